"""Rematerialization flow: a lower bound on the bytes that values recomputed later keep live.

Problem.  A stored value that `tanh` reads, whose result a product of the backward pass reads, is live until then:
unless the result of `tanh` is materialized to be resharded, and is live instead. Which of the two happens is not
visible at one variable of the cost network, and a bound may count only what every plan holds.

Idea.  A cut argument. Somewhere on the chain from the stored value to its last reader a tensor is in memory, at least
one block a device. So a share of each stored value *flows* along its chain, as much as the smallest tensor on it has
capacity left. Flows always count; a tensor on the chain that is materialized counts less what flows through it. What is
in memory cuts every chain, and no tensor carries more than its smallest block, so this never exceeds what a plan holds.

A chain can be long: the gradient of a residual stream joins the chains of all layers, and one flow fills it. But an
operator's result is in no memory before the operator runs. So until an operator u of the chain starts, the part of the
chain before u is cut already: what is left of its capacity flows until then. That is done at the largest step of a
chain in the program, from the forward to the backward pass.

A value that several others are recomputed from has as many chains: queries, keys and values are slices of one product, each
a third of it, and all of it flows. The chain that is needed longest comes first; the others share what is left of the
capacity, each until its own last reader starts.

Worked case.  `h` of 8 bytes, `tanh(h)` of 8 bytes, read by two products later; 4 devices: 2 bytes flow from h
through tanh(h). If that is gathered and kept, it holds 8 bytes: 2 that flow, and 6 more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from jshard._core.arrays import Floats
from jshard._program.graph import calls_of
from jshard._program.memory.live_intervals import LiveIntervals


@dataclasses.dataclass(frozen=True)
class Flow:
    """Bytes that flow from a stored tensor, until an operator starts; None: until the tensor's last use ends."""

    nbytes: float
    until: int | None = None


def remat_flow(
    intervals: LiveIntervals, stored: Iterable[int], devices: int
) -> tuple[dict[int, tuple[Flow, ...]], Floats]:
    """The flows from each of some stored tensors, and (tensors,) the bytes that flow through each other one."""
    tensors = intervals.program.tensors
    # Whole bytes: sums are exact.
    capacity = np.array([t.nbytes // devices for t in tensors], dtype=np.float64)
    through = np.zeros(len(tensors))
    out: dict[int, tuple[Flow, ...]] = {}

    def send(tensor: int, chain: Sequence[int], most: float, until: int | None) -> float:
        flow = min(most, float(capacity[chain].min()))
        if flow > 0:
            out[tensor] = (*out.get(tensor, ()), Flow(flow, until))
            capacity[chain] -= flow
            through[chain] += flow
        return flow

    following = _following(intervals)
    chains = {t: chain for t in stored if (chain := _remat_chain(following, t))}
    left = {t: capacity[t] - send(t, chain, capacity[t], None) for t, chain in chains.items()}
    def_op = [op for op, _ in intervals.program.defs()]
    inside = {i for call in calls_of(intervals.program.body) for i in call.inner_operators}
    for t, chain in chains.items():
        at = [def_op[r] for r in (t, *chain)]
        steps = np.diff(at)
        k = int(steps.argmax())
        if k and left[t] > 0 and not inside.intersection(at[: k + 2]):
            left[t] -= send(t, chain[:k], left[t], at[k + 1])
    for t in chains:
        for r in _recomputed_from(intervals, t):
            if r != following[t] and left[t] > 0:
                chain = [r, *_remat_chain(following, r)]
                left[t] -= send(t, chain, left[t], intervals.liveness.last_use[r])
    return out, through


def _recomputed_from(intervals: LiveIntervals, tensor: int) -> list[int]:
    """The values that are recomputed from a tensor and needed, those needed longest first."""
    program, last_use = intervals.program, intervals.liveness.last_use
    readers = sorted({u for u, _ in program.uses()[tensor] if intervals.is_rematerialized(u)})
    results = [r for u in readers for r in program.operators[u].results if last_use[r] >= 0]
    return sorted(results, key=lambda r: -last_use[r])


def _following(intervals: LiveIntervals) -> list[int]:
    """For each tensor what is recomputed from it and needed last; -1 where a reader that is not recomputed is last."""
    program, last_use = intervals.program, intervals.liveness.last_use
    rematerialized = [intervals.is_rematerialized(op.id) for op in program.operators]
    out = []
    for uses in program.uses():
        last, following = -1, -1
        for u, _ in uses:
            if not rematerialized[u]:
                if u >= last:
                    last, following = u, -1
                continue
            for r in program.operators[u].results:
                if last_use[r] > last:
                    last, following = last_use[r], r
        out.append(following)
    return out


def _remat_chain(following: Sequence[int], tensor: int) -> list[int]:
    """The tensors that are recomputed one from the other, the first from a stored one, until its last reader."""
    chain: list[int] = []
    while (tensor := following[tensor]) >= 0:
        chain.append(tensor)
    return chain
