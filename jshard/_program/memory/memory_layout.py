"""Memory layouts: arrays that stay row-major, and products that read them transposed (XLA's minor-to-major order).

Problem.  Arguments and results of a compiled program are row-major; in between the compiler chooses. A product with
batch dimensions reads an operand fastest where those are outermost. A key-value cache of shape (batch, length, heads,
width) is multiplied head by head: where it is an argument, the product makes a transposed copy of it. Where a loop
carries it, the TPU compiler transposes it once before the loop and back after it, and meanwhile both are live.

Idea.  Follow the arrays from the arguments through updates, loops, slices and casts to the products. An array that every
product reads in its own order is kept row-major: compiled alone, an update of it might transpose it as well, for the
sake of the few rows that it writes (`LocalContext.in_row_major`). For each of the others a copy is counted: at the
product, or while the loop runs.

An update of which the new elements come from other elements of the same array is not constrained: XLA for CPUs writes
over them before they are read (`docs/jax_bugs.md`).

Seen on v5e with libtpu 0.0.42: a cache (32, 2, 8192, 128) in a `fori_loop`: 428 MB instead of 294 with one array
transposed, 294 and 14% fewer cycles an iteration where it is kept row-major; (32, 8192, 2, 128): 428 MB transposed before
the loop, 562 MB transposed in every iteration.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jshard._core.hardware import Chip
from jshard._program.graph import Literal, Operator, Program
from jshard._program.memory.fusion_traits import fusion_traits
from jshard._program.memory.in_place import CARRY_KINDS, is_update, updated_stacks


_VIEWS = frozenset(
    "slice dynamic_slice squeeze reshape convert_element_type rounded_sum transpose copy".split()
)
_BOUNDARIES = ("scan_const", "while_const", "scan_xs")


@dataclasses.dataclass(frozen=True)
class MemoryLayout:
    """Where a compiled program departs from row-major arrays, and where it must not.

    - `row_major_updates`: updates whose arrays stay row-major.
    - `transposed_operands`: (operator, operand) that are copied transposed for a product.
    - `transposed_carries`: boundary operators of carries that have another layout while their loop runs.
    """

    row_major_updates: frozenset[int]
    transposed_operands: tuple[tuple[int, int], ...]
    transposed_carries: frozenset[int]


@dataclasses.dataclass(frozen=True)
class _View:
    """A tensor as part of an argument: the argument's dimension of each of its own, and the updates and carries between."""

    argument: int
    dims: tuple[int, ...]
    updates: tuple[int, ...] = ()
    carries: tuple[int, ...] = ()


def memory_layout(program: Program, chip: Chip) -> MemoryLayout:
    """The memory layouts that the compiler for a chip gives a program's arrays. Memoised.

    The TPU compiler transposes a loop's carry once, others transpose the operand of a product in every iteration.
    """
    key = ("memory layout", chip.name.startswith("tpu"))
    if key not in program.memo:
        program.memo[key] = _memory_layout(program, key[1])
    return program.memo[key]


def _memory_layout(program: Program, transposes_carries: bool) -> MemoryLayout:
    views = _views(program)
    wrong: list[tuple[int, int, _View]] = []
    for i in np.flatnonzero(program.use_def.has_primitive(frozenset(("dot_general",)))).tolist():
        op = program.operators[i]
        for k, a in enumerate(op.operands):
            view = None if isinstance(a, Literal) else views.get(a)
            if view is not None and not _batch_dims_outermost(op, k, view):
                wrong.append((i, k, view))
    # An argument that one product reads transposed is not kept row-major for the others.
    transposed_updates = {u for *_, view in wrong for u in view.updates}
    transposed_arguments = {view.argument for *_, view in wrong}
    all_updates = {u: v.argument for v in views.values() for u in v.updates}
    row_major = frozenset(
        u
        for u, arg in all_updates.items()
        if u not in transposed_updates
        and arg not in transposed_arguments
        and not _reads_elsewhere(program, program.operators[u])
    )
    transposed = frozenset(view.carries[0] for *_, view in wrong if view.carries and transposes_carries)
    return MemoryLayout(
        row_major,
        tuple((i, k) for i, k, view in wrong if not (view.carries and transposes_carries)),
        transposed,
    )


def _reads_elsewhere(program: Program, update: Operator) -> bool:
    """Whether what is written comes, through operators that may be one kernel with the update, from another part of it."""
    array, traits = update.operands[0], fusion_traits(program)
    pending, seen = [a for a in update.operands[1:] if isinstance(a, int)], set()
    while pending:
        t = pending.pop()
        if t == array:
            return True
        maker = program.operators[program.use_def.def_op[t]]
        if t in seen or not (traits.duplicable[maker.id] or maker.primitive in _VIEWS):
            continue
        seen.add(t)
        if not _is_same_place(program, maker, update):
            pending += [a for a in maker.operands if isinstance(a, int)]
    return False


def _is_same_place(program: Program, part: Operator, update: Operator) -> bool:
    """Whether an operator takes of the updated array what the update writes."""
    if part.operands[:1] != update.operands[:1] or part.primitive not in ("slice", "dynamic_slice"):
        return False
    written = update.operands[1]
    shape = written.aval.shape if isinstance(written, Literal) else program.tensors[written].shape
    if update.primitive != "dynamic_update_slice" or program.tensors[part.results[0]].shape != shape:
        return False
    if part.primitive == "slice":
        starts = [a.value if isinstance(a, Literal) else None for a in update.operands[2:]]
        return starts == list(part.equation.params["start_indices"])
    return [_number(a) for a in part.operands[1:]] == [_number(a) for a in update.operands[2:]]


def _number(a: Literal | int) -> tuple[bool, int]:
    return (True, int(np.asarray(a.value))) if isinstance(a, Literal) else (False, a)


def _views(program: Program) -> dict[int, _View]:
    """The tensors that are arguments, or parts of them in the same memory layout."""
    views: dict[int, _View] = {}
    stacks = updated_stacks(program)
    carried = {s.xs for s in stacks.values()}
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
            carries = (*view.carries, op.id) if op.id in carried else view.carries
            view = dataclasses.replace(view, dims=view.dims[1:], carries=carries)
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
    """The view after a slice, a cast or a reshape that keeps the dimensions; None where it joins or splits some."""
    old = program.tensors[op.operands[0]].shape if isinstance(op.operands[0], int) else ()
    new = program.tensors[op.results[0]].shape
    if op.primitive == "transpose":
        return dataclasses.replace(view, dims=tuple(view.dims[d] for d in op.equation.params["permutation"]))
    if old != new and op.primitive in ("squeeze", "reshape"):
        # Only dimensions of length one come and go.
        longer = [(s, d) for s, d in zip(old, view.dims, strict=True) if s != 1]
        if [s for s in new if s != 1] != [s for s, _ in longer]:
            return None
        dims = iter(longer)
        return dataclasses.replace(view, dims=tuple(next(dims)[1] if s != 1 else -1 for s in new))
    return view


def _batch_dims_outermost(op: Operator, operand: int, view: _View) -> bool:
    """Whether the batch dimensions of a product's operand are the outermost ones of the array that it is part of."""
    _, batch = op.equation.params["dimension_numbers"]
    shape = op.equation.invars[operand].aval.shape
    first = sorted(view.dims[d] for d in batch[operand] if shape[d] != 1)
    every = sorted(d for d, s in zip(view.dims, shape, strict=True) if s != 1)
    return first == every[: len(first)]
