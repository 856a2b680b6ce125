"""The collectives that an operator's local implementation sends under a candidate, as its rule lists them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

from jshard._core.jaxcompat import itemsize
from jshard._core.layout import ArrayType, CollectiveKind, MeshAxes
from jshard._rules.block_reads import RolledReads, exchange
from jshard._rules.rule import (
    Candidate,
    InternalCollective,
    Rule,
    operand_layouts,
    reduced_axes,
    result_layouts,
)
from jshard._rules.sorting_network import rounds


@dataclasses.dataclass(frozen=True)
class SentCollective:
    """An internal collective under a candidate: over `axes`, of `local_bytes` per device, of a result or operand.

    `count`: how often it runs in one run of the operator; `ring`: to the next device, while the operator computes; `hop`:
    a permute to the device at this distance (in a sorting network, between the two), where there is one; `circular`: and
    from the last devices to the first.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    local_bytes: float
    result: int
    operand: int | None = None
    count: int = 1
    ring: bool = False
    hop: int | None = None
    circular: bool = False


def internal_collectives(
    rule: Rule,
    c: Candidate,
    mesh: MeshAxes,
    results: Sequence[ArrayType],
    operands: Sequence[ArrayType] = (),
    received: Collection[int] = (),
) -> tuple[SentCollective, ...]:
    """The internal collectives of an operator under a candidate, in order.

    `results` and `operands` have the global `shape` and the `dtype` of each; the latter are needed for a rule that sends
    operands. Of operands in `received` nothing is sent: another operator has exchanged their edges.

    >>> import numpy as np
    >>> from jshard._rules.rule import NONE
    >>> r = Rule(operands=(((0,), (1,)),), results=(((0,),),), sizes=(8, 6), reduction=(1,), reducer="max")
    >>> mesh, y = MeshAxes(("x", "y"), (4, 2)), np.zeros(8, np.float32)
    >>> (sent,) = internal_collectives(r, Candidate((0, 1)), mesh, [y])
    >>> sent.kind, sent.axes, sent.local_bytes, internal_collectives(r, Candidate((0, NONE)), mesh, [y])
    ('all_reduce', ('y',), 8.0, ())
    """
    reduced = reduced_axes(rule, c, mesh)
    internal = rule.internal
    if not internal and reduced:
        internal = tuple(
            InternalCollective("all_reduce", itemsize(a.dtype), k) for k, a in enumerate(results)
        )
    out, layouts = [], result_layouts(rule, c, mesh) if internal else ()
    operand_lays = operand_layouts(rule, c, mesh) if any(i.operand is not None for i in internal) else ()
    extended: dict[int, list[int]] = {}  # operand -> local shape with the edges that arrived
    for one in internal:
        axes = mesh.names if one.all_axes else reduced if one.over is None else c.cut(one.over, mesh)
        n = mesh.size(*axes)
        if n > 1:
            k = one.operand
            if one.reads is not None:
                assert k is not None, "an exchange is of an operand"
                shape = extended.setdefault(k, list(operand_lays[k].local_shape(operands[k].shape, mesh)))
                out += _exchanged(one, tuple(axes), n, shape)
                continue
            aval, layout = (
                (results[one.result], layouts[one.result]) if k is None else (operands[k], operand_lays[k])
            )
            local_bytes = math.prod(aval.shape) * one.itemsize * one.fraction / layout.pieces(mesh)
            if one.rows is not None:
                local_bytes *= one.rows / layout.local_shape(aval.shape, mesh)[one.dim]
            sent = SentCollective(one.kind, tuple(axes), local_bytes, one.result, k)
            if one.network:
                out += [dataclasses.replace(sent, hop=r.distance) for r in rounds(n)]
                continue
            out.append(dataclasses.replace(sent, count=n - 1, ring=True) if one.ring else sent)
    return tuple(s for s in out if s.operand not in received or s.operand is None)


def _exchanged(
    one: InternalCollective, axes: tuple[str, ...], n: int, shape: list[int]
) -> list[SentCollective]:
    """The permutes of an exchange; `shape` is that of the operand's block, and becomes that of what is read."""
    assert one.reads is not None
    e = exchange(one.reads, n)
    row = float(one.itemsize) * math.prod(shape[: one.dim] + shape[one.dim + 1 :])
    shape[one.dim] = e.length
    circular = isinstance(one.reads, RolledReads)
    return [
        SentCollective(one.kind, axes, row * p.rows, one.result, one.operand, hop=p.hop, circular=circular)
        for p in e.pieces
        if p.pairs
    ]
