"""Greedy construction: variables one after the other, each in the state that is cheapest beside those before it.

Layers that repeat ask the same question many times: of equal tables and equal neighbours the answer is looked up.

>>> from jshard._search.cost_network import build
>>> net = build([[0.0, 3.0]] * 3, [(0, 1, [[9.0, 1.0], [0.0, 0.0]]), (1, 2, [[9.0, 1.0], [0.0, 0.0]])])
>>> greedy_assignment(net, range(3)).tolist()
[0, 1, 0]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jshard._core.arrays import Ints
from jshard._search.cost_network import CostNetwork


def greedy_assignment(network: CostNetwork, order: Sequence[int]) -> Ints:
    """An assignment of low cost, by one pass; it may contain a forbidden pair.

    Arguments:

    - `network`: its memory does not count.
    - `order`: every variable once.
    """
    place = np.empty(network.size, dtype=np.int64)
    place[np.array(order, dtype=np.int64)] = np.arange(network.size)
    edges = network.edges.reshape(-1, 2)
    forward = place[edges[:, 0]] < place[edges[:, 1]]
    earlier = np.where(forward, edges[:, 0], edges[:, 1]).tolist()
    later = np.where(forward, edges[:, 1], edges[:, 0]).tolist()
    before: list[list[tuple[int, int, bool]]] = [[] for _ in range(network.size)]
    for u, v, table, along in zip(earlier, later, network.edge_table.tolist(), forward.tolist(), strict=True):
        before[v].append((u, table, along))
    nodes = network.node_table.tolist()
    states = [0] * network.size
    known: dict[tuple, int] = {}
    for v in order:
        key = (nodes[v], *[(states[u], table, along) for u, table, along in before[v]])
        if key not in known:
            costs = network.unary[nodes[v]]
            for u, table, along in before[v]:
                pairwise = network.pairwise[table]
                costs = costs + (pairwise[states[u]] if along else pairwise[:, states[u]])
            known[key] = int(np.argmin(costs))
        states[v] = known[key]
    return np.array(states, dtype=np.int64)
