"""Least peak memory: a matrix game solved by cutting planes (Kelley 1960), ties to the lower cost.

For weights w >= 0 over the key times with sum 1,

    min over x of max over t of bytes_t(x)  >=  min over x of sum over t of w_t bytes_t(x),

where x ranges over the assignments of finite cost; costs do not count beyond that. It is a matrix game between times
and assignments. A small linear program over the answers so far proposes the weights (the master problem), branch and
bound solves the right side (the oracle), and the answer's worst time joins the game. Answers are repaired below ever
smaller limits (`budget_repair`). The cost is then minimised with the least peak as the limit.

Example: two tensors live at different times, each 8 or 2 bytes, forbidden to be both 2: the weights (1/2, 1/2) prove
5, the answer is 8; the gap is what mixing states would save.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jshard._core.arrays import Floats, Ints
from jshard._core.errors import MemoryBudgetError
from jshard._search.branch_and_bound import branch_and_bound
from jshard._search.cost_network import (
    CostNetwork,
    Prices,
    evaluate,
    interval_bytes,
    live_bytes,
    peak,
)
from jshard._search.effort import Effort
from jshard._search.exact.table_pool import TablePool
from jshard._search.exact.working_network import working_network
from jshard._search.memory.answer_fusion import fused_network
from jshard._search.memory.budget_repair import BudgetedCore, budgeted_core, repair_then_descend
from jshard._search.memory.ilp import solve_small_core
from jshard._search.memory.key_times import fullest_time, key_times_above, sum_over_intervals, usage_range
from jshard._search.memory.lagrangian import PRICE_CUTS_FROM, fuse, solve_limited
from jshard._search.memory.price_cuts import PricedNetworks, without_costs
from jshard._search.memory.reduced_problem import (
    ReducedProblem,
    lift_core,
    reduced_problem,
    solve_lagrangian,
)
from jshard._search.primal.local_search import energy
from jshard._search.search_state import GapProgress, SearchState


# A peak this near its bound is not lowered further: the plan would pay in time for bytes that make no difference.
_PEAK_GAP = 0.005
_ROUNDS = 100  # of the game
_PATIENCE = 25  # of them without a lower peak or a better bound, after which it ends
_MESSAGE_ROUNDS = 60  # of message passing per round
_KEPT_ENTRIES = 3e7  # of tables that rounds computed: 240 MB
_ROUNDS_ON_FEW_TIMES = 30  # of the game, for a large network
_PATIENCE_ON_FEW_TIMES = 2  # of them in which the gap does not shrink by a tenth, after which it ends
_SHRINKS = 0.9  # of the gap before, to which it has to shrink
_INNER_GAP = 0.2  # of the gap that suffices: how near its optimum a weighted network is solved
_FUSED_ANSWERS = 4
_SMALL_COST_GAP = 1e-3  # of a cost that only breaks ties
_COST_GAP = 1e-2  # of a cost that only breaks ties, in a large network
_SHARE_FOR_TIES = 0.5  # of the effort of all that came before: for such a cost, and for lower peaks by prices
_LEAST_FOR_TIES = 3e8  # entries that these may take in any case, but in a large network
_POOR_PEAK = 1.5  # times its bound, above which a peak is lowered by prices though the effort is spent
_NEAR_COST = 0.1  # of such a cost: how near its bound it is not lowered by searches of its own
_SPEND_FOR_PEAK = 30.0  # the bytes of the peak cost so many times the network's cost
_COST_EFFORT = 0.5  # of the game's effort: what a lower cost at its peak may take
_NEAR_BOUND = 0.9  # of the gap: how near its bound a peak is looked for at first
_SHARE_OF_GAME = 0.5  # of a given effort, for the game; the rest is for lower peaks by prices
_REPAIR_SHARE = 0.5  # of the way from the peak down to its bound that a repair aims at


def master_lp(profiles: list[Floats], times: list[int]) -> Floats:
    """The weights over some times that maximise the least weighted bytes of the answers so far.

    Arguments:

    - `profiles`: (T,) bytes at the key times of each answer.
    - `times`: indices into them.
    """
    rows = np.array([profile[times] for profile in profiles])
    scale = rows.max()
    n = len(times)
    # maximise z with z <= w . row for every row, sum w = 1, w >= 0
    from scipy.optimize import linprog  # here, so that `import jshard` stays light

    result = linprog(
        np.append(np.zeros(n), -1.0),
        A_ub=np.hstack([-rows / scale, np.ones((len(profiles), 1))]),
        b_ub=np.zeros(len(profiles)),
        A_eq=np.append(np.ones(n), 0.0)[None],
        b_eq=[1.0],
        bounds=[(0, None)] * n + [(None, None)],
        method="highs",
    )
    weights = np.maximum(result.x[:n], 0.0) if result.x is not None else np.ones(n)
    return weights / weights.sum()


def cutting_plane_game(problem: ReducedProblem, search: SearchState, start: int) -> None:
    """Solve the game between times and answers; `search` receives the peak and its bound.

    Arguments:

    - `problem`: a core without costs.
    - `search`: receives the answer and the bound.
    - `start`: the key time that the game starts with.
    """
    memory = problem.memory
    budgeted = budgeted_core(problem.core, memory, np.inf)
    # Few variables have weights, so rounds share most of their products.
    tables = problem.core_network.tables.copy()
    given = len(tables.arrays)
    times: list[int] = [start]
    profiles: list[Floats] = []
    reached, gained = (np.inf, -np.inf), 0  # the peak and its bound, and the round of the last gain
    for rounds in range(1, _ROUNDS + 1):
        weights = np.zeros(memory.num_times)
        weights[times] = master_lp(profiles, times) if profiles else 1.0
        if sum(table.size for table in tables.arrays[given:]) > _KEPT_ENTRIES:
            tables = problem.core_network.tables.copy()
        answer = solve_lagrangian(problem, weights, search, _MESSAGE_ROUNDS, tables)
        search.bound = max(search.bound, answer.bound + float(weights @ memory.constant))
        if answer.states is None:
            break
        profile = memory.live_bytes(answer.states)
        best = _lower_peak(problem, budgeted, search, answer.states)
        if search.incumbent_cost < reached[0] or search.bound > reached[1]:
            reached, gained = (search.incumbent_cost, search.bound), rounds
        if search.gap_closed(search.bound) or search.out_of_time or rounds - gained >= _PATIENCE:
            break
        worst = (int(profile.argmax()), int(memory.live_bytes(best).argmax()))
        joining = [t for t in worst if t not in times]
        known = any(np.array_equal(profile, other) for other in profiles)
        if known and not joining:
            break
        times += dict.fromkeys(joining)
        profiles.append(profile)
        if rounds % 10 == 1:
            search.report(f"least peak, round {rounds}: {len(times)} times in play")
    search.report("least peak")


def _lower_peak(
    problem: ReducedProblem, budgeted: BudgetedCore, search: SearchState, states: list[int]
) -> list[int]:
    """Repair an answer below ever smaller limits: each repair that succeeds halves the way down to the bound.

    Returns the last answer; `search` receives the best one.
    """
    best = list(states)
    while True:
        reached = float(problem.memory.live_bytes(best).max())
        if reached < search.incumbent_cost:
            search.incumbent_cost = reached
            search.assignment = lift_core(problem, best, search.num_variables)
        for limit in (search.bound, search.bound + _REPAIR_SHARE * (reached - search.bound)):
            trial = list(best)
            tried = replace(budgeted, limit=limit)
            if reached > limit and repair_then_descend(tried, trial, search.deadline) < np.inf:
                best = trial
                break
        else:
            return best
        if search.out_of_time:
            return best


def game_on_few_times(network: CostNetwork, search: SearchState, cost_gap: float) -> bool:
    """The game between times and answers of a large network whose layers repeat, without reductions that keep memory.

    While few times have weights, equal layers have equal tables (`price_cuts`). At the times without a weight an answer
    would hold anything, so answers come from bytes at a price beside which costs hardly count; the bound comes from
    bytes alone. The answers are combined in the end.

    Arguments:

    - `network`: with a memory.
    - `search`: receives the answer and the bound.
    - `cost_gap`: relative, of a cost that is near the least.

    Returns whether the answer's cost is proved to be near the least at its peak.
    """
    memory = network.memory
    assert memory is not None
    least, _ = usage_range(memory)
    lasting = memory.intervals[:, 0] < memory.intervals[:, 1]
    first = int(memory.intervals[lasting, 0].min())
    floor = live_bytes(memory, least)
    search.bound = float(floor.max())
    # In a large network they take most of the time, and combining the answers reaches peaks as low without them.
    moves_forests = not network.is_large(search.effort)
    priced = PricedNetworks(network, moves_forests)
    bytes_alone = PricedNetworks(without_costs(network), moves_forests)
    times, profiles, answers = [int(floor.argmax())], [], []
    spent = search.effort.spent  # before the game
    gap = max(search.gap, _PEAK_GAP)
    cost = search.unlimited[0] if search.unlimited else 0.0
    price = _SPEND_FOR_PEAK * cost / max(search.bound, 1.0)  # of a byte
    at_any_time = True  # whether short intervals are to have a price at any time
    progress = GapProgress(_SHRINKS, _PATIENCE_ON_FEW_TIMES)
    for rounds in range(1, _ROUNDS_ON_FEW_TIMES + 1):
        weights = master_lp(profiles, times) if profiles else np.ones(1)
        order = np.argsort(times)
        at, weights = np.array(times)[order] + first, weights[order]
        search.bound = max(search.bound, bytes_alone.solve(at, weights, search, _INNER_GAP * gap)[1])
        assignment, priced_bound = priced.solve(at, price * weights, search, _INNER_GAP * gap)
        if assignment is None:
            break
        if not price:
            price = _SPEND_FOR_PEAK * evaluate(network, assignment) / max(search.bound, 1.0)
        answers.append(assignment)
        profile = live_bytes(memory, interval_bytes(memory, assignment))
        if profile.max() < search.incumbent_cost:
            search.prices = Prices(at, price * weights, priced_bound)
        search.update_incumbent((), float(profile.max()), assignment)
        if at_any_time and search.incumbent_cost > search.bound * (1 + gap):
            at_any_time = _lower_everywhere(network, search, priced, (at, price * weights), gap, answers)
        search.report(f"least peak, round {rounds}: {len(times)} times in play")
        if search.incumbent_cost <= search.bound * (1 + gap) or search.out_of_time:
            break
        if progress.stalled(search.incumbent_cost - search.bound):
            break
        search.known = tuple(answers)
        if len(answers) > 1 and _fuse_near_bound(network, search, answers[-_FUSED_ANSWERS:], gap):
            break
        known = any(np.array_equal(profile, other) for other in profiles)
        worst = int(profile.argmax())
        if worst in times and known:
            break
        times += [worst] * (worst not in times)
        profiles.append(profile)
    search.known = tuple(answers)
    if search.incumbent_cost > search.bound * (1 + gap) and len(answers) > 1 and not search.out_of_time:
        _fuse_for_peak(network, search, [search.assignment, *answers[-_FUSED_ANSWERS:]])
        return False
    most = _COST_EFFORT * (search.effort.spent - spent)
    return _cost_is_low(network, search, cost_gap) or _lower_cost_under_prices(
        network, search, priced, cost_gap, most
    )


def _lower_everywhere(
    network: CostNetwork, search: SearchState, priced: PricedNetworks, prices: tuple[Ints, Floats], gap: float,
    answers: list[Ints],
) -> bool:  # fmt: skip
    """Add the answer in which bytes that are held briefly have the price at any time too; whether its peak is lower.

    Else layers whose times have no price hold anything, and are the peak of the next answer one after the other.
    """
    at, per_byte = prices
    assignment, _ = priced.solve(at, per_byte, search, _INNER_GAP * gap, float(per_byte.sum()))
    if assignment is None:
        return False
    answers.append(assignment)
    reached = peak(network, assignment)
    lower = reached < search.incumbent_cost
    search.update_incumbent((), reached, assignment)
    return lower


def bound_at_prices(network: CostNetwork, prices: Prices, effort: Effort | None = None) -> float:
    """Bytes that every assignment holds at its peak, as the weights prove it that prices of a similar network have.

    Arguments:

    - `network`: with a memory.
    - `prices`: at times of the same clock.
    - `effort`: ends the search when it is spent.
    """
    memory = network.memory
    assert memory is not None
    floor = float(live_bytes(memory, usage_range(memory)[0]).max())
    total = float(prices.per_byte.sum())
    if not total:
        return floor
    search = SearchState(np.inf, 0.0, lambda _: None, network.size)
    search.effort = effort or search.effort
    solver = PricedNetworks(without_costs(network))
    return max(floor, solver.solve(prices.times, prices.per_byte / total, search, _INNER_GAP * _PEAK_GAP)[1])


def bound_at_fullest_time(network: CostNetwork, effort: Effort | None = None) -> float:
    """Bytes that every assignment holds at the time at which most are held in any case; arguments as `bound_at_prices`."""
    memory = network.memory
    assert memory is not None
    return bound_at_prices(network, Prices(np.array([fullest_time(memory)]), np.ones(1)), effort)


def _fuse_near_bound(network: CostNetwork, search: SearchState, answers: Sequence[Ints], gap: float) -> bool:
    """The cheapest assignment of the states of some answers whose peak is within the gap of the bound, if there is one."""
    assert network.memory is not None
    limit = search.bound * (1 + _NEAR_BOUND * gap)
    fused = fuse(network.within(limit), answers, search)
    if fused is None:
        return False
    search.assignment, search.incumbent_cost = fused, peak(network, fused)
    search.report("answers combined")
    return True


def _cost_is_low(network: CostNetwork, search: SearchState, cost_gap: float) -> bool:
    """Whether the incumbent's cost is proved to be near the least at its peak."""
    if search.assignment is None or search.prices is None:
        return False
    least = search.prices.bound - float(search.prices.per_byte.sum()) * search.incumbent_cost
    return evaluate(network, search.assignment) <= least * (1 + cost_gap)


