"""Memory seen from a reduced graph: which times matter, and who holds what at them.

Problem.  A training step has tens of thousands of points in time and as many live intervals; most can
never be the ones that break the budget, and most variables were merged or eliminated.

Idea.  Of the times keep only those at which a set of live variables is largest (something began since
the last end), and of these only those whose most conceivable sum exceeds the limit.  Give every
variable of the core the list of members (interval, bytes per state of the core variable) that were
merged into it; everything that does not vary is one constant profile.

Worked case.  Intervals [0, 3), [1, 2), [2, 4): the sets are {a}, {a, b}, {a, c}, {c}; times 1 and 2 stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jshard._search.cost_network import Floats, Ints, Memory
from jshard._search.exact.reduce import WorkingNetwork
from jshard._search.exact.table_pool import NONE


def usage_range(memory: Memory) -> tuple[Floats, Floats]:
    """(H,) least and most bytes of each holding."""
    least = np.array([u.min() for u in memory.usage_tables] or [0.0], dtype=np.float64)
    most = np.array([u.max() for u in memory.usage_tables] or [0.0], dtype=np.float64)
    return least[memory.interval_table], most[memory.interval_table]


def sum_over_intervals(start: Ints, end: Ints, amount: Floats, times: int) -> Floats:
    """Sum of amounts over half-open index intervals."""
    steps = np.bincount(start, amount, times + 1) - np.bincount(end, amount, times + 1)
    return np.cumsum(steps)[:times].astype(np.float64)


def key_times(memory: Memory) -> Ints:
    """The times at which the live set is inclusion-maximal, ascending."""
    start, end = memory.intervals[:, 0], memory.intervals[:, 1]
    alive = end > start
    begins, ends = np.unique(start[alive]), np.unique(end[alive])
    # The last begin before each end, once: after it nothing was added before something left.
    return np.unique(begins[np.searchsorted(begins, ends, side="left") - 1])


@dataclass(frozen=True)
class KeyTimes:
    """The times that matter, and every holding's interval as indices into them."""

    times: Ints
    start: Ints
    end: Ints


def key_times_above(memory: Memory, threshold: float) -> KeyTimes:
    """The key times at which more than ``threshold`` is conceivable."""
    times = key_times(memory)
    start = np.searchsorted(times, memory.intervals[:, 0])
    end = np.maximum(start, np.searchsorted(times, memory.intervals[:, 1]))
    _, most = usage_range(memory)
    risky = sum_over_intervals(start, end, most, len(times)) > threshold
    times = times[risky]
    start = np.searchsorted(times, memory.intervals[:, 0])
    end = np.maximum(start, np.searchsorted(times, memory.intervals[:, 1]))
    return KeyTimes(times, start, end)


def guard_memory(graph: WorkingNetwork, memory: Memory, clock: KeyTimes) -> None:
    """Tell the reductions which variables' bytes matter."""
    tables, core = graph.tables, set(graph.core)
    made: dict[tuple[int, int], int] = {}
    marks: dict[int, list[int]] = {}
    lasting = np.flatnonzero(clock.end > clock.start)
    for v, table in zip(
        memory.interval_variable[lasting].tolist(), memory.interval_table[lasting].tolist(), strict=True
    ):
        if v in core:
            key = (table, graph.states[v])
            if key not in made:
                made[key] = tables.memory_guard(memory.usage_tables[table][tables.subsets.arrays[key[1]]])
            found = marks.setdefault(v, [])
            if made[key] != NONE and made[key] not in found:
                found.append(made[key])
    for v, found in marks.items():
        graph.memory_guards[v] = tuple(found)


