"""The figures of the HTML page as SVG text: the operator graph, and memory over the program."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from jshard._report.format_units import format_bytes, format_seconds
from jshard._report.graph_layout import assign_columns, assign_rows
from jshard._report.operator_graph import OperatorGraph, edge_label, operator_graph


if TYPE_CHECKING:
    from jshard._plan.compiled_timeline import CompiledTimeline
    from jshard._plan.record import PlanRecord


NODE_WIDTH, NODE_HEIGHT, GAP_X, GAP_Y = 178, 40, 22, 46
MAX_POINTS = 400  # of the memory curve; more would not be seen
HUES = (210, 35, 130, 275, 0, 175, 55, 320, 95, 240)


def hue(number: int) -> int:
    """A colour for the n-th layout."""
    return HUES[number % len(HUES)] if number < len(HUES) else (number * 47) % 360


def graph_svg(plan: PlanRecord) -> tuple[str, list[str]]:
    """The folded operator graph, coloured by layout, and the layouts in the order of their colours."""
    g = operator_graph(plan)
    pairs = [(e.source, e.target) for e in g.edges]
    inputs = frozenset(i for i, n in enumerate(g.nodes) if n.kind == "input")
    row = assign_rows(len(g.nodes), pairs, inputs)
    x = assign_columns(row, pairs, NODE_WIDTH + GAP_X)
    at = [(round(x[i]) + 30, row[i] * (NODE_HEIGHT + GAP_Y) + 20) for i in range(len(g.nodes))]
    wide = max((p[0] for p in at), default=0) + NODE_WIDTH + 60
    high = max((p[1] for p in at), default=0) + NODE_HEIGHT + 30
    layouts: dict[str, int] = {}
    for n in g.nodes:
        layouts.setdefault(str(n.layout), len(layouts))
    parts = [
        f'<svg class="graph" viewBox="0 0 {wide} {high}" data-wide="{wide}" data-high="{high}" role="img" '
        f'aria-label="operator graph"><defs><marker id="jshard-arrow" viewBox="0 0 8 8" refX="7" refY="4" '
        'markerWidth="6" markerHeight="6" orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>'
    ]
    parts += _edges(g, at, row)
    for i, n in enumerate(g.nodes):
        times = f" x{n.count}" if n.count > 1 else ""
        spent = f"\n{format_seconds(n.seconds)} of compute" if n.seconds else ""
        title = escape(f"{n.label}{times}\n{n.detail}\n{n.layout}{spent}")
        name = n.label + times
        name = name if len(name) <= 25 else name[:23] + ".."
        shown = str(n.layout) if len(str(n.layout)) <= 27 else str(n.layout)[:25] + ".."
        parts.append(
            f'<g class="node {n.kind}" style="--h:{hue(layouts[str(n.layout)])}" data-n="{i}" '
            f'transform="translate({at[i][0]} {at[i][1]})"><title>{title}</title>'
            f'<rect width="{NODE_WIDTH}" height="{NODE_HEIGHT}" rx="{5 if n.kind == "operator" else NODE_HEIGHT // 2}"/>'
            f'<text x="{NODE_WIDTH // 2}" y="17">{escape(name)}</text>'
            f'<text class="layout" x="{NODE_WIDTH // 2}" y="32">{escape(shown)}</text></g>'
        )
    return "".join(parts) + "</svg>", list(layouts)


def _edges(g: OperatorGraph, at: list[tuple[int, int]], row: list[int]) -> list[str]:
    parts = []
    drawn: set[int] = set()
    for e in g.edges:
        (ax, ay), (bx, by) = at[e.source], at[e.target]
        if row[e.source] < row[e.target]:
            x1, y1, x2, y2 = ax + NODE_WIDTH // 2, ay + NODE_HEIGHT, bx + NODE_WIDTH // 2, by
            bend = min(60, (y2 - y1) // 2)
            path, middle = (
                f"M{x1} {y1}C{x1} {y1 + bend} {x2} {y2 - bend} {x2} {y2}",
                ((x1 + x2) // 2, (y1 + y2) // 2),
            )
            far = row[e.target] - row[e.source] > 4 or g.nodes[e.source].kind == "input"
            back = " far" if far and not e.collectives else ""
        else:  # to the next of the folded layers
            x1, y1, x2, y2 = ax + NODE_WIDTH, ay + NODE_HEIGHT // 2, bx + NODE_WIDTH, by + NODE_HEIGHT // 2
            out = max(x1, x2) + 26
            path, middle, back = f"M{x1} {y1}C{out} {y1} {out} {y2} {x2} {y2}", (out, (y1 + y2) // 2), " back"
        kinds = " ".join(dict.fromkeys(m.kind for m in e.collectives))
        title = "\n".join(map(edge_label, e.collectives)) or "stays where it is"
        names = f"{g.nodes[e.source].label} -> {g.nodes[e.target].label}"
        label = ""
        # A collective for several readers is executed once: its bytes are written on one edge only.
        ids = {i for m in e.collectives for i in m.ids}
        if not ids <= drawn:
            amount = format_bytes(sum(m.bytes for m in e.collectives))
            label = f'<text x="{middle[0]}" y="{middle[1] + 4}">{escape(kinds.replace(" ", ", "))} {amount}</text>'
        drawn |= ids
        parts.append(
            f'<g class="edge{" moved" if e.collectives else ""}{back}" data-a="{e.source}" data-b="{e.target}" '
            f'data-kinds="{kinds}"><title>{escape(f"{names}{chr(10)}{title}")}</title><path d="{path}"/>{label}</g>'
        )
    return parts


def memory_svg(plan: PlanRecord) -> str:
    """Live bytes while each operator runs, with the budget as a line; empty if the plan has no memory curve."""
    curve = plan.memory.curve
    if not curve:
        return ""
    each = max(1, -(-len(curve) // MAX_POINTS))
    tops = [max(curve[i : i + each]) for i in range(0, len(curve), each)]
    wide, high = 800, 160
    peak = plan.cost.peak_bytes
    budget = plan.memory_budget
    top = max(peak, budget if budget is not None and budget < 3 * peak else 0.0) * 1.05 or 1.0
    points = []
    for i, b in enumerate(tops):
        y = round(high - b / top * high, 1)
        points += [f"{round(i / len(tops) * wide, 1)},{y}", f"{round((i + 1) / len(tops) * wide, 1)},{y}"]
    line = ""
    if budget is not None and budget <= top:
        y = round(high - budget / top * high, 1)
        line = (
            f'<line class="budget" x1="0" x2="{wide}" y1="{y}" y2="{y}">'
            f"<title>budget {format_bytes(budget)}</title></line>"
        )
    return (
        f'<svg class="memory" viewBox="0 0 {wide} {high}" preserveAspectRatio="none" role="img" '
        f'aria-label="memory over the program"><title>peak {format_bytes(peak)}</title>'
        f'<polygon points="0,{high} {" ".join(points)} {wide},{high}"/>{line}</svg>'
    )


def timeline_svg(timeline: CompiledTimeline) -> str:
    """Two lanes, compute above communication; the exposed part of a collective is solid, what is hidden is pale."""
    wide, lane = 1200, 26
    scale = wide / (timeline.step or 1.0)
    parts = [
        f'<svg class="timeline" viewBox="0 0 {wide} {2 * lane + 12}" preserveAspectRatio="none" role="img" '
        'aria-label="timeline of the compiled program">'
    ]
    # Of a pixel, half; shorter ones together would be one block of colour.
    shortest = timeline.step / wide / 2
    for i in timeline.intervals:
        if i.seconds < shortest:
            continue
        x, w = round(i.start * scale, 2), round(i.seconds * scale, 2)
        y = 4 if i.stream == "compute" else lane + 8
        title = f"{i.kind or i.name}, {format_seconds(i.seconds)}"
        if i.stream == "communication":
            title += (
                f" of which {format_seconds(i.exposed)} exposed, for {i.operator}; {i.name}, line {i.line}"
            )
        title = escape(title)
        parts.append(
            f'<rect class="{i.stream}" x="{x}" y="{y}" width="{w}" height="{lane - 4}"><title>{title}</title></rect>'
        )
        if i.exposed:
            shown = round(i.exposed * scale, 2)
            end = round(x + w - shown, 2)
            parts.append(
                f'<rect class="exposed" x="{end}" y="{y}" width="{shown}" height="{lane - 4}"><title>{title}</title></rect>'
            )
    return "".join(parts) + "</svg>"
