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

from jshard._search.bound import Passed, pass_messages, rounded
from jshard._search.chain import Chain, Layers, chain_of, positions
from jshard._search.eliminate import Finished, eliminate, read_off
from jshard._search.fold import Folded, fold, retell
from jshard._search.heard import Heard, hear, heard_in
from jshard._search.improve import Local, energy_of, improve, local_of
from jshard._search.network import Floats, Ints
from jshard._search.reduce import Contradiction, Graph, backtrack, reduce
from jshard._search.tables import NONE


TOLERANCE = 1e-9
FEW = 3  # states a variable that are mostly solved together, exactly
Start = Callable[[Graph, Chain], None]  # gives a chain its first messages


@dataclass(frozen=True)
class Level:
    """A reduced graph and the components of its core that are finished."""

    graph: Graph
    finished: tuple[Finished, ...]


@dataclass
class Search:
    """What one run knows: the best answer so far, the clock, the report."""

    deadline: float
    gap: float
    report: Callable[[str], None]
    variables: int
    best: float = np.inf
    bound: float = -np.inf
    effort: int = 20  # block moves per rounding
    patient: bool = False  # keep passing messages while they gain, and remember them
    heard: Heard | None = None
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(20250))
    found: Ints | None = None
    below: tuple[Level, ...] = ()  # what `found` still has to be lifted through: only the last answer is

    @property
    def assignment(self) -> Ints | None:
        """The best answer so far, one state for every variable; None when there is none."""
        if self.found is not None and self.below:
            self.found, self.below = lift(self.below, self.found), ()
        return self.found

    @assignment.setter
    def assignment(self, found: Ints | None) -> None:
        self.found, self.below = found, ()

    def closed(self, bound: float) -> bool:
        """Is the best answer good enough for a subproblem with this bound?"""
        if self.best == np.inf or bound == -np.inf:  # a share of infinity is no gap
            return False
        return self.best - bound <= max(self.gap * abs(bound), TOLERANCE * abs(self.best))

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline


def descend(
    graph: Graph, start: list[int] | None = None, *, table: float | None = None, work: float | None = None
) -> tuple[Level, Graph]:
    """Reduce, finish what fits (into tables of so many entries, so many in all), and fork the core that is left."""
    reduce(graph, start)
    done = eliminate(graph, table, work)
    rest = graph.fork()
    for part, _ in done:
        for v in part:
            rest.unary[v] = NONE
            rest.adj[v] = {}
    return Level(graph, tuple(f for _, f in done)), rest


def lift(levels: tuple[Level, ...], assignment: Ints) -> Ints:
    """From the last core's states to everybody's."""
    for level in reversed(levels):
        for finished in level.finished:
            read_off(level.graph, finished, assignment)
        backtrack(level.graph, assignment)
    return assignment


def offer(search: Search, levels: tuple[Level, ...], cost: float, assignment: Ints) -> None:
    if cost < search.best:
        search.best, search.found, search.below = cost, assignment, levels


def kept(rest: Graph, slacks: dict[int, Floats], most: float) -> tuple[Graph, list[int], int]:
    """The core with the states of at most so much slack, whom that touches, and how many states went."""
    small = rest.fork()
    touched: set[int] = set()
    dropped = 0
    for v, slack in slacks.items():
        keep = np.flatnonzero(slack <= most)
        if len(keep) < len(slack):
            dropped += len(slack) - len(keep)
            touched.update((v, *small.adj[v]))
            small.shrink(v, small.tables.subsets(keep))
    return small, sorted(touched), dropped


def solve_among(
    search: Search,
    levels: tuple[Level, ...],
    rest: Graph,
    slacks: dict[int, Floats],
    most: float,
    work: float,
) -> Graph | None:
    """Offer the best answer among the states of at most so much slack; the core that is left where that takes more
    `work` than this, None where there is no answer."""
    try:
        small, touched, _ = kept(rest, slacks, most)
        level, core = descend(small, touched, table=200_000, work=work)
    except Contradiction:
        return None
    if not core.core:
        offer(search, (*levels, level), core.offset, np.zeros(search.variables, dtype=np.int64))
    return core


