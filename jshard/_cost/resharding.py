"""Resharding: the cheapest sequence of collectives from one layout of a tensor to another, by shortest paths.

Layouts are the nodes of a graph, single steps its edges (`reshard_steps.py`), and a reshard is a shortest path, found
by Bellman-Ford (R. Bellman, "On a routing problem", Quarterly of Applied Mathematics 16, 1958). An edge costs seconds
per byte of the whole tensor plus a latency. One graph serves all tensors on a mesh with the same pattern of
divisibility; paths depend on the number of bytes. Slices are free, so the costs alone put them first where that helps,
and gathers last.

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

Partial axes common to both layouts remain; a partial axis of the source alone needs an all-reduce or a reduce-scatter;
one of the target alone is not reachable (infinite cost).

A path is the fastest for the tensor's bytes. So costs satisfy the triangle inequality, on which lower bounds rest.
Ties are broken by fewer collectives, then by a fixed order. Without an item size it is the fastest path in the limit
of large tensors, where latency is negligible; bytes are counted on that path.
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
from jshard._cost.collectives import Coefficients, Collective, coefficients
from jshard._cost.reshard_steps import Dims, ReshardStep, apply_step, successor_steps, successors


REDUCING_KINDS = ("all_reduce", "reduce_scatter")  # XLA combines small ones, which then share a latency
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

    - `a`, `b`: layouts with one entry per dimension; raises `SearchError` if `b` is not reachable (partial where
        `a` is not, or shards that do not divide the shape). Mesh axes of size one do not occur in the steps.
    - `shape`: global shape of the tensor.
    - `topology`: the mesh and its links.
    - `itemsize`: bytes of one element; None for the limit of large tensors.
    - `combined`: number of sums that XLA combines into one collective; they share a latency.
    """
    return _cheapest_steps(a, b, tuple(shape), topology, _scale(shape, itemsize, combined))


# (bytes of the whole tensor, sums combined into one collective); None for the limit of large tensors
Scale = tuple[float, int] | None


def _scale(shape: Sequence[int], itemsize: float | None, combined: int) -> Scale:
    return None if itemsize is None else (math.prod(shape) * itemsize, combined)


@functools.lru_cache(maxsize=65536)
def _cheapest_steps(
    a: Layout, b: Layout, shape: tuple[int, ...], topology: Topology, scale: Scale
) -> tuple[ReshardStep, ...]:
    graph, order = _canonical_graph(shape, topology)
    source, target = _layout_ids((a, b), graph, order, topology).tolist()
    if source >= 0 and target >= 0:
        paths = _paths_of(graph, scale)
        _add_sources(paths, [source])
        tree = paths.trees[source]
        if np.isfinite(tree.totals[0, target]):
            path = _steps_on_path(graph, tree.last_edge, source, target, topology)
            return _to_tensor_dims(path, order, a)
    raise SearchError(
        f"layout {a} of a tensor of shape {shape} cannot become {b}",
        where=f"redistribution on mesh {topology.mesh}",
        fix="cuts that divide the shape, and partial sums only where the source has them",
    )


