"""Attention: its batch, its heads, its queries, its keys, or both sequences together may be cut.

| cut | what moves inside the operator |
|---|---|
| batch; heads | nothing; if the axis is longer than there are key heads, these are whole and each device takes its own |
| queries ("t") | nothing: keys and values are whole, so they are gathered before |
| "keys", queries whole (decoding) | two all-reduces, of largest logit and sum; the result is a partial sum |
| "ring": queries and keys along one axis | keys and values n - 1 times to the next device, backward their gradients too |
| "zigzag": the same, a causal mask's work spread evenly | and halves of all that has a position, before and after |

Cutting the sequence outside and the heads inside is the second row with an all-to-all before and after, which the search
finds as any other change of layout (Ulysses: S. A. Jacobs et al., arXiv 2309.14509). The backward pass has the same
cuts: with these known, keys that are cut need no exchange but the sum of the queries' gradients.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jshard._core.jaxcompat import itemsize
from jshard._core.layout import ArrayType, MeshAxes
from jshard._rules.attention.definition import BLOCK, Attention, softmax_dtype
from jshard._rules.factors import Factors
from jshard._rules.registry import LocalContext, OpView, block_index, family
from jshard._rules.rule import (
    PARTIAL,
    WHOLE,
    Candidate,
    Dims,
    InternalCollective,
    JointCut,
    Rule,
    Workspace,
    joint_code,
    operand_layouts,
)


if TYPE_CHECKING:
    from jshard._rules.attention.online_softmax import Part
    from jshard._rules.attention.ring import Ring


rule = family("attention")

_NOTE = "the size of a head is whole, and so are key heads that their query heads are not cut with"


class _Numbering:
    """The factors of an attention, and the dimensions of its operands and results."""

    def __init__(self, op: OpView):
        spec: Attention = op.params["spec"]
        q, k, v = op.ins[:3]
        f = Factors()
        self.batch = tuple(f.new(n) for n in q.shape[:-3])
        self.t, self.s = f.new(q.shape[-3]), f.new(k.shape[-3])
        self.n = f.new(q.shape[-2])
        self.m = self.n if q.shape[-2] == k.shape[-2] else f.new(k.shape[-2])
        self.h, self.e = f.new(q.shape[-1]), f.new(v.shape[-1])
        self.sizes = f.sizes
        self.q, self.k, self.v, self.out, self.softmax = (
            (*((b,) for b in self.batch), *((d,) for d in dims))
            for dims in (
                (self.t, self.n, self.h),
                (self.s, self.m, self.h),
                (self.s, self.m, self.e),
                (self.t, self.n, self.e),
                (self.n, self.t),
            )
        )
        num_pairs = spec.has_bias + spec.has_mask
        self.pairs = tuple(self._pairs(a) for a in op.ins[3 : 3 + num_pairs])
        segments = ((self.t,), (self.s,)) if spec.has_segments else ()
        rows = [a.shape[-2] for a in op.ins[3 : 3 + num_pairs]]
        same_length = q.shape[-3] == k.shape[-3]
        self.may_zigzag = spec.causal and spec.window is None and same_length and max(rows, default=1) == 1
        self.segments = tuple((*((b,) for b in self.batch), d) for d in segments)

    @property
    def operands(self) -> tuple[Dims, ...]:
        """Those of the forward pass."""
        return (self.q, self.k, self.v, *self.pairs, *self.segments)

    def _pairs(self, aval: ArrayType) -> Dims:
        """Dimensions of a bias or mask; one of length one is broadcast."""
        full = (*self.batch, self.n, self.t, self.s)
        return tuple((f,) if size > 1 else () for f, size in zip(full, aval.shape, strict=True))

    def joint_cuts(self, results: Sequence[Dims], operands: Sequence[Dims]) -> tuple[JointCut, ...]:
        """The cuts of several factors: heads with their key heads, both sequences, keys alone.

        A result that does not carry the factor by which its addends are cut is a partial sum, but not those of the softmax.
        """

        def carried(dims: Dims, *factors: int) -> int:
            return next((f for f in factors if any(f in d for d in dims)), WHOLE)

        def summed(dims: Dims, *factors: int) -> int:
            own = carried(dims, *factors)
            return PARTIAL if own == WHOLE and dims != self.softmax else own

        def cut(name: str, *factors: int, major: bool = False) -> JointCut:
            return JointCut(
                name,
                tuple(carried(d, *factors) for d in operands),
                tuple(summed(d, *factors) for d in results),
                major,
            )

        ring = JointCut(
            "ring",
            tuple(carried(d, self.t) if d not in (self.k, self.v) else self.s for d in operands),
            tuple(summed(d, self.t) if d not in (self.k, self.v) else self.s for d in results),
        )
        heads = [cut("heads", self.n, self.m, major=True)] if self.m != self.n else []
        balanced = dataclasses.replace(ring, name="zigzag", alone=True, pieces=2)
        return (*heads, ring, cut("keys", self.s, major=True), *([balanced] if self.may_zigzag else []))


def _code(r: Rule, name: str) -> int:
    """The axis code of a joint cut; one that no candidate has where the rule lacks the cut."""
    return joint_code(r, next((k for k, cut in enumerate(r.joint) if cut.name == name), len(r.joint)))


def _rule(
    op: OpView,
    f: _Numbering,
    operands: tuple[Dims, ...],
    results: tuple[Dims, ...],
    flops: float,
) -> Rule:
    """The rule without what it sends and holds."""
    spec: Attention = op.params["spec"]
    joint = f.joint_cuts(results, operands)
    blocked = (f.s, f.h, f.e) if f.m == f.n else (f.s, f.m, f.h, f.e)
    base = Rule(
        operands, results, f.sizes, blocked=blocked,
        work=flops / math.prod(f.sizes) if math.prod(f.sizes) else 0.0,
        note=_NOTE, joint=joint,
    )  # fmt: skip
    if not spec.causal or spec.window is not None:
        return base
    return dataclasses.replace(base, triangular=(f.t, _code(base, "ring"), _code(base, "keys")))


def _flops(op: OpView, *, backward: bool = False) -> float:
    spec: Attention = op.params["spec"]
    return spec.flops(*(a.shape for a in op.ins[:3]), backward=backward)


def _forward_local(ctx: LocalContext, *arrays: jax.Array) -> Sequence[jax.Array]:
    # Here, so that `import jshard` stays light.
    from jshard._rules.attention.blocks import arranged, as_result
    from jshard._rules.attention.kernels import local_forward
    from jshard._rules.attention.ring import ring_forward

    spec, q = ctx.op.params["spec"], arrays[0]
    ring, kv_heads = _ring(ctx), _kv_heads(ctx)
    if ring is not None:
        part = ring_forward(spec, arrays, ring, kv_heads)
    else:
        rows, columns = ctx.operand_offset(0, -3), ctx.operand_offset(1, -3)
        part = local_forward(spec, arranged(spec, arrays, kv_heads), rows, columns)
    keys = ctx.axes(_code(ctx.rule, "keys"))
    if ctx.mesh.size(*keys) > 1:
        part = _weighted(ctx, part, keys, first=0 if ring is None else 2)
    batch = q.shape[:-3]
    softmax = (y.reshape(*batch, -1, y.shape[-1]) for y in (part.largest, part.total))
    return [as_result(part.out, batch).astype(q.dtype), *softmax]


def _weighted(ctx: LocalContext, part: Part, axes: tuple[str, ...], first: int) -> Part:
    """The device's addend of the result over all keys, with their largest logit and sum."""
    from jshard._rules.attention.online_softmax import weight  # here, so that `import jshard` stays light

    with ctx.collective_scope(first):
        largest = lax.pmax(part.largest, axes)
    own = weight(part, largest)
    with ctx.collective_scope(first + 1):
        total = lax.psum(own, axes)
    share = own / jnp.where(total > 0, total, jnp.ones_like(total))
    return type(part)(part.out * share[..., None], largest, total)


