"""The record of a scheduled solution: cost, memory, and rows for tensors, operators and collectives.

The decision comes in full. Rows of operators, which only a report, a file or a comparison needs, are made at their
first use (`LazyTuple`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jshard._core.jaxcompat import is_backward
from jshard._core.layout import Layout
from jshard._plan.lazy_rows import LazyTuple
from jshard._plan.local_program import local_rows
from jshard._plan.model_flops import model_flops
from jshard._plan.record import PlanRecord
from jshard._plan.rows import Cost, Decision, LiveRow, Memory, OperatorRow, TensorRow
from jshard._plan.scheduled_solution import ScheduledSolution
from jshard._plan.stage_memory import memory_of_a_stage
from jshard._plan.step_lower_bound import step_lower_bound
from jshard._plan.tiled_memory import tiled_peak
from jshard._program.call_path import call_path
from jshard._program.fingerprint import dtype_name, fingerprint
from jshard._program.graph import Literal, Program, operator_name
from jshard._program.memory.liveness import liveness
from jshard._rules.rule import candidate_codes, unmet_blocks
from jshard._schedule.live_values import live_intervals
from jshard._schedule.schedule import Assignment, Schedule


TRACER = "trace_call.py"
"""The file (`_api/`) in which functions are traced: what runs outside of it is not part of the program."""


def summarize(solution: ScheduledSolution, space: str = "") -> PlanRecord:
    """The record of a solution; `space` says which plans its bound is about, where that is not all of them."""
    request, assignment, costs = solution.request, solution.schedule.assignment, solution.schedule_cost
    program, topology = assignment.program, assignment.topology
    equations = np.flatnonzero(program.use_def.has_kind("eqn")).tolist()
    boundaries = np.flatnonzero(~program.use_def.has_kind("eqn", "input", "const", "output")).tolist()
    # A plan keeps no captured array alive.
    bare = dataclasses.replace(assignment, program=dataclasses.replace(program, constants=(), jaxpr=None))
    collectives = [(row.id, op) for row, op in solution.collectives]
    profile = solution.profile
    inputs, outputs = _endpoint_rows(assignment, {(op, side, k) for op, side, k, _ in request.pins})
    return PlanRecord(
        name=program.name,
        level=request.level,
        search=request.search,
        mesh=topology.mesh,
        chip=topology.chip.name,
        fingerprint=fingerprint(program),
        inputs=inputs,
        outputs=outputs,
        operators=LazyTuple(
            len(equations),
            lambda: operator_rows(bare, equations, collectives, costs.seconds, costs.redundant),
        ),
        collectives=tuple(row for row, _ in solution.collectives),
        cost=Cost(
            objective=float(solution.objective),
            bound=float(solution.bound),
            compute=costs.compute,
            redundant=costs.redundant_compute,
            communication=costs.communication,
            peak_bytes=profile.peak,
            unit="B" if request.level == 1 else "s",
            price=costs.price,
            unpriced=solution.unpriced,
            space=space,
            hidden=solution.hidden,
        ),
        decision=_decision(assignment),
        memory_budget=request.memory_limit,
        unknown=costs.unknown,
        memory=Memory(
            tuple([float(profile.curve.get(i, 0.0)) for i in equations]),
            profile.by_class,
            memory_of_a_stage(program, profile),
            tiled_peak(profile, assignment),
        ),
        boundaries=LazyTuple(len(boundaries), lambda: operator_rows(bare, boundaries, collectives)),
        local=LazyTuple(None, lambda: local_rows(Schedule(bare))),
        live=LazyTuple(None, lambda: live_rows(bare, equations, request.donated)),
        steps=solution.steps,
        physics=step_lower_bound(assignment, request.donated),
        model_flops=model_flops(bare.program, topology),
    )


def _endpoint_rows(
    assignment: Assignment, pinned: set[tuple[int, str, int]]
) -> tuple[tuple[TensorRow, ...], tuple[TensorRow, ...]]:
    """The rows of arguments and of results; `pinned` are the (operator, side, index) of the user's pins."""
    program = assignment.program
    operators = program.operators
    inputs = tuple(
        _tensor_row(program, i, assignment.result_layout(operators[i].results[0]), (i, "result", 0) in pinned)
        for i in program.inputs
        if operators[i].kind == "input"
    )
    outputs = tuple(
        _tensor_row(program, i, assignment.operand_layout(i, 0), (i, "operand", 0) in pinned)
        for i in program.outputs
    )
    return inputs, outputs


