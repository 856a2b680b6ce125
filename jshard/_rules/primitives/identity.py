"""Identities: pins (`jshard.op`, `with_sharding_constraint`, `reshard`), placement, barriers; and reinterpreted bits.

Elementwise in every dimension. Pins compile to nothing: the schedule reshards their operand.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jshard._core import jaxcompat as compat
from jshard._rules.factors import Factors, linear_sets
from jshard._rules.registry import LocalContext, OpView, family
from jshard._rules.rule import Rule


rule = family("marks")
other = family("other")


def _pin_local(ctx: LocalContext, x: jax.Array) -> Sequence[jax.Array]:
    """The shard itself; a Python number becomes an array."""
    return [x if hasattr(x, "shape") else jnp.asarray(x, ctx.op.outs[0].dtype)]


@rule(
    "jshard_pin_result", "jshard_own_result", "sharding_constraint", "reshard", "layout_constraint", "out_sharding",
    "jshard_module_output", local=_pin_local,
)  # fmt: skip
def pin(op: OpView) -> Rule:
    """One factor per dimension."""
    shape = op.outs[0].shape
    dims = tuple((k,) for k in range(len(shape)))
    return Rule(operands=(dims,), results=(dims,), sizes=tuple(shape), work=0.0)


def _identity_local(ctx: LocalContext, *operands: jax.Array) -> Sequence[jax.Array]:
    return operands


def _each_to_its_result(op: OpView) -> Rule:
    """Each operand to its result; operands share the factors of dimensions of equal index and length."""
    f = Factors()
    dims = tuple(f.aligned_dims(a.shape) for a in op.ins)
    return Rule(dims, dims, f.sizes, linear=linear_sets(op, tuple(range(len(op.ins)))), work=0.0)


# Placement is decided by the plan: what the program states about it is a pin, or has no effect.
@other(
    "mesh_cast", "device_put", "relayout",
    "with_memory_space_constraint", "pvary", "xla_metadata_value", local=_identity_local,
)  # fmt: skip
def identity(op: OpView) -> Rule:
    """The value itself."""
    return _each_to_its_result(op)


def _barrier_local(ctx: LocalContext, *operands: jax.Array) -> Sequence[jax.Array]:
    """One barrier; where values are typed by the axes they vary over, one for the values of each type, as JAX 0.10 wants."""
    groups: dict[frozenset[str], list[int]] = {}
    for i, x in enumerate(operands):
        groups.setdefault(compat.vma(x), []).append(i)
    out = list(operands)
    for group in groups.values():
        for i, y in zip(group, ctx.bind(*(operands[i] for i in group)), strict=True):
            out[i] = y
    return out


@other("optimization_barrier", local=_barrier_local)
def barrier(op: OpView) -> Rule:
    """The values themselves, not fused with their operands."""
    return _each_to_its_result(op)


@other("bitcast_convert_type", "to_edtype", "from_edtype")
def bitcast(op: OpView) -> Rule:
    """Elementwise for equal widths; else the narrow side has a last dimension more, which is not sharded."""
    f = Factors()
    ins, outs = op.ins[0].shape, op.outs[0].shape
    n = min(len(ins), len(outs))
    dims = f.dims(ins[:n])
    return Rule((dims + ((),) * (len(ins) - n),), (dims + ((),) * (len(outs) - n),), f.sizes, work=0.0)


def _unvmap_local(ctx: LocalContext, x: jax.Array) -> Sequence[jax.Array]:
    (y,) = ctx.bind(x)
    across = ctx.reduced_axes()
    if not across:
        return [y]
    return [(lax.pmin if ctx.rule.reducer == "and" else lax.pmax)(y, across)]


@other("unvmap_any", "unvmap_all", "unvmap_max", local=_unvmap_local)
def unvmap(op: OpView) -> Rule:
    """equinox: a reduction to one scalar."""
    f = Factors()
    dims = f.dims(op.ins[0].shape)
    reducer = {"unvmap_any": "or", "unvmap_all": "and", "unvmap_max": "max"}[op.primitive]
    return Rule((dims,), ((),), f.sizes, reduction=tuple(range(len(f.sizes))), reducer=reducer)


@other("platform_index", "dimension_size", "create_token", "after_all")
def constant(op: OpView) -> Rule:
    """The same on every device."""
    return Rule(
        tuple(((),) * len(a.shape) for a in op.ins if hasattr(a, "shape")),
        tuple(((),) * len(a.shape) for a in op.outs if hasattr(a, "shape")),
        (), work=0.0,
    )  # fmt: skip
