"""`jshard.calibrate`: products, memory traffic and collectives measured on the devices at hand, as a chip of the table.

What is measured replaces the figures of the table's chip that the devices are closest to; each quantity is fitted, and
its residuals are printed. Where they are too large (a busy machine), that figure of the table stays, unless it is a
stand-in itself.
"""

from __future__ import annotations

import dataclasses
import datetime
import statistics
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, cast

import jax
import numpy as np

from jshard._core import hardware
from jshard._core.argument_checks import checked
from jshard._core.collective_curves import CollectiveCurve
from jshard._core.compute_units import REGISTER, VectorUnit
from jshard._core.errors import MeshError
from jshard._core.hardware import Chip
from jshard._core.jax_types import Device
from jshard._core.layout import CollectiveKind, MeshAxes
from jshard._core.messages import describe_value, format_seconds
from jshard._core.saved_chip import chip_to_json
from jshard._core.text_files import check_writable, write_file
from jshard._core.topology import from_mesh
from jshard._cost.collectives import collective
from jshard._report.progress import progress


if TYPE_CHECKING:
    from jshard._api.microbenchmarks import Measured, Task


MAX_RESIDUAL = 0.5
"""A fit that is off by more, as the root mean square of relative errors, does not replace a figure of the table.

A choice, not derived: what is off by half may be off by a factor of two, as the table's own times of small
collectives are where a published point is left out (docs/modelled.md), so that the fit says no more than the table does.
"""
_PEAKS = {"float32": "f32_flops", "bfloat16": "bf16_flops"}
_UNITS = {"product": "FLOP/s", "simple": "op/s", "transcendental": "op/s"}
_FIELDS = {
    "read": "hbm_bandwidth", "memory": "hbm_bandwidth", "call": "call_seconds", "simple": "units",
    "transcendental": "units",
}  # fmt: skip
LARGEST = {"shared": 4e6, "switch": 2.7e8}
"""Bytes that a device receives in the largest collective, by interconnect; 3.4e7 on a torus."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One measurement beside what the calibrated chip says of it; `turn`: the seconds of both that the loop itself takes."""

    measured: Measured
    fitted: float
    turn: float = 0.0

    @property
    def residual(self) -> float:
        """(fitted - measured) / measured."""
        return self.fitted / self.measured.seconds - 1


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A measured chip with the measurements that it rests on.

    - `chip`: in the hardware table, under its name.
    - `samples`: every measurement; `notes`: what was too far off its fit, and whose figure is used.
    - `date`, `versions`, `devices`: when, with what and on what it was measured, in `seconds`.
    """

    chip: Chip
    base: str
    samples: tuple[Sample, ...]
    notes: tuple[str, ...]
    date: str
    versions: tuple[tuple[str, str], ...]
    devices: str
    seconds: float

    @property
    def residual(self) -> float:
        """The median size of the residuals."""
        return statistics.median(abs(s.residual) for s in self.samples) if self.samples else 0.0

    def __str__(self) -> str:
        c = self.chip
        lines = [
            f"{c.name}: {self.devices}, measured {self.date} in {self.seconds:.0f} s; replaces figures of {self.base}",
            f"  products {c.f32_flops:.3g} float32 and {c.bf16_flops:.3g} bfloat16 FLOP/s, memory {c.hbm_bandwidth:.3g} B/s",
            f"  {'':<16}{'group':<12}{'sizes':>6}{'smallest':>12}{'largest':>12}{'rate':>16}{'residual':>10}",
        ]
        for (what, dtype, group, strided), found in _by_quantity(self.samples).items():
            first, last = found[0].measured, found[-1].measured
            devices = f"{group}{' strided' if strided else ''}" if group > 1 else dtype
            rate = f"{last.task.size / last.seconds:.3g} {_UNITS.get(what, 'B/s')}" if what != "call" else ""
            off = max(abs(s.residual) for s in found)
            turn = f"  {format_seconds(found[0].turn)} a turn of the loop" if found[0].turn > 1e-6 else ""
            lines.append(
                f"  {what:<16}{devices:<12}{len(found):>6}{format_seconds(first.seconds):>12}"
                f"{format_seconds(last.seconds):>12}{rate:>16}{off:>10.0%}{turn}"
            )
        lines.append(f"  residuals: {self.residual:.0%} in the median, the largest of each row beside it")
        return "\n".join(lines + [f"  {note}" for note in self.notes])

    def save(self, path: str | Path) -> None:
        """Write the chip to a JSON file that `hardware=` of `shard` takes."""
        samples = [
            {
                **dataclasses.asdict(s.measured.task),
                "seconds": s.measured.seconds,
                "fitted": s.fitted,
                "turn": s.turn,
            }
            for s in self.samples
        ]
        about = {"date": self.date, "versions": dict(self.versions), "devices": self.devices}
        text = chip_to_json(self.chip, {**about, "notes": self.notes, "samples": samples})
        write_file(path, text, "Calibration.save")

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>{picture(self)}"


@checked
def calibrate(
    devices: Sequence[Device] | None = None,
    *,
    save: str | Path | None = None,
    name: str | None = None,
    largest: float | None = None,
) -> Calibration:
    """Measure the devices and register what they do as a chip: `hardware=calibration.chip.name`.

    >>> import jax, jshard
    >>> found = jshard.calibrate(jax.devices()[:2], name="two-devices", largest=4096)
    >>> jshard.hardware.get("two-devices") == found.chip, len(found.chip.curves) <= 5
    (True, True)

    Arguments:

    - `devices`: default: all of `jax.devices()`. Collectives are measured over groups of every size that divides their
        number, of neighbours and strided.
    - `save`: a file to write, which `hardware="my-cluster.json"` takes in another process.
    - `name`: of the chip; default: that of the table's chip with the time.
    - `largest`: bytes that a device receives in the largest collective; default: by the kind of links.

    Raises `MeshError` for objects that are no devices, and for a name that another chip has.
    """
    from jshard._api.microbenchmarks import RUNS, measure, tasks  # here, so that `import jshard` stays light

    given = list(jax.devices() if devices is None else devices)
    if not given or not all(hasattr(d, "device_kind") for d in given):
        raise MeshError(
            f"devices is {describe_value(devices)}", where="calibrate", fix="some of jax.devices()"
        )
    if save is not None:  # before the minutes of measuring
        check_writable(save, "calibrate(save=...)")
    base = hardware.for_device(given[0])
    now = datetime.datetime.now()
    begin = time.perf_counter()
    todo = list(
        tasks(len(given), largest or LARGEST.get(base.interconnect, 3.4e7), base.interconnect == "shared")
    )
    found: list[Measured] = []
    with progress("calibrating", len(todo)) as show:
        for k, task in enumerate(todo):
            show(k, task.what)
            start = found[0].seconds if found else 0.0  # the first task is an empty call
            found.append(measure(task, given, RUNS if task.group > 1 else 2 * RUNS, start))
    chip, notes = fitted_chip(
        base, found, name or f"{base.name}-{now:%Y%m%d-%H%M%S}", f"{now:%Y-%m-%d %H:%M}", len(given)
    )
    samples = fitted_samples(chip, found, len(given))
    result = Calibration(
        hardware.register(chip),
        base.name,
        samples,
        notes,
        f"{now:%Y-%m-%d %H:%M}",
        (("jax", jax.__version__), ("numpy", np.__version__)),
        f"{len(given)} x {given[0].device_kind}",
        time.perf_counter() - begin,
    )
    if save is not None:
        result.save(save)
    return result


def fitted_chip(
    base: Chip, found: Sequence[Measured], name: str, date: str, devices: int
) -> tuple[Chip, tuple[str, ...]]:
    """The chip that the measurements give, and notes on quantities that their fits do not describe."""
    from jshard._cost.curve_fit import fit_curve  # here, so that `import jshard` stays light

    figures: dict[str, float] = {}
    elementwise: dict[str, float] = {}
    write_factor = base.units.write_factor
    notes: list[str] = []
    curves: list[CollectiveCurve] = []
    for (what, dtype, group, strided), rows in _by_quantity([Sample(m, m.seconds) for m in found]).items():
        sizes, seconds = [r.measured.task.size for r in rows], [r.measured.seconds for r in rows]
        label = f"{what} of {dtype}" if group == 1 else f"{what} over {group}{' strided' if strided else ''}"
        field = "curves" if group > 1 else _PEAKS[dtype] if what == "product" else _FIELDS[what]
        knots, rate = (), 0.0
        is_written = what == "memory" and "hbm_bandwidth" in figures  # what reads was measured apart
        if group > 1:
            knots, error = fit_curve(sizes, seconds)
        elif is_written:
            rate, error = _write_factor(sizes, seconds, figures["hbm_bandwidth"])
        elif _has_turns(rows):
            turn, rate = fit_turn(sizes, seconds)
            error = _root_mean_square(
                [(turn + size / rate) / t - 1 for size, t in zip(sizes, seconds, strict=True)]
            )
        else:
            first = 1 if len(sizes) > 1 else 0  # without the smallest, which is mostly its start
            rates = [s / t for s, t in zip(sizes, seconds, strict=True)][first:]
            # Products of all sizes together, so that the larger ones count more.
            rate = (
                sum(sizes[first:]) / sum(seconds[first:]) if what == "product" else statistics.median(rates)
            )
            error = _root_mean_square([r / rate - 1 for r in rates])
        if error > MAX_RESIDUAL:
            keep = "[stand-in]" not in base.sources.get(field, "")
            what_now = "the table's figure stays" if keep else "used all the same, the table has a stand-in"
            notes.append(f"{label}: off its fit by {error:.0%}, is the machine busy? {what_now}")
            if keep:
                continue
        if group > 1:
            kind = cast("CollectiveKind", what)
            curves.append(CollectiveCurve(kind, group, knots, _reach(base, group, strided, devices), strided))
        elif is_written:
            write_factor = rate
        elif field == "units":
            elementwise[what] = rate
        else:
            figures[field] = 1 / rate if what == "call" else rate
    units = dataclasses.replace(base.units, write_factor=write_factor)
    if len(elementwise) == 2:
        units = dataclasses.replace(units, vector=_vector_unit(**elementwise))
    fields = (*figures, "curves", *(("units",) if units != base.units else ()))
    sources = {**base.sources, **dict.fromkeys(fields, f"measured {date} [M]")}
    chip = dataclasses.replace(base, name=name, curves=tuple(curves), units=units, sources=sources, **figures)
    return chip, tuple(notes)


def fitted_samples(chip: Chip, found: Sequence[Measured], devices: int) -> tuple[Sample, ...]:
    """The measurements beside what the chip says of each, and of the loops that they were measured in."""
    alone = [Sample(m, m.seconds) for m in found]
    turns = {
        k: fit_turn([r.measured.task.size for r in rows], [r.measured.seconds for r in rows])[0]
        for k, rows in _by_quantity(alone).items()
        if _has_turns(rows)
    }
    return tuple(
        Sample(m, turn + predicted_seconds(chip, m.task, devices), turn)
        for m in found
        for turn in (turns.get((m.task.what, m.task.dtype, m.task.group, m.task.strided), 0.0),)
    )


def _has_turns(rows: Sequence[Sample]) -> bool:
    """Whether these are turns of loops of enough sizes that the loop's own seconds can be told from the rate."""
    tasks = [r.measured.task for r in rows]
    return len({t.size for t in tasks}) > 2 and all(t.looped and t.group == 1 for t in tasks)


