"""Least peak memory, ties to the lower cost.

Problem.  Which assignment's worst moment is the least bad, and what is the proof?

Idea.  Forget the costs, keep what they forbid.  For weights w >= 0 over the key times with sum 1, the
least of sum w_t bytes_t(x) over all x bounds every peak from below; the ladder finds it.  It is a matrix
game: a small linear program over the answers met so far proposes the weights, the ladder answers, and
the answer's worst time joins the game.  Answers are repaired below ever smaller limits (``budget_repair.py``).
The least peak found is then the limit under which the cost is made least.

Worked case.  Two tensors live at different times, each 8 or 2 bytes, forbidden to be both 2: weights
(1/2, 1/2) prove 5, the answer is 8; the gap is the price of not mixing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jshard._core.errors import MemoryBudgetError
from jshard._search.branch_and_bound import SearchState, branch_and_bound
from jshard._search.cost_network import CostNetwork, Floats, evaluate, peak
from jshard._search.exact.reduce import working_network
from jshard._search.exact.table_pool import TablePool
from jshard._search.memory.ilp import solve_small_core
from jshard._search.memory.key_times import key_times_above, sum_over_intervals, usage_range
from jshard._search.memory.lagrangian import (
    ReducedProblem,
    lift_core,
    reduced_problem,
    solve_lagrangian,
    solve_limited,
)
from jshard._search.primal.budget_repair import budgeted_core, repair_then_descend
from jshard._search.primal.local_search import energy


# A peak this near its bound is not lowered further: the plan would pay in time for what no device notices.
_NEAR = 0.005


def without_costs(network: CostNetwork) -> CostNetwork:
    """The same choices and prohibitions, everything else free."""
    return replace(
        network,
        unary=tuple(np.where(np.isinf(t), np.inf, 0.0) for t in network.unary),
        pairwise=tuple(np.where(np.isinf(t), np.inf, 0.0) for t in network.pairwise),
    )


def master_lp(met: list[Floats], times: list[int]) -> Floats:
    """The weights over some times that make the best of the met answers as heavy as possible."""
    rows = np.array([profile[times] for profile in met])
    scale = rows.max()
    n = len(times)
    # maximise z with z <= w . row for every row, sum w = 1, w >= 0
    from scipy.optimize import linprog  # here, so that `import jshard` stays light

    result = linprog(
        np.append(np.zeros(n), -1.0),
        A_ub=np.hstack([-rows / scale, np.ones((len(met), 1))]),
        b_ub=np.zeros(len(met)),
        A_eq=np.append(np.ones(n), 0.0)[None],
        b_eq=[1.0],
        bounds=[(0, None)] * n + [(None, None)],
        method="highs",
    )
    found = np.maximum(result.x[:n], 0.0) if result.x is not None else np.ones(n)
    return found / found.sum()


def cutting_plane_game(model: ReducedProblem, search: SearchState, start: int) -> None:
    """The game between times and answers; fills in ``search`` with the peak and its bound."""
    held = model.memory
    pack = budgeted_core(model.core, held, np.inf)
    times, met = [start], []
    for rounds in range(1, 101):
        weights = np.zeros(held.times)
        weights[times] = master_lp(met, times) if met else 1.0
        answer = solve_lagrangian(model, weights, search, 60)
        search.bound = max(search.bound, answer.bound + float(weights @ held.constant))
        if answer.chosen is None:
            break
        profile = held.live_bytes(answer.chosen)
        best = list(answer.chosen)
        # Each repair that succeeds halves the way down to the bound.
        while True:
            now = float(held.live_bytes(best).max())
            if now < search.incumbent_cost:
                search.incumbent_cost = now
                search.assignment = lift_core(model, best, search.num_variables)
            aim = search.bound + 0.5 * (now - search.bound)
            for limit in (search.bound, aim):
                trial = list(best)
                tried = replace(pack, limit=limit)
                if now > limit and repair_then_descend(tried, trial, search.deadline) < np.inf:
                    best = trial
                    break
            else:
                break
            if search.out_of_time:
                break
        if search.closed(search.bound) or search.out_of_time:
            break
        fresh = [t for t in (int(profile.argmax()), int(held.live_bytes(best).argmax())) if t not in times]
        known = any(np.array_equal(profile, other) for other in met)
        if known and not fresh:
            break
        times += dict.fromkeys(fresh)
        met.append(profile)
        if rounds % 10 == 1:
            search.report(f"least peak, round {rounds}: {len(times)} times in play")
    search.report("least peak")


def solve_peak(network: CostNetwork, search: SearchState, break_ties_by_cost: bool = True) -> None:
    """Least peak, ties to lower cost unless told not to; fills in ``search`` with the peak and its bound."""
    memory = network.memory
    assert memory is not None
    least, most = usage_range(memory)
    everywhere = key_times_above(memory, -np.inf)
    floor = sum_over_intervals(everywhere.start, everywhere.end, least, len(everywhere.times))
    lowest = float(floor.max(initial=0.0))
    clock = key_times_above(memory, lowest)
    if not len(clock.times):  # nothing can exceed the floor
        branch_and_bound(search, (), working_network(network))
        assert search.assignment is not None
        search.incumbent_cost = search.bound = peak(network, search.assignment)
        return
    grid = 2.0 ** (np.ceil(np.log2(max(float(most.sum()), 1e-300))) - 55)
    model = reduced_problem(without_costs(network), clock, None, TablePool(grid))
    search.report(
        f"reductions that keep memory: {network.size} variables -> {len(model.core.variables)}; "
        f"{len(clock.times)} key times can be the peak"
    )
    search.bound = lowest
    floor = sum_over_intervals(clock.start, clock.end, least, len(clock.times))
    cutting_plane_game(model, search, int(floor.argmax()))
    if found := solve_small_core(budgeted_core(model.core, model.memory, np.inf), search):
        chosen, bound, _ = found
        if chosen is not None and energy(model.core, chosen) < model.core.infeasibility_penalty:
            search.bound = max(search.bound, bound)
            if float(model.memory.live_bytes(chosen).max()) < search.incumbent_cost:
                search.assignment = lift_core(model, chosen, network.size)
        search.report("integer program")
    if search.assignment is None:
        return
    search.incumbent_cost = peak(network, search.assignment)
    if not break_ties_by_cost:
        return
    min_cost_at_peak(network, search)
    for share in (0.1, 0.5):  # prices that know the costs lead to other answers than the game's
        if search.out_of_time or search.incumbent_cost <= search.bound * (1 + max(search.gap, _NEAR)):
            break
        if min_cost_at_peak(network, search, search.bound + share * (search.incumbent_cost - search.bound)):
            search.report(f"prices below {search.incumbent_cost:.6g}")
    search.report("least cost at this peak")


def min_cost_at_peak(network: CostNetwork, search: SearchState, limit: float | None = None) -> bool:
    """The least cost found within a limit, by default the peak reached; whether there was an answer (in place).

    The peak is the objective; the cost only breaks ties and needs no proof, so the effort is bounded by counts.
    """
    assert network.memory is not None and search.assignment is not None
    at_peak = limit is None
    limit = search.incumbent_cost if limit is None else limit
    capped = replace(network, memory=replace(network.memory, limit=limit * (1 + 1e-9)))
    second = SearchState(
        search.deadline,
        max(search.gap, 1e-3),
        lambda text: search.report(
            f"{text} (time cost {second.incumbent_cost:.6g}, bound {second.bound:.6g})"
        ),
        network.size,
    )
    try:
        solve_limited(capped, second, tie_break_only=True)
    except MemoryBudgetError:  # not found in the rounds given: keep what there is
        pass
    except KeyboardInterrupt:
        search.report("interrupted")
    if second.assignment is None or (
        at_peak and second.incumbent_cost > evaluate(network, search.assignment)
    ):
        return False
    search.assignment = second.assignment
    search.incumbent_cost = peak(network, search.assignment)
    return True
