"""The operators of a pipeline (`_program/stage_shift.py`): the shift to the next stage is one permute where they are cut.

Each device sends the row at the end of its block of stages to the next device; the other dimensions are cut as they are.

>>> from jax import ShapeDtypeStruct as S
>>> x = S((4, 8), "float32")
>>> print(shift(OpView("stage_shift", {"by": 1, "wrap": False}, (x,), (x,))))
a b -> a b  (stages: a)
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jshard._core.jaxcompat import itemsize, to_common_vma
from jshard._program.stage_shift import (
    ADD_TO_ROUND,
    ROUNDED_SUM,
    STAGE_SHIFT,
    ZERO_UNLESS,
    run_add_to_round,
    run_zero_unless,
)
from jshard._rules.factors import Factors, linear_sets
from jshard._rules.registry import LocalContext, OpView, StackSlice, family, write_back
from jshard._rules.rule import InternalCollective, JointCut, Rule, joint_code


rule = family("pipeline")


def _shift_local(ctx: LocalContext, x: jax.Array) -> Sequence[jax.Array]:
    """The block with the row that arrives from the device before it (behind it, where values go back)."""
    axes = ctx.axes(joint_code(ctx.rule, 0))
    n = ctx.mesh.size(*axes)
    if n == 1:
        return ctx.bind(x)
    by, wrap, rows = ctx.op.params["by"], ctx.op.params["wrap"], x.shape[0]
    last = rows - 1 if by > 0 else 0
    pairs = [(i, (i + by) % n) for i in range(n) if wrap or 0 <= i + by < n]
    with ctx.collective_scope(0):
        arrived = lax.ppermute(lax.slice_in_dim(x, last, last + 1), axes, pairs)
    if rows == 1:
        return [arrived]
    kept = lax.slice_in_dim(x, 0, rows - 1) if by > 0 else lax.slice_in_dim(x, 1, rows)
    kept, arrived = to_common_vma([kept, arrived])
    return [jnp.concatenate([arrived, kept] if by > 0 else [kept, arrived])]


@rule(STAGE_SHIFT, local=_shift_local)
def shift(op: OpView) -> Rule:
    """Dimension 0 is cut with a permute of one row."""
    f = Factors()
    dims = f.dims(op.ins[0].shape)
    joint: tuple[JointCut, ...] = ()
    internal: tuple[InternalCollective, ...] = ()
    if dims[0]:
        (stages,) = dims[0]
        joint = (JointCut("stages", (stages,), (stages,), alone=True),)
        size = itemsize(op.ins[0].dtype)
        internal = (InternalCollective("permute", size, operand=0, over=len(f.sizes), dim=0, rows=1),)
    return Rule(
        (dims,), (dims,), f.sizes, blocked=dims[0], linear=linear_sets(op, (0,)), work=0.0,
        joint=joint, internal=internal, note="stages pass their values on",
    )  # fmt: skip


def _zero_unless_local(ctx: LocalContext, x: jax.Array, kept: jax.Array) -> Sequence[jax.Array]:
    return run_zero_unless(*to_common_vma([x, kept]))


@rule(ZERO_UNLESS, local=_zero_unless_local)
def zero_unless(op: OpView) -> Rule:
    """Elementwise, and linear in the first operand; the second has its first dimensions."""
    f = Factors()
    dims = f.dims(op.ins[0].shape)
    return Rule(
        (dims, dims[: len(op.ins[1].shape)]), (dims,), f.sizes, linear=linear_sets(op, (0,)), work=1.0
    )


def _add_to_round_local(
    ctx: LocalContext, sums: jax.Array | StackSlice, addend: jax.Array, rounds: jax.Array
) -> Sequence[jax.Array | StackSlice]:
    if isinstance(sums, StackSlice):
        (y,) = _add_to_round_local(ctx, sums.array(), addend, rounds)
        return [write_back(ctx, sums, y)]
    (y,) = run_add_to_round(*to_common_vma([ctx.keep_row_major(sums), addend, rounds]))
    return [ctx.keep_row_major(y)]


@rule(ADD_TO_ROUND, local=_add_to_round_local)
def add_to_round(op: OpView) -> Rule:
    """Linear in the sums and the addend; a round is chosen on each device, so that the rounds are not cut."""
    f = Factors()
    dims = f.dims(op.ins[0].shape)
    return Rule(
        (dims, dims[1:], dims[2:3]), (dims,), f.sizes, blocked=dims[0], linear=linear_sets(op, (0, 1)), work=0.0,
        note="each stage adds to the sums of its round",
    )  # fmt: skip


def _rounded_sum_local(ctx: LocalContext, x: jax.Array) -> Sequence[jax.Array]:
    """On TPUs partial sums leave the loop as it holds them: a reduce-scatter's layout would be copied to in every tick."""
    held = ctx.chip.startswith("tpu") and ctx.operand_layout(0).partial
    return ctx.bind(lax.optimization_barrier(x) if held else x)


@rule(ROUNDED_SUM, local=_rounded_sum_local)
def rounded_sum(op: OpView) -> Rule:
    """Elementwise; partial sums are rounded on each device, as those of a product are."""
    f = Factors()
    dims = f.dims(op.ins[0].shape)
    return Rule((dims,), (dims,), f.sizes, linear=linear_sets(op, (0,)), work=0.0)
