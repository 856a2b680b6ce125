"""A first answer within a memory limit: one of little memory, combined with the fastest (fusion, Lempitsky et al. 2010).

Problem.  A search under a limit near the least peak finds its first answer that fits late, and a search that ends early has
a poor one.

Idea.  One price on the time at which most is held in any case, at which costs hardly count, gives an answer of little
memory, as the search for the least peak begins (`minimax_peak.py`). Between it and the fastest answer the limit decides:
the cheapest assignment of the states of both is found in little time, since most variables have one or two states then.

>>> from jshard._search.cost_network import build
>>> net = build([[1.0, 2.0], [1.0, 3.0]], [], intervals=[[0, 1]] * 2, usages=[[8.0, 2.0]] * 2, limit=11.0)
>>> [x.tolist() for x in answers_within(net, np.array([0, 0]), effort=Effort())]
[[1, 1], [1, 0]]
"""

from __future__ import annotations

import numpy as np

from jshard._core.arrays import Ints
from jshard._search.cost_network import CostNetwork, evaluate, live_bytes, peak
from jshard._search.effort import Effort
from jshard._search.memory.key_times import usage_range
from jshard._search.memory.lagrangian import fuse
from jshard._search.memory.price_cuts import PricedNetworks
from jshard._search.search_state import SearchState


_SPEND = (4.0, 30.0)  # the limit's bytes cost so many times the fastest answer's cost, in each try
_GAP = 0.01  # of the combined answer's cost
_INNER_GAP = 0.002  # how near its optimum a priced network is solved


def answers_within(
    network: CostNetwork, fastest: Ints, known: Ints | None = None, *, effort: Effort
) -> list[Ints]:
    """Answers within the limit of a network with memory, the last one combined of those before and the fastest.

    Answers above the limit are among them where none was found that keeps it. `known`: an answer of little memory, where
    there is one; no other is looked for where it is within the limit.
    """
    memory = network.memory
    assert memory is not None and memory.limit is not None
    search = SearchState(np.inf, _GAP, lambda _: None, network.size, effort=effort)
    lasting = memory.intervals[:, 0] < memory.intervals[:, 1]
    floor = live_bytes(memory, usage_range(memory)[0])
    at = np.array([int(memory.intervals[lasting, 0].min()) + int(floor.argmax())])
    solver, found = PricedNetworks(network), [] if known is None else [known]
    fits = known is not None and peak(network, known) <= memory.limit
    for count, spend in enumerate(() if fits else _SPEND):
        prices = np.array([spend * evaluate(network, fastest) / memory.limit])
        # In the second try bytes that are held briefly have the price at any time, so that all equal layers hold little.
        answer, _ = solver.solve(at, prices, search, _INNER_GAP, float(prices[0]) if count else 0.0)
        if answer is not None:
            found.append(answer)
            if peak(network, answer) <= memory.limit:
                break
    if not found or effort.exhausted:
        return found
    fused = fuse(network, [*found, fastest], search)
    return found if fused is None else [*found, fused]
