"""Turning one layout of a tensor into another: the cheapest sequence of collectives, and its cost.

Layouts are the nodes of a graph, single collectives its edges; a redistribution is a shortest path. Every
edge costs so many seconds per byte of the whole tensor and a latency. The graph is that of a mesh and a pattern of
divisibility, shared by all tensors that have them; paths are found for a number of bytes. Slices are free, so they
come first where that helps, and gathers last: this falls out of the costs and is written nowhere.

>>> from jshard._core import hardware
>>> from jshard._core.layout import MeshAxes
>>> from jshard._core.topology import from_mesh
>>> t = from_mesh(MeshAxes(("x", "y"), (2, 4)), hardware.get("v5e"))
>>> a, b = Layout((("x",), ("y",))), Layout((("x", "y"), ()))
>>> [str(s) for s in cheapest_steps(a, b, (128, 32), t)]
['all_to_all[y] 1->0']
>>> seconds, received, collectives = reshard_cost(a, b, (128, 32), 4, t)
>>> received, str(collectives[0])
(1536.0, 'all_to_all[y] 1536 B 8.08e-06 s')

A partial sum on axes that the target has too passes through; one that the target lacks ends in an all-reduce
or a reduce-scatter; a target that is partial where the source is not cannot be reached (infinite cost).

The path is the quickest for the tensor's bytes, so that no detour is quicker (costs obey the triangle inequality,
which bounds rest on); ties go to fewer collectives, then to a fixed order. Where no item size is given, it is the
quickest for a tensor so large that latency is nothing: that is how bytes are counted.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np

from jshard._core.errors import SearchError
from jshard._core.layout import Layout, MeshAxes
from jshard._core.topology import Topology
from jshard._cost.collectives import Collective, coefficients
from jshard._cost.reshard_steps import Dims, ReshardStep, apply_step, successor_steps, successors


REDUCING_KINDS = ("all_reduce", "reduce_scatter")  # compilers put those of small results into one
_RELAX_BATCH = 2_000_000  # edges times sources relaxed at once


def cheapest_steps(
    a: Layout,
    b: Layout,
    shape: Sequence[int],
    topology: Topology,
    itemsize: float | None = None,
    combined: int = 1,
) -> tuple[ReshardStep, ...]:
    """The cheapest steps that turn layout `a` of a tensor into layout `b`.

    Arguments:

    - `a`, `b`: layouts with one entry per dimension; a pair that cannot be joined raises `SearchError`
        (`b` partial where `a` is not, or a cut that does not divide). Mesh axes of size one are left out of
        the steps.
    - `shape`: global shape of the tensor.
    - `topology`: the mesh and its wires.
    - `itemsize`: bytes of one element; None for a tensor so large that latency is nothing.
    - `together`: so many sums are sent at once and share a latency.
    """
    return _cheapest_steps(a, b, tuple(shape), topology, _scale(shape, itemsize, combined))


Scale = (
    tuple[float, int] | None
)  # bytes of the whole tensor, sums sent together; None for the limit of many bytes


def _scale(shape: Sequence[int], itemsize: float | None, together: int) -> Scale:
    return None if itemsize is None else (math.prod(shape) * itemsize, together)


@functools.lru_cache(maxsize=65536)
def _cheapest_steps(
    a: Layout, b: Layout, shape: tuple[int, ...], topology: Topology, scale: Scale
) -> tuple[ReshardStep, ...]:
    graph, order = _canonical_graph(shape, topology)
    i, j = _ids((a, b), graph, order, topology).tolist()
    if i >= 0 and j >= 0:
        paths = _paths_of(graph, scale)
        _relax(paths, [i])
        before, total = paths.rows[i]
        if np.isfinite(total[0, j]):
            return _merge(_path(graph, before, i, j, topology), order, a)
    raise SearchError(
        f"layout {a} of a tensor of shape {shape} cannot become {b}",
        where=f"redistribution on mesh {topology.mesh}",
        fix="cuts that divide the shape, and partial sums only where the source has them",
    )


def reshard_cost(
    a: Layout, b: Layout, shape: Sequence[int], itemsize: float, topology: Topology
) -> tuple[float, float, tuple[Collective, ...]]:
    """Seconds, bytes received per device, and the collectives of a redistribution.

    Arguments:

    - `a`, `b`, `shape`, `topology`: as for `steps`; both numbers are infinite where that raises.
    - `itemsize`: bytes of one element.
    """
    try:
        path = cheapest_steps(a, b, shape, topology, itemsize)
    except SearchError:
        return math.inf, math.inf, ()
    out, here, whole = [], without_unit_axes(a, topology.mesh), math.prod(shape) * itemsize
    for s in path:
        if s.kind != "slice":
            c = coefficients(s.kind, _group(s.axes, topology.mesh), topology)
            held = whole / here.pieces(topology.mesh)
            out.append(Collective(s.kind, s.axes, held * c.volume, held * c.slope + c.alpha))
        here = apply_step(s, here)
    return sum((c.seconds for c in out), 0.0), sum((c.bytes for c in out), 0.0), tuple(out)


def seconds_table(
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    shape: Sequence[int],
    itemsize: float,
    topology: Topology,
    combined: int = 1,
) -> np.ndarray:
    """Seconds from every source layout to every target layout: `(len(sources), len(targets))`.

    So many sums as `together` says are sent at once: each pays that share of the latency. What else is on the way
    pays its own.
    """
    scale = _scale(shape, itemsize, combined)
    t = _tables(tuple(sources), tuple(targets), tuple(shape), topology, scale)
    latency = t[2] + t[3] / combined
    return _scaled(t[0], math.prod(shape) * itemsize) + latency


def bytes_table(
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    shape: Sequence[int],
    itemsize: float,
    topology: Topology,
) -> np.ndarray:
    """Bytes received per device from every source layout to every target layout, by paths for large tensors."""
    t = _tables(tuple(sources), tuple(targets), tuple(shape), topology, None)
    return _scaled(t[1], math.prod(shape) * itemsize)


def _scaled(coefficients: np.ndarray, whole: float) -> np.ndarray:
    """Coefficients times bytes, where unreachable stays unreachable also for a tensor of no elements."""
    return coefficients * whole if whole else np.where(np.isfinite(coefficients), 0.0, np.inf)


@functools.lru_cache(maxsize=4096)
def _tables(
    sources: tuple[Layout, ...], targets: tuple[Layout, ...], shape: tuple[int, ...], topology: Topology, scale: Scale
) -> np.ndarray:  # fmt: skip
    """As `numbers` of a graph, of the path from every source to every target: `(4, len(sources), len(targets))`."""
    graph, order = _canonical_graph(shape, topology)
    i, j = _ids(sources, graph, order, topology), _ids(targets, graph, order, topology)
    rows, columns = np.flatnonzero(i >= 0), np.flatnonzero(j >= 0)
    out = np.full((4, len(i), len(j)), np.inf)
    if len(rows) and len(columns):
        known = i[rows].tolist()
        paths = _paths_of(graph, scale)
        _relax(paths, known)
        picked = np.stack([paths.rows[s][1] for s in known], axis=1)[:, :, j[columns]]
        if len(rows) == len(i) and len(columns) == len(j):
            out = picked
        else:
            out[:, rows[:, None], columns] = picked
    out.flags.writeable = False
    return out


@dataclasses.dataclass(frozen=True, eq=False)
class _LayoutGraph:
    """All layouts of a tensor whose dimensions have these gcds with the mesh, and the moves between them.

    Edge arrays are sorted by target, then source; `target` are the layouts among their `ends`, `begin` where
    the edges to each begin.
    """

    mesh: MeshAxes
    gcds: tuple[int, ...]
    layouts: tuple[Layout, ...]
    ids: dict[Layout, int]
    source: np.ndarray
    ends: np.ndarray
    target: np.ndarray
    begin: np.ndarray
    preference: np.ndarray  # (edges,) how paths of equal cost are told apart: far below any cost
    # (4, edges): slope and volume per byte of the whole tensor, then latency: of sums the last.
    numbers: np.ndarray
    known: dict[tuple[int, ...], dict[Layout, int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class _Paths:
    """Shortest paths of a graph under one weight for each edge.

    `rows` keeps, for each source so far, the last edge of the shortest path to every layout (-1: none) and its slope,
    volume and latencies.
    """

    graph: _LayoutGraph
    weight: np.ndarray
    rows: dict[int, tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=dict)


@functools.lru_cache(maxsize=1024)
def _paths_of(graph: _LayoutGraph, scale: Scale) -> _Paths:
    """The shortest paths for a number of bytes and of sums sent together."""
    slope, _, alone, summing = graph.numbers
    if scale is None:
        seconds = slope
    else:
        nbytes, together = scale
        seconds = slope * nbytes + alone + summing / together
    unit = float(seconds.max(initial=0.0)) or 1.0
    # Relative to the largest edge; the cost of a path is summed without it.
    small = 1e-6 if scale is None else 1e-13
    return _Paths(graph, seconds / unit + small * graph.preference)


@functools.lru_cache(maxsize=65536)
def _canonical_graph(shape: tuple[int, ...], topology: Topology) -> tuple[_LayoutGraph, tuple[int, ...]]:
    """The graph of a tensor, and which of its dimensions the graph's dimensions are.

    Only the gcd of a dimension with the number of devices matters, a dimension with gcd 1 is never cut, and
    the order of dimensions does not change costs: so few graphs serve all tensors.
    """
    gcds = [math.gcd(s, topology.mesh.total) for s in shape]
    order = tuple(sorted((d for d, g in enumerate(gcds) if g > 1), key=lambda d: -gcds[d]))
    return _layout_graph(topology, tuple(gcds[d] for d in order)), order


def _ids(
    some: Sequence[Layout], graph: _LayoutGraph, order: tuple[int, ...], topology: Topology
) -> np.ndarray:
    """Numbers of layouts in the graph; -1 for those that do not divide the shape."""
    known = graph.known.setdefault(order, {})
    for a in some:
        if a not in known:
            b = without_unit_axes(a, topology.mesh)
            lost = sum(map(len, b.dims)) != sum(len(b.dims[d]) for d in order)
            known[a] = -1 if lost else graph.ids.get(Layout(tuple(b.dims[d] for d in order), b.partial), -1)
    return np.array([known[a] for a in some], dtype=np.int64)


@functools.lru_cache(maxsize=512)
def _layout_graph(topology: Topology, gcds: tuple[int, ...]) -> _LayoutGraph:
    mesh = _mesh_without_unit_axes(topology.mesh)
    layouts = tuple(_layouts(mesh, gcds))
    n, ids = len(layouts), {a: i for i, a in enumerate(layouts)}
    by_value = {(a.dims, a.partial): i for i, a in enumerate(layouts)}
    edges: dict[int, tuple[float, float, float, float, int]] = {}
    known: dict[tuple[str, tuple[str, ...]], tuple[float, float, float, float]] = {}
    for i, a in enumerate(layouts):
        pieces = a.pieces(mesh)
        for kind, axes, _, _, dims, partial in successors(a, mesh, gcds):
            edge = (0.0, 0.0, 0.0, 0.0, len(axes))
            if kind != "slice":
                if (kind, axes) not in known:
                    c = coefficients(kind, _group(axes, mesh), topology)
                    late = (0.0, c.alpha) if kind in REDUCING_KINDS else (c.alpha, 0.0)
                    known[kind, axes] = (c.slope, c.volume, *late)
                slope, volume, alone, summing = known[kind, axes]
                edge = (slope / pieces, volume / pieces, alone, summing, len(axes))
            key = i * n + by_value[dims, partial]
            if key not in edges or edge < edges[key]:
                edges[key] = edge
    keys = np.array(sorted(edges), dtype=np.int64)
    numbers = np.array([edges[k] for k in keys.tolist()], dtype=float).reshape(-1, 5)
    # Ties: fewer collectives, then smaller groups, then fewer slices, then the rank of the edge.
    preference = np.where(numbers[:, 1] > 0, 1 + 0.1 * numbers[:, 4], 0.01)
    preference += 1e-4 * np.arange(len(keys)) / max(1, len(keys))
    by_target = np.lexsort((keys // n, keys % n))
    keys, preference, numbers = keys[by_target], preference[by_target], numbers[by_target, :4]
    target, begin = np.unique(keys % n, return_index=True)
    return _LayoutGraph(
        mesh, gcds, layouts, ids, keys // n, keys % n, target, begin, preference, numbers.T.copy()
    )


def _mesh_without_unit_axes(mesh: MeshAxes) -> MeshAxes:
    """The mesh without axes of size one: they move nothing."""
    kept = [(n, s) for n, s in zip(mesh.names, mesh.sizes, strict=True) if s > 1]
    return MeshAxes(tuple(n for n, _ in kept), tuple(s for _, s in kept))


def without_unit_axes(a: Layout, mesh: MeshAxes) -> Layout:
    """The layout without mesh axes of size one, partial axes in mesh order."""
    small = {n for n, s in zip(mesh.names, mesh.sizes, strict=True) if s == 1}
    dims = tuple(tuple(x for x in d if x not in small) for d in a.dims) if small else a.dims
    return Layout(dims, tuple(n for n in mesh.names if n in a.partial and n not in small))


def _group(axes: Sequence[str], mesh: MeshAxes) -> tuple[str, ...]:
    return tuple(sorted(axes, key=mesh.names.index))


def _path(graph: _LayoutGraph, before: np.ndarray, i: int, j: int, topology: Topology) -> list[ReshardStep]:
    nodes = [j]
    while nodes[-1] != i:
        nodes.append(int(graph.source[before[nodes[-1]]]))
    path = []
    for b, a in itertools.pairwise(nodes):
        here, there = graph.layouts[a], graph.layouts[b]
        fitting = [s for s in successor_steps(here, graph.mesh, graph.gcds) if apply_step(s, here) == there]
        path.append(min(fitting, key=lambda s: _edge_order(s, topology)))
    return path[::-1]


def _edge_order(s: ReshardStep, topology: Topology) -> tuple[float, float, float, int]:
    if s.kind == "slice":
        return 0.0, 0.0, 0.0, len(s.axes)
    c = coefficients(s.kind, _group(s.axes, topology.mesh), topology)
    return c.slope, c.volume, c.alpha, len(s.axes)


def _merge(path: Sequence[ReshardStep], order: tuple[int, ...], a: Layout) -> tuple[ReshardStep, ...]:
    """Steps with the tensor's own dimensions; neighbouring slices of one dimension become one."""
    out: list[ReshardStep] = []
    for s in path:
        src = None if s.src_dim is None else order[s.src_dim]
        dst = None if s.dst_dim is None else order[s.dst_dim]
        target = None
        if s.target is not None:
            dims: list[tuple[str, ...]] = [()] * len(a.dims)
            for d, axes in zip(order, s.target, strict=True):
                dims[d] = axes
            target = tuple(dims)
        if s.kind == "slice" and out and out[-1].kind == "slice" and out[-1].dst_dim == dst:
            out[-1] = dataclasses.replace(out[-1], axes=out[-1].axes + s.axes)
        else:
            out.append(ReshardStep(s.kind, s.axes, src, dst, target))
    return tuple(out)