def operator_rows(
    assignment: Assignment,
    operators: Sequence[int],
    collectives: Sequence[tuple[int, int]],
    seconds: Sequence[float] | None = None,
    redundant: Sequence[float] | None = None,
) -> tuple[OperatorRow, ...]:
    """Rows of some operators.

    Arguments:

    - `collectives`: (number of a collective, operator that it is for).
    - `seconds`, `redundant`: of each of the operators, in all its runs; None for 0.
    """
    by_operator: dict[int, list[int]] = {}
    for number, op in collectives:
        by_operator.setdefault(op, []).append(number)
    cache: dict[Hashable, _Tensors] = {}
    times = [0.0] * len(operators) if seconds is None else seconds
    beyond = [0.0] * len(operators) if redundant is None else redundant
    return tuple(
        [
            _operator_row(assignment, i, tuple(by_operator.get(i, ())), (t, more), cache)
            for i, t, more in zip(operators, times, beyond, strict=True)
        ]
    )


def live_rows(
    assignment: Assignment, operators: Sequence[int], donated: Sequence[int]
) -> tuple[LiveRow, ...]:
    """When each tensor is in memory, by positions in `operators`; `donated` are flat indices of arguments."""
    program = assignment.program
    found = live_intervals(Schedule(assignment), liveness(program, donated), donated, operators)
    return tuple([LiveRow(program.tensors[i.tensor].name, i.kind, i.nbytes, i.first, i.last) for i in found])


def _tensor_row(program: Program, op: int, layout: Layout, pinned: bool) -> TensorRow:
    operator = program.operators[op]
    atom = operator.operands[0] if operator.kind == "output" else operator.results[0]
    aval: Any = atom.aval if isinstance(atom, Literal) else program.tensors[atom]
    name = "" if isinstance(atom, Literal) else program.tensors[atom].name
    return TensorRow(operator.name, tuple(aval.shape), dtype_name(aval.dtype), layout, pinned, name)


class _Tensors(NamedTuple):
    """The operands and results of an operator in one state, equal for all operators of its class in that state."""

    strategy: tuple[tuple[int, ...], ...]
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    shapes: tuple[tuple[int, ...], ...]
    result_shapes: tuple[tuple[int, ...], ...]
    operand_dtypes: tuple[str, ...]
    result_dtypes: tuple[str, ...]


def _tensors_of(assignment: Assignment, i: int) -> _Tensors:
    op, candidates, k = assignment.program.operators[i], assignment.states[i], assignment.state[i]
    tensors = assignment.program.tensors
    operands = tuple(c.layout(k) for c in candidates.operands)
    avals: list[Any] = [a.aval if isinstance(a, Literal) else tensors[a] for a in op.operands]
    return _Tensors(
        strategy=tuple(layout.cuts(assignment.topology.mesh) for layout in operands),
        operands=operands,
        results=tuple(c.layout(k) for c in candidates.results),
        shapes=tuple(tuple(a.shape) for a in avals),
        result_shapes=tuple(tensors[r].shape for r in op.results),
        operand_dtypes=tuple(dtype_name(a.dtype) for a in avals),
        result_dtypes=tuple(dtype_name(tensors[r].dtype) for r in op.results),
    )


