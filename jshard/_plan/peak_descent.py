"""A plan of lower peak by changes of single operators, each measured on its schedule.

Problem.  At level 1 a small program's peak is decided by a few tensors, and the network that estimates bytes misses some
of them (`_network/memory_network.py`): its best assignment may hold more in its schedule than another one.

Idea.  Descent (first improvement) over the operators that produce or read what is in memory at the peak: one takes
another state, the variables around it follow by their costs, and the peak of the schedule is counted. A schedule is only
made where the lower-bound memory network counts less for the assignment than the lowest peak so far.

Worked case.  A product of two cut matrices leaves a partial sum beside its all-reduced result at the peak; with its
operands gathered, which are smaller than the result, the peak is lower.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jshard._core.arrays import Ints
from jshard._plan.memory_ties import assignment_of_solution
from jshard._plan.ranked_search import COUNTED, ENTRIES, OPERATORS_SCHEDULED, least_peak
from jshard._plan.scheduled_solution import ROUNDING, ScheduledSolution, schedule_solution
from jshard._search import CostNetwork, Effort


_OPERATORS = 400  # of a program at most: on larger ones the estimate is near, and schedules take long
_LEAST_GAIN = 0.01  # of the cost, for which a plan is made to fit
_RADIUS = 2  # edges around an operator, whose variables follow it


def descend_peak(
    solution: ScheduledSolution, bounding: CostNetwork, effort: Effort, enough: float
) -> ScheduledSolution:
    """The solution, or one of lower peak that changes of single operators lead to.

    Arguments:

    - `bounding`: the lower-bound memory network of the same program.
    - `effort`: what schedules are charged to; nothing is tried once it is exhausted.
    - `enough`: bytes below which the peak need not be.
    """
    network = solution.network
    operators = len(network.program.operators)
    if solution.interrupted or operators > _OPERATORS:
        return solution
    done, tried = 0.0, set[bytes]()
    improved = True
    while improved and solution.peak > enough:
        improved = False
        for states in _changes(solution):
            if effort.exhausted or done >= OPERATORS_SCHEDULED:
                return solution
            key = states.tobytes()
            if key in tried:
                continue
            tried.add(key)
            lower = least_peak(bounding, states) < solution.peak * (1 - ROUNDING)
            share = operators * (COUNTED + (1.0 if lower else 0.0))
            done += share
            effort.spend(entries=ENTRIES * share)
            if not lower:
                continue
            other = schedule_solution(network, solution.request, states, solution.bound, solution.steps)
            if other.peak < solution.peak * (1 - ROUNDING):
                solution, improved = dataclasses.replace(other, peak_bound=solution.peak_bound), True
                break
    return solution


def cheaper_by_descent(
    best: ScheduledSolution,
    plans: Sequence[ScheduledSolution],
    limit: float,
    bounding: CostNetwork,
    effort: Effort,
) -> ScheduledSolution:
    """The best plan, or one that costs less to which changes lead of a plan that holds a little more than the limit.

    Arguments:

    - `best`: of least cost found within the limit in bytes, or of least peak.
    - `plans`: those found, of which the two of least peak above the limit are tried that cost less than `best`.
    - `bounding`, `effort`: as in `descend_peak`.
    """
    fits = best.peak <= limit
    near = [p for p in plans if p.peak > limit and (not fits or p.cost < best.cost * (1 - _LEAST_GAIN))]
    for plan in sorted(near, key=lambda p: p.peak)[:2]:
        lower = descend_peak(plan, bounding, effort, limit)
        if lower.peak <= limit and (best.peak > limit or lower.cost < best.cost):
            best = dataclasses.replace(lower, steps=(*best.steps, "a cheaper plan by changes of operators"))
    return best


def _changes(solution: ScheduledSolution) -> Iterator[Ints]:
    """Assignments in which one operator near what is held at the peak has another state."""
    network = solution.network
    base = _Costs(network.cost_network)
    states = assignment_of_solution(solution)
    for v in _near_peak(solution):
        for s in range(len(base.unary(v))):
            if s != states[v]:
                changed = base.following(states, v, s)
                if changed is not None:
                    yield changed


def _near_peak(solution: ScheduledSolution) -> list[int]:
    """The operators that produce or read the tensors held at the peak, those of large blocks first."""
    program = solution.network.program
    producers, readers = program.defs(), program.uses()
    found: dict[int, None] = {}
    for tensor, _, _ in sorted(solution.profile.held, key=lambda h: -h[1]):
        found[producers[tensor][0]] = None
        for op, _ in readers[tensor]:
            found[op] = None
    return [v for v in found if v < solution.network.cost_network.size]


class _Costs:
    """A cost network by variable."""

    def __init__(self, network: CostNetwork):
        self.network = network
        ends = network.edges
        self.edges_of: list[list[tuple[int, int, bool]]] = [[] for _ in range(network.size)]
        for e, (i, j) in enumerate(ends.tolist()):
            table = int(network.edge_table[e])
            self.edges_of[i].append((j, table, True))
            self.edges_of[j].append((i, table, False))

    def unary(self, v: int) -> np.ndarray:
        """(states,) costs of a variable alone."""
        return self.network.unary[int(self.network.node_table[v])]

    def given(self, v: int, states: Ints) -> np.ndarray:
        """(states,) costs of a variable, all others as they are."""
        costs = self.unary(v).copy()
        for u, table, rows in self.edges_of[v]:
            pairwise = self.network.pairwise[table]
            costs += pairwise[:, states[u]] if rows else pairwise[states[u]]
        return costs

    def following(self, states: Ints, v: int, s: int) -> Ints | None:
        """The assignment with another state of a variable, to which those around adapt; None if none is possible."""
        changed = states.copy()
        changed[v] = s
        seen, shell = {v}, [v]
        for _ in range(_RADIUS):
            shell = list(dict.fromkeys(u for w in shell for u, _, _ in self.edges_of[w] if u not in seen))
            seen.update(shell)
            for u in shell:
                costs = self.given(u, changed)
                best = int(costs.argmin())
                if costs[best] < costs[changed[u]]:
                    changed[u] = best
        possible = all(np.isfinite(self.given(u, changed)[changed[u]]) for u in seen)
        return changed if possible else None
