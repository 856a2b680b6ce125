"""Bound a core by TRW-S, and remove states by reduced-cost fixing (Dantzig, Fulkerson and Johnson 1954).

A state a of a variable with bound + reduced cost(a) > incumbent cost is in no better assignment, so it is removed; the
reductions then work again, and the messages continue from where they were. Answers come from rounding the messages,
and from restricted problems solved exactly: those with the states of least reduced cost only (in the spirit of
relaxation-induced neighbourhoods, Danna, Rothberg and Le Pape 2005), about three a variable.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jshard._core.arrays import Floats
from jshard._search.dual.message_layout import (
    LayerPositions,
    MessageLayout,
    build_message_layout,
    to_original_states,
)
from jshard._search.dual.trws import DualBound, round_primal, trws
from jshard._search.dual.warm_start import CoreMessages, save_messages
from jshard._search.exact.working_network import Contradiction, WorkingNetwork
from jshard._search.primal.local_search import CoreProblem, core_problem, forest_search
from jshard._search.search_state import TOLERANCE, Reductions, SearchState, reduce_and_eliminate


RESTRICTED_STATES = 3  # states a variable that are mostly few enough to be solved together, exactly
RESTRICTED_TABLE = 200_000  # entries of a joint table of a restricted problem
RESTRICTED_WORK = 2_000_000  # entries of all its joint tables, or ...
RESTRICTED_WORK_PER_VARIABLE = 700  # ... so many a variable where that is more
MIN_FIXED_SHARE = 0.02  # of the states, below which fixing has stalled
MAX_FIX_SHARE = 0.3  # of the states left, above which others are not removed yet
GAP_FOR_MOVES = 0.01  # relative, above which moves on forests improve an answer before the bound stalls
SETTLED = 0.01  # of the gap: what the bound gains in a step when it is the answer that leaves the gap

WarmStart = Callable[[WorkingNetwork, MessageLayout], None]  # sets the messages of a layout


def fix_by_reduced_cost(
    core: WorkingNetwork, reduced_costs: dict[int, Floats], most: float
) -> tuple[WorkingNetwork, list[int], int]:
    """Remove the states of larger reduced cost than `most`.

    Returns the restricted core, the variables whose tables changed, and the number of states removed.
    Raises `Contradiction` where that leaves no assignment.
    """
    restricted = core.fork()
    changed: set[int] = set()
    removed = 0
    for v, costs in reduced_costs.items():
        keep = np.flatnonzero(costs <= most)
        if len(keep) < len(costs):
            removed += len(costs) - len(keep)
            changed.update((v, *restricted.adj[v]))
            restricted.restrict(v, restricted.tables.subsets(keep))
    return restricted, sorted(changed), removed


def solve_restricted(
    search: SearchState,
    reductions: Reductions,
    core: WorkingNetwork,
    reduced_costs: dict[int, Floats],
    most: float,
    work: float,
) -> WorkingNetwork | None:
    """Solve a core with the states of reduced cost at most `most` alone, and offer the answer as the incumbent.

    Returns what elimination left: an empty core where the problem is solved (its offset is the least cost), None where
    it has no answer. `work` limits the entries of all joint tables.
    """
    try:
        restricted, changed, _ = fix_by_reduced_cost(core, reduced_costs, most)
        reduction, rest = reduce_and_eliminate(
            restricted, changed, table_limit=RESTRICTED_TABLE, work_limit=work
        )
    except Contradiction:
        return None
    finally:
        search.spend_on(core)
    if not rest.core:
        search.update_incumbent(
            (*reductions, reduction), rest.offset, np.zeros(search.num_variables, dtype=np.int64)
        )
    return rest


def solve_restricted_neighbourhoods(
    search: SearchState,
    reductions: Reductions,
    core: WorkingNetwork,
    reduced_costs: dict[int, Floats],
    bound: float,
) -> float:
    """Look for an answer among the states of least reduced cost, of ever more states.

    Returns a bound on all assignments: no better one is among those states, and one with another state costs at least
    `bound` and that state's reduced cost.
    """
    ascending = np.sort(np.concatenate(list(reduced_costs.values())))
    work = max(RESTRICTED_WORK, RESTRICTED_WORK_PER_VARIABLE * len(reduced_costs))
    proved = -np.inf
    for states in (RESTRICTED_STATES, 2 * RESTRICTED_STATES, 4 * RESTRICTED_STATES):
        at = min(states * len(reduced_costs), len(ascending)) - 1
        most = float(ascending[at])
        rest = solve_restricted(search, reductions, core, reduced_costs, most, work)
        others = bound + most if at < len(ascending) - 1 else np.inf
        if rest is None:
            proved = others
            continue  # too few states have no answer
        if not rest.core:
            proved = min(rest.offset, others)
        if rest.core or search.gap_closed(rest.offset) or others == np.inf:
            break
    return proved


@dataclass
class PrimalSteps:
    """The primal steps while TRW-S bounds one core: its `on_round` callback, and what it has come to."""

    search: SearchState
    reductions: Reductions
    core: WorkingNetwork
    layout: MessageLayout
    always_round: bool  # also where an incumbent exists and the bound has not stalled
    fix_share: float  # share of states left at which the others are removed
    next_rounds: int  # rounds from which on restricted problems are worth it
    next_share: float = 0.0  # or share of states left
    fix_now: bool = False  # few enough states are left
    restricted_bound: float = -np.inf  # proved by restricted problems
    last_bound: float = -np.inf  # at the step before

    @functools.cached_property
    def problem(self) -> CoreProblem:
        """The core for local search."""
        return core_problem(self.core, self.layout.variables)

    def __call__(self, dual: DualBound, stalled: bool) -> tuple[float, bool]:
        """Look for answers; returns the bound that would close the gap, and whether to stop passes now."""
        search, bound = self.search, dual.bound
        # Far below a poor answer, the bound is near its limit long before the passes end: the answer is what is missing.
        settled = bound - self.last_bound <= SETTLED * (search.incumbent_cost - bound) < np.inf
        self.last_bound = bound
        if not search.gap_closed(bound) and (
            stalled or settled or self.always_round or search.incumbent_cost == np.inf
        ):
            far = settled and search.incumbent_cost - bound > GAP_FOR_MOVES * abs(bound)
            moves = search.forest_moves if stalled else search.forest_moves // 4 if far else 0
            self._round(bound, 0 if search.out_of_time else moves)
        share = self._share_left(dual)
        due = settled or dual.rounds >= self.next_rounds or share <= self.next_share
        due = due and share > self.fix_share
        if not search.gap_closed(bound) and (stalled or due):
            reduced_costs = dual.reduced_costs_by_variable(self.layout)
            proved = solve_restricted_neighbourhoods(
                search, self.reductions, self.core, reduced_costs, dual.reduced_cost_bound
            )
            self.restricted_bound = max(self.restricted_bound, proved)
            # Others are worth it when half as many states are left, or after as many rounds again.
            share = self._share_left(dual)
            self.next_rounds, self.next_share = 2 * dual.rounds, 0.5 * share
        allowed = max(search.gap * abs(bound), TOLERANCE * abs(search.incumbent_cost))
        self.fix_now = share <= self.fix_share
        return search.incumbent_cost - allowed, self.fix_now or search.gap_closed(self.restricted_bound)

    def _round(self, bound: float, moves: int) -> None:
        """Round the messages and improve the answer by local search."""
        search, problem = self.search, self.problem
        states = round_primal(self.layout)
        target = bound + max(search.gap * abs(bound), TOLERANCE * abs(bound))
        cost = forest_search(
            problem, states, search.rng, target=target, deadline=search.deadline, moves=moves
        )
        if cost < min(search.incumbent_cost, problem.offset + problem.infeasibility_penalty):
            search.update_incumbent(self.reductions, cost, to_original_states(self.layout, states))

    def _share_left(self, dual: DualBound) -> float:
        """The share of states that reduced-cost fixing would leave."""
        gap = self.search.incumbent_cost - dual.reduced_cost_bound
        return np.count_nonzero(dual.reduced_costs <= gap) / len(dual.reduced_costs) if gap < np.inf else 1.0


class BoundedCore(NamedTuple):
    """A core and what is proved about it."""

    reductions: Reductions  # that led to it
    core: WorkingNetwork | None  # None: closed, nothing better than the incumbent is in it
    bound: float
    reduced_costs: dict[int, Floats]  # of the core's variables


def bound_and_fix(
    search: SearchState,
    reductions: Reductions,
    core: WorkingNetwork,
    max_rounds: int,
    start: WarmStart | None = None,
    layers: LayerPositions | None = None,
) -> BoundedCore:
    """Bound a core and remove the states that the bound excludes, until that stalls.

    Messages survive the removal of states.

    Arguments:

    - `search`: receives better answers.
    - `reductions`: those that led to the core.
    - `core`: the core.
    - `max_rounds`: rounds of message passing at most, each time.
    - `start`: sets the first messages, from a similar core; None for zeros.
    - `layers`: the positions of variables in repeated layers, where there are any.
    """
    # Rounds before the first restricted problems: a start from a similar core is worth more of them.
    first_rounds = 15 if start is None else 5 if search.similar else 20
    # A new layout costs as much as a dozen rounds on a short core, but as few of a whole one, whose layers share work.
    fix_share = 0.05 if search.for_warm_start else MAX_FIX_SHARE if layers else 0.1
    always_round = start is None or search.similar is not None
    while True:
        search.spend_on(core)
        if not core.core:
            search.update_incumbent(reductions, core.offset, np.zeros(search.num_variables, dtype=np.int64))
            return BoundedCore(reductions, None, core.offset, {})
        layout = build_message_layout(core, layers)
        if start is not None:
            start(core, layout)
        total = len(layout.unary)
        fix_share = min(MAX_FIX_SHARE, max(fix_share, RESTRICTED_STATES * len(layout.variables) / total))
        steps = PrimalSteps(search, reductions, core, layout, always_round, fix_share, first_rounds)
        dual = trws(
            core,
            layout,
            target=np.inf,
            deadline=search.deadline,
            effort=search.effort,
            max_rounds=max_rounds,
            on_round=steps,
        )
        if not steps.fix_now and not search.gap_closed(steps.restricted_bound):
            steps(dual, stalled=True)
        bound = max(dual.bound, steps.restricted_bound)
        if (search.for_warm_start or search.keeps_messages) and search.saved is None:
            search.saved = CoreMessages(core, save_messages(core, layout))
        reduced_costs = dual.reduced_costs_by_variable(layout)
        if search.gap_closed(bound):
            return BoundedCore(reductions, None, bound, reduced_costs)
        if search.out_of_time:
            return BoundedCore(reductions, core, bound, reduced_costs)
        margin = TOLERANCE * abs(search.incumbent_cost)
        gap = search.incumbent_cost - dual.reduced_cost_bound + margin
        try:
            restricted, changed, removed = fix_by_reduced_cost(core, reduced_costs, gap)
            if removed < MIN_FIXED_SHARE * total:
                return BoundedCore(reductions, core, bound, reduced_costs)
            reduction, rest = reduce_and_eliminate(restricted, changed)
        except Contradiction:  # nothing cheaper than the incumbent is left
            return BoundedCore(reductions, None, search.incumbent_cost, {})
        start = CoreMessages(core, save_messages(core, layout)).restore
        reductions, core = (*reductions, reduction), rest
        first_rounds, fix_share, always_round = 20, 0.1, False
        search.report(f"fixing: {removed} of {total} states excluded, core {len(core.core)} variables")
