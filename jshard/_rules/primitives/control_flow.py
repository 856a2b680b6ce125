"""Rules of the boundary operators: where values enter and leave loops and branches.

All operands and results of a boundary operator have one layout; a stacked dimension (a scan's `xs` and `ys`)
is never cut, since every turn needs its own slice of it.

A sum that a loop adds up (the gradient of a weight that every turn reads, or of many small batches) may stay a
partial sum until the loop ends: one all-reduce instead of one a turn. The first device of an axis then starts from
the initial value, the others from zero. Small sums that a loop stacks (the gradients of biases and scales) may stay
partial as well: what they save is latency. Large ones end in their turn, so that no device holds whole gradients of
all layers for the sake of some microseconds.
"""

from __future__ import annotations

import math
from typing import Any

from jshard._jaxcompat import itemsize
from jshard._rules.factors import linear_sets
from jshard._rules.registry import OpView, family
from jshard._rules.rule import Rule


SMALL_SUM_BYTES = 1 << 20
"""Bytes of a turn's sum below which latency decides: on a TPU v5e axis they take about ten of its latencies."""

rule = family("boundary")


@rule("scan_const", "scan_carry", "while_const", "while_carry", "cond_join")
def same_layout(op: OpView) -> Rule:
    """One layout for every operand and result."""
    shape = op.outs[0].shape
    dims = tuple((k,) for k in range(len(shape)))
    return Rule(operands=(dims,) * len(op.ins), results=(dims,) * len(op.outs), sizes=tuple(shape), work=0.0)


@rule("scan_sum")
def accumulator(op: OpView) -> Rule:
    """One layout, and partial sums from turn to turn, whether or not the initial value is one."""
    r = same_layout(op)
    return Rule(r.operands, r.results, r.sizes, linear=linear_sets(op, (1,), (0, 1)), work=0.0)


@rule("scan_xs")
def xs(op: OpView) -> Rule:
    """The body sees one slice: the leading dimension of the operand stays whole."""
    shape = op.outs[0].shape
    dims = tuple((k,) for k in range(len(shape)))
    return Rule(operands=(((), *dims),), results=(dims,), sizes=tuple(shape), work=0.0)


@rule("scan_ys")
def ys(op: OpView) -> Rule:
    """The body gives one slice: the leading dimension of the result stays whole."""
    shape = op.outs[0].shape[1:]
    dims = tuple((k,) for k in range(len(shape)))
    through = linear_sets(op, (0,)) if is_small_sum(op.ins[0]) else ()
    return Rule(operands=(dims,), results=(((), *dims),), sizes=tuple(shape), linear=through, work=0.0)


def is_small_sum(aval: Any) -> bool:
    """Whether a sum that a loop stacks is so small that latency decides when to end it."""
    return math.prod(aval.shape) * itemsize(aval.dtype) <= SMALL_SUM_BYTES


@rule("predicate")
def predicate(op: OpView) -> Rule:
    """A test or branch index is the same on every device."""
    ndim = len(op.ins[0].shape)
    return Rule(operands=(((),) * ndim,), results=(((),) * len(op.outs[0].shape),), sizes=(), work=0.0)
