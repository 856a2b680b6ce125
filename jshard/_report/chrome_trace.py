"""The predicted timeline as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Compute and communication follow each other, as the cost counts them; an operator in a loop is one slice as long as all
its trips. All devices do the same, so one is enough; `devices` writes more. A pipeline has its stages as one more process:
in each tick of a loop the microbatch of every stage that is not idle.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jshard._plan.compiled_timeline import CompiledTimeline
from jshard._plan.rows import CollectiveRow, OperatorRow
from jshard._report.pipeline_schedules import stage_ticks
from jshard._report.timeline import events
from jshard._report.totals import objective_text, optimality_text


if TYPE_CHECKING:
    from jshard._plan.record import PlanRecord


def chrome_trace(plan: PlanRecord, devices: int = 1) -> dict[str, object]:
    """The trace in Chrome's format: slices for operators and collectives, a counter for memory."""
    out: list[dict[str, object]] = []
    live = dict(zip((r.name for r in plan.operators), plan.memory.curve, strict=False))
    for pid in range(devices):
        name = f"device {pid}" if devices > 1 else f"each of {plan.mesh.total} devices"
        out.append(_metadata_event("process_name", pid, 0, name))
        out += [
            _metadata_event("thread_name", pid, 1, "compute"),
            _metadata_event("thread_name", pid, 2, "communication"),
        ]
        at, loops = 0.0, list[tuple[float, float]]()
        for e in events(plan):
            if isinstance(e, OperatorRow):
                if e.name in live:
                    counter = {"bytes": live[e.name]}
                    out.append({"name": "memory", "ph": "C", "ts": at, "pid": pid, "tid": 0, "args": counter})
                if not e.seconds:
                    continue
                args: dict[str, object] = {
                    "operator": e.name, "module": e.module, "source": e.source, "strategy": str(e.strategy),
                    "results": " ".join(map(str, e.results)), "runs": e.repeat,
                }  # fmt: skip
                name, thread, duration = e.primitive, 1, e.seconds * 1e6
            else:
                args = {
                    "bytes": e.total, "runs": e.count, "for": e.operator, "tensor": e.tensor, "block": e.local,
                    "axes": list(e.axes), "id": e.id,
                }  # fmt: skip
                name, thread, duration = f"{e.kind}[{'*'.join(e.axes)}]", 2, e.seconds * e.count * 1e6
            _extend(loops, plan, e, at, duration)
            category = "compute" if thread == 1 else "communication"
            out.append(
                {"name": name, "cat": category, "ph": "X", "ts": at, "dur": duration, "pid": pid, "tid": thread,
                 "args": args}
            )  # fmt: skip
            at += duration
        if not pid:
            out += pipeline_events(plan, loops, devices + 1)
    timeline = plan.verification.timeline if plan.verification is not None else None
    if timeline is not None:
        out += compiled_events(timeline, devices)
    about = {
        "plan": plan.name,
        "mesh": str(plan.mesh),
        "chip": plan.chip,
        "least": objective_text(plan),
        "proof": optimality_text(plan),
    }
    return {"traceEvents": out, "displayTimeUnit": "ns", "otherData": about}


def _extend(
    loops: list[tuple[float, float]], plan: PlanRecord, event: OperatorRow | CollectiveRow, begin: float, duration: float
) -> None:  # fmt: skip
    """Record an event of a pipeline's loop: in the loop before it where nothing outside loops came between."""
    runs = event.repeat if isinstance(event, OperatorRow) else event.count
    if plan.pipeline is None or runs < plan.pipeline.ticks or runs % plan.pipeline.ticks:
        return
    if loops and loops[-1][1] == begin:
        loops[-1] = loops[-1][0], begin + duration
    else:
        loops.append((begin, begin + duration))


def pipeline_events(
    plan: PlanRecord, loops: Sequence[tuple[float, float]], pid: int
) -> list[dict[str, object]]:
    """The stages of a pipeline as threads; `loops`: when the events of its loops begin and end, in microseconds.

    A loop's ticks are equally long. Nothing is drawn where not as many loops are found as the plan has.
    """
    p = plan.pipeline
    longest = sorted(sorted(loops, key=lambda x: x[0] - x[1])[: len(p.layers)] if p is not None else [])
    if p is None or len(longest) < len(p.layers):
        return []
    out = [_metadata_event("process_name", pid, 0, f"stages over {p.axis}")]
    out += [_metadata_event("thread_name", pid, s + 1, f"stage {s}") for s in range(p.stages)]
    for number, (begin, end) in enumerate(longest):
        each = (end - begin) / p.ticks
        for t in stage_ticks(p, number):
            out.append(
                {"name": f"microbatch {t.microbatch}", "cat": "tick", "ph": "X", "ts": begin + t.tick * each, "dur": each,
                 "pid": pid, "tid": t.stage + 1, "args": {"tick": t.tick, "loop": number, "layers": t.layers}}
            )  # fmt: skip
    return out


def compiled_events(timeline: CompiledTimeline, pid: int) -> list[dict[str, object]]:
    """The schedule of the compiled program as one more process of two threads."""
    out = [
        _metadata_event("process_name", pid, 0, "compiled program"),
        _metadata_event("thread_name", pid, 1, "compute"),
        _metadata_event("thread_name", pid, 2, "communication"),
    ]
    for i in timeline.intervals:
        moved = i.stream == "communication"
        args: dict[str, object] = {"instruction": i.name, "line": i.line}
        if moved:
            args |= {"for": i.operator, "planned_us": i.planned * 1e6, "exposed_us": i.exposed * 1e6,
                     "asynchronous": i.asynchronous}  # fmt: skip
        out.append(
            {"name": i.kind if moved else i.name, "cat": i.stream, "ph": "X", "ts": i.start * 1e6, "dur": i.seconds * 1e6,
             "pid": pid, "tid": 2 if moved else 1, "args": args}
        )  # fmt: skip
    return out


def chrome_trace_json(plan: PlanRecord, devices: int = 1) -> str:
    """The trace as JSON text."""
    return json.dumps(chrome_trace(plan, devices), separators=(",", ":"))


def _metadata_event(what: str, pid: int, tid: int, name: str) -> dict[str, object]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
