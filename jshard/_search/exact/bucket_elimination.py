"""Exact elimination of what the degree-2 reductions leave, when the tables stay small enough.

Problem.  The residual core has variables of three and more neighbours; eliminating one couples all its
neighbours in one table with as many axes.

Idea.  Choose an order in which every intermediate table stays small (least resulting table first),
component by component; carry it out only when a dry run says that it fits.  Tables are interned here
too, so equal layers share the products.

Worked case.  A complete graph on four variables of 10 states: eliminating the first gives one table of
10 x 10 x 10 from a joint of 10**4, the rest is smaller.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from jshard._search.cost_network import Ints
from jshard._search.exact.reduce import WorkingNetwork, contradiction
from jshard._search.exact.table_pool import NONE


TABLE_LIMIT = 5_000_000  # entries of the largest joint table
WORK_LIMIT = 300_000_000  # entries of all joint tables together


@dataclass(frozen=True)
class EliminationOrder:
    """An elimination order of one component and what it costs."""

    variables: tuple[int, ...]
    scopes: tuple[tuple[int, ...], ...]  # neighbours at elimination
    largest_table: float
    work: float


def components(graph: WorkingNetwork) -> list[list[int]]:
    """The core's connected components, each ascending, in order of their least variable."""
    seen: set[int] = set()
    found = []
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
        found.append(sorted(part))
    return found


def elimination_order(
    graph: WorkingNetwork,
    part: list[int],
    table_limit: float | None = None,
    work_limit: float | None = None,
) -> EliminationOrder | None:
    """A least-table-first order of a component, or None when it does not fit the limits."""
    table_limit = TABLE_LIMIT if table_limit is None else table_limit
    work_limit = WORK_LIMIT if work_limit is None else work_limit
    size = {v: float(len(graph.tables.arrays[graph.unary[v]])) for v in part}
    near = {v: set(graph.adj[v]) for v in part}

    def joint(v: int) -> float:
        return math.prod([size[w] for w in near[v]], start=size[v])

    price = {v: joint(v) for v in part}
    heap = [(p, v) for v, p in price.items()]
    heapq.heapify(heap)
    order: list[int] = []
    scopes: list[tuple[int, ...]] = []
    largest = work = 0.0
    while heap:
        p, v = heapq.heappop(heap)
        if price.get(v) != p:
            continue
        if p > table_limit or work + p > work_limit:
            return None
        largest, work = max(largest, p), work + p
        del price[v]
        around = near.pop(v)
        order.append(v)
        scopes.append(tuple(around))
        for w in around:
            near[w] |= around
            near[w] -= {v, w}
        for w in around:
            new = joint(w)
            if new != price[w]:
                price[w] = new
                heapq.heappush(heap, (new, w))
    return EliminationOrder(tuple(order), tuple(scopes), largest, work)


@dataclass(frozen=True)
class EliminatedComponent:
    """A component's exact minimum and how to read its assignment off."""

    minimum: float
    buckets: tuple[tuple[int, tuple[tuple[int, tuple[int, ...]], ...]], ...]


def eliminate_in_order(graph: WorkingNetwork, order: EliminationOrder) -> EliminatedComponent:
    """Eliminate a component in the given order; the graph is not changed."""
    tables = graph.tables
    arrays = tables.arrays
    rank = {v: r for r, v in enumerate(order.variables)}
    # A factor is (table number, its variables by rank); it waits in its first variable's bucket.
    waiting: dict[int, list[tuple[int, tuple[int, ...]]]] = {v: [] for v in order.variables}
    for v in order.variables:
        waiting[v].append((graph.unary[v], (v,)))
        for w, table in graph.adj[v].items():
            if rank[v] < rank[w]:
                waiting[v].append((table, (v, w)))
    memo: dict[tuple, tuple[int, float]] = {}
    minimum = 0.0
    buckets = []
    for v, around in zip(order.variables, order.scopes, strict=True):
        scope = (v, *sorted(around, key=rank.__getitem__))
        axis = {w: a for a, w in enumerate(scope)}
        factors = sorted((t, tuple([axis[w] for w in ws])) for t, ws in waiting[v])
        key = tuple(factors)
        found = memo.get(key)
        if found is None:
            shape = [len(arrays[graph.unary[w]]) for w in scope]
            result = None
            for x in range(shape[0]):
                slab = np.zeros([1] * (len(scope) - 1))
                for t, axes in factors:
                    dims = [1] * (len(scope) - 1)
                    for a in axes[1:]:
                        dims[a - 1] = shape[a]
                    slab = slab + arrays[t][x].reshape(dims)
                result = slab if result is None else np.minimum(result, slab)
            assert result is not None
            result = np.broadcast_to(result, shape[1:])
            least = float(result.min())
            if np.isinf(least):
                raise contradiction(scope)
            tables.num_products += 1
            found = memo[key] = (
                tables.table_id(result - least) if len(scope) > 1 else NONE,
                least,
            )
        table, least = found
        minimum += least
        buckets.append((v, tuple(waiting.pop(v))))
        if table != NONE and arrays[table].any():
            rest = tuple(scope[1:])
            waiting[rest[0]].append((table, rest))
    return EliminatedComponent(minimum, tuple(buckets))


def reconstruct_component(graph: WorkingNetwork, finished: EliminatedComponent, assignment: Ints) -> None:
    """Write a component's best assignment (original state numbers), last eliminated first."""
    arrays, subsets = graph.tables.arrays, graph.tables.subsets.arrays
    at: dict[int, int] = {}
    for v, factors in reversed(finished.buckets):
        total = np.zeros(1)
        for t, scope in factors:
            total = total + arrays[t][(slice(None), *[at[w] for w in scope[1:]])]
        at[v] = int(total.argmin())
        assignment[v] = subsets[graph.states[v]][at[v]]


def eliminate_components(
    graph: WorkingNetwork, table_limit: float | None = None, work_limit: float | None = None
) -> list[tuple[list[int], EliminatedComponent]]:
    """Finish every component that fits; the finished ones leave the graph."""
    done = []
    for part in components(graph):
        order = elimination_order(graph, part, table_limit, work_limit)
        if order is None:
            continue
        finished = eliminate_in_order(graph, order)
        graph.offset += finished.minimum
        done.append((part, finished))
    return done
