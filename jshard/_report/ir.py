"""`plan.ir()`: one line an operator with its strategy, in the style of MindSpore's IR; `local=True`: one device's program.

In the local form, which follows the schedule, every step of a reshard is a line of its own and gives the tensor a new
name: `%add.6.1` is `%add.6` after it. Cutting a block further without communication is a `slice`. The bodies of loops
and branches are in braces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jshard._core.errors import ShardError
from jshard._core.messages import short_source
from jshard._plan.rows import CollectiveRow, LocalRow, OperatorRow
from jshard._report.format_units import format_count, format_tuple
from jshard._report.timeline import events
from jshard._report.totals import USER_OWN


if TYPE_CHECKING:
    from jshard._plan.record import PlanRecord


DTYPE_PREFIXES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c", "bool": "bool"}


def ir_listing(plan: PlanRecord, local: bool = False) -> str:
    """The plan as text, one line for each operator.

    With `local`, shapes are those of one device, every step of a reshard has a line of its own, and so have the ends of
    the bodies of loops and branches.
    """
    lines = [f"# {plan.name} on {plan.mesh}, level {plan.level}" + (", one device's blocks" if local else "")]
    for r in plan.inputs:
        shape = r.layout.local_shape(r.shape, plan.mesh) if local else r.shape
        lines.append(
            f"%{r.path} : {format_type(r.dtype, shape)} {r.layout}" + ("  # pinned" if r.pinned else "")
        )
    lines += _local(plan) if local else _global(plan)
    if not local:
        lines += (f"return {r.path} : {format_type(r.dtype, r.shape)} {r.layout}" for r in plan.outputs)
    return "\n".join(lines)


def _global(plan: PlanRecord) -> Iterator[str]:
    for r in events(plan, boundaries=True):
        if isinstance(r, OperatorRow):
            yield _line(r, r.reads, r.shapes, r.result_shapes)


def _local(plan: PlanRecord) -> Iterator[str]:
    """The lines of one device's program."""
    if not plan.local:
        raise ShardError(
            "this plan says nothing of one device",
            where="Plan.ir(local=True)",
            fix="plan the function with this version of jshard: jshard.shard(fn, ...).plan(*args)",
        )
    rows = {r.name: r for r in (*plan.operators, *plan.boundaries)}
    own: dict[str, list[CollectiveRow]] = {}
    for c in plan.collectives:
        if c.own:
            own.setdefault(c.operator, []).append(c)
    for r in plan.local:
        indent = "  " * r.depth
        if r.kind == "operator" or r.operator in rows and rows[r.operator].primitive == r.kind:
            yield indent + _local_operator(rows[r.operator], r)
            if r.kind == "operator":
                yield from (f"{indent}  {_user_own(c)}" for c in own.get(r.operator, ()))
        elif r.kind == "return":
            for out, value, shape in zip(plan.outputs, r.reads, r.shapes, strict=True):
                yield f"return {out.path} = {_value(value)} : {format_type(out.dtype, shape)} {out.layout}"
        elif r.kind in ("begin", "end", "branch on"):
            yield indent + _body_frame(r)
        elif r.reads:
            yield f"{indent}  {_reshard_step(r)}"
        else:
            yield f"{indent}  # {r.kind}[{'*'.join(r.axes)}] of {r.operator}'s own"


def _user_own(c: CollectiveRow) -> str:
    """A collective in the user's own `shard_map`."""
    times = f" x{format_count(c.count)}" if c.count != 1 else ""
    return f"# {c.kind}[{'*'.join(c.axes)}] of {c.local}{times}, {USER_OWN}, in {c.operator}"


def _local_operator(row: OperatorRow, r: LocalRow) -> str:
    """An operator, or one side of a loop's boundary, with the strategies of the operands in this line."""
    first = 0 if r.kind == "operator" or r.reads[:1] == row.reads[:1] else len(row.reads) - len(r.reads)
    strategies = row.strategy if r.kind == "operator" else row.strategy[max(0, first) :][: len(r.reads)]
    shown = dataclasses.replace(
        row, writes=r.writes, strategy=strategies, operand_dtypes=r.dtypes, result_dtypes=r.result_dtypes, repeat=r.count
    )  # fmt: skip
    return _line(shown, r.reads, r.shapes, r.result_shapes)


def _reshard_step(r: LocalRow) -> str:
    """One step of a reshard."""
    axes = f"[{'*'.join(r.axes)}]" if r.id >= 0 else ""
    times = f" x{format_count(r.count)}" if r.count != 1 else ""
    reader = f"  # for {r.operator}" if r.operator else ""
    return (
        f"%{r.writes[0]} = {r.kind}{axes}(%{r.reads[0]}){times} : "
        f"{format_type(r.dtypes[0], r.shapes[0])} -> {format_type(r.result_dtypes[0], r.result_shapes[0])}{reader}"
    )


def _body_frame(r: LocalRow) -> str:
    """The begin or end of a body, or the value that selects a branch."""
    values = ", ".join(
        f"{_value(v)} : {format_type(d, s)}" for v, d, s in zip(r.reads, r.dtypes, r.shapes, strict=True)
    )
    if r.kind == "begin":
        times = " of unknown trip count" if r.turn else f" x{format_count(r.count)}" if r.count != 1 else ""
        return f"{r.operator}{times} {{"
    return f"branch on {values}" if r.kind == "branch on" else f"}} gives {values}".rstrip()


def _value(name: str) -> str:
    return f"%{name}" if name else "const"


def _line(r: OperatorRow, reads: Sequence[str], ins: Sequence, outs: Sequence) -> str:
    operands = ", ".join(f"%{n}" if n else "const" for n in reads)
    results = ", ".join(f"%{n}" for n in r.writes) or f"%{r.name}"
    where = " ".join(p for p in (r.module, short_source(r.source)) if p)
    times = f" x{format_count(r.repeat)}" if r.repeat != 1 else ""
    ins_text = ", ".join(map(format_type, r.operand_dtypes, ins))
    outs_text = ", ".join(map(format_type, r.result_dtypes, outs))
    text = f"{results} = {r.primitive}({operands}){times} {{in_strategy: {format_strategy(r.strategy)}}} : ({ins_text}) -> "
    text += outs_text if len(outs) == 1 else f"({outs_text})"
    return text + (f"  # {where}" if where else "") + (f"  # {r.note}" if r.note else "")


def format_strategy(cuts: Sequence[Sequence[int]]) -> str:
    """Pieces per dimension of each operand, `((2, 1), (1, 4))`, as MindSpore writes it."""
    return "(" + ", ".join(map(format_tuple, cuts)) + ("," if len(cuts) == 1 else "") + ")"


def format_type(dtype: str, shape: Sequence[int]) -> str:
    """Type and shape in short.

    >>> format_type("float32", (8, 10)), format_type("bool", ()), format_type("key<fry>", (2,))
    ('f32[8,10]', 'bool[]', 'key<fry>[2]')
    """
    stem = dtype.rstrip("0123456789")
    short = DTYPE_PREFIXES[stem] + dtype[len(stem) :] if stem in DTYPE_PREFIXES else dtype
    return f"{short}[{','.join(map(str, shape))}]"
