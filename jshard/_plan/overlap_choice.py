"""A second search that counts less of what products hide, and which of the two plans has the shorter step.

Problem.  The search makes the sum of compute and all communication least. Of two plans of nearly equal sum the one whose
gathers of weights hide under products takes less time, and the sum does not tell. `config={"overlap": "search"}` asks
for that one.

Method.  How much of each kind of collective hides is known of the schedule of the first plan. A second search counts the
rest alone (`Topology.hidden`): one step of the iterative re-weighting of a concave cost (E. Candes, M. Wakin, S. Boyd,
Journal of Fourier Analysis and Applications 14, 2008). Its plan is scheduled at full cost, and taken if its own schedule
says that its step is shorter by `LEAST_GAIN` at least. Nothing is searched where what hides, or what does not, is a
smaller part of the step.

The bound stays that of the first search: on the sum, all communication counted. So a plan that is taken has a gap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jshard._core.layout import CollectiveKind
from jshard._core.messages import format_seconds
from jshard._network.build import PlanningNetwork
from jshard._plan.scheduled_solution import ScheduledSolution, schedule_solution
from jshard._search import Solution


LEAST_GAIN = 0.01
"""Of the step. Seconds of kernels are some per cent off those of compiled programs (benchmarks/compilers/exposure.md)."""


def hidden_shares(plan: ScheduledSolution) -> tuple[tuple[CollectiveKind, float], ...]:
    """The part of each kind's seconds that hides; empty where another plan cannot gain `LEAST_GAIN` by it."""
    least = LEAST_GAIN * step_of(plan)
    if (
        plan.request.overlap != "search"
        or plan.interrupted
        or not least < plan.hidden < plan.schedule_cost.communication - least
    ):
        return ()
    rows, shares = [row for row, _ in plan.collectives], []
    for kind in plan.network.topology.chip.async_kinds:
        hidden = sum(row.hidden * row.count for row in rows if row.kind == kind)
        if hidden:
            shares.append((kind, hidden / sum(row.seconds * row.count for row in rows if row.kind == kind)))
    return tuple(shares)


def step_of(plan: ScheduledSolution) -> float:
    """Seconds of a step: compute, and the communication that does not hide."""
    return plan.schedule_cost.compute + plan.schedule_cost.communication - plan.hidden


def is_alike(a: PlanningNetwork, b: PlanningNetwork) -> bool:
    """Whether assignments of one network are assignments of the other: as many variables, of as many states each."""
    x, y = a.cost_network, b.cost_network
    return x.size == y.size and all(
        len(x.unary[i]) == len(y.unary[j])
        for i, j in zip(x.node_table.tolist(), y.node_table.tolist(), strict=True)
    )


def with_shorter_step(
    first: ScheduledSolution,
    build: Callable[[tuple[tuple[CollectiveKind, float], ...]], PlanningNetwork],
    solve: Callable[[PlanningNetwork], Solution],
) -> ScheduledSolution:
    """The plan of a second search if its step is shorter by `LEAST_GAIN` and it keeps the budget, else the first.

    Arguments:

    - `build`: the network of the request without a share of the seconds of some kinds of collectives.
    - `solve`: the search for the least sum in a network.
    """
    shares = hidden_shares(first)
    discounted = build(shares) if shares else first.network
    if not shares or not is_alike(discounted, first.network):
        return first
    found = solve(discounted)
    second = schedule_solution(first.network, first.request, found.assignment, 0.0, found.steps)
    limit, before, after = first.request.memory_limit, step_of(first), step_of(second)
    gains = after <= before * (1 - LEAST_GAIN) and second.cost - second.hidden < first.cost - first.hidden
    if not gains or (limit is not None and second.peak > limit):
        return first
    note = (
        f"overlap: a step of {format_seconds(after)} in place of {format_seconds(before)}, by a search that counts what "
        "products do not hide; the bound is on the sum with all communication"
    )
    return dataclasses.replace(second, bound=first.bound, steps=(*first.steps, note))
