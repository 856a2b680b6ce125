"""The collectives of a compiled program: one `Emitted` for each, together an `EmittedProgram`.

Bytes are those that one device receives over the wire, as in the planner's cost model.

>>> a = Emitted("all_gather", 96, group_size=4, groups="{{0,1,2,3}}", count=5, op_name="jshard.7/all_gather")
>>> a.total, a.tags
(480, (7,))
>>> EmittedProgram((a,)).by_kind
{'all_gather': 480}
"""

from __future__ import annotations

import dataclasses
import re

from jshard._verify.scheduled_steps import ProgramSchedule


KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")


def wire_bytes(kind: str, operand_bytes: float, group_size: int) -> float:
    """Bytes that a device receives in one collective of a group of n devices.

    With b the bytes of the local operand: all_gather b(n-1), reduce_scatter b(n-1)/n, all_reduce twice
    that, all_to_all b(n-1)/n, permute b. Source: the ring algorithms, which meet the bandwidth bounds
    (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009;
    Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005).

    >>> [wire_bytes(k, 100, 4) for k in KINDS]
    [300, 75.0, 150.0, 75.0, 100]
    """
    n = group_size
    return {
        "all_gather": operand_bytes * (n - 1),
        "reduce_scatter": operand_bytes * (n - 1) / n,
        "all_reduce": 2 * operand_bytes * (n - 1) / n,
        "all_to_all": operand_bytes * (n - 1) / n,
        "permute": operand_bytes,
    }[kind]


@dataclasses.dataclass(frozen=True)
class Emitted:
    """One collective of a compiled program.

    - `bytes`: what one device receives in one execution; `count`: executions (trips of the surrounding loops).
    - `shape`: of the local operands.
    - `requested_bytes`: bytes without the compiler's own additions, if it made any: another type (`requested_dtype` is
      the one that the program requested) or padding (`form` says so).
    - `form`: how the collective is written, if that is not the plain one.
    - `conditional`: a branch contains it. `in_open_loop`: a loop of unknown trip count contains it, and `count` is for one
      trip.
    - `written_kind`: the kind that is written, if it amounts to another `kind`; `written_bytes`: the bytes of that kind.
    """

    kind: str
    bytes: float
    group_size: int
    groups: str
    count: int = 1
    shape: str = ""
    op_name: str = ""
    source: str = ""
    line: int = 0
    name: str = ""
    requested_dtype: str = ""
    requested_bytes: float | None = None
    form: str = ""
    conditional: bool = False
    in_open_loop: bool = False
    written_kind: str = ""
    written_bytes: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of all its executions, on the wire."""
        return self.bytes * self.count

    @property
    def requested_total(self) -> float:
        """Bytes of all its executions as the program requested them: what a plan predicts."""
        return (self.bytes if self.requested_bytes is None else self.requested_bytes) * self.count

    def as_written(self) -> Emitted:
        """The same collective as the kind that is written, for a program that requested that kind."""
        requested = None if self.written_bytes == self.bytes else self.written_bytes
        return dataclasses.replace(
            self, kind=self.written_kind, requested_bytes=requested, written_kind="", written_bytes=0.0
        )

    @property
    def tags(self) -> tuple[int, ...]:
        """Numbers of the planned collectives that its metadata names, as `jshard.<number>`."""
        return tuple(dict.fromkeys(int(n) for n in re.findall(r"\bjshard\.(\d+)\b", self.op_name)))

    def __str__(self) -> str:
        times = f" x {self.count}" if self.count != 1 else ""
        promoted = self.requested_dtype and f"asked for in {self.requested_dtype}"
        inside = self.conditional and "in a branch", self.in_open_loop and "a turn of a loop"
        notes = "".join(f", {n}" for n in (self.form, promoted, *inside) if n)
        where = self.op_name or self.name or "no metadata"
        source = f" ({self.source})" if self.source else ""
        return (
            f"{self.kind} of {self.shape} over {self.group_size}{times}: {self.total:,.0f} B{notes}; "
            f"{where}{source}, line {self.line}"
        )


@dataclasses.dataclass(frozen=True)
class EmittedProgram:
    """The collectives of a compiled program and its totals.

    - `flops`: of the matrix products and convolutions of one device, loops times trips (XLA's own `cost_analysis` counts
      a loop's body once on TPU).
    - `peak_bytes`, `estimated_cycles` (TPU only): the compiler's own figures.
    - `unread`: lines that could not be read; if there are any, totals are incomplete.
    - `partitions`: devices, 0 if the text does not say.
    - `inputs`: local types of the arguments.
    - `open_loops`: loops with collectives and unknown trip count: they count as one trip, so totals are lower bounds.
    - `schedule`: the order in which instructions run; None if there is no text of a program.
    """

    collectives: tuple[Emitted, ...]
    flops: float | None = None
    peak_bytes: int | None = None
    estimated_cycles: float | None = None
    unread: tuple[str, ...] = ()
    partitions: int = 0
    inputs: tuple[str, ...] = ()
    name: str = ""
    open_loops: tuple[str, ...] = ()
    schedule: ProgramSchedule | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def by_kind(self) -> dict[str, float]:
        """Bytes on the wire per device, by kind; kinds without traffic are left out."""
        out = {k: sum(e.total for e in self.collectives if e.kind == k) for k in KINDS}
        return {k: v for k, v in out.items() if v}

    @property
    def total(self) -> float:
        """Bytes on the wire per device."""
        return sum(e.total for e in self.collectives)

    @property
    def complete(self) -> bool:
        """Whether every line was read."""
        return not self.unread

    @property
    def at_least_prefix(self) -> str:
        """The prefix of totals: unread lines and further trips of loops of unknown trip count would add to them."""
        return "at least " if self.unread or self.open_loops else ""

    def __str__(self) -> str:
        lines = [
            f"{self.name or 'program'} on {self.partitions} devices: {self.at_least_prefix}{self.total:,.0f} B per device"
            + ("" if self.complete else ", incomplete")
        ]
        lines += [f"  {e}" for e in self.collectives]
        lines += [f"  counted once: {loop}" for loop in self.open_loops]
        lines += [f"  not read: {u}" for u in self.unread]
        return "\n".join(lines)
