"""Halos: a rule with cuts of dimensions whose blocks read beyond their edges, and the windows of a device's block.

A `Halo` is a joint cut of the read dimension and the reading one, with the exchange that makes it right. `with_halos`
adds to a rule the cuts, the permutes that they send (`block_reads.py`) and the memory of the operands with their edges.

>>> rule = Rule(operands=(((0,),),), results=(((0,),),), sizes=(16,), blocked=(0,))
>>> cut = JointCut("halo", operands=(0,), results=(0,))
>>> x = jax.ShapeDtypeStruct((16,), "float32")
>>> found = with_halos(rule, [x], [Halo(cut, ((0, 0, WindowReads(16, 16, low=1, span=2)),))])
>>> print(found)
a -> a  (halo: a)
>>> from jshard._core.layout import MeshAxes
>>> from jshard._rules.rule import Candidate
>>> from jshard._rules.sent_collectives import internal_collectives
>>> sent = internal_collectives(found, Candidate((joint_code(found, 0),)), MeshAxes(("x",), (4,)), [x], [x])
>>> [(s.kind, s.hop, s.local_bytes) for s in sent]
[('permute', -1, 4.0), ('permute', 1, 4.0)]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jshard._core.jaxcompat import itemsize
from jshard._core.layout import ArrayType, MeshAxes
from jshard._rules.block_reads import BlockReads, WindowReads
from jshard._rules.neighbour_exchange import at_device
from jshard._rules.registry import block_index
from jshard._rules.rule import Dims, InternalCollective, JointCut, Rule, Workspace, joint_code


@dataclasses.dataclass(frozen=True)
class Halo:
    """A joint cut, and what it makes blocks read: (operand, dimension of it, the interval of each block)."""

    cut: JointCut
    reads: tuple[tuple[int, int, BlockReads], ...]
    added: bool = False  # `InternalCollective.added`


def with_halos(rule: Rule, operands: Sequence[ArrayType], halos: Sequence[Halo]) -> Rule:
    """A rule with halos as joint cuts, their exchanges as internal collectives, and their buffers as workspace."""
    halos = [h for h in halos if all(_can_be_sent(operands[k]) for k, _, _ in h.reads)]
    first = len(rule.joint)
    codes = [joint_code(rule, first + i) for i in range(len(halos))]
    sent = [
        InternalCollective(
            "permute",
            itemsize(operands[k].dtype),
            operand=k,
            over=code,
            reads=reads,
            dim=dim,
            added=halo.added,
        )
        for code, halo in zip(codes, halos, strict=True)
        for k, dim, reads in halo.reads
    ]
    buffers = []
    for k in sorted({k for h in halos for k, _, _ in h.reads}):
        own = [(code, *r) for code, h in zip(codes, halos, strict=True) for r in h.reads if r[0] == k]
        edges = {dim: max(0, reads.length(2) - reads.size // 2) for _, _, dim, reads in own}
        over = tuple(code for code, *_ in own)
        buffers.append(_buffer(rule.operands[k], operands[k], over, edges))
    return dataclasses.replace(
        rule,
        joint=(*rule.joint, *(h.cut for h in halos)),
        internal=(*rule.internal, *sent),
        workspace=(*rule.workspace, *buffers),
    )


def _can_be_sent(aval: ArrayType) -> bool:
    """Whether blocks of this element type can be permuted and masked: not those of keys."""
    return not jnp.issubdtype(aval.dtype, jax.dtypes.extended) and aval.dtype != jax.dtypes.float0


def _buffer(dims: Dims, aval: ArrayType, over: tuple[int, ...], edges: dict[int, int]) -> Workspace:
    """An operand with its edges: a copy of the block, longer in some dimensions."""
    size, factors, more = float(itemsize(aval.dtype)), [], []
    for d, (fs, n) in enumerate(zip(dims, aval.shape, strict=True)):
        size *= 1 if fs else n
        factors += fs
        more += [edges.get(d, 0) if i == 0 else 0 for i in range(len(fs))]
    return Workspace(tuple(factors), size, over=over, more=tuple(more))


def local_windows(
    x: jax.Array, dim: int, reads: WindowReads, axes: Sequence[str], mesh: MeshAxes, fill: ArrayLike = 0
) -> tuple[jax.Array, tuple[int, int], int]:
    """What a block's windows are applied to, given what the device reads; the padding, and the dilation that is left.

    Where the first element is at another position of the dilated dimension on each device, the dilation is written out,
    with `fill` between the elements.
    """
    n = mesh.size(*axes)
    phases, total = reads.phases(n).tolist(), reads.extent(n)
    if len(set(phases)) == 1:
        low = int(phases[0])
        return x, (low, total - low - (x.shape[dim] - 1) * reads.base - 1), reads.base
    config = [(0, 0, 0)] * x.ndim
    config[dim] = (reads.base - 1, total, reads.base - 1)
    dilated = lax.pad(x, jnp.asarray(fill, x.dtype), config)
    start = at_device([reads.base - 1 - p for p in phases], block_index(axes, mesh))
    return lax.dynamic_slice_in_dim(dilated, start, total, dim), (0, 0), 1
