"""First answers within a memory limit: one of little memory, combined with the fastest (fusion, Lempitsky et al. 2010).

Problem.  A search under a limit near the least peak finds its first answer that fits late, and a search that ends early has
a poor one.

Idea.  One price on the time at which most is held in any case, at which the limit's bytes cost nearly as much as the network
does, gives an answer of little memory and a bound that is mostly within a hundredth or two of the least cost within the
limit. Where the answer holds more than the limit, the price is raised, at the time at which that answer holds most; where it
does so at other times alone, bytes that are held briefly have a price at any time too. Between a price that is too low and
one that is too high, the bound is best where the answers of both cost the same. Among all of them and the fastest answer the
limit decides: the cheapest assignment of their states is found in little time, since most variables have one or two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jshard._core.arrays import Ints
from jshard._search.cost_network import CostNetwork, Prices, interval_bytes, live_bytes
from jshard._search.effort import Effort
from jshard._search.memory.key_times import first_time, fullest_time
from jshard._search.memory.lagrangian import fuse
from jshard._search.memory.price_cuts import (
    FIRST_SPEND,
    MOST_SPENT,
    PricedNetworks,
    best_prices,
    cut_of,
    prices_while_held,
)
from jshard._search.search_state import SearchState


# Times the price before, where an answer exceeds the limit at the time that has a price: the first is mostly near.
_RAISED = (2.0, 8.0)
_BETTER_PRICES = 3  # solutions, at most, between the first price and those it was raised to
_GAP = 0.01  # of the combined answer's cost
_INNER_GAP = 0.002  # how near its optimum a priced network is solved


class FirstAnswers(NamedTuple):
    """Assignments, the last within the limit if one was found, and the prices that bound the cost best."""

    assignments: list[Ints]
    prices: Prices


def first_answers(
    solver: PricedNetworks, cost: float, *, effort: Effort, prices: Prices | None = None
) -> FirstAnswers:
    """Answers of a network with memory under a price on the time at which most is held in any case.

    The price is raised until an answer is within the limit, a few times.

    Arguments:

    - `solver`: of a network with memory and a limit.
    - `cost`: of the fastest answer.
    - `effort`: ends the search when it is spent.
    - `prices`: to begin with: those of a similar network. Else so much at one time that the limit costs a share of `cost`.

    >>> from jshard._search.cost_network import build
    >>> net = build([[1.0, 2.0], [1.0, 3.0]], [], intervals=[[0, 1]] * 2, usages=[[8.0, 2.0]] * 2, limit=11.0)
    >>> answers = first_answers(PricedNetworks(net), 2.0, effort=Effort())
    >>> [x.tolist() for x in answers.assignments], round(answers.prices.proved_cost(11.0), 3)
    ([[0, 0], [1, 0]], 2.764)
    """
    memory = solver.network.memory
    assert memory is not None and memory.limit is not None
    limit = memory.limit
    search = _search(solver.network, effort)
    found, start, at_any_time = list[Ints](), first_time(memory), False
    at, per_byte = np.array([fullest_time(memory)]), np.array([FIRST_SPEND * cost / limit])
    if prices is not None:
        times, given = prices_while_held(solver.network, prices)
        if given.any():
            at, per_byte = times[given > 0], given[given > 0]
    best = Prices(at, per_byte)
    for raised in (*_RAISED, None):
        total = float(per_byte.sum())
        answer, bound = solver.solve(at, per_byte, search, _INNER_GAP, total if at_any_time else 0.0)
        if not at_any_time:  # else the bound is one on the cost with those bytes charged for too
            best = max(best, Prices(at, per_byte, bound), key=lambda p: p.proved_cost(limit))
        if answer is None:
            break
        found.append(answer)
        profile = live_bytes(memory, interval_bytes(memory, answer))
        if profile.max() <= limit or raised is None:
            break
        if at_any_time or (profile[at - start] > limit).any():
            at, per_byte = np.array([start + int(profile.argmax())]), np.array([total * raised])
        else:
            at_any_time = True
    return FirstAnswers(found, best)


def with_better_prices(
    solver: PricedNetworks, fastest: Ints, first: FirstAnswers, gap: float, *, effort: Effort
) -> FirstAnswers:
    """A few answers more, each at the prices that would bound the cost best if no other cost less at them (Kelley 1960).

    They end where one within the limit is near the bound, or where those prices would prove hardly more. None are looked for
    where no answer is within the limit: the prices have no upper end then.

    Arguments:

    - `solver`: of a network with memory and a limit.
    - `fastest`: its assignment of least cost, or nearly.
    - `first`: its answers of little memory, and prices.
    - `gap`: relative, of a cost that is near the bound.
    - `effort`: ends the search when it is spent.

    >>> from jshard._search.cost_network import build
    >>> net = build([[1.0, 2.0], [1.0, 3.0]], [], intervals=[[0, 1]] * 2, usages=[[8.0, 2.0]] * 2, limit=11.0)
    >>> solver = PricedNetworks(net)
    >>> first = first_answers(solver, 2.0, effort=Effort())
    >>> better = with_better_prices(solver, np.array([0, 0]), first, 0.01, effort=Effort())
    >>> [x.tolist() for x in better.assignments], round(better.prices.proved_cost(11.0), 3)
    ([[0, 0], [1, 0], [0, 0]], 2.833)
    """
    network, memory = solver.network, solver.network.memory
    assert memory is not None and memory.limit is not None
    limit, start = memory.limit, first_time(memory)
    cuts = [cut_of(network, x) for x in (fastest, *first.assignments)]
    best, times = first.prices, first.prices.times - start
    for _ in range(_BETTER_PRICES):
        proved = best.proved_cost(limit)
        fitting = min((c.cost for c in cuts if c.profile.max() <= limit), default=np.inf)
        if effort.exhausted or fitting == np.inf or fitting <= proved * (1 + gap):
            break
        over = [int(c.profile.argmax()) for c in cuts[1:] if c.profile.max() > limit]
        times = np.union1d(times, np.array(over, dtype=np.int64))
        prices, model = best_prices(cuts, times, limit, MOST_SPENT * limit * float(best.per_byte.sum()))
        if model <= proved * (1 + _GAP):
            break
        answer, bound = solver.solve(times + start, prices, _search(network, effort), _INNER_GAP)
        best = max(best, Prices(times + start, prices, bound), key=lambda p: p.proved_cost(limit))
        if answer is None:
            break
        cuts.append(cut_of(network, answer))
    return FirstAnswers([c.assignment for c in cuts[1:]], best)


def _search(network: CostNetwork, effort: Effort) -> SearchState:
    return SearchState(np.inf, _GAP, lambda _: None, network.size, effort=effort)


def answers_within(
    network: CostNetwork,
    fastest: Ints,
    given: Sequence[Ints],
    *,
    effort: Effort,
    bound: float = -np.inf,
    prices_only: bool = False,
) -> list[Ints]:
    """Given answers, and the cheapest of the states of those and of the fastest that is within the limit, if one is.

    Arguments:

    - `network`: with memory and a limit.
    - `fastest`, `given`: its assignments, of little cost and of little memory.
    - `effort`: ends the search when it is spent.
    - `bound`: no assignment within the limit costs less.
    - `prices_only`: whether the states are combined by prices alone, which is quick.

    >>> from jshard._search.cost_network import build
    >>> net = build([[1.0, 2.0], [1.0, 3.0]], [], intervals=[[0, 1]] * 2, usages=[[8.0, 2.0]] * 2, limit=11.0)
    >>> [x.tolist() for x in answers_within(net, np.array([0, 0]), [np.array([1, 1])], effort=Effort())]
    [[1, 1], [1, 0]]
    """
    if not given or effort.exhausted:
        return list(given)
    search = SearchState(np.inf, _GAP, lambda _: None, network.size, effort=effort)
    fused = fuse(network, [*given, fastest], search, bound, prices_only)
    return list(given) if fused is None else [*given, fused]
