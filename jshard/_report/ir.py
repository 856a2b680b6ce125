"""`plan.ir()`: one line an operator, as MindSpore's IR shows strategies; `local=True` as one device sees it.

In the local form a collective is a line of its own, and gives the tensor a new name: `%add.6.1` is `%add.6`
after it. A block that is cut further without communication is a `slice`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jshard._plan.rows import CollectiveRow, OperatorRow, TensorRow
from jshard._report.order import events
from jshard._report.summary import OWN
from jshard._report.units import count


if TYPE_CHECKING:
    from jshard._plan.plan import Plan


SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c", "bool": "bool"}


def ir(plan: Plan, local: bool = False) -> str:
    """The plan as text, one line for each operator.

    With `local`, shapes are those of one device and the inserted collectives have lines of their own.
    """
    lines = [f"# {plan.name} on {plan.mesh}, level {plan.level}" + (", one device's blocks" if local else "")]
    for r in plan.inputs:
        shape = r.layout.local_shape(r.shape, plan.mesh) if local else r.shape
        lines.append(f"%{r.path} : {typed(r.dtype, shape)} {r.layout}" + ("  # pinned" if r.pinned else ""))
    lines += _local(plan) if local else _global(plan)
    if not local:
        lines += (f"return {r.path} : {typed(r.dtype, r.shape)} {r.layout}" for r in plan.outputs)
    return "\n".join(lines)


def _global(plan: Plan) -> Iterator[str]:
    for r in events(plan, boundaries=True):
        if isinstance(r, OperatorRow):
            yield _line(r, r.reads, r.shapes, r.result_shapes)


def _local(plan: Plan) -> Iterator[str]:
    """Lines of one device: every value has a name for each block shape in which it exists."""
    mesh = plan.mesh
    names: dict[tuple[str, tuple[int, ...]], str] = {}
    types = {r.path: r.dtype for r in plan.inputs}
    for r in (*plan.operators, *plan.boundaries):
        types.update(zip(r.reads + r.writes, r.operand_dtypes + r.result_dtypes, strict=True))
    latest: dict[str, tuple[str, tuple[int, ...]]] = {}
    number: dict[str, int] = {}

    def have(tensor: str, shape: tuple[int, ...], name: str) -> None:
        names[tensor, shape] = name
        latest[tensor] = name, shape

    def new(tensor: str) -> str:
        number[tensor] = number.get(tensor, 0) + 1
        return f"{tensor}.{number[tensor]}"

    def moved(c: CollectiveRow) -> str:
        if c.own:
            times = f" x{count(c.count)}" if c.count != 1 else ""
            return f"  # {c.kind}[{'*'.join(c.axes)}] of {c.local}{times}, {OWN}, in {c.operator}"
        before, after = (_shape(s) for s in (c.local.split(" -> ") * 2)[:2])
        source, name = names.get((c.tensor, before), c.tensor), new(c.tensor)
        have(c.tensor, after, name)
        times = f" x{count(c.count)}" if c.count != 1 else ""
        dtype = types.get(c.tensor, "")
        return (
            f"  %{name} = {c.kind}[{'*'.join(c.axes)}](%{source}){times}"
            f" : {typed(dtype, before)} -> {typed(dtype, after)}  # for {c.operator}"
        )

    def read(tensor: str, shape: tuple[int, ...]) -> Iterator[str]:
        """The slice that makes a block of this shape, where no collective did."""
        if tensor in latest and (tensor, shape) not in names:
            source, old = latest[tensor]
            dtype, name = types.get(tensor, ""), new(tensor)
            have(tensor, shape, name)
            yield f"  %{name} = slice(%{source}) : {typed(dtype, old)} -> {typed(dtype, shape)}"

    for r in plan.inputs:
        have(r.path, r.layout.local_shape(r.shape, mesh), r.path)
    for r in events(plan, boundaries=True):
        if isinstance(r, CollectiveRow):
            yield moved(r)
            continue
        ins = [lay.local_shape(s, mesh) for s, lay in zip(r.shapes, r.operands, strict=True)]
        outs = [lay.local_shape(s, mesh) for s, lay in zip(r.result_shapes, r.results, strict=True)]
        for tensor, shape in zip(r.reads, ins, strict=True):
            yield from read(tensor, shape)
        yield _line(r, [names.get((t, s), t) for t, s in zip(r.reads, ins, strict=True)], ins, outs)
        for tensor, shape in zip(r.writes, outs, strict=True):
            have(tensor, shape, tensor)
    yield from (_returned(out, plan) for out in plan.outputs)


def _returned(r: TensorRow, plan: Plan) -> str:
    return f"return {r.path} : {typed(r.dtype, r.layout.local_shape(r.shape, plan.mesh))} {r.layout}"


def _line(r: OperatorRow, reads: Sequence[str], ins: Sequence, outs: Sequence) -> str:
    operands = ", ".join(f"%{n}" if n else "const" for n in reads)
    results = ", ".join(f"%{n}" for n in r.writes) or f"%{r.name}"
    where = " ".join(p for p in (r.module, short(r.source)) if p)
    times = f" x{count(r.repeat)}" if r.repeat != 1 else ""
    given = ", ".join(map(typed, r.operand_dtypes, ins))
    made = ", ".join(map(typed, r.result_dtypes, outs))
    text = f"{results} = {r.primitive}({operands}){times} {{in_strategy: {strategy(r.strategy)}}} : ({given}) -> "
    text += made if len(outs) == 1 else f"({made})"
    return text + (f"  # {where}" if where else "") + (f"  # {r.note}" if r.note else "")


def strategy(cuts: Sequence[Sequence[int]]) -> str:
    """Pieces per dimension of each operand, `((2, 1), (1, 4))`, as MindSpore writes it."""
    each = ("(" + ", ".join(map(str, s)) + ("," if len(s) == 1 else "") + ")" for s in cuts)
    return "(" + ", ".join(each) + ("," if len(cuts) == 1 else "") + ")"


def short(source: str) -> str:
    """File and line without folders, column and function.

    >>> short("/home/me/net.py:12:4 (Net.__call__)"), short("")
    ('net.py:12', '')
    """
    place = source.split(" ")[0].rsplit("/", 1)[-1].split(":")
    return ":".join(place[:2])


def typed(dtype: str, shape: Sequence[int]) -> str:
    """Type and shape in short.

    >>> typed("float32", (8, 10)), typed("bool", ()), typed("key<fry>", (2,))
    ('f32[8,10]', 'bool[]', 'key<fry>[2]')
    """
    stem = dtype.rstrip("0123456789")
    short = SHORT[stem] + dtype[len(stem) :] if stem in SHORT else dtype
    return f"{short}[{','.join(map(str, shape))}]"


def _shape(text: str) -> tuple[int, ...]:
    return () if text == "scalar" else tuple(map(int, text.split("x")))
