"""Attention on one device's blocks: by the online softmax of this package, or by the kernel of an accelerator."""

from __future__ import annotations

import jax

from jshard._core.jax_types import Index
from jshard._rules.attention.definition import Attention, Operands
from jshard._rules.attention.online_softmax import Gradients, Part, backward, forward, summed_delta


def local_forward(spec: Attention, x: Operands, row: Index = 0, column: Index = 0) -> Part:
    """Attention of one device's queries to one device's keys, which begin at positions `row` and `column`."""
    return forward(spec, x, row, column)


def local_backward(
    spec: Attention,
    x: Operands,
    lse: jax.Array,
    out: jax.Array,
    cotangent: jax.Array,
    row: Index = 0,
    column: Index = 0,
    *,
    bias_gradient: bool = True,
) -> Gradients:
    """The gradients of these queries and keys; `out`, `lse` and `cotangent` are over all keys."""
    gradients = backward(spec, x, lse, cotangent, summed_delta(cotangent, out), row, column)
    return gradients if bias_gradient else gradients._replace(bias=None)
