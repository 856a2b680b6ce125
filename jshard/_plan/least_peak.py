"""The least peak of a program whose memory networks are searched in seconds: which are solved, and which plans are taken.

The network that estimates bytes comes first: its plan says which states of the lower-bound network no better plan takes
(`cast_probing.py`). That network gives the bound and, where its own schedule holds less, another plan.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from jshard._core.errors import SearchError
from jshard._network.build import PlanningNetwork
from jshard._network.memory_network import memory_network
from jshard._plan.cast_probing import without_costly_casts
from jshard._plan.memory_preference import PlansWithin
from jshard._plan.peak_descent import descend_peak
from jshard._plan.request import PlanRequest
from jshard._plan.scheduled_solution import ROUNDING, ScheduledSolution, least_peak_plan, schedule_solution
from jshard._search import CostNetwork, Effort, Prices
from jshard._search.effort import ENTRIES_PER_SECOND, longest_seconds
from jshard._search.solve import Progress, solve as solve_network


# Of the search for each budget below the least peak found: the gap that suffices, since the cost decides nothing, and its
# effort, a share of that of all before and a second, at most five.
_GAP_BELOW = 0.5
_EFFORT_BELOW, _LEAST_BELOW, _MOST_BELOW = 0.5, ENTRIES_PER_SECOND, 5.0 * ENTRIES_PER_SECOND
_NEAR_BOUND = 1.1  # times its bound: a peak below is not lowered so
_BUDGETS = 5  # tried at most
# Of the peak, the budgets: the second where nothing is found within the first.
_FAR_BELOW, _BELOW = 0.8, 0.95

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


def least_peak_plan_of(
    plan: ScheduledSolution,
    least_cost: float,
    effort: Effort,
    note: Callable[[ScheduledSolution], object],
    on_progress: Progress | None,
    gap: float,
) -> ScheduledSolution:
    """The plan of least peak found by both memory networks, and by changes of single operators.

    Arguments:

    - `plan`, `least_cost`: any plan, and the cost of a plan of least time by the network.
    - `effort`, `note`: as in `least_peak_plans`. `gap`: as in `least_peak_plans_of_large`.
    """
    bounding = memory_network(plan.network, lower_bound=True)
    search = peak_search(plan.network, plan.request, (least_cost, plan.peak), effort, on_progress)
    if bounding.is_large(effort):
        found, bound = least_peak_plans_of_large(plan, bounding, search, effort, note, gap)
    else:
        found, bound = least_peak_plans(plan, bounding, search, effort, note)
    best = dataclasses.replace(least_peak_plan(found, bound), steps=found[1].steps)
    return descend_peak(best, bounding, effort, best.bound * (1 + ROUNDING))


def lower_by_budgets(
    best: ScheduledSolution, searches: Callable[[float, float], PlansWithin], effort: Effort
) -> ScheduledSolution:
    """The plan, or one of lower peak that searches for budgets below it find.

    A memory network counts of an assignment less than its schedule holds, of some far less. Its least peak may be one of
    these: a block with batch normalisation and dropout on 2 x 4 held 65,324 bytes where 28,460 were counted of another
    plan, and hold. Within a budget limits are lowered until a schedule keeps it (`lowered_limits.py`).

    Arguments:

    - `best`: the plan of least peak found, with a bound in bytes.
    - `searches`: of the gap that suffices and an effort, what gives plans for a budget. `effort`: that was spent before.
    """
    plans_within = searches(_GAP_BELOW, min(_EFFORT_BELOW * effort.spent + _LEAST_BELOW, _MOST_BELOW))
    given, share = best.peak, _FAR_BELOW
    for _ in range(_BUDGETS):
        if best.interrupted or best.peak <= _NEAR_BOUND * best.bound:
            break
        found = min(plans_within(share * best.peak, math.inf), key=lambda p: p.peak, default=best)
        if found.peak < best.peak * (1 - ROUNDING):
            best = dataclasses.replace(found, request=best.request, bound=best.bound, steps=best.steps)
        elif share == _BELOW:
            break
        else:
            share = _BELOW
    if best.peak == given:
        return best
    return dataclasses.replace(
        best, steps=(*best.steps, f"budgets below {given:,.0f} bytes: {best.peak:,.0f}")
    )


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
