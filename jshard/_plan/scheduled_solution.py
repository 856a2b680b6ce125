"""A solution of the cost network as a schedule, with the schedule's own cost and peak memory.

The network's cost is a relaxation of memory and, on large meshes, of shared copies; what a plan reports is measured on
its schedule. Two changes are tried on the way: assignments of equal cost that compilers handle better
(`tie_breaking.py`), and copies made again for later readers instead of being kept (`live_range_splits.py`), where a plan
exceeds its budget.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from jshard._core.messages import say_interrupted
from jshard._network.build import PlanningNetwork
from jshard._plan.live_range_splits import split_live_ranges
from jshard._plan.overlap import with_hidden_seconds
from jshard._plan.request import PlanRequest
from jshard._plan.rows import CollectiveRow
from jshard._plan.schedule_cost import ScheduleCost, schedule_cost
from jshard._plan.tie_breaking import break_ties
from jshard._schedule.peak import PeakProfile, peak_profile
from jshard._schedule.schedule import Schedule, assignment_of, schedule


ROUNDING = 1e-9
"""Relative: the network and the schedule add up the same seconds in different orders."""

# Where no budget is kept by it, copies are made again only if the peak falls below this share.
_SPLIT_PEAK_RATIO = 0.99


@dataclasses.dataclass(frozen=True, eq=False)
class ScheduledSolution:
    """A schedule with its cost and memory, and the bound of the search that found it.

    `bound` is in the unit of `objective`. `peak_bound`: no plan has a lower peak, in bytes; 0 where that is not known.
    `unpriced`: as in `Cost`.
    """

    network: PlanningNetwork
    request: PlanRequest
    schedule: Schedule
    schedule_cost: ScheduleCost
    bound: float
    steps: tuple[str, ...]
    profile: PeakProfile
    peak_bound: float = 0.0
    unpriced: float = 0.0

    @property
    def peak(self) -> float:
        """Peak bytes a device."""
        return self.profile.peak

    @property
    def cost(self) -> float:
        """Seconds of the schedule and prices; at level 1 the seconds of a whole call, which break ties."""
        return self.schedule_cost.objective(self.request.level)

    @property
    def objective(self) -> float:
        """What the level minimises: bytes at level 1, else seconds."""
        return self.peak if self.request.level == 1 else self.cost

    @functools.cached_property
    def collectives(self) -> tuple[tuple[CollectiveRow, int], ...]:
        """The collectives of the schedule, each with the seconds that hide, and the operator that each is for."""
        costs, made = self.schedule_cost, self.schedule
        if not self.request.overlap:
            return costs.collectives
        equations = np.flatnonzero(made.assignment.program.use_def.has_kind("eqn")).tolist()
        seconds = dict(zip(equations, costs.seconds, strict=True))
        return with_hidden_seconds(costs.collectives, made, seconds, self.profile, self.request.memory_limit)

    @property
    def hidden(self) -> float:
        """Seconds of communication beside which products run."""
        return sum(row.hidden * row.count for row, _ in self.collectives)

    @property
    def interrupted(self) -> bool:
        """Whether a search for it was interrupted."""
        return say_interrupted(self.steps)

    def after(self, other: ScheduledSolution) -> ScheduledSolution:
        """The solution of a search that followed another: it carries over the note that that was interrupted."""
        if not other.interrupted or self.interrupted:
            return self
        return dataclasses.replace(self, steps=(*self.steps, "an earlier part of the search was interrupted"))


def with_bound(solution: ScheduledSolution, bound: float, of_all: float) -> ScheduledSolution:
    """A solution with a bound on the cost of plans within the budget, or with that of all plans where it costs less.

    It does where it exceeds the budget, or where its copies are in no network.
    """
    return dataclasses.replace(solution, bound=of_all if solution.cost < bound * (1 - ROUNDING) else bound)


def schedule_solution(
    network: PlanningNetwork,
    request: PlanRequest,
    assignment: np.ndarray | Sequence[int],
    bound: float,
    steps: Sequence[str],
    may_break_ties: bool = True,
) -> ScheduledSolution:
    """Schedule an assignment. Copy variables of a memory network at its end are dropped: the others imply them."""
    assignment = np.asarray(assignment)[: network.cost_network.size]
    solution = _measured(network, request, _schedule_of(network, assignment), bound, steps)
    if may_break_ties and request.level == 2:
        solution = _with_ties_broken(solution, assignment)
    return _with_live_ranges_split(solution)


def _schedule_of(network: PlanningNetwork, assignment: np.ndarray) -> Schedule:
    return schedule(assignment_of(network, tuple(assignment.tolist())))


def _measured(
    network: PlanningNetwork, request: PlanRequest, made: Schedule, bound: float, steps: Sequence[str]
) -> ScheduledSolution:
    profile = peak_profile(made, network.liveness, request.donated)
    return ScheduledSolution(
        network, request, made, schedule_cost(made, network), float(bound), tuple(steps), profile
    )


def _with_ties_broken(solution: ScheduledSolution, assignment: np.ndarray) -> ScheduledSolution:
    """The solution after tie breaking, unless its schedule costs more or exceeds both the peak before and the budget."""
    network, request = solution.network, solution.request
    changed = break_ties(network, assignment, request.ties)
    if changed is assignment:
        return solution
    other = _measured(network, request, _schedule_of(network, changed), solution.bound, solution.steps)
    cheap = other.cost <= solution.cost * (1 + ROUNDING)
    return other if cheap and other.peak <= max(solution.peak, request.memory_limit or 0.0) else solution


def _with_live_ranges_split(solution: ScheduledSolution) -> ScheduledSolution:
    """The solution with copies made again for later readers, where that lowers a peak that is too high.

    Not on CPU, whose compiler merges two equal collectives.
    """
    network, request, made = solution.network, solution.request, solution.schedule
    limit = 0.0 if request.level == 1 else request.memory_limit
    if limit is None or solution.peak <= limit:
        return solution
    if network.topology.chip.name == "cpu" or made.assignment.regather:
        return solution
    split = split_live_ranges(made, network.liveness, request.donated, limit)
    if split is None or split.profile.peak > max(limit, _SPLIT_PEAK_RATIO * solution.peak):
        return solution
    cost = schedule_cost(split.schedule, network)
    return dataclasses.replace(solution, schedule=split.schedule, schedule_cost=cost, profile=split.profile)


def of_network(solution: ScheduledSolution, network: PlanningNetwork) -> ScheduledSolution:
    """The solution as one of another network of its program, by which its schedule is priced."""
    cost = schedule_cost(solution.schedule, network)
    return dataclasses.replace(solution, network=network, schedule_cost=cost)


def least_peak_plan(plans: Sequence[ScheduledSolution], bound: float) -> ScheduledSolution:
    """The fastest of the plans whose peak is as low as any, or that keep the budget, with a bound on all peaks."""
    request = plans[0].request
    acceptable = min(s.peak for s in plans) * (1 + request.memory_gap)
    if request.level != 1:  # every plan within the budget will do
        acceptable = max(acceptable, request.memory_limit or 0.0)
    best = min((s for s in plans if s.peak <= acceptable), key=lambda s: (s.cost, s.peak))
    if all(float(s.peak).is_integer() for s in plans):  # then those of all plans are whole bytes
        bound = float(math.ceil(bound * (1 - ROUNDING)))
    return dataclasses.replace(best, bound=bound, peak_bound=bound)


def fitting_or_lowest(plans: Sequence[ScheduledSolution], limit: float) -> ScheduledSolution:
    """The cheapest of some plans within a limit, else that of lowest peak."""
    return best_within(plans, limit) or min(plans, key=lambda p: p.peak)


def best_within(plans: Sequence[ScheduledSolution], limit: float) -> ScheduledSolution | None:
    """The cheapest plan within a limit; None where there is none."""
    return min((p for p in plans if p.peak <= limit), key=lambda p: p.cost, default=None)
