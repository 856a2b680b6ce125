"""A network reduced with its memory preserved: its core under prices per byte, and the way back to all variables.

The reductions that preserve memory (contraction, dominance in cost *and* bytes, elimination of what holds nothing) are made
once, before any price. A price per byte at each key time is then a unary cost of each core state, and the core a cost
network of its own.

Example: states (cost 0, 8 bytes) and (cost 6, 2 bytes), limit 5: at the price 1 both cost 8 (less 5 for the limit).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jshard._core.arrays import Floats, Ints
from jshard._core.errors import MemoryBudgetError
from jshard._search.branch_and_bound import branch_and_bound
from jshard._search.cost_network import CostNetwork, Memory
from jshard._search.effort import Effort
from jshard._search.exact.reduce import reduce
from jshard._search.exact.table_pool import TablePool
from jshard._search.exact.working_network import Contradiction, WorkingNetwork, working_network
from jshard._search.memory.key_times import (
    CoreMemory,
    KeyTimes,
    core_memory,
    guard_memory,
    sum_over_intervals,
    usage_range,
)
from jshard._search.primal.local_search import CoreProblem, core_problem
from jshard._search.search_state import Reduction, SearchState, reconstruct


@dataclass(frozen=True)
class ReducedProblem:
    """A network reduced with its memory preserved."""

    graph: WorkingNetwork
    core_network: WorkingNetwork  # the core alone
    core: CoreProblem
    memory: CoreMemory


def reduced_problem(
    network: CostNetwork, clock: KeyTimes, limit: float | None, tables: TablePool | None = None
) -> ReducedProblem:
    """Reduce a network, preserving memory; states that cannot fit are forbidden.

    Arguments:

    - `network`: with a memory.
    - `clock`: the key times.
    - `limit`: bytes; None for no limit.
    - `tables`: the pool for its tables; None for one on the costs' quantum.

    Raises `MemoryBudgetError` where nothing fits, `Contradiction` where no assignment has finite cost.
    """
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
    core_network = graph.fork()
    return ReducedProblem(graph, core_network, core_problem(core_network), core_memory(graph, memory, clock))


def forbid_infeasible_states(graph: WorkingNetwork, memory: Memory, clock: KeyTimes, limit: float) -> None:
    """Forbid states that exceed the limit even when everything else holds its least (in place)."""
    least, most = usage_range(memory)
    profile = sum_over_intervals(clock.start, clock.end, least, len(clock.times))
    fullest = float(profile.max(initial=0.0))
    if fullest > limit:
        at = int(profile.argmax())
        raise limit_too_small(memory, limit, float(profile[at]), int(clock.times[at]))
    tables, core = graph.tables, set(graph.core)
    # Else no state exceeds the limit, at any time.
    may_exceed = (clock.start < clock.end) & (most - least + fullest > limit)
    for h in np.flatnonzero(may_exceed).tolist():
        v, a, b = int(memory.interval_variable[h]), int(clock.start[h]), int(clock.end[h])
        if v in core:
            usage = memory.usage_tables[memory.interval_table[h]]
            amount = usage[tables.subsets.arrays[graph.states[v]]]
            # Of the variable's other intervals the least is counted, in whatever state that is: never too much.
            over = amount - amount.min() + profile[a:b].max() > limit
            if over.any():
                graph.add_unary(v, tables.table_id(np.where(over, np.inf, 0.0)))


def limit_too_small(memory: Memory, limit: float, least: float, when: int) -> MemoryBudgetError:
    """The error for a limit below the least that any assignment holds at a time."""
    live = (memory.intervals[:, 0] <= when) & (when < memory.intervals[:, 1])
    amounts, _ = usage_range(memory)
    of_variable = np.bincount(memory.interval_variable[live], amounts[live])
    top = np.argsort(-of_variable, kind="stable")[:5].tolist()
    return MemoryBudgetError(
        f"the memory limit of {limit:.6g} bytes cannot be kept: any assignment holds {least:.6g} "
        f"bytes or more",
        where=f"time {when}; the largest there are variables {', '.join(map(str, top))}",
        fix=f"a limit of {least:.6g} bytes or more",
    )


def priced_core(
    problem: ReducedProblem, multipliers: Floats, tables: TablePool | None = None
) -> WorkingNetwork:
    """The core with every state charged for its bytes; arguments as of `solve_lagrangian`."""
    core_network = problem.core_network
    graph = core_network.fork(tables or core_network.tables.copy())
    prices = problem.memory.state_prices(multipliers)
    offsets = problem.memory.state_offsets.tolist()
    for v, a, b in zip(graph.core, offsets[:-1], offsets[1:], strict=True):
        price = prices[a:b]
        if price.any():
            graph.add_unary(v, graph.tables.quantized_table_id(price))
    return graph


@dataclass(frozen=True)
class LagrangianAnswer:
    """The answer to a priced problem: core states, None where none was found, and a bound on the priced cost."""

    states: list[int] | None
    bound: float


def solve_lagrangian(
    problem: ReducedProblem,
    multipliers: Floats,
    search: SearchState,
    max_rounds: int,
    tables: TablePool | None = None,
    effort: Effort | None = None,
) -> LagrangianAnswer:
    """Solve the core with every state charged for its bytes.

    Arguments:

    - `problem`: the core.
    - `multipliers`: price of a byte at each key time.
    - `search`: for its deadline and its effort.
    - `max_rounds`: rounds of message passing at most.
    - `tables`: a copy of the core's, which keeps what is computed here; None for one that does not.
    - `effort`: in place of that of the search.
    """
    graph = priced_core(problem, multipliers, tables)
    effort = effort or search.effort
    inner = SearchState(search.deadline, 1e-6, lambda _: None, search.num_variables, effort=effort)
    branch_and_bound(inner, graph, max_rounds=max_rounds, may_branch=False)
    assignment = inner.assignment
    if assignment is None:
        return LagrangianAnswer(None, inner.bound)
    return LagrangianAnswer(core_states(problem, assignment), inner.bound)


def lift_core(problem: ReducedProblem, states: list[int], num_variables: int) -> Ints:
    """The assignment of all variables from the core's states."""
    assignment = np.zeros(num_variables, dtype=np.int64)
    core_network = problem.core_network
    subsets = core_network.tables.subsets.arrays
    for v, s in zip(core_network.core, states, strict=True):
        assignment[v] = subsets[core_network.states[v]][s]
    return reconstruct((Reduction(problem.graph, ()),), assignment)


def core_states(problem: ReducedProblem, assignment: Ints) -> list[int]:
    """The core's states of an assignment; of a variable whose state was removed, that of least cost alone."""
    network = problem.core_network
    out = []
    for v, costs in zip(network.core, problem.core.unary, strict=True):
        position = network.tables.subset_positions(network.states[v]).get(int(assignment[v]))
        out.append(int(costs.argmin()) if position is None else position)
    return out
