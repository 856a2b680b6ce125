"""Sorting over devices: each sorts its block, then blocks are merged and split by pairs, in rounds.

In a sorting network of comparators, each comparator may be replaced by a merge of two sorted blocks of which the lower
device keeps the lower half (G. Baudet and D. Stevenson, "Optimal sorting algorithms for parallel computers", 1978). The
network is K. E. Batcher's merge exchange (D. E. Knuth, The Art of Computer Programming 3, algorithm 5.2.2M), of
t (t + 1) / 2 rounds for n devices, t = log2 n rounded up: 6 rounds for 8 devices, 10 for 16, 21 for 64. A block is sent in
each; a gather sends n - 1 blocks, and each device then sorts all of them.

>>> [(r.distance, r.pairs) for r in rounds(4)]
[(2, ((0, 2), (1, 3))), (1, ((0, 1), (2, 3))), (1, ((1, 2),))]
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jshard._core.jaxcompat import to_common_vma
from jshard._core.layout import MeshAxes


@dataclasses.dataclass(frozen=True)
class Round:
    """Pairs of devices, the lower first, at one distance."""

    distance: int
    pairs: tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=64)
def rounds(n: int) -> tuple[Round, ...]:
    """The rounds of the network over `n` devices.

    >>> [len(rounds(n)) for n in (1, 2, 3, 8, 16, 64)]
    [0, 1, 3, 6, 10, 21]
    """
    out = []
    top = 1 << max(0, (n - 1).bit_length() - 1)
    p = top
    while p > 0 and n > 1:
        q, r, d = top, 0, p
        while True:
            out.append(Round(d, tuple((i, i + d) for i in range(n - d) if i & p == r)))
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1
    return tuple(out)


Sort = Callable[[Sequence[jax.Array], int], list[jax.Array]]
"""Sorts arrays together along a dimension."""


def sorted_over_devices(
    blocks: Sequence[jax.Array],
    dim: int,
    sort: Sort,
    axes: Sequence[str],
    mesh: MeshAxes,
    device: jax.Array,
    scope: Callable[[int], contextlib.AbstractContextManager[object]],
) -> list[jax.Array]:
    """This device's blocks of arrays that are sorted together along a dimension over all devices of `axes`.

    Arguments:

    - `sort`: the order. Where elements are equal in it, the first operand's come first.
    - `device`: this device's place along `axes`.
    - `scope`: the name scope of the k-th permute: one a round of each array, array by array.
    """
    own, network = sort(blocks, dim), rounds(mesh.size(*axes))
    for number, one in enumerate(network):
        sent = [pair for i, j in one.pairs for pair in ((i, j), (j, i))]
        other = []
        for k, x in enumerate(own):
            with scope(k * len(network) + number):
                other.append(lax.ppermute(x, tuple(axes), sent))
        is_lower, is_upper = (
            _is_among(side, mesh.size(*axes), device) for side in zip(*one.pairs, strict=True)
        )
        kept = _half(own, other, dim, sort, is_lower)
        own = [_where(is_lower | is_upper, new, x) for new, x in zip(sort(kept, dim), own, strict=True)]
    return own


def _half(
    own: Sequence[jax.Array], other: Sequence[jax.Array], dim: int, sort: Sort, is_lower: jax.Array
) -> list[jax.Array]:
    """The lower or upper half of two sorted blocks, in no order: element i of one against i from the end of the other."""
    pairs = []
    for x, y in zip(own, other, strict=True):
        y = lax.rev(y, (dim,))
        pairs.append(jnp.stack([_where(is_lower, x, y), _where(is_lower, y, x)]))
    return [_where(is_lower, both[0], both[1]) for both in sort(pairs, 0)]


def _where(condition: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    condition, x, y = to_common_vma([condition, x, y])
    return lax.select(jnp.broadcast_to(condition, x.shape), x, y)


def _is_among(devices: Sequence[int], n: int, device: jax.Array) -> jax.Array:
    return jnp.asarray(np.isin(np.arange(n), devices))[device]
