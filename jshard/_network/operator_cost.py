"""Seconds of one operator under each of its states: compute, the redundant part of it, its own communication.

Compute is the roofline of a device's share of the work and of the bytes it reads and writes. What lies beyond an
even share (all work over all devices) is redundant. A product that is repeated, though its dimensions and pins would
let it be cut further, pays a price beside its time (`replication_price.py`).

Operators that finish a reduction themselves (a maximum over
a cut dimension) communicate on their own account; sums do not, they stay partial until a reader needs them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jshard._core.topology import Topology
from jshard._cost import collectives, roofline
from jshard._network.candidates import CandidateSet
from jshard._network.shard_map_cost import ShardMapCost, operation_count, shard_map_cost
from jshard._program.graph import Tensor
from jshard._program.user_shard_map import SHARD_MAP
from jshard._rules.registry import OpView
from jshard._rules.rule import internal_collectives, local_work


@dataclasses.dataclass(frozen=True, eq=False)
class OperatorCost:
    """Arrays over the states of an operator, seconds of one run; `inside` is what a user's `shard_map` does there."""

    compute: np.ndarray
    redundant: np.ndarray
    internal_collectives: np.ndarray
    replication_price: np.ndarray
    shard_map: ShardMapCost | None = None

    def objective(self, level: int) -> np.ndarray:
        """What a level counts: 0 the redundant part, 2 all compute (and so does 1, to break ties)."""
        return (
            (self.redundant if level == 0 else self.compute)
            + self.internal_collectives
            + self.replication_price
        )


def operator_cost(
    s: CandidateSet,
    reads: Sequence[int],
    writes: Sequence[int],
    topology: Topology,
    price: float = 0.0,
    unforced: CandidateSet | None = None,
) -> OperatorCost:
    """Times of an operator that reads and writes the given operands and results in memory.

    `price` is what each second of work counts that is repeated beyond the least of the states that the user's pins
    allow (`replication_price.py`): those of `wished`, where `s` are fewer.
    """
    assert s.op is not None
    mesh, chip = topology.mesh, topology.chip
    if s.op.primitive == SHARD_MAP:
        return _shard_map_operator_cost(s, topology)
    dtype = s.op.outs[0].dtype if s.op.outs else np.dtype("float32")
    tensors = [(_nbytes(s.op.ins[i]), s.operands[i]) for i in reads]
    tensors += [(_nbytes(s.op.outs[i]), s.results[i]) for i in writes]
    work = s.rule.work * math.prod(s.rule.sizes)
    if s.rule.opaque:
        work = float(sum(math.prod(a.shape) for a in s.op.outs))
    # A function that its author gave a rule does what it does, whatever the rule counts.
    hidden = _traced_work(s.op) / work if work else 1.0
    moved = np.zeros(len(s))
    for nbytes, choices in tensors:
        moved += nbytes / choices.num_shards(mesh)
    local = np.full(len(s), work) if s.rule.opaque else local_work(s.rule, s.axis_codes, mesh)
    local, work = local * max(1.0, hidden), work * max(1.0, hidden)
    seconds = roofline.roofline(local, moved, dtype, chip)
    even = roofline.roofline(work / mesh.total, sum(b for b, _ in tensors) / mesh.total, dtype, chip)
    own = np.zeros(len(s))
    if s.rule.internal or s.rule.reducer != "sum":
        for k, c in enumerate(s.candidates):
            for sent in internal_collectives(s.rule, c, mesh, s.op.outs) if c is not None else ():
                own[k] += collectives.collective(sent.kind, sent.axes, sent.local_bytes, topology).seconds
    redundant = np.maximum(0.0, seconds - even)
    if not price:
        return OperatorCost(seconds, redundant, own, np.zeros(len(s)))
    least = local if unforced is None else local_work(unforced.rule, unforced.axis_codes, mesh)
    rate = roofline.peak_flops(dtype, chip)
    return OperatorCost(seconds, redundant, own, price * (local - least.min(initial=work)) / rate)


def _traced_work(op: OpView) -> float:
    """Operations of the function inside an operator of `jshard.op(rule=...)`."""
    if op.primitive != "jshard_fused":
        return 0.0
    run = op.params["fused"].run
    ins = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in op.ins]
    return operation_count(jax.make_jaxpr(run)(*ins))


def _shard_map_operator_cost(s: CandidateSet, topology: Topology) -> OperatorCost:
    """Times of a user's `shard_map`: what its body does, on as many blocks as its specs make different."""
    assert s.op is not None
    found = shard_map_cost(s.op.params["jaxpr"], topology)
    blocks = np.array([
        topology.mesh.size(*(n for n, f in zip(topology.mesh.names, c.axis_codes, strict=True) if f >= 0)) if c else 1
        for c in s.candidates
    ])  # fmt: skip
    seconds = np.full(len(s), found.compute)
    own = np.full(len(s), found.communication)
    return OperatorCost(seconds, seconds * (1 - blocks / topology.mesh.total), own, np.zeros(len(s)), found)


def _nbytes(a: Any) -> float:
    return float(a.nbytes) if isinstance(a, Tensor) else 4.0
