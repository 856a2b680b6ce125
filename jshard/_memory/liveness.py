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
import heapq
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from jshard._memory.hbm_traffic import PRODUCTS, is_unfusible, unfusible_operators
from jshard._memory.in_place import in_place_updates, is_update
from jshard._program.graph import Block, Literal, Operator, Program, calls_of
from jshard._program.use_def import Bools, Ints


# Heavy operators whose operands may be computed on the fly by the compiled kernel that reads them.
_FUSES_OPERANDS = PRODUCTS | {"dynamic_update_slice"}
# Products can also write a following light operator's result instead of their own.
_EXPENSIVE = frozenset("exp exp2 expm1 log log1p pow erf".split())
_REDUCTION_PREFIXES = ("reduce_", "argm", "cum")
_NEVER_DUPLICATED = (*_REDUCTION_PREFIXES, "random_", "threefry", "rng_")


@dataclasses.dataclass(frozen=True, eq=False)
class Liveness:
    """For each tensor: is it held in memory, and the last operator that needs it (through fluid readers).

    A `copied` one is held for the readers that cannot compute it again; the others go on from its source. `over` are
    the updates that write over their first operand.
    """

    materialized: Sequence[bool]
    last_use: Sequence[int]
    duplicated_cast: Sequence[bool]
    length: int
    epilogue_bytes: Sequence[
        float
    ]  # of a product that its reader's result stands for: bytes written while it runs
    traits: FusionTraits
    in_place: frozenset[int] = frozenset()


def is_duplicable(op: Operator) -> bool:
    """Whether an operator is computed again in its readers rather than stored."""
    if op.kind != "eqn" or op.primitive.startswith(_NEVER_DUPLICATED):
        return False
    return not is_unfusible(op) or _is_one_hot_scatter(op)


def _is_one_hot_scatter(op: Operator) -> bool:
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


def fuses_operands(op: Operator) -> bool:
    """Whether an operator can compute its operands itself, from what they were computed from."""
    return op.kind == "eqn" and (
        op.primitive in _FUSES_OPERANDS or not is_unfusible(op) or _is_one_hot_scatter(op)
    )


def may_alias_operand(op: Operator) -> bool:
    """Whether an operator may write its result where an operand was that nobody needs any more."""
    return is_duplicable(op) or is_update(op.primitive)


@dataclasses.dataclass(frozen=True, eq=False)
class FusionTraits:
    """(operators,) whether each is light, computes its operands itself, and may write over one of them."""

    duplicable: Bools
    fuses_operands: Bools
    may_alias_operand: Bools


def fusion_traits(program: Program) -> FusionTraits:
    """The traits of all operators: by primitive, but for scatters, of which each is looked at."""
    if "traits" in program.memo:
        return program.memo["traits"]
    a = program.use_def
    first = np.unique(a.primitive_id, return_index=True)[1].tolist()
    some = [program.operators[i] for i in first]
    found = [
        np.array([f(op) for op in some], dtype=bool)[a.primitive_id]
        for f in (is_duplicable, fuses_operands, may_alias_operand)
    ]
    for i in np.flatnonzero(a.primitive_starts_with(("scatter",))).tolist():
        for each, f in zip(found, (is_duplicable, fuses_operands, may_alias_operand), strict=True):
            each[i] = f(program.operators[i])
    program.memo["traits"] = FusionTraits(*found)
    return program.memo["traits"]


def liveness(program: Program, donated: Collection[int] = ()) -> Liveness:
    """Anchors and needs of all tensors; `donated` are the flat indices of the donated arguments."""
    key = ("residency", frozenset(donated))
    if key not in program.memo:
        program.memo[key] = _liveness(program, donated)
    return program.memo[key]


def _liveness(program: Program, donated: Collection[int]) -> Liveness:
    ops, a = program.operators, program.use_def
    n = len(a.def_op)
    traits = fusion_traits(program)
    crossing = np.zeros(n, dtype=bool)
    crossing[_call_outputs(program.body)] = True
    readers = np.bincount(a.use_tensor, minlength=n)
    refusing = ~traits.fuses_operands[a.use_op] | (a.repeat[a.use_op] != a.repeat[a.def_op[a.use_tensor]])
    fluid = (
        traits.duplicable[a.def_op]
        & (readers > 0)
        & ~crossing
        & (np.bincount(a.use_tensor, refusing, n) == 0)
    )
    fluid[_kept_before_reduction(program, fluid, traits)] = False
    absorbed = _fuse_epilogues(program, traits, fluid, crossing)
    stored = (readers > 0) & ~fluid
    stored[list(absorbed)] = False
    held = stored | a.has_kind("input", "const")[a.def_op]
    copied = held & ~crossing & _widening_casts(program)
    needed = _last_uses(program, traits, fluid, copied)
    free = frozenset(donated)
    whole = [i for k, i in enumerate(program.inputs) if k not in free]
    needed[a.result[a.result_begin[np.array(whole, dtype=np.int64)]]] = len(ops) - 1
    times, here, written, maker = needed.tolist(), held.tolist(), [0.0] * n, a.def_op.tolist()
    for t in absorbed:
        if ops[maker[t]].primitive in PRODUCTS:
            written[t] = _epilogue_bytes(program, t, absorbed, here, times, maker)
    over = in_place_updates(program, donated, here, traits.duplicable.tolist())
    return Liveness(here, times, copied.tolist(), len(ops), written, traits, over)


