"""Updates in place: operators that overwrite their first operand, and so cost what they write and occupy no memory.

Problem.  A decoder writes one row an iteration into a cache of gigabytes. `dynamic_update_slice` returns a new array,
but no compiler allocates one where the old array is dead: it writes the row into the old one's buffer. A loop's carry
that is updated so is one buffer as well, from before the loop until after it.

Idea.  An update overwrites its first operand if that is not read later, and if its buffer may be overwritten: an
argument's if it is donated, that of the result of an operator or a loop, and always that of a loop's carry, which
belongs to the loop. "Later" is in program order, through operators that are recomputed in their readers; a branch that
is not taken reads nothing, and what goes into the next iteration is read at the end of the iteration.

Worked case.  `c, y = f(c)` in a loop, with `d = c.at[i].set(row); y = d.sum()` and d the next c: the update
overwrites c. With `y = c.sum()` computed after it, c is still live and d is a copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

from jshard._program.graph import Atom, Block, Call, Literal, Operator, Program, calls_of, operators_of
from jshard._program.stage_shift import ADD_TO_ROUND


CARRY_KINDS = ("scan_carry", "scan_sum", "while_carry")
_OWNS_BUFFER = ("eqn", "scan_ys", "cond_join", *CARRY_KINDS)  # kinds of operators that allocate their results


def is_update(primitive: str) -> bool:
    """Whether a primitive returns its first operand with some elements changed.

    >>> is_update("dynamic_update_slice"), is_update("scatter-add"), is_update("add")
    (True, True, False)
    """
    return primitive in ("dynamic_update_slice", ADD_TO_ROUND) or primitive.startswith("scatter")


def update_operand(primitive: str) -> int:
    """Number of the operand that has the new elements of an update."""
    return 2 if primitive.startswith("scatter") else 1


def in_place_updates(
    program: Program, donated: Collection[int], stored: Sequence[bool], duplicable: Sequence[bool]
) -> frozenset[int]:
    """The operators that overwrite their first operand.

    Arguments:

    - `donated`: flat indices of arguments whose buffers may be overwritten.
    - `stored`: (tensors,) whether each is in memory at all.
    - `duplicable`: (operators,) whether each is recomputed in its readers, if its results are not stored.
    """
    updates = [op for op in program.operators if op.kind == "eqn" and is_update(op.primitive)]
    if not updates:
        return frozenset()
    reads = _LastReads(program, stored, duplicable)
    writable = {program.inputs[k] for k in donated}
    # Slices of a stack that goes through a loop: they may be overwritten if the stack may be when the loop ends.
    for stack in updated_stacks(program).values():
        whole = program.operators[stack.xs].operands[0]
        if _may_overwrite(whole, stack.last_operator, stack.xs, writable, reads):
            writable.add(stack.xs)
    return frozenset(
        op.id
        for op in updates
        if op.operands[0] not in op.operands[1:]
        and _may_overwrite(op.operands[0], op.id, op.id, writable, reads)
    )


def _may_overwrite(
    tensor: Atom, until: int, seen_from: int, writable: Collection[int], reads: _LastReads
) -> bool:
    """Whether a tensor is in memory, in a buffer that may be overwritten, and is not read later than `until`.

    `writable` are operators whose results may be overwritten beside those that allocate them.
    """
    if isinstance(tensor, Literal) or not reads.stored[tensor]:
        return False
    def_op, _ = reads.program.defs()[tensor]
    if reads.program.operators[def_op].kind not in _OWNS_BUFFER and def_op not in writable:
        return False
    return reads.last_read(tensor, seen_from) <= until


@dataclasses.dataclass(frozen=True)
class UpdatedStack:
    """A stack that a `scan` slices, and whose updated slices it stacks again.

    `xs` is the boundary operator that slices it, `updates` the operators that a slice goes through, `last_operator` the
    last one of an iteration.
    """

    xs: int
    updates: tuple[int, ...]
    last_operator: int


def updated_stacks(program: Program) -> Mapping[int, UpdatedStack]:
    """Stacked results of a `scan` that are its stacked operands with every slice updated: by `ys` boundary operator.

    A cache of all layers goes through a loop over them so: as slices in, as slices out. It may be one buffer that the
    loop carries instead, in which every iteration updates its own part. Memoised.

    >>> import jax, jax.numpy as jnp
    >>> from jshard._program.trace import build
    >>> step = lambda x, c: jax.lax.scan(lambda x, k: (x + 1, k.at[0].set(x)), x, c)
    >>> traced = jax.make_jaxpr(step)(0.0, jnp.ones((4, 8)))
    >>> [len(s.updates) for s in updated_stacks(build(traced, name="step", input_names=[])).values()]
    [1]
    """
    if "stacked" not in program.memo:
        program.memo["stacked"] = {
            ys: stack
            for call in calls_of(program.body)
            if call.kind == "scan"
            for ys, stack in _updated_stacks_of(call, program)
        }
    return program.memo["stacked"]


def _updated_stacks_of(scan: Call, program: Program) -> Iterator[tuple[int, UpdatedStack]]:
    ops, tensors, uses = program.operators, program.tensors, program.uses()
    own = {step for step in scan.blocks[0].steps if isinstance(step, int)}
    slices = {ops[i].results[0]: i for i in scan.boundary["xs"]}
    boundary = {i for ids in scan.boundary.values() for i in ids}
    end = max(operators_of(scan.blocks[0]), default=-1)

    def is_overwritten(update: int) -> bool:
        """Whether what an update overwrites is not read after it, in this iteration or the next."""
        overwritten = ops[update].operands[0]
        assert isinstance(overwritten, int)
        readers = [u for u, _ in uses[overwritten]]
        return max(readers) <= update and boundary.isdisjoint(readers)

    for ys in scan.boundary["ys"]:
        updates, t = [], ops[ys].operands[0]
        while isinstance(t, int) and t not in slices:
            def_op, _ = program.defs()[t]
            if def_op not in own or not is_update(ops[def_op].primitive):
                break
            updates.append(def_op)
            t = ops[def_op].operands[0]
        xs = slices.get(t) if isinstance(t, int) else None
        if xs is None or not updates:
            continue
        stack = ops[xs].operands[0]
        if not isinstance(stack, int):
            continue
        before, after = tensors[stack], tensors[ops[ys].results[0]]
        enters_once = sum(u in boundary for u, _ in uses[stack]) == 1
        same_type = (before.shape, before.dtype) == (after.shape, after.dtype)
        if enters_once and same_type and all(map(is_overwritten, updates)):
            del slices[ops[xs].results[0]]
            yield ys, UpdatedStack(xs, tuple(reversed(updates)), end)


class _LastReads:
    """When tensors are read last, as seen from an operator."""

    def __init__(self, program: Program, stored: Sequence[bool], duplicable: Sequence[bool]):
        self.program, self.stored, self.duplicable = program, stored, duplicable
        self.iteration_end = iteration_ends(program)
        self.branches = _branches_of_operators(program)

    def last_read(self, tensor: int, seen_from: int) -> int:
        """The last operator that reads a tensor, without those in branches that exclude `seen_from`; -1 for none."""
        taken = self.branches.get(seen_from, {})
        last, queue, seen = -1, [tensor], {tensor}
        while queue:
            for u, k in self.program.uses()[queue.pop()]:
                if any(taken.get(cond, b) != b for cond, b in self.branches.get(u, {}).items()):
                    continue
                last = max(last, self.iteration_end.get((u, k), u))
                results = self.program.operators[u].results
                if self.duplicable[u] and not any(self.stored[r] for r in results):
                    queue += [r for r in results if r not in seen]
                    seen.update(results)
        return last


def iteration_ends(program: Program) -> Mapping[tuple[int, int], int]:
    """(boundary operator, operand) of what a loop hands to its next iteration -> the last operator of the iteration."""
    out: dict[tuple[int, int], int] = {}
    for call in calls_of(program.body):
        end = max(call.inner_operators, default=-1)
        for i in call.boundary.get("carry", ()) if end >= 0 else ():
            out.update({(i, k): end for k in range(1, len(program.operators[i].operands))})
    return out


def _branches_of_operators(program: Program) -> Mapping[int, Mapping[int, int]]:
    """Operator -> the branches that it is in: {id of a `cond`: number of the branch}."""
    out: dict[int, dict[int, int]] = {}

    def walk(block: Block, above: dict[int, int]) -> None:
        for step in block.steps:
            if isinstance(step, int):
                if above:
                    out[step] = above
                continue
            for k, inner in enumerate(step.blocks):
                walk(inner, {**above, id(step): k} if step.kind == "cond" else above)
            if above:
                out.update((i, above) for ids in step.boundary.values() for i in ids)

    if any(call.kind == "cond" for call in calls_of(program.body)):
        walk(program.body, {})
    return out


def carry_buffer_tensors(
    program: Program, in_place: Collection[int], also: Collection[int] = ()
) -> frozenset[int]:
    """Tensors that share the buffer of some loop's carry, if the updates `in_place` overwrite their operands.

    Those are the carry that an iteration starts from and what is written over it, up to what it hands to the next; and
    the results of inner loops that carry such a tensor. The tensors `also` share it too, and what is written over them.
    """
    ops = program.operators
    # The last result of a carry's boundary operator leaves the loop; the others are seen by its test and its body.
    out = {r for op in ops if op.kind in CARRY_KINDS for r in op.results[:-1]} | set(also)
    out |= {ops[s.xs].results[0] for s in updated_stacks(program).values()}
    for op in ops:  # in program order: what is overwritten comes first
        overwritten = op.operands[0] if op.operands else None
        if overwritten in out and (op.id in in_place or op.kind in CARRY_KINDS):
            out.update(op.results)
    return frozenset(out)


def touched_operands(op: Operator, reads: Sequence[int]) -> tuple[int, ...]:
    """Indices of the operands whose bytes an update in place moves: each as often as they pass through memory.

    `reads` are the operands that are in memory: indices and update are read, as many bytes as the update has are
    written, and read before if they are combined with the old ones.
    """
    update = update_operand(op.primitive)
    combines = op.primitive not in ("dynamic_update_slice", "scatter")
    return (*(i for i in reads if i != 0), update, *([update] * combines))
