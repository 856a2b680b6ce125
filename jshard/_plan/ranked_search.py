"""The cheapest plan of a small program within a budget, proved: schedules in the order of cost until one fits.

Problem.  The peak of a schedule is counted action by action, and neither memory network has exactly its bytes
(`_network/memory_network.py`). On a large program they differ by little; on one of twenty operators a single tensor can
decide what fits.

Idea.  All assignments are listed in the order of cost (`_search/exact/ranked_assignments.py`), and the peak of each one's
schedule is counted. The first that fits is the cheapest: no schedule costs less than its assignment. Where the list ends
before, nothing fits, and the lowest peak of all is proved. Longer lists are left to the search with prices on memory,
which then has the cost of the last one looked at as a bound.

A schedule is made only where its peak may be lower than the lowest so far: no schedule holds less than the lower-bound
memory network counts for its assignment, and that is counted in a tenth of the time.
"""

from __future__ import annotations

import dataclasses
import math

from jshard._core.arrays import Ints
from jshard._network.build import PlanningNetwork
from jshard._network.memory_network import memory_network, with_copies
from jshard._plan.request import PlanRequest
from jshard._plan.scheduled_solution import ROUNDING, ScheduledSolution, schedule_solution
from jshard._search import CostNetwork, Effort, peak
from jshard._search.exact.ranked_assignments import assignments_by_cost


_VARIABLES = 100  # of a network at most: larger ones have too many assignments of about the same cost
OPERATORS_SCHEDULED = 25_000  # of all schedules together
COUNTED = 0.1  # of a schedule: what it takes to count the bytes of an assignment in the lower-bound network
ENTRIES = 10_000  # of effort, for an operator of a schedule


@dataclasses.dataclass(frozen=True, eq=False)
class RankedSearch:
    """What the list gave.

    - `best`: the cheapest plan within the budget, of those the one of least peak; else that of least peak; None where
        nothing was listed.
    - `bound`: no plan within the budget costs less. `finished`: whether `best` is proved to be the cheapest, or that
        nothing fits.
    """

    best: ScheduledSolution | None
    bound: float
    finished: bool


def cheapest_by_rank(network: PlanningNetwork, request: PlanRequest, effort: Effort) -> RankedSearch:
    """List the plans of a network without second copies until one fits the budget of the request."""
    limit = request.memory_limit
    assert limit is not None
    nothing = RankedSearch(None, 0.0, finished=False)
    if network.cost_network.size > _VARIABLES or effort.exhausted:
        return nothing
    listed = assignments_by_cost(network.cost_network)
    if listed is None:
        return nothing
    operators = len(network.program.operators)
    bounding = memory_network(network, lower_bound=True)
    best: ScheduledSolution | None = None
    lowest: ScheduledSolution | None = None
    number, done = -1, 0.0
    for number, (cost, states) in enumerate(listed):
        spent = done >= OPERATORS_SCHEDULED or effort.exhausted
        if best is not None and (spent or cost > best.cost * (1 + ROUNDING)):
            return _fitting(best, number)
        if spent:
            return RankedSearch(lowest, cost, finished=False)
        needed = lowest is None or least_peak(bounding, states) < lowest.peak
        share = operators * (1.0 if needed else COUNTED)
        done += share
        effort.spend(entries=ENTRIES * share)
        if not needed:
            continue
        solution = schedule_solution(network, request, states, 0.0, (), may_break_ties=False)
        if lowest is None or solution.peak < lowest.peak:
            lowest = solution
        if solution.peak <= limit and (best is None or _order(solution) < _order(best)):
            best = solution
    if best is not None:
        return _fitting(best, number + 1)
    if lowest is None:
        return nothing
    step = f"plans in the order of cost: none of all {number + 1} fits"
    return RankedSearch(dataclasses.replace(lowest, peak_bound=lowest.peak, steps=(step,)), math.inf, True)


def least_peak(bounding: CostNetwork, states: Ints) -> float:
    """Bytes that every schedule of an assignment holds at its peak."""
    return peak(bounding, with_copies(bounding, states))


def _order(solution: ScheduledSolution) -> tuple[float, float]:
    return solution.cost, solution.peak


def _fitting(best: ScheduledSolution, listed: int) -> RankedSearch:
    step = f"plans in the order of cost: of {listed} the first that fits"
    return RankedSearch(dataclasses.replace(best, bound=best.cost, steps=(step,)), best.cost, True)
