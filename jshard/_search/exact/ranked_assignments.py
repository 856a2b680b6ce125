"""All assignments of a small network in the order of their cost.

Problem.  Some properties of an assignment, such as the peak memory of its schedule, are no sum over pairs of variables.
The cheapest assignment with such a property is the first one that has it, in the order of cost.

Idea.  Bucket elimination gives, for each variable, the least cost of everything that was eliminated before it, as a table
over itself and its neighbours at the time. Variables are then assigned in the reverse order. The difference of a table's
entry to the least of its row is what a state costs more than the best one, given all states before: so the cost of the
best completion of a partial assignment is known exactly, and best-first search (Hart, Nilsson and Raphael 1968) goes
down no path without an assignment at its end.

>>> from jshard._search.cost_network import build
>>> net = build([[0.0, 1.0], [0.0, 1.5]], [(0, 1, [[0.0, 3.0], [3.0, 0.0]])])
>>> [(cost, states.tolist()) for cost, states in assignments_by_cost(net)]
[(0.0, [0, 0]), (2.5, [1, 1]), (4.0, [1, 0]), (4.5, [0, 1])]

Source: E. Rollon, N. Flerova and R. Dechter, "Inference Schemes for M Best Solutions for Soft CSPs", 2011, for elimination
tables as the heuristic of a search for the best m.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from jshard._core.arrays import Floats, Ints
from jshard._search.cost_network import CostNetwork


TABLE_LIMIT = 1_000_000  # entries of the largest joint table
WORK_LIMIT = 10_000_000  # entries of all joint tables together

Factor = tuple[tuple[int, ...], Floats]  # variables, table with one axis each


@dataclasses.dataclass(frozen=True, eq=False)
class _Bucket:
    """A variable, its neighbours when it was eliminated, and what each of its states costs more than the best.

    `excess`: one axis for the variable, then one for each of `scope`.
    """

    variable: int
    scope: tuple[int, ...]
    excess: Floats


def assignments_by_cost(network: CostNetwork) -> Iterator[tuple[float, Ints]] | None:
    """(cost, states) of every assignment of finite cost, cheapest first; None where the tables would be too large."""
    eliminated = _eliminated(network)
    return None if eliminated is None else _in_order(network, *eliminated)


def _eliminated(network: CostNetwork) -> tuple[float, list[_Bucket]] | None:
    """The least cost, and the buckets in the order of elimination, least joint table first."""
    sizes = [network.num_states(v) for v in range(network.size)]
    factors: list[set[int]] = [set() for _ in sizes]  # of each variable, numbers of factors
    tables: dict[int, Factor] = {}

    def add(variables: tuple[int, ...], table: Floats) -> None:
        number = len(tables)
        tables[number] = variables, table
        for v in variables:
            factors[v].add(number)

    for v in range(network.size):
        add((v,), network.unary[network.node_table[v]])
    for (i, j), k in zip(network.edges.tolist(), network.edge_table.tolist(), strict=True):
        table = network.pairwise[k]
        if i == j:
            add((i,), np.diagonal(table))
        else:
            add((i, j), table)

    def scope_of(v: int) -> tuple[int, ...]:
        return tuple(sorted({u for f in factors[v] for u in tables[f][0]} - {v}))

    def entries(v: int) -> float:
        return float(np.prod([float(sizes[u]) for u in (v, *scope_of(v))]))

    joint = {v: entries(v) for v in range(network.size)}
    least, work, buckets = 0.0, 0.0, []
    while joint:
        v = min(joint, key=lambda u: (joint[u], u))
        work += joint.pop(v)
        scope = scope_of(v)
        if work > WORK_LIMIT or np.prod([float(sizes[u]) for u in (v, *scope)]) > TABLE_LIMIT:
            return None
        total = np.zeros([sizes[u] for u in (v, *scope)])
        for f in sorted(factors[v]):
            total += _expanded(tables[f], (v, *scope))
            for u in tables[f][0]:
                if u != v:
                    factors[u].discard(f)
        message = total.min(axis=0)
        with np.errstate(invalid="ignore"):  # inf - inf: no assignment of the scope is possible
            excess = np.nan_to_num(total - message, nan=np.inf, posinf=np.inf)
        buckets.append(_Bucket(v, scope, excess))
        if scope:
            add(scope, message)
            joint.update((u, entries(u)) for u in scope)
        else:
            least += float(message)
    return least, buckets


def _expanded(factor: Factor, axes: Sequence[int]) -> Floats:
    """A factor's table with one axis for each of `axes`."""
    variables, table = factor
    order = np.argsort([axes.index(u) for u in variables], kind="stable")
    shape = [1] * len(axes)
    for u, size in zip(variables, table.shape, strict=True):
        shape[axes.index(u)] = size
    return np.transpose(table, order).reshape(shape)


def _in_order(network: CostNetwork, least: float, buckets: Sequence[_Bucket]) -> Iterator[tuple[float, Ints]]:
    if not np.isfinite(least):
        return
    order = list(reversed(buckets))
    queue: list[tuple[float, int, tuple[int, ...]]] = [(least, 0, ())]  # the number decides equal costs
    pushed = 1
    position = {bucket.variable: k for k, bucket in enumerate(order)}
    scopes = [tuple(position[u] for u in bucket.scope) for bucket in order]
    while queue:
        cost, _, states = heapq.heappop(queue)
        chosen, depth = list(states), len(states)
        # Down the path of the best completion; the others wait in the queue.
        while depth < len(order):
            row = order[depth].excess[(slice(None), *(chosen[p] for p in scopes[depth]))]
            best = int(row.argmin())
            for state in np.flatnonzero(np.isfinite(row)).tolist():
                if state != best:
                    heapq.heappush(queue, (cost + float(row[state]), pushed, (*chosen, state)))
                    pushed += 1
            chosen.append(best)
            depth += 1
        out = np.empty(network.size, dtype=np.int64)
        out[[bucket.variable for bucket in order]] = chosen
        yield cost, out
