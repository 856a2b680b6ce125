"""The time points of a program: when each operand is resharded and when each operator runs, before any plan is known.

Time is a row of integer points. Operator i with n operands has 2 n + 1 of them, from `begin[i]` on: for operand k one
at which its tensor is resharded to its stored layout (2 k), one at which the stored tensor is resharded for this
operator (2 k + 1); then one at which the operator runs.

    begin[i]                                                        begin[i + 1]
    | store operand 0 | reshard operand 0 | store operand 1 | reshard operand 1 | run |

A call that is one action of the schedule has its operands stored when it begins.

Worked case.  Operators 0 (an argument), 1 (`tanh`, one operand), 2 (a product, two operands): they begin at 0, 1 and
4; the product's second operand is resharded at 7 and it runs at 8.
"""

from __future__ import annotations

import functools
import itertools

from jshard._program.graph import Program, calls_of, operators_of
from jshard._program.memory.in_place import CARRY_KINDS


def program_clock(program: Program) -> ProgramClock:
    """The time points of a program. Memoised."""
    if "clock" not in program.memo:
        program.memo["clock"] = ProgramClock(program)
    return program.memo["clock"]


class ProgramClock:
    """The time points of a program, and the operators between which calls, branches and loops run.

    - `begin`: (operators + 1,) the first time point of each operator; one more for the end.
    - `loop_spans`: boundary operator that hands a value to a loop -> first operator after the loop's body, and the last
      operator of the loop: it needs the value until then.
    - `call_spans`: first and last operators of calls that are not loops: they store their operands at once.
    - `branch_spans`: first and last operators of blocks of branches and `while` loops.
    - `allocated_at`: result of a loop or branch -> time point from which it is in memory, before the bodies run.
    """

    def __init__(self, program: Program):
        self.program = program
        self.begin = [0, *itertools.accumulate(2 * len(op.operands) + 1 for op in program.operators)]
        self.loop_spans: dict[int, tuple[int, int]] = {}
        self.call_spans: list[tuple[int, int]] = []
        self.branch_spans: list[tuple[int, int]] = []
        self.allocated_at: dict[int, int] = {}
        for call in calls_of(program.body):
            inside = call.inner_operators
            if call.kind in ("cond", "while"):
                self.branch_spans += [(min(ops), max(ops)) for ops in map(operators_of, call.blocks) if ops]
            if call.kind not in ("scan", "while") and inside:
                self.call_spans.append((min(inside), max(inside)))
            body = max(inside, default=-1)
            end = max([body, *call.boundary.get("ys", ())])
            for role in ("test", "const", "carry", "xs"):
                self.loop_spans.update((i, (body + 1, end)) for i in call.boundary.get(role, ()) if i < end)
            for t in call.results if call.boundary else ():
                def_op = program.defs()[t][0]
                # A carry is the buffer of its initial value, from when that has been resharded.
                after = 2 if program.operators[def_op].kind in CARRY_KINDS else 1
                self.allocated_at[t] = self.begin[min([*inside, def_op])] + after

    def run_point(self, op: int) -> int:
        """When an operator runs."""
        return self.begin[op + 1] - 1

    def store_point(self, tensor: int, reader: int, operand: int) -> int:
        """When a tensor is resharded to its stored layout, if this reader is the first that needs it there."""
        leaving = self.leaves_block_at(tensor, reader)
        if leaving is not None:
            return leaving
        def_op = self.program.defs()[tensor][0]
        for first in self._calls_around.get(reader, ()):
            if def_op < first:
                return self.begin[first]
        return self.begin[reader] + 2 * operand

    @functools.cached_property
    def _calls_around(self) -> dict[int, list[int]]:
        """Operator -> the first operators of the calls that it is in, ascending; absent where there is none."""
        around: dict[int, list[int]] = {}
        for first, last in sorted(self.call_spans):
            for op in range(first, last + 1):
                around.setdefault(op, []).append(first)
        return around

    def reshard_point(self, reader: int, operand: int) -> int:
        """When the stored tensor is resharded for a reader."""
        return self.begin[reader] + 2 * operand + 1

    def leaves_block_at(self, tensor: int, reader: int) -> int | None:
        """When a block returns a tensor that it makes to a boundary operator; None for every other use."""
        def_op = self.program.defs()[tensor][0]
        if reader in self.loop_spans:
            return self.begin[self.loop_spans[reader][0]] if def_op > reader else None
        if self.branch_spans and self.program.operators[reader].kind not in ("eqn", "output"):
            ends = [last for first, last in self.branch_spans if first <= def_op <= last < reader]
            return self.begin[min(ends) + 1] if ends else None
        return None
