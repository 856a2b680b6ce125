"""The schedule: the program with every redistribution spelled out, as data.

A solution says how each operator is cut. The schedule says what then happens, in order: move a tensor from
one layout to another by these steps; run an operator on blocks of these layouts; run a loop. The lowering
executes it, the predicted collectives are read off it, `ir(local=True)` prints it. So the three cannot differ.

A value is named by its tensor and layout. Programs without loops and calls are written as arrays (`flat.py`), others,
and what is lowered, as objects (`writer.py`).
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from jshard._plan.choice import Choice as Choice, Value as Value
from jshard._plan.flat import Flat, flat
from jshard._plan.network import Problem
from jshard._plan.writer import Action as Action, Move as Move, Nested as Nested, Run as Run, Written, write
from jshard._program.graph import Literal


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """The whole program: actions, and the values that are the results.

    They are written when they are asked for: lowering does, a plan of a program without inner blocks does not. With
    `calls`, those with a derivative rule of their own stay calls.
    """

    choice: Choice
    calls: bool = False

    @functools.cached_property
    def with_calls(self) -> Schedule:
        """The same for a program that JAX differentiates."""
        return Schedule(self.choice, calls=True)

    @functools.cached_property
    def flat(self) -> Flat | None:
        """The same as arrays; None where the program has inner blocks."""
        return flat(self.choice)

    @functools.cached_property
    def _written(self) -> Written:
        return write(self.choice, self.calls)

    @property
    def actions(self) -> tuple[Action, ...]:
        """Everything that happens, in order."""
        return self._written[0]

    @property
    def outputs(self) -> tuple[Value | Literal, ...]:
        """The results."""
        return self._written[1]

    @functools.cached_property
    def communicating(self) -> tuple[Move | Run, ...]:
        """The actions that communicate, in order."""
        return self._written[2] if self.flat is None else _communicating(self.flat)


def choice_of(problem: Problem, assignment: tuple[int, ...]) -> Choice:
    """Read a solution of the network as a choice."""
    n = len(problem.program.operators)
    relay = {t: problem.relays[t].of(assignment[v]) for t, v in problem.relay_variable.items()}
    return Choice(problem.program, problem.topology, problem.states, tuple(assignment[:n]), relay)


def schedule(choice: Choice) -> Schedule:
    """Every move of a choice, spelled out."""
    made = Schedule(choice)
    _ = made.flat or made.actions  # what cannot be moved is refused now
    return made


def _communicating(found: Flat) -> tuple[Move | Run, ...]:
    """The moves and operators of a flat schedule that communicate, as objects."""
    choice = found.choice
    program = choice.program
    operators, tensors = program.operators, program.tensors
    a, layouts = program.arrays, found.layouts

    def value(v: int) -> Value:
        made = v < len(tensors)
        t = v if made else int(found.tensor[v - len(tensors)])
        return t, layouts[found.made[v] if made else found.target[v - len(tensors)]]

    out: dict[int, Move | Run] = {}
    for m in np.flatnonzero(found.number[found.move_at] >= 0).tolist():
        at, steps = int(found.move_at[m]), found.paths[found.path[m]]
        first = int(found.number[at])
        cut = [s.kind == "slice" for s in steps]
        numbers = tuple([-1 if c else first + k - sum(cut[:k]) for k, c in enumerate(cut)])
        reader = int(found.reader[m])
        out[at] = Move(
            int(found.tensor[m]),
            layouts[found.source[m]],
            layouts[found.target[m]],
            steps,
            1.0,
            reader,
            numbers,
            bool(found.again[m]),
        )
    runs = found.run_at >= 0
    runs[runs] = found.number[found.run_at[runs]] >= 0
    for op in np.flatnonzero(runs).tolist():
        at, begin = int(found.run_at[op]), int(a.begin[op])
        first = int(found.number[at])
        values = iter(found.value[begin : int(a.begin[op + 1])].tolist())
        reads = tuple([x if isinstance(x, Literal) else value(next(values)) for x in operators[op].operands])
        out[at] = Run(op, reads, 1.0, tuple(range(first, first + len(choice.own(op)))))
    return tuple(out[k] for k in sorted(out))