def _last_uses(program: Program, traits: FusionTraits, fluid: Bools, copied: Bools) -> Ints:
    """(tensors,) the last operator that needs each."""
    a = program.use_def
    n = len(program.operators)
    until = np.where(a.has_kind("output"), n - 1, np.arange(n))
    needed = a.def_op.copy()
    through = a.def_op.copy()  # of copied tensors, for the readers that compute them again
    again = copied[a.use_tensor] & traits.fuses_operands[a.use_op]
    np.maximum.at(needed, a.use_tensor[~again], until[a.use_op[~again]])
    np.maximum.at(through, a.use_tensor[again], until[a.use_op[again]])
    count = np.diff(a.result_begin)
    flowing = (count > 0) & (np.bincount(a.def_op, ~fluid, n) == 0)
    some = np.flatnonzero(flowing | (np.bincount(a.def_op, copied, n) > 0))
    return propagate_last_use(program, some, until, flowing, copied, again, a.use_tensor, needed, through)


def propagate_last_use(
    program: Program, some: Ints, at: Ints, flowing: Bools, copied: Bools, again: Bools, value: Ints,
    needed: Ints, through: Ints, views: Sequence[tuple[int, int, int]] = (),
) -> Ints:  # fmt: skip
    """The last time at which each value is needed, where some operators need theirs as long as their results.

    `needed` holds for each value the last reader's time, `through` the last one that computes it again. `value` is
    that of each read, tensor t being value t as it is made. An operator that is `flowing` needs its operands until
    its results are needed no more, any other its `copied` results' only until nobody computes them again.
    `views` are (time, source, target) of values that are cut from others when they are read.
    """
    a = program.use_def
    # From the last to the first; a view by a negative number.
    order = [(-t, op) for t, op in zip(at[some].tolist(), some.tolist(), strict=True)]
    order += [(-v[0], -1 - k) for k, v in enumerate(views)]
    order.sort()
    final, late = needed.tolist(), through.tolist()
    values, later, result = value.tolist(), again.tolist(), a.result.tolist()
    begin, first = a.use_begin.tolist(), a.result_begin.tolist()
    flows, copies = flowing.tolist(), copied.tolist()
    for now, op in order:
        until = -now
        if op < 0:
            _, source, target = views[-1 - op]
            final[source] = max(final[source], final[target], until)
            continue
        flow = flows[op]
        for t in result[first[op] : first[op + 1]]:
            if flow and final[t] > until:
                until = final[t]
            if copies[t] and late[t] > until:
                until = late[t]
        for r in range(begin[op], begin[op + 1]):
            times = late if later[r] else final
            if times[values[r]] < until:
                times[values[r]] = until
    return np.array(final, dtype=np.int64)


def _epilogue_bytes(
    program: Program, product: int, absorbed: Mapping[int, Sequence[int]], held: Sequence[bool],
    needed: Sequence[int], maker: Sequence[int],
) -> float:  # fmt: skip
    """Bytes that a product writes in its readers' place; none where they go over an operand that ends there."""
    ops, tensors = program.operators, program.tensors
    passed, at = [], product
    while at in absorbed:
        passed += absorbed[at]
        at = ops[passed[-1]].results[0]
    made = set(passed)
    read = [a for i in passed for a in ops[i].operands]
    seen = {product}
    while read:
        a = read.pop()
        if isinstance(a, Literal) or a in seen or maker[a] in made:
            continue
        seen.add(a)
        if not held[a]:
            read += ops[maker[a]].operands  # computed again here, from these
        elif needed[a] <= passed[-1] and tensors[a].nbytes >= tensors[at].nbytes:
            return 0.0
    return tensors[at].nbytes


