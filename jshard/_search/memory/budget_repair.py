"""Answers within a memory limit: greedy repair, greedy descent, and forest moves under Lagrangian prices.

The cheapest assignment holds too many bytes; one under Lagrangian prices is nearly right but a little over the limit,
or leaves bytes unused.

- Repair: at the worst time make the change that frees the missing bytes at least cost per byte; repeat.
- Descent: make every change that lowers the cost and fits.
- Forest moves: solve a random forest of variables exactly under the prices, repair and descend, keep what is cheaper.

A change is one variable's, together with the neighbours that forbid it otherwise: a weight that is sharded makes its
reader's copy smaller, which are two variables of which neither can change alone.

Example: two variables with states (cost 0, 8 bytes) and (cost 1, 4 bytes), limit 12: repair changes one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from jshard._core.arrays import Floats
from jshard._search.effort import Effort
from jshard._search.memory.key_times import CoreMemory
from jshard._search.primal.local_search import (
    CoreProblem,
    conditional_costs,
    energy,
    random_induced_forest,
    solve_forest,
)


_JOINT_CHANGES = 4  # states that forbidding neighbours would have to follow: how many are tried
_PRICE_SCALES = (0.0, 0.5, 0.8, 1.0, 1.0, 1.25, 2.0)  # of the prices in a forest move
_MOVE = 5  # visits of every variable that a move is counted as
_FOREST_SIZES = (10, 30, 100, 300, 1 << 30)

Interval = tuple[int, int, Floats]  # start, end (key times), bytes per state
Change = list[tuple[int, int]]  # (variable, new state), all made together


@dataclass(frozen=True)
class BudgetedCore:
    """A core with its memory and a limit."""

    core: CoreProblem
    memory: CoreMemory
    intervals: list[list[Interval]]  # of each variable
    limit: float  # bytes


def budgeted_core(core: CoreProblem, memory: CoreMemory, limit: float) -> BudgetedCore:
    """A core with its memory and a limit in bytes."""
    intervals: list[list[Interval]] = [[] for _ in core.variables]
    for m, v in enumerate(memory.owner.tolist()):
        amount = memory.amounts[memory.offset[m] : memory.offset[m + 1]]
        intervals[v].append((int(memory.start[m]), int(memory.end[m]), amount))
    return BudgetedCore(core, memory, intervals, limit)


def update_profile(problem: BudgetedCore, profile: Floats, v: int, old: int, new: int) -> None:
    """Change the live bytes for v going from one state to another (in place)."""
    for a, b, amount in problem.intervals[v]:
        if amount[new] != amount[old]:
            profile[a:b] += amount[new] - amount[old]


def follow_neighbours(problem: BudgetedCore, states: list[int], v: int, new: int) -> tuple[float, Change]:
    """What v's change costs when the neighbours that forbid it change too, each to its best state."""
    core = problem.core
    costs = conditional_costs(core, states, v)
    total, old = float(costs[new] - costs[states[v]]), states[v]
    changes: Change = [(v, new)]
    if costs[new] < core.infeasibility_penalty:
        return total, changes
    undo = [(v, old)]
    states[v] = new
    for w, table in core.neighbours[v]:
        if table[new, states[w]] >= core.infeasibility_penalty:
            costs = conditional_costs(core, states, w)
            best = int(costs.argmin())
            total += float(costs[best] - costs[states[w]])
            undo.append((w, states[w]))
            changes.append((w, best))
            states[w] = best
    for w, state in undo:
        states[w] = state
    return total, changes


def apply_change(problem: BudgetedCore, states: list[int], profile: Floats, changes: Change) -> None:
    """Make changes (states and live bytes in place)."""
    for w, new in changes:
        update_profile(problem, profile, w, states[w], new)
        states[w] = new


def _grown(problem: BudgetedCore, states: list[int], changes: Change) -> list[Interval]:
    """The intervals that changes make larger."""
    return [m for w, new in changes for m in problem.intervals[w] if m[2][new] > m[2][states[w]]]


