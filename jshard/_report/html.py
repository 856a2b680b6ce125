"""`plan` as the last value of a notebook cell, or `plan.to_html(path)`: one self-contained page.

Tables, the tree of modules and the figures need no script; the script adds zoom, filtering and the figure of which
device holds which block. The sections are those of `print(plan)`.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from jshard._report.format_units import format_bytes, format_count, format_percent, format_seconds
from jshard._report.grouping import OperatorGroup, fold_tensors, operator_groups
from jshard._report.module_tree import Branch, module_tree
from jshard._report.step_figures import mfu_text
from jshard._report.svg import graph_svg, hue, memory_svg, timeline_svg
from jshard._report.text import Section, group_location, header_lines, sections
from jshard._report.totals import (
    at_least_prefix,
    formatted_totals,
    objective_text,
    optimality_text,
    traffic,
)


if TYPE_CHECKING:
    from jshard._plan.record import PlanRecord


MAX_ROWS = 120  # rows of one table
MIN_MODULE_SHARE = 0.01  # share of the step below which modules without collectives are folded
FIGURE_NAMES = {
    "step": "predicted step", "compute": "compute", "redundant": "of it redundant", "communication": "communication",
    "moved": "received by a device", "peak": "peak memory", "budget": "memory budget",
}  # fmt: skip
# Of these a loop of unknown turns makes least values.
LOWER_BOUND_FIGURES = ("step", "compute", "redundant", "communication", "moved")


def html_page(plan: PlanRecord) -> str:
    """A whole HTML document."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>plan of {escape(plan.name)}</title></head><body>{html_fragment(plan)}</body></html>\n"
    )


def html_fragment(plan: PlanRecord) -> str:
    """The report as a piece of HTML with its own style and script."""
    files = importlib.resources.files("jshard._report")
    style, script = (files.joinpath(n).read_text(encoding="utf-8") for n in ("page.css", "page.js"))
    svg, layouts = graph_svg(plan)
    data = json.dumps(_script_data(plan), separators=(",", ":")).replace("</", "<\\/")
    by_title = {s.title: s for s in sections(plan, MAX_ROWS)}
    tables = [_table(s) for t, s in by_title.items() if not t.startswith("per device")]
    parts = [
        f'<div class="jshard"><style>{style}</style>',
        _summary(plan),
        _details(
            "Modules",
            f'<div class="tree">{_tree(module_tree(plan), plan.step_seconds or 1.0, True)}</div>',
            True,
        ),
        _details(
            "Operators and collectives",
            _legend(plan, layouts) + f'<div class="stage">{svg}<pre class="hover"></pre></div>',
            True,
        ),
        _details("Which device holds what", '<div class="devices"></div>', True),
        _details("Traffic", _traffic(plan), True),
        _compiled_timeline(plan),
        _details("Memory over the program", _memory(plan), True),
        _details("Tables", "".join(tables), False),
        f'<script type="application/json" class="data">{data}</script><script>{script}</script></div>',
    ]
    return "".join(parts)


def _details(title: str, body: str, open_: bool) -> str:
    return f"<details{' open' if open_ else ''}><summary>{escape(title)}</summary>{body}</details>"


