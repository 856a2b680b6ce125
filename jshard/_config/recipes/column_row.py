"""Which inner dimensions of a model are cut so that each weight is cut once, as many bytes of weights as possible.

Problem.  In a chain of products every dimension between two of them could be cut (the first product by columns, the
second by rows), but a weight between two such dimensions would be cut twice over the same devices. Megatron cuts every
other one (Shoeybi et al. 2019).

Idea.  A maximum weight independent set: dimensions that share a weight exclude each other, and each is worth the weights
that have it. A dimension that a normalisation goes over counts half, for every such reduction would need a sum over
devices. Solved exactly as an integer program by HiGHS; among equals, the dimensions earlier in the program.

>>> max_weight_independent_set(["ab", "bc", "cd"], {"a": 0.0, "b": 10.0, "c": 10.0, "d": 0.0})
('b',)
>>> max_weight_independent_set(["xy", "yz"], {"x": 1, "y": 1.5, "z": 1})
('x', 'z')
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import TypeVar

import numpy as np


T = TypeVar("T")


def max_weight_independent_set(cliques: Iterable[Iterable[T]], weights: Mapping[T, float]) -> tuple[T, ...]:
    """The nodes of most weight of which no two are in one of the cliques."""
    names = [n for n, w in weights.items() if w > 0]
    number = {n: i for i, n in enumerate(names)}
    pairs = {
        (a, b)
        for clique in cliques
        for a, b in itertools.combinations(sorted({number[n] for n in clique if n in number}), 2)
    }
    if not pairs:
        return tuple(names)
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    rows = np.repeat(np.arange(len(pairs)), 2)
    columns = np.array(sorted(pairs)).ravel()
    matrix = coo_array((np.ones(len(rows)), (rows, columns)), shape=(len(pairs), len(names)))
    value = np.array([weights[n] for n in names]) / max(weights.values())
    value += 1e-6 * (1 - np.arange(len(names)) / (2 * len(names)))
    found = milp(
        -value,
        integrality=np.ones(len(names)),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(matrix.tocsr(), -np.inf, 1),
    )
    return tuple(n for n, x in zip(names, found.x, strict=True) if x > 0.5)
