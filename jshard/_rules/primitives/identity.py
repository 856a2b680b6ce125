"""Rules of identities: with a pin (`jshard.op`, `with_sharding_constraint`, `reshard`), or a result's own name.

Elementwise in every dimension; they run as nothing at all, since the layout they ask for is the schedule's work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jshard._rules.registry import LocalContext, OpView, family
from jshard._rules.rule import Rule


rule = family("marks")


def unchanged(ctx: LocalContext, x: Any) -> Sequence[Any]:
    """The block as it is; a number is an array from here on."""
    return [x if hasattr(x, "shape") else jnp.asarray(x, ctx.op.outs[0].dtype)]


@rule(
    "jshard_pin_result", "jshard_own_result", "sharding_constraint", "reshard", "layout_constraint", "out_sharding",
    local=unchanged,
)  # fmt: skip
def identity(op: OpView) -> Rule:
    """One factor a dimension."""
    shape = op.outs[0].shape
    dims = tuple((k,) for k in range(len(shape)))
    return Rule(operands=(dims,), results=(dims,), sizes=tuple(shape), work=0.0)
