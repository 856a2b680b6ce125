"""What a schedule costs: its collectives, its compute, and the prices of the objective, added up action by action.

A plan's objective is this figure, for every search; the bound of the search is compared with it before a plan is
called optimal. The cost network computes the same number another way (`exact_cost.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jshard._cost import collectives
from jshard._cost.redistribute import SUMS
from jshard._cost.steps import apply
from jshard._numbers import numbered, packed
from jshard._plan.cost_tables import scatter_price
from jshard._plan.network import Problem
from jshard._plan.rows import CollectiveRow
from jshard._plan.schedule import Choice, Move, Run, Schedule
from jshard._program.graph import Tensor, operator_name
from jshard._program.mapped import SHARD_MAP


@dataclasses.dataclass(frozen=True, eq=False)
class ScheduleCost:
    """Seconds a call of one device, and what they are made of.

    `collectives` are (row, operator that it is for, -1 for several); `seconds` and `redundant` are of each equation
    in all its runs; `price` is what the objective adds to time: for repeated products and for scattered results;
    `unknown` are primitives without a rule.
    """

    collectives: tuple[tuple[CollectiveRow, int], ...]
    seconds: tuple[float, ...]
    redundant: tuple[float, ...]
    price: float
    unknown: tuple[str, ...]

    @property
    def communication(self) -> float:
        """Seconds of all collectives."""
        return sum(r.seconds * r.count for r, _ in self.collectives)

    # Summed one after the other, so that no version of Python rounds it otherwise.
    @property
    def compute(self) -> float:
        """Seconds of all equations."""
        return float(np.cumsum(self.seconds)[-1]) if self.seconds else 0.0

    @property
    def beyond(self) -> float:
        """Seconds of compute beyond an even share."""
        return float(np.cumsum(self.redundant)[-1]) if self.redundant else 0.0

    def objective(self, level: int) -> float:
        """What a level minimises: 0 communication and redundant compute, else all seconds; and the prices."""
        return self.communication + (self.beyond if level == 0 else self.compute) + self.price


def schedule_cost(made: Schedule, built: Problem) -> ScheduleCost:
    """The cost of a schedule of a problem's program."""
    rows = collective_rows(made, built.together)
    rows += _own_rows(made.choice, built, 1 + max((row.id for row, _ in rows), default=-1))
    seconds, redundant, price, unknown = _operators(made.choice, built)
    return ScheduleCost(
        tuple(rows), tuple(seconds), tuple(redundant), price + _scattered(made, built), unknown
    )


def _operators(choice: Choice, built: Problem) -> tuple[list[float], list[float], float, tuple[str, ...]]:
    """Of each equation the seconds in all its runs and those beyond an even share; the price; primitives without a rule."""
    equations = np.flatnonzero(choice.program.arrays.of_kind("eqn"))
    # Operators of one table in the network are alike in form, traffic and repeats.
    states = np.array(choice.state, dtype=np.int64)[equations]
    alike, some = numbered(packed(built.network.node_table[equations], states))
    times, unknown = [], {}
    for i in equations[some].tolist():
        op, s = choice.program.operators[i], choice.states[i]
        t, k = built.times[int(built.network.node_table[i])], choice.state[i]
        times.append([float(x[k]) * op.repeat for x in (t.compute, t.redundant, t.price)])
        if s.rule.opaque:
            unknown[op.primitive] = None
    seconds, redundant, price = np.array(times).reshape(-1, 3)[alike].T
    return seconds.tolist(), redundant.tolist(), float(price.sum()), tuple(unknown)


def _scattered(made: Schedule, built: Problem) -> float:
    """The price of sums that are handed to the caller scattered."""
    total = 0.0
    for action in made.communicating:
        if not isinstance(action, Run) and action.tensor in built.returned:
            tensor = built.program.tensors[action.tensor]
            price = scatter_price(
                [action.source], [action.target], tensor.shape, tensor.itemsize, built.topology
            )
            total += float(price[0, 0]) * action.repeat
    return total


def collective_rows(made: Schedule, together: Mapping[int, int]) -> list[tuple[CollectiveRow, int]]:
    """Every collective of a schedule with the operator it is for (-1 for several)."""
    choice = made.choice
    program, topology = choice.program, choice.topology
    out = []
    for action in made.communicating:
        if isinstance(action, Run):
            op, s = program.operators[action.op], choice.states[action.op]
            for number, sent in zip(action.numbers, choice.own(op.id), strict=True):
                tensor = program.tensors[op.results[sent.result]]
                lay = s.results[sent.result].of(choice.state[op.id])
                c = collectives.collective(sent.kind, sent.axes, sent.held, topology)
                local = _block(lay.local_shape(tensor.shape, topology.mesh))
                out.append((_row(number, c, action, operator_name(op), tensor, local), op.id))
            continue
        tensor, lay = program.tensors[action.tensor], action.source
        reader = program.operators[action.reader] if action.reader >= 0 else None
        for step, number in zip(action.steps, action.numbers, strict=True):
            held = tensor.nbytes / lay.pieces(topology.mesh)
            after = apply(step, lay)
            if step.kind != "slice":
                sums = together.get(action.tensor, 1) if step.kind in SUMS else 1
                c = collectives.collective(step.kind, step.axes, held, topology, sums)
                before = _block(lay.local_shape(tensor.shape, topology.mesh))
                local = f"{before} -> {_block(after.local_shape(tensor.shape, topology.mesh))}"
                name = operator_name(reader) if reader is not None else f"readers of {tensor.name}"
                out.append((_row(number, c, action, name, tensor, local), action.reader))
            lay = after
    return out


def _own_rows(choice: Choice, built: Problem, first: int) -> list[tuple[CollectiveRow, int]]:
    """Every collective that the user wrote in a `shard_map`, with the operator that it is; numbered from `first`."""
    out: list[tuple[CollectiveRow, int]] = []
    program = choice.program
    for i in np.flatnonzero(program.arrays.which(frozenset((SHARD_MAP,)))).tolist():
        op, found = program.operators[i], built.times[int(built.network.node_table[i])].inside
        for own in found.collectives if found is not None else ():
            c = own.collective
            row = CollectiveRow(
                first + len(out), c.kind, tuple(c.axes), float(c.bytes), float(c.seconds), own.count * op.repeat,
                operator_name(op), "", _block(own.block), i in program.in_open_loops or own.turn, own.dtype, own=True,
            )  # fmt: skip
            out.append((row, i))
    return out


def _row(number: int, c: Any, action: Move | Run, operator: str, tensor: Tensor, local: str) -> CollectiveRow:
    return CollectiveRow(
        number, c.kind, tuple(c.axes), float(c.bytes), float(c.seconds), float(action.repeat), operator,
        tensor.name, local, action.turn, str(tensor.dtype),
    )  # fmt: skip


def _block(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
