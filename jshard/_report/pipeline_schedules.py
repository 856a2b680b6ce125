"""A plan's pipeline by stages and ticks, and what other schedules of it would give by formula.

Each device of a stage runs one program, so a tick, and what a device holds, are the same in every stage. Only the schedule
with all forward ticks before all backward ticks runs (GPipe: Huang et al. 2019, arXiv:1811.06965; in rounds: circular).
The others are formulas of their papers, for equal stages whose backward pass takes twice the forward pass, half of that for
the gradients of weights:

- 1F1B (Narayanan et al. 2021, arXiv:2104.04473): as idle as GPipe, at most S microbatches in flight;
- interleaved 1F1B with v groups of layers a stage (ibid., section 2.2): (S - 1) / (v M + S - 1) idle, and the memory of
  S + (S - 1) / v microbatches;
- zero bubble (Qi et al. 2023, arXiv:2401.10241): ZB-H1 a third of the idle time of 1F1B at its memory; ZB-H2 none, with
  2 S - 1 microbatches in flight.

>>> from jshard._plan.rows import PipelineRow
>>> for s in schedules(PipelineRow("stage", stages=4, microbatches=8, rounds=1, layers=(8, 8)))[:3]:
...     print(s.name, f"{s.idle:.3f}", f"{s.in_flight:g}", s.runs)
GPipe 0.273 8 True
1F1B 0.273 4 False
interleaved 1F1B, 2 groups 0.158 5.5 False
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jshard._core.messages import count_of
from jshard._plan.rows import CollectiveRow, PipelineRow


MOST_TICKS = 40
"""Ticks of a loop up to which every one is written."""

_SHIFT = "stage_shift"  # the operator of such permutes
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A schedule of a pipeline: share of the time a device is idle, and microbatches whose activations it holds at most.

    `runs`: whether it is the plan's; the others are known by formula only.
    """

    name: str
    idle: float
    in_flight: float
    runs: bool = False


@dataclasses.dataclass(frozen=True)
class StageTick:
    """What a stage works on in a tick of a loop: a microbatch in a round, and its layers by number."""

    stage: int
    tick: int
    microbatch: int
    layers: str


def stage_ticks(p: PipelineRow, loop: int) -> list[StageTick]:
    """The busy ticks of each stage in one of the pipeline's loops, by number; the second half of them are backward loops.

    Backward loops go through the ticks in reverse.

    >>> row = PipelineRow("stage", 2, 3, layers=(4, 4))
    >>> [(t.stage, t.tick, t.microbatch, t.layers) for t in stage_ticks(row, 0)][2:4]
    [(0, 2, 2, '0-1'), (1, 1, 0, '2-3')]
    >>> [(t.stage, t.tick, t.microbatch, t.layers) for t in stage_ticks(row, 1)][2:4]
    [(0, 1, 2, '0-1'), (1, 2, 0, '2-3')]
    """
    backward = 2 * loop >= len(p.layers) > 1
    one = dataclasses.replace(p, layers=(p.layers[loop],))
    out = []
    for s in range(p.stages):
        rounds = layers_of(one, s).split(", ")
        for position in range(p.rounds * p.microbatches):
            tick, r = position + s, position // p.microbatches
            at = p.ticks - 1 - tick if backward else tick
            held = rounds[r] if r < len(rounds) else "none"
            out.append(StageTick(s, at, position % p.microbatches, held))
    return out


def schedules(p: PipelineRow) -> list[Schedule]:
    """The plan's schedule, and others of as many stages and microbatches."""
    s, m, v = p.stages, p.microbatches, max(2, p.rounds)
    run = "GPipe" if p.rounds == 1 else f"circular, {p.rounds} rounds"
    return [
        Schedule(run, p.bubble, m, runs=True),
        Schedule("1F1B", (s - 1) / (m + s - 1), min(s, m)),
        Schedule(f"interleaved 1F1B, {v} groups", (s - 1) / (v * m + s - 1), min(s + (s - 1) / v, m)),
        Schedule("zero bubble (ZB-H1)", (s - 1) / (3 * m + s - 1), min(s, m)),
        Schedule("zero bubble (ZB-H2)", 0.0, min(2 * s - 1, m)),
    ]


def layers_of(p: PipelineRow, stage: int) -> str:
    """The numbers of a stage's layers, those of each round apart; loops of other lengths after a semicolon.

    >>> [layers_of(PipelineRow("stage", 2, 4, 2, True, (7, 7)), s) for s in (0, 1)]
    ['0-1, 4-5', '2-3, 6']
    """
    texts = []
    for n in dict.fromkeys(p.layers):
        each = -(-n // (p.stages * p.rounds))
        runs = []
        for r in range(p.rounds):
            first = (r * p.stages + stage) * each
            last = min(first + each, n) - 1
            if last >= first:
                runs.append(str(first) if first == last else f"{first}-{last}")
        texts.append(", ".join(runs) or "none")
    return "; ".join(texts)


def moving_lines(p: PipelineRow, collectives: Iterable[CollectiveRow]) -> list[str]:
    """What passes from stage to stage, where that is more than one value a loop: bytes of a permute, and how many run.

    A loop passes on whatever its layers carry per example. The gradient of a value that all layers read, of an encoder's
    output or of embeddings that are added again, is such a carry of the backward loop.
    """
    moved = [c for c in collectives if c.operator.startswith(_SHIFT)]
    if len(moved) <= len(p.layers):
        return []
    each = ", ".join(f"{c.local} {c.dtype} ({c.operator}, {c.count:.0f} times)" for c in moved)
    return [
        f"{len(moved)} values pass from stage to stage in its {count_of(len(p.layers), 'loop')}, each by a permute a tick: "
        f"{each}; more than one in a loop are all that its layers carry per example, as the gradient of what every layer "
        "reads"
    ]


def unused_share(p: PipelineRow, stage: int) -> float:
    """The part of what a stage has for its layers that no layer uses, where the stages do not divide the layers.

    >>> [unused_share(PipelineRow("stage", 2, 4, 2, True, (7, 7)), s) for s in (0, 1)]
    [0.0, 0.25]
    """
    n = max(p.layers, default=0)
    each = -(-n // (p.stages * p.rounds))
    firsts = [(r * p.stages + stage) * each for r in range(p.rounds)]
    used = sum(max(0, min(first + each, n) - first) for first in firsts)
    return 1 - used / (each * p.rounds) if n else 0.0


def ticks_of(p: PipelineRow, stage: int) -> str:
    """The microbatch of a stage in each tick of a forward loop, "." where it is idle; the busy ticks where they are many.

    >>> [ticks_of(PipelineRow("stage", 2, 3, 2, layers=(4,)), s) for s in (0, 1)]
    ['012012.', '.012012']
    """
    if p.ticks > MOST_TICKS or p.microbatches > len(_DIGITS):
        return f"busy in ticks {stage} to {stage + p.rounds * p.microbatches - 1} of {p.ticks}"
    busy = "".join(_DIGITS[: p.microbatches]) * p.rounds
    return "." * stage + busy + "." * (p.stages - 1 - stage)
