"""Scatter by its dimension numbers: gradients of lookups, `x.at[i].add(u)`, segment sums.

As for gather, a dimension of the operand is batching, covered in full by the updates' window, or indexed one element at
a time. An indexed dimension may be sharded: each device applies the updates to its rows and drops the others. For sums
the updates' own dimensions may be sharded: the results are partial sums, to which only the first device adds the
operand. For `max` and `min` the local implementation reduces at once.

>>> from jax import ShapeDtypeStruct as S
>>> from jax.lax import ScatterDimensionNumbers as N, GatherScatterMode as M
>>> p = {"dimension_numbers": N((1,), (0,), (0,)), "mode": M.CLIP}
>>> x, i, u = S((64, 16), "float32"), S((8, 1), "int32"), S((8, 16), "float32")
>>> print(scatter(OpView("scatter-add", p, (x, i, u), (x,))))
a b, c (), c b -> a b  (reduce c)
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode

from jshard._rules.factors import Factors, linear_sets, summable
from jshard._rules.primitives.slicing import clamped
from jshard._rules.registry import LocalContext, OpView, StackSlice, block_index, family, write_back
from jshard._rules.rule import Rule


rule = family("scatter")

_LINEAR = {"scatter-add": ((0, 2),), "scatter-sub": ((0, 2),), "scatter": ((0, 2),), "scatter-mul": ((0,),)}
_SUMS = ("scatter-add", "scatter-sub")
_EXTREMA = {"scatter-max": "max", "scatter-min": "min"}


def _scatter_local(
    ctx: LocalContext, x: jax.Array | StackSlice, indices: jax.Array, updates: jax.Array
) -> Sequence[jax.Array | StackSlice]:
    if isinstance(x, StackSlice):
        (y,) = _scatter_local(ctx, x.array(), indices, updates)
        return [write_back(ctx, x, y)]
    n, mode, into = ctx.op.params["dimension_numbers"], ctx.op.params["mode"], ctx.keep_row_major(x)
    sums = [f for f in ctx.rule.reduction if ctx.axes(f)]
    across = tuple(a for f in sums for a in ctx.axes(f))
    if across and ctx.rule.reducer == "sum":
        into = jnp.where(block_index(across, ctx.mesh) == 0, into, jnp.zeros_like(into))
    window = _covered(ctx.op)
    masked = [
        d for d in n.scatter_dims_to_operand_dims if ctx.operand_layout(0).dims[d] and d not in window
    ]  # fmt: skip
    if masked:
        columns = []
        for c, d in enumerate(n.scatter_dims_to_operand_dims):
            index = indices[..., c]
            size = ctx.op.ins[0].shape[d]
            if mode == GatherScatterMode.CLIP:
                index = clamped(index, size - window.get(d, 1))
            else:
                # Out of range becomes -1 or `size`, so that subtracting the offset cannot overflow.
                index = jnp.where(index < 0, -1, clamped(index, size))
            if d in masked:
                index = index - ctx.operand_offset(0, d)
                # Rows of other devices are out of range on either side, and dropped.
                index = jnp.where((index < 0) | (index >= into.shape[d]), into.shape[d], index)
            columns.append(index)
        if indices.size == len(columns):
            # XLA rewrites a single update as an update of a slice of `into`; if that is itself a slice, it merges the two
            # without the clamping of the inner one (jaxlib 0.10, not 0.12).
            into = lax.optimization_barrier(into)
        wide = jnp.result_type(*columns)
        indices = jnp.stack([c.astype(wide) for c in columns], -1)
        result = ctx.bind(
            into,
            indices,
            updates,
            mode=GatherScatterMode.FILL_OR_DROP,
            indices_are_sorted=False,
            unique_indices=False,
        )
    else:
        result = ctx.bind(into, indices, updates)
    if across and ctx.rule.reducer != "sum":
        collective = lax.pmax if ctx.rule.reducer == "max" else lax.pmin
        result = [collective(y, across) for y in result]
    return [ctx.keep_row_major(y) for y in result]


def _covered(op: OpView) -> dict[int, int]:
    """Operand dimensions that the updates' window covers in full, with their length."""
    return {d: s for d, s in _window(op).items() if s == op.ins[0].shape[d]}


def _window(op: OpView) -> dict[int, int]:
    """Operand dimensions of the updates' window, with the window's length along each."""
    n = op.params["dimension_numbers"]
    not_in_window = {*n.inserted_window_dims, *n.operand_batching_dims}
    dims = [d for d in range(len(op.ins[0].shape)) if d not in not_in_window]
    return {d: op.ins[2].shape[p] for d, p in zip(dims, n.update_window_dims, strict=True)}


@rule(
    "scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-max", "scatter-min", local=_scatter_local
)
def scatter(op: OpView) -> Rule:
    """Factors of the indices' dimensions, then of the operand's."""
    n = op.params["dimension_numbers"]
    x, indices, updates = op.ins
    f = Factors()
    index_dims = f.dims(indices.shape[:-1])
    operand: list[tuple[int, ...]] = [()] * len(x.shape)
    for d, b in zip(n.operand_batching_dims, n.scatter_indices_batching_dims, strict=True):
        operand[d] = index_dims[b]
    covered, window = _covered(op), _window(op)
    update: list[tuple[int, ...]] = [()] * len(updates.shape)
    for d, size in enumerate(x.shape):
        if d in n.operand_batching_dims:
            continue
        single = window.get(d, 1) == 1 and d in n.scatter_dims_to_operand_dims
        if d in covered or single:
            operand[d] = (f.new(size),)
    for p, d in zip(n.update_window_dims, window, strict=True):
        update[p] = operand[d] if d in covered else ()
    batch = iter(index_dims)
    for p in range(len(update)):
        if p not in n.update_window_dims:
            update[p] = next(batch)
    carried = {k for d in operand for k in d}
    update_factors = tuple(d[0] for d in index_dims if d[0] not in carried)
    sums = op.primitive in _SUMS and summable(op.outs[0])
    extremum = op.primitive in _EXTREMA and not jnp.issubdtype(x.dtype, jnp.complexfloating)
    return Rule(
        (tuple(operand), (*index_dims, ()), tuple(update)), (tuple(operand),), f.sizes,
        reduction=update_factors if sums or extremum else (),
        blocked=() if sums or extremum else update_factors,
        reducer=_EXTREMA.get(op.primitive, "sum"),
        linear=linear_sets(op, *_LINEAR.get(op.primitive, ())),
        work=0.0,
        note="" if sums or extremum else "updates to one place are applied in order",
    )  # fmt: skip
