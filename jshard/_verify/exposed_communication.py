"""Exposed communication: the schedule of a compiled program with the seconds that the plan gives its collectives.

The compilers' schedules say what runs beside what; they do not say how long a collective takes. That is the plan's own
figure, for the bytes that are really on the wire. Compute takes the TPU compiler's `estimated_cycles` over the clock of
the chip; the GPU compiler writes no such figure, there it is the roofline of FLOPs and bytes. The CPU compiler writes no
asynchronous collectives and no estimates: its programs have no timeline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from jshard._core import hardware
from jshard._core.errors import MeshError
from jshard._core.hardware import Chip
from jshard._cost.roofline import roofline
from jshard._plan.compiled_timeline import CompiledTimeline
from jshard._plan.rows import CollectiveRow
from jshard._verify.compare import Verification
from jshard._verify.emitted import Emitted
from jshard._verify.match import MatchedRow
from jshard._verify.scheduled_steps import ScheduledStep
from jshard._verify.simulated_schedule import CollectiveTime, play


# HLO element types of products -> the type whose peak they have; all others multiply as float32.
_MULTIPLIED_AS = {
    "bf16": "bfloat16",
    "f16": "bfloat16",
    "s8": "int8",
    "u8": "int8",
    "f64": "float64",
    "c64": "complex64",
}


def compiled_timeline(
    rows: Mapping[int, CollectiveRow], chip_name: str, found: Verification
) -> CompiledTimeline | None:
    """The timeline of the program that was compared; None for a CPU, and where chip or schedule are not known.

    Arguments:

    - `rows`: the plan's collectives by number.
    - `chip_name`: of the plan, a name in the hardware table.
    - `found`: the comparison with the plan, which says what each emitted collective stands for.
    """
    try:
        chip = hardware.get(chip_name)
    except MeshError:
        return None
    schedule = found.program.schedule
    if chip.interconnect == "shared" or schedule is None:
        return None
    times = collective_times(rows, found, chip)
    timeline = play(schedule, times, compute_seconds(chip))
    unread = (*timeline.unread, *(u for u in found.program.unread if u not in timeline.unread))
    planned = sum(c.seconds * c.count for c in rows.values() if not c.own)
    return dataclasses.replace(timeline, planned=planned, clock=chip.clock, unread=unread)


def collective_times(
    rows: Mapping[int, CollectiveRow], found: Verification, chip: Chip
) -> dict[int, CollectiveTime]:
    """Seconds of one execution of each emitted collective, by its line."""
    out: dict[int, CollectiveTime] = {}
    for row in found.rows:
        for e, t in zip(row.emitted, _row_times(rows, row, chip), strict=True):
            out[e.line] = _joined(out.get(e.line), t)
    rest = (*found.extra, *found.own, *found.unrequested)
    own = {c.kind: c.seconds / c.bytes for c in rows.values() if c.bytes}
    for e in rest:
        seconds = e.bytes * own[e.kind] if e.kind in own else _link_seconds(e, chip)
        out[e.line] = _joined(out.get(e.line), CollectiveTime(seconds, e.kind, "not planned"))
    return out


def _row_times(rows: Mapping[int, CollectiveRow], row: MatchedRow, chip: Chip) -> list[CollectiveTime]:
    """The emitted collectives of a row at its planned seconds per byte, for the bytes on the wire."""
    known = [(rows[p.id], p.count) for p in row.predicted if p.id is not None and p.id in rows]
    planned = sum(c.seconds * count for c, count in known)
    requested = sum(e.requested_total for e in row.emitted)
    operators = list(dict.fromkeys(p.operator for p in row.predicted))
    name = operators[0] + (f" and {len(operators) - 1} more" if len(operators) > 1 else "")
    times = []
    for e in row.emitted:
        if not planned or not requested:
            times.append(CollectiveTime(_link_seconds(e, chip), e.kind, name))
            continue
        own = (e.bytes if e.requested_bytes is None else e.requested_bytes) / requested
        times.append(
            CollectiveTime(_priced_bytes(e, chip) * planned / row.bytes[0], e.kind, name, own * planned)
        )
    return times


def _priced_bytes(e: Emitted, chip: Chip) -> float:
    """Bytes on the wire; those requested where the plan's seconds are those of the all-reduce that was made of it."""
    is_all_reduced = e.kind in chip.all_reduced_kinds and not e.requested_dtype and "padded" not in e.form
    if is_all_reduced and e.requested_bytes is not None:
        return min(e.bytes, e.requested_bytes)
    return e.bytes


def _joined(one: CollectiveTime | None, other: CollectiveTime) -> CollectiveTime:
    """Both parts of a combined collective as one."""
    if one is None:
        return other
    return dataclasses.replace(one, seconds=one.seconds + other.seconds, planned=one.planned + other.planned)


def _link_seconds(e: Emitted, chip: Chip) -> float:
    """Seconds of a collective that the plan does not have, over one link: an estimate for the compiler's own."""
    return e.bytes / (chip.link_bandwidth * chip.efficiency) + chip.startup


def compute_seconds(chip: Chip) -> Callable[[ScheduledStep], float]:
    """Seconds of a step that computes: the compiler's cycles at the chip's clock, else its roofline."""

    def seconds(step: ScheduledStep) -> float:
        if step.cycles and chip.clock:
            return step.cycles / chip.clock
        kind = "float8_e4m3fn" if step.dtype.startswith("f8") else _MULTIPLIED_AS.get(step.dtype, "float32")
        return float(roofline(step.flops, step.bytes, kind, chip))

    return seconds
