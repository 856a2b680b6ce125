"""What a plan would cost if repeated products had no price: said beside a plan whose products could be repeated faster."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from jshard._core.errors import SearchError
from jshard._network.build import PlanningNetwork
from jshard._plan.scheduled_solution import ScheduledSolution, schedule_solution
from jshard._program.memory.unfusible import ALL_PRODUCTS
from jshard._search import Effort, solve
from jshard._search.effort import ENTRIES_PER_SECOND


_SHARE_OF_EFFORT = 0.3  # of the effort of the plan itself: this cost is said beside it, and needs no proof
_LEAST_EFFORT = 2.0 * ENTRIES_PER_SECOND


def with_unpriced_cost(
    solution: ScheduledSolution,
    unpriced_network: Callable[[], PlanningNetwork],
    effort: Effort,
    seconds: float,
) -> ScheduledSolution:
    """The solution with the cost of a plan without the price of repeated products, where that is lower.

    Repeating all products can be faster only where they take less time than the plan's communication: elsewhere nothing
    is searched.

    Arguments:

    - `unpriced_network`: builds the network of the same request without that price.
    - `effort`, `seconds`: what the search may spend.
    """
    request, cost, made = solution.request, solution.schedule_cost, solution.schedule
    program, topology = made.assignment.program, solution.network.topology
    equations = np.flatnonzero(program.use_def.has_kind("eqn")).tolist()
    products = sum(
        float(s) for i, s in zip(equations, cost.seconds, strict=True)
        if program.operators[i].primitive in ALL_PRODUCTS
    )  # fmt: skip
    repeated = products * (topology.mesh.total - 1)
    if (
        not request.replication_price
        or solution.interrupted
        or effort.exhausted
        or cost.communication <= repeated
    ):
        return solution
    network, most = unpriced_network(), solution.cost - cost.price
    part = effort.at_most(max(_LEAST_EFFORT, _SHARE_OF_EFFORT * effort.spent))
    try:
        s = solve(network.cost_network, gap=request.memory_gap, seconds=seconds, effort=part, most=most)
    except SearchError:  # no answer in so little effort
        return solution
    unpriced = schedule_solution(network, request, s.assignment, s.bound, ())
    fits = unpriced.peak <= (request.memory_limit or math.inf)
    if not fits or unpriced.cost >= most:
        return solution
    return dataclasses.replace(solution, unpriced=unpriced.cost)