def _lower_cost_under_prices(
    network: CostNetwork, search: SearchState, priced: PricedNetworks, cost_gap: float, most: float
) -> bool:
    """Solve once more under the prices of the incumbent, as nearly as its cost wants it; whether that is low then.

    Bytes cost many times what the cost is: a small gap in both together leaves a larger one in the cost. `most`: effort
    that this may take, since the cost only breaks ties.
    """
    prices = search.prices
    if prices is None or search.out_of_time or search.assignment is None:
        return False
    bytes_at_peak = float(prices.per_byte.sum()) * search.incumbent_cost
    own = evaluate(network, search.assignment)
    gap = _INNER_GAP * cost_gap * own / max(own + bytes_at_peak, 1e-300)
    limited = search.effort.at_most(most)
    assignment, bound = priced.solve(prices.times, prices.per_byte, replace(search, effort=limited), gap)
    if assignment is None:
        return False
    reached, cost = peak(network, assignment), evaluate(network, assignment)
    search.known, search.prices = (*search.known, assignment), replace(prices, bound=max(bound, prices.bound))
    if reached <= search.incumbent_cost and cost < own:
        search.assignment, search.incumbent_cost, own = assignment, reached, cost
    search.report(f"least peak, cost {own:.6g}")
    return _cost_is_low(network, search, cost_gap)


