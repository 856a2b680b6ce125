"""Variables that were eliminated many at a time, and how their states are found again.

A round is a set of variables of which no two are neighbours, each with at most two. Those of one kind, with equal
tables, whose neighbours are in equal states are in the same best state, so it is looked for once.

>>> from jshard._search.cost_network import build
>>> from jshard._search.exact.reduce_batched import early
>>> from jshard._search.exact.table_pool import Tables, quantum
>>> net = build([[0.0, 5.0], [3.0, 0.0], [0.0, 5.0]], [(0, 1, [[0, 1], [1, 0]]), (1, 2, [[0, 1], [1, 0]])])
>>> graph = early(net, Tables(quantum(net)), least=1)
>>> [r.variables.tolist() for r in graph.rounds], undone(graph.rounds, graph.tables, np.zeros(3, dtype=np.int64)).tolist()
([[0, 2], [1]], [0, 1, 0])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jshard._core.row_codes import first_occurrence_codes, row_codes
from jshard._search.cost_network import Ints
from jshard._search.exact.table_pool import TablePool


@dataclass(frozen=True)
class EliminationRound:
    """Variables eliminated together; a kind is (unary table, states left, edges' tables, neighbours' states left)."""

    variables: Ints  # (n,)
    neighbours: Ints  # (n, 2) neighbours, -1 for none
    record_index: Ints  # (n,) which of the kinds
    records: tuple[tuple[int, int, tuple[int, ...], tuple[int, ...]], ...]


def backtrack_rounds(rounds: Sequence[EliminationRound], tables: TablePool, assignment: Ints) -> Ints:
    """Fill in what was eliminated in rounds, from the last to the first (in place)."""
    arrays = tables.arrays
    for r in reversed(rounds):
        x = np.where(r.neighbours >= 0, assignment[r.neighbours], 0)
        alike, some = first_occurrence_codes(row_codes(r.record_index, *x.T))
        best = []
        for s in some:
            u, states, edges, subsets = r.records[r.record_index[s]]
            total = arrays[u]
            for e, subset, y in zip(edges, subsets, x[s].tolist(), strict=False):
                total = total + arrays[e][:, tables.subset_positions(subset)[y]]
            best.append(int(tables.subsets.arrays[states][int(total.argmin())]))
        assignment[r.variables] = np.array(best, dtype=np.int64)[alike]
    return assignment
