"""The price of repeated products: matrix products and convolutions that several devices compute redundantly.

Problem.  Every collective has a latency and a small product takes almost no time, so the fastest plan of a small model
lets every device compute all of it. That is right for one step on an idle machine and wrong for a user with eight
devices: the model grows, its plan is kept, and every copy costs energy.

Idea.  A price in the objective of levels 0 and 2, beside the seconds that repeated work takes: each second of a product's
work beyond the least that its dimensions and pins allow is charged `REPLICATION_PRICE` seconds. It is part of what is
searched, bounded, compared and printed, and `config={"replication_price": 0}` removes it. The smallest products have no
price, as long as they together add at most a twentieth to the work of a device when each device computes all of them: a
router, an adapter's inner products. With the price, the work of all plans in `benchmarks/` is at most 1.05 of an even
share, also of models so small that all their work takes less time than one collective.

>>> unpriced_work([(1e9, 4), (2e6, 2), (1e6, 8)], 8)      # 12e6 of work, 7 times too often, beside 4e9: a fiftieth
2000000.0
>>> unpriced_work([(1e9, 4), (2e6, 2), (1e6, 8)], 24)     # 23 times too often: only the smallest may be
1000000.0
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

import numpy as np

from jshard._core.arrays import Ints
from jshard._core.row_codes import first_occurrence_codes, row_codes
from jshard._network.candidates import CandidateCache
from jshard._program.graph import Operator, Program
from jshard._program.memory.unfusible import ALL_PRODUCTS


REPLICATION_PRICE = 1000.0
"""Seconds charged for a second of repeated product work; the small workloads of `benchmarks/` need some hundreds."""

# Share by which the work of a device may exceed an even one, for products that are too small to be partitioned.
_MAX_REDUNDANT_WORK = 0.05


def priced_products(program: Program, cache: CandidateCache, operator_class: Ints) -> frozenset[int]:
    """Products and convolutions whose repetition has a price; `operator_class` is the number of each operator's class."""
    a = program.use_def
    products = np.flatnonzero(a.has_primitive(ALL_PRODUCTS))
    repeat = np.unique(a.repeat[products], return_inverse=True)[1]
    classes, representatives = first_occurrence_codes(row_codes(operator_class[products], repeat))
    work = np.array([_work(program.operators[i], cache) for i in products[representatives].tolist()])[classes]
    free = unpriced_work(Counter(work.tolist()).items(), cache.mesh.total)
    return frozenset(products[work > free].tolist())


def unpriced_work(products: Collection[tuple[float, int]], devices: int) -> float:
    """The work of a product up to which its repetition has no price.

    Arguments:

    - `products`: (arithmetic operations of a product in all its runs, how many such products). Of equal products all or
        none are free.
    - `devices`: how many could compute each of them.
    """
    total = sum(w * n for w, n in products)
    repeated = free = 0.0
    for w, n in sorted(products):
        repeated += w * n
        if repeated * (devices - 1) > _MAX_REDUNDANT_WORK * total:
            break
        free = w
    return free


def _work(op: Operator, cache: CandidateCache) -> float:
    rule = cache.rule_of(op)[1]
    return rule.work * math.prod(rule.sizes) * op.repeat
