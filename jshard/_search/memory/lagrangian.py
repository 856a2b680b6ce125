"""Memory: least cost within a limit, and least peak, by multipliers on the key times.

Problem.  At no time may the live tensors hold more than the limit; that couples everything.

Idea.  Price a byte at each key time.  The priced problem has no coupling, so the ladder solves it, and
(its bound - prices x limit) is a lower bound for the limited problem whatever the prices.  Raise prices
where the priced answer is over, lower them where it has room (subgradient steps of Polyak's length, which
use the best answer known).  Every priced answer is repaired and filled into one that fits (``budget_repair.py``).
What remains between the best answer and the best bound is printed, never hidden.

The reductions that keep memory intact (aliases, dominance in cost *and* bytes, elimination of what holds
nothing) are done once, before any price.

Worked case.  States (cost 0, 8 bytes), (cost 6, 2 bytes), limit 5: the price 1 per byte makes both cost
8 - 5 = 3, so the bound is 3 and the answer 6; the gap is the price of not mixing states.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jshard._core.errors import MemoryBudgetError
from jshard._search.branch_and_bound import Reduction, SearchState, branch_and_bound, reconstruct
from jshard._search.cost_network import CostNetwork, Floats, Ints, Memory
from jshard._search.exact.reduce import Contradiction, WorkingNetwork, reduce, working_network
from jshard._search.exact.table_pool import TablePool
from jshard._search.memory.ilp import solve_small_core
from jshard._search.memory.key_times import (
    CoreMemory,
    KeyTimes,
    core_memory,
    guard_memory,
    key_times_above,
    sum_over_intervals,
    usage_range,
)
from jshard._search.primal.budget_repair import budgeted_core, priced_forest_search, repair_then_descend
from jshard._search.primal.local_search import CoreProblem, core_problem


@dataclass(frozen=True)
class ReducedProblem:
    """A network reduced with its memory intact."""

    graph: WorkingNetwork
    core_network: WorkingNetwork  # the core alone
    core: CoreProblem
    memory: CoreMemory

    @property
    def reduction(self) -> Reduction:
        return Reduction(self.graph, ())


def reduced_problem(
    network: CostNetwork, clock: KeyTimes, limit: float | None, tables: TablePool | None = None
) -> ReducedProblem:
    """Reduce a network, keeping what memory needs; states that cannot fit at all are forbidden."""
    memory = network.memory
    assert memory is not None
    graph = working_network(network, tables)
    guard_memory(graph, memory, clock)
    try:
        if limit is not None:
            forbid_infeasible_states(graph, memory, clock, limit)
        reduce(graph)
    except Contradiction as error:
        if limit is None:
            raise
        raise MemoryBudgetError(
            f"the memory limit of {limit:.6g} bytes cannot be kept: what fits at each time does not fit together",
            where=error.where,
            fix="a larger limit; objective 'peak' tells the least",
        ) from None
    rest = graph.fork()
    return ReducedProblem(graph, rest, core_problem(rest), core_memory(graph, memory, clock))


def forbid_infeasible_states(graph: WorkingNetwork, memory: Memory, clock: KeyTimes, limit: float) -> None:
    """Forbid states over the limit even when everything else holds its least."""
    least, _ = usage_range(memory)
    profile = sum_over_intervals(clock.start, clock.end, least, len(clock.times))
    if len(profile) and profile.max() > limit:
        at = int(profile.argmax())
        raise limit_too_small(memory, limit, float(profile[at]), int(clock.times[at]))
    tables, core = graph.tables, set(graph.core)
    for h in np.flatnonzero(clock.start < clock.end).tolist():
        v, a, b = int(memory.interval_variable[h]), int(clock.start[h]), int(clock.end[h])
        if v in core:
            amount = memory.usage_tables[memory.interval_table[h]][tables.subsets.arrays[graph.states[v]]]
            # No state is forbidden too many: the least of its other holdings is counted, in whatever state that is.
            over = amount - amount.min() + profile[a:b].max() > limit
            if over.any():
                graph.add_unary(v, tables.table_id(np.where(over, np.inf, 0.0)))


def limit_too_small(memory: Memory, limit: float, least: float, when: int) -> MemoryBudgetError:
    live = (memory.intervals[:, 0] <= when) & (when < memory.intervals[:, 1])
    small, _ = usage_range(memory)
    top = np.argsort(-np.bincount(memory.interval_variable[live], small[live]), kind="stable")[:5].tolist()
    return MemoryBudgetError(
        f"the memory limit of {limit:.6g} bytes cannot be kept: any assignment holds {least:.6g} "
        f"bytes or more",
        where=f"time {when}; the largest there are variables {', '.join(map(str, top))}",
        fix=f"a limit of {least:.6g} bytes or more",
    )


@dataclass
class LagrangianAnswer:
    """The answer to a priced problem: core states, and a bound on the priced cost."""

    chosen: list[int] | None
    bound: float


def solve_lagrangian(
    model: ReducedProblem, multipliers: Floats, search: SearchState, most: int
) -> LagrangianAnswer:
    """Solve the core with every state charged for its bytes."""
    graph = model.core_network.fork(model.core_network.tables.copy())
    flat = model.memory.state_prices(multipliers)
    for v, a, b in zip(
        graph.core, model.memory.first[:-1].tolist(), model.memory.first[1:].tolist(), strict=True
    ):
        part = flat[a:b]
        if part.any():
            graph.add_unary(v, graph.tables.quantized_table_id(part))
    inner = SearchState(search.deadline, 1e-6, lambda _: None, search.num_variables)
    branch_and_bound(inner, (), graph, max_rounds=most, split=False)
    if inner.assignment is None:
        return LagrangianAnswer(None, inner.bound)
    where = model.core_network.tables.subset_positions
    chosen = [where(model.core_network.states[v])[int(inner.assignment[v])] for v in model.core_network.core]
    return LagrangianAnswer(chosen, inner.bound)


def lift_core(model: ReducedProblem, chosen: list[int], variables: int) -> Ints:
    """Everybody's states from the core's."""
    assignment = np.zeros(variables, dtype=np.int64)
    subsets = model.core_network.tables.subsets.arrays
    for v, s in zip(model.core_network.core, chosen, strict=True):
        assignment[v] = subsets[model.core_network.states[v]][s]
    return reconstruct((model.reduction,), assignment)


def has_integral_costs(network: CostNetwork) -> float:
    """1 when all costs are whole numbers (bounds may then be rounded up), else 0."""
    for table in (*network.unary, *network.pairwise):
        finite = table[np.isfinite(table)]
        if (finite != np.round(finite)).any():
            return 0.0
    return 1.0


class DualAscent:
    """Prices that climb the dual: Polyak steps with momentum, halved when they stop helping."""

    def __init__(self, times: int) -> None:
        self.best = self.prices = np.zeros(times)
        self.bound = -np.inf
        self.speed = 1.0
        self.stuck = 0
        self.direction = np.zeros(times)

    def record(self, value: float) -> None:
        """``value`` is the bound that the present prices prove."""
        if value > self.bound:
            self.bound, self.best, self.stuck = value, self.prices, 0
        else:
            self.stuck += 1

    def step(self, value: float, slope: Floats, goal: float, unit: float) -> None:
        """``slope``: bytes over the limit, over ``unit``; ``goal``: the best answer known."""
        if self.stuck >= 4:
            self.speed, self.stuck, self.prices = self.speed / 2, 0, self.best
            self.direction = np.zeros_like(slope)
        slope = np.where((self.prices <= 0) & (slope < 0), 0.0, slope)
        self.direction = slope + 0.7 * self.direction
        length = float(slope @ slope)
        if length > 0 and goal > value:
            step = 0.5 * self.speed * (goal - value) / length
            self.prices = np.maximum(0.0, self.prices + step * self.direction / unit)

    def escalate(self, value: float, slope: Floats, unit: float) -> None:
        """No answer is known yet: four times the prices, and a first price where bytes are over."""
        over = np.maximum(slope, 0.0)
        length = float(over @ over)
        first = (abs(value) + 1.0) / length * over / unit if length > 0 else over
        self.prices = np.maximum(4.0 * self.prices, first)


_ALL = 1e12  # a price of the whole limit, over all other costs together, at which these do not count any more
# Rounds times variables of the core: some seconds of either on a core of 2026. The effort is counted, so that a slow
# machine finds what a fast one does; a limit in seconds, where there is one, ends it earlier.
_PRICES = 40_000
_MOVES = 60_000


def effort(variables: int) -> tuple[int, int]:
    """Rounds of prices, and of block moves after them, for a core of so many variables.

    >>> effort(10), effort(1_000), effort(100_000)
    ((400, 6000), (40, 60), (20, 30))
    """
    n = max(1, variables)
    return int(np.clip(_PRICES // n, 20, 400)), int(np.clip(_MOVES // n, 30, 6000))


def solve_limited(network: CostNetwork, search: SearchState, *, tie_break_only: bool = False) -> None:
    """Least cost within the limit; fills in ``search``.

    First prices, then block moves, as many of both as `effort` says. Between them, a small core that is left with a
    gap is given to an integer program. `rough` is for costs that only break ties: less of each, and no program.
    """
    memory = network.memory
    assert memory is not None and memory.limit is not None
    limit = memory.limit
    unit = max(limit, 1.0)
    clock = key_times_above(memory, limit)
    if not len(clock.times):
        branch_and_bound(search, (), working_network(network))
        return
    model = reduced_problem(network, clock, limit)
    pack = budgeted_core(model.core, model.memory, limit)
    search.report(
        f"reductions that keep memory: {network.size} variables -> {len(model.core.variables)}; "
        f"{len(clock.times)} key times can exceed the limit"
    )
    prices, moves = effort(len(model.core.variables))
    if tie_break_only:
        prices, moves = int(np.clip(prices // 2, 8, 40)), min(moves, 120)
    whole_costs = has_integral_costs(network)
    ascent = DualAscent(len(clock.times))
    best: list[int] | None = None
    # Sweeps per price: fewer on a large core.  Counts and not seconds, so that two runs agree.
    most = int(np.clip(100_000 // max(1, len(model.core.variables)), 20, 60))
    rounds = 0

    def keep(chosen: list[int], cost: float) -> None:
        nonlocal best
        if cost < search.incumbent_cost:
            best = list(chosen)
            search.incumbent_cost = cost
            search.assignment = lift_core(model, best, network.size)

    while not search.out_of_time and rounds < prices:
        answer = solve_lagrangian(model, ascent.prices, search, most)
        rounds += 1
        value = answer.bound + float(ascent.prices @ (model.memory.constant - limit))
        ascent.record(value)
        # Whole-number costs: so is the optimum (the margin covers the sums' rounding).
        proved = float(np.ceil(value - 1e-6 - 1e-11 * abs(value))) if whole_costs else value
        search.bound = min(max(search.bound, proved), search.incumbent_cost)
        if answer.chosen is None:
            ascent.stuck = 4
            ascent.step(value, np.zeros_like(ascent.prices), value, unit)
            continue
        slope = (model.memory.live_bytes(answer.chosen) - limit) / unit
        trial = list(answer.chosen)
        keep(trial, repair_then_descend(pack, trial, search.deadline))
        if best is not None:
            trial = list(best)
            keep(
                trial,
                priced_forest_search(
                    pack,
                    trial,
                    ascent.best,
                    search.rng,
                    deadline=search.deadline,
                    target=search.bound,
                    rounds=5,
                ),
            )
        if search.closed(search.bound):
            break
        if (
            best is None
            and float(ascent.prices.max(initial=0.0)) * unit > _ALL * model.core.infeasibility_penalty
        ):
            break  # bytes are all that has counted for a while, and nothing was found that fits
        if rounds % 10 == 1:
            search.report(f"prices, round {rounds}: {int((slope > 0).sum())} key times over")
        if best is None:
            ascent.escalate(value, slope, unit)
        else:
            ascent.step(value, slope, search.incumbent_cost, unit)
        if ascent.speed < 1e-4:
            break
    search.report(f"prices, round {rounds}")
    found = None if tie_break_only else solve_small_core(pack, search)
    if found:
        search.bound = min(max(search.bound, found.bound), search.incumbent_cost)
        if found.chosen is not None:
            keep(found.chosen, repair_then_descend(pack, found.chosen, search.deadline))
        search.report("integer program")
    if best is None and not search.out_of_time:
        raise MemoryBudgetError(
            f"no assignment within {limit:.6g} bytes was found, and none is known to exist",
            where=f"{len(clock.times)} key times",
            fix="a larger limit; objective 'peak' tells the least",
        )
    # A program solved to HiGHS' tolerances leaves nothing to move for, though the bound is short by them.
    solved = found is not None and found.solved
    if best is not None and not solved and not search.closed(search.bound):
        keep(
            best,
            priced_forest_search(
                pack,
                best,
                ascent.best,
                search.rng,
                deadline=search.deadline,
                target=search.bound,
                rounds=moves,
            ),
        )
        search.report("priced blocks")
