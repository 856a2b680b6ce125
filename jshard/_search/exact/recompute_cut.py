"""Which values to keep and which to compute again, as a minimum cut (project selection; Picard 1976).

Problem.  Some values are needed late. Each needed value is kept, which costs its bytes at a price, or its equation is run
again, which costs seconds and makes the equation's operands needed late as well. Wanted is the least of both.

Idea.  Variables x_v (v is needed late) and y_e (e is run again), 1 on the source side of a cut:

    source -> x_v   infinite     v is needed by the late part itself
    x_v -> y_e      price * bytes + its seconds   v is needed and the equation e that makes it is not run again: v is kept
    y_e -> x_u      infinite     e is run again and reads u
    y_e -> sink     seconds      e is run again

Every price gives the optimum of "seconds + price * bytes", so these optima are the lower convex hull of all choices by
(bytes, seconds); `recompute_hull` walks it. A chain of three values of 8, 8 and 4
bytes, each of whose equations takes 1 s:

>>> graph = RecomputeGraph(np.array([8., 8., 4.]), np.zeros(3), np.ones(3), np.array([0, 1, 2]),
...                        np.array([[1, 0], [2, 1]]), np.array([0, 1, 2]))
>>> [(c.bytes, c.seconds) for c in recompute_hull([graph])]
[(20.0, 0.0), (4.0, 2.0), (0.0, 3.0)]

Sources: J.-C. Picard, "Maximal closure of a graph and applications to combinatorial problems", Management Science 22(11),
1976. The same cut between the passes of a training step: functorch's min-cut partitioner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow


_MAX_CAPACITY = 2**30  # scipy's flows are 32 bit integers
_MAX_HULL = 24  # vertices looked for


@dataclasses.dataclass(frozen=True, eq=False)
class RecomputeGraph:
    """Values and the equations that make them.

    - `bytes`: (values,) that keeping each takes.
    - `keep_seconds`: (values,) that writing and reading each takes, if it is kept.
    - `seconds`: (equations,) what running each again costs; infinite if it cannot be.
    - `maker`: (values,) the equation that makes each; -1 for none, such as an argument.
    - `reads`: (reads, 2) pairs (equation, value that it reads).
    - `needed`: values that the late part reads.
    """

    bytes: np.ndarray
    keep_seconds: np.ndarray
    seconds: np.ndarray
    maker: np.ndarray
    reads: np.ndarray
    needed: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class RecomputeChoice:
    """A choice for several graphs: of each the values that are kept; bytes and seconds of all."""

    kept: tuple[frozenset[int], ...]
    bytes: float
    seconds: float


def recompute_hull(graphs: Sequence[RecomputeGraph]) -> list[RecomputeChoice]:
    """The choices of least seconds + price * bytes for every price, from the least seconds to the least bytes."""
    scale = _scale(graphs)
    if scale is None:
        return []
    first, last = cheapest_choice(graphs, 1e-6 * scale), cheapest_choice(graphs, 1e9 * scale)
    found = {(first.bytes, first.seconds): first, (last.bytes, last.seconds): last}
    queue = [(first, last)]
    while queue and len(found) < _MAX_HULL:
        a, b = queue.pop(0)
        if b.bytes >= a.bytes or b.seconds <= a.seconds:
            continue
        price = (b.seconds - a.seconds) / (a.bytes - b.bytes)
        c = cheapest_choice(graphs, price)
        if c.seconds + price * c.bytes < (a.seconds + price * a.bytes) * (1 - 1e-6):
            found[c.bytes, c.seconds] = c
            queue += [(a, c), (c, b)]
    ordered, out = sorted(found.values(), key=lambda c: (c.seconds, c.bytes)), []
    for c in ordered:
        if not out or c.bytes < out[-1].bytes:
            out.append(c)
    return out


def _scale(graphs: Sequence[RecomputeGraph]) -> float | None:
    """Seconds a byte, all equations by all values; None where nothing is kept."""
    nbytes = sum(float(g.bytes.sum()) for g in graphs)
    seconds = sum(float(g.seconds[np.isfinite(g.seconds)].sum()) for g in graphs)
    return seconds / nbytes if nbytes and seconds else None


def cheapest_choice(graphs: Sequence[RecomputeGraph], price: float) -> RecomputeChoice:
    """The choice of least seconds + price * bytes; of equal ones that which runs least again."""
    kept, nbytes, seconds = [], 0.0, 0.0
    for graph in graphs:
        needed, again = _minimum_cut(graph, price)
        made_again = (graph.maker >= 0) & again[graph.maker]
        keep = needed & ~made_again
        kept.append(frozenset(np.flatnonzero(keep).tolist()))
        nbytes += float(graph.bytes[keep].sum())
        seconds += float(graph.seconds[again].sum() + graph.keep_seconds[keep].sum())
    return RecomputeChoice(tuple(kept), nbytes, seconds)


def _minimum_cut(graph: RecomputeGraph, price: float) -> tuple[np.ndarray, np.ndarray]:
    """(values,) whether each is needed late and (equations,) whether each is run again, at the least cost."""
    n, m = len(graph.bytes), len(graph.seconds)
    keep, run = price * graph.bytes + graph.keep_seconds, graph.seconds
    finite = np.isfinite(run)
    # Of a value that costs more than running everything the excess does not matter.
    total = float(run[finite].sum()) + 1e-200
    keep = np.minimum(keep, 2 * total)
    unit = (_MAX_CAPACITY - 1) / max(total, float(keep.sum())) / 4
    infinite = _MAX_CAPACITY - 1
    source, sink = n + m, n + m + 1
    made = graph.maker >= 0
    values = np.flatnonzero(made)
    rows = [values, n + graph.reads[:, 0], np.full(len(graph.needed), source), n + np.arange(m)]
    columns = [n + graph.maker[values], graph.reads[:, 1], graph.needed, np.full(m, sink)]
    capacities = [
        np.ceil(keep[values] * unit), np.full(len(graph.reads), infinite), np.full(len(graph.needed), infinite),
        np.where(finite, np.ceil(np.where(finite, run, 0.0) * unit), infinite),
    ]  # fmt: skip
    row, column = np.concatenate(rows), np.concatenate(columns)
    capacity = np.concatenate(capacities).astype(np.int32)
    shape = (n + m + 2, n + m + 2)
    network = csr_array((capacity, (row, column)), shape=shape)
    network.data = np.minimum(network.data, infinite).astype(np.int32)
    flow = maximum_flow(network, source, sink).flow
    residual = csr_array(network - flow)
    residual.data = np.where(residual.data > 0, residual.data, 0)
    residual.eliminate_zeros()
    reached = breadth_first_order(residual, source, return_predecessors=False)
    side = np.zeros(n + m + 2, dtype=bool)
    side[reached] = True
    return side[:n], side[n : n + m]
