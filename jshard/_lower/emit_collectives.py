"""The steps of a reshard as collectives on one device's block, inside `jax.shard_map`.

Each `ReshardStep` is one collective or one local slice. Under `check_vma` JAX types every value with the mesh axes it
varies over. Here a value varies over exactly the axes of its layout (and may vary over `consumer_axes`, where the
consumer's blocks differ in any case). So an all-gather is the invariant kind, whose transpose is a slice, except on
those axes: there it is the plain kind, whose transpose, a reduce-scatter, is what the gradient needs.

>>> import jax, numpy as np
>>> from jax.sharding import AxisType
>>> from jshard._cost.resharding import cheapest_steps
>>> from jshard._core.topology import from_mesh, mesh_axes
>>> mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])
>>> a, b = Layout((("x",), ("y",))), Layout((("x", "y"), ()))
>>> found = cheapest_steps(a, b, (8, 8), from_mesh(mesh))
>>> def reshard(x):
...     return apply_reshard(x, a, b, found, mesh_axes(mesh), vma=True)
>>> x = np.arange(64.0).reshape(8, 8)
>>> bool((jax.jit(jax.shard_map(reshard, mesh=mesh, in_specs=a.spec, out_specs=b.spec))(x) == x).all())
True
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jshard._core import jaxcompat as compat
from jshard._core.compute_units import LANES
from jshard._core.jaxcompat import itemsize
from jshard._core.layout import Layout, MeshAxes
from jshard._core.topology import Topology
from jshard._cost.all_to_all_kind import all_to_all_in_permutes
from jshard._cost.reshard_steps import ReshardStep, apply_step
from jshard._cost.resharding import without_unit_axes
from jshard._lower.all_to_all_permutes import all_to_all_by_permutes
from jshard._rules.registry import block_index


def apply_reshard(
    x: jax.Array,
    source: Layout,
    target: Layout,
    steps: Sequence[ReshardStep],
    mesh: MeshAxes,
    *,
    vma: bool,
    consumer_axes: frozenset[str] = frozenset(),
    topology: Topology | None = None,
    after_loop: bool = False,
) -> jax.Array:
    """Turn a local block in one layout into the local block in another; called inside `shard_map`.

    Arguments:

    - `x`: this device's block, of shape `source.local_shape(shape, mesh)`; any dtype.
    - `source`, `target`: the layouts; `steps` must lead from one to the other, else `ValueError`.
    - `steps`: from `jshard._cost.resharding.cheapest_steps`.
    - `mesh`: the mesh of the surrounding `shard_map`.
    - `vma`: whether that runs with `check_vma=True`.
    - `consumer_axes`: axes on which the consumer varies, so that the result may be typed as varying there.
    - `topology`: the mesh's links, which decide whether an all-to-all is sent by permutes; without it none is.
    - `after_loop`: whether a loop makes the block.
    """
    if 0 in x.shape:  # XLA refuses collectives of arrays of size zero
        shape = [n * mesh.size(*axes) for n, axes in zip(x.shape, source.dims, strict=True)]
        empty = compat.empty(target.local_shape(tuple(shape), mesh), x.dtype)
        return compat.cast_vma(empty, target.axes) if vma else empty
    layout, end = without_unit_axes(source, mesh), without_unit_axes(target, mesh)
    if vma:
        x = compat.cast_vma(x, source.axes)
    for step in steps:
        if step.kind == "all_to_all" and topology is not None and not vma:
            if all_to_all_in_permutes(step.axes, x.size * itemsize(x.dtype), topology):
                assert step.dst_dim is not None and step.src_dim is not None
                x = all_to_all_by_permutes(x, step.axes, step.dst_dim, step.src_dim, mesh)
                layout = apply_step(step, layout)
                continue
        on_tpu = topology is not None and not vma and topology.chip.name.startswith("tpu")
        if on_tpu and step.kind == "reduce_scatter":
            x = _as_computed(x, step, mesh) if after_loop else x
            x = _scattered_at_once(_emit(x, layout, step, mesh, vma, consumer_axes))
        else:
            x = _emit(x, layout, step, mesh, vma, consumer_axes)
        layout = apply_step(step, layout)
    if layout.dims != end.dims or set(layout.partial) != set(end.partial):
        raise ValueError(f"steps lead from {source} to {layout}, not to {target}")
    return _fix_unit_axes(x, target, mesh, consumer_axes) if vma else x


def _as_computed(x: jax.Array, step: ReshardStep, mesh: MeshAxes) -> jax.Array:
    """The sum of a loop that is reduce-scattered, in the memory layout that the loop gives it.

    Where blocks are no multiple of the lanes of a register, the TPU compiler wants the scattered dimension as the major one.
    A loop that adds to the sum would hold it so, and copy it to the layout of the products and back in every pass. A product
    outside of loops just writes it so, while in its own layout the reduce-scatter would be an all-reduce and a slice.
    """
    assert step.dst_dim is not None
    block = x.shape[step.dst_dim] // mesh.size(*step.axes)
    return lax.optimization_barrier(x) if block % LANES else x


def _scattered_at_once(x: jax.Array) -> jax.Array:
    """The block of a reduce-scatter, which is in memory before any reader runs.

    The TPU compiler makes an all-reduce and a slice of some (over both axes of a square slice of v5e). The slice would be
    fused into each reader, and the whole sum stay in memory until the last of them, in the backward pass, say.
    """
    return lax.optimization_barrier(x)


def _emit(
    x: jax.Array, layout: Layout, step: ReshardStep, mesh: MeshAxes, vma: bool, consumer_axes: frozenset[str]
) -> jax.Array:
    """Run one step on a block in `layout`."""
    axes, src, dst = step.axes, step.src_dim, step.dst_dim
    if step.kind == "slice":
        assert dst is not None
        x = compat.cast_vma(x, axes) if vma else x
        size = x.shape[dst] // mesh.size(*axes)
        return lax.dynamic_slice_in_dim(x, block_index(axes, mesh) * size, size, dst)
    if step.kind == "all_gather":
        assert src is not None
        return _all_gather(x, axes, src, vma, consumer_axes)
    if step.kind == "all_to_all":
        assert dst is not None and src is not None
        if compat.ALL_TO_ALL_MIXES_LAYOUTS and 1 in x.shape:
            return _flat_all_to_all(x, axes, dst, src, mesh.size(*axes))
        return lax.all_to_all(x, axes, dst, src, tiled=True)
    if step.kind == "all_reduce":
        return lax.psum(x, axes)
    if step.kind == "reduce_scatter":
        assert dst is not None
        if jnp.issubdtype(x.dtype, jnp.complexfloating):  # TPUs have no reduce-scatter of complex numbers
            parts = [lax.psum_scatter(p, axes, scatter_dimension=dst, tiled=True) for p in (x.real, x.imag)]
            return lax.complex(*parts)
        return lax.psum_scatter(x, axes, scatter_dimension=dst, tiled=True)
    return lax.ppermute(x, axes, permute_pairs(layout, step, mesh))


def _flat_all_to_all(x: jax.Array, axes: tuple[str, ...], split: int, join: int, n: int) -> jax.Array:
    """An all-to-all of the flattened, concatenated parts: a vector has only one memory layout."""
    part = [*x.shape[:split], x.shape[split] // n, *x.shape[split + 1 :]]
    parts = jnp.moveaxis(x.reshape(*x.shape[:split], n, *part[split:]), split, 0)
    parts = lax.all_to_all(parts.reshape(-1), axes, 0, 0, tiled=True).reshape(n, *part)
    joined = jnp.moveaxis(parts, 0, join)
    return joined.reshape(*part[:join], n * part[join], *part[join + 1 :])


def _all_gather(
    x: jax.Array, axes: tuple[str, ...], dim: int, vma: bool, consumer_axes: frozenset[str]
) -> jax.Array:
    """Gather over `axes`; one collective has one kind of typing, so axes of both kinds take several."""
    if not vma or set(axes) <= consumer_axes:
        return lax.all_gather(x, axes, axis=dim, tiled=True)
    if not set(axes) & consumer_axes:
        return compat.all_gather_invariant(x, axes, axis=dim)
    # Minor axes first: a gather removes the minor axes of a dimension.
    for varying, group in itertools.groupby(reversed(axes), key=lambda a: a in consumer_axes):
        x = _all_gather(x, tuple(group)[::-1], dim, vma, consumer_axes if varying else frozenset())
    return x


def permute_pairs(layout: Layout, step: ReshardStep, mesh: MeshAxes) -> list[tuple[int, int]]:
    """Pairs (source, target) of positions in the group of a permute, its axes major first.

    If some axis of the group cuts nothing, several devices hold the same block: those that hold the right block already
    keep it, the others are paired in order.

    >>> mesh = MeshAxes(("x", "y"), (2, 2))
    >>> step = ReshardStep("permute", ("x", "y"), target=(("y", "x"), ()))
    >>> permute_pairs(Layout((("x", "y"), ())), step, mesh)
    [(0, 0), (2, 1), (1, 2), (3, 3)]
    """
    assert step.target is not None
    before = _block_indices(layout.dims, step.axes, mesh)
    after = _block_indices(step.target, step.axes, mesh)
    holders: dict[tuple[int, ...], list[int]] = {}
    for i, block in enumerate(before):
        holders.setdefault(block, []).append(i)
    source = {i: i for i, block in enumerate(before) if block == after[i]}
    for i in source:
        holders[before[i]].remove(i)
    for i, block in enumerate(after):
        if i not in source:
            source[i] = holders[block].pop(0)
    return [(source[i], i) for i in range(len(before))]


def _block_indices(
    dims: Sequence[tuple[str, ...]], axes: Sequence[str], mesh: MeshAxes
) -> list[tuple[int, ...]]:
    """The block that each member of a group holds, as its index along every dimension; axes outside the group at 0."""
    blocks = []
    for position in itertools.product(*(range(mesh.size(a)) for a in axes)):
        coordinate = dict(zip(axes, position, strict=True))
        index = []
        for dim in dims:
            i = 0
            for a in dim:
                i = i * mesh.size(a) + coordinate.get(a, 0)
            index.append(i)
        blocks.append(tuple(index))
    return blocks


def _fix_unit_axes(x: jax.Array, target: Layout, mesh: MeshAxes, consumer_axes: frozenset[str]) -> jax.Array:
    """Correct the type on axes of size one, which no step mentions: collectives over them cost nothing."""
    unit = {name for name, size in zip(mesh.names, mesh.sizes, strict=True) if size == 1}
    extra = tuple(
        a for a in mesh.names if a in unit & compat.vma(x) and a not in target.axes and a not in consumer_axes
    )
    if extra and x.ndim:
        x = compat.all_gather_invariant(x, extra, axis=0)
    elif extra:
        x = lax.psum(x, extra)
    return compat.cast_vma(x, unit.intersection(target.axes))
