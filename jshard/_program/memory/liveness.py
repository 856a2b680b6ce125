"""Liveness under XLA-like fusion: which tensors a compiled program materializes, and the last use of each.

Problem.  A traced training step names every value that the backward pass reads. A compiler keeps far fewer: an
elementwise value costs less to recompute inside each of its readers than to write and read back. Such a value is
*fused*: never stored. What it was computed from stays live instead, until the last of those readers.

Idea.  Everything else is *materialized*: results of matrix products, convolutions, gathers, sorts, reductions and
loops, arguments, and values that leave a loop or the program. Five refinements:

- Epilogues. A bias or residual that is added to a product is written by the product's own kernel, so the sum is
  materialized and the product is not, if the addition comes next. The same holds for several elementwise operators
  whose results meet again, such as a gradient times a SiLU's derivative.
- Exponentials under a reduction. The exponential of a softmax (summed, and read twice more) is materialized: compilers
  write it in the pass that sums it and do not recompute it, unless its source is smaller, such as scores in bfloat16
  under an exponential in float32.
- Values read at several places. What several slices, pads or concatenations read would be computed once for each of them,
  and level by level of an associative scan twice as often as the level after: it is materialized, if it takes any work.
- Duplicated casts. A cast to a wider type is recomputed by each reader that can; readers that cannot, such as the
  gather of a cross entropy, get one materialized copy.
- Updates in place (`in_place.py`).

These rules were read off the buffer assignments of the TPU compiler (v5e) for GPT training steps in float32 and
bfloat16: of a GELU's eight intermediate values one is kept, of a softmax's the exponential alone.

The model of time (`kernel_fusion.py`) groups operators by the same values.

Worked case.  `h = x @ w + b; y = tanh(h) @ v` and its gradient: h is materialized, `x @ w` and `tanh(h)` are not.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from jshard._core.arrays import Bools, Ints
from jshard._program.graph import Block, Literal, Operator, Program, calls_of
from jshard._program.memory.fusion_traits import REDUCTION_PREFIXES, FusionTraits, fusion_traits
from jshard._program.memory.in_place import in_place_updates
from jshard._program.memory.unfusible import unfusible_operators
from jshard._program.operators import PRODUCTS


_MOVING = frozenset("slice dynamic_slice pad concatenate rev".split())
_WITHOUT_WORK = frozenset(
    "broadcast_in_dim iota convert_element_type rounded_sum reshape squeeze expand_dims neg slice".split()
)
_EXPENSIVE = frozenset("exp exp2 expm1 log log1p pow erf".split())


@dataclasses.dataclass(frozen=True, eq=False)
class Liveness:
    """What a compiled program holds in memory, and until when; one entry a tensor.

    - `materialized`: whether the tensor is in memory at all.
    - `last_use`: the last operator that needs it, through readers that are fused into theirs.
    - `duplicated_cast`: whether it is materialized only for readers that cannot recompute it from its source.
    - `epilogue_bytes`: of a product that is not materialized, the bytes that its kernel writes in place of it.
    - `sliced_in_readers`: whether a reader of a slice computes that alone: of a value that is fused, but by a kernel that
        writes it whole (a product before its epilogue, a scatter that fuses).
    - `traits`: the fusion traits of the operators.
    - `in_place`: operators: updates that overwrite their first operand.
    """

    materialized: Sequence[bool]
    last_use: Sequence[int]
    duplicated_cast: Sequence[bool]
    epilogue_bytes: Sequence[float]
    sliced_in_readers: Sequence[bool]
    traits: FusionTraits
    in_place: frozenset[int] = frozenset()


def liveness(program: Program, donated: Collection[int] = ()) -> Liveness:
    """The liveness of a program's tensors; `donated` are the flat indices of the donated arguments. Memoised."""
    key = ("liveness", frozenset(donated))
    if key not in program.memo:
        program.memo[key] = _liveness(program, donated)
    return program.memo[key]


