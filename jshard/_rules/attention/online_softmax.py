"""Attention by an online softmax: block by block, so that the logits of all pairs are never in memory at once.

Forward, a query keeps the largest logit m so far, the sum l of exp(logit - m), and the values weighted by it; a block
that raises m scales both down. Backward, the probabilities of a block are computed again from m and l. Their logsumexp,
m + log l, would not do: where a bias moves all logits of a query to -1e6, say, log l is lost in its rounding.

Sources: M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867; T. Dao et al.,
"FlashAttention", NeurIPS 2022, arXiv 2205.14135, algorithms 1 and 4. Combining parts of the keys by their sums is
what H. Liu et al., "Ring attention with blockwise transformers", ICLR 2024, arXiv 2310.01889, and Flash-Decoding do.

A query without any key to attend to gives zeros; its largest logit is minus infinity, and its sum zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Index, PyTree
from jshard._rules.attention.definition import (
    BLOCK,
    Attention,
    Operands,
    allowed,
    logits,
    may_attend,
    softmax_dtype,
)


class Part(NamedTuple):
    """Attention to some of the keys, `out` (B, K, G, T, E), and what its softmax divides by.

    `largest` (B, K, G, T) of their logits, and the sum `total` (B, K, G, T) of exp(logit - largest).
    """

    out: jax.Array
    largest: jax.Array
    total: jax.Array


class Gradients(NamedTuple):
    """Gradients of `Operands`, in the type of the softmax."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None


class _Running(NamedTuple):
    largest: jax.Array
    total: jax.Array
    weighted: jax.Array


class _Block(NamedTuple):
    """Queries from `row`, keys from `column`.

    If blocks overlap, those before `first_row` and `first_column` belong to the block before.
    """

    row: Index
    first_row: Index
    column: Index
    first_column: Index
    overlap: bool = False


def forward(spec: Attention, x: Operands, row: Index = 0, column: Index = 0) -> Part:
    """Attention of some queries to some keys.

    Arguments:

    - `row`, `column`: positions of the first query and of the first key, or of each of them.
    """
    nothing, dtype = no_part(x), softmax_dtype(x.q.dtype)
    running = _Running(nothing.largest, nothing.total, nothing.out)

    def step(running: _Running, at: _Block, rows: int, columns: int) -> _Running:
        part = x.rows(at.row, rows).keys(at.column, columns)
        s = _masked(spec, part, at, row, column)
        old = _Running(*(lax.dynamic_slice_in_dim(y, at.row, rows, 3) for y in running))
        largest = jnp.maximum(old.largest, s.max(-1))
        base = _finite(largest)
        p, shrink = jnp.exp(s - base[..., None]), jnp.exp(old.largest - base)
        value = jnp.einsum("bkgts,bske->bkgte", p.astype(x.v.dtype), part.v, preferred_element_type=dtype)
        new = _Running(
            largest, old.total * shrink + p.sum(-1), old.weighted * shrink[..., None] + value.astype(dtype)
        )
        return _Running(
            *(lax.dynamic_update_slice_in_dim(y, z, at.row, 3) for y, z in zip(running, new, strict=True))
        )

    running = _over_blocks(spec, x, row, column, running, step)
    return Part(running.weighted / _nonzero(running.total)[..., None], running.largest, running.total)


def no_part(x: Operands) -> Part:
    """What attention of these queries to no keys is."""
    b, t, k, g, _ = x.q.shape
    dtype, heads = softmax_dtype(x.q.dtype), (b, k, g, t)
    largest = jnp.full(heads, -jnp.inf, dtype)
    return Part(jnp.zeros((*heads, x.v.shape[-1]), dtype), largest, jnp.zeros(heads, dtype))


