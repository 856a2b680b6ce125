"""The ladder: reduce, eliminate, bound, improve, fix, branch, until the gap is closed.

Problem.  Least cost with a proof, in the time given, the same answer every time.

Idea.  Each rung makes the rest easier.  Exact reductions leave a small core; components whose tables
fit are finished exactly; message passing bounds what is left and suggests an answer; block moves improve
it; states that the bound and the answer together exclude are dropped, which lets the reductions bite
again.  When that stalls, the most undecided variable's states are split in two, the more promising half
first.

Worked case.  A chain never leaves the first rung; a cycle of three-state variables neither (degree 2).
"""

from __future__ import annotations

import functools
import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from jshard._search.cost_network import Floats, Ints
from jshard._search.dual.layer_folding import FoldedNetwork, fold_layers, unfold_messages
from jshard._search.dual.message_layout import (
    LayerPositions,
    MessageLayout,
    build_message_layout,
    to_original_states,
)
from jshard._search.dual.trws import DualBound, round_primal, trws
from jshard._search.dual.warm_start import SavedMessages, restore_messages, save_messages
from jshard._search.exact.bucket_elimination import (
    EliminatedComponent,
    eliminate_components,
    reconstruct_component,
)
from jshard._search.exact.reduce import Contradiction, WorkingNetwork, backtrack, reduce
from jshard._search.exact.table_pool import NONE
from jshard._search.primal.local_search import CoreProblem, core_energy, core_problem, forest_search


TOLERANCE = 1e-9
FEW = 3  # states a variable that are mostly solved together, exactly
WarmStart = Callable[[WorkingNetwork, MessageLayout], None]  # gives a chain its first messages


@dataclass(frozen=True)
class Reduction:
    """A reduced graph and the components of its core that are finished."""

    graph: WorkingNetwork
    eliminated: tuple[EliminatedComponent, ...]


@dataclass
class SearchState:
    """What one run knows: the best answer so far, the clock, the report."""

    deadline: float
    gap: float
    report: Callable[[str], None]
    num_variables: int
    incumbent_cost: float = np.inf
    bound: float = -np.inf
    forest_moves: int = 20  # block moves per rounding
    for_warm_start: bool = False  # keep passing messages while they gain, and remember them
    saved_messages: SavedMessages | None = None
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(20250))
    core_assignment: Ints | None = None
    reductions: tuple[
        Reduction, ...
    ] = ()  # what `found` still has to be lifted through: only the last answer is

    @property
    def assignment(self) -> Ints | None:
        """The best answer so far, one state for every variable; None when there is none."""
        if self.core_assignment is not None and self.reductions:
            self.core_assignment, self.reductions = reconstruct(self.reductions, self.core_assignment), ()
        return self.core_assignment

    @assignment.setter
    def assignment(self, found: Ints | None) -> None:
        self.core_assignment, self.reductions = found, ()

    def closed(self, bound: float) -> bool:
        """Is the best answer good enough for a subproblem with this bound?"""
        if self.incumbent_cost == np.inf or bound == -np.inf:  # a share of infinity is no gap
            return False
        return self.incumbent_cost - bound <= max(self.gap * abs(bound), TOLERANCE * abs(self.incumbent_cost))

    @property
    def out_of_time(self) -> bool:
        return time.monotonic() > self.deadline


def reduce_and_eliminate(
    graph: WorkingNetwork,
    start: list[int] | None = None,
    *,
    table_limit: float | None = None,
    work_limit: float | None = None,
) -> tuple[Reduction, WorkingNetwork]:
    """Reduce, finish what fits (into tables of so many entries, so many in all), and fork the core that is left."""
    reduce(graph, start)
    done = eliminate_components(graph, table_limit, work_limit)
    rest = graph.fork()
    for part, _ in done:
        for v in part:
            rest.unary[v] = NONE
            rest.adj[v] = {}
    return Reduction(graph, tuple(f for _, f in done)), rest


def reconstruct(levels: tuple[Reduction, ...], assignment: Ints) -> Ints:
    """From the last core's states to everybody's."""
    for level in reversed(levels):
        for finished in level.eliminated:
            reconstruct_component(level.graph, finished, assignment)
        backtrack(level.graph, assignment)
    return assignment


