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

from jshard._cost.in_place import overwriting, touched
from jshard._program.arrays import Bools
from jshard._program.graph import Literal, Operator, Program


PRODUCTS = frozenset("dot_general ragged_dot ragged_dot_general conv_general_dilated".split())
# Operators that a compiler does not fuse into their neighbours: their operands and results are stored.
HEAVY = PRODUCTS | frozenset(
    "gather sort top_k fft cholesky "
    "triangular_solve eigh svd qr lu geqrf reduce_window reduce_window_sum reduce_window_max "
    "select_and_scatter_add dynamic_update_slice cumsum cumprod cummax cummin cumlogsumexp custom_linear_solve "
    "pallas_call shard_map pure_callback io_callback".split()
)
SLICES = frozenset(("slice", "dynamic_slice", "gather"))  # read of their first operand what they give
_TRANSPOSED = frozenset(("dot_general", "conv_general_dilated"))  # write their result transposed as well
_REDUCING = ("reduce_", "argm")


def is_heavy(op: Operator) -> bool:
    """Whether an operator stores its results and reads its operands from memory."""
    return op.kind != "eqn" or _heavy(op.primitive)


@functools.lru_cache(maxsize=1024)
def _heavy(primitive: str) -> bool:
    return primitive in HEAVY or primitive.startswith(("jshard_", "scatter"))


@dataclasses.dataclass(frozen=True, eq=False)
class Lifetimes:
    """For each tensor whether it is `stored`, and its half-open live interval in operator numbers.

    `folded` are the transpositions that a product makes while it writes, `over` the updates that write over their
    first operand (`in_place.py`).
    """

    stored: Sequence[bool]
    start: Sequence[int]
    end: Sequence[int]
    length: int
    folded: frozenset[int] = frozenset()
    over: frozenset[int] = frozenset()


def lifetimes(program: Program, donated: Collection[int] = ()) -> Lifetimes:
    """Lifetimes of all tensors; `donated` are the flat indices of the donated arguments."""
    a, n = program.arrays, len(program.operators)
    given = frozenset(donated)
    kept = np.zeros(n, dtype=bool)
    kept[[i for k, i in enumerate(program.inputs) if k not in given]] = True
    order, begin = a.by_tensor
    count = np.diff(begin)
    light, reducing = ~heavy_of(program), a.named(_REDUCING)
    made = a.maker >= 0
    # Of those with one reader; what has none or several is looked at with the first there is.
    one = order[np.minimum(begin[:-1], max(len(order) - 1, 0))] if len(order) else a.maker * 0
    user = a.reader[one] if len(order) else a.maker * 0
    same = a.repeat[user] == a.repeat[a.maker]
    # A reduction reads what feeds it in one pass, but its own result starts a new kernel.
    fused = (count == 1) & made & light[a.maker] & light[user] & same & ~reducing[a.maker]
    last = a.maker.copy()
    last[count > 0] = 0
    np.maximum.at(last, a.read, a.reader)
    returned = np.zeros(n, dtype=bool)
    returned[list(program.outputs)] = True
    last[(made & kept[a.maker]) | (np.bincount(a.read, returned[a.reader], len(a.maker)) > 0)] = n - 1
    # A carry's last operand is made inside the loop, after the boundary operator's own number.
    end = np.maximum(last, a.maker) + 1
    ops = np.flatnonzero(a.which(_TRANSPOSED))
    t = a.result[a.result_begin[ops]]
    t = t[(count[t] == 1) & same[t] & a.which(frozenset(("transpose",)))[user[t]]]
    stored = ((count > 0) & ~fused).tolist()
    over = overwriting(program, given, stored, light.tolist())
    return Lifetimes(
        stored, np.maximum(a.maker, 0).tolist(), end.tolist(), n, frozenset(user[t].tolist()), over
    )


def heavy_of(program: Program) -> Bools:
    """(operators,) whether each is heavy."""
    a = program.arrays
    first = np.unique(a.primitive, return_index=True)[1].tolist()
    return np.array([is_heavy(program.operators[i]) for i in first], dtype=bool)[a.primitive]


def stored_operands(op: Operator, life: Lifetimes) -> tuple[int, ...]:
    """Indices of the operands that are read from memory."""
    stored = life.stored
    return tuple([i for i, a in enumerate(op.operands) if not isinstance(a, Literal) and stored[a]])


def traffic(op: Operator, life: Lifetimes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Indices of the operands that an operator reads from memory, and of the results that it writes there.

    None of either for a transposition of a product that nobody else reads: the product itself writes its result
    that way round. An update that writes over its first operand passes the bytes of the update through memory, an
    index as often as they do (`in_place.touched`). A slice or lookup reads as many bytes as it gives, so its result
    stands for its operand.
    """
    if op.id in life.folded:
        return (), ()
    reads, writes = stored_operands(op, life), tuple([i for i, r in enumerate(op.results) if life.stored[r]])
    if op.id in life.over:
        return touched(op, reads), ()
    if op.primitive in SLICES and 0 in reads and op.eqn.outvars[0].aval.size < op.eqn.invars[0].aval.size:
        return tuple([i for i in reads if i != 0]), (*writes, 0)
    return reads, writes
