"""`plan.measure(f, *args)`: the planned program on the devices at hand, predicted beside measured.

The step is the median of several calls after warm-up, with arguments in their planned layouts, beside the planned step
and the start of a call, where the chip is a calibrated one. Where JAX's profiler names instructions (CPU, GPU, TPU), so
is each collective: of the devices that take part in one, the one that waits least, since the others' time contains
their wait for the last to arrive.
"""

from __future__ import annotations

import dataclasses
import glob
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import jax

from jshard._core import hardware
from jshard._core.errors import PlanMismatchError, ShardError
from jshard._core.jax_types import PyTree
from jshard._core.messages import format_seconds, type_with_article
from jshard._core.text_width import wrapped
from jshard._plan.record import PlanRecord
from jshard._verify.verify_plan import verify_plan


RUNS = 9
MOST_RUNS = 99
SECONDS = 0.2
"""At least so long the program is called before it is measured, and then measured, up to `MOST_RUNS` calls each."""
PROFILED_RUNS = 3
BUSY = 0.25  # quartiles of the calls that are further from the median say that the machine does something else too


class PlannedFunction(Protocol):
    """What `measure` needs of a function made by `shard`."""

    def plan(self, *args: PyTree, **kwargs: PyTree) -> PlanRecord:
        """The plan of a call."""
        ...

    def lower(self, *args: PyTree, **kwargs: PyTree) -> jax.stages.Lowered:
        """The planned program."""
        ...

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Run it."""
        ...


@dataclasses.dataclass(frozen=True)
class MeasuredCollective:
    """Collectives of one kind over the same axes: seconds a call, predicted and measured (None: not in the profile)."""

    kind: str
    axes: str
    count: float
    predicted: float
    measured: float | None


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A planned step, predicted and measured: seconds of a call.

    - `predicted`, `measured`: the whole call; `spread`: half the distance of the quartiles over the median.
    - `compute`, `communication`, `call`: predicted; `call` is the start of a program (`Chip.call_seconds`).
    - `profiled`: whether the collectives' figures are from the profiler.
    """

    name: str
    chip: str
    predicted: float
    measured: float
    spread: float
    runs: int
    compute: float
    communication: float
    collectives: tuple[MeasuredCollective, ...]
    profiled: bool
    call: float = 0.0

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        lines = [
            f"{self.name} ({self.chip}): predicted {format_seconds(self.predicted)}, measured "
            f"{format_seconds(self.measured)} (median of {self.runs} calls, quartiles within {self.spread:.0%}): "
            f"{self.error:+.0%}",
            f"  predicted compute {format_seconds(self.compute)}, communication {format_seconds(self.communication)}"
            + (f", start of a call {format_seconds(self.call)}" if self.call else ""),
        ]
        if self.spread > BUSY:
            lines.append("  the calls differ: the machine may be busy")
        if self.collectives:
            lines.append(f"  {'collective':<16}{'axes':<10}{'times':>6}{'predicted':>12}{'measured':>12}")
        for c in self.collectives:
            measured = "-" if c.measured is None else format_seconds(c.measured)
            lines.append(
                f"  {c.kind:<16}{c.axes:<10}{c.count:>6g}{format_seconds(c.predicted):>12}{measured:>12}"
            )
        if self.collectives and not self.profiled:
            lines.append("  JAX's profiler names no instructions here: only the whole call is measured")
        return wrapped(lines)


def measure_plan(
    plan: PlanRecord,
    f: PlannedFunction,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    runs: int = RUNS,
) -> Measurement:
    """Run a planned function and compare; `f` must plan these arguments as `plan`."""
    if not all(hasattr(f, name) for name in ("plan", "lower")):
        raise ShardError(
            f"measure takes the function that was planned, not {type_with_article(f)}",
            where="Plan.measure",
            fix="plan.measure(f, *args) with f = jshard.shard(...)",
        )
    own = f.plan(*args, **kwargs)
    if own.fingerprint != plan.fingerprint or own.decision != plan.decision or own.mesh != plan.mesh:
        raise PlanMismatchError(
            "this function has another plan for these arguments",
            where="Plan.measure",
            fix="f.plan(*args).measure(f, *args), or jshard.shard(fn, plan=plan)",
        )
    compiled = f.lower(*args, **kwargs).compile()
    call = _repeatable_call(compiled, f, args, kwargs)
    _calls(call, 2)
    seconds = sorted(_calls(call, runs))
    names = _instructions(plan, compiled)
    profile = _profile(call, set(names.values())) if names else {}
    middle, quarter = statistics.median(seconds), len(seconds) // 4
    start = hardware.get(plan.chip).call_seconds
    return Measurement(
        name=plan.name,
        chip=plan.chip,
        predicted=plan.step_seconds + start,
        measured=middle,
        spread=(seconds[-1 - quarter] - seconds[quarter]) / 2 / middle,
        runs=len(seconds),
        call=start,
        compute=plan.cost.compute,
        communication=plan.cost.communication,
        collectives=_rows(plan, names, profile),
        profiled=bool(profile),
    )


