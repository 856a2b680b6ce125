"""What a schedule costs: its collectives, its compute, and the prices of the objective, added up action by action.

A plan's objective is this figure, for every search; the bound of the search is compared with it before a plan is
called optimal. The cost network computes the same number another way (`tests/laws/exact_cost.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jshard._core.row_codes import first_occurrence_codes, row_codes
from jshard._cost import collectives
from jshard._cost.reshard_steps import apply_step
from jshard._cost.resharding import REDUCING_KINDS
from jshard._network.build import PlanningNetwork
from jshard._network.cost_tables import deferred_gather_seconds
from jshard._plan.records import CollectiveRow
from jshard._program.graph import Tensor, operator_name
from jshard._program.user_shard_map import SHARD_MAP
from jshard._schedule.schedule import Assignment, Reshard, RunOperator, Schedule


@dataclasses.dataclass(frozen=True, eq=False)
class ScheduleCost:
    """Seconds that one call takes on a device, by part.

    - `collectives`: (row, operator that it is for, -1 for several).
    - `seconds`, `redundant`: (equations,) of each in all its runs: all seconds, and those beyond an even share.
    - `price`: seconds that the objective adds, for replicated products and for results returned reduce-scattered.
    - `unknown`: primitives without a rule.
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
    def redundant_compute(self) -> float:
        """Seconds of compute beyond an even share."""
        return float(np.cumsum(self.redundant)[-1]) if self.redundant else 0.0

    def objective(self, level: int) -> float:
        """What a level minimises: 0 communication and redundant compute, else all seconds; and the prices."""
        return self.communication + (self.redundant_compute if level == 0 else self.compute) + self.price


def schedule_cost(made: Schedule, built: PlanningNetwork) -> ScheduleCost:
    """The cost of a schedule; `built` is the network of its program."""
    rows = collective_rows(made, built.combined_with)
    rows += _user_collective_rows(made.assignment, built, 1 + max((row.id for row, _ in rows), default=-1))
    seconds, redundant, price, unknown = _operator_costs(made.assignment, built)
    return ScheduleCost(
        tuple(rows), tuple(seconds), tuple(redundant), price + _scattered_sum_price(made, network), unknown
    )


def _operator_costs(
    assignment: Assignment, network: PlanningNetwork
) -> tuple[list[float], list[float], float, tuple[str, ...]]:
    """(equations,) seconds in all runs, and those beyond an even share; the price; primitives without a rule."""
    equations = np.flatnonzero(choice.program.use_def.has_kind("eqn"))
    # Operators that share a table of the network have equal avals, traffic and repeats.
    states = np.array(choice.state, dtype=np.int64)[equations]
    table_class, representatives = first_occurrence_codes(
        row_codes(built.cost_network.node_table[equations], states)
    )
    times, unknown = [], {}
    for i in equations[representatives].tolist():
        op, s = choice.program.operators[i], choice.states[i]
        t, k = built.operator_costs[int(built.cost_network.node_table[i])], choice.state[i]
        times.append([float(x[k]) * op.repeat for x in (t.compute, t.redundant, t.replication_price)])
        if s.rule.opaque:
            unknown[op.primitive] = None
    seconds, redundant, price = np.array(times).reshape(-1, 3)[table_class].T
    return seconds.tolist(), redundant.tolist(), float(price.sum()), tuple(unknown)


def _scattered_sum_price(made: Schedule, built: PlanningNetwork) -> float:
    """The price of sums that are returned to the caller reduce-scattered."""
    total = 0.0
    for action in made.communicating:
        if not isinstance(action, RunOperator) and action.tensor in network.returned_sums:
            tensor = network.program.tensors[action.tensor]
            price = deferred_gather_seconds(
                [action.source], [action.target], tensor.shape, tensor.itemsize, network.topology
            )
            total += float(price[0, 0]) * action.repeat
    return total


def collective_rows(made: Schedule, combined_sums: Mapping[int, int]) -> list[tuple[CollectiveRow, int]]:
    """Every collective of a schedule with the operator it is for (-1 for several)."""
    assignment = made.assignment
    program, topology = assignment.program, assignment.topology
    out = []
    for action in made.communicating:
        if isinstance(action, RunOperator):
            op, s = program.operators[action.op], assignment.states[action.op]
            for number, sent in zip(
                action.collective_ids, assignment.internal_collectives(op.id), strict=True
            ):
                tensor = program.tensors[op.results[sent.result]]
                lay = s.results[sent.result].layout(assignment.state[op.id])
                c = collectives.collective(sent.kind, sent.axes, sent.local_bytes, topology)
                local = _shape_text(lay.local_shape(tensor.shape, topology.mesh))
                out.append((_row(number, c, action, operator_name(op), tensor, local), op.id))
            continue
        tensor, lay = program.tensors[action.tensor], action.source
        reader = program.operators[action.reader] if action.reader >= 0 else None
        for step, number in zip(action.steps, action.collective_ids, strict=True):
            local_bytes = tensor.nbytes / lay.pieces(topology.mesh)
            after = apply_step(step, lay)
            if step.kind != "slice":
                sums = combined_sums.get(action.tensor, 1) if step.kind in REDUCING_KINDS else 1
                c = collectives.collective(step.kind, step.axes, local_bytes, topology, sums)
                before = _block(lay.local_shape(tensor.shape, topology.mesh))
                local = f"{before} -> {_block(after.local_shape(tensor.shape, topology.mesh))}"
                name = operator_name(reader) if reader is not None else f"readers of {tensor.name}"
                out.append((_row(number, c, action, name, tensor, local), action.reader))
            lay = after
    return out


def _user_collective_rows(
    assignment: Assignment, network: PlanningNetwork, first: int
) -> list[tuple[CollectiveRow, int]]:
    """Every collective that the user wrote in a `shard_map`, with the operator that it is; numbered from `first`."""
    out: list[tuple[CollectiveRow, int]] = []
    program = assignment.program
    for i in np.flatnonzero(program.use_def.has_primitive(frozenset((SHARD_MAP,)))).tolist():
        op = program.operators[i]
        cost = built.operator_costs[int(built.cost_network.node_table[i])].shard_map
        for own in cost.collectives if cost is not None else ():
            c = own.collective
            row = CollectiveRow(
                first + len(out), c.kind, tuple(c.axes), float(c.bytes), float(c.seconds), own.count * op.repeat,
                operator_name(op), "", _block(own.block), i in program.in_unbounded_loops or own.per_iteration,
                own.dtype, own=True,
            )  # fmt: skip
            out.append((row, i))
    return out


def _row(
    number: int, c: Any, action: Reshard | RunOperator, operator: str, tensor: Tensor, local: str
) -> CollectiveRow:
    return CollectiveRow(
        number, c.kind, tuple(c.axes), float(c.bytes), float(c.seconds), float(action.repeat), operator,
        tensor.name, local, action.unknown_trip_count, str(tensor.dtype),
    )  # fmt: skip


def _shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
