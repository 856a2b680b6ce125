"""A traced float32 function with its arithmetic in float64.

Two float32 runs of one program differ by rounding, and nothing in them says which is nearer the truth. So every
equation of the traced program is run again on float64 values: the same program, random bits and branches included,
with 29 more bits in each operation. The distance of a float32 run from that is its own rounding.

>>> f = lambda x: jnp.log(1 + x)
>>> x = np.float32(1e-9)
>>> g, wider = exact(f, x)
>>> with jax.enable_x64(True):
...     float(jax.jit(f)(x)), round(float(g(*wider)), 12)
(0.0, 1e-09)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jshard._core import jaxcompat as compat
from jshard._program.trace import CALL_PRIMITIVES
from jshard._rules.lookup import REGISTRY
from jshard._rules.primitives.opaque_operators import OPAQUE


F32 = np.dtype(np.float32)
_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")
# Bits, not numbers: these take and give what the float32 program has.
_AS_THEY_ARE = (
    "bitcast_convert_type",
    "nextafter",
    "random_bits",
    "random_wrap",
    "random_unwrap",
    "reduce_precision",
)
_SCATTERS = {"scatter": lax.scatter, "scatter-add": lax.scatter_add, "scatter_add": lax.scatter_add}


def exact(fn: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """`fn` in float64, and its arguments; both are for use under `jax.enable_x64(True)`."""
    traced, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    check(traced)
    tree = jax.tree.structure(shapes)

    def wider(*args: Any) -> Any:
        return jax.tree.unflatten(tree, run(traced, *jax.tree.leaves(args)))

    with jax.enable_x64(True):
        return wider, jax.tree.map(wide, args)


def check(closed: Any) -> None:
    """Raise a `NotImplementedError` for a program with loops or branches, or with primitives that nothing is known of."""
    for eqn in compat.open_jaxpr(closed)[0].eqns:
        name = eqn.primitive.name
        inner = name in CALL_PRIMITIVES or name.startswith("jshard_")
        if name in ("scan", "while", "cond") or name in OPAQUE or not (inner or REGISTRY.get(name)):
            raise NotImplementedError(f"{name} in float64")
        if (body := _body(eqn)) is not None:
            check(body)


def wide(x: Any) -> Any:
    """A float32 array in float64; another unchanged."""
    return jnp.asarray(x, np.float64) if getattr(x, "dtype", None) == F32 else x


def run(closed: Any, *args: Any) -> list[Any]:
    """Evaluate a jaxpr with every float32 widened."""
    jaxpr, consts = compat.open_jaxpr(closed)
    env: dict[Any, Any] = {}
    env.update(zip(jaxpr.constvars, map(wide, consts), strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(v: Any) -> Any:
        return wide(np.asarray(v.val, v.aval.dtype)) if compat.is_literal(v) else env[v]

    for eqn in jaxpr.eqns:
        out = _equation(eqn, [read(v) for v in eqn.invars])
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _equation(eqn: Any, ins: list[Any]) -> list[Any]:
    name = eqn.primitive.name
    if (body := _body(eqn)) is not None:
        return run(body, *ins)
    if name in _SCATTERS:  # their parameters hold the update's own traced program
        kept = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        return [_SCATTERS[name](*ins, **{k: eqn.params[k] for k in kept})]
    if name in _AS_THEY_ARE:
        ins = [
            jnp.asarray(x, v.aval.dtype) if v.aval.dtype == F32 else x
            for x, v in zip(ins, eqn.invars, strict=True)
        ]
        params = dict(eqn.params)
    else:
        params = {k: np.dtype(np.float64) if _is_f32(v) else v for k, v in eqn.params.items()}
    out = eqn.primitive.bind(*ins, **compat.bind_params(eqn, params))
    return [wide(x) for x in (out if eqn.primitive.multiple_results else [out])]


def _body(eqn: Any) -> Any:
    body = next((eqn.params[k] for k in _INNER if k in eqn.params), None)
    return body if hasattr(body, "eqns") else None


def _is_f32(v: Any) -> bool:
    return isinstance(v, np.dtype | type) and v in (F32, np.float32)
