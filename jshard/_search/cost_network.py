"""The pairwise cost network (factor graph, weighted constraint network): the search problem as plain arrays.

Choose one state for every variable such that the sum of one unary cost per variable and one pairwise cost per edge is
least; `np.inf` means forbidden. A model of 126 equal layers has tens of thousands of variables but only a few
hundred distinct cost tables, so the distinct tables are kept in pools, and variables and edges hold indices into them.

Example: two variables of two states with one unary table, and an edge that costs 3 when the states differ.

>>> net = build([[0.0, 1.0], [0.0, 1.0]], [(0, 1, [[0.0, 3.0], [3.0, 0.0]])])
>>> len(net.unary), len(net.pairwise), evaluate(net, [1, 0])
(1, 1, 4.0)
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jshard._core.arrays import Floats, Ints
from jshard._core.errors import ShardError
from jshard._search.effort import Effort


SMALL_ARRAY_BYTES = 2048  # up to here an array is looked up by its bytes, beyond by a digest
_HASHED = 256  # entries of a long array, or some more
# Variables from which on reductions are batched, and memory is searched by prices on few times alone.
LARGE_NETWORK = 4000
# Entries of all tables, and passes over them, of which a search of fewer is that of a large network: with 3e8 entries to
# spend on tables of 8e7, stages that end late each took 231 s and found nothing, where those of a large network found a plan
# in 34 s.
_LARGE_TABLES, _FEW_PASSES = 1e7, 10


@dataclass(frozen=True, eq=False)
class Memory:
    """Live intervals: each holds a number of bytes, by the state of one variable, over half-open integer times.

    A variable may have several intervals or none: a copy that is made first and read later holds one, then another.
    """

    intervals: Ints  # (H, 2) half-open [start, end); empty when start >= end
    usage_tables: tuple[Floats, ...]  # distinct (k,) tables of bytes by state
    interval_variable: Ints  # (H,) interval -> variable
    interval_table: Ints  # (H,) interval -> index into usage_tables
    limit: float | None  # bytes; None: no limit


@dataclass(frozen=True, eq=False)
class CostNetwork:
    """Variables with unary tables, edges with pairwise tables, both through pools of distinct tables."""

    unary: tuple[Floats, ...]  # distinct (k,) tables, inf = forbidden
    pairwise: tuple[Floats, ...]  # distinct (ki, kj) tables
    node_table: Ints  # (V,) variable -> index into unary
    edges: Ints  # (E, 2): (i, j), the table's rows are i's states; multi-edges allowed
    edge_table: Ints  # (E,) edge -> index into pairwise
    memory: Memory | None = None

    @property
    def size(self) -> int:
        """The number of variables."""
        return len(self.node_table)

    @functools.cached_property
    def num_entries(self) -> int:
        """The entries of all edges' tables."""
        entries = np.array([t.size for t in self.pairwise] or [0])
        return int(entries[self.edge_table].sum())

    def is_large(self, effort: Effort) -> bool:
        """Whether every stage takes long: of many variables, or of large tables over which the effort allows few passes.

        >>> net = build([np.zeros(4000), np.zeros(4000)], [(0, 1, np.zeros((4000, 4000)))])
        >>> net.num_entries, [net.is_large(Effort(most)) for most in (1e7, 1e8, 1e9)], net.is_large(Effort())
        (16000000, [True, True, False], False)
        """
        if self.size >= LARGE_NETWORK:
            return True
        return self.num_entries >= max(_LARGE_TABLES, effort.search_limit / _FEW_PASSES)

    def num_states(self, variable: int) -> int:
        """The number of states of a variable."""
        return len(self.unary[self.node_table[variable]])

    def within(self, limit: float) -> CostNetwork:
        """The same network with a limit on its memory, in bytes."""
        assert self.memory is not None
        return replace(self, memory=replace(self.memory, limit=limit))

    def __repr__(self) -> str:
        return (
            f"CostNetwork({len(self.node_table)} variables, {len(self.edge_table)} edges; "
            f"{len(self.unary)} unary and {len(self.pairwise)} pairwise tables)"
        )


@dataclass(frozen=True, eq=False)
class Prices:
    """Prices on memory: the price of a byte at each of some ascending times."""

    times: Ints  # (T,)
    per_byte: Floats  # (T,) in the unit of costs
    # No assignment of the network that they are for costs less, with its bytes charged for.
    bound: float = -np.inf

    def of_another_network(self) -> Prices:
        """The same prices, nothing known of what they prove."""
        return Prices(self.times, self.per_byte)

    def proved_cost(self, limit: float) -> float:
        """What they prove of the cost of every assignment within a limit, in bytes, of the network that they are for."""
        return self.bound - limit * float(self.per_byte.sum())


