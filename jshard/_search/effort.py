"""Effort of a search, counted in table entries and not in seconds, so that every machine finds the same plan.

A pass of messages costs its tables' entries, and each variable that is visited `PER_VARIABLE` more; a reduction costs
what it computes (`exact/table_pool.py`), an integer program its columns. One core of a server of 2026 goes through some
`ENTRIES_PER_SECOND` (`benchmarks/planning/search.md`); the time to build networks and schedules is not counted.

>>> effort = Effort.of_seconds(0.5)
>>> effort.spend(entries=60e6)
>>> effort.exhausted, effort.part(0.5).limit, Effort.of_seconds(None).exhausted
(True, 0.0, False)
"""

from __future__ import annotations

import math
from dataclasses import dataclass


ENTRIES_PER_SECOND = 1e8
PER_VARIABLE = 1000  # entries
_SLOWEST = 20.0  # times the seconds of a given effort, after which a search ends on any machine


def longest_seconds(wanted: float | None, most: float) -> float:
    """A time limit that an effort of some seconds does not meet first; `most` where none is given."""
    return most if wanted is None else max(most, _SLOWEST * wanted)


@dataclass
class Effort:
    """What a search may spend, and has spent, in table entries; what a part of it spends counts here too."""

    limit: float = math.inf
    spent: float = 0.0
    whole: Effort | None = None  # of which this is a part
    of_search: float | None = None  # the limit of the search that this is a part of; None: `limit`

    @staticmethod
    def of_seconds(seconds: float | None) -> Effort:
        """The effort that takes some seconds on one core of 2026; None: no limit."""
        return Effort() if seconds is None else Effort(seconds * ENTRIES_PER_SECOND)

    def part(self, share: float) -> Effort:
        """A part of what is left."""
        return Effort(share * max(0.0, self.limit - self.spent), 0.0, self, self.search_limit)

    def next_part(self, share: float, least: float) -> Effort:
        """A part of what is left for the next of several searches; `least`: a share of the whole that it has in any case.

        >>> whole = Effort(10.0, spent=9.0)
        >>> whole.next_part(0.5, least=0.1).limit, whole.next_part(1.0, least=0.02).limit
        (1.0, 1.0)
        """
        return Effort(max(self.part(share).limit, least * self.limit), 0.0, self)

    def at_least(self, entries: float) -> Effort:
        """What is left, or so many entries where that is less; what they spend counts here.

        >>> whole = Effort(10.0, spent=9.0)
        >>> whole.at_least(1.0) is whole, whole.at_least(2.0).limit
        (True, 2.0)
        """
        left = self.limit - self.spent
        return self if left >= entries else Effort(entries, 0.0, self, self.search_limit)

    def at_most(self, entries: float) -> Effort:
        """What is left, or so many entries where that is more; what they spend counts here.

        >>> Effort(10.0, spent=9.0).at_most(4.0).limit, Effort(10.0).at_most(4.0).limit
        (1.0, 4.0)
        """
        return Effort(min(entries, self.limit - self.spent), 0.0, self, self.search_limit)

    def spend(self, entries: float = 0.0, variables: int = 0) -> None:
        """Count entries gone through and variables visited."""
        self.spent += entries + PER_VARIABLE * variables
        if self.whole is not None:
            self.whole.spend(entries, variables)

    @property
    def search_limit(self) -> float:
        """The limit of the search that this is a part of."""
        return self.limit if self.of_search is None else self.of_search

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left."""
        return self.spent >= self.limit
