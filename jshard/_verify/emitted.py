"""What a compiled program moves: one `Emitted` per collective, their sum as an `EmittedProgram`.

Bytes are those one device receives over the wire, as in the planner's own cost model.

>>> a = Emitted("all_gather", 96, group_size=4, groups="{{0,1,2,3}}", count=5, op_name="jshard.7/all_gather")
>>> a.total, a.tags
(480, (7,))
>>> EmittedProgram((a,)).by_kind
{'all_gather': 480}
"""

from __future__ import annotations

import dataclasses
import re


KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")


def wire_bytes(kind: str, operand_bytes: float, group_size: int) -> float:
    """Bytes a device receives in one collective of a group of n devices.

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

    `bytes` is what one device receives in one execution, `count` the executions (trips of the loops around
    it), `shape` the local operands. `asked` is the bytes without the compiler's own additions, when it made
    any: another type (`promoted` names the one asked for) or padding (`form` says so). `form` is how the
    collective is written when that is not the plain one; `conditional`: a branch holds it. `turn`: a loop
    whose trip count is not known holds it, and `count` is that of one turn. `plain` is the kind that is written where
    `kind` is what it amounts to, and `plain_bytes` what that kind would ask for.
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
        """Bytes of all its executions as the program asked for them: what a plan predicts."""
        return (self.bytes if self.requested_bytes is None else self.requested_bytes) * self.count

    def as_written(self) -> Emitted:
        """The same as the kind that is written, for a program that asked for just that."""
        asked = None if self.written_bytes == self.bytes else self.written_bytes
        return dataclasses.replace(
            self, kind=self.written_kind, requested_bytes=asked, written_kind="", written_bytes=0.0
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
    """Everything the reader found.

    `flops` counts matrix products and convolutions of one device, loops times trips (XLA's own
    `cost_analysis` counts a loop's body once on TPU). `peak_bytes` and `estimated_cycles` (TPU only) are the
    compiler's. `unread` lists what could not be read; when it is not empty, totals are incomplete. `open_loops` are
    loops that hold collectives and whose trip count is not known: they count as one turn, so totals are the least.
    `partitions` is 0 when the text does not say.
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

    @property
    def by_kind(self) -> dict[str, float]:
        """Bytes on the wire per device, by kind; kinds without traffic are left out."""
        return _bytes_by_kind(self.collectives, lambda e: e.total)

    @property
    def meant_by_kind(self) -> dict[str, float]:
        """The same, without the compilers' own widening and padding."""
        return _bytes_by_kind(self.collectives, lambda e: e.meant)

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
        """What stands before a total: lines that were not read, and turns that nobody knows, would add to it."""
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


def _bytes_by_kind(collectives, value) -> dict[str, float]:
    out = {k: sum(value(e) for e in collectives if e.kind == k) for k in KINDS}
    return {k: v for k, v in out.items() if v}
