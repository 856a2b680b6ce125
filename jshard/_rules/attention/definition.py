"""What attention computes: its parameters, its operands in blocks, which queries may attend to which keys, its FLOPs.

Queries are `(batch..., T, N, H)`, keys `(batch..., S, K, H)`, values `(batch..., S, K, E)`. Inside, the batch is one
dimension and the N query heads are K groups of G, so that a group shares one key and value head:
`logits[b, k, g, t, s] = scale q[b, t, k, g] . k[b, s, k] + bias`.

>>> attended_pairs(4, 4, causal=True, window=None), attended_pairs(4, 4, causal=False, window=(1, 0))
(10, 7)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jshard._core.jax_types import Index


BLOCK = 512
"""Queries and keys of a block: its logits are (B, N, 512, 512)."""


@dataclasses.dataclass(frozen=True)
class Attention:
    """The parameters of one attention, and which of its optional operands it has.

    - `scale`: of the logits.
    - `causal`: query i attends to keys up to i.
    - `window`: (left, right): query i attends to keys i - left to i + right.
    - `num_keys`: keys from this position on are padding, and are not attended to; None if there is none.
    """

    scale: float
    causal: bool = False
    window: tuple[int, int] | None = None
    has_bias: bool = False
    has_mask: bool = False
    has_segments: bool = False
    num_keys: int | None = None

    @property
    def shift_invariant(self) -> bool:
        """Whether only the distance of a query and a key matters, not their positions."""
        return self.num_keys is None

    @property
    def num_operands(self) -> int:
        """Operands of the forward pass."""
        return 3 + self.has_bias + self.has_mask + 2 * self.has_segments

    def flops(self, q: Sequence[int], k: Sequence[int], v: Sequence[int], *, backward: bool = False) -> float:
        """FLOPs of the products, of the pairs that causality and window allow, for operands of these shapes.

        Two forward; five backward: the logits again, the gradients of probabilities, values, queries and keys.

        >>> Attention(1.0).flops((2, 16, 4, 8), (2, 16, 1, 8), (2, 16, 1, 8)) == 2 * 2 * 2 * 4 * 16 * 16 * 8
        True
        """
        pairs = attended_pairs(q[-3], k[-3], causal=self.causal, window=self.window)
        per_pair = 3 * q[-1] + 2 * v[-1] if backward else q[-1] + v[-1]
        return 2.0 * math.prod(q[:-3]) * q[-2] * pairs * per_pair


class Operands(NamedTuple):
    """The operands on one device: `q` (B, T, K, G, H), `k` (B, S, K, H), `v` (B, S, K, E); the others may be absent.

    `bias` and `mask` are (B, K, G, T, S), each dimension whole or of length one; segments (B, T) and (B, S).
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None = None
    mask: jax.Array | None = None
    q_segments: jax.Array | None = None
    k_segments: jax.Array | None = None

    def rows(self, start: Index, size: int) -> Operands:
        """The operands for `size` queries from `start`."""
        return self._replace(
            q=lax.dynamic_slice_in_dim(self.q, start, size, 1),
            bias=sliced(self.bias, 3, start, size),
            mask=sliced(self.mask, 3, start, size),
            q_segments=sliced(self.q_segments, 1, start, size),
        )

    def columns(self, start: Index, size: int) -> Operands:
        """What goes with `size` keys from `start`, without keys and values themselves."""
        return self._replace(
            bias=sliced(self.bias, 4, start, size),
            mask=sliced(self.mask, 4, start, size),
            k_segments=sliced(self.k_segments, 1, start, size),
        )

    def keys(self, start: Index, size: int) -> Operands:
        """The operands for `size` keys from `start`."""
        return self.columns(start, size)._replace(
            k=lax.dynamic_slice_in_dim(self.k, start, size, 1),
            v=lax.dynamic_slice_in_dim(self.v, start, size, 1),
        )


def sliced(x: jax.Array | None, dim: int, start: Index, size: int) -> jax.Array | None:
    """A slice along a dimension, which a broadcast one (of length one) has whole."""
    return x if x is None or x.shape[dim] == 1 else lax.dynamic_slice_in_dim(x, start, size, dim)


def softmax_dtype(dtype: np.dtype) -> np.dtype:
    """The type of logits, softmax and sums: at least float32."""
    return jnp.promote_types(dtype, np.float32)


def logits(spec: Attention, x: Operands) -> jax.Array:
    """(B, K, G, T, S) logits with the bias, unmasked."""
    s = jnp.einsum("btkgh,bskh->bkgts", x.q, x.k, preferred_element_type=softmax_dtype(x.q.dtype))
    s = s * jnp.asarray(spec.scale, s.dtype)
    return s if x.bias is None else (s + x.bias).astype(s.dtype)


def allowed(spec: Attention, x: Operands, rows: jax.Array, columns: jax.Array) -> jax.Array | None:
    """(B, K, G, T, S), broadcast, whether a query attends to a key; None if all do.

    Arguments:

    - `rows`, `columns`: positions of the queries (T,) and of the keys (S,).
    """
    out: list[jax.Array] = []
    distance = columns[None, :] - rows[:, None]
    if spec.num_keys is not None:
        out.append((columns < spec.num_keys)[None, None, None, None])
    if spec.causal:
        out.append((distance <= 0)[None, None, None])
    if spec.window is not None:
        left, right = spec.window
        out.append(((distance >= -left) & (distance <= right))[None, None, None])
    if x.mask is not None:
        out.append(x.mask)
    if x.q_segments is not None and x.k_segments is not None:
        out.append((x.q_segments[:, :, None] == x.k_segments[:, None, :])[:, None, None])
    together = None
    for one in out:
        together = one if together is None else together & one
    return together


def may_attend(spec: Attention, rows: tuple[Index, Index], columns: tuple[Index, Index]) -> bool | jax.Array:
    """Whether causality and window let any query between two positions attend to any key between two positions.

    Positions are the first and the last; the answer is a `bool` where all are known.
    """
    out: bool | jax.Array = True
    if spec.num_keys is not None:
        out = columns[0] < spec.num_keys
    if spec.causal:
        out = out & (columns[0] <= rows[1])
    if spec.window is not None:
        left, right = spec.window
        out = out & (columns[1] >= rows[0] - left) & (columns[0] <= rows[1] + right)
    return out


def attended_pairs(queries: int, keys: int, *, causal: bool, window: tuple[int, int] | None) -> int:
    """How many pairs of a query and a key causality and window allow."""
    i = np.arange(queries, dtype=np.int64)
    first, last = np.zeros_like(i), np.full_like(i, keys - 1)
    if causal:
        last = np.minimum(last, i)
    if window is not None:
        first, last = np.maximum(first, i - window[0]), np.minimum(last, i + window[1])
    return int(np.maximum(0, last - first + 1).sum())
