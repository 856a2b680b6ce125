"""Random cost networks of several shapes, and the least cost of all their assignments."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from jshard._search import build, evaluate


def random_network(seed: int, memory: bool = False, most: int = 7):
    """Fewer than `most` variables of up to four states, with ties or without; `memory` adds intervals and a limit."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, most))
    sizes = rng.integers(1, 5, n)
    whole = rng.random() < 0.5  # whole numbers make ties, fractions make rounding
    forbid = rng.choice([0.0, 0.1, 0.3])

    def table(*shape):
        t = rng.integers(0, 6, shape).astype(float) if whole else rng.random(shape) * 7
        t[rng.random(shape) < forbid] = np.inf
        return t

    edges = []
    for _ in range(int(rng.integers(0, 2 * n + 1))):
        i, j = (int(v) for v in rng.integers(0, n, 2))
        edges.append((i, j, table(sizes[i], sizes[j])))
    if not memory:
        return build([table(k) for k in sizes], edges)
    start = rng.integers(0, 5, n)
    network = build(
        [table(k) for k in sizes],
        edges,
        intervals=np.stack([start, start + rng.integers(0, 4, n)], axis=1),
        usages=[rng.integers(0, 9, k).astype(float) for k in sizes],
        limit=float(rng.integers(4, 25)),
    )
    assert network.memory is not None
    # Some hold something else at another time, or besides.
    held, more = network.memory, rng.integers(0, n, int(rng.integers(0, 3)))
    start = rng.integers(0, 6, len(more))
    return dataclasses.replace(
        network,
        memory=dataclasses.replace(
            held,
            intervals=np.concatenate(
                [held.intervals, np.stack([start, start + rng.integers(0, 3, len(more))], 1)]
            ),
            usage_tables=(*held.usage_tables, *(rng.integers(0, 6, sizes[v]).astype(float) for v in more)),
            interval_variable=np.concatenate([held.interval_variable, more]),
            interval_table=np.concatenate(
                [held.interval_table, len(held.usage_tables) + np.arange(len(more))]
            ),
        ),
    )


def brute_force(network, allowed=lambda x: True) -> float:
    """The least cost of all allowed assignments; inf where there is none."""
    every = itertools.product(*(range(network.num_states(v)) for v in range(network.size)))
    return min((evaluate(network, x) for x in every if allowed(x)), default=np.inf)


def hard_core(seed: int, n: int = 7, k: int = 4):
    """A complete graph: nothing reduces, so messages, local search and branching have to work."""
    rng = np.random.default_rng(seed)
    unaries = [rng.random(k) for _ in range(n)]
    edges = [(i, j, rng.random((k, k)) * 3) for i in range(n) for j in range(i)]
    return build(unaries, edges)


def layers(count: int, seed: int = 0, k: int = 6, ring: bool = False):
    """Identical layers of four variables with a skip edge, one after the other."""
    rng = np.random.default_rng(seed)
    u = [rng.random(k) for _ in range(4)]
    e = [rng.random((k, k)) for _ in range(5)]
    unaries, edges = [], []
    for layer in range(count):
        at = 4 * layer
        unaries += u
        edges += [(at, at + 1, e[0]), (at + 1, at + 2, e[1]), (at + 2, at + 3, e[2])]
        edges.append((at, at + 3, e[3]))
        if layer + 1 < count:
            edges.append((at + 3, at + 4, e[4]))
        elif ring:
            edges.append((at + 3, 0, e[4]))
    return build(unaries, edges)
