"""Gather by its dimension numbers: embedding lookup, `take_along_axis`, any advanced indexing.

Each dimension of the operand is one of
- batching: paired with a dimension of the indices, with a common factor;
- covered in full by the slice: a factor of operand and result;
- indexed, one element at a time (a vocabulary): if sharded, each device looks up the rows that it holds and returns
  zero for the others, so the results are partial sums. Out-of-range indices behave as in the plain operator.
The indices' other dimensions are factors of indices and result.

>>> from jax import ShapeDtypeStruct as S
>>> from jax.lax import GatherDimensionNumbers as N, GatherScatterMode as M
>>> p = {"dimension_numbers": N((1,), (0,), (0,)), "slice_sizes": (1, 16), "mode": M.CLIP, "fill_value": None}
>>> print(gather(OpView("gather", p, (S((64, 16), "float32"), S((8, 1), "int32")), (S((8, 16), "float32"),))))
a b, c () -> c b  (reduce a)
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import GatherDimensionNumbers, GatherScatterMode

from jshard._rules.factors import Factors, is_float, linear_sets, summable
from jshard._rules.primitives.slicing import clamped
from jshard._rules.registry import LocalContext, OpView, block_index, family
from jshard._rules.rule import Rule


rule = family("gather")


def _window_dims(n: GatherDimensionNumbers, rank: int) -> list[int]:
    """Operand dimensions that appear in the result, in order."""
    not_in_window = {*n.collapsed_slice_dims, *n.operand_batching_dims}
    return [d for d in range(rank) if d not in not_in_window]


@rule("gather", local=lambda ctx, x, i: _gather_local(ctx, x, i))
def gather(op: OpView) -> Rule:
    """Factors of the indices' dimensions, then of the operand's."""
    n, sizes = op.params["dimension_numbers"], op.params["slice_sizes"]
    x, indices, y = op.ins[0], op.ins[1], op.outs[0]
    f = Factors()
    index_dims = f.dims(indices.shape[:-1])
    operand: list[tuple[int, ...]] = [()] * len(x.shape)
    reduction = []
    for d, b in zip(n.operand_batching_dims, n.start_indices_batching_dims, strict=True):
        operand[d] = index_dims[b]
    for d, size in enumerate(x.shape):
        if d in n.operand_batching_dims:
            continue
        if sizes[d] == size and d not in n.collapsed_slice_dims:
            operand[d] = (f.new(size),)
        elif sizes[d] == 1 and d in n.start_index_map and summable(y):
            operand[d] = (f.new(size),)
            reduction.append(operand[d][0])
    window = _window_dims(n, len(x.shape))
    out: list[tuple[int, ...]] = [()] * len(y.shape)
    for p, d in zip(n.offset_dims, window, strict=True):
        # An indexed dimension of slice size one leaves a result dimension of size one.
        out[p] = (
            operand[d] if sizes[d] == x.shape[d] and operand[d] and operand[d][0] not in reduction else ()
        )
    batch = iter(index_dims)
    for p in range(len(out)):
        if p not in n.offset_dims:
            out[p] = next(batch)
    fills = op.params["mode"] == GatherScatterMode.FILL_OR_DROP
    fill = op.params["fill_value"]
    adds_up = not fills or fill == 0 or (is_float(y) and fill is not None and bool(fill != fill))
    return Rule(
        (tuple(operand), (*index_dims, ())), (tuple(out),), f.sizes, reduction=tuple(reduction),
        linear=linear_sets(op, (0,)) if adds_up else (), work=0.0,
        note="" if summable(y) else f"rows of {y.dtype} cannot be added up",
    )  # fmt: skip


def _gather_local(ctx: LocalContext, x: jax.Array, indices: jax.Array) -> Sequence[jax.Array]:
    n, sizes, mode = (ctx.op.params[k] for k in ("dimension_numbers", "slice_sizes", "mode"))
    whole = ctx.op.ins[0].shape
    cut = [ctx.operand_layout(0).dims[d] for d in range(x.ndim)]
    # A slice that covers a dimension covers its shard; an indexed dimension keeps slice size one.
    indexed = {d: c for c, d in enumerate(n.start_index_map)}
    masked = [d for d in indexed if cut[d] and sizes[d] == 1 and whole[d] > 1]
    local_sizes = tuple(x.shape[d] if s == whole[d] and d not in masked else s for d, s in enumerate(sizes))
    if not masked:
        (y,) = ctx.bind(x, indices, slice_sizes=local_sizes)
        # XLA rewrites a gather of one row as a slice at a clamped index, and loses the clamp when it merges that with a
        # slice of a later reshard (see `in_range` of `slicing.py`). Indices are not clamped here: derivatives use them.
        one = indices.size == len(n.start_index_map) and mode != GatherScatterMode.FILL_OR_DROP
        return [lax.optimization_barrier(y) if one and y.ndim else y]

    mine: jax.Array | bool = True
    columns = []
    promised = mode not in (GatherScatterMode.FILL_OR_DROP, GatherScatterMode.CLIP)
    for c, d in enumerate(n.start_index_map):
        index, last = indices[..., c], whole[d] - sizes[d]
        column = clamped(index, last)
        if d in masked:
            column = column - ctx.operand_offset(0, d)
            mine = mine & (column >= 0) & (column < x.shape[d])
            column = jnp.clip(column, 0, x.shape[d] - 1)
        if promised:
            # An index out of range reads the nearest row, but its gradient is dropped: it must stay out of range.
            column = jnp.where(index < 0, -1, jnp.where(clamped(index, last + 1) > last, x.shape[d], column))
        columns.append(column)
    wide = jnp.result_type(*columns)
    local = jnp.stack([c.astype(wide) for c in columns], -1)
    if indices.size == len(columns):
        # XLA loses the clamp of a slice of a slice: see `in_range` of `slicing.py`.
        x = lax.optimization_barrier(x)
    (y,) = ctx.bind(
        x, local, slice_sizes=local_sizes, mode=GatherScatterMode.PROMISE_IN_BOUNDS, fill_value=None,
        indices_are_sorted=False,
    )  # fmt: skip
    batch = [p for p in range(y.ndim) if p not in n.offset_dims]
    y = jnp.where(lax.broadcast_in_dim(mine, y.shape, batch), y, jnp.zeros_like(y))
    if mode != GatherScatterMode.FILL_OR_DROP:
        return [y]
    # Out of range of the whole dimension: the fill value, contributed by one device.
    inside: jax.Array | bool = True
    for c, d in enumerate(n.start_index_map):
        index = indices[..., c]
        last = min(whole[d] - sizes[d], int(jnp.iinfo(index.dtype).max))
        inside = inside & (index >= 0) & (index <= last)
    holders = tuple(a for d in masked for a in cut[d])
    fill = jnp.where(
        block_index(holders, ctx.mesh) == 0, jnp.asarray(ctx.op.params["fill_value"], y.dtype), 0
    )
    return [jnp.where(lax.broadcast_in_dim(inside, y.shape, batch), y, fill.astype(y.dtype))]
