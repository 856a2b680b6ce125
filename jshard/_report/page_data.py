"""What the scripts of the HTML page draw: operators, modules, collectives, the order of a step, memory, as short lists.

Alike operators are one node (`operator_groups`), split by pass and by where they are called from. Lists in place of
objects, and numbers in place of names, keep a network of 126 layers small; `page/*.js` say what stands where.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jshard._core.messages import short_source
from jshard._plan.rows import CollectiveRow, OperatorRow
from jshard._report.grouping import fold_tensors, operator_groups, strip_numbers
from jshard._report.operator_graph import linked
from jshard._report.page_modules import folded, page_modules, pass_of, path_of
from jshard._report.timeline import events, program_index


if TYPE_CHECKING:
    from jshard._plan.record import PlanRecord


MIN_SHARE = 0.005  # share of a step below which an operator without collectives may be hidden in the graph


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much a page may hold.

    `events` of the timeline, `points` of the memory curve, tensors in memory (`live`) and on devices (`tensors`), `numbers`
    of the operators of one node, and lines of detail about light operators.
    """

    events: int
    points: int
    live: int
    tensors: int
    numbers: int = 200
    details: int = 10


PAGE = Limits(events=20_000, points=4_000, live=8_000, tensors=400)
NOTEBOOK = Limits(events=400, points=200, live=120, tensors=40, numbers=3, details=1)
"""Less, so that a stored cell stays small."""


class Nodes:
    """The nodes of the page's graph and the number of each row's node, by ("operator", name) or ("input", path)."""

    def __init__(self, plan: PlanRecord):
        self.plan = plan
        self.groups: list[tuple[OperatorRow, ...]] = []
        self.member: dict[tuple[str, str], int] = {}
        self.inputs = fold_tensors(plan.inputs)
        self.outputs = fold_tensors(plan.outputs)
        for g in operator_groups(plan):
            parts: dict[object, list[OperatorRow]] = {}
            for r in g.rows:
                parts.setdefault((pass_of(r), folded(path_of(r, plan.name))), []).append(r)
            self.groups += [tuple(rows) for rows in parts.values()]
        loops: dict[object, list[OperatorRow]] = {}
        for r in plan.boundaries:
            key = (r.primitive, r.shapes, r.results, pass_of(r), folded(path_of(r, plan.name)))
            loops.setdefault(key, []).append(r)
        self.groups += [tuple(rows) for rows in loops.values()]
        self.groups.sort(key=lambda rows: program_index(rows[0]))
        self._number()

    def _number(self) -> None:
        for k, (_, rows) in enumerate(self.inputs):
            self.member.update((("input", r.path), k) for r in rows)
        first = len(self.inputs)
        for k, rows in enumerate(self.groups):
            self.member.update((("operator", r.name), first + k) for r in rows)
        first += len(self.groups)
        for k, (_, rows) in enumerate(self.outputs):
            self.member.update((("output", r.path), first + k) for r in rows)


def page_data(plan: PlanRecord, limits: Limits = PAGE) -> dict[str, object]:
    """Everything the scripts draw, and `behind`: which nodes stand behind each part of the static tree."""
    nodes = Nodes(plan)
    modules, module_of = page_modules(nodes.groups, plan.name)
    collectives, group_of = _collectives(plan, nodes)
    return {
        "name": plan.name, "chip": plan.chip, "level": plan.level,
        "axes": [list(plan.mesh.names), list(plan.mesh.sizes)],
        "step": plan.serial_seconds, "peak": plan.cost.peak_bytes, "budget": plan.memory_budget,
        "modules": [[m.name, m.parent, m.count] for m in modules],
        "nodes": _nodes(nodes, module_of, group_of, limits),
        "collectives": collectives,
        "edges": _edges(plan, nodes, group_of),
        "events": _events(plan, nodes, group_of, limits.events),
        **_memory(plan, nodes, limits),
        "tensors": _tensors(plan, nodes, limits.tensors),
    }  # fmt: skip


