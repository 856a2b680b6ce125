"""The plan of a schedule, as plain data: cost, memory, and rows for tensors, operators and collectives.

What the search decided comes in full. The rows of operators, which only a report, a file or a comparison reads,
are made when they are asked for (`Later`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jshard._cost import collectives
from jshard._cost.redistribute import SUMS
from jshard._cost.steps import apply
from jshard._layout import Layout
from jshard._numbers import numbered, packed
from jshard._plan.later import Later
from jshard._plan.network import Problem
from jshard._plan.peak import Profile
from jshard._plan.physics import physics
from jshard._plan.plan import CollectiveRow, Cost, Decision, Memory, OperatorRow, Plan, TensorRow
from jshard._plan.schedule import Choice, Run, Schedule
from jshard._program.graph import Literal, Program, operator_name
from jshard._program.mapped import SHARD_MAP
from jshard._rules.rule import reduced_axes


def describe(
    made: Schedule,
    wish: Any,
    objective: float,
    bound: float,
    steps: Sequence[str],
    built: Problem,
    held: Profile,
) -> Plan:
    """The plan of a schedule that answers a problem under a wish."""
    choice = made.choice
    program, topology = choice.program, choice.topology
    moved = collective_rows(made, built.together)
    moved += own_rows(choice, built, 1 + max((row.id for row, _ in moved), default=-1))
    seconds, redundant, unknown = _compute(choice, built)
    a = program.arrays
    equations = np.flatnonzero(a.of_kind("eqn")).tolist()
    joints = np.flatnonzero(~a.of_kind("eqn", "input", "const", "output")).tolist()
    # A plan keeps no captured array alive.
    bare = dataclasses.replace(choice, program=dataclasses.replace(program, constants=(), jaxpr=None))
    moves = [(row.id, reader) for row, reader in moved]
    pinned = {(op, side, k) for op, side, k, _ in wish.pins}
    inputs = tuple(
        _tensor_row(program, i, choice.made(program.operators[i].results[0]), (i, "result", 0) in pinned)
        for i in program.inputs
        if program.operators[i].kind == "input"
    )
    outputs = tuple(
        _tensor_row(program, i, choice.needed(i, 0), (i, "operand", 0) in pinned) for i in program.outputs
    )
    communication = sum(r.seconds * r.count for r, _ in moved)
    # Summed one after the other, so that no version of Python rounds it otherwise.
    compute, beyond = (float(np.cumsum(s)[-1]) if s else 0.0 for s in (seconds, redundant))
    cost = Cost(
        float(objective), float(min(bound, objective)), compute, beyond, communication,
        held.peak, "B" if wish.level == 1 else "s",
    )  # fmt: skip
    memory = Memory(tuple([float(held.curve.get(i, 0.0)) for i in equations]), held.held)
    return Plan(
        name=program.name, level=wish.level, search=wish.search, mesh=topology.mesh, chip=topology.chip.name,
        fingerprint=fingerprint(program), inputs=inputs, outputs=outputs,
        operators=Later(len(equations), lambda: operator_rows(bare, equations, moves, seconds)),
        collectives=tuple(r for r, _ in moved), cost=cost, decision=_decision(choice),
        memory_budget=wish.memory_limit, unknown=unknown, memory=memory,
        boundaries=Later(len(joints), lambda: operator_rows(bare, joints, moves)),
        steps=tuple(steps), physics=physics(choice, compute - beyond),
    )  # fmt: skip


def _compute(choice: Choice, built: Problem) -> tuple[list[float], list[float], tuple[str, ...]]:
    """Of each equation the seconds in all its runs and those beyond an even share; primitives without a rule."""
    equations = np.flatnonzero(choice.program.arrays.of_kind("eqn"))
    # Operators of one table in the network are alike in form, traffic and repeats.
    states = np.array(choice.state, dtype=np.int64)[equations]
    alike, some = numbered(packed(built.network.node_table[equations], states))
    times, unknown = [], {}
    for i in equations[some].tolist():
        op, s = choice.program.operators[i], choice.states[i]
        t, k = built.times[int(built.network.node_table[i])], choice.state[i]
        times.append((float(t.compute[k]) * op.repeat, float(t.redundant[k]) * op.repeat))
        if s.rule.opaque:
            unknown[op.primitive] = None
    seconds, redundant = np.array(times).reshape(-1, 2)[alike].T
    return seconds.tolist(), redundant.tolist(), tuple(unknown)


def operator_rows(
    choice: Choice,
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


def collective_rows(made: Schedule, together: Mapping[int, int]) -> list[tuple[CollectiveRow, int]]:
    """Every collective of a schedule with the operator it is for (-1 for several)."""
    choice = made.choice
    program, topology = choice.program, choice.topology
    out = []
    for action in made.communicating:
        if isinstance(action, Run):
            op, s = program.operators[action.op], choice.states[action.op]
            candidate = choice.candidate(action.op)
            assert candidate is not None
            axes = reduced_axes(s.rule, candidate, topology.mesh)
            for r, t in enumerate(op.results):
                tensor = program.tensors[t]
                lay = s.results[r].of(choice.state[op.id])
                held = tensor.nbytes / lay.pieces(topology.mesh)
                c = collectives.collective("all_reduce", axes, held, topology)
                local = _block(lay.local_shape(tensor.shape, topology.mesh))
                out.append(
                    (_row(action.number, c, action.repeat, operator_name(op), tensor.name, local), op.id)
                )
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
                out.append((_row(number, c, action.repeat, name, tensor.name, local), action.reader))
            lay = after
    return out


def own_rows(choice: Choice, built: Problem, first: int) -> list[tuple[CollectiveRow, int]]:
    """Every collective that the user wrote in a `shard_map`, with the operator that it is; numbered from `first`."""
    out = []
    for i in np.flatnonzero(choice.program.arrays.which(frozenset((SHARD_MAP,)))).tolist():
        op, found = choice.program.operators[i], built.times[int(built.network.node_table[i])].inside
        for c in found.collectives if found is not None else ():
            row = _row(
                first + len(out), c.collective, c.count * op.repeat, operator_name(op), "", _block(c.block)
            )
            out.append((dataclasses.replace(row, own=True), i))
    return out


def _row(number: int, c: Any, count: float, operator: str, tensor: str, local: str) -> CollectiveRow:
    return CollectiveRow(
        number, c.kind, tuple(c.axes), float(c.bytes), float(c.seconds), float(count), operator, tensor, local
    )


def _block(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _tensor_row(program: Program, op: int, layout: Layout, pinned: bool) -> TensorRow:
    operator = program.operators[op]
    atom = operator.operands[0] if operator.kind == "output" else operator.results[0]
    t: Any = atom.aval if isinstance(atom, Literal) else program.tensors[atom]
    name = "" if isinstance(atom, Literal) else program.tensors[atom].name
    return TensorRow(operator.name, tuple(t.shape), dtype_name(t.dtype), layout, pinned, name)


def _operator_row(
    choice: Choice, i: int, moved: tuple[int, ...], seconds: float, alike: dict[Any, tuple]
) -> OperatorRow:
    """The row of an operator; `alike` keeps what operators of one form in one state have in common."""
    op, s, k = choice.program.operators[i], choice.states[i], choice.state[i]
    tensors = choice.program.tensors
    key = (id(s), k) if op.kind == "eqn" else (id(s), k, i)
    if key not in alike:
        ins = tuple(c.of(k) for c in s.operands)
        outs = tuple(c.of(k) for c in s.results)
        avals: list[Any] = [a.aval if isinstance(a, Literal) else tensors[a] for a in op.operands]
        alike[key] = (
            tuple(lay.cuts(choice.topology.mesh) for lay in ins), ins, outs,
            tuple(tuple(a.shape) for a in avals), tuple(tensors[r].shape for r in op.results),
            tuple(dtype_name(a.dtype) for a in avals), tuple(dtype_name(tensors[r].dtype) for r in op.results),
        )  # fmt: skip
    strategy, ins, outs, shapes, result_shapes, dtypes, result_dtypes = alike[key]
    return OperatorRow(
        name=operator_name(op), primitive=op.primitive, module=op.module, source=op.source,
        strategy=strategy, operands=ins, results=outs, shapes=shapes, result_shapes=result_shapes,
        dtype=result_dtypes[0] if op.results else "", collectives=moved, repeat=op.repeat,
        seconds=seconds, note=s.rule.note,
        reads=tuple(["" if isinstance(a, Literal) else tensors[a].name for a in op.operands]),
        writes=tuple([tensors[r].name for r in op.results]),
        operand_dtypes=dtypes, result_dtypes=result_dtypes,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def dtype_name(dtype: Any) -> str:
    """`str(dtype)`, which numpy composes anew each time."""
    return str(dtype)


def _decision(choice: Choice) -> Decision:
    alike, some = choice.alike
    axes = [None if (c := choice.candidate(i)) is None else c.axes for i in some]
    candidates = tuple([axes[k] for k in alike.tolist()])
    endpoints = []
    for i in np.flatnonzero(np.array([x is None for x in axes], dtype=bool)[alike]).tolist():
        op = choice.program.operators[i]
        endpoints.append((i, choice.needed(i, 0) if op.kind == "output" else choice.made(op.results[0])))
    return Decision(candidates, tuple(endpoints), tuple(sorted(choice.relay.items())), choice.regather)


def fingerprint(program: Program) -> str:
    """A short hash of the program: operators, how they are joined, shapes and dtypes; not of names or sources."""
    a = program.arrays
    # Numbers are given in the order of the program, so they are the same in every process.
    kinds = [(shape, dtype_name(dtype)) for shape, dtype in a.kinds]
    literals = [str(x.value) for x in a.literals]
    found = hashlib.sha256(repr((list(a.primitives), kinds, literals)).encode())
    for numbers in (
        a.primitive, a.begin, a.read, a.operand, a.result_begin, a.result, a.kind, a.literal_op, a.literal_operand,
    ):  # fmt: skip
        found.update(np.asarray(numbers, dtype="<i8").tobytes())
    found.update(np.asarray(a.repeat, dtype="<f8").tobytes())
    return found.hexdigest()[:16]
