"""Running the steps of a redistribution on one device's block, inside `jax.shard_map`.

Each `Step` is one collective, or one local slice. Under `check_vma` JAX types every value with the axes it
varies over; here a value varies exactly over the axes of its layout (and may vary over `varying`, where the
consumer varies anyhow). So a gather is the invariant kind, whose transpose is a slice, except on the axes
where the consumer varies: there the plain gather's transpose, a reduce-scatter, is what the gradient needs.

>>> import jax, numpy as np
>>> from jax.sharding import AxisType, PartitionSpec as P
>>> from jshard import _hardware as hardware
>>> from jshard._cost.resharding import steps
>>> from jshard._core.topology import from_mesh, mesh_axes
>>> mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])
>>> a, b = Layout((("x",), ("y",))), Layout((("x", "y"), ()))
>>> plan = steps(a, b, (8, 8), from_mesh(mesh))
>>> def move(x):
...     return run_steps(x, a, b, plan, mesh_axes(mesh), vma=True)
>>> x = np.arange(64.0).reshape(8, 8)
>>> bool((jax.jit(jax.shard_map(move, mesh=mesh, in_specs=a.spec, out_specs=b.spec))(x) == x).all())
True
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jshard import _jaxcompat as compat
from jshard._core.layout import Layout, MeshAxes
from jshard._cost.reshard_steps import ReshardStep, apply_step
from jshard._cost.resharding import without_unit_axes
from jshard._rules.registry import block_index


def apply_reshard(
    x: Any,
    layout_from: Layout,
    layout_to: Layout,
    steps: Sequence[ReshardStep],
    mesh: MeshAxes,
    *,
    vma: bool,
    consumer_axes: frozenset[str] = frozenset(),
) -> Any:
    """Turn a local block in one layout into the local block in another; called inside `shard_map`.

    Arguments:

    - `x`: this device's block, of shape `layout_from.local_shape(shape, mesh)`; any dtype.
    - `layout_from`, `layout_to`: the layouts; `steps` must lead from one to the other, else `ValueError`.
    - `steps`: from `jshard._cost.resharding.steps`.
    - `mesh`: the mesh of the surrounding `shard_map`.
    - `vma`: whether that runs with `check_vma=True`.
    - `varying`: axes on which the consumer varies, so that a result typed varying there is welcome.
    """
    here, goal = without_unit_axes(layout_from, mesh), without_unit_axes(layout_to, mesh)
    if 0 in x.shape:  # XLA refuses collectives of nothing
        whole = [n * mesh.size(*axes) for n, axes in zip(x.shape, layout_from.dims, strict=True)]
        nothing = compat.empty(layout_to.local_shape(tuple(whole), mesh), x.dtype)
        return _cast_vma(nothing, layout_to.axes) if vma else nothing
    if vma:
        x = _cast_vma(x, layout_from.axes)
    for step in steps:
        x = _apply_step(x, here, step, mesh, vma, consumer_axes)
        here = apply_step(step, here)
    if here.dims != goal.dims or set(here.partial) != set(goal.partial):
        raise ValueError(f"steps lead from {layout_from} to {here}, not to {layout_to}")
    if vma:
        x = _fix_unit_axes(x, layout_to, mesh, consumer_axes)
    return x


def _apply_step(
    x: Any, here: Layout, step: ReshardStep, mesh: MeshAxes, vma: bool, varying: frozenset[str]
) -> Any:
    axes, src, dst = step.axes, step.src_dim, step.dst_dim
    if step.kind == "slice":
        assert dst is not None
        x = _cast_vma(x, axes) if vma else x
        size = x.shape[dst] // mesh.size(*axes)
        return lax.dynamic_slice_in_dim(x, block_index(axes, mesh) * size, size, dst)
    if step.kind == "all_gather":
        return _all_gather(x, axes, src, vma, varying)
    if step.kind == "all_to_all":
        assert dst is not None and src is not None
        if compat.ALL_TO_ALL_MIXES_LAYOUTS and 1 in x.shape:
            return _flat_all_to_all(x, axes, dst, src, mesh.size(*axes))
        return lax.all_to_all(x, axes, dst, src, tiled=True)
    if step.kind == "all_reduce":
        return lax.psum(x, axes)
    if step.kind == "reduce_scatter":
        assert dst is not None
        if jnp.issubdtype(x.dtype, jnp.complexfloating):  # TPUs have none of complex numbers
            parts = [lax.psum_scatter(p, axes, scatter_dimension=dst, tiled=True) for p in (x.real, x.imag)]
            return lax.complex(*parts)
        return lax.psum_scatter(x, axes, scatter_dimension=dst, tiled=True)
    return lax.ppermute(x, axes, permute_pairs(here, step, mesh))


def _flat_all_to_all(x: Any, axes: tuple[str, ...], split: int, join: int, n: int) -> Any:
    """The all-to-all of a vector that holds the parts one after the other: a vector has one memory layout only."""
    part = [*x.shape[:split], x.shape[split] // n, *x.shape[split + 1 :]]
    parts = jnp.moveaxis(x.reshape(*x.shape[:split], n, *part[split:]), split, 0)
    parts = lax.all_to_all(parts.reshape(-1), axes, 0, 0, tiled=True).reshape(n, *part)
    joined = jnp.moveaxis(parts, 0, join)
    return joined.reshape(*part[:join], n * part[join], *part[join + 1 :])


def _all_gather(x: Any, axes: tuple[str, ...], dim: Any, vma: bool, varying: frozenset[str]) -> Any:
    """One all-gather; only one kind of typing fits in one collective, so mixed axes take one each."""
    if not vma or set(axes) <= varying:
        return lax.all_gather(x, axes, axis=dim, tiled=True)
    if not set(axes) & varying:
        return compat.all_gather_invariant(x, axes, axis=dim)
    # Minor axes first: a gather removes the minor end of the cut.
    for same, group in itertools.groupby(reversed(axes), key=lambda a: a in varying):
        x = _all_gather(x, tuple(group)[::-1], dim, vma, varying if same else frozenset())
    return x


def permute_pairs(here: Layout, step: ReshardStep, mesh: MeshAxes) -> list[tuple[int, int]]:
    """Pairs (from, to) of positions in the group of a permute, its axes major first.

    A block may lie on several devices of the group, when some axis of it cuts nothing; such devices are
    paired in order, those that already hold the right block with themselves.

    >>> mesh = MeshAxes(("x", "y"), (2, 2))
    >>> step = Step("permute", ("x", "y"), target=(("y", "x"), ()))
    >>> permutation(Layout((("x", "y"), ())), step, mesh)
    [(0, 0), (2, 1), (1, 2), (3, 3)]
    """
    assert step.target is not None
    sizes = [mesh.size(a) for a in step.axes]
    before, after = _block_indices(here.dims, step.axes, mesh), _block_indices(step.target, step.axes, mesh)
    holders: dict[tuple[int, ...], list[int]] = {}
    for i in range(math.prod(sizes)):
        holders.setdefault(before[i], []).append(i)
    pairs: dict[int, int] = {}
    for i in range(math.prod(sizes)):
        if before[i] == after[i]:
            pairs[i] = i
            holders[before[i]].remove(i)
    for i in range(math.prod(sizes)):
        if i not in pairs:
            pairs[i] = holders[after[i]].pop(0)
    return [(pairs[i], i) for i in range(math.prod(sizes))]


def _block_indices(
    dims: Sequence[tuple[str, ...]], axes: Sequence[str], mesh: MeshAxes
) -> list[tuple[int, ...]]:
    """Which block each member of a group holds: its index along every dimension, other axes at zero."""
    out = []
    for position in itertools.product(*(range(mesh.size(a)) for a in axes)):
        at = dict(zip(axes, position, strict=True))
        index = []
        for d in dims:
            i = 0
            for a in d:
                i = i * mesh.size(a) + at.get(a, 0)
            index.append(i)
        out.append(tuple(index))
    return out


def _cast_vma(x: Any, axes: Sequence[str]) -> Any:
    """The value typed as varying over `axes` too."""
    missing = tuple(a for a in axes if a not in compat.vma(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def _fix_unit_axes(x: Any, goal: Layout, mesh: MeshAxes, varying: frozenset[str]) -> Any:
    """Make the type right on axes of size one, which no step mentions: sums over them are free."""
    small = {n for n, s in zip(mesh.names, mesh.sizes, strict=True) if s == 1}
    extra = tuple(a for a in mesh.names if a in small and a in compat.vma(x))
    extra = tuple(a for a in extra if a not in goal.axes and a not in varying)
    if extra and x.ndim:
        x = compat.all_gather_invariant(x, extra, axis=0)
    elif extra:
        x = lax.psum(x, extra)
    return _cast_vma(x, [a for a in goal.axes if a in small])