def no_gradients(x: Operands) -> Gradients:
    """Gradients of zero."""
    dtype = softmax_dtype(x.q.dtype)
    dq, dk, dv = (jnp.zeros(y.shape, dtype) for y in (x.q, x.k, x.v))
    return Gradients(dq, dk, dv, None if x.bias is None else jnp.zeros(x.bias.shape, dtype))


def merged(a: Part, b: Part) -> Part:
    """Attention to the keys of two parts together."""
    largest = jnp.maximum(a.largest, b.largest)
    of_a, of_b = weight(a, largest), weight(b, largest)
    total = of_a + of_b
    some = _nonzero(total)
    out = a.out * (of_a / some)[..., None] + b.out * (of_b / some)[..., None]
    return Part(out, largest, total)


def weight(part: Part, largest: jax.Array) -> jax.Array:
    """The sum of exp(logit - largest) over the keys of a part, where `largest` is of more keys."""
    return part.total * jnp.exp(part.largest - _finite(largest))


def backward(
    spec: Attention,
    x: Operands,
    largest: jax.Array,
    total: jax.Array,
    cotangent: jax.Array,
    delta: jax.Array,
    row: Index = 0,
    column: Index = 0,
) -> Gradients:
    """Gradients with respect to these queries and keys, of attention to these and perhaps other keys.

    Arguments:

    - `largest`, `total`: (B, K, G, T) over all keys, as in `Part`.
    - `cotangent`: (B, K, G, T, E) of the result.
    - `delta`: (B, K, G, T) the sum of cotangent times result over E.
    """
    dtype = softmax_dtype(x.q.dtype)
    base, inverse = _finite(largest), 1 / _nonzero(total)

    def step(sums: Gradients, at: _Block, rows: int, columns: int) -> Gradients:
        part = x.rows(at.row, rows).keys(at.column, columns)
        some = [lax.dynamic_slice_in_dim(y, at.row, rows, 3) for y in (base, inverse, cotangent, delta)]
        p = jnp.exp(_masked(spec, part, at, row, column) - some[0][..., None]) * some[1][..., None]
        narrow = x.q.dtype

        def product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
            return jnp.einsum(equation, a.astype(narrow), b.astype(narrow), preferred_element_type=dtype)

        dp = product("bkgte,bske->bkgts", some[2], part.v)
        ds = p * (dp - some[3][..., None])
        scaled = ds * jnp.asarray(spec.scale, dtype)
        return Gradients(
            _added(sums.q, product("bkgts,bskh->btkgh", scaled, part.k), at.row, 1),
            _added(sums.k, product("bkgts,btkgh->bskh", scaled, part.q), at.column, 1),
            _added(sums.v, product("bkgts,bkgte->bske", p, some[2]), at.column, 1),
            None if sums.bias is None else _added_to_bias(sums.bias, ds, at),
        )

    return _over_blocks(spec, x, row, column, no_gradients(x), step)


def _masked(spec: Attention, x: Operands, at: _Block, row: Index, column: Index) -> jax.Array:
    """The logits of a block, minus infinity where a query may not attend or belongs to another block."""
    s = logits(spec, x)
    rows = at.row + jnp.arange(x.q.shape[1], dtype=np.int32)
    columns = at.column + jnp.arange(x.k.shape[1], dtype=np.int32)
    if at.overlap:
        own = (rows >= at.first_row)[:, None] & (columns >= at.first_column)[None, :]
        s = jnp.where(own, s, -jnp.inf)
    keep = allowed(
        spec, x, _positions(row, at.row, x.q.shape[1]), _positions(column, at.column, x.k.shape[1])
    )
    return s if keep is None else jnp.where(keep, s, -jnp.inf)


def _positions(first: Index, start: Index, size: int) -> jax.Array:
    """Positions of `size` queries or keys from `start`, where those of all are `first` or begin with it."""
    if isinstance(first, int) or first.ndim == 0:
        return first + start + jnp.arange(size, dtype=np.int32)
    return lax.dynamic_slice_in_dim(first, start, size, 0)