def _fuse_for_peak(network: CostNetwork, search: SearchState, answers: Sequence[Ints | None]) -> None:
    """The least peak among the assignments of the states that some answers have."""
    fused = fused_network(network, [a for a in answers if a is not None])
    if not len(fused.variables):
        return
    inner = SearchState(
        search.deadline, max(search.gap, _PEAK_GAP), lambda _: None, fused.network.size, effort=search.effort
    )
    solve_peak(fused.network, inner, break_ties_by_cost=False)
    if inner.assignment is not None:
        assignment = fused.lift(inner.assignment)
        search.update_incumbent((), peak(network, assignment), assignment)
    search.report("answers combined")


def solve_peak(
    network: CostNetwork,
    search: SearchState,
    break_ties_by_cost: bool = True,
    layers_repeat: bool = False,
) -> None:
    """The least peak; `search` receives the answer, with the peak as its cost, and the peak's bound.

    Arguments:

    - `network`: with a memory; its limit does not count.
    - `search`: receives the result.
    - `break_ties_by_cost`: of assignments of one peak look for one of low cost.
    - `layers_repeat`: whether layers are expected to.
    """
    memory = network.memory
    assert memory is not None
    every = key_times_above(memory, -np.inf)
    whole, large = search.effort, network.is_large(search.effort)
    if break_ties_by_cost and np.isfinite(whole.limit) and not large:
        search.effort = whole.part(_SHARE_OF_GAME)
    if layers_repeat and network.size >= PRICE_CUTS_FROM and len(every.times):
        cost_gap = _COST_GAP if large else _SMALL_COST_GAP
        cost_is_low = game_on_few_times(network, search, cost_gap)
        closed = search.incumbent_cost <= search.bound * (1 + max(search.gap, _PEAK_GAP))
        if closed or large:
            search.effort = whole
            cost_is_low = cost_is_low or (large and _cost_is_low(network, search, _NEAR_COST))
            if break_ties_by_cost and not cost_is_low and search.has_answer and not search.out_of_time:
                min_cost_at_peak(network, search, layers_repeat=True)
                search.report("least cost at this peak")
            return
    least, most = usage_range(memory)
    floor = sum_over_intervals(every.start, every.end, least, len(every.times))
    lowest = float(floor.max(initial=0.0))
    clock = key_times_above(memory, lowest)
    if not len(clock.times):  # nothing can exceed the floor
        branch_and_bound(search, working_network(network))
        assert search.assignment is not None
        search.incumbent_cost = search.bound = peak(network, search.assignment)
        return
    grid = 2.0 ** (np.ceil(np.log2(max(float(most.sum()), 1e-300))) - 55)
    problem = reduced_problem(without_costs(network), clock, None, TablePool(grid))
    search.spend_on(problem.graph)
    search.report(
        f"reductions that keep memory: {network.size} variables -> {len(problem.core.variables)}; "
        f"{len(clock.times)} key times can be the peak"
    )
    search.bound = max(search.bound, lowest)
    floor = sum_over_intervals(clock.start, clock.end, least, len(clock.times))
    cutting_plane_game(problem, search, int(floor.argmax()))
    search.effort = whole
    _solve_integer_program(problem, search)
    if search.assignment is None:
        return
    search.incumbent_cost = peak(network, search.assignment)
    if break_ties_by_cost:
        _break_ties(network, search)


