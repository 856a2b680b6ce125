"""What loops over pieces of the batch need beside JAX's operators: to pass values on, to add and to round sums.

A pipeline's stages are dimension 0 of its values. Once that dimension is cut over the axis of the stages, the shift is one
permute (`_rules/primitives/pipeline_shift.py`); a slice and a concatenation in its place would each need an exchange.
`zero_unless` is linear in its operand, which a select beside zeros is not by its rule: sums over the batch stay partial
sums over the mesh until the pipeline ends. `add_to_round` adds a tick's sums to those of the round that each stage is in:
an update in place, of one round's sums, where an addition would go through those of all rounds. `rounded_sum` casts sums to
the dtype of their addends. Partial sums pass it, as they do not pass a cast to a narrower dtype: each device rounds its own,
as it rounds its part of a product of the whole batch, and the sum over the mesh moves half the bytes.

>>> import jax.numpy as jnp
>>> stage_shift(jnp.arange(1, 5), 1).tolist(), stage_shift(jnp.arange(1, 5), -1, wrap=True).tolist()
([0, 1, 2, 3], [2, 3, 4, 1])
>>> add_to_round(jnp.zeros((2, 1, 3)), jnp.array([[5.0, 6.0, 7.0]]), jnp.array([1, 0, 2])).tolist()
[[[0.0, 6.0, 0.0]], [[5.0, 0.0, 0.0]]]
>>> rounded_sum(jnp.array([1.0, 1.001]), jnp.bfloat16).tolist()
[1.0, 1.0]
>>> import jax
>>> jax.grad(lambda x: jnp.vdot(stage_shift(x, 1), jnp.array([1.0, 2.0, 3.0])))(jnp.ones(3)).tolist()
[2.0, 3.0, 0.0]
>>> zero_unless(jnp.array([[1.0, 2.0], [jnp.inf, jnp.nan]]), jnp.array([True, False])).tolist()
[[1.0, 2.0], [0.0, 0.0]]
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import core, lax

from jshard._core import jaxcompat as compat
from jshard._program.array_primitive import define_linear_rules, define_primitive


STAGE_SHIFT, ZERO_UNLESS, ADD_TO_ROUND = "stage_shift", "zero_unless", "add_to_round"
ROUNDED_SUM = "rounded_sum"

stage_shift_p = compat.multi_result_primitive(STAGE_SHIFT)
zero_unless_p = compat.multi_result_primitive(ZERO_UNLESS)
add_to_round_p = compat.multi_result_primitive(ADD_TO_ROUND)
rounded_sum_p = compat.multi_result_primitive(ROUNDED_SUM)


def stage_shift(x: jax.Array, by: int, wrap: bool = False) -> jax.Array:
    """`x` with what stage i has in stage i + `by`, for `by` 1 or -1.

    `wrap`: whether the last one goes to the first; else zeros do.
    """
    return stage_shift_p.bind(x, by=by, wrap=wrap)[0]


def zero_unless(x: jax.Array, kept: jax.Array) -> jax.Array:
    """`x` where `kept`, a bool for each element of its first dimensions, is true, and zeros elsewhere."""
    return zero_unless_p.bind(x, kept)[0]


def add_to_round(sums: jax.Array, addend: jax.Array, rounds: jax.Array) -> jax.Array:
    """`sums` (rounds, layers, stages, ...) with `addend` (layers, stages, ...) added to the round of each stage, (stages,).

    A stage whose round is out of range adds nothing.
    """
    return add_to_round_p.bind(sums, addend, rounds)[0]


def rounded_sum(total: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """A finished sum in the dtype of its addends."""
    if total.dtype == dtype:
        return total
    return rounded_sum_p.bind(total, dtype=jnp.dtype(dtype))[0]


def sum_dtype(dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
    """The dtype in which addends are summed: float32 for narrower floats, as products of a whole batch sum them."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.float32 if narrow else dtype


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


def run_add_to_round(sums: jax.Array, addend: jax.Array, rounds: jax.Array) -> list[jax.Array]:
    """`add_to_round` on one device."""
    works = (rounds >= 0) & (rounds < sums.shape[0])
    (addend,) = run_zero_unless(addend, jnp.broadcast_to(works, addend.shape[:2]))
    for stage in range(sums.shape[2]):
        zero = jnp.zeros((), rounds.dtype)
        starts = (rounds[stage], zero, jnp.full_like(zero, stage), *(zero,) * (sums.ndim - 3))
        sizes = (1, sums.shape[1], 1, *sums.shape[3:])
        new = lax.dynamic_slice(sums, starts, sizes) + addend[None, :, stage : stage + 1]
        sums = lax.dynamic_update_slice(sums, new, starts)
    return [sums]


def _type_of_first(x: core.ShapedArray, *_: core.ShapedArray) -> list[core.ShapedArray]:
    return [x]


def run_rounded_sum(x: jax.Array, *, dtype: jax.typing.DTypeLike) -> list[jax.Array]:
    """`rounded_sum` on one device."""
    return [lax.convert_element_type(x, dtype)]


def _rounded_type(x: core.ShapedArray, *, dtype: jax.typing.DTypeLike) -> list[core.ShapedArray]:
    return [x.update(dtype=jnp.dtype(dtype), weak_type=False)]


def _shifted_back(
    ct: jax.Array, avals: Sequence[core.ShapedArray], *, by: int, wrap: bool
) -> list[jax.Array]:
    return [stage_shift(ct, -by, wrap)]


def _zero_unless_back(ct: jax.Array, avals: Sequence[core.ShapedArray], kept: jax.Array) -> list[jax.Array]:
    return [zero_unless(ct, kept)]


def _taken_from_round(ct: jax.Array, avals: Sequence[core.ShapedArray], rounds: jax.Array) -> list[jax.Array]:
    """The cotangents of the sums and of the addend: of each stage that of the round it adds to."""
    own = jnp.arange(ct.shape[0], dtype=rounds.dtype)[:, None, None] == rounds
    return [ct, jnp.sum(zero_unless(ct, jnp.broadcast_to(own, ct.shape[:3])), 0)]


def _widened(
    ct: jax.Array, avals: Sequence[core.ShapedArray], *, dtype: jax.typing.DTypeLike
) -> list[jax.Array]:
    return [lax.convert_element_type(ct, avals[0].dtype)]


define_linear_rules(rounded_sum_p, _widened)
define_linear_rules(zero_unless_p, _zero_unless_back)
define_linear_rules(add_to_round_p, _taken_from_round, linear=2)
define_linear_rules(stage_shift_p, _shifted_back)
define_primitive(rounded_sum_p, run_rounded_sum, _rounded_type, "dtype")
define_primitive(zero_unless_p, run_zero_unless, _type_of_first)
define_primitive(add_to_round_p, run_add_to_round, _type_of_first)
define_primitive(stage_shift_p, run_stage_shift, _same_type, "by", "wrap")
