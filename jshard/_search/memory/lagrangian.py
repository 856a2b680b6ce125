"""Lagrangian relaxation of the memory limit: subgradient ascent (Held and Karp 1971, Polyak 1969) and primal repair.

The limit couples all variables that are live at one time. With a price lambda_t >= 0 per byte at each key time the
problem decomposes: for any prices

    min over x of cost(x) + sum over t of lambda_t (bytes_t(x) - limit)

is a lower bound on the least cost within the limit, and branch and bound solves it as a cost network of its own. The
prices rise where the priced answer exceeds the limit and fall where it does not: subgradient steps of Polyak's length
towards the best known cost, with momentum. Every priced answer is repaired into one within the limit
(`budget_repair`). The gap that is left is reported.

Example: states (cost 0, 8 bytes) and (cost 6, 2 bytes), limit 5: the price 1 per byte makes both cost 8 - 5 = 3, so
the bound is 3 and the answer 6; the gap is what mixing states would save.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from jshard._core.arrays import Ints
from jshard._core.errors import MemoryBudgetError
from jshard._search.branch_and_bound import branch_and_bound
from jshard._search.cost_network import CostNetwork
from jshard._search.effort import ENTRIES_PER_SECOND
from jshard._search.exact.working_network import Contradiction, working_network
from jshard._search.integer_program import num_columns
from jshard._search.memory.answer_fusion import fused_network
from jshard._search.memory.budget_repair import (
    BudgetedCore,
    budgeted_core,
    priced_forest_search,
    repair_then_descend,
)
from jshard._search.memory.dual_ascent import DualAscent
from jshard._search.memory.ilp import solve_small_core
from jshard._search.memory.key_times import KeyTimes, key_times_above
from jshard._search.memory.price_cuts import (
    EFFORT_WITHOUT_ANSWER,
    OVERDUE,
    ROUNDS,
    TIE_BREAK_ROUNDS,
    TIE_BREAK_ROUNDS_IF_LARGE,
    PriceCuts,
)
from jshard._search.memory.reduced_problem import (
    ReducedProblem,
    core_states,
    lift_core,
    reduced_problem,
    solve_lagrangian,
)
from jshard._search.memory.restricted_program import (
    RESTRICTED_COLUMNS,
    largest_restriction,
    restricted_core,
    state_bounds,
)
from jshard._search.search_state import GapProgress, SearchState, Wanted


def has_integral_costs(network: CostNetwork) -> bool:
    """Whether all finite costs are whole numbers (bounds may then be rounded up)."""
    finite = [table[np.isfinite(table)] for table in (*network.unary, *network.pairwise)]
    return all(bool((costs == np.round(costs)).all()) for costs in finite)


# A price of the whole limit, over the penalty of a forbidden pair, at which costs do not count any more.
_OVERWHELMING_PRICE = 1e12
# Rounds times variables of the core: some seconds of either on a core of 2026. The effort is counted, so that a slow
# machine finds what a fast one does; a limit in seconds, where there is one, ends it earlier.
_PRICED_VARIABLES = 40_000
_MOVED_VARIABLES = 60_000
# Rounds of prices in which the gap does not shrink to that share of itself, after which they end; fewer where prices on few
# times came before.
_SHRINKS, _PATIENCE, _PATIENCE_AFTER = 0.98, 20, 4
# Variables of a core below which prices at all times follow those on few times that found an answer. In larger ones they
# took up to three fifths of the seconds and raised bounds by 0.07% at most: without them, training steps of two layers took
# 9 s in place of 35, 18 in place of 42, with the same plans.
_ASCENT_AFTER_BELOW = 1000
# The same where only the bound is of use; and the share to which the cost has to shrink where only the answer is.
_PATIENCE_FOR_BOUND, _CHEAPER = 10, 0.995
# Columns above which an integer program took 20 to 30 s; one of 10,000 took 3 to 12. And above which 6,000 are too few
# of them: of two Llama layers and of LoRA, with 100,000, they took 1 to 4 s and gained nothing.
_MANY_COLUMNS, _TOO_MANY_COLUMNS = 12_000, 40_000
# Of the gap of the best plan known: what an integer program of many columns has to be able to close.
_WORTH_PROVING = 0.5
_STEP_SCALE_LIMIT = 1e-4  # steps shorter than this share of Polyak's end the ascent


def effort(variables: int) -> tuple[int, int]:
    """Rounds of prices, and of forest moves after them, for a core of so many variables.

    >>> effort(10), effort(1_000), effort(100_000)
    ((400, 6000), (40, 60), (20, 30))
    """
    n = max(1, variables)
    return int(np.clip(_PRICED_VARIABLES // n, 20, 400)), int(np.clip(_MOVED_VARIABLES // n, 30, 6000))


PRICE_CUTS_FROM = 200  # variables from which on prices on few times come first
# Rounds of prices, and of forest moves, for the states of some answers.
_FUSION_PRICES, _FUSION_MOVES = 4, 40
# Table entries of a fusion where the effort is spent: a poor answer is all there may be.
_LAST_FUSION = 0.5 * ENTRIES_PER_SECOND


def fuse(
    network: CostNetwork,
    answers: Sequence[Ints],
    search: SearchState,
    bound: float = -np.inf,
    prices_only: bool = False,
) -> Ints | None:
    """An assignment within the limit of the states that some answers have; None where none was found.

    `search` gives the gap that suffices, the deadline and the effort, of which some is left in any case; no assignment
    costs less than `bound`. With `prices_only` neither an integer program nor forest moves follow the prices.
    """
    effort = search.effort
    if effort.exhausted:
        effort = effort.at_least(_LAST_FUSION)
    fused = fused_network(network, answers)
    memory = fused.network.memory
    assert memory is not None and memory.limit is not None
    inner = SearchState(
        search.deadline,
        search.gap,
        lambda _: None,
        fused.network.size,
        bound=bound,
        effort=effort,
    )
    clock = key_times_above(memory, memory.limit)
    if not len(clock.times) or not len(fused.variables):
        return None
    try:
        problem = reduced_problem(fused.network, clock, memory.limit)
    except (MemoryBudgetError, Contradiction):
        return None
    inner.spend_on(problem.graph)
    limited = _LimitedSearch(inner, problem, memory.limit, integral_costs=False)
    limited.ascend(_FUSION_PRICES)
    if (
        not prices_only
        and not inner.gap_closed(inner.bound)
        and not limited.solve_integer_program()
        and limited.states is not None
    ):
        limited.move_forests(limited.states, _FUSION_MOVES)
    return None if inner.assignment is None else fused.lift(inner.assignment)


def solve_limited(
    network: CostNetwork,
    search: SearchState,
    *,
    tie_break_only: bool = False,
    layers_repeat: bool = False,
    only: Wanted = None,
) -> None:
    """The least cost within the memory limit; the result is in `search`.

    First prices, then forest moves, as many of both as `effort` says. Between them, a small core that is left with a
    gap is given to an integer program, of a larger one some states. Where layers repeat, prices on few times come before.
    Nothing follows them in a large network, and no prices at all times in a core of `_ASCENT_AFTER_BELOW` variables and
    more, if they found an answer.

    Arguments:

    - `network`: with a memory and a limit.
    - `search`: receives the answer and the bound.
    - `tie_break_only`: the costs only break ties: fewer rounds, and no integer program.
    - `layers_repeat`: whether layers are expected to.
    - `only`: what is of use, if not both: the answer, or the bound (`search.known` has a good answer).

    Raises `MemoryBudgetError` where nothing fits or nothing that fits was found.
    """
    memory = network.memory
    assert memory is not None and memory.limit is not None
    clock = key_times_above(memory, memory.limit)
    if not len(clock.times):
        branch_and_bound(search, working_network(network))
        return
    priced_before = layers_repeat and network.size >= PRICE_CUTS_FROM
    large = network.is_large(search.effort)

    @functools.cache  # made where it is of use: reductions that keep memory take as long as some rounds of prices
    def reduced() -> _LimitedSearch:
        return _LimitedSearch.of(network, search, clock)

    if priced_before:
        rounds = (TIE_BREAK_ROUNDS_IF_LARGE if large else TIE_BREAK_ROUNDS) if tie_break_only else ROUNDS

        def combined(answers: Sequence[Ints]) -> Ints | None:
            combines = only != "bound" and not (tie_break_only and large)
            return fuse(network, answers, search, search.bound) if combines else None

        def repaired(answer: Ints) -> Ints | None:
            return None if large or only == "bound" else reduced().repaired(answer)

        PriceCuts(network, search, memory.limit, combined, rounds, repaired, only == "bound").run()
        if search.useless:
            raise _nothing_found(memory.limit, "prices on the times that exceed it")
        if search.gap_closed(search.bound) or (large and search.has_answer):
            return
        if large:
            raise _nothing_found(memory.limit, "prices on the times that exceed it")
    limited = reduced()
    size = len(limited.problem.core.variables)
    prices, moves = effort(size)
    if tie_break_only:
        prices, moves = int(np.clip(prices // 2, 8, 40)), min(moves, 120)
    if priced_before:
        limited.begin_with_prices_on_few_times(clock)
    if not (priced_before and search.has_answer):
        patience = _PATIENCE_AFTER if priced_before else _PATIENCE_FOR_BOUND if only == "bound" else _PATIENCE
        limited.ascend(prices, patience, until_found=not tie_break_only, answer_only=only == "answer")
    elif size < _ASCENT_AFTER_BELOW:
        limited.ascend(prices, _PATIENCE_AFTER, answer_only=only == "answer")
    if search.useless:
        raise _nothing_found(memory.limit, f"{len(clock.times)} key times")
    solved = not tie_break_only and limited.solve_integer_programs(only, some_states=layers_repeat)
    if not search.has_answer and not search.is_late:
        raise _nothing_found(memory.limit, f"{len(clock.times)} key times")
    if only == "bound":
        return
    # A program solved to HiGHS' tolerances leaves nothing to move for, though the bound is short by them.
    if limited.states is not None and not solved and not search.gap_closed(search.bound):
        limited.move_forests(limited.states, moves)
        search.report("priced blocks")


def _nothing_found(limit: float, where: str) -> MemoryBudgetError:
    return MemoryBudgetError(
        f"no assignment within {limit:.6g} bytes was found, and none is known to exist",
        where=where,
        fix="a larger limit; objective 'peak' tells the least",
    )


class _LimitedSearch:
    """The stages of `solve_limited` on a reduced problem; answers and bounds go to `search`."""

    def __init__(
        self, search: SearchState, problem: ReducedProblem, limit: float, integral_costs: bool
    ) -> None:
        self.search, self.problem, self.limit = search, problem, limit
        self.budgeted: BudgetedCore = budgeted_core(problem.core, problem.memory, limit)
        self.integral_costs = integral_costs
        self.ascent = DualAscent(problem.memory.num_times, max(limit, 1.0))
        self.states: list[int] | None = None  # the best answer's core states

    @classmethod
    def of(cls, network: CostNetwork, search: SearchState, clock: KeyTimes) -> _LimitedSearch:
        """The stages of a network with a limit, after the reductions that preserve memory."""
        memory = network.memory
        assert memory is not None and memory.limit is not None
        problem = reduced_problem(network, clock, memory.limit)
        search.spend_on(problem.graph)
        search.report(
            f"reductions that keep memory: {network.size} variables -> {len(problem.core.variables)}; "
            f"{len(clock.times)} key times can exceed the limit"
        )
        return cls(search, problem, memory.limit, has_integral_costs(network))

    def begin_with_prices_on_few_times(self, clock: KeyTimes) -> None:
        """Begin with the prices and the answer of the search; a price between two key times counts at the later one."""
        search, problem = self.search, self.problem
        if search.prices is not None:
            at = np.minimum(np.searchsorted(clock.times, search.prices.times), len(clock.times) - 1)
            per_byte = np.bincount(at, search.prices.per_byte, len(clock.times)).astype(np.float64)
            self.ascent.best = self.ascent.prices = per_byte
        if search.assignment is not None:
            states = core_states(problem, search.assignment)
            cost = repair_then_descend(self.budgeted, states, search.deadline)
            if np.isfinite(cost):
                self.states = states
                self._keep(states, cost)

    def repaired(self, assignment: Ints) -> Ints | None:
        """An assignment within the limit near one that exceeds it; None where none is found."""
        states = core_states(self.problem, assignment)
        if not np.isfinite(repair_then_descend(self.budgeted, states, self.search.deadline)):
            return None
        return lift_core(self.problem, states, self.search.num_variables)

    def ascend(
        self,
        max_prices: int,
        patience: int = _PATIENCE,
        until_found: bool = True,
        answer_only: bool = False,
    ) -> None:
        """Ascend the dual, and repair every priced answer, until the gap is closed or nothing helps any more.

        `patience`: rounds in which the gap hardly shrinks after which that is so. `until_found`: for some rounds after the
        effort was spent too, while no answer is known. `answer_only`: it is the cost that has to shrink; better bounds
        are of no use.
        """
        search, ascent, memory = self.search, self.ascent, self.problem.memory
        # Rounds of message passing per price: fewer on a large core. Counts and not seconds, so that two runs agree.
        max_rounds = int(np.clip(100_000 // max(1, len(self.problem.core.variables)), 20, 60))
        rounds, progress = 0, GapProgress(_CHEAPER if answer_only else _SHRINKS, patience)
        overdue = 0  # rounds after the effort was spent
        while rounds < max_prices and not (
            search.is_late or overdue >= OVERDUE
            if until_found and self.states is None
            else search.out_of_time
        ):
            overdue += search.effort.exhausted
            proved = 0.0 if answer_only else search.bound
            if search.has_answer and progress.stalled(search.incumbent_cost - proved):
                break
            effort = search.effort
            if self.states is None:
                effort = effort.at_least(EFFORT_WITHOUT_ANSWER)
            answer = solve_lagrangian(self.problem, ascent.prices, search, max_rounds, effort=effort)
            rounds += 1
            bound = answer.bound + float(ascent.prices @ (memory.constant - self.limit))
            ascent.record(bound)
            self._raise_bound(bound)
            if answer.states is None:
                ascent.restart()
                continue
            excess = (memory.live_bytes(answer.states) - self.limit) / ascent.unit
            self._improve(list(answer.states))
            if search.useless or search.gap_closed(search.bound):
                break
            if self.states is None and self._only_bytes_count():
                break  # they have been all that counts for a while, and nothing was found that fits
            if rounds % 10 == 1:
                search.report(f"prices, round {rounds}: {int((excess > 0).sum())} key times over")
            if self.states is None:
                ascent.escalate(bound, excess)
            else:
                ascent.step(bound, excess, search.incumbent_cost)
            if ascent.step_scale < _STEP_SCALE_LIMIT:
                break
        search.report(f"prices, round {rounds}")

    def solve_integer_programs(self, only: Wanted, some_states: bool) -> bool:
        """Solve a core with a gap as integer programs; whether the whole one was solved to the end.

        Of a larger core the states of least reduced cost come first where `some_states` says so. The whole follows where a
        bound is of use that can close much of the gap of what is known, or where an effort was given that suffices.
        """
        search, columns = self.search, num_columns(self.budgeted.core)
        if not some_states or self.states is None or not _MANY_COLUMNS < columns <= _TOO_MANY_COLUMNS:
            return self.solve_integer_program()
        self._solve_restricted_program(self.states)
        known = search.incumbent_cost if search.known_cost == np.inf else search.known_cost
        least_rise = _WORTH_PROVING * (known - search.bound)
        closes = only != "answer" and search.incumbent_cost - search.bound >= least_rise
        if not closes and search.effort.limit == np.inf:
            return False
        return self.solve_integer_program()

    def _solve_restricted_program(self, answer: list[int]) -> None:
        """Solve the integer program of the states of least reduced cost under the best prices, and of an answer."""
        search, problem = self.search, self.budgeted
        if search.out_of_time or search.gap_closed(search.bound):
            return
        bounds, proved = state_bounds(self.problem, self.ascent.best, self.limit, search)
        self._raise_bound(proved)
        most = search.incumbent_cost - bounds.base
        kept = largest_restriction(problem, bounds, answer, most, RESTRICTED_COLUMNS)
        result = solve_small_core(restricted_core(problem, kept), search)
        if result is None:
            return
        if result.states is not None:
            states = [int(of[s]) for of, s in zip(kept, result.states, strict=True)]
            self._keep(states, repair_then_descend(problem, states, search.deadline))
        self._raise_bound(min(result.bound, bounds.least_of_others(kept)))
        search.report("integer program of some states")

    def solve_integer_program(self) -> bool:
        """Solve a small core with a gap as an integer program; whether that was done to the end."""
        search = self.search
        result = solve_small_core(self.budgeted, search)
        if result is None:
            return False
        search.bound = min(max(search.bound, result.bound), search.incumbent_cost)
        if result.states is not None:
            self._keep(result.states, repair_then_descend(self.budgeted, result.states, search.deadline))
        search.report("integer program")
        return result.solved

    def move_forests(self, states: list[int], moves: int) -> None:
        """Improve an answer within the limit by forest moves under the best prices."""
        search = self.search
        states = list(states)
        cost = priced_forest_search(
            self.budgeted,
            states,
            self.ascent.best,
            search.rng,
            deadline=search.deadline,
            effort=search.effort,
            target=search.bound,
            moves=moves,
        )
        self._keep(states, cost)

    def _raise_bound(self, bound: float) -> None:
        """Take over a bound, rounded up where all costs are whole numbers (the margin covers the sums' rounding)."""
        proved = float(np.ceil(bound - 1e-6 - 1e-11 * abs(bound))) if self.integral_costs else bound
        self.search.bound = min(max(self.search.bound, proved), self.search.incumbent_cost)

    def _improve(self, states: list[int]) -> None:
        """Repair a priced answer (in place), then move forests of the best answer."""
        self._keep(states, repair_then_descend(self.budgeted, states, self.search.deadline))
        if self.states is not None:
            self.move_forests(self.states, 5)

    def _keep(self, states: list[int], cost: float) -> None:
        """Make an answer the incumbent if it costs less."""
        search = self.search
        if cost < search.incumbent_cost:
            self.states = list(states)
            search.incumbent_cost = cost
            search.assignment = assignment = lift_core(self.problem, self.states, search.num_variables)
            if search.on_answer is not None:
                search.on_answer(assignment)

    def _only_bytes_count(self) -> bool:
        highest = float(self.ascent.prices.max(initial=0.0)) * self.ascent.unit
        return highest > _OVERWHELMING_PRICE * self.problem.core.infeasibility_penalty
