"""How far the units of a chip that compute stay below its peak: tiles of the matrix unit, passes, the vector unit.

The figures of TPUs are fitted to what their compiler estimates (`estimated_cycles` in compiled programs), on kernels of
eight training steps for v5e: products and their operands' elementwise work, sums over a row, updates of an optimizer.
`FITTED` has some of these kernels; the figures give their seconds to 16%, most of them to 5%.

>>> unit = tpu_units(1.5e9).vector
>>> for k in FITTED:
...     print(f"{float(unit.seconds(*(k.elements * x for x in k.of_each))) / k.seconds - 1:+.0%} {k.name}")
+0% sum of exponentials over 8192 logits
-1% gradient of a layer norm, added to another
-1% gradient of a layer norm
+4% Adam
-8% stochastic gradient descent
+0% maxima of logits, in their product
+0% gradient of a softmax, in its product
+3% softmax, in the product that reads it
-15% gradient of a softmax, in the product that reads it
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike


LANES = 128
"""Lanes of a TPU's vector register."""

REGISTER = 8 * LANES
"""Elements of a TPU's vector register: 8 sublanes of 128 lanes."""


@dataclasses.dataclass(frozen=True)
class VectorUnit:
    """Cycles of a TPU core for one vector register of elements, by what a kernel does with them.

    Arguments:

    - `simple`, `transcendental`: an elementwise operation; an exponential, division or root.
    - `array`, `loop`, `least`: of a kernel without a product, for each array that it reads or writes, beside those, and
        at least.
    - `reduced`: of elements that are summed along the last dimension in a product's kernel.
    - `clock`: cycles/s, those of all cores of a device together.
    """

    simple: float
    transcendental: float
    array: float
    loop: float
    least: float
    reduced: float
    clock: float

    def seconds(
        self,
        simple: ArrayLike,
        transcendental: ArrayLike = 0.0,
        arrays: ArrayLike = 0.0,
        loop: ArrayLike = 0.0,
        reduced: ArrayLike = 0.0,
    ) -> np.ndarray:
        """Seconds for so many elements of each kind."""
        cycles = self.simple * np.asarray(simple) + self.transcendental * np.asarray(transcendental)
        cycles = cycles + self.array * np.asarray(arrays) + self.loop * np.asarray(loop)
        cycles = cycles + self.reduced * np.asarray(reduced)
        return np.maximum(cycles, self.least * np.asarray(loop)) / REGISTER / self.clock


@dataclasses.dataclass(frozen=True)
class FittedKernel:
    """A kernel that the compiler estimated for v5e: its elements, how often each passes (as in `seconds`), the seconds."""

    name: str
    elements: int
    of_each: tuple[int, ...]
    seconds: float


# simple, transcendental, arrays, loop, reduced: of the GPT and the lm-head of benchmarks/workloads.py, libtpu 0.0.42.1.
FITTED = (
    FittedKernel("sum of exponentials over 8192 logits", 2**27, (2, 1, 1, 1, 0), 1247.7e-6),
    FittedKernel("gradient of a layer norm, added to another", 2**22, (14, 0, 4, 1, 0), 66.3e-6),
    FittedKernel("gradient of a layer norm", 2**22, (10, 0, 3, 1, 0), 54.0e-6),
    FittedKernel("Adam", 2**22, (13, 1, 7, 1, 0), 86.1e-6),
    FittedKernel("stochastic gradient descent", 2**24, (5, 0, 3, 1, 0), 203.5e-6),
    FittedKernel("maxima of logits, in their product", 2**26, (3, 0, 0, 0, 1), 624.2e-6),
    FittedKernel("gradient of a softmax, in its product", 2**26, (7, 1, 0, 0, 1), 806.9e-6),
    FittedKernel("softmax, in the product that reads it", 2**26, (5, 2, 0, 0, 0), 293.6e-6),
    FittedKernel("gradient of a softmax, in the product that reads it", 2**26, (10, 2, 0, 0, 0), 485.8e-6),
)


@dataclasses.dataclass(frozen=True)
class ComputeUnits:
    """What products and elementwise kernels reach.

    Arguments:

    - `tile`: rows and columns of the matrix unit: two of a product's sizes count in multiples of it. `sublanes`: the
        third in multiples of these.
    - `efficiency`: fraction of the peak that large products reach.
    - `highest_passes`: passes of a float32 product at `Precision.HIGHEST`, each as long as one at the default.
    - `streamed`: fraction of the memory bandwidth at which a product reads and writes.
    - `fuses`: whether elementwise operators run in the kernels of products.
    - `launch`: seconds that a kernel takes beside its work.
    - `write_factor`: how often a byte that is written counts beside one that is read: more than once where the system
        gives a program fresh pages.
    - `vector`: the vector unit; None counts no elementwise work beside its memory traffic.
    """

    tile: int = 1
    sublanes: int = 1
    efficiency: float = 1.0
    streamed: float = 1.0
    highest_passes: float = 1.0
    fuses: bool = False
    launch: float = 0.0
    vector: VectorUnit | None = None
    write_factor: float = 1.0


def tpu_units(
    clock: float, tile: int = 128, cores: int = 1, product_efficiency: float = 0.95
) -> ComputeUnits:
    """The units of a TPU of `cores` cores, each at `clock` cycles/s."""
    vector = VectorUnit(
        simple=0.5, transcendental=2.2, array=2.4, loop=7.4, least=14.3, reduced=12.8, clock=clock * cores
    )
    return ComputeUnits(tile, 8, product_efficiency, 0.85, 6.0, True, 1.2e-6, vector)


NO_UNITS = ComputeUnits()
