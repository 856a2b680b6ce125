"""Bucket elimination (Dechter 1999) of the core's components whose joint tables stay small.

Eliminating a variable of degree three or more couples all its neighbours in one table with as many axes. The
elimination order is greedy, least joint table first, component by component; it is carried out only where a dry run
stays within the limits. Tables are interned, so that equal layers share the products.

Example: of a complete graph on four variables of 10 states the first elimination minimises a joint table of 10**4
entries over one axis and leaves a table of 10 x 10 x 10.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jshard._core.arrays import Floats, Ints
from jshard._search.exact.table_pool import NONE
from jshard._search.exact.working_network import WorkingNetwork, contradiction


TABLE_LIMIT = 5_000_000  # entries of the largest joint table
WORK_LIMIT = 300_000_000  # entries of all joint tables together

Factor = tuple[int, tuple[int, ...]]  # table number, its variables by rank in the order


@dataclass(frozen=True)
class EliminationOrder:
    """An elimination order of one component; `work`: entries of all its joint tables together."""

    variables: tuple[int, ...]
    scopes: tuple[tuple[int, ...], ...]  # neighbours at the time of elimination
    work: float


@dataclass(frozen=True)
class EliminatedComponent:
    """A component's exact minimum, and the buckets from which its assignment is recovered."""

    minimum: float
    buckets: tuple[tuple[int, tuple[Factor, ...]], ...]  # (variable, factors), in elimination order


def components(graph: WorkingNetwork) -> list[list[int]]:
    """The core's connected components, each ascending, in order of their least variable."""
    seen: set[int] = set()
    parts = []
    for root in graph.core:
        if root in seen:
            continue
        seen.add(root)
        part, stack = [root], [root]
        while stack:
            for w in graph.adj[stack.pop()]:
                if w not in seen:
                    seen.add(w)
                    part.append(w)
                    stack.append(w)
        parts.append(sorted(part))
    return parts


def elimination_order(
    graph: WorkingNetwork,
    part: list[int],
    table_limit: float | None = None,
    work_limit: float | None = None,
) -> EliminationOrder | None:
    """The greedy order of a component, least joint table first; None when it exceeds the limits.

    Arguments:

    - `graph`: the working network.
    - `part`: the component's variables.
    - `table_limit`: entries of the largest joint table; None for `TABLE_LIMIT`.
    - `work_limit`: entries of all joint tables together; None for `WORK_LIMIT`.
    """
    table_limit = TABLE_LIMIT if table_limit is None else table_limit
    work_limit = WORK_LIMIT if work_limit is None else work_limit
    size = {v: float(len(graph.tables.arrays[graph.unary[v]])) for v in part}
    neighbours = {v: set(graph.adj[v]) for v in part}

    def joint_entries(v: int) -> float:
        return math.prod([size[w] for w in neighbours[v]], start=size[v])

    entries = {v: joint_entries(v) for v in part}
    heap = [(e, v) for v, e in entries.items()]
    heapq.heapify(heap)
    order: list[int] = []
    scopes: list[tuple[int, ...]] = []
    work = 0.0
    while heap:
        least, v = heapq.heappop(heap)
        if entries.get(v) != least:  # outdated
            continue
        if least > table_limit or work + least > work_limit:
            return None
        work += least
        del entries[v]
        scope = neighbours.pop(v)
        order.append(v)
        scopes.append(tuple(scope))
        for w in scope:
            neighbours[w] |= scope
            neighbours[w] -= {v, w}
        for w in scope:
            updated = joint_entries(w)
            if updated != entries[w]:
                entries[w] = updated
                heapq.heappush(heap, (updated, w))
    return EliminationOrder(tuple(order), tuple(scopes), work)


def eliminate_in_order(graph: WorkingNetwork, order: EliminationOrder) -> EliminatedComponent:
    """Eliminate a component in the given order; the working network is not changed."""
    tables = graph.tables
    arrays = tables.arrays
    rank = {v: r for r, v in enumerate(order.variables)}
    # A factor waits in the bucket of its variable that is eliminated first.
    waiting: dict[int, list[Factor]] = {v: [] for v in order.variables}
    for v in order.variables:
        waiting[v].append((graph.unary[v], (v,)))
        for w, table in graph.adj[v].items():
            if rank[v] < rank[w]:
                waiting[v].append((table, (v, w)))
    memo: dict[tuple, tuple[int, float]] = {}
    minimum = 0.0
    buckets = []
    for v, neighbours in zip(order.variables, order.scopes, strict=True):
        scope = (v, *sorted(neighbours, key=rank.__getitem__))
        axis = {w: a for a, w in enumerate(scope)}
        key = tuple(sorted((t, tuple([axis[w] for w in ws])) for t, ws in waiting[v]))
        known = memo.get(key)
        if known is None:
            message = _minimize_sum(key, arrays, [len(arrays[graph.unary[w]]) for w in scope])
            least = float(message.min())
            if np.isinf(least):
                raise contradiction(scope)
            tables.num_products += 1
            known = memo[key] = (tables.table_id(message - least) if len(scope) > 1 else NONE, least)
        table, least = known
        minimum += least
        buckets.append((v, tuple(waiting.pop(v))))
        if table != NONE and arrays[table].any():
            rest = tuple(scope[1:])
            waiting[rest[0]].append((table, rest))
    return EliminatedComponent(minimum, tuple(buckets))


def _minimize_sum(factors: Sequence[Factor], arrays: Sequence[Floats], shape: list[int]) -> Floats:
    """The sum of factors (with axis numbers for variables), minimised over axis 0.

    One slab of axis 0 at a time, so that the joint table is never in memory as a whole.
    """
    result = None
    for x in range(shape[0]):
        slab = np.zeros([1] * (len(shape) - 1))
        for t, axes in factors:
            dims = [1] * (len(shape) - 1)
            for a in axes[1:]:
                dims[a - 1] = shape[a]
            slab = slab + arrays[t][x].reshape(dims)
        result = slab if result is None else np.minimum(result, slab)
    assert result is not None
    return np.broadcast_to(result, shape[1:])


def reconstruct_component(graph: WorkingNetwork, component: EliminatedComponent, assignment: Ints) -> None:
    """Write a component's best assignment (original states), last eliminated first (in place)."""
    arrays, subsets = graph.tables.arrays, graph.tables.subsets.arrays
    states: dict[int, int] = {}
    for v, factors in reversed(component.buckets):
        total = np.zeros(1)
        for t, scope in factors:
            total = total + arrays[t][(slice(None), *[states[w] for w in scope[1:]])]
        states[v] = int(total.argmin())
        assignment[v] = subsets[graph.states[v]][states[v]]


def eliminate_components(
    graph: WorkingNetwork, table_limit: float | None = None, work_limit: float | None = None
) -> list[tuple[list[int], EliminatedComponent]]:
    """Eliminate every component that stays within the limits: (its variables, the result).

    Their minima are added to the network's offset; taking their variables out is the caller's.
    """
    done = []
    for part in components(graph):
        order = elimination_order(graph, part, table_limit, work_limit)
        if order is None:
            continue
        component = eliminate_in_order(graph, order)
        graph.offset += component.minimum
        done.append((part, component))
    return done