def _operator_row(
    assignment: Assignment,
    i: int,
    collectives: tuple[int, ...],
    seconds: tuple[float, float],
    cache: dict[Hashable, _Tensors],
) -> OperatorRow:
    """The row of an operator; `seconds`: all, and the redundant ones of them.

    `cache` has the tensors of equations by candidate set and state.
    """
    op, candidates, k = assignment.program.operators[i], assignment.states[i], assignment.state[i]
    tensors = assignment.program.tensors
    key = (id(candidates), k) if op.kind == "eqn" else (id(candidates), k, i)
    if key not in cache:
        cache[key] = _tensors_of(assignment, i)
    shared = cache[key]
    return OperatorRow(
        name=operator_name(op),
        primitive=op.primitive,
        module=op.module,
        source=op.source,
        dtype=shared.result_dtypes[0] if op.results else "",
        collectives=collectives,
        repeat=op.repeat,
        seconds=seconds[0],
        note=candidates.rule.note,
        reads=tuple(["" if isinstance(a, Literal) else tensors[a].name for a in op.operands]),
        writes=tuple([tensors[r].name for r in op.results]),
        turn=i in assignment.program.in_unbounded_loops,
        backward=op.eqn is not None and is_backward(op.prefix, op.eqn),
        redundant=seconds[1],
        calls=call_path(op.eqn, TRACER),
        kernel=_kernel(assignment, i),
        limit=_limit(assignment, i) if seconds[1] > 0 or collectives else "",
        **shared._asdict(),
    )


def _limit(assignment: Assignment, i: int) -> str:
    """Why no candidate of an operator cuts it into more pieces than the chosen one; "" where one does."""
    mesh, states, candidate = assignment.topology.mesh, assignment.states[i], assignment.candidate(i)
    if candidate is None or states.op is None or states.rule.opaque:
        return ""
    sizes = np.array(mesh.sizes, dtype=np.int64)

    def pieces(codes: np.ndarray) -> np.ndarray:
        return np.where(codes >= 0, sizes, 1).prod(axis=1)  # partial sums are no cuts

    chosen = int(pieces(np.array([candidate.axis_codes], dtype=np.int64))[0])
    if chosen == mesh.total or pieces(states.axis_codes).max() > chosen:
        return ""
    rule = states.rule
    if pieces(candidate_codes(rule, mesh)).max() > chosen:
        return ""  # a pin allows no more
    exchanged = {f for cut in rule.joint for f in cut.factors}
    if rule.note and any(rule.sizes[f] > 1 and f not in exchanged for f in rule.blocked):
        return rule.note
    for f in sorted(exchanged):
        dividing = [p for p in mesh.piece_counts if p > chosen and rule.sizes[f] % p == 0]
        if dividing and (unmet := unmet_blocks(rule, f, min(dividing))):
            return unmet
    return "no cut divides its sizes"


def _kernel(assignment: Assignment, i: int) -> str:
    """What computes an operator on an accelerator, if its primitive has a choice."""
    states, candidate = assignment.states[i], assignment.candidate(i)
    if states.op is None or candidate is None or states.entry is None or states.entry.kernel is None:
        return ""
    platform = assignment.topology.chip.name.partition("-")[0]
    return states.entry.kernel(states.op, states.rule, candidate, assignment.topology.mesh, platform)


def _decision(assignment: Assignment) -> Decision:
    alike, representatives = assignment.state_classes
    codes = [None if (c := assignment.candidate(i)) is None else c.axis_codes for i in representatives]
    endpoints = []
    for i in np.flatnonzero(np.array([c is None for c in codes], dtype=bool)[alike]).tolist():
        op = assignment.program.operators[i]
        is_output = op.kind == "output"
        layout = assignment.operand_layout(i, 0) if is_output else assignment.result_layout(op.results[0])
        endpoints.append((i, layout))
    return Decision(
        candidates=tuple([codes[k] for k in alike.tolist()]),
        endpoints=tuple(endpoints),
        relays=tuple(sorted(assignment.relay.items())),
        regather=tuple(sorted(assignment.regather)),
        regather_after=tuple(sorted(assignment.regather_after)),
    )
