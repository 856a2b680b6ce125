"""What a plan is searched for: pins, ties of state, donation, level, budget and search, beside the program."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal

from jshard._core.layout import Layout
from jshard._core.topology import Topology
from jshard._network.candidates import LayoutTest, PinOfSide
from jshard._network.replication_price import REPLICATION_PRICE
from jshard._spec.entry import Pin, satisfies


if TYPE_CHECKING:
    from jshard._network.build import Pins
    from jshard._search.effort import Effort


Place = tuple[int, str, int]
"""An operand or result of an operator: (operator, "operand" or "result", index)."""

Force = tuple[int, str, int, str, LayoutTest]
"""(operator, side, index, description, test of layouts): what `Plan.why` requires beside the user's pins."""


LEAST_EFFORT = 0.1
"""Of a call's effort: what each of several searches for it has in any case."""

ENOUGH = 4
"""Times a given effort in which no plan within the budget was found, for the search that is made again."""

_MOST_AGAIN = 20.0
"""Seconds of that search's effort, unless more was given: what takes longer is better spent on the least peak."""


def searched_again(times: float) -> str:
    """A step of the plan of such a search.

    >>> searched_again(1)
    'the given effort found no plan within the budget: searched again with as much'
    >>> searched_again(2.5)
    'the given effort found no plan within the budget: searched again with 2.5 times as much'
    """
    more = f"{times:.2g} times " if times > 1 else ""
    return f"the given effort found no plan within the budget: searched again with {more}as much"


def effort_of_call(seconds: float | None) -> Effort:
    """What the searches for one call may spend together."""
    from jshard._search.effort import Effort  # here, so that `import jshard` stays light

    return Effort.of_seconds(seconds)


class NoBetterPlan(Exception):  # noqa: N818 (nothing failed)
    """Ends a search: every plan costs at least `bound`, and what is known costs no more. Handled inside this package.

    `bound` is in the unit of the objective; of a search with `most`, at level 0, the even share of the compute is added.
    """

    def __init__(self, bound: float):
        super().__init__(f"no plan costs less than {bound:.6g}")
        self.bound = bound