def update_incumbent(
    search: SearchState, levels: tuple[Reduction, ...], cost: float, assignment: Ints
) -> None:
    if cost < search.incumbent_cost:
        search.incumbent_cost, search.core_assignment, search.reductions = cost, assignment, levels


def fix_by_reduced_cost(
    rest: WorkingNetwork, slacks: dict[int, Floats], most: float
) -> tuple[WorkingNetwork, list[int], int]:
    """The core with the states of at most so much slack, whom that touches, and how many states went."""
    small = rest.fork()
    touched: set[int] = set()
    dropped = 0
    for v, slack in slacks.items():
        keep = np.flatnonzero(slack <= most)
        if len(keep) < len(slack):
            dropped += len(slack) - len(keep)
            touched.update((v, *small.adj[v]))
            small.restrict(v, small.tables.subsets(keep))
    return small, sorted(touched), dropped


def solve_restricted(
    search: SearchState,
    levels: tuple[Reduction, ...],
    rest: WorkingNetwork,
    slacks: dict[int, Floats],
    most: float,
    work: float,
) -> WorkingNetwork | None:
    """Offer the best answer among the states of at most so much slack; the core that is left where that takes more
    `work` than this, None where there is no answer."""
    try:
        small, touched, _ = fix_by_reduced_cost(rest, slacks, most)
        level, core = reduce_and_eliminate(small, touched, table_limit=200_000, work_limit=work)
    except Contradiction:
        return None
    if not core.core:
        update_incumbent(
            search, (*levels, level), core.offset, np.zeros(search.num_variables, dtype=np.int64)
        )
    return core


def solve_restricted_neighbourhoods(
    search: SearchState,
    levels: tuple[Reduction, ...],
    rest: WorkingNetwork,
    slacks: dict[int, Floats],
    bound: float,
) -> float:
    """Look for an answer among the states of least slack: rounding decides one variable at a time, but
    three states a variable are mostly few enough to be solved together, exactly.

    Returns what is proved then: no answer among those, none that costs less than `bound` and their slack among others.
    """
    every = np.sort(np.concatenate(list(slacks.values())))
    proved = -np.inf
    for states in (FEW, 2 * FEW, 4 * FEW):
        at = min(states * len(slacks), len(every)) - 1
        core = solve_restricted(search, levels, rest, slacks, float(every[at]), 2_000_000)
        others = bound + float(every[at]) if at < len(every) - 1 else np.inf
        if core is None:
            proved = others
            continue  # too few states have no answer
        if not core.core:
            proved = min(core.offset, others)
        if core.core or search.closed(core.offset) or others == np.inf:
            break
    return proved