def _kernel(op: OpView, r: Rule, candidate: Candidate, mesh: MeshAxes, platform: str) -> str:
    """What computes a candidate's blocks."""
    from jshard._rules.attention.kernel_choice import kernel_of  # here, so that `import jshard` stays light

    layouts = operand_layouts(r, candidate, mesh)
    cut = [layouts[i].dims[-3] for i in (0, 1)]
    pieces = mesh.size(*cut[0]), mesh.size(*cut[1])
    zigzag = mesh.size(*candidate.cut(_code(r, "zigzag"), mesh)) > 1
    return kernel_of(op.params["spec"], op.ins, pieces, platform, same=cut[0] == cut[1], zigzag=zigzag)


@rule("jshard_attention", local=_forward_local, kernel=_kernel)
def attention(op: OpView) -> Rule:
    """The cuts of the forward pass; results are attention, the largest logit and the sum of its softmax."""
    f = _Numbering(op)
    r = _rule(op, f, f.operands, (f.out, f.softmax, f.softmax), _flops(op))
    size = itemsize(op.outs[1].dtype)
    sent = _rounds(op, _code(r, "ring"), ())
    sent += [InternalCollective("all_reduce", size, 1, over=_code(r, "keys"))] * 2
    if f.may_zigzag:
        over = _code(r, "zigzag")
        sent += _rounds(op, over, ()) + _halves(op, over, _permuted_inputs(op), (0, 1, 2))
    weighted = Workspace((*f.batch, f.t, f.n, f.e), size)
    return dataclasses.replace(r, internal=tuple(sent), workspace=(*_workspace(op, f, r), weighted))


