"""Roofline: seconds of compute on one device, bounded by arithmetic or by memory bandwidth.

The peak is that of the matrix units, by dtype; plans count tiles and vector units too (`_network/kernel_seconds.py`).

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

import ml_dtypes  # noqa: F401  registers bfloat16, float8_e4m3fn, ... with numpy
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import ArrayLike

from jshard._core.hardware import Chip


def roofline(work: ArrayLike, nbytes: ArrayLike, dtype: DTypeLike, chip: Chip) -> np.ndarray:
    """Seconds of `work` operations and `nbytes` bytes of memory traffic on one device, elementwise.

    Arguments:

    - `work`: arithmetic operations; a multiply-add is two.
    - `nbytes`: bytes read and written in device memory.
    - `dtype`: selects the peak.
    - `chip`: entry of the hardware table.
    """
    return np.maximum(np.divide(work, peak_flops(dtype, chip)), np.divide(nbytes, chip.hbm_bandwidth))


def peak_flops(dtype: DTypeLike, chip: Chip) -> float:
    """Peak operations per second of a chip's matrix units for a dtype.

    >>> from jshard._core import hardware
    >>> peak_flops("int8", hardware.get("v5e")) / peak_flops("bfloat16", hardware.get("v5e"))
    2.0

    A chip without units for a narrow type converts it to bfloat16. The table has no column for float64 and complex
    types: half of the float32 rate for float64 (two words per operand) and a quarter for complex64 (four products)
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
def _name(dtype: DTypeLike) -> str:
    return np.dtype(dtype).name if not str(dtype).startswith("key<") else "uint32"
