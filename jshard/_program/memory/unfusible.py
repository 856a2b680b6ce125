"""Operators that compilers do not fuse with their neighbours: their operands and results are in device memory.

A pad that puts elements between others (the gradient of a slice with steps, the interleaving of even and odd places in an
associative scan) is one too: the TPU compiler writes both its operand and its result, where pads of edges are fused.

Used by the model of time (`kernel_fusion.py`), by that of space (`liveness.py`) and by the search.
"""

from __future__ import annotations

import functools

import numpy as np

from jshard._core.arrays import Bools
from jshard._program.graph import Operator, Program
from jshard._program.operators import PRODUCTS


ATTENTION = frozenset(("jshard_attention", "jshard_attention_backward"))
"""Attention and its gradient: two and five products in one operator."""

ALL_PRODUCTS = PRODUCTS | ATTENTION
UNFUSIBLE = PRODUCTS | frozenset(
    "gather sort top_k fft cholesky "
    "triangular_solve eigh svd qr lu geqrf reduce_window reduce_window_sum reduce_window_max "
    "select_and_scatter_add dynamic_update_slice cumsum cumprod cummax cummin cumlogsumexp custom_linear_solve "
    "pallas_call shard_map pure_callback io_callback".split()
)


def is_unfusible(op: Operator) -> bool:
    """Whether an operator writes its results to memory and reads its operands from memory."""
    return op.kind != "eqn" or _is_unfusible_primitive(op.primitive) or _dilates(op)


def _dilates(op: Operator) -> bool:
    """Whether an operator puts elements between those of its operand."""
    if op.primitive != "pad":
        return False
    shape = op.equation.invars[0].aval.shape
    config = op.equation.params["padding_config"]
    return any(between and size > 1 for size, (_, _, between) in zip(shape, config, strict=True))


@functools.lru_cache(maxsize=1024)
def _is_unfusible_primitive(primitive: str) -> bool:
    return primitive in UNFUSIBLE or primitive.startswith(("jshard_", "scatter"))


def unfusible_operators(program: Program) -> Bools:
    """(operators,) whether each is unfusible."""
    a = program.use_def
    first = np.unique(a.primitive_id, return_index=True)[1].tolist()
    found = np.array([is_unfusible(program.operators[i]) for i in first], dtype=bool)[a.primitive_id]
    pads = np.flatnonzero(a.has_primitive(frozenset(("pad",)))).tolist()
    found[pads] = [is_unfusible(program.operators[i]) for i in pads]
    return found
