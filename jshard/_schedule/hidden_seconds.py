"""How much of some collectives hides under products: each product's seconds used once, every transfer as late as possible.

Problem.  A collective may run beside the products between the one after which its operand is ready and the one that
reads its result: an interval of products. No two run beside one product at once, since they share the links.

Algorithm.  Which seconds of collectives run beside which seconds of products is a matching in a convex bipartite graph.
The greedy rule of Glover (Naval Research Logistics Quarterly 14, 1967) makes it a maximum one. It is applied from the
last product to the first, as XLA's latency-hiding scheduler goes through a computation: a product takes, of the
collectives whose results are read after it, those first whose operands are ready last. So no schedule of these
intervals hides more, and results are in memory for as short as this rule allows.

The second product hides the gather of 5 s that the third reads, as far as its 2 s go; the first hides 1 s more.

>>> hide([1.0, 2.0, 4.0], [Transfer(5.0, 0, 2), Transfer(9.0, 2, 2)])
[3.0, 0.0]
>>> hide([1.0, 2.0, 4.0], [Transfer(5.0, 0, 2, nbytes=8.0)], room=[4.0, 9.0, 9.0])
[2.0]
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective that may hide: its seconds, and the products `begin` to `end - 1` that it may run beside.

    `nbytes`: of its result on a device, which is in memory from the product where it starts.
    """

    seconds: float
    begin: int
    end: int
    nbytes: float = 0.0


def hide(
    products: Sequence[float], transfers: Sequence[Transfer], room: Sequence[float] | None = None
) -> list[float]:
    """Seconds of each transfer that hide.

    Arguments:

    - `products`: seconds of each product, in order.
    - `room`: bytes of memory that are free while each of them runs; None for any. A transfer starts no earlier than its
        result has room.
    """
    left = [t.seconds for t in transfers]
    starts_at = [t.end for t in transfers]  # the first product beside which each runs
    free = None if room is None else list(room)
    by_end = sorted(range(len(transfers)), key=lambda i: transfers[i].end)
    waiting: list[tuple[int, int]] = []  # those read after the product at hand, the last ready first
    for k in range(len(products) - 1, -1, -1):
        while by_end and transfers[by_end[-1]].end > k:
            i = by_end.pop()
            heapq.heappush(waiting, (-transfers[i].begin, i))
        seconds = products[k]
        while waiting and seconds > 0:
            begin, i = waiting[0]
            fits = free is None or _has_room(free, k, starts_at[i], transfers[i].nbytes)
            if -begin > k or not fits:
                heapq.heappop(waiting)
                continue
            if free is not None:
                for j in range(k, starts_at[i]):
                    free[j] -= transfers[i].nbytes
            starts_at[i] = k
            part = min(seconds, left[i])
            seconds, left[i] = seconds - part, left[i] - part
            if left[i] <= 0:
                heapq.heappop(waiting)
    return [t.seconds - rest for t, rest in zip(transfers, left, strict=True)]


def _has_room(free: Sequence[float], begin: int, end: int, nbytes: float) -> bool:
    """Whether so many bytes are free while the products `begin` to `end - 1` run."""
    return all(nbytes <= free[j] for j in range(begin, end))
