"""Exact reductions: dead-end elimination, contraction, bucket elimination of variables of degree at most two.

A `WorkingNetwork` of table numbers is reduced until nothing applies:

- the separable part of an edge's table moves into the unary tables (reparametrisation);
- forbidden states are removed, and dominated ones: dead-end elimination (Desmet et al. 1992, Goldstein 1994);
- a variable whose state is a function of one neighbour's (one finite entry per row) is contracted into it;
- a variable of degree 0, 1 or 2 is eliminated by a memoised min-plus product (bucket elimination, Dechter 1999).

Each elimination leaves a record, from which `backtrack` recovers the variable's state.

Eliminations at degree 2 run in rounds: a variable whose edges changed in this round waits for the next one. A cycle
of n equal layers is then halved log n times (log n distinct products), where first come, first served would compute
n different powers of one table.

Example: of the path a - b - c the ends have degree 1 and are projected onto b, whose least entry is the optimum;
backtracking assigns b, then c and a.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jshard._core.errors import SearchError
from jshard._search.cost_network import CostNetwork, Ints
from jshard._search.exact.elimination_records import (
    ArgminTables,
    Elimination,
    EliminationRound,
    backtrack_rounds,
    backtrack_stack,
)
from jshard._search.exact.table_pool import NONE, EdgeParts, TablePool, quantum


class Contradiction(SearchError):
    """No assignment has finite cost; ``variables`` says where the contradiction was met."""

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
    """The network while it is reduced. Variables keep their numbers; an eliminated one has ``unary`` NONE."""

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
        """Merge w into its neighbour v, whose state decides w's (``function``: w's state per state of v).

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
    pairwise = [tables.quantized_table_id(t) for t in network.pairwise]
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


def reduce(graph: WorkingNetwork, start: Iterable[int] | None = None) -> WorkingNetwork:
    """Apply all reductions until none applies (in place; returned for convenience).

    Arguments:
        graph: the network.
        start: the variables to look at first, those just changed; None for the whole core.
    """
    _Reducer(graph, graph.core if start is None else start).run()
    return graph


class _Reducer:
    """The work queues of `reduce`, from the cheapest reductions to the dearest."""

    def __init__(self, graph: WorkingNetwork, start: Iterable[int]) -> None:
        n = len(graph.unary)
        self.graph = graph
        self.changed = deque(start)  # variables whose tables changed
        self.is_changed = bytearray(n)
        for v in self.changed:
            self.is_changed[v] = 1
        self.degree_two: deque[int] = deque()
        self.next_round: deque[int] = deque()  # degree 2, with an edge that changed in this round
        self.round = 1
        self.changed_in_round = [0] * n
        self.dominance: deque[int] = deque()  # dominated states are looked for last
        self.in_dominance = bytearray(n)

    def run(self) -> None:
        """Until all queues are empty."""
        while True:
            if self.changed:
                self._visit_changed()
            elif self.degree_two:
                self._eliminate_degree_two()
            elif self.next_round:
                self.degree_two, self.next_round = self.next_round, self.degree_two
                self.round += 1
            elif self.dominance:
                self._remove_dominated()
            else:
                return

    def _mark_changed(self, v: int) -> None:
        if not self.is_changed[v]:
            self.is_changed[v] = 1
            self.changed.append(v)

    def _visit_changed(self) -> None:
        """Work the queue of changed variables off: forbidden states, degrees 0 and 1, contractions."""
        graph, tables, changed, is_changed = self.graph, self.graph.tables, self.changed, self.is_changed
        unary, adj, guards = graph.unary, graph.adj, graph.memory_guards
        feasible, not_functional = tables.known_feasible, tables.not_functional
        while changed:
            v = changed.popleft()
            is_changed[v] = 0
            if unary[v] == NONE:
                continue
            keep = feasible.get(unary[v])
            if keep is None:
                keep = tables.feasible_states(unary[v])
            if keep != NONE:
                neighbours = tuple(adj[v])
                graph.restrict(v, keep)
                for w in (*neighbours, v):
                    if not is_changed[w]:
                        is_changed[w] = 1
                        changed.append(w)
                continue
            edges = adj[v]
            free = not guards[v]
            if not edges and free:
                graph.eliminate(v)
            elif len(edges) == 1 and free:
                ((w, table),) = edges.items()
                message = tables.project(tables.transpose(table), unary[v])
                graph.eliminate(v)
                graph.add_unary(w, message)
                self._mark_changed(w)
            elif len(edges) == 2 and free:
                self.degree_two.append(v)  # it will be eliminated: no need to look at its states
            elif not not_functional.issuperset(edges.values()) and self._contract(v):
                pass
            elif not self.in_dominance[v]:
                self.in_dominance[v] = 1
                self.dominance.append(v)

    def _contract(self, v: int) -> bool:
        """Contract v and a neighbour of which one's state decides the other's, if there is one."""
        graph, tables = self.graph, self.graph.tables
        for w, table in graph.adj[v].items():
            if table in tables.not_functional:
                continue
            transposed = graph.adj[w][v]
            w_of_v = tables.functional_map(table)
            v_of_w = tables.functional_map(transposed)
            if w_of_v == NONE and v_of_w == NONE:
                tables.not_functional.update((table, transposed))
                continue
            # Of two that decide each other the one with fewer edges is merged into the other.
            if w_of_v == NONE or (v_of_w != NONE and len(graph.adj[w]) > len(graph.adj[v])):
                v, w, w_of_v = w, v, v_of_w
            for x in graph.adj[w]:
                self._mark_changed(x)
            graph.contract(v, w, w_of_v)
            self._mark_changed(v)
            return True
        return False

    def _eliminate_degree_two(self) -> None:
        """Eliminate the next variable of degree 2: an edge between its neighbours takes its place."""
        graph, tables = self.graph, self.graph.tables
        adj, unary, stamp = graph.adj, graph.unary, self.changed_in_round
        v = self.degree_two.popleft()
        edges = adj[v]
        if unary[v] == NONE or len(edges) != 2 or graph.memory_guards[v]:
            return
        if stamp[v] == self.round:
            self.next_round.append(v)
            return
        i, j = sorted(edges)
        key = adj[i][v], unary[v], edges[j], adj[i].get(j, NONE)
        parts = tables.known_eliminations.get(key) or tables.eliminate_middle(*key)
        graph.eliminate(v)
        graph.set_edge(i, j, parts)
        stamp[i] = stamp[j] = self.round
        self._mark_changed(i)
        self._mark_changed(j)

    def _remove_dominated(self) -> None:
        """Remove the dominated states of the next variable."""
        graph, tables = self.graph, self.graph.tables
        v = self.dominance.popleft()
        self.in_dominance[v] = 0
        edges, guards = graph.adj[v], graph.memory_guards[v]
        if graph.unary[v] == NONE or (len(edges) < 3 and not guards):
            return
        keep = tables.undominated_states(graph.unary[v], tuple(sorted([*edges.values(), *guards])))
        if keep != NONE:
            neighbours = list(edges)
            graph.restrict(v, keep)
            for w in neighbours:
                self._mark_changed(w)
            self._mark_changed(v)


def backtrack(graph: WorkingNetwork, assignment: Ints) -> Ints:
    """Fill in the eliminated variables of an assignment whose core entries are set (in place)."""
    backtrack_stack(graph.elimination_stack, graph.tables, assignment)
    return backtrack_rounds(graph.elimination_rounds, graph.tables, assignment)
