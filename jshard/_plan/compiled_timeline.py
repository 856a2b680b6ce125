"""The timeline of a compiled program on one device, as plain data: what computes, what communicates, what waits.

>>> gather = Interval("communication", "all-gather-start.1", 0.0, 3e-3, kind="all_gather", exposed=1e-3)
>>> t = CompiledTimeline((Interval("compute", "fusion.1", 0.0, 2e-3), gather), clock=1.5e9)
>>> print(t.summary)
compiled schedule: compute 2 ms, communication 3 ms: 1 ms exposed, 2 ms hidden; step 3 ms
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from jshard._core.messages import format_seconds


@dataclasses.dataclass(frozen=True)
class Interval:
    """One instruction on one of the two streams of a device; one in a loop is as long as all its turns.

    - `stream`: `"compute"` or `"communication"`.
    - `start`, `seconds`: when it starts, and how long it takes.
    - `exposed`: of a collective, the seconds for which the compute stream waits for it.
    - `kind`, `line`: of a collective, and where it is in the text. `operator`: for whom the plan has it.
    - `planned`: seconds of the collectives of the plan that it stands for; 0 for the compiler's own.
    - `asynchronous`: whether it has a start and an end between which others may run.
    """

    stream: Literal["compute", "communication"]
    name: str
    start: float
    seconds: float
    exposed: float = 0.0
    kind: str = ""
    line: int = 0
    operator: str = ""
    planned: float = 0.0
    asynchronous: bool = False


@dataclasses.dataclass(frozen=True)
class CompiledTimeline:
    """Both streams of one device.

    - `intervals`: by start.
    - `planned`: seconds of all collectives of the plan.
    - `clock`: cycles/s of the compiler's own estimates; 0 if compute is estimated from FLOPs and bytes.
    - `unread`: lines that could not be read as a schedule, and loops counted once; if there are any, totals are
      incomplete.
    """

    intervals: tuple[Interval, ...]
    planned: float = 0.0
    clock: float = 0.0
    unread: tuple[str, ...] = ()

    def _total(self, stream: str) -> float:
        return sum(i.seconds for i in self.intervals if i.stream == stream)

    @property
    def compute(self) -> float:
        """Seconds of the compute stream, without its waits."""
        return self._total("compute")

    @property
    def communication(self) -> float:
        """Seconds of all collectives."""
        return self._total("communication")

    @property
    def exposed(self) -> float:
        """Seconds for which the compute stream waits for collectives."""
        return sum(i.exposed for i in self.intervals)

    @property
    def hidden(self) -> float:
        """Seconds of collectives beside which something is computed."""
        hidden = self.communication - self.exposed
        return hidden if hidden > 1e-9 * self.communication else 0.0

    @property
    def step(self) -> float:
        """Seconds of the program: compute, and waits for collectives."""
        return self.compute + self.exposed

    @property
    def complete(self) -> bool:
        """Whether every line was read and every loop has a known number of turns."""
        return not self.unread

    @property
    def collectives(self) -> tuple[Interval, ...]:
        """The intervals of the communication stream."""
        return tuple(i for i in self.intervals if i.stream == "communication")

    @property
    def summary(self) -> str:
        """One line; incomplete totals say so."""
        least = "" if self.complete else "at least "
        incomplete = "" if self.complete else f"; {len(self.unread)} lines not read, totals are incomplete"
        return (
            f"compiled schedule: compute {least}{format_seconds(self.compute)}, communication {least}"
            f"{format_seconds(self.communication)}: {format_seconds(self.exposed)} exposed, "
            f"{format_seconds(self.hidden)} hidden; step {least}{format_seconds(self.step)}{incomplete}"
        )
