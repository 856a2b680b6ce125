"""The schedule: the program with every reshard spelled out, as data.

An assignment says how each operator is sharded. The schedule says what then happens, in order: reshard a tensor from one
layout to another by these steps; run an operator on blocks of these layouts; run a loop. The lowering executes it, the
predicted collectives are derived from it, `ir(local=True)` prints it. So the three cannot differ.

A value is a tensor in a layout. The schedule of a program without loops and branches is computed as arrays
(`vectorized.py`); that of any other program, and of one that is lowered, as objects (`writer.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import numpy as np

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


if TYPE_CHECKING:
    from jshard._network.build import PlanningNetwork


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """The whole program: actions, and the values that are the results.

    Both forms are computed when first used: lowering needs the objects, a plan of a program without loops and branches
    does not. With `keep_calls`, calls with a derivative rule of their own stay calls.
    """

    assignment: Assignment
    keep_calls: bool = False

    @functools.cached_property
    def with_calls(self) -> Schedule:
        """The same for a program that JAX differentiates."""
        return Schedule(self.assignment, keep_calls=True)

    @functools.cached_property
    def arrays(self) -> ScheduleArrays | None:
        """The same as arrays; None where the program has loops or branches, or calls that stay calls."""
        if self.keep_calls and not all(isinstance(step, int) for step in self.assignment.program.body.steps):
            return None
        return schedule_arrays(self.assignment)

    @functools.cached_property
    def _written(self) -> WrittenSchedule:
        return write_schedule(self.assignment, self.keep_calls)

    @property
    def actions(self) -> tuple[Action, ...]:
        """Everything that happens, in order."""
        return self._written.actions

    @property
    def outputs(self) -> tuple[Value | Literal, ...]:
        """The results."""
        return self._written.outputs

    @functools.cached_property
    def communicating(self) -> tuple[Reshard | RunOperator, ...]:
        """The actions that communicate, in order."""
        return self._written.communicating if self.arrays is None else _communicating_actions(self.arrays)


def assignment_of(network: PlanningNetwork, states: tuple[int, ...]) -> Assignment:
    """The assignment that a solution of the cost network stands for; `states`: the state of each of its variables."""
    n = len(network.program.operators)
    relay = {t: network.relays[t].layout(states[v]) for t, v in network.relay_variable.items()}
    return Assignment(
        network.program,
        network.topology,
        network.candidates,
        tuple(states[:n]),
        relay,
        shared_exchanges=network.shared_exchanges,
    )


def schedule(assignment: Assignment) -> Schedule:
    """The schedule of an assignment.

    Raises a `ShardError` where a tensor cannot be resharded as the assignment needs it.
    """
    out = Schedule(assignment)
    _ = out.arrays or out.actions  # impossible reshards are errors now, not when the plan is used
    return out


def _communicating_actions(arrays: ScheduleArrays) -> tuple[Reshard | RunOperator, ...]:
    """The reshards and operators of a schedule that communicate, as objects."""
    actions: dict[int, Reshard | RunOperator] = {}
    actions |= {int(arrays.reshard_at[m]): reshard_object(arrays, m) for m in communicating_reshards(arrays)}
    actions |= {int(arrays.run_at[op]): _run_object(arrays, op) for op in _communicating_operators(arrays)}
    return tuple(actions[k] for k in sorted(actions))


def communicating_reshards(arrays: ScheduleArrays) -> list[int]:
    """The reshards that communicate, in order."""
    return np.flatnonzero(arrays.first_collective[arrays.reshard_at] >= 0).tolist()


def _communicating_operators(arrays: ScheduleArrays) -> list[int]:
    communicates = arrays.run_at >= 0
    communicates[communicates] = arrays.first_collective[arrays.run_at[communicates]] >= 0
    return np.flatnonzero(communicates).tolist()


def reshard_object(arrays: ScheduleArrays, m: int) -> Reshard:
    """Reshard m as an object."""
    steps, layouts = arrays.paths[arrays.path[m]], arrays.layouts
    first = int(arrays.first_collective[arrays.reshard_at[m]])
    is_slice = [s.kind == "slice" for s in steps]
    ids = tuple([-1 if is_slice[k] else first + k - sum(is_slice[:k]) for k in range(len(steps))])
    source, target = layouts[arrays.source[m]], layouts[arrays.target[m]]
    reader, regathered = int(arrays.reader[m]), bool(arrays.regathered[m])
    return Reshard(int(arrays.tensor[m]), source, target, steps, 1.0, reader, ids, regathered)


def _run_object(arrays: ScheduleArrays, op: int) -> Reshard | RunOperator:
    """The run of an operator as an object."""
    assignment, a = arrays.assignment, arrays.assignment.program.use_def
    first = int(arrays.first_collective[arrays.run_at[op]])
    values = iter(arrays.read_value[int(a.use_begin[op]) : int(a.use_begin[op + 1])].tolist())
    operands = assignment.program.operators[op].operands
    reads = tuple([x if isinstance(x, Literal) else _value_object(arrays, next(values)) for x in operands])
    ids = tuple(range(first, first + len(assignment.internal_collectives(op))))
    return RunOperator(op, reads, 1.0, ids)


def _value_object(arrays: ScheduleArrays, v: int) -> Value:
    """A numbered value as (tensor, layout)."""
    m = v - len(arrays.result_layout)
    if m < 0:
        return v, arrays.layouts[arrays.result_layout[v]]
    return int(arrays.tensor[m]), arrays.layouts[arrays.target[m]]
