"""From the operands of the attention primitive, on any device, to grouped heads and one batch dimension, and back.

A device that has some query heads, and all key and value heads, takes those that its query heads belong to: `kv_heads`.
The gradients of the others are zero there, and those of all devices are summed.

>>> import jax.numpy as jnp
>>> from jshard._rules.attention.definition import Attention
>>> q, k = jnp.ones((2, 3, 5, 4, 8)), jnp.ones((2, 3, 6, 2, 8))
>>> x = arranged(Attention(1.0, has_bias=True), (q, k, k, jnp.ones((2, 1, 1, 5, 6))))
>>> x.q.shape, x.k.shape, x.bias.shape
((6, 5, 2, 2, 8), (6, 6, 2, 8), (6, 1, 1, 5, 6))
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jshard._rules.attention.definition import Attention, Operands
from jshard._rules.attention.online_softmax import Gradients


def arranged(spec: Attention, arrays: Sequence[jax.Array], kv_heads: jax.Array | None = None) -> Operands:
    """The operands of the primitive in the shapes of `Operands`; `kv_heads`: the numbers of the heads to take."""
    rest = iter(arrays)
    q, k, v = next(rest), next(rest), next(rest)
    batch, kv_batch = q.shape[:-3], k.shape[:-3]
    size = math.prod(batch)
    if kv_heads is not None:
        k, v = (jnp.take(x, kv_heads, axis=-2) for x in (k, v))
    heads = k.shape[-2]
    k, v = (x.reshape(math.prod(kv_batch), *x.shape[-3:]) for x in (k, v))
    bias = _flat(next(rest), batch, heads) if spec.has_bias else None
    mask = _flat(next(rest), batch, heads) if spec.has_mask else None
    segments = [x.reshape(size, x.shape[-1]) for x in rest] if spec.has_segments else [None, None]
    return Operands(grouped(q, heads), k, v, bias, mask, segments[0], segments[1])


def grouped(q: jax.Array, heads: int) -> jax.Array:
    """(batch..., T, N, H) as (B, T, K, G, H)."""
    return q.reshape(math.prod(q.shape[:-3]), q.shape[-3], heads, q.shape[-2] // heads, q.shape[-1])


def by_head(x: jax.Array, heads: int) -> jax.Array:
    """(batch..., T, N, E) as (B, K, G, T, E), the order of results inside."""
    return grouped(x, heads).transpose(0, 2, 3, 1, 4)


def as_result(x: jax.Array, batch: Sequence[int]) -> jax.Array:
    """(B, K, G, T, E) as (batch..., T, N, E)."""
    _, k, g, t, e = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(*batch, t, k * g, e)


def _flat(x: jax.Array, batch: Sequence[int], heads: int) -> jax.Array:
    """A bias or mask (batch..., N, T, S), of which dimensions may be of length one, as (B, K, G, T, S)."""
    lead, (n, t, s) = x.shape[:-3], x.shape[-3:]
    if any(d != 1 for d in lead) and tuple(lead) != tuple(batch):
        x, lead = jnp.broadcast_to(x, (*batch, n, t, s)), batch
    groups = (1, 1) if n == 1 else (heads, n // heads)
    return x.reshape(math.prod(lead), *groups, t, s)


def arranged_back(
    spec: Attention, gradients: Gradients, arrays: Sequence[jax.Array], kv_heads: jax.Array | None = None
) -> list[jax.Array]:
    """The gradients in the shapes of the operands of the primitive, in the type of the softmax."""
    q, k, v = arrays[:3]
    out = [gradients.q.reshape(q.shape)]
    for x, g in ((k, gradients.k), (v, gradients.v)):
        g = g.reshape(*x.shape[:-2], -1, x.shape[-1])
        if kv_heads is not None:
            g = jnp.zeros(x.shape, g.dtype).at[..., kv_heads, :].add(g)
        out.append(g)
    if gradients.bias is not None:
        bias, batch = arrays[3], q.shape[:-3]
        lead = bias.shape[:-3]
        g = gradients.bias.reshape(
            *(lead if gradients.bias.shape[0] == math.prod(lead) else batch), *bias.shape[-3:]
        )
        summed = tuple(d for d in range(len(lead)) if g.shape[d] != bias.shape[d])
        out.append(g.sum(summed, keepdims=True) if summed else g)
    return out
