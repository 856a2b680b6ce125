"""Which kernel computes an attention's blocks on an accelerator, and what keeps a kernel from it: what a plan says of it.

The same questions as in `kernels.py`, asked of the plan's shapes in place of a traced program. A sharded function that is
differentiated from outside has no kernels, which is not known when it is planned.

>>> import jax
>>> q = jax.ShapeDtypeStruct((1, 4096, 8, 128), "bfloat16")
>>> kernel_of(Attention(1.0, causal=True), (q, q, q), (4, 4), "tpu", same=True)
'splash attention'
>>> kernel_of(Attention(1.0, causal=True), (q, q, q), (1, 4), "gpu")
'online softmax: positions of queries and keys that are known on each device only'
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jshard._core.layout import ArrayType
from jshard._rules.attention.cudnn import cudnn_lacks
from jshard._rules.attention.definition import Attention
from jshard._rules.attention.splash import splash_lacks


_POSITIONS = "positions of queries and keys that are known on each device only"


def kernel_of(
    spec: Attention,
    operands: Sequence[ArrayType],
    pieces: tuple[int, int],
    platform: str,
    *,
    same: bool = False,
    zigzag: bool = False,
) -> str:
    """The name of what computes it; after a colon, what the platform's kernel has not.

    Arguments:

    - `operands`: whole queries, keys and values, as the primitive has them.
    - `pieces`: into how many the queries and the keys are cut.
    - `platform`: "tpu" or "gpu"; any other has no kernel.
    - `same`, `zigzag`: whether both sequences are cut along the same axes, and in zigzag order.
    """
    if platform not in ("tpu", "gpu"):
        return ""
    lacks = _lacks(spec, operands, pieces, platform, same, zigzag)
    if lacks:
        return f"online softmax: {lacks}"
    return "splash attention" if platform == "tpu" else "cuDNN"


def _lacks(
    spec: Attention,
    operands: Sequence[ArrayType],
    pieces: tuple[int, int],
    platform: str,
    same: bool,
    zigzag: bool,
) -> str:
    if not spec.shift_invariant:
        return "keys that are padding"
    q, k, v = operands[:3]
    queries, keys = q.shape[-3] // pieces[0], k.shape[-3] // pieces[1]

    def local(spec: Attention, queries: int, keys: int) -> str:
        short = [_resized(x, n) for x, n in ((q, queries), (k, keys), (v, keys))]
        return splash_lacks(spec, *short[:2]) if platform == "tpu" else cudnn_lacks(spec, *short)

    if pieces == (1, 1) or not spec.causal and spec.window is None:
        return local(spec, queries, keys)
    if spec.window is not None:
        return _POSITIONS
    if pieces[1] == 1 and keys % queries == 0:
        return local(spec, queries, queries)
    if same and q.shape[-3] == k.shape[-3]:
        half = queries // 2 if zigzag else queries
        return local(spec, queries, keys) or local(spec, half, half)
    return _POSITIONS


def _resized(x: ArrayType, length: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*x.shape[:-3], length, *x.shape[-2:]), x.dtype)