@dataclass(frozen=True)
class CoreMemory:
    """Bytes of the core variables' states over the key times.

    Members are flattened: member m belongs to core position ``who[m]``, is live over key times
    ``start[m]:end[m]``, and its bytes per state are ``flat[offset[m] : offset[m + 1]]``.
    """

    owner: Ints
    start: Ints
    end: Ints
    offset: Ints
    flat: Floats
    target: Ints  # flat -> index into all core states end to end
    first: Ints  # core position -> first of its states end to end
    constant: Floats  # (T,) bytes that do not depend on the core

    @property
    def times(self) -> int:
        return len(self.constant)

    def state_prices(self, multipliers: Floats) -> Floats:
        """Price of every core state (end to end), given a price per byte at each key time."""
        total = np.concatenate([[0.0], np.cumsum(multipliers)])
        each = np.repeat(total[self.end] - total[self.start], np.diff(self.offset))
        return np.bincount(self.target, each * self.flat, int(self.first[-1])).astype(np.float64)

    def live_bytes(self, chosen: Ints | list[int]) -> Floats:
        """Bytes at the key times."""
        amount = self.flat[self.offset[:-1] + np.asarray(chosen, dtype=np.int64)[self.owner]]
        return self.constant + sum_over_intervals(self.start, self.end, amount, self.times)


def merged_states(graph: WorkingNetwork) -> dict[int, Ints]:
    """For every variable its original states aligned with the states of the core variable that it was
    merged into; for an eliminated one just one of its states."""
    tables = graph.tables
    subsets = tables.subsets.arrays
    found: dict[int, Ints] = {v: subsets[graph.states[v]] for v in graph.core}
    merged = set(graph.contractions)
    for place in reversed(range(len(graph.elimination_stack))):
        v, u, states, near, edges, below = graph.elimination_stack[place]
        if place in merged:
            where = tables.subset_positions(below[0])
            rows = [where[int(s)] for s in found[near[0]]]
            costs = tables.arrays[u][:, None] + tables.arrays[edges[0]][:, rows]
            found[v] = subsets[states][costs.argmin(axis=0)]
        else:
            found[v] = subsets[states][:1]
    return found


def representatives(graph: WorkingNetwork) -> dict[int, int]:
    """Variable -> the core variable it was merged into (absent when eliminated)."""
    found = {v: v for v in graph.core}
    for place in reversed(graph.contractions):
        v, _, _, near, _, _ = graph.elimination_stack[place]
        if near[0] in found:
            found[v] = found[near[0]]
    return found


def core_memory(graph: WorkingNetwork, memory: Memory, clock: KeyTimes) -> CoreMemory:
    """The memory of a graph reduced with marks."""
    core = graph.core
    rank = {v: r for r, v in enumerate(core)}
    sizes = [len(graph.tables.arrays[graph.unary[v]]) for v in core]
    first = np.zeros(len(core) + 1, dtype=np.int64)
    np.cumsum(sizes, out=first[1:])
    owner, choice = representatives(graph), merged_states(graph)
    fixed = np.zeros(len(memory.interval_table))
    members: dict[tuple[int, int, int], Floats] = {}  # one per core variable and interval
    for h in np.flatnonzero(clock.end > clock.start).tolist():
        v, a, b = int(memory.interval_variable[h]), int(clock.start[h]), int(clock.end[h])
        amount = memory.usage_tables[memory.interval_table[h]][choice[v]]
        least = amount.min()
        fixed[h] = least
        if (amount > least).any():
            key = (rank[owner[v]], a, b)
            amount = amount - least
            members[key] = members[key] + amount if key in members else amount
    constant = sum_over_intervals(clock.start, clock.end, fixed, len(clock.times))
    keys = np.array(list(members), dtype=np.int64).reshape(-1, 3)
    lengths = [len(m) for m in members.values()]
    offset = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offset[1:])
    flat = np.concatenate(list(members.values())) if members else np.zeros(0)
    inside = np.arange(len(flat)) - np.repeat(offset[:-1], lengths)
    target = np.repeat(first[keys[:, 0]], lengths) + inside
    return CoreMemory(keys[:, 0], keys[:, 1], keys[:, 2], offset, flat, target, first, constant)