def _solve_integer_program(problem: ReducedProblem, search: SearchState) -> None:
    """Solve a small core with a gap as an integer program."""
    result = solve_small_core(
        budgeted_core(problem.core, problem.memory, np.inf), search, search.incumbent_cost
    )
    if result is None:
        return
    states = result.states
    if states is not None and energy(problem.core, states) < problem.core.infeasibility_penalty:
        search.bound = max(search.bound, result.bound)
        if float(problem.memory.live_bytes(states).max()) < search.incumbent_cost:
            search.assignment = lift_core(problem, states, search.num_variables)
    search.report("integer program")


def _break_ties(network: CostNetwork, search: SearchState) -> None:
    """Look for lower peaks by prices that know the costs, and where there is none, lower the cost at the peak reached.

    An answer within a limit has a low cost already. Each search may take a third of the effort for all.
    """
    found = False
    most = max(_LEAST_FOR_TIES, _SHARE_FOR_TIES * search.effort.spent) / 3
    if search.incumbent_cost > _POOR_PEAK * search.bound:
        search.effort = search.effort.at_least(_LEAST_FOR_TIES / 3)  # a spent effort ended the game early
    for share in (0.1, 0.5):  # of the peak's gap: other limits lead to other answers than the game's
        if search.out_of_time or search.incumbent_cost <= search.bound * (1 + max(search.gap, _PEAK_GAP)):
            break
        limit = search.bound + share * (search.incumbent_cost - search.bound)
        if min_cost_at_peak(network, search, limit, most=most):
            search.report(f"prices below {search.incumbent_cost:.6g}")
            found = True
    if not found:
        min_cost_at_peak(network, search, most=most)
    search.report("least cost at this peak")


