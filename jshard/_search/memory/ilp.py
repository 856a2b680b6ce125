"""Small cores with memory, solved to the end: an integer program for HiGHS.

Problem.  Prices prove a bound that mixes states; on a small network the gap this leaves can be large, and
moves at random do not close it.

Idea.  Write the core as an integer program: one 0/1 variable per state, one between 0 and 1 per allowed pair of
states of an edge, whose sums along either side are the states' variables; bytes at each key time within the limit.
For the least peak the limit is a variable, and the cost. scipy's HiGHS branches and gives an answer and a bound.
Where all times are too many to write down, those are added that the answer without them exceeds, until it keeps all;
a program that lacks some bounds as well. (Contest problem P: 7.7 GB and 51 s with all 40,875 times, 0.4 GB and 27 s so.)

Worked case.  States (cost 0, 8 bytes), (cost 6, 2 bytes), limit 5: prices prove 3, this answers 6 and proves 6.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np

from jshard._search.branch_and_bound import SearchState
from jshard._search.cost_network import Floats, Ints
from jshard._search.primal.budget_repair import BudgetedCore


_SOLVED, _INFEASIBLE = 0, 2  # scipy's status
_SLACK = 1e-6
# Columns times nodes of the branching: counted, so that the answer hangs on the clock only where a node takes long.
_NODES = 200_000
_SECONDS = 30.0
ENTRIES = 2_000_000  # bytes of a state at a time: some 100 MB
LARGEST = 20_000  # columns; beyond, the relaxation alone takes longer than the moves that it would replace


def num_columns(pack: BudgetedCore) -> int:
    """States and allowed pairs of states of a core."""
    local = pack.core
    pairs = sum(
        int((t < local.infeasibility_penalty).sum())
        for v, near in enumerate(local.neighbours)
        for w, t in near
        if w > v
    )
    return pairs + sum(len(u) for u in local.unary)


class IlpResult(NamedTuple):
    """What an integer program ended with: states of the core, a bound, and whether to the end (HiGHS' tolerances)."""

    chosen: list[int] | None
    bound: float
    solved: bool


def solve_small_core(pack: BudgetedCore, search: SearchState) -> IlpResult | None:
    """`solve_integer` with a counted effort; None, and nothing done, without a gap or on a large core."""
    wide = num_columns(pack)
    if search.out_of_time or search.closed(search.bound) or wide > LARGEST:
        return None
    if not pack.core.unary:  # nothing is left to choose
        fullest = float(pack.memory.constant.max(initial=0.0))
        if np.isinf(pack.limit):
            return IlpResult([], fullest, True)
        return (
            IlpResult([], pack.core.offset, True) if fullest <= pack.limit else IlpResult(None, np.inf, True)
        )
    nodes = max(1, _NODES // max(1, wide))
    return solve_ilp(pack, search.gap, min(_SECONDS, 0.5 * (search.deadline - time.monotonic())), nodes)


def solve_ilp(pack: BudgetedCore, gap: float, seconds: float, nodes: int = 1 << 30) -> IlpResult:
    """States of the core's variables, or None, and a bound on their cost, or on their peak when there is no limit.

    The bound is inf where no states keep the limit.
    """
    from scipy import optimize, sparse  # here, so that `import jshard` stays light

    tools: Any = optimize  # whose stubs know bounds as single numbers only

    local = pack.core
    sizes = [len(u) for u in local.unary]
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
    cost: list[Floats] = [np.concatenate(local.unary)]
    rows, cols, values, right = [], [], [], []  # equalities: entries and right sides
    count, wide = 0, int(first[-1])

    def add(row: Ints, col: Ints, value: float) -> None:
        rows.append(row)
        cols.append(col)
        values.append(np.full(len(row), value))

    for v, n in enumerate(sizes):
        add(np.full(n, count), np.arange(first[v], first[v] + n), 1.0)
        right.append(np.ones(1))
        count += 1
    for v, near in enumerate(local.neighbours):
        for w, table in near:
            if w < v:
                continue
            i, j = np.nonzero(table < local.infeasibility_penalty)
            here = wide + np.arange(len(i))
            wide += len(i)
            cost.append(table[i, j])
            for end, of in ((v, i), (w, j)):
                add(count + of, here, 1.0)
                add(count + np.arange(sizes[end]), first[end] + np.arange(sizes[end]), -1.0)
                right.append(np.zeros(sizes[end]))
                count += sizes[end]
    equal = sparse.coo_array(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(cols))), shape=(count, wide)
    ).tocsr()
    held, for_peak = pack.memory, np.isinf(pack.limit)
    unit = max([float(a.max()) for members in pack.members for _, _, a in members], default=1.0) or 1.0
    unit = max(unit, float(held.constant.max(initial=0.0))) if for_peak else pack.limit
    objective = np.concatenate(cost)
    dearest = float(objective.max(initial=0.0)) or 1.0
    if for_peak:  # one more column, the peak in units
        objective, wide, dearest = np.append(np.zeros(wide), 1.0), wide + 1, 1.0
    equal.resize((count, wide))
    highest = np.ones(wide)
    if for_peak:
        highest[-1] = np.inf
    sums, peak_column = np.concatenate(right), wide - 1

    def weight(some: Ints) -> Any:
        """Bytes of the states at some times, in units; less the peak where that is a column."""
        rows, states, amounts = [np.zeros(0, int)], [np.zeros(0, int)], [np.zeros(0)]
        for v, members in enumerate(pack.members):
            for a, b, amount in members:
                held_in = np.flatnonzero(amount)
                a, b = np.searchsorted(some, (a, b)).tolist()
                rows.append(np.repeat(np.arange(a, b), len(held_in)))
                states.append(np.tile(first[v] + held_in, b - a))
                amounts.append(np.tile(amount[held_in] / unit, b - a))
        if for_peak:
            rows.append(np.arange(len(some)))
            states.append(np.full(len(some), peak_column))
            amounts.append(np.full(len(some), -1.0))
        at = np.concatenate(rows), np.concatenate(states)
        return sparse.coo_array((np.concatenate(amounts), at), shape=(len(some), wide)).tocsr()

    entries = sum(
        (b - a) * int(np.count_nonzero(amount)) for members in pack.members for a, b, amount in members
    )
    some = np.arange(held.times)
    if entries > ENTRIES:
        some = np.array([int(held.constant.argmax())])
    until, best = time.monotonic() + seconds, -np.inf
    while True:
        found = tools.milp(
            objective / dearest,
            integrality=np.arange(wide) < first[-1],
            bounds=tools.Bounds(0.0, highest),
            constraints=[
                tools.LinearConstraint(equal, sums, sums),
                tools.LinearConstraint(weight(some), -np.inf, (0.0 if for_peak else 1.0) - held.constant[some] / unit),
            ],
            options={
                "time_limit": max(0.1, until - time.monotonic()), "mip_rel_gap": gap, "node_limit": nodes,
            },
        )  # fmt: skip
        if found.x is None:
            none = found.status == _INFEASIBLE
            return IlpResult(None, np.inf if none else best, none)
        # HiGHS keeps its constraints to 1e-6, so what it proves is that much less.
        bound = float(found.mip_dual_bound)
        bound -= _SLACK * abs(bound)
        best = max(best, unit * bound if for_peak else local.offset + dearest * bound)
        chosen = [int(found.x[first[v] : first[v + 1]].argmax()) for v in range(len(sizes))]
        over = held.live_bytes(chosen) - (unit * float(found.x[-1]) if for_peak else pack.limit) * (
            1 + _SLACK
        )
        over[some] = 0.0
        if not (over > 0).any() or time.monotonic() > until:
            return IlpResult(chosen, best, found.status == _SOLVED and not (over > 0).any())
        # The fullest time of every stretch that is over.
        begins = np.flatnonzero(np.diff(over > 0, prepend=False) & (over > 0))
        worst = [int(a + over[a:b].argmax()) for a, b in zip(begins, [*begins[1:], len(over)], strict=True)]
        some = np.union1d(some, worst)
