"""The report as Markdown: the sections of `print(plan)` as unclipped tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jshard._report.text import Section, footer_lines, header_lines, sections


if TYPE_CHECKING:
    from jshard._plan.record import PlanRecord


def markdown_report(plan: PlanRecord) -> str:
    """The whole report; its headings start at the second level, so that it can be part of a page."""
    title, *proofs = header_lines(plan)
    parts = [f"## {title}", *(line.strip() for line in proofs)]
    parts += [_table(s) for s in sections(plan)]
    parts.append("\n".join(f"- {line.strip()}" for line in footer_lines(plan, width=0)))
    return "\n\n".join(parts) + "\n"


def _table(s: Section) -> str:
    right = ("---:" if w < 0 else "---" for w in s.widths)
    lines = [f"### {s.title}", "", _row(s.columns), f"|{'|'.join(right)}|"]
    lines += map(_row, s.rows)
    if s.omitted:
        lines += ["", f"... and {s.omitted}"]
    return "\n".join(lines)


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(_escaped(c.strip()) for c in cells) + " |"


def _escaped(cell: str) -> str:
    r"""A cell that Markdown shows as it is.

    >>> print(_escaped("x*y | w_1"))
    x\*y \| w\_1
    """
    for mark in "\\|*_<`":
        cell = cell.replace(mark, "\\" + mark)
    return cell
