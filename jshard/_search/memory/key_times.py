"""Live intervals over the key times: the points in time that can break a memory limit, and who holds what at them.

A training step has tens of thousands of points in time and as many live intervals. Of the times only those matter
at which the set of live intervals is inclusion-maximal (an interval began since the last end: the maximal cliques of
an interval graph, Fulkerson and Gross 1965), and of these only those whose largest conceivable sum exceeds the limit.
Every variable of the core has the intervals (bytes per state of the core variable) of the variables that were
contracted into it; bytes that do not vary are one constant per key time.

Example: of the intervals [0, 3), [1, 2), [2, 4) the live sets are {a}, {a, b}, {a, c}, {c}: key times are 1 and 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jshard._core.arrays import Floats, Ints
from jshard._search.cost_network import Memory, live_bytes
from jshard._search.exact.table_pool import NONE
from jshard._search.exact.working_network import WorkingNetwork


def usage_range(memory: Memory) -> tuple[Floats, Floats]:
    """(H,) least and most bytes of each interval."""
    least = np.array([u.min() for u in memory.usage_tables] or [0.0], dtype=np.float64)
    most = np.array([u.max() for u in memory.usage_tables] or [0.0], dtype=np.float64)
    return least[memory.interval_table], most[memory.interval_table]


def sum_over_intervals(start: Ints, end: Ints, amount: Floats, times: int) -> Floats:
    """(times,) sums of amounts over half-open index intervals."""
    changes = np.bincount(start, amount, times + 1) - np.bincount(end, amount, times + 1)
    return np.cumsum(changes)[:times].astype(np.float64)


def least_conceivable_peak(memory: Memory) -> float:
    """Bytes that every assignment holds at some time: there, every interval with the least that it may have.

    >>> two = Memory(np.array([[0, 2], [1, 3]]), (np.array([4.0, 8.0]),), np.array([0, 1]), np.array([0, 0]), None)
    >>> least_conceivable_peak(two)
    8.0
    """
    clock = key_times_above(memory, -np.inf)
    least, _ = usage_range(memory)
    return float(sum_over_intervals(clock.start, clock.end, least, len(clock.times)).max(initial=0.0))


def first_time(memory: Memory) -> int:
    """The time from which on something is held, from which `live_bytes` counts."""
    lasting = memory.intervals[:, 0] < memory.intervals[:, 1]
    return int(memory.intervals[lasting, 0].min())


def fullest_time(memory: Memory) -> int:
    """The first of the times at which most is held in any case: with the least that each interval may have.

    >>> two = Memory(np.array([[1, 3], [2, 4]]), (np.array([4.0, 8.0]),), np.array([0, 1]), np.array([0, 0]), None)
    >>> first_time(two), fullest_time(two)
    (1, 2)
    """
    return first_time(memory) + int(live_bytes(memory, usage_range(memory)[0]).argmax())


def key_times(memory: Memory) -> Ints:
    """The times at which the set of live intervals is inclusion-maximal, ascending."""
    start, end = memory.intervals[:, 0], memory.intervals[:, 1]
    nonempty = end > start
    begins, ends = np.unique(start[nonempty]), np.unique(end[nonempty])
    # The last begin before each end, once: after it nothing begins before something ends.
    return np.unique(begins[np.searchsorted(begins, ends, side="left") - 1])


@dataclass(frozen=True)
class KeyTimes:
    """The times that matter, and every interval as indices into them."""

    times: Ints  # (T,) ascending
    start: Ints  # (H,)
    end: Ints  # (H,) not before start


def key_times_above(memory: Memory, threshold: float) -> KeyTimes:
    """The key times at which more bytes than `threshold` are conceivable."""

    def indices(times: Ints) -> KeyTimes:
        start = np.searchsorted(times, memory.intervals[:, 0])
        return KeyTimes(times, start, np.maximum(start, np.searchsorted(times, memory.intervals[:, 1])))

    every = indices(key_times(memory))
    _, most = usage_range(memory)
    above = sum_over_intervals(every.start, every.end, most, len(every.times)) > threshold
    return indices(every.times[above])


def guard_memory(graph: WorkingNetwork, memory: Memory, clock: KeyTimes) -> None:
    """Give the reductions a guard for every variable whose bytes at the key times vary (in place)."""
    tables, core = graph.tables, set(graph.core)
    known: dict[tuple[int, int], int] = {}
    guards: dict[int, list[int]] = {}
    lasting = np.flatnonzero(clock.end > clock.start)
    variables, usages = memory.interval_variable[lasting], memory.interval_table[lasting]
    for v, table in zip(variables.tolist(), usages.tolist(), strict=True):
        if v in core:
            key = (table, graph.states[v])
            if key not in known:
                known[key] = tables.memory_guard(memory.usage_tables[table][tables.subsets.arrays[key[1]]])
            of_v = guards.setdefault(v, [])
            if known[key] != NONE and known[key] not in of_v:
                of_v.append(known[key])
    for v, of_v in guards.items():
        graph.memory_guards[v] = tuple(of_v)


@dataclass(frozen=True)
class CoreMemory:
    """Bytes of the core variables' states over the key times.

    Intervals are flattened: interval m belongs to core position `owner[m]`, is live over the key times
    `start[m]:end[m]`, and its bytes per state are `amounts[offset[m] : offset[m + 1]]`.
    """

    owner: Ints
    start: Ints
    end: Ints
    offset: Ints
    amounts: Floats
    state_index: Ints  # entry of `amounts` -> index into all core states end to end
    state_offsets: Ints  # core position -> first of its states end to end
    constant: Floats  # (T,) bytes that do not depend on the core

    @classmethod
    def of(
        cls,
        owner: Ints,
        start: Ints,
        end: Ints,
        amounts: Sequence[Floats],
        sizes: Sequence[int],
        constant: Floats,
    ) -> CoreMemory:
        """The memory of intervals with their bytes per state (`amounts`), of core variables of so many states (`sizes`)."""
        lengths = np.array([len(amount) for amount in amounts], dtype=np.int64)
        offset = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        state_offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        within = np.arange(offset[-1]) - np.repeat(offset[:-1], lengths)
        state_index = np.repeat(state_offsets[owner], lengths) + within
        flat = np.concatenate(amounts) if amounts else np.zeros(0)
        return cls(owner, start, end, offset, flat, state_index, state_offsets, constant)

    @property
    def num_times(self) -> int:
        """The number of key times."""
        return len(self.constant)

    def state_prices(self, multipliers: Floats) -> Floats:
        """The price of every core state (end to end), given a price per byte at each key time."""
        total = np.concatenate([[0.0], np.cumsum(multipliers)])
        per_byte = np.repeat(total[self.end] - total[self.start], np.diff(self.offset))
        prices = np.bincount(self.state_index, per_byte * self.amounts, int(self.state_offsets[-1]))
        return prices.astype(np.float64)

    def live_bytes(self, states: Ints | list[int]) -> Floats:
        """(T,) bytes at the key times, given the states by core position."""
        amount = self.amounts[self.offset[:-1] + np.asarray(states, dtype=np.int64)[self.owner]]
        return self.constant + sum_over_intervals(self.start, self.end, amount, self.num_times)


def merged_states(graph: WorkingNetwork) -> dict[int, Ints]:
    """For every variable its original states aligned with the states of the core variable that it was contracted
    into; for an eliminated one just one of its states."""
    tables = graph.tables
    subsets = tables.subsets.arrays
    aligned: dict[int, Ints] = {v: subsets[graph.states[v]] for v in graph.core}
    for v, neighbours, argmin, contracted in reversed(graph.elimination_stack):
        own = subsets[argmin.states]
        if contracted:
            position = tables.subset_positions(argmin.neighbour_states[0])
            columns = [position[int(s)] for s in aligned[neighbours[0]]]
            costs = tables.arrays[argmin.unary][:, None] + tables.arrays[argmin.edges[0]][:, columns]
            aligned[v] = own[costs.argmin(axis=0)]
        else:
            aligned[v] = own[:1]
    return aligned


def representatives(graph: WorkingNetwork) -> dict[int, int]:
    """Variable -> the core variable it was contracted into (absent when eliminated)."""
    core_variable = {v: v for v in graph.core}
    for v, neighbours, _, contracted in reversed(graph.elimination_stack):
        if contracted and neighbours[0] in core_variable:
            core_variable[v] = core_variable[neighbours[0]]
    return core_variable


def core_memory(graph: WorkingNetwork, memory: Memory, clock: KeyTimes) -> CoreMemory:
    """The memory of a network that was reduced with guards."""
    core = graph.core
    rank = {v: r for r, v in enumerate(core)}
    sizes = [len(graph.tables.arrays[graph.unary[v]]) for v in core]
    owner, states = representatives(graph), merged_states(graph)
    lasting = clock.end > clock.start
    least, most = usage_range(memory)
    fixed = np.where(lasting, least, 0.0)
    varying: dict[tuple[int, int, int], Floats] = {}  # one per core variable and interval
    for h in np.flatnonzero(lasting & (most > least)).tolist():
        v, a, b = int(memory.interval_variable[h]), int(clock.start[h]), int(clock.end[h])
        amount = memory.usage_tables[memory.interval_table[h]][states[v]]
        fixed[h] = amount.min()
        if (amount > fixed[h]).any():
            key = (rank[owner[v]], a, b)
            amount = amount - fixed[h]
            varying[key] = varying[key] + amount if key in varying else amount
    constant = sum_over_intervals(clock.start, clock.end, fixed, len(clock.times))
    keys = np.array(list(varying), dtype=np.int64).reshape(-1, 3)
    owners, starts, ends = keys.T
    return CoreMemory.of(owners, starts, ends, list(varying.values()), sizes, constant)