@dataclass(frozen=True, eq=False)
class Solution:
    """An assignment, its cost, and a proved lower bound on every assignment's cost."""

    assignment: Ints  # (V,) state of each variable
    cost: float
    bound: float
    peak: float | None  # bytes; None for a network without memory
    seconds: float
    steps: tuple[str, ...]  # one line of text per stage, for the report
    prices: Prices | None = None  # those that prove the bound, where prices on few times were found
    answers: tuple[Ints, ...] = ()  # assignments found on the way, where prices on few times were looked for

    @property
    def gap(self) -> float:
        """Cost minus bound, relative to the bound."""
        return (self.cost - self.bound) / max(abs(self.bound), 1e-300)

    @property
    def optimal(self) -> bool:
        """Whether the bound proves that no assignment costs less."""
        return self.cost <= self.bound


class ArrayPool:
    """Numbers for arrays (of 8-byte items): equal content gives equal numbers, in order of first occurrence."""

    def __init__(self) -> None:
        self.arrays: list[NDArray] = []
        self._index: dict[tuple, tuple[int, ...]] = {}

    def __call__(self, array: NDArray) -> int:
        # A long array is looked up by a digest, then compared: its bytes would be kept twice.
        short = array.nbytes <= SMALL_ARRAY_BYTES
        key = (array.shape, array.tobytes() if short else _digest(array))
        candidates = self._index.get(key, ())
        for number in candidates:
            if short or array.tobytes() == self.arrays[number].tobytes():
                return number
        number = len(self.arrays)
        self._index[key] = (*candidates, number)
        array.setflags(write=False)
        self.arrays.append(array)
        return number

    def copy(self) -> ArrayPool:
        """An independent pool with the same contents."""
        other = ArrayPool()
        other.arrays, other._index = list(self.arrays), dict(self._index)
        return other


