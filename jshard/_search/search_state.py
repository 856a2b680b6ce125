"""What one branch-and-bound search knows: the incumbent, the bound, the clock, and how to lift core answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from jshard._core.arrays import Ints
from jshard._search.cost_network import Prices
from jshard._search.dual.warm_start import CoreMessages
from jshard._search.effort import Effort
from jshard._search.exact.bucket_elimination import (
    EliminatedComponent,
    eliminate_components,
    reconstruct_component,
)
from jshard._search.exact.reduce import backtrack, reduce
from jshard._search.exact.table_pool import NONE
from jshard._search.exact.working_network import WorkingNetwork


TOLERANCE = 1e-9  # relative gap that counts as closed


@dataclass(frozen=True)
class Reduction:
    """A reduced network, and the components of its core that were eliminated."""

    graph: WorkingNetwork
    eliminated: tuple[EliminatedComponent, ...]


Wanted = Literal["answer", "bound"] | None  # what alone is of use of a search; None: both
Reductions = tuple[Reduction, ...]  # of a network, of the core that this left, and so on


@dataclass
class SearchState:
    """The incumbent (best answer so far) and the bound of one search, its clock and its report."""

    deadline: float  # on the monotonic clock, in seconds
    gap: float  # relative gap that suffices
    report: Callable[[str], None]  # called with a line of text per stage
    num_variables: int
    incumbent_cost: float = np.inf
    bound: float = -np.inf
    forest_moves: int = 20  # per rounding, where the bound has stalled
    for_warm_start: bool = False  # a short core: its messages are kept, and few states are worth a new layout
    keeps_messages: bool = False  # those of the first core or, where layers repeat, of the short one
    saved: CoreMessages | None = None  # of the first core, where they are kept
    similar: CoreMessages | None = None  # of a similar core, to begin with
    unlimited: tuple[float, float] | None = (
        None  # cost and peak of a good answer without a limit, where one is known
    )
    prices: Prices | None = None  # on memory: those to begin with, then those that prove the bound
    known: tuple[Ints, ...] = ()  # assignments known before, then those found under prices
    most: float = np.inf  # an answer of higher cost is of no use
    known_cost: float = np.inf  # of the plan that the bound is for, where one is known
    on_answer: Callable[[Ints], None] | None = None  # called with better assignments within a limit
    effort: Effort = field(default_factory=Effort)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(20250))
    core_assignment: Ints | None = None  # the incumbent's states of the last core
    reductions: Reductions = ()  # through which `core_assignment` is lifted when it is read

    @property
    def assignment(self) -> Ints | None:
        """The incumbent, one state for every variable; None when there is none."""
        if self.core_assignment is not None and self.reductions:
            self.core_assignment, self.reductions = reconstruct(self.reductions, self.core_assignment), ()
        return self.core_assignment

    @assignment.setter
    def assignment(self, assignment: Ints | None) -> None:
        self.core_assignment, self.reductions = assignment, ()

    @property
    def has_answer(self) -> bool:
        """Whether there is an incumbent."""
        return self.core_assignment is not None

    def update_incumbent(self, reductions: Reductions, cost: float, core_assignment: Ints) -> None:
        """Take over an answer of a core if it costs less than the incumbent."""
        if cost < self.incumbent_cost:
            self.incumbent_cost, self.core_assignment, self.reductions = cost, core_assignment, reductions

    def gap_closed(self, bound: float) -> bool:
        """Whether the incumbent is good enough for a subproblem with this bound."""
        if self.incumbent_cost == np.inf or bound == -np.inf:  # a share of infinity is no gap
            return False
        allowed = max(self.gap * abs(bound), TOLERANCE * abs(self.incumbent_cost))
        return self.incumbent_cost - bound <= allowed

    def spend_on(self, graph: WorkingNetwork) -> None:
        """Count what the operations on a network's tables went through."""
        self.effort.spend(graph.tables.take_work())

    @property
    def useless(self) -> bool:
        """Whether no assignment is cheap enough to be of use."""
        return self.bound > self.most

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self.deadline

    @property
    def out_of_time(self) -> bool:
        """Whether the deadline has passed, or the effort is spent."""
        return self.effort.exhausted or time.monotonic() > self.deadline


def reduce_and_eliminate(
    graph: WorkingNetwork,
    start: list[int] | None = None,
    *,
    table_limit: float | None = None,
    work_limit: float | None = None,
) -> tuple[Reduction, WorkingNetwork]:
    """Reduce a network (in place), eliminate the components that stay within the limits, fork the core that is left.

    Arguments:

    - `graph`: the network.
    - `start`: the variables whose tables changed; None for all.
    - `table_limit`: entries of the largest joint table; None for the default.
    - `work_limit`: entries of all joint tables together; None for the default.
    """
    reduce(graph, start)
    done = eliminate_components(graph, table_limit, work_limit)
    core = graph.fork()
    for part, _ in done:
        for v in part:
            core.unary[v] = NONE
            core.adj[v] = {}
    return Reduction(graph, tuple([component for _, component in done])), core


def reconstruct(reductions: Reductions, assignment: Ints) -> Ints:
    """From the states of the last core to those of all variables (in place; returned for convenience)."""
    for reduction in reversed(reductions):
        for component in reduction.eliminated:
            reconstruct_component(reduction.graph, component, assignment)
        backtrack(reduction.graph, assignment)
    return assignment


@dataclass
class GapProgress:
    """Whether a search's gap still shrinks: it has stalled after so many rounds in which it does not, to a share of itself.

    >>> progress = GapProgress(share=0.9, patience=2)
    >>> [progress.stalled(gap) for gap in (8.0, 7.0, 6.9, 6.8, 5.0)]
    [False, False, False, True, False]
    """

    share: float
    patience: int
    gap: float = np.inf  # at the end of the last round in which it shrank
    rounds: int = 0  # since then

    def stalled(self, gap: float) -> bool:
        """Note the gap at the end of a round; whether it has stalled."""
        if gap < self.share * self.gap:
            self.gap, self.rounds = gap, 0
        else:
            self.rounds += 1
        return self.rounds >= self.patience
