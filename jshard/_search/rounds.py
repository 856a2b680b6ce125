"""Variables that were eliminated many at a time, and how their states are found again.

A round is a set of variables of which no two are neighbours, each with at most two. Those of one kind, with equal
tables, whose neighbours are in equal states are in the same best state, so it is looked for once.

>>> from jshard._search.network import build
>>> from jshard._search.early import early
>>> from jshard._search.tables import Tables, quantum
>>> net = build([[0.0, 5.0], [3.0, 0.0], [0.0, 5.0]], [(0, 1, [[0, 1], [1, 0]]), (1, 2, [[0, 1], [1, 0]])])
>>> graph = early(net, Tables(quantum(net)), least=1)
>>> [r.variables.tolist() for r in graph.rounds], undone(graph.rounds, graph.tables, np.zeros(3, dtype=np.int64)).tolist()
([[0, 2], [1]], [0, 1, 0])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jshard._numbers import numbered, packed
from jshard._search.network import Ints
from jshard._search.tables import Tables


@dataclass(frozen=True)
class Round:
    """Variables eliminated together; a kind is (unary table, states left, edges' tables, neighbours' states left)."""

    variables: Ints  # (n,)
    near: Ints  # (n, 2) neighbours, -1 for none
    kind: Ints  # (n,) which of the kinds
    kinds: tuple[tuple[int, int, tuple[int, ...], tuple[int, ...]], ...]


def undone(rounds: Sequence[Round], tables: Tables, assignment: Ints) -> Ints:
    """Fill in what was eliminated in rounds, from the last to the first (in place)."""
    arrays = tables.arrays
    for r in reversed(rounds):
        x = np.where(r.near >= 0, assignment[r.near], 0)
        alike, some = numbered(packed(r.kind, *x.T))
        best = []
        for s in some:
            u, states, edges, subsets = r.kinds[r.kind[s]]
            total = arrays[u]
            for e, subset, y in zip(edges, subsets, x[s].tolist(), strict=False):
                total = total + arrays[e][:, tables.position(subset)[y]]
            best.append(int(tables.subsets.arrays[states][int(total.argmin())]))
        assignment[r.variables] = np.array(best, dtype=np.int64)[alike]
    return assignment
