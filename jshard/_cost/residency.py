"""Which values a compiled program keeps in memory, and how long it needs them.

Problem.  A traced training step names every value that the backward pass reads. A compiler keeps far fewer:
an elementwise value costs less to compute again inside each of its readers than to write and read back, so it
is *fluid* and never stored; what it was computed from is held instead, until the last such reader.

Idea.  Call the rest *anchors*: what matrix products, convolutions, gathers, sorts, reductions and loops make,
arguments, and values that leave a loop or the program. The bias or residual that is added to a product is
written by the product itself, so the sum is the anchor and the product is never stored. The exponential of a
softmax (summed, and read twice more) is kept: compilers write it in the pass that sums it, and do not repeat it.

These rules were read off the buffer assignments of the TPU compiler (v5e) for GPT training steps in float32
and bfloat16: of a GELU's eight intermediate values one is kept, of a softmax's the exponential alone.

Worked case.  ``h = x @ w + b; y = tanh(h) @ v`` and its gradient: h is kept, ``x @ w`` and ``tanh(h)`` are not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from jshard._cost.memory import is_heavy
from jshard._program.graph import Block, Literal, Operator, Program, Step


# Heavy operators whose operands may be computed on the fly by the compiled kernel that reads them.
_FUSES_OPERANDS = frozenset(
    "dot_general ragged_dot ragged_dot_general conv_general_dilated gather dynamic_update_slice".split()
)
# Heavy operators that can write a following light operator's result instead of their own.
_FUSES_RESULT = frozenset("dot_general ragged_dot ragged_dot_general conv_general_dilated".split())
_EXPENSIVE = frozenset("exp exp2 expm1 log log1p pow erf".split())
_REDUCTIONS = ("reduce_", "argm", "cum")
_OPAQUE_LIGHT = ("random_", "threefry", "rng_")
# Operators that write their result over their first operand.
_IN_PLACE = frozenset(
    "scatter scatter-add scatter_add scatter_mul scatter_min scatter_max dynamic_update_slice".split()
)


@dataclasses.dataclass(frozen=True, eq=False)
class Residency:
    """For each tensor: is it held in memory, and the last operator that needs it (through fluid readers)."""

    held: tuple[bool, ...]
    needed: tuple[int, ...]
    length: int


def is_light(op: Operator) -> bool:
    """Whether an operator is computed again in its readers rather than stored."""
    return (
        op.kind == "eqn" and not is_heavy(op) and not op.primitive.startswith((*_REDUCTIONS, *_OPAQUE_LIGHT))
    )


def reuses(op: Operator) -> bool:
    """Whether an operator may write its result where an operand was that nobody needs any more."""
    return is_light(op) or op.primitive in _IN_PLACE


def residency(program: Program, donated: Collection[int] = ()) -> Residency:
    """Anchors and needs of all tensors; `donated` are the flat indices of the donated arguments."""
    ops = program.operators
    producers = [ops[p] for p, _ in program.producers()]
    readers = [list(dict.fromkeys(u for u, _ in users)) for users in program.consumers()]
    crossing = set(_crossing(program.body))
    fluid = [
        _is_fluid(program, t, producers[t], [ops[u] for u in readers[t]], crossing)
        for t in range(len(readers))
    ]
    absorbed = _absorb(program, producers, readers, fluid, crossing)
    held = tuple(
        producers[t].kind in ("input", "const") or bool(readers[t]) and not fluid[t] and not absorbed[t]
        for t in range(len(readers))
    )
    last = len(ops) - 1
    needed = [producers[t].id for t in range(len(readers))]
    for op in reversed(ops):
        until = op.id
        if op.results and all(fluid[r] for r in op.results):
            until = max(until, *(needed[r] for r in op.results))
        for a in op.operands:
            if not isinstance(a, Literal):
                needed[a] = max(needed[a], last if op.kind == "output" else until)
    for k, i in enumerate(program.inputs):
        if k not in donated:
            needed[ops[i].results[0]] = last
    return Residency(held, tuple(needed), len(ops))


def _is_fluid(
    program: Program, tensor: int, maker: Operator, users: Sequence[Operator], crossing: set[int]
) -> bool:
    if not is_light(maker) or not users or tensor in crossing:
        return False
    if any(u.repeat != maker.repeat for u in users):
        return False
    if any(u.kind != "eqn" or (is_heavy(u) and u.primitive not in _FUSES_OPERANDS) for u in users):
        return False
    summed = sum(u.primitive.startswith(_REDUCTIONS) for u in users)
    return not (maker.primitive in _EXPENSIVE and summed and len(users) - summed > 1)


def _absorb(
    program: Program, producers: Sequence[Operator], readers: Sequence[Sequence[int]], fluid: list[bool],
    crossing: set[int],
) -> list[bool]:  # fmt: skip
    """Products whose one reader is light and no larger: the reader's result takes their place (and is kept)."""
    absorbed = [False] * len(readers)
    taken: set[int] = set()
    ends: set[int] = set()  # results that now stand for a product
    for op in program.operators:
        for t in op.results:
            root = op.primitive in _FUSES_RESULT or t in ends
            if not root or len(readers[t]) != 1 or t in crossing:
                continue
            u = program.operators[readers[t][0]]
            if not is_light(u) or len(u.results) != 1 or u.id in taken or u.repeat != op.repeat:
                continue
            r = u.results[0]
            if program.tensors[r].nbytes <= program.tensors[t].nbytes and readers[r]:
                taken.add(u.id)
                ends.add(r)
                absorbed[t], fluid[r] = True, False
    return absorbed


def _crossing(block: Block) -> list[int]:
    """Tensors that leave a call's block: a `remat` or a custom rule hands them out of its own scope."""
    out: list[int] = []
    for step in block.steps:
        if isinstance(step, Step):
            continue
        for inner in step.blocks:
            out += [a for a in inner.outputs if not isinstance(a, Literal)]
            out += _crossing(inner)
    return out
