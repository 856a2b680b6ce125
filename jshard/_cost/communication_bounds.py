"""What nothing can beat: bytes that a device must receive, whatever the plan.

A plan that is optimal among layouts may still be far from what physics asks; the difference is the space
gap. For one matrix product `(m, k) @ (k, n)` on P devices, each doing 1/P of the work, the bound has three
regimes: with few devices send only the smallest matrix (1D), then parts of two (2D), then of all three (3D).

>>> b = matmul(16_777_216, 53_248, 16_384, 64, itemsize=2)     # an MLP of Llama-3-405B, 16M tokens, bfloat16
>>> b.regime, round(b.bytes / 1e9, 2)
('1D', 1.72)
>>> matmul(16_777_216, 53_248, 16_384, 4096, itemsize=2).regime
'3D'
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jshard._core.hardware import Chip


_ABGKR = "Al Daas, Ballard, Grigori, Kumar, Rouse 2022, arXiv 2205.13407, Theorem 1"
_COSMA = "Kwasniewski et al. 2019 (COSMA), arXiv 1908.09606, Theorem 2 [R], less the words held at the start"
_SYNC = "ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054) section 7: usual cost, not a proven bound"


@dataclasses.dataclass(frozen=True)
class Bound:
    """Bytes a device must receive, the regime, where the formula is from, and whether it is proved."""

    bytes: float
    regime: str
    source: str
    proven: bool = True

    def seconds(self, chip: Chip) -> float:
        """Time when every link of the device brings data at its full rate."""
        return self.bytes / (chip.links * chip.link_bandwidth)


def matmul(
    m: int, n: int, k: int, devices: float, *, itemsize: float, local_elements: float | None = None
) -> Bound:
    """The least bytes that the busiest device receives for one matrix product.

    Arguments:

    - `m`, `n`, `k`: sizes, in any order.
    - `devices`: how many share the work evenly.
    - `itemsize`: bytes of an element.
    - `held`: elements that a device has of the operands before and of the result after; by default one copy
        of all three spread evenly. Operands on several devices lower the bound, to zero when all are whole.

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
    return Bound(max(0.0, footprint - local_elements) * itemsize, regime, _ABGKR)


def matmul_in_memory(m: int, n: int, k: int, devices: int, *, itemsize: float, memory: float) -> Bound:
    """The least bytes received when a device has only `memory` bytes for operands and result.

    Small memory forbids the 3D regime its copies: traffic then falls only with the root of the memory.

    >>> size = dict(itemsize=2, devices=4096)
    >>> tight = matmul_in_memory(4096, 4096, 4096, memory=25e3, **size)
    >>> tight.regime, round(tight.bytes / matmul(4096, 4096, 4096, **size).bytes, 2)
    ('memory', 1.63)
    >>> matmul_in_memory(4096, 4096, 4096, memory=1e9, **size).regime
    '3D'
    """
    words, held = memory / itemsize, (m * n + m * k + n * k) / devices
    free = matmul(m, n, k, devices, itemsize=itemsize)
    if words >= (m * n * k / devices) ** (2 / 3):
        return free
    least = (2 * m * n * k / (devices * math.sqrt(words)) + words - held) * itemsize
    return Bound(least, "memory", _COSMA) if least > free.bytes else free


def parameter_sync(nbytes: float, devices: int, *, resident: bool) -> Bound:
    """Bytes that data parallelism receives for parameters and their gradients in one training step.

    Resident parameters need their gradients reduced and the result spread: twice the bytes. Parameters cut
    over the devices are gathered forward, gathered backward, and their gradients scattered: three times.

    >>> parameter_sync(8e9, 8, resident=False).bytes / parameter_sync(8e9, 8, resident=True).bytes
    1.5
    """
    return Bound((2 if resident else 3) * nbytes * (1 - 1 / devices), "sync", _SYNC, proven=False)


def step(
    matmuls: Sequence[tuple[int, int, int]],
    devices: int,
    *,
    itemsize: float,
    held: Sequence[float | None] | None = None,
) -> Bound:
    """The least bytes received in a step with these products: that of the hardest one.

    Chained products can share operands, so their bounds must not be added: only the largest one is safe.

    >>> step([(64, 64, 64), (128, 64, 64)], 8, itemsize=4).bytes == matmul(128, 64, 64, 8, itemsize=4).bytes
    True
    """
    kept = held or [None] * len(matmuls)
    bounds = [
        matmul(*sizes, devices, itemsize=itemsize, local_elements=h)
        for sizes, h in zip(matmuls, kept, strict=True)
    ]
    return max(bounds, key=lambda b: b.bytes, default=Bound(0.0, "none", "no products"))


def space_gap(received: float, bound: Bound) -> float:
    """How far a plan is from physics: (received - bound) / bound; infinite where physics asks for nothing.

    >>> space_gap(1.5e9, Bound(1.0e9, "1D", "example"))
    0.5
    """
    if received <= bound.bytes:
        return 0.0
    return (received - bound.bytes) / bound.bytes if bound.bytes else math.inf
