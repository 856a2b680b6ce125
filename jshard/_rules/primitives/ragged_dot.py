"""Ragged and scaled contractions (mixture of experts, block-scaled floats).

`ragged_dot_general` multiplies consecutive row groups of the left operand by one matrix each. Cutting the
ragged rows gives every device a part of some groups, so its local function recomputes the group sizes: of
each group, the rows that fall into the device's block.

    groups end at 3, 5, 8; a device with rows 4..8 sees 0, 1, 3 of them

The rows may be a free dimension (the forward pass) or the contracted one (the gradient of the matrices: a
partial sum). Groups (experts) stay whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jshard._rules.factors import Factors, summable
from jshard._rules.registry import LocalContext, OpView, family
from jshard._rules.rule import Rule


rule = family("ragged")


def _ragged_local(ctx: LocalContext, x: Any, w: Any, groups: Any) -> Sequence[Any]:
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
    """Batch, ragged, contracted and free dimensions, as in `dot_general`; groups stay whole."""
    n = op.params["ragged_dot_dimension_numbers"]
    (lc, rc), (lb, rb) = n.dot_dimension_numbers
    (ragged,) = n.lhs_ragged_dimensions
    x, w, groups = op.ins
    f = Factors()
    left: list[int] = [-1] * len(x.shape)
    right: list[int] = [-1] * len(w.shape)
    for a, b in [*zip(lb, rb, strict=True), *zip(lc, rc, strict=True)]:
        left[a] = right[b] = f.new(x.shape[a])
    free_left = [d for d in range(len(left)) if left[d] < 0]
    for d in free_left:
        left[d] = f.new(x.shape[d])
    # The group dimension is whole, and its length is not a loop: each row meets one group.
    free_right = [d for d in range(len(right)) if right[d] < 0 and d not in n.rhs_group_dimensions]
    for d in free_right:
        right[d] = f.new(w.shape[d])
    out = [(left[d],) for d in lb] + [(left[d],) for d in free_left] + [(right[d],) for d in free_right]
    if ragged in lc:
        out = [(), *out]
    blocked = [left[ragged]] if ragged in lb or len(groups.shape) > 1 else []
    if len(groups.shape) > 1:
        blocked += [left[d] for d in (*lb, *free_left)]
    contracted = [left[d] for d in lc]
    if not summable(op.outs[0]):
        blocked, contracted = blocked + contracted, []
    return Rule(
        (
            tuple((k,) for k in left),
            tuple(() if k < 0 else (k,) for k in right),
            ((),) * len(groups.shape),
        ),
        (tuple(out),), f.sizes,
        reduction=tuple(k for k in contracted if k not in blocked), blocked=tuple(dict.fromkeys(blocked)),
        work=2.0, note="groups stay whole",
    )  # fmt: skip


@rule("scaled_dot")
def scaled_dot(op: OpView) -> Rule:
    """Batch and free dimensions pass; blocks of the contracted dimensions share a scale and stay whole."""
    (lc, rc), (lb, rb) = op.params["dimension_numbers"]
    x, w = op.ins[0], op.ins[1]
    f = Factors()
    left: list[int] = [-1] * len(x.shape)
    right: list[int] = [-1] * len(w.shape)
    for a, b in [*zip(lb, rb, strict=True), *zip(lc, rc, strict=True)]:
        left[a] = right[b] = f.new(x.shape[a])
    free_left = [d for d in range(len(left)) if left[d] < 0]
    free_right = [d for d in range(len(right)) if right[d] < 0]
    for d in free_left:
        left[d] = f.new(x.shape[d])
    for d in free_right:
        right[d] = f.new(w.shape[d])
    out = [left[d] for d in lb] + [left[d] for d in free_left] + [right[d] for d in free_right]

    def scales(
        side: list[int], contracted: Sequence[int], like: Any, scale: Any
    ) -> tuple[tuple[int, ...], ...]:
        return tuple(
            () if d in contracted or like.shape[d] != scale.shape[d] else (k,) for d, k in enumerate(side)
        )

    return Rule(
        (
            tuple((k,) for k in left), tuple((k,) for k in right),
            scales(left, lc, x, op.ins[2]), scales(right, rc, w, op.ins[3]),
        ),
        (tuple((k,) for k in out),), f.sizes, blocked=tuple(left[d] for d in lc), work=2.0,
        note="contracted dimensions share scales",
    )  # fmt: skip
