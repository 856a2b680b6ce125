"""Traffic between TPU slices, NVLink domains or hosts: the part of a plan's collectives that the network carries.

In a collective over n devices, i of them inside each slice, the devices of a slice share what comes from outside: of
the n - 1 blocks that gathers, sums and their halves count, a device receives s - 1 over the network, with s = n / i
slices (as the time in `_cost/collectives.py`). An all-to-all sends n - i of its n - 1 blocks across, a permute all.

>>> crosses("all_gather", 8, 2, 700.0), crosses("all_to_all", 8, 2, 700.0), crosses("permute", 8, 2, 700.0)
(100.0, 400.0, 700.0)
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from jshard._report.format_units import format_bytes, format_seconds


if TYPE_CHECKING:
    from jshard._core.topology import Topology
    from jshard._plan.record import PlanRecord


@dataclasses.dataclass(frozen=True)
class Crossing:
    """Bytes that a device receives over the network in one call, and the seconds of the collectives that do so.

    `axes`: those mesh axes that span slices, each with the number of slices along it.
    """

    bytes: float
    seconds: float
    axes: tuple[tuple[str, int], ...]


def crossing(plan: PlanRecord, topology: Topology) -> Crossing:
    """The traffic of a plan over the network of its machine."""
    slices = {
        name: math.prod(w.size for w in link.wires if w.kind == "network")
        for name, link in zip(topology.mesh.names, topology.links, strict=True)
    }
    received = seconds = 0.0
    for c in plan.collectives:
        across = math.prod(slices.get(a, 1) for a in c.axes)
        if across > 1:
            received += crosses(c.kind, topology.mesh.size(*c.axes), across, c.total)
            seconds += c.seconds * c.count
    return Crossing(received, seconds, tuple((n, s) for n, s in slices.items() if s > 1))


def crosses(kind: str, devices: int, slices: int, received: float) -> float:
    """Of the bytes that a device receives in a collective, those that come over the network."""
    if kind == "permute":
        return received
    blocks = devices - devices // slices if kind == "all_to_all" else slices - 1
    return received * blocks / (devices - 1)


def crossing_text(plan: PlanRecord) -> str:
    """One sentence on the traffic between slices; "" on one slice, and for a plan that was read from a file."""
    topology = getattr(getattr(plan, "search_again", None), "topology", None)
    found = None if topology is None else crossing(plan, topology)
    if found is None or not found.axes:
        return ""
    axes = " x ".join(f"{n} {s}" for n, s in found.axes)
    return (
        f"between slices ({axes}): {format_bytes(found.bytes)} received per device, "
        f"in collectives of {format_seconds(found.seconds)}"
    )
