"""Attentions of many kinds, and their plain definition with an array of all pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def plain_attention(
    q: Any, k: Any, v: Any, *, causal: bool = False, mask: Any = None, bias: Any = None, scale: Any = None,
    segment_ids: Any = None, window: Any = None,
) -> jax.Array:  # fmt: skip
    """Attention by its definition; zeros for a query that may attend to no key."""
    groups = q.shape[-2] // k.shape[-2]
    k, v = (jnp.repeat(x, groups, -2) for x in (k, v))
    dtype = jnp.promote_types(q.dtype, np.float32)
    s = jnp.einsum("...tnh,...snh->...nts", q, k, preferred_element_type=dtype)
    s = s * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if bias is None else s + bias
    rows, columns = np.arange(s.shape[-2])[:, None], np.arange(s.shape[-1])[None]
    may = np.ones(s.shape[-2:], bool)
    if causal:
        may &= columns <= rows
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
        may &= (columns >= rows - left) & (columns <= rows + right)
    may = jnp.broadcast_to(may, s.shape)
    if mask is not None:
        may = may & mask
    if segment_ids is not None:
        ours, theirs = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        may = may & (ours[..., :, None] == theirs[..., None, :])[..., None, :, :]
    largest = jnp.where(may, s, -jnp.inf).max(-1, keepdims=True)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    p = jnp.where(may, jnp.exp(jnp.where(may, s - jax.lax.stop_gradient(largest), 0)), 0)
    total = p.sum(-1, keepdims=True)
    p = p / jnp.where(total > 0, total, 1)
    return jnp.einsum("...nts,...snh->...tnh", p.astype(v.dtype), v)


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (5, 0)},
    "window_both": {"window": (3, 6)},
    "mask": {"mask": (2, 1, 16, 16)},
    "padding": {"mask": (2, 1, 1, 16)},
    "causal_padding": {"causal": True, "mask": (2, 1, 1, 16), "bias": (1, 4, 1, 16)},
    "bias": {"bias": (2, 4, 16, 16), "causal": True},
    "bias_heads": {"bias": (1, 4, 16, 16)},
    "bias_keys": {"bias": (1, 1, 1, 16)},
    "bias_rows": {"bias": (2, 1, 16, 1), "window": (4, 4)},
    "segments": {"segment_ids": True, "causal": True, "mask": (2, 1, 1, 16), "bias": (1, 4, 1, 16)},
    "all": {"segment_ids": True, "causal": True, "window": 7, "mask": (1, 4, 16, 16), "bias": (2, 4, 1, 16), "scale": 0.3},
}  # fmt: skip
"""Keyword arguments; a tuple of a mask or bias is its shape."""


def operands(
    kind: str, shape: Sequence[int] = (2, 16, 4, 8), kv_heads: int = 2, keys: int | None = None,
    dtype: Any = np.float64, seed: int = 0,
) -> tuple[list[jax.Array], dict[str, Any], dict[str, Any]]:  # fmt: skip
    """Queries, keys and values; static keyword arguments; keyword arguments that are arrays."""
    rng = np.random.default_rng(seed)
    *batch, t, n, h = shape
    s = t if keys is None else keys
    arrays = [
        jnp.asarray(rng.normal(size=d), dtype)
        for d in ((*batch, t, n, h), (*batch, s, kv_heads, h), (*batch, s, kv_heads, h))
    ]
    full = (*batch, n, t, s)
    static: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for key, value in KINDS[kind].items():
        if key in ("mask", "bias"):
            dims = tuple(1 if d == 1 else size for d, size in zip(value, full, strict=True))
            drawn = rng.random(dims) > 0.3 if key == "mask" else rng.normal(size=dims)
            extra[key] = jnp.asarray(drawn, bool if key == "mask" else dtype)
        elif key == "segment_ids":
            extra[key] = tuple(
                jnp.asarray(np.sort(rng.integers(0, 3, (*batch, size)), -1), np.int32) for size in (t, s)
            )
        else:
            static[key] = value
    return arrays, static, extra
