"""Cumulative operators and `top_k` along a cut dimension: each block by itself, then what others add.

A cumulative sum (product, maximum, minimum, logsumexp) of a block lacks what the blocks before it amount to. Devices
gather one total a block, accumulate the totals by the same primitive, and combine that with their own: n - 1 slices of
one element travel (block-wise scan: G. E. Blelloch, "Prefix sums and their applications", 1990). `top_k` of the whole
is `top_k` of what each block has found, in the order of blocks, so that ties fall as before.

>>> from jax import ShapeDtypeStruct as S
>>> p = {"axis": 1, "reverse": False}
>>> print(cumulative(OpView("cumsum", p, (S((4, 8), "float32"),), (S((4, 8), "float32"),))))
a b -> a b  (prefix: b)
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jshard._core.jaxcompat import all_gather_invariant, itemsize, to_common_vma
from jshard._core.layout import ArrayType
from jshard._rules.factors import Factors, linear_sets
from jshard._rules.neutral_element import neutral_element
from jshard._rules.registry import LocalContext, OpView, block_index, family
from jshard._rules.rule import WHOLE, InternalCollective, JointCut, Rule, joint_code


rule = family("cumulative")

_COMBINE = {
    "cumsum": lax.add, "cumprod": lax.mul, "cummax": lax.max, "cummin": lax.min, "cumlogsumexp": jnp.logaddexp,
}  # fmt: skip
_REDUCER = {"cumsum": "sum", "cumprod": "prod", "cummax": "max", "cummin": "min", "cumlogsumexp": "max"}


def _neutral(primitive: str, dtype: np.dtype) -> ArrayLike:
    """The element that combining with changes nothing; for the order of complex numbers, that of the real parts."""
    reducer = _REDUCER[primitive]
    value = neutral_element(reducer, dtype)
    return value if value is not None else float("-inf" if reducer == "max" else "inf")


def _cumulative_local(ctx: LocalContext, x: jax.Array) -> Sequence[jax.Array]:
    """The block's own results, combined with the total of all blocks before it (behind it, if reversed)."""
    (own,) = ctx.bind(x)
    axes = ctx.axes(joint_code(ctx.rule, 0))
    n = ctx.mesh.size(*axes)
    if n == 1:
        return [own]
    axis, reverse, name = ctx.op.params["axis"], ctx.op.params["reverse"], ctx.op.primitive
    last = x.shape[axis] - 1
    total = lax.slice_in_dim(own, 0 if reverse else last, 1 if reverse else last + 1, axis=axis)
    with ctx.collective_scope(0):
        totals = lax.all_gather(total, axes, axis=axis, tiled=True)
    (totals,) = ctx.bind(totals)
    neighbour = block_index(axes, ctx.mesh) + (1 if reverse else -1)
    before = lax.dynamic_slice_in_dim(totals, jnp.clip(neighbour, 0, n - 1), 1, axis)
    exists = (neighbour >= 0) & (neighbour < n)
    before = jnp.where(exists, before, jnp.asarray(_neutral(name, x.dtype), x.dtype))
    own, before = to_common_vma([own, jnp.broadcast_to(before, own.shape)])
    return [_COMBINE[name](own, before)]


@rule("cumsum", "cumlogsumexp", "cummax", "cummin", "cumprod", local=_cumulative_local)
def cumulative(op: OpView) -> Rule:
    """The scanned dimension is cut with a gather of one element a block."""
    f, axis = Factors(), op.params["axis"]
    dims = f.dims(op.ins[0].shape)
    (along,) = dims[axis]
    joint: tuple[JointCut, ...] = ()
    internal: tuple[InternalCollective, ...] = ()
    if op.ins[0].shape[axis] > 1 and _ordered(op.ins[0]):
        joint = (JointCut("prefix", (along,), (along,)),)
        size = itemsize(op.outs[0].dtype)
        internal = (InternalCollective("all_gather", size, operand=0, over=len(f.sizes), dim=axis, rows=1),)
    return Rule(
        (dims,), (dims,), f.sizes, blocked=(along,),
        linear=linear_sets(op, (0,)) if op.primitive == "cumsum" else (),
        joint=joint, internal=internal, note="each element depends on all before it",
    )  # fmt: skip


def _ordered(aval: ArrayType) -> bool:
    """Whether elements are numbers that collectives send."""
    return bool(jnp.issubdtype(aval.dtype, jnp.number))


def _top_k_axis(op: OpView) -> int:
    axis = op.params["axis"] if "axis" in op.params else op.params.get("reduction_dimension", -1)
    return axis % len(op.ins[0].shape)


def _top_k_local(ctx: LocalContext, x: jax.Array) -> Sequence[jax.Array]:
    """The best of each block, then the best of those; positions are those in the whole."""
    axes = ctx.axes(joint_code(ctx.rule, 0))
    if ctx.mesh.size(*axes) == 1:
        return ctx.bind(x)
    axis = _top_k_axis(ctx.op)
    values, positions = ctx.bind(x)
    positions = positions + jnp.asarray(ctx.operand_offset(0, axis), positions.dtype)
    with ctx.collective_scope(0):
        values = all_gather_invariant(values, axes, axis=axis)
    with ctx.collective_scope(1):
        positions = all_gather_invariant(positions, axes, axis=axis)
    best, chosen = ctx.bind(values)
    return [best, jnp.take_along_axis(positions, chosen, axis)]


@rule("top_k", local=_top_k_local)
def top_k(op: OpView) -> Rule:
    """The searched dimension is cut where blocks have at least k elements; what they find is gathered."""
    axis = _top_k_axis(op)
    f = Factors()
    dims = f.dims(op.ins[0].shape)
    out = tuple(() if i == axis else d for i, d in enumerate(dims))
    (along,) = dims[axis]
    k = op.outs[0].shape[axis]
    joint: tuple[JointCut, ...] = ()
    internal: tuple[InternalCollective, ...] = ()
    if k > 0 and _ordered(op.ins[0]):
        joint = (JointCut("merge", (along,), (WHOLE, WHOLE), least=k),)
        internal = tuple(
            InternalCollective("all_gather", itemsize(a.dtype), i, over=len(f.sizes))
            for i, a in enumerate(op.outs)
        )
    return Rule(
        (dims,), (out, out), f.sizes, blocked=(along,), joint=joint, internal=internal,
        note="top_k compares elements along the whole dimension",
    )  # fmt: skip


@rule("approx_top_k")
def approx_top_k(op: OpView) -> Rule:
    """The searched dimension is not sharded: its recall is about the whole."""
    axis = _top_k_axis(op)
    f = Factors()
    dims = f.dims(op.ins[0].shape)
    out = tuple(() if i == axis else d for i, d in enumerate(dims))
    return Rule(
        (dims,),
        (out, out),
        f.sizes,
        blocked=dims[axis],
        note="top_k compares elements along the whole dimension",
    )
