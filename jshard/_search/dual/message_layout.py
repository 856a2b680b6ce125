"""A core made ready for passes: segments walked side by side, a level's tables of one shape one numpy operation.

Problem.  Message passing visits every edge in turn, and numpy pays for every call.

Idea.  The order of the walk is free, and only edges have to wait for each other.  So the core is cut into
segments walked side by side: equal positions of all segments form a level.  A level's edges are grouped by the
shapes of their tables, those with one table once more; groups that are too small are filled up and joined, those
too large for the cache are cut.  126 layers then cost little more than one.

Worked case.  A path of 128 variables is two segments of 64, and 64 levels of two variables each.

>>> import numpy as np
>>> from jshard._search.cost_network import build
>>> from jshard._search.exact.reduce import graph_of
>>> step = np.array([[0.0, 3.0], [2.0, 0.0]])
>>> chain = chain_of(graph_of(build([[0.0, 1.0]] * 128, [(i, i + 1, step) for i in range(127)])))
>>> len(chain.levels), chain.levels[5]
(64, (10, 12))
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jshard._core.row_codes import concat_ranges
from jshard._search.cost_network import Floats, Ints
from jshard._search.exact.reduce import WorkingNetwork


SEGMENT = 64  # variables walked one after the other; longer passes news further, shorter is wider
STACK = 4096  # entries of a table above which a table is worked on alone
LARGE = 2000  # mean entries of a table above which fewer rounds count for more than wider levels
LONG = 1 << 20  # messages above which index arrays are made anew in each pass
ALIKE = 4  # edges of a level with one table that are worked on together without copying it
ALONE = 1000  # entries of a table from which on edges that share it are told apart by what goes through it
FEW = 20_000  # entries of tables that are worked on in less time than it takes numpy to begin
ROOM = 1 << 17  # entries of tables worked on in one operation: what is computed on the way stays in the cache
HEAVY = 2_000_000  # entries of all tables from which on most passes are made in single precision


@dataclass(frozen=True)
class EdgeBatch:
    """Edges between a level and later ones (in one direction) whose tables have one shape."""

    sender_states: (
        Ints  # (k, n) -> index into all states: the sender's; where it would be long, (n,) of the first ones
    )
    in_messages: Ints  # likewise -> index into messages: what the sender heard on this edge
    out_messages: Ints  # (m, n) or (n, m), or (n,) -> index into messages: what the receiver will have heard
    # (k, m, n) when `wide`, else (k, n, m), the longer axis last; n is 1 where all edges have one table. Or n
    # tables (k, m). The sender's states come first: minima over the first axis run along the memory.
    tables: Floats | tuple[Floats, ...]
    edges_last: bool


EdgeBatches = tuple[list[list[EdgeBatch]], list[list[EdgeBatch]]]


@dataclass(frozen=True)
class SelectedRows:
    """Table rows that the chosen states of earlier variables select, for rounding a level."""

    target: Ints  # states of the level
    base: Ints  # place in the pool for state 0 of the other variable
    step: Ints  # row length
    other: Ints  # the other variable


@dataclass
class MessageLayout:
    """A core made ready for passes."""

    variables: list[int]  # walk position -> the graph's variable
    unary: Floats  # all states end to end, in walk order
    state_offsets: Ints  # (n + 1,) where each variable's states begin
    waves: list[tuple[int, int]]  # walk positions [a, b)
    incoming: list[tuple[Ints, Ints]]  # per level: (state within level, message index)
    batches: EdgeBatches  # forwards and backwards, per level
    single_precision_batches: (
        Callable[[], EdgeBatches] | None
    )  # the same in single precision, where the tables are many
    share: Floats  # per state: what each edge ahead gets
    kept_shares: tuple[Floats, Floats]  # per variable: what stays, forwards and backwards
    # Per level, for rounding: like collect, only messages from later variables; and table rows. Made when asked for.
    rounding_inputs: Callable[[], tuple[list[tuple[Ints, Ints]], list[SelectedRows], Floats]]
    messages: Floats  # then one that is always zero and one that nobody reads, for `_joined`
    edge_ends: Ints  # (E, 2) walk positions of every edge
    message_offsets: Ints  # (E, 2) where the messages to these two begin


# Variable -> (place within its layer, turn, layer); neighbours at one place in different layers take turns.
LayerPositions = Mapping[int, tuple[int, int, int]]


def peripheral_order(graph: WorkingNetwork, deep: bool) -> list[int]:
    """The core from one far end to the other, so that neighbours come soon after each other: by nearness, or,
    `deep`, along branches, which passes news further in one pass and leaves less to do side by side."""
    adj, out, seen = graph.adj, [], set()
    for root in graph.core:
        if root in seen:
            continue
        reached, order = {root}, [root]
        for v in order:
            for w in adj[v]:
                if w not in reached:
                    reached.add(w)
                    order.append(w)
        queue = deque([order[-1]])
        while queue:
            v = queue.pop() if deep else queue.popleft()
            if v not in seen:
                seen.add(v)
                out.append(v)
                queue.extend([w for w in adj[v] if w not in seen])
    return out


def variable_order(
    graph: WorkingNetwork, layers: LayerPositions | None = None
) -> tuple[list[int], list[int]]:
    """The core in walk order, and each one's level; where layers repeat, a layer is a segment."""
    arrays = graph.tables.arrays
    sizes = [arrays[t].size for near in graph.adj for t in near.values()]
    core = peripheral_order(graph, sum(sizes) > LARGE * len(sizes))
    count = len(core)
    length = -(-count // max(1, count // SEGMENT)) if count else 1
    place = {v: (r % length, 0, r // length) for r, v in enumerate(core)}
    if layers:
        many = -(-count // length)
        place |= {v: (p, turn, many + layer) for v, (p, turn, layer) in layers.items() if v in place}
    order = sorted(core, key=place.__getitem__)
    rank = {v: i for i, v in enumerate(order)}
    level = {}
    for v in order:
        below = [level[w] for w in graph.adj[v] if rank[w] < rank[v]]
        level[v] = 1 + max(below) if below else 0
    variables = sorted(core, key=lambda v: (level[v], rank[v]))
    return variables, [level[v] for v in variables]


def build_message_layout(graph: WorkingNetwork, layers: LayerPositions | None = None) -> MessageLayout:
    """The core made ready for passes."""
    arrays, adj = graph.tables.arrays, graph.adj
    variables, level = variable_order(graph, layers)
    n = len(variables)
    rank = {v: r for r, v in enumerate(variables)}
    unary = [arrays[graph.unary[v]] for v in variables]
    size = np.array([len(u) for u in unary], dtype=np.int64)
    first = np.zeros(n + 1, dtype=np.int64)
    np.cumsum(size, out=first[1:])
    # Edges as (low, high, table with low's states as rows); the higher end's message follows.
    pairs = [(r, rank[w], t) for r, v in enumerate(variables) for w, t in adj[v].items() if r < rank[w]]
    edges = np.array(pairs, dtype=np.int64).reshape(-1, 3)
    low, high, table = edges[:, 0], edges[:, 1], edges[:, 2]
    begin = np.zeros(len(edges) + 1, dtype=np.int64)
    np.cumsum(size[low] + size[high], out=begin[1:])
    at_low, at_high = begin[:-1], begin[:-1] + size[low]

    where = np.array(level, dtype=np.int64)
    cuts = np.searchsorted(where, np.arange(where[-1] + 2 if n else 0)).tolist()
    levels = list(zip(cuts[:-1], cuts[1:], strict=True))

    def listing(ends: Ints, places: Ints) -> list[tuple[Ints, Ints]]:
        """Per level: which state each message entry is added to."""
        order = np.argsort(ends, kind="stable")
        ends, places = ends[order], places[order]
        out = []
        for a, b in levels:
            part = slice(*np.searchsorted(ends, [a, b]).tolist())
            lengths = size[ends[part]]
            place = concat_ranges(places[part], places[part] + lengths)
            out.append(
                (
                    concat_ranges(first[ends[part]], first[ends[part] + 1]) - first[a],
                    place.astype(np.int32) if LONG < begin[-1] < 2**31 else place,
                )
            )
        return out

    def grouped(sender: Ints, receiver: Ints, heard: Ints, told: Ints, flip: bool) -> list[list[EdgeBatch]]:
        kinds: dict[tuple[int, int, int], list[int]] = {}
        for e, key in enumerate(
            zip(where[sender].tolist(), size[sender].tolist(), size[receiver].tolist(), strict=True)
        ):
            kinds.setdefault(key, []).append(e)
        found: dict[int, list[EdgeBatch]] = {}
        small: dict[int, list[_Few]] = {}

        def add(at: int, e: Ints, k: int, m: int, tables: Floats | tuple[Floats, ...]) -> None:
            alone = isinstance(tables, tuple) or (tables.shape[1] == 1 and k * m >= ALONE)
            most = len(e) if alone else max(1, ROOM // (k * m))
            for a in range(0, len(e), most):
                part = slice(a, a + most)
                split = not isinstance(tables, tuple) and tables.shape[1] > 1
                add_part(at, e[part], k, m, tables[:, part] if split else tables)  # type: ignore[call-overload]

        def add_part(at: int, e: Ints, k: int, m: int, tables: Floats | tuple[Floats, ...]) -> None:
            wide = not isinstance(tables, tuple) and len(e) > m and (tables.shape[1] > 1 or k * m < ALONE)
            if not isinstance(tables, tuple):  # (k, n or 1, m)
                tables = np.ascontiguousarray(tables.transpose(0, 2, 1)) if wide else tables
            group = EdgeBatch(first[sender[e]], heard[e], told[e], tables, wide)
            found.setdefault(at, []).append(group if begin[-1] > LONG else expand_indices(group, k, m))

        for (at, k, m), members in kinds.items():
            by_table: dict[int, list[int]] = {}
            for e, t in zip(members, table[members].tolist(), strict=True):
                by_table.setdefault(graph.tables.transpose(t) if flip else t, []).append(e)
            if len(members) * k * m <= FEW and begin[-1] <= LONG:
                e = np.array([e for some in by_table.values() for e in some], dtype=np.int64)
                side = [arrays[t] for t, some in by_table.items() for _ in some]
                few = _Few(first[sender[e]], heard[e], told[e], np.array(side))
                small.setdefault(at, []).append(few)
                continue
            if k * m > STACK:
                alone = [(e, arrays[t]) for t, some in by_table.items() for e in some if len(some) == 1]
                if alone:
                    add(
                        at,
                        np.array([e for e, _ in alone], dtype=np.int64),
                        k,
                        m,
                        tuple([t for _, t in alone]),
                    )
                for t, some in by_table.items():
                    if len(some) > 1:
                        add(at, np.array(some, dtype=np.int64), k, m, arrays[t][:, None])
                continue
            rest: list[tuple[int, Floats]] = []
            for t, some in by_table.items():
                if len(some) >= ALIKE or len(by_table) == 1:
                    add(at, np.array(some, dtype=np.int64), k, m, arrays[t][:, None])
                else:
                    rest += [(e, arrays[t]) for e in some]
            if rest:
                side = np.stack([t for _, t in rest], axis=1)
                add(at, np.array([e for e, _ in rest], dtype=np.int64), k, m, side)
        for at, some in small.items():
            found.setdefault(at, []).extend(_joined(some, int(first[-1]), int(begin[-1])))
        return [found.get(at, []) for at in range(len(levels))]

    def ahead() -> tuple[list[tuple[Ints, Ints]], list[SelectedRows], Floats]:
        used = np.unique(table).tolist()
        start = dict(zip(used, np.cumsum([0] + [arrays[t].size for t in used])[:-1].tolist(), strict=True))
        pool = np.concatenate([arrays[t].ravel() for t in used]) if used else np.zeros(0)
        order = np.argsort(high, kind="stable")
        rows = []
        for a, b in levels:
            e = order[slice(*np.searchsorted(high[order], [a, b]).tolist())]
            lengths = size[high[e]]
            base = np.array([start[t] for t in table[e].tolist()], dtype=np.int64)
            rows.append(
                SelectedRows(
                    concat_ranges(first[high[e]], first[high[e] + 1]) - first[a],
                    concat_ranges(base, base + lengths),
                    np.repeat(lengths, lengths),
                    np.repeat(low[e], lengths),
                )
            )
        return listing(low, at_low), rows, pool

    forth, back = np.bincount(low, minlength=n), np.bincount(high, minlength=n)
    most = np.maximum(np.maximum(forth, back), 1)
    keeps = (1.0 - forth / most, 1.0 - back / most)
    groups = (grouped(low, high, at_low, at_high, False), grouped(high, low, at_high, at_low, True))
    heavy = sum(arrays[t].size for t in table.tolist()) > HEAVY
    return MessageLayout(
        variables,
        np.concatenate(unary) if unary else np.zeros(0),
        first,
        levels,
        listing(np.concatenate([low, high]), np.concatenate([at_low, at_high])),
        groups,
        functools.cache(functools.partial(_lightened, groups)) if heavy else None,
        np.repeat(1.0 / most, size),
        keeps,
        functools.cache(ahead),
        np.zeros(int(begin[-1]) + 2),
        edges[:, :2],
        np.stack([at_low, at_high], axis=1),
    )


def batch_shape(group: EdgeBatch) -> tuple[int, int]:
    """States of the sender and of the receiver."""
    assert not isinstance(group.tables, tuple)
    k, a, b = group.tables.shape
    return k, a if group.edges_last else b


def expand_indices(group: EdgeBatch, k: int, m: int) -> EdgeBatch:
    """A group with its index arrays in full."""
    down, along = np.arange(k)[:, None], np.arange(m)
    told = group.out_messages + along[:, None] if group.edges_last else group.out_messages[:, None] + along
    return EdgeBatch(
        group.sender_states + down, group.in_messages + down, told, group.tables, group.edges_last
    )


@dataclass(frozen=True)
class _Few:
    """Edges of a level whose tables (n, k, m) have one shape, too few to be worth an operation of their own."""

    own: Ints  # (n,) first indices, as in `Group`
    heard: Ints
    told: Ints
    tables: Floats


def _joined(some: list[_Few], states: int, messages: int) -> list[EdgeBatch]:
    """Groups that hold tables of several shapes, filled up with forbidden states.

    A state that fills up reads a cost and a message of zero, and what it is told goes where nobody reads.
    """
    batches: list[list[_Few]] = []
    count = entries = wide = high = 0
    for few in sorted(some, key=lambda f: (f.tables.shape[1] * f.tables.shape[2], f.tables.shape)):
        n, k, m = few.tables.shape
        filled = (count + n) * max(wide, k) * max(high, m)
        if not batches or filled > entries + few.tables.size + FEW:
            batches.append([])
            count = entries = wide = high = 0
        batches[-1].append(few)
        count, entries, wide, high = count + n, entries + few.tables.size, max(wide, k), max(high, m)
    return [_filled(batch, states, messages) for batch in batches]


def _filled(batch: list[_Few], states: int, messages: int) -> EdgeBatch:
    k, m = (max(f.tables.shape[axis] for f in batch) for axis in (1, 2))
    count = sum(len(f.own) for f in batch)
    tables = np.full((count, k, m), np.inf)
    own, heard = np.full((count, k), states), np.full((count, k), messages)
    told = np.full((count, m), messages + 1)
    at = 0
    for f in batch:
        n, a, b = f.tables.shape
        part = slice(at, at + n)
        tables[part, :a, :b] = f.tables
        own[part, :a] = f.own[:, None] + np.arange(a)
        heard[part, :a] = f.heard[:, None] + np.arange(a)
        told[part, :b] = f.told[:, None] + np.arange(b)
        at += n
    across = count > m
    order = (1, 2, 0) if across else (1, 0, 2)
    return EdgeBatch(
        np.ascontiguousarray(own.T),
        np.ascontiguousarray(heard.T),
        np.ascontiguousarray(told.T if across else told),
        np.ascontiguousarray(tables.transpose(order)),
        across,
    )


def _lightened(groups: EdgeBatches) -> EdgeBatches:
    """The same groups with tables in single precision; what shared a table still does."""
    known: dict[tuple, Any] = {}

    def single(table: Floats) -> Any:
        at = table.__array_interface__
        key = (at["data"], at["strides"], table.shape)
        if key not in known:
            known[key] = table.astype(np.float32)
        return known[key]

    def lighter(group: EdgeBatch) -> EdgeBatch:
        tables = group.tables
        light = tuple(map(single, tables)) if isinstance(tables, tuple) else single(tables)
        return dataclasses.replace(group, tables=light)

    forth, back = ([[lighter(g) for g in level] for level in way] for way in groups)
    return forth, back


def to_original_states(graph: WorkingNetwork, chain: MessageLayout, chosen: list[int]) -> Ints:
    """Core states by original number, at the variables' own places (others 0)."""
    assignment = np.zeros(len(graph.unary), dtype=np.int64)
    for v, s in zip(chain.variables, chosen, strict=True):
        assignment[v] = graph.tables.subsets.arrays[graph.states[v]][s]
    return assignment
