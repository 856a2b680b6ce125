"""The text of a refusal: what holds the memory at the peak, and what helps, with the figures of the plans that one gets.

>>> rows = [Remedy("batch of 8 in place of 32", 3 * 2**30, 0.25), Remedy("mesh d=4 x m=2", 30 * 2**30, 1.5)]
>>> print(remedy_lines(rows, 4 * 2**30))
one of these, with the peak and the time of a step of the plan that it gives
    batch of 8 in place of 32    3 GiB         250 ms
    mesh d=4 x m=2              30 GiB         1.5 s   not enough alone
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jshard._core.errors import MemoryBudgetError
from jshard._report.format_units import format_bytes, format_seconds


if TYPE_CHECKING:
    from jshard._plan.memory_refusal import MemoryRefusal


_MOST_NAMES = 3  # modules or arguments of a class that get their own figure
_KINDS = {"intermediate values": "activations", "redistributed copies": "gathered copies"}


@dataclasses.dataclass(frozen=True)
class Remedy:
    """Something that one can write instead: the peak in bytes a device and seconds a step of the plan that it gives.

    `estimated`: no plan was made for it, or one in which nothing is padded; `seconds` is 0 where that is not known.
    `searched`: whether the search looked for less memory where the plan of least time exceeds the budget. `own_budget`:
    it is another budget, which the plan fits.
    """

    advice: str
    peak: float
    seconds: float
    estimated: bool = False
    searched: bool = True
    own_budget: bool = False


def refusal_error(
    error: MemoryBudgetError, refusal: MemoryRefusal, remedies: Sequence[Remedy], donated: Sequence[str]
) -> MemoryBudgetError:
    """The error with what holds the memory and what helps; `refusal` is what is known of it.

    `donated`: names of donated arguments.
    """
    where = "\n    ".join(held_lines(refusal, donated))
    fix = remedy_lines(remedies, refusal.limit) or "more devices, or smaller shapes"
    return MemoryBudgetError(
        error.what, where=where, fix=fix, refusal=refusal, remedies=tuple(remedies),
        least_found=error.least_found, proved_least=error.proved_least,
    )  # fmt: skip


def held_lines(refusal: MemoryRefusal, donated: Sequence[str]) -> list[str]:
    """What is in memory at the peak, a line for each class with its largest modules."""
    by_kind: dict[str, list[tuple[float, str]]] = {}
    for holder in refusal.holders:
        by_kind.setdefault(holder.kind, []).append((holder.nbytes, holder.name))
    lines = [f"memory_budget of {refusal.mesh} ({refusal.mesh.total} x {refusal.chip}); the peak is held by"]
    for kind, parts in sorted(by_kind.items(), key=lambda item: -sum(b for b, _ in item[1])):
        argument = kind.removeprefix("argument ")
        note = "donated" if argument in donated else "not donated" if argument != kind else ""
        shown = [f"{name} {format_bytes(b)}" for b, name in parts if name][:_MOST_NAMES]
        words = note or ", ".join(shown)
        total = format_bytes(sum(b for b, _ in parts))
        lines.append(f"{_KINDS.get(kind, kind):<20} {total:>9}  {words}".rstrip())
    if refusal.argument_bytes > refusal.limit:
        lines.append(
            f"the arguments alone take {format_bytes(refusal.argument_bytes)} or more, however they are cut"
        )
    return lines


def remedy_lines(remedies: Sequence[Remedy], limit: float) -> str:
    """The table of what helps; what fits comes first."""
    if not remedies:
        return ""
    ordered = sorted(remedies, key=lambda r: r.peak > limit and not r.own_budget)
    width = max(len(r.advice) for r in ordered)
    lines = ["one of these, with the peak and the time of a step of the plan that it gives"]
    for r in ordered:
        about = "about " if r.estimated else ""
        seconds = about + format_seconds(r.seconds) if r.seconds else ""
        note = "  not enough alone" if r.searched else "  may fit, not searched"
        note = "" if r.peak <= limit or r.own_budget else note
        lines.append(
            f"    {r.advice:<{width}} {about + format_bytes(r.peak):>15}  {seconds:>12}{note}".rstrip()
        )
    return "\n".join(lines)
