"""Several plans of one function side by side: the rows of a sweep or a frontier as text, HTML and a `DataFrame`.

Settings that all rows share are in the title, the others are columns. A row without a plan gives the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html import escape
from typing import Any, Generic, TypeVar

from jshard._core.text_width import clip, text_width
from jshard._plan.record import PlanRecord
from jshard._report.format_units import format_bytes, format_seconds
from jshard._report.optional_imports import require
from jshard._report.step_figures import step_figures
from jshard._report.totals import gap_text, received_bytes


Record = TypeVar("Record", bound=PlanRecord, covariant=True)


@dataclasses.dataclass(frozen=True)
class PlanPoint(Generic[Record]):
    """One plan, or the error instead of one, with the names and values of the settings that led to it."""

    settings: tuple[tuple[str, object], ...]
    plan: Record | None
    error: str = ""

    def setting(self, name: str) -> Any:
        """The value of a setting; None if it is not set."""
        return dict(self.settings).get(name)

    @property
    def row(self) -> dict[str, object]:
        """Settings and figures by name, in seconds and bytes of one device and call; None without a plan."""
        p = self.plan
        figures = None if p is None else step_figures(p, examples=self.setting("batch"))
        row = dict(self.settings)
        row |= {
            "step_s": figures and figures.step_seconds,
            "compute_s": p and p.cost.compute,
            "redundant_s": p and p.cost.redundant,
            "communication_s": p and p.cost.communication,
            "moved_bytes": p and received_bytes(p),
            "mfu": figures and figures.mfu,
            "model_flops": figures and figures.model_flops,
            "chip_hours": figures and figures.chip_hours,
            "examples_per_second": figures and figures.examples_per_second,
            "peak_bytes": p and p.cost.peak_bytes,
            "gap": p.cost.gap if p is not None and p.search != "propagation" else None,
            "error": self.error,
        }
        return row


FIGURE_COLUMNS = (
    ("step", lambda p: format_seconds(p.step_seconds)), ("compute", lambda p: format_seconds(p.cost.compute)),
    ("comm.", lambda p: format_seconds(p.cost.communication)), ("moved", lambda p: format_bytes(received_bytes(p))),
    ("peak", lambda p: format_bytes(p.cost.peak_bytes)),
    ("gap", lambda p: {"nothing proved": "-", "optimal": "0"}.get(gap_text(p), gap_text(p).removeprefix("gap "))),
)  # fmt: skip


MEANINGS = (
    ("step", "predicted seconds of a call: compute, and the collectives that do not hide under products"),
    ("compute", "operators at the chip's speed"),
    ("comm.", "all collectives"),
    ("moved", "bytes that a device receives in a call"),
    ("peak", "memory of a device where the step holds most"),
    ("gap", "(cost - proved bound) / bound; 0 is optimal, - has no bound"),
    ("chip time", "step x devices, for one entry of the batch where batches differ"),
)
"""What the columns of figures are."""
TABLE_STYLE = (
    ".jshard-table { font: 14px/1.5 system-ui, sans-serif; overflow-x: auto; padding: 4px; } "
    ".jshard-table table { border-collapse: collapse; margin: 8px 0; } "
    ".jshard-table th, .jshard-table td { padding: 3px 9px; border-bottom: 1px solid #8884; white-space: nowrap; "
    "font-variant-numeric: tabular-nums; } .jshard-table .wide { white-space: normal; } "
    ".jshard-table small { opacity: 0.75; }"
)


def varying_settings(points: Sequence[PlanPoint]) -> list[str]:
    """Settings that differ between points."""
    names = dict.fromkeys(name for p in points for name, _ in p.settings)
    return [n for n in names if len({str(p.setting(n)) for p in points}) > 1]


def setting_columns(points: Sequence[PlanPoint]) -> list[str]:
    """The settings that have a column: those that differ, without chips and devices that follow from the mesh."""

    def follows_from_mesh(name: str) -> bool:
        pairs = {(str(p.setting("mesh")), str(p.setting(name))) for p in points}
        return len(pairs) == len({mesh for mesh, _ in pairs}) > 1

    names = varying_settings(points)
    return [
        n for n in names if n not in ("chip", "devices") or "mesh" not in names or not follows_from_mesh(n)
    ]


def shared_settings_text(points: Sequence[PlanPoint]) -> str:
    """The settings that all points share."""
    if not points:
        return ""
    same = [(n, v) for n, v in points[0].settings if n not in varying_settings(points) and v is not None]
    return ", ".join(f"{v}" if n in ("mesh", "chip") else f"{n} {v}" for n, v in same)


def column_names(points: Sequence[PlanPoint]) -> list[str]:
    """Names of the columns."""
    price = ["chip time"] if _needs_chip_time(points) else []
    return [*setting_columns(points), *(name for name, _ in FIGURE_COLUMNS), *price]


def cells(points: Sequence[PlanPoint]) -> list[tuple[list[str], str]]:
    """The cells of each row, and the error in place of the figures if there is no plan."""
    names, priced, out = setting_columns(points), _needs_chip_time(points), []
    for p in points:
        row = ["-" if p.setting(n) is None else str(p.setting(n)) for n in names]
        if p.plan is not None:
            row += [show(p.plan) for _, show in FIGURE_COLUMNS]
            if priced:
                row.append(format_seconds(chip_seconds(p)))
        out.append((row, p.error))
    return out


def chip_seconds(p: PlanPoint) -> float:
    """Chip time of a call: devices times seconds, divided by the batch size if there is one."""
    assert p.plan is not None
    return p.plan.step_seconds * p.plan.mesh.total / (p.setting("batch") or 1)


def table(title: str, points: Sequence[PlanPoint]) -> str:
    """Title and rows as text of at most 100 columns, or those of the terminal; longer lines are clipped."""
    names, rows = column_names(points), cells(points)
    widths = [
        max([len(name)] + [len(row[k]) for row, _ in rows if k < len(row)]) for k, name in enumerate(names)
    ]
    left = len(setting_columns(points))
    shared = shared_settings_text(points)
    lines = [title + (f" ({shared})" if shared else "")]
    if _needs_chip_time(points) and any(p.setting("batch") for p in points):
        lines[0] += "; chip time for one entry of the batch"
    for row, error in [(names, ""), *rows]:
        line = " ".join(
            c.ljust(w) if k < left else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=False))
        )
        lines.append("  " + f"{line} {error and 'no plan: ' + error}".rstrip())
    width = text_width()
    return "\n".join(clip(line, width) for line in lines)


def html_table(title: str, points: Sequence[PlanPoint]) -> str:
    """The same as an HTML table, with bars for step and peak relative to the largest."""
    left = len(setting_columns(points))
    names = column_names(points)
    most = {
        "step": max((p.plan.step_seconds for p in points if p.plan), default=0.0),
        "peak": max((p.plan.cost.peak_bytes for p in points if p.plan), default=0.0),
    }
    body = []
    for p, (row, error) in zip(points, cells(points), strict=True):
        tds = [
            f'<td style="text-align:{"left" if k < left else "right"}">{escape(cell)}{_bar(names[k], p, most)}</td>'
            for k, cell in enumerate(row)
        ]
        if error:
            tds.append(
                f'<td class="wide" colspan="{len(names) - left}" style="text-align:left">no plan: {escape(error)}</td>'
            )
        body.append(f"<tr>{''.join(tds)}</tr>")
    meanings = {name: text for name, text in MEANINGS if name in names}
    head = "".join(
        f'<th style="text-align:{"left" if k < left else "right"}" title="{meanings.get(n, "setting")}">{escape(n)}</th>'
        for k, n in enumerate(names)
    )
    shared = shared_settings_text(points)
    note = f" <small>{escape(shared)}</small>" if shared else ""
    return (
        f'<div class="jshard-table"><style>{TABLE_STYLE}</style><b>{escape(title)}</b>{note}'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
        f"<small>{'; '.join(f'<b>{n}</b> {text}' for n, text in meanings.items())}</small></div>"
    )


def html_page(title: str, points: Sequence[PlanPoint]) -> str:
    """The table as a document of its own, light or dark as the reader's system is."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title></head><body>{html_table(title, points)}</body></html>\n"
    )


def to_dataframe(points: Sequence[PlanPoint], where: str) -> Any:
    """A `pandas.DataFrame` with one row per point."""
    return require("pandas", "report", where).DataFrame([p.row for p in points])


def _needs_chip_time(points: Sequence[PlanPoint]) -> bool:
    """Whether device counts or batch sizes differ, so that step times alone cannot be compared."""
    planned = [p for p in points if p.plan is not None]
    return len({(p.plan.mesh.total if p.plan else 0, p.setting("batch")) for p in planned}) > 1


def _bar(name: str, p: PlanPoint, most: dict[str, float]) -> str:
    if name not in most or p.plan is None or not most[name]:
        return ""
    value = p.plan.step_seconds if name == "step" else p.plan.cost.peak_bytes
    colour = "#3b76c4" if name == "step" else "#c4863b"
    return (
        f'<div style="height:4px;width:{100 * value / most[name]:.0f}%;background:{colour};'
        'margin-left:auto;border-radius:2px"></div>'
    )
