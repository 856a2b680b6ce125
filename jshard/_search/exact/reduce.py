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
from collections.abc import Iterable

from jshard._core.arrays import Ints
from jshard._search.exact.elimination_records import backtrack_rounds, backtrack_stack
from jshard._search.exact.table_pool import NONE
from jshard._search.exact.working_network import WorkingNetwork


PER_VISIT = 150.0  # entries of `effort.py` that a visit of a variable counts


def reduce(graph: WorkingNetwork, start: Iterable[int] | None = None) -> WorkingNetwork:
    """Apply all reductions until none applies (in place; returned for convenience).

    Arguments:

    - `graph`: the network.
    - `start`: the variables to look at first, those just changed; None for the whole core.
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
        visits = 0
        while changed:
            v = changed.popleft()
            is_changed[v] = 0
            visits += 1
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
                # It will be eliminated: no need to look at its states. What is cheap to eliminate goes first: the
                # readers of a copy have more states than the layouts in which it may be.
                if any(map(tables.decides, edges.values())):
                    self.degree_two.appendleft(v)
                else:
                    self.degree_two.append(v)
            elif not not_functional.issuperset(edges.values()) and self._contract(v):
                pass
            elif not self.in_dominance[v]:
                self.in_dominance[v] = 1
                self.dominance.append(v)
        tables.work += PER_VISIT * visits

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
