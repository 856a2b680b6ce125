"""What must stay in memory for values that are computed again later, wherever along the way it is kept.

Problem.  A stored value that ``tanh`` reads, whose result a product of the backward pass reads, stays until then:
unless the result of ``tanh`` is written out to be moved, and stays instead. Which of the two a plan does the
network does not see at one variable, and a bound may count only what every plan holds.

Idea.  Something on the way from the stored value to its last reader is in memory, in one block a device at least.
So a share of each stored value *flows* along its way, as much as the smallest tensor there has to spare. Flows are
counted always; a tensor on the way that is written out is counted less what flows through it. What is in memory
cuts every way, and no tensor carries more than its smallest block, so this is never above what a plan holds.

Worked case.  ``h`` of 8 bytes, ``tanh(h)`` of 8 bytes, read by two products later; 4 devices: 2 bytes flow from h
through tanh(h). If that is gathered and kept, it holds 8 bytes: 2 that flow, and 6 more.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jshard._memory.live_intervals import LiveIntervals
from jshard._program.use_def import Floats


def remat_flow(
    intervals: LiveIntervals, stored: Iterable[int], devices: int
) -> tuple[dict[int, float], Floats]:
    """Bytes that flow from each of some stored tensors, and (tensors,) the bytes that flow through each other one."""
    tensors = intervals.program.tensors
    spare = np.array([t.nbytes // devices for t in tensors], dtype=np.float64)  # whole bytes: sums are exact
    through = np.zeros(len(tensors))
    out: dict[int, float] = {}
    for t in stored:
        way = _remat_chain(intervals, t)
        if way and (share := min(spare[t], *(spare[r] for r in way))) > 0:
            out[t] = float(share)
            spare[way] -= share
            through[way] += share
    return out, through


def _remat_chain(intervals: LiveIntervals, tensor: int) -> list[int]:
    """The tensors that are computed again one from the other, the first from a stored one, until its last reader."""
    program, life = intervals.program, intervals.liveness
    way: list[int] = []
    while True:
        last, onward = -1, -1
        for u, _ in program.uses()[tensor]:
            if not intervals.is_rematerialized(u):
                if u >= last:
                    last, onward = u, -1
                continue
            for r in program.operators[u].results:
                if life.last_use[r] > last:
                    last, onward = life.last_use[r], r
        if onward < 0:
            return way
        way.append(onward)
        tensor = onward
