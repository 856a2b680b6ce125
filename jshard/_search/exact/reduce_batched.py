"""The first reductions, of all variables that are alike at once.

Problem.  Of the 75,000 variables of 126 layers 58,000 have forbidden states or at most two neighbours. To reduce them
one after the other takes longer than everything that is computed on the way, since equal layers share that.

Idea.  The same reductions in rounds, on arrays: forbidden states go everywhere, then variables with at most two
neighbours, of which no two are neighbours of each other. They are taken in the order of the variables, as `reduce`
would take them, so that layers share their tables and equal costs are settled alike. What is left, and where rounds
get small, is for `reduce`.

Worked case.  Of a ring of forty equal variables every second one goes first, then every second one of the others.

>>> from jshard._search.cost_network import build
>>> from jshard._search.exact.table_pool import quantum
>>> step = np.array([[0.0, 3.0], [2.0, 0.0]])
>>> net = build([[0.0, 1.0]] * 40, [(i, (i + 1) % 40, step) for i in range(40)])
>>> graph = early(net, Tables(quantum(net)), least=1)
>>> [len(r.variables) for r in graph.rounds], len(graph.core), graph.offset
([20, 10, 5, 5], 0, 0.0)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jshard._core.row_codes import first_occurrence_codes, row_codes
from jshard._search.cost_network import CostNetwork, Ints
from jshard._search.exact.elimination_records import EliminationRound
from jshard._search.exact.reduce import WorkingNetwork, contradiction
from jshard._search.exact.table_pool import NONE, TablePool


LEAST = 64  # variables of a round; fewer are left to be reduced one by one


def reduce_batched(network: CostNetwork, tables: TablePool, min_round: int = LEAST) -> WorkingNetwork:
    """The working graph of a network after its first reductions. Raises `Contradiction` where nothing is possible."""
    work = _BatchedReduction(network, tables)
    work.shrink(min_round)
    while True:
        while work.eliminate(1) >= min_round:
            work.shrink(min_round)
        if work.eliminate(2) < min_round:
            return work.graph()
        work.shrink(min_round)


def _each(columns: tuple[Ints, ...], one: Callable) -> Ints:
    """What `one` gives for each row of some columns of numbers from -1, asked once for equal rows."""
    alike, some = first_occurrence_codes(row_codes(*[c + 1 for c in columns]))
    rows = zip(*[c[some].tolist() for c in columns], strict=True)
    return np.array([one(*row) for row in rows])[alike]


class _BatchedReduction:
    """The network while rounds change it; used once."""

    def __init__(self, network: CostNetwork, tables: TablePool):
        self.tables, self.n = tables, network.size
        self.given = self.n, int(np.array([len(t) for t in network.unary])[network.node_table].sum())
        self.offset, self.rounds = 0.0, []
        self.touched = np.ones(self.n, dtype=bool)  # whose unary table has changed
        every = np.array([tables.subsets(np.arange(len(t))) for t in network.unary], dtype=np.int64)
        zero = np.array([tables.table_id(np.zeros(len(t))) for t in network.unary], dtype=np.int64)
        own = np.array([tables.quantized_table_id(t) for t in network.unary], dtype=np.int64)
        self.states, self.unary = every[network.node_table], zero[network.node_table]
        self.charge(np.arange(self.n), own[network.node_table])
        i, j = network.edges.T
        table = np.array([tables.quantized_table_id(t) for t in network.pairwise], dtype=np.int64)[
            network.edge_table
        ]
        loop = i == j
        self.charge(i[loop], _each((table[loop],), lambda t: tables.table_id(np.diag(tables.arrays[t]))))
        i, j, table = i[~loop], j[~loop], table[~loop]
        over = i > j
        table[over] = _each((table[over],), tables.transpose)
        # Edges in the order of low * n + high: the table with low's states as rows, and seen from high.
        self.code = self.low = self.high = self.table = self.back = np.zeros(0, dtype=np.int64)
        self.put(np.minimum(i, j), np.maximum(i, j), table)

    def charge(self, v: Ints, table: Ints) -> None:
        """Add unary tables to variables, several to one if need be."""
        order = np.argsort(v, kind="stable")
        v, table = v[order], table[order]
        begin = np.flatnonzero(np.diff(v, prepend=-1))
        nth = np.arange(len(v)) - np.repeat(begin, np.diff(begin, append=len(v)))
        self.touched[v] = True
        for k in range(int(nth.max(initial=-1)) + 1):
            part = nth == k
            found = _each((self.unary[v[part]], table[part]), self.tables.add_unaries)
            if np.isinf(found[:, 1]).any():
                raise contradiction(v[part][np.isinf(found[:, 1])][:1])
            self.unary[v[part]] = found[:, 0].astype(np.int64)
            self.offset += float(found[:, 1].sum())

    def put(self, low: Ints, high: Ints, table: Ints) -> None:
        """New edges, beside those that are there between the same two."""
        code = low * self.n + high
        order = np.argsort(code, kind="stable")
        code, table = code[order], table[order]
        first = np.diff(code, prepend=-1) != 0
        every = new = code[first]
        while len(new):
            t, code, table = table[first], code[~first], table[~first]
            at = np.minimum(np.searchsorted(self.code, new), max(len(self.code) - 1, 0))
            there = self.code[at] == new if len(self.code) else np.zeros(len(new), dtype=bool)
            self.table[at[there]] = _each((self.table[at[there]], t[there]), self.tables.add_pairwise)
            new, t = new[~there], t[~there]
            joined = np.concatenate([self.code, new])
            order = np.argsort(joined, kind="stable")  # two runs in order
            self.code = joined[order]
            self.low = np.concatenate([self.low, new // self.n])[order]
            self.high = np.concatenate([self.high, new % self.n])[order]
            self.table, self.back = (np.concatenate([x, t])[order] for x in (self.table, self.back))
            first = np.diff(code, prepend=-1) != 0
            new = code[first]
        self.settle(np.searchsorted(self.code, every))

    def settle(self, edges: Ints) -> None:
        """Normalise some edges; what is separable goes to the ends."""
        parts = _each((self.table[edges],), lambda t: self.tables.normalize_sum(t, NONE)).reshape(-1, 4)
        self.table[edges], self.back[edges] = parts[:, 0], parts[:, 1]
        v = np.concatenate([self.low[edges], self.high[edges]])
        charged = np.concatenate([parts[:, 2], parts[:, 3]])
        self.charge(v[charged != NONE], charged[charged != NONE])
        if (parts[:, 0] == NONE).any():
            self.leave(self.table != NONE)

    def leave(self, keep: np.ndarray) -> None:
        """Only some of the edges."""
        self.code, self.low, self.high = self.code[keep], self.low[keep], self.high[keep]
        self.table, self.back = self.table[keep], self.back[keep]

    def shrink(self, least: int) -> None:
        """Forbidden states go, and what that forbids elsewhere."""
        tables = self.tables
        while True:
            v = np.flatnonzero(self.touched & (self.unary != NONE))
            subset = _each((self.unary[v],), tables.feasible_states)
            v, subset = v[subset != NONE], subset[subset != NONE]
            if len(v) < least:
                return
            if any(not len(tables.subsets.arrays[s]) for s in np.unique(subset).tolist()):
                raise contradiction(v[:1])
            self.touched[:] = False
            found = _each((self.unary[v], subset), tables.restrict_unary)
            self.unary[v] = found[:, 0].astype(np.int64)
            self.offset += float(found[:, 1].sum())
            self.states[v] = _each((self.states[v], subset), tables.compose_subsets)
            cut = np.full(self.n, NONE)
            cut[v] = subset
            rows, columns = cut[self.low], cut[self.high]
            edges = np.flatnonzero((rows != NONE) | (columns != NONE))
            self.table[edges] = _each((self.table[edges], rows[edges], columns[edges]), self.part)
            self.settle(edges)

    def part(self, table: int, rows: int, columns: int) -> int:
        """Some rows and columns of a table."""
        tables = self.tables
        if rows != NONE:
            table = tables.rows(table, rows)
        if columns != NONE:
            table = tables.transpose(tables.rows(tables.transpose(table), columns))
        return table

    def eliminate(self, most: int) -> int:
        """One round: variables with at most so many neighbours go, no two of which are neighbours; how many went."""
        low, high, tables = self.low, self.high, self.tables
        degree = np.bincount(low, minlength=self.n) + np.bincount(high, minlength=self.n)
        may = (degree <= most) & (self.unary != NONE)
        # In order: each one that is no neighbour of one before it that goes.
        both = may[low] & may[high]
        left, right = low[both], high[both]
        waits = may.copy()
        while len(left):
            goes = waits.copy()
            goes[right] = False
            may[right[goes[left]]] = False
            waits &= may
            waits &= ~goes
            both = waits[left] & waits[right]
            left, right = left[both], right[both]
        gone = np.flatnonzero(may)
        a, b = np.flatnonzero(may[low]), np.flatnonzero(may[high])
        v, w = np.concatenate([low[a], high[b]]), np.concatenate([high[a], low[b]])
        own, other = (
            np.concatenate([self.table[a], self.back[b]]), np.concatenate([self.back[a], self.table[b]])
        )  # fmt: skip
        order = np.lexsort((w, v))
        v, w, own, other = v[order], w[order], own[order], other[order]
        self.leave(~(may[low] | may[high]))
        at = np.searchsorted(v, gone)
        near, edges, count = np.full((len(gone), 2), -1), np.full((len(gone), 2), NONE), degree[gone]
        for k in range(2):
            near[count > k, k], edges[count > k, k] = w[at[count > k] + k], own[at[count > k] + k]
        subsets = np.where(near >= 0, self.states[near], NONE)
        unary = self.unary[gone]
        kind, some = first_occurrence_codes(
            row_codes(unary, self.states[gone], *(edges + 1).T, *(subsets + 1).T)
        )
        kinds = [
            (int(unary[s]), int(self.states[gone[s]]), tuple(edges[s, :m].tolist()), tuple(subsets[s, :m].tolist()))
            for s, m in zip(some, count[some].tolist(), strict=True)
        ]  # fmt: skip
        if len(gone):
            self.rounds.append(EliminationRound(gone, near, kind, tuple(kinds)))
        self.unary[gone] = NONE
        one, two = np.flatnonzero(count == 1), np.flatnonzero(count == 2)
        self.charge(near[one, 0], _each((other[at[one]], unary[one]), tables.project))
        self.put(
            near[two, 0],
            near[two, 1],
            _each((other[at[two]], unary[two], edges[two, 1]), tables.min_plus_product),
        )
        return len(gone)

    def graph(self) -> WorkingNetwork:
        """The graph of what is left."""
        alive = np.flatnonzero(self.unary != NONE).tolist()
        graph = WorkingNetwork(
            self.tables, self.unary.tolist(), [{} for _ in range(self.n)], self.states.tolist(), self.offset,
            core_superset=alive, elimination_rounds=tuple(self.rounds), original_size=self.given,
        )  # fmt: skip
        adj = graph.adj
        edges = np.stack([self.low, self.high, self.table, self.back], axis=1)
        for i, j, table, back in edges.tolist():
            adj[i][j], adj[j][i] = table, back
        return graph
