"""When each reading of a tensor has it moved, and until when it needs what it read.

Problem.  The network with memory must not count more than the schedule holds, whatever the states, so it has to
know to the single move what is there at once.

Idea.  All of it but who moves is known from the program alone. Time is a row of moments: for every operand of an
operator one in which its tensor is brought into the layout in which it is kept, one in which it goes on from there
to the operator; then one in which the operator runs. A call that is one action of the schedule has what it reads
brought into place when it begins. A reader that is computed again in its own readers needs what it reads as long as
they do; what is handed to a loop is needed until the loop ends.

Worked case.  Operators 0 (an argument), 1 (``tanh``, one operand), 2 (a product, two operands): their first
moments are 0, 1 and 4; the product's second operand is moved on at 7 and it runs at 8.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Mapping, Sequence

from jshard._memory.in_place import CARRY_KINDS, carry_buffer_tensors, is_update, updated_stacks
from jshard._memory.liveness import Liveness, fuses_operands, is_duplicable, may_alias_operand
from jshard._program.graph import Literal, Program, calls_of, operators_of


@dataclasses.dataclass(frozen=True)
class Use:
    """Moments of one reading: when the tensor is kept, when it is moved on, and before which what is read may go."""

    reader: int
    stored_at: int
    resharded_at: int
    live_until: int


@dataclasses.dataclass(frozen=True, eq=False)
class LiveIntervals:
    """Moments of a program."""

    program: Program
    liveness: Liveness
    lower_bound: (
        bool  # until when a reading is needed in every plan; else in one that moves nothing further on
    )
    always_live: frozenset[int]  # tensors with room throughout: kept arguments, what a loop hands to its body
    begin: Sequence[int]  # operator -> its first moment; one more for the end
    loop_spans: Mapping[
        int, tuple[int, int]
    ]  # boundary operator -> first operator after the body, last of all
    allocated_at: Mapping[int, int]  # result of a loop or branch -> the moment from which it takes room
    call_spans: Sequence[tuple[int, int]]  # first and last operator of calls that move what they read at once
    branch_spans: Sequence[
        tuple[int, int]
    ]  # first and last operator of blocks that run one without the other
    # Tensors that lie in the buffer of a loop's carry, which is counted as the loop's result.
    in_carry_buffer: frozenset[int]
    next_iteration: frozenset[int]  # what a turn makes for the next one; it may lie there

    def counted_elsewhere(self, tensor: int) -> bool:
        """Whether the room of a tensor is counted elsewhere: as an argument, or as what goes round a loop."""
        return (
            tensor in self.always_live
            or tensor in self.in_carry_buffer
            or (self.lower_bound and tensor in self.next_iteration)
        )

    def run_point(self, op: int) -> int:
        """The moment in which an operator runs."""
        return self.begin[op + 1] - 1

    def storing_point(self, tensor: int, reader: int, operand: int) -> int:
        """The moment in which a tensor would be brought into the layout in which it is kept for this reader."""
        at = self.leaves_block_at(tensor, reader)
        if at is not None:
            return at
        made = self.program.defs()[tensor][0]
        calls = [self.begin[a] for a, b in self.call_spans if made < a <= reader <= b]
        return min([self.begin[reader] + 2 * operand, *calls])

    def rematerializes(self, tensor: int, reader: int) -> bool:
        """Whether a reader computes a copied tensor again, from what it was made of, instead of reading it."""
        return self.liveness.duplicated_cast[tensor] and fuses_operands(self.program.operators[reader])

    def live_until_through(self, op: int, result: int) -> int:
        """The moment before which the operands of an operator may go that is computed again for who reads a result."""
        users = self.program.uses()[result]
        if self.is_rematerialized(op):
            if not self.lower_bound:
                return self.begin[self.liveness.last_use[result] + 1]
            # No more once the result is written out to be moved.
            return min([self.storing_point(result, u, k) for u, k in users], default=-1) + 1
        last = -1
        if self.liveness.duplicated_cast[result] and not self.lower_bound:
            for u, _ in users:
                if self.rematerializes(result, u):
                    is_last_use = [self.liveness.last_use[r] for r in self.program.operators[u].results]
                    last = max([last, u, *(is_last_use if self.is_rematerialized(u) else ())])
        return self.begin[last + 1]

    def allocation_point(self, tensor: int, started: int) -> int:
        """From when a tensor takes room that is the result of a loop or branch; of an operator, when that has `started`."""
        if tensor not in self.allocated_at:
            return started
        op = self.program.operators[self.program.defs()[tensor][0]]
        if self.lower_bound and op.kind == "cond_join":
            return self.begin[op.id]  # a branch may make it over what it was lent
        stack = updated_stacks(self.program).get(op.id)
        if stack is not None:  # over the stack that the loop was given, which is needed until then
            return self.begin[self.loop_spans[stack.xs][1] + 1]
        return self.allocated_at[tensor]

    def is_rematerialized(self, op: int) -> bool:
        """Whether an operator is computed again where its results are read."""
        operator = self.program.operators[op]
        return is_duplicable(operator) and not any(self.liveness.materialized[r] for r in operator.results)

    def ends(self, tensor: int, reader: int) -> bool:
        """Whether nobody needs a stored tensor after a reader, whatever else a plan does."""
        stored = self.liveness.materialized[tensor] and not self.counted_elsewhere(tensor)
        return stored and max(u for u, _ in self.program.uses()[tensor]) == reader

    def results_dominate(self, op: int) -> bool | None:
        """Whether results count while an operator runs that may write them over what it reads, or what ends there.

        Together they hold as much as the larger of the two. None for any other operator. A block of its own that
        it was moved may always be written over; what others need of that tensor is there besides.
        """
        operator, tensors = self.program.operators[op], self.program.tensors
        made = sum(tensors[r].nbytes for r in operator.results if self.liveness.materialized[r])
        if operator.kind != "eqn" or not made or not may_alias_operand(operator):
            return None
        read = {a for a in operator.operands if not isinstance(a, Literal)}
        return made >= sum(tensors[a].nbytes for a in read if self.ends(a, op))

    def leaves_block_at(self, tensor: int, reader: int) -> int | None:
        """When a block hands a tensor that it makes to a boundary after it; None for every other reading."""
        made = self.program.defs()[tensor][0]
        if reader in self.loop_spans:
            return self.begin[self.loop_spans[reader][0]] if made > reader else None
        if self.branch_spans and self.program.operators[reader].kind not in ("eqn", "output"):
            ends = [b for a, b in self.branch_spans if a <= made <= b < reader]
            return self.begin[min(ends) + 1] if ends else None
        return None

    def use(self, tensor: int, reader: int, operand: int) -> Use:
        """When an operand is moved, and until when it is needed."""
        op, kept = self.program.operators[reader], self.storing_point(tensor, reader, operand)
        if op.kind in CARRY_KINDS and operand > 0:
            # In the end of a turn it is where the next one reads it, in the buffer that goes round.
            return Use(reader, kept, kept, kept)
        moved = self.begin[reader] + 2 * operand + 1
        if op.kind in CARRY_KINDS:
            return Use(reader, kept, moved, moved + 1)  # then it is the loop's
        until = self.begin[(self.loop_spans[reader][1] if reader in self.loop_spans else reader) + 1]
        if self.leaves_block_at(tensor, reader) is not None:
            return Use(reader, kept, kept, max(kept, until) if reader in self.loop_spans else kept)
        if self.lower_bound and self.rematerializes(tensor, reader):
            until = moved + 1  # computed again from what it was made of, unless it was moved
        elif self.lower_bound and (results := self.results_dominate(reader)) is not None:
            if results or not self.ends(tensor, reader):
                until -= 1
        else:
            for r in op.results:
                until = max(until, self.live_until_through(reader, r))
        return Use(reader, kept, moved, until)

    @functools.cached_property
    def uses(self) -> list[list[Use]]:
        """For each tensor its readings in the order in which it is moved; an operator's by its first operand."""
        out: list[list[Use]] = []
        for tensor, consumers in enumerate(self.program.uses()):
            users: dict[int, int] = {}
            for u, k in consumers:
                users.setdefault(u, k)
            found = (self.use(tensor, u, k) for u, k in users.items())
            out.append(sorted(found, key=lambda r: (r.resharded_at, r.reader)))
        return out


