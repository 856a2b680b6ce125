"""What a device of a ring computes in one step, where queries and keys have equal positions and the mask is causal.

| keys of | blocks in order | zigzag order |
|---|---|---|
| the device itself | causal | causal: its two pieces are in order |
| an earlier device | all pairs | all queries, the first piece of the keys |
| a later device | none | the second piece of the queries, all keys |

So each case is attention whose mask is known when the program is compiled, which kernels of accelerators compute.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import PyTree
from jshard._rules.attention.definition import Attention, Operands
from jshard._rules.attention.kernels import Softmax, local_backward, local_forward
from jshard._rules.attention.online_softmax import Gradients, Part, no_gradients, no_part


def step_forward(spec: Attention, x: Operands, earlier: bool | jax.Array, *, zigzag: bool) -> Part:
    """Attention of a device's queries to the keys of another device, which is earlier in the ring or later."""
    whole, half = dataclasses.replace(spec, causal=False), x.q.shape[1] // 2

    def before(x: Operands) -> Part:
        return uniform(local_forward(whole, x.keys(0, half) if zigzag else x), (x, earlier))

    def after(x: Operands) -> Part:
        if not zigzag:
            return uniform(no_part(x), (x, earlier))
        parts = no_part(x.rows(0, half)), local_forward(whole, x.rows(half, half))
        return uniform(
            Part(*(jnp.concatenate(y, 3) for y in zip(*parts, strict=True))),
            (x, earlier),
        )

    return lax.cond(earlier, before, after, x)


def step_backward(
    spec: Attention,
    x: Operands,
    softmax: Softmax,
    earlier: bool | jax.Array,
    *,
    zigzag: bool,
    bias_gradient: bool,
) -> Gradients:
    """The gradients of a device's queries and of the keys of another device, which is earlier in the ring or later."""
    whole, half = dataclasses.replace(spec, causal=False), x.q.shape[1] // 2

    def before(x: Operands, softmax: Softmax) -> Gradients:
        part = x.keys(0, half) if zigzag else x
        found = local_backward(whole, part, softmax, bias_gradient=bias_gradient)
        if zigzag:
            k, v = (_grown(y, 1, half, front=False) for y in (found.k, found.v))
            bias = found.bias
            if bias is not None and bias.shape[4] > 1:
                bias = _grown(bias, 4, half, front=False)
            found = Gradients(found.q, k, v, bias)
        return uniform(found, (x, softmax, earlier))

    def after(x: Operands, softmax: Softmax) -> Gradients:
        if zigzag:  # the rule offers this order only where a bias has no rows
            part, known = x.rows(half, half), softmax.rows(half, half)
            found = local_backward(whole, part, known, bias_gradient=bias_gradient)
            found = found._replace(q=_grown(found.q, 1, half, front=True))
        else:
            found = no_gradients(x)
            found = found if bias_gradient else found._replace(bias=None)
        return uniform(found, (x, softmax, earlier))

    return lax.cond(earlier, before, after, x, softmax)


def uniform(state: PyTree, others: PyTree) -> PyTree:
    """A state typed as varying over all axes over which it or anything in `others` varies."""
    leaves, tree = jax.tree.flatten(state)
    return jax.tree.unflatten(tree, compat.to_common_vma([*leaves, *jax.tree.leaves(others)])[: len(leaves)])


def _grown(x: jax.Array, dim: int, size: int, *, front: bool) -> jax.Array:
    """`x` with `size` zeros before or after it along a dimension."""
    widths = [(0, 0, 0)] * x.ndim
    widths[dim] = (size, 0, 0) if front else (0, size, 0)
    return lax.pad(x, jnp.zeros((), x.dtype), widths)
