"""What a pipeline needs beside JAX's operators: `stage_shift` passes values on, `zero_unless` drops those of idle stages.

A pipeline's stages are dimension 0 of its values. Once that dimension is cut over the axis of the stages, the shift is one
permute (`_rules/primitives/pipeline_shift.py`); a slice and a concatenation in its place would each need an exchange.
`zero_unless` is linear in its operand, which a select beside zeros is not by its rule: sums over the batch stay partial
sums over the mesh until the pipeline ends.

>>> import jax.numpy as jnp
>>> stage_shift(jnp.arange(1, 5), 1).tolist(), stage_shift(jnp.arange(1, 5), -1, wrap=True).tolist()
([0, 1, 2, 3], [2, 3, 4, 1])
>>> zero_unless(jnp.array([[1.0, 2.0], [jnp.inf, jnp.nan]]), jnp.array([True, False])).tolist()
[[1.0, 2.0], [0.0, 0.0]]
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import core, lax
from jax.interpreters import mlir

from jshard._core import jaxcompat as compat


STAGE_SHIFT, ZERO_UNLESS = "stage_shift", "zero_unless"

stage_shift_p = compat.multi_result_primitive(STAGE_SHIFT)
zero_unless_p = compat.multi_result_primitive(ZERO_UNLESS)


def stage_shift(x: jax.Array, by: int, wrap: bool = False) -> jax.Array:
    """`x` with what stage i has in stage i + `by`, for `by` 1 or -1.

    `wrap`: whether the last one goes to the first; else zeros do.
    """
    return stage_shift_p.bind(x, by=by, wrap=wrap)[0]


def zero_unless(x: jax.Array, kept: jax.Array) -> jax.Array:
    """`x` where `kept`, a bool for each element of its first dimensions, is true, and zeros elsewhere."""
    return zero_unless_p.bind(x, kept)[0]


def run_stage_shift(x: jax.Array, *, by: int, wrap: bool) -> list[jax.Array]:
    """`stage_shift` on one device."""
    n = x.shape[0]
    kept = lax.slice_in_dim(x, 0 if by > 0 else 1, n - 1 if by > 0 else n)
    entering = lax.slice_in_dim(x, n - 1 if by > 0 else 0, n if by > 0 else 1)
    entering = entering if wrap else jnp.zeros_like(entering)
    return [lax.concatenate([entering, kept] if by > 0 else [kept, entering], 0)]


def _same_type(x: core.ShapedArray, *, by: int, wrap: bool) -> list[core.ShapedArray]:
    return [x]


def run_zero_unless(x: jax.Array, kept: jax.Array) -> list[jax.Array]:
    """`zero_unless` on one device."""
    return [jnp.where(kept.reshape(*kept.shape, *(1,) * (x.ndim - kept.ndim)), x, jnp.zeros_like(x))]


def _type_of_first(x: core.ShapedArray, kept: core.ShapedArray) -> list[core.ShapedArray]:
    return [x]


def _define() -> None:
    zero_unless_p.def_impl(jax.jit(run_zero_unless))
    zero_unless_p.def_abstract_eval(_type_of_first)
    mlir.register_lowering(zero_unless_p, mlir.lower_fun(run_zero_unless, multiple_results=True))
    stage_shift_p.def_impl(jax.jit(run_stage_shift, static_argnames=("by", "wrap")))
    stage_shift_p.def_abstract_eval(_same_type)
    mlir.register_lowering(stage_shift_p, mlir.lower_fun(run_stage_shift, multiple_results=True))


_define()
