"""Batches of edges whose TRW-S messages (Kolmogorov 2006) are computed by one numpy operation.

Along an edge from a sender with k states to a receiver with m states a message is the column minimum of
table (k, m) + cost (k,), where the cost is the sender's share of its total less the message that it received on this
edge. The edges of a wave whose tables have one shape are batched in one of three ways:

- `SharedTableBatch`: edges with one table, which is not copied;
- `StackedBatch`: tables stacked along an axis, those of several small shapes padded to one;
- `SeparateBatch`: large tables, one operation each.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jshard._core.arrays import Floats, Ints


STACKED_TABLE_MAX = 4096  # entries of a table above which it is not stacked with others
LAZY_INDEX_FROM = 1 << 20  # message entries above which index arrays are expanded anew in each pass
SHARED_TABLE_EDGES = 4  # edges of a wave with one table from which on they are batched without copying it
SHARED_TABLE_ENTRIES = 1000  # entries of a shared table from which on equal costs are minimised once
SMALL_BATCH_ENTRIES = 20_000  # table entries that are processed in less time than a numpy call takes
CACHE_ENTRIES = 1 << 17  # table entries processed at once: intermediate results stay in the cache


@dataclass(frozen=True)
class EdgeIndices:
    """Where n edges read and write."""

    sender_states: Ints  # (k, n) -> index into all states end to end
    in_messages: Ints  # (k, n) -> index into messages: what the sender received on this edge
    out_messages: Ints  # (n, m), or (m, n) for a batch with edges last -> index into messages

    def expand(self) -> EdgeIndices:
        """Itself."""
        return self


@dataclass(frozen=True)
class FirstIndices:
    """The same by the first index of each edge; expanded anew where the full arrays would be long."""

    sender_states: Ints  # (n,)
    in_messages: Ints  # (n,)
    out_messages: Ints  # (n,)
    k: int  # states of the sender
    m: int  # states of the receiver
    edges_last: bool

    def expand(self) -> EdgeIndices:
        """All indices."""
        rows, columns = np.arange(self.k)[:, None], np.arange(self.m)
        return EdgeIndices(
            self.sender_states + rows,
            self.in_messages + rows,
            self.out_messages + columns[:, None] if self.edges_last else self.out_messages[:, None] + columns,
        )


@dataclass(frozen=True)
class EdgeBatch(abc.ABC):
    """Edges from one wave to later ones (in one direction) whose tables have one shape.

    With `edges_last` the edges are the last axis, which is then the longer one.
    """

    indices: EdgeIndices | FirstIndices
    edges_last: bool

    @abc.abstractmethod
    def _minimize(self, cost: Floats) -> Floats:
        """Minima over the sender's states of table + cost (k, n): (n, m), or (m, n) with edges last."""

    @abc.abstractmethod
    def single_precision(self, convert: Callable[[Floats], Any]) -> EdgeBatch:
        """The same batch with converted tables."""

    @property
    @abc.abstractmethod
    def dtype(self) -> np.dtype:
        """The precision of the tables."""

    def send(self, share: Floats, messages: Floats) -> float:
        """Compute the messages and write them, normalised to minimum 0; returns the sum of the minima.

        Arguments:

        - `share`: every state's total, divided by the edges that share it.
        - `messages`: all message entries; the batch's own are replaced.
        """
        indices = self.indices.expand()
        cost = share[indices.sender_states] - messages[indices.in_messages]
        sent = self._minimize(cost.astype(self.dtype, copy=False))
        least = np.minimum.reduce(sent, axis=0 if self.edges_last else 1)
        messages[indices.out_messages] = sent - (least if self.edges_last else least[:, None])
        return float(least.sum())


@dataclass(frozen=True)
class StackedBatch(EdgeBatch):
    """One table per edge; the sender's states come first, so that minima over them run along the memory."""

    tables: Floats  # (k, n, m), or (k, m, n) with edges last

    def _minimize(self, cost: Floats) -> Floats:
        return np.minimum.reduce(
            self.tables + (cost[:, None] if self.edges_last else cost[:, :, None]), axis=0
        )

    def single_precision(self, convert: Callable[[Floats], Any]) -> EdgeBatch:
        return dataclasses.replace(self, tables=convert(self.tables))

    @property
    def dtype(self) -> np.dtype:
        return self.tables.dtype


@dataclass(frozen=True)
class SharedTableBatch(EdgeBatch):
    """One table for all edges; a large one never has the edges last."""

    table: Floats  # (k, m)

    def _minimize(self, cost: Floats) -> Floats:
        if self.edges_last:
            return np.minimum.reduce(self.table[:, :, None] + cost[:, None], axis=0)
        if self.table.size >= SHARED_TABLE_ENTRIES:
            return min_plus_columns(self.table, cost)
        return np.minimum.reduce(self.table[:, None] + cost[:, :, None], axis=0)

    def single_precision(self, convert: Callable[[Floats], Any]) -> EdgeBatch:
        return dataclasses.replace(self, table=convert(self.table))

    @property
    def dtype(self) -> np.dtype:
        return self.table.dtype


