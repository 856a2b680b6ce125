"""Two plans of one function compared: layouts, strategies, collectives and costs that differ."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from jshard._core.text_width import clip, text_width, wrapped
from jshard._plan.rows import OperatorRow, TensorRow
from jshard._report.format_units import format_bytes, format_count, format_seconds
from jshard._report.grouping import common_pattern, fold_paths
from jshard._report.ir import format_strategy
from jshard._report.totals import traffic


if TYPE_CHECKING:
    from jshard._plan.record import PlanRecord

Record = TypeVar("Record", bound="PlanRecord", covariant=True)


MAX_LINES = 20  # of one list


@dataclasses.dataclass(frozen=True)
class Figure:
    """One number of two plans; `unit` is "s" or "B"."""

    name: str
    before: float
    after: float
    unit: str

    def __str__(self) -> str:
        show = format_bytes if self.unit == "B" else format_seconds
        change = self.after - self.before
        if nearly_equal(self.before, self.after):
            return f"{self.name}: {show(self.before)}, the same"
        more = f"{'+' if change > 0 else '-'}{show(abs(change))}"
        relative = f", {relative_change(self.before, self.after)}" if self.before else ""
        return f"{self.name}: {show(self.before)} -> {show(self.after)} ({more}{relative})"


def nearly_equal(a: float, b: float) -> bool:
    """Whether two sums of the same numbers differ by rounding at most."""
    return math.isclose(a, b, rel_tol=1e-9)


def relative_change(before: float, after: float) -> str:
    """How a number changed, in percent or as a multiple.

    >>> relative_change(2.0, 2.1), relative_change(2.0, 2.0), relative_change(2.0, 37.0)
    ('+5%', '', '18.5x')
    """
    if nearly_equal(before, after) or not before:
        return ""
    ratio = after / before
    return f"{ratio:.3g}x" if ratio >= 10 else f"{100 * (ratio - 1):+.3g}%"


@dataclasses.dataclass(frozen=True)
class Difference:
    """How a second plan differs from a first; false if it does not."""

    name: str
    headings: tuple[str, ...]
    tensors: tuple[tuple[TensorRow, TensorRow], ...]
    operators: tuple[tuple[OperatorRow, OperatorRow], ...]
    traffic: tuple[tuple[str, float, float, float, float], ...]  # kind over axes; count and bytes of both
    figures: tuple[Figure, ...]

    def __bool__(self) -> bool:
        changed = any(not nearly_equal(f.before, f.after) for f in self.figures)
        return changed or bool(self.headings or self.tensors or self.operators or self.traffic)

    def __str__(self) -> str:
        if not self:
            return wrapped([f"the two plans of {self.name} are the same"])
        lines = [f"two plans of {self.name}", *(f"  {h}" for h in self.headings)]
        lines += (f"  {f}" for f in self.figures)
        lines += _bulleted("collectives", [_traffic_line(*t) for t in self.traffic])
        keys = [(a.path, (a.shape, a.dtype, a.layout, b.layout, a.pinned, b.pinned)) for a, b in self.tensors]
        lines += _bulleted(
            "layouts", [_tensor_line(p, *self.tensors[n[0]], len(n)) for p, n in fold_paths(keys)]
        )
        lines += _bulleted("strategies", _operator_lines(self.operators))
        return "\n".join(clip(line, text_width()) for line in lines)


class WhatIf(NamedTuple, Generic[Record]):
    """A plan with other pins, and how it differs from the plan that was asked; prints the difference."""

    plan: Record
    difference: Difference

    def __str__(self) -> str:
        return str(self.difference)


def compare_plans(a: PlanRecord, b: PlanRecord) -> Difference:
    """How plan `b` differs from plan `a`; tensors and operators are matched by name."""
    headings = [
        f"{title}: {x} -> {y}"
        for title, x, y in (
            ("function", a.name, b.name), ("mesh", a.mesh, b.mesh), ("level", a.level, b.level),
            ("chip", a.chip, b.chip), ("search", a.search, b.search),
            ("program", a.fingerprint, b.fingerprint), ("budget", a.memory_budget, b.memory_budget),
        )
        if x != y
    ]  # fmt: skip
    theirs = {(k, r.path): r for k, rows in enumerate((b.inputs, b.outputs)) for r in rows}
    tensors = []
    for k, rows in enumerate((a.inputs, a.outputs)):
        for r in rows:
            other = theirs.get((k, r.path))
            if other is not None and (r.layout, r.pinned, r.shape) != (
                other.layout,
                other.pinned,
                other.shape,
            ):
                tensors.append((r, other))
    named = {r.name: r for r in b.operators}
    operators = [
        (r, o) for r in a.operators if (o := named.get(r.name)) is not None
        and (r.strategy, r.operands, r.results) != (o.strategy, o.operands, o.results)
    ]  # fmt: skip
    mine, other = ({(t.kind, t.axes): t for t in traffic(p)} for p in (a, b))
    moved = []
    for key in sorted(mine.keys() | other.keys()):
        x, y = mine.get(key), other.get(key)
        row = (x.count if x else 0.0, y.count if y else 0.0, x.bytes if x else 0.0, y.bytes if y else 0.0)
        if row[0] != row[1] or row[2] != row[3]:
            moved.append((f"{key[0]} over {key[1]}", *row))
    figures = (
        Figure("cost", a.cost.objective, b.cost.objective, a.cost.unit),
        Figure("step", a.step_seconds, b.step_seconds, "s"),
        Figure("communication", a.cost.communication, b.cost.communication, "s"),
        Figure("redundant compute", a.cost.redundant, b.cost.redundant, "s"),
        Figure("peak memory", a.cost.peak_bytes, b.cost.peak_bytes, "B"),
    )
    return Difference(a.name, tuple(headings), tuple(tensors), tuple(operators), tuple(moved), figures)


def regression_text(a: PlanRecord, b: PlanRecord) -> str:
    """In a few words, what plan `b` spends more on than `a`, and at which operator the most."""
    names = {"communication": "comm.", "redundant compute": "redundant", "peak memory": "peak"}
    said = []
    for f in compare_plans(a, b).figures:
        if f.name in names and f.after > f.before and not nearly_equal(f.before, f.after):
            said.append(
                f"{names[f.name]} +{(format_bytes if f.unit == 'B' else format_seconds)(f.after - f.before)}"
            )
    mine, other = (_by_operator(p) for p in (a, b))
    more = {k: v - mine.get(k, 0.0) for k, v in other.items() if v > mine.get(k, 0.0)}
    if more:
        (kind, axes, operator), extra = max(more.items(), key=lambda item: item[1])
        said.insert(0, f"{kind}[{axes}] +{format_bytes(extra)} at {operator}")
    return ", ".join(said)


def _by_operator(p: PlanRecord) -> dict[tuple[str, str, str], float]:
    out: dict[tuple[str, str, str], float] = {}
    for c in p.collectives:
        key = c.kind, "*".join(c.axes), c.operator
        out[key] = out.get(key, 0.0) + c.total
    return out


def _traffic_line(name: str, n: float, m: float, before: float, after: float) -> str:
    return f"{name}: {format_count(n)} -> {format_count(m)} times, {before:,.0f} -> {after:,.0f} B"


def _tensor_line(path: str, a: TensorRow, b: TensorRow, times: int) -> str:
    many = f" x{times}" if times > 1 else ""
    before, after = (f"{t.layout} pinned" if t.pinned else str(t.layout) for t in (a, b))
    return f"{path}{many}: {before} -> {after}"


def _operator_lines(pairs: tuple[tuple[OperatorRow, OperatorRow], ...]) -> list[str]:
    by: dict[tuple, list[OperatorRow]] = {}
    for a, b in pairs:
        by.setdefault((a.primitive, a.source, a.strategy, b.strategy, a.results, b.results), []).append(a)
    lines = []
    for (primitive, _, before, after, results, new_results), same in by.items():
        name = same[0].name if len(same) == 1 else f"{primitive} x{len(same)}"
        where = common_pattern([r.module for r in same])
        cut = f"{format_strategy(before)} -> {format_strategy(after)}"
        if before == after:
            cut = f"{' '.join(map(str, results))} -> {' '.join(map(str, new_results))}"
        lines.append(f"{name} {where}".rstrip() + f": {cut}")
    return lines


def _bulleted(title: str, lines: list[str]) -> list[str]:
    if not lines:
        return []
    more = [f"    ... and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []
    return [f"  {title}", *(f"    {line}" for line in lines[:MAX_LINES]), *more]
