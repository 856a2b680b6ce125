"""A schedule played on two streams: one computes in the order of the text, one carries collectives one after the other.

A synchronous collective makes the compute stream wait for all of it. An asynchronous one starts where its start stands,
and its end makes the compute stream wait for what is left: that is exposed, the rest is hidden. What shares an
instruction with a product is exposed as far as it takes longer.

>>> steps = (ScheduledStep("start", "s", 3, collectives=(3,)), ScheduledStep("compute", "d", 4, cycles=2000.0),
...          ScheduledStep("done", "e", 5, started_by="s"))
>>> t = play(ProgramSchedule(steps), {3: CollectiveTime(3e-6, "all_gather")}, lambda step: step.cycles / 1e9)
>>> [(i.name, i.stream, f"{i.start:.1e}", f"{i.seconds:.1e}", f"{i.exposed:.1e}") for i in t.intervals]
[('s', 'communication', '0.0e+00', '3.0e-06', '1.0e-06'), ('d', 'compute', '0.0e+00', '2.0e-06', '0.0e+00')]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from jshard._plan.compiled_timeline import CompiledTimeline, Interval
from jshard._verify.scheduled_steps import ProgramSchedule, ScheduledStep


@dataclasses.dataclass(frozen=True)
class CollectiveTime:
    """One execution of an emitted collective: its seconds, its kind, whom the plan has it for, planned seconds."""

    seconds: float
    kind: str
    operator: str = ""
    planned: float = 0.0


def play(
    schedule: ProgramSchedule,
    times: Mapping[int, CollectiveTime],
    compute_seconds: Callable[[ScheduledStep], float],
) -> CompiledTimeline:
    """The timeline of a schedule.

    Arguments:

    - `times`: of the collectives, by the line of the text; one that is missing takes no time.
    - `compute_seconds`: of a step that computes.
    """
    streams = _Streams(times, compute_seconds, list(schedule.unread))
    streams.run(schedule.steps)
    intervals = tuple(sorted(streams.intervals, key=lambda i: i.start))
    return CompiledTimeline(intervals, unread=tuple(streams.unread))


class _Streams:
    """The two streams while a computation runs: when each is free, and which collectives are under way."""

    def __init__(
        self,
        times: Mapping[int, CollectiveTime],
        compute_seconds: Callable[[ScheduledStep], float],
        unread: list[str],
    ):
        self.times, self.compute_seconds, self.unread = times, compute_seconds, unread
        self.intervals: list[Interval] = []
        self.now = self.link_free = 0.0
        self.under_way: dict[str, list[int]] = {}  # name of a start -> places of its intervals

    def run(self, steps: Sequence[ScheduledStep]) -> None:
        """All steps, and the ends of what is still under way after them."""
        for step in steps:
            if step.kind == "loop":
                self._loop(step)
            elif step.kind == "compute":
                self._compute(step)
            elif step.kind == "start":
                self.under_way[step.name] = self._send(step, asynchronous=True)
            elif step.kind == "done":
                self._wait(self.under_way.pop(step.started_by, []))
            elif step.kind == "collective":
                self._wait(self._send(step))
            else:
                sent = self._send(step, asynchronous=True)
                self._compute(step)
                self._wait(sent)
        for places in self.under_way.values():
            self._wait(places)
        self.under_way.clear()

    def _compute(self, step: ScheduledStep) -> None:
        seconds = self.compute_seconds(step)
        if seconds:
            self.intervals.append(Interval("compute", step.name, self.now, seconds, line=step.line))
            self.now += seconds

    def _send(self, step: ScheduledStep, asynchronous: bool = False) -> list[int]:
        """Put the collectives of a step on the link; returns the places of their intervals."""
        places = []
        for line in step.collectives:
            t = self.times.get(line)
            if t is None:
                continue
            start = max(self.now, self.link_free)
            places.append(len(self.intervals))
            self.intervals.append(
                Interval(
                    "communication", step.name, start, t.seconds, 0.0, t.kind, line, t.operator, t.planned, asynchronous
                )
            )  # fmt: skip
            self.link_free = start + t.seconds
        return places

    def _wait(self, places: Sequence[int]) -> None:
        """Let the compute stream wait for the end of these collectives; each is exposed for its part of the wait."""
        for place in places:
            sent = self.intervals[place]
            waited = sent.start + sent.seconds - self.now
            if waited <= 1e-9 * sent.seconds:  # rounding
                continue
            # Waiting for those before it in the queue is theirs, as far as they are not waited for themselves.
            self.intervals[place] = dataclasses.replace(sent, exposed=min(waited, sent.seconds))
            self._expose_queue(sent.start, waited - min(waited, sent.seconds))
            self.now += waited

    def _expose_queue(self, before: float, seconds: float) -> None:
        """Count a wait for the collectives ahead on the link as theirs, the last one first."""
        ahead = [k for k, i in enumerate(self.intervals) if i.stream == "communication" and i.start < before]
        for k in sorted(ahead, key=lambda k: -self.intervals[k].start):
            if seconds <= 0:
                return
            i = self.intervals[k]
            part = min(seconds, i.seconds - i.exposed)
            self.intervals[k] = dataclasses.replace(i, exposed=i.exposed + part)
            seconds -= part

    def _loop(self, step: ScheduledStep) -> None:
        """A loop: its body once, each instruction as long as all its turns."""
        trips = 1 if step.trips is None else step.trips
        if step.trips is None:
            self.unread.append(f"line {step.line}: trip count of the loop {step.name} is not known")
        body = _Streams(self.times, self.compute_seconds, self.unread if trips else [])
        body.run(step.body)
        moves = any(i.stream == "communication" for i in body.intervals)
        if trips and self.link_free > self.now and moves:
            # What is under way delays the first turn's collectives: that turn is played by itself.
            outer, self.under_way = self.under_way, {}
            self.run(step.body)
            self.under_way, trips = outer, trips - 1
        for i in body.intervals if trips else ():
            self.intervals.append(
                dataclasses.replace(
                    i,
                    start=self.now + trips * i.start,
                    seconds=trips * i.seconds,
                    exposed=trips * i.exposed,
                    planned=trips * i.planned,
                )
            )
        self.now += trips * body.now
