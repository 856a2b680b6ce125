"""Which emitted collective is which planned one: by number first, then by kind and bytes.

What carries the number of a prediction, or of several, is compared with those as a group. A collective that compilers
rewrote is read as what it amounts to, unless the plan asked for just what is written: an all-reduce whose result is
then sliced may be a reduce-scatter, or both as planned. What is in a loop whose turns only one side knows is compared
turn by turn.

>>> from jshard._verify.emitted import Emitted
>>> plan = [Predicted("all_reduce", ("x",), 64, "test", count=1, id=0, turn=True)]
>>> rows, extra = matched(plan, [Emitted("all_reduce", 64, 4, "", count=3, op_name="while/body/jshard.0/psum")])
>>> rows[0].bytes, rows[0].predicted[0].count, extra
((192, 192), 3, [])
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jshard._verify.emitted import KINDS, Emitted


TOLERANCE = 0.02  # of the bytes of a kind: the issue's own definition of agreement
NEGLIGIBLE = 0.005  # of the program's bytes: less cannot spoil the verdict on a kind (the scalar of a loss)


@dataclasses.dataclass(frozen=True)
class Predicted:
    """One collective of a plan: `bytes` received per device and execution, `count` executions.

    `id` is the number in its `jshard.<id>` scope; by default its place in the list given to `compare`. `turn`: it is
    in a loop whose turns nobody knows, and `count` is that of one turn. `dtype` is the tensor's, where it is known.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    operator: str = ""
    count: float = 1
    id: int | None = None
    in_open_loop: bool = False
    dtype: str = ""

    @property
    def total(self) -> float:
        """Bytes of all executions."""
        return self.bytes * self.count

    def __str__(self) -> str:
        times = f" x {self.count:g}" if self.count != 1 else ""
        times += " a turn" if self.in_open_loop else ""
        return f"{self.kind} over {'*'.join(self.axes)} of {self.operator or '?'}{times}: {self.total:,.0f} B"


@dataclasses.dataclass(frozen=True)
class MatchedRow:
    """Predicted collectives and the emitted ones with their numbers; several when they were combined."""

    predicted: tuple[Predicted, ...]
    emitted: tuple[Emitted, ...]

    @property
    def bytes(self) -> tuple[float, float]:
        """Predicted and emitted bytes per device."""
        return sum(p.total for p in self.predicted), sum(e.requested_total for e in self.emitted)

    @property
    def agrees(self) -> bool:
        """Whether the bytes agree within the tolerance."""
        return bytes_agree(*self.bytes)


def match_collectives(
    plan: Sequence[Predicted], emitted: Sequence[Emitted]
) -> tuple[list[MatchedRow], list[Emitted]]:
    """Rows of predictions with what was emitted for them, and what was emitted for none."""
    by_id: dict[int | None, list[Predicted]] = {}
    for p in plan:
        by_id.setdefault(p.id, []).append(p)
    tagged, untagged = [], []
    for e in emitted:
        asked = [p for i in e.tags for p in by_id.get(i, ())]
        if asked:
            tagged.append(_as_requested(e, asked))
        elif (
            e.requested_total
        ):  # what nobody asked for (edges of the compiler's padding) belongs to no row: the notes count it
            untagged.append(e)
    rows, extra = _match_by_bytes(_rows_by_number(plan, tagged), untagged)
    return [_with_equal_trips(r) for r in rows], extra


def _as_requested(e: Emitted, asked: Sequence[Predicted]) -> Emitted:
    """A collective in the kind and type that the plan asked for, where the compiler chose another that amounts to it."""
    if e.written_kind and {p.kind for p in asked} == {e.written_kind}:
        e = e.as_written()
    # TPUs multiply float32 in bfloat16, and send only that of what nothing else reads.
    narrow = e.shape.startswith(("bf16", "f16")) and {p.dtype for p in asked} == {"float32"}
    return (
        dataclasses.replace(e, requested_dtype="f32", requested_bytes=2 * e.bytes)
        if narrow and e.requested_bytes is None
        else e
    )


