"""Pictures of several plans with matplotlib: step time, bytes moved, and time against memory."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from jshard._report.comparison_table import PlanPoint, setting_columns
from jshard._report.format_units import format_seconds
from jshard._report.optional_imports import require
from jshard._report.totals import received_bytes


SCALES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def bars(title: str, points: Sequence[PlanPoint], where: str) -> Any:
    """A figure of three panels, a bar for every plan: step (compute and communication), bytes moved, peak memory."""
    figure = _figure(where, (11.0, max(2.2, 0.36 * len(points) + 1.2)))
    axes = figure.subplots(1, 3, sharey=True)
    names, at = point_labels(points), range(len(points))
    plans = [p.plan for p in points]
    unit, word = _pick_unit([p.step_seconds for p in plans if p], SCALES)
    compute = [p.cost.compute / unit if p else 0 for p in plans]
    axes[0].barh(at, compute, color="#3b76c4", label="compute")
    axes[0].barh(
        at, [p.cost.communication / unit if p else 0 for p in plans], left=compute, color="#d1622b",
        label="communication",
    )  # fmt: skip
    axes[0].set_xlabel(f"step, {word}")
    axes[0].legend(fontsize=8)
    for panel, value, what, colour in (
        (axes[1], received_bytes, "moved by a device", "#d1622b"),
        (axes[2], lambda p: p.cost.peak_bytes, "peak of a device", "#c4863b"),
    ):
        unit, word = _pick_unit([value(p) for p in plans if p], SIZES)
        panel.barh(at, [value(p) / unit if p else 0 for p in plans], color=colour)
        panel.set_xlabel(f"{what}, {word}")
    for k, p in enumerate(points):
        if p.plan is None:
            axes[0].annotate("no plan", (0, k), xytext=(4, 0), textcoords="offset points", va="center")
    axes[0].set_yticks(list(at), names, fontsize=8)
    axes[0].invert_yaxis()
    figure.suptitle(title, fontsize=11)
    return figure


def frontier(title: str, curves: Sequence[tuple[str, Sequence[tuple[float, float]]]], where: str) -> Any:
    """A figure of memory against step time; each curve is a name and its (seconds, bytes), fastest first."""
    figure = _figure(where, (6.4, 4.2))
    axes = figure.subplots()
    every = [p for _, points in curves for p in points]
    unit, word = _pick_unit([s for s, _ in every], SCALES)
    bytes_, size_word = _pick_unit([b for _, b in every], SIZES)
    for name, points in curves:
        x, y = [s / unit for s, _ in points], [b / bytes_ for _, b in points]
        axes.step(x, y, where="post", marker="o", markersize=4, linewidth=1.2, label=name)
    axes.set_xlabel(f"predicted step, {word}")
    axes.set_ylabel(f"peak memory of a device, {size_word}")
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.3)
    if len(curves) > 1:
        axes.legend(fontsize=8)
    return figure


def point_labels(points: Sequence[PlanPoint]) -> list[str]:
    """A label for each point, made of the settings that differ between points."""
    names = setting_columns(points)
    short = {"mesh": "", "chip": "", "search": ""}
    return [
        ", ".join(f"{short.get(n, n + ' ')}{p.setting(n)}" for n in names if p.setting(n) is not None)
        or (format_seconds(p.plan.step_seconds) if p.plan else "")
        for p in points
    ]  # fmt: skip


def _figure(where: str, size: tuple[float, float]) -> Any:
    # Not pyplot: a figure of its own needs no display, no backend and no global state.
    figure = require("matplotlib.figure", "report", where).Figure

    class Picture(figure):
        """A figure that notebooks show with any backend."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png")
            return file.getvalue()

    return Picture(figsize=size, layout="constrained")


def _pick_unit(values: Sequence[float], scales: Sequence[tuple[float, str]]) -> tuple[float, str]:
    most = max(values, default=0.0)
    return next((s for s in scales if most >= s[0]), scales[-1])