def _liveness(program: Program, donated: Collection[int]) -> Liveness:
    ops, a = program.operators, program.use_def
    traits = fusion_traits(program)
    escaping = np.zeros(len(a.def_op), dtype=bool)
    escaping[_call_outputs(program.body)] = True
    fused = _recomputed_by_all_readers(program, traits, escaping)
    epilogues, fused = _fuse_epilogues(program, traits, fused, escaping)

    has_uses = np.bincount(a.use_tensor, minlength=len(a.def_op)) > 0
    stored = has_uses & ~fused
    stored[list(epilogues)] = False
    materialized = stored | a.has_kind("input", "const")[a.def_op]
    casts = materialized & ~escaping & _widening_casts(program)
    last_use = _last_uses(program, traits, fused, casts)
    kept = [i for k, i in enumerate(program.inputs) if k not in frozenset(donated)]
    last_use[a.result[a.result_begin[np.array(kept, dtype=np.int64)]]] = len(ops) - 1

    is_materialized, last, def_op = materialized.tolist(), last_use.tolist(), a.def_op.tolist()
    epilogue_bytes = [0.0] * len(def_op)
    for t in epilogues:
        if ops[def_op[t]].primitive in PRODUCTS:
            epilogue_bytes[t] = _epilogue_bytes(program, t, epilogues, is_materialized, last, def_op)
    in_place = in_place_updates(program, donated, is_materialized, traits.duplicable.tolist())
    sliced = ~(materialized | unfusible_operators(program)[a.def_op])
    return Liveness(is_materialized, last, casts.tolist(), epilogue_bytes, sliced.tolist(), traits, in_place)


def _recomputed_by_all_readers(program: Program, traits: FusionTraits, escaping: Bools) -> Bools:
    """(tensors,) whether every reader recomputes the tensor, so that it is fused."""
    a = program.use_def
    n = len(a.def_op)
    has_uses = np.bincount(a.use_tensor, minlength=n) > 0
    refusing = ~traits.fuses_operands[a.use_op] | (a.repeat[a.use_op] != a.repeat[a.def_op[a.use_tensor]])
    refused = np.bincount(a.use_tensor, refusing, n) > 0
    fused = traits.duplicable[a.def_op] & has_uses & ~escaping & ~refused
    fused[_kept_under_reduction(program, fused, traits)] = False
    return fused & ~_read_at_several_places(program)


def _read_at_several_places(program: Program) -> Bools:
    """(tensors,) whether several operators read other elements of the tensor than they compute, as slices and pads do.

    A kernel computes an operand once for each place at which it reads it, and level by level of an associative scan that
    is twice as often. So compilers store such values, but those that take no work.
    """
    a = program.use_def
    moving = a.has_primitive(_MOVING)[a.use_op]
    readers = np.unique(np.stack([a.use_tensor[moving], a.use_op[moving]]), axis=1)[0]
    without_work = a.has_primitive(_WITHOUT_WORK)[a.def_op]
    return (np.bincount(readers, minlength=len(a.def_op)) > 1) & ~without_work