def disjoint_intervals(uses: Sequence[Use], begin: Sequence[int]) -> list[tuple[int, int, int]]:
    """(reader, start, end), in order and apart: when what one of the readers needs is surely there.

    While an operator runs it is its own; in between that of the reader that needs it longest.
    """
    own = [
        (r.reader, r.resharded_at, max(r.resharded_at, min(r.live_until, begin[r.reader + 1]))) for r in uses
    ]
    if all(r.live_until <= end for r, (_, _, end) in zip(uses, own, strict=True)):
        return own
    taken = [w for w in own if w[1] < w[2]]
    for r, (u, _, end) in sorted(
        zip(uses, own, strict=True), key=lambda x: (-x[0].live_until, -x[0].resharded_at)
    ):
        at, more = end, []
        for _, a, b in sorted(taken, key=lambda w: w[1]):
            if a > at and at < r.live_until:
                more.append((u, at, min(a, r.live_until)))
            at = max(at, b)
        if at < r.live_until:
            more.append((u, at, r.live_until))
        taken += more
    return sorted(taken, key=lambda w: w[1])


def live_intervals(
    program: Program, liveness: Liveness, donated: Collection[int], *, lower_bound: bool
) -> LiveIntervals:
    """The moments of a program; `life` tells what is held at all, `donated` are the flat indices of arguments."""
    begin = [0, *itertools.accumulate(2 * len(op.operands) + 1 for op in program.operators)]
    calls, branches = _call_and_branch_spans(program)
    first, free = _allocation_points(program, begin), {program.inputs[k] for k in donated}
    given = frozenset(
        r
        for op in program.operators
        for r in op.results
        if op.kind != "eqn" and r not in first and op.id not in free
    )
    shared, next_turn = _carry_buffers(program, liveness, lower_bound)
    return LiveIntervals(
        program,
        liveness,
        lower_bound,
        given,
        begin,
        _loop_spans(program),
        first,
        calls,
        branches,
        shared,
        next_turn,
    )