def _layouts(mesh: MeshAxes, gcds: tuple[int, ...]) -> list[Layout]:
    """Every layout that divides, found by cutting further and further."""
    size = dict(zip(mesh.names, mesh.sizes, strict=True))
    out = []
    for r in range(len(mesh.names) + 1):
        for partial in itertools.combinations(mesh.names, r):
            start: Dims = ((),) * len(gcds)
            seen: set[Dims] = {start}
            free = tuple(a for a in mesh.names if a not in partial)
            todo: list[tuple[Dims, tuple[int, ...], tuple[str, ...]]] = [(start, gcds, free)]
            while todo:
                dims, room, free = todo.pop()
                for a, d in itertools.product(free, range(len(gcds))):
                    after: Dims = (*dims[:d], (*dims[d], a), *dims[d + 1 :])
                    if room[d] % size[a] == 0 and after not in seen:
                        seen.add(after)
                        less = (*room[:d], room[d] // size[a], *room[d + 1 :])
                        todo.append((after, less, tuple(f for f in free if f != a)))
            out += [Layout(dims, partial) for dims in sorted(seen)]
    return out


def _relax(paths: _Paths, sources: Sequence[int]) -> None:
    """Fill `paths.rows` for sources not met before: Bellman's relaxation of all edges for all of them at once.

    Paths are short (a handful of collectives) and graphs small, so this beats Dijkstra's queue, and importing it.
    """
    graph = paths.graph
    new = [s for s in dict.fromkeys(sources) if s not in paths.rows]
    n, edges = len(graph.layouts), len(graph.source)
    step = max(1, _RELAX_BATCH // max(1, edges))
    for at in range(0, len(new), step):
        some = np.array(new[at : at + step])
        every = np.arange(len(some))
        distance = np.full((n, len(some)), np.inf)
        distance[some, every] = 0.0
        before = np.full((n, len(some)), -1, dtype=np.int32)
        over = np.empty((0, len(some)))
        while edges:
            over = distance[graph.source] + paths.weight[:, None]
            least = np.minimum.reduceat(over, graph.begin, axis=0)
            t, k = np.nonzero(least < distance[graph.target])
            if not len(t):
                break
            distance[graph.target[t], k] = least[t, k]
        # The edge that gives a layout its distance; then all paths are walked back at once, summing their edges.
        tight, k = np.nonzero((over == distance[graph.ends]) & np.isfinite(over))
        before[graph.ends[tight[::-1]], k[::-1]] = tight[::-1]
        before[some, every] = -1
        total = np.zeros((4, n, len(some)))
        t, k = np.nonzero(before >= 0)
        here = t
        while len(t):
            edge = before[here, k]
            total[:, t, k] += graph.numbers[:, edge]
            here = graph.source[edge]
            more = here != some[k]
            t, k, here = t[more], k[more], here[more]
        total[:, ~np.isfinite(distance)] = np.inf
        for c, s in enumerate(some.tolist()):
            paths.rows[s] = (before[:, c].copy(), np.ascontiguousarray(total[:, :, c]))
