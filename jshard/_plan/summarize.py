"""The plan of a schedule, as plain data: cost, memory, and rows for tensors, operators and collectives.

What the search decided comes in full. The rows of operators, which only a report, a file or a comparison reads,
are made when they are asked for (`Later`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jshard._api.plan import Cost, Decision, Memory, OperatorRow, Plan, TensorRow
from jshard._core.layout import Layout
from jshard._plan.lazy_rows import LazyTuple
from jshard._plan.local_program import local_rows
from jshard._plan.schedule_cost import ScheduleCost
from jshard._plan.step_lower_bound import step_lower_bound
from jshard._program.graph import Literal, Program, operator_name
from jshard._schedule.peak import PeakProfile
from jshard._schedule.schedule import Assignment, Schedule


def summarize(
    made: Schedule,
    request: Any,
    found: ScheduleCost,
    objective: float,
    bound: float,
    steps: Sequence[str],
    held: PeakProfile,
    unpriced: float = 0.0,
    space: str = "",
) -> Plan:
    """The plan of a schedule that answers a problem under a wish; `found` is what the schedule costs."""
    choice = made.assignment
    program, topology = choice.program, choice.topology
    a = program.use_def
    equations = np.flatnonzero(a.has_kind("eqn")).tolist()
    joints = np.flatnonzero(~a.has_kind("eqn", "input", "const", "output")).tolist()
    # A plan keeps no captured array alive.
    bare = dataclasses.replace(choice, program=dataclasses.replace(program, constants=(), jaxpr=None))
    moves = [(row.id, reader) for row, reader in found.collectives]
    pinned = {(op, side, k) for op, side, k, _ in request.pins}
    inputs = tuple(
        _tensor_row(
            program, i, choice.result_layout(program.operators[i].results[0]), (i, "result", 0) in pinned
        )
        for i in program.inputs
        if program.operators[i].kind == "input"
    )
    outputs = tuple(
        _tensor_row(program, i, choice.operand_layout(i, 0), (i, "operand", 0) in pinned)
        for i in program.outputs
    )
    cost = Cost(
        float(objective), float(bound), found.compute, found.redundant_compute, found.communication, held.peak,
        "B" if request.level == 1 else "s", found.price, unpriced, space,
    )  # fmt: skip
    memory = Memory(tuple([float(held.curve.get(i, 0.0)) for i in equations]), held.by_class)
    return Plan(
        name=program.name, level=request.level, search=request.search, mesh=topology.mesh, chip=topology.chip.name,
        fingerprint=fingerprint(program), inputs=inputs, outputs=outputs,
        operators=LazyTuple(len(equations), lambda: operator_rows(bare, equations, moves, found.seconds)),
        collectives=tuple(r for r, _ in found.collectives), cost=cost, decision=_decision(choice),
        memory_budget=request.memory_limit, unknown=found.unknown, memory=memory,
        boundaries=LazyTuple(len(joints), lambda: operator_rows(bare, joints, moves)),
        local=LazyTuple(None, lambda: local_rows(Schedule(bare))),
        steps=tuple(steps), physics=step_lower_bound(choice, request.donated),
    )  # fmt: skip


def operator_rows(
    choice: Assignment,
    which: Sequence[int],
    moves: Sequence[tuple[int, int]],
    seconds: Sequence[float] | None = None,
) -> tuple[OperatorRow, ...]:
    """Rows of some operators; `moves` are (number of a collective, operator that it is for)."""
    by_reader: dict[int, list[int]] = {}
    for number, reader in moves:
        by_reader.setdefault(reader, []).append(number)
    alike: dict[Any, tuple] = {}
    times = [0.0] * len(which) if seconds is None else seconds
    return tuple(
        [
            _operator_row(choice, i, tuple(by_reader.get(i, ())), t, alike)
            for i, t in zip(which, times, strict=True)
        ]
    )


def _tensor_row(program: Program, op: int, layout: Layout, pinned: bool) -> TensorRow:
    operator = program.operators[op]
    atom = operator.operands[0] if operator.kind == "output" else operator.results[0]
    t: Any = atom.aval if isinstance(atom, Literal) else program.tensors[atom]
    name = "" if isinstance(atom, Literal) else program.tensors[atom].name
    return TensorRow(operator.name, tuple(t.shape), dtype_name(t.dtype), layout, pinned, name)


def _operator_row(
    choice: Assignment, i: int, moved: tuple[int, ...], seconds: float, shared_fields: dict[Any, tuple]
) -> OperatorRow:
    """The row of an operator; `alike` keeps what operators of one form in one state have in common."""
    op, s, k = choice.program.operators[i], choice.states[i], choice.state[i]
    tensors = choice.program.tensors
    key = (id(s), k) if op.kind == "eqn" else (id(s), k, i)
    if key not in shared_fields:
        ins = tuple(c.layout(k) for c in s.operands)
        outs = tuple(c.layout(k) for c in s.results)
        avals: list[Any] = [a.aval if isinstance(a, Literal) else tensors[a] for a in op.operands]
        shared_fields[key] = (
            tuple(lay.cuts(choice.topology.mesh) for lay in ins), ins, outs,
            tuple(tuple(a.shape) for a in avals), tuple(tensors[r].shape for r in op.results),
            tuple(dtype_name(a.dtype) for a in avals), tuple(dtype_name(tensors[r].dtype) for r in op.results),
        )  # fmt: skip
    strategy, ins, outs, shapes, result_shapes, dtypes, result_dtypes = shared_fields[key]
    return OperatorRow(
        name=operator_name(op), primitive=op.primitive, module=op.module, source=op.source,
        strategy=strategy, operands=ins, results=outs, shapes=shapes, result_shapes=result_shapes,
        dtype=result_dtypes[0] if op.results else "", collectives=moved, repeat=op.repeat,
        seconds=seconds, note=s.rule.note,
        reads=tuple(["" if isinstance(a, Literal) else tensors[a].name for a in op.operands]),
        writes=tuple([tensors[r].name for r in op.results]),
        operand_dtypes=dtypes, result_dtypes=result_dtypes, turn=i in choice.program.in_unbounded_loops,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def dtype_name(dtype: Any) -> str:
    """`str(dtype)`, which numpy composes anew each time."""
    return str(dtype)


def _decision(choice: Assignment) -> Decision:
    alike, some = choice.state_classes
    axes = [None if (c := choice.candidate(i)) is None else c.axis_codes for i in some]
    candidates = tuple([axes[k] for k in alike.tolist()])
    endpoints = []
    for i in np.flatnonzero(np.array([x is None for x in axes], dtype=bool)[alike]).tolist():
        op = choice.program.operators[i]
        endpoints.append(
            (i, choice.operand_layout(i, 0) if op.kind == "output" else choice.result_layout(op.results[0]))
        )
    return Decision(candidates, tuple(endpoints), tuple(sorted(choice.relay.items())), choice.regather)


def fingerprint(program: Program) -> str:
    """A short hash of the program: operators, how they are joined, shapes and dtypes; not of names or sources."""
    a = program.use_def
    # Numbers are given in the order of the program, so they are the same in every process.
    kinds = [(shape, dtype_name(dtype)) for shape, dtype in a.aval_ids]
    literals = [str(x.value) for x in a.literals]
    found = hashlib.sha256(repr((list(a.primitive_ids), kinds, literals)).encode())
    for numbers in (
        a.primitive_id, a.use_begin, a.use_tensor, a.use_operand, a.result_begin, a.result, a.aval_id, a.literal_op, a.literal_operand,
    ):  # fmt: skip
        found.update(np.asarray(numbers, dtype="<i8").tobytes())
    found.update(np.asarray(a.repeat, dtype="<f8").tobytes())
    return found.hexdigest()[:16]