def _carry_buffers(program: Program, life: Liveness, sure: bool) -> tuple[frozenset[int], frozenset[int]]:
    """Tensors that lie in the buffer of a loop's carry, and those that the next turn gets.

    `sure`: all that lie there in any plan; else those that do in a plan that moves nothing.
    """
    ops = program.operators
    over = {op.id for op in ops if is_update(op.primitive)} if sure else life.in_place
    inside = {i for call in calls_of(program.body) for i in call.inner_operators}
    ends = {
        a: op.results[-2]  # what a turn is given
        for op in ops
        if op.kind in CARRY_KINDS
        for a in op.operands[1:]
        if not isinstance(a, Literal)
    }
    made = {t: program.defs()[t][0] for t in ends}
    later = frozenset(t for t in ends if made[t] in inside)
    if sure:
        lent = _branch_results(program)
        return carry_buffer_tensors(program, over, lent | later), later
    # Where the turn needs what it was given no more when it has made this.
    free = {
        t
        for t in later
        if life.last_use[ends[t]] < made[t]
        or (life.last_use[ends[t]] == made[t] and may_alias_operand(ops[made[t]]))
    }
    return carry_buffer_tensors(program, over, free), later


def _branch_results(program: Program) -> frozenset[int]:
    """What updates and loops give in branches: it may lie over what the branch was lent."""
    out: set[int] = set()
    for call in calls_of(program.body):
        for i in call.inner_operators if call.kind == "cond" else ():
            op = program.operators[i]
            if op.kind in CARRY_KINDS or is_update(op.primitive):
                out.update(op.results)
    return frozenset(out)


def _call_and_branch_spans(program: Program) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """First and last operators: of calls that are no loops, and of the blocks of branches and `while` loops."""
    calls: list[tuple[int, int]] = []
    branches: list[tuple[int, int]] = []
    for call in calls_of(program.body):
        if call.kind in ("cond", "while"):
            branches.extend((min(ops), max(ops)) for ops in map(operators_of, call.blocks) if ops)
        if call.kind not in ("scan", "while") and (inside := call.inner_operators):
            calls.append((min(inside), max(inside)))
    return calls, branches


def _loop_spans(program: Program) -> dict[int, tuple[int, int]]:
    """Of the operators that hand values to a loop the first one after its body, and its last: it needs them so long."""
    found: dict[int, tuple[int, int]] = {}
    for call in calls_of(program.body):
        body = max(call.inner_operators, default=-1)
        end = max([body, *call.boundary.get("ys", ())])
        for role in ("test", "const", "carry", "xs"):
            found.update((i, (body + 1, end)) for i in call.boundary.get(role, ()) if i < end)
    return found


def _allocation_points(program: Program, begin: Sequence[int]) -> dict[int, int]:
    """Results of loops and branches are allocated before their bodies run: the moment from which each takes room."""
    producers = program.defs()
    # After what goes in was brought into place: where a carry's initial value was read, it is the carry.
    return {
        t: begin[min([*call.inner_operators, producers[t][0]])]
        + (2 if program.operators[producers[t][0]].kind in CARRY_KINDS else 1)
        for call in calls_of(program.body)
        if call.boundary
        for t in call.results
    }
