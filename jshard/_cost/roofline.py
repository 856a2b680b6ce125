"""Seconds of work on one device: whichever is slower, the arithmetic or the memory (the roofline).

The matrix units set the peak, by dtype. Elementwise work runs on vector units that the table does not list:
it does so few operations per byte that the memory decides, and the matrix peak in the formula never binds.

>>> from jshard._core import hardware
>>> chip = hardware.get("v5e")
>>> n = 8192                              # a matmul: bound by arithmetic
>>> f"{roofline(2 * n**3, 3 * n * n * 2, np.dtype('bfloat16'), chip):.3g}"
'0.00558'
>>> f"{roofline(n * n, 3 * n * n * 2, np.dtype('bfloat16'), chip):.3g}"   # an addition: bound by memory
'0.000497'

Source: S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 52(4), 2009.
"""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes  # noqa: F401  gives numpy the names bfloat16, float8_e4m3fn, ...
import numpy as np

from jshard._core.hardware import Chip


def roofline(work: float, bytes_moved: float, dtype: Any, chip: Chip) -> float:
    """Seconds of `work` operations and `bytes_moved` bytes of memory traffic on one device.

    Arguments:

    - `work`: arithmetic operations; a multiply-add is two.
    - `bytes_moved`: bytes read and written in device memory.
    - `dtype`: of the operands; picks the peak.
    - `chip`: entry of the hardware table.
    """
    return max(work / peak_flops(dtype, chip), bytes_moved / chip.hbm_bandwidth)


def peak_flops(dtype: Any, chip: Chip) -> float:
    """Operations per second of a chip's matrix units on a dtype.

    >>> from jshard._core import hardware
    >>> peak_flops("int8", hardware.get("v5e")) / peak_flops("bfloat16", hardware.get("v5e"))
    2.0

    A chip without units for a narrow type widens it to bfloat16. No column holds float64 and complex numbers:
    half of the float32 rate for float64 (two words an operand), a quarter for complex64 (four products); both
    are stand-ins.
    """
    name = _name(dtype)
    if name.startswith(("float8", "float4")):
        return chip.fp8_flops or chip.bf16_flops
    if name in ("int8", "uint8", "int4", "uint4", "int2", "uint2"):
        return chip.int8_flops or chip.bf16_flops
    if name in ("bfloat16", "float16"):
        return chip.bf16_flops
    slower = {"float64": 2, "int64": 2, "uint64": 2, "complex64": 4, "complex128": 8}
    return chip.f32_flops / slower.get(name, 1)


@functools.lru_cache(maxsize=256)
def _name(dtype: Any) -> str:
    return np.dtype(dtype).name if not str(dtype).startswith("key<") else "uint32"
