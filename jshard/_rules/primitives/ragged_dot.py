"""Ragged and scaled contractions (mixture of experts, block-scaled floats).

`ragged_dot_general` multiplies consecutive row groups of the left operand by one matrix each. If the ragged rows are
sharded, each device has parts of some groups, so the local implementation recomputes the group sizes: of each group,
the number of rows in the device's shard.

    groups end at 3, 5, 8; a device with rows 4..8 has group sizes 0, 1, 3

The rows may be a free dimension (the forward pass) or the contracted one (the gradient of the matrices: a partial sum).
Groups (experts) are not sharded.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jshard._core.layout import ArrayType
from jshard._rules.factors import Factors, summable, unsharded_dims
from jshard._rules.primitives.dot_general import contraction, one_factor_each
from jshard._rules.registry import LocalContext, OpView, family
from jshard._rules.rule import Dims, Rule


rule = family("ragged")


def _ragged_local(ctx: LocalContext, x: jax.Array, w: jax.Array, groups: jax.Array) -> Sequence[jax.Array]:
    n = ctx.op.params["ragged_dot_dimension_numbers"]
    (d,) = n.lhs_ragged_dimensions
    if not ctx.operand_layout(0).dims[d] or groups.ndim != 1:
        return ctx.bind(x, w, groups)
    start = jnp.asarray(ctx.operand_offset(0, d), jnp.int32)
    ends = jnp.cumsum(groups.astype(jnp.int32))
    inside = jnp.clip(ends - start, 0, x.shape[d])
    local = jnp.diff(inside, prepend=jnp.zeros_like(inside[:1]))
    return ctx.bind(x, w, local.astype(groups.dtype))


@rule("ragged_dot_general", local=_ragged_local)
def ragged_dot(op: OpView) -> Rule:
    """Batch, ragged, contracted and free dimensions, as in `dot_general`; the group dimension has no factor."""
    n = op.params["ragged_dot_dimension_numbers"]
    (lc, _), (lb, _) = n.dot_dimension_numbers
    (ragged,) = n.lhs_ragged_dimensions
    x, w, groups = op.ins
    f = Factors()
    # The group dimension is not a loop index: each row is multiplied by the matrix of one group.
    c = contraction(f, x.shape, w.shape, n.dot_dimension_numbers, skipped_rhs=n.rhs_group_dimensions)
    left, out = c.left, one_factor_each(c.out)
    if ragged in lc:
        out = ((), *out)
    blocked = [left[ragged]] if ragged in lb or len(groups.shape) > 1 else []
    if len(groups.shape) > 1:
        blocked += [left[d] for d in (*lb, *c.free_left)]
    contracted = [left[d] for d in lc]
    if not summable(op.outs[0]):
        blocked, contracted = blocked + contracted, []
    return Rule(
        (
            one_factor_each(left),
            one_factor_each(c.right),
            unsharded_dims(groups),
        ),
        (out,), f.sizes,
        reduction=tuple(k for k in contracted if k not in blocked), blocked=tuple(dict.fromkeys(blocked)),
        work=2.0, note="groups stay whole",
    )  # fmt: skip


@rule("scaled_dot")
def scaled_dot(op: OpView) -> Rule:
    """Batch and free dimensions may be sharded; blocks of contracted dimensions share a scale and are not."""
    (lc, rc), _ = op.params["dimension_numbers"]
    x, w, x_scale, w_scale = op.ins[:4]
    f = Factors()
    c = contraction(f, x.shape, w.shape, op.params["dimension_numbers"])

    def scales(factors: Sequence[int], contracted: Sequence[int], aval: ArrayType, scale: ArrayType) -> Dims:
        return tuple(
            () if d in contracted or aval.shape[d] != scale.shape[d] else (k,) for d, k in enumerate(factors)
        )

    return Rule(
        (
            one_factor_each(c.left), one_factor_each(c.right),
            scales(c.left, lc, x, x_scale), scales(c.right, rc, w, w_scale),
        ),
        (one_factor_each(c.out),), f.sizes, blocked=tuple(c.left[d] for d in lc), work=2.0,
        note="contracted dimensions share scales",
    )  # fmt: skip
