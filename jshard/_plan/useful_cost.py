"""The end of a search whose plan would cost more than one that is known, of another program for the same call.

Pipelines are compared by planning a program each. Once one plan is known, a search ends as soon as a bound on its own plans
is not below that plan's cost: first by each operator alone, then without a memory budget, then within it.

>>> import numpy as np
>>> from jshard._search.cost_network import build
>>> net = build([[4.0, 1.0], [0.0, 2.0]], [(0, 1, [[0.0, 3.0], [5.0, 6.0]])])
>>> least_conceivable_cost(net)
1.0
>>> check_useful(1.0, most=2.0)
>>> check_useful(2.0, most=2.0)
Traceback (most recent call last):
...
jshard._plan.request.NoBetterPlan: no plan costs less than 2
"""

from __future__ import annotations

import math

import numpy as np

from jshard._network.build import PlanningNetwork
from jshard._plan.request import NoBetterPlan, PlanRequest
from jshard._search import CostNetwork


def check_useful(bound: float, most: float, even_share: float = 0.0) -> None:
    """Raise `NoBetterPlan` if a bound, the even share added, is not below `most`."""
    if bound + even_share >= most:
        raise NoBetterPlan(bound + even_share)


def least_conceivable_cost(network: CostNetwork) -> float:
    """A bound on all assignments: the least entry of every table."""
    unary = np.array([float(t.min()) for t in network.unary])[network.node_table]
    pairwise = np.array([float(t.min()) for t in network.pairwise])[network.edge_table]
    return float(unary.sum() + pairwise.sum())


def even_share(network: PlanningNetwork) -> float:
    """Seconds of compute that level 0 does not count: each operator's, divided evenly among the devices."""
    total = 0.0
    for i in np.flatnonzero(network.program.use_def.has_kind("eqn")).tolist():
        t = network.operator_costs[int(network.cost_network.node_table[i])]
        total += float(t.compute[0] - t.redundant[0]) * network.program.operators[i].repeat
    return total


def check_useful_plans(network: PlanningNetwork, request: PlanRequest, bound: float) -> None:
    """Raise `NoBetterPlan` if a plan that is known costs no more than this bound on all plans of a request."""
    if request.most < math.inf:
        check_useful(bound, request.most, even_share(network) if request.level == 0 else 0.0)
