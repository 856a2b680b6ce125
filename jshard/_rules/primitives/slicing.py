"""Slices and updates at an offset: dimensions covered in full may be sharded, others not, with two exceptions.

A strided `slice` with one element per stride is `(o k) -> o`: each shard holds its own elements. A
`dynamic_update_slice` of one element along a dimension (a key-value cache in decoding) may be sharded along it: the
device that holds the position writes, the others keep their shard.

>>> from jax import ShapeDtypeStruct as S
>>> p = {"start_indices": (0, 1), "limit_indices": (4, 8), "strides": (1, 2)}
>>> print(slice_(OpView("slice", p, (S((4, 8), "int8"),), (S((4, 4), "int8"),))))
a (b c) -> a b
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jshard._rules.factors import Factors, linear_sets, summable
from jshard._rules.registry import LocalContext, OpView, StackSlice, family, materialized
from jshard._rules.rule import PARTIAL, JointCut, Rule


rule = family("slice")


_LEAST_DROPPED = 16
"""A slice of at most one in so many positions of a cut dimension is a sum over the devices, of which one has it."""


def _slice_local(ctx: LocalContext, x: jax.Array | StackSlice) -> Sequence[jax.Array]:
    p = ctx.op.params
    strides = p["strides"] or (1,) * len(x.shape)
    if any(c >= len(ctx.rule.sizes) for c in ctx.candidate.axis_codes):
        return [_slice_of_owner(ctx, materialized(x), strides)]
    cut = [bool(axes) for axes in ctx.operand_layout(0).dims]
    limits = tuple(x.shape[d] if cut[d] else n for d, n in enumerate(p["limit_indices"]))
    if isinstance(x, StackSlice) and set(strides) <= {1}:
        sizes = [n - i for i, n in zip(p["start_indices"], limits, strict=True)]
        return [x.part(p["start_indices"], sizes)]
    return [lax.slice(materialized(x), p["start_indices"], limits, strides)]


def _slice_of_owner(ctx: LocalContext, x: jax.Array, strides: Sequence[int]) -> jax.Array:
    """What this device has of a slice of few positions along cut dimensions, zeros where others have it."""
    p, starts, limits = ctx.op.params, [], []
    for d, (start, limit) in enumerate(zip(p["start_indices"], p["limit_indices"], strict=True)):
        n, m = ctx.op.ins[0].shape[d], limit - start
        if not ctx.operand_layout(0).dims[d] or m == n or strides[d] != 1:
            starts.append(start)
            limits.append(x.shape[d] if ctx.operand_layout(0).dims[d] else limit)
            continue
        around = lax.pad(
            x, np.zeros((), x.dtype), [(m, m, 0) if k == d else (0, 0, 0) for k in range(x.ndim)]
        )
        first = jnp.clip(start + m - jnp.asarray(ctx.operand_offset(0, d), jnp.int32), 0, x.shape[d] + m)
        x = lax.dynamic_slice_in_dim(around, first, m, d)
        starts.append(0)
        limits.append(m)
    return lax.slice(x, starts, limits, strides)


@rule("slice", local=_slice_local)
def slice_(op: OpView) -> Rule:
    """A shared factor for dimensions covered in full; `(o k) -> o` for one element per stride; none for others.

    A few positions of a cut dimension are a partial sum: the device that has them adds them to the others' zeros.
    """
    p = op.params
    strides = p["strides"] or (1,) * len(op.ins[0].shape)
    f = Factors()
    operand, out, blocked, few = [], [], [], []
    for size, n, start, stride in zip(
        op.ins[0].shape, op.outs[0].shape, p["start_indices"], strides, strict=True
    ):
        if size == n and stride == 1:
            operand.append((f.new(size),))
            out.append(operand[-1])
        elif n * stride == size and start < stride and n > 0:
            o, k = f.new(n), f.new(stride)
            blocked.append(k)
            operand.append((o, k))
            out.append((o,))
        elif stride == 1 and 0 < n * _LEAST_DROPPED <= size and summable(op.outs[0]):
            few.append(f.new(size))
            operand.append((few[-1],))
            out.append(())
        else:
            operand.append(())
            out.append(())
    blocked += few
    return Rule(
        (tuple(operand),), (tuple(out),), f.sizes, blocked=tuple(blocked), linear=linear_sets(op, (0,)), work=0.0,
        note="a sliced dimension shifts across blocks",
        joint=tuple(JointCut("owner", (k,), (PARTIAL,), alone=True) for k in few),
    )  # fmt: skip


def _dynamic_slice_local(
    ctx: LocalContext, x: jax.Array | StackSlice, *starts: ArrayLike
) -> Sequence[jax.Array]:
    # Not `lax.dynamic_slice`, which wraps negative starts around; the primitive clamps them.
    sizes = ctx.result_shape()
    if isinstance(x, StackSlice):
        return [x.part(in_range(starts, x.shape, sizes), sizes)]
    return ctx.bind(x, *in_range(starts, x.shape, sizes), slice_sizes=sizes)


@rule("dynamic_slice", local=_dynamic_slice_local)
def dynamic_slice(op: OpView) -> Rule:
    """A shared factor for dimensions covered in full, whose start clamps to 0."""
    f = Factors()
    sizes = op.params["slice_sizes"]
    dims = tuple((f.new(s),) if s == n else () for s, n in zip(op.ins[0].shape, sizes, strict=True))
    scalars = ((),) * (len(op.ins) - 1)
    return Rule((dims, *scalars), (dims,), f.sizes, linear=linear_sets(op, (0,)), work=0.0,
                note="a sliced dimension shifts across blocks")  # fmt: skip


def _update_local(
    ctx: LocalContext, x: jax.Array | StackSlice, update: jax.Array, *starts: ArrayLike
) -> Sequence[jax.Array | StackSlice]:
    stack_slice = x if isinstance(x, StackSlice) else None
    x = x if isinstance(x, StackSlice) else ctx.keep_row_major(x)
    is_local: jax.Array | None = None  # whether this device holds the updated position
    local_starts = []
    for d, start in enumerate(starts):
        # Not sharded, or covered in full.
        if not ctx.operand_layout(0).dims[d] or ctx.operand_layout(1).dims[d]:
            local_starts += in_range([start], x.shape[d : d + 1], update.shape[d : d + 1])
            continue
        length = x.shape[d]
        position = clamped(start, ctx.op.ins[0].shape[d] - 1) - ctx.operand_offset(0, d)
        in_shard = (position >= 0) & (position < length)
        is_local = in_shard if is_local is None else is_local & in_shard
        local_starts.append(jnp.clip(position, 0, length - 1).astype(jnp.result_type(start)))
    if is_local is not None:
        # Other devices write back their own elements: a small update, in place.
        update = jnp.where(is_local, update, lax.dynamic_slice(materialized(x), local_starts, update.shape))
    if stack_slice is not None:
        return [stack_slice.updated(update, local_starts, ctx.keep_row_major)]
    return [ctx.keep_row_major(ctx.bind(materialized(x), update, *local_starts)[0])]


def in_range(starts: Sequence[ArrayLike], shape: Sequence[int], sizes: Sequence[int]) -> list[jax.Array]:
    """Starts of a slice, clamped as XLA defines it.

    XLA merges a slice of a slice without the clamping of the inner one (openxla/xla#48024: jaxlib 0.10, not 0.12). A
    user's slice may be out of range, and a reshard may slice its result.
    """
    clamps = zip(starts, shape, sizes, strict=True)
    return [clamped(i, n - s).astype(jnp.result_type(i)) for i, n, s in clamps]


def clamped(index: ArrayLike, last: int) -> jax.Array:
    """Indices of any integer type clamped to `0..last`, as int32 (int64 beyond 2**31)."""
    index = jnp.asarray(index)
    index = jnp.clip(index, 0, min(last, int(jnp.iinfo(index.dtype).max)))
    return index.astype(jnp.int32) if last < 2**31 else index


@rule("dynamic_update_slice", local=_update_local)
def dynamic_update_slice(op: OpView) -> Rule:
    """A factor for dimensions that the update covers, and for those of update size 1; the update carries the first."""
    f = Factors()
    operand, update = [], []
    for s, n in zip(op.ins[0].shape, op.ins[1].shape, strict=True):
        covered, single = s == n, n == 1
        operand.append((f.new(s),) if covered or single else ())
        update.append(operand[-1] if covered else ())
    scalars = ((),) * (len(op.ins) - 2)
    return Rule(
        (tuple(operand), tuple(update), *scalars), (tuple(operand),), f.sizes,
        linear=linear_sets(op, (0, 1)), work=0.0,
        note="an updated dimension shifts across blocks",
    )  # fmt: skip
