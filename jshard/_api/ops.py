"""Functions for which JAX has several equations, fused: attention, norms, and a product with an activation before it.

>>> import jax, jax.numpy as jnp, jshard
>>> q = jax.random.normal(jax.random.key(0), (2, 16, 4, 8))     # batch, sequence, heads, size of a head
>>> k = v = jax.random.normal(jax.random.key(1), (2, 16, 2, 8))  # two heads, each for two heads of q
>>> out = jshard.ops.attention(q, k, v, causal=True)
>>> bool(jnp.allclose(out, jax.nn.dot_product_attention(q, k, v, is_causal=True), atol=1e-5))
True
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jshard._api import fused_ops
from jshard._core.errors import ShardError


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: bool = False,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    scale: float | None = None,
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    window: int | tuple[int, int] | None = None,
    kv_groups: int | None = None,
) -> jax.Array:
    """Attention, softmax(scale q k^T + bias) v, without an array of all pairs; equal to `jax.nn.dot_product_attention`.

    Inside a sharded function it is one operator. Its batch and its heads may be cut, and nothing moves; so may the
    queries, with whole keys; the keys, as in decoding, with parts combined by their sums; or both sequences along
    one mesh axis: keys and values then pass from device to device (ring attention). Cutting the sequence outside and
    the heads inside, by all-to-alls (Ulysses), follows from the first. The search prices all with the rest of the
    program. On TPUs and NVIDIA's GPUs a kernel computes the blocks where it can, which a plan says.

    >>> import jax
    >>> x = jax.random.normal(jax.random.key(0), (1, 64, 2, 8))
    >>> jax.grad(lambda x: attention(x, x, x, causal=True, window=(16, 0)).sum())(x).shape
    (1, 64, 2, 8)

    Arguments:

    - `q`: queries, (batch..., T, N, H) with any number of batch dimensions, none as well.
    - `k`, `v`: keys (batch..., S, K, H) and values (batch..., S, K, E), where K divides N: consecutive N / K query heads
        share a head of them. The three are promoted to one floating point type, that of the result; the softmax is in
        float32 at least.
    - `causal`: query i attends to keys up to i.
    - `mask`, `bias`: boolean (true: may attend) and added to the logits; (batch..., N, T, S), each dimension may be one.
        Biases may be as low as the type's minimum; pairs that must not attend are better in `mask`.
    - `scale`: of the logits, by default 1 / sqrt(H).
    - `segment_ids`: integers (batch..., T), or a pair of them for queries and keys (batch..., S): only equal ones attend.
    - `window`: (left, right), or one for both: query i attends to keys i - left to i + right.
    - `kv_groups`: N / K, to be checked against the shapes; by default it follows from them.

    Returns (batch..., T, N, E); zeros for a query that may attend to no key. Derivatives in reverse mode.

    Raises `ShardError` for shapes, types or parameters that do not fit.
    """
    from jshard._rules.attention.definition import Attention
    from jshard._rules.attention.primitive import attend

    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    dtype = jnp.result_type(q, k, v)
    _check_shapes(q, k, v, dtype, kv_groups)
    batch, (t, n, h), s = q.shape[:-3], q.shape[-3:], k.shape[-3]
    operands: list[jax.Array] = [x.astype(dtype) for x in (q, k, v)]
    full = (*batch, n, t, s)
    if bias is not None:
        operands.append(_checked_pairs(jnp.asarray(bias), full, "bias"))
    if mask is not None:
        operands.append(_checked_pairs(jnp.asarray(mask), full, "mask"))
    if segment_ids is not None:
        operands += _segments(segment_ids, batch, t, s)
    if isinstance(window, int):
        window = (window, window)
    spec = Attention(
        float(1 / math.sqrt(h) if scale is None else scale), bool(causal), _checked_window(window),
        bias is not None, mask is not None, segment_ids is not None,
    )  # fmt: skip
    return attend(spec, *operands)


layer_norm, rms_norm = fused_ops.layer_norm, fused_ops.rms_norm
activated_product = fused_ops.activated_product

_WHERE = "jshard.ops.attention"


def _check_shapes(q: jax.Array, k: jax.Array, v: jax.Array, dtype: jnp.dtype, kv_groups: int | None) -> None:
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ShardError(
            f"attention on {dtype}", where=_WHERE, fix="queries, keys and values of a floating point type"
        )
    if q.ndim < 3 or k.ndim != q.ndim or v.ndim != q.ndim:
        raise ShardError(
            f"operands of shapes {shapes}",
            where=_WHERE,
            fix="q (batch..., T, N, H), k (batch..., S, K, H), v (batch..., S, K, E)",
        )
    same = q.shape[:-3] == k.shape[:-3] == v.shape[:-3] and k.shape[-3:-1] == v.shape[-3:-1]
    if not same or q.shape[-1] != k.shape[-1]:
        raise ShardError(
            f"operands of shapes {shapes}",
            where=_WHERE,
            fix="equal batch dimensions; equal S and K in k and v; equal H in q and k",
        )
    n, heads = q.shape[-2], k.shape[-2]
    if not heads or n % heads:
        raise ShardError(
            f"{n} query heads and {heads} heads of keys and values",
            where=_WHERE,
            fix=f"a number of query heads that {heads or 1} divides",
        )
    if kv_groups is not None and kv_groups * heads != n:
        raise ShardError(
            f"kv_groups={kv_groups} for {n} query heads and {heads} heads of keys and values",
            where=_WHERE,
            fix=f"kv_groups={n // heads}, or none",
        )


def _checked_pairs(x: jax.Array, full: tuple[int, ...], what: str) -> jax.Array:
    """A bias or mask with as many dimensions as `full`, each equal or of length one."""
    fits = x.ndim <= len(full) and all(a in (1, b) for a, b in zip(x.shape[::-1], full[::-1], strict=False))
    if not fits:
        raise ShardError(
            f"a {what} of shape {x.shape}",
            where=_WHERE,
            fix=f"(batch..., N, T, S), here {full}, in which any dimension may be 1",
        )
    if (x.dtype == bool) != (what == "mask") or what == "bias" and not jnp.issubdtype(x.dtype, jnp.floating):
        raise ShardError(
            f"a {what} of type {x.dtype}",
            where=_WHERE,
            fix="mask= for booleans, bias= for what is added to the logits",
        )
    return x.reshape((1,) * (len(full) - x.ndim) + x.shape)


def _segments(
    given: ArrayLike | tuple[ArrayLike, ArrayLike], batch: tuple[int, ...], t: int, s: int
) -> list[jax.Array]:
    pair = given if isinstance(given, tuple) else (given, given)
    arrays = [jnp.asarray(x) for x in pair]
    want = [(*batch, t), (*batch, s)]
    if [x.shape for x in arrays] != want or not all(jnp.issubdtype(x.dtype, jnp.integer) for x in arrays):
        have = ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)
        raise ShardError(
            f"segment_ids {have}",
            where=_WHERE,
            fix=f"integers of shape {want[0]} for the queries and {want[1]} for the keys, a pair if they differ",
        )
    return arrays


def _checked_window(window: tuple[int, int] | None) -> tuple[int, int] | None:
    if window is None:
        return None
    sides = tuple(window)
    if len(sides) != 2 or any(not isinstance(w, int) or w < 0 for w in sides):
        raise ShardError(
            f"window={window}",
            where=_WHERE,
            fix="(left, right), how many keys before and after, or one number",
        )
    return sides[0], sides[1]