def _changed_profile(problem: BudgetedCore, profile: Floats, states: list[int], changes: Change) -> Floats:
    trial = profile.copy()
    for w, new in changes:
        update_profile(problem, trial, w, states[w], new)
    return trial


def fits(problem: BudgetedCore, profile: Floats, states: list[int], changes: Change) -> bool:
    """Whether changes keep every time that they make fuller within the limit."""
    grown = _grown(problem, states, changes)
    if not grown:
        return True
    trial = _changed_profile(problem, profile, states, changes)
    return all(bool(trial[a:b].max() <= problem.limit) for a, b, _ in grown)


def exceeds_no_further(problem: BudgetedCore, profile: Floats, states: list[int], changes: Change) -> bool:
    """Whether changes keep every time within the limit or, where it is exceeded already, no further above it."""
    grown = _grown(problem, states, changes)
    if not grown:
        return True
    trial = _changed_profile(problem, profile, states, changes)
    return all(bool((trial[a:b] <= np.maximum(profile[a:b], problem.limit)).all()) for a, b, _ in grown)


def repair(
    problem: BudgetedCore, states: list[int], profile: Floats, deadline: float, rounds: int = 300
) -> bool:
    """Changes until no time is over the limit (in place); whether that was reached.

    At the worst time all changes that free bytes there are ranked by cost per byte once, and made in that order until
    the time is within the limit; a change that earlier ones have made dearer is skipped.
    """
    for _ in range(rounds):
        worst = int(profile.argmax())
        if profile[worst] <= problem.limit:
            return True
        if time.monotonic() > deadline or not _repair_time(problem, states, profile, worst):
            return False
    return False


def _repair_time(problem: BudgetedCore, states: list[int], profile: Floats, worst: int) -> bool:
    """Changes until a time is within the limit, or none is left (in place); whether any was made."""
    ranked = []
    for v in range(len(states)):
        changes = _freeing_changes(problem, states, v, worst, profile[worst] - problem.limit)
        if changes:
            ranked.append((changes[0][0], v))
    ranked.sort()
    changed = False
    for expected, v in ranked:
        over = profile[worst] - problem.limit
        if over <= 0:
            break
        candidates = _freeing_changes(problem, states, v, worst, over)
        if not candidates or (changed and candidates[0][0] > 2.0 * abs(expected) + 1e-12):
            continue
        for _, changes in candidates:
            if exceeds_no_further(problem, profile, states, changes):
                apply_change(problem, states, profile, changes)
                changed = True
                break
    return changed


def bytes_at(intervals: list[Interval], when: int) -> Floats | None:
    """Bytes per state of a variable at a key time; None when it is not live then."""
    total: Floats | None = None
    for a, b, amount in intervals:
        if a <= when < b:
            total = amount if total is None else total + amount
    return total


def _freeing_changes(
    problem: BudgetedCore, states: list[int], v: int, when: int, over: float
) -> list[tuple[float, Change]]:
    """(cost per needed byte, change) of v's changes that free bytes at a time, cheapest first."""
    amounts = bytes_at(problem.intervals[v], when)
    if amounts is None:
        return []
    core, s = problem.core, states[v]
    gain = amounts[s] - amounts
    freeing = np.flatnonzero(gain > 0)
    if not len(freeing):
        return []
    costs = conditional_costs(core, states, v)
    delta = costs - costs[s]
    alone = delta < core.infeasibility_penalty / 2
    out: list[tuple[float, Change]] = [
        (float(delta[k] / min(gain[k], over)), [(v, k)]) for k in freeing[alone[freeing]].tolist()
    ]
    joint = freeing[~alone[freeing]]
    for k in joint[np.argsort(-gain[joint], kind="stable")][:_JOINT_CHANGES].tolist():
        cost, changes = follow_neighbours(problem, states, v, k)
        freed = sum(_freed(problem, w, states[w], new, when) for w, new in changes)
        if freed > 0 and cost < core.infeasibility_penalty / 2:
            out.append((cost / min(freed, over), changes))
    out.sort(key=lambda change: change[0])
    return out