def _backward_local(ctx: LocalContext, *arrays: jax.Array) -> Sequence[jax.Array]:
    # Here, so that `import jshard` stays light.
    from jshard._rules.attention.blocks import arranged, arranged_back, by_head
    from jshard._rules.attention.kernels import Softmax, local_backward
    from jshard._rules.attention.ring import ring_backward

    spec, bias_gradient = ctx.op.params["spec"], ctx.op.params["bias_gradient"]
    inputs, results = arrays[: spec.num_operands], arrays[spec.num_operands :]
    ring, kv_heads = _ring(ctx), _kv_heads(ctx)
    if ring is not None:
        found = ring_backward(spec, inputs, results, ring, kv_heads, bias_gradient=bias_gradient)
    else:
        x = arranged(spec, inputs, kv_heads)
        b, _, k, g, _ = x.q.shape
        out, largest, total, cotangent = results
        largest, total = (y.reshape(b, k, g, y.shape[-1]) for y in (largest, total))
        softmax = Softmax(largest, total, by_head(out, k), by_head(cotangent, k))
        rows, columns = ctx.operand_offset(0, -3), ctx.operand_offset(1, -3)
        gradients = local_backward(spec, x, softmax, rows, columns, bias_gradient=bias_gradient)
        found = arranged_back(spec, gradients, inputs, kv_heads)
    return [g.astype(x.dtype) for g, x in zip(found, inputs, strict=False)]


@rule("jshard_attention_backward", local=_backward_local, kernel=_kernel)
def attention_backward(op: OpView) -> Rule:
    """The same cuts; a gradient that does not carry a factor is a partial sum over its cut.

    Five products: the logits again, the gradients of probabilities, values, queries and keys.
    """
    f = _Numbering(op)
    gradients = (f.q, f.k, f.v, *f.pairs[: op.params["bias_gradient"]])
    r = _rule(op, f, (*f.operands, f.out, f.softmax, f.softmax, f.out), gradients, _flops(op, backward=True))
    sent = _rounds(op, _code(r, "ring"), (1, 2))
    if f.may_zigzag:
        last, over = len(op.ins), _code(r, "zigzag")
        inputs = (*_permuted_inputs(op), *range(last - 4, last))
        sent += _rounds(op, over, (1, 2)) + _halves(op, over, inputs, (0, 1, 2))
    size = itemsize(softmax_dtype(op.ins[0].dtype))
    keys, values = (*f.batch, f.s, f.m, f.h), (*f.batch, f.s, f.m, f.e)
    sums = [Workspace(d, size) for d in ((*f.batch, f.t, f.n, f.h), keys, values)]
    travelling = [Workspace(d, 2 * size, over=_rings(r)) for d in (keys, values)]
    held = (*_workspace(op, f, r), *sums, *travelling)
    return dataclasses.replace(r, internal=tuple(sent), reduction=(*f.batch, f.t, f.n), workspace=held)


