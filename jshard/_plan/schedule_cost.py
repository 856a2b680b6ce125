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
from jshard._network.operator_cost import costed_internal_collectives
from jshard._plan.rows import CollectiveRow
from jshard._program.graph import Tensor, operator_name
from jshard._program.user_shard_map import SHARD_MAP
from jshard._schedule.schedule import Assignment, Reshard, RunOperator, Schedule


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
    def redundant_compute(self) -> float:
        """Seconds of compute beyond an even share."""
        return float(np.cumsum(self.redundant)[-1]) if self.redundant else 0.0

    def objective(self, level: int) -> float:
        """What a level minimises: 0 communication and redundant compute, else all seconds; and the prices."""
        return self.communication + (self.redundant_compute if level == 0 else self.compute) + self.price


def schedule_cost(made: Schedule, network: PlanningNetwork) -> ScheduleCost:
    """The cost of a schedule of the network's program."""
    rows = collective_rows(made, network.combined_with)
    rows += _user_collective_rows(made.assignment, network, 1 + max((row.id for row, _ in rows), default=-1))
    seconds, redundant, price, unknown = _operator_costs(made.assignment, network)
    return ScheduleCost(
        tuple(rows), tuple(seconds), tuple(redundant), price + _scattered_sum_price(made, network), unknown
    )


def _operator_costs(
    assignment: Assignment, network: PlanningNetwork
) -> tuple[list[float], list[float], float, tuple[str, ...]]:
    """Of each equation the seconds in all its runs and those beyond an even share; the price; primitives without a rule."""
    equations = np.flatnonzero(assignment.program.use_def.has_kind("eqn"))
    # Operators of one table in the network are equal in class, traffic and repeats.
    state = np.array(assignment.state, dtype=np.int64)[equations]
    classes, representatives = first_occurrence_codes(
        row_codes(network.cost_network.node_table[equations], state)
    )
    costs, unknown = [], {}
    for i in equations[representatives].tolist():
        op, s = assignment.program.operators[i], assignment.states[i]
        t, k = network.operator_costs[int(network.cost_network.node_table[i])], assignment.state[i]
        costs.append([float(x[k]) * op.repeat for x in (t.compute, t.redundant, t.replication_price)])
        if s.rule.opaque:
            unknown[op.primitive] = None
    seconds, redundant, price = np.array(costs).reshape(-1, 3)[classes].T
    if network.epilogue_charges:
        place = np.full(len(assignment.program.operators), -1)
        place[equations] = np.arange(len(equations))
        for op, more, beyond in _epilogue_seconds(assignment, network):
            seconds[place[op]] += more
            redundant[place[op]] += beyond
    return seconds.tolist(), redundant.tolist(), float(price.sum()), tuple(unknown)


def _epilogue_seconds(assignment: Assignment, network: PlanningNetwork) -> list[tuple[int, float, float]]:
    """(operator, seconds, redundant) for epilogues: those in a product's kernel are the product's."""
    edges, out = network.tensor_edges, []
    for e, charged in network.epilogue_charges.items():
        source, target = (edges.layouts[int(x[e])] for x in (edges.source_layouts, edges.target_layouts))
        tensor, reader = int(edges.tensor[e]), int(edges.reader[e])
        # A relay's first states are its layouts, each by itself.
        kept = source if reader >= 0 else target
        stored = kept.layouts.index(assignment.relay[tensor]) if tensor in network.relays else -1
        i = assignment.state[int(edges.source_variable[e])] if stored < 0 or reader < 0 else stored
        j = assignment.state[reader] if reader >= 0 else stored
        for product, root, charge in charged:
            costs = network.cost_tables.charge_seconds(charge, source, target)
            fused, seconds, redundant = costs.of_schedule(i, int(source.of_state[i]), int(target.of_state[j]))
            if seconds:
                out.append((product if fused else root, seconds, redundant))
    return out


def _scattered_sum_price(made: Schedule, network: PlanningNetwork) -> float:
    """The price of sums that the caller gets reduce-scattered."""
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
            candidate = assignment.candidate(action.op)
            assert candidate is not None and s.op is not None
            received = assignment.received_edges.get(op.id, {})
            sent_costs = costed_internal_collectives(s.rule, candidate, s.op, topology, received)
            for number, (sent, c) in zip(action.collective_ids, sent_costs, strict=True):
                if sent.operand is None:
                    of, lays = op.results[sent.result], s.results[sent.result]
                else:
                    of, lays = op.operands[sent.operand], s.operands[sent.operand]
                assert isinstance(of, int), "a literal is a scalar, which no collective sends"
                tensor, lay = program.tensors[of], lays.layout(assignment.state[op.id])
                local = _shape_text(lay.local_shape(tensor.shape, topology.mesh))
                row = _row(number, c, action, operator_name(op), tensor, local)
                out.append((dataclasses.replace(row, count=row.count * sent.count), op.id))
            continue
        tensor, lay = program.tensors[action.tensor], action.source
        reader = program.operators[action.reader] if action.reader >= 0 else None
        for step, number in zip(action.steps, action.collective_ids, strict=True):
            nbytes = tensor.nbytes / lay.pieces(topology.mesh)
            after = apply_step(step, lay)
            if step.kind != "slice":
                sums = combined_sums.get(action.tensor, 1) if step.kind in REDUCING_KINDS else 1
                c = collectives.collective(step.kind, step.axes, nbytes, topology, sums)
                before = _shape_text(lay.local_shape(tensor.shape, topology.mesh))
                local = f"{before} -> {_shape_text(after.local_shape(tensor.shape, topology.mesh))}"
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
        body = network.operator_costs[int(network.cost_network.node_table[i])].shard_map
        for user in body.collectives if body is not None else ():
            c = user.collective
            row = CollectiveRow(
                first + len(out), c.kind, tuple(c.axes), float(c.bytes), float(c.seconds), user.count * op.repeat,
                operator_name(op), "", _shape_text(user.block),
                i in program.in_unbounded_loops or user.per_iteration, user.dtype, own=True,
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