def reshard_cost(
    a: Layout, b: Layout, shape: Sequence[int], itemsize: float, topology: Topology
) -> tuple[float, float, tuple[Collective, ...]]:
    """Seconds, bytes received per device, and the collectives of a reshard.

    Arguments:

    - `a`, `b`, `shape`, `topology`: as for `cheapest_steps`; both numbers are infinite where that raises.
    - `itemsize`: bytes of one element.
    """
    try:
        path = cheapest_steps(a, b, shape, topology, itemsize)
    except SearchError:
        return math.inf, math.inf, ()
    out, layout, nbytes = [], without_unit_axes(a, topology.mesh), math.prod(shape) * itemsize
    for s in path:
        if s.kind != "slice":
            c = coefficients(s.kind, _in_mesh_order(s.axes, topology.mesh), topology)
            local_bytes = nbytes / layout.pieces(topology.mesh)
            slope, alpha = c.at(local_bytes)
            out.append(Collective(s.kind, s.axes, local_bytes * c.volume, local_bytes * slope + alpha))
        layout = apply_step(s, layout)
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

    Of `combined` sums each pays its share of the latency; other collectives on the path pay all of theirs.
    """
    scale = _scale(shape, itemsize, combined)
    slope, _, latency, sum_latency = _tables(tuple(sources), tuple(targets), tuple(shape), topology, scale)
    return _scaled(slope, math.prod(shape) * itemsize) + (latency + sum_latency / combined)


def bytes_table(
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    shape: Sequence[int],
    itemsize: float,
    topology: Topology,
) -> np.ndarray:
    """Bytes received per device from every source layout to every target layout, on the paths of large tensors."""
    _, volume, _, _ = _tables(tuple(sources), tuple(targets), tuple(shape), topology, None)
    return _scaled(volume, math.prod(shape) * itemsize)


def _scaled(coefficients: np.ndarray, nbytes: float) -> np.ndarray:
    """Coefficients times bytes; infinite ones stay infinite for a tensor without elements."""
    return coefficients * nbytes if nbytes else np.where(np.isfinite(coefficients), 0.0, np.inf)


@functools.lru_cache(maxsize=4096)
def _tables(
    sources: tuple[Layout, ...], targets: tuple[Layout, ...], shape: tuple[int, ...], topology: Topology, scale: Scale
) -> np.ndarray:  # fmt: skip
    """Coefficients of the paths from every source to every target: `(4, len(sources), len(targets))`."""
    graph, order = _canonical_graph(shape, topology)
    source_ids = _layout_ids(sources, graph, order, topology)
    target_ids = _layout_ids(targets, graph, order, topology)
    rows, columns = np.flatnonzero(source_ids >= 0), np.flatnonzero(target_ids >= 0)
    out = np.full((4, len(sources), len(targets)), np.inf)
    if len(rows) and len(columns):
        roots = source_ids[rows].tolist()
        paths = _paths_of(graph, scale)
        _add_sources(paths, roots)
        totals = np.stack([paths.trees[s].totals for s in roots], axis=1)[:, :, target_ids[columns]]
        if len(rows) == len(sources) and len(columns) == len(targets):
            out = totals
        else:
            out[:, rows[:, None], columns] = totals
    out.flags.writeable = False
    return out


@dataclasses.dataclass(frozen=True, eq=False)
class _LayoutGraph:
    """All layouts of a tensor whose dimensions have these gcds with the number of devices, and the steps between them.

    Edge arrays are sorted by target, then source.
    """

    mesh: MeshAxes
    gcds: tuple[int, ...]
    layouts: tuple[Layout, ...]
    ids: dict[Layout, int]
    source: np.ndarray  # (edges,) id of a layout
    target: np.ndarray  # (edges,)
    targets: np.ndarray  # distinct targets, ascending
    target_begin: np.ndarray  # where the edges to each of `targets` begin
    preference: np.ndarray  # (edges,) breaks ties between paths of equal cost
    # (4, edges): seconds and bytes received per byte of the whole tensor; latency of other collectives, and of sums.
    coefficients: np.ndarray
    # Edges whose time was measured by size: the collective, the pieces of the tensor before it, the edges, is a sum.
    measured: tuple[tuple[Coefficients, int, np.ndarray, bool], ...]
    # ids of a tensor's own layouts, by the order of its dimensions in the graph; -1 for those not in it
    id_cache: dict[tuple[int, ...], dict[Layout, int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class _PathTree:
    """Shortest paths from one source to every layout."""

    last_edge: np.ndarray  # (layouts,) last edge of the path; -1 at the source and for unreachable layouts
    totals: np.ndarray  # (4, layouts) coefficients summed over the path; infinite for unreachable layouts


@dataclasses.dataclass(frozen=True, eq=False)
class _Paths:
    """Shortest paths of a graph under one weight per edge; `trees` of the sources so far."""

    graph: _LayoutGraph
    coefficients: np.ndarray  # (4, edges): those of the graph, for this number of bytes
    weight: np.ndarray  # (edges,)
    trees: dict[int, _PathTree] = dataclasses.field(default_factory=dict)


@functools.lru_cache(maxsize=1024)
def _paths_of(graph: _LayoutGraph, scale: Scale) -> _Paths:
    """The shortest paths for a number of bytes and of combined sums."""
    coefficients = _coefficients_at(graph, scale)
    slope, _, latency, sum_latency = coefficients
    if scale is None:
        seconds = slope
    else:
        nbytes, combined = scale
        seconds = slope * nbytes + latency + sum_latency / combined
    largest = float(seconds.max(initial=0.0)) or 1.0
    # The tie break is far below the largest edge; the reported cost of a path does not contain it.
    epsilon = 1e-6 if scale is None else 1e-13
    return _Paths(graph, coefficients, seconds / largest + epsilon * graph.preference)


def _coefficients_at(graph: _LayoutGraph, scale: Scale) -> np.ndarray:
    """The coefficients of a graph's edges for a tensor of so many bytes."""
    if scale is None or not graph.measured:
        return graph.coefficients
    (nbytes, combined), out = scale, graph.coefficients.copy()
    for collective, shards, edges, is_sum in graph.measured:
        slope, alpha = collective.at(nbytes / shards * (combined if is_sum else 1))
        out[0, edges], out[3 if is_sum else 2, edges] = slope / shards, alpha
    return out


