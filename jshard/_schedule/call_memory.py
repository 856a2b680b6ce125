"""How loops and branches use memory: which buffers carries, stacked results and results of branches are in.

A loop's carry is one buffer from before the loop until after it: that of the initial value, if that is dead, else a new
one. In the body, the value for the next iteration is written there as soon as what the iteration started from is dead;
else beside it, until the iteration ends. Stacked results are allocated before the first iteration. The slice of a stack is
read from the stack, unless a loop inside reads it: what goes into a loop is a buffer (seen on v5e with libtpu 0.0.42, where
a tick's activations of all layers of a stage are copied out of those of all ticks).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from jshard._program.graph import Literal
from jshard._program.memory.in_place import is_update
from jshard._schedule.assignment import Assignment, Value
from jshard._schedule.buffers import ActionScope, Buffer, BufferSizes
from jshard._schedule.last_uses import last_uses
from jshard._schedule.loop_stacks import CarriedStack, carried_stacks
from jshard._schedule.writer import Action, Reshard, RunCall, RunOperator


@dataclasses.dataclass(frozen=True, eq=False)
class BodyMemory:
    """What a body starts with: `lent` values in the caller's buffers, those of them that are live after the body
    (`outliving`), buffers for values of the next iteration, and slices of stacks that are copied, with their bytes."""

    lent: Mapping[Value, Buffer]
    outliving: Collection[Value] = ()
    next_iteration: Mapping[Value, Buffer] = dataclasses.field(default_factory=dict)
    copied_slices: Sequence[tuple[Value, float]] = ()


@dataclasses.dataclass(eq=False)
class CallMemory:
    """How a call uses memory.

    - `results`: its results and their buffers.
    - `while_running`: (value, bytes) that are live while it runs, beside what the caller holds.
    - `overwritten`: values of the caller whose buffers results take over.
    - `bodies`: what each body starts with.
    """

    results: list[tuple[Value, Buffer]] = dataclasses.field(default_factory=list)
    while_running: list[tuple[Value, float]] = dataclasses.field(default_factory=list)
    overwritten: list[Value] = dataclasses.field(default_factory=list)
    bodies: list[BodyMemory] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, eq=False)
class _Carry:
    """A value that a loop carries: its boundary operator, the value before the loop and the one after it."""

    operator: int
    initial: Value | Literal
    final: Value


def loop_memory(
    action: RunCall, scope: ActionScope, sizes: BufferSizes, transposed_carries: Collection[int]
) -> CallMemory:
    """How a loop uses memory; `transposed_carries` are boundary operators (`_program/memory/memory_layout.py`)."""
    assignment = sizes.assignment
    stacks = carried_stacks(action, assignment.program, assignment.values)
    carries = _carries(action, stacks, assignment)
    memory = CallMemory()
    reread = _read_in_every_iteration(action, stacks)
    buffers = [_place_carry(carry, memory, scope, sizes, reread) for carry in carries]
    _add_transposed_copies(memory, carries, buffers, transposed_carries)
    placed = {v for v, _ in memory.results}
    for v in (assignment.values[t] for t in action.call.results):
        if v not in placed:
            _place_result(v, memory, scope, sizes)
    memory.bodies = _loop_bodies(action, stacks, buffers, sizes)
    return memory


def _first_carry(action: RunCall) -> int:
    """Position of the first carry among the values that a loop reads."""
    boundary = action.call.boundary
    return len(boundary.get("test", ())) + len(boundary["const"])


def _carries(action: RunCall, stacks: Sequence[CarriedStack], assignment: Assignment) -> list[_Carry]:
    """The carries of a loop, then the stacks that it carries."""
    boundary, operators = action.call.boundary, assignment.program.operators
    first = _first_carry(action)
    carries = [
        _Carry(i, action.reads[first + k], assignment.values[operators[i].results[-1]])
        for k, i in enumerate(boundary["carry"])
    ]
    return carries + [_Carry(boundary["xs"][stack.xs], stack.initial, stack.result) for stack in stacks]


def _read_in_every_iteration(action: RunCall, stacks: Sequence[CarriedStack]) -> set[Value]:
    """What a body reads in every iteration, as a constant or slice by slice; it is not overwritten."""
    first, n = _first_carry(action), len(action.call.boundary["carry"])
    carried = {*range(first, first + n), *(first + n + stack.xs for stack in stacks)}
    return {v for k, v in enumerate(action.reads) if k not in carried and not isinstance(v, Literal)}


def _place_carry(
    carry: _Carry, memory: CallMemory, scope: ActionScope, sizes: BufferSizes, reread: Collection[Value]
) -> Buffer:
    """The buffer of a carry while the loop runs; its result is added to `memory`."""
    initial, final = carry.initial, carry.final
    own = Buffer(sizes.nbytes(final), owned_by_caller=True)
    kept = {*reread, *memory.overwritten}
    if not isinstance(initial, Literal) and initial in scope.dying and initial not in kept:
        if scope.buffers[initial].owned_by_caller:
            memory.results.append((final, scope.buffers[initial]))
            return scope.buffers[initial]
        memory.overwritten.append(initial)
    elif (next_iteration := scope.next_iteration_buffer(final, over_dying=True)) is not None:
        memory.results.append((final, next_iteration))
        return next_iteration
    else:
        memory.while_running.append((final, own.nbytes))
    memory.results.append((final, Buffer(sizes.result_nbytes(final))))
    return own


def _add_transposed_copies(
    memory: CallMemory, carries: Sequence[_Carry], buffers: Sequence[Buffer], transposed: Collection[int]
) -> None:
    """Add what carries need that have another memory layout in the loop than before it.

    They are transposed one after the other; the smallest ones are beside their initial values, because what is freed
    first makes room for the largest.
    """
    copies = [
        (buffer.nbytes, carry.initial, carry.final)
        for carry, buffer in zip(carries, buffers, strict=True)
        if carry.operator in transposed
        and not isinstance(carry.initial, Literal)
        and carry.initial in memory.overwritten
    ]
    for nbytes, initial, final in sorted(copies, key=lambda copy: copy[0])[:-1]:
        memory.overwritten.remove(initial)
        memory.while_running.append((final, nbytes))


def _place_result(v: Value, memory: CallMemory, scope: ActionScope, sizes: BufferSizes) -> None:
    """Add a result that is allocated before the call runs, or is in a surrounding loop's buffer."""
    buffer = scope.next_iteration_buffer(v, over_dying=False)
    if buffer is None:
        memory.while_running.append((v, sizes.result_nbytes(v)))
    memory.results.append((v, buffer or Buffer(sizes.result_nbytes(v))))


