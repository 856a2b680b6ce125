"""The integer program of a small core with memory (HiGHS, Huangfu and Hall 2018), memory rows added as violated.

Lagrangian prices prove a bound that mixes states; on a small network the gap that this leaves can be large, and random
moves do not close it. The program is the local polytope with integral states:

    minimise    sum of c_v(s) x_v(s) + sum of c_vw(s, t) y_vw(s, t)
    subject to  sum over s of x_v(s) = 1,
                sum over t of y_vw(s, t) = x_v(s),  sum over s of y_vw(s, t) = x_w(t),
                bytes at each key time <= limit,    x binary, y in [0, 1].

For the least peak the limit is a variable, and the objective. Where the rows of all key times are too many to write
down, those are added that the answer without them violates, until it violates none (cutting planes); the bound of a
program without some rows is a bound all the same. (Contest problem P: 7.7 GB and 51 s with all 40,875 times, 0.4 GB
and 27 s so.)

Example: states (cost 0, 8 bytes) and (cost 6, 2 bytes), limit 5: prices prove 3, this answers 6 and proves 6.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jshard._core.arrays import Floats, Ints
from jshard._search.integer_program import (
    FEASIBILITY,
    INFEASIBLE,
    SOLVED,
    MilpResult,
    Polytope,
    local_polytope,
    mixed_integer_program,
    num_columns,
)
from jshard._search.memory.budget_repair import BudgetedCore
from jshard._search.search_state import SearchState


# Columns times branching nodes: counted, so that the answer depends on the clock only where a node takes long.
_COLUMN_NODES = 200_000
_SECONDS = 30.0
# Of effort, for each pair of columns: programs of 5,000 to 10,000 columns took 4 to 20, most smaller ones fewer.
_ENTRIES_PER_PAIR = 5
MAX_ENTRIES = 2_000_000  # entries of all memory rows (some 100 MB) above which rows are added as violated
MAX_COLUMNS = 20_000  # beyond, the linear relaxation alone takes longer than the moves that it would replace


class IlpResult(NamedTuple):
    """What an integer program ended with: states of the core, a bound, and whether it was solved to the end."""

    states: list[int] | None
    bound: float
    solved: bool  # to HiGHS' tolerances


def solve_small_core(problem: BudgetedCore, search: SearchState, most: float = np.inf) -> IlpResult | None:
    """`solve_ilp` with a counted effort; None, and nothing done, without a gap, on a large core, or where that is spent.

    `most`: as there.
    """
    columns = num_columns(problem.core)
    if search.out_of_time or search.gap_closed(search.bound) or columns > MAX_COLUMNS:
        return None
    entries = float(_ENTRIES_PER_PAIR) * columns**2
    if entries > search.effort.limit - search.effort.spent:
        return None
    search.effort.spend(entries)
    if not problem.core.unary:  # nothing is left to choose
        peak = float(problem.memory.constant.max(initial=0.0))
        if np.isinf(problem.limit):
            return IlpResult([], peak, True)
        return (
            IlpResult([], problem.core.offset, True)
            if peak <= problem.limit
            else IlpResult(None, np.inf, True)
        )
    nodes = max(1, _COLUMN_NODES // max(1, columns))
    seconds = min(_SECONDS, 0.5 * (search.deadline - time.monotonic()))
    return solve_ilp(problem, search.gap, seconds, nodes, most)


def solve_ilp(
    problem: BudgetedCore, gap: float, seconds: float, nodes: int = 1 << 30, most: float = np.inf
) -> IlpResult:
    """The core states of least cost within the limit, or of least peak when there is no limit.

    Arguments:

    - `problem`: the core with its memory and limit (inf for none).
    - `gap`: relative gap between answer and bound that suffices.
    - `seconds`: time limit.
    - `nodes`: branching nodes at most.
    - `most`: a peak that is known, above which none is looked for; not used within a limit.

    The bound is inf where no states are within the limit, and `most` where none has a peak so low.
    """
    program = _Program.of(problem)
    memory, for_peak = problem.memory, program.for_peak
    times = np.arange(memory.num_times)
    if program.memory_entries() > MAX_ENTRIES:
        times = np.array([int(memory.constant.argmax())])
    until, best = time.monotonic() + seconds, -np.inf
    while True:
        result = program.solve(times, gap, max(0.1, until - time.monotonic()), nodes, most)
        if result.x is None:
            infeasible = result.status == INFEASIBLE
            nothing_below = most if for_peak else np.inf
            return IlpResult(None, nothing_below if infeasible else best, infeasible)
        scaled = program.unit * result.bound
        if not for_peak:
            scaled = problem.core.offset + program.cost_unit * result.bound
        best = max(best, scaled)
        states = program.polytope.states(result.x)
        limit = program.unit * float(result.x[-1]) if for_peak else problem.limit
        over = memory.live_bytes(states) - limit * (1 + FEASIBILITY)
        over[times] = 0.0
        if not (over > 0).any() or time.monotonic() > until:
            return IlpResult(states, best, result.status == SOLVED and not (over > 0).any())
        # The fullest time of every stretch that is over the limit.
        begins = np.flatnonzero(np.diff(over > 0, prepend=False) & (over > 0))
        fullest = [int(a + over[a:b].argmax()) for a, b in zip(begins, [*begins[1:], len(over)], strict=True)]
        times = np.union1d(times, fullest)


@dataclass(frozen=True)
class _Program:
    """The polytope of a core and the rows of its memory; the peak in units is the last column where there is no limit."""

    problem: BudgetedCore
    polytope: Polytope

    @property
    def first(self) -> Ints:
        """(n + 1,) column of each variable's first state."""
        return self.polytope.first

    @functools.cached_property
    def objective(self) -> Floats:
        """(columns,) what is minimised."""
        costs = self.polytope.objective
        return np.append(np.zeros(len(costs)), 1.0) if self.for_peak else costs

    @property
    def for_peak(self) -> bool:
        """Whether the peak is minimised: there is no limit."""
        return bool(np.isinf(self.problem.limit))

    @functools.cached_property
    def unit(self) -> float:
        """The bytes that memory rows are scaled by."""
        if not self.for_peak:
            return self.problem.limit
        amounts = (float(a.max()) for intervals in self.problem.intervals for _, _, a in intervals)
        largest = max(amounts, default=1.0) or 1.0
        return max(largest, float(self.problem.memory.constant.max(initial=0.0)))

    @functools.cached_property
    def cost_unit(self) -> float:
        """What the objective is scaled by."""
        return 1.0 if self.for_peak else float(self.objective.max(initial=0.0)) or 1.0

    @staticmethod
    def of(problem: BudgetedCore) -> _Program:
        """The program of a core."""
        return _Program(problem, local_polytope(problem.core))

    def memory_entries(self) -> int:
        """Entries of the memory rows of all key times."""
        return sum(
            (b - a) * int(np.count_nonzero(amount))
            for intervals in self.problem.intervals
            for a, b, amount in intervals
        )

    def memory_rows(self, times: Ints) -> Any:
        """Sparse (times, columns): varying bytes of the states at some times in units, less the peak where that is a
        column."""
        from scipy import sparse

        rows, columns, values = [np.zeros(0, int)], [np.zeros(0, int)], [np.zeros(0)]
        for v, intervals in enumerate(self.problem.intervals):
            for start, end, amount in intervals:
                nonzero = np.flatnonzero(amount)
                a, b = np.searchsorted(times, (start, end)).tolist()
                rows.append(np.repeat(np.arange(a, b), len(nonzero)))
                columns.append(np.tile(self.first[v] + nonzero, b - a))
                values.append(np.tile(amount[nonzero] / self.unit, b - a))
        if self.for_peak:
            rows.append(np.arange(len(times)))
            columns.append(np.full(len(times), len(self.objective) - 1))
            values.append(np.full(len(times), -1.0))
        at = np.concatenate(rows), np.concatenate(columns)
        shape = (len(times), len(self.objective))
        return sparse.coo_array((np.concatenate(values), at), shape=shape).tocsr()

    def solve(self, times: Ints, gap: float, seconds: float, nodes: int, most: float) -> MilpResult:
        """HiGHS' result with the memory rows of some times, and a peak of at most `most` bytes."""
        upper = np.ones(len(self.objective))
        if self.for_peak:
            # It rules out all states that hold more: the program of a step with two matrices took 0.08 s in place of 4.6.
            upper[-1] = most / self.unit * (1 + FEASIBILITY)
        room = (0.0 if self.for_peak else 1.0) - self.problem.memory.constant[times] / self.unit
        return mixed_integer_program(
            self.objective / self.cost_unit,
            self.polytope,
            upper,
            (self.memory_rows(times), room),
            {"time_limit": seconds, "mip_rel_gap": gap, "node_limit": nodes},
        )