def _nodes(
    nodes: Nodes, module_of: list[int], group_of: dict[int, int], limits: Limits
) -> list[list[object]]:
    """Kind, label, module, times, seconds, redundant, layout, lines of detail, collectives, light, numbers of operators."""
    out: list[list[object]] = []
    for kind, folded_rows in (("input", nodes.inputs), ("output", nodes.outputs)):
        part: list[list[object]] = []
        for path, rows in folded_rows:
            r = rows[0]
            detail = [f"{r.dtype}[{','.join(map(str, r.shape))}]", "pinned" if r.pinned else ""]
            part.append([kind, path, -1, len(rows), 0, 0, str(r.layout), [d for d in detail if d], [], 0, ""])
        if kind == "input":
            out += part
            out += _operators(nodes, module_of, group_of, limits)
        else:
            out += part
    return out


def _operators(
    nodes: Nodes, module_of: list[int], group_of: dict[int, int], limits: Limits
) -> list[list[object]]:
    plan = nodes.plan
    moved = {c.tensor for c in plan.collectives}
    out: list[list[object]] = []
    for rows, module in zip(nodes.groups, module_of, strict=True):
        r = rows[0]
        seconds = sum(x.seconds for x in rows)
        shapes = ", ".join(
            f"{d}[{','.join(map(str, s))}]" for d, s in zip(r.operand_dtypes, r.shapes, strict=True)
        )
        made = ", ".join(
            f"{d}[{','.join(map(str, s))}]" for d, s in zip(r.result_dtypes, r.result_shapes, strict=True)
        )
        detail = [
            short_source(r.source), f"{shapes} -> {made}",
            f"in_strategy={r.strategy}" if r.strategy else "",
            "reads " + ", ".join(map(str, r.operands)) if r.operands else "",
            "makes " + ", ".join(map(str, r.results)) if r.results else "", r.note,
            f"runs {r.repeat:g} times a call" if r.repeat != 1 else "",
        ]  # fmt: skip
        own = sorted({group_of[i] for x in rows for i in x.collectives})
        light = (
            not own
            and seconds < MIN_SHARE * plan.serial_seconds
            and not any(moved & set(x.writes) for x in rows)
        )
        layout = str(r.results[0]) if r.results else ""
        kept_detail = [d for d in detail if d][: limits.details if light else None]
        out.append(
            ["operator", r.primitive, module, len(rows), _short(seconds), _short(sum(x.redundant for x in rows)), layout,
             kept_detail, own, int(light), _ranges([program_index(x) for x in rows], limits.numbers)]
        )  # fmt: skip
    return out


def _ranges(numbers: list[int], most: int = 200) -> str:
    """Numbers as text, runs with equal steps as `first-last/step`; the rest after `most` pieces is left out.

    >>> _ranges([3, 5, 7, 9, 20])
    '3-9/2 20'
    """
    pieces, i = [], 0
    while i < len(numbers) and len(pieces) < most:
        j = i + 1
        step = numbers[j] - numbers[i] if j < len(numbers) else 0
        while j + 1 < len(numbers) and numbers[j + 1] - numbers[j] == step:
            j += 1
        if j - i >= 2 and j < len(numbers):
            pieces.append(f"{numbers[i]}-{numbers[j]}/{step}")
            i = j + 1
        else:
            pieces.append(str(numbers[i]))
            i += 1
    return " ".join(pieces)


def _collectives(plan: PlanRecord, nodes: Nodes) -> tuple[list[list[object]], dict[int, int]]:
    """Kind, axes, block, executions, bytes, seconds, for whom, own; and the group of each collective by number."""
    owner = {i: nodes.member["operator", r.name] for r in plan.operators for i in r.collectives}
    by: dict[object, list[CollectiveRow]] = {}
    for c in plan.collectives:
        who = owner.get(c.id, strip_numbers(c.operator))
        by.setdefault((c.kind, c.axes, c.local, c.own, strip_numbers(c.tensor), who), []).append(c)
    out: list[list[object]] = []
    group_of: dict[int, int] = {}
    for rows in by.values():
        c = rows[0]
        group_of.update((r.id, len(out)) for r in rows)
        out.append(
            [c.kind, "*".join(c.axes), c.local, sum(r.count for r in rows), sum(r.total for r in rows),
             _short(sum(r.seconds * r.count for r in rows)), owner.get(c.id, -1), c.tensor, c.operator, int(c.own),
             len(rows)]
        )  # fmt: skip
    return out, group_of


def _edges(plan: PlanRecord, nodes: Nodes, group_of: dict[int, int]) -> list[list[object]]:
    """Source, target, and the collectives between them."""
    return [
        [a, b, sorted({group_of[i] for i in moved})] if moved else [a, b]
        for (a, b), moved in sorted(linked(plan, nodes.member).items(), key=lambda item: item[0])
    ]


