"""The price of repeated products: matrix products and convolutions that devices compute several times over.

Problem.  Every collective has a latency and a small product takes almost no time, so the quickest plan of a small
model lets every device compute all of it. That is right for a step alone on its machine and wrong for whoever asked
for eight devices: the model grows, its plan is kept, and energy is paid for every copy.

Idea.  A price in the objective of levels 0 and 2, beside the seconds that repeated work takes: each second of a
product's work beyond the least that its dimensions and pins allow counts `REPLICATION_PRICE` seconds. It is part of
what is searched, bounded, compared and printed, and `shard(replication_price=0)` takes it away. Free of it are the
smallest products, which together add at most a twentieth to the work of a device when each device does all of them: a
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

from jshard._core.row_codes import Ints, first_occurrence_codes, row_codes
from jshard._memory.hbm_traffic import PRODUCTS
from jshard._network.candidates import CandidateCache
from jshard._program.graph import Operator, Program


REPLICATION_PRICE = 1000.0
"""Seconds that a second of repeated product work counts; the small workloads of `benchmarks/` need some hundreds."""

# A device's work may be this much over an even share, for products that are too small to be cut.
_MAX_REDUNDANT_WORK = 0.05


def priced_products(program: Program, interner: CandidateCache, operator_class: Ints) -> frozenset[int]:
    """Products and convolutions whose repetition has a price; operators of one `form` are alike."""
    a = program.use_def
    products = np.flatnonzero(a.has_primitive(PRODUCTS))
    often = np.unique(a.repeat[products], return_inverse=True)[1]
    alike, some = first_occurrence_codes(row_codes(operator_class[products], often))
    work = np.array([_work(program.operators[i], interner) for i in products[some].tolist()])[alike]
    free = unpriced_work(Counter(work.tolist()).items(), interner.mesh.total)
    return frozenset(products[work > free].tolist())


def unpriced_work(products: Collection[tuple[float, int]], devices: int) -> float:
    """Work up to which a product may be repeated without a price; products are (work, how many).

    Of equal products all or none are free.
    """
    total = sum(w * n for w, n in products)
    repeated = free = 0.0
    for w, n in sorted(products):
        repeated += w * n
        if repeated * (devices - 1) > _MAX_REDUNDANT_WORK * total:
            break
        free = w
    return free


def _work(op: Operator, interner: CandidateCache) -> float:
    rule = interner.rule_of(op)[1]
    return rule.work * math.prod(rule.sizes) * op.repeat
