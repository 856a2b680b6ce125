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
from collections.abc import Collection

from jshard._program.graph import Literal, Operator, Program


PRODUCTS = frozenset("dot_general ragged_dot ragged_dot_general conv_general_dilated".split())
# Operators that a compiler does not fuse into their neighbours: their operands and results are stored.
HEAVY = PRODUCTS | frozenset(
    "gather scatter scatter-add scatter_add scatter_mul scatter_min scatter_max sort top_k fft cholesky "
    "triangular_solve eigh svd qr lu geqrf reduce_window reduce_window_sum reduce_window_max "
    "select_and_scatter_add dynamic_update_slice cumsum cumprod cummax cummin cumlogsumexp custom_linear_solve "
    "pallas_call shard_map pure_callback io_callback".split()
)
_TRANSPOSED = frozenset(("dot_general", "conv_general_dilated"))  # write their result transposed as well
_REDUCING = ("reduce_", "argm")


def is_heavy(op: Operator) -> bool:
    """Whether an operator stores its results and reads its operands from memory."""
    return op.kind != "eqn" or _heavy(op.primitive)


@functools.lru_cache(maxsize=1024)
def _heavy(primitive: str) -> bool:
    return primitive in HEAVY or primitive.startswith("jshard_")


@dataclasses.dataclass(frozen=True, eq=False)
class Lifetimes:
    """For each tensor whether it is `stored`, and its half-open live interval in operator numbers.

    `folded` are the transpositions that a product makes while it writes.
    """

    stored: tuple[bool, ...]
    start: tuple[int, ...]
    end: tuple[int, ...]
    length: int
    folded: frozenset[int] = frozenset()


def lifetimes(program: Program, donated: Collection[int] = ()) -> Lifetimes:
    """Lifetimes of all tensors; `donated` are the flat indices of the donated arguments."""
    ops = program.operators
    n = len(ops)
    producers, consumers = program.producers(), program.consumers()
    stored, start, end = [], [], []
    given = frozenset(donated)
    kept = {i for k, i in enumerate(program.inputs) if k not in given}
    returned = set(program.outputs)
    light = [not is_heavy(op) for op in ops]
    for (maker, _), readers in zip(producers, consumers, strict=True):
        users = [u for u, _ in readers]
        fused = False
        if len(users) == 1 and maker >= 0 and light[maker] and light[users[0]]:
            # A reduction reads what feeds it in one pass, but its own result starts a new kernel.
            same = ops[users[0]].repeat == ops[maker].repeat
            fused = same and not ops[maker].primitive.startswith(_REDUCING)
        stored.append(bool(users) and not fused)
        start.append(max(maker, 0))
        last = max(users, default=maker)
        if maker in kept or not returned.isdisjoint(users):
            last = n - 1
        # A carry's last operand is made inside the loop, after the boundary operator's own number.
        end.append(max(last, maker) + 1)
    folded = frozenset(
        users[0][0]
        for op in ops
        if op.kind == "eqn" and op.primitive in _TRANSPOSED
        for users in (consumers[op.results[0]],)
        if len(users) == 1
        and ops[users[0][0]].primitive == "transpose"
        and ops[users[0][0]].repeat == op.repeat
    )
    return Lifetimes(tuple(stored), tuple(start), tuple(end), n, folded)


def stored_operands(op: Operator, life: Lifetimes) -> tuple[int, ...]:
    """Indices of the operands that are read from memory."""
    stored = life.stored
    return tuple([i for i, a in enumerate(op.operands) if not isinstance(a, Literal) and stored[a]])


def traffic(op: Operator, life: Lifetimes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Indices of the operands that an operator reads from memory, and of the results that it writes there.

    None of either for a transposition of a product that nobody else reads: the product itself writes its result
    that way round.
    """
    if op.id in life.folded:
        return (), ()
    return stored_operands(op, life), tuple([i for i, r in enumerate(op.results) if life.stored[r]])
