"""Time and bytes of one collective over a set of mesh axes.

The time of a collective is linear in the bytes, as in the alpha-beta model of Hockney (Parallel Computing 20, 1994): a
slope from the links' bandwidth and a latency from the steps. So a collective over given axes is three numbers
(`Coefficients`), and a reshard is a sum of them. Where a chip has measured times (`Chip.curves`), they are linear in
pieces: slope and latency depend on the size.

>>> from jshard._core import hardware
>>> from jshard._core.layout import MeshAxes
>>> from jshard._core.topology import from_mesh
>>> t = from_mesh(MeshAxes(("x", "y"), (8, 16)), hardware.get("v5e"))
>>> collective("all_gather", ("y",), 41e6, t)
Collective(kind='all_gather', axes=('y',), bytes=615000000.0, seconds=0.007513)

Formulas, with `b` the bytes of a device's operand, `n` the group size, `w` the bandwidth of an axis one way in
bytes/s (hardware.md section 2, after jax-ml/scaling-book sharding.md):

| kind | bytes received | time on a line; a ring has half |
|---|---|---|
| all_gather | b (n-1) | b (n-1) / w |
| reduce_scatter | b (n-1)/n | b (n-1) / (n w) |
| all_reduce | 2 b (n-1)/n | 2 b (n-1) / (n w) |
| all_to_all | b (n-1)/n | b n / (4 w), and on a torus 4 b / (0.4 memory bandwidth) |
| permute | b | b h / w, with h the load in hops of the busiest link |

An all-to-all reorders blocks before and after, each time with a read and a write of memory; the TPU compiler emits
copies for that, which take longer than the transfer on a small torus.

On TPU v4 and v5p the compiler makes an all-reduce of a gather or a reduce-scatter over all three axes of a torus, in twice
the seconds: they are priced as that (`Chip.all_reduced_kinds`), and take several steps over fewer axes where that is faster.

Several torus axes work at once: their bandwidths add up. In a hierarchy (dies, torus or NVLink, network) the slowest
tier decides, since tiers can be pipelined.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from jshard._core.collective_curves import CollectiveCurve, nearest_curve
from jshard._core.hardware import Chip
from jshard._core.layout import CollectiveKind
from jshard._core.topology import WIRE_KINDS, Topology, Wire


# Fraction of the memory bandwidth that the reordering copies reach: the TPU compiler estimates 1.21M cycles for a copy
# of 134 MB and 92k for one of 8.4 MB on a v5e, which is 333 and 273 of 819 GB/s.
_REORDERING = 0.4


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective: its mesh axes, bytes received by each device, predicted seconds."""

    kind: CollectiveKind
    axes: tuple[str, ...]
    bytes: float
    seconds: float

    def __str__(self) -> str:
        return f"{self.kind}[{'*'.join(self.axes)}] {self.bytes:.4g} B {self.seconds:.3g} s"


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """A collective as a linear function of the bytes of a device's operand.

    With a measured `curve` it is one for operands of each size (`at`); `slope` and `alpha` are those of large ones. The
    curve is of operands `scale` times as large, where it was measured in groups of another size. Where it is that of the
    nearer links only, the farther ones make each byte take `least_slope` at least, and add `more_alpha`: the slower of
    both decides, since they are pipelined.
    """

    slope: float  # seconds per byte
    volume: float  # bytes received per byte
    alpha: float  # latency in seconds
    curve: CollectiveCurve | None = None
    scale: float = 1.0
    least_slope: float = 0.0
    more_alpha: float = 0.0

    def at(self, local_bytes: float) -> tuple[float, float]:
        """Slope and latency for an operand of so many bytes."""
        if self.curve is None:
            return self.slope, self.alpha
        slope, alpha = self.curve.piece(local_bytes * self.scale)
        slope, least = slope * self.scale, self.curve.knots[0][1]
        if self.least_slope * local_bytes + least > slope * local_bytes + alpha:
            slope, alpha = self.least_slope, least
        return slope, alpha + self.more_alpha

    def counted(self, share: float) -> Coefficients:
        """The same with a share of the seconds.

        >>> Coefficients(slope=4.0, volume=1.0, alpha=2.0).counted(0.25).at(3.0)
        (1.0, 0.5)
        """
        curve = self.curve
        if curve is not None:
            curve = dataclasses.replace(curve, knots=tuple((size, t * share) for size, t in curve.knots))
        return dataclasses.replace(
            self, slope=self.slope * share, alpha=self.alpha * share, curve=curve,
            least_slope=self.least_slope * share, more_alpha=self.more_alpha * share,
        )  # fmt: skip


