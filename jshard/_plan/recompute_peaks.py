"""Peaks of choices of what is kept, predicted without a search.

Problem.  To plan a choice takes a search, of a large program seconds; most were planned only to see whether they fit.

Idea.  The largest sum of live bytes of a choice's program as traced, nothing partitioned, takes no search. The peak of a
plan is close to a fixed share of it, one over the devices or a little more. Each plan corrects that share for the choices
that keep about as much.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

from jshard._plan.recomputation import Choice, Kept, Recomputation


WITHIN_REACH = 1.25
"""Times the budget: the peak up to which other layouts may make up for what a choice keeps."""

_NEARLY = 0.97  # of the limit: so near it the choice that keeps most is not looked for further
_LEAST_DIFFERENCE = 0.01  # of the seconds of a choice that fits, by which one that is worth planning differs


class PeakPrediction:
    """Predicts peaks from that of one plan.

    - `recomputation`: the choices. `limit`: the budget in bytes.
    - `choice`, `peak`: a plan that is known; None for the program as it was traced.
    """

    def __init__(self, recomputation: Recomputation, limit: float, choice: Choice | None, peak: float):
        self.recomputation, self.limit = recomputation, limit
        self._share = 1.0
        self.correct(choice, peak)

    def correct(self, choice: Choice | None, peak: float) -> None:
        """Take the share from a plan of a choice, `peak` bytes."""
        self._share *= peak / max(self.of(choice), 1.0)

    def of(self, choice: Choice | None) -> float:
        """The peak of a choice's plan without a budget; None for the program as it was traced."""
        return self._share * self.recomputation.traced_peak(choice or self.recomputation.everything())

    def hull(self) -> list[Choice]:
        """The choices of the hull, without those of which what is kept alone is out of reach."""
        return self.recomputation.hull(WITHIN_REACH * self.limit / self._share)

    def fitting(self, hull: Sequence[Choice | None]) -> Iterator[int]:
        """Positions of a hull that are predicted to fit, fewest seconds first; the first is not among them."""
        for k in range(1, len(hull)):
            choice = hull[k]
            assert choice is not None
            # What is kept is in memory at once.
            if self._share * choice.bytes <= self.limit and self.of(choice) <= self.limit:
                yield k

    def last_between(self, kept: Sequence[Kept], low: int, high: int, least: Choice) -> Choice | None:
        """The choice that keeps most of those between two positions of a list and is predicted to fit.

        None where it runs nearly the same again as `least`, which fits. What it saves only its plan says: kept values are
        written and read, which the seconds of choices count roughly.

        Arguments: what choices keep, each more than the one before; the position of `least`; of one that does not fit.
        """
        choices = {-1: least}

        def at(k: int) -> Choice:
            if k not in choices:
                choices[k] = self.recomputation.choice(kept[k])
            return choices[k]

        def keeps_too_much(k: int) -> bool:  # what is kept is in memory at once
            return self._share * at(k).bytes > self.limit

        def saves(k: int) -> bool:
            return at(k).seconds < (1 - _LEAST_DIFFERENCE) * least.seconds

        first = low + 1 + bisect.bisect_left(range(low + 1, high), True, key=saves)
        if first < high:
            if self.of(at(first)) > self.limit:
                return None
            low = first
        high = low + 1 + bisect.bisect_left(range(low + 1, high), True, key=keeps_too_much)
        while high - low > 1 and self.of(at(low)) < _NEARLY * self.limit:
            middle = (low + high) // 2
            if self.of(at(middle)) > self.limit:
                high = middle
            else:
                low = middle
        differs = abs(at(low).seconds - least.seconds) > _LEAST_DIFFERENCE * least.seconds
        return at(low) if differs else None


def estimated_first_choice(
    recomputation: Recomputation, limit: float, peak: float
) -> tuple[float, float] | None:
    """(peak, seconds) of the choice that computes least again among those that are predicted to fit; None where none is.

    Arguments: the choices; the budget in bytes a device; the peak of a plan of the program as it was traced. The seconds
    are those that one device alone would add to a step by computing again what is not kept.
    """
    if not recomputation.can_recompute:
        return None
    prediction = PeakPrediction(recomputation, limit, None, peak)
    hull = prediction.hull()
    for k in prediction.fitting([None, *hull]):
        choice = hull[k - 1]
        return prediction.of(choice), max(0.0, choice.seconds - recomputation.everything().seconds)
    return None
