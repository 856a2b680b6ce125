"""First answers within a memory limit: one of little memory, combined with the fastest (fusion, Lempitsky et al. 2010).

Problem.  A search under a limit near the least peak finds its first answer that fits late, and a search that ends early has
a poor one.

Idea.  One price on the time at which most is held in any case, at which the limit's bytes cost nearly as much as the network
does, gives an answer of little memory and a bound that is mostly within a hundredth or two of the least cost within the
limit. Where the answer holds more than the limit, the price is raised; where it does so at other times alone, bytes that
are held briefly have a price at any time too. Between it and the fastest answer the limit decides: the cheapest assignment
of the states of both is found in little time, since most variables have one or two states then.

>>> from jshard._search.cost_network import build
>>> net = build([[1.0, 2.0], [1.0, 3.0]], [], intervals=[[0, 1]] * 2, usages=[[8.0, 2.0]] * 2, limit=11.0)
>>> [x.tolist() for x in answers_within(net, np.array([0, 0]), effort=Effort()).assignments]
[[1, 1], [1, 0]]
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jshard._core.arrays import Ints
from jshard._search.cost_network import (
    CostNetwork,
    Memory,
    Prices,
    evaluate,
    interval_bytes,
    live_bytes,
    peak,
)
from jshard._search.effort import Effort
from jshard._search.memory.key_times import usage_range
from jshard._search.memory.lagrangian import fuse
from jshard._search.memory.price_cuts import FIRST_SPEND, PricedNetworks
from jshard._search.search_state import SearchState


_RAISED = (
    8.0  # times the price before, where an answer under it exceeds the limit at the time that has a price
)
_TRIES = 3
_GAP = 0.01  # of the combined answer's cost
_INNER_GAP = 0.002  # how near its optimum a priced network is solved


class FirstAnswers(NamedTuple):
    """Assignments, the last one combined of those before, and the prices that bound the cost best; None without any."""

    assignments: list[Ints]
    prices: Prices | None


def answers_within(
    network: CostNetwork, fastest: Ints, known: Ints | None = None, *, effort: Effort
) -> FirstAnswers:
    """Answers within the limit of a network with memory, the last one combined of those before and the fastest.

    Answers above the limit are among them where none was found that keeps it. `known`: an answer of little memory, where
    there is one; no other is looked for where it is within the limit.
    """
    memory = network.memory
    assert memory is not None and memory.limit is not None
    search = SearchState(np.inf, _GAP, lambda _: None, network.size, effort=effort)
    fits = known is not None and peak(network, known) <= memory.limit
    price = FIRST_SPEND * evaluate(network, fastest) / memory.limit
    found, prices = ([], None) if fits else _under_prices(network, memory, price, search)
    if known is not None:
        found = [known, *found]
    if not found or effort.exhausted:
        return FirstAnswers(found, prices)
    bound = -np.inf if prices is None else _proved(prices, memory.limit)
    fused = fuse(network, [*found, fastest], search, bound)
    return FirstAnswers(found if fused is None else [*found, fused], prices)


def _under_prices(
    network: CostNetwork, memory: Memory, price: float, search: SearchState
) -> tuple[list[Ints], Prices | None]:
    """Answers under a price on the time at which most is held in any case, raised until one is within the limit."""
    assert memory.limit is not None
    lasting = memory.intervals[:, 0] < memory.intervals[:, 1]
    first = int(memory.intervals[lasting, 0].min())
    fullest = int(live_bytes(memory, usage_range(memory)[0]).argmax())
    solver, found, at_any_time = PricedNetworks(network), [], False
    best: Prices | None = None
    for _ in range(_TRIES):
        at, per_byte = np.array([first + fullest]), np.array([price])
        answer, bound = solver.solve(at, per_byte, search, _INNER_GAP, price if at_any_time else 0.0)
        if not at_any_time:  # else the bound is one on the cost with those bytes charged for too
            prices = Prices(at, per_byte, bound)
            if best is None or _proved(prices, memory.limit) > _proved(best, memory.limit):
                best = prices
        if answer is None:
            break
        found.append(answer)
        profile = live_bytes(memory, interval_bytes(memory, answer))
        if profile.max() <= memory.limit:
            break
        if at_any_time or profile[fullest] > memory.limit:
            price *= _RAISED
        else:
            at_any_time = True
    return found, best


def _proved(prices: Prices, limit: float) -> float:
    """What prices prove of the cost within a limit."""
    return prices.bound - limit * float(prices.per_byte.sum())