def collective(
    kind: CollectiveKind, axes: Sequence[str], local_bytes: float, topology: Topology, combined: int = 1
) -> Collective:
    """One collective over the devices along `axes`.

    Arguments:

    - `local_bytes`: of a device's operand.
    - `combined`: number of collectives that XLA combines into one; each pays its share of the latency.

    >>> from jshard._core import hardware
    >>> from jshard._core.layout import MeshAxes
    >>> from jshard._core.topology import from_mesh
    >>> t = from_mesh(MeshAxes(("x",), (16,)), hardware.get("v5e"))
    >>> print(collective("all_gather", ("x",), 1e6, t))
    all_gather[x] 1.5e+07 B 0.000194 s
    """
    c = coefficients(kind, tuple(sorted(axes, key=topology.mesh.names.index)), topology)
    slope, alpha = c.at(local_bytes * combined)
    return Collective(kind, tuple(axes), local_bytes * c.volume, local_bytes * slope + alpha / combined)


@functools.lru_cache(maxsize=65536)
def coefficients(kind: CollectiveKind, axes: tuple[str, ...], topology: Topology) -> Coefficients:
    """Slope, volume and latency of a collective over `axes`; all zero for a group of one device."""
    if topology.hidden:
        share = 1 - dict(topology.hidden).get(kind, 0.0)
        return coefficients(kind, axes, dataclasses.replace(topology, hidden=())).counted(share)
    n = topology.mesh.size(*axes)
    if n == 1:
        return Coefficients(0.0, 0.0, 0.0)
    volume = received_per_byte(kind, n)
    tiers = _tiers(axes, topology)
    curve = _measured(kind, axes, tiers[-1], topology)
    if curve is not None:
        return _of_curve(kind, n, curve)
    if tiers[0][0].kind == "shared":  # one memory: time is proportional to the bytes received, one latency
        return Coefficients(volume / tiers[0][0].bandwidth, volume, tiers[0][0].alpha)
    if kind in ("all_to_all", "permute"):
        cross = _all_to_all if kind == "all_to_all" else _permute
        slope = max(cross(tier) for tier in tiers)
        if kind == "all_to_all" and tiers[0][0].kind == "ici":
            slope += reordering_seconds(1.0, topology.chip)
    else:
        per_full_byte, inside = 0.0, 1
        for tier in tiers:  # all devices below one position of a tier share its transfer
            size = math.prod(w.size for w in tier)
            per_full_byte = max(per_full_byte, (size - 1) / (size * _receive_bandwidth(tier) * inside))
            inside *= size
        slope = per_full_byte * {"all_gather": n, "reduce_scatter": 1, "all_reduce": 2}[kind]
    twice = 2 if kind == "all_reduce" else 1
    if kind in topology.chip.all_reduced_kinds and _is_whole_torus(tiers, rings=kind == "all_gather"):
        slope, twice = 2 * slope, 2
    if len(tiers) > 1:
        # Of the near links there may be a measurement, of the far ones none: they are used one after the other.
        near = _measured(kind, axes, tiers[0], topology)
        if near is not None:
            group = math.prod(w.size for w in tiers[0])
            found = _of_curve(kind, group, near)
            # A gather goes over the far links first: what it has of them is the operand of the near ones.
            grown = n // group if kind == "all_gather" else 1
            beyond = twice * sum(_latency_steps(kind, w) * w.alpha for tier in tiers[1:] for w in tier)
            return dataclasses.replace(
                found,
                slope=max(found.slope * grown, slope),
                alpha=(found.alpha if found.slope * grown > slope else near.knots[0][1]) + beyond,
                volume=volume,
                scale=found.scale * grown,
                least_slope=slope,
                more_alpha=beyond,
            )
    alpha = sum(_latency_steps(kind, w) * w.alpha for tier in tiers for w in tier)
    return Coefficients(slope, volume, topology.chip.startup + alpha * twice)


