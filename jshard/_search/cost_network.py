"""The cost network: the search problem as plain arrays.

Problem.  Choose one state for every variable so that the sum of one cost per variable (unary) and one
cost per connected pair (pairwise) is least.  A sharding problem of 126 equal layers has tens of
thousands of variables but only a few hundred *distinct* cost tables.

Idea.  Keep the distinct tables in two pools and let variables and edges point into them.  Everything
after this (reductions, products, dominance) works on table numbers and is remembered per number, so
the hundredth layer costs a dictionary lookup.

Worked case.  Two variables of two states, the same unary table, one edge that charges 3 when the
states differ:

>>> net = build([[0.0, 1.0], [0.0, 1.0]], [(0, 1, [[0.0, 3.0], [3.0, 0.0]])])
>>> len(net.unary), len(net.pairwise), evaluate(net, [1, 0])
(1, 1, 4.0)

``np.inf`` in a table means forbidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jshard._core.errors import ShardError
from jshard._core.row_codes import Ints as Ints


SHORT = 2048  # bytes of an array that are as well looked up as they are
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Memory:
    """What the variables' states hold: a holding is bytes by state over an interval of integer times.

    A variable may have several, or none: a copy that is made first and read later holds this, then that.
    """

    intervals: Ints  # (H, 2) half-open [start, end); empty when start >= end
    usage_tables: tuple[Floats, ...]  # pool of distinct (k,) tables
    interval_variable: Ints  # (H,) holding -> variable
    interval_table: Ints  # (H,) holding -> index into usage
    limit: float | None  # None: no limit


@dataclass(frozen=True, eq=False)
class CostNetwork:
    """Variables with unary tables, edges with pairwise tables, both through pools."""

    unary: tuple[Floats, ...]  # distinct (k,) tables, inf = forbidden
    pairwise: tuple[Floats, ...]  # distinct (ki, kj) tables
    node_table: Ints  # (V,) variable -> index into unary
    edges: Ints  # (E, 2): (i, j), the table's rows are i's states; multi-edges allowed
    edge_table: Ints  # (E,) edge -> index into pairwise
    memory: Memory | None = None

    @property
    def size(self) -> int:
        return len(self.node_table)

    def num_states(self, variable: int) -> int:
        return len(self.unary[self.node_table[variable]])

    def __repr__(self) -> str:
        return (
            f"CostNetwork({len(self.node_table)} variables, {len(self.edge_table)} edges; "
            f"{len(self.unary)} unary and {len(self.pairwise)} pairwise tables)"
        )


@dataclass(frozen=True, eq=False)
class Solution:
    """An assignment, its cost, and a proved lower bound on every assignment's cost."""

    assignment: Ints
    cost: float
    bound: float
    peak: float | None
    seconds: float
    steps: tuple[str, ...]  # one line of text per stage, for the report

    @property
    def gap(self) -> float:
        return (self.cost - self.bound) / max(abs(self.bound), 1e-300)

    @property
    def optimal(self) -> bool:
        return self.cost <= self.bound


class ArrayPool:
    """Numbers for arrays (of 8-byte items), equal content giving equal numbers (first come, first numbered)."""

    def __init__(self) -> None:
        self.arrays: list[NDArray] = []
        self._index: dict[tuple, tuple[int, ...]] = {}

    def __call__(self, array: NDArray) -> int:
        # A long array is looked up by some sums of its bits, then compared: bytes would be a copy each time.
        short = array.nbytes <= SHORT
        bits = array.reshape(-1).view(np.int64)
        key = (array.shape, array.tobytes() if short else _digest(bits))
        alike = self._index.get(key, ())
        for found in alike:
            if short or np.array_equal(bits, self.arrays[found].reshape(-1).view(np.int64)):
                return found
        found = len(self.arrays)
        self._index[key] = (*alike, found)
        array.setflags(write=False)
        self.arrays.append(array)
        return found

    def copy(self) -> ArrayPool:
        other = ArrayPool()
        other.arrays, other._index = list(self.arrays), dict(self._index)
        return other


