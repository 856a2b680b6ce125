"""Ring attention: both sequences are cut along the same mesh axes, and keys and values pass from device to device.

In each of n rounds a device computes on the block of keys that it holds, while it sends that block to the next device.
Forward, the parts are combined by their logsumexp. Backward, the gradients of a block of keys travel behind it, and
arrive where it belongs: n - 1 permutes each of keys, values and of their gradients. A block that causality or the window
rules out costs no work, but the devices of a ring wait for each other.

Source: H. Liu, M. Zaharia, P. Abbeel, "Ring attention with blockwise transformers for near-infinite context", ICLR 2024,
arXiv 2310.01889.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jshard import _jaxcompat as compat
from jshard._core.jax_types import Index, PyTree
from jshard._core.layout import MeshAxes
from jshard._rules.attention.blocks import arranged, arranged_back, by_head
from jshard._rules.attention.definition import Attention, Operands
from jshard._rules.attention.kernels import local_backward, local_forward
from jshard._rules.attention.online_softmax import Part, merged
from jshard._rules.registry import block_index


@dataclasses.dataclass(frozen=True, eq=False)
class Ring:
    """The devices of a ring, and where this device's sequences begin.

    - `axes`: mesh axes, major first.
    - `row`: position of this device's first query.
    - `column`: position of the first key of the ring's first device.
    - `scope`: the name scope of the ring's k-th collective.
    """

    axes: tuple[str, ...]
    mesh: MeshAxes
    row: Index
    column: Index
    scope: Callable[[int], contextlib.AbstractContextManager[object]]

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.mesh.size(*self.axes)

    def holder(self, turn: Index) -> Index:
        """The device whose block of keys this device has in a round."""
        return (block_index(self.axes, self.mesh) - turn) % self.size

    def send(self, x: jax.Array, number: int) -> jax.Array:
        """What the device before sent, where this one sends `x` to the next; as collective `number` of the operator."""
        pairs = [(i, (i + 1) % self.size) for i in range(self.size)]
        with self.scope(number):
            return lax.ppermute(x, self.axes, pairs)


def ring_forward(
    spec: Attention, arrays: Sequence[jax.Array], ring: Ring, kv_heads: jax.Array | None
) -> Part:
    """Attention of this device's queries to the keys of all devices of a ring.

    Arguments:

    - `arrays`: the primitive's operands on this device; of bias, mask and segments, all columns of the ring's keys.
    - `kv_heads`: as for `arranged`.
    """

    def part(keys: Sequence[jax.Array], turn: Index) -> Part:
        x, column = _block(spec, arrays, keys, ring, turn, kv_heads)
        return local_forward(spec, x, ring.row, column)

    def body(state: PyTree, turn: jax.Array) -> tuple[PyTree, None]:
        keys, total = state
        following = [ring.send(x, i) for i, x in enumerate(keys)]
        return (following, merged(total, part(keys, turn))), None

    keys = list(arrays[1:3])
    following = [ring.send(x, i) for i, x in enumerate(keys)]
    total = part(keys, 0)
    state = _uniform((following, total), (arrays, ring.row, ring.holder(0)))
    if ring.size > 2:
        state, _ = lax.scan(body, state, np.arange(1, ring.size - 1, dtype=np.int32))
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
    - `results`: of this device's queries the result (batch..., T, N, E), its logsumexp (batch..., N, T) over all keys
        of the ring (and of other devices, if keys are cut further), and the cotangent.
    """
    out, lse, cotangent = results

    def gradients(keys: Sequence[jax.Array], turn: Index) -> list[jax.Array]:
        x, column = _block(spec, arrays, keys, ring, turn, kv_heads)
        b, _, k, g, _ = x.q.shape
        found = local_backward(
            spec,
            x,
            lse.reshape(b, k, g, lse.shape[-1]),
            by_head(out, k),
            by_head(cotangent, k),
            ring.row,
            column,
            bias_gradient=bias_gradient,
        )
        narrow = [*arrays[:1], *keys, *_columns_of(spec, arrays, ring, turn, keys[0].shape[-3])[:bias_gradient]]
        return arranged_back(spec, found, narrow, kv_heads)

    def add(sums: list[jax.Array], found: Sequence[jax.Array], turn: Index) -> list[jax.Array]:
        """The gradients of what stays on this device: queries, and the columns of the bias."""
        if not bias_gradient or found[1].shape[-1] == sums[1].shape[-1]:
            return [x + y for x, y in zip(sums, found, strict=True)]
        bias, part = sums[1], found[1]
        start = ring.holder(turn) * part.shape[-1]
        old = lax.dynamic_slice_in_dim(bias, start, part.shape[-1], bias.ndim - 1)
        return [sums[0] + found[0], lax.dynamic_update_slice_in_dim(bias, old + part, start, bias.ndim - 1)]

    def body(state: PyTree, turn: jax.Array) -> tuple[PyTree, None]:
        keys, travelling, staying = state
        following = [ring.send(x, i) for i, x in enumerate(keys)]
        dq, dk, dv, *dbias = gradients(keys, turn)
        travelling = [ring.send(x + y, 2 + i) for i, (x, y) in enumerate(zip(travelling, (dk, dv), strict=True))]
        return (following, travelling, add(staying, [dq, *dbias], turn)), None

    keys = list(arrays[1:3])
    following = [ring.send(x, i) for i, x in enumerate(keys)]
    dq, *own, dbias = [*gradients(keys, 0), None][: 4]
    staying = [jnp.zeros_like(dq)] + ([jnp.zeros(arrays[3].shape, dq.dtype)] if bias_gradient else [])
    staying = add(staying, [dq] + ([dbias] if dbias is not None else []), 0)
    # What a device finds for its own keys stays: the gradients of others set out from the next device.
    travelling = [jnp.zeros_like(x) for x in own]
    state = _uniform((following, travelling, staying), (arrays, results, ring.row, ring.holder(0)))
    if ring.size > 2:
        state, _ = lax.scan(body, state, np.arange(1, ring.size - 1, dtype=np.int32))
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
    turn: Index,
    kv_heads: jax.Array | None,
) -> tuple[Operands, Index]:
    """The operands for the keys of a round, and the position of the first of them."""
    size = keys[0].shape[-3]
    others = _columns_of(spec, arrays, ring, turn, size)
    return arranged(spec, (arrays[0], *keys, *others), kv_heads), ring.column + ring.holder(turn) * size


def _columns_of(
    spec: Attention, arrays: Sequence[jax.Array], ring: Ring, turn: Index, size: int
) -> list[jax.Array]:
    """Bias, mask and segments, as far as they go with the keys of a round."""
    start, out = ring.holder(turn) * size, list(arrays[3:])
    by_column = [*range(spec.has_bias + spec.has_mask), *([len(out) - 1] if spec.has_segments else [])]
    for i in by_column:
        if out[i].shape[-1] > 1:
            out[i] = lax.dynamic_slice_in_dim(out[i], start, size, out[i].ndim - 1)
    return out


def _uniform(state: PyTree, others: PyTree) -> PyTree:
    """A loop's state typed as varying over all axes over which anything in the loop varies."""
    leaves, tree = jax.tree.flatten(state)
    return jax.tree.unflatten(tree, compat.to_common_vma([*leaves, *jax.tree.leaves(others)])[: len(leaves)])
