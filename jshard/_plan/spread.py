"""Which products and convolutions may not be repeated: all that matter are cut over the whole mesh where they can be.

Problem.  Every collective has a latency and a small product takes almost no time, so the cheapest plan of a small
model lets every device compute all of it. That is right for a step alone on its machine and wrong for whoever asked
for eight devices: the model grows, its plan is kept, and energy is paid for every copy.

Idea.  A rule beside the cost: a product is cut into as many pieces as its dimensions and its own pins allow. Free
are the smallest ones, which together add at most a twentieth to the work of a device when each device does all of
them: a router, an adapter's inner products. So the plan's work is at most 1.05 of an even share, wherever
dimensions divide. The rule leaves candidates out before the search, so what the search proves, it proves of plans
that keep the rule. It is dropped where nothing else is possible, and where bytes are what counts (level 1).

>>> free_of([(1e9, 4), (2e6, 2), (1e6, 8)], 8)      # 12e6 of work, 7 times too often, beside 4e9: a fiftieth
2000000.0
>>> free_of([(1e9, 4), (2e6, 2), (1e6, 8)], 24)     # 23 times too often: only the smallest may be
1000000.0
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

import numpy as np

from jshard._cost.memory import PRODUCTS
from jshard._layout import MeshAxes
from jshard._numbers import Ints, numbered, packed
from jshard._plan.states import Interner
from jshard._program.graph import Operator, Program


# A device's work may be this much over an even share, for products that are too small to be cut.
_WASTE = 0.05


def never_repeated(program: Program, interner: Interner, form: Ints) -> frozenset[int]:
    """Products and convolutions that the rule is for; operators of one `form` are alike."""
    a = program.arrays
    products = np.flatnonzero(a.which(PRODUCTS))
    often = np.unique(a.repeat[products], return_inverse=True)[1]
    alike, some = numbered(packed(form[products], often))
    work = np.array([_work(program.operators[i], interner) for i in products[some].tolist()])[alike]
    free = free_of(Counter(work.tolist()).items(), interner.mesh.total)
    return frozenset(products[work > free].tolist())


def free_of(products: Collection[tuple[float, int]], devices: int) -> float:
    """Work up to which a product may be repeated; products are (work, how many), of equal ones all or none."""
    total = sum(w * n for w, n in products)
    repeated = free = 0.0
    for w, n in sorted(products):
        repeated += w * n
        if repeated * (devices - 1) > _WASTE * total:
            break
        free = w
    return free


def _work(op: Operator, interner: Interner) -> float:
    rule = interner.rule(op)[1]
    return rule.work * math.prod(rule.sizes) * op.repeat


def finest(axes: np.ndarray, mesh: MeshAxes) -> np.ndarray:
    """Which candidates, given by their axes, cut an operator into the most pieces."""
    pieces = np.where(axes >= 0, np.array(mesh.sizes, dtype=np.int64), 1).prod(axis=1)
    return pieces == pieces.max(initial=0)