def _last_uses(program: Program, traits: FusionTraits, fused: Bools, casts: Bools) -> Ints:
    """(tensors,) the last operator that needs each."""
    a = program.use_def
    n = len(program.operators)
    run_at = np.where(a.has_kind("output"), n - 1, np.arange(n))
    last_read, last_recomputed = a.def_op.copy(), a.def_op.copy()
    recomputes = casts[a.use_tensor] & traits.fuses_operands[a.use_op]
    np.maximum.at(last_read, a.use_tensor[~recomputes], run_at[a.use_op[~recomputes]])
    np.maximum.at(last_recomputed, a.use_tensor[recomputes], run_at[a.use_op[recomputes]])
    all_fused = (np.diff(a.result_begin) > 0) & (np.bincount(a.def_op, ~fused, n) == 0)
    return propagate_last_use(
        program,
        DirectUses(run_at, all_fused, casts, a.use_tensor, recomputes, last_read, last_recomputed),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class DirectUses:
    """When values are read, before uses are propagated through fused operators.

    A value is a tensor in a layout: value t is tensor t as its operator makes it, higher numbers are resharded copies.
    Times are operators, or actions of a schedule.

    - `run_at`: (operators,) when each operator runs, -1 for never.
    - `fused`: (operators,) whether all results of the operator are recomputed in their readers.
    - `duplicated_cast`: (tensors,) as in `Liveness`.
    - `read_value`: (reads,) the value of each read.
    - `recomputes`: (reads,) whether the reader recomputes a duplicated cast instead of reading it.
    - `last_read`, `last_recomputed`: (values,) the last time that a reader reads, or recomputes, the value.
    - `slices`: (time, source value, sliced value) of slices that are computed where they are read.
    """

    run_at: Ints
    fused: Bools
    duplicated_cast: Bools
    read_value: Ints
    recomputes: Bools
    last_read: Ints
    last_recomputed: Ints
    slices: Sequence[tuple[int, int, int]] = ()


def propagate_last_use(program: Program, uses: DirectUses) -> Ints:
    """(values,) the last time that each value is needed.

    A fused operator needs its operands until the last use of its results; an operator whose result is a duplicated
    cast, until the last reader that recomputes that; a slice its source until the last use of the slice. One pass over
    those operators and slices, from the last to the first.
    """
    a = program.use_def
    makes_cast = np.bincount(a.def_op, uses.duplicated_cast, len(program.operators)) > 0
    extending = np.flatnonzero((uses.fused | makes_cast) & (uses.run_at >= 0))
    # Latest first; slice k is numbered -1 - k.
    order = [(-t, op) for t, op in zip(uses.run_at[extending].tolist(), extending.tolist(), strict=True)]
    order += [(-time, -1 - k) for k, (time, _, _) in enumerate(uses.slices)]
    order.sort()
    last_read, last_recomputed = uses.last_read.tolist(), uses.last_recomputed.tolist()
    read_value, recomputes = uses.read_value.tolist(), uses.recomputes.tolist()
    use_begin, result, result_begin = a.use_begin.tolist(), a.result.tolist(), a.result_begin.tolist()
    fused, duplicated_cast = uses.fused.tolist(), uses.duplicated_cast.tolist()
    for now, op in order:
        until = -now
        if op < 0:
            _, source, sliced = uses.slices[-1 - op]
            last_read[source] = max(last_read[source], last_read[sliced], until)
            continue
        is_fused = fused[op]
        for t in result[result_begin[op] : result_begin[op + 1]]:
            if is_fused and last_read[t] > until:
                until = last_read[t]
            if duplicated_cast[t] and last_recomputed[t] > until:
                until = last_recomputed[t]
        for r in range(use_begin[op], use_begin[op + 1]):
            times = last_recomputed if recomputes[r] else last_read
            if times[read_value[r]] < until:
                times[read_value[r]] = until
    return np.array(last_read, dtype=np.int64)


def _fuse_epilogues(
    program: Program, traits: FusionTraits, fused: Bools, escaping: Bools
) -> tuple[dict[int, Sequence[int]], Bools]:
    """Products that are fused with the operators after them, and `fused` without the results that stand for them.

    Gives, for each such product's result, the operators of its epilogue. The result of the last of them is materialized
    instead: it is no larger, and all that the product is read for goes through it. One operator makes it, or several
    whose results meet again, as in `g * s(h) + g * h * ds(h)`, the gradient of a SiLU. Only where no unfusible
    operator runs in between: a product that waits for a later reader is itself in memory.
    """
    a, ops = program.use_def, program.operators
    order, begin = a.uses_by_tensor
    readers, bounds = a.use_op[order].tolist(), begin.tolist()
    fusible = (traits.duplicable & (np.diff(a.result_begin) == 1)).tolist()
    unfusible_before = np.concatenate([[0], np.cumsum(unfusible_operators(program))]).tolist()
    leaves = escaping.tolist()
    epilogues: dict[int, Sequence[int]] = {}
    taken: set[int] = set()
    fused = fused.copy()

    def epilogue_of(product: Operator, t: int) -> list[int]:
        """The operators that tensor t goes through until one operator alone has all of it; none if there is none."""
        passed: list[int] = []
        waiting = set(readers[bounds[t] : bounds[t + 1]])
        while waiting:
            u = min(waiting)
            if not fusible[u] or u in taken or ops[u].repeat != product.repeat:
                break
            if unfusible_before[u] > unfusible_before[product.id + 1] or (passed and leaves[t]):
                break
            passed.append(u)
            waiting.remove(u)
            if not waiting:
                return passed
            t = ops[u].results[0]
            waiting.update(readers[bounds[t] : bounds[t + 1]])
        return []

    # In program order: products, and the results that stand for one, which may have an epilogue again.
    products = np.isin(a.primitive_id, [k for (_, name), k in a.primitive_ids.items() if name in PRODUCTS])
    queue = [(i, t) for i in np.flatnonzero(products).tolist() for t in ops[i].results]
    while queue:
        i, t = heapq.heappop(queue)
        passed = [] if leaves[t] else epilogue_of(ops[i], t)
        if not passed:
            continue
        r = ops[passed[-1]].results[0]
        if program.tensors[r].nbytes <= program.tensors[t].nbytes and bounds[r] < bounds[r + 1]:
            taken.update(passed)
            heapq.heappush(queue, (passed[-1], r))
            epilogues[t], fused[r] = passed, False
    return epilogues, fused


def _epilogue_bytes(
    program: Program, product: int, epilogues: Mapping[int, Sequence[int]], materialized: Sequence[bool],
    last_use: Sequence[int], def_op: Sequence[int],
) -> float:  # fmt: skip
    """Bytes that a product writes in place of its own result; none if they go over an operand that ends there."""
    ops, tensors = program.operators, program.tensors
    passed, final = [], product
    while final in epilogues:
        passed += epilogues[final]
        final = ops[passed[-1]].results[0]
    inside = set(passed)
    unread = [a for i in passed for a in ops[i].operands]
    seen = {product}
    while unread:
        a = unread.pop()
        if isinstance(a, Literal) or a in seen or def_op[a] in inside:
            continue
        seen.add(a)
        if not materialized[a]:
            unread += ops[def_op[a]].operands  # recomputed in this kernel, from these
        elif last_use[a] <= passed[-1] and tensors[a].nbytes >= tensors[final].nbytes:
            return 0.0
    return tensors[final].nbytes


def _widening_casts(program: Program) -> Bools:
    """(tensors,) whether the tensor is a cast of a smaller one."""
    a = program.use_def
    casts = a.has_primitive(frozenset(("convert_element_type",))) & (np.diff(a.use_begin) > 0)
    ops = np.flatnonzero(casts)
    results = a.result[a.result_begin[ops]]
    out = np.zeros(len(a.def_op), dtype=bool)
    out[results] = a.nbytes[results] > a.nbytes[a.use_tensor[a.use_begin[ops]]]
    return out


def _kept_under_reduction(program: Program, fused: Bools, traits: FusionTraits) -> list[int]:
    """Of the fused tensors those that are expensive, reduced, read twice more, and no larger than their source."""
    a = program.use_def
    reduces = a.primitive_starts_with(REDUCTION_PREFIXES)
    reduced = np.bincount(a.use_tensor, reduces[a.use_op], len(a.def_op)) > 0
    out: list[int] = []
    source_bytes: dict[int, float] = {}
    order, begin = a.uses_by_tensor
    for t in np.flatnonzero(fused & reduced & a.has_primitive(_EXPENSIVE)[a.def_op]).tolist():
        users = set(a.use_op[order[begin[t] : begin[t + 1]]].tolist())
        others = sum(not reduces[u] for u in users)
        if others > 1 and program.tensors[t].nbytes <= _largest_source_bytes(
            program, t, traits, source_bytes
        ):
            out.append(t)
    return out


def _largest_source_bytes(
    program: Program, tensor: int, traits: FusionTraits, memo: dict[int, float]
) -> float:
    """Bytes of the largest value from which a tensor would be recomputed; `memo` holds those already known."""
    a = program.use_def
    stack = [tensor]
    while stack:
        t = stack[-1]
        op = program.operators[a.def_op[t]]
        if not traits.duplicable[op.id]:
            memo[t] = program.tensors[t].nbytes
        sources = [x for x in op.operands if not isinstance(x, Literal)] if t not in memo else []
        unknown = [x for x in sources if x not in memo]
        if unknown:
            stack += unknown
            continue
        if t not in memo:
            memo[t] = max([memo[x] for x in sources], default=0.0)
        stack.pop()
    return memo[tensor]


def _call_outputs(block: Block) -> list[int]:
    """Tensors that leave a call's block: a `remat` or a custom rule returns them from its own scope."""
    inner = [b for call in calls_of(block) for b in call.blocks]
    return [a for b in inner for a in b.outputs if not isinstance(a, Literal)]
