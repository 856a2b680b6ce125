"""HBM traffic under XLA-like fusion: which operands an operator reads from device memory, which results it writes.

Used by the roofline (`_network/operator_cost.py`): the memory time of an operator is its traffic over the chip's
bandwidth.

Model.  Compilers fuse an elementwise operator into its consumer, so a value with exactly one consumer never reaches
memory if both operators are fusible and run equally often. Every other value is *stored*: written once, and read once
by each consumer. A reduction fuses its operand, but its result starts a new kernel.

Why `liveness.py` has another fusion model.  That one is about space: a cheap value with several consumers is
duplicated into each of them and occupies no memory between them, however far apart they run. This one is about time:
duplicating a value into n consumers replaces n reads of it by n reads of what it is computed from, so the bytes that
pass through memory stay about the same, and it counts the value as written once and read n times.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence

import numpy as np

from jshard._core.arrays import Bools, Ints
from jshard._program.graph import Literal, Operator, Program
from jshard._program.memory.in_place import in_place_updates, touched_operands
from jshard._program.operators import PRODUCTS
from jshard._program.tail_primitives import MASK_TAIL, PAD_TAIL


ATTENTION = frozenset(("jshard_attention", "jshard_attention_backward"))
"""Attention and its gradient: two and five products in one operator."""

ALL_PRODUCTS = PRODUCTS | ATTENTION
# Operators that compilers do not fuse with their neighbours: their operands and results are stored.
UNFUSIBLE = PRODUCTS | frozenset(
    "gather sort top_k fft cholesky "
    "triangular_solve eigh svd qr lu geqrf reduce_window reduce_window_sum reduce_window_max "
    "select_and_scatter_add dynamic_update_slice cumsum cumprod cummax cummin cumlogsumexp custom_linear_solve "
    "pallas_call shard_map pure_callback io_callback".split()
)
# Read as much of operand 0 as they return.
PARTIAL_READS = frozenset(("slice", "dynamic_slice", "gather", PAD_TAIL))
_FUSE_TRANSPOSE = frozenset(("dot_general", "conv_general_dilated"))  # can write their result transposed
_REDUCTION_PREFIXES = ("reduce_", "argm")


def is_unfusible(op: Operator) -> bool:
    """Whether an operator writes its results to memory and reads its operands from memory."""
    return op.kind != "eqn" or _is_unfusible_primitive(op.primitive)


@functools.lru_cache(maxsize=1024)
def _is_unfusible_primitive(primitive: str) -> bool:
    return primitive in UNFUSIBLE or primitive.startswith(("jshard_", "scatter"))


@dataclasses.dataclass(frozen=True, eq=False)
class HbmTraffic:
    """What a program moves through device memory.

    - `stored`: (tensors,) whether the tensor is written to memory.
    - `fused_transposes`: operators: transpositions of a product's result that the product itself writes.
    - `in_place`: operators: updates that overwrite their first operand (`in_place.py`).
    """

    stored: Sequence[bool]
    fused_transposes: frozenset[int] = frozenset()
    in_place: frozenset[int] = frozenset()


def hbm_traffic(program: Program, donated: Collection[int] = ()) -> HbmTraffic:
    """The traffic of a program; `donated` are the flat indices of the donated arguments."""
    a = program.use_def
    num_uses = np.diff(a.uses_by_tensor[1])
    fusible, reduction = ~unfusible_operators(program), a.primitive_starts_with(_REDUCTION_PREFIXES)
    user = _first_users(program)
    same_count = a.repeat[user] == a.repeat[a.def_op]
    fusible_pair = (a.def_op >= 0) & fusible[a.def_op] & fusible[user] & same_count
    fused = (num_uses == 1) & fusible_pair & ~reduction[a.def_op]
    stored = ((num_uses > 0) & ~fused).tolist()

    products = np.flatnonzero(a.has_primitive(_FUSE_TRANSPOSE))
    written = a.result[a.result_begin[products]]
    is_transpose = a.has_primitive(frozenset(("transpose",)))
    written = written[(num_uses[written] == 1) & same_count[written] & is_transpose[user[written]]]
    return HbmTraffic(
        stored,
        frozenset(user[written].tolist()),
        in_place_updates(program, donated, stored, fusible.tolist()),
    )


def _first_users(program: Program) -> Ints:
    """(tensors,) the first operator that reads each tensor; arbitrary for a tensor that no operator reads."""
    a = program.use_def
    order, begin = a.uses_by_tensor
    if not len(order):
        return np.zeros_like(a.def_op)
    return a.use_op[order[np.minimum(begin[:-1], len(order) - 1)]]


def unfusible_operators(program: Program) -> Bools:
    """(operators,) whether each is unfusible."""
    a = program.use_def
    first = np.unique(a.primitive_id, return_index=True)[1].tolist()
    return np.array([is_unfusible(program.operators[i]) for i in first], dtype=bool)[a.primitive_id]


def stored_operands(op: Operator, traffic: HbmTraffic) -> tuple[int, ...]:
    """Indices of the operands that are read from memory."""
    stored = traffic.stored
    return tuple([i for i, a in enumerate(op.operands) if not isinstance(a, Literal) and stored[a]])


def memory_accesses(op: Operator, traffic: HbmTraffic) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Indices of the operands that an operator reads from memory, and of the results that it writes there.

    - A transposition that is fused into the product before it accesses nothing.
    - Padding that is masked before a product or the like reads it is masked in that reader, which reads as many bytes.
    - An update in place moves the bytes of the update, an index as often as those pass (`in_place.touched_operands`).
    - A slice or gather reads as many bytes of operand 0 as it returns, so its result (index 0) stands for the operand.
    """
    if op.id in traffic.fused_transposes:
        return (), ()
    reads = stored_operands(op, traffic)
    if op.primitive == MASK_TAIL and traffic.stored[op.results[0]] and stored_operands(op, traffic):
        return (), ()
    if op.id in traffic.in_place:
        return touched_operands(op, reads), ()
    writes = tuple([i for i, r in enumerate(op.results) if traffic.stored[r]])
    partial = op.primitive in PARTIAL_READS and 0 in reads
    if op.primitive == PAD_TAIL and partial:
        # A device reads its block of the operand, whose length is that of the result's.
        return (), (*writes, 0)
    if partial and op.equation.outvars[0].aval.size < op.equation.invars[0].aval.size:
        return tuple([i for i in reads if i != 0]), (*writes, 0)
    return reads, writes
