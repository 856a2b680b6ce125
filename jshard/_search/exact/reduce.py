"""Exact reductions: make the network smaller without changing its best cost.

Problem.  Most variables of a sharding network have one or two neighbours, and most states are never
worth taking.

Idea.  A working graph of table numbers (:class:`Graph`), reduced until nothing applies:
separable edges move into unaries; forbidden states and dominated states go; a variable whose state is
decided by a neighbour's (one finite entry per row) is absorbed by it; one with no, one or two
neighbours is eliminated by a (remembered) min-plus product.  Each elimination leaves a record, from
which :func:`backtrack` recovers the eliminated variable's best state once its neighbours are known.

Degree-2 eliminations run in rounds, and a variable whose edges changed in this round waits for the
next one.  So a cycle of n equal layers is halved log n times (log n distinct products), where
first-come-first-served would build the n different powers of one table.

Worked case.  The path a - b - c: a and c have one neighbour, so they are projected onto b, and b's
minimum is the answer; backtracking picks b, then c, then a.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jshard._core.errors import SearchError
from jshard._search.cost_network import CostNetwork, Ints
from jshard._search.exact.elimination_records import EliminationRound, backtrack_rounds
from jshard._search.exact.table_pool import NONE, TablePool, quantum


class Contradiction(SearchError):
    """No assignment has finite cost; ``variables`` says where the contradiction was met."""

    variables: tuple[int, ...] = ()


def contradiction(variables: Iterable[int]) -> Contradiction:
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
    """The network being reduced.  Variables keep their numbers; a gone one has ``unary`` NONE."""

    tables: TablePool
    unary: list[int]
    adj: list[dict[int, int]]  # adj[v][w]: table with v's states as rows
    states: list[int]  # subset of the original states that the tables still cover
    offset: float = 0.0
    elimination_stack: list[tuple] = field(default_factory=list)
    # Memory, where the bytes of a state matter: per variable, tables that are inf where one state holds
    # more than another (see ``mark``).  A marked variable is neither eliminated nor, for a state that
    # holds more, dominated.
    memory_guards: list[tuple[int, ...]] = field(default_factory=list)
    contractions: list[int] = field(default_factory=list)  # places in the trail where one absorbed another
    core_superset: Sequence[int] = ()  # all variables of the core, and perhaps others
    elimination_rounds: tuple[
        EliminationRound, ...
    ] = ()  # what was eliminated before, many at a time (`reduce_batched.py`)
    original_size: tuple[int, int] = (0, 0)  # variables and states of the network

    def __post_init__(self) -> None:
        if not self.memory_guards:
            self.memory_guards = [()] * len(self.unary)
        self.core_superset = self.core_superset or range(len(self.unary))

    @property
    def core(self) -> list[int]:
        unary = self.unary
        return [v for v in self.core_superset if unary[v] >= 0]  # NONE is the only negative number

    def fork(self, tables: TablePool | None = None) -> WorkingNetwork:
        """A copy, without marks and with an empty trail; it shares the tables unless given a copy."""
        return WorkingNetwork(
            tables or self.tables,
            list(self.unary),
            [a.copy() if a else {} for a in self.adj],  # most are of variables that have gone
            list(self.states),
            self.offset,
            core_superset=self.core,
        )

    def add_unary(self, v: int, table: int) -> None:
        """Add a unary table to a variable."""
        if table != NONE:
            u = self.unary[v]
            found = self.tables.known_unary_sums.get((u, table) if u <= table else (table, u))
            self.unary[v], least = found or self.tables.add_unaries(u, table)
            if least == np.inf:
                raise contradiction([v, *self.adj[v]])
            self.offset += least

    def add_edge(self, v: int, w: int, table: int) -> None:
        """Add a pairwise table (v's states as rows), merging with the edge that is there."""
        self.set_edge(v, w, self.tables.normalize_sum(table, self.adj[v].get(w, NONE)))

    def set_edge(self, v: int, w: int, parts: tuple[int, int, int, int]) -> None:
        """Set an edge: its table, the same seen from w, and what goes to v's and w's own tables."""
        table, back, rows, cols = parts
        if table == NONE:
            if w in self.adj[v]:
                del self.adj[v][w], self.adj[w][v]
        else:
            self.adj[v][w] = table
            self.adj[w][v] = back
        if rows != NONE:
            self.add_unary(v, rows)
        if cols != NONE:
            self.add_unary(w, cols)

    def restrict(self, v: int, keep: int) -> None:
        """Keep only a subset of v's present states."""
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
        # As `join` does it, in place: with a step for each edge this is where reductions spend their time.
        near, known = self.adj[v], tables.known_restricted_edges
        for w, table in tuple(near.items()):
            there = self.adj[w]
            del there[v]
            table, back, rows, cols = known.get((table, keep)) or tables.restrict_edge(table, keep)
            if table == NONE:
                del near[w]
            else:
                near[w] = table
                there[v] = back
            if rows != NONE:
                self.add_unary(v, rows)
            if cols != NONE:
                self.add_unary(w, cols)

    def contract(self, v: int, w: int, function: int) -> None:
        """Merge w into its neighbour v, whose state decides w's; w's edges become v's."""
        tables = self.tables
        table = self.adj[v].pop(w)
        edges = list(self.adj[w].items())
        # The ordinary record of w with only this neighbour: its edge has one finite entry per state.
        self.adj[w] = {v: self.adj[w][v]}
        self.adj[v][w] = table
        unary = self.unary[w]
        self.contractions.append(len(self.elimination_stack))
        self.eliminate(w)
        self.memory_guards[v] = tuple(
            sorted({*self.memory_guards[v], *tables.restrict_guards(self.memory_guards[w], function)})
        )
        columns = tables.subsets.arrays[function]
        row = np.arange(len(columns))
        self.add_unary(v, tables.table_id(tables.arrays[table][row, columns]))
        self.add_unary(v, tables.rows(unary, function))
        for x, t in edges:
            if x != v:
                del self.adj[x][w]
                self.add_edge(v, x, tables.rows(t, function))

    def eliminate(self, v: int) -> None:
        """Remove v, leaving the record that finds its state again."""
        near = self.adj[v]
        self.elimination_stack.append(
            (
                v,
                self.unary[v],
                self.states[v],
                tuple(near),
                tuple(near.values()),
                tuple([self.states[w] for w in near]),
            )
        )
        for w in near:
            del self.adj[w][v]
        self.unary[v] = NONE
        self.adj[v] = {}


def working_network(network: CostNetwork, tables: TablePool | None = None) -> WorkingNetwork:
    """The working graph of a network: costs on the grid, parallel edges merged, edges normalised."""
    tables = tables or TablePool(quantum(network))
    unary = [tables.quantized_table_id(t) for t in network.unary]
    pairwise = [tables.quantized_table_id(t) for t in network.pairwise]
    every = [tables.subsets(np.arange(len(t))) for t in network.unary]
    zero = [tables.table_id(np.zeros(len(t))) for t in network.unary]
    # What a variable is charged for its own table depends on the table alone.
    charged = [tables.add_unaries(z, u) for z, u in zip(zero, unary, strict=True)]
    least = np.array([c[1] for c in charged])[network.node_table] if network.size else np.zeros(1)
    if np.isinf(least).any():
        raise contradiction([int(np.isinf(least).argmax())])
    which = network.node_table.tolist()
    graph = WorkingNetwork(
        tables, [charged[n][0] for n in which], [{} for _ in which], [every[n] for n in which]
    )
    graph.offset = float(np.cumsum(least)[-1])
    adj = graph.adj
    parts: dict[int, tuple[int, int, int, int]] = {}
    for (i, j), t in zip(network.edges.tolist(), network.edge_table.tolist(), strict=True):
        if i == j:
            graph.add_unary(i, tables.table_id(np.diag(tables.arrays[pairwise[t]])))
            continue
        if j in adj[i]:
            graph.add_edge(i, j, pairwise[t])
            continue
        found = parts.get(t)
        if found is None:
            found = parts[t] = tables.normalize_sum(pairwise[t], NONE)
        graph.set_edge(i, j, found)
    return graph


def reduce(graph: WorkingNetwork, start: Iterable[int] | None = None) -> WorkingNetwork:
    """Apply all reductions until none applies (in place; returned for convenience).

    ``start`` limits the first look to some variables (those just changed).
    """
    tables, unary, adj, marks = graph.tables, graph.unary, graph.adj, graph.memory_guards
    n = len(unary)
    loose, live, through = tables.not_functional, tables.known_feasible, tables.known_eliminations
    look = deque(graph.core if start is None else start)
    in_look = bytearray(n)
    for v in look:
        in_look[v] = 1
    wide: deque[int] = deque()
    in_wide = bytearray(n)
    now: deque[int] = deque()
    later: deque[int] = deque()
    stamp = [0] * n
    turn = 1

    def touch(v: int) -> None:
        if not in_look[v]:
            in_look[v] = 1
            look.append(v)

    def bond(v: int) -> bool:
        """Absorb a neighbour whose state v's decides (or the other way about)."""
        for w, table in adj[v].items():
            if table in loose:
                continue
            there = tables.functional_map(table)
            back = tables.functional_map(adj[w][v])
            if there == NONE and back == NONE:
                loose.update((table, adj[w][v]))
                continue
            # Of two that decide each other the one with fewer edges moves.
            if there == NONE or (back != NONE and len(adj[w]) > len(adj[v])):
                v, w, there = w, v, back
            for x in adj[w]:
                touch(x)
            graph.contract(v, w, there)
            touch(v)
            return True
        return False

    while True:
        if look:
            v = look.popleft()
            in_look[v] = 0
            if unary[v] == NONE:
                continue
            keep = live.get(unary[v])
            if keep is None:
                keep = tables.feasible_states(unary[v])
            if keep != NONE:
                near = tuple(adj[v])
                graph.restrict(v, keep)
                for w in (*near, v):
                    if not in_look[w]:
                        in_look[w] = 1
                        look.append(w)
                continue
            near = adj[v]
            free = not marks[v]
            if not near and free:
                graph.eliminate(v)
            elif len(near) == 1 and free:
                ((w, table),) = near.items()
                message = tables.project(tables.transpose(table), unary[v])
                graph.eliminate(v)
                graph.add_unary(w, message)
                touch(w)
            elif len(near) == 2 and free:
                now.append(v)  # it goes: which of its states are worth keeping need not be asked
            elif not loose.issuperset(near.values()) and bond(v):
                pass
            elif not in_wide[v]:
                in_wide[v] = 1
                wide.append(v)
        elif now:
            v = now.popleft()
            near = adj[v]
            if unary[v] == NONE or len(near) != 2 or marks[v]:
                continue
            if stamp[v] == turn:
                later.append(v)
                continue
            i, j = near
            if i > j:
                i, j = j, i
            key = adj[i][v], unary[v], near[j], adj[i].get(j, NONE)
            parts = through.get(key) or tables.eliminate_middle(*key)
            graph.eliminate(v)
            graph.set_edge(i, j, parts)
            stamp[i] = stamp[j] = turn
            touch(i)
            touch(j)
        elif later:
            now, later = later, now
            turn += 1
        elif wide:
            v = wide.popleft()
            in_wide[v] = 0
            near = adj[v]
            if unary[v] == NONE or (len(near) < 3 and not marks[v]):
                continue
            keep = tables.undominated_states(unary[v], tuple(sorted([*near.values(), *marks[v]])))
            if keep != NONE:
                around = list(near)
                graph.restrict(v, keep)
                for w in around:
                    touch(w)
                touch(v)
        else:
            return graph


def backtrack(graph: WorkingNetwork, assignment: Ints) -> Ints:
    """Fill in the eliminated variables of an assignment whose core entries are set (in place)."""
    tables = graph.tables
    arrays = tables.arrays
    memo: dict[tuple, int] = {}
    found: list[int] = assignment.tolist()
    for v, u, states, near, edges, subsets in reversed(graph.elimination_stack):
        key = (u, states, edges, subsets, *[found[w] for w in near])
        best = memo.get(key)
        if best is None:
            total = arrays[u]
            for w, e, s in zip(near, edges, subsets, strict=True):
                total = total + arrays[e][:, tables.subset_positions(s)[found[w]]]
            best = memo[key] = int(tables.subsets.arrays[states][int(total.argmin())])
        found[v] = best
    assignment[:] = found
    return backtrack_rounds(graph.elimination_rounds, tables, assignment)
