"""Communication lower bound of one matrix product: bytes that some device must receive under any schedule.

For `(m, k) @ (k, n)` on P devices, each doing 1/P of the work, the bound has three regimes. With few devices only the
smallest matrix must be sent (1D), then parts of two (2D), then parts of all three (3D).

Source: Al Daas, Ballard, Grigori, Kumar, Rouse, "Tight memory-independent parallel matrix multiplication communication
lower bounds", SPAA 2022, arXiv 2205.13407, Theorem 1.

>>> b = matmul(16_777_216, 53_248, 16_384, 64, itemsize=2)     # an MLP of Llama-3-405B, 16M tokens, bfloat16
>>> b.regime, round(b.bytes / 1e9, 2)
('1D', 1.72)
>>> matmul(16_777_216, 53_248, 16_384, 4096, itemsize=2).regime
'3D'
"""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Bound:
    """Bytes that some device must receive, and the regime of the bound: "1D", "2D" or "3D"."""

    bytes: float
    regime: str


def matmul(
    m: int, n: int, k: int, devices: float, *, itemsize: float, local_elements: float | None = None
) -> Bound:
    """The least bytes that the busiest device receives for one matrix product.

    Arguments:

    - `m`, `n`, `k`: sizes, in any order.
    - `devices`: number of devices that share the work evenly.
    - `itemsize`: bytes of an element.
    - `local_elements`: elements that a device holds of the operands before and of the result after; by default one
        copy of all three, spread evenly. Replicas lower the bound, to zero when every device holds everything.

    >>> matmul(64, 64, 64, 8, itemsize=4, local_elements=2 * 64 * 64 + 64 * 64 / 8).bytes
    0.0
    """
    k, n, m = sorted((m, n, k))
    if devices <= m / n:
        regime, footprint = "1D", (m * n + m * k) / devices + n * k
    elif devices <= m * n / k**2:
        regime, footprint = "2D", 2 * math.sqrt(m * n * k**2 / devices) + m * n / devices
    else:
        regime, footprint = "3D", 3 * (m * n * k / devices) ** (2 / 3)
    local_elements = (m * n + m * k + n * k) / devices if local_elements is None else local_elements
    return Bound(max(0.0, footprint - local_elements) * itemsize, regime)
