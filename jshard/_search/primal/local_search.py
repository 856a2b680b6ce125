"""Better answers: exact moves on random tree-shaped blocks.

Problem.  Rounding the messages gives an answer, changing one variable at a time improves it little:
a whole run of layers has to switch together.

Idea.  Pick a random set of variables that induces a forest (half of a transformer's core), hold the
rest, and solve the forest exactly by dynamic programming.  The cost never rises, and a run of layers
is one path of the forest.

Worked case.  On a cycle, leaving out one variable leaves a path; a few blocks with different variables
left out find the cycle's optimum.  Randomness comes from a seeded generator only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from jshard._search.cost_network import Floats
from jshard._search.exact.reduce import WorkingNetwork


@dataclass(frozen=True)
class CoreProblem:
    """A core by position: unaries, and per variable its neighbours with own states as rows."""

    variables: list[int]
    unary: list[Floats]
    neighbours: list[list[tuple[int, Floats]]]
    offset: float
    infeasibility_penalty: (
        float  # of one forbidden pair; an answer that costs less than offset + price has none
    )


def core_problem(graph: WorkingNetwork, variables: list[int] | None = None) -> CoreProblem:
    """The core (in the order given), forbidden pairs at a price above everything else.

    With inf one bad pair looks as bad as ten, and no move would lead out of it; a price can be counted.
    """
    arrays = graph.tables.arrays
    variables = graph.core if variables is None else variables
    rank = {v: r for r, v in enumerate(variables)}
    price = 1.0
    capped: dict[int, Floats] = {}
    for v in variables:
        price += float(arrays[graph.unary[v]].max())
        for w, t in graph.adj[v].items():
            if v < w:
                if t not in capped:
                    capped[t] = np.where(np.isinf(arrays[t]), -1.0, arrays[t])
                price += float(capped[t].max(initial=0.0))
    price = 2.0 ** np.ceil(np.log2(price))
    capped.clear()
    for v in variables:
        for t in graph.adj[v].values():
            if t not in capped:
                table = arrays[t]
                capped[t] = np.where(np.isinf(table), price, table) if np.isinf(table).any() else table
    return CoreProblem(
        variables,
        [arrays[graph.unary[v]] for v in variables],
        [[(rank[w], capped[t]) for w, t in graph.adj[v].items()] for v in variables],
        graph.offset,
        price,
    )


def energy(local: CoreProblem, chosen: list[int]) -> float:
    total = local.offset
    for v, near in enumerate(local.neighbours):
        total += float(local.unary[v][chosen[v]])
        for w, table in near:
            if w > v:
                total += float(table[chosen[v], chosen[w]])
    return total


def core_energy(graph: WorkingNetwork, chosen: dict[int, int]) -> float:
    """The cost of a core's states, by variable."""
    arrays, total = graph.tables.arrays, graph.offset
    for v, s in chosen.items():
        total += float(arrays[graph.unary[v]][s])
        for w, table in graph.adj[v].items():
            if w > v:
                total += float(arrays[table][s, chosen[w]])
    return total


def conditional_costs(local: CoreProblem, chosen: list[int], v: int, but: set[int] | None = None) -> Floats:
    """v's cost per state, the neighbours (outside ``but``) held."""
    total = local.unary[v]
    for w, table in local.neighbours[v]:
        if but is None or w not in but:
            total = total + table[:, chosen[w]]
    return total


def icm(local: CoreProblem, chosen: list[int]) -> None:
    """Change single variables while that helps (in place)."""
    queue = list(range(len(chosen)))
    waiting = bytearray(b"\1" * len(chosen))
    at = 0
    while at < len(queue):
        v = queue[at]
        at += 1
        waiting[v] = 0
        costs = conditional_costs(local, chosen, v)
        best = int(costs.argmin())
        if costs[best] < costs[chosen[v]]:
            chosen[v] = best
            for w, _ in local.neighbours[v]:
                if not waiting[w]:
                    waiting[w] = 1
                    queue.append(w)


def random_induced_forest(
    local: CoreProblem, rng: np.random.Generator, most: int = 1 << 30
) -> list[tuple[int, int]]:
    """A random induced forest (maximal, or of ``most`` variables) as (variable, parent or -1),
    parents first."""
    n = len(local.unary)
    order = rng.permutation(n).tolist()
    hits = [0] * n  # neighbours already in the current tree, or in any finished one
    taken = bytearray(n)
    out: list[tuple[int, int]] = []
    for root in order:
        if len(out) >= most:
            break
        if taken[root] or hits[root]:
            continue
        stack = [(root, -1)]
        while stack and len(out) < most:
            v, parent = stack.pop()
            if taken[v] or hits[v] > (0 if parent < 0 else 1):
                continue
            taken[v] = 1
            out.append((v, parent))
            near = local.neighbours[v]
            start = int(rng.integers(len(near))) if len(near) > 1 else 0
            for w, _ in near:
                hits[w] += 1
            for w, _ in near[start:] + near[:start]:
                if not taken[w] and hits[w] == 1:
                    stack.append((w, v))
    return out


def solve_forest(local: CoreProblem, chosen: list[int], block: list[tuple[int, int]]) -> None:
    """Set a forest's variables to their joint best, the rest held (in place)."""
    inside = {v for v, _ in block}
    costs = {v: conditional_costs(local, chosen, v, inside) for v, _ in block}
    tables: dict[int, Floats] = {}
    for v, parent in reversed(block):
        if parent >= 0:
            tables[v] = next(t for w, t in local.neighbours[v] if w == parent)
            costs[parent] = costs[parent] + (costs[v][:, None] + tables[v]).min(axis=0)
    for v, parent in block:
        c = costs[v] if parent < 0 else costs[v] + tables[v][:, chosen[parent]]
        best = int(c.argmin())
        if c[best] < c[chosen[v]]:
            chosen[v] = best


def forest_search(
    local: CoreProblem,
    chosen: list[int],
    rng: np.random.Generator,
    *,
    target: float,
    deadline: float,
    rounds: int = 20,
    patience: int = 8,
) -> float:
    """Block moves until ``target`` is reached, ``patience`` of them gained nothing, or time is up."""
    icm(local, chosen)
    best = energy(local, chosen)
    idle = 0
    for _ in range(rounds):
        if best <= target or idle >= patience or time.monotonic() > deadline:
            break
        solve_forest(local, chosen, random_induced_forest(local, rng))
        now = energy(local, chosen)
        idle = 0 if now < best else idle + 1
        best = min(best, now)
    return best
