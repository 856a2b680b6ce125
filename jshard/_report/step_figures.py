"""What people ask of a step first: seconds, model FLOPs utilization, tokens or examples a second, chip-hours, price.

All follow from a plan's predicted step, so what that leaves out stands beside them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jshard._core.text_width import wrapped
from jshard._report.format_units import format_percent, format_seconds
from jshard._report.totals import Traffic, at_least_prefix, traffic


if TYPE_CHECKING:
    from jshard._plan.record import PlanRecord


LEFT_OUT = "launches of kernels, input pipeline and host are not in it"
"""What a predicted step does not count."""


@dataclasses.dataclass(frozen=True)
class StepFigures:
    """Figures of one predicted step on all devices of a plan.

    - `step_seconds`: compute at the chip's peak, and the communication that no product hides as its compiler schedules
      it. `fastest_seconds`: the longer of compute and communication, which a step takes where the other hides under it
      altogether; `slowest_seconds`: both one after the other.
    - `compiled_seconds`: by the schedule of the compiled program, if the plan was verified and its compiler tells.
    - `model_flops`: of one step on all devices, in FLOPs, without recomputation; `recomputed_flops` beside them.
    - `mfu`: model FLOPs utilization, 0 to 1; None where neither FLOPs nor seconds are known (`is_lower_bound`).
    - `tokens_per_second`, `examples_per_second`: None unless the number of each in a step was given.
    - `chip_hours`: devices times hours of a step; `cost` their price, None without one.
    - `by_axes`: bytes received by a device, and seconds, of the collectives over the same mesh axes.
    - `is_lower_bound`: a loop of unknown trip count is counted as one trip: seconds, FLOPs and hours are at least this.
    """

    step_seconds: float
    model_flops: float
    recomputed_flops: float
    mfu: float | None
    chip_hours: float
    by_axes: tuple[tuple[str, float, float], ...]
    tokens_per_second: float | None = None
    examples_per_second: float | None = None
    cost: float | None = None
    is_complete: bool = True
    is_lower_bound: bool = False
    fastest_seconds: float = 0.0
    slowest_seconds: float = 0.0
    compiled_seconds: float | None = None

    def __str__(self) -> str:
        least = "at least " if self.is_lower_bound else ""
        flops = least or ("" if self.is_complete else "at least ")
        step = f"{least}{format_seconds(self.step_seconds)}"
        if self.fastest_seconds < self.slowest_seconds:
            span = f"{format_seconds(self.fastest_seconds)} to {format_seconds(self.slowest_seconds)}"
            if self.step_seconds < self.slowest_seconds:
                step += f", of {span}"
            else:
                step = least + span
            step += ", as far as collectives hide"
        if self.compiled_seconds is not None:
            step += f"; {format_seconds(self.compiled_seconds)} by the compiled schedule"
        lines = [
            f"step {step}: {LEFT_OUT}",
            f"model FLOPs {flops}{format_flops(self.model_flops)}, "
            + ("MFU not known" if self.mfu is None else f"MFU {flops}{format_percent(self.mfu)}")
            + (f"; recomputed {format_flops(self.recomputed_flops)} more" if self.recomputed_flops else ""),
        ]
        most = "at most " if self.is_lower_bound else ""
        for rate, what in ((self.tokens_per_second, "tokens"), (self.examples_per_second, "examples")):
            if rate is not None:
                lines.append(f"{most}{rate:,.0f} {what}/s")
        price = "" if self.cost is None else f", costs {self.cost:.4g}"
        lines.append(f"{least}{self.chip_hours:.3g} chip-hours{price}")
        lines += [f"over {axes}: {size:,.0f} B, {format_seconds(s)}" for axes, size, s in self.by_axes]
        return wrapped(lines)


def step_figures(
    plan: PlanRecord, tokens: float | None = None, examples: float | None = None, price: float | None = None
) -> StepFigures:
    """The figures of a plan; `tokens` and `examples` of one call, `price` of one device for an hour."""
    seconds = plan.step_seconds
    timeline = plan.verification.timeline if plan.verification is not None else None
    hours = plan.mesh.total * seconds / 3600

    def per_second(n: float | None) -> float | None:
        return None if n is None or not seconds else n / seconds

    return StepFigures(
        step_seconds=seconds,
        model_flops=plan.model_flops.flops,
        recomputed_flops=plan.model_flops.recomputed,
        mfu=None if at_least_prefix(plan) else plan.mfu,
        chip_hours=hours,
        by_axes=_by_axes(traffic(plan)),
        tokens_per_second=per_second(tokens),
        examples_per_second=per_second(examples),
        cost=None if price is None else hours * price,
        is_complete=plan.model_flops.complete,
        is_lower_bound=bool(at_least_prefix(plan)),
        fastest_seconds=max(plan.cost.compute, plan.cost.communication),
        slowest_seconds=plan.serial_seconds,
        compiled_seconds=None if timeline is None else timeline.step,
    )


def _by_axes(rows: list[Traffic]) -> tuple[tuple[str, float, float], ...]:
    """(axes, bytes, seconds), most seconds first."""
    totals: dict[str, tuple[float, float]] = {}
    for t in rows:
        size, seconds = totals.get(t.axes, (0.0, 0.0))
        totals[t.axes] = (size + t.bytes, seconds + t.seconds)
    return tuple(sorted(((a, b, s) for a, (b, s) in totals.items()), key=lambda r: (-r[2], r[0])))


def mfu_text(plan: PlanRecord) -> str:
    """One line on model FLOPs and their utilization; empty without products, and where the step itself is not known."""
    work = plan.model_flops
    if not work.flops or at_least_prefix(plan):
        return ""
    least = "" if work.complete else "at least "
    alone = "" if plan.cost.hidden else " if nothing overlaps"
    again = f", {format_flops(work.recomputed)} more recomputed" if work.recomputed else ""
    return (
        f"model FLOPs {least}{format_flops(work.flops)}{again}: MFU {least}{format_percent(plan.mfu)}{alone}"
    )


def format_flops(flops: float) -> str:
    """FLOPs with a unit.

    >>> format_flops(3.07e15), format_flops(81920)
    ('3.07 PFLOP', '81.9 kFLOP')
    """
    for factor, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if flops >= factor:
            return f"{flops / factor:.3g} {unit}FLOP"
    return f"{flops:.3g} FLOP"