def _ends(first: Index, start: Index, size: int) -> tuple[Index, Index]:
    """The least and the greatest position of `size` queries or keys from `start`."""
    if isinstance(first, int) or first.ndim == 0:
        return first + start, first + start + (size - 1)
    some = _positions(first, start, size)
    return some.min(), some.max()


def _added(total: jax.Array, x: jax.Array, start: Index, dim: int) -> jax.Array:
    old = lax.dynamic_slice_in_dim(total, start, x.shape[dim], dim)
    return lax.dynamic_update_slice_in_dim(total, old + x.astype(total.dtype), start, dim)


def _added_to_bias(total: jax.Array, ds: jax.Array, at: _Block) -> jax.Array:
    summed = tuple(d for d in range(5) if total.shape[d] == 1 and ds.shape[d] != 1)
    ds = ds.sum(summed, keepdims=True)
    row, column = (at.row if total.shape[3] > 1 else 0, at.column if total.shape[4] > 1 else 0)
    starts = [jnp.asarray(i, np.int32) for i in (0, 0, 0, row, column)]
    old = lax.dynamic_slice(total, starts, ds.shape)
    return lax.dynamic_update_slice(total, old + ds, starts)


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(x == -jnp.inf, jnp.zeros_like(x), x)


def _nonzero(total: jax.Array) -> jax.Array:
    return jnp.where(total > 0, total, jnp.ones_like(total))


Step = Callable[..., PyTree]  # (state, block, rows, columns) -> state


def _over_blocks(
    spec: Attention, x: Operands, row: Index, column: Index, state: PyTree, step: Step
) -> PyTree:
    """The state after every block in which some query may attend to some key.

    The last block of a length that blocks do not divide begins earlier, and leaves out what the one before had.
    """
    t, s = x.q.shape[1], x.k.shape[1]
    rows, columns = min(BLOCK, t), min(BLOCK, s)
    known = isinstance(row, int) and isinstance(column, int)
    blocks = list(_blocks(t, s))
    if known:
        blocks = [at for at in blocks if _reaches(spec, row, column, at, rows, columns)]
    if not blocks:
        return state
    values = compat.to_common_vma([*jax.tree.leaves(state), *jax.tree.leaves((x, row, column))])
    state = jax.tree.unflatten(jax.tree.structure(state), values[: len(jax.tree.leaves(state))])

    def one(state: PyTree, at: _Block) -> PyTree:
        if known:
            return step(state, at, rows, columns)
        reaches = _reaches(spec, row, column, at, rows, columns)
        return lax.cond(reaches, lambda y: step(y, at, rows, columns), lambda y: y, state)

    if len(blocks) == 1:
        return one(state, blocks[0])
    overlap = t % rows > 0 or s % columns > 0
    table = np.array([at[:4] for at in blocks], dtype=np.int32)

    def body(state: PyTree, at: jax.Array) -> tuple[PyTree, None]:
        return one(state, _Block(at[0], at[1], at[2], at[3], overlap)), None

    return lax.scan(body, state, jnp.asarray(table))[0]


def _blocks(queries: int, keys: int) -> Iterator[_Block]:
    rows, columns = min(BLOCK, queries), min(BLOCK, keys)
    for i in range(0, queries, rows):
        for j in range(0, keys, columns):
            yield _Block(min(i, queries - rows), i, min(j, keys - columns), j)


def _reaches(
    spec: Attention, row: Index, column: Index, at: _Block, rows: int, columns: int
) -> bool | jax.Array:
    return may_attend(spec, _ends(row, at.row, rows), _ends(column, at.column, columns))


def summed_delta(cotangent: jax.Array, out: jax.Array) -> jax.Array:
    """The sum of cotangent times result over the value's dimension, in the type of the softmax."""
    dtype = softmax_dtype(out.dtype)
    return (cotangent.astype(dtype) * out.astype(dtype)).sum(-1)