def fit_turn(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Seconds that a turn of a loop takes by itself, and the rate of what runs in it: least squares of relative errors.

    On an H200 a turn takes 23 to 36 us, since the host starts it, as long as 70 MB of memory traffic.

    >>> turn, rate = fit_turn([1e6, 4e6, 16e6], [1.2e-5, 1.8e-5, 4.2e-5])
    >>> f"{turn:.1e} s, {rate:.1e} a second"
    '1.0e-05 s, 5.0e+11 a second'
    """
    from scipy.optimize import nnls  # here, so that `import jshard` stays light

    t, scale = np.asarray(seconds), max(sizes) / max(seconds)
    columns = np.stack([1 / t, np.asarray(sizes) / scale / t], 1)
    turn, each = nnls(columns, np.ones(len(t)))[0]
    return (float(turn), float(scale / each)) if each > 0 else (0.0, scale)


def _write_factor(sizes: Sequence[float], seconds: Sequence[float], bandwidth: float) -> tuple[float, float]:
    """How often a written byte counts, and the error of that, of traffic of which a third is written."""
    factors = [max(1.0, 3 * t * bandwidth / s - 2) for s, t in zip(sizes, seconds, strict=True)]
    factor = statistics.median(factors[1:] or factors)
    return factor, _root_mean_square([(2 + factor) / (2 + f) - 1 for f in factors[1:] or factors])


def _vector_unit(simple: float, transcendental: float) -> VectorUnit:
    """A unit with these rates in elements/s; its cycles are such that a register takes one in a simple operation."""
    clock = simple / REGISTER
    return VectorUnit(
        simple=1.0,
        transcendental=simple / transcendental,
        array=0.0,
        loop=0.0,
        least=1.0,
        reduced=0.0,
        clock=clock,
    )


def _reach(base: Chip, group: int, strided: bool, devices: int) -> str:
    """The farthest kind of link in a group of devices."""
    if base.interconnect == "shared":
        return "shared"
    if base.interconnect == "switch":
        spans = devices if strided else group
        return "nvlink" if spans <= base.node_size else "network"
    return "ici"


def predicted_seconds(chip: Chip, task: Task, devices: int) -> float:
    """What a chip says of a task, in a mesh of the groups that were measured."""
    if task.what == "product":
        return task.size / (chip.f32_flops if task.dtype == "float32" else chip.bf16_flops)
    if task.what in ("read", "memory"):
        written = task.size / (2 if task.looped else 3) if task.what == "memory" else 0.0
        return (task.size + (chip.units.write_factor - 1) * written) / chip.hbm_bandwidth
    if task.what == "call":
        return chip.call_seconds
    if task.what in ("simple", "transcendental"):
        simple, transcendental = (task.size, 0.0) if task.what == "simple" else (0.0, task.size)
        return float(chip.units.vector.seconds(simple, transcendental)) if chip.units.vector else 0.0
    n = task.group
    sizes = (n, devices // n) if task.strided else (devices // n, n)
    kind = cast("CollectiveKind", task.what)
    topology = from_mesh(MeshAxes(("outer", "inner"), sizes), chip)
    return collective(kind, ("outer",) if task.strided else ("inner",), task.size, topology).seconds


def _root_mean_square(values: Sequence[float]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def _by_quantity(samples: Sequence[Sample]) -> dict[tuple[str, str, int, bool], list[Sample]]:
    """Samples of one quantity together, by size."""
    out: dict[tuple[str, str, int, bool], list[Sample]] = {}
    for s in samples:
        t = s.measured.task
        out.setdefault((t.what, t.dtype, t.group, t.strided), []).append(s)
    return {k: sorted(v, key=lambda s: s.measured.task.size) for k, v in out.items()}


def picture(found: Calibration) -> str:
    """Seconds by bytes of each collective, both logarithmic: dots measured, lines as fitted."""
    shown = {k: v for k, v in _by_quantity(found.samples).items() if k[2] > 1}
    if not shown:
        return ""
    sizes = [s.measured.task.size for v in shown.values() for s in v]
    times = [t for v in shown.values() for s in v for t in (s.measured.seconds, s.fitted)]
    wide, high = 640, 320

    def at(size: float, seconds: float) -> tuple[float, float]:
        x = np.log(size / min(sizes)) / (np.log(max(sizes) / min(sizes)) or 1)
        y = np.log(seconds / min(times)) / (np.log(max(times) / min(times)) or 1)
        return round(20 + float(x) * (wide - 40), 1), round(high - 20 - float(y) * (high - 40), 1)

    parts = [
        f'<svg viewBox="0 0 {wide} {high}" role="img" aria-label="measured and fitted seconds by bytes">'
    ]
    for k, ((what, _, group, strided), rows) in enumerate(shown.items()):
        colour = f"hsl({47 * k % 360} 60% 45%)"
        line = " ".join("{},{}".format(*at(s.measured.task.size, s.fitted)) for s in rows)
        label = f"{what} over {group}{' strided' if strided else ''}"
        parts.append(
            f'<g stroke="{colour}" fill="{colour}"><title>{label}</title><polyline points="{line}" fill="none"/>'
        )
        for s in rows:
            x, y = at(s.measured.task.size, s.measured.seconds)
            parts.append(f'<circle cx="{x}" cy="{y}" r="3"/>')
        parts.append("</g>")
    return "".join(parts) + "</svg>"