def _digest(bits: Ints) -> tuple[int, ...]:
    """Sums modulo 2**64: of all, of the first half, of every seventh (tables are often rearranged tables)."""
    return int(bits.sum()), int(bits[: len(bits) // 2].sum()), int(bits[::7].sum())


def _table(values: ArrayLike, ndim: int, what: str) -> Floats:
    # "+ 0.0" makes a fresh array and turns -0.0 into 0.0, so that equal tables have equal bytes.
    array = np.ascontiguousarray(values, dtype=np.float64) + 0.0
    if array.ndim != ndim or 0 in array.shape:
        raise ShardError(f"{what}: expected a non-empty {ndim}-dimensional table, got {array.shape}")
    if np.isnan(array).any() or np.isneginf(array).any():
        raise ShardError(f"{what}: a cost is nan or -inf; use numbers, or inf for forbidden")
    return array


def build(
    unaries: Sequence[ArrayLike],
    edges: Iterable[tuple[int, int, ArrayLike]],
    *,
    intervals: ArrayLike | None = None,
    usages: Sequence[ArrayLike] | None = None,
    limit: float | None = None,
) -> CostNetwork:
    """A network from one unary table per variable and ``(i, j, table)`` edges; tables are interned.

    A table object that is passed many times is converted once.
    """
    pools = ArrayPool(), ArrayPool(), ArrayPool()
    seen: dict[int, int] = {}
    alive: list[object] = []  # keeps ids in ``seen`` from being reused

    def number(pool: int, values: ArrayLike, ndim: int, what: str) -> int:
        found = seen.get(id(values) * 4 + pool)
        if found is None:
            found = pools[pool](_table(values, ndim, what))
            seen[id(values) * 4 + pool] = found
            alive.append(values)
        return found

    nodes = [number(0, u, 1, f"variable {i}") for i, u in enumerate(unaries)]
    ends: list[tuple[int, int]] = []
    which: list[int] = []
    for i, j, table in edges:
        where = f"edge ({i}, {j})"
        if not (0 <= i < len(nodes) and 0 <= j < len(nodes)):
            raise ShardError(f"{where}: there are only {len(nodes)} variables")
        t = number(1, table, 2, where)
        shape = (len(pools[0].arrays[nodes[i]]), len(pools[0].arrays[nodes[j]]))
        if pools[1].arrays[t].shape != shape:
            raise ShardError(f"{where}: table {pools[1].arrays[t].shape}, states {shape}")
        ends.append((i, j))
        which.append(t)
    memory = None
    if usages is not None:
        use = [number(2, u, 1, f"usage of variable {i}") for i, u in enumerate(usages)]
        spans = np.array(intervals, dtype=np.int64).reshape(-1, 2)
        if len(use) != len(nodes) or len(spans) != len(nodes):
            raise ShardError("memory: one interval and one usage table per variable, please")
        for i, u in enumerate(use):
            if len(pools[2].arrays[u]) != len(pools[0].arrays[nodes[i]]):
                raise ShardError(f"usage of variable {i}: not one number per state")
        memory = Memory(
            spans, tuple(pools[2].arrays), np.arange(len(use)), np.array(use, dtype=np.int64), limit
        )
    return CostNetwork(
        tuple(pools[0].arrays),
        tuple(pools[1].arrays),
        np.array(nodes, dtype=np.int64),
        np.array(ends, dtype=np.int64).reshape(-1, 2),
        np.array(which, dtype=np.int64),
        memory,
    )


def _flat(pool: Sequence[NDArray]) -> tuple[Floats, Ints]:
    """All tables of a pool end to end, and where each begins."""
    starts = np.zeros(len(pool) + 1, dtype=np.int64)
    np.cumsum([t.size for t in pool], out=starts[1:])
    values = np.concatenate([t.ravel() for t in pool]) if pool else np.zeros(0)
    return values, starts


def evaluate(network: CostNetwork, assignment: ArrayLike) -> float:
    """The cost of an assignment (one state number per variable)."""
    x = np.asarray(assignment, dtype=np.int64)
    values, starts = _flat(network.unary)
    total = float(values[starts[network.node_table] + x].sum())
    if len(network.edges):
        values, starts = _flat(network.pairwise)
        width = np.array([t.shape[1] for t in network.pairwise], dtype=np.int64)
        i, j = network.edges[:, 0], network.edges[:, 1]
        where = starts[network.edge_table] + x[i] * width[network.edge_table] + x[j]
        total += float(values[where].sum())
    return total


def interval_bytes(memory: Memory, assignment: ArrayLike) -> Floats:
    """(H,) bytes of each holding while it lasts."""
    values, starts = _flat(memory.usage_tables)
    return values[
        starts[memory.interval_table] + np.asarray(assignment, dtype=np.int64)[memory.interval_variable]
    ]


def live_bytes(memory: Memory, held: Floats) -> Floats:
    """Bytes live at every time, from the bytes of each holding."""
    start, end = memory.intervals[:, 0], memory.intervals[:, 1]
    keep = end > start
    if not keep.any():
        return np.zeros(1)
    base = int(start[keep].min())
    steps = np.zeros(int(end[keep].max()) - base + 1)
    np.add.at(steps, start[keep] - base, held[keep])
    np.subtract.at(steps, end[keep] - base, held[keep])
    return np.cumsum(steps)[:-1]


def peak(network: CostNetwork, assignment: ArrayLike) -> float:
    """The most bytes live at any time (0 for a network without memory)."""
    if network.memory is None or not network.size:
        return 0.0
    return float(live_bytes(network.memory, interval_bytes(network.memory, assignment)).max(initial=0.0))


def save(network: CostNetwork, path: str | Path) -> None:
    """Write a network as ``.npz``: the flattened pools, their shapes, and the index arrays."""
    unary, _ = _flat(network.unary)
    pairwise, _ = _flat(network.pairwise)
    data = {
        "version": np.array(2),
        "unary": unary,
        "unary_sizes": np.array([len(t) for t in network.unary], dtype=np.int64),
        "pairwise": pairwise,
        "pairwise_shapes": np.array([t.shape for t in network.pairwise], np.int64).reshape(-1, 2),
        "node_table": network.node_table,
        "edges": network.edges,
        "edge_table": network.edge_table,
    }
    memory = network.memory
    if memory is not None:
        data["intervals"] = memory.intervals
        data["usage"] = _flat(memory.usage_tables)[0]
        data["usage_sizes"] = np.array([len(t) for t in memory.usage_tables], dtype=np.int64)
        data["holder"] = memory.interval_variable
        data["usage_table"] = memory.interval_table
        data["limit"] = np.array(np.nan if memory.limit is None else memory.limit)
    with open(path, "wb") as file:
        np.savez_compressed(file, allow_pickle=False, **data)


def _unflat(values: Floats, shapes: Iterable[tuple[int, ...]]) -> tuple[Floats, ...]:
    tables, at = [], 0
    for shape in shapes:
        size = int(np.prod(shape))
        tables.append(values[at : at + size].reshape(shape).copy())
        at += size
    return tuple(tables)


def load(path: str | Path) -> CostNetwork:
    """Read what :func:`save` wrote."""
    with np.load(path, allow_pickle=False) as data:
        if int(data["version"]) != 2:
            raise ShardError(f"{path}: cost network of version {int(data['version'])}, expected 2")
        memory = None
        if "intervals" in data:
            limit = float(data["limit"])
            memory = Memory(
                data["intervals"],
                _unflat(data["usage"], [(int(n),) for n in data["usage_sizes"]]),
                data["holder"],
                data["usage_table"],
                None if np.isnan(limit) else limit,
            )
        return CostNetwork(
            _unflat(data["unary"], [(int(n),) for n in data["unary_sizes"]]),
            _unflat(data["pairwise"], [(int(a), int(b)) for a, b in data["pairwise_shapes"]]),
            data["node_table"],
            data["edges"],
            data["edge_table"],
            memory,
        )
