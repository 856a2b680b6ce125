"""`plan` as the last value of a notebook cell, or `plan.to_html(path)`: one self-contained page.

Head, figures, tables and the tree of modules need no script; the scripts of `page/` draw the graph, the time line, memory
and devices from `page_data`, and show the operators behind a number. The sections are those of `print(plan)`.
"""

from __future__ import annotations

import base64
import importlib.resources
import json
import zlib
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from jshard._report.compiled_svg import timeline_svg
from jshard._report.format_units import format_bytes, format_count, format_percent, format_seconds
from jshard._report.grouping import OperatorGroup
from jshard._report.module_tree import Branch, module_tree
from jshard._report.page_data import NOTEBOOK, PAGE, Limits, Nodes, page_data
from jshard._report.page_help import KEYS, figure_sentences
from jshard._report.step_figures import mfu_text
from jshard._report.text import Section, group_location, header_lines, sections
from jshard._report.totals import (
    Traffic,
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
LOWER_BOUND_FIGURES = ("step", "compute", "redundant", "communication", "moved", "cost", "bound")
"""Of these a loop of unknown trip count makes least values."""
STYLES = ("page.css", "graph.css", "time.css")
SCRIPTS = (
    "units.js", "layered.js", "nested.js", "graph.js", "panel.js", "search.js", "time.js", "devices.js", "main.js"
)  # fmt: skip
"""The files of `page/`, in the order in which they are one function."""


def html_page(plan: PlanRecord) -> str:
    """A whole HTML document."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>plan of {escape(plan.name)}</title></head><body>{_report(plan, PAGE)}</body></html>\n"
    )


def html_fragment(plan: PlanRecord) -> str:
    """The report as a piece of HTML with its own style and script, small enough for a notebook's cell."""
    return _report(plan, NOTEBOOK)


def assets(names: Iterable[str]) -> str:
    """The text of some files of `page/`, without comment lines and indentation."""
    folder = importlib.resources.files("jshard._report").joinpath("page")
    lines = [
        line.strip() for n in names for line in folder.joinpath(n).read_text(encoding="utf-8").splitlines()
    ]
    return "\n".join(line for line in lines if line and not line.startswith("// "))


def _report(plan: PlanRecord, limits: Limits) -> str:
    script = "(async function () {\n" + assets(SCRIPTS) + "\n})();"
    data = json.dumps(page_data(plan, limits), separators=(",", ":"))
    embedded = _json_script(data) if limits is PAGE else _deflated_script(data)
    by_title = {s.title: s for s in sections(plan, MAX_ROWS if limits is PAGE else 24)}
    tables = [_table(s) for t, s in by_title.items() if not t.startswith("per device")]
    behind = _Behind(plan)
    tree = _tree(module_tree(plan), plan.serial_seconds or 1.0, behind, True) if limits is PAGE else ""
    parts = [
        f'<div class="jshard" tabindex="-1"><style>{assets(STYLES)}</style>',
        _summary(plan),
        _TOP,
        _details("Operators and collectives", _graph(plan), True),
        _details("Time and memory of a step, on one device", _TIME, True),
        _compiled_timeline(plan),
        _details("Memory at the peak", _memory(plan), True),
        _details("Which device holds what", '<div class="devices"></div>', True),
        _details("Traffic", _traffic(plan), True),
        _details("Modules", f'<div class="tree">{tree}</div>', False) if tree else "",
        _details("Tables", f'<div class="tables">{"".join(tables)}</div>', False),
        _help(),
        '<aside class="panel" hidden role="dialog" aria-label="details"></aside>',
        f"{embedded}<script>{script}</script></div>",
    ]
    return "".join(parts)


def _json_script(data: str) -> str:
    escaped = data.replace("<", "\\u003c")
    return f'<script type="application/json" class="data">{escaped}</script>'


def _deflated_script(data: str) -> str:
    """The data in a fifth of the characters, for notebooks, which keep every cell's output: zlib's format in base64."""
    packed = base64.b64encode(zlib.compress(data.encode(), 9)).decode()
    return f'<script type="text/plain" class="data" data-encoding="deflate">{packed}</script>'


_TOP = (
    '<div class="bar-top"><div class="searching"><input class="search" type="search" autocomplete="off" '
    'placeholder="search operators, modules, tensors, collectives, source lines" aria-label="search">'
    '<ul class="found" role="listbox" hidden></ul></div>'
    '<button type="button" class="theme">light or dark</button></div>'
)
_TIME = (
    '<div class="tools"><button type="button" class="timein">zoom in</button> '
    '<button type="button" class="timeout">zoom out</button> <button type="button" class="timeall">whole step</button> '
    '<button type="button" class="timepeak">peak memory</button> <small>in the order of the program, compute and '
    "collectives one after the other; move over it, drag, ctrl and wheel zoom</small></div>"
    '<div class="time"></div><noscript>the picture needs its script</noscript>'
)


def _help() -> str:
    rows = "".join(f"<tr><td>{''.join(f'<kbd>{escape(k)}</kbd> ' for k in keys)}</td><td>{escape(what)}</td></tr>"
                   for keys, what in KEYS)  # fmt: skip
    return (
        f'<details class="help"><summary>Keys and reading</summary><table><tbody>{rows}</tbody></table>'
        "<p>A box with a + is a module; a click opens it where it stands, another closes it. Alike layers are one box "
        "with their number; what goes to the next of them is marked at both ends, and a dashed line leads upwards. "
        "Orange boxes are collectives, on the line of the tensor that they reshard; the blue bar of a box is its share of "
        "the step. Every figure underlined with dots leads to the operators behind it.</p></details>"
    )


def _details(title: str, body: str, open_: bool) -> str:
    return f"<details{' open' if open_ else ''}><summary>{escape(title)}</summary>{body}</details>"


def _summary(plan: PlanRecord) -> str:
    cards = "".join(
        f'<div class="card"><b data-figure="{f.key}" data-value="{f.value!r}" data-title="{escape(f.name)}: '
        f'{escape(f.text)}">{escape((f.key in LOWER_BOUND_FIGURES) * at_least_prefix(plan) + f.text)}</b>'
        f'<span class="what">{escape(f.name)}</span><span>{escape(f.sentence)}</span></div>'
        for f in figure_sentences(plan)
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


class _Behind:
    """Attributes that name the nodes and collectives of the page's data behind a part of the tree."""

    def __init__(self, plan: PlanRecord):
        self.member = Nodes(plan).member

    def of(self, groups: Iterable[OperatorGroup]) -> str:
        """The attributes for some groups: their operators; the collectives for no operator are not among the nodes."""
        numbers = sorted({self.member["operator", r.name] for g in groups for r in g.rows})
        return f' data-nodes="{" ".join(map(str, numbers))}"' if numbers else ""


def _all_groups(b: Branch) -> list[OperatorGroup]:
    return [*b.groups, *(g for c in b.branches for g in _all_groups(c))]


def _tree(b: Branch, whole: float, behind: _Behind, top: bool = False) -> str:
    bars = (
        f'<span class="bar"><i class="compute" style="width:{100 * b.compute / whole:.1f}%"></i>'
        f'<i class="communication" style="width:{100 * b.communication / whole:.1f}%"></i></span>'
    )
    total = b.compute + b.communication
    head = (
        f"<summary><code>{escape(b.name)}</code>{bars}<em{behind.of(_all_groups(b))}>{format_percent(total / whole)}</em> "
        f"<small>{format_seconds(b.compute)} compute, {format_seconds(b.communication)} comm., "
        f"{b.operators} operators</small></summary>"
    )
    worth = [g for g in b.groups if g.collectives or g.seconds >= 0.001 * whole]
    rest = len(b.groups) - len(worth)
    rows = "".join(_group(g, whole, behind) for g in worth)
    rows += f'<div class="op"><small>and {rest} kinds of light operators</small></div>' if rest else ""
    light = [c for c in b.branches if not c.communication and c.compute < MIN_MODULE_SHARE * whole]
    light = light if len(light) > 2 else []
    inner = "".join(_tree(c, whole, behind) for c in b.branches if c not in light)
    if light:
        rest = sum(c.compute for c in light)
        inner += (
            f"<details><summary><code>{len(light)} light ones</code><small>{format_seconds(rest)} compute, no comm., "
            f"{sum(c.operators for c in light)} operators</small></summary>"
            f"{''.join(_tree(c, whole, behind) for c in light)}</details>"
        )
    return f"<details{' open' if top else ''}>{head}{inner}{rows}</details>"


def _group(g: OperatorGroup, whole: float, behind: _Behind) -> str:
    times = f" x{len(g.rows)}" if len(g.rows) > 1 else ""
    cuts = "".join(str(s).replace(" ", "") for s in g.rows[0].strategy if s) if g.rows else ""
    layouts = " ".join(dict.fromkeys(map(str, g.rows[0].results))) if g.rows else ""
    arrow = " &rarr; " if cuts or layouts else ""
    moved = "".join(
        f'<span class="coll" data-kinds="{m.kind}">{escape(m.name)} {escape(m.local)}, {m.figures}</span>'
        for m in g.collectives
    )
    share = f"<em{behind.of([g])}>{format_percent(g.seconds / whole)}</em>"
    return (
        f'<div class="op"><code>{escape(g.label + times)}</code> {share} '
        f"<small>{escape(group_location(g))}</small> <code>{escape(cuts)}{arrow}{escape(layouts)}</code>{moved}</div>"
    )


def _graph(plan: PlanRecord) -> str:
    kinds = sorted({c.kind for c in plan.collectives})
    options = "".join(f'<option value="{k}">{k}</option>' for k in kinds)
    return (
        '<div class="tools"><button type="button" class="fit">fit</button> '
        '<button type="button" class="in" aria-label="zoom in">+</button> '
        '<button type="button" class="out" aria-label="zoom out">&minus;</button> '
        '<button type="button" class="closeall">close all</button> '
        f'<label>collectives <select class="kinds"><option value="">all</option>{options}</select></label> '
        '<label><input type="checkbox" class="light"> light operators too</label> '
        "<small>click opens a module or tells about a box; drag to move, ctrl and wheel to zoom</small></div>"
        '<div class="stage"></div><noscript>the graph needs its script; the tables do not</noscript>'
        "<div><small>colours are layouts: which mesh axes cut each dimension, - for none, "
        '+ for a sum that is not finished</small></div><div class="keys"></div>'
    )


def _traffic(plan: PlanRecord) -> str:
    rows = traffic(plan)
    if not rows:
        return "<p>no collectives</p>"
    most = max(t.seconds for t in rows) or 1.0
    body = "".join(_traffic_row(t, most) for t in rows)
    titles = "".join(f"<th>{t}</th>" for t in ("collective", "axes", "times", "bytes a device", "time", ""))
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def _traffic_row(t: Traffic, most: float) -> str:
    least = "at least " * t.is_lower_bound

    def number(unit: str, text: str) -> str:
        return f'<span data-traffic="{t.kind}|{escape(t.axes)}" data-unit="{unit}">{least}{text}</span>'

    return (
        f'<tr class="coll" data-kinds="{t.kind}"><td>{t.kind}</td><td>{escape(t.axes)}</td>'
        f'<td class="r">{number("times", format_count(t.count))}</td>'
        f'<td class="r" data-bytes="{t.bytes!r}">{number("bytes", f"{t.bytes:,.0f} B")}</td>'
        f'<td class="r">{number("seconds", format_seconds(t.seconds))}</td><td class="wide"><span class="bar">'
        f'<i class="communication" style="width:{100 * t.seconds / most:.1f}%"></i></span></td></tr>'
    )


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
        f"<p>peak {formatted_totals(plan)['peak']} a device, and what it consists of:</p>"
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
