"""Matching emitted collectives to predicted ones: by number first, then by kind and bytes.

An emitted collective with the numbers of several predictions is compared with all of them as a group. A collective that
compilers rewrote counts as what it amounts to, unless the plan has the kind that is written: an all-reduce whose result
is then sliced may be a reduce-scatter, or both as planned. Collectives in a loop whose trip count is known on one side
only are compared trip by trip.

>>> from jshard._verify.emitted import Emitted
>>> plan = [Predicted("all_reduce", ("x",), 64, "test", count=1, id=0, in_open_loop=True)]
>>> rows, extra = match_collectives(plan, [Emitted("all_reduce", 64, 4, "", count=3, op_name="while/body/jshard.0/psum")])
>>> rows[0].bytes, rows[0].predicted[0].count, extra
((192, 192), 3, [])
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jshard._core.union_find import UnionFind
from jshard._verify.emitted import KINDS, Emitted


TOLERANCE = 0.02  # of the bytes of a kind
NEGLIGIBLE = 0.005  # of the program's bytes: less cannot spoil the verdict on a kind (the scalar of a loss)


@dataclasses.dataclass(frozen=True)
class Predicted:
    """One collective of a plan: bytes received per device and execution, and the number of executions.

    `id` is the number in its `jshard.<id>` scope; by default its index in the list given to `compare`. `in_open_loop`: it
    is in a loop of unknown trip count, and `count` is for one trip. `dtype` is that of the tensor, if known. `moved`: the
    tensor and how its block changes, if known: two collectives of a kind that move the same may be one to a compiler.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    operator: str = ""
    count: float = 1
    id: int | None = None
    in_open_loop: bool = False
    dtype: str = ""
    moved: str = ""

    @property
    def total(self) -> float:
        """Bytes of all executions."""
        return self.bytes * self.count

    def moves_the_same(self, other: Predicted) -> bool:
        """Whether another collective moves the same value in the same way."""
        own, others = ((p.kind, p.axes, p.bytes, p.moved) for p in (self, other))
        return own == others and self.moved != ""

    def __str__(self) -> str:
        times = f" x {self.count:g}" if self.count != 1 else ""
        times += " a turn" if self.in_open_loop else ""
        return f"{self.kind} over {'*'.join(self.axes)} of {self.operator or '?'}{times}: {self.total:,.0f} B"


@dataclasses.dataclass(frozen=True)
class MatchedRow:
    """Predicted collectives and the emitted ones matched to them; several if they were combined."""

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
    """Predicted collectives with those emitted for them, and the emitted ones without a prediction."""
    by_id: dict[int | None, list[Predicted]] = {}
    for p in plan:
        by_id.setdefault(p.id, []).append(p)
    tagged, untagged = [], []
    for e in emitted:
        predictions = [p for i in e.tags for p in by_id.get(i, ())]
        if predictions:
            tagged.append(_as_requested(e, predictions))
        # Collectives of the compiler's own padding belong to no row: the notes count them.
        elif e.requested_total:
            untagged.append(e)
    rows, extra = _match_by_bytes(_rows_by_number(plan, tagged), untagged)
    return [_with_equal_trips(r) for r in rows], extra


def _as_requested(e: Emitted, predictions: Sequence[Predicted]) -> Emitted:
    """A collective in the kind and type of its predictions, if the compiler chose another that amounts to the same."""
    if e.written_kind and {p.kind for p in predictions} == {e.written_kind}:
        e = e.as_written()
    # TPUs multiply float32 in bfloat16, and send only the bfloat16 of values that nothing else reads.
    narrow = e.shape.startswith(("bf16", "f16")) and {p.dtype for p in predictions} == {"float32"}
    return (
        dataclasses.replace(e, requested_dtype="f32", requested_bytes=2 * e.bytes)
        if narrow and e.requested_bytes is None
        else e
    )


def _with_equal_trips(row: MatchedRow) -> MatchedRow:
    """The row with the same trip count on both sides, if it is known on one side only."""
    predicted_open = {p.in_open_loop for p in row.predicted}
    emitted_open = {e.in_open_loop for e in row.emitted}
    if len(predicted_open) != 1 or len(emitted_open) != 1 or predicted_open == emitted_open:
        return row
    counts = {p.count for p in row.predicted}, {e.count for e in row.emitted}
    one_trip, all_trips = counts if predicted_open == {True} else counts[::-1]
    trips = {all_ / one for one in one_trip for all_ in all_trips}
    if len(trips) != 1 or min(trips) < 1 or min(trips) % 1:
        return row
    k = int(min(trips))
    if predicted_open == {True}:
        predicted = [dataclasses.replace(p, count=p.count * k, in_open_loop=False) for p in row.predicted]
        return MatchedRow(tuple(predicted), row.emitted)
    emitted = [dataclasses.replace(e, count=e.count * k, in_open_loop=False) for e in row.emitted]
    return MatchedRow(row.predicted, tuple(emitted))


def bytes_agree(predicted: float, emitted: float, slack: float = 0.0) -> bool:
    """Whether two numbers of bytes differ by at most the tolerance, or by `slack` bytes."""
    return abs(predicted - emitted) <= max(TOLERANCE * max(predicted, emitted), slack)


def _rows_by_number(plan: Sequence[Predicted], tagged: Sequence[Emitted]) -> list[MatchedRow]:
    """One row for each group of predictions that share an emitted collective, in the plan's order."""
    by_id: dict[int | None, list[Predicted]] = {}
    for p in plan:
        by_id.setdefault(p.id, []).append(p)
    shared = UnionFind[int | None]()
    for e in tagged:
        ids = [i for i in e.tags if i in by_id]
        for i in ids[1:]:
            shared.unite(ids[0], i)
    groups: dict[int | None, tuple[list[Predicted], list[Emitted]]] = {}
    for i, ps in by_id.items():
        groups.setdefault(shared.root(i), ([], []))[0].extend(ps)
    for e in tagged:
        groups[shared.root(next(i for i in e.tags if i in by_id))][1].append(e)
    return [MatchedRow(tuple(ps), tuple(es)) for ps, es in groups.values()]


def _match_by_bytes(
    rows: list[MatchedRow], untagged: Sequence[Emitted]
) -> tuple[list[MatchedRow], list[Emitted]]:
    """Match collectives without a number to predictions of their kind that have none, or too few bytes.

    First one to one by equal bytes; then, kind by kind, all that are left together if their sums agree: combining keeps
    the bytes. The others are extra.
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
        if spare and short and bytes_agree(lack, sum(e.requested_total for e in spare)):
            joint = MatchedRow(
                tuple(p for r in short for p in r.predicted), (*(e for r in short for e in r.emitted), *spare)
            )
            at = rows.index(short[0])
            rows = [joint if k == at else r for k, r in enumerate(rows) if k == at or r not in short]
        else:
            extra += spare
    return rows, extra
