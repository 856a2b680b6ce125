"""Rematerialization flow: a lower bound on the bytes that values recomputed later keep live.

Problem.  A stored value that `tanh` reads, whose result a product of the backward pass reads, is live until then:
unless the result of `tanh` is materialized to be resharded, and is live instead. Which of the two happens is not
visible at one variable of the cost network, and a bound may count only what every plan holds.

Idea.  A cut argument. Somewhere on the chain from the stored value to its last reader a tensor is in memory, at least
one block a device. So a share of each stored value *flows* along its chain, as much as the smallest tensor on it has
capacity left. Flows always count; a tensor on the chain that is materialized counts less what flows through it. What is
in memory cuts every chain, and no tensor carries more than its smallest block, so this never exceeds what a plan holds.

Worked case.  `h` of 8 bytes, `tanh(h)` of 8 bytes, read by two products later; 4 devices: 2 bytes flow from h
through tanh(h). If that is gathered and kept, it holds 8 bytes: 2 that flow, and 6 more.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jshard._core.arrays import Floats
from jshard._memory.live_intervals import LiveIntervals


def remat_flow(
    intervals: LiveIntervals, stored: Iterable[int], devices: int
) -> tuple[dict[int, float], Floats]:
    """Bytes that flow from each of some stored tensors, and (tensors,) the bytes that flow through each other one."""
    tensors = intervals.program.tensors
    capacity = np.array(
        [t.nbytes // devices for t in tensors], dtype=np.float64
    )  # whole bytes: sums are exact
    through = np.zeros(len(tensors))
    out: dict[int, float] = {}
    for t in stored:
        chain = _remat_chain(intervals, t)
        if chain and (flow := min(capacity[t], *(capacity[r] for r in chain))) > 0:
            out[t] = float(flow)
            capacity[chain] -= flow
            through[chain] += flow
    return out, through


def _remat_chain(intervals: LiveIntervals, tensor: int) -> list[int]:
    """The tensors that are recomputed one from the other, the first from a stored one, until its last reader."""
    program, last_use = intervals.program, intervals.liveness.last_use
    chain: list[int] = []
    while True:
        last, following = -1, -1
        for u, _ in program.uses()[tensor]:
            if not intervals.is_rematerialized(u):
                if u >= last:
                    last, following = u, -1
                continue
            for r in program.operators[u].results:
                if last_use[r] > last:
                    last, following = last_use[r], r
        if following < 0:
            return chain
        chain.append(following)
        tensor = following
