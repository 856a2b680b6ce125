"""The search of each level, with and without a memory budget: which networks are solved, and which schedule is taken.

Level 0 minimises communication and redundant compute, level 2 all seconds; level 1 the peak of memory. A budget adds a
limit on the peak to levels 0 and 2. Memory is a property of a schedule that no pairwise network counts exactly, so two
networks serve it (`memory_network.py`): one whose bytes are a lower bound for every plan gives the bound, one that
estimates the bytes of schedules gives the plans.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from jshard._core.errors import MemoryBudgetError, SearchError
from jshard._core.topology import Topology
from jshard._memory.hbm_traffic import PRODUCTS
from jshard._network.build import Pins, PlanningNetwork, build_network
from jshard._network.memory_network import memory_network
from jshard._plan.memory_preference import prefer_memory
from jshard._plan.memory_ties import lower_peak_at_equal_cost
from jshard._plan.request import PlanRequest, merged_pins, pins_by_operator
from jshard._plan.schedule_cost import schedule_cost
from jshard._plan.scheduled_solution import ROUNDING, ScheduledSolution, schedule_solution
from jshard._program.graph import Program, rule_boundaries
from jshard._search import CostNetwork, Solution, solve
from jshard._search.memory.key_times import least_conceivable_peak


_BUDGET_ROUNDS = (
    4  # searches under a budget, each with the limit lowered by what the schedule before exceeded it
)
_LEAST_PEAK_VARIABLES = 100  # up to which the least peak is looked for though it is proved not to fit
_OVERSHOOT = 1.05  # times the excess of that schedule


class LevelSearch:
    """The searches that one request needs; used once."""

    def __init__(
        self,
        program: Program,
        topology: Topology,
        request: PlanRequest,
        on_progress: Callable[..., None] | None = None,
    ):
        self.program, self.topology, self.request = program, topology, request
        self.on_progress = on_progress
        self.pins, self.forced = pins_by_operator(request, topology, rule_boundaries(program))

    @property
    def every_pin(self) -> Pins:
        """The user's pins and the forced layouts."""
        return merged_pins(self.pins, self.forced)

    def network(
        self,
        *,
        second_copies: bool = True,
        replication_price: float | None = None,
        price_returned_sums: bool = True,
    ) -> PlanningNetwork:
        """The network of the request; the arguments are those of `build_network`."""
        r = self.request
        return build_network(
            self.program, self.topology, self.pins, forced=self.forced, pinned_results=r.pinned_results,
            level=r.level, ties=r.ties, donated=r.donated,
            replication_price=r.replication_price if replication_price is None else replication_price,
            second_copies=second_copies, price_returned_sums=price_returned_sums,
        )  # fmt: skip

    def run(self, network: PlanningNetwork) -> ScheduledSolution:
        """Search by level. A plan of least time that keeps the budget is that of the budget too, with its proof."""
        limit = self.request.memory_limit
        if self.request.level == 1:
            return self.minimize_peak(network)
        fastest = lower_peak_at_equal_cost(self.minimize_time(network))
        if self.request.memory_slack and not fastest.interrupted:
            fastest = prefer_memory(fastest, lambda b: self._within(b, fastest), self.request.memory_slack)
        if limit is None or fastest.peak <= limit or not self.request.search_in_budget:
            return self._with_unpriced_cost(fastest)
        network = self.network(second_copies=False)
        solution = self.minimize_time_under_budget(network, fastest)
        if solution.peak <= limit:
            return solution
        if solution.peak_bound > limit and network.cost_network.size > _LEAST_PEAK_VARIABLES:
            return solution  # nothing fits, and the least peak of a large program takes long to find
        # Plans that fit may have to repeat products: that is priced in their cost, but not in this search.
        unpriced = self.network(replication_price=0.0, price_returned_sums=False, second_copies=False)
        smallest = self.minimize_peak(unpriced).after(solution)
        if solution.peak < smallest.peak:
            smallest = dataclasses.replace(solution, peak_bound=smallest.peak_bound)
        cost = schedule_cost(smallest.schedule, network)
        return dataclasses.replace(smallest, network=network, schedule_cost=cost, bound=solution.bound)

    def minimize_time(self, network: PlanningNetwork) -> ScheduledSolution:
        """The plan of least time without a budget.

        The network lets several readers share more copies than some schedules can. Where a schedule therefore costs more
        than the network, the network in which a tensor has a single shared copy is solved too, and the cheaper plan taken.
        """
        s = self._solve_time(network)
        solution = schedule_solution(network, self.request, s.assignment, s.bound, s.steps)
        if network.one_shared_copy or solution.interrupted or solution.cost <= s.cost * (1 + ROUNDING):
            return solution
        single = self.network(second_copies=False)
        s = self._solve_time(single)
        other = schedule_solution(single, self.request, s.assignment, s.bound, (*solution.steps, *s.steps))
        if other.cost >= solution.cost:
            return solution
        optimal = abs(other.cost - other.bound) <= ROUNDING * min(other.cost, other.bound)
        return other if optimal else dataclasses.replace(other, network=network, bound=solution.bound)

    def _within(self, budget: float, fastest: ScheduledSolution) -> ScheduledSolution:
        """The cheapest plan found within another budget; one that exceeds it where none was found."""
        request = dataclasses.replace(self.request, memory_limit=budget)
        search = LevelSearch(self.program, self.topology, request, self.on_progress)
        return search.minimize_time_under_budget(search.network(second_copies=False), fastest)

    def _solve_time(self, network: PlanningNetwork) -> Solution:
        r = self.request
        return solve(network.cost_network, gap=r.gap, seconds=r.seconds, on_progress=self.on_progress)

    def _with_unpriced_cost(self, solution: ScheduledSolution) -> ScheduledSolution:
        """The solution with the cost of a plan without the price of repeated products, where that is lower.

        Repeating all products can be faster only where they take less time than the plan's communication: elsewhere
        nothing is searched.
        """
        request, cost, program = self.request, solution.schedule_cost, self.program
        equations = np.flatnonzero(program.use_def.has_kind("eqn")).tolist()
        products = sum(
            float(s) for i, s in zip(equations, cost.seconds, strict=True)
            if program.operators[i].primitive in PRODUCTS
        )  # fmt: skip
        repeated = products * (self.topology.mesh.total - 1)
        if not request.replication_price or solution.interrupted or cost.communication <= repeated:
            return solution
        network = self.network(replication_price=0.0)
        s = solve(network.cost_network, gap=request.memory_gap, seconds=request.seconds)
        unpriced = schedule_solution(network, request, s.assignment, s.bound, ())
        fits = unpriced.peak <= (request.memory_limit or math.inf)
        if not fits or unpriced.cost >= solution.cost - cost.price:
            return solution
        return dataclasses.replace(solution, unpriced=unpriced.cost)

    def minimize_peak(self, network: PlanningNetwork) -> ScheduledSolution:
        """The plan of least peak among the schedules of several searches; a faster one if its peak is as low.

        The bound is that of the lower-bound memory network; the estimating one finds better schedules.
        """
        found: list[ScheduledSolution] = []
        bounding = memory_network(network, lower_bound=True)
        first = self._solve_peak(network, bounding, break_ties_by_cost=False)
        bound = first.bound
        found.append(first)
        if not first.interrupted:
            found.append(self._solve_peak(network, memory_network(network), break_ties_by_cost=True))
        steps = found[-1].steps
        if not any(s.interrupted for s in found):
            # The memory networks do not count every copy; the plan of least time sometimes makes fewer.
            r = self.request
            fastest = solve(network.cost_network, gap=r.memory_gap, seconds=r.memory_seconds)
            found.append(schedule_solution(network, r, fastest.assignment, bound, fastest.steps))
            found.remove(first)
            if first.peak < min(s.peak for s in found):
                found.append(self._solve_peak(network, bounding, break_ties_by_cost=True))
        acceptable = min(s.peak for s in found) * (1 + self.request.memory_gap)
        if self.request.level != 1:  # every plan within the budget will do
            acceptable = max(acceptable, self.request.memory_limit or 0.0)
        best = min((s for s in found if s.peak <= acceptable), key=lambda s: (s.cost, s.peak))
        return dataclasses.replace(best, bound=bound, peak_bound=bound, steps=steps)

    def _solve_peak(
        self, network: PlanningNetwork, memory: CostNetwork, break_ties_by_cost: bool
    ) -> ScheduledSolution:
        r = self.request
        s = solve(
            memory, objective="peak", gap=r.gap, seconds=r.memory_seconds, on_progress=self.on_progress,
            break_ties_by_cost=break_ties_by_cost,
        )  # fmt: skip
        return schedule_solution(network, r, s.assignment, s.bound, s.steps)

    def minimize_time_under_budget(
        self, network: PlanningNetwork, fastest: ScheduledSolution
    ) -> ScheduledSolution:
        """The cheapest plan within the budget, else the one of lowest peak that was found.

        The lower-bound memory network bounds the time within the budget. The plan comes from the estimating one;
        while its schedule exceeds the budget, the search is repeated with a limit lowered by the excess.

        Arguments:

        - `network`: with a single shared copy a tensor.
        - `fastest`: the plan of least time, which exceeds the budget.
        """
        limit, gap = self.request.memory_limit, self.request.memory_gap
        assert limit is not None
        bounding_network = memory_network(network, lower_bound=True)
        assert bounding_network.memory is not None
        floor = least_conceivable_peak(bounding_network.memory)
        if floor > limit:
            return dataclasses.replace(fastest, peak_bound=floor)
        bounding = self._solve_limited(bounding_network, limit)
        if bounding is None:
            return fastest
        bound = max(fastest.bound, bounding.bound)

        def scheduled(s: Solution, before: ScheduledSolution) -> ScheduledSolution:
            return schedule_solution(network, self.request, s.assignment, bound, s.steps).after(before)

        first = lowest = scheduled(bounding, fastest)
        if first.interrupted or (first.peak <= limit and first.cost <= bound * (1 + gap)):
            return min((fastest, first), key=lambda s: (s.peak > limit, s.peak))
        estimating, aim = memory_network(network), limit
        for _ in range(_BUDGET_ROUNDS):
            s = self._solve_limited(estimating, aim)
            if s is None:
                break
            solution = scheduled(s, lowest)
            lowest = min((lowest, solution), key=lambda s: s.peak)
            if solution.peak <= limit:
                return min((s for s in (first, solution) if s.peak <= limit), key=lambda s: s.cost)
            aim -= _OVERSHOOT * (solution.peak - limit)
        return lowest

    def _solve_limited(self, memory: CostNetwork, limit: float) -> Solution | None:
        """The solution of a memory network under a limit in bytes; None where none was found."""
        assert memory.memory is not None
        limited = dataclasses.replace(memory, memory=dataclasses.replace(memory.memory, limit=limit))
        r = self.request
        try:
            return solve(limited, gap=r.memory_gap, seconds=r.memory_seconds, on_progress=self.on_progress)
        except (MemoryBudgetError, SearchError):
            return None
