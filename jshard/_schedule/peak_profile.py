"""The memory of a schedule over time: its peak, the curve, and what the peak consists of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple


INTERMEDIATE, COPIES = "intermediate values", "redistributed copies"


class HeldValue(NamedTuple):
    """A value in memory at the peak: its tensor, bytes on a device, class as in `PeakProfile.by_class`."""

    tensor: int
    nbytes: float
    kind: str


@dataclasses.dataclass(frozen=True)
class PeakProfile:
    """The memory of a schedule.

    `peak` bytes; `curve`: live bytes while each operator runs; `by_class`: (class, bytes) at the peak, largest first.
    `held`: the values in memory at the peak; what an operator holds beside them while it runs is not among them.
    """

    peak: float
    curve: dict[int, float]
    by_class: tuple[tuple[str, float], ...]
    held: tuple[HeldValue, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @staticmethod
    def of(
        peak: float, curve: dict[int, float], values: Mapping[str, float], held: tuple[HeldValue, ...]
    ) -> PeakProfile:
        """A profile from the bytes of values by class; what an operator holds while it runs counts as intermediate."""
        by_class = dict(values)
        temporary = peak - sum(by_class.values())
        if temporary > 0:
            by_class[INTERMEDIATE] = by_class.get(INTERMEDIATE, 0.0) + temporary
        return PeakProfile(peak, curve, tuple(sorted(by_class.items(), key=lambda item: -item[1])), held)
