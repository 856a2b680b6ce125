"""The first exact reductions, batched over variables: forbidden states, bucket elimination of degree at most two.

The same reductions as `reduce`, in rounds on arrays: forbidden states are removed everywhere, then an independent set
of variables of degree at most 2 is eliminated. Variables are taken in ascending order, as in `reduce`, so that equal
layers share their tables and equal costs are broken alike. Where a round gets small, the rest is left to `reduce`.
Most of the 75,000 variables of a 126-layer model go this way; one by one they would take longer than the table
operations, which equal layers share.

Example: of a ring of forty equal variables every second one is eliminated, then every second one of those left.

>>> from jshard._search.cost_network import build
>>> from jshard._search.exact.table_pool import quantum
>>> step = np.array([[0.0, 3.0], [2.0, 0.0]])
>>> net = build([[0.0, 1.0]] * 40, [(i, (i + 1) % 40, step) for i in range(40)])
>>> graph = reduce_batched(net, TablePool(quantum(net)), min_round=1)
>>> [len(r.variables) for r in graph.elimination_rounds], len(graph.core), graph.offset
([20, 10, 5, 5], 0, 0.0)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jshard._core.arrays import Ints
from jshard._core.row_codes import first_occurrence_codes, row_codes
from jshard._search.cost_network import LARGE_NETWORK, CostNetwork
from jshard._search.exact.elimination_records import ArgminTables, EliminationRound
from jshard._search.exact.table_pool import NONE, TablePool, quantum
from jshard._search.exact.working_network import Contradiction, WorkingNetwork, contradiction, working_network


MIN_ROUND = 64  # variables of a round; fewer are left to be reduced one by one


def starting_network(network: CostNetwork, tables: TablePool | None = None) -> WorkingNetwork:
    """The working network, a large one after its first reductions; `tables` is the pool for its tables."""
    tables = tables or TablePool(quantum(network))
    if network.size >= LARGE_NETWORK:
        try:
            return reduce_batched(network, tables)
        except Contradiction:
            pass  # reductions one by one tell where it was met
    return working_network(network, tables)


def reduce_batched(network: CostNetwork, tables: TablePool, min_round: int = MIN_ROUND) -> WorkingNetwork:
    """The working network of a cost network after its first reductions.

    Arguments:

    - `network`: the network.
    - `tables`: the pool for its tables.
    - `min_round`: variables that a round changes at least.

    Raises `Contradiction` where no assignment has finite cost.
    """
    batch = _BatchedReduction(network, tables)
    batch.remove_forbidden(min_round)
    while True:
        while batch.eliminate(1) >= min_round:
            batch.remove_forbidden(min_round)
        if batch.eliminate(2) < min_round:
            return batch.working_network()
        batch.remove_forbidden(min_round)


def _map_rows(columns: tuple[Ints, ...], fn: Callable) -> Ints:
    """`fn` of every row of integer columns (>= -1), evaluated once per distinct row."""
    codes, representatives = first_occurrence_codes(row_codes(*[c + 1 for c in columns]))
    rows = zip(*[c[representatives].tolist() for c in columns], strict=True)
    return np.array([fn(*row) for row in rows])[codes]


class _BatchedReduction:
    """The network as arrays while rounds change it; used once.

    Edges are sorted by `code` = low * n + high; `table` has the states of `low` as rows, `transposed` those of
    `high`.
    """

    def __init__(self, network: CostNetwork, tables: TablePool):
        self.tables, self.n = tables, network.size
        num_states = np.array([len(t) for t in network.unary])[network.node_table]
        self.original_size = self.n, int(num_states.sum())
        self.offset, self.rounds = 0.0, []
        self.changed = np.ones(self.n, dtype=bool)  # variables whose unary table changed
        all_states = np.array([tables.subsets(np.arange(len(t))) for t in network.unary], dtype=np.int64)
        zero = np.array([tables.table_id(np.zeros(len(t))) for t in network.unary], dtype=np.int64)
        own = np.array([tables.quantized_table_id(t) for t in network.unary], dtype=np.int64)
        self.states, self.unary = all_states[network.node_table], zero[network.node_table]
        self.add_unaries(np.arange(self.n), own[network.node_table])
        i, j = network.edges.T
        table = np.array(tables.quantized_table_ids(network.pairwise), dtype=np.int64)
        table = table[network.edge_table]
        loop = i == j
        self.add_unaries(
            i[loop], _map_rows((table[loop],), lambda t: tables.table_id(np.diag(tables.arrays[t])))
        )
        i, j, table = i[~loop], j[~loop], table[~loop]
        over = i > j
        table[over] = _map_rows((table[over],), tables.transpose)
        self.code = self.low = self.high = self.table = self.transposed = np.zeros(0, dtype=np.int64)
        self.add_edges(np.minimum(i, j), np.maximum(i, j), table)

    def add_unaries(self, v: Ints, table: Ints) -> None:
        """Add unary tables to variables; a variable may occur several times."""
        order = np.argsort(v, kind="stable")
        v, table = v[order], table[order]
        begin = np.flatnonzero(np.diff(v, prepend=-1))
        nth = np.arange(len(v)) - np.repeat(begin, np.diff(begin, append=len(v)))
        self.changed[v] = True
        for k in range(int(nth.max(initial=-1)) + 1):
            part = nth == k
            sums = _map_rows((self.unary[v[part]], table[part]), self.tables.add_unaries)
            if np.isinf(sums[:, 1]).any():
                raise contradiction(v[part][np.isinf(sums[:, 1])][:1])
            self.unary[v[part]] = sums[:, 0].astype(np.int64)
            self.offset += float(sums[:, 1].sum())

    def add_edges(self, low: Ints, high: Ints, table: Ints) -> None:
        """Add edges, merging them with those that exist between the same two variables."""
        code = low * self.n + high
        order = np.argsort(code, kind="stable")
        code, table = code[order], table[order]
        first = np.diff(code, prepend=-1) != 0
        distinct = codes = code[first]
        while len(codes):  # one of parallel edges in each turn
            t, code, table = table[first], code[~first], table[~first]
            at = np.minimum(np.searchsorted(self.code, codes), max(len(self.code) - 1, 0))
            exists = self.code[at] == codes if len(self.code) else np.zeros(len(codes), dtype=bool)
            self.table[at[exists]] = _map_rows((self.table[at[exists]], t[exists]), self.tables.add_pairwise)
            codes, t = codes[~exists], t[~exists]
            merged = np.concatenate([self.code, codes])
            order = np.argsort(merged, kind="stable")  # two sorted runs
            self.code = merged[order]
            self.low = np.concatenate([self.low, codes // self.n])[order]
            self.high = np.concatenate([self.high, codes % self.n])[order]
            self.table, self.transposed = (
                np.concatenate([x, t])[order] for x in (self.table, self.transposed)
            )
            first = np.diff(code, prepend=-1) != 0
            codes = code[first]
        self.normalize(np.searchsorted(self.code, distinct))

    def normalize(self, edges: Ints) -> None:
        """Normalise some edges; their row and column minima go to the unary tables of the ends."""
        parts = _map_rows((self.table[edges],), lambda t: self.tables.normalize_sum(t, NONE)).reshape(-1, 4)
        self.table[edges], self.transposed[edges] = parts[:, 0], parts[:, 1]
        v = np.concatenate([self.low[edges], self.high[edges]])
        minima = np.concatenate([parts[:, 2], parts[:, 3]])
        self.add_unaries(v[minima != NONE], minima[minima != NONE])
        if (parts[:, 0] == NONE).any():
            self.keep_edges(self.table != NONE)

    def keep_edges(self, keep: np.ndarray) -> None:
        """Only the edges of a mask."""
        self.code, self.low, self.high = self.code[keep], self.low[keep], self.high[keep]
        self.table, self.transposed = self.table[keep], self.transposed[keep]

    def remove_forbidden(self, min_round: int) -> None:
        """Remove forbidden states, and those that this forbids elsewhere, while at least so many variables change."""
        tables = self.tables
        while True:
            v = np.flatnonzero(self.changed & (self.unary != NONE))
            subset = _map_rows((self.unary[v],), tables.feasible_states)
            v, subset = v[subset != NONE], subset[subset != NONE]
            if len(v) < min_round:
                return
            if any(not len(tables.subsets.arrays[s]) for s in np.unique(subset).tolist()):
                raise contradiction(v[:1])
            self.changed[:] = False
            restricted = _map_rows((self.unary[v], subset), tables.restrict_unary)
            self.unary[v] = restricted[:, 0].astype(np.int64)
            self.offset += float(restricted[:, 1].sum())
            self.states[v] = _map_rows((self.states[v], subset), tables.compose_subsets)
            kept = np.full(self.n, NONE)
            kept[v] = subset
            rows, columns = kept[self.low], kept[self.high]
            edges = np.flatnonzero((rows != NONE) | (columns != NONE))
            self.table[edges] = _map_rows((self.table[edges], rows[edges], columns[edges]), self.submatrix)
            self.normalize(edges)

    def submatrix(self, table: int, rows: int, columns: int) -> int:
        """Subsets of a table's rows and columns (NONE: all)."""
        tables = self.tables
        if rows != NONE:
            table = tables.take_rows(table, rows)
        if columns != NONE:
            table = tables.transpose(tables.take_rows(tables.transpose(table), columns))
        return table

    def eliminate(self, max_degree: int) -> int:
        """One round: eliminate an independent set of variables of at most this degree (1 or 2); returns its size."""
        tables = self.tables
        chosen, degree = self._independent_set(max_degree, self._cheap())
        gone = np.flatnonzero(chosen)
        # Their edges, sorted by eliminated variable v and neighbour w, seen from either end.
        a, b = np.flatnonzero(chosen[self.low]), np.flatnonzero(chosen[self.high])
        v, w = np.concatenate([self.low[a], self.high[b]]), np.concatenate([self.high[a], self.low[b]])
        from_v = np.concatenate([self.table[a], self.transposed[b]])
        from_w = np.concatenate([self.transposed[a], self.table[b]])
        order = np.lexsort((w, v))
        v, w, from_v, from_w = v[order], w[order], from_v[order], from_w[order]
        self.keep_edges(~(chosen[self.low] | chosen[self.high]))
        at = np.searchsorted(v, gone)  # first edge of each
        count = degree[gone]
        neighbours, edges = np.full((len(gone), 2), -1), np.full((len(gone), 2), NONE)
        for k in range(2):
            has = count > k
            neighbours[has, k], edges[has, k] = w[at[has] + k], from_v[at[has] + k]
        unary = self.unary[gone]
        if len(gone):
            self.rounds.append(self._record(gone, neighbours, edges, count))
        self.unary[gone] = NONE
        one, two = np.flatnonzero(count == 1), np.flatnonzero(count == 2)
        self.add_unaries(neighbours[one, 0], _map_rows((from_w[at[one]], unary[one]), tables.project))
        products = _map_rows((from_w[at[two]], unary[two], edges[two, 1]), tables.min_plus_product)
        self.add_edges(neighbours[two, 0], neighbours[two, 1], products)
        return len(gone)

    def _cheap(self) -> np.ndarray:
        """The mask of the variables that an edge's other end decides, but for few states (`TablePool.decides`)."""
        cheap = np.zeros(self.n, dtype=bool)
        for end, tables in ((self.low, self.table), (self.high, self.transposed)):
            cheap[end[_map_rows((tables,), self.tables.decides).astype(bool)]] = True
        return cheap

    def _independent_set(self, max_degree: int, first_of_all: np.ndarray) -> tuple[np.ndarray, Ints]:
        """(mask, degree of all variables): greedily, of the variables of at most this degree.

        In ascending order, but for a mask of those that come first of all.
        """
        rank = np.argsort(np.argsort(~first_of_all, kind="stable"))
        low, high = self.low, self.high
        degree = np.bincount(low, minlength=self.n) + np.bincount(high, minlength=self.n)
        chosen = (degree <= max_degree) & (self.unary != NONE)
        both = chosen[low] & chosen[high]
        left, right = low[both], high[both]  # conflicts not resolved yet
        swap = rank[left] > rank[right]
        left, right = np.where(swap, right, left), np.where(swap, left, right)
        undecided = chosen.copy()
        while len(left):
            first = undecided.copy()  # no undecided neighbour of a smaller number: chosen
            first[right] = False
            chosen[right[first[left]]] = False
            undecided &= chosen
            undecided &= ~first
            both = undecided[left] & undecided[right]
            left, right = left[both], right[both]
        return chosen, degree

    def _record(self, gone: Ints, neighbours: Ints, edges: Ints, count: Ints) -> EliminationRound:
        """The record of a round, equal tables once."""
        unary, states = self.unary[gone], self.states[gone]
        subsets = np.where(neighbours >= 0, self.states[neighbours], NONE)
        codes, representatives = first_occurrence_codes(
            row_codes(unary, states, *(edges + 1).T, *(subsets + 1).T)
        )
        records = [
            ArgminTables(
                int(unary[i]), int(states[i]), tuple(edges[i, :m].tolist()), tuple(subsets[i, :m].tolist())
            )
            for i, m in zip(representatives, count[representatives].tolist(), strict=True)
        ]
        return EliminationRound(gone, neighbours, codes, tuple(records))

    def working_network(self) -> WorkingNetwork:
        """The network of what is left."""
        graph = WorkingNetwork(
            self.tables,
            self.unary.tolist(),
            [{} for _ in range(self.n)],
            self.states.tolist(),
            self.offset,
            core_superset=np.flatnonzero(self.unary != NONE).tolist(),
            elimination_rounds=tuple(self.rounds),
            original_size=self.original_size,
        )
        adj = graph.adj
        edges = np.stack([self.low, self.high, self.table, self.transposed], axis=1)
        for i, j, table, transposed in edges.tolist():
            adj[i][j], adj[j][i] = table, transposed
        return graph
