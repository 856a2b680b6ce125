"""Plans within a budget by a memory network, whose limit is lowered by what their schedules exceed.

Problem.  A memory network counts the bytes of a schedule only nearly (`_network/memory_network.py`): what it finds within a
budget may exceed it.

Idea.  While the schedule does, the network is solved again with a limit lowered by the excess and a little more. Where that
has no answer, half of the way back to what it counted of the last plan is tried. Where a schedule leaves room and costs far
more than one that exceeded the budget, the limit is raised again, by linear interpolation of the peaks (regula falsi).

Worked case.  A budget of 100 bytes; the network counts 98 of a plan whose schedule holds 104: the next limit is
98 - 1.05 * 4 = 93.8. Its plan holds 88 and costs twice as much: the next limit is 93.8 + (98 - 93.8) * 12 / 16 = 96.95.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from jshard._core.arrays import Ints
from jshard._plan.scheduled_solution import ScheduledSolution
from jshard._search import LARGE_NETWORK, CostNetwork, Effort, Prices, Solution


ROUNDS = 6
_LATE_LIMITS = 2  # tried after the effort was spent, where every search takes long for that effort
_OVERSHOOT = 1.05  # of the excess, by which a limit is lowered
_NEARLY = 0.98  # of the bytes that the network counts of a plan: no limit between the two is tried
_RAISED = 2  # times that a limit is raised again
_WORTH = 0.02  # relative, that a plan within the budget costs more than one above it, where that is done


def least_counted(memory: CostNetwork, effort: Effort) -> float:
    """Bytes that a large memory network counts of every assignment, as far as one priced network proves; else 0.

    On a small one a limit that nothing keeps is soon found out by the search itself.
    """
    if not memory.is_large(effort) or effort.exhausted:
        return 0.0
    from jshard._search.memory.minimax_peak import bound_at_fullest_time  # here: the import stays light

    return bound_at_fullest_time(memory, effort)


def when_spent(memory: CostNetwork, effort: Effort, late_limits: bool) -> Callable[[], bool]:
    """A test, for `LimitSearch.ends`: the effort is spent, and the network is not of many variables.

    Where every search of one of few variables takes long for that effort, `_LATE_LIMITS` more are tried if `late_limits`.
    """
    late = iter(range(_LATE_LIMITS if late_limits and memory.is_large(effort) else 0))
    few = memory.size < LARGE_NETWORK
    return lambda: effort.exhausted and few and next(late, None) is None


Counted = tuple[float, ScheduledSolution]  # the bytes that a memory network counts of a plan, and the plan


def last_above(plans: Sequence[ScheduledSolution], found: Solution | None, limit: float) -> Counted | None:
    """What `LimitSearch.run` found last, if it is above the budget in bytes: the bytes counted, and the plan."""
    return (found.peak, plans[-1]) if found and found.peak and plans[-1].peak > limit else None


@dataclasses.dataclass(frozen=True, eq=False)
class LimitSearch:
    """How a memory network is searched under limits.

    - `limit`: the budget in bytes.
    - `solve`: of a limit, prices and answers to begin with, the network's solution or None.
    - `scheduled`: the plan of a solution.
    - `rounds`: limits tried at most. `furthest`: bytes of a schedule above which no lower limit is tried.
    - `may_fit`: whether it is not proved that nothing fits; asked once, after the first schedule above the budget.
    - `least`: bytes that the network counts of every assignment; asked once, before the first lower limit.
    - `ends`: whether the effort is spent; asked before each lower limit.
    - `above`: what a search before found: the bytes that the network counts of a plan above the budget, and the plan. The
      first limit is lowered by its excess; no bound of the budget is found then.
    """

    limit: float
    solve: Callable[[float, Prices | None, Sequence[Ints]], Solution | None]
    scheduled: Callable[[Solution], ScheduledSolution]
    rounds: int = ROUNDS
    furthest: float = math.inf
    may_fit: Callable[[], bool] = lambda: True
    least: Callable[[], float] = lambda: 0.0
    ends: Callable[[], bool] = lambda: False
    above: Counted | None = None

    def run(
        self, prices: Prices | None = None, answers: Sequence[Ints] = ()
    ) -> tuple[list[ScheduledSolution], Solution | None]:
        """The plans, some of which may be within the budget, and the last solution with the bound of the first.

        `prices` and `answers` are those to begin with. The bound holds for the budget: it is that of no lower limit.
        """
        # Those of the last limit whose plan exceeds the budget, and of the last whose plan keeps it.
        above, within = self.above, None
        aim = self._lowered(*above) if above else self.limit
        plans, bound, least, raised = [], -math.inf, math.nan, 0
        s: Solution | None = None
        for _ in range(self.rounds):
            following = self.solve(aim, s.prices if s else prices, s.answers if s else answers)
            if following is None:
                held = s.peak if s else above and above[0]
                if within or held is None or aim >= _NEARLY * held or self.ends():
                    break
                aim = (aim + held) / 2  # too low: schedules exceed what is counted by different amounts
                continue
            s, bound = following, following.bound if aim == self.limit else bound
            plan = self.scheduled(s)
            plans.append(plan)
            if plan.peak > self.furthest or plan.interrupted:
                break
            counted = min(aim, s.peak or aim)
            if plan.peak <= self.limit:
                within = counted, plan
            else:
                above = counted, plan
            if within:
                higher = None if above is None or raised == _RAISED else self._raised(within, above)
                if higher is None:
                    break
                aim, raised = higher, raised + 1
                continue
            if self.ends() or len(plans) == 1 and not self.may_fit():
                break
            aim = self._lowered(counted, plan)
            least = self.least() if math.isnan(least) else least
            if aim < least:  # nothing keeps it: half of the way down to what something may keep
                aim = (counted + least) / 2
                if least >= _NEARLY * counted:
                    break
        return plans, s and dataclasses.replace(s, bound=bound)

    def _lowered(self, counted: float, plan: ScheduledSolution) -> float:
        """A limit below the bytes that the network counts of a plan above the budget, so that it is not found again."""
        return counted - _OVERSHOOT * (plan.peak - self.limit)

    def _raised(self, within: Counted, above: Counted) -> float | None:
        """A limit between those of two plans, within the budget and above it; None where that is not worth it.

        Arguments: of each the bytes that the network counts, and the plan.
        """
        (low, fits), (high, exceeds) = within, above
        room, excess = self.limit - fits.peak, exceeds.peak - self.limit
        if (
            low >= _NEARLY * high
            or fits.peak >= _NEARLY * self.limit
            or fits.cost <= exceeds.cost * (1 + _WORTH)
        ):
            return None
        return low + (high - low) * room / (room + excess)
