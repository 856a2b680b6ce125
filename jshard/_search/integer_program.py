"""The integer program of a small core without a limit (HiGHS, Huangfu and Hall 2018), where branching alone is long.

Problem.  Messages prove the bound of the local polytope at best. Where two large arrays are read row by row and column by
column, as the logits of a contrastive loss are, that is half of the cost, and hundreds of branches gain nothing.

Idea.  The same polytope with integral states as a program for HiGHS, whose cuts and probing close such gaps at the root:

    minimise    sum of c_v(s) x_v(s) + sum of c_vw(s, t) y_vw(s, t)
    subject to  sum over s of x_v(s) = 1,
                sum over t of y_vw(s, t) = x_v(s),  sum over s of y_vw(s, t) = x_w(t),
                x binary, y in [0, 1].

Example: the logits of 16,384 x 16,384 pairs, cut on two axes, are a core of 54 variables: 480 branches leave a gap of 96%,
HiGHS proves the same answer optimal at the root.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jshard._core.arrays import Floats, Ints
from jshard._search.primal.local_search import CoreProblem


MAX_COLUMNS = 40_000  # states and allowed pairs: beyond, the linear relaxation alone takes long
ENTRIES_PER_COLUMN = 40_000  # of effort: 27,000 columns take as long as 10^9 entries of messages
FEASIBILITY = 1e-6  # HiGHS keeps its constraints to so much
_SECONDS = 30.0
SOLVED, INFEASIBLE = 0, 2  # scipy's status


class IntegerSolution(NamedTuple):
    """States of the core by position (None: none found), a bound on the cost of all, and whether HiGHS came to its end.

    The bound is then short of the cost by HiGHS' tolerance alone.
    """

    states: list[int] | None
    bound: float
    solved: bool


class MilpResult(NamedTuple):
    """What HiGHS returns: its status, the columns (None: no solution found), and a bound less its tolerance."""

    status: int
    x: Floats | None
    bound: float


@dataclass(frozen=True)
class Polytope:
    """The local polytope of a core: columns (states, then allowed pairs), and rows that must equal the right side."""

    first: Ints  # (n + 1,) column of each variable's first state
    objective: Floats  # (columns,)
    consistency: Any  # sparse (rows, columns)
    right_side: Floats  # (rows,)

    def states(self, x: Floats) -> list[int]:
        """The states of a solution."""
        first = self.first.tolist()
        return [int(x[a:b].argmax()) for a, b in zip(first[:-1], first[1:], strict=True)]


def num_columns(core: CoreProblem) -> int:
    """States and allowed pairs of states of a core."""
    pairs = sum(
        int((t < core.infeasibility_penalty).sum())
        for v, edges in enumerate(core.neighbours)
        for w, t in edges
        if w > v
    )
    return pairs + sum(len(u) for u in core.unary)


def local_polytope(core: CoreProblem) -> Polytope:
    """The polytope of a core; forbidden pairs have no column."""
    from scipy import sparse  # here, so that `import jshard` stays light

    sizes = [len(u) for u in core.unary]
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
    cost: list[Floats] = [np.concatenate(core.unary)]
    rows, columns, values, right = [], [], [], []  # entries and right sides of equalities
    num_rows, count = 0, int(first[-1])

    def add(row: Ints, column: Ints, value: float) -> None:
        rows.append(row)
        columns.append(column)
        values.append(np.full(len(row), value))

    for v, n in enumerate(sizes):  # one state each
        add(np.full(n, num_rows), np.arange(first[v], first[v] + n), 1.0)
        right.append(np.ones(1))
        num_rows += 1
    for v, edges in enumerate(core.neighbours):
        for w, table in edges:
            if w < v:
                continue
            i, j = np.nonzero(table < core.infeasibility_penalty)
            pairs = count + np.arange(len(i))
            count += len(i)
            cost.append(table[i, j])
            for end, state in ((v, i), (w, j)):  # pairs sum up to the end's states
                add(num_rows + state, pairs, 1.0)
                own = np.arange(sizes[end])
                add(num_rows + own, first[end] + own, -1.0)
                right.append(np.zeros(sizes[end]))
                num_rows += sizes[end]
    at = np.concatenate(rows), np.concatenate(columns)
    consistency = sparse.coo_array((np.concatenate(values), at), shape=(num_rows, count)).tocsr()
    return Polytope(first, np.concatenate(cost), consistency, np.concatenate(right))


def mixed_integer_program(
    objective: Floats,
    polytope: Polytope,
    upper: Floats,
    at_most: tuple[Any, Floats] | None,
    options: dict[str, float],
) -> MilpResult:
    """HiGHS' result for a polytope whose states are integral.

    Arguments:

    - `objective`, `upper`: of the polytope's columns and perhaps more, the upper bounds; the lower ones are zero.
    - `at_most`: a sparse matrix of all columns and what its rows are at most.
    - `options`: of `scipy.optimize.milp`.
    """
    from scipy import optimize, sparse

    tools: Any = optimize  # whose stubs know bounds as single numbers only
    consistency, right, more = (
        polytope.consistency,
        polytope.right_side,
        len(objective) - len(polytope.objective),
    )
    if more:
        consistency = sparse.hstack([consistency, sparse.coo_array((len(right), more))]).tocsr()
    constraints = [tools.LinearConstraint(consistency, right, right)]
    if at_most is not None:
        constraints.append(tools.LinearConstraint(at_most[0], -np.inf, at_most[1]))
    integrality = np.arange(len(objective)) < polytope.first[-1]
    bounds = tools.Bounds(0.0, upper)
    result = tools.milp(
        objective, integrality=integrality, bounds=bounds, constraints=constraints, options=options
    )
    proved = -np.inf if result.mip_dual_bound is None else float(result.mip_dual_bound)
    # What HiGHS proves is short by its tolerance.
    return MilpResult(int(result.status), result.x, proved - FEASIBILITY * abs(proved))


def solve_integer_program(core: CoreProblem, gap: float, deadline: float) -> IntegerSolution:
    """The states of least cost of a core within a relative gap; `deadline` in seconds of the monotonic clock."""
    polytope = local_polytope(core)
    unit = float(polytope.objective.max(initial=0.0)) or 1.0
    seconds = max(0.1, min(_SECONDS, deadline - time.monotonic()))
    costs, options = polytope.objective / unit, {"mip_rel_gap": gap, "time_limit": seconds}
    result = mixed_integer_program(costs, polytope, np.ones(len(costs)), None, options)
    states = None if result.x is None else polytope.states(result.x)
    return IntegerSolution(states, core.offset + unit * result.bound, result.status == SOLVED)
