"""The search of each level, with and without a memory budget: which networks are solved, and which schedule is taken.

Level 0 minimises communication and redundant compute, level 2 all seconds; level 1 the peak of memory. A budget adds a
limit on the peak to levels 0 and 2. Memory is a property of a schedule that no pairwise network counts exactly, so two
networks serve it (`memory_network.py`): one whose bytes are a lower bound for every plan gives the bound, one that
estimates the bytes of schedules gives the plans.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from jshard._core.arrays import Ints
from jshard._core.errors import MemoryBudgetError, SearchError
from jshard._core.layout import CollectiveKind
from jshard._core.topology import Topology
from jshard._network.build import Pins, PlanningNetwork, build_network
from jshard._network.memory_network import memory_network, with_copies
from jshard._plan.cast_probing import without_costly_casts
from jshard._plan.early_plans import BudgetStart, budget_start, early_plan, is_large_and_limited
from jshard._plan.least_peak import least_peak_bound, least_peak_plan_of, lower_by_budgets
from jshard._plan.lowered_limits import ROUNDS, Counted, LimitSearch, last_above, least_counted, when_spent
from jshard._plan.memory_preference import EACH_BUDGET, PlansWithin, prefer_memory
from jshard._plan.memory_ties import assignment_of_solution, lower_peak_at_equal_cost
from jshard._plan.overlap_choice import with_shorter_step
from jshard._plan.peak_descent import cheaper_by_descent, descend_peak
from jshard._plan.ranked_search import cheapest_by_rank
from jshard._plan.request import NoBetterPlan, PlanRequest, merged_pins, pins_by_operator, searched_again
from jshard._plan.scheduled_solution import (
    ROUNDING,
    ScheduledSolution,
    best_within,
    fitting_or_lowest,
    of_network,
    schedule_solution,
    with_bound,
)
from jshard._plan.unpriced_cost import with_unpriced_cost
from jshard._plan.useful_cost import check_useful_plans, even_share, least_conceivable_cost
from jshard._program.graph import Program, rule_boundaries
from jshard._search import LARGE_NETWORK, CostNetwork, Effort, Prices, Solution, Wanted, evaluate, solve
from jshard._search.effort import ENTRIES_PER_SECOND, longest_seconds
from jshard._search.memory.key_times import least_conceivable_peak


_REFUSAL_SECONDS = 4  # of effort, for the least peak though it is proved not to fit (0.2: up to 3.3 times it)
_BOUNDED_AT_FIRST = 1000  # variables below which the least peak is bounded once a plan exceeds the budget
_LARGE_GAP = 0.01  # relative, at which the search of a large network without memory ends
_BUDGET_GAP = 0.015  # ... and that of one with memory, where a tighter proof takes several solutions more
# Variables from which on a round of prices takes seconds; the estimating network, which needs fewer, comes first there.
_LONG_ROUNDS = 50_000
_MANY_ENTRIES = 2e7  # of a memory network's tables, from which its search begins as that of a large program
# Of the budget: above it a schedule by the lower-bound, or (if a plan is known) the estimating, network is too far off.
_NEAR_BUDGET, _FAR_FROM_BUDGET = 1.01, 1.05
_FAR_ABOVE = 1.25  # of the budget: a large network's plan of nearly least time above it: the budget decides
# Of a given effort, for the plan of least time that the search under a budget begins with.
_SHARE_WITHOUT_BUDGET = 0.4
_SHARE_FOR_START = 0.4  # of what is left, for a first plan within the budget
_SHARE_FOR_BOUND = 0.25  # of what is left, for a bound on the least peak
_SHARE_FOR_PLANS = 0.6  # of what is left then, for plans within the budget; the bound has the rest
_LEAST_FOR_BOUND = 0.2  # of the whole, where plans took more


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
        self.effort = request.effort or Effort.of_seconds(request.search_seconds)
        self._known: list[ScheduledSolution] = []  # each with a bound that holds for every plan
        self._above: Counted | None = None  # of the last limit, where no plan within the budget was found

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
        hidden: tuple[tuple[CollectiveKind, float], ...] = (),
    ) -> PlanningNetwork:
        """The network of the request; arguments as in `build_network`, `hidden` as in `Topology`."""
        r, topology = self.request, dataclasses.replace(self.topology, hidden=hidden)
        return build_network(
            self.program, topology, self.pins, forced=self.forced, pinned_results=r.pinned_results,
            level=r.level, ties=r.ties, donated=r.donated,
            replication_price=r.replication_price if replication_price is None else replication_price,
            second_copies=second_copies, price_returned_sums=price_returned_sums,
        )  # fmt: skip

    @functools.cached_property
    def _single_copies(self) -> PlanningNetwork:
        return self.network(second_copies=False)

    @functools.cached_property
    def first_network(self) -> PlanningNetwork:
        """The network that the search begins with, without second copies where that search is for little memory."""
        single = self.request.level == 1 or is_large_and_limited(self.program, self.request)
        return self._single_copies if single else self.network()

    @functools.cached_property
    def _bounding_network(self) -> CostNetwork:
        """The lower-bound memory network, with a single shared copy a tensor."""
        return memory_network(self._single_copies, lower_bound=True)

    @functools.cached_property
    def peak_floor(self) -> float:
        """Bytes that every plan holds at some time, as far as that is known without a search."""
        assert self._bounding_network.memory is not None
        return least_conceivable_peak(self._bounding_network.memory)

    def run(self) -> ScheduledSolution:
        """Search by level. An interruption (Ctrl-C) gives the best plan known; it is raised again where none is."""
        try:
            return self._run()
        except KeyboardInterrupt:
            fitting = [s for s in self._known if s.peak <= self._limit]
            if not fitting:
                raise
            best = min(fitting, key=lambda s: s.objective)
            bound = max(s.bound for s in self._known)
            return dataclasses.replace(best, bound=bound, steps=(*best.steps, "interrupted"))

    @property
    def _limit(self) -> float:
        """The budget in bytes; infinite without one."""
        return self.request.memory_limit or math.inf

    def _known_plan(self, solution: ScheduledSolution) -> ScheduledSolution:
        """Note a plan that an interruption may return, with a bound that holds for every plan."""
        self._known.append(solution)
        return solution

    def _seconds(self, most: float) -> float:
        """A time limit that an effort does not meet first."""
        return longest_seconds(self.request.search_seconds, most)

    def _run(self) -> ScheduledSolution:
        """Search by level. A plan of least time within the budget is that of the budget too, with its proof."""
        if self.request.level == 1:
            return self.minimize_peak()
        network = self.first_network
        check_useful_plans(network, self.request, least_conceivable_cost(network.cost_network))
        early = None
        if is_large_and_limited(self.program, self.request):
            found = early_plan(self._single_copies, self.request, self.effort.part(_SHARE_FOR_START))
            early = found and self._known_plan(found)
            if early is not None and early.peak > _FAR_ABOVE * self._limit < (floor := self.peak_floor):
                return dataclasses.replace(early, peak_bound=floor)
            if (far := self._nearly_fastest()) is not None:
                return self._within_budget(far.network, far, early)
            network = self.network()
        fastest = self.minimize_time(network)
        check_useful_plans(network, self.request, fastest.bound)
        if not self.effort.exhausted:
            fastest = with_shorter_step(fastest, lambda h: self.network(hidden=h), self._solve_time)
        fastest = lower_peak_at_equal_cost(fastest)
        if self.request.memory_slack and not fastest.interrupted:
            fastest = self._prefer_memory(fastest)
        if fastest.peak <= self._limit or not self.request.search_in_budget:
            build, seconds = lambda: self.network(replication_price=0.0), self._seconds(self.request.seconds)
            return with_unpriced_cost(fastest, build, self.effort, seconds)
        return self._within_budget(self._single_copies, fastest, early)

    def _nearly_fastest(self) -> ScheduledSolution | None:
        """A plan of nearly least time of a large program, if it is so far above the budget that this is what decides."""
        if self.request.memory_slack:
            return None
        s = self._solve_time(self._single_copies, max(self.request.gap, _LARGE_GAP))
        if s.bound > self.request.ends_above:
            return None
        plan = schedule_solution(self._single_copies, self.request, s.assignment, s.bound, s.steps)
        return plan if plan.peak > _FAR_ABOVE * self._limit else None

    def _within_budget(
        self, network: PlanningNetwork, fastest: ScheduledSolution, early: ScheduledSolution | None
    ) -> ScheduledSolution:
        """The cheapest plan within the budget, which `fastest` exceeds; that of least peak found if none fits."""
        solution = self.minimize_time_under_budget(network, fastest)
        bounds = solution.bound, fastest.bound  # of plans within the budget, and of all
        if early is not None and early.peak <= self._limit < solution.peak:
            early = dataclasses.replace(of_network(early, network), steps=solution.steps)
            solution = dataclasses.replace(early, peak_bound=solution.peak_bound)
        if solution.peak <= self._limit:
            return with_bound(solution, *bounds)
        proved = solution.peak_bound > self._limit
        # To look for the least peak of a large program takes long.
        names_least = self.request.names_least_peak and network.cost_network.size < LARGE_NETWORK
        if proved and (not names_least or solution.peak <= solution.peak_bound):
            return with_bound(solution, *bounds)
        if not proved and (request := self.request.with_more(self.effort, lowers=self._above is not None)):
            again = copy.copy(self)  # with its networks, its plans for an interruption, and its last limit
            again.request, again.effort = request, request.effort or self.effort
            found = again._within_budget(network, fastest, None)
            best = fitting_or_lowest((found, of_network(solution, network).after(found)), self._limit)
            floor = max(found.peak_bound, solution.peak_bound)
            steps = (searched_again(self.request.times_again(self.effort)), *best.steps)
            best = dataclasses.replace(best, peak_bound=floor, steps=steps)
            return with_bound(best, max(bounds[0], found.bound), bounds[1])
        # As level 1 searches, with as much effort as was given: what that finds within the budget is not refused.
        little = self.effort.at_most(_REFUSAL_SECONDS * ENTRIES_PER_SECOND).limit
        of_level_1 = dataclasses.replace(self.request, level=1, memory_limit=None, memory_slack=0.0)
        search = self._search_of(of_level_1, little if proved else self.effort.limit)
        try:
            lowest = dataclasses.replace(search.minimize_peak(), request=self.request)
            smallest = of_network(lowest, network).after(solution)
        except SearchError:  # a large network has no answer in little effort
            smallest = solution
        best = fitting_or_lowest((smallest, solution), self._limit)
        if best.peak > self._limit:
            best = dataclasses.replace(best, peak_bound=max(smallest.peak_bound, solution.peak_bound))
            if not proved:
                bounding = memory_network(best.network, lower_bound=True)
                best = descend_peak(best, bounding, Effort(), self._limit)
        return with_bound(best, *bounds)

    def _search_of(self, request: PlanRequest, most: float) -> LevelSearch:
        """A search of the same program with an effort of its own, in table entries."""
        request = dataclasses.replace(request, effort=Effort(most, whole=self.effort))
        return LevelSearch(self.program, self.topology, request, self.on_progress)

    def minimize_time(self, network: PlanningNetwork) -> ScheduledSolution:
        """The plan of least time without a budget.

        The network lets several readers share more copies than some schedules can. Where a schedule therefore costs more
        than the network, the network in which a tensor has a single shared copy is solved too, and the cheaper plan taken.
        """
        s = self._solve_time(network)
        if s.bound > self.request.ends_above:
            raise NoBetterPlan(s.bound)
        solution = schedule_solution(network, self.request, s.assignment, s.bound, s.steps)
        self._known_plan(solution)
        if (
            network.one_shared_copy
            or solution.interrupted
            or self.effort.exhausted
            or solution.cost <= s.cost * (1 + ROUNDING)
        ):
            return solution
        single = self._single_copies
        s = self._solve_time(single)
        other = schedule_solution(single, self.request, s.assignment, s.bound, (*solution.steps, *s.steps))
        if other.cost >= solution.cost:
            return solution
        optimal = abs(other.cost - other.bound) <= ROUNDING * min(other.cost, other.bound)
        return other if optimal else dataclasses.replace(other, network=network, bound=solution.bound)

    def _prefer_memory(self, fastest: ScheduledSolution) -> ScheduledSolution:
        """The plan of lowest peak found that costs little more than the fastest; each budget is searched for as long."""
        slack, network = self.request.memory_slack, self._single_copies
        gap, each = EACH_BUDGET.gap * slack, EACH_BUDGET.effort * self.effort.spent + ENTRIES_PER_SECOND
        within = self._plans_within(network, fastest, gap, each)
        return prefer_memory(fastest, self.peak_floor, within, slack)

    def _plans_within(
        self, network: PlanningNetwork, fastest: ScheduledSolution, gap: float, each: float
    ) -> PlansWithin:
        """Plans for other budgets, each with an effort of its own, of no use above a cost."""
        memory = functools.cache(lambda: memory_network(network))
        gap = max(self.request.memory_gap, gap)

        def plans(budget: float, most: float) -> Sequence[ScheduledSolution]:
            if self.effort.exhausted:
                return []
            request = dataclasses.replace(self.request, memory_limit=budget, memory_gap=gap)
            search = self._search_of(request, self.effort.at_most(each).limit)
            return search._search_schedules(network, memory(), fastest, most, rounds=EACH_BUDGET.rounds)[0]

        return plans

    def _solve_time(self, network: PlanningNetwork, gap: float | None = None) -> Solution:
        r = self.request
        effort = self.effort if r.memory_limit is None else self.effort.part(_SHARE_WITHOUT_BUDGET)
        return solve(
            network.cost_network, gap=r.gap if gap is None else gap, seconds=self._seconds(r.seconds),
            on_progress=self.on_progress, effort=effort, most=r.ends_above,
        )  # fmt: skip

    def minimize_peak(self) -> ScheduledSolution:
        """The plan of least peak among the schedules of several searches; a faster one if its peak is as low."""
        r, network = self.request, self.first_network
        # The memory networks do not count every copy; the plan of least time sometimes makes fewer.
        fastest = solve(
            network.cost_network, gap=r.memory_gap, seconds=self._seconds(r.memory_seconds),
            effort=self.effort.part(_SHARE_WITHOUT_BUDGET),
        )  # fmt: skip
        plan = schedule_solution(network, r, fastest.assignment, 0.0, fastest.steps)
        note = self._known_plan
        best = least_peak_plan_of(note(plan), fastest.cost, self.effort, note, self.on_progress, _LARGE_GAP)
        return lower_by_budgets(best, functools.partial(self._plans_within, network, plan), self.effort)

    def minimize_time_under_budget(
        self, network: PlanningNetwork, fastest: ScheduledSolution
    ) -> ScheduledSolution:
        """The cheapest plan within the budget, else the one of lowest peak that was found.

        The plan comes from the estimating memory network; the lower-bound one bounds the time within the budget, and
        what it finds is a plan too where its schedule is within the budget. `network` has a single shared copy a tensor;
        `fastest`, the plan of least time, exceeds the budget.
        """
        limit = self._limit
        large = network.cost_network.is_large(self.effort) and network.cost_network.size < _LONG_ROUNDS
        start = self._start(network, fastest) if best_within(self._known, limit) else None
        if start and (near := start.near_bound(limit, _BUDGET_GAP)):
            return near
        bounding, floor = self._bounding_network, self.peak_floor
        if floor > limit:
            return dataclasses.replace(fastest, peak_bound=floor)
        ranked = cheapest_by_rank(network, self.request, self.effort)
        if ranked.finished and ranked.best is not None:
            return self._known_plan(ranked.best.after(fastest))

        def may_fit() -> bool:
            nonlocal floor
            if bounding.size < _BOUNDED_AT_FIRST:
                effort = self.effort.part(_SHARE_FOR_BOUND)
                floor = max(floor, least_peak_bound(bounding, fastest, effort, self.on_progress))
            return floor <= limit

        most = self.request.most - (even_share(network) if self.request.level == 0 else 0.0)
        start = start or self._start(network, fastest)
        if near := start.near_bound(limit, _BUDGET_GAP):
            return near
        fastest = dataclasses.replace(fastest, bound=max(fastest.bound, start.bound))
        if large:
            return self._minimize_time_of_large(network, bounding, fastest, most, start)
        memory = start.estimating or memory_network(network)
        begin = start.prices and start.prices.of_another_network(), start.answers
        plans, found = self._search_schedules(network, memory, fastest, most, begin, may_fit=may_fit)
        plans = [*start.plans, *plans]
        if not plans and most < math.inf:
            raise NoBetterPlan(fastest.bound + self.request.most - most)
        if ranked.best is not None:
            plans.append(
                self._known_plan(dataclasses.replace(ranked.best, bound=fastest.bound).after(fastest))
            )
        best = best_within(plans, limit)
        if floor > limit:
            return dataclasses.replace(min((fastest, *plans), key=lambda p: p.peak), peak_bound=floor)
        if best is not None and best.interrupted:
            return best
        known = [*(found.answers if found else ()), *([] if best is None else [assignment_of_solution(best)])]
        bounding = without_costly_casts(bounding, network.cost_network.size, limit, self.effort)
        # What the others prove holds for the network that estimates bytes.
        prices = found.prices.of_another_network() if found and found.prices else start.prices
        s = self._solve_limited(
            bounding, limit, (fastest.cost, fastest.peak), prices=prices, bound=fastest.bound,
            known=[with_copies(bounding, x[: network.cost_network.size]) for x in known],
            only="bound" if best else None, effort=self.effort.next_part(1.0, _LEAST_FOR_BOUND),
        )  # fmt: skip
        if s is None:
            return best or fitting_or_lowest((fastest, *plans), limit)
        bound = max(fastest.bound, s.bound, ranked.bound)
        plans = [dataclasses.replace(p, bound=bound) for p in plans]
        if best is None or s.cost < best.cost:
            plan = schedule_solution(network, self.request, s.assignment, bound, s.steps)
            plans.append(self._known_plan(plan.after(plans[-1] if plans else fastest)))
        best = best_within(plans, limit) or fitting_or_lowest((fastest, *plans), limit)
        best = cheaper_by_descent(best, plans, limit, bounding, self.effort)
        return dataclasses.replace(best, bound=bound)

    def _minimize_time_of_large(
        self,
        network: PlanningNetwork,
        bounding: CostNetwork,
        fastest: ScheduledSolution,
        most: float,
        start: BudgetStart,
    ) -> ScheduledSolution:
        """As `minimize_time_under_budget`, of a network whose every search takes long; no cost above `most` is of use.

        The lower-bound network gives the bound and, where its schedules are near the budget, the plan; else the estimating
        one gives that, beginning with what was found.
        """
        limit, size = self._limit, network.cost_network.size
        early, known = start.plans, start.answers
        answers = [with_copies(bounding, x[:size]) for x in known]
        near, rounds = _NEAR_BUDGET * limit, 1 if best_within(early, limit) else ROUNDS
        begin = start.prices, answers
        plans, found = self._search_schedules(
            network, bounding, fastest, most, begin, near, rounds, only=None
        )
        bound = fastest.bound if found is None else max(fastest.bound, found.bound)
        best = best_within([*early, *plans], limit)
        if best is None or best.cost > bound * (1 + _BUDGET_GAP) and not best.interrupted:
            estimating = start.estimating or memory_network(network)
            prices = found and found.prices and found.prices.of_another_network()
            more = [with_copies(estimating, x[:size]) for x in (found.answers if found else ())]
            begin, far = (prices, (*known, *more)), math.inf if best is None else _FAR_FROM_BUDGET * limit
            bounded = dataclasses.replace(fastest, bound=bound)
            plans += self._search_schedules(network, estimating, bounded, most, begin, far)[0]
        if not plans and not early and most < math.inf:
            raise NoBetterPlan(fastest.bound + self.request.most - most)
        best = best_within([*early, *plans], limit) or fitting_or_lowest((fastest, *plans), limit)
        return dataclasses.replace(best, bound=bound)

    def _start(self, network: PlanningNetwork, fastest: ScheduledSolution) -> BudgetStart:
        """Plans within the budget, and answers to begin with, where every search takes long."""
        if not is_large_and_limited(self.program, self.request) and (
            self.request.most < math.inf or self._bounding_network.num_entries < _MANY_ENTRIES
        ):
            return BudgetStart()
        known, effort = best_within(self._known, self._limit), self.effort.part(_SHARE_FOR_START)
        start = budget_start(network, fastest, known, _BUDGET_GAP, effort, lambda: self._bounding_network)
        for plan in start.plans:
            self._known_plan(plan)
        return start

    def _search_schedules(
        self,
        network: PlanningNetwork,
        memory: CostNetwork,
        fastest: ScheduledSolution,
        most: float = math.inf,
        start: tuple[Prices | None, Sequence[Ints]] = (None, ()),
        furthest: float = math.inf,
        rounds: int = ROUNDS,
        may_fit: Callable[[], bool] = lambda: True,
        only: Wanted = "answer",
    ) -> tuple[list[ScheduledSolution], Solution | None]:
        """Plans by a memory network, and its last solution with a bound that holds for the budget.

        No cost above `most` is of use. `start`: prices, answers to begin with. `only`: as in `solve`. Others: `LimitSearch`.
        """
        limit, large, effort = self._limit, memory.is_large(self.effort), self.effort.part(_SHARE_FOR_PLANS)
        early, measured = list[ScheduledSolution](), dict[bytes, ScheduledSolution]()

        def note_plan(assignment: Ints) -> None:
            if not early or not large and evaluate(memory, assignment) < min(p.cost for p in early):
                plan = schedule_solution(network, self.request, assignment, fastest.bound, ())
                measured[assignment.tobytes()] = plan
                if plan.peak <= limit:
                    early.append(self._known_plan(plan.after(fastest)))

        def solved(aim: float, prices: Prices | None, answers: Sequence[Ints]) -> Solution | None:
            return self._solve_limited(
                memory, aim, (fastest.cost, fastest.peak), prices, answers, note_plan, effort=effort,
                only=only, bound=fastest.bound, most=most,
            )  # fmt: skip

        def scheduled(s: Solution) -> ScheduledSolution:
            plan = measured.get(s.assignment.tobytes())
            plan = plan or schedule_solution(network, self.request, s.assignment, fastest.bound, s.steps)
            return self._known_plan(dataclasses.replace(plan, steps=s.steps).after(fastest))

        least = functools.partial(least_counted, memory, effort)
        ends = when_spent(memory, effort, self.request.names_least_peak)
        tried = LimitSearch(limit, solved, scheduled, rounds, furthest, may_fit, least, ends, self._above)
        plans, found = tried.run(*start)
        self._above = None if large else last_above(plans, found, limit)
        return [*early, *plans], found

    def _solve_limited(
        self,
        memory: CostNetwork,
        limit: float,
        unlimited: tuple[float, float],
        prices: Prices | None = None,
        known: Sequence[Ints] = (),
        on_answer: Callable[[Ints], None] | None = None,
        only: Wanted = None,
        effort: Effort | None = None,
        bound: float = -math.inf,
        most: float = math.inf,
    ) -> Solution | None:
        """The solution of a memory network under a limit in bytes; None where none was found.

        `unlimited`: seconds and peak of the fastest plan. `prices`, `known`: to begin with. `on_answer`: called with every
        better one. `only`: as in `solve`. `bound`: of the cost, so far. `most`: no cost above is of use.
        """
        r = self.request
        gap = max(r.memory_gap, _BUDGET_GAP) if memory.is_large(self.effort) else r.memory_gap
        cheapest = min((p.cost for p in self._known if p.peak <= self._limit), default=math.inf)
        try:
            s = solve(
                memory.within(limit), gap=gap, seconds=self._seconds(r.memory_seconds),
                on_progress=self.on_progress, layers_repeat=True, prices=prices, known=known,
                unlimited=unlimited, effort=effort or self.effort, on_answer=on_answer,
                only=only, known_cost=cheapest, bound=bound, most=most,
            )  # fmt: skip
            return s if s.bound <= most else None
        except (MemoryBudgetError, SearchError):
            return None