@dataclasses.dataclass(frozen=True, eq=False)
class PlanRequest:
    """What to plan for.

    - `pins`: (operator, side, index, pin) of the user.
    - `ties`: (output operator, input operator) pairs that must have one layout: state that is passed from call to call.
    - `donated`: flat indices of donated arguments.
    - `level`: the objective, 0 to 2; `search`: "optimal" or "propagation".
    - `memory_limit`: bytes a device, None for no limit.
    - `seconds`, `gap`: when a search without memory ends; `gap` is relative.
    - `memory_seconds`, `memory_gap`: the same under a budget and for the least peak. There the work is counted, so
        that every machine finds the same plan; the seconds only end a search that takes far longer than it should.
    - `search_seconds`: effort for all searches together, in the seconds that it takes on one core of 2026
        (`_search/effort.py`); None for as much as the proof takes. `effort`: a part of what several plans may spend
        together, in place of that.
    - `search_in_budget`: False to return the plan of least time though it exceeds the limit.
    - `estimate`: whether the first plan of little memory will do, of a program whose every search takes long: its figures
        are estimates of those of another plan.
    - `names_least_peak`: False where a refusal that is proved need not name the least peak: other programs are planned.
    - `effort_again`: how many times a given effort is given again where it finds no plan within the budget; 1, where other
        programs are planned too, only if the limit of its last search would be lowered.
    - `memory_slack`: at levels 0 and 2, the share of the least cost that may be spent on a lower peak.
    - `forced`: what `Plan.why` requires beside the pins.
    - `pinned_results`: output operators that the user pinned, where `pins` has others: an output pinned by
        `Plan.what_if` changes no price.
    - `overlap`: whether communication that products hide is left out of the step; "search": it is searched for too
        (`overlap_choice.py`).
    - `most`: at levels 0 and 2, the cost of a plan that is known: searches that cannot find a cheaper one end
        (`useful_cost.py`).
    - `ends_above`: at levels 0 and 2, an objective: a search for least time ends once its bound is above.
    """

    pins: tuple[tuple[int, str, int, Pin], ...]
    ties: tuple[tuple[int, int], ...] = ()
    donated: tuple[int, ...] = ()
    level: int = 0
    search: str = "optimal"
    memory_limit: float | None = None
    seconds: float = 60.0
    gap: float = 0.0
    replication_price: float = REPLICATION_PRICE
    memory_seconds: float = 240.0
    memory_gap: float = 0.005
    search_seconds: float | None = None
    effort: Effort | None = dataclasses.field(default=None, compare=False)
    forced: tuple[Force, ...] = ()
    pinned_results: tuple[int, ...] | None = None
    search_in_budget: bool = True
    estimate: bool = False
    memory_slack: float = 0.0
    names_least_peak: bool = True
    effort_again: int = ENOUGH
    most: float = math.inf
    ends_above: float = math.inf
    overlap: bool | Literal["search"] = True

    @property
    def to_the_end(self) -> PlanRequest:
        """The request without costs at which its searches end, and with an effort of its own."""
        return dataclasses.replace(self, most=math.inf, ends_above=math.inf, effort=None)

    def with_more(self, effort: Effort, lowers: bool) -> PlanRequest | None:
        """The request of a search to be made again, as it found no plan in a given effort; None where it is not to be.

        `lowers`: whether the first search would have lowered its limit, which the second begins with: once more the same
        effort may do then.
        """
        if effort.limit == math.inf or not self.effort_again or self.effort_again == 1 and not lowers:
            return None
        again = type(effort)(self.times_again(effort) * effort.limit, whole=effort)
        # Each search takes some effort at least: one that spent more than a second may would be repeated as it was.
        if not lowers and effort.spent >= again.limit:
            return None
        return dataclasses.replace(self, effort=again, effort_again=0)

    def times_again(self, effort: Effort) -> float:
        """Times an effort for a search made again: `effort_again`; for more than `_MOST_AGAIN` fewer, at least 1."""
        if not effort.limit:
            return self.effort_again
        return min(self.effort_again, max(1.0, effort.of_seconds(_MOST_AGAIN).limit / effort.limit))

    def with_pins(self, more: Sequence[tuple[int, str, int, Pin]]) -> PlanRequest:
        """The request with more pins."""
        return dataclasses.replace(self, pins=(*self.pins, *more))


def pins_by_operator(
    request: PlanRequest, topology: Topology, no_partial_sums: Collection[Place]
) -> tuple[Pins, Pins]:
    """The pins of a request and what it forces, by operator, as keys with tests of layouts.

    `no_partial_sums` are operands and results that may not be partial sums.
    """
    pins: dict[int, list[PinOfSide]] = {}
    for op, side, k in no_partial_sums:
        pins.setdefault(op, []).append((side, k, "no partial sum", lambda layout: not layout.partial))
    for op, side, k, pin in request.pins:
        pins.setdefault(op, []).append((side, k, _key(pin, topology), _test(pin, topology)))
    forced: dict[int, list[PinOfSide]] = {}
    for op, side, k, key, test in request.forced:
        forced.setdefault(op, []).append((side, k, key, test))
    return pins, forced


def merged_pins(pins: Pins, forced: Pins) -> Pins:
    """Pins and forced layouts of each operator in one list."""
    return {op: [*pins.get(op, ()), *forced.get(op, ())] for op in {**pins, **forced}}


def _key(pin: Pin, topology: Topology) -> Layout | tuple[Sequence[int | None], Any]:
    """What identifies a pin: its layout where it names all axes, else pieces and axes per dimension."""
    if pin.axes is not None and all(a is not None for a in pin.axes):
        return Layout(tuple(tuple(a for a in (d or ()) if topology.mesh.size(a) > 1) for d in pin.axes))
    return pin.cuts, pin.axes


def _test(pin: Pin, topology: Topology) -> Callable[[Layout], bool]:
    return lambda layout: satisfies(pin, layout, topology.mesh)