@functools.lru_cache(maxsize=65536)
def _canonical_graph(shape: tuple[int, ...], topology: Topology) -> tuple[_LayoutGraph, tuple[int, ...]]:
    """The graph of a tensor, and the tensor's dimension for each dimension of the graph.

    Only the gcd of a dimension with the number of devices matters, a dimension with gcd 1 is never sharded, and the
    order of dimensions does not change costs: so few graphs serve all tensors.
    """
    gcds = [math.gcd(s, topology.mesh.total) for s in shape]
    order = tuple(sorted((d for d, g in enumerate(gcds) if g > 1), key=lambda d: -gcds[d]))
    return _layout_graph(topology, tuple(gcds[d] for d in order)), order


def _layout_ids(
    layouts: Sequence[Layout], graph: _LayoutGraph, order: tuple[int, ...], topology: Topology
) -> np.ndarray:
    """Ids of layouts in the graph; -1 for those that do not divide the shape."""
    ids = graph.id_cache.setdefault(order, {})
    for a in layouts:
        if a not in ids:
            b = without_unit_axes(a, topology.mesh)
            canonical = Layout(tuple(b.dims[d] for d in order), b.partial)
            shards_other_dims = sum(map(len, b.dims)) != sum(map(len, canonical.dims))
            ids[a] = -1 if shards_other_dims else graph.ids.get(canonical, -1)
    return np.array([ids[a] for a in layouts], dtype=np.int64)


