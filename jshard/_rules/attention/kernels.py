"""Attention on one device's blocks: by the online softmax of this package, or by the kernel of an accelerator.

On TPUs JAX's splash attention runs, on NVIDIA's GPUs cuDNN's attention, where these have what is asked for and where the
positions of queries and keys begin together or do not matter. Queries that begin later than the keys (their sequence is
cut, the keys are whole) go over blocks of keys, of which one is on the diagonal of the causal mask. Elsewhere the online
softmax runs. A program is traced with both, and keeps the one of the platform that it is compiled for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Index
from jshard._rules.attention.cudnn import cudnn_backward, cudnn_forward, cudnn_lacks
from jshard._rules.attention.definition import Attention, Operands
from jshard._rules.attention.online_softmax import (
    Gradients,
    Part,
    backward,
    forward,
    merged,
    no_gradients,
    no_part,
    summed_delta,
)
from jshard._rules.attention.splash import splash_backward, splash_forward, splash_lacks


class Softmax(NamedTuple):
    """What the backward pass knows of its queries, over all keys: (B, K, G, T), the last two (B, K, G, T, E)."""

    largest: jax.Array
    total: jax.Array
    out: jax.Array
    cotangent: jax.Array

    def rows(self, start: int, size: int) -> Softmax:
        """The same for `size` queries from `start`."""
        return Softmax(*(lax.slice_in_dim(y, start, start + size, axis=3) for y in self))


class Kernel(NamedTuple):
    """A kernel's passes: `forward(spec, x)`, and `backward(spec, x, logsumexp, out, cotangent)` over perhaps more keys."""

    platform: str
    forward: Callable[[Attention, Operands], Part]
    backward: Callable[[Attention, Operands, jax.Array, jax.Array, jax.Array], Gradients]


SPLASH = Kernel("tpu", splash_forward, splash_backward)
CUDNN = Kernel("cuda", cudnn_forward, cudnn_backward)


def local_forward(
    spec: Attention, x: Operands, row: Index = 0, column: Index = 0, *, kernels: bool = True
) -> Part:
    """Attention of one device's queries to one device's keys, which begin at positions `row` and `column`.

    `kernels`: whether the program is one device's, so that kernels may be in it.
    """
    default = functools.partial(forward, spec, row=row, column=column)
    if not kernels:
        run = {}
    elif aligned(spec, row, column):
        run = {k.platform: functools.partial(k.forward, spec) for k in kernels_for(spec, x)}
    elif _later_rows(spec, x, column):
        blocks = kernels_for(spec, x.keys(0, x.q.shape[1]))
        run = {k.platform: functools.partial(_forward_by_blocks, k, spec, row=row) for k in blocks}
    else:
        run = {}
    return lax.platform_dependent(x, **run, default=default) if run else default(x)


def local_backward(
    spec: Attention,
    x: Operands,
    softmax: Softmax,
    row: Index = 0,
    column: Index = 0,
    *,
    bias_gradient: bool = True,
    kernels: bool = True,
) -> Gradients:
    """The gradients of these queries and keys; `softmax` is over all keys, `kernels` as for `local_forward`."""

    def default(x: Operands, softmax: Softmax) -> Gradients:
        largest, total, out, cotangent = softmax
        found = backward(spec, x, largest, total, cotangent, summed_delta(cotangent, out), row, column)
        return found if bias_gradient else found._replace(bias=None)

    if not kernels:
        run = {}
    elif aligned(spec, row, column):
        run = {k.platform: functools.partial(_kernel_backward, k, spec) for k in kernels_for(spec, x)}
    elif _later_rows(spec, x, column):
        blocks = kernels_for(spec, x.keys(0, x.q.shape[1]))
        run = {k.platform: functools.partial(_backward_by_blocks, k, spec, row=row) for k in blocks}
    else:
        run = {}
    return lax.platform_dependent(x, softmax, **run, default=default) if run else default(x, softmax)


def aligned(spec: Attention, row: Index, column: Index) -> bool:
    """Whether queries and keys begin at one position, as far as is known when the program is traced, or it is all one."""
    if not spec.shift_invariant:
        return False
    if not spec.causal and spec.window is None:
        return True
    return isinstance(row, int) and isinstance(column, int) and row == column


def kernels_for(spec: Attention, x: Operands) -> list[Kernel]:
    """The kernels that compute this, if queries and keys begin at one position."""
    if compat.check_vma_enabled():  # whose types kernels do not have
        return []
    b, t, k, g, h = x.q.shape
    q = jax.ShapeDtypeStruct((b, t, k * g, h), x.q.dtype)
    lacks = ((SPLASH, splash_lacks(spec, q, x.k)), (CUDNN, cudnn_lacks(spec, q, x.k, x.v)))
    return [kernel for kernel, what in lacks if not what]


def _later_rows(spec: Attention, x: Operands, column: Index) -> bool:
    """Whether keys from the sequence's begin can be taken in blocks as long as these queries, which are one such block."""
    several = isinstance(column, int) and column == 0 and x.k.shape[1] % x.q.shape[1] == 0
    return several and spec.causal and spec.window is None and spec.shift_invariant


def _kernel_backward(kernel: Kernel, spec: Attention, x: Operands, softmax: Softmax) -> Gradients:
    """Of a query without any key the kernel gets a logsumexp of zero and a cotangent of zero."""
    reaches = softmax.total > 0
    logsumexp = jnp.where(reaches, softmax.largest + jnp.log(jnp.where(reaches, softmax.total, 1)), 0)
    given = jnp.where(reaches[..., None], softmax.cotangent, 0)
    return kernel.backward(spec, x, logsumexp, softmax.out, given)


def _forward_by_blocks(kernel: Kernel, spec: Attention, x: Operands, *, row: Index) -> Part:
    size, whole = x.q.shape[1], dataclasses.replace(spec, causal=False)
    own = row // size

    def body(total: Part, block: jax.Array) -> tuple[Part, None]:
        keys = x.keys(block * size, size)
        found = lax.switch(
            jnp.clip(own - block + 1, 0, 2),
            [no_part, functools.partial(kernel.forward, spec), functools.partial(kernel.forward, whole)],
            keys,
        )
        return merged(total, found), None

    return lax.scan(body, no_part(x), jnp.arange(x.k.shape[1] // size, dtype=np.int32))[0]


def _backward_by_blocks(
    kernel: Kernel, spec: Attention, x: Operands, softmax: Softmax, *, row: Index
) -> Gradients:
    size, whole = x.q.shape[1], dataclasses.replace(spec, causal=False)
    own = row // size

    def body(dq: jax.Array, block: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        keys = x.keys(block * size, size)
        found = lax.switch(
            jnp.clip(own - block + 1, 0, 2),
            [
                lambda x, softmax: no_gradients(x),
                functools.partial(_kernel_backward, kernel, spec),
                functools.partial(_kernel_backward, kernel, whole),
            ],
            keys,
            softmax,
        )
        return dq + found.q, (found.k, found.v)

    dq, keys = lax.scan(body, no_gradients(x).q, jnp.arange(x.k.shape[1] // size, dtype=np.int32))
    dk, dv = (jnp.moveaxis(y, 0, 1).reshape(y.shape[1], -1, *y.shape[3:]) for y in keys)
    return Gradients(dq, dk, dv, None)
