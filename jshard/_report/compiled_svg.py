"""The timeline of a compiled program as SVG text."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from jshard._report.format_units import format_seconds


if TYPE_CHECKING:
    from jshard._plan.compiled_timeline import CompiledTimeline


def timeline_svg(timeline: CompiledTimeline) -> str:
    """Two lanes, compute above communication; the exposed part of a collective is solid, what is hidden is pale."""
    wide, lane = 1200, 26
    scale = wide / (timeline.step or 1.0)
    parts = [
        f'<svg class="compiled" viewBox="0 0 {wide} {2 * lane + 12}" preserveAspectRatio="none" role="img" '
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
