"""The working network that reductions change: tables by number, adjacency, elimination records, contradictions.

Every change preserves the least cost: cost moves between tables and the offset (reparametrisation), states and
variables are removed with the record that finds them again.

>>> from jshard._search.cost_network import build
>>> net = build([[1.0, 3.0], [0.0, 2.0]], [(0, 1, [[0.0, 4.0], [5.0, 0.0]]), (0, 1, [[1.0, 1.0], [1.0, 1.0]])])
>>> graph = working_network(net)
>>> graph.core, graph.offset, graph.tables.arrays[graph.adj[0][1]].tolist()
([0, 1], 2.0, [[0.0, 4.0], [5.0, 0.0]])
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jshard._core.errors import SearchError
from jshard._search.cost_network import CostNetwork
from jshard._search.exact.elimination_records import ArgminTables, Elimination, EliminationRound
from jshard._search.exact.table_pool import NONE, EdgeParts, TablePool, quantum


class Contradiction(SearchError):
    """No assignment has finite cost; `variables` says where the contradiction was met."""

    variables: tuple[int, ...] = ()


def contradiction(variables: Iterable[int]) -> Contradiction:
    """The error for a contradiction met at some variables."""
    where = tuple(sorted({int(v) for v in variables}))
    shown = ", ".join(map(str, where[:8])) + (", ..." if len(where) > 8 else "")
    error = Contradiction(
        "no assignment is possible: what these variables' own costs and their neighbours' allow "
        "leaves nothing to choose",
        where=f"variables {shown}",
        fix="relax one of the pins that meet there",
    )
    error.variables = where
    return error


@dataclass
class WorkingNetwork:
    """The network while it is reduced. Variables keep their numbers; an eliminated one has `unary` NONE."""

    tables: TablePool
    unary: list[int]
    adj: list[dict[int, int]]  # adj[v][w]: edge table with v's states as rows
    states: list[int]  # subset of the original states that the tables still cover
    offset: float = 0.0  # constant cost taken out of all tables
    elimination_stack: list[Elimination] = field(default_factory=list)
    # Per variable, pseudo edge tables (`TablePool.memory_guard`) that keep states of fewer bytes from being dominated
    # by states of more. A guarded variable is not eliminated.
    memory_guards: list[tuple[int, ...]] = field(default_factory=list)
    core_superset: Sequence[int] = ()  # all variables of the core, and perhaps eliminated ones
    elimination_rounds: tuple[EliminationRound, ...] = ()  # eliminated before, by `reduce_batched`
    original_size: tuple[int, int] = (0, 0)  # variables and states of the network; (0, 0) where not counted

    def __post_init__(self) -> None:
        if not self.memory_guards:
            self.memory_guards = [()] * len(self.unary)
        self.core_superset = self.core_superset or range(len(self.unary))

    @property
    def core(self) -> list[int]:
        """The variables that are not eliminated, ascending."""
        unary = self.unary
        return [v for v in self.core_superset if unary[v] >= 0]  # NONE is the only negative number

    def fork(self, tables: TablePool | None = None) -> WorkingNetwork:
        """A copy of the core without guards and records; shares the table pool unless given another."""
        return WorkingNetwork(
            tables or self.tables,
            list(self.unary),
            [a.copy() if a else {} for a in self.adj],  # most are empty: of eliminated variables
            list(self.states),
            self.offset,
            core_superset=self.core,
        )

    def add_unary(self, v: int, table: int) -> None:
        """Add a unary table (or NONE) to a variable; its minimum goes to the offset."""
        if table != NONE:
            u = self.unary[v]
            known = self.tables.known_unary_sums.get((u, table) if u <= table else (table, u))
            self.unary[v], least = known or self.tables.add_unaries(u, table)
            if least == np.inf:
                raise contradiction([v, *self.adj[v]])
            self.offset += least

    def add_edge(self, v: int, w: int, table: int) -> None:
        """Add an edge table (v's states as rows), merging it with an existing edge."""
        self.set_edge(v, w, self.tables.normalize_sum(table, self.adj[v].get(w, NONE)))

    def set_edge(self, v: int, w: int, parts: EdgeParts) -> None:
        """Replace the edge between v and w by a normalised table, and charge its row and column minima."""
        table, transposed, row_minima, column_minima = parts
        if table == NONE:
            if w in self.adj[v]:
                del self.adj[v][w], self.adj[w][v]
        else:
            self.adj[v][w] = table
            self.adj[w][v] = transposed
        if row_minima != NONE:
            self.add_unary(v, row_minima)
        if column_minima != NONE:
            self.add_unary(w, column_minima)

    def restrict(self, v: int, keep: int) -> None:
        """Restrict v to a subset of its present states."""
        tables = self.tables
        if not len(tables.subsets.arrays[keep]):
            raise contradiction([v, *self.adj[v]])
        self.states[v] = tables.compose_subsets(self.states[v], keep)
        u, least = tables.restrict_unary(self.unary[v], keep)
        if least == np.inf:
            raise contradiction([v, *self.adj[v]])
        self.unary[v] = u
        self.offset += least
        if self.memory_guards[v]:
            self.memory_guards[v] = tables.restrict_guards(self.memory_guards[v], keep)
        # `set_edge` inlined: reductions spend most of their time here.
        edges, known = self.adj[v], tables.known_restricted_edges
        for w, table in tuple(edges.items()):
            edges_of_w = self.adj[w]
            del edges_of_w[v]
            table, transposed, row_minima, column_minima = known.get((table, keep)) or tables.restrict_edge(
                table, keep
            )
            if table == NONE:
                del edges[w]
            else:
                edges[w] = table
                edges_of_w[v] = transposed
            if row_minima != NONE:
                self.add_unary(v, row_minima)
            if column_minima != NONE:
                self.add_unary(w, column_minima)

    def contract(self, v: int, w: int, function: int) -> None:
        """Merge w into its neighbour v, whose state decides w's (`function`: w's state per state of v).

        The edges of w become edges of v.
        """
        tables = self.tables
        table = self.adj[v].pop(w)
        edges = list(self.adj[w].items())
        # w is recorded with v as its only neighbour: that edge has one finite entry per state of v.
        self.adj[w] = {v: self.adj[w][v]}
        self.adj[v][w] = table
        unary = self.unary[w]
        self.eliminate(w, contracted=True)
        guards = tables.restrict_guards(self.memory_guards[w], function)
        self.memory_guards[v] = tuple(sorted({*self.memory_guards[v], *guards}))
        columns = tables.subsets.arrays[function]
        self.add_unary(v, tables.table_id(tables.arrays[table][np.arange(len(columns)), columns]))
        self.add_unary(v, tables.take_rows(unary, function))
        for x, t in edges:
            if x != v:
                del self.adj[x][w]
                self.add_edge(v, x, tables.take_rows(t, function))

    def eliminate(self, v: int, contracted: bool = False) -> None:
        """Remove v, leaving the record of its tables; what it leaves on its neighbours is the caller's."""
        edges = self.adj[v]
        argmin = ArgminTables(
            self.unary[v], self.states[v], tuple(edges.values()), tuple([self.states[w] for w in edges])
        )
        self.elimination_stack.append(Elimination(v, tuple(edges), argmin, contracted))
        for w in edges:
            del self.adj[w][v]
        self.unary[v] = NONE
        self.adj[v] = {}


def working_network(network: CostNetwork, tables: TablePool | None = None) -> WorkingNetwork:
    """The working network of a cost network: costs quantised, parallel edges merged, edges normalised."""
    tables = tables or TablePool(quantum(network))
    unary = [tables.quantized_table_id(t) for t in network.unary]
    pairwise = tables.quantized_table_ids(network.pairwise)
    all_states = [tables.subsets(np.arange(len(t))) for t in network.unary]
    zero = [tables.table_id(np.zeros(len(t))) for t in network.unary]
    # (table with minimum 0, that minimum) of each distinct unary table.
    normalized = [tables.add_unaries(z, u) for z, u in zip(zero, unary, strict=True)]
    least = np.array([c[1] for c in normalized])[network.node_table] if network.size else np.zeros(1)
    if np.isinf(least).any():
        raise contradiction([int(np.isinf(least).argmax())])
    node_table = network.node_table.tolist()
    graph = WorkingNetwork(
        tables,
        [normalized[n][0] for n in node_table],
        [{} for _ in node_table],
        [all_states[n] for n in node_table],
    )
    graph.offset = float(np.cumsum(least)[-1])
    adj = graph.adj
    parts_of_table: dict[int, EdgeParts] = {}
    for (i, j), t in zip(network.edges.tolist(), network.edge_table.tolist(), strict=True):
        if i == j:
            graph.add_unary(i, tables.table_id(np.diag(tables.arrays[pairwise[t]])))
            continue
        if j in adj[i]:
            graph.add_edge(i, j, pairwise[t])
            continue
        parts = parts_of_table.get(t)
        if parts is None:
            parts = parts_of_table[t] = tables.normalize_sum(pairwise[t], NONE)
        graph.set_edge(i, j, parts)
    return graph
