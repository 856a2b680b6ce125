"""Callbacks with effects (`io_callback`, `jax.debug`): replicated operands, one call per step, on the first device.

The other devices receive its results by a sum over the mesh, to which they contribute zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jshard._core import jaxcompat as compat
from jshard._rules.primitives.opaque_operators import OPAQUE
from jshard._rules.registry import LocalContext, OpView, block_index, family, opaque_rule
from jshard._rules.rule import InternalCollective, Rule


rule = family("other")


def _callback_local(ctx: LocalContext, *operands: jax.Array) -> Sequence[jax.Array]:
    """Call on the first device only; the others receive its results."""
    names = ctx.mesh.names
    if ctx.mesh.total == 1:
        return ctx.bind(*operands)
    outs = ctx.op.outs

    def zeros() -> list[jax.Array]:
        return [jnp.zeros(a.shape, _sent_dtype(a.dtype)) for a in outs]

    def call() -> list[jax.Array]:
        if _is_ordered_debug(ctx.op):
            _ordered_debug_callback(ctx, operands)
            return []
        return [y.astype(_sent_dtype(y.dtype)) for y in ctx.bind(*operands)]

    # The barrier makes the predicate depend on the operands: otherwise JAX takes it for loop-invariant in a
    # differentiated `scan`, and drops a `cond` that has effects but no results.
    device, *_ = lax.optimization_barrier((block_index(names, ctx.mesh), *map(lax.stop_gradient, operands)))
    results = lax.cond(device == 0, call, zeros)
    sums = []
    for k, (y, a) in enumerate(zip(results, outs, strict=True)):
        with ctx.collective_scope(k):
            sums.append(lax.psum(y, names).astype(a.dtype))
    return sums


def _ordered_debug_callback(ctx: LocalContext, operands: Sequence[jax.Array]) -> None:
    """Call the host function of an ordered `jax.debug` callback, in order.

    JAX supports ordered debug callbacks on one device only, but an ordered `io_callback` on any number. It drops
    `io_callback` from differentiated loops; there the call is unordered.
    """
    from jax.experimental import io_callback  # imported here to keep `import jshard` fast

    function = compat.debug_callback_function(ctx.op.primitive, ctx.op.params)
    if ctx.differentiable_loop:
        jax.debug.callback(function, *operands)
    else:
        io_callback(function, None, *map(lax.stop_gradient, operands), ordered=True)


def _is_ordered_debug(op: OpView) -> bool:
    effect = type(op.params.get("effect")).__name__
    return op.primitive != "io_callback" and bool(op.params.get("ordered") or effect.startswith("Ordered"))


def _sent_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in which a result is summed: predicates have no sum."""
    return np.dtype(np.uint8) if np.dtype(dtype) == np.bool_ else dtype


@rule("debug_callback", "debug_print", "io_callback", local=_callback_local)
def callback(op: OpView) -> Rule:
    """Opaque, with an all-reduce over the whole mesh for each result."""
    internal = tuple(
        InternalCollective("all_reduce", compat.itemsize(a.dtype), k, all_axes=True)
        for k, a in enumerate(op.outs)
    )
    return dataclasses.replace(opaque_rule(op, OPAQUE[op.primitive]), internal=internal)