def min_cost_at_peak(
    network: CostNetwork,
    search: SearchState,
    limit: float | None = None,
    layers_repeat: bool = False,
    most: float = np.inf,
) -> bool:
    """The least cost found within a limit, by default the peak reached; whether there was an answer (in `search`).

    The peak is the objective; the cost only breaks ties and needs no proof, so the effort is bounded by counts, and
    by `most`.
    """
    assert network.memory is not None and search.assignment is not None
    at_peak = limit is None
    limit = search.incumbent_cost if limit is None else limit
    capped = network.within(limit * (1 + 1e-9))
    large, whole = layers_repeat and network.is_large(search.effort), search.effort
    most = min(most, _SHARE_FOR_TIES * whole.spent if large else np.inf)
    inner = SearchState(
        search.deadline,
        max(search.gap, _COST_GAP if large else _SMALL_COST_GAP),
        lambda text: search.report(f"{text} (time cost {inner.incumbent_cost:.6g}, bound {inner.bound:.6g})"),
        network.size,
        prices=search.prices,
        known=search.known,
        unlimited=search.unlimited,
        effort=whole.at_most(most),
    )
    try:
        solve_limited(capped, inner, tie_break_only=True, layers_repeat=layers_repeat)
    except MemoryBudgetError:  # not found in the rounds given: keep what there is
        pass
    except KeyboardInterrupt:
        search.report("interrupted")
    if inner.assignment is None or (at_peak and inner.incumbent_cost > evaluate(network, search.assignment)):
        return False
    search.assignment = inner.assignment
    search.incumbent_cost = peak(network, search.assignment)
    return True