def reordering_seconds(local_bytes: float, chip: Chip) -> float:
    """Of an all-to-all on a torus, the copies that reorder its operand and its result.

    >>> from jshard._core import hardware
    >>> f"{reordering_seconds(4.8e6, hardware.get('v5e')):.2g}"
    '5.9e-05'
    """
    return 4 * local_bytes / (_REORDERING * chip.hbm_bandwidth)


def _of_curve(kind: CollectiveKind, group: int, curve: CollectiveCurve) -> Coefficients:
    """The coefficients of a collective in groups of one size from a curve of another: equal for equal bytes received."""
    volume = received_per_byte(kind, group)
    scale = volume / received_per_byte(kind, curve.group)
    slope, alpha = curve.piece(math.inf)
    return Coefficients(slope * scale, volume, alpha, curve, scale)


def received_per_byte(kind: CollectiveKind, group: int) -> float:
    """Bytes that a device receives for each byte of its operand.

    >>> received_per_byte("all_gather", 8), received_per_byte("all_reduce", 8)
    (7.0, 1.75)
    """
    return {
        "all_gather": group - 1.0,
        "reduce_scatter": (group - 1) / group,
        "all_reduce": 2 * (group - 1) / group,
        "all_to_all": (group - 1) / group,
        "permute": 1.0,
    }[kind]


def _measured(
    kind: CollectiveKind, axes: Sequence[str], tier: Sequence[Wire], topology: Topology
) -> CollectiveCurve | None:
    """The chip's measured times that fit a collective on such links best; None if it has none."""
    if not topology.chip.curves:
        return None
    names = [n for n, size in zip(topology.mesh.names, topology.mesh.sizes, strict=True) if size > 1]
    wide = [a for a in axes if a in names]
    neighbours = set(wide) == set(names[len(names) - len(wide) :])
    return nearest_curve(topology.chip.curves, kind, topology.mesh.size(*axes), tier[0].kind, not neighbours)


def ring_step(axes: Sequence[str], local_bytes: float, topology: Topology) -> Collective:
    """A permute in which each device along `axes` sends its operand to the next one, and the last to the first.

    No link carries more than one operand in a direction: on a line the last device's goes back against the others.

    >>> from jshard._core import hardware
    >>> from jshard._core.layout import MeshAxes
    >>> from jshard._core.topology import from_mesh
    >>> t = from_mesh(MeshAxes(("x",), (16,)), hardware.get("v5e"))
    >>> print(ring_step(("x",), 1e6, t))
    permute[x] 1e+06 B 3.54e-05 s
    """
    tiers = _tiers(axes, topology)
    if not tiers:
        return Collective("permute", tuple(axes), 0.0, 0.0)
    wires = [w for tier in tiers for w in tier]
    curve = _measured("permute", axes, tiers[-1], topology)
    if curve is not None:
        return Collective("permute", tuple(axes), local_bytes, curve.seconds(local_bytes))
    if wires[0].kind == "shared":
        return Collective(
            "permute", tuple(axes), local_bytes, local_bytes / wires[0].bandwidth + wires[0].alpha
        )
    slope = max(1 / w.rate for w in wires)
    hops = sum(w.alpha * (1 if w.kind != "ici" or w.wrap else w.size - 1) for w in wires)
    return Collective("permute", tuple(axes), local_bytes, local_bytes * slope + topology.chip.startup + hops)


