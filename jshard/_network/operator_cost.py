"""Seconds of one operator in each of its states: compute, its redundant part, its own communication, its price.

Compute is the roofline (Williams et al. 2009) of a device's share of the kernel whose root the operator is
(`kernel_seconds.py`); an operator inside another's kernel costs its arithmetic at most. What
exceeds an even share (all work over all devices) is redundant. A product that is repeated, though its dimensions and
pins would let it be partitioned further, pays a price beside its time (`replication_price.py`).

Operators that finish a reduction themselves (a maximum over a partitioned dimension) communicate on their own account;
sums do not, they stay partial until a reader needs them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import cast

import jax
import numpy as np

from jshard._core.hardware import Chip
from jshard._core.jax_types import ClosedJaxpr
from jshard._core.jaxcompat import itemsize
from jshard._core.layout import MeshAxes
from jshard._core.topology import Topology
from jshard._cost import collectives, roofline
from jshard._cost.collectives import Collective
from jshard._cost.sorts_and_prefixes import (
    PREFIXES,
    SortedArrays,
    prefix_seconds,
    sort_seconds,
    transform_seconds,
)
from jshard._network.candidates import CandidateSet
from jshard._network.kernel_seconds import (
    arithmetic_seconds,
    kernel_parts_seconds,
    parts_seconds_in_all,
    product_rate,
)
from jshard._network.shard_map_cost import ShardMapCost, operation_count, shard_map_cost
from jshard._program.memory.kernel_parts import Parts
from jshard._program.user_shard_map import SHARD_MAP
from jshard._rules.registry import OpView
from jshard._rules.rule import (
    NONE,
    Candidate,
    Rule,
    busiest_share,
    joint_code,
    local_work,
    workspace_bytes,
)
from jshard._rules.sent_collectives import SentCollective, internal_collectives


@dataclasses.dataclass(frozen=True, eq=False)
class OperatorCost:
    """Seconds of one run of an operator, each of shape (states,).

    - `compute`, and the `redundant` part of it.
    - `internal_collectives`: collectives of the operator itself.
    - `replication_price`: what the objective adds for repeated product work.
    - `epilogues`: of a product, of each the seconds by which it makes the product's kernel longer, and its even share
        (`epilogue_charges.py` adds them to edges).
    - `shard_map`: the body of a user's `shard_map`; None for other operators.
    """

    compute: np.ndarray
    redundant: np.ndarray
    internal_collectives: np.ndarray
    replication_price: np.ndarray
    epilogues: tuple[tuple[np.ndarray, float], ...] = ()
    shard_map: ShardMapCost | None = None

    def objective(self, level: int) -> np.ndarray:
        """What a level counts of compute, and the rest: 0 the redundant part, 2 all (and so does 1, to break ties)."""
        compute = self.redundant if level == 0 else self.compute
        return compute + self.internal_collectives + self.replication_price


def operator_cost(
    candidates: CandidateSet,
    parts: Parts,
    fused: Parts,
    launched: bool,
    topology: Topology,
    price: float = 0.0,
    unforced: CandidateSet | None = None,
) -> OperatorCost:
    """The cost of an operator.

    Arguments:

    - `parts`, `launched`: of the kernel whose root it is, as in `Kernels`; `fused`: what each epilogue adds to it.
    - `price`: seconds charged for each second of work that is repeated beyond the least of the states that the user's
        pins allow.
    - `unforced`: the candidates that the user's pins allow, where `candidates` are fewer.
    """
    op, rule = candidates.op, candidates.rule
    assert op is not None
    if op.primitive == SHARD_MAP:
        return _shard_map_operator_cost(candidates, op, topology)
    mesh, chip, n = topology.mesh, topology.chip, len(candidates)
    if rule.opaque:
        work = float(sum(math.prod(a.shape) for a in op.outs))
        local = np.full(n, work)
    else:
        work = rule.work * math.prod(rule.sizes)
        local = local_work(rule, candidates.axis_codes, mesh)
    # The function of `jshard.op(rule=...)` may compute more than its rule says.
    traced = max(1.0, _traced_work(op) / work if work else 1.0)
    local, work = local * traced, work * traced
    uneven = rule.triangular or any(cut.repeated or cut.network for cut in rule.joint)
    busiest = local * busiest_share(rule, candidates.axis_codes, mesh) if uneven else local
    arithmetic = _arithmetic(op, rule, busiest, candidates.axis_codes, mesh, chip)
    by_epilogues = [
        np.maximum(arithmetic, kernel_parts_seconds(parts + fused[:k], candidates, mesh, chip, op.primitive))
        for k in range(len(fused) + 1)
    ]
    seconds = by_epilogues[0] + _copied_bytes(candidates, mesh) / chip.hbm_bandwidth
    whole = np.full((1, len(mesh.names)), NONE, dtype=np.int64)
    even_work = np.array([work / mesh.total])
    even_arithmetic = float(_arithmetic(op, rule, even_work, whole, mesh, chip)[0])
    even = [
        max(even_arithmetic, parts_seconds_in_all(parts + fused[:k], chip, op.primitive, mesh.total))
        for k in range(len(fused) + 1)
    ]
    replication = np.zeros(n)
    if price:
        allowed = local if unforced is None else local_work(unforced.rule, unforced.axis_codes, mesh)
        replication = price * (local - allowed.min(initial=work)) / product_rate(op, chip)
    return OperatorCost(
        compute=seconds + (chip.units.launch if launched else 0.0),
        redundant=np.maximum(0.0, seconds - even[0]),
        internal_collectives=_internal_collective_seconds(candidates, op, topology),
        replication_price=replication,
        epilogues=tuple(
            zip(map(np.subtract, by_epilogues[1:], by_epilogues), np.diff(even).tolist(), strict=False)
        ),
    )


def _arithmetic(
    op: OpView, rule: Rule, work: np.ndarray, axis_codes: np.ndarray, mesh: MeshAxes, chip: Chip
) -> np.ndarray:
    """(candidates,) seconds of `work` of one device: of a sort as much for each element as its block is long."""
    if op.primitive in PREFIXES:
        return prefix_seconds(work, chip)
    if op.primitive == "fft" and chip.units.vector is not None:
        lengths, result = op.params["fft_lengths"], op.outs[0]
        whole = math.prod(lengths) / max(1, math.prod(result.shape[len(result.shape) - len(lengths) :]))
        nbytes = max(itemsize(a.dtype) for a in (op.ins[0], result))  # of the complex one
        return transform_seconds(lengths, work / rule.work * whole, nbytes, chip)
    if op.primitive != "sort":
        return arithmetic_seconds(op, rule, work, axis_codes, mesh, chip)
    length = np.full(len(axis_codes), float(op.ins[0].shape[op.params["dimension"]]))
    for k, cut in enumerate(rule.joint):
        if cut.network:
            length /= np.where(axis_codes == joint_code(rule, k), mesh.sizes, 1).prod(axis=1)
    sizes, keys = [itemsize(a.dtype) for a in op.ins], op.params["num_keys"]
    # A stable sort takes the positions along.
    positions = 4 * bool(op.params["is_stable"])
    arrays = SortedArrays(
        keys, sum(sizes[:keys]), sum(sizes) + positions, len(sizes) + bool(positions)
    )  # fmt: skip
    return sort_seconds(length, work, arrays, chip)


def _copied_bytes(candidates: CandidateSet, mesh: MeshAxes) -> np.ndarray:
    """Bytes read and written to put blocks and the edges that arrive together, once for each dimension.

    In a sorting network, to sort the pairs and the block anew in each round.
    """
    rule, codes = candidates.rule, candidates.axis_codes
    if any(cut.network for cut in rule.joint):
        return 2 * workspace_bytes(rule, codes, mesh) * (busiest_share(rule, codes, mesh) - 1)
    cuts = {one.over: one.added for one in rule.internal if one.reads is not None}
    if not cuts:
        return np.zeros(len(candidates))
    longer = np.array(mesh.sizes, dtype=np.int64) > 1
    used = {over: ((codes == over) & longer).any(axis=1) for over in cuts}
    times = np.sum([u.astype(np.int64) for u in used.values()], axis=0)
    alone = (times == 1) & np.any([used[over] & added for over, added in cuts.items()], axis=0)
    return 2 * workspace_bytes(rule, codes, mesh) * np.where(alone, 0, times)


def _internal_collective_seconds(candidates: CandidateSet, op: OpView, topology: Topology) -> np.ndarray:
    out = np.zeros(len(candidates))
    if not candidates.rule.internal and candidates.rule.reducer == "sum":
        return out
    for k, c in enumerate(candidates.candidates):
        if c is not None:
            sent = costed_internal_collectives(candidates.rule, c, op, topology)
            out[k] = sum(cost.seconds * one.count for one, cost in sent)
    return out


def costed_internal_collectives(
    rule: Rule, c: Candidate, op: OpView, topology: Topology, received: Collection[int] = ()
) -> list[tuple[SentCollective, Collective]]:
    """The internal collectives of an operator under a candidate, each with its bytes and seconds of one run.

    Those of a ring run while the operator computes on what arrived before: their seconds are those by which they take
    longer than the products of one round. On a machine with one memory, copies run beside nothing. Of operands in
    `received` nothing is sent.
    """
    mesh = topology.mesh
    sent = internal_collectives(rule, c, mesh, op.outs, op.ins, received)
    in_ring = sum(s.local_bytes for s in sent if s.ring)
    codes = np.array([c.axis_codes], dtype=np.int64)
    out = []
    for s in sent:
        if s.circular:
            around = abs(s.hop or 0) % mesh.size(*s.axes)
            if around in (1, mesh.size(*s.axes) - 1):
                out.append((s, collectives.ring_step(s.axes, s.local_bytes, topology)))
            else:
                out.append((s, collectives.collective(s.kind, s.axes, s.local_bytes, topology)))
            continue
        if s.hop is not None:
            out.append((s, collectives.shift(s.axes, abs(s.hop), s.local_bytes, topology)))
            continue
        if not s.ring:
            out.append((s, collectives.collective(s.kind, s.axes, s.local_bytes, topology)))
            continue
        cost = collectives.ring_step(s.axes, s.local_bytes, topology)
        if not any(w.kind == "shared" for a in s.axes for w in topology.link(a).wires) and in_ring:
            rate = roofline.peak_flops(op.outs[0].dtype, topology.chip)
            work = float((local_work(rule, codes, mesh) * busiest_share(rule, codes, mesh))[0])
            hidden = work / (s.count + 1) / rate * s.local_bytes / in_ring
            cost = dataclasses.replace(cost, seconds=max(0.0, cost.seconds - hidden))
        out.append((s, cost))
    return out


def _traced_work(op: OpView) -> float:
    """Arithmetic operations of the function inside an operator of `jshard.op(rule=...)`; 0 for others and where stated."""
    if op.primitive != "jshard_fused" or op.params["fused"].stated:
        return 0.0
    run = op.params["fused"].run
    ins = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in op.ins]
    return operation_count(cast("ClosedJaxpr", jax.make_jaxpr(run)(*ins)))


def _shard_map_operator_cost(candidates: CandidateSet, op: OpView, topology: Topology) -> OperatorCost:
    """The cost of a user's `shard_map`: its body on every device; redundant where its specs repeat blocks."""
    body, mesh, n = shard_map_cost(op.params["jaxpr"], topology), topology.mesh, len(candidates)
    blocks = np.array([
        mesh.size(*(name for name, f in zip(mesh.names, c.axis_codes, strict=True) if f >= 0)) if c else 1
        for c in candidates.candidates
    ])  # fmt: skip
    seconds = np.full(n, body.compute)
    return OperatorCost(
        compute=seconds,
        redundant=seconds * (1 - blocks / mesh.total),
        internal_collectives=np.full(n, body.communication),
        replication_price=np.zeros(n),
        shard_map=body,
    )
