"""`sort` along a cut dimension, and `searchsorted` in an array that is cut.

Blocks are sorted, then merged and split by pairs of devices (`sorting_network.py`). A stable sort takes the positions
along as the last key. The number of elements before a value in a sorted array is the sum of those in its blocks, so that
a search in a cut array is a partial sum.

>>> from jax import ShapeDtypeStruct as S
>>> x = S((4, 64), "float32")
>>> print(sort(OpView("sort", {"dimension": 1, "is_stable": True, "num_keys": 1}, (x,), (x,))))
a b -> a b  (network: b)
>>> print(searchsorted(OpView("searchsorted", {"side": "left"}, (S((64,), "float32"), x), (S((4, 64), "int32"),))))
a, b c -> b c  (reduce a)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jshard._core.jaxcompat import itemsize, to_common_vma
from jshard._core.layout import ArrayType
from jshard._rules.factors import Factors
from jshard._rules.registry import LocalContext, OpView, block_index, family
from jshard._rules.rule import InternalCollective, JointCut, Rule, Workspace, joint_code
from jshard._rules.sorting_network import sorted_over_devices


rule = family("sorting")

_POSITION = "int32"


def _sends_positions(op: OpView) -> bool:
    """Whether equal keys are told apart by their positions: of a stable sort that has more operands than keys."""
    return bool(op.params["is_stable"]) and op.params["num_keys"] < len(op.ins)


def _sort_local(ctx: LocalContext, *operands: jax.Array) -> Sequence[jax.Array]:
    axes = ctx.axes(joint_code(ctx.rule, 0)) if ctx.rule.joint else ()
    if ctx.mesh.size(*axes) == 1:
        return ctx.bind(*operands)
    dim, keys = ctx.op.params["dimension"], ctx.op.params["num_keys"]
    device = jnp.asarray(block_index(axes, ctx.mesh))
    arrays = list(operands)
    positions = _sends_positions(ctx.op)
    if positions:
        x = operands[0]
        own = lax.broadcasted_iota(_POSITION, x.shape, dim) + device.astype(_POSITION) * x.shape[dim]
        x, own = to_common_vma([x, own])
        arrays = [x, *operands[1:keys], own, *operands[keys:]]

    def sort(some: Sequence[jax.Array], d: int) -> list[jax.Array]:
        return list(lax.sort(tuple(some), dimension=d, is_stable=True, num_keys=keys + positions))

    # Positions are listed last among the rule's collectives, whatever their place among the keys.
    place = [*range(keys), len(operands), *range(keys, len(operands))] if positions else range(len(operands))
    count = len(ctx.collective_ids) // len(arrays)

    def scope(number: int):  # noqa: ANN202
        return ctx.collective_scope(place[number // count] * count + number % count if count else number)

    done = sorted_over_devices(arrays, dim, sort, axes, ctx.mesh, device, scope)
    return done[:keys] + done[keys + positions :]


@rule("sort", local=_sort_local)
def sort(op: OpView) -> Rule:
    """All operands are sorted together along one dimension, which is cut with the rounds of a sorting network."""
    f, n = Factors(), len(op.ins)
    dims = f.dims(op.ins[0].shape)
    along = dims[op.params["dimension"]]
    found = Rule(
        (dims,) * n, (dims,) * n, f.sizes, blocked=along, note="sorting compares elements along the whole dimension"
    )  # fmt: skip
    if not along or f.sizes[along[0]] < 2 or not all(map(_can_be_sent, op.ins)):
        return found
    sizes = [itemsize(a.dtype) for a in op.ins]
    sent = [(size, i) for i, size in enumerate(sizes)] + ([(4.0, 0)] if _sends_positions(op) else [])
    return dataclasses.replace(
        found,
        joint=(JointCut("network", along * n, along * n, network=True),),
        internal=tuple(
            InternalCollective("permute", size, operand=i, over=len(f.sizes), network=True)
            for size, i in sent
        ),
        # The pairs of own and other elements: two blocks.
        workspace=(
            Workspace(tuple(d[0] for d in dims), 2 * sum(size for size, _ in sent), over=(len(f.sizes),)),
        ),
    )


def _can_be_sent(aval: ArrayType) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.number) or jnp.issubdtype(aval.dtype, jnp.bool_))


@rule("searchsorted")
def searchsorted(op: OpView) -> Rule:
    """Elements before each query in a sorted array: counted block by block, and added."""
    f = Factors()
    array = f.dims(op.ins[0].shape)
    queries = f.dims(op.ins[1].shape)
    n = max(1, op.ins[0].shape[0])
    return Rule(
        (array, queries), (queries,), f.sizes, reduction=array[0], work=max(1.0, math.log2(n)) / n,
    )  # fmt: skip