@dataclass(frozen=True)
class SeparateBatch(EdgeBatch):
    """One large table per edge, each processed alone; edges are never last."""

    tables: tuple[Floats, ...]  # (k, m) each

    def _minimize(self, cost: Floats) -> Floats:
        sent = np.empty((len(self.tables), self.tables[0].shape[1]), cost.dtype)
        for e, table in enumerate(self.tables):
            np.minimum.reduce(table + cost[:, e, None], axis=0, out=sent[e])
        return sent

    def single_precision(self, convert: Callable[[Floats], Any]) -> EdgeBatch:
        return dataclasses.replace(self, tables=tuple(map(convert, self.tables)))

    @property
    def dtype(self) -> np.dtype:
        return self.tables[0].dtype


def min_plus_columns(table: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Minima over the rows of table (k, m) + each column of costs (k, n): (n, m).

    Repeated layers have columns that are exactly equal; each distinct one is minimised once.
    """
    n, m = costs.shape[1], table.shape[1]
    if n >= 8:
        bits = np.uint64 if costs.dtype == np.float64 else np.uint32
        multipliers = np.arange(1, 2 * len(costs), 2, dtype=bits) * bits(2654435761)
        hashes = (costs.view(bits) * multipliers[:, None]).sum(axis=0)
        _, first, distinct = np.unique(hashes, True, True)
        if 2 * len(first) <= n and np.array_equal(costs, costs[:, first[distinct]]):
            return min_plus_columns(table, costs[:, first])[distinct]
    step = max(1, CACHE_ENTRIES // table.size)
    sent = np.empty((n, m), costs.dtype)
    for a in range(0, n, step):
        part = table[:, None] + costs[:, a : a + step, None]
        np.minimum.reduce(part, axis=0, out=sent[a : a + step])
    return sent


@dataclass(frozen=True)
class DirectedEdges:
    """All edges of a core in one direction."""

    wave: Ints  # (E,) the sender's
    k: Ints  # (E,) states of the sender
    m: Ints  # (E,) states of the receiver
    tables: list[int]  # (E,) table numbers, the sender's states as rows
    sender_states: Ints  # (E,) first indices, as in `FirstIndices`
    in_messages: Ints
    out_messages: Ints
    num_states: int  # of all variables together
    num_messages: int  # message entries

    def first_indices(self, edges: Ints, edges_last: bool) -> FirstIndices:
        """The indices of some edges of one shape."""
        k, m = int(self.k[edges[0]]), int(self.m[edges[0]])
        of = self.sender_states[edges], self.in_messages[edges], self.out_messages[edges]
        return FirstIndices(*of, k, m, edges_last)

    def indices(self, edges: Ints, edges_last: bool) -> EdgeIndices | FirstIndices:
        """The same, expanded unless that is long."""
        first = self.first_indices(edges, edges_last)
        return first if self.num_messages > LAZY_INDEX_FROM else first.expand()


def batch_edges(edges: DirectedEdges, arrays: Sequence[Floats], num_waves: int) -> list[list[EdgeBatch]]:
    """The batches of each wave.

    Arguments:

    - `edges`: the edges.
    - `arrays`: the tables by number.
    - `num_waves`: how many waves there are.
    """
    of_shape: dict[tuple[int, int, int], list[int]] = {}
    for e, key in enumerate(zip(edges.wave.tolist(), edges.k.tolist(), edges.m.tolist(), strict=True)):
        of_shape.setdefault(key, []).append(e)
    batches: list[list[EdgeBatch]] = [[] for _ in range(num_waves)]
    small: list[list[_SmallBatch]] = [[] for _ in range(num_waves)]
    for (wave, k, m), members in of_shape.items():
        of_table: dict[int, list[int]] = {}
        for e in members:
            of_table.setdefault(edges.tables[e], []).append(e)
        if len(members) * k * m <= SMALL_BATCH_ENTRIES and edges.num_messages <= LAZY_INDEX_FROM:
            order = np.concatenate([*of_table.values()])
            tables = np.array([arrays[t] for t, of in of_table.items() for _ in of])
            small[wave].append(_SmallBatch(edges.first_indices(order, False), tables))
        elif k * m > STACKED_TABLE_MAX:
            batches[wave] += _unstacked(edges, arrays, of_table)
        else:
            batches[wave] += _stacked(edges, arrays, of_table)
    for wave in range(num_waves):
        batches[wave] += _pad_batches(small[wave], edges.num_states, edges.num_messages)
    return batches


def _unstacked(
    edges: DirectedEdges, arrays: Sequence[Floats], of_table: dict[int, list[int]]
) -> list[EdgeBatch]:
    """Batches of large tables of one shape: those of one edge together, then one batch per shared table."""
    batches: list[EdgeBatch] = []
    single = {t: of[0] for t, of in of_table.items() if len(of) == 1}
    if single:
        indices = edges.indices(np.array([*single.values()], dtype=np.int64), False)
        batches.append(SeparateBatch(indices, False, tuple([arrays[t] for t in single])))
    for t, of in of_table.items():
        if len(of) > 1:
            batches += _shared(edges, arrays[t], of)
    return batches


def _stacked(
    edges: DirectedEdges, arrays: Sequence[Floats], of_table: dict[int, list[int]]
) -> list[EdgeBatch]:
    """Batches of tables of one shape: those that several edges share, then the others stacked."""
    batches: list[EdgeBatch] = []
    others: list[tuple[int, Floats]] = []
    for t, of in of_table.items():
        if len(of) >= SHARED_TABLE_EDGES or len(of_table) == 1:
            batches += _shared(edges, arrays[t], of)
        else:
            others += [(e, arrays[t]) for e in of]
    if others:
        members = np.array([e for e, _ in others], dtype=np.int64)
        tables = np.stack([t for _, t in others], axis=1)  # (k, n, m)
        k, n, m = tables.shape
        step = max(1, CACHE_ENTRIES // (k * m))
        for a in range(0, n, step):
            part, of = tables[:, a : a + step], members[a : a + step]
            last = len(of) > m
            part = np.ascontiguousarray(part.transpose(0, 2, 1) if last else part)
            batches.append(StackedBatch(edges.indices(of, last), last, part))
    return batches


def _shared(edges: DirectedEdges, table: Floats, members: list[int]) -> list[EdgeBatch]:
    """Batches of edges with one table: one of a large table, else as many as fit into the cache each."""
    k, m = table.shape
    large = k * m >= SHARED_TABLE_ENTRIES
    step = len(members) if large else max(1, CACHE_ENTRIES // (k * m))
    batches: list[EdgeBatch] = []
    for a in range(0, len(members), step):
        part = np.array(members[a : a + step], dtype=np.int64)
        last = not large and len(part) > m
        batches.append(SharedTableBatch(edges.indices(part, last), last, table))
    return batches


@dataclass(frozen=True)
class _SmallBatch:
    """Edges of a wave whose tables have one shape, too few to be worth an operation of their own."""

    indices: FirstIndices
    tables: Floats  # (n, k, m)


def _pad_batches(small: list[_SmallBatch], num_states: int, num_messages: int) -> list[EdgeBatch]:
    """Stacks of tables of several shapes, padded by forbidden states while padding costs less than a numpy call."""
    merged: list[list[_SmallBatch]] = []
    count = entries = most_rows = most_columns = 0
    for batch in sorted(small, key=lambda b: (b.tables.shape[1] * b.tables.shape[2], b.tables.shape)):
        n, k, m = batch.tables.shape
        padded = (count + n) * max(most_rows, k) * max(most_columns, m)
        if not merged or padded > entries + batch.tables.size + SMALL_BATCH_ENTRIES:
            merged.append([])
            count = entries = most_rows = most_columns = 0
        merged[-1].append(batch)
        count, entries = count + n, entries + batch.tables.size
        most_rows, most_columns = max(most_rows, k), max(most_columns, m)
    return [_pad(batches, num_states, num_messages) for batches in merged]


def _pad(batches: list[_SmallBatch], num_states: int, num_messages: int) -> EdgeBatch:
    """One stack of batches. A padding state reads the share and the message behind the last ones, which are zero; its
    message goes to the entry behind that, which is not read."""
    k, m = (max(b.tables.shape[axis] for b in batches) for axis in (1, 2))
    count = sum(len(b.tables) for b in batches)
    tables = np.full((count, k, m), np.inf)
    sender_states, in_messages = np.full((count, k), num_states), np.full((count, k), num_messages)
    out_messages = np.full((count, m), num_messages + 1)
    at = 0
    for b in batches:
        n, rows, columns = b.tables.shape
        part = slice(at, at + n)
        indices = b.indices.expand()
        tables[part, :rows, :columns] = b.tables
        sender_states[part, :rows] = indices.sender_states.T
        in_messages[part, :rows] = indices.in_messages.T
        out_messages[part, :columns] = indices.out_messages
        at += n
    last = count > m
    return StackedBatch(
        EdgeIndices(
            np.ascontiguousarray(sender_states.T),
            np.ascontiguousarray(in_messages.T),
            np.ascontiguousarray(out_messages.T if last else out_messages),
        ),
        last,
        np.ascontiguousarray(tables.transpose((1, 2, 0) if last else (1, 0, 2))),
    )


def single_precision(batches: Sequence[Sequence[EdgeBatch]]) -> list[list[EdgeBatch]]:
    """The same batches with tables in single precision; edges that share a table still do."""
    known: dict[tuple, np.ndarray] = {}

    def convert(table: Floats) -> np.ndarray:
        at = table.__array_interface__
        key = (at["data"], at["strides"], table.shape)
        if key not in known:
            known[key] = table.astype(np.float32)
        return known[key]

    return [[batch.single_precision(convert) for batch in wave] for wave in batches]
