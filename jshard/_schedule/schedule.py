"""The schedule: the program with every redistribution spelled out, as data.

A solution says how each operator is cut. The schedule says what then happens, in order: move a tensor from
one layout to another by these steps; run an operator on blocks of these layouts; run a loop. The lowering
executes it, the predicted collectives are read off it, `ir(local=True)` prints it. So the three cannot differ.

A value is named by its tensor and layout. Programs without loops and calls are written as arrays (`vectorized.py`), others,
and what is lowered, as objects (`writer.py`).
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from jshard._network.build import PlanningNetwork
from jshard._program.graph import Literal
from jshard._schedule.assignment import Assignment as Assignment, Value as Value
from jshard._schedule.vectorized import ScheduleArrays, schedule_arrays
from jshard._schedule.writer import (
    Action as Action,
    Reshard as Reshard,
    RunCall as RunCall,
    RunOperator as RunOperator,
    WrittenSchedule,
    write_schedule,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """The whole program: actions, and the values that are the results.

    They are written when they are asked for: lowering does, a plan of a program without inner blocks does not. With
    `calls`, those with a derivative rule of their own stay calls.
    """

    assignment: Assignment
    keep_calls: bool = False

    @functools.cached_property
    def with_calls(self) -> Schedule:
        """The same for a program that JAX differentiates."""
        return Schedule(self.assignment, keep_calls=True)

    @functools.cached_property
    def arrays(self) -> ScheduleArrays | None:
        """The same as arrays; None where the program has inner blocks."""
        return schedule_arrays(self.assignment)

    @functools.cached_property
    def _written(self) -> WrittenSchedule:
        return write_schedule(self.assignment, self.keep_calls)

    @property
    def actions(self) -> tuple[Action, ...]:
        """Everything that happens, in order."""
        return self._written[0]

    @property
    def outputs(self) -> tuple[Value | Literal, ...]:
        """The results."""
        return self._written[1]

    @functools.cached_property
    def communicating(self) -> tuple[Reshard | RunOperator, ...]:
        """The actions that communicate, in order."""
        return self._written[2] if self.arrays is None else _communicating_actions(self.arrays)


def assignment_of(problem: PlanningNetwork, assignment: tuple[int, ...]) -> Assignment:
    """Read a solution of the network as a choice."""
    n = len(problem.program.operators)
    relay = {t: problem.relays[t].layout(assignment[v]) for t, v in problem.relay_variable.items()}
    return Assignment(problem.program, problem.topology, problem.candidates, tuple(assignment[:n]), relay)


def schedule(assignment: Assignment) -> Schedule:
    """Every move of a choice, spelled out."""
    made = Schedule(assignment)
    _ = made.arrays or made.actions  # what cannot be moved is refused now
    return made


def _communicating_actions(arrays: ScheduleArrays) -> tuple[Reshard | RunOperator, ...]:
    """The moves and operators of a flat schedule that communicate, as objects."""
    choice = arrays.assignment
    program = choice.program
    operators, tensors = program.operators, program.tensors
    a, layouts = program.use_def, arrays.layouts

    def value(v: int) -> Value:
        made = v < len(tensors)
        t = v if made else int(arrays.tensor[v - len(tensors)])
        return t, layouts[arrays.result_layout[v] if made else arrays.target[v - len(tensors)]]

    out: dict[int, Reshard | RunOperator] = {}
    for m in np.flatnonzero(arrays.first_collective[arrays.reshard_at] >= 0).tolist():
        at, steps = int(arrays.reshard_at[m]), arrays.paths[arrays.path[m]]
        first = int(arrays.first_collective[at])
        cut = [s.kind == "slice" for s in steps]
        numbers = tuple([-1 if c else first + k - sum(cut[:k]) for k, c in enumerate(cut)])
        reader = int(arrays.reader[m])
        out[at] = Reshard(
            int(arrays.tensor[m]),
            layouts[arrays.source[m]],
            layouts[arrays.target[m]],
            steps,
            1.0,
            reader,
            numbers,
            bool(arrays.regathered[m]),
        )
    runs = arrays.run_at >= 0
    runs[runs] = arrays.first_collective[arrays.run_at[runs]] >= 0
    for op in np.flatnonzero(runs).tolist():
        at, begin = int(arrays.run_at[op]), int(a.use_begin[op])
        first = int(arrays.first_collective[at])
        values = iter(arrays.read_value[begin : int(a.use_begin[op + 1])].tolist())
        reads = tuple([x if isinstance(x, Literal) else value(next(values)) for x in operators[op].operands])
        out[at] = RunOperator(
            op, reads, 1.0, tuple(range(first, first + len(choice.internal_collectives(op))))
        )
    return tuple(out[k] for k in sorted(out))
