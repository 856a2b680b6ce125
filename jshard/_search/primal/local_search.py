"""Local search: ICM (Besag 1986) and exact moves on random induced forests (Hamze and de Freitas 2004).

Rounding the messages gives an answer, and changing one variable at a time improves it little: a whole run of layers
has to switch together. A move picks a random set of variables that induces a forest (half of a transformer's core),
keeps the others, and solves the forest exactly by dynamic programming. The cost never increases, and a run of layers
is one path of the forest. The random generator is seeded.

Example: a cycle without one variable is a path; a few moves that leave out different ones find the cycle's optimum.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from jshard._core.arrays import Floats
from jshard._search.exact.working_network import WorkingNetwork


@dataclass(frozen=True)
class CoreProblem:
    """A core by position: forbidden pairs cost a penalty above everything else, so that they can be counted.

    With inf one forbidden pair is as bad as ten, and no move would lead out of an infeasible answer.
    """

    variables: list[int]  # the working network's variable at each position
    unary: list[Floats]
    neighbours: list[list[tuple[int, Floats]]]  # (neighbour, table with the own states as rows)
    offset: float
    infeasibility_penalty: float  # of one forbidden pair; an answer below offset + penalty has none


def core_problem(graph: WorkingNetwork, variables: list[int] | None = None) -> CoreProblem:
    """The core of a working network, its variables in the given order."""
    arrays = graph.tables.arrays
    variables = graph.core if variables is None else variables
    rank = {v: r for r, v in enumerate(variables)}
    largest: dict[int, float] = {}  # finite entry of a table
    penalty = 1.0
    for v in variables:
        penalty += float(arrays[graph.unary[v]].max())
        for w, t in graph.adj[v].items():
            if v < w:
                if t not in largest:
                    largest[t] = float(np.where(np.isinf(arrays[t]), -1.0, arrays[t]).max(initial=0.0))
                penalty += largest[t]
    penalty = 2.0 ** np.ceil(np.log2(penalty))
    penalized: dict[int, Floats] = {}
    for t in {t for v in variables for t in graph.adj[v].values()}:
        forbidden = np.isinf(arrays[t])
        penalized[t] = np.where(forbidden, penalty, arrays[t]) if forbidden.any() else arrays[t]
    return CoreProblem(
        variables,
        [arrays[graph.unary[v]] for v in variables],
        [[(rank[w], penalized[t]) for w, t in graph.adj[v].items()] for v in variables],
        graph.offset,
        penalty,
    )


def energy(core: CoreProblem, states: list[int]) -> float:
    """The cost of an assignment of states by position."""
    total = core.offset
    for v, edges in enumerate(core.neighbours):
        total += float(core.unary[v][states[v]])
        for w, table in edges:
            if w > v:
                total += float(table[states[v], states[w]])
    return total


def core_energy(graph: WorkingNetwork, states: dict[int, int]) -> float:
    """The cost of an assignment of present states by the working network's variables."""
    arrays, total = graph.tables.arrays, graph.offset
    for v, s in states.items():
        total += float(arrays[graph.unary[v]][s])
        for w, table in graph.adj[v].items():
            if w > v:
                total += float(arrays[table][s, states[w]])
    return total


def conditional_costs(core: CoreProblem, states: list[int], v: int, but: set[int] | None = None) -> Floats:
    """The costs of v's states beside its neighbours' states, without the neighbours in `but`."""
    total = core.unary[v]
    for w, table in core.neighbours[v]:
        if but is None or w not in but:
            total = total + table[:, states[w]]
    return total


def icm(core: CoreProblem, states: list[int]) -> None:
    """Iterated conditional modes: change single variables while that lowers the cost (in place)."""
    queue = list(range(len(states)))
    waiting = bytearray(b"\1" * len(states))
    at = 0
    while at < len(queue):
        v = queue[at]
        at += 1
        waiting[v] = 0
        costs = conditional_costs(core, states, v)
        best = int(costs.argmin())
        if costs[best] < costs[states[v]]:
            states[v] = best
            for w, _ in core.neighbours[v]:
                if not waiting[w]:
                    waiting[w] = 1
                    queue.append(w)


def random_induced_forest(
    core: CoreProblem, rng: np.random.Generator, most: int = 1 << 30
) -> list[tuple[int, int]]:
    """A random induced forest, maximal or of `most` variables: (variable, parent or -1), parents first."""
    n = len(core.unary)
    order = rng.permutation(n).tolist()
    forest_neighbours = [0] * n  # neighbours in the current tree or any finished one
    taken = bytearray(n)
    out: list[tuple[int, int]] = []
    for root in order:
        if len(out) >= most:
            break
        if taken[root] or forest_neighbours[root]:
            continue
        stack = [(root, -1)]
        while stack and len(out) < most:
            v, parent = stack.pop()
            if taken[v] or forest_neighbours[v] > (0 if parent < 0 else 1):
                continue
            taken[v] = 1
            out.append((v, parent))
            edges = core.neighbours[v]
            start = int(rng.integers(len(edges))) if len(edges) > 1 else 0
            for w, _ in edges:
                forest_neighbours[w] += 1
            for w, _ in edges[start:] + edges[:start]:
                if not taken[w] and forest_neighbours[w] == 1:
                    stack.append((w, v))
    return out


def solve_forest(core: CoreProblem, states: list[int], forest: list[tuple[int, int]]) -> None:
    """Set a forest's variables to their joint optimum beside all others (in place)."""
    inside = {v for v, _ in forest}
    costs = {v: conditional_costs(core, states, v, inside) for v, _ in forest}
    tables: dict[int, Floats] = {}
    for v, parent in reversed(forest):
        if parent >= 0:
            tables[v] = next(t for w, t in core.neighbours[v] if w == parent)
            costs[parent] = costs[parent] + (costs[v][:, None] + tables[v]).min(axis=0)
    for v, parent in forest:
        c = costs[v] if parent < 0 else costs[v] + tables[v][:, states[parent]]
        best = int(c.argmin())
        if c[best] < c[states[v]]:
            states[v] = best


def forest_search(
    core: CoreProblem,
    states: list[int],
    rng: np.random.Generator,
    *,
    target: float,
    deadline: float,
    moves: int = 20,
    patience: int = 8,
) -> float:
    """ICM, then moves on random induced forests (in place); returns the cost reached.

    Arguments:

    - `core`: the problem.
    - `states`: the start, by position; replaced by the result.
    - `rng`: picks the forests.
    - `target`: the cost that suffices.
    - `deadline`: on the monotonic clock, in seconds.
    - `moves`: moves at most.
    - `patience`: moves without gain after which to stop.
    """
    icm(core, states)
    best = energy(core, states)
    idle = 0
    for _ in range(moves):
        if best <= target or idle >= patience or time.monotonic() > deadline:
            break
        solve_forest(core, states, random_induced_forest(core, rng))
        cost = energy(core, states)
        idle = 0 if cost < best else idle + 1
        best = min(best, cost)
    return best
