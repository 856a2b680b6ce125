"""The search over what is computed again, jointly with the layouts: choices of `recomputation.py`, planned and compared.

Problem.  A budget may be met by other layouts, by computing values again, or by both, and what is best depends on both.

Idea.  Where the plan of least time keeps the budget nothing is computed again. Else every choice is a program of its own.
Programs with few values have all their choices planned within the budget, if none takes long. Of others peaks are predicted
(`recompute_peaks.py`): the choice of the hull with the fewest seconds that is predicted to fit is planned without a budget,
which is quick; then the one that keeps most between it and the next, and between it and the program as it was traced; then
the next ones and the program as it was traced within the budget, whose layouts may make up for it; then, where they are few,
all others. A search ends where its bound is not below the cost of a plan that fits.

Effort.  What the user allows is for all choices together: each has a half of what those before it left, and at least a
tenth of the whole. Beyond these few no other is planned once it is spent, or four times as much where nothing fits. Before
a refusal the program as it was traced is planned once more, with the effort of a call that computes nothing again.

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
from jshard._plan.recompute_peaks import WITHIN_REACH, PeakPrediction
from jshard._plan.record import PlanRecord
from jshard._plan.request import ENOUGH, LEAST_EFFORT, NoBetterPlan
from jshard._search.cost_network import LARGE_NETWORK
from jshard._search.effort import ENTRIES_PER_SECOND, Effort


_TRIED_BETWEEN = 2  # choices planned between two neighbours of the hull
_WITHIN_BUDGET = 2  # choices planned within the budget, that exceed it when planned without
_PART = 0.5  # of the effort that is left, for the next plan
# Of effort, if each of a few choices takes as much as the program as it was traced: beyond, those are planned only as far as
# they may be cheaper than what fits, which proves less. Four reversible blocks on 2x4 took 697 s for all 32 of them.
_ALL_PROVED = 30 * ENTRIES_PER_SECOND
_TRIED_FREE = 8  # choices of the hull planned without a budget to find one that fits

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

    - `plan_of`: `plan_of(choice, limited, most, effort)` plans the program of a choice, within the budget or without; it
        may raise `NoBetterPlan` where no plan costs less than `most`, at level 0 with the even share of the compute.
    - `record_of`: the record of what `plan_of` returns.
    - `limit`: the budget in bytes.
    - `seconds`: effort for all choices together; None for as much as the proofs take.
    - `traced_is_refused`: whether no plan of the program as it was traced was found within the budget before, as in the
        trial of a refusal: where nothing fits each plan takes several times its part of the effort, so no other follows.
    """

    def __init__(
        self,
        recomputation: Recomputation,
        plan_of: Callable[[Choice | None, bool, float, Effort], Planned],
        record_of: Callable[[Planned], PlanRecord],
        limit: float,
        seconds: float | None = None,
        traced_is_refused: bool = False,
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
        self.interrupted, self.traced_is_refused = False, traced_is_refused
        self._effort = Effort.of_seconds(seconds)
        self.refusal: MemoryBudgetError | None = None
        self._proved: dict[Choice | None, float] = {}  # bytes that every plan of a choice needs

    def run(self, original: Planned) -> Trial[Planned] | None:
        """The cheapest trial within the budget; None if there is none. `original` is planned without a budget.

        An interruption (Ctrl-C) ends the search; it is raised again where no trial within the budget is known.
        """
        self.trials.append(self._trial(None, original))
        try:
            if self.record_of(original).interrupted:
                raise KeyboardInterrupt
            self._run()
        except KeyboardInterrupt:
            if not self._fitting:
                raise
            self.interrupted, self.complete = True, False
        return min(self._fitting, key=lambda t: (t.cost, t.peak), default=None)

    def _run(self) -> None:
        """Plan all choices where they are few and none takes long; else first those that are predicted to fit."""
        choices = self.recomputation.every_choice()
        if choices is not None:
            # Without loops to rewrite the choice that keeps all is the program as it was traced.
            choices = [None, *(choices if self.recomputation.rewrites_loops else choices[1:])]
            if self._effort.limit == math.inf:
                self.plan(None, limited=True)  # of which the bound without a budget is known
                if self._effort.spent * len(choices) <= _ALL_PROVED:
                    self.complete = True
                    for choice in choices[1:]:
                        self._plan_with_bound(choice)
                    return
        self.planned[None, False] = self.trials[0]
        self._search()
        if choices is not None:
            self._plan_all(choices)

    def _plan_all(self, choices: Sequence[Choice | None]) -> None:
        """Plan every choice as far as it may be cheaper than what fits, until the effort is spent.

        What keeps most costs least, and is first where something fits; else what keeps least is, which is likely to.
        """
        for choice in choices if self._fitting else reversed(choices):
            if self._is_spent:
                return
            if not self._is_settled(choice):
                self._plan_with_bound(choice)
        self.complete = True

    @property
    def _is_spent(self) -> bool:
        """Whether a given effort ends the search: it is spent, some times where nothing fits but in a trial."""
        times = 1 if self._fitting or self.traced_is_refused else ENOUGH
        return self._effort.spent >= times * self._effort.limit

    @property
    def _fitting(self) -> list[Trial[Planned]]:
        """The plans within the budget that are known."""
        return [t for t in self.trials if t.fits(self.limit)]

    def _is_settled(self, choice: Choice | None) -> bool:
        """Whether the plan of a choice without a budget is that within it, or its bound says that none is cheaper."""
        if choice is None and self.traced_is_refused:
            return True
        free = self.planned.get((choice, False))
        return free is not None and (free.fits(self.limit) or free.bound >= self._cheapest()[1])

    @property
    def bound(self) -> float:
        """No plan of a choice that was planned costs less."""
        bounds: dict[Choice | None, float] = {}
        for t in self.trials:
            bounds[t.choice] = max(bounds.get(t.choice, 0.0), t.bound)
        return min(bounds.values())

    @property
    def proved_least(self) -> float:
        """Bytes that every plan of every choice needs, as far as that is proved; 0 where not every choice was refused."""
        if not self.complete or any(t.choice not in self._proved for t in self.trials):
            return 0.0
        return min(self._proved.values())

    @property
    def traced_is_settled(self) -> bool:
        """Whether it is of no use to plan the program as it was traced within the budget once more.

        It is proved that no plan of it fits, or it was planned without a limit of effort, or before.
        """
        if self.traced_is_refused:
            return True
        tried = self.planned.get((None, True))
        return tried is not None and math.inf in (self._effort.limit, tried.bound)

    @property
    def choices_planned(self) -> int:
        """The number of different choices that were planned, the program as it was traced among them."""
        return len({t.choice for t in self.trials})

    def plan(self, choice: Choice | None, *, limited: bool) -> Trial[Planned]:
        """Plan a choice and record it; one that was planned so before is not planned again."""
        if (choice, limited) not in self.planned:
            self.planned[choice, limited] = self._planned(choice, limited)
        return self.planned[choice, limited]

    def _plan_with_bound(self, choice: Choice | None) -> None:
        """Plan a choice within the budget; where that proves nothing, without it too: its bound holds within it."""
        if self.plan(choice, limited=True).bound <= 0.0:
            self.plan(choice, limited=False)

    def _planned(self, choice: Choice | None, limited: bool) -> Trial[Planned]:
        beside, least = self._cheapest()
        most = least + beside if limited and not self.complete else math.inf
        try:
            trial = self._trial(choice, self.plan_of(choice, limited, most, self.next_effort()))
        except NoBetterPlan as found:
            trial = Trial(choice, None, math.inf, max(0.0, found.bound - beside), math.inf)
            impossible = True
        except SearchError as error:
            # Without a proof that nothing fits, the choice's bound is that of its plan without a budget.
            impossible = not isinstance(error, MemoryBudgetError) or error.proved_least > self.limit
            if isinstance(error, MemoryBudgetError):
                self._proved[choice] = max(error.proved_least, self._proved.get(choice, 0.0))
                if self.refusal is None or error.least_found < self.refusal.least_found:
                    self.refusal = error
            trial = Trial(choice, None, math.inf, math.inf if impossible else 0.0, math.inf)
        else:
            impossible = False
        if trial.planned is not None or impossible:  # else nothing is known of the plans of this choice
            self.trials.append(trial)
        if trial.planned is not None and self.record_of(trial.planned).interrupted:
            raise KeyboardInterrupt  # that was of one choice: the others are not planned either
        return trial

    def next_effort(self) -> Effort:
        """The effort of the next plan."""
        return self._effort.next_part(_PART, least=LEAST_EFFORT)

    def _cheapest(self) -> tuple[float, float]:
        """(what plans of all choices cost beside the objective, the least cost of one within the budget)."""
        best = min(self._fitting, key=lambda t: t.cost, default=None)
        if best is None:
            return 0.0, math.inf
        assert best.planned is not None
        record = self.record_of(best.planned)
        if record.level == 1:
            return 0.0, math.inf
        # What is computed again counts as redundant.
        return (record.cost.compute - record.cost.redundant if record.level == 0 else 0.0), best.cost

    def _trial(self, choice: Choice | None, planned: Planned) -> Trial[Planned]:
        record = self.record_of(planned)
        c = record.cost
        # At level 1 what is computed again is chosen by time, the plan's own peak by its search.
        cost = record.step_seconds if record.level == 1 else c.objective
        return Trial(choice, planned, cost, 0.0 if record.level == 1 else c.bound, c.peak_bytes)

    def _search(self) -> None:
        """Plan some of the hull; its first is the program as it was traced, which does not fit."""
        prediction = PeakPrediction(self.recomputation, self.limit, None, self.trials[0].peak)
        everything = [self.recomputation.everything()] if self.recomputation.rewrites_loops else []
        hull = [None, *everything, *prediction.hull()]
        if len(hull) < 2:
            return
        high = self._first_that_fits(hull, prediction)
        if high == 0:
            self._within_budget(self._lowest_peaks(hull))
            return
        self._between(hull[high - 1], hull[high], prediction)
        best = min(self._fitting, key=lambda t: t.cost)
        if best.choice is not None:
            self._between(None, best.choice, prediction)  # what is left of the budget
        self._within_budget(self._promising(hull, high - 1, prediction))

    def _promising(
        self, hull: Sequence[Choice | None], last: int, prediction: PeakPrediction
    ) -> list[Choice | None]:
        """The choices up to the last that exceeds the budget, that one first, which layouts within it may make up for."""
        out: list[Choice | None] = []
        least = min(t.cost for t in self._fitting)
        for k in range(last, 0, -1):
            trial = self.planned.get((hull[k], False))
            peak = prediction.of(hull[k]) if trial is None else trial.peak
            if len(out) == _WITHIN_BUDGET or peak >= WITHIN_REACH * self.limit:
                break  # those before it keep more
            if trial is None or trial.cost < least:
                out.append(hull[k])
        return out

    def _first_that_fits(self, hull: Sequence[Choice | None], prediction: PeakPrediction) -> int:
        """A position of the hull that fits without a budget: the first that is predicted to; 0 where none does.

        If none does so, lower peaks as traced first: the peak of a partitioned program may fall where that of the traced
        one does not.
        """
        for tried, k in enumerate(prediction.fitting(hull)):
            if tried == _TRIED_FREE:
                return 0
            trial = self.plan(hull[k], limited=False)
            if trial.fits(self.limit):
                return k
            self._correct(prediction, trial)
        left = [k for k in range(1, len(hull)) if (hull[k], False) not in self.planned]
        tried_last = self._by_traced_peak(left, hull)[: _TRIED_FREE - (len(hull) - 1 - len(left))]
        return next((k for k in tried_last if self.plan(hull[k], limited=False).fits(self.limit)), 0)

    def _correct(self, prediction: PeakPrediction, trial: Trial[Planned]) -> None:
        if trial.planned is not None:
            prediction.correct(trial.choice, trial.peak)

    def _lowest_peaks(self, hull: Sequence[Choice | None]) -> list[Choice | None]:
        """The choices of a hull that were planned without a budget, by their peaks as traced and as planned in turn."""
        tried = [k for k in range(1, len(hull)) if (hull[k], False) in self.planned]
        as_planned = sorted(tried, key=lambda k: self.planned[hull[k], False].peak)
        pairs = zip(self._by_traced_peak(tried, hull), as_planned, strict=True)
        return [hull[k] for k in dict.fromkeys(k for pair in pairs for k in pair)]

    def _by_traced_peak(self, positions: Sequence[int], hull: Sequence[Choice | None]) -> list[int]:
        peaks = {k: self.recomputation.traced_peak(c) for k in positions if (c := hull[k]) is not None}
        return sorted(peaks, key=lambda k: (peaks[k], -k))

    def _between(self, more: Choice | None, less: Choice | None, prediction: PeakPrediction) -> None:
        """Plan choices that keep some of what only `more` keeps, as much as is predicted to fit."""
        if less is None:
            return
        kept = self.recomputation.between(more or self.recomputation.everything(), less)
        low, high = -1, len(kept)  # positions of the last that fits and the first that does not
        self._correct(prediction, self.planned[less, False])
        for _ in range(_TRIED_BETWEEN):
            choice = prediction.last_between(kept, low, high, less)
            if choice is None:
                break
            trial = self.plan(choice, limited=False)
            if trial.fits(self.limit):
                low, less = kept.index(choice.kept), choice
            else:
                high = kept.index(choice.kept)
            self._correct(prediction, trial)

    def _within_budget(self, choices: Sequence[Choice | None]) -> None:
        """Plan the first choices, and the program as it was traced, within the budget.

        That of least cost without it comes first: a cheap plan ends the others. With a given effort and nothing that fits,
        those that far exceed the budget come last, by their peaks: what holds less is more likely to fit.
        """
        by_peak = self._effort.limit < math.inf and not self._fitting

        def key(choice: Choice | None) -> tuple[float, float]:
            trial = self.planned.get((choice, False))
            if trial is None:
                return math.inf, math.inf
            return trial.peak if by_peak and trial.peak > WITHIN_REACH * self.limit else 0.0, trial.cost

        original = [None] if self._traced_may_fit() else []
        for choice in sorted((*original, *choices[:_WITHIN_BUDGET]), key=key):
            if self.traced_is_refused and self._effort.exhausted:
                break
            self._plan_with_bound(choice)

    def _traced_may_fit(self) -> bool:
        """Whether the program as it was traced is planned within the budget: not a large one that far exceeds it."""
        free = self.planned[None, False]
        assert free.planned is not None
        if self.traced_is_refused:
            return False
        few = len(self.record_of(free.planned).operators) < LARGE_NETWORK
        return few or free.peak < WITHIN_REACH * self.limit
