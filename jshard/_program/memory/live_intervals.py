"""Live intervals of every use of a tensor: a lower bound over all plans, and an estimate of most.

Problem.  The cost network with memory must not count more than any schedule holds, whatever the assignment, so it has
to know to the single reshard what is live together.

Idea.  Everything but which tensors are resharded is known from the program alone. On the clock of `program_clock.py`, a
use of a tensor has three time points:

    time            --->  def        stored_at        resharded_at     reader runs       live_until
    result layout         |------------|
    stored layout                      |------------------| ... until the last reader has it resharded
    reader's layout                                       |------------------------------|

A reader that is fused needs its operands as long as its own readers do; what is handed to a loop is live until the loop
ends, and what the program returns to its end. How long exactly depends on the plan: a fused result that is resharded is
materialized, and its operands die. So there are two answers:

- `LowerBoundIntervals`: until when a value is live in every plan.
- `EstimatedIntervals`: until when it is live in a plan that does not reshard fused results.
"""

from __future__ import annotations

import abc
import enum
import functools
from collections.abc import Collection, Sequence
from typing import NamedTuple

from jshard._program.graph import Literal, Operator, Program, calls_of
from jshard._program.memory.fusion_traits import fuses_operands, is_duplicable, may_alias_operand
from jshard._program.memory.in_place import CARRY_KINDS, carry_buffer_tensors, is_update, updated_stacks
from jshard._program.memory.liveness import Liveness, liveness
from jshard._program.memory.program_clock import ProgramClock, program_clock


class Use(NamedTuple):
    """Time points of one use: stored in its shared layout, resharded for this reader, dead from `live_until` on."""

    reader: int
    stored_at: int
    resharded_at: int
    live_until: int


class InPlace(enum.Enum):
    """How memory counts while an operator runs that may overwrite an operand.

    Its results and the operands that die there share memory: together they take as much as the larger of the two.
    """

    NEVER = enum.auto()  # the operator cannot overwrite an operand
    COUNT_RESULTS = enum.auto()  # the results are at least as large
    COUNT_OPERANDS = enum.auto()  # the dying operands are larger