def _summary(plan: PlanRecord) -> str:
    values = {**formatted_totals(plan), "moved": format_bytes(sum(c.total for c in plan.collectives))}
    raw = {
        "step": plan.step_seconds, "compute": plan.cost.compute, "redundant": plan.cost.redundant,
        "communication": plan.cost.communication, "moved": sum(c.total for c in plan.collectives),
        "peak": plan.cost.peak_bytes, "budget": plan.memory_budget,
    }  # fmt: skip
    cards = "".join(
        f'<div class="card"><b data-figure="{k}" data-value="{raw[k]!r}">'
        f"{escape((k in LOWER_BOUND_FIGURES) * at_least_prefix(plan) + values[k])}</b>"
        f"<span>{escape(FIGURE_NAMES[k])}</span></div>"
        for k in FIGURE_NAMES
        if k != "budget" or raw[k] is not None
    )
    # The head's further lines, whatever they say: what print(plan) proves stands here too.
    unknown = "".join(f"<p>{escape(line.strip())}</p>" for line in header_lines(plan)[2:])
    if plan.chip != "cpu" and (utilization := mfu_text(plan)):
        unknown += f"<p>{escape(utilization)}</p>"
    if plan.unknown:
        unknown += f'<p class="warn">replicated for want of a rule: {escape(", ".join(plan.unknown))}</p>'
    if plan.verification is not None:
        agreed = "proved" if plan.verification.ok else "open"
        unknown += f'<p class="proof {agreed}">compiled program: {escape(plan.verification.summary)}</p>'
    state = "proved" if plan.cost.optimal and plan.search != "propagation" else "open"
    return (
        f"<h1>plan of {escape(plan.name)}</h1><p>on {escape(str(plan.mesh))} "
        f"({plan.mesh.total} x {escape(plan.chip)}), level {plan.level}: least {objective_text(plan)}; "
        f"{len(plan.operators)} operators, search {escape(plan.search)}</p>"
        f'<p class="proof {state}">{escape(optimality_text(plan))}</p><div class="cards">{cards}</div>{unknown}'
    )


def _tree(b: Branch, whole: float, top: bool = False) -> str:
    bars = (
        f'<span class="bar"><i class="compute" style="width:{100 * b.compute / whole:.1f}%"></i>'
        f'<i class="communication" style="width:{100 * b.communication / whole:.1f}%"></i></span>'
    )
    total = b.compute + b.communication
    head = (
        f"<summary><code>{escape(b.name)}</code>{bars}<em>{format_percent(total / whole)}</em> "
        f"<small>{format_seconds(b.compute)} compute, {format_seconds(b.communication)} comm., "
        f"{b.operators} operators</small></summary>"
    )
    worth = [g for g in b.groups if g.collectives or g.seconds >= 0.001 * whole]
    rest = len(b.groups) - len(worth)
    rows = "".join(_group(g, whole) for g in worth)
    rows += f'<div class="op"><small>and {rest} kinds of light operators</small></div>' if rest else ""
    light = [c for c in b.branches if not c.communication and c.compute < MIN_MODULE_SHARE * whole]
    light = light if len(light) > 2 else []
    inner = "".join(_tree(c, whole) for c in b.branches if c not in light)
    if light:
        rest = sum(c.compute for c in light)
        inner += (
            f"<details><summary><code>{len(light)} light ones</code><small>{format_seconds(rest)} compute, no comm., "
            f"{sum(c.operators for c in light)} operators</small></summary>"
            f"{''.join(_tree(c, whole) for c in light)}</details>"
        )
    return f"<details{' open' if top else ''}>{head}{inner}{rows}</details>"


def _group(g: OperatorGroup, whole: float) -> str:
    times = f" x{len(g.rows)}" if len(g.rows) > 1 else ""
    cuts = "".join(str(s).replace(" ", "") for s in g.rows[0].strategy if s) if g.rows else ""
    layouts = " ".join(dict.fromkeys(map(str, g.rows[0].results))) if g.rows else ""
    arrow = " &rarr; " if cuts or layouts else ""
    moved = "".join(
        f'<span class="coll" data-kinds="{m.kind}">{escape(m.name)} {escape(m.local)}, {m.figures}</span>'
        for m in g.collectives
    )
    return (
        f'<div class="op"><code>{escape(g.label + times)}</code> <em>{format_percent(g.seconds / whole)}</em> '
        f"<small>{escape(group_location(g))}</small> <code>{escape(cuts)}{arrow}{escape(layouts)}</code>{moved}</div>"
    )


def _legend(plan: PlanRecord, layouts: list[str]) -> str:
    kinds = sorted({c.kind for c in plan.collectives})
    options = "".join(f'<option value="{k}">{k}</option>' for k in kinds)
    colours = "".join(
        f'<span class="key" style="--h:{hue(i)}">{escape(lay)}</span>' for i, lay in enumerate(layouts[:24])
    )
    return (
        '<div class="tools"><label>show <select class="kinds"><option value="">every edge</option>'
        f'{options}</select></label> <button type="button" class="fit">fit</button> '
        '<button type="button" class="in" aria-label="zoom in">+</button> '
        '<button type="button" class="out" aria-label="zoom out">&minus;</button> '
        "<small>drag to move, ctrl and wheel to zoom, hover for details; alike layers lie on each other, "
        "dashed edges go to the next one"
        "</small></div><div><small>colours are layouts: which mesh axes cut each dimension, - for none, "
        f'+ for a sum that is not finished</small></div><div class="keys">{colours}</div>'
    )