def _rings(r: Rule) -> tuple[int, ...]:
    return tuple(_code(r, cut.name) for cut in r.joint if cut.name in ("ring", "zigzag"))


def _workspace(op: OpView, f: _Numbering, r: Rule) -> tuple[Workspace, ...]:
    """Logits and probabilities of one block; in a ring, the keys and values that are here and those that arrive."""
    block = (*f.batch, f.n, f.t, f.s)
    most = (*[0] * (len(f.batch) + 1), BLOCK, BLOCK)
    moved = [
        Workspace((*f.batch, f.s, f.m, d), 2 * itemsize(op.ins[1].dtype), over=_rings(r)) for d in (f.h, f.e)
    ]
    return (Workspace(block, 2 * itemsize(softmax_dtype(op.ins[0].dtype)), most), *moved)


def _rounds(op: OpView, over: int, gradients: Sequence[int]) -> list[InternalCollective]:
    """What goes round a ring: keys and values, and some gradients in the type of the softmax."""
    sum_size = itemsize(softmax_dtype(op.ins[0].dtype))
    out = [
        InternalCollective("permute", itemsize(op.ins[i].dtype), operand=i, over=over, ring=True)
        for i in (1, 2)
    ]
    return out + [InternalCollective("permute", sum_size, i, over=over, ring=True) for i in gradients]


def _permuted_inputs(op: OpView) -> tuple[int, ...]:
    """The operands that zigzag order permutes: those that carry positions, but the keys' segments."""
    spec: Attention = op.params["spec"]
    return (0, 1, 2, *([spec.num_operands - 2] if spec.has_segments else []))


def _halves(op: OpView, over: int, inputs: Sequence[int], results: Sequence[int]) -> list[InternalCollective]:
    """Two halves of each operand and result that are exchanged for zigzag order."""
    half = functools.partial(InternalCollective, "permute", over=over, fraction=0.5)
    out = [half(itemsize(op.ins[i].dtype), operand=i) for i in inputs for _ in range(2)]
    return out + [half(itemsize(op.outs[i].dtype), i) for i in results for _ in range(2)]


def _ring(ctx: LocalContext) -> Ring | None:
    """The ring of a candidate, if it has one of several devices."""
    from jshard._rules.attention.ring import Ring  # here, so that `import jshard` stays light

    axes, zigzag = ctx.axes(_code(ctx.rule, "ring")), ctx.axes(_code(ctx.rule, "zigzag"))
    if ctx.mesh.size(*zigzag) > 1:
        return Ring(zigzag, ctx.mesh, 0, 0, ctx.collective_scope, zigzag=True, equal_positions=True)
    if ctx.mesh.size(*axes) == 1:
        return None
    keys = ctx.axes(_code(ctx.rule, "keys"))  # major to the ring's
    columns = ctx.op.ins[1].shape[-3] // ctx.mesh.size(*keys)
    column = block_index(keys, ctx.mesh) * columns if keys else 0
    lengths = {(ctx.op.ins[i].shape[-3], ctx.operand_shape(i)[-3]) for i in (0, 1)}
    equal = len(lengths) == 1 and ctx.mesh.size(*keys) == 1
    return Ring(
        axes, ctx.mesh, ctx.operand_offset(0, -3), column, ctx.collective_scope, equal_positions=equal
    )


def _kv_heads(ctx: LocalContext) -> jax.Array | None:
    """The key heads, of those on this device, that its query heads belong to; None for all.

    They are fewer, or in MHA-like order, where query heads are cut and key heads are not.
    """
    n, k = ctx.op.ins[0].shape[-2], ctx.op.ins[1].shape[-2]
    local_n, local_k = ctx.operand_shape(0)[-2], ctx.operand_shape(1)[-2]
    group = n // k
    if local_n == local_k * group:
        return None
    if local_n % group == 0:
        heads = np.arange(local_n // group) * group  # whole groups
    elif group % local_n == 0:
        heads = np.zeros(1, dtype=np.int64)  # a part of one group
    else:
        heads = np.arange(local_n)  # parts of groups: a key head for each query head
    return jnp.asarray((ctx.operand_offset(0, -2) + heads) // group - ctx.operand_offset(1, -2))
