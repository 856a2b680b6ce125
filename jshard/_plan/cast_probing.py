"""Probing: states of recomputed casts that no plan below a peak takes are taken out of the lower-bound memory network.

Problem.  A cast is recomputed from its source, or one of its readers has it resharded: each costs memory, but at times of
its own (`_network/recomputed_casts.py`). A bound by prices on a few times mixes the four, and is lower than each of them.

Idea.  Probing, as in mixed-integer programming (Savelsbergh, ORSA Journal on Computing 6, 1994): each of the three kinds of
resharding is fixed in turn, and the bytes at its own time are bounded. Where that is above the peak of a plan that is
known, or above a budget, the kind is forbidden.

Worked case.  Logits of 1 GiB a device, cast from 0.5 GiB: resharding takes 2 GiB, a plan with 1.5 GiB is known, so the
source is in memory beside the cast in every better one.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jshard._core.arrays import Ints
from jshard._network.recomputed_casts import CastState
from jshard._search import CostNetwork, Effort, Prices


def cast_variables(bounding: CostNetwork, size: int) -> Ints:
    """The variables of recomputed casts in a lower-bound network; `size`: of the network without memory."""
    first, second = bounding.edges.T
    return np.unique(second[(first >= size) & (second >= size)])


def without_costly_casts(bounding: CostNetwork, size: int, limit: float, effort: Effort) -> CostNetwork:
    """The lower-bound network without the kinds of casts with which every plan holds more than `limit` bytes.

    Arguments:

    - `size`: of the network without memory.
    - `effort`: ends the probing when it is spent.
    """
    from jshard._search.memory.minimax_peak import bound_at_prices  # here: `import jshard` stays light

    for cast in cast_variables(bounding, size).tolist():
        for kind, time in _times(bounding, size, cast).items():
            if effort.exhausted:
                return bounding
            fixed = _without(bounding, cast, frozenset(CastState) - {kind})
            if bound_at_prices(fixed, Prices(np.array([time]), np.ones(1)), effort) > limit:
                bounding = _without(bounding, cast, frozenset([kind]))
    return bounding


def _times(bounding: CostNetwork, size: int, cast: int) -> dict[CastState, int]:
    """By kind of resharding the time point at which it takes most."""
    memory = bounding.memory
    assert memory is not None
    first, second = bounding.edges.T
    store, *before = np.sort(
        first[(second == cast) & (first >= size)]
    ).tolist()  # in the order in which they were made

    def starts(variable: int) -> list[int]:
        return np.sort(memory.intervals[memory.interval_variable == variable, 0]).tolist()

    found = {CastState.FROM_STORED: starts(store)[0], CastState.FRESH: starts(cast)[1]}
    return found if not before else {**found, CastState.SHARED: starts(before[0])[0]}


def _without(network: CostNetwork, cast: int, kinds: frozenset[CastState]) -> CostNetwork:
    own = network.unary[int(network.node_table[cast])].copy()
    states = len(own) // len(CastState)
    for kind in kinds:
        own[kind * states : (kind + 1) * states] = np.inf
    tables = network.node_table.copy()
    tables[cast] = len(network.unary)
    return dataclasses.replace(network, unary=(*network.unary, own), node_table=tables)
