"""Which dimensions are worth padding on a mesh, and to which sizes.

Problem.  A program with n sizes that no cut divides has 2^n programs in which some of them are padded.

Idea.  A size is padded to the largest cut that the mesh offers and that leaves little waste: to a multiple of the
largest product of mesh axes, if that adds at most an eighth. All classes of dimensions with large tensors are padded at
once, and those that the plan then does not cut are left as they were. Small tensors are never padded: to keep them whole
costs next to nothing.

>>> mesh = MeshAxes(("x", "y"), (4, 4))
>>> padded_size(50257, mesh), padded_size(197, mesh), padded_size(12, mesh), padded_size(64, mesh)
(50272, 208, None, None)
"""

from __future__ import annotations

import math
from collections.abc import Collection

from jshard._core.jax_types import ClosedJaxpr
from jshard._core.layout import MeshAxes
from jshard._plan.padded_program import Sizes
from jshard._plan.padding_classes import PaddingClasses
from jshard._program.graph import Program
from jshard._schedule.schedule import Schedule


MOST_WASTE = 0.125
"""The largest share of its true size that a dimension grows by, where the user does not ask for more."""

LEAST_BYTES = 1 << 20
"""Bytes of the largest tensor of a class that is padded: cutting a smaller one saves less than a microsecond of HBM."""

LEAST_GAIN = 0.01
"""Padding is tried where communication and repeated work take more than this share of a step."""

LEAST_POSSIBLE_GAIN = 0.01
"""... and where padding can gain more than this share of a step, or of the peak if memory is scarce (`padding_gain.py`)."""

SCARCE = 0.9
"""Of the budget: peaks above it are worth a search for lower ones."""


def padded_size(size: int, mesh: MeshAxes, most_waste: float = MOST_WASTE) -> int | None:
    """The size that a dimension is padded to; None if it divides, or if no cut leaves so little waste."""
    for pieces in reversed(mesh.piece_counts):
        if size % pieces == 0:
            return None
        padded = -(-size // pieces) * pieces
        if size >= pieces and padded - size <= most_waste * size and padded < 2**31:
            return padded
    return None


def large_sizes(program: Program, least_bytes: int) -> frozenset[int]:
    """The lengths of the dimensions of a program's tensors of at least so many bytes."""
    kinds = {(t.shape, t.itemsize) for t in program.tensors}
    return frozenset(n for shape, size in kinds if math.prod(shape) * size >= least_bytes for n in shape)


def padded_sizes(
    closed: ClosedJaxpr,
    lengths: Collection[int],
    mesh: MeshAxes,
    least_bytes: int = LEAST_BYTES,
    most_waste: float = MOST_WASTE,
) -> tuple[Sizes, PaddingClasses | None]:
    """The classes of a jaxpr that are worth padding, with their sizes; empty for programs whose large `lengths` divide."""
    target = {n: padded for n in lengths if (padded := padded_size(n, mesh, most_waste)) is not None}
    if not target:
        return {}, None
    classes = PaddingClasses(closed, frozenset(target))
    chosen = {(c.size, c.number): target[c.size] for c in classes.all() if c.largest_bytes >= least_bytes}
    return chosen, classes if chosen else None


def cut_sizes(schedule: Schedule) -> frozenset[int]:
    """The lengths of the dimensions that a schedule cuts in any tensor."""
    assignment, found = schedule.assignment, set()
    for tensor, layout in assignment.values:
        shape = assignment.program.tensors[tensor].shape
        found.update(n for n, axes in zip(shape, layout.dims, strict=True) if axes)
    return frozenset(found)