class LiveIntervals(abc.ABC):
    """Live intervals of a program's tensors.

    - `always_live`: tensors that are in memory throughout: arguments that are not donated, what a loop hands to its body.
    - `next_iteration`: what a loop's body makes for its next iteration.
    - `in_carry_buffer`: tensors in the buffer of a loop's carry, which counts as the loop's result.
    """

    def __init__(self, program: Program, liveness: Liveness, donated: Collection[int]):
        self.program, self.liveness, self.clock = program, liveness, program_clock(program)
        self._in_place: dict[int, InPlace] = {}
        writable = {program.inputs[k] for k in donated}
        self.always_live = frozenset(
            r
            for op in program.operators
            for r in op.results
            if op.kind != "eqn" and r not in self.clock.allocated_at and op.id not in writable
        )
        inside = {i for call in calls_of(program.body) for i in call.inner_operators}
        carry_of = _carries_by_next_value(program)
        self.next_iteration = frozenset(t for t in carry_of if program.defs()[t][0] in inside)
        self.in_carry_buffer = self._in_carry_buffer({t: carry_of[t] for t in self.next_iteration})

    @abc.abstractmethod
    def _in_carry_buffer(self, carry_of: dict[int, int]) -> frozenset[int]:
        """The tensors in carry buffers; `carry_of`: next iteration's value -> what this iteration starts from."""

    @abc.abstractmethod
    def allocation_point(self, tensor: int, started: int) -> int:
        """From when the result of a loop or branch is in memory; of any other operator, when that has `started`."""

    @abc.abstractmethod
    def result_start(self, op: Operator) -> int:
        """From when the results of an operator take memory beside its operands."""

    @abc.abstractmethod
    def _live_until(self, tensor: int, op: Operator, resharded_at: int, run_end: int) -> int:
        """Until when a reader needs an operand that it reads as it runs; `run_end` is the point after that."""

    def counted_elsewhere(self, tensor: int) -> bool:
        """Whether the memory of a tensor counts elsewhere: as an argument, or as a loop's carry."""
        return tensor in self.always_live or tensor in self.in_carry_buffer

    def recomputes_cast(self, tensor: int, reader: int) -> bool:
        """Whether a reader recomputes a duplicated cast from its source instead of reading it."""
        return self.liveness.duplicated_cast[tensor] and fuses_operands(self.program.operators[reader])

    def is_rematerialized(self, op: int) -> bool:
        """Whether an operator is recomputed where its results are read."""
        return self._rematerialized[op]

    @functools.cached_property
    def _rematerialized(self) -> list[bool]:
        materialized = self.liveness.materialized
        return [
            is_duplicable(op) and not any([materialized[r] for r in op.results])
            for op in self.program.operators
        ]

    def is_last_use(self, tensor: int, reader: int) -> bool:
        """Whether a materialized tensor dies at a reader in every plan."""
        if not self.liveness.materialized[tensor] or self.counted_elsewhere(tensor):
            return False
        return max([u for u, _ in self.program.uses()[tensor]]) == reader

    def in_place(self, op: int) -> InPlace:
        """How memory counts while an operator runs.

        A block that was resharded for the operator may always be overwritten; what others need of that tensor is
        counted beside it.
        """
        known = self._in_place.get(op)
        if known is None:
            known = self._in_place[op] = self._found_in_place(op)
        return known

    def _found_in_place(self, op: int) -> InPlace:
        operator, tensors = self.program.operators[op], self.program.tensors
        result_bytes = sum(tensors[r].nbytes for r in operator.results if self.liveness.materialized[r])
        if operator.kind != "eqn" or not result_bytes or not may_alias_operand(operator):
            return InPlace.NEVER
        read = {a for a in operator.operands if not isinstance(a, Literal)}
        dying = sum(tensors[a].nbytes for a in read if self.is_last_use(a, op))
        return InPlace.COUNT_RESULTS if result_bytes >= dying else InPlace.COUNT_OPERANDS

    @functools.cached_property
    def uses(self) -> list[list[Use]]:
        """For each tensor its uses in the order in which it is resharded for them; one a reader, by its first operand."""
        out: list[list[Use]] = []
        for tensor, pairs in enumerate(self.program.uses()):
            first_operand: dict[int, int] = {}
            for reader, operand in pairs:
                first_operand.setdefault(reader, operand)
            uses = [self._use(tensor, reader, operand) for reader, operand in first_operand.items()]
            out.append(sorted(uses, key=lambda use: (use.resharded_at, use.reader)))
        return out

    def _use(self, tensor: int, reader: int, operand: int) -> Use:
        op, clock = self.program.operators[reader], self.clock
        leaving = clock.leaves_block_at(tensor, reader)
        stored_at = clock.store_point(tensor, reader, operand) if leaving is None else leaving
        if op.kind in CARRY_KINDS and operand > 0:
            # At the end of an iteration it is where the next one reads it, in the carry's buffer.
            return Use(reader, stored_at, stored_at, stored_at)
        resharded_at = clock.reshard_point(reader, operand)
        if op.kind in CARRY_KINDS:
            return Use(reader, stored_at, resharded_at, resharded_at + 1)  # from then on it is the loop's
        if op.kind == "output":
            return Use(reader, stored_at, resharded_at, clock.begin[-1])
        in_loop = reader in clock.loop_spans
        end = clock.begin[(clock.loop_spans[reader][1] if in_loop else reader) + 1]
        if leaving is not None:
            return Use(reader, stored_at, stored_at, max(stored_at, end) if in_loop else stored_at)
        return Use(reader, stored_at, resharded_at, self._live_until(tensor, op, resharded_at, end))


class LowerBoundIntervals(LiveIntervals):
    """Live intervals that hold in every plan: no schedule holds less."""

    def _in_carry_buffer(self, carry_of: dict[int, int]) -> frozenset[int]:
        """Every tensor that is in a carry's buffer in some plan."""
        updates = {op.id for op in self.program.operators if is_update(op.primitive)}
        return carry_buffer_tensors(
            self.program, updates, _updates_and_loops_in_branches(self.program) | carry_of.keys()
        )

    def allocation_point(self, tensor: int, started: int) -> int:
        point = _allocation_point(self.clock, tensor, started)
        op = self.program.operators[self.program.defs()[tensor][0]]
        if tensor in self.clock.allocated_at and op.kind == "cond_join":
            return self.clock.begin[op.id]  # a branch may write it over an operand that it was lent
        return point

    def result_start(self, op: Operator) -> int:
        if op.kind in ("input", "const"):
            return 0
        return self.clock.run_point(op.id) + (self.in_place(op.id) is InPlace.COUNT_OPERANDS)

    def _live_until(self, tensor: int, op: Operator, resharded_at: int, run_end: int) -> int:
        if self.recomputes_cast(tensor, op.id):
            return resharded_at + 1  # the source counts, unless the cast was resharded
        in_place = self.in_place(op.id)
        if in_place is InPlace.COUNT_RESULTS:
            return run_end - 1
        if in_place is InPlace.COUNT_OPERANDS:
            return run_end if self.is_last_use(tensor, op.id) else run_end - 1
        if not self.is_rematerialized(op.id):
            return run_end
        # No later than the result may be materialized to be resharded.
        uses = self.program.uses()
        store_points = [
            min([self.clock.store_point(r, u, k) for u, k in uses[r]], default=-1) + 1 for r in op.results
        ]
        return max([run_end, *store_points])


