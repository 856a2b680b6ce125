"""Tie breaking: among assignments of equal cost, the one that compilers handle better.

**Sums are completed after a product's transposition, not before.** The gradient of a weight is often a product and
then a transposition. A compiler writes the product in the transposed order at once, unless a collective stands between
the two: then it makes the transposition a change of the array's order in memory, which spreads to the new weight and
ends in copies of it.

**State stays sharded between calls, and is gathered where it is read, rather than gathered when it is written.**
The bytes are the same. But new state is written over the donated one, and the result of a collective is first written
elsewhere and then copied; and gathered state takes memory between the calls.

In the step of an MLP with two weights of 134 MB on 8 TPUs v5e, the first saves 0.9 of 33.8 ms of compute by the
compiler's own count and the second 2.3 ms.

A change is made only if the cost of its variables, with their edges, does not rise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jshard._core.layout import Layout
from jshard._network.build import PlanningNetwork
from jshard._network.candidates import TensorLayouts


def break_ties(
    problem: PlanningNetwork, assignment: np.ndarray, ties: Sequence[tuple[int, int]]
) -> np.ndarray:
    """The assignment after all changes that cost nothing; the same object if there are none.

    `ties` are the (output operator, input operator) pairs of state that is passed from call to call.
    """
    return _TieBreaker(problem, assignment).run(ties)


class _TieBreaker:
    """Tries changes of an assignment; used once."""

    def __init__(self, problem: PlanningNetwork, assignment: np.ndarray):
        self.problem, self.assignment = problem, assignment
        self.edges: dict[int, list[int]] = {}
        for e, pair in enumerate(problem.cost_network.edges.tolist()):
            for v in pair:
                self.edges.setdefault(v, []).append(e)

    def run(self, ties: Sequence[tuple[int, int]]) -> np.ndarray:
        for v in sorted(self.problem.kernels.fused_transposes):
            self.defer_sum_past_transpose(v)
        for out, inp in ties:
            self.keep_state_sharded(out, inp)
        return self.assignment

    def defer_sum_past_transpose(self, v: int) -> None:
        """Let a transposition take a partial sum, which is completed after it."""
        states = self.problem.candidates[v]
        tensor = self.problem.program.operators[v].operands[0]
        assert isinstance(tensor, int)  # the result of a product
        maker, k = self.problem.program.defs()[tensor]
        made = self.problem.candidates[maker].results[k].layout(int(self.assignment[maker]))
        if made.partial and states.operands[0].layout(int(self.assignment[v])).partial != made.partial:
            through = _state_of_layout(states.operands[0], made)
            if through is not None:
                self.change_if_free({v: through})

    def keep_state_sharded(self, out: int, inp: int) -> None:
        """Return new state as its producer shards it, and take the argument in that layout."""
        problem = self.problem
        tensor = problem.program.operators[out].operands[0]
        if not isinstance(tensor, int):
            return
        variable, _ = problem.program.defs()[tensor]
        made = (
            problem.candidates[variable].results[0]
            if len(problem.candidates[variable].results) == 1
            else None
        )
        if tensor in problem.relay_variable:
            variable, made = problem.relay_variable[tensor], problem.relays[tensor]
        if made is None:
            return
        produced = made.layout(int(self.assignment[variable]))
        returned = problem.candidates[out].operands[0].layout(int(self.assignment[out]))
        if produced.partial or produced == returned or not _shards_at_least(produced, returned):
            return
        a, b = (
            _state_of_layout(problem.candidates[out].operands[0], produced),
            _state_of_layout(problem.candidates[inp].results[0], produced),
        )
        if a is not None and b is not None:
            self.change_if_free({out: a, inp: b})

    def change_if_free(self, to: Mapping[int, int]) -> None:
        changed = self.assignment.copy()
        for v, state in to.items():
            changed[v] = state
        if self.cost(changed, to) <= self.cost(self.assignment, to) * (1 + 1e-9):
            self.assignment = changed

    def cost(self, assignment: np.ndarray, variables: Mapping[int, int]) -> float:
        """Cost of some variables, with their edges."""
        network = self.problem.cost_network
        total = sum(float(network.unary[network.node_table[v]][assignment[v]]) for v in variables)
        for e in {e for v in variables for e in self.edges.get(v, ())}:
            i, j = network.edges[e]
            total += float(network.pairwise[network.edge_table[e]][assignment[i], assignment[j]])
        return total


def _state_of_layout(tensor: TensorLayouts, layout: Layout) -> int | None:
    """The first state with a layout; None if there is none."""
    return next((s for s in range(len(tensor.of_state)) if tensor.layout(s) == layout), None)


def _shards_at_least(a: Layout, b: Layout) -> bool:
    """Whether `a` shards over all axes that `b` shards over."""
    return set(a.axes) >= set(b.axes)