def bound_and_fix(
    search: SearchState,
    levels: tuple[Reduction, ...],
    rest: WorkingNetwork,
    most: int,
    start: WarmStart | None = None,
    layers: LayerPositions | None = None,
) -> tuple[tuple[Reduction, ...], WorkingNetwork | None, float, dict[int, Floats]]:
    """Bound a core and drop what the bound excludes, again and again until that stalls.

    Messages survive the dropping, and may come from a similar core (`start`) of its `layers`.
    Returns (levels, core or None when closed, bound, slack of the core's variables).
    """
    soon = 15 if start is None else 20  # rounds before the first dive
    # The share of states left at which the others are dropped: a new core costs as much as a dozen rounds on a short
    # one, but as few of a whole one, whose layers share their work. A start for a larger core is worth more rounds.
    drop = 0.05 if search.for_warm_start else 0.3 if layers else 0.1
    while True:
        core = rest.core
        if not core:
            update_incumbent(search, levels, rest.offset, np.zeros(search.num_variables, dtype=np.int64))
            return levels, None, rest.offset, {}
        chain = build_message_layout(rest, layers)
        if start is not None:
            start(rest, chain)
        # Where an answer is sought, if one is.
        local = functools.cache(functools.partial(core_problem, rest, chain.variables))
        total = len(chain.unary)
        due = [(soon, 0.0)]  # rounds, or share of states left, at which a dive is worth it
        few = [False]  # whether few enough states are left to drop the others now
        proved = [-np.inf]  # by dives
        drop = min(0.3, max(drop, FEW * len(core) / total))

        def look(
            passed: DualBound,
            hard: bool,
            rest: WorkingNetwork = rest,
            chain: MessageLayout = chain,
            local: Callable[[], CoreProblem] = local,
            levels: tuple[Reduction, ...] = levels,
            total: int = total,
            drop: float = drop,
            fresh: bool = start is None,
            due: list[tuple[int, float]] = due,
            few: list[bool] = few,
            proved: list[float] = proved,
        ) -> tuple[float, bool]:
            """Answers from the messages; the bound that would close, and whether to drop states now."""

            def left() -> float:
                room = search.incumbent_cost - passed.reduced_cost_bound
                return np.count_nonzero(passed.reduced_costs <= room) / total if room < np.inf else 1.0

            bound = passed.bound
            if not search.closed(bound) and (hard or fresh or search.incumbent_cost == np.inf):
                chosen = round_primal(chain)
                target = bound + max(search.gap * abs(bound), TOLERANCE * abs(bound))
                effort = search.forest_moves if hard else 0
                near = local()
                cost = forest_search(
                    near, chosen, search.rng, target=target, deadline=search.deadline, rounds=effort
                )
                if cost < min(search.incumbent_cost, near.offset + near.infeasibility_penalty):
                    update_incumbent(search, levels, cost, to_original_states(rest, chain, chosen))
            share = left()
            worth = share > drop and (passed.rounds >= due[0][0] or share <= due[0][1])
            if not search.closed(bound) and (hard or worth):
                slacks = passed.reduced_costs_by_variable(chain)
                proved[0] = max(
                    proved[0],
                    solve_restricted_neighbourhoods(search, levels, rest, slacks, passed.reduced_cost_bound),
                )
                # Another one is worth it when half as many states are left, or after as many rounds again.
                share = left()
                due[0] = 2 * passed.rounds, 0.5 * share
            target = search.incumbent_cost - max(
                search.gap * abs(bound), TOLERANCE * abs(search.incumbent_cost)
            )
            few[0] = share <= drop
            return target, few[0] or search.closed(proved[0])

        passed: DualBound = trws(
            rest, chain, target=np.inf, deadline=search.deadline, max_rounds=most, on_round=look
        )
        if not few[0] and not search.closed(proved[0]):
            look(passed, True)
        bound = max(passed.bound, proved[0])
        if search.for_warm_start and search.saved_messages is None:
            search.saved_messages = save_messages(rest, chain)
        slacks = passed.reduced_costs_by_variable(chain)
        if search.closed(bound) or search.out_of_time:
            return levels, None if search.closed(bound) else rest, bound, slacks
        room = search.incumbent_cost - passed.reduced_cost_bound + TOLERANCE * abs(search.incumbent_cost)
        try:
            trimmed, touched, dropped = fix_by_reduced_cost(rest, slacks, room)
            if dropped < 0.02 * total:
                return levels, rest, bound, slacks
            level, after = reduce_and_eliminate(trimmed, touched)
        except Contradiction:
            return levels, None, search.incumbent_cost, {}  # nothing cheaper than the best is left
        start = functools.partial(restore_messages, heard=save_messages(rest, chain), before=rest)
        levels, rest, soon, drop = (*levels, level), after, 20, 0.1
        search.report(f"fixing: {dropped} of {total} states excluded, core {len(rest.core)} variables")


