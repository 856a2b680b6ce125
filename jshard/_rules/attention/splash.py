"""Splash attention, JAX's Pallas kernel for TPUs, on one device's blocks.

It skips blocks that causality or the window rule out, and keeps the logsumexp of each query. Its backward kernels read a
logsumexp and a result that may be over more keys than those given, so that it runs on the blocks of a ring too. Without
a bias, the logsumexp of logits of usual size keeps the digits of both its terms.

It needs sequences of whole tiles (128), positions of queries and keys that begin together, and neither bias nor mask.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Function
from jshard._core.layout import ArrayType
from jshard._rules.attention.definition import Attention, Operands
from jshard._rules.attention.online_softmax import Gradients, Part


_LANES = 128  # of a TPU's vector unit: sequences are multiples of it
_BLOCKS = (512, 256, 128)


def splash_lacks(spec: Attention, q: ArrayType, k: ArrayType) -> str:
    """What of this attention splash attention has not, for queries (..., T, N, H) and keys (..., S, K, H); "" if nothing."""
    if spec.has_bias or spec.has_mask:
        return "a bias" if spec.has_bias else "a mask"
    if q.dtype not in (jnp.bfloat16, np.float32):
        return f"{q.dtype} operands"
    if q.shape[-3] % _LANES or k.shape[-3] % _LANES:
        return f"blocks of {q.shape[-3]} queries and {k.shape[-3]} keys, no multiples of {_LANES}"
    return ""


def splash_forward(spec: Attention, x: Operands, *, interpret: bool = False) -> Part:
    """`online_softmax.forward`, by the kernel, with the logsumexp as the largest logit and one as the sum."""
    kernel = _splash(spec, x, save_residuals=True, interpret=interpret)
    out, (lse,) = jax.vmap(lambda q, k, v, s: kernel(q, k, v, segment_ids=s))(
        *_heads_first(spec, x), _segment_ids(x)
    )
    b, t, k, g, _ = x.q.shape
    lse = lse.reshape(b, k, g, t).astype(jnp.float32)
    reaches = lse > 0.5 * _mask_value()
    out = out.reshape(b, k, g, t, -1).astype(jnp.float32)
    return Part(
        jnp.where(reaches[..., None], out, 0),
        jnp.where(reaches, lse, -jnp.inf),
        reaches.astype(jnp.float32),
    )


def splash_backward(
    spec: Attention,
    x: Operands,
    logsumexp: jax.Array,
    out: jax.Array,
    cotangent: jax.Array,
    *,
    interpret: bool = False,
) -> Gradients:
    """The gradients of these queries and keys, by the kernel.

    Arguments:

    - `logsumexp` (B, K, G, T), `out`, `cotangent` (B, K, G, T, E): of attention to these and perhaps other keys; of a
        query without any key the cotangent is zero.
    """
    kernel = _splash(spec, x, save_residuals=False, interpret=interpret)
    (b, t, k, g, h), s = x.q.shape, x.k.shape[1]

    def one(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segments: object,
        y: jax.Array,
        lse: jax.Array,
        given: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        return compat.splash_backward(kernel, (q, k, v), segments, y, lse, given)

    per_query = [y.astype(x.q.dtype).reshape(b, k * g, t, -1) for y in (out, cotangent)]
    dq, dk, dv = (
        y.astype(jnp.float32)
        for y in jax.vmap(one)(
            *_heads_first(spec, x),
            _segment_ids(x),
            per_query[0],
            logsumexp.astype(jnp.float32).reshape(b, k * g, t),
            per_query[1],
        )
    )
    return Gradients(
        dq.reshape(b, k, g, t, h).transpose(0, 3, 1, 2, 4) * spec.scale,
        dk.reshape(b, k, s, h).transpose(0, 2, 1, 3),
        dv.reshape(b, k, s, -1).transpose(0, 2, 1, 3),
        None,
    )


def _heads_first(spec: Attention, x: Operands) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scaled queries (B, N, T, H), keys and values (B, K, S, H)."""
    b, t, k, g, h = x.q.shape
    q = (x.q * jnp.asarray(spec.scale, x.q.dtype)).transpose(0, 2, 3, 1, 4).reshape(b, k * g, t, h)
    return q, x.k.transpose(0, 2, 1, 3), x.v.transpose(0, 2, 1, 3)


def _segment_ids(x: Operands) -> tuple[jax.Array, jax.Array] | None:
    if x.q_segments is None or x.k_segments is None:
        return None
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    return SegmentIds(x.q_segments.astype(np.int32), x.k_segments.astype(np.int32))


def _mask_value() -> float:
    """What the kernel gives logits that are masked."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    return float(splash_attention_kernel.DEFAULT_MASK_VALUE)


def _splash(spec: Attention, x: Operands, *, save_residuals: bool, interpret: bool) -> Function:
    """The kernel for one example: (N, T, H), (K, S, H), (K, S, H) and segments."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    (_, t, k, g, _), s = x.q.shape, x.k.shape[1]
    mask: splash.Mask = splash.CausalMask((t, s)) if spec.causal else splash.FullMask((t, s))
    if spec.window is not None:
        local = splash.LocalMask((t, s), spec.window, 0)
        mask = mask & local if spec.causal else local
    rows, columns = (next(n for n in _BLOCKS if size % n == 0) for size in (t, s))
    blocks = splash.BlockSizes(
        block_q=rows, block_kv=columns, block_q_dkv=rows, block_kv_dkv=columns, block_kv_dkv_compute=columns,
        block_q_dq=rows, block_kv_dq=columns,
    )  # fmt: skip
    return splash.make_splash_mha(
        splash.MultiHeadMask([mask] * (k * g)), block_sizes=blocks, save_residuals=save_residuals,
        head_shards=1, q_seq_shards=1, interpret=interpret,
    )  # fmt: skip
