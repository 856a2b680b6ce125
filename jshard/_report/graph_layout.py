"""Where the nodes of a graph go on paper: rows by dependence, columns near what they are joined to.

A node's row is one below the lowest node it reads (edges to earlier nodes, which close the loop of alike layers,
do not count); an argument stands just above its first reader. Within a row, a few sweeps move each node towards
the mean of its neighbours (Sugiyama's method, with the barycentre heuristic).
"""

from __future__ import annotations

from collections.abc import Sequence


def assign_rows(
    count: int, edges: Sequence[tuple[int, int]], sources: frozenset[int] = frozenset()
) -> list[int]:
    """Row of each of `count` nodes, which are numbered in program order.

    >>> rows(4, [(0, 1), (1, 2), (2, 1), (3, 2)], sources=frozenset([3]))
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
    """Horizontal place of each node, at least `step` apart within a row, none below zero.

    >>> columns([0, 0, 1], [(0, 2), (1, 2)], 10.0)
    [0.0, 10.0, 5.0]
    """
    levels: dict[int, list[int]] = {}
    for i, r in enumerate(row):
        levels.setdefault(r, []).append(i)
    near: list[list[int]] = [[] for _ in row]
    for a, b in edges:
        if a != b and abs(row[a] - row[b]) <= 3:  # far edges would only pull everything to the middle
            near[a].append(b)
            near[b].append(a)
    x = [0.0] * len(row)
    for same in levels.values():
        for k, i in enumerate(same):
            x[i] = (k - (len(same) - 1) / 2) * step
    for sweep in range(sweeps):
        for r in sorted(levels, reverse=bool(sweep % 2)):
            wanted = {i: sum(x[j] for j in near[i]) / len(near[i]) if near[i] else x[i] for i in levels[r]}
            order = sorted(levels[r], key=lambda i: (wanted[i], i))
            placed: list[float] = []
            for i in order:
                placed.append(max(wanted[i], placed[-1] + step) if placed else wanted[i])
            shift = sum(p - wanted[i] for p, i in zip(placed, order, strict=True)) / len(order)
            for i, p in zip(order, placed, strict=True):
                x[i] = p - shift
    left = min(x, default=0.0)
    return [round(v - left, 1) for v in x]