def branch(
    search: SearchState,
    levels: tuple[Reduction, ...],
    rest: WorkingNetwork,
    bound: float,
    slack: dict[int, Floats],
) -> float:
    """Split the most undecided variable's states until closed or late; the bound proved."""
    count = 0
    heap: list[tuple] = [(bound, count, levels, rest, slack)]
    while heap:
        bound, _, levels, rest, slack = heap[0]
        if search.closed(bound) or search.out_of_time:
            break
        heapq.heappop(heap)
        # The second-least slack is what deciding this variable wrongly would cost at least.
        regret = {u: float(np.partition(s, 1)[1]) if len(s) > 1 else 0.0 for u, s in slack.items()}
        v = max(regret, key=lambda u: (regret[u], -u))
        costs = slack[v]
        first = np.flatnonzero(costs <= 0.0)
        if len(first) == len(costs):
            first = first[: (len(first) + 1) // 2]
        second = np.setdiff1d(np.arange(len(costs)), first)
        for keep in (first, second):
            child = rest.fork()
            try:
                near = list(child.adj[v])
                child.restrict(v, child.tables.subsets(keep))
                level, core = reduce_and_eliminate(child, sorted({v, *near}))
                deeper, core, low, more = bound_and_fix(search, (*levels, level), core, 60)
            except Contradiction:
                continue
            count += 1
            if core is not None:
                heapq.heappush(heap, (max(low, bound), count, deeper, core, more))
        if count % 20 == 0:
            search.report(f"branching: {count} halves, {len(heap)} open")
    return min((h[0] for h in heap), default=search.incumbent_cost)


def solve_folded(
    search: SearchState, levels: tuple[Reduction, ...], rest: WorkingNetwork, most: int
) -> tuple[WarmStart | None, LayerPositions | None]:
    """Solve a short core of the layers that repeat; its answer is offered, its messages are a start."""
    folded = fold_layers(rest) if len(rest.core) > 1000 else None
    if folded is None:
        return None, None
    inner = SearchState(
        search.deadline, search.gap, lambda _: None, search.num_variables, for_warm_start=True
    )
    try:
        bound_and_fix(inner, (), folded.short, most)
    except Contradiction:
        return None, folded.layers
    if inner.assignment is not None:
        assignment = inner.assignment.copy()
        assignment[folded.representative[:, 0]] = assignment[folded.representative[:, 1]]
        where = rest.tables.subset_positions
        chosen = {v: where(rest.states[v])[int(assignment[v])] for v in rest.core}
        update_incumbent(search, levels, core_energy(rest, chosen), assignment)
        recombine_layers(search, levels, rest, folded, assignment)
    search.report(f"folding: {len(folded.short.core)} variables stand for {len(rest.core)}")
    if inner.saved_messages is None:
        return None, folded.layers
    return functools.partial(unfold_messages, folded=folded, heard=inner.saved_messages), folded.layers


def recombine_layers(
    search: SearchState,
    levels: tuple[Reduction, ...],
    rest: WorkingNetwork,
    folded: FoldedNetwork,
    assignment: Ints,
) -> None:
    """Look for an answer in which every layer does what some layer of a short core's answer does.

    Layers that stand side by side there may differ (two equal mesh axes take turns), and one of them repeated is then
    a poor answer; but a few states a variable are solved together, exactly.
    """
    alike: dict[int, set[int]] = {}
    lost = set(folded.representative[:, 0].tolist())
    for v, (place, _, _) in folded.layers.items():
        if v not in lost:
            alike.setdefault(place, set()).add(int(assignment[v]))
    if max(map(len, alike.values()), default=0) < 2:
        return
    where, slacks = rest.tables.subset_positions, {}
    for v in rest.core:
        place = where(rest.states[v])
        slacks[v] = np.ones(len(place))
        some = alike[folded.layers[v][0]] if v in folded.layers else ()
        slacks[v][[place[s] for s in (*some, int(assignment[v])) if s in place]] = 0.0
    solve_restricted(search, levels, rest, slacks, 0.0, 20_000_000)


def branch_and_bound(
    search: SearchState,
    levels: tuple[Reduction, ...],
    graph: WorkingNetwork,
    *,
    max_rounds: int = 400,
    split: bool = True,
) -> None:
    """The whole ladder on a graph (which is reduced in place); the result is in ``search``."""
    variables, before = graph.original_size
    if not variables:
        variables, before = len(graph.core), sum(len(graph.tables.arrays[graph.unary[v]]) for v in graph.core)
    level, rest = reduce_and_eliminate(graph)
    search.report(
        f"reductions: {variables} variables, {before} states -> core of "
        f"{len(graph.core)} variables, {len(level.eliminated)} components finished exactly, "
        f"{len(rest.core)} variables left; {graph.tables.num_products} distinct products"
    )
    levels = (*levels, level)
    search.bound = rest.offset
    left = bool(rest.core)
    start, layers = solve_folded(search, levels, rest, max_rounds)
    levels, core, bound, slack = bound_and_fix(search, levels, rest, max_rounds, start, layers)
    search.bound = min(bound, search.incumbent_cost)
    if left:
        search.report("messages and blocks")
    if split and core is not None and not search.out_of_time:
        search.bound = min(
            max(search.bound, branch(search, levels, core, bound, slack)), search.incumbent_cost
        )
        search.report("branching")
