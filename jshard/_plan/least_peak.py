"""The least peak of a program whose memory networks are searched in seconds: which are solved, and which plans are taken.

The network that estimates bytes comes first: its plan says which states of the lower-bound network no better plan takes
(`cast_probing.py`). That network gives the bound and, where its own schedule holds less, another plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jshard._core.errors import SearchError
from jshard._network.build import PlanningNetwork
from jshard._network.memory_network import memory_network
from jshard._plan.cast_probing import without_costly_casts
from jshard._plan.request import PlanRequest
from jshard._plan.scheduled_solution import ScheduledSolution, schedule_solution
from jshard._search import CostNetwork, Effort, Prices
from jshard._search.effort import longest_seconds
from jshard._search.solve import Progress, solve as solve_network


SolvePeak = Callable[[CostNetwork, bool], tuple[ScheduledSolution, Prices | None]]


def peak_search(
    network: PlanningNetwork,
    request: PlanRequest,
    unlimited: tuple[float, float],
    effort: Effort,
    on_progress: Progress | None,
) -> SolvePeak:
    """The search of a memory network for a plan of low peak, with the prices that prove it.

    Arguments:

    - `network`: that the plans are of. `request`: gives the gap that suffices.
    - `unlimited`: seconds and peak of the fastest plan.
    - `effort`: ends a search when it is spent.
    """

    def search(memory: CostNetwork, break_ties_by_cost: bool) -> tuple[ScheduledSolution, Prices | None]:
        s = solve_network(
            memory, objective="peak", gap=request.gap, on_progress=on_progress,
            seconds=longest_seconds(request.search_seconds, request.memory_seconds),
            break_ties_by_cost=break_ties_by_cost, layers_repeat=True, unlimited=unlimited, effort=effort,
        )  # fmt: skip
        return schedule_solution(network, request, s.assignment, s.bound, s.steps), s.prices

    return search


def least_peak_plans(
    plan: ScheduledSolution,
    bounding: CostNetwork,
    solve: SolvePeak,
    effort: Effort,
    note: Callable[[ScheduledSolution], object],
) -> tuple[list[ScheduledSolution], float]:
    """Plans of low peak, that of the estimating network second, and bytes that every plan holds.

    Arguments:

    - `plan`: any plan.
    - `bounding`: the lower-bound memory network.
    - `solve`: gives the plan of least peak by a memory network, and with whether ties are broken by cost, and its prices.
    - `effort`: of the search.
    - `note`: is told of each plan as it is found, with a bound that holds for all.
    """
    network = plan.network
    estimated = solve(memory_network(network), True)[0]
    note(dataclasses.replace(estimated, bound=0.0))
    found = [plan, estimated]
    lowest = min(s.peak for s in found)
    bounding = without_costly_casts(bounding, network.cost_network.size, lowest, effort)
    first = solve(bounding, False)[0]
    if any(s.interrupted for s in (*found, first)):
        found.append(first)
    elif first.peak < lowest:
        found.append(solve(bounding, True)[0])
        if first.peak < min(s.peak for s in found):  # its schedule is not that of the plan with ties broken
            found.append(first)
    return found, first.bound


def least_peak_plans_of_large(
    plan: ScheduledSolution,
    bounding: CostNetwork,
    solve: SolvePeak,
    effort: Effort,
    note: Callable[[ScheduledSolution], object],
    gap: float,
) -> tuple[list[ScheduledSolution], float]:
    """As `least_peak_plans`, of a program whose every search takes long: the estimating network's prices may prove enough.

    `gap`: relative, of the lowest peak, at which no other search is made.
    """
    from jshard._search.memory.minimax_peak import bound_at_prices  # here: the import stays light

    estimated, prices = solve(memory_network(plan.network), True)
    found = [plan, estimated]
    bound = 0.0 if prices is None else bound_at_prices(bounding, prices, effort)
    note(dataclasses.replace(estimated, bound=bound))
    if not estimated.interrupted and min(s.peak for s in found) > bound * (1 + gap):
        first = solve(bounding, False)[0]
        found, bound = [*found, first], max(bound, first.bound)
        note(first)
    return found, bound


def least_peak_bound(
    bounding: CostNetwork, fastest: ScheduledSolution, effort: Effort, on_progress: Progress | None = None
) -> float:
    """Bytes that every plan holds at its peak, as far as a search without ties broken proves it; 0 for none.

    Arguments:

    - `bounding`: the lower-bound memory network. `fastest`: the plan of least time.
    - `effort`: ends the search when it is spent.
    """
    r = fastest.request
    if effort.exhausted:
        return 0.0
    try:
        return solve_network(
            bounding, objective="peak", gap=r.gap, seconds=longest_seconds(r.search_seconds, r.memory_seconds),
            on_progress=on_progress, break_ties_by_cost=False, layers_repeat=True,
            unlimited=(fastest.cost, fastest.peak), effort=effort,
        ).bound  # fmt: skip
    except SearchError:  # not in time
        return 0.0