def dive(
    search: Search, levels: tuple[Level, ...], rest: Graph, slacks: dict[int, Floats], bound: float
) -> float:
    """Look for an answer among the states of least slack: rounding decides one variable at a time, but
    three states a variable are mostly few enough to be solved together, exactly.

    Returns what is proved then: no answer among those, none that costs less than `bound` and their slack among others.
    """
    every = np.sort(np.concatenate(list(slacks.values())))
    proved = -np.inf
    for states in (FEW, 2 * FEW, 4 * FEW):
        at = min(states * len(slacks), len(every)) - 1
        core = solve_among(search, levels, rest, slacks, float(every[at]), 2_000_000)
        others = bound + float(every[at]) if at < len(every) - 1 else np.inf
        if core is None:
            proved = others
            continue  # too few states have no answer
        if not core.core:
            proved = min(core.offset, others)
        if core.core or search.closed(core.offset) or others == np.inf:
            break
    return proved


def tighten(
    search: Search,
    levels: tuple[Level, ...],
    rest: Graph,
    most: int,
    start: Start | None = None,
    layers: Layers | None = None,
) -> tuple[tuple[Level, ...], Graph | None, float, dict[int, Floats]]:
    """Bound a core and drop what the bound excludes, again and again until that stalls.

    Messages survive the dropping, and may come from a similar core (`start`) of its `layers`.
    Returns (levels, core or None when closed, bound, slack of the core's variables).
    """
    soon = 15 if start is None else 20  # rounds before the first dive
    # The share of states left at which the others are dropped: a new core costs as much as a dozen rounds on a short
    # one, but as few of a whole one, whose layers share their work. A start for a larger core is worth more rounds.
    drop = 0.05 if search.patient else 0.3 if layers else 0.1
    while True:
        core = rest.core
        if not core:
            offer(search, levels, rest.offset, np.zeros(search.variables, dtype=np.int64))
            return levels, None, rest.offset, {}
        chain = chain_of(rest, layers)
        if start is not None:
            start(rest, chain)
        # Where an answer is sought, if one is.
        local = functools.cache(functools.partial(local_of, rest, chain.variables))
        total = len(chain.unary)
        due = [(soon, 0.0)]  # rounds, or share of states left, at which a dive is worth it
        few = [False]  # whether few enough states are left to drop the others now
        proved = [-np.inf]  # by dives
        drop = min(0.3, max(drop, FEW * len(core) / total))

        def look(
            passed: Passed,
            hard: bool,
            rest: Graph = rest,
            chain: Chain = chain,
            local: Callable[[], Local] = local,
            levels: tuple[Level, ...] = levels,
            total: int = total,
            drop: float = drop,
            fresh: bool = start is None,
            due: list[tuple[int, float]] = due,
            few: list[bool] = few,
            proved: list[float] = proved,
        ) -> tuple[float, bool]:
            """Answers from the messages; the bound that would close, and whether to drop states now."""

            def left() -> float:
                room = search.best - passed.slack_bound
                return np.count_nonzero(passed.slack <= room) / total if room < np.inf else 1.0

            bound = passed.bound
            if not search.closed(bound) and (hard or fresh or search.best == np.inf):
                chosen = rounded(chain)
                target = bound + max(search.gap * abs(bound), TOLERANCE * abs(bound))
                effort = search.effort if hard else 0
                near = local()
                cost = improve(
                    near, chosen, search.rng, target=target, deadline=search.deadline, rounds=effort
                )
                if cost < min(search.best, near.offset + near.price):
                    offer(search, levels, cost, positions(rest, chain, chosen))
            share = left()
            worth = share > drop and (passed.passes >= due[0][0] or share <= due[0][1])
            if not search.closed(bound) and (hard or worth):
                slacks = passed.slack_of(chain)
                proved[0] = max(proved[0], dive(search, levels, rest, slacks, passed.slack_bound))
                # Another one is worth it when half as many states are left, or after as many rounds again.
                share = left()
                due[0] = 2 * passed.passes, 0.5 * share
            target = search.best - max(search.gap * abs(bound), TOLERANCE * abs(search.best))
            few[0] = share <= drop
            return target, few[0] or search.closed(proved[0])

        passed: Passed = pass_messages(
            rest, chain, target=np.inf, deadline=search.deadline, most=most, on_round=look
        )
        if not few[0] and not search.closed(proved[0]):
            look(passed, True)
        bound = max(passed.bound, proved[0])
        if search.patient and search.heard is None:
            search.heard = heard_in(rest, chain)
        slacks = passed.slack_of(chain)
        if search.closed(bound) or search.late:
            return levels, None if search.closed(bound) else rest, bound, slacks
        room = search.best - passed.slack_bound + TOLERANCE * abs(search.best)
        try:
            trimmed, touched, dropped = kept(rest, slacks, room)
            if dropped < 0.02 * total:
                return levels, rest, bound, slacks
            level, after = descend(trimmed, touched)
        except Contradiction:
            return levels, None, search.best, {}  # nothing cheaper than the best is left
        start = functools.partial(hear, heard=heard_in(rest, chain), before=rest)
        levels, rest, soon, drop = (*levels, level), after, 20, 0.1
        search.report(f"fixing: {dropped} of {total} states excluded, core {len(rest.core)} variables")