def _freed(problem: BudgetedCore, v: int, old: int, new: int, when: int) -> float:
    amounts = bytes_at(problem.intervals[v], when)
    return 0.0 if amounts is None else float(amounts[old] - amounts[new])


def greedy_descent(problem: BudgetedCore, states: list[int], profile: Floats, deadline: float) -> None:
    """Make changes that lower the cost and fit, until there are none (in place)."""
    queue = list(range(len(states)))
    waiting = bytearray(b"\1" * len(states))
    at = 0
    while at < len(queue):
        if at % 256 == 255 and time.monotonic() > deadline:
            return
        v = queue[at]
        at += 1
        waiting[v] = 0
        for changes in _descents(problem, states, v):
            if fits(problem, profile, states, changes):
                apply_change(problem, states, profile, changes)
                for u, _ in changes:
                    for w, _ in problem.core.neighbours[u]:
                        if not waiting[w]:
                            waiting[w] = 1
                            queue.append(w)
                break


def _descents(problem: BudgetedCore, states: list[int], v: int) -> list[Change]:
    """v's changes that lower the cost: alone, cheapest first, then together with the neighbours that forbid them."""
    core = problem.core
    costs = conditional_costs(core, states, v)
    s = states[v]
    better = np.flatnonzero(costs < costs[s])
    out: list[Change] = [[(v, k)] for k in better[np.argsort(costs[better], kind="stable")].tolist()]
    joint = np.flatnonzero((costs >= core.infeasibility_penalty) & (core.unary[v] < core.unary[v][s]))
    for k in joint[np.argsort(core.unary[v][joint], kind="stable")][:_JOINT_CHANGES].tolist():
        cost, changes = follow_neighbours(problem, states, v, k)
        if cost < 0:
            out.append(changes)
    return out


def repair_then_descend(problem: BudgetedCore, states: list[int], deadline: float) -> float:
    """Repair, then descend (in place); returns the cost, inf when the limit could not be kept."""
    profile = problem.memory.live_bytes(states)
    if not repair(problem, states, profile, deadline):
        return np.inf
    greedy_descent(problem, states, profile, deadline)
    cost = energy(problem.core, states)
    return cost if cost < problem.core.offset + problem.core.infeasibility_penalty else np.inf


def priced_forest_search(
    problem: BudgetedCore,
    states: list[int],
    multipliers: Floats,
    rng: np.random.Generator,
    *,
    deadline: float,
    effort: Effort,
    target: float,
    moves: int,
) -> float:
    """Forest moves under prices from an assignment within the limit (in place); returns the cost reached.

    Arguments:

    - `problem`: the core with its memory and limit.
    - `states`: the start, by position; replaced by the result.
    - `multipliers`: price of a byte at each key time.
    - `rng`: picks the forests and the prices' scales.
    - `deadline`: on the monotonic clock, in seconds.
    - `effort`: ends the moves when it is spent.
    - `target`: the cost that suffices.
    - `moves`: how many moves.
    """
    core, memory = problem.core, problem.memory
    best = energy(core, states)
    for _ in range(moves):
        if effort.exhausted or time.monotonic() > deadline or best <= target:
            break
        effort.spend(variables=_MOVE * len(states))
        prices = memory.state_prices(multipliers * float(rng.choice(_PRICE_SCALES)))
        offsets = memory.state_offsets[:-1].tolist()
        unary = [u + prices[a : a + len(u)] for u, a in zip(core.unary, offsets, strict=True)]
        size = int(rng.choice(_FOREST_SIZES))
        trial = list(states)
        solve_forest(replace(core, unary=unary), trial, random_induced_forest(core, rng, size))
        if trial == states:
            continue
        cost = repair_then_descend(problem, trial, deadline)
        if cost <= best:
            states[:] = trial
            best = cost
    return best