def _digest(array: NDArray) -> tuple[int, int]:
    """The sum of an array's bits modulo 2**64, and a hash of a few (tables are often rearranged tables)."""
    bits = array.reshape(-1).view(np.int64)
    return int(np.add.reduce(bits)), hash(bits[:: max(1, len(bits) // _HASHED)].tobytes())


def _checked_table(values: ArrayLike, ndim: int, what: str) -> Floats:
    # "+ 0.0" makes a fresh array and turns -0.0 into 0.0, so that equal tables have equal bytes.
    array = np.ascontiguousarray(values, dtype=np.float64) + 0.0
    if array.ndim != ndim or 0 in array.shape:
        raise ShardError(f"{what}: expected a non-empty {ndim}-dimensional table, got {array.shape}")
    if np.isnan(array).any() or np.isneginf(array).any():
        raise ShardError(f"{what}: a cost is nan or -inf; use numbers, or inf for forbidden")
    return array


class _TableInterner:
    """A pool of checked tables; an object that is passed many times is converted once."""

    def __init__(self, ndim: int) -> None:
        self.ndim = ndim
        self.pool = ArrayPool()
        self._known: dict[int, int] = {}
        self._alive: list[object] = []  # keeps the ids of `_known` from being reused

    def __call__(self, values: ArrayLike, what: str) -> int:
        number = self._known.get(id(values))
        if number is None:
            number = self._known[id(values)] = self.pool(_checked_table(values, self.ndim, what))
            self._alive.append(values)
        return number

    def shape(self, number: int) -> tuple[int, ...]:
        return self.pool.arrays[number].shape


def build(
    unaries: Sequence[ArrayLike],
    edges: Iterable[tuple[int, int, ArrayLike]],
    *,
    intervals: ArrayLike | None = None,
    usages: Sequence[ArrayLike] | None = None,
    limit: float | None = None,
) -> CostNetwork:
    """A network from one unary table per variable and `(i, j, table)` edges; tables are interned.

    Arguments:

    - `unaries`: (k,) costs by state, one table per variable.
    - `edges`: (i, j, (ki, kj) costs).
    - `intervals`: (V, 2) live interval of each variable; with `usages` only.
    - `usages`: (k,) bytes by state, one table per variable.
    - `limit`: bytes that may be live at any time; None for no limit.

    Raises `ShardError` for tables that are empty, not numbers or of the wrong shape.
    """
    unary, pairwise = _TableInterner(1), _TableInterner(2)
    nodes = [unary(u, f"variable {i}") for i, u in enumerate(unaries)]
    ends: list[tuple[int, int]] = []
    edge_table: list[int] = []
    for i, j, table in edges:
        where = f"edge ({i}, {j})"
        if not (0 <= i < len(nodes) and 0 <= j < len(nodes)):
            raise ShardError(f"{where}: there are only {len(nodes)} variables")
        t = pairwise(table, where)
        shape = (*unary.shape(nodes[i]), *unary.shape(nodes[j]))
        if pairwise.shape(t) != shape:
            raise ShardError(f"{where}: table {pairwise.shape(t)}, states {shape}")
        ends.append((i, j))
        edge_table.append(t)
    memory = None
    if usages is not None:
        usage = _TableInterner(1)
        usage_of_node = [usage(u, f"usage of variable {i}") for i, u in enumerate(usages)]
        live = np.array(intervals, dtype=np.int64).reshape(-1, 2)
        if len(usage_of_node) != len(nodes) or len(live) != len(nodes):
            raise ShardError("memory: one interval and one usage table per variable, please")
        for i, u in enumerate(usage_of_node):
            if usage.shape(u) != unary.shape(nodes[i]):
                raise ShardError(f"usage of variable {i}: not one number per state")
        memory = Memory(
            live,
            tuple(usage.pool.arrays),
            np.arange(len(usage_of_node)),
            np.array(usage_of_node, dtype=np.int64),
            limit,
        )
    return CostNetwork(
        tuple(unary.pool.arrays),
        tuple(pairwise.pool.arrays),
        np.array(nodes, dtype=np.int64),
        np.array(ends, dtype=np.int64).reshape(-1, 2),
        np.array(edge_table, dtype=np.int64),
        memory,
    )


def concat_tables(pool: Sequence[NDArray]) -> tuple[Floats, Ints]:
    """All tables of a pool end to end, and where each begins."""
    starts = np.zeros(len(pool) + 1, dtype=np.int64)
    np.cumsum([t.size for t in pool], out=starts[1:])
    values = np.concatenate([t.ravel() for t in pool]) if pool else np.zeros(0)
    return values, starts


def evaluate(network: CostNetwork, assignment: ArrayLike) -> float:
    """The cost of an assignment (one state number per variable)."""
    x = np.asarray(assignment, dtype=np.int64)
    values, starts = concat_tables(network.unary)
    total = float(values[starts[network.node_table] + x].sum())
    if len(network.edges):
        total += float(_edge_costs(network, x).sum())
    return total


def _edge_costs(network: CostNetwork, x: Ints) -> Floats:
    """(edges,) the costs of an assignment's edges; tables are not copied, which would take longest where they are large."""
    order = np.argsort(network.edge_table, kind="stable")
    tables = network.edge_table[order]
    begin = np.flatnonzero(np.diff(tables, prepend=-1)).tolist()
    row, column = x[network.edges[order]].T
    costs = np.empty(len(order))
    for a, b in zip(begin, [*begin[1:], len(order)], strict=True):
        costs[order[a:b]] = network.pairwise[tables[a]][row[a:b], column[a:b]]
    return costs


def interval_bytes(memory: Memory, assignment: ArrayLike) -> Floats:
    """(H,) bytes of each interval while it lasts."""
    values, starts = concat_tables(memory.usage_tables)
    states = np.asarray(assignment, dtype=np.int64)[memory.interval_variable]
    return values[starts[memory.interval_table] + states]


def live_bytes(memory: Memory, amounts: Floats) -> Floats:
    """Bytes live at every time from the first start to the last end, given the (H,) bytes of each interval."""
    start, end = memory.intervals[:, 0], memory.intervals[:, 1]
    keep = end > start
    if not keep.any():
        return np.zeros(1)
    base = int(start[keep].min())
    changes = np.zeros(int(end[keep].max()) - base + 1)
    np.add.at(changes, start[keep] - base, amounts[keep])
    np.subtract.at(changes, end[keep] - base, amounts[keep])
    return np.cumsum(changes)[:-1]


def peak(network: CostNetwork, assignment: ArrayLike) -> float:
    """The most bytes live at any time (0 for a network without memory)."""
    if network.memory is None or not network.size:
        return 0.0
    return float(live_bytes(network.memory, interval_bytes(network.memory, assignment)).max(initial=0.0))