@functools.lru_cache(maxsize=512)
def _layout_graph(topology: Topology, gcds: tuple[int, ...]) -> _LayoutGraph:
    mesh = _mesh_without_unit_axes(topology.mesh)
    layouts = tuple(_layouts(mesh, gcds))
    n, ids = len(layouts), {a: i for i, a in enumerate(layouts)}
    by_value = {(a.dims, a.partial): i for i, a in enumerate(layouts)}
    # source * n + target -> slope, volume, latency, latency of sums, size of the group; of parallel edges the least
    edges: dict[int, tuple[float, float, float, float, int]] = {}
    by_curve: dict[int, tuple[Coefficients, int, bool]] = {}  # of those that were measured by size
    collectives: dict[tuple[str, tuple[str, ...]], tuple[float, float, float, float]] = {}
    measured: dict[tuple[str, tuple[str, ...]], Coefficients] = {}
    for i, a in enumerate(layouts):
        shards = a.pieces(mesh)
        for kind, axes, _, _, dims, partial in successors(a, mesh, gcds):
            edge = (0.0, 0.0, 0.0, 0.0, len(axes))
            if kind != "slice":
                if (kind, axes) not in collectives:
                    c = coefficients(kind, _in_mesh_order(axes, mesh), topology)
                    measured[kind, axes] = c
                    latencies = (0.0, c.alpha) if kind in REDUCING_KINDS else (c.alpha, 0.0)
                    collectives[kind, axes] = (c.slope, c.volume, *latencies)
                slope, volume, latency, sum_latency = collectives[kind, axes]
                edge = (slope / shards, volume / shards, latency, sum_latency, len(axes))
            key = i * n + by_value[dims, partial]
            if key not in edges or edge < edges[key]:
                edges[key] = edge
                by_curve.pop(key, None)
                if kind != "slice" and measured[kind, axes].curve is not None:
                    by_curve[key] = measured[kind, axes], shards, kind in REDUCING_KINDS
    keys = np.array(sorted(edges), dtype=np.int64)
    columns = np.array([edges[k] for k in keys.tolist()], dtype=float).reshape(-1, 5)
    # Ties: fewer collectives, then smaller groups, then fewer slices, then the rank of the edge.
    preference = np.where(columns[:, 1] > 0, 1 + 0.1 * columns[:, 4], 0.01)
    preference += 1e-4 * np.arange(len(keys)) / max(1, len(keys))
    by_target = np.lexsort((keys // n, keys % n))
    keys, preference, columns = keys[by_target], preference[by_target], columns[by_target, :4]
    targets, target_begin = np.unique(keys % n, return_index=True)
    alike: dict[tuple[Coefficients, int, bool], list[int]] = {}
    for at, key in enumerate(keys.tolist()):
        if key in by_curve:
            alike.setdefault(by_curve[key], []).append(at)
    curves = tuple((c, shards, np.array(at), is_sum) for (c, shards, is_sum), at in alike.items())
    return _LayoutGraph(
        mesh,
        gcds,
        layouts,
        ids,
        keys // n,
        keys % n,
        targets,
        target_begin,
        preference,
        columns.T.copy(),
        curves,
    )


def _mesh_without_unit_axes(mesh: MeshAxes) -> MeshAxes:
    axes = [(n, s) for n, s in zip(mesh.names, mesh.sizes, strict=True) if s > 1]
    return MeshAxes(tuple(n for n, _ in axes), tuple(s for _, s in axes))


def without_unit_axes(a: Layout, mesh: MeshAxes) -> Layout:
    """The layout without mesh axes of size one, and with its partial axes in mesh order."""
    unit = {n for n, s in zip(mesh.names, mesh.sizes, strict=True) if s == 1}
    dims = tuple(tuple(x for x in d if x not in unit) for d in a.dims) if unit else a.dims
    return Layout(dims, tuple(n for n in mesh.names if n in a.partial and n not in unit))


def _in_mesh_order(axes: Sequence[str], mesh: MeshAxes) -> tuple[str, ...]:
    return tuple(sorted(axes, key=mesh.names.index))


def _steps_on_path(
    graph: _LayoutGraph, last_edge: np.ndarray, source: int, target: int, topology: Topology
) -> list[ReshardStep]:
    """The steps of a shortest path; of several between two layouts, the one whose cost the edge has."""
    nodes = [target]
    while nodes[-1] != source:
        nodes.append(int(graph.source[last_edge[nodes[-1]]]))
    path = []
    for after_id, before_id in itertools.pairwise(nodes):
        before, after = graph.layouts[before_id], graph.layouts[after_id]
        between = [
            s for s in successor_steps(before, graph.mesh, graph.gcds) if apply_step(s, before) == after
        ]
        path.append(min(between, key=lambda s: _edge_order(s, topology)))
    return path[::-1]


def _edge_order(s: ReshardStep, topology: Topology) -> tuple[float, float, float, int]:
    """The order in which `_layout_graph` chooses one of several edges between two layouts."""
    if s.kind == "slice":
        return 0.0, 0.0, 0.0, len(s.axes)
    c = coefficients(s.kind, _in_mesh_order(s.axes, topology.mesh), topology)
    return c.slope, c.volume, c.alpha, len(s.axes)


def _to_tensor_dims(
    path: Sequence[ReshardStep], order: tuple[int, ...], a: Layout
) -> tuple[ReshardStep, ...]:
    """Steps on the tensor's own dimensions; consecutive slices of one dimension are merged."""
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
    """Every layout that divides dimensions of these gcds, found by appending axes one by one."""
    size = dict(zip(mesh.names, mesh.sizes, strict=True))
    out = []
    for r in range(len(mesh.names) + 1):
        for partial in itertools.combinations(mesh.names, r):
            start: Dims = ((),) * len(gcds)
            seen: set[Dims] = {start}
            unused = tuple(a for a in mesh.names if a not in partial)
            # axes of each dimension, its remaining length, axes not used yet
            pending: list[tuple[Dims, tuple[int, ...], tuple[str, ...]]] = [(start, gcds, unused)]
            while pending:
                dims, local, unused = pending.pop()
                for a, d in itertools.product(unused, range(len(gcds))):
                    after: Dims = (*dims[:d], (*dims[d], a), *dims[d + 1 :])
                    if local[d] % size[a] == 0 and after not in seen:
                        seen.add(after)
                        local_after = (*local[:d], local[d] // size[a], *local[d + 1 :])
                        pending.append((after, local_after, tuple(b for b in unused if b != a)))
            out += [Layout(dims, partial) for dims in sorted(seen)]
    return out


def _add_sources(paths: _Paths, sources: Sequence[int]) -> None:
    """Compute the trees of new sources by Bellman-Ford, for many sources at once.

    Paths are short (a handful of collectives) and graphs small, so relaxing all edges until nothing changes is faster
    than Dijkstra's algorithm with its queue.
    """
    new = [s for s in dict.fromkeys(sources) if s not in paths.trees]
    batch = max(1, _RELAX_BATCH // max(1, len(paths.graph.source)))
    for begin in range(0, len(new), batch):
        roots = np.array(new[begin : begin + batch])
        distance, over_edge = _bellman_ford(paths, roots)
        last_edge, totals = _path_totals(paths, roots, distance, over_edge)
        for column, source in enumerate(roots.tolist()):
            paths.trees[source] = _PathTree(
                last_edge[:, column].copy(), np.ascontiguousarray(totals[:, :, column])
            )


def _bellman_ford(paths: _Paths, roots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(layouts, roots) distance from each root; (edges, roots) length of the shortest path that ends in each edge."""
    graph = paths.graph
    distance = np.full((len(graph.layouts), len(roots)), np.inf)
    distance[roots, np.arange(len(roots))] = 0.0
    over_edge = np.empty((0, len(roots)))
    while len(graph.source):
        over_edge = distance[graph.source] + paths.weight[:, None]
        least = np.minimum.reduceat(over_edge, graph.target_begin, axis=0)
        improved, column = np.nonzero(least < distance[graph.targets])
        if not len(improved):
            break
        distance[graph.targets[improved], column] = least[improved, column]
    return distance, over_edge


def _path_totals(
    paths: _Paths, roots: np.ndarray, distance: np.ndarray, over_edge: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(layouts, roots) last edge of each shortest path; (4, layouts, roots) its coefficients, summed edge by edge."""
    graph = paths.graph
    n = len(graph.layouts)
    last_edge = np.full((n, len(roots)), -1, dtype=np.int32)
    tight, column = np.nonzero((over_edge == distance[graph.target]) & np.isfinite(over_edge))
    last_edge[graph.target[tight[::-1]], column[::-1]] = tight[::-1]  # of several the first
    last_edge[roots, np.arange(len(roots))] = -1
    totals = np.zeros((4, n, len(roots)))
    layout, column = np.nonzero(last_edge >= 0)
    node = layout  # all paths are followed back at once; those that reach their root drop out
    while len(layout):
        edge = last_edge[node, column]
        totals[:, layout, column] += paths.coefficients[:, edge]
        node = graph.source[edge]
        on_path = node != roots[column]
        layout, column, node = layout[on_path], column[on_path], node[on_path]
    totals[:, ~np.isfinite(distance)] = np.inf
    return last_edge, totals