def _events(plan: PlanRecord, nodes: Nodes, group_of: dict[int, int], most: int) -> list[list[object]]:
    """In the order of the program: seconds, then the node of an operator, or -1 - the group of a collective.

    Where there are too many, neighbours on one lane that are short are one event; a third entry counts them.
    """
    out: list[list[object]] = []
    every: list[tuple[float, int]] = []
    for e in events(plan):
        if isinstance(e, OperatorRow):
            if e.seconds:
                every.append((e.seconds, nodes.member["operator", e.name]))
        elif e.seconds:
            every.append((e.seconds * e.count, -1 - group_of[e.id]))
    shortest = 0.0
    while len(out := _merged(every, shortest)) > most and shortest < 0.02 * plan.serial_seconds:
        shortest = 2 * shortest or plan.serial_seconds / (8 * most)
    return out


def _merged(every: list[tuple[float, int]], shortest: float) -> list[list[object]]:
    out: list[list[object]] = []
    sums: list[tuple[float, int, int]] = []
    for seconds, who in every:
        short = seconds < shortest
        if short and sums and sums[-1][2] and (sums[-1][1] < 0) == (who < 0):
            before, same, n = sums[-1]
            sums[-1] = (before + seconds, same, n + 1)
        else:
            sums.append((seconds, who, 1 if short else 0))
    for seconds, who, n in sums:
        out.append([_short(seconds), who, n] if n > 1 else [_short(seconds), who])
    return out


def _memory(plan: PlanRecord, nodes: Nodes, limits: Limits) -> dict[str, object]:
    """`curve`: number of an operator, seconds at its start, bytes; `live`: node, class, bytes, first and last operator."""
    starts: dict[str, float] = {}
    at = 0.0
    for e in events(plan):
        if isinstance(e, OperatorRow):
            starts[e.name] = at
            at += e.seconds
        else:
            at += e.seconds * e.count
    points = [
        (k, starts.get(r.name, 0.0), b)
        for k, (r, b) in enumerate(zip(plan.operators, plan.memory.curve, strict=False))
    ]
    each = max(1, -(-len(points) // limits.points))
    highest = [max(points[i : i + each], key=lambda p: p[2]) for i in range(0, len(points), each)]
    made = {r.tensor: nodes.member["input", r.path] for r in plan.inputs}
    made.update((t, nodes.member["operator", r.name]) for r in plan.operators for t in r.writes)
    made.update((t, nodes.member["operator", r.name]) for r in plan.boundaries for t in r.writes)
    kinds = list(dict.fromkeys(r.kind for r in plan.live))
    folded_rows: dict[tuple[int, str, float, int, int], int] = {}
    for r in plan.live:
        key = (made.get(r.tensor, -1), r.kind, r.bytes, r.first, r.last)
        folded_rows[key] = folded_rows.get(key, 0) + 1
    most = sorted(folded_rows.items(), key=lambda item: -item[0][2] * item[1])[: limits.live]
    return {
        "curve": [[k, _short(t), b] for k, t, b in highest],
        "kinds": kinds,
        "live": [[node, kinds.index(kind), b, i, j, n] for (node, kind, b, i, j), n in most],
        "held": [[kind, b] for kind, b in plan.memory.held],
        "unlisted": max(0, len(folded_rows) - len(most)),
    }


def _tensors(plan: PlanRecord, nodes: Nodes, most: int) -> list[list[object]]:
    """Name, type, shape, axes by dimension, axes of a partial sum, node: what the picture of devices can show."""
    out: list[list[object]] = []
    for title, folded_rows in (("argument", nodes.inputs), ("result", nodes.outputs)):
        for path, rows in folded_rows:
            r = rows[0]
            out.append([f"{title} {path}", r.dtype, r.shape, r.layout.dims, r.layout.partial])
    for rows in nodes.groups[: max(0, most - len(out))]:
        r = rows[0]
        for k, lay in enumerate(r.results[: len(r.writes)]):
            out.append([r.writes[k], r.result_dtypes[k], r.result_shapes[k], lay.dims, lay.partial])
    return out


def _short(seconds: float) -> float:
    """Six digits, which no picture exceeds."""
    return float(f"{seconds:.6g}")
