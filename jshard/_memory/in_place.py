"""Which operators write their result over their first operand, and so cost what they write and take no room.

Problem.  A decoder writes one row a turn into a cache of gigabytes. ``dynamic_update_slice`` gives a new array, but no
compiler makes one where nobody needs the old: it writes the row into the old one's buffer. A loop's carry that is
updated so is one buffer as well, from before the loop until after it.

Idea.  An update writes over its first operand if nobody reads that operand later, and if its buffer may be written
over: an argument's if it is donated, what an operator or a loop has made, and always what goes round a loop, whose
buffer is the loop's own. "Later" is in the program's order, through operators that are computed where they are read; a
branch that is not taken reads nothing, and what goes into the next turn is read when the turn ends.

Worked case.  ``c, y = f(c)`` in a loop, with ``d = c.at[i].set(row); y = d.sum()`` and d the next c: the update
writes over c. With ``y = c.sum()`` computed after it, c is still needed and d is a copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

from jshard._program.graph import Atom, Block, Literal, Operator, Program, calls_of, operators_of


CARRY_KINDS = ("scan_carry", "scan_sum", "while_carry")
_OWNS_BUFFER = ("eqn", "scan_ys", "cond_join", *CARRY_KINDS)  # makers whose results have buffers of their own


def is_update(primitive: str) -> bool:
    """Whether a primitive gives its first operand with some elements changed.

    >>> updates("dynamic_update_slice"), updates("scatter-add"), updates("add")
    (True, True, False)
    """
    return primitive == "dynamic_update_slice" or primitive.startswith("scatter")


def in_place_updates(
    program: Program, donated: Collection[int], stored: Sequence[bool], duplicable: Sequence[bool]
) -> frozenset[int]:
    """The operators that write over their first operand.

    Arguments:

    - `donated`: flat indices of arguments whose buffers may be written over.
    - `stored`: for each tensor whether it is in memory at all.
    - `light`: for each operator whether it is computed where its result is read, if that is not stored.
    """
    some = [op for op in program.operators if op.kind == "eqn" and is_update(op.primitive)]
    if not some:
        return frozenset()
    times = _LastReads(program, stored, duplicable)
    given = {program.inputs[k] for k in donated}
    # A slice of a stack that goes through a loop, updated: in the stack, if that may be written over when the loop ends.
    for xs in updated_stacks(program).values():
        stack = program.operators[xs.xs].operands[0]
        if _may_overwrite(stack, xs.last_operator, xs.xs, program, given, stored, times):
            given.add(xs.xs)
    return frozenset(
        op.id
        for op in some
        if op.operands[0] not in op.operands[1:]
        and _may_overwrite(op.operands[0], op.id, op.id, program, given, stored, times)
    )


def _may_overwrite(
    tensor: Atom, until: int, seen_from: int, program: Program, given: Collection[int], stored: Sequence[bool],
    times: _LastReads,
) -> bool:  # fmt: skip
    """Whether a tensor is in memory, in a buffer that may be written over, and nobody reads it later than `until`."""
    if isinstance(tensor, Literal) or not stored[tensor]:
        return False
    maker, _ = program.defs()[tensor]
    if program.operators[maker].kind not in _OWNS_BUFFER and maker not in given:
        return False
    return times.last_read(tensor, seen_from) <= until


@dataclasses.dataclass(frozen=True)
class UpdatedStack:
    """A boundary operator that hands a loop the slices of a stack, each of which comes back updated.

    `links` are the updates that a slice goes through, `end` is the last operator of a turn.
    """

    xs: int
    updates: tuple[int, ...]
    last_operator: int


def updated_stacks(program: Program) -> Mapping[int, UpdatedStack]:
    """Stacked results of a `scan` that are its stacked operands with every slice updated: by boundary operator.

    A cache of all layers goes through a loop over them so: as slices in, as slices out. It may be one buffer that goes
    round instead, in which every turn updates its own part.

    >>> import jax, jax.numpy as jnp
    >>> from jshard._program.trace import build
    >>> step = lambda x, c: jax.lax.scan(lambda x, k: (x + 1, k.at[0].set(x)), x, c)
    >>> traced = jax.make_jaxpr(step)(0.0, jnp.ones((4, 8)))
    >>> [len(s.links) for s in stacked(build(traced, name="step", input_names=[])).values()]
    [1]
    """
    if "stacked" not in program.memo:
        program.memo["stacked"] = dict(_find_stacks(program))
    return program.memo["stacked"]


def _find_stacks(program: Program) -> Iterator[tuple[int, UpdatedStack]]:
    ops, tensors, consumers = program.operators, program.tensors, program.uses()
    for call in calls_of(program.body):
        if call.kind != "scan":
            continue
        own = {step for step in call.blocks[0].steps if isinstance(step, int)}
        slices = {ops[i].results[0]: i for i in call.boundary["xs"]}
        around = {i for ids in call.boundary.values() for i in ids}
        end = max(operators_of(call.blocks[0]), default=-1)
        for ys in call.boundary["ys"]:
            links, t = [], ops[ys].operands[0]
            while isinstance(t, int) and t not in slices:
                maker, _ = program.defs()[t]
                if maker not in own or not is_update(ops[maker].primitive):
                    break
                links.append(maker)
                t = ops[maker].operands[0]
            if not isinstance(t, int):
                continue
            xs = slices.get(t)
            stack = ops[xs].operands[0] if xs is not None and links else None
            if xs is None or not isinstance(stack, int):
                continue
            whole, result = tensors[stack], tensors[ops[ys].results[0]]
            alone = sum(u in around for u, _ in consumers[stack]) == 1
            # What a link writes over is not read after it.
            read = all(
                max(u for u, _ in consumers[ops[i].operands[0]]) <= i
                and not any(u in around for u, _ in consumers[ops[i].operands[0]])
                for i in links
            )
            if alone and read and (whole.shape, whole.dtype) == (result.shape, result.dtype):
                del slices[t]
                yield ys, UpdatedStack(xs, tuple(reversed(links)), end)


class _LastReads:
    """When tensors are read last, as seen from an operator."""

    def __init__(self, program: Program, stored: Sequence[bool], light: Sequence[bool]):
        self.program, self.stored, self.light = program, stored, light
        self.ends = iteration_ends(program)
        self.branch = _branches_of_operators(program)

    def last_read(self, tensor: int, seen_from: int) -> int:
        """The last operator that reads a tensor, but in branches that exclude `seen_from`."""
        here = self.branch.get(seen_from, {})
        found, todo, known = -1, [tensor], {tensor}
        while todo:
            for u, k in self.program.uses()[todo.pop()]:
                there = self.branch.get(u, {})
                if any(here.get(call, b) != b for call, b in there.items()):
                    continue
                found = max(found, self.ends.get((u, k), u))
                results = self.program.operators[u].results
                if self.light[u] and not any(self.stored[r] for r in results):
                    todo += [r for r in results if r not in known]
                    known.update(results)
        return found


def iteration_ends(program: Program) -> Mapping[tuple[int, int], int]:
    """(boundary operator, operand) of what goes into a loop's next turn -> the last operator of the turn."""
    out: dict[tuple[int, int], int] = {}
    for call in calls_of(program.body):
        end = max(call.inner_operators, default=-1)
        for i in call.boundary.get("carry", ()) if end >= 0 else ():
            out.update({(i, k): end for k in range(1, len(program.operators[i].operands))})
    return out


