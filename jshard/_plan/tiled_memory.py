"""What the arrays of convolutions take in the tiles of a TPU's memory.

Problem.  TPUs store an array in tiles of 8 x 128 elements of its two minor dimensions (https://openxla.org/xla/tiled_layout),
and their compiler takes features and batch for these in convolutions: 2 images of 32 channels take four times their
bytes, those of 3 channels far more. The memory of a plan counts elements, so that a U-Net planned at 2.5 GiB needs 15.8.

Idea.  Of the values that are held at the peak, those that a convolution reads or writes, and others of such a shape, count
in tiles, in the order of the two dimensions that takes less. It is less than the compiler allocates, which stores some
arrays twice, and splits space into a larger batch: 2.3 to 2.4 times this for a ResNet-50, a U-Net and plain
convolutions of 64 channels (`benchmarks/compilers/odd_sizes.md`).

>>> in_tiles((2, 256, 4096, 32), (0, 3)), in_tiles((64, 16, 16, 128), (0, 3))
(4.0, 1.0)
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from jshard._core.topology import Topology
from jshard._program.graph import Program
from jshard._schedule.peak_profile import COPIES, PeakProfile
from jshard._schedule.schedule import Assignment


LANES, SUBLANES = 128, 8


def tiled_peak(profile: PeakProfile, assignment: Assignment) -> float:
    """Bytes of a device at the peak with the arrays of convolutions in tiles; 0 where that is no more, or no TPU."""
    if not has_tiles(assignment.topology):
        return 0.0
    added = sum(nbytes * (tiles - 1.0) for nbytes, tiles, *_ in held_in_tiles(profile, assignment))
    return profile.peak + added if added else 0.0


def held_in_tiles(
    profile: PeakProfile, assignment: Assignment
) -> Iterator[tuple[float, float, tuple[int, ...], tuple[int, int]]]:
    """Of arrays of convolutions at the peak: bytes, those in tiles over them, the block's shape, its minor dimensions."""
    program, mesh = assignment.program, assignment.topology.mesh
    minor = minor_dimensions(program)
    for tensor, nbytes, kind in profile.held if minor else ():
        shape = program.tensors[tensor].shape
        if shape in minor and kind != COPIES:
            local = assignment.result_layout(tensor).local_shape(shape, mesh)
            yield nbytes, in_tiles(local, minor[shape]), local, minor[shape]


def in_tiles(shape: tuple[int, ...], minor: tuple[int, int]) -> float:
    """The bytes of an array over those of its elements, its tiles along two dimensions in the better order.

    The compiler's tiles have fewer sublanes where the dimension is shorter.
    """
    a, b = (max(1, shape[d]) for d in minor)
    return min(_whole(x, LANES) / x * _whole(y, min(SUBLANES, _power(y))) / y for x, y in ((a, b), (b, a)))


def has_tiles(topology: Topology) -> bool:
    """Whether arrays are stored in tiles: on TPUs."""
    return topology.chip.interconnect.startswith("torus")


def minor_dimensions(program: Program) -> dict[tuple[int, ...], tuple[int, int]]:
    """For the shapes of what convolutions read and write, batch and features; their kernels are small."""
    found = {}
    for op in program.operators:
        if op.kind != "eqn" or op.equation.primitive.name != "conv_general_dilated":
            continue
        n = op.equation.params["dimension_numbers"]
        for v, spec in ((op.equation.invars[0], n.lhs_spec), (op.equation.outvars[0], n.out_spec)):
            if len(spec) > 2:
                found[tuple(v.aval.shape)] = tuple(sorted(spec[:2]))
    return found


def _whole(n: int, of: int) -> int:
    return -(-n // of) * of


def _power(n: int) -> int:
    return 2 ** math.ceil(math.log2(n))
