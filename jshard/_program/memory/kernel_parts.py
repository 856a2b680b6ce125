"""What a kernel moves and computes beside its products, as data: parts that are divided among devices.

>>> work = VectorWork(simple=2.0) + VectorWork(simple=1.0, arrays=4.0)
>>> KernelPart(True, 0, 512.0, work).work.simple
3.0
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jshard._core.arrays import Ints


@dataclasses.dataclass(frozen=True)
class VectorWork:
    """Elements that pass through a kernel's vector units, by what is done with them.

    `simple` and `transcendental` operations, elements of `arrays` that a kernel without a product reads or writes, those
    that it loops over, and those that a product's kernel sums up along the last dimension (`reduced`). A last dimension of
    128 or more counts as padded to a multiple of that.
    """

    simple: float = 0.0
    transcendental: float = 0.0
    arrays: float = 0.0
    loop: float = 0.0
    reduced: float = 0.0

    def __add__(self, other: VectorWork) -> VectorWork:
        return VectorWork(
            self.simple + other.simple,
            self.transcendental + other.transcendental,
            self.arrays + other.arrays,
            self.loop + other.loop,
            self.reduced + other.reduced,
        )


@dataclasses.dataclass(frozen=True)
class KernelPart:
    """Bytes and elements of a kernel that are divided among devices as an operand or a result of its root is.

    `written`: of the bytes those that are written.
    """

    is_result: bool
    index: int
    nbytes: float
    work: VectorWork
    written: float = 0.0


Parts = tuple[KernelPart, ...]


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """An operator that runs in the kernel of the product before it, if nothing is resharded in between.

    - `product`, `root`: the operators.
    - `fused`: what it adds to the product's kernel.
    - `alone`, `launched`: as a kernel of its own what it moves and computes, and whether that is one more kernel.
    - `path`: (tensor, reader) pairs from the product to the root.
    """

    product: int
    root: int
    fused: KernelPart
    alone: KernelPart
    launched: bool
    path: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Kernels:
    """The kernels of a program.

    - `parts`: of each operator that is the root of one, and `launched`: whether that kernel is its own.
    - `epilogues`: those of each product.
    - `class_id`: (operators,) a number that is equal only where all of these but paths are equal.
    - `fused_transposes`: operators: transpositions of a product's result that the product itself writes.
    """

    parts: Sequence[Parts]
    launched: Sequence[bool]
    epilogues: Mapping[int, tuple[Epilogue, ...]]
    class_id: Ints
    fused_transposes: frozenset[int]

    def fused_parts(self, op: int) -> Parts:
        """What the epilogues of a product add to its kernel, in their order."""
        return tuple(e.fused for e in self.epilogues.get(op, ()))