def shift(axes: Sequence[str], distance: int, local_bytes: float, topology: Topology) -> Collective:
    """A permute in which each device along `axes` sends its operand to the one `distance` on, and the last ones do not.

    On a torus, messages of so many devices cross a link. Along several wires the messages of the ends of the inner ones
    go back along them: around a ring, else past all devices of the line.

    >>> from jshard._core import hardware
    >>> from jshard._core.layout import MeshAxes
    >>> from jshard._core.topology import from_mesh
    >>> t = from_mesh(MeshAxes(("x",), (16,)), hardware.get("v5e"))
    >>> print(shift(("x",), 1, 1e6, t), "|", shift(("x",), 2, 1e6, t))
    permute[x] 1e+06 B 3.34e-05 s | permute[x] 1e+06 B 5.78e-05 s
    """
    wires = [w for tier in _tiers(axes[::-1], topology) for w in tier]  # minor axes first
    if not wires:
        return Collective("permute", tuple(axes), 0.0, 0.0)
    if wires[0].kind == "shared":
        return Collective(
            "permute", tuple(axes), local_bytes, local_bytes / wires[0].bandwidth + wires[0].alpha
        )
    slope, alpha, inner = 0.0, 0.0, 1
    for k, w in enumerate(wires):
        hops = min(-(-distance // inner), w.size - 1)
        steps = hops if k == len(wires) - 1 or w.wrap else w.size - 1
        slope = max(slope, (hops if w.kind == "ici" else 1) / w.rate)
        alpha += w.alpha * (steps if w.kind == "ici" else 1)
        inner *= w.size
    return Collective(
        "permute", tuple(axes), local_bytes, local_bytes * slope + topology.chip.startup + alpha
    )


def _tiers(axes: Sequence[str], topology: Topology) -> list[list[Wire]]:
    """The wires below a group by kind, from near to far; parts of one torus axis, or of one switch, are merged."""
    merged: dict[tuple[str, int], Wire] = {}
    for w in (w for a in axes for w in topology.link(a).wires if w.size > 1):
        key = (w.kind, w.axis)
        if key in merged:
            part = merged[key]
            w = dataclasses.replace(w, size=w.size * part.size, stride=min(w.stride, part.stride))
        merged[key] = w
    tiers = [[w for w in merged.values() if w.kind == kind] for kind in WIRE_KINDS]
    return [tier for tier in tiers if tier]


def _is_whole_torus(tiers: Sequence[Sequence[Wire]], rings: bool) -> bool:
    """Whether a group is a whole torus of three axes, and where asked of rings."""
    if len(tiers) != 1 or len(tiers[0]) != 3:
        return False
    return all(w.kind == "ici" and w.size == w.axis_length and (w.wrap or not rings) for w in tiers[0])


def _receive_bandwidth(tier: Sequence[Wire]) -> float:
    """Bytes/s into one device over all torus axes of a tier; on a ring from both sides."""
    return sum(w.rate * (2 if w.wrap else 1) for w in tier)


def _all_to_all(tier: Sequence[Wire]) -> float:
    """Seconds per byte of operand: on a torus the bisection of its slowest axis, else the device's own port."""
    if tier[0].kind == "ici":
        return max(w.size / ((8 if w.wrap else 4) * w.rate) for w in tier)
    return (tier[0].size - 1) / (tier[0].size * tier[0].rate)


def _permute(tier: Sequence[Wire]) -> float:
    """Seconds per byte of operand for the worst permutation: reversal of a line, rotation of a ring by half."""
    if tier[0].kind == "ici":
        return max(max(1.0, w.size / (4 if w.wrap else 2)) / w.rate for w in tier)
    return 1 / tier[0].rate


def _latency_steps(kind: CollectiveKind, w: Wire) -> int:
    """Sequential steps on a wire: hops on a torus, rounds on a switch or network."""
    if w.kind != "ici":
        return 1 if kind == "permute" else math.ceil(math.log2(w.size))
    if kind in ("all_to_all", "permute"):
        return w.size // 2 if w.wrap else w.size - 1
    return math.ceil((w.size - 1) / 2) if w.wrap else w.size - 1