def _loop_bodies(
    action: RunCall, stacks: Sequence[CarriedStack], buffers: Sequence[Buffer], sizes: BufferSizes
) -> list[BodyMemory]:
    """What the body of a loop starts with, and the test of a `while` loop, which hands on no carries."""
    n = len(action.call.boundary["carry"])
    is_scan = action.call.kind == "scan"
    bodies = []
    for k, (entry, returns) in enumerate(zip(action.entry, action.returns, strict=True)):
        first = _first_carry(action) if is_scan else len(entry) - n
        lent = dict(zip(entry[first : first + n], buffers, strict=False))
        iterates = len(returns) >= n and (is_scan or k == len(action.entry) - 1)
        handed_on = zip(returns[:n], buffers, strict=False) if iterates else ()
        next_iteration = {v: b for v, b in handed_on if not isinstance(v, Literal) and v not in lent}
        lent |= {stack.slice: b for stack, b in zip(stacks, buffers[n:], strict=True)}
        slices = (v for v in entry[first + n :] if v not in lent) if is_scan else ()
        copied = [(v, sizes.nbytes(v)) for v in slices if _read_by_loops(v, action.bodies[k])]
        bodies.append(BodyMemory(lent, () if iterates else tuple(lent), next_iteration, copied))
    return bodies


def _read_by_loops(v: Value, actions: Sequence[Action]) -> bool:
    """Whether a loop among the actions reads a value."""
    return any(isinstance(a, RunCall) and a.call.kind in ("scan", "while") and v in a.reads for a in actions)


def branch_memory(action: RunCall, scope: ActionScope, sizes: BufferSizes) -> CallMemory:
    """How branches use memory: a result that each of them writes over one dying operand is in that one's buffer."""
    assignment = sizes.assignment
    lent = {v: scope.buffers[v] for v in action.entry[0] if v in scope.dying}
    uses = [last_uses(body, sizes.liveness, assignment) for body in action.bodies]
    memory = CallMemory()
    taken: set[Value] = set()
    for j, t in enumerate(action.call.results):
        v = assignment.values[t]
        sources = {
            _overwritten_source(returns[j], body, assignment, last)
            for body, returns, last in zip(action.bodies, action.returns, uses, strict=True)
        }
        source = next(iter(sources)) if len(sources) == 1 else None
        if source is None or source not in lent or source in taken:
            _place_result(v, memory, scope, sizes)
            continue
        taken.add(source)
        if lent[source].owned_by_caller:
            memory.results.append((v, lent[source]))
        else:
            memory.overwritten.append(source)
            memory.results.append((v, Buffer(sizes.result_nbytes(v))))
    inside = {v: b if b.owned_by_caller else Buffer(b.nbytes, owned_by_caller=True) for v, b in lent.items()}
    memory.bodies = [BodyMemory(inside)] * len(action.bodies)
    return memory


def _overwritten_source(
    v: Value | Literal, actions: Sequence[Action], assignment: Assignment, last_use: Mapping[Value, int]
) -> Value | None:
    """The value over which a list of actions writes another; that one itself if they do not make it; None for none."""
    if isinstance(v, Literal):
        return None
    operators = assignment.program.operators
    for i in range(len(actions) - 1, -1, -1):
        a = actions[i]
        if isinstance(a, Reshard):
            makes = (a.tensor, a.target) == v and a.source != a.target
        else:
            makes = v[0] in (operators[a.op].results if isinstance(a, RunOperator) else a.call.results)
        if not makes:
            continue
        if not isinstance(a, RunOperator) or not a.reads or not is_update(operators[a.op].primitive):
            return None
        updated = a.reads[0]
        if isinstance(updated, Literal) or last_use.get(updated) != i:
            return None
        v = updated
    return v
