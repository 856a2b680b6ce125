"""cuDNN's attention, the kernel of NVIDIA's GPUs, on one device's blocks.

It keeps the logsumexp of each query; its backward kernel reads a logsumexp and a result that may be over more keys than
those given, so that it runs on the blocks of a ring too, as in NVIDIA's Transformer Engine.

It needs bfloat16 or float16, heads of at most 128 numbers, a multiple of 8 (more on Hopper only), a GPU of compute
capability 8 or later, and neither bias, mask nor segments. Small sequences, one block of the online softmax, gain nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jshard._core import jaxcompat as compat
from jshard._core.layout import ArrayType
from jshard._rules.attention.definition import Attention, Operands
from jshard._rules.attention.online_softmax import Gradients, Part


_LONGEST_HEAD, _SHORTEST = 128, 128


def cudnn_lacks(spec: Attention, q: ArrayType, k: ArrayType, v: ArrayType) -> str:
    """What of this attention cuDNN's kernel has not, for operands in the shapes of the primitive; "" if nothing."""
    for has, what in ((spec.has_bias, "a bias"), (spec.has_mask, "a mask"), (spec.has_segments, "segments")):
        if has:
            return what
    if spec.window is not None:
        return "a window"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{q.dtype} operands"
    if q.shape[-1] != v.shape[-1] or q.shape[-1] > _LONGEST_HEAD or q.shape[-1] % 8:
        return f"heads of {q.shape[-1]} and {v.shape[-1]}, not equal, a multiple of 8 and at most {_LONGEST_HEAD}"
    if spec.causal and q.shape[-3] != k.shape[-3]:
        return f"a causal mask of {q.shape[-3]} queries and {k.shape[-3]} keys"
    if min(q.shape[-3], k.shape[-3]) < _SHORTEST:
        return f"blocks of {q.shape[-3]} queries and {k.shape[-3]} keys, under {_SHORTEST}"
    old = [d for d in jax.local_devices() if float(getattr(d, "compute_capability", None) or 8) < 8]
    return f"a GPU of compute capability {getattr(old[0], 'compute_capability', '')}" if old else ""


def cudnn_forward(spec: Attention, x: Operands) -> Part:
    """`online_softmax.forward`, by the kernel, with the logsumexp as the largest logit and one as the sum."""
    b, t, k, g, h = x.q.shape
    out, lse = compat.cudnn_attention(
        x.q.reshape(b, t, k * g, h), x.k, x.v, scale=spec.scale, causal=spec.causal
    )
    lse = lse.reshape(b, k, g, t).astype(jnp.float32)
    out = out.reshape(b, t, k, g, -1).transpose(0, 2, 3, 1, 4).astype(jnp.float32)
    return Part(out, lse, jnp.ones_like(lse))


def cudnn_backward(
    spec: Attention, x: Operands, logsumexp: jax.Array, out: jax.Array, cotangent: jax.Array
) -> Gradients:
    """The gradients of these queries and keys, by the kernel.

    Arguments:

    - `logsumexp` (B, K, G, T), `out`, `cotangent` (B, K, G, T, E): of attention to these and perhaps other keys.
    """
    b, t, k, g, h = x.q.shape
    y, given = (
        z.astype(x.q.dtype).transpose(0, 3, 1, 2, 4).reshape(b, t, k * g, -1) for z in (out, cotangent)
    )
    lse = logsumexp.astype(jnp.float32).reshape(b, k * g, t)
    found = compat.cudnn_attention(
        x.q.reshape(b, t, k * g, h), x.k, x.v, lse, y, given, scale=spec.scale, causal=spec.causal
    )
    dq, dk, dv = (z.astype(jnp.float32) for z in found[:3])
    return Gradients(dq.reshape(x.q.shape), dk, dv, None)
