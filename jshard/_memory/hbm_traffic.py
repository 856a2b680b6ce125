"""Which tensors take memory, and from when to when.

Time is the program's order: operator `i` runs at time `i`. A tensor lives from its making to its last use;
an argument the whole time, unless it is donated. Not every value is stored: compilers fuse elementwise
operators into their consumer, so the value of a light operator with one light consumer in the same loop body
never reaches memory. What is stored is what the roofline counts as traffic and the peak as bytes.

The order of the program is an upper bound to what a compiler does: it may reorder to save memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence

import numpy as np

from jshard._memory.in_place import in_place_updates, touched_operands
from jshard._program.graph import Literal, Operator, Program
from jshard._program.use_def import Bools


PRODUCTS = frozenset("dot_general ragged_dot ragged_dot_general conv_general_dilated".split())
# Operators that a compiler does not fuse into their neighbours: their operands and results are stored.
UNFUSIBLE = PRODUCTS | frozenset(
    "gather sort top_k fft cholesky "
    "triangular_solve eigh svd qr lu geqrf reduce_window reduce_window_sum reduce_window_max "
    "select_and_scatter_add dynamic_update_slice cumsum cumprod cummax cummin cumlogsumexp custom_linear_solve "
    "pallas_call shard_map pure_callback io_callback".split()
)
PARTIAL_READS = frozenset(("slice", "dynamic_slice", "gather"))  # read of their first operand what they give
_FUSE_TRANSPOSE = frozenset(("dot_general", "conv_general_dilated"))  # write their result transposed as well
_REDUCTION_PREFIXES = ("reduce_", "argm")


def is_unfusible(op: Operator) -> bool:
    """Whether an operator stores its results and reads its operands from memory."""
    return op.kind != "eqn" or _is_unfusible_primitive(op.primitive)


@functools.lru_cache(maxsize=1024)
def _is_unfusible_primitive(primitive: str) -> bool:
    return primitive in UNFUSIBLE or primitive.startswith(("jshard_", "scatter"))


@dataclasses.dataclass(frozen=True, eq=False)
class HbmTraffic:
    """For each tensor whether it is `stored`, and its half-open live interval in operator numbers.

    `folded` are the transpositions that a product makes while it writes, `over` the updates that write over their
    first operand (`in_place.py`).
    """

    stored: Sequence[bool]
    start: Sequence[int]
    end: Sequence[int]
    length: int
    fused_transposes: frozenset[int] = frozenset()
    in_place: frozenset[int] = frozenset()


def hbm_traffic(program: Program, donated: Collection[int] = ()) -> HbmTraffic:
    """Lifetimes of all tensors; `donated` are the flat indices of the donated arguments."""
    a, n = program.use_def, len(program.operators)
    given = frozenset(donated)
    kept = np.zeros(n, dtype=bool)
    kept[[i for k, i in enumerate(program.inputs) if k not in given]] = True
    order, begin = a.uses_by_tensor
    count = np.diff(begin)
    light, reducing = ~unfusible_operators(program), a.primitive_starts_with(_REDUCTION_PREFIXES)
    made = a.def_op >= 0
    # Of those with one reader; what has none or several is looked at with the first there is.
    one = order[np.minimum(begin[:-1], max(len(order) - 1, 0))] if len(order) else a.def_op * 0
    user = a.use_op[one] if len(order) else a.def_op * 0
    same = a.repeat[user] == a.repeat[a.def_op]
    # A reduction reads what feeds it in one pass, but its own result starts a new kernel.
    fused = (count == 1) & made & light[a.def_op] & light[user] & same & ~reducing[a.def_op]
    last = a.def_op.copy()
    last[count > 0] = 0
    np.maximum.at(last, a.use_tensor, a.use_op)
    returned = np.zeros(n, dtype=bool)
    returned[list(program.outputs)] = True
    last[(made & kept[a.def_op]) | (np.bincount(a.use_tensor, returned[a.use_op], len(a.def_op)) > 0)] = n - 1
    # A carry's last operand is made inside the loop, after the boundary operator's own number.
    end = np.maximum(last, a.def_op) + 1
    ops = np.flatnonzero(a.has_primitive(_FUSE_TRANSPOSE))
    t = a.result[a.result_begin[ops]]
    t = t[(count[t] == 1) & same[t] & a.has_primitive(frozenset(("transpose",)))[user[t]]]
    stored = ((count > 0) & ~fused).tolist()
    over = in_place_updates(program, given, stored, light.tolist())
    return HbmTraffic(
        stored, np.maximum(a.def_op, 0).tolist(), end.tolist(), n, frozenset(user[t].tolist()), over
    )


def unfusible_operators(program: Program) -> Bools:
    """(operators,) whether each is heavy."""
    a = program.use_def
    first = np.unique(a.primitive_id, return_index=True)[1].tolist()
    return np.array([is_unfusible(program.operators[i]) for i in first], dtype=bool)[a.primitive_id]


def stored_operands(op: Operator, traffic: HbmTraffic) -> tuple[int, ...]:
    """Indices of the operands that are read from memory."""
    stored = traffic.stored
    return tuple([i for i, a in enumerate(op.operands) if not isinstance(a, Literal) and stored[a]])


def memory_accesses(op: Operator, traffic: HbmTraffic) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Indices of the operands that an operator reads from memory, and of the results that it writes there.

    None of either for a transposition of a product that nobody else reads: the product itself writes its result
    that way round. An update that writes over its first operand passes the bytes of the update through memory, an
    index as often as they do (`in_place.touched`). A slice or lookup reads as many bytes as it gives, so its result
    stands for its operand.
    """
    if op.id in traffic.fused_transposes:
        return (), ()
    reads, writes = (
        stored_operands(op, traffic),
        tuple([i for i, r in enumerate(op.results) if traffic.stored[r]]),
    )
    if op.id in traffic.in_place:
        return touched_operands(op, reads), ()
    if (
        op.primitive in PARTIAL_READS
        and 0 in reads
        and op.eqn.outvars[0].aval.size < op.eqn.invars[0].aval.size
    ):
        return tuple([i for i in reads if i != 0]), (*writes, 0)
    return reads, writes
