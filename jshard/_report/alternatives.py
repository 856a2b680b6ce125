"""`plan.why(name)`: every other way to cut one tensor or operator, and what the whole plan would cost with it.

Each alternative is forced and the program replanned, so its cost is exactly that of the resulting plan. Alternatives
that are impossible have a reason: a cut that does not divide, a pin, the memory budget.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from jshard._core.errors import MemoryBudgetError, ShardError
from jshard._core.text_width import clip, text_width
from jshard._plan.replan import PADDING_NOTE
from jshard._plan.rows import Alternative
from jshard._report.diff import nearly_equal, regression_text, relative_change
from jshard._report.format_units import format_bytes, format_seconds


if TYPE_CHECKING:
    from jshard._plan.record import PlanRecord
    from jshard._plan.replan import Replanner


@dataclasses.dataclass(frozen=True)
class Why:
    """The alternatives of one tensor or operator: possible ones by cost, then impossible ones with the reason."""

    name: str
    kind: str
    cost: float
    unit: str
    alternatives: tuple[Alternative, ...]

    def __str__(self) -> str:
        show, width_of_text = format_bytes if self.unit == "B" else format_seconds, text_width()
        each = "pieces of each operand" if self.kind == "operator" else "pieces per dimension"
        lines = [f"why {self.name} ({each}; cost of the whole plan, {show(self.cost)} now)"]
        possible = [a for a in self.alternatives if a.cost is not None]
        width = max([len(str(a.cuts)) for a in possible] + [12])
        for a in possible:
            assert a.cost is not None
            same = nearly_equal(self.cost, a.cost)
            words = "<- chosen" if a.chosen else "equally good" if same else a.worse
            words = f"by {a.how}; {words}" if a.how else words
            line = f"  {str(a.cuts):<{width}} {show(a.cost):>8} {relative_change(self.cost, a.cost):>8}  "
            while len(line) + len(words) > width_of_text and ", " in words:
                words = words.rpartition(", ")[0]
            lines.append(line + words.strip())
        reasons: dict[str, list[str]] = {}
        for a in self.alternatives:
            if a.cost is None:
                reasons.setdefault(a.reason, []).append(str(a.cuts) + (" <- chosen" if a.chosen else ""))
        for reason, cuts in reasons.items():
            more = f" and {len(cuts) - 3} more" if len(cuts) > 3 else ""
            said, _, note = reason.partition(PADDING_NOTE)
            lines.append(f"  unavailable: {' '.join(cuts[:3])}{more}: {said}")
            lines += [f"    padding {note}"] if note else []
        return "\n".join(clip(line.rstrip(), width_of_text) for line in lines)


def rank_alternatives(
    plan: PlanRecord, again: Replanner, name: str, on_progress: Callable[[int, int], None] | None = None
) -> Why:
    """Force each alternative of a tensor or operator and replan."""
    found = again.alternatives(name)
    name = again.names_matching(name)[0]
    shape = again.place_of(name)[1]
    chosen = again.current_cuts(plan.decision, name)
    open_ = sum(not a.reason for a in found)
    tried: list[Alternative] = []
    done = 0
    for a in found:
        if a.reason:
            tried.append(a)
            continue
        tried.append(_replan_with(plan, again, name, a, a.cuts == chosen))
        done += 1
        if on_progress is not None:
            on_progress(done, open_)
    tried.sort(key=lambda a: (a.cost is None, a.cost or 0.0, not a.chosen, str(a.cuts)))
    kind = "operator" if shape is None else "tensor"
    return Why(name, kind, plan.cost.objective, plan.cost.unit, tuple(tried))


def _replan_with(plan: PlanRecord, again: Replanner, name: str, a: Alternative, chosen: bool) -> Alternative:
    try:
        forced = again.replan({name: a.cuts})
    except MemoryBudgetError as e:
        return dataclasses.replace(a, reason=f"memory: {e.what}", chosen=chosen)
    except ShardError as e:
        return dataclasses.replace(a, reason=e.what, chosen=chosen)
    more = "" if chosen or forced.cost.objective < plan.cost.objective else regression_text(plan, forced)
    return dataclasses.replace(a, cost=forced.cost.objective, chosen=chosen, worse=more)