def branch(
    search: Search, levels: tuple[Level, ...], rest: Graph, bound: float, slack: dict[int, Floats]
) -> float:
    """Split the most undecided variable's states until closed or late; the bound proved."""
    count = 0
    heap: list[tuple] = [(bound, count, levels, rest, slack)]
    while heap:
        bound, _, levels, rest, slack = heap[0]
        if search.closed(bound) or search.late:
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
                child.shrink(v, child.tables.subsets(keep))
                level, core = descend(child, sorted({v, *near}))
                deeper, core, low, more = tighten(search, (*levels, level), core, 60)
            except Contradiction:
                continue
            count += 1
            if core is not None:
                heapq.heappush(heap, (max(low, bound), count, deeper, core, more))
        if count % 20 == 0:
            search.report(f"branching: {count} halves, {len(heap)} open")
    return min((h[0] for h in heap), default=search.best)


def rehearse(
    search: Search, levels: tuple[Level, ...], rest: Graph, most: int
) -> tuple[Start | None, Layers | None]:
    """Solve a short core of the layers that repeat; its answer is offered, its messages are a start."""
    folded = fold(rest) if len(rest.core) > 1000 else None
    if folded is None:
        return None, None
    inner = Search(search.deadline, search.gap, lambda _: None, search.variables, patient=True)
    try:
        tighten(inner, (), folded.short, most)
    except Contradiction:
        return None, folded.layers
    if inner.assignment is not None:
        assignment = inner.assignment.copy()
        assignment[folded.image[:, 0]] = assignment[folded.image[:, 1]]
        where = rest.tables.position
        chosen = {v: where(rest.states[v])[int(assignment[v])] for v in rest.core}
        offer(search, levels, energy_of(rest, chosen), assignment)
        mix(search, levels, rest, folded, assignment)
    search.report(f"folding: {len(folded.short.core)} variables stand for {len(rest.core)}")
    if inner.heard is None:
        return None, folded.layers
    return functools.partial(retell, folded=folded, heard=inner.heard), folded.layers


def mix(search: Search, levels: tuple[Level, ...], rest: Graph, folded: Folded, assignment: Ints) -> None:
    """Look for an answer in which every layer does what some layer of a short core's answer does.

    Layers that stand side by side there may differ (two equal mesh axes take turns), and one of them repeated is then
    a poor answer; but a few states a variable are solved together, exactly.
    """
    alike: dict[int, set[int]] = {}
    lost = set(folded.image[:, 0].tolist())
    for v, (place, _, _) in folded.layers.items():
        if v not in lost:
            alike.setdefault(place, set()).add(int(assignment[v]))
    if max(map(len, alike.values()), default=0) < 2:
        return
    where, slacks = rest.tables.position, {}
    for v in rest.core:
        place = where(rest.states[v])
        slacks[v] = np.ones(len(place))
        some = alike[folded.layers[v][0]] if v in folded.layers else ()
        slacks[v][[place[s] for s in (*some, int(assignment[v])) if s in place]] = 0.0
    solve_among(search, levels, rest, slacks, 0.0, 20_000_000)


def climb(
    search: Search, levels: tuple[Level, ...], graph: Graph, *, most: int = 400, split: bool = True
) -> None:
    """The whole ladder on a graph (which is reduced in place); the result is in ``search``."""
    variables, before = graph.given
    if not variables:
        variables, before = len(graph.core), sum(len(graph.tables.arrays[graph.unary[v]]) for v in graph.core)
    level, rest = descend(graph)
    search.report(
        f"reductions: {variables} variables, {before} states -> core of "
        f"{len(graph.core)} variables, {len(level.finished)} components finished exactly, "
        f"{len(rest.core)} variables left; {graph.tables.products} distinct products"
    )
    levels = (*levels, level)
    search.bound = rest.offset
    left = bool(rest.core)
    start, layers = rehearse(search, levels, rest, most)
    levels, core, bound, slack = tighten(search, levels, rest, most, start, layers)
    search.bound = min(bound, search.best)
    if left:
        search.report("messages and blocks")
    if split and core is not None and not search.late:
        search.bound = min(max(search.bound, branch(search, levels, core, bound, slack)), search.best)
        search.report("branching")
