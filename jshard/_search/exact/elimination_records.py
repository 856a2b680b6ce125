"""Elimination records: eliminated variables, and back-substitution of their states (Bertele and Brioschi 1972).

An eliminated variable takes the state of least cost beside the states of its neighbours at elimination time, so
records are replayed from the last to the first. Variables eliminated one by one leave an `Elimination` each, those
eliminated many at a time an `EliminationRound`; both hold the tables in an `ArgminTables`.

>>> from jshard._search.cost_network import build
>>> from jshard._search.exact.reduce_batched import reduce_batched
>>> from jshard._search.exact.table_pool import TablePool, quantum
>>> net = build([[0.0, 5.0], [3.0, 0.0], [0.0, 5.0]], [(0, 1, [[0, 1], [1, 0]]), (1, 2, [[0, 1], [1, 0]])])
>>> reduced = reduce_batched(net, TablePool(quantum(net)), min_round=1)
>>> [r.variables.tolist() for r in reduced.elimination_rounds]
[[0, 2], [1]]
>>> backtrack_rounds(reduced.elimination_rounds, reduced.tables, np.zeros(3, dtype=np.int64)).tolist()
[0, 1, 0]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jshard._core.arrays import Ints
from jshard._core.row_codes import first_occurrence_codes, row_codes
from jshard._search.exact.table_pool import TablePool


class ArgminTables(NamedTuple):
    """Tables (by number) of a variable when it was eliminated: they decide its state once the neighbours' are known."""

    unary: int
    states: int  # subset of the original states that the tables' rows stand for
    edges: tuple[int, ...]  # one table per neighbour, the neighbour's states as columns
    neighbour_states: tuple[int, ...]  # subsets of the original states that the columns stand for

    def best_state(self, tables: TablePool, neighbours: Iterable[int]) -> int:
        """The original state of least cost beside the neighbours' original states (ties: the first)."""
        arrays = tables.arrays
        total = arrays[self.unary]
        for edge, subset, state in zip(self.edges, self.neighbour_states, neighbours, strict=True):
            total = total + arrays[edge][:, tables.subset_positions(subset)[state]]
        return int(tables.subsets.arrays[self.states][int(total.argmin())])


class Elimination(NamedTuple):
    """One eliminated variable."""

    variable: int
    neighbours: tuple[int, ...]
    argmin: ArgminTables
    contracted: bool = False  # merged into its only neighbour, whose state decides its own


@dataclass(frozen=True)
class EliminationRound:
    """Variables eliminated together: no two are neighbours, and each has at most two."""

    variables: Ints  # (n,)
    neighbours: Ints  # (n, 2), -1 for none
    record_index: Ints  # (n,) index into `records`
    records: tuple[ArgminTables, ...]  # the distinct ones


def backtrack_stack(stack: Sequence[Elimination], tables: TablePool, assignment: Ints) -> Ints:
    """Fill in the variables of a stack, last eliminated first (in place; returned for convenience)."""
    memo: dict[tuple, int] = {}
    states: list[int] = assignment.tolist()
    for variable, neighbours, argmin, _ in reversed(stack):
        beside = tuple([states[w] for w in neighbours])
        best = memo.get((argmin, beside))
        if best is None:
            best = memo[argmin, beside] = argmin.best_state(tables, beside)
        states[variable] = best
    assignment[:] = states
    return assignment


def backtrack_rounds(rounds: Sequence[EliminationRound], tables: TablePool, assignment: Ints) -> Ints:
    """Fill in the variables of rounds, last round first (in place; returned for convenience).

    Variables of one record whose neighbours' states are equal take one state, computed once.
    """
    for r in reversed(rounds):
        beside = np.where(r.neighbours >= 0, assignment[r.neighbours], 0)
        codes, representatives = first_occurrence_codes(row_codes(r.record_index, *beside.T))
        best = []
        for i in representatives:
            record = r.records[r.record_index[i]]
            best.append(record.best_state(tables, beside[i, : len(record.edges)].tolist()))
        assignment[r.variables] = np.array(best, dtype=np.int64)[codes]
    return assignment
