"""Stacks that a loop slices and stacks again, updated: carried by the loop as one buffer.

Problem.  A `scan` over layers takes a cache of all layers as slices and returns it as slices. Compiled as written, that
is two buffers and a copy of every slice: a decoder's step copies its whole cache to write one row a layer.

Idea.  Where a slice is only updated (`_program/memory/in_place.py`), and the plan reshards nothing between the updates, the
loop carries the whole stack. An iteration updates its part of it in place, and reads the slice from there.

Only for compiled calls: the derivative of such a loop, taken from outside, would save the whole stack every iteration.
"""

from __future__ import annotations

import dataclasses

from jshard._program.graph import Literal, Program
from jshard._program.memory.in_place import updated_stacks
from jshard._schedule.assignment import Value
from jshard._schedule.writer import RunCall, RunOperator


@dataclasses.dataclass(frozen=True)
class CarriedStack:
    """A stack that a loop carries: index of its `xs` and `ys`, its value before, its slice in the body, its result."""

    xs: int
    ys: int
    initial: Value
    slice: Value
    result: Value


def carried_stacks(action: RunCall, program: Program, values: list[Value]) -> list[CarriedStack]:
    """The stacks that a loop carries; `values` are the tensors as they are made."""
    if action.call.kind != "scan":
        return []
    known, b = updated_stacks(program), action.call.boundary
    first = len(b["const"]) + len(b["carry"])
    out = []
    runs: dict[int, RunOperator] = {}
    for j, ys in enumerate(b["ys"]):
        if ys not in known:
            continue
        runs = runs or {a.op: a for a in action.bodies[0] if isinstance(a, RunOperator)}
        stack = known[ys]
        k = b["xs"].index(stack.xs)
        given, at, end = (
            action.reads[first + k],
            action.entry[0][first + k],
            action.returns[0][len(b["carry"]) + j],
        )
        result = values[program.operators[ys].results[0]]
        if (
            isinstance(given, Literal)
            or isinstance(end, Literal)
            or given[1] != result[1]
            or given[1].partial
        ):
            continue
        here: Value = at
        for op in stack.updates:
            if op not in runs or runs[op].reads[0] != here:
                break
            here = values[program.operators[op].results[0]]
        else:
            if here == end:
                out.append(CarriedStack(k, j, given, at, result))
    return out
