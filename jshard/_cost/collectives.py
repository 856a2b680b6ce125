"""Time and bytes of one collective over a set of mesh axes.

Every collective's time is linear in the bytes: a slope from the wires and an intercept from the steps. So a
collective on given axes is three numbers (`Coefficients`), and a whole redistribution is a sum of them.

>>> from jshard._core import hardware
>>> from jshard._core.layout import MeshAxes
>>> from jshard._core.topology import from_mesh
>>> t = from_mesh(MeshAxes(("x", "y"), (8, 16)), hardware.get("v5e"))
>>> collective("all_gather", ("y",), 41e6, t)
Collective(kind='all_gather', axes=('y',), bytes=615000000.0, seconds=0.007513)

Formulas, with `b` the bytes that a device holds before, `n` the group size, `w` the bandwidth of an axis one
way (hardware.md section 2, after jax-ml/scaling-book sharding.md):

| kind | bytes received | time on a line; a ring has half |
|---|---|---|
| all_gather | b (n-1) | b (n-1) / w |
| reduce_scatter | b (n-1)/n | b (n-1) / (n w) |
| all_reduce | 2 b (n-1)/n | 2 b (n-1) / (n w) |
| all_to_all | b (n-1)/n | b n / (4 w), and on a torus 4 b / (0.4 memory bandwidth) |
| permute | b | b h / w, for the h hops that the busiest link is loaded with |

The blocks of an all-to-all are put in order before and after it, each time read and written; the TPU compiler
makes copies for that, which take longer than the wires on a small torus.

Several torus axes work at once: their bandwidths add. Over a hierarchy (dies, torus or NVLink, network) a
collective takes the time of its slowest level, since the levels can be pipelined.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from jshard._core.layout import CollectiveKind
from jshard._core.topology import WIRE_KINDS, Topology, Wire


# Share of the memory bandwidth at which blocks are put in order: the TPU compiler counts 1.21M cycles for a copy
# of 134 MB and 92k for one of 8.4 MB on a v5e, which is 333 and 273 of 819 GB/s.
_ORDERING = 0.4


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective: over which mesh axes, bytes received by each device, predicted seconds."""

    kind: CollectiveKind
    axes: tuple[str, ...]
    bytes: float
    seconds: float

    def __str__(self) -> str:
        return f"{self.kind}[{'*'.join(self.axes)}] {self.bytes:.4g} B {self.seconds:.3g} s"


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """A collective per byte held before it: seconds per byte, bytes received per byte, and fixed seconds."""

    slope: float
    volume: float
    alpha: float


def collective(
    kind: CollectiveKind, axes: Sequence[str], local_bytes: float, topology: Topology, combined: int = 1
) -> Collective:
    """One collective over the group that `axes` span, for a device that holds `held` bytes before it.

    Of so many as are sent `together`, each pays its share of the latency.

    >>> from jshard._core import hardware
    >>> from jshard._core.layout import MeshAxes
    >>> from jshard._core.topology import from_mesh
    >>> t = from_mesh(MeshAxes(("x",), (16,)), hardware.get("v5e"))
    >>> print(collective("all_gather", ("x",), 1e6, t))
    all_gather[x] 1.5e+07 B 0.000194 s
    """
    c = coefficients(kind, tuple(sorted(axes, key=topology.mesh.names.index)), topology)
    return Collective(kind, tuple(axes), local_bytes * c.volume, local_bytes * c.slope + c.alpha / combined)


@functools.lru_cache(maxsize=65536)
def coefficients(kind: CollectiveKind, axes: tuple[str, ...], topology: Topology) -> Coefficients:
    """Slope, volume and latency of a collective over `axes`; all zero when the group is one device."""
    n = topology.mesh.size(*axes)
    if n == 1:
        return Coefficients(0.0, 0.0, 0.0)
    volume = {
        "all_gather": n - 1.0,
        "reduce_scatter": (n - 1) / n,
        "all_reduce": 2 * (n - 1) / n,
        "all_to_all": (n - 1) / n,
        "permute": 1.0,
    }[kind]
    levels = _tiers(axes, topology)
    if levels[0][0].kind == "shared":  # one memory: every byte costs the same, every collective starts once
        return Coefficients(volume / levels[0][0].bandwidth, volume, levels[0][0].alpha)
    if kind in ("all_to_all", "permute"):
        cross = _all_to_all if kind == "all_to_all" else _permute
        slope = max(cross(level) for level in levels)
        if kind == "all_to_all" and levels[0][0].kind == "ici":
            slope += 4 / (_ORDERING * topology.chip.hbm_bandwidth)
    else:
        per_full_byte, inside = 0.0, 1
        for level in levels:  # the devices below one position of a level share out its transfer
            size = math.prod(w.size for w in level)
            per_full_byte = max(per_full_byte, (size - 1) / (size * _receive_bandwidth(level) * inside))
            inside *= size
        slope = per_full_byte * {"all_gather": n, "reduce_scatter": 1, "all_reduce": 2}[kind]
    alpha = sum(_latency_steps(kind, w) * w.alpha for level in levels for w in level)
    return Coefficients(slope, volume, topology.chip.startup + alpha * (2 if kind == "all_reduce" else 1))


def _tiers(axes: Sequence[str], topology: Topology) -> list[list[Wire]]:
    """The wires below a group, near to far; parts of one torus axis, or of one switch, are joined."""
    joined: dict[tuple[str, int], Wire] = {}
    for w in (w for a in axes for w in topology.link(a).wires if w.size > 1):
        key = (w.kind, w.axis)
        if key in joined:
            old = joined[key]
            w = dataclasses.replace(w, size=w.size * old.size, stride=min(w.stride, old.stride))
        joined[key] = w
    levels = [[w for w in joined.values() if w.kind == kind] for kind in WIRE_KINDS]
    return [level for level in levels if level]


def _receive_bandwidth(level: Sequence[Wire]) -> float:
    """Bytes/s into one device over all torus axes of a level; a ring brings data from both sides."""
    return sum(w.rate * (2 if w.wrap else 1) for w in level)


def _all_to_all(level: Sequence[Wire]) -> float:
    """Seconds per byte held: on a torus the middle cut of its slowest axis, else the device's own port."""
    if level[0].kind == "ici":
        return max(w.size / ((8 if w.wrap else 4) * w.rate) for w in level)
    return (level[0].size - 1) / (level[0].size * level[0].rate)


def _permute(level: Sequence[Wire]) -> float:
    """Seconds per byte held for the worst permutation: reversal of a line, half a turn of a ring."""
    if level[0].kind == "ici":
        return max(max(1.0, w.size / (4 if w.wrap else 2)) / w.rate for w in level)
    return 1 / level[0].rate


def _latency_steps(kind: CollectiveKind, w: Wire) -> int:
    """Steps one after the other on a wire: hops on a torus, rounds on a switch or network."""
    if w.kind != "ici":
        return 1 if kind == "permute" else math.ceil(math.log2(w.size))
    if kind in ("all_to_all", "permute"):
        return w.size // 2 if w.wrap else w.size - 1
    return math.ceil((w.size - 1) / 2) if w.wrap else w.size - 1