class EstimatedIntervals(LiveIntervals):
    """Live intervals in a plan that does not reshard fused results: what most plans hold."""

    def _in_carry_buffer(self, carry_of: dict[int, int]) -> frozenset[int]:
        """The tensors in a carry's buffer if nothing is resharded.

        Among them the next iteration's value, if what the iteration started from is dead when it is made.
        """
        ops, last_use = self.program.operators, self.liveness.last_use

        def overwrites(tensor: int, carry: int) -> bool:
            def_op = self.program.defs()[tensor][0]
            dies_there = last_use[carry] == def_op and may_alias_operand(ops[def_op])
            return last_use[carry] < def_op or dies_there

        free = {t for t, carry in carry_of.items() if overwrites(t, carry)}
        return carry_buffer_tensors(self.program, self.liveness.in_place, free)

    def allocation_point(self, tensor: int, started: int) -> int:
        return _allocation_point(self.clock, tensor, started)

    def result_start(self, op: Operator) -> int:
        if op.kind in ("input", "const"):
            return 0
        run = self.clock.run_point(op.id)
        if op.kind != "eqn" or not may_alias_operand(op):
            return run
        last_use = self.liveness.last_use
        results_stay = all(last_use[r] > op.id for r in op.results)
        operand_dies = any(last_use[a] == op.id for a in op.operands if not isinstance(a, Literal))
        return run + (results_stay and operand_dies)

    def _live_until(self, tensor: int, op: Operator, resharded_at: int, run_end: int) -> int:
        return max([run_end, *(self._needed_through(op.id, r) for r in op.results)])

    def _needed_through(self, op: int, result: int) -> int:
        """Until when the operands of an operator are needed to recompute a result for its readers; 0 for not at all."""
        last_use, begin = self.liveness.last_use, self.clock.begin
        if self.is_rematerialized(op):
            return begin[last_use[result] + 1]
        last = -1
        if self.liveness.duplicated_cast[result]:
            for u, _ in self.program.uses()[result]:
                if self.recomputes_cast(result, u):
                    through = self.program.operators[u].results if self.is_rematerialized(u) else ()
                    last = max([last, u, *(last_use[r] for r in through)])
        return begin[last + 1]


def live_intervals(
    program: Program, donated: Collection[int] = (), *, lower_bound: bool = False
) -> LiveIntervals:
    """The live intervals of a program's tensors; `donated` are the flat indices of the donated arguments. Memoised."""
    key = ("live intervals", lower_bound, frozenset(donated))
    if key not in program.memo:
        intervals = LowerBoundIntervals if lower_bound else EstimatedIntervals
        program.memo[key] = intervals(program, liveness(program, donated), donated)
    return program.memo[key]


def disjoint_intervals(uses: Sequence[Use], begin: Sequence[int]) -> list[tuple[int, int, int]]:
    """(reader, start, end), in order and disjoint: when the block of one of the readers is surely in memory.

    While an operator runs it is its own block; in between, that of the reader that needs the tensor longest.
    """
    own = [
        (use.reader, use.resharded_at, max(use.resharded_at, min(use.live_until, begin[use.reader + 1])))
        for use in uses
    ]
    if all([use.live_until <= end for use, (_, _, end) in zip(uses, own, strict=True)]):
        return own
    taken = [interval for interval in own if interval[1] < interval[2]]
    longest_first = sorted(
        zip(uses, own, strict=True), key=lambda pair: (-pair[0].live_until, -pair[0].resharded_at)
    )
    for use, (_, _, at) in longest_first:
        gaps = []
        for _, start, end in sorted(taken, key=lambda interval: interval[1]):
            if start > at and at < use.live_until:
                gaps.append((use.reader, at, min(start, use.live_until)))
            at = max(at, end)
        if at < use.live_until:
            gaps.append((use.reader, at, use.live_until))
        taken += gaps
    return sorted(taken, key=lambda interval: interval[1])


def _allocation_point(clock: ProgramClock, tensor: int, started: int) -> int:
    """`LiveIntervals.allocation_point` where each branch allocates its own results."""
    if tensor not in clock.allocated_at:
        return started
    stack = updated_stacks(clock.program).get(clock.program.defs()[tensor][0])
    # It shares the buffer of the stack that the loop updates, which is counted until then.
    if stack is not None:
        return clock.begin[clock.loop_spans[stack.xs][1] + 1]
    return clock.allocated_at[tensor]


def _carries_by_next_value(program: Program) -> dict[int, int]:
    """Tensor that a loop hands to its next iteration -> the tensor from which an iteration starts."""
    return {
        a: op.results[-2]
        for op in program.operators
        if op.kind in CARRY_KINDS
        for a in op.operands[1:]
        if not isinstance(a, Literal)
    }


def _updates_and_loops_in_branches(program: Program) -> frozenset[int]:
    """Results of updates and loops in branches: they may be in the buffer of an operand that the branch was lent."""
    out: set[int] = set()
    for call in calls_of(program.body):
        for i in call.inner_operators if call.kind == "cond" else ():
            op = program.operators[i]
            if op.kind in CARRY_KINDS or is_update(op.primitive):
                out.update(op.results)
    return frozenset(out)
