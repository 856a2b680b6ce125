"""A second plan for TPUs, where arrays of convolutions would not fit as their compiler stores them.

Problem.  The TPU compiler takes features and batch for tiles of 8 x 128 (`tiled_memory.py`), and splits long rows of an
image into a larger batch; it then keeps most arrays in both forms. A U-Net of two images of 4096 x 4096 is planned at 2.2
GiB on 16 devices, takes 6.8 in tiles and 15.9 as it is stored: the compiler refuses it. Cut along rows in place of columns,
at the same cost, the same step takes 7.3.

Idea.  Where the bytes as stored, by the measured ratio for long rows, exceed the budget, a second search has convolutions
with rows of at most `ROW` pixels a device. Its plan is taken if its arrays as stored are fewer and then fit, or, where
neither fits, if it is no slower: a slower plan that the compiler refuses as well is of no use. The bound stays that of
the first search, which is of all layouts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jshard._core.errors import ShardError
from jshard._core.layout import Layout, MeshAxes
from jshard._core.topology import Topology
from jshard._plan.request import Force, PlanRequest
from jshard._plan.scheduled_solution import ROUNDING, ScheduledSolution
from jshard._plan.tiled_memory import has_tiles, held_in_tiles, in_tiles, minor_dimensions
from jshard._program.graph import Literal, Program


ROW = 256
"""Pixels of a row that is not split: with 512 or more arrays are stored twice."""

LONG_ROWS, SHORT_ROWS = 2.35, 1.1
"""Bytes that the compiler allocates over bytes in tiles, for convolutions alone, a U-Net and a ResNet-50: 2.30 to 2.40 with
rows of 1,024 to 4,096 pixels, 1.07 to 1.09 with rows of 256 (benchmarks/compilers/odd_sizes.md)."""

_LEAST = 1 / 64
"""Of the budget: smaller arrays may keep long rows."""


def with_short_rows(
    first: ScheduledSolution, search_again: Callable[[PlanRequest], ScheduledSolution]
) -> ScheduledSolution:
    """The first plan, or one with shorter rows that takes less memory as it is stored; its steps say so."""
    request, assignment = first.request, first.schedule.assignment
    program, topology = assignment.program, assignment.topology
    limit = request.memory_limit
    if limit is None or request.forced or first.interrupted or not has_tiles(topology):
        return first
    before = stored_bytes(first)
    forced = short_rows(program, topology, limit) if before > limit else ()
    if not forced:
        return first
    try:
        second = search_again(dataclasses.replace(request, forced=forced))
    except ShardError:
        return first  # pins leave rows no cut
    except KeyboardInterrupt:
        return dataclasses.replace(
            first, steps=(*first.steps, "interrupted: rows as the first search cuts them")
        )
    after = stored_bytes(second)
    if after >= before or second.peak > limit:
        return first
    if after > limit and second.cost > first.cost * (1 + ROUNDING):
        return first
    note = (
        f"rows of at most {ROW} pixels a device: as the TPU compiler stores them, arrays of convolutions take about "
        f"{after / 2**30:.1f} GiB in place of {before / 2**30:.1f}, of {limit / 2**30:.1f} allowed"
    )
    return dataclasses.replace(
        second,
        bound=min(first.bound, second.bound),
        steps=(*first.steps, *second.steps, note),
    )


def stored_bytes(plan: ScheduledSolution) -> float:
    """Bytes of a device at the peak as the compiler stores them."""
    total = plan.peak
    for nbytes, tiles, block, minor in held_in_tiles(plan.profile, plan.schedule.assignment):
        ratio = SHORT_ROWS if block[_row(block, minor)] <= ROW else LONG_ROWS
        total += nbytes * (tiles * ratio - 1)
    return total


def short_rows(program: Program, topology: Topology, limit: float) -> tuple[Force, ...]:
    """What convolutions' operands and results must be: their last dimension in space cut to `ROW` pixels."""
    minor, mesh, found = minor_dimensions(program), topology.mesh, []
    for op in program.operators:
        if op.kind != "eqn" or op.equation.primitive.name != "conv_general_dilated":
            continue
        sides = (("operand", op.operands), ("result", op.results))
        for side, places in sides:
            for k, place in enumerate(places):
                if isinstance(place, Literal):
                    continue
                tensor = program.tensors[place]
                shape = tensor.shape
                if shape not in minor or not ROW < shape[_row(shape, minor[shape])] <= ROW * mesh.total:
                    continue
                if tensor.nbytes * in_tiles(shape, minor[shape]) * LONG_ROWS / mesh.total < _LEAST * limit:
                    continue
                test = _Short(shape, mesh, minor[shape])
                found.append((op.id, side, k, "rows in tiles", test))
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class _Short:
    """Whether a layout cuts the rows of an array of this shape to `ROW` pixels."""

    shape: tuple[int, ...]
    mesh: MeshAxes
    minor: tuple[int, int]

    def __call__(self, layout: Layout) -> bool:
        return layout.local_shape(self.shape, self.mesh)[_row(self.shape, self.minor)] <= ROW


def _row(shape: tuple[int, ...], minor: tuple[int, int]) -> int:
    """The last dimension in space."""
    return max(d for d in range(len(shape)) if d not in minor)
