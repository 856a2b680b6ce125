"""The search over what is computed again, jointly with the layouts: choices of `recomputation.py`, planned and compared.

Problem.  A budget may be met by other layouts, by computing values again, or by both, and what is best depends on both.

Idea.  Where the plan of least time keeps the budget nothing is computed again. Else every choice is a program of its own.
Programs with few values have all their choices planned within the budget. Others have those of the hull planned without
a budget first, which is quick, to find by bisection the least that has to be computed again; then choices that keep more,
between that one and the next, by bisection too; then the next ones within the budget, whose layouts may make up for it.

Bound.  A plan of a choice costs no less than that choice's bound, with or without a budget. So the least of the bounds is
one on all plans of all choices that were planned, and the plan says how many these are; over all choices where all were.

Sources: T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; P. Jain et al., "Checkmate", MLSys 2020.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from jshard._core.errors import MemoryBudgetError, SearchError
from jshard._plan.recomputation import Choice, Recomputation
from jshard._plan.record import PlanRecord


_TRIED_BETWEEN = 4  # choices planned between two neighbours of the hull
_WITHIN_BUDGET = 2  # choices planned within the budget, that exceed it when planned without
_TRIED_FREE = 8  # choices of the hull planned without a budget to find one that fits
_WITHIN_REACH = 1.5  # times the budget: how far above it their peak may be

Planned = TypeVar("Planned")


@dataclasses.dataclass(frozen=True, eq=False)
class Trial(Generic[Planned]):
    """One choice planned: None stands for the program as it was traced; `planned` is None where nothing fits."""

    choice: Choice | None
    planned: Planned | None
    cost: float
    bound: float
    peak: float

    def fits(self, limit: float) -> bool:
        """Whether it is a plan within the limit, in bytes."""
        return self.planned is not None and self.peak <= limit


class RecomputeSearch(Generic[Planned]):
    """One search; used once.

    Arguments:

    - `plan_of`: `plan_of(choice, limited)` plans the program of a choice, within the budget or without.
    - `record_of`: the record of what `plan_of` returns.
    - `limit`: the budget in bytes.
    """

    def __init__(
        self,
        recomputation: Recomputation,
        plan_of: Callable[[Choice | None, bool], Planned],
        record_of: Callable[[Planned], PlanRecord],
        limit: float,
    ):
        self.recomputation, self.plan_of, self.record_of, self.limit = (
            recomputation,
            plan_of,
            record_of,
            limit,
        )
        self.trials: list[Trial[Planned]] = []
        # By choice, within the budget or not.
        self.planned: dict[tuple[Choice | None, bool], Trial[Planned]] = {}
        self.complete = False  # whether every choice was planned
        self.refusal: MemoryBudgetError | None = None

    def run(self, original: Planned) -> Trial[Planned] | None:
        """The cheapest trial within the budget; None if there is none. `original` is planned without a budget."""
        self.trials.append(self._trial(None, original))
        choices = self.recomputation.every_choice()
        if choices is not None:
            self.complete = True
            self.plan(None, limited=True)
            # Of the program as it was traced the bound without a budget is known; mostly it is the first choice.
            for choice in choices if self.recomputation.rewrites_loops else choices[1:]:
                if self.plan(choice, limited=True).bound == 0.0:
                    self.plan(choice, limited=False)
        else:
            everything = [self.recomputation.everything()] if self.recomputation.rewrites_loops else []
            self._search([None, *everything, *self.recomputation.hull()])
        fitting = [t for t in self.trials if t.fits(self.limit)]
        return min(fitting, key=lambda t: (t.cost, t.peak), default=None)

    @property
    def bound(self) -> float:
        """No plan of a choice that was planned costs less."""
        bounds: dict[Choice | None, float] = {}
        for t in self.trials:
            bounds[t.choice] = max(bounds.get(t.choice, 0.0), t.bound)
        return min(bounds.values())

    @property
    def choices_planned(self) -> int:
        """The number of different choices that were planned, the program as it was traced among them."""
        return len({t.choice for t in self.trials})

    def plan(self, choice: Choice | None, *, limited: bool) -> Trial[Planned]:
        """Plan a choice and record it; one that was planned so before is not planned again."""
        if (choice, limited) not in self.planned:
            self.planned[choice, limited] = self._planned(choice, limited)
        return self.planned[choice, limited]

    def _planned(self, choice: Choice | None, limited: bool) -> Trial[Planned]:
        try:
            trial = self._trial(choice, self.plan_of(choice, limited))
        except SearchError as error:
            # Without a proof that nothing fits, the choice's bound is that of its plan without a budget.
            impossible = not isinstance(error, MemoryBudgetError) or error.proved_least > self.limit
            if isinstance(error, MemoryBudgetError) and (
                self.refusal is None or error.least_found < self.refusal.least_found
            ):
                self.refusal = error
            trial = Trial(choice, None, math.inf, math.inf if impossible else 0.0, math.inf)
        self.trials.append(trial)
        return trial

    def _trial(self, choice: Choice | None, planned: Planned) -> Trial[Planned]:
        record = self.record_of(planned)
        c = record.cost
        # At level 1 what is computed again is chosen by time, the plan's own peak by its search.
        cost = record.step_seconds if record.level == 1 else c.objective
        return Trial(choice, planned, cost, 0.0 if record.level == 1 else c.bound, c.peak_bytes)

    def _search(self, hull: Sequence[Choice | None]) -> None:
        """Plan some of the hull; its first is the program as it was traced, which does not fit."""

        def without_budget(k: int) -> Trial[Planned]:
            return self.plan(hull[k], limited=False)

        if len(hull) < 2:
            return
        self.planned[None, False] = self.trials[0]
        low, high = 0, self._first_that_fits(hull)
        if high == 0:
            self._within_budget(self._lowest_peaks(hull))
            return
        while high - low > 1:
            middle = (low + high) // 2
            if without_budget(middle).fits(self.limit):
                high = middle
            else:
                low = middle
        self._between(hull[low], hull[high])
        best = min((t for t in self.trials if t.fits(self.limit)), key=lambda t: t.cost)
        if best.choice is not None:
            self._between(None, best.choice)  # what is left of the budget
        self._within_budget(self._promising(hull, low))

    def _promising(self, hull: Sequence[Choice | None], last: int) -> list[Choice | None]:
        """The choices up to the last that exceeds the budget, that one first, which layouts within it may make up for."""
        best = min(t.cost for t in self.trials if t.fits(self.limit))
        out: list[Choice | None] = []
        for k in range(last, 0, -1):
            if len(out) == _WITHIN_BUDGET:
                break
            trial = self.plan(hull[k], limited=False)
            if trial.peak >= _WITHIN_REACH * self.limit:
                break  # those before it keep more
            if trial.cost < best:
                out.append(hull[k])
        return out

    def _first_that_fits(self, hull: Sequence[Choice | None]) -> int:
        """A position of the hull that fits without a budget, lower peaks as traced first; 0 where none does.

        The peak of a partitioned program may fall where that of the traced one does not.
        """
        tried = self._by_traced_peak(range(1, len(hull)), hull)[:_TRIED_FREE]
        return next((k for k in tried if self.plan(hull[k], limited=False).fits(self.limit)), 0)

    def _lowest_peaks(self, hull: Sequence[Choice | None]) -> list[Choice | None]:
        """The choices of a hull that were planned without a budget, by their peaks as traced and as planned in turn."""
        tried = [k for k in range(1, len(hull)) if (hull[k], False) in self.planned]
        as_planned = sorted(tried, key=lambda k: self.planned[hull[k], False].peak)
        pairs = zip(self._by_traced_peak(tried, hull), as_planned, strict=True)
        return [hull[k] for k in dict.fromkeys(k for pair in pairs for k in pair)]

    def _by_traced_peak(self, positions: Sequence[int], hull: Sequence[Choice | None]) -> list[int]:
        peaks = {k: self.recomputation.traced_peak(c) for k in positions if (c := hull[k]) is not None}
        return sorted(peaks, key=lambda k: (peaks[k], -k))

    def _between(self, more: Choice | None, less: Choice | None) -> None:
        """Plan choices that keep some of what only `more` keeps, as much as fits: by bisection of their bytes."""
        more, less = more or self.recomputation.everything(), less or self.recomputation.everything()
        choices = self.recomputation.between(more, less)
        low, high = -1, len(choices)  # positions of the last that fits and the first that does not
        for _ in range(_TRIED_BETWEEN):
            inside = choices[low + 1 : high]
            if not inside:
                break
            least = choices[low].bytes if low >= 0 else less.bytes
            most = choices[high].bytes if high < len(choices) else more.bytes
            target = (least + most) / 2
            k = min(range(low + 1, high), key=lambda k: abs(choices[k].bytes - target))
            if self.plan(choices[k], limited=False).fits(self.limit):
                low = k
            else:
                high = k

    def _within_budget(self, choices: Sequence[Choice | None]) -> None:
        for choice in choices[:_WITHIN_BUDGET]:
            self.plan(choice, limited=True)
