"""Answers inside a memory limit: repair, fill, and priced block moves.

Problem.  The cheapest assignment holds too much; a priced one is nearly right but a little over, or
wastes room.

Idea.  Repair: at the worst time, make the change that buys the missing bytes most cheaply; repeat.
Fill: make every change that saves cost and still fits. A change is one variable's, with those neighbours
that forbid it following (a weight that is cut makes the copy that its reader takes: two variables, neither
alone). Blocks: re-solve a random forest of variables exactly under the multipliers' prices, repair and fill
what that upset, keep it when cheaper.

Worked case.  Two variables, states (cost 0, 8 bytes) and (cost 1, 4 bytes), limit 12: repair changes one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from jshard._search.cost_network import Floats
from jshard._search.memory.key_times import CoreMemory
from jshard._search.primal.local_search import (
    CoreProblem,
    conditional_costs,
    energy,
    random_induced_forest,
    solve_forest,
)


_FOLLOWED = 4  # states whose neighbours would have to follow: how many are tried


@dataclass(frozen=True)
class BudgetedCore:
    """A core with its memory: per variable its members (start, end, bytes per state)."""

    core: CoreProblem
    memory: CoreMemory
    members: list[list[tuple[int, int, Floats]]]
    limit: float


def budgeted_core(local: CoreProblem, held: CoreMemory, limit: float) -> BudgetedCore:
    members: list[list[tuple[int, int, Floats]]] = [[] for _ in local.variables]
    for m, v in enumerate(held.owner.tolist()):
        amount = held.flat[held.offset[m] : held.offset[m + 1]]
        members[v].append((int(held.start[m]), int(held.end[m]), amount))
    return BudgetedCore(local, held, members, limit)


def update_profile(pack: BudgetedCore, profile: Floats, v: int, old: int, new: int) -> None:
    """Change the profile for v going from one state to another (in place)."""
    for a, b, amount in pack.members[v]:
        if amount[new] != amount[old]:
            profile[a:b] += amount[new] - amount[old]


Change = list[tuple[int, int]]  # (variable, new state), all made together


def follow_neighbours(pack: BudgetedCore, chosen: list[int], v: int, new: int) -> tuple[float, Change]:
    """What v's change costs when the neighbours that forbid it follow, each to its best state."""
    local = pack.core
    costs = conditional_costs(local, chosen, v)
    total, old = float(costs[new] - costs[chosen[v]]), chosen[v]
    changes: Change = [(v, new)]
    if costs[new] < local.infeasibility_penalty:
        return total, changes
    undo = [(v, old)]
    chosen[v] = new
    for w, table in local.neighbours[v]:
        if table[new, chosen[w]] >= local.infeasibility_penalty:
            costs = conditional_costs(local, chosen, w)
            best = int(costs.argmin())
            total += float(costs[best] - costs[chosen[w]])
            undo.append((w, chosen[w]))
            changes.append((w, best))
            chosen[w] = best
    for w, state in undo:
        chosen[w] = state
    return total, changes


def apply_change(pack: BudgetedCore, chosen: list[int], profile: Floats, changes: Change) -> None:
    """Carry out changes (in place)."""
    for w, new in changes:
        update_profile(pack, profile, w, chosen[w], new)
        chosen[w] = new


def fits(
    pack: BudgetedCore, profile: Floats, chosen: list[int], changes: Change, worse: bool = False
) -> bool:
    """Do changes keep every time within the limit (or, with `worse`, no further over it than it was)?"""
    grown = [m for w, new in changes for m in pack.members[w] if m[2][new] > m[2][chosen[w]]]
    if not grown:
        return True
    trial = profile.copy()
    for w, new in changes:
        update_profile(pack, trial, w, chosen[w], new)
    if worse:
        return all(bool((trial[a:b] <= np.maximum(profile[a:b], pack.limit)).all()) for a, b, _ in grown)
    return all(bool(trial[a:b].max() <= pack.limit) for a, b, _ in grown)


def repair(pack: BudgetedCore, chosen: list[int], profile: Floats, deadline: float, most: int = 300) -> bool:
    """Changes until nothing is over the limit (in place); whether that was reached.

    At the worst time all changes that free bytes there are ranked by cost per byte once, and made in
    that order until the time is within the limit; a change that others have made dearer is passed over.
    """
    limit = pack.limit
    for _ in range(most):
        worst = int(profile.argmax())
        if profile[worst] <= limit:
            return True
        if time.monotonic() > deadline:
            return False
        ranked = []
        for v, members in enumerate(pack.members):
            there = bytes_at(members, worst)
            if there is not None:
                found = _cheapest(pack, chosen, v, there, worst, profile[worst] - limit)
                if found:
                    ranked.append((found[0][0], v))
        ranked.sort()
        changed = False
        for expected, v in ranked:
            over = profile[worst] - limit
            if over <= 0:
                break
            there = bytes_at(pack.members[v], worst)
            assert there is not None
            found = _cheapest(pack, chosen, v, there, worst, over)
            if not found or (changed and found[0][0] > 2.0 * abs(expected) + 1e-12):
                continue
            for _, changes in found:
                if fits(pack, profile, chosen, changes, worse=True):
                    apply_change(pack, chosen, profile, changes)
                    changed = True
                    break
        if not changed:
            return False
    return False


