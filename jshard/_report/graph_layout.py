"""Layered graph drawing after Sugiyama, Tagawa and Toda (1981): rows by dependence, columns by the barycentre heuristic.

A node's row is one below the lowest of its predecessors; edges to earlier nodes, which close the loop of folded layers,
do not count. An argument is just above its first reader. Within a row, a few sweeps move each node towards the mean of
its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence


def assign_rows(
    count: int, edges: Sequence[tuple[int, int]], sources: frozenset[int] = frozenset()
) -> list[int]:
    """Row of each of `count` nodes, which are numbered in program order.

    >>> assign_rows(4, [(0, 1), (1, 2), (2, 1), (3, 2)], sources=frozenset([3]))
    [0, 1, 2, 1]
    """
    row = [0] * count
    for a, b in sorted(edges, key=lambda e: e[1]):
        if a < b and a not in sources:
            row[b] = max(row[b], row[a] + 1)
    for s in sources:
        row[s] = min((row[b] for a, b in edges if a == s), default=1) - 1
    lowest = min(row, default=0)
    return [r - lowest for r in row]


def assign_columns(
    row: Sequence[int], edges: Sequence[tuple[int, int]], step: float, sweeps: int = 12
) -> list[float]:
    """The horizontal position of each node, at least `step` apart within a row, none below zero.

    >>> assign_columns([0, 0, 1], [(0, 2), (1, 2)], 10.0)
    [0.0, 10.0, 5.0]
    """
    nodes_in: dict[int, list[int]] = {}
    for i, r in enumerate(row):
        nodes_in.setdefault(r, []).append(i)
    neighbours: list[list[int]] = [[] for _ in row]
    for a, b in edges:
        if a != b and abs(row[a] - row[b]) <= 3:  # longer edges would pull everything to the middle
            neighbours[a].append(b)
            neighbours[b].append(a)
    x = [0.0] * len(row)
    for same in nodes_in.values():
        for k, i in enumerate(same):
            x[i] = (k - (len(same) - 1) / 2) * step
    for sweep in range(sweeps):
        for r in sorted(nodes_in, reverse=bool(sweep % 2)):
            wanted = {
                i: sum(x[j] for j in neighbours[i]) / len(neighbours[i]) if neighbours[i] else x[i]
                for i in nodes_in[r]
            }
            order = sorted(nodes_in[r], key=lambda i: (wanted[i], i))
            placed: list[float] = []
            for i in order:
                placed.append(max(wanted[i], placed[-1] + step) if placed else wanted[i])
            shift = sum(p - wanted[i] for p, i in zip(placed, order, strict=True)) / len(order)
            for i, p in zip(order, placed, strict=True):
                x[i] = p - shift
    left = min(x, default=0.0)
    return [round(v - left, 1) for v in x]