def _traffic(plan: PlanRecord) -> str:
    rows = traffic(plan)
    if not rows:
        return "<p>no collectives</p>"
    most = max(t.seconds for t in rows) or 1.0
    body = "".join(
        f'<tr class="coll" data-kinds="{t.kind}"><td>{t.kind}</td><td>{escape(t.axes)}</td>'
        f'<td class="r">{"at least " * t.is_lower_bound}{format_count(t.count)}</td>'
        f'<td class="r" data-bytes="{t.bytes!r}">{"at least " * t.is_lower_bound}{t.bytes:,.0f} B</td>'
        f'<td class="r">{"at least " * t.is_lower_bound}{format_seconds(t.seconds)}</td><td class="wide"><span class="bar">'
        f'<i class="communication" style="width:{100 * t.seconds / most:.1f}%"></i></span></td></tr>'
        for t in rows
    )
    titles = "".join(f"<th>{t}</th>" for t in ("collective", "axes", "times", "bytes a device", "time", ""))
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def _compiled_timeline(plan: PlanRecord) -> str:
    timeline = plan.verification.timeline if plan.verification is not None else None
    if timeline is None:
        return ""
    notes = "".join(f'<p class="warn">not scheduled: {escape(u)}</p>' for u in timeline.unread)
    text = f"<p>{escape(timeline.summary)}; above compute, below communication, solid where compute waits for it</p>"
    return _details("Timeline of the compiled program", timeline_svg(timeline) + text + notes, True)


def _memory(plan: PlanRecord) -> str:
    held = "".join(
        f'<tr><td>{escape(name)}</td><td class="r">{format_bytes(b)}</td><td class="wide"><span class="bar">'
        f'<i class="compute" style="width:{100 * b / (plan.cost.peak_bytes or 1.0):.1f}%"></i></span></td></tr>'
        for name, b in plan.memory.held
    )
    return (
        f"{memory_svg(plan)}<p>peak {formatted_totals(plan)['peak']} a device, in program order; at the peak:</p>"
        f"<table><tbody>{held}</tbody></table>"
    )


def _table(s: Section) -> str:
    head = "".join(f"<th>{escape(c)}</th>" for c in s.columns)
    rows = "".join(f"<tr>{''.join(_cells(row, s.widths))}</tr>" for row in s.rows)
    more = f"<p>... and {escape(s.omitted)}</p>" if s.omitted else ""
    return (
        f"<h2>{escape(s.title)}</h2><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{more}"
    )


def _cells(row: tuple[str, ...], widths: tuple[int, ...]) -> Iterable[str]:
    for cell, width in zip(row, widths, strict=True):
        right = ' class="r"' if width < 0 else ""
        indent = "&emsp;" if cell.startswith("  ") else ""
        yield f"<td{right}>{indent}{escape(cell.strip())}</td>"


def _script_data(plan: PlanRecord) -> dict:
    """What the script draws devices from: the mesh, and every tensor's shape and cut, alike ones once."""
    tensors = []
    for title, rows in (("argument", plan.inputs), ("result", plan.outputs)):
        for path, same in fold_tensors(rows):
            r = same[0]
            tensors.append([f"{title} {path}", r.dtype, r.shape, r.layout.dims, r.layout.partial])
    for g in operator_groups(plan)[:400]:
        for r in g.rows[:1]:
            for k, lay in enumerate(r.results):
                name = r.writes[k] if k < len(r.writes) else r.name
                dtype = r.result_dtypes[k] if k < len(r.result_dtypes) else r.dtype
                tensors.append(
                    [f"{name} {g.module}".strip(), dtype, r.result_shapes[k], lay.dims, lay.partial]
                )
    return {"names": plan.mesh.names, "sizes": plan.mesh.sizes, "tensors": tensors}
