"""The headline figures of the HTML page, each with a sentence, and its keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from jshard._report.format_units import format_bytes, format_percent, format_seconds
from jshard._report.totals import formatted_totals, gap_text, received_bytes


if TYPE_CHECKING:
    from jshard._plan.record import PlanRecord


KEYS = (
    (("/",), "search; arrow keys choose, Enter shows it in the graph"),
    (("g",), "to the graph: arrow keys go from box to box, Enter opens or closes a module or tells about an operator, "
     "i tells about a module, f fits, + and - zoom"),
    (("t",), "to the time line: left and right go from event to event (with Shift ten), Home, End, p to the peak of memory, "
     "+ and - zoom, f the whole step"),
    (("d",), "to the devices: arrow keys go from device to device"),
    (("Tab", "Enter"), "to the next number or button, and what is behind it"),
    (("Esc",), "closes the panel or the search"),
    (("?",), "this list"),
)  # fmt: skip


class Figure(NamedTuple):
    """A headline figure: key, name, value, as text, and what it is."""

    key: str
    name: str
    value: float
    text: str
    sentence: str


def figure_sentences(plan: PlanRecord) -> list[Figure]:
    """The headline figures; they agree: step = compute + communication - hidden, the cost the sum that its sentence says."""
    c, text = plan.cost, formatted_totals(plan)
    share = format_percent(c.communication / plan.serial_seconds if plan.serial_seconds else 0.0)
    show = format_bytes if c.unit == "B" else format_seconds
    both = f"compute {text['compute']} and communication {text['communication']}"
    hidden = f", {format_seconds(c.hidden)} of it hidden by products" if c.hidden else ", one after the other"
    found = [
        Figure("step", "predicted step", plan.step_seconds, text["step"],
               both + hidden),
        Figure("compute", "compute", c.compute, text["compute"], "operators of one device at the chip's speed"),
        Figure("redundant", "of it redundant", c.redundant, text["redundant"],
               "beyond an even share of the work over all devices"),
        Figure("communication", "communication", c.communication, text["communication"],
               f"all collectives, {share} of the step" + " if none hides" * bool(c.hidden)),
        Figure("moved", "received by a device", received_bytes(plan), format_bytes(received_bytes(plan)),
               "in all collectives of a call"),
        Figure("peak", "peak memory", c.peak_bytes, text["peak"], "of one device, where the step holds most"),
    ]  # fmt: skip
    if plan.memory_budget is not None:
        found.append(
            Figure(
                "budget",
                "memory budget",
                plan.memory_budget,
                text["budget"],
                "what a device may hold at most",
            )
        )
    found.append(Figure("cost", "cost", c.objective, show(c.objective), _cost_sentence(plan)))
    if gap_text(plan) != "nothing proved":
        about = f"no plan of {c.space} costs less" if c.space else "no plan of the search space costs less"
        gap = "equal to the cost" if c.optimal else f"{100 * c.gap:.2g}% below the cost"
        found.append(Figure("bound", "proved bound", c.bound, show(c.bound), f"{about}; {gap}"))
    return found


def _cost_sentence(plan: PlanRecord) -> str:
    """Which sum the search made least."""
    c, text = plan.cost, formatted_totals(plan)
    if plan.level == 1:
        return "what level 1 makes least: the peak of memory"
    parts = [f"communication {text['communication']}"]
    parts.append(
        f"redundant compute {text['redundant']}" if plan.level == 0 else f"compute {text['compute']}"
    )
    if c.price:
        parts.append(f"the price of repeated products and scattered results {format_seconds(c.price)}")
    return f"what level {plan.level} makes least: " + " + ".join(parts)
