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

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from jshard._search.bound import chain_of, pass_messages, positions, rounded
from jshard._search.eliminate import Finished, eliminate, read_off
from jshard._search.improve import improve, local_of
from jshard._search.network import Floats, Ints
from jshard._search.reduce import Contradiction, Graph, backtrack, reduce
from jshard._search.tables import NONE


TOLERANCE = 1e-9


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
    assignment: Ints | None = None
    bound: float = -np.inf
    effort: int = 20  # block moves per rounding
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(20250))

    def closed(self, bound: float) -> bool:
        """Is the best answer good enough for a subproblem with this bound?"""
        if self.best == np.inf:
            return False
        return self.best - bound <= max(self.gap * abs(bound), TOLERANCE * abs(self.best))

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline


def descend(graph: Graph, start: list[int] | None = None) -> tuple[Level, Graph]:
    """Reduce, finish what fits, and fork the core that is left."""
    reduce(graph, start)
    done = eliminate(graph)
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
        search.best = cost
        search.assignment = lift(levels, assignment)


def dive(
    search: Search, levels: tuple[Level, ...], rest: Graph, slacks: dict[int, Floats], bound: float
) -> None:
    """Look for an answer among the states within a part of the gap: rounding decides one variable at a
    time, but the reductions often finish such a cut-down core exactly."""
    # Without an answer, a tenth of the bound stands for the gap.
    room = search.best - bound if search.best < np.inf else 0.1 * abs(bound)
    for part in (0.3, 0.1, 0.03, 0.01, 0.001):
        small = rest.fork()
        touched: set[int] = set()
        try:
            for v, slack in slacks.items():
                keep = np.flatnonzero(slack <= part * room)
                if len(keep) < len(slack):
                    touched.update((v, *small.adj[v]))
                    small.shrink(v, small.tables.subsets(keep))
            level, core = descend(small, sorted(touched))
        except Contradiction:
            return  # a smaller part has no answer either
        if not core.core:
            assignment = np.zeros(search.variables, dtype=np.int64)
            offer(search, (*levels, level), core.offset, assignment)
            return  # exact for this part, so a smaller part has no better one


def tighten(
    search: Search, levels: tuple[Level, ...], rest: Graph, most: int
) -> tuple[tuple[Level, ...], Graph | None, float, dict[int, Floats]]:
    """Bound a core and drop what the bound excludes, again and again until that stalls.

    Returns (levels, core or None when closed, bound, slack of the core's variables).
    """
    while True:
        core = rest.core
        if not core:
            offer(search, levels, rest.offset, np.zeros(search.variables, dtype=np.int64))
            return levels, None, rest.offset, {}
        chain = chain_of(rest)
        local = local_of(rest, chain.variables)

        def try_rounding(
            bound: float, hard: bool, rest: Graph = rest, chain=chain, local=local, levels=levels
        ) -> float:
            if search.closed(bound):
                return bound
            chosen = rounded(chain)
            target = bound + max(search.gap * abs(bound), TOLERANCE * abs(bound))
            cost = improve(
                local,
                chosen,
                search.rng,
                target=target,
                deadline=search.deadline,
                rounds=search.effort if hard else 0,
            )
            if cost < min(search.best, local.offset + local.price):
                offer(search, levels, cost, positions(rest, chain, chosen))
            return search.best - max(search.gap * abs(bound), TOLERANCE * abs(search.best))

        passed = pass_messages(
            rest,
            chain,
            target=np.inf,
            deadline=search.deadline,
            most=most,
            on_round=try_rounding,
        )
        try_rounding(passed.bound, True)
        bound = passed.bound
        slacks = dict(zip(chain.variables, passed.slack, strict=True))
        if search.closed(bound) or search.late:
            return levels, None if search.closed(bound) else rest, bound, slacks
        dive(search, levels, rest, slacks, passed.slack_bound)
        if search.closed(bound):
            return levels, None, bound, slacks
        room = search.best - passed.slack_bound + TOLERANCE * abs(search.best)
        dropped, total = 0, 0
        trimmed = rest.fork()
        touched = set()
        try:
            for v, slack in slacks.items():
                total += len(slack)
                keep = np.flatnonzero(slack <= room)
                if len(keep) < len(slack):
                    dropped += len(slack) - len(keep)
                    touched.update((v, *trimmed.adj[v]))
                    trimmed.shrink(v, trimmed.tables.subsets(keep))
            if dropped < 0.02 * total:
                return levels, rest, bound, slacks
            level, rest = descend(trimmed, sorted(touched))
        except Contradiction:
            return levels, None, search.best, {}  # nothing cheaper than the best is left
        levels = (*levels, level)
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


def climb(
    search: Search, levels: tuple[Level, ...], graph: Graph, *, most: int = 400, split: bool = True
) -> None:
    """The whole ladder on a graph (which is reduced in place); the result is in ``search``."""
    before = sum(len(graph.tables.arrays[u]) for u in graph.unary if u != NONE)
    variables = len(graph.core)
    level, rest = descend(graph)
    search.report(
        f"reductions: {variables} variables, {before} states -> core of "
        f"{len(graph.core)} variables, {len(level.finished)} components finished exactly, "
        f"{len(rest.core)} variables left; {graph.tables.products} distinct products"
    )
    levels = (*levels, level)
    search.bound = rest.offset
    left = bool(rest.core)
    levels, core, bound, slack = tighten(search, levels, rest, most)
    search.bound = min(bound, search.best)
    if left:
        search.report("messages and blocks")
    if split and core is not None and not search.late:
        search.bound = min(max(search.bound, branch(search, levels, core, bound, slack)), search.best)
        search.report("branching")
