"""Integer programs of the states of least reduced cost of a core with memory (kernel search, Angelelli et al. 2010).

Problem.  The integer program of a whole core (`ilp.py`) of 12,000 columns and more takes HiGHS up to half a minute, much of
it on states that no good answer has.

Idea.  Under prices on memory, messages bound every state: an assignment within the limit that uses it costs at least the
dual's bound and the state's reduced cost. States above the best answer's cost are excluded (reduced-cost fixing, Dantzig,
Fulkerson and Johnson 1954). Of the others, as many of least reduced cost as a small program holds are kept, and solved.
What is left out costs at least the bound and the least reduced cost left out, so that the smaller of that and the program's
bound holds for every assignment.

Example: two states (cost 0, 8 bytes) and (cost 6, 2 bytes), limit 5: at the price 1 their reduced costs are 0; a third of
cost 20 and 2 bytes has 20 + 2 - 8 = 14 and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jshard._core.arrays import Bools, Floats, Ints
from jshard._search.dual.message_layout import build_message_layout
from jshard._search.dual.trws import trws
from jshard._search.integer_program import num_columns
from jshard._search.memory.budget_repair import BudgetedCore, budgeted_core
from jshard._search.memory.key_times import CoreMemory
from jshard._search.memory.reduced_problem import ReducedProblem, priced_core
from jshard._search.primal.local_search import CoreProblem
from jshard._search.search_state import SearchState


# Of the programs' states and pairs. A training step of a GAN on 2x4 near its least peak: with 4,000 a program took 0.2 s and
# gained nothing, with 6,000 some 1 s and 4%, with 8,000 some 8 s and as much. With 9,000 the plan took 60 s in
# place of 10, at 6% less cost.
RESTRICTED_COLUMNS = 6000
_MESSAGE_ROUNDS = 40


@dataclass(frozen=True)
class StateBounds:
    """Bounds on the cost of assignments within the limit by the states they use: `base` and the reduced cost."""

    base: float
    reduced_costs: tuple[Floats, ...]  # of each variable's states

    def kept(self, most: float, answer: Sequence[int]) -> list[Ints]:
        """Of each variable the states whose reduced cost is at most `most`, and that of an answer."""
        return [
            np.flatnonzero((costs <= most) | (np.arange(len(costs)) == s))
            for costs, s in zip(self.reduced_costs, answer, strict=True)
        ]

    def least_of_others(self, kept: Sequence[Ints]) -> float:
        """The least cost of an assignment that uses a state which is not kept; inf where all are."""
        least = np.inf
        for costs, states in zip(self.reduced_costs, kept, strict=True):
            left: Bools = np.ones(len(costs), dtype=bool)
            left[states] = False
            least = min(least, float(costs[left].min(initial=np.inf)))
        return self.base + least


def state_bounds(
    problem: ReducedProblem, prices: Floats, limit: float, search: SearchState
) -> tuple[StateBounds, float]:
    """The bounds of a core's states under prices per byte at each key time, by messages, and that of every assignment.

    `search` gives the deadline and the effort.
    """
    graph = priced_core(problem, prices)
    layout = build_message_layout(graph)
    dual = trws(
        graph,
        layout,
        target=np.inf,
        deadline=search.deadline,
        effort=search.effort,
        max_rounds=_MESSAGE_ROUNDS,
    )
    unused = float(prices @ (problem.memory.constant - limit))  # what the states are not charged for
    by_variable = dual.reduced_costs_by_variable(layout)
    reduced_costs = tuple(by_variable[v] for v in graph.core)
    return StateBounds(dual.reduced_cost_bound + unused, reduced_costs), dual.bound + unused


def restricted_core(problem: BudgetedCore, kept: Sequence[Ints]) -> BudgetedCore:
    """The core of some states of each variable, with its memory and limit."""
    return budgeted_core(
        _restricted_problem(problem.core, kept), _restricted_memory(problem.memory, kept), problem.limit
    )


def _restricted_problem(core: CoreProblem, kept: Sequence[Ints]) -> CoreProblem:
    return replace(
        core,
        unary=[costs[states] for costs, states in zip(core.unary, kept, strict=True)],
        neighbours=[
            [(w, table[np.ix_(kept[v], kept[w])]) for w, table in edges]
            for v, edges in enumerate(core.neighbours)
        ],
    )


def _restricted_memory(memory: CoreMemory, kept: Sequence[Ints]) -> CoreMemory:
    ranges = zip(memory.owner.tolist(), memory.offset[:-1], memory.offset[1:], strict=True)
    amounts = [memory.amounts[a:b][kept[v]] for v, a, b in ranges]
    sizes = [len(states) for states in kept]
    return CoreMemory.of(memory.owner, memory.start, memory.end, amounts, sizes, memory.constant)


def largest_restriction(
    problem: BudgetedCore, bounds: StateBounds, answer: Sequence[int], most: float, columns: int
) -> list[Ints]:
    """The states of least reduced cost, and those of an answer, whose integer program has at most so many columns.

    States of a reduced cost above `most` are left out in any case.
    """
    ascending = np.unique(np.concatenate(bounds.reduced_costs))
    ascending = ascending[ascending <= most]
    low, high = -1, len(ascending) - 1  # bisection: few enough; perhaps too many
    while low < high:
        middle = (low + high + 1) // 2
        kept = bounds.kept(float(ascending[middle]), answer)
        if num_columns(_restricted_problem(problem.core, kept)) <= columns:
            low = middle
        else:
            high = middle - 1
    return bounds.kept(float(ascending[low]) if low >= 0 else -np.inf, answer)
