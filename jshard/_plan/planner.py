"""From a traced program and a request to a plan record and its schedule: build the network, search, summarize."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jshard._core.gc_pause import gc_paused
from jshard._core.topology import Topology
from jshard._network.pin_conflicts import explain_contradiction
from jshard._plan.early_plans import early_plan, is_estimated
from jshard._plan.level_search import LevelSearch
from jshard._plan.propagation import propagate
from jshard._plan.record import PlanRecord
from jshard._plan.request import LEAST_EFFORT, PlanRequest
from jshard._plan.scheduled_solution import ROUNDING, ScheduledSolution, schedule_solution
from jshard._plan.short_rows import with_short_rows
from jshard._plan.summarize import summarize
from jshard._program.graph import Program
from jshard._schedule.schedule import Schedule
from jshard._search import LARGE_NETWORK, Contradiction


ONE_SHARED_COPY = "plans with a single shared copy a tensor"


@gc_paused()
def make_plan(
    program: Program, topology: Topology, request: PlanRequest, on_progress: Callable[..., None] | None = None
) -> tuple[PlanRecord, Schedule]:
    """Search a plan for a program on a topology; returns the plan and the schedule it stands for."""
    whole = request.effort  # a search puts parts of it into the requests of those it begins

    def search(request: PlanRequest) -> ScheduledSolution:
        effort = None if whole is None else whole.next_part(1.0, least=LEAST_EFFORT)
        return _searched(program, topology, dataclasses.replace(request, effort=effort), on_progress)

    solution = search(request)
    if request.search == "optimal":
        solution = with_short_rows(solution, search)
    solution = _with_valid_bound(solution)
    one_copy = request.level != 1 and solution.network.one_shared_copy
    record = summarize(solution, ONE_SHARED_COPY if one_copy else "")
    limit = request.memory_limit
    if limit is None or not (request.search_in_budget or solution.peak_bound > limit):
        return record, solution.schedule
    if record.cost.peak_bytes > limit:
        if solution.interrupted:
            raise KeyboardInterrupt  # no plan within the budget was known
        from jshard._plan.memory_refusal import refuse  # here, so that `import jshard` stays light

        raise refuse(solution, record, limit)
    return record, solution.schedule


def _searched(
    program: Program, topology: Topology, request: PlanRequest, on_progress: Callable[..., None] | None
) -> ScheduledSolution:
    search = LevelSearch(program, topology, request, on_progress)
    if request.search == "propagation":
        network = search.network(second_copies=request.level != 1)
        configured = {op for op, *_ in (*request.pins, *request.forced)}
        assignment, steps = propagate(network, configured)
        return schedule_solution(network, request, assignment, 0.0, steps, may_break_ties=False)
    try:
        if is_estimated(program, request):
            early = early_plan(search.network(second_copies=False), request, search.effort)
            if early is not None:
                return early
        solution = search.run()
        limit = request.memory_limit
        # A search for the least peak says enough by itself.
        quick = request.level != 1 and len(program.operators) < LARGE_NETWORK
        if limit is not None and not request.search_in_budget and quick and solution.peak > limit:
            # Where it is known without a search that nothing fits, that is said of a trial too.
            return dataclasses.replace(solution, peak_bound=max(solution.peak_bound, search.peak_floor))
        return solution
    except Contradiction as e:
        raise explain_contradiction(e, search.first_network, search.every_pin) from None


def _with_valid_bound(solution: ScheduledSolution) -> ScheduledSolution:
    """The solution with the bound that a plan may claim.

    The bound is the schedule's cost where only rounding separates them, since the two add up the same terms in another
    order. A bound above the cost of a schedule would be no bound: it is replaced by 0, and the steps say so.
    """
    cost, bound = solution.objective, solution.bound
    if abs(cost - bound) <= ROUNDING * max(cost, bound):
        return dataclasses.replace(solution, bound=cost)
    if bound > cost:
        note = f"the search's bound {bound:.6g} is above the schedule's cost {cost:.6g}: nothing is proved"
        return dataclasses.replace(solution, bound=0.0, steps=(*solution.steps, note))
    return solution
