"""Which values a compiled program keeps in memory, and how long it needs them.

Problem.  A traced training step names every value that the backward pass reads. A compiler keeps far fewer:
an elementwise value costs less to compute again inside each of its readers than to write and read back, so it
is *fluid* and never stored; what it was computed from is held instead, until the last such reader.

Idea.  Call the rest *anchors*: what matrix products, convolutions, gathers, sorts, reductions and loops make,
arguments, and values that leave a loop or the program. The bias or residual that is added to a product is
written by the product itself, so the sum is the anchor and the product is never stored, if it comes next; so is
what several elementwise operators make of a product and bring together again, a gradient times a SiLU's. The
exponential of a softmax (summed, and read twice more) is kept: compilers write it in the pass that sums it, and do
not repeat it, unless what it is computed from is smaller, such as scores in bfloat16 under an exponential in float32.
A cast to a wider type is made again by each reader that can; one that cannot, such as the gather of a cross
entropy, gets a *copy* of its own for that time.

These rules were read off the buffer assignments of the TPU compiler (v5e) for GPT training steps in float32
and bfloat16: of a GELU's eight intermediate values one is kept, of a softmax's the exponential alone.

Worked case.  ``h = x @ w + b; y = tanh(h) @ v`` and its gradient: h is kept, ``x @ w`` and ``tanh(h)`` are not.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence

from jshard._cost.memory import PRODUCTS, is_heavy
from jshard._program.graph import Block, Literal, Operator, Program


# Heavy operators whose operands may be computed on the fly by the compiled kernel that reads them.
_FUSES_OPERANDS = PRODUCTS | {"dynamic_update_slice"}
# Products can also write a following light operator's result instead of their own.
_EXPENSIVE = frozenset("exp exp2 expm1 log log1p pow erf".split())
_REDUCTIONS = ("reduce_", "argm", "cum")
_NOT_AGAIN = (*_REDUCTIONS, "random_", "threefry", "rng_")
# Operators that write their result over their first operand.
_IN_PLACE = frozenset(
    "scatter scatter-add scatter_add scatter_mul scatter_min scatter_max dynamic_update_slice".split()
)


@dataclasses.dataclass(frozen=True, eq=False)
class Residency:
    """For each tensor: is it held in memory, and the last operator that needs it (through fluid readers).

    A `copied` one is held for the readers that cannot compute it again; the others go on from its source.
    """

    held: tuple[bool, ...]
    needed: tuple[int, ...]
    copied: tuple[bool, ...]
    length: int
    written: tuple[
        float, ...
    ]  # of a product that its reader's result stands for: bytes written while it runs


def is_light(op: Operator) -> bool:
    """Whether an operator is computed again in its readers rather than stored."""
    if op.kind != "eqn" or op.primitive.startswith(_NOT_AGAIN):
        return False
    return not is_heavy(op) or _selects(op)


def _selects(op: Operator) -> bool:
    """Whether a scatter sets one element a row: the gradient of `take_along_axis`, as in a cross entropy.

    Compilers compare each row's index with the element's own and select, so it fuses as elementwise operators do.
    """
    if not op.primitive.startswith("scatter"):
        return False
    numbers, (into, _, updates) = op.eqn.params["dimension_numbers"], (v.aval for v in op.eqn.invars)
    axes = numbers.scatter_dims_to_operand_dims
    return (
        not numbers.update_window_dims and len(axes) == 1 and updates.size * into.shape[axes[0]] == into.size
    )


def fuses(op: Operator) -> bool:
    """Whether an operator can compute its operands itself, from what they were computed from."""
    return op.kind == "eqn" and (op.primitive in _FUSES_OPERANDS or not is_heavy(op) or _selects(op))


def reuses(op: Operator) -> bool:
    """Whether an operator may write its result where an operand was that nobody needs any more."""
    return is_light(op) or op.primitive in _IN_PLACE


def residency(program: Program, donated: Collection[int] = ()) -> Residency:
    """Anchors and needs of all tensors; `donated` are the flat indices of the donated arguments."""
    ops = program.operators
    producers = [ops[p] for p, _ in program.producers()]
    readers = [list(dict.fromkeys([u for u, _ in users])) for users in program.consumers()]
    crossing = set(_crossing(program.body))
    light, fusing = [is_light(op) for op in ops], [fuses(op) for op in ops]
    sources = _sources(program, light)
    fluid = [
        light[maker.id]
        and all([fusing[u] for u in users])
        and _is_fluid(program, t, maker, [ops[u] for u in users], crossing, sources[t])
        for t, (maker, users) in enumerate(zip(producers, readers, strict=True))
    ]
    absorbed = _absorb(program, producers, readers, fluid, crossing)
    held = tuple(
        producers[t].kind in ("input", "const") or bool(readers[t]) and not fluid[t] and t not in absorbed
        for t in range(len(readers))
    )
    copied = tuple(
        held[t] and t not in crossing and _widens(program, producers[t], t) for t in range(len(readers))
    )
    last = len(ops) - 1
    needed = [producers[t].id for t in range(len(readers))]
    through = list(needed)  # of copied tensors, for the readers that compute them again
    for op in reversed(ops):
        until = op.id
        if op.results and all([fluid[r] for r in op.results]):
            until = max([until] + [needed[r] for r in op.results])
        until = max([until] + [through[r] for r in op.results if copied[r]])
        if op.kind == "output":
            until = last
        for a in op.operands:
            if not isinstance(a, Literal):
                times = through if copied[a] and fusing[op.id] else needed
                if times[a] < until:
                    times[a] = until
    given = frozenset(donated)
    for k, i in enumerate(program.inputs):
        if k not in given:
            needed[ops[i].results[0]] = last
    written = [0.0] * len(readers)
    for op in ops:
        for t in op.results:
            if t in absorbed and op.primitive in PRODUCTS:
                written[t] = _written(program, t, producers, absorbed, held, needed)
    return Residency(held, tuple(needed), copied, len(ops), tuple(written))


def _written(
    program: Program, product: int, producers: Sequence[Operator], absorbed: Mapping[int, Sequence[int]],
    held: Sequence[bool], needed: Sequence[int],
) -> float:  # fmt: skip
    """Bytes that a product writes in its readers' place; none where they go over an operand that ends there."""
    passed, at = [], product
    while at in absorbed:
        passed += absorbed[at]
        at = program.operators[passed[-1]].results[0]
    tensors, made = program.tensors, set(passed)
    read = [a for i in passed for a in program.operators[i].operands]
    seen = {product}
    while read:
        a = read.pop()
        if isinstance(a, Literal) or a in seen or producers[a].id in made:
            continue
        seen.add(a)
        if not held[a]:
            read += producers[a].operands  # computed again here, from these
        elif needed[a] <= passed[-1] and tensors[a].nbytes >= tensors[at].nbytes:
            return 0.0
    return tensors[at].nbytes


