"""The local program of one device as plain rows: every operator, every step of every reshard, every loop and branch.

The schedule is what runs; these rows are derived from it, and `plan.ir(local=True)` prints them. A value has one name: the
tensor's own as it is made, the tensor's with a number for each copy that a step makes of it. A body sees the names of
the values that enter it; a `remat` and a branch see those of what they are given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from jshard._cost.reshard_steps import apply_step
from jshard._plan.rows import LocalRow
from jshard._program.graph import Call, Literal, operator_name
from jshard._schedule.schedule import Action, Reshard, RunCall, RunOperator, Schedule, Value


Names = dict[Value, str]


class _How(TypedDict):
    count: float
    turn: bool


def local_rows(made: Schedule) -> tuple[LocalRow, ...]:
    """The rows of a schedule; its results come last."""
    writer = _RowWriter(made)
    names = {v: writer.name(v) for v in writer.inputs()}
    writer.constants = {v: n for v, n in names.items() if writer.captured(v)}
    writer.actions(made.actions, names, 0)
    writer.out.append(
        LocalRow(
            "return", "", tuple(writer.read(v, names) for v in made.outputs), (), *writer.types(made.outputs)
        )
    )
    return tuple(writer.out)


class _RowWriter:
    """Collects rows; used once."""

    def __init__(self, made: Schedule):
        self.assignment = made.assignment
        self.program, self.mesh = made.assignment.program, made.assignment.topology.mesh
        self.out: list[LocalRow] = []
        self.copies: dict[int, int] = {}
        self.constants: Names = {}

    def inputs(self) -> list[Value]:
        return [self.assignment.values[self.program.operators[i].results[0]] for i in self.program.inputs]

    def captured(self, v: Value) -> bool:
        return self.program.operators[self.assignment.producers[v[0]][0]].kind == "const"

    def name(self, v: Value) -> str:
        return self.program.tensors[v[0]].name

    def copy(self, tensor: int) -> str:
        self.copies[tensor] = self.copies.get(tensor, 0) + 1
        return f"{self.program.tensors[tensor].name}.{self.copies[tensor]}"

    def shape(self, v: Value) -> tuple[int, ...]:
        return v[1].local_shape(self.program.tensors[v[0]].shape, self.mesh)

    def read(self, v: Value | Literal, names: Mapping[Value, str]) -> str:
        return "" if isinstance(v, Literal) else names[v]

    def types(self, values: Sequence[Value | Literal]) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
        """Local shapes and element types."""
        shapes = tuple(tuple(v.aval.shape) if isinstance(v, Literal) else self.shape(v) for v in values)
        tensors = self.program.tensors
        return shapes, tuple(
            str(v.aval.dtype if isinstance(v, Literal) else tensors[v[0]].dtype) for v in values
        )

    def row(
        self, kind: str, operator: str, reads: Sequence[Value | Literal], writes: Sequence[Value], names: Names,
        depth: int, *, count: float = 1.0, turn: bool = False, made: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """A row that gives names to what it writes: `made`, or the tensors' own."""
        shapes, dtypes = self.types(reads)
        given = tuple(self.read(v, names) for v in reads)
        made = made or [self.name(v) for v in writes]
        names.update(zip(writes, made, strict=True))
        self.out.append(
            LocalRow(
                kind,
                operator,
                given,
                tuple(made),
                shapes,
                dtypes,
                *self.types(writes),
                count=count,
                turn=turn,
                depth=depth,
            )  # fmt: skip
        )

    def actions(self, some: Sequence[Action], names: Names, depth: int) -> None:
        for a in some:
            if isinstance(a, Reshard):
                self.reshard(a, names, depth)
                if not depth and self.captured((a.tensor, a.target)):
                    self.constants[a.tensor, a.target] = names[a.tensor, a.target]
            elif isinstance(a, RunOperator):
                self.operator(a, names, depth)
            else:
                self.nested(a, names, depth)

    def operator(self, a: RunOperator, names: Names, depth: int) -> None:
        """An operator, and the collectives that it emits itself."""
        op, how = self.program.operators[a.op], _How(count=a.repeat, turn=a.unknown_trip_count)
        results = [self.assignment.values[t] for t in op.results]
        self.row("operator", operator_name(op), a.reads, results, names, depth, **how)
        for number, sent in zip(a.collective_ids, self.assignment.internal_collectives(a.op), strict=True):
            self.out.append(
                LocalRow(
                    sent.kind,
                    operator_name(op),
                    axes=sent.axes,
                    id=number,
                    depth=depth,
                    bytes=sent.local_bytes,
                    count=a.repeat * sent.count,
                    turn=a.unknown_trip_count,
                )
            )

    def reshard(self, m: Reshard, names: Names, depth: int) -> None:
        reader = operator_name(self.program.operators[m.reader]) if m.reader >= 0 else ""
        dtype, here = (str(self.program.tensors[m.tensor].dtype),), m.source
        name = names[m.tensor, m.source]
        for step, number in zip(m.steps, m.collective_ids, strict=True):
            after, made = apply_step(step, here), self.copy(m.tensor)
            before, shape = ((self.shape((m.tensor, lay)),) for lay in (here, after))
            self.out.append(
                LocalRow(
                    step.kind,
                    reader,
                    (name,),
                    (made,),
                    before,
                    dtype,
                    shape,
                    dtype,
                    tuple(step.axes),
                    number,
                    m.repeat,
                    m.unknown_trip_count,
                    depth,
                )  # fmt: skip
            )
            here, name = after, made
        names[m.tensor, m.target] = name

    def nested(self, a: RunCall, names: Names, depth: int) -> None:
        """A call: its operands, each body, its results."""
        call, ops = a.call, self.program.operators
        b = call.boundary
        enter = [i for role in ("test", "const", "carry", "xs") for i in b.get(role, ())]
        inside = dict(names)
        if enter:  # a loop: its bodies see what comes in under the names of their own tensors
            for v, i in zip(a.reads, enter, strict=True):
                writes = [
                    self.assignment.values[t] for t in ops[i].results[: max(1, len(ops[i].results) - 1)]
                ]
                self.row(ops[i].primitive, operator_name(ops[i]), (v,), writes, inside, depth)
        elif call.kind == "cond":
            self.row("branch on", operator_name(ops[b["pred"][0]]), a.reads[:1], (), inside, depth)
        ends: list[Names] = []
        for k, (entry, body, returns) in enumerate(zip(a.entry, a.bodies, a.returns, strict=True)):
            count = float(call.trip_count or 1) + (
                call.kind == "while" and k == 0 and call.trip_count is not None
            )
            title = {"cond": f"branch {k}", "while": ("test", "turn")[k > 0]}.get(call.kind, call.kind)
            self.out.append(LocalRow("begin", title, count=count, turn=call.trip_count is None, depth=depth))
            known = {**self.constants, **{v: inside[v] for v in entry}}
            self.actions(body, known, depth + 1)
            self.out.append(
                LocalRow("end", title, tuple(self.read(v, known) for v in returns), (), *self.types(returns),
                         depth=depth)
            )  # fmt: skip
            ends.append(known)
        self.leave(call, a, ends, names, depth)

    def leave(self, call: Call, a: RunCall, ends: Sequence[Names], names: Names, depth: int) -> None:
        """The results of a call, from those of its bodies."""
        ops, b = self.program.operators, call.boundary
        if not b:
            for v in a.returns[0]:
                if not isinstance(v, Literal):
                    names[v] = self.read(v, ends[0])
            return
        leaving = (*b.get("carry", ()), *b.get("ys", ()), *b.get("join", ()))
        for k, i in enumerate(leaving):
            given = [r[k] for r in a.returns] if call.kind == "cond" else [a.returns[-1][k]]
            scope: Names = {v: n for known in ends for v, n in known.items()}
            written = self.assignment.values[ops[i].results[-1]]
            self.row(ops[i].primitive, operator_name(ops[i]), given, (written,), scope, depth)
            names[written] = scope[written]