def bytes_at(members: list[tuple[int, int, Floats]], when: int) -> Floats | None:
    """Bytes per state of a variable at a key time; None when it is not live then."""
    found: Floats | None = None
    for a, b, amount in members:
        if a <= when < b:
            found = amount if found is None else found + amount
    return found


def _cheapest(
    pack: BudgetedCore, chosen: list[int], v: int, there: Floats, worst: int, over: float
) -> list[tuple[float, Change]]:
    """Changes of v that free bytes at the worst time, cheapest per needed byte first."""
    s = chosen[v]
    gain = there[s] - there
    freeing = np.flatnonzero(gain > 0)
    if not len(freeing):
        return []
    costs = conditional_costs(pack.core, chosen, v)
    delta = costs - costs[s]
    alone = delta < pack.core.infeasibility_penalty / 2
    out: list[tuple[float, Change]] = [
        (float(delta[k] / min(gain[k], over)), [(v, k)]) for k in freeing[alone[freeing]].tolist()
    ]
    followed = freeing[~alone[freeing]]
    for k in followed[np.argsort(-gain[followed], kind="stable")][:_FOLLOWED].tolist():
        cost, changes = follow_neighbours(pack, chosen, v, k)
        freed = sum(_freed(pack, w, chosen[w], new, worst) for w, new in changes)
        if freed > 0 and cost < pack.core.infeasibility_penalty / 2:
            out.append((cost / min(freed, over), changes))
    out.sort(key=lambda found: found[0])
    return out


def _freed(pack: BudgetedCore, v: int, old: int, new: int, when: int) -> float:
    there = bytes_at(pack.members[v], when)
    return 0.0 if there is None else float(there[old] - there[new])


def greedy_descent(pack: BudgetedCore, chosen: list[int], profile: Floats, deadline: float) -> None:
    """Changes that save cost and fit (in place)."""
    local = pack.core
    queue = list(range(len(chosen)))
    waiting = bytearray(b"\1" * len(chosen))
    at = 0
    while at < len(queue):
        if at % 256 == 255 and time.monotonic() > deadline:
            return
        v = queue[at]
        at += 1
        waiting[v] = 0
        costs = conditional_costs(local, chosen, v)
        s = chosen[v]
        better = np.flatnonzero(costs < costs[s])
        trials: list[Change] = [[(v, k)] for k in better[np.argsort(costs[better], kind="stable")].tolist()]
        # A state that only its neighbours forbid may save cost when they follow.
        hidden = np.flatnonzero((costs >= local.infeasibility_penalty) & (local.unary[v] < local.unary[v][s]))
        for k in hidden[np.argsort(local.unary[v][hidden], kind="stable")][:_FOLLOWED].tolist():
            cost, changes = follow_neighbours(pack, chosen, v, k)
            if cost < 0:
                trials.append(changes)
        for changes in trials:
            if fits(pack, profile, chosen, changes):
                apply_change(pack, chosen, profile, changes)
                for u, _ in changes:
                    for w, _ in local.neighbours[u]:
                        if not waiting[w]:
                            waiting[w] = 1
                            queue.append(w)
                break


def repair_then_descend(pack: BudgetedCore, chosen: list[int], deadline: float) -> float:
    """Repair and fill; the cost, or inf when it could not be made to fit (in place)."""
    profile = pack.memory.live_bytes(chosen)
    if not repair(pack, chosen, profile, deadline):
        return np.inf
    greedy_descent(pack, chosen, profile, deadline)
    cost = energy(pack.core, chosen)
    return cost if cost < pack.core.offset + pack.core.infeasibility_penalty else np.inf


def priced_forest_search(
    pack: BudgetedCore,
    chosen: list[int],
    multipliers: Floats,
    rng: np.random.Generator,
    *,
    deadline: float,
    target: float,
    rounds: int,
) -> float:
    """Priced forest moves from a fitting assignment (in place); the cost reached."""
    local, held = pack.core, pack.memory
    best = energy(local, chosen)
    for _ in range(rounds):
        if time.monotonic() > deadline or best <= target:
            break
        scale = float(rng.choice([0.0, 0.5, 0.8, 1.0, 1.0, 1.25, 2.0]))
        flat = held.state_prices(multipliers * scale)
        priced = replace(
            local,
            unary=[
                u + flat[a : a + len(u)] for u, a in zip(local.unary, held.first[:-1].tolist(), strict=True)
            ],
        )
        size = int(rng.choice([10, 30, 100, 300, 1 << 30]))
        trial = list(chosen)
        solve_forest(priced, trial, random_induced_forest(local, rng, size))
        if trial == chosen:
            continue
        cost = repair_then_descend(pack, trial, deadline)
        if cost <= best:
            chosen[:] = trial
            best = cost
    return best
