"""Padding at the end of a dimension, as primitives: `pad_tail` appends zeros, `mask_tail` writes over what was appended.

A dimension whose size no cut divides is padded to one that divides (`_plan/padded_program.py`). The two are primitives
of their own, and not JAX's `pad` and `select_n`, so that each has a sharding rule which keeps the padded dimension cut.

>>> import jax.numpy as jnp
>>> pad_tail(jnp.arange(1, 4), 0, 5).tolist()
[1, 2, 3, 0, 0]
>>> mask_tail(jnp.arange(5), 0, 3, -1).tolist()
[0, 1, 2, -1, -1]

Matrices are written over with diagonal ones of different eigenvalues, of which solvers, factorizations and their
derivatives make no NaN:

>>> mask_tail(jnp.zeros((2, 2, 2)), 0, 1, DIAGONAL).tolist()
[[[0.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 2.0]]]
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import core, lax

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Index
from jshard._program.array_primitive import define_primitive


PAD_TAIL, MASK_TAIL = "pad_tail", "mask_tail"
DIAGONAL: Literal["diagonal"] = "diagonal"
Fill = bool | int | float | Literal["diagonal"]
"""What a tail is written over with: a value, or matrices in the last two dimensions with 1, 2, 3 ... on their diagonals."""

pad_tail_p = compat.multi_result_primitive(PAD_TAIL)
mask_tail_p = compat.multi_result_primitive(MASK_TAIL)


def pad_tail(x: jax.Array, dim: int, size: int) -> jax.Array:
    """`x` with zeros appended along `dim`, to length `size`."""
    return pad_tail_p.bind(x, dim=dim, size=size)[0]


def mask_tail(x: jax.Array, dim: int, length: int, value: Fill) -> jax.Array:
    """`x` with every element from position `length` of `dim` on replaced by `value`."""
    return mask_tail_p.bind(x, dim=dim, length=length, value=value)[0]


def run_pad(x: jax.Array, *, dim: int, size: int) -> list[jax.Array]:
    """`pad_tail` on one device."""
    padding = [(0, size - x.shape[dim] if d == dim else 0, 0) for d in range(x.ndim)]
    return [lax.pad(x, jnp.zeros((), x.dtype), padding)]


def run_mask(
    x: jax.Array,
    *,
    dim: int,
    length: int,
    value: Fill,
    offset: Index = 0,
    corner: tuple[Index, Index] = (0, 0),
) -> list[jax.Array]:
    """`mask_tail` on one device, on a block that begins at position `offset` of the dimension.

    `corner`: where the block begins in the last two dimensions.
    """

    def position(d: int) -> jax.Array:
        return lax.broadcasted_iota(jnp.int32, x.shape, d)

    if value == DIAGONAL:
        row, column = (position(x.ndim - 2 + i) + jnp.asarray(corner[i], jnp.int32) for i in (0, 1))
        fill = jnp.where(row == column, row + 1, 0).astype(x.dtype)
    else:
        fill = jnp.full((), value, x.dtype)
    return [jnp.where(position(dim) < jnp.int32(length) - offset, x, fill)]


def _padded_type(x: core.ShapedArray, *, dim: int, size: int) -> list[core.ShapedArray]:
    return [x.update(shape=(*x.shape[:dim], size, *x.shape[dim + 1 :]))]


def _masked_type(x: core.ShapedArray, *, dim: int, length: int, value: Fill) -> list[core.ShapedArray]:
    return [x]


define_primitive(pad_tail_p, run_pad, _padded_type, "dim", "size")
define_primitive(mask_tail_p, run_mask, _masked_type, "dim", "length", "value")