def _widening_casts(program: Program) -> Bools:
    """(tensors,) whether it is a cast of a smaller tensor."""
    a = program.use_def
    ops = np.flatnonzero(a.has_primitive(frozenset(("convert_element_type",))) & (np.diff(a.use_begin) > 0))
    made = a.result[a.result_begin[ops]]
    out = np.zeros(len(a.def_op), dtype=bool)
    out[made] = a.nbytes[made] > a.nbytes[a.use_tensor[a.use_begin[ops]]]
    return out


def _kept_before_reduction(program: Program, fluid: Bools, traits: FusionTraits) -> list[int]:
    """Of the tensors that all readers can compute, those that are summed, read twice more, and dear to compute."""
    a = program.use_def
    summed = (
        np.bincount(a.use_tensor, a.primitive_starts_with(_REDUCTION_PREFIXES)[a.use_op], len(a.def_op)) > 0
    )
    out, sources = [], {}
    order, begin = a.uses_by_tensor
    for t in np.flatnonzero(fluid & summed & a.has_primitive(_EXPENSIVE)[a.def_op]).tolist():
        users = {program.operators[u] for u in a.use_op[order[begin[t] : begin[t + 1]]].tolist()}
        sums = sum(u.primitive.startswith(_REDUCTION_PREFIXES) for u in users)
        if len(users) - sums > 1 and program.tensors[t].nbytes <= _largest_source_bytes(
            program, t, traits, sources
        ):
            out.append(t)
    return out


def _largest_source_bytes(
    program: Program, tensor: int, traits: FusionTraits, known: dict[int, float]
) -> float:
    """Bytes of the largest stored value that a tensor would be computed from again."""
    a = program.use_def
    todo = [tensor]
    while todo:
        t = todo[-1]
        op = program.operators[a.def_op[t]]
        if not traits.duplicable[op.id]:
            known[t] = program.tensors[t].nbytes
        before = [x for x in op.operands if not isinstance(x, Literal)] if t not in known else []
        ahead = [x for x in before if x not in known]
        if ahead:
            todo += ahead
            continue
        if t not in known:
            known[t] = max([known[x] for x in before], default=0.0)
        todo.pop()
    return known[tensor]


def _fuse_epilogues(
    program: Program, traits: FusionTraits, fluid: Bools, crossing: Bools
) -> dict[int, Sequence[int]]:
    """Products that are never stored, with the light operators after them: the result of the last is kept instead.

    It is no larger, and all that the product is read for goes through it: one operator makes it, or several that
    meet again, as ``g * s(h) + g * h * ds(h)`` in the gradient of a SiLU. Only where nothing that takes time runs
    in between: a product that waits for a later reader keeps its operands, one that does not is itself in memory.
    `fluid` is changed in place.
    """
    a, ops = program.use_def, program.operators
    order, begin = a.uses_by_tensor
    by, bounds = a.use_op[order].tolist(), begin.tolist()
    light = (traits.duplicable & (np.diff(a.result_begin) == 1)).tolist()
    heavy = np.concatenate([[0], np.cumsum(unfusible_operators(program))]).tolist()
    leaves = crossing.tolist()
    absorbed: dict[int, Sequence[int]] = {}
    taken: set[int] = set()

    def through(first: Operator, t: int) -> list[int]:
        """The operators that a tensor goes through until it goes through one alone; none if there is none."""
        passed: list[int] = []
        waiting = set(by[bounds[t] : bounds[t + 1]])
        while waiting:
            u = min(waiting)
            if not light[u] or u in taken or ops[u].repeat != first.repeat:
                break
            if heavy[u] > heavy[first.id + 1] or (passed and leaves[t]):
                break
            passed.append(u)
            waiting.remove(u)
            if not waiting:
                return passed
            t = ops[u].results[0]
            waiting.update(by[bounds[t] : bounds[t + 1]])
        return []

    # In the program's order: products, and results that now stand for one.
    products = np.isin(a.primitive_id, [k for (_, name), k in a.primitive_ids.items() if name in PRODUCTS])
    ahead = [(i, t) for i in np.flatnonzero(products).tolist() for t in ops[i].results]
    while ahead:
        i, t = heapq.heappop(ahead)
        passed = [] if leaves[t] else through(ops[i], t)
        if not passed:
            continue
        r = ops[passed[-1]].results[0]
        if program.tensors[r].nbytes <= program.tensors[t].nbytes and bounds[r] < bounds[r + 1]:
            taken.update(passed)
            heapq.heappush(ahead, (passed[-1], r))
            absorbed[t], fluid[r] = passed, False
    return absorbed


def _call_outputs(block: Block) -> list[int]:
    """Tensors that leave a call's block: a `remat` or a custom rule hands them out of its own scope."""
    inner = [b for call in calls_of(block) for b in call.blocks]
    return [a for b in inner for a in b.outputs if not isinstance(a, Literal)]
