"""Rules of the boundary operators of loops and branches.

All operands and results of a boundary operator have one layout. The stacked dimension of a scan's `xs` and `ys` is
never sharded, since every iteration reads or writes one slice of it.

A carry that only accumulates (the gradient of a weight that every iteration reads, or of microbatches) may stay a partial
sum until the loop ends: one all-reduce instead of one per iteration. The first device of an axis then starts from the
initial value, the others from zero. Small stacked sums (gradients of biases and scales) may stay partial too, which saves
latency. Large ones are reduced per iteration, since otherwise each device would hold unreduced gradients of all layers to
save some microseconds; but what a loop around adds up (the layers of a stage, in each tick of a pipeline) lives one turn.
"""

from __future__ import annotations

import math

from jshard._core.jaxcompat import itemsize
from jshard._core.layout import ArrayType
from jshard._rules.factors import linear_sets, unsharded_dims
from jshard._rules.registry import OpView, family
from jshard._rules.rule import Rule


SMALL_SUM_BYTES = 1 << 20
"""Bytes per iteration below which latency matters: on a TPU v5e axis their transfer takes about ten latencies."""

rule = family("boundary")


@rule("scan_const", "scan_carry", "while_const", "while_carry", "cond_join")
def same_layout(op: OpView) -> Rule:
    """Carries, constants and joins: one layout for every operand and result."""
    shape = op.outs[0].shape
    dims = tuple((k,) for k in range(len(shape)))
    return Rule(operands=(dims,) * len(op.ins), results=(dims,) * len(op.outs), sizes=tuple(shape), work=0.0)


@rule("scan_sum")
def accumulator(op: OpView) -> Rule:
    """A carry to which iterations only add: it may be a partial sum whether or not its initial value is one."""
    r = same_layout(op)
    return Rule(r.operands, r.results, r.sizes, linear=linear_sets(op, (1,), (0, 1)), work=0.0)


@rule("scan_xs")
def xs(op: OpView) -> Rule:
    """The result is one slice: the leading dimension of the operand is not sharded."""
    shape = op.outs[0].shape
    dims = tuple((k,) for k in range(len(shape)))
    return Rule(operands=(((), *dims),), results=(dims,), sizes=tuple(shape), work=0.0)


@rule("scan_ys")
def ys(op: OpView) -> Rule:
    """The operand is one slice: the leading dimension of the result is not sharded."""
    shape = op.outs[0].shape[1:]
    dims = tuple((k,) for k in range(len(shape)))
    linear = linear_sets(op, (0,)) if is_small_sum(op.ins[0]) else ()
    return Rule(operands=(dims,), results=(((), *dims),), sizes=tuple(shape), linear=linear, work=0.0)


@rule("scan_summed_ys")
def summed_ys(op: OpView) -> Rule:
    """As `ys`; it may stay a partial sum, since the loop around it only adds it up."""
    r = ys(op)
    return Rule(r.operands, r.results, r.sizes, linear=linear_sets(op, (0,)), work=0.0)


def is_small_sum(aval: ArrayType) -> bool:
    """Whether a stacked sum is so small that latency decides when to reduce it."""
    return math.prod(aval.shape) * itemsize(aval.dtype) <= SMALL_SUM_BYTES


@rule("predicate")
def predicate(op: OpView) -> Rule:
    """A loop condition or branch index: replicated."""
    return Rule((unsharded_dims(op.ins[0]),), (unsharded_dims(op.outs[0]),), sizes=(), work=0.0)
