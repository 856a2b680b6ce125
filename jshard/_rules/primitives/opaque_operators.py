"""Operators that are identities for the planner, reinterpret bits, or must stay whole for a written reason.

`OPAQUE` is the list of primitives that run replicated on purpose, each with its reason; the reports print it.

>>> print(OPAQUE["pure_callback"])
a Python callback sees whole arrays
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jshard import _jaxcompat as compat
from jshard._rules.factors import Factors, linear_sets
from jshard._rules.registry import LocalContext, OpView, block_index, family, opaque_rule
from jshard._rules.rule import InternalCollective, Rule


rule = family("other")


def _identity(ctx: LocalContext, *operands: Any) -> Sequence[Any]:
    return operands


def _separate(op: OpView) -> Rule:
    """Each operand passes to its result; dimensions of equal place and length share a factor.

    A mesh axis cuts one factor, so operands with nothing in common could not be cut by one axis at once.
    """
    f = Factors()
    shared: dict[tuple[int, int], int] = {}
    dims = []
    for a in op.ins:
        tensor = []
        for place, size in enumerate(a.shape):
            if (place, size) not in shared:
                shared[place, size] = f.new(size)
            tensor.append((shared[place, size],))
        dims.append(tuple(tensor))
    return Rule(
        tuple(dims), tuple(dims), f.sizes, linear=linear_sets(op, tuple(range(len(op.ins)))), work=0.0
    )


# The plan decides where values lie, so what the user's program says of placement is a pin or nothing.
@rule(
    "mesh_cast", "device_put", "relayout",
    "with_memory_space_constraint", "pvary", "xla_metadata_value", local=_identity,
)  # fmt: skip
def identity(op: OpView) -> Rule:
    """The value itself."""
    return _separate(op)


@rule("optimization_barrier")
def barrier(op: OpView) -> Rule:
    """The values themselves, kept apart from what comes before."""
    return _separate(op)


@rule("bitcast_convert_type", "to_edtype", "from_edtype")
def bitcast(op: OpView) -> Rule:
    """Same width: elementwise. Otherwise the narrow side has one more, whole, dimension at the end."""
    f = Factors()
    ins, outs = op.ins[0].shape, op.outs[0].shape
    n = min(len(ins), len(outs))
    dims = f.dims(ins[:n])
    return Rule((dims + ((),) * (len(ins) - n),), (dims + ((),) * (len(outs) - n),), f.sizes, work=0.0)


def _unvmap_local(ctx: LocalContext, x: Any) -> Sequence[Any]:
    (y,) = ctx.bind(x)
    across = ctx.reduced_axes()
    if not across:
        return [y]
    return [(lax.pmin if ctx.rule.reducer == "and" else lax.pmax)(y, across)]


@rule("unvmap_any", "unvmap_all", "unvmap_max", local=_unvmap_local)
def unvmap(op: OpView) -> Rule:
    """equinox: reduce everything to one scalar."""
    f = Factors()
    dims = f.dims(op.ins[0].shape)
    reducer = {"unvmap_any": "or", "unvmap_all": "and", "unvmap_max": "max"}[op.primitive]
    return Rule((dims,), ((),), f.sizes, reduction=tuple(range(len(f.sizes))), reducer=reducer)


@rule("platform_index", "dimension_size", "create_token", "after_all")
def constant(op: OpView) -> Rule:
    """The same on every device."""
    return Rule(
        tuple(((),) * len(a.shape) for a in op.ins if hasattr(a, "shape")),
        tuple(((),) * len(a.shape) for a in op.outs if hasattr(a, "shape")),
        (), work=0.0,
    )  # fmt: skip


OPAQUE: dict[str, str] = {
    "pure_callback": "a Python callback sees whole arrays",
    "io_callback": "a Python callback sees whole arrays, once",
    "debug_callback": "a Python callback sees whole arrays, once",
    "debug_print": "prints whole arrays, once",
    "inspect_sharding": "a callback that asks for the compiler's sharding",
    "ffi_call": "foreign code: nothing is known about it; give it a rule by jshard.op(rule=...)",
    "pallas_call": "a kernel: nothing is known about it; give it a rule by jshard.op(rule=...)",
    "custom_partitioning": "partitioned by a callback of the user's",
    "call_hi_primitive": "JAX hides what is inside",
    "call_exported": "an exported program: its shapes are fixed",
    "custom_linear_solve": "a solver between user functions, on whole systems",
    "linear_call": "a linear function and its transpose, by the user",
    "cudnn_fusion": "a fused kernel; give it a rule by jshard.op(rule=...)",
    "dot_product_attention_fwd_wrapper": "a fused kernel; give it a rule by jshard.op(rule=...)",
    "dot_product_attention_bwd_wrapper": "a fused kernel; give it a rule by jshard.op(rule=...)",
    "dot_product_attention_fp8_fwd_wrapper": "a fused kernel; give it a rule by jshard.op(rule=...)",
    "dot_product_attention_fp8_bwd_wrapper": "a fused kernel; give it a rule by jshard.op(rule=...)",
    "scaled_matmul_wrapper": "a fused kernel; give it a rule by jshard.op(rule=...)",
    "maybe_set": "equinox: writes to a buffer by a predicate",
    "vprim": "equinox: a wrapper around another primitive",
}


def _once_local(ctx: LocalContext, *operands: Any) -> Sequence[Any]:
    """Run a callback with effects on the first device only; the others receive its results."""
    names = ctx.mesh.names
    if ctx.mesh.total == 1:
        return ctx.bind(*operands)
    outs = ctx.op.outs

    def zeros() -> list[Any]:
        return [jnp.zeros(a.shape, _number(a.dtype)) for a in outs]

    def call() -> list[Any]:
        if _is_ordered(ctx.op):
            from jax.experimental import io_callback  # here, so that `import jshard` stays light

            run = compat.debug_callback_function(ctx.op.primitive, ctx.op.params)
            if (
                ctx.differentiable_loop
            ):  # from there JAX drops `io_callback`: better in some order than not at all
                jax.debug.callback(run, *operands)
                return []
            io_callback(run, None, *map(lax.stop_gradient, operands), ordered=True)
            return []
        return [y.astype(_number(y.dtype)) for y in ctx.bind(*operands)]

    # Tied to the operands: JAX loses a `cond` for its effects alone from a differentiated `scan`, where it takes the
    # place among the devices for something that no turn changes.
    place, *_ = lax.optimization_barrier((block_index(names, ctx.mesh), *map(lax.stop_gradient, operands)))
    results = lax.cond(place == 0, call, zeros)
    sums = []
    for k, (y, a) in enumerate(zip(results, outs, strict=True)):
        with ctx.collective_scope(k):
            sums.append(lax.psum(y, names).astype(a.dtype))
    return sums


def _is_ordered(op: OpView) -> bool:
    """An ordered debug callback: JAX orders those on one device only, but its ordered `io_callback` on any number."""
    effect = type(op.params.get("effect")).__name__
    return op.primitive != "io_callback" and bool(op.params.get("ordered") or effect.startswith("Ordered"))


def _number(dtype: Any) -> Any:
    """What a result is sent as: predicates have no sum."""
    return np.dtype(np.uint8) if np.dtype(dtype) == np.bool_ else dtype


def _whole(op: OpView) -> Rule:
    return opaque_rule(op, OPAQUE[op.primitive])


def _once(op: OpView) -> Rule:
    """Opaque; the results come from the first device by a sum over all."""
    own = [
        InternalCollective("all_reduce", compat.itemsize(a.dtype), k, all_axes=True)
        for k, a in enumerate(op.outs)
    ]
    return dataclasses.replace(_whole(op), internal=tuple(own))


_EFFECTS = ("debug_callback", "debug_print", "io_callback")
rule(*_EFFECTS, local=_once_local)(_once)
_OWN_RULE = ("custom_linear_solve",)
rule(*(name for name in OPAQUE if name not in (*_EFFECTS, *_OWN_RULE)))(_whole)
