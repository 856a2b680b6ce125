"""Ring attention: both sequences are cut along the same mesh axes, and keys and values pass from device to device.

In each of n steps a device computes on the block of keys that it holds, while it sends that block to the next device.
Forward, the parts are combined by their sums. Backward, the gradients of a block of keys travel behind it, and arrive
where it belongs: n - 1 permutes each of keys, values and of their gradients. A block that causality or the window
rules out costs no work, but the devices of a ring wait for each other.

Under a causal mask the last device has nearly twice an even share of the work. In zigzag order each device has two
pieces of the sequence, one from the front and its mirror image from the back, which are the same work for all: the
operator exchanges halves before and after. Compilers skip blocks that no query may attend to.

Sources: H. Liu, M. Zaharia, P. Abbeel, "Ring attention with blockwise transformers for near-infinite context", ICLR
2024, arXiv 2310.01889; W. Brandon et al., "Striped attention", arXiv 2311.09431; the zigzag order is that of Llama 3's
context parallelism (arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jshard._core.jax_types import Index, PyTree
from jshard._core.layout import MeshAxes
from jshard._rules.attention.blocks import arranged, arranged_back, by_head
from jshard._rules.attention.definition import Attention, Operands
from jshard._rules.attention.kernels import Softmax, local_backward, local_forward
from jshard._rules.attention.online_softmax import Gradients, Part, merged
from jshard._rules.attention.ring_steps import step_backward, step_forward, uniform
from jshard._rules.registry import block_index


@dataclasses.dataclass(frozen=True, eq=False)
class Ring:
    """The devices of a ring, and where this device's sequences begin.

    - `axes`: mesh axes, major first.
    - `row`: position of this device's first query.
    - `column`: position of the first key of the ring's first device.
    - `scope`: the name scope of the ring's k-th collective.
    - `zigzag`: whether device i of n has the pieces i and 2n - 1 - i of 2n, instead of consecutive ones.
    - `equal_positions`: whether a device's queries and its own keys have the same positions.
    - `forth`: whether the next device is the one of the next number, or of the number before.
    """

    axes: tuple[str, ...]
    mesh: MeshAxes
    row: Index
    column: Index
    scope: Callable[[int], contextlib.AbstractContextManager[object]]
    zigzag: bool = False
    equal_positions: bool = False
    forth: bool = True

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.mesh.size(*self.axes)

    def holder(self, step: Index) -> Index:
        """The device whose block of keys this device has in a step."""
        back = -step if self.forth else step
        return (block_index(self.axes, self.mesh) + back) % self.size

    def is_earlier(self, step: Index) -> jax.Array:
        """Whether the keys of a step come before all of this device's queries, but not its own keys."""
        return jnp.asarray(self.holder(step) < self.holder(0))

    def own(self, step: Index) -> bool:
        """Whether the keys of a step are known to be this device's own."""
        return isinstance(step, int) and step == 0

    def knows_masks(self, spec: Attention) -> bool:
        """Whether the mask of each step is one of those of `ring_steps`."""
        return spec.causal and spec.window is None and spec.shift_invariant and self.equal_positions

    def send(self, x: jax.Array, number: int) -> jax.Array:
        """What the device before sent, where this one sends `x` to the next; as collective `number` of the operator."""
        pairs = [(i, (i + (1 if self.forth else -1)) % self.size) for i in range(self.size)]
        with self.scope(number):
            return lax.ppermute(x, self.axes, self._listed(pairs))

    def starts(self, step: Index, size: int) -> list[tuple[Index, int]]:
        """(start, length) of the pieces that this device has in a step, in the sequence of the ring."""
        holder = self.holder(step)
        if not self.zigzag:
            return [(holder * size, size)]
        return [(holder * (size // 2), size // 2), ((2 * self.size - 1 - holder) * (size // 2), size // 2)]

    def columns(self, step: Index, size: int) -> Index:
        """Positions of the keys of a step: of the first, or of each."""
        pieces = self.starts(step, size)
        if not self.zigzag:
            return self.column + pieces[0][0]
        return jnp.concatenate([start + jnp.arange(n, dtype=np.int32) for start, n in pieces])

    def rows(self, size: int) -> Index:
        """Positions of this device's queries: of the first, or of each."""
        return self.columns(0, size) if self.zigzag else self.row

    def into_zigzag(self, x: jax.Array, dim: int, number: int) -> jax.Array:
        """This device's pieces in zigzag order, of a tensor cut in order; collectives `number` and the next."""
        even, odd = jnp.split(x, 2, dim)
        even, odd = (self._exchange(h, number + k, k, False) for k, h in enumerate((even, odd)))
        return jnp.concatenate(self._by_parity(even, odd), dim)

    def out_of_zigzag(self, x: jax.Array, dim: int, number: int) -> jax.Array:
        """The inverse of `into_zigzag`."""
        front, back = jnp.split(x, 2, dim)
        halves = self._by_parity(front, back)
        return jnp.concatenate([self._exchange(h, number + k, k, True) for k, h in enumerate(halves)], dim)

    def _by_parity(self, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Front and back piece from the even and odd one, and the other way round: they swap on odd devices."""
        even = self.holder(0) % 2 == 0
        return jnp.where(even, a, b), jnp.where(even, b, a)

    def _exchange(self, x: jax.Array, number: int, parity: int, back: bool) -> jax.Array:
        """Every device's even (odd) piece 2 i + parity, to the device that has it in zigzag order, or back."""
        n = self.size
        pairs = [(i, p if (p := 2 * i + parity) < n else 2 * n - 1 - p) for i in range(n)]
        with self.scope(number):
            return lax.ppermute(x, self.axes, self._listed([(b, a) for a, b in pairs] if back else pairs))

    def _listed(self, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Pairs of a permute in an order that differs between the passes, since compilers merge equal permutes."""
        return pairs if self.forth else pairs[::-1]


def ring_forward(
    spec: Attention, arrays: Sequence[jax.Array], ring: Ring, kv_heads: jax.Array | None
) -> Part:
    """Attention of this device's queries to the keys of all devices of a ring.

    Arguments:

    - `arrays`: the primitive's operands on this device; of bias, mask and segments, all columns of the ring's keys.
    - `kv_heads`: as for `arranged`.
    """
    if not ring.zigzag:
        return _forward(spec, arrays, ring, kv_heads)
    arrays, number = _inputs_into_zigzag(spec, arrays, ring, 2)
    total = _forward(spec, arrays, ring, kv_heads)
    out = ring.out_of_zigzag(total.out.astype(arrays[0].dtype), 3, number)
    largest = ring.out_of_zigzag(total.largest, 3, number + 2)
    return Part(out, largest, ring.out_of_zigzag(total.total, 3, number + 4))


def _inputs_into_zigzag(
    spec: Attention, arrays: Sequence[jax.Array], ring: Ring, number: int
) -> tuple[list[jax.Array], int]:
    """Queries, keys, values and the queries' segments in zigzag order, and the number of the next collective."""
    out = list(arrays)
    for i in (0, 1, 2, *([len(out) - 2] if spec.has_segments else [])):
        out[i] = ring.into_zigzag(out[i], out[i].ndim - (3 if i < 3 else 1), number)
        number += 2
    return out, number


def _forward(spec: Attention, arrays: Sequence[jax.Array], ring: Ring, kv_heads: jax.Array | None) -> Part:
    def part(keys: Sequence[jax.Array], step: Index) -> Part:
        x, column = _block(spec, arrays, keys, ring, step, kv_heads)
        if not ring.knows_masks(spec):
            return local_forward(spec, x, ring.rows(x.q.shape[1]), column)
        if ring.own(step):
            return local_forward(spec, x)
        return step_forward(spec, x, ring.is_earlier(step), zigzag=ring.zigzag)

    def body(state: PyTree, step: jax.Array) -> tuple[PyTree, None]:
        keys, total = state
        following = [ring.send(x, i) for i, x in enumerate(keys)]
        return (following, merged(total, part(keys, step))), None

    keys = list(arrays[1:3])
    following = [ring.send(x, i) for i, x in enumerate(keys)]
    total = part(keys, 0)
    state = uniform((following, total), (arrays, ring.row, ring.holder(0)))
    if ring.size > 2:
        state, _ = lax.scan(body, state, jnp.arange(1, ring.size - 1, dtype=np.int32))
    keys, total = state
    return merged(total, part(keys, ring.size - 1))


def ring_backward(
    spec: Attention,
    arrays: Sequence[jax.Array],
    results: Sequence[jax.Array],
    ring: Ring,
    kv_heads: jax.Array | None,
    *,
    bias_gradient: bool,
) -> list[jax.Array]:
    """Gradients of this device's queries, keys, values and, if wanted, bias, in the type of the softmax.

    Arguments:

    - `arrays`, `kv_heads`: as for `ring_forward`.
    - `results`: of this device's queries the result (batch..., T, N, E), largest logit and sum (batch..., N, T) over all
        keys of the ring (and of other devices, if keys are cut further), and the cotangent.
    """
    # XLA would take the forward pass's equal permutes, and hold what arrived until here. So blocks pass the other way round,
    # and behind a barrier, which the compiler for CPUs of JAX 0.10 removes before it merges.
    ring = dataclasses.replace(ring, forth=not ring.forth)
    arrays, results = lax.optimization_barrier((list(arrays), list(results)))
    if not ring.zigzag:
        return _backward(spec, arrays, results, ring, kv_heads, bias_gradient)
    arrays, number = _inputs_into_zigzag(spec, arrays, ring, 4)
    moved = []
    for x, dim in zip(results, (3, 1, 1, 3), strict=True):
        moved.append(ring.into_zigzag(x, x.ndim - dim, number))
        number += 2
    found = _backward(spec, arrays, moved, ring, kv_heads, bias_gradient)
    for i in range(3):
        g = found[i].astype(arrays[i].dtype)
        found[i] = ring.out_of_zigzag(g, g.ndim - 3, number)
        number += 2
    return found


def _backward(
    spec: Attention,
    arrays: Sequence[jax.Array],
    results: Sequence[jax.Array],
    ring: Ring,
    kv_heads: jax.Array | None,
    bias_gradient: bool,
) -> list[jax.Array]:
    out, cotangent = results[0], results[-1]

    def of_step(x: Operands, softmax: Softmax, column: Index, step: Index) -> Gradients:
        how = {"bias_gradient": bias_gradient}
        if not ring.knows_masks(spec):
            return local_backward(spec, x, softmax, ring.rows(out.shape[-3]), column, **how)
        if ring.own(step):
            return local_backward(spec, x, softmax, **how)
        return step_backward(spec, x, softmax, ring.is_earlier(step), zigzag=ring.zigzag, **how)

    def gradients(keys: Sequence[jax.Array], step: Index) -> list[jax.Array]:
        x, column = _block(spec, arrays, keys, ring, step, kv_heads)
        b, _, k, g, _ = x.q.shape
        largest, total = (y.reshape(b, k, g, y.shape[-1]) for y in results[1:3])
        softmax = Softmax(largest, total, by_head(out, k), by_head(cotangent, k))
        found = of_step(x, softmax, column, step)
        narrow = [
            *arrays[:1],
            *keys,
            *_columns_of(spec, arrays, ring, step, keys[0].shape[-3])[:bias_gradient],
        ]
        return arranged_back(spec, found, narrow, kv_heads)

    def add(sums: list[jax.Array], found: Sequence[jax.Array], step: Index) -> list[jax.Array]:
        """The gradients of what stays on this device: queries, and the columns of the bias."""
        if not bias_gradient or found[1].shape[-1] == sums[1].shape[-1]:
            return [x + y for x, y in zip(sums, found, strict=True)]
        bias, at, last = sums[1], 0, sums[1].ndim - 1
        for start, size in ring.starts(step, found[1].shape[-1]):
            new = lax.dynamic_slice_in_dim(bias, start, size, last) + found[1][..., at : at + size]
            bias, at = lax.dynamic_update_slice_in_dim(bias, new, start, last), at + size
        return [sums[0] + found[0], bias]

    def body(state: PyTree, step: jax.Array) -> tuple[PyTree, None]:
        keys, travelling, staying = state
        following = [ring.send(x, i) for i, x in enumerate(keys)]
        dq, dk, dv, *dbias = gradients(keys, step)
        travelling = [
            ring.send(x + y, 2 + i) for i, (x, y) in enumerate(zip(travelling, (dk, dv), strict=True))
        ]
        return (following, travelling, add(staying, [dq, *dbias], step)), None

    keys = list(arrays[1:3])
    following = [ring.send(x, i) for i, x in enumerate(keys)]
    dq, *own, dbias = [*gradients(keys, 0), None][:4]
    staying = [jnp.zeros_like(dq)] + ([jnp.zeros(arrays[3].shape, dq.dtype)] if bias_gradient else [])
    staying = add(staying, [dq] + ([dbias] if dbias is not None else []), 0)
    # What a device finds for its own keys stays: the gradients of others set out from the next device.
    travelling = [jnp.zeros_like(x) for x in own]
    state = uniform((following, travelling, staying), (arrays, results, ring.row, ring.holder(0)))
    if ring.size > 2:
        state, _ = lax.scan(body, state, jnp.arange(1, ring.size - 1, dtype=np.int32))
    keys, travelling, staying = state
    dq, dk, dv, *rest = gradients(keys, ring.size - 1)
    arrived = [ring.send(x + y, 2 + i) for i, (x, y) in enumerate(zip(travelling, (dk, dv), strict=True))]
    staying = add(staying, [dq, *rest], ring.size - 1)
    return [staying[0], *(x + y for x, y in zip(own, arrived, strict=True)), *staying[1:]]


def _block(
    spec: Attention,
    arrays: Sequence[jax.Array],
    keys: Sequence[jax.Array],
    ring: Ring,
    step: Index,
    kv_heads: jax.Array | None,
) -> tuple[Operands, Index]:
    """The operands for the keys of a step, and the position of the first of them."""
    size = keys[0].shape[-3]
    others = _columns_of(spec, arrays, ring, step, size)
    return arranged(spec, (arrays[0], *keys, *others), kv_heads), ring.columns(step, size)


def _columns_of(
    spec: Attention, arrays: Sequence[jax.Array], ring: Ring, step: Index, size: int
) -> list[jax.Array]:
    """Bias, mask and segments, as far as they go with the keys of a step."""
    pieces, out = ring.starts(step, size), list(arrays[3:])
    by_column = [*range(spec.has_bias + spec.has_mask), *([len(out) - 1] if spec.has_segments else [])]
    for i in by_column:
        if out[i].shape[-1] > 1:
            cut = [lax.dynamic_slice_in_dim(out[i], a, n, out[i].ndim - 1) for a, n in pieces]
            out[i] = cut[0] if len(cut) == 1 else jnp.concatenate(cut, -1)
    return out
