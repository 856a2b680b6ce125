"""Slices and updates at an offset: dimensions taken whole pass, others stay whole.

Two cases more. A strided `slice` with one element per stride is `(o k) -> o`: each block holds its own
elements. A `dynamic_update_slice` of one element along a dimension (a key-value cache in decoding) may cut
that dimension: the device that holds the position writes, the others keep what they have.

>>> from jax import ShapeDtypeStruct as S
>>> p = {"start_indices": (0, 1), "limit_indices": (4, 8), "strides": (1, 2)}
>>> print(slice_(OpView("slice", p, (S((4, 8), "int8"),), (S((4, 4), "int8"),))))
a (b c) -> a b
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jshard._rules.factors import Factors, linear_sets
from jshard._rules.registry import LocalContext, OpView, family
from jshard._rules.rule import Rule


rule = family("slice")


def _slice_local(ctx: LocalContext, x: Any) -> Sequence[Any]:
    p = ctx.op.params
    strides = p["strides"] or (1,) * x.ndim
    cut = [bool(axes) for axes in ctx.operand_layout(0).dims]
    limits = tuple(x.shape[d] if cut[d] else n for d, n in enumerate(p["limit_indices"]))
    return [lax.slice(x, p["start_indices"], limits, strides)]


@rule("slice", local=_slice_local)
def slice_(op: OpView) -> Rule:
    """Whole dimensions pass; one element per stride keeps blocks; the rest stays whole."""
    p = op.params
    strides = p["strides"] or (1,) * len(op.ins[0].shape)
    f = Factors()
    operand, out, blocked = [], [], []
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
        else:
            operand.append(())
            out.append(())
    return Rule(
        (tuple(operand),), (tuple(out),), f.sizes, blocked=tuple(blocked), linear=linear_sets(op, (0,)), work=0.0,
        note="a sliced dimension shifts across blocks",
    )  # fmt: skip


def _dynamic_slice_local(ctx: LocalContext, x: Any, *starts: Any) -> Sequence[Any]:
    # Not `lax.dynamic_slice`: that would wrap negative starts, which the primitive clamps.
    sizes = ctx.result_shape()
    return ctx.bind(x, *in_range(starts, x.shape, sizes), slice_sizes=sizes)


@rule("dynamic_slice", local=_dynamic_slice_local)
def dynamic_slice(op: OpView) -> Rule:
    """Dimensions taken whole pass (their start clamps to 0)."""
    f = Factors()
    sizes = op.params["slice_sizes"]
    dims = tuple((f.new(s),) if s == n else () for s, n in zip(op.ins[0].shape, sizes, strict=True))
    scalars = ((),) * (len(op.ins) - 1)
    return Rule((dims, *scalars), (dims,), f.sizes, linear=linear_sets(op, (0,)), work=0.0,
                note="a sliced dimension shifts across blocks")  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class StackSlice:
    """One slice of a stack along its first dimension, to be read and updated where it is."""

    stack: Any
    index: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        return tuple(self.stack.shape[1:])

    def array(self) -> Any:
        """The slice by itself."""
        return lax.dynamic_index_in_dim(self.stack, self.index, 0, keepdims=False)

    def updated(self, update: Any, starts: Sequence[Any], in_order: Any) -> StackSlice:
        """The slice of the stack in which the update is written at `starts`, which are in range."""
        at = (self.index, *(jnp.asarray(i, self.index.dtype) for i in starts))
        return StackSlice(
            in_order(lax.dynamic_update_slice(in_order(self.stack), update[None], at)), self.index
        )


def materialized(x: Any) -> Any:
    """A value as an array, also where it is a part of a stack."""
    return x.array() if isinstance(x, StackSlice) else x


def _update_local(ctx: LocalContext, x: Any, update: Any, *starts: Any) -> Sequence[Any]:
    inside: Any
    part, inside, local = x if isinstance(x, StackSlice) else None, None, []
    x = x if part is not None else ctx.keep_row_major(x)
    for d, start in enumerate(starts):
        if not ctx.operand_layout(0).dims[d] or ctx.operand_layout(1).dims[d]:
            local += in_range([start], x.shape[d : d + 1], update.shape[d : d + 1])  # uncut, or covered
            continue
        mine = x.shape[d]
        position = clamped(start, ctx.op.ins[0].shape[d] - 1) - ctx.operand_offset(0, d)
        here = (position >= 0) & (position < mine)
        inside = here if inside is None else inside & here
        local.append(jnp.clip(position, 0, mine - 1).astype(jnp.result_type(start)))
    if inside is not None:
        # The device that does not hold the position writes what is there: an update of as few bytes, in place.
        update = jnp.where(inside, update, lax.dynamic_slice(materialized(x), local, update.shape))
    if part is not None:
        return [part.updated(update, local, ctx.keep_row_major)]
    return [ctx.keep_row_major(ctx.bind(x, update, *local)[0])]


def in_range(starts: Sequence[Any], shape: Sequence[int], sizes: Sequence[int]) -> list[Any]:
    """Starts of a slice as XLA would clamp them.

    XLA merges a slice of a slice into one and forgets that their starts were clamped (openxla/xla#48024: jaxlib 0.10,
    not 0.12). A user's slice may be out of range, and a redistribution may slice what it gives.
    """
    clamps = zip(starts, shape, sizes, strict=True)
    return [clamped(i, n - s).astype(jnp.result_type(i)) for i, n, s in clamps]


def clamped(index: Any, last: int) -> Any:
    """Indices of any integer type clamped to `0..last`, as int32 (int64 beyond 2**31)."""
    index = jnp.asarray(index)
    index = jnp.clip(index, 0, min(last, int(jnp.iinfo(index.dtype).max)))
    return index.astype(jnp.int32) if last < 2**31 else index


@rule("dynamic_update_slice", local=_update_local)
def dynamic_update_slice(op: OpView) -> Rule:
    """Dimensions the update covers pass; one of update size 1 is written by the device that holds it."""
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