def _calls(call: Callable[[], float], least: int) -> list[float]:
    """Seconds of at least so many calls, and of more while they take little time."""
    found: list[float] = []
    while len(found) < least or (sum(found) < SECONDS and len(found) < MOST_RUNS):
        found.append(call())
    return found


def _repeatable_call(
    compiled: jax.stages.Compiled, f: PlannedFunction, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> Callable[[], float]:
    """A function that calls `f` and says how long that took; donated arguments are copied before."""
    given, named = tuple(args), dict(kwargs)
    shardings = compiled.input_shardings
    if jax.tree.structure((given, named)) == jax.tree.structure(shardings):  # where no argument is static
        given, named = jax.device_put((given, named), shardings)

    def copies() -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        copied = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, (given, named))
        return jax.block_until_ready(copied)

    first, first_named = copies()
    jax.block_until_ready(f(*first, **first_named))
    leaves = [x for x in jax.tree.leaves((first, first_named)) if isinstance(x, jax.Array)]
    donates = any(x.is_deleted() for x in leaves)

    def call() -> float:
        now, now_named = copies() if donates else (given, named)
        begin = time.perf_counter()
        jax.block_until_ready(f(*now, **now_named))
        return time.perf_counter() - begin

    return call


def _instructions(plan: PlanRecord, compiled: jax.stages.Compiled) -> dict[int, str]:
    """The instruction of the compiled program that stands for each collective of the plan."""
    if not plan.collectives:
        return {}
    found = verify_plan(plan, compiled)
    return {
        p.id: row.emitted[0].name
        for row in found.rows
        for p in row.predicted
        if p.id is not None and row.emitted
    }


def _profile(call: Callable[[], float], names: set[str]) -> dict[str, float]:
    """Seconds of a call in each of these instructions; empty if the profiler does not name them."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with jax.profiler.trace(folder):
                for _ in range(PROFILED_RUNS):
                    call()
            files = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
            planes = [p for name in files for p in jax.profiler.ProfileData.from_file(name).planes]
        # A profiler that is in use, or that a backend lacks, raises its own kinds of errors.
        except Exception:
            return {}
        spans: dict[str, list[tuple[float, float]]] = {}
        for plane in planes:
            for line in plane.lines:
                for e in line.events:
                    if e.name in names:
                        spans.setdefault(e.name, []).append((e.start_ns, e.duration_ns))
    return {name: _least_waits(found) * 1e-9 / PROFILED_RUNS for name, found in spans.items()}


def _least_waits(spans: Sequence[tuple[float, float]]) -> float:
    """Of executions that overlap in time, which are those of the devices of one, the shortest; summed."""
    total, end, least = 0.0, -1.0, 0.0
    for start, duration in sorted(spans):
        if start < end:
            end, least = max(end, start + duration), min(least, duration)
        else:
            total, end, least = total + least, start + duration, duration
    return total + least


def _rows(
    plan: PlanRecord, names: Mapping[int, str], profile: Mapping[str, float]
) -> tuple[MeasuredCollective, ...]:
    """Predicted and measured seconds by kind and axes; an instruction of several collectives counts once."""
    out: dict[tuple[str, str], list[float]] = {}
    instructions: dict[tuple[str, str], set[str]] = {}
    for c in plan.collectives:
        key = c.kind, "*".join(c.axes)
        row = out.setdefault(key, [0.0, 0.0])
        row[0] += c.count
        row[1] += c.seconds * c.count
        if c.id in names:
            instructions.setdefault(key, set()).add(names[c.id])
    rows = []
    for (kind, axes), (count, predicted) in out.items():
        found = [profile[n] for n in sorted(instructions.get((kind, axes), ())) if n in profile]
        rows.append(MeasuredCollective(kind, axes, count, predicted, sum(found) if found else None))
    return tuple(rows)
