"""Exposed communication: schedules read from HLO, played on two streams, and shown in every form of a plan."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random

import jax
import pytest

import jshard
from jshard._core import hardware
from jshard._plan.compiled_timeline import CompiledTimeline
from jshard._report.chrome_trace import chrome_trace
from jshard._report.html import html_page
from jshard._verify import read_program
from jshard._verify.exposed_communication import compute_seconds
from jshard._verify.scheduled_steps import ProgramSchedule, ScheduledStep
from jshard._verify.simulated_schedule import CollectiveTime, play


SAMPLES = pathlib.Path(__file__).parent / "hlo_samples"
V5E = hardware.get("v5e")

PROGRAM = """HloModule jit_f, is_scheduled=true, num_partitions=8

ENTRY %main (x: f32[1024,4096], w: f32[512,4096]) -> f32[1024,4096] {
  %x = f32[1024,4096]{1,0} parameter(0)
  %w = f32[512,4096]{1,0} parameter(1)
  %start = (f32[512,4096]{1,0}, f32[4096,4096]{1,0}) all-gather-start(%w), channel_id=1, ATTRIBUTES
  %relu = f32[1024,4096]{1,0} maximum(%x, %x)
  %done = f32[4096,4096]{1,0} all-gather-done(%start)
  ROOT %y = f32[1024,4096]{1,0} dot(%relu, %done), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
""".replace(
    "ATTRIBUTES",
    "replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, "
    'metadata={op_name="jit(f)/jshard.0/all_gather"}, backend_config={"collective_backend_config":{"is_sync":SYNC}}',
)


def planned() -> jshard.Plan:
    """`relu(x) @ w` on eight GPUs: the batch is cut, and so is the weight, which is gathered."""
    mesh = jshard.topology("h100:1x8", {"x": 8}, compiles=False)
    f = jshard.shard(
        lambda x, w: jax.numpy.maximum(x, 0) @ w,
        in_strategy=((8, 1), (8, 1)),
        out_strategy=(8, 1),
        mesh=mesh,
        level=2,
    )
    return f.plan(
        jax.ShapeDtypeStruct((8192, 4096), "float32"), jax.ShapeDtypeStruct((4096, 4096), "float32")
    )


@pytest.fixture(scope="module")
def plan() -> jshard.Plan:
    p = planned()
    assert [c.kind for c in p.collectives] == ["all_gather"]
    return p


def test_what_runs_before_its_end_hides_a_collective(plan: jshard.Plan) -> None:
    gather = plan.collectives[0].seconds
    chip = hardware.get("h100")
    relu = 3 * 1024 * 4096 * 4 / chip.hbm_bandwidth
    product = 2 * 1024 * 4096 * 4096 / chip.f32_flops
    found = plan.verify(PROGRAM.replace("SYNC", "false"))
    t = found.timeline
    assert found.ok and t is not None and t.complete
    assert t.planned == t.communication == pytest.approx(gather)
    assert t.compute == pytest.approx(relu + product)
    assert 0 < relu < gather and t.exposed == pytest.approx(gather - relu)
    assert t.step == pytest.approx(gather + product)
    assert "exposed" in found.text and t.summary in found.text


def test_a_synchronous_start_hides_nothing(plan: jshard.Plan) -> None:
    t = plan.verify(PROGRAM.replace("SYNC", "true")).timeline
    assert t is not None
    assert t.exposed == pytest.approx(plan.collectives[0].seconds) and not t.hidden
    assert t.step == pytest.approx(t.compute + t.communication)


def test_a_widened_collective_takes_longer_than_planned(plan: jshard.Plan) -> None:
    half = dataclasses.replace(
        plan, collectives=(dataclasses.replace(plan.collectives[0], bytes=plan.collectives[0].bytes / 2),)
    )
    t = half.verify(PROGRAM.replace("SYNC", "true")).timeline
    assert t is not None
    assert t.communication == pytest.approx(2 * half.collectives[0].seconds)
    assert t.planned == pytest.approx(half.collectives[0].seconds)


def test_every_form_of_a_plan_shows_the_timeline(plan: jshard.Plan) -> None:
    verified = dataclasses.replace(plan, verification=plan.verify(PROGRAM.replace("SYNC", "false")))
    t = verified.verification.timeline
    assert t.summary in " ".join(str(verified).split())
    assert verified.figures().compiled_seconds == t.step and "by the compiled schedule" in str(
        verified.figures()
    )
    page = html_page(verified)
    assert 'class="compiled"' in page and 'class="exposed"' in page and t.summary in page
    trace = chrome_trace(verified)["traceEvents"]
    own = [e for e in trace if e["ph"] == "X" and e["pid"] == 1]
    by = {c: sum(e["dur"] for e in own if e["cat"] == c) * 1e-6 for c in ("compute", "communication")}
    assert by == pytest.approx({"compute": t.compute, "communication": t.communication})
    gather = next(e for e in own if e["cat"] == "communication")
    relu = next(e for e in own if e["name"] == "relu")
    assert gather["ts"] == relu["ts"] == 0.0  # side by side
    json.dumps(trace)
    assert 'class="compiled"' not in html_page(plan)


@pytest.mark.parametrize(
    "broken, said",
    [
        (lambda t: t.replace("is_scheduled=true, ", ""), "line 1: the text has no is_scheduled=true"),
        (lambda t: t.replace("  %relu = f32[1024,4096]{1,0} maximum(", "  %relu = what ("), "line 7: "),
        (
            lambda t: t.replace("all-gather-done(%start)", "get-tuple-element(%start), index=1"),
            "nothing ends",
        ),
    ],
)
def test_lines_that_cannot_be_read_are_named(plan: jshard.Plan, broken, said) -> None:
    found = plan.verify(broken(PROGRAM.replace("SYNC", "false")))
    t = found.timeline
    assert t is not None and not t.complete
    assert any(said in u for u in t.unread)
    assert "incomplete" in t.summary and said in found.text


def test_programs_of_a_cpu_have_no_timeline() -> None:
    f = jshard.shard(
        lambda x, w: x @ w, in_strategy=((8, 1), (8, 1)), mesh=jshard.topology("cpu:8", {"x": 8})
    )
    args = jax.numpy.ones((16, 8)), jax.numpy.ones((8, 8))
    v = f.plan(*args, verify=True).verification
    assert v.ok and v.timeline is None and "exposed" not in v.text


def test_a_chain_of_tpu_fusions_is_one_collective_in_every_turn() -> None:
    program = read_program((SAMPLES / "tpu_async_fusion.txt").read_text())
    (loop,) = program.schedule.steps
    assert [s.kind for s in loop.body if not s.name.startswith("next")] == ["start", "compute", "done"]
    assert loop.trips == 4 and loop.body[-1].started_by == "async-collective-start"
    (emitted,) = program.collectives
    gather = 100e-6
    t = play(program.schedule, {emitted.line: CollectiveTime(gather, "all_gather")}, compute_seconds(V5E))
    beside = 71516 / 1.5e9
    assert t.communication == pytest.approx(4 * gather)
    assert t.exposed == pytest.approx(4 * (gather - beside), rel=1e-3)


def test_a_loop_of_unknown_turns_makes_totals_incomplete() -> None:
    loop = ScheduledStep("loop", "w", 7, body=(ScheduledStep("compute", "d", 8, cycles=10.0),), trips=None)
    t = play(ProgramSchedule((loop,)), {}, compute_seconds(V5E))
    assert not t.complete and "line 7" in t.unread[0] and "at least" in t.summary


def random_schedule(rng: random.Random, depth: int = 0) -> list[ScheduledStep]:
    """Steps of every kind; ends of collectives in another order than their starts, some of them missing."""
    out, open_ = [], []
    for _ in range(rng.randint(1, 9)):
        line = rng.randint(1, 10**9)
        kind = rng.choice(("compute", "compute", "collective", "fused", "start", "start", "done", "loop"))
        cycles = rng.choice((0.0, 1e3, 1e6)) * rng.random()
        if kind == "loop" and depth < 2:
            body = tuple(random_schedule(rng, depth + 1))
            out.append(ScheduledStep("loop", f"w{line}", line, body=body, trips=rng.randint(0, 3)))
        elif kind == "done" and open_:
            out.append(
                ScheduledStep("done", f"d{line}", line, started_by=open_.pop(rng.randrange(len(open_))))
            )
        elif kind in ("compute", "fused", "collective", "start"):
            moved = (line,) if kind != "compute" else ()
            out.append(ScheduledStep(kind, f"s{line}", line, cycles=cycles, collectives=moved))
            open_ += [f"s{line}"] * (kind == "start")
    return out


def lines_of(steps: list[ScheduledStep]) -> list[int]:
    return [n for s in steps for n in (*s.collectives, *lines_of(list(s.body)))]


@pytest.mark.parametrize("seed", range(60))
def test_both_streams_run_one_thing_at_a_time(seed: int) -> None:
    rng = random.Random(seed)
    steps = random_schedule(rng)
    times = {n: CollectiveTime(rng.random() * 1e-3, "all_gather") for n in lines_of(steps)}
    t = play(ProgramSchedule(tuple(steps)), times, compute_seconds(V5E))
    slack = 1e-9
    assert max(t.compute, t.communication) <= t.step + slack
    assert t.step <= t.compute + t.communication + slack
    assert all(0 <= i.exposed <= i.seconds + slack for i in t.intervals)
    assert max((i.start + i.seconds for i in t.intervals), default=0.0) <= t.step + slack
    if not any(s.kind == "loop" for s in steps):  # a loop's turns are drawn as one
        for stream in ("compute", "communication"):
            own = sorted((i for i in t.intervals if i.stream == stream), key=lambda i: i.start)
            assert all(a.start + a.seconds <= b.start + slack for a, b in zip(own, own[1:], strict=False))


def test_an_empty_program_takes_no_time() -> None:
    assert CompiledTimeline(()).step == 0.0 and not CompiledTimeline(()).exposed