def _widens(program: Program, maker: Operator, tensor: int) -> bool:
    if maker.primitive != "convert_element_type" or isinstance(maker.operands[0], Literal):
        return False
    return program.tensors[tensor].nbytes > program.tensors[maker.operands[0]].nbytes


def _sources(program: Program, light: Sequence[bool]) -> list[float]:
    """For each tensor the bytes of the largest stored value that it would be computed from again."""
    sources = [0.0] * len(program.tensors)
    for op in program.operators:
        for t in op.results:
            if light[op.id]:
                sources[t] = max([sources[a] for a in op.operands if not isinstance(a, Literal)], default=0.0)
            else:
                sources[t] = program.tensors[t].nbytes
    return sources


def _is_fluid(
    program: Program,
    tensor: int,
    maker: Operator,
    users: Sequence[Operator],
    crossing: set[int],
    source: float,
) -> bool:
    """Whether a light operator's tensor, which all its readers can compute, is left to them.

    `source` is the bytes that would be read to compute the tensor again.
    """
    if not users or tensor in crossing:
        return False
    if any([u.repeat != maker.repeat for u in users]):
        return False
    summed = sum(u.primitive.startswith(_REDUCTIONS) for u in users)
    dear = maker.primitive in _EXPENSIVE and program.tensors[tensor].nbytes <= source
    return not (dear and summed and len(users) - summed > 1)


def _absorb(
    program: Program, producers: Sequence[Operator], readers: Sequence[Sequence[int]], fluid: list[bool],
    crossing: set[int],
) -> dict[int, Sequence[int]]:  # fmt: skip
    """Products that are never stored, with the light operators after them: the result of the last is kept instead.

    It is no larger, and all that the product is read for goes through it: one operator makes it, or several that
    meet again, as ``g * s(h) + g * h * ds(h)`` in the gradient of a SiLU. Only where nothing that takes time runs
    in between: a product that waits for a later reader keeps its operands, one that does not is itself in memory.
    """
    absorbed: dict[int, Sequence[int]] = {}
    ops = program.operators
    heavy = list(itertools.accumulate((is_heavy(op) for op in ops), initial=0))
    taken: set[int] = set()
    ends: set[int] = set()  # results that now stand for a product

    def through(first: Operator, t: int) -> list[int]:
        """The operators that a tensor goes through until it goes through one alone; none if there is none."""
        passed: list[int] = []
        waiting = set(readers[t])
        while waiting:
            u = ops[min(waiting)]
            if not is_light(u) or len(u.results) != 1 or u.id in taken or u.repeat != first.repeat:
                break
            if heavy[u.id] > heavy[first.id + 1] or (passed and t in crossing):
                break
            passed.append(u.id)
            waiting.remove(u.id)
            if not waiting:
                return passed
            t = u.results[0]
            waiting.update(readers[t])
        return []

    for op in ops:
        for t in op.results:
            if (op.primitive not in PRODUCTS and t not in ends) or t in crossing:
                continue
            passed = through(op, t)
            if not passed:
                continue
            r = ops[passed[-1]].results[0]
            if program.tensors[r].nbytes <= program.tensors[t].nbytes and readers[r]:
                taken.update(passed)
                ends.add(r)
                absorbed[t], fluid[r] = passed, False
    return absorbed


def _crossing(block: Block) -> list[int]:
    """Tensors that leave a call's block: a `remat` or a custom rule hands them out of its own scope."""
    out: list[int] = []
    for step in block.steps:
        if isinstance(step, int):
            continue
        for inner in step.blocks:
            out += [a for a in inner.outputs if not isinstance(a, Literal)]
            out += _crossing(inner)
    return out