def _branches_of_operators(program: Program) -> Mapping[int, Mapping[int, int]]:
    """Operator -> the branches that it stands in: which one of each `cond`, by a number of its own."""
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
    """Tensors that lie in the buffer of some loop's carry, if updates write over their operands as `over` says.

    Those are what a turn is given and, written over that, what it gives to the next; and in a loop inside, which goes
    on with such a tensor, what that loop gives. `also` lie there, and what is made over them.
    """
    ops = program.operators
    # The last result is what the loop gives; the others are what its test and a turn are given.
    out = {r for op in ops if op.kind in CARRY_KINDS for r in op.results[:-1]} | set(also)
    out |= {ops[s.xs].results[0] for s in updated_stacks(program).values()}
    for op in ops:  # in the program's order: what is written over comes first
        into = op.operands[0] if op.operands else None
        if into in out and (op.id in in_place or op.kind in CARRY_KINDS):
            out.update(op.results)
    return frozenset(out)


def touched_operands(op: Operator, reads: Sequence[int]) -> tuple[int, ...]:
    """The operands whose bytes an update in place moves: each as often as they pass through memory.

    `reads` are the operands that lie in memory: indices and update are read, as many bytes as the update has are
    written, and read before if they are combined with the old ones.
    """
    update = 1 if op.primitive == "dynamic_update_slice" else 2
    combines = op.primitive not in ("dynamic_update_slice", "scatter")
    return (*(i for i in reads if i != 0), update, *([update] * combines))
