"""Measured times of collectives: seconds by size as a few straight pieces, each with a latency and a bandwidth.

One latency and one bandwidth do not fit the collectives of GPUs and CPUs: they change their algorithm with the size.
Between two knots a time is linear in the bytes, so it is still a slope and a latency; beyond the last one the last piece
goes on, before the first one the time is that of the first.

>>> curve = CollectiveCurve("all_reduce", 8, ((1e6, 79e-6), (1.6e7, 294e-6), (2.56e8, 2358e-6)))
>>> f"{curve.seconds(1e6) * 1e6:.0f} {curve.seconds(1e8) * 1e6:.0f} {curve.seconds(1e9) * 1e6:.0f} us"
'79 1016 8756 us'
>>> curve.seconds(1e3) == curve.seconds(1e6)
True
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

from jshard._core.layout import CollectiveKind


@dataclasses.dataclass(frozen=True)
class CollectiveCurve:
    """The time of one kind of collective in groups of one size.

    - `group`: devices of a group.
    - `knots`: (bytes of a device's operand, seconds), ascending in both.
    - `reach`: the farthest kind of link that it was measured on: `"shared"`, `"nvlink"`, `"network"`, `"ici"`, `"die"`.
    - `strided`: whether the devices of a group are not neighbours in the mesh.
    """

    kind: CollectiveKind
    group: int
    knots: tuple[tuple[float, float], ...]
    reach: str = ""
    strided: bool = False

    def piece(self, nbytes: float) -> tuple[float, float]:
        """(seconds per byte, latency) of the piece in which an operand of so many bytes is."""
        first = self.knots[0]
        at = bisect.bisect_left(self.knots, nbytes, key=lambda k: k[0])
        if at == 0:
            return 0.0, first[1]
        (a, s), (b, t) = self._before(min(at, len(self.knots) - 1))
        slope = (t - s) / (b - a)
        return slope, s - slope * a

    def _before(self, at: int) -> tuple[tuple[float, float], tuple[float, float]]:
        """The piece that ends in a knot; of a single knot the line from the origin through it."""
        return ((0.0, 0.0), self.knots[0]) if at < 1 else (self.knots[at - 1], self.knots[at])

    def seconds(self, nbytes: float) -> float:
        """Seconds for an operand of so many bytes."""
        slope, latency = self.piece(nbytes)
        return slope * nbytes + latency


def nearest_curve(
    curves: Sequence[CollectiveCurve], kind: CollectiveKind, group: int, reach: str, strided: bool
) -> CollectiveCurve | None:
    """The curve of a collective that was measured most like it; None if there is none of its kind on such links.

    Groups of another size count by the ratio of the sizes; neighbours for strided groups only if there is no other.
    """
    found = [c for c in curves if c.kind == kind and c.reach == reach]
    if not found:
        return None
    return min(found, key=lambda c: (max(c.group / group, group / c.group), c.strided != strided))
