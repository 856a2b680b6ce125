"""The order of dimensions in memory: arrays that are row-major, and products that read them transposed.

Problem.  Arguments and results of a compiled program are row-major; in between the compiler chooses (XLA's
minor-to-major). A product with batch dimensions reads an operand fastest where those are outermost. A key-value cache of
shape (batch, length, heads, width) is multiplied head by head: where it is an argument, the product makes a transposed
copy of it. Where it goes round a loop, the TPU compiler transposes it once before the loop and back after it, and while
it does, both are there.

Idea.  Follow the arrays from the arguments through updates, loops, slices and casts to the products. An array that every
product reads in its own order is kept row-major: compiled alone, an update of it may transpose it as well, for the sake
of the few rows that it writes (`LocalContext.in_row_major`). Of the others a copy is counted: at the product, or while
the loop runs.

Seen on v5e with libtpu 0.0.42: a cache (32, 2, 8192, 128) in a `fori_loop`: 428 MB for 294 with one array transposed, 294
and 14% fewer cycles a turn where it is kept row-major; (32, 8192, 2, 128): 428 MB transposed before the loop, 562 MB
transposed in every turn.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jshard._core.hardware import Chip
from jshard._memory.in_place import CARRY_KINDS, is_update, updated_stacks
from jshard._program.graph import Literal, Operator, Program


_VIEWS = frozenset("slice dynamic_slice squeeze reshape convert_element_type transpose copy".split())
_BOUNDARIES = ("scan_const", "while_const", "scan_xs")


@dataclasses.dataclass(frozen=True)
class MemoryLayout:
    """`row_major` are the updates whose arrays stay so; `copies` the (operator, operand) that are transposed for it.

    `transposed` are the carries (their boundary operators) that are in another order while their loop runs.
    """

    row_major_updates: frozenset[int]
    transposed_operands: tuple[tuple[int, int], ...]
    transposed_carries: frozenset[int]


@dataclasses.dataclass(frozen=True)
class _View:
    """Which dimensions of an argument the dimensions of a tensor are, outermost first, and what it went through."""

    argument: int
    dims: tuple[int, ...]
    updates: tuple[int, ...] = ()
    carries: tuple[int, ...] = ()


def memory_layout(program: Program, chip: Chip) -> MemoryLayout:
    """The orders that the compiler for a chip gives a program's arrays; kept with the program.

    That for TPUs transposes what goes round a loop once, others transpose in every turn what a product reads.
    """
    key = ("memory order", chip.name.startswith("tpu"))
    if key not in program.memo:
        program.memo[key] = _memory_layout(program, key[1])
    return program.memo[key]


def _memory_layout(program: Program, once: bool) -> MemoryLayout:
    views = _views(program)
    wrong: list[tuple[int, int, _View]] = []
    for i in np.flatnonzero(program.use_def.has_primitive(frozenset(("dot_general",)))).tolist():
        op = program.operators[i]
        for k, a in enumerate(op.operands):
            view = None if isinstance(a, Literal) else views.get(a)
            if view is not None and not _batch_dims_outermost(op, k, view):
                wrong.append((i, k, view))
    # All that shares an array with one that is transposed is transposed with it.
    others = {u for *_, view in wrong for u in view.updates}
    whose = {view.argument for *_, view in wrong}
    all_updates = {u: v.argument for v in views.values() for u in v.updates}
    row_major = frozenset(u for u, arg in all_updates.items() if u not in others and arg not in whose)
    transposed = frozenset(view.carries[0] for *_, view in wrong if view.carries and once)
    return MemoryLayout(
        row_major, tuple((i, k) for i, k, view in wrong if not (view.carries and once)), transposed
    )


def _views(program: Program) -> dict[int, _View]:
    """The tensors that are arguments, or parts of them as they lie."""
    views: dict[int, _View] = {}
    stacks = updated_stacks(program)
    round_loops = {s.xs for s in stacks.values()}
    for i in program.inputs:
        t = program.operators[i].results[0]
        if program.operators[i].kind == "input":
            views[t] = _View(t, tuple(range(program.tensors[t].ndim)))
    for op in program.operators:
        first = op.operands[0] if op.operands else None
        view = None if first is None or isinstance(first, Literal) else views.get(first)
        if view is None:
            continue
        if op.kind in CARRY_KINDS:
            view = dataclasses.replace(view, carries=(*view.carries, op.id))
        elif op.kind == "scan_xs":
            through = (*view.carries, op.id) if op.id in round_loops else view.carries
            view = dataclasses.replace(view, dims=view.dims[1:], carries=through)
        elif op.kind == "scan_ys" and op.id in stacks:
            stack = program.operators[stacks[op.id].xs].operands[0]
            view = views.get(stack) if isinstance(stack, int) else None
        elif op.kind == "eqn" and is_update(op.primitive):
            view = dataclasses.replace(view, updates=(*view.updates, op.id))
        elif op.kind == "eqn" and op.primitive in _VIEWS:
            view = _view_after(op, view, program)
        elif op.kind not in _BOUNDARIES:
            continue
        if view is not None:
            views.update(dict.fromkeys(op.results, view))
    return views


def _view_after(op: Operator, view: _View, program: Program) -> _View | None:
    """The view after a slice, a cast or a change of shape that moves nothing; None where dimensions are joined or split."""
    old = program.tensors[op.operands[0]].shape if isinstance(op.operands[0], int) else ()
    new = program.tensors[op.results[0]].shape
    if op.primitive == "transpose":
        return dataclasses.replace(view, dims=tuple(view.dims[d] for d in op.eqn.params["permutation"]))
    if old != new and op.primitive in ("squeeze", "reshape"):
        # Only dimensions of length one come and go.
        kept = [(s, d) for s, d in zip(old, view.dims, strict=True) if s != 1]
        if [s for s in new if s != 1] != [s for s, _ in kept]:
            return None
        left = iter(kept)
        return dataclasses.replace(view, dims=tuple(next(left)[1] if s != 1 else -1 for s in new))
    return view


def _batch_dims_outermost(op: Operator, operand: int, view: _View) -> bool:
    """Whether the batch dimensions of a product's operand are the outermost ones of the array that it is part of."""
    _, batch = op.eqn.params["dimension_numbers"]
    shape = op.eqn.invars[operand].aval.shape
    first = sorted(view.dims[d] for d in batch[operand] if shape[d] != 1)
    every = sorted(d for d, s in zip(view.dims, shape, strict=True) if s != 1)
    return first == every[: len(first)]
