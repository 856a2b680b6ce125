"""Seconds of operators whose work grows faster than their bytes: sorts, cumulative operators and transforms on TPUs.

No compiler states what a sort takes: the TPU's estimates no cycles for it (its `optimal_seconds` are four passes over the
memory), XLA's others neither. So these are formulas:

- A vector unit runs a sorting network, L (L + 1) / 2 rounds for n elements, L = log2 n rounded up (K. E. Batcher, "Sorting
  networks and their applications", 1968). In a round each array is permuted and selected from, and each key is compared in
  the total order of floats: `_COMPARED` operations.
- A GPU sorts by the digits of the keys, eight bits a pass, that each read and write all arrays once (A. Adinets and
  D. Merrill, "Onesweep: a faster least significant digit radix sort for GPUs", 2022), or merges, if that has fewer passes.
- A CPU takes `_COMPARISON` for each of n log2 n comparisons: measured on 2^14, 2^18 and 2^21 numbers of float32, 12.0, 11.4
  and 11.2 ns (XLA calls its comparator for each pair), whatever the memory's bandwidth.

Cumulative operators: `_PREFIX` cycles for each register, which is the TPU compiler's estimate for 2^20 elements of float32
in one dimension, and in two along either: 31 to 38 us on v5e, without the `reduce-window` over tiles, of which it states
none (`benchmarks/compilers/primitives.md`).

Fourier transforms: the TPU compiler makes products with matrices of up to 128 roots of unity of them, one after the other,
and transposes in between. Each reads and writes the array of full length, and so does its transposition: `_TRANSFORMED`
passes for each power of 128. Compiled on v5e, real transforms of 768, 64 and 1,024 rows of 16,384, 16,384 and 1,024 points
take 1.20, 0.078 and 0.076 ms with what stores their parts, by this formula 1.11, 0.100 and 0.077.

>>> from jshard._core import hardware
>>> for name in ("v5e", "h100", "cpu"):
...     s = sort_seconds(2**20, 2**20, SortedArrays(1, 4, 4, 1), hardware.get(name))
...     print(f"{name} {float(s):.1e}, cumulative {prefix_seconds(2**20, hardware.get(name)):.1e}")
v5e 4.3e-04, cumulative 3.3e-05
h100 1.1e-05, cumulative 0.0e+00
cpu 2.4e-01, cumulative 0.0e+00
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from jshard._core.compute_units import REGISTER
from jshard._core.hardware import Chip


PREFIXES = frozenset(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"))
"""The cumulative operators."""

_COMPARED = 4.0  # vector operations to compare two floats in their total order
_COMPARISON = 11.5e-9
_PREFIX = 48.0
_TRANSFORMED = 4.0
_LARGEST_PRODUCT = 128  # points of a transform that is one product


@dataclasses.dataclass(frozen=True)
class SortedArrays:
    """Arrays that are sorted together: how many are keys, bytes of an element of these and of all, their number."""

    keys: int
    key_bytes: float
    all_bytes: float
    number: int


def sort_seconds(length: ArrayLike, elements: ArrayLike, arrays: SortedArrays, chip: Chip) -> np.ndarray:
    """Seconds of sorts of `length` elements, of `elements` in all."""
    levels = np.ceil(np.log2(np.maximum(2.0, length)))
    if chip.units.vector is not None:
        each = levels * (levels + 1) / 2 * (2 * arrays.number + _COMPARED * arrays.keys)
        return chip.units.vector.seconds(each * np.asarray(elements))
    if chip.interconnect == "shared":
        return levels * np.asarray(elements) * _COMPARISON
    passes = np.minimum(levels, math.ceil(arrays.key_bytes)) * 2 + 1
    return passes * arrays.all_bytes * np.asarray(elements) / chip.hbm_bandwidth


def prefix_seconds(elements: ArrayLike, chip: Chip) -> np.ndarray:
    """Seconds of a cumulative operator beside its memory traffic; 0 where that is all that counts."""
    vector = chip.units.vector
    return (
        np.zeros_like(elements, float)
        if vector is None
        else np.asarray(elements) * _PREFIX / REGISTER / vector.clock
    )


def transform_seconds(lengths: Sequence[int], elements: ArrayLike, nbytes: float, chip: Chip) -> np.ndarray:
    """Seconds of Fourier transforms that are done by products.

    Arguments:

    - `lengths`: of the transformed dimensions.
    - `elements`: of the complex array of full length; `nbytes` of each.
    """
    products = math.log(max(1, math.prod(lengths))) / math.log(_LARGEST_PRODUCT)
    return _TRANSFORMED * products * nbytes * np.asarray(elements) / chip.hbm_bandwidth