def _with_equal_trips(row: MatchedRow) -> MatchedRow:
    """The row with as many turns on both sides, where only one side knows how many a loop makes."""
    planned, made = {p.in_open_loop for p in row.predicted}, {e.in_open_loop for e in row.emitted}
    if len(planned) != 1 or len(made) != 1 or planned == made:
        return row
    few, many = (row.predicted, row.emitted) if planned == {True} else (row.emitted, row.predicted)
    turns = {m.count / f.count for f in few for m in many}
    if len(turns) != 1 or min(turns) < 1 or min(turns) % 1:
        return row
    k = int(min(turns))
    more = tuple(dataclasses.replace(f, count=f.count * k, in_open_loop=False) for f in few)
    return MatchedRow(more, row.emitted) if planned == {True} else MatchedRow(row.predicted, more)  # type: ignore[arg-type]


def bytes_agree(predicted: float, emitted: float, slack: float = 0.0) -> bool:
    return abs(predicted - emitted) <= max(TOLERANCE * max(predicted, emitted), slack)


def _rows_by_number(plan: Sequence[Predicted], tagged: Sequence[Emitted]) -> list[MatchedRow]:
    """One row per group of predictions that share an emitted collective, in the plan's order."""
    by_id: dict[int | None, list[Predicted]] = {}
    for p in plan:
        by_id.setdefault(p.id, []).append(p)
    home = {i: i for i in by_id}

    def find(i: int | None) -> int | None:
        while home[i] != i:
            i = home[i]
        return i

    for e in tagged:
        ids = [i for i in e.tags if i in by_id]
        for i in ids[1:]:
            home[find(i)] = find(ids[0])
    groups: dict[int | None, tuple[list[Predicted], list[Emitted]]] = {}
    for i, ps in by_id.items():
        groups.setdefault(find(i), ([], []))[0].extend(ps)
    for e in tagged:
        groups[find(next(i for i in e.tags if i in by_id))][1].append(e)
    return [MatchedRow(tuple(ps), tuple(es)) for ps, es in groups.values()]


def _match_by_bytes(
    rows: list[MatchedRow], untagged: Sequence[Emitted]
) -> tuple[list[MatchedRow], list[Emitted]]:
    """Give collectives without a number to predictions of their kind that have none, or too little.

    First one to one by equal bytes; then, kind by kind, all that is left together when their sums agree: a
    compiler that combines keeps the bytes. What still does not fit is extra.
    """
    rows, left = list(rows), []
    for e in untagged:
        fits = [
            (k, way)
            for way in ([e, e.as_written()] if e.written_kind else [e])
            for k, r in enumerate(rows)
            if not r.emitted
            and r.predicted[0].kind == way.kind
            and abs(r.bytes[0] - way.requested_total) <= 1e-6 * max(way.requested_total, 1)
        ]
        if fits:
            k, way = fits[0]
            rows[k] = dataclasses.replace(rows[k], emitted=(way,))
        else:
            left.append(e)
    extra: list[Emitted] = []
    for kind in KINDS:
        spare = [e for e in left if e.kind == kind]
        short = [
            r
            for r in rows
            if {p.kind for p in r.predicted} == {kind} and not r.agrees and r.bytes[1] < r.bytes[0]
        ]
        lack = sum(r.bytes[0] - r.bytes[1] for r in short)
        if spare and short and bytes_agree(lack, sum(e.meant for e in spare)):
            joint = MatchedRow(
                tuple(p for r in short for p in r.predicted), (*(e for r in short for e in r.emitted), *spare)
            )
            at = rows.index(short[0])
            rows = [joint if k == at else r for k, r in enumerate(rows) if k == at or r not in short]
        else:
            extra += spare
    return rows, extra
