"""Attention on one device's blocks: by the online softmax of this package, or by the kernel of an accelerator.

On TPUs, attention whose positions are known when it is compiled (no ring, no cut of queries or keys) runs as JAX's
splash attention, a Pallas kernel that skips blocks which causality or the window rule out. Its backward kernels read
the logsumexp that its own forward kernel made, which runs again for them; in one program XLA merges the two. Without a
bias, the logsumexp of logits of usual size keeps the digits of both its terms. Elsewhere,
and for biases, masks and sizes of which the kernel has no blocks, the online softmax runs.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Function, Index
from jshard._rules.attention.definition import Attention, Operands
from jshard._rules.attention.online_softmax import Gradients, Part, backward, forward, summed_delta


_LANES = 128  # of a TPU's vector unit: heads and sequences are multiples of it
_BLOCKS = (512, 256, 128)


def local_forward(spec: Attention, x: Operands, row: Index = 0, column: Index = 0) -> Part:
    """Attention of one device's queries to one device's keys, which begin at positions `row` and `column`."""
    if not splash_takes(spec, x, row, column):
        return forward(spec, x, row, column)
    return lax.platform_dependent(
        x,
        tpu=functools.partial(splash_forward, spec),
        default=functools.partial(forward, spec),
    )


def local_backward(
    spec: Attention,
    x: Operands,
    largest: jax.Array,
    total: jax.Array,
    out: jax.Array,
    cotangent: jax.Array,
    row: Index = 0,
    column: Index = 0,
    *,
    bias_gradient: bool = True,
) -> Gradients:
    """The gradients of these queries and keys; all but `x` are over all keys."""

    def loop(
        x: Operands, largest: jax.Array, total: jax.Array, out: jax.Array, cotangent: jax.Array
    ) -> Gradients:
        delta = summed_delta(cotangent, out)
        found = backward(spec, x, largest, total, cotangent, delta, row, column)
        return found if bias_gradient else found._replace(bias=None)

    if not splash_takes(spec, x, row, column):
        return loop(x, largest, total, out, cotangent)

    def kernel(
        x: Operands, largest: jax.Array, total: jax.Array, out: jax.Array, cotangent: jax.Array
    ) -> Gradients:
        return splash_backward(spec, x, total > 0, cotangent)

    return lax.platform_dependent(x, largest, total, out, cotangent, tpu=kernel, default=loop)


def splash_takes(spec: Attention, x: Operands, row: Index, column: Index) -> bool:
    """Whether splash attention computes this: positions from zero, no bias, no mask, whole tiles."""
    sizes = (x.q.shape[1], x.k.shape[1], x.q.shape[-1])
    return (
        isinstance(row, int) and isinstance(column, int) and row == column == 0
        and not spec.has_bias and not spec.has_mask
        and x.q.dtype in (jnp.bfloat16, np.float32) and x.q.shape[-1] == x.v.shape[-1]
        and all(n % _LANES == 0 for n in sizes)
        and not compat.check_vma_enabled()  # whose types kernels do not have
    )  # fmt: skip


def splash_forward(spec: Attention, x: Operands, *, interpret: bool = False) -> Part:
    """`forward`, by the kernel, with the logsumexp as the largest logit and one as the sum."""
    run = _splash(spec, x, save_residuals=True, interpret=interpret)
    out, (lse,) = jax.vmap(run)(*_heads_first(spec, x), _segment_ids(x))
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
    spec: Attention, x: Operands, reaches: jax.Array, cotangent: jax.Array, *, interpret: bool = False
) -> Gradients:
    """`backward`, by the kernel; `reaches` (B, K, G, T): which queries attend to any key."""
    run, segments = _splash(spec, x, save_residuals=False, interpret=interpret), _segment_ids(x)
    (b, t, k, g, h), s = x.q.shape, x.k.shape[1]
    given = jnp.where(reaches[..., None], cotangent, 0).astype(x.q.dtype)
    _, pull = jax.vjp(lambda q, k, v: jax.vmap(run)(q, k, v, segments), *_heads_first(spec, x))
    dq, dk, dv = (y.astype(jnp.float32) for y in pull(given.reshape(b, k * g, t, h)))
    return Gradients(
        dq.reshape(b, k, g, t, h).transpose(0, 3, 1, 2, 4) * spec.scale,
        dk.reshape(b, k, s, h).transpose(0, 2, 1, 3),
        dv.reshape(b, k, s, h).transpose(0, 2, 1, 3),
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
        block_q=rows, block_kv=columns, block_q_dkv=rows, block_kv_dkv=columns, block_q_dq=rows, block_kv_dq=columns
    )  # fmt: skip
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * (k * g)), block_sizes=blocks, save_residuals=save_residuals,
        head_shards=1, q_seq_shards=1, interpret=interpret,
    )  # fmt: skip
    return lambda q, k, v, segments: kernel(q, k, v, segment_ids=segments)
