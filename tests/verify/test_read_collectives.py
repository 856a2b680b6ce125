"""Collectives read from HLO: small texts with the answer in their first lines, compiled programs of known traffic."""

from __future__ import annotations

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from jshard._verify import EmittedProgram, read_program, wire_bytes
from jshard._verify.hlo_parser import parse
from jshard._verify.match import Predicted, match_collectives
from jshard._verify.replica_groups import read_groups
from tests.helpers import known_traffic


SAMPLES = sorted((pathlib.Path(__file__).parent / "hlo_samples").glob("*.txt"))
MESH = known_traffic.mesh_of(jax.devices("cpu"))


def stated(text: str, key: str) -> dict[str, float]:
    """The bytes by kind that a sample's `// key:` line states."""
    line = re.search(rf"^// {key}: (.*)$", text, re.M)
    assert line, f"the sample has no line '// {key}:'"
    return {kind: float(n) for kind, n in (part.split() for part in line[1].split(","))}


@pytest.mark.parametrize("path", SAMPLES, ids=lambda p: p.stem)
def test_samples_give_what_they_state(path: pathlib.Path) -> None:
    text = path.read_text()
    program = read_program(text)
    assert program.by_kind == stated(text, "expect")
    assert known_traffic.requested_by_kind(program) == stated(text, "requested")
    assert program.complete


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("program", known_traffic.programs(), ids=lambda p: p.name)
def test_compiled_programs_have_the_traffic_of_their_shapes(program: known_traffic.Program, dtype) -> None:
    found = read_program(program.lower(MESH, dtype).compile())
    itemsize = jnp.dtype(dtype).itemsize
    assert known_traffic.requested_by_kind(found) == {k: v * itemsize for k, v in program.expected.items()}
    # CPU has no bfloat16 collectives: the wire carries float32, and the reader says so.
    assert found.by_kind == {k: v * 4 for k, v in program.expected.items()}
    assert {e.requested_dtype for e in found.collectives} == ({""} if itemsize == 4 else {"bf16"})
    assert sorted({t for e in found.collectives for t in e.tags}) == list(program.tags)
    assert all("known_traffic.py:" in e.source for e in found.collectives)
    assert found.complete and found.partitions == 8


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_a_training_step_has_the_traffic_of_its_jaxpr(dtype) -> None:
    f, args = known_traffic.training_step(MESH, layers=3, batch=128, d=64, ff=128, dtype=dtype)
    traced = f.trace(*args)
    found = read_program(traced.lower().compile())
    assert known_traffic.requested_by_kind(found) == known_traffic.jaxpr_traffic(traced.jaxpr, MESH)
    products = 3 * 2 * (1 + 2)  # layers, two in each; forward and two backward
    assert found.flops == products * 2 * 128 * 64 * 128 / 8
    assert found.peak_bytes and found.peak_bytes > 0
    assert found.inputs == tuple(
        f"{'f32' if dtype == jnp.float32 else 'bf16'}[{s}]" for s in ("3,32,32", "3,32,32", "16,64")
    )


def test_flops_of_a_convolution_leave_out_padding_and_holes() -> None:
    conv = jax.jit(lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME"))
    x, k = jnp.ones((2, 3, 8, 8)), jnp.ones((5, 3, 3, 3))
    # Along each dimension of 8 with 3 taps, 8 + 7 + 7 pairs of output and tap fall inside.
    assert read_program(conv.lower(x, k).compile()).flops == 2 * 2 * 3 * 5 * 22 * 22


def test_conditional_collectives_are_marked() -> None:
    program = next(p for p in known_traffic.programs() if p.name == "branch")
    (found,) = read_program(program.lower(MESH, jnp.float32).compile()).collectives
    assert found.conditional and "in a branch" in str(found)


def test_widening_asked_for_by_the_program_is_its_own() -> None:
    def f(a):
        return known_traffic.gather(a.astype(jnp.float32), "x") * 2

    program = known_traffic.Program("f", f, (known_traffic.P("x"),), known_traffic.P(), ((64, 128),), {})
    (found,) = read_program(program.lower(MESH, jnp.bfloat16).compile()).collectives
    assert found.requested_dtype == "" and found.requested_total == found.total == 64 * 128 * 4 / 2


def test_cycles_and_tags_of_a_tpu_text() -> None:
    path = next(p for p in SAMPLES if p.stem == "tpu_async_fusion")
    program = read_program(path.read_text())
    assert program.estimated_cycles == 4 * 71516
    (gather,) = program.collectives
    assert gather.tags == (2,) and gather.count == 4 and gather.line == 8
    assert program.flops == 4 * 2 * 8 * 4096 * 4096


def test_combined_collectives_keep_all_their_numbers() -> None:
    path = next(p for p in SAMPLES if p.stem == "combined_in_a_call")
    assert {e.kind: e.tags for e in read_program(path.read_text()).collectives}["all_reduce"] == (3, 5)


@pytest.mark.parametrize(
    "bad, message",
    [
        ("not HLO at all", "line 1: not HLO at all"),
        ("", "line 1: no computation in the text"),
        (
            "ENTRY %m (p: f32[8]) -> f32[16] {\n  %p = f32[8] parameter(0)\n"
            "  ROOT %g = f32[16] all-gather(%p), replica_groups=?weird\n}",
            "line 3: replica groups in a notation not known: ?weird",
        ),
        (
            "ENTRY %m (p: f32[8]) -> f32[16] {\n  what is this\n  ROOT %p = f32[8] parameter(0)\n}",
            "line 2: what is this",
        ),
        (
            "ENTRY %m (p: f32[8]) -> f32[16] {\n  ROOT %g = f32[16] all-gather(%q)\n}",
            "line 2: operands of g are not in the text",
        ),
        (
            "ENTRY %m (p: f32[8]) -> f32[8] {\n  %p = f32[8] parameter(0)\n"
            "  ROOT %c = f32[8] call(%p), to_apply=%gone\n}",
            "line 3: computation gone is not in the text",
        ),
        (
            "ENTRY %m (p: f32[8]) -> f32[8] {\n  ROOT %p = f32[8] parameter(0)",
            "line 2: the text ends inside computation m",
        ),
    ],
)
def test_what_cannot_be_read_is_named_by_line(bad: str, message: str) -> None:
    program = read_program(bad)
    assert message in program.unread
    assert not program.complete and "incomplete" in str(program)


def test_reading_goes_on_after_a_line_it_cannot_read() -> None:
    path = next(p for p in SAMPLES if p.stem == "notations")
    text = path.read_text()
    broken = text.replace("replica_groups=[4,2]<=[8]", "replica_groups=<odd>").replace(
        "%all = f32", "%all f32"
    )
    program = read_program(broken)
    assert program.by_kind == {"all_gather": 544 - 32 - 7 * 32}
    assert len(program.unread) == 2


def test_a_loop_without_a_known_end_is_counted_once_and_said() -> None:
    text = next(p for p in SAMPLES if p.stem == "ring_all_gather").read_text()
    program = read_program(
        text.replace("%n = s32[] constant(3)", "%n = s32[] get-tuple-element(%c.1), index=0")
    )
    assert program.by_kind == {"all_gather": 512}
    assert program.complete and [e.in_open_loop for e in program.collectives] == [True]
    assert any("trip count of the loop loop is not known" in u for u in program.open_loops)
    assert str(program).startswith("jit_f on 4 devices: at least 512 B per device\n")


@pytest.mark.parametrize(
    "start, step, limit, direction, trips",
    [(0, 1, 7, "LT", 7), (0, 1, 7, "LE", 8), (2, 3, 12, "LT", 4), (0, 1, 5, "NE", 5), (5, 1, 5, "LT", 0)],
)
def test_trip_counts_follow_the_comparison(start, step, limit, direction, trips) -> None:
    text = next(p for p in SAMPLES if p.stem == "ring_all_gather").read_text()
    text = text.replace("%zero.0 = s32[] constant(0)", f"%zero.0 = s32[] constant({start})")
    text = text.replace("%one = s32[] constant(1)", f"%one = s32[] constant({step})")
    text = text.replace("%n = s32[] constant(3)", f"%n = s32[] constant({limit})")
    text = text.replace("compare(%n, %i.1), direction=GT", f"compare(%i.1, %n), direction={direction}")
    assert read_program(text).by_kind == ({"all_gather": 512 * trips} if trips else {})


@pytest.mark.parametrize(
    "text, groups",
    [
        ("{{0,2},{1,3}}", ((0, 2), (1, 3))),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("{}", ((0, 1, 2, 3),)),
        (None, ((0, 1, 2, 3),)),
        ("mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'b','a'}", ((0, 2, 1, 3),)),
        ("mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
        ("mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", ((0, 1), (2, 3))),
    ],
)
def test_groups_in_every_notation(text: str | None, groups: tuple) -> None:
    assert read_groups(text, 4) == groups


def test_bytes_of_a_reduce_scatter_and_an_all_gather_make_an_all_reduce() -> None:
    """The law behind the formulas: reducing and gathering a tensor moves what all-reducing it does."""
    for n in (2, 3, 8, 512):
        both = wire_bytes("reduce_scatter", 1000, n) + wire_bytes("all_gather", 1000 / n, n)
        assert both == pytest.approx(wire_bytes("all_reduce", 1000, n))


def test_stack_frames_and_literals_do_not_confuse_the_parser() -> None:
    module = parse(
        'HloModule m, num_partitions=2, frontend_attributes={a="}{"}\n\n'
        'FileNames\n1 "/a b/c.py"\n\n'
        "FileLocations\n1 {file_name_id=1 function_name_id=1 line=7 end_line=7}\n\n"
        "StackFrames\n1 {file_location_id=1 parent_frame_id=1}\n\n"
        'ENTRY %e () -> f32[2,2] {\n  %s = s8[3] constant("a)b")\n'
        "  ROOT %k = f32[2,2] constant({\n    { 1, 2 },\n    { 3, 4 }\n  }), metadata={stack_frame_id=1}\n}\n"
    )
    entry = module.computations["e"]
    assert [i.name for i in entry.instructions] == ["s", "k"] and not module.unread
    assert entry.root is not None and module.source(entry.root) == "/a b/c.py:7"


def test_programs_print() -> None:
    assert str(EmittedProgram(())) == "program on 0 devices: 0 B per device"


def test_a_collective_that_nothing_runs_is_named() -> None:
    text = next(p for p in SAMPLES if p.stem == "sparse_core_call").read_text()
    program = read_program(text.replace("to_apply=%called_computation", "runs=%called_computation"))
    assert program.by_kind == {}
    assert program.unread == (
        "line 9: all-gather all-gather.1 is in called_computation, which nothing that was read runs",
    )


def test_parts_of_a_combined_collective_keep_their_own_numbers() -> None:
    text = next(p for p in SAMPLES if p.stem == "combined_and_sliced").read_text()
    assert {e.kind: e.tags for e in read_program(text).collectives} == {
        "reduce_scatter": (4,),
        "all_reduce": (9,),
    }


def test_a_part_of_a_combination_that_is_named_after_another_part_has_no_number() -> None:
    """XLA for TPUs names a combination after its first part, and the slices of a reduce-scatter after nothing."""
    text = next(p for p in SAMPLES if p.stem == "combined_and_sliced").read_text()
    text = text.replace(', metadata={op_name="jit(f)/jshard.4/reduce_scatter"}', "")
    named = text.replace("to_apply=%add\n", 'to_apply=%add, metadata={op_name="jit(f)/jshard.9/psum"}\n')
    assert named.count("jshard.9") == 2
    program = read_program(named)
    assert {e.kind: e.tags for e in program.collectives} == {"reduce_scatter": (), "all_reduce": (9,)}
    plan = [Predicted("reduce_scatter", ("x",), 96, id=4), Predicted("all_reduce", ("x",), 48, id=9)]
    rows, extra = match_collectives(plan, program.collectives)
    assert [r.bytes for r in rows] == [(96, 96), (48, 48)] and not extra


def test_of_a_combination_only_the_widened_parts_count_as_narrow() -> None:
    """XLA combines a float32 sum with one that it widened from bfloat16, and names the reducer of the first."""
    found = read_program("""HloModule jit_f, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

ENTRY %main (p: f32[8], q: bf16[64]) -> (f32[8], bf16[64]) {
  %p = f32[8] parameter(0)
  %q = bf16[64] parameter(1)
  %wide = f32[64] convert(%q)
  %both = (f32[8], f32[64]) all-reduce(%p, %wide), replica_groups={{0,1,2,3}}, to_apply=%add
  %first = f32[8] get-tuple-element(%both), index=0
  %second = f32[64] get-tuple-element(%both), index=1
  %narrow = bf16[64] convert(%second)
  ROOT %out = (f32[8], bf16[64]) tuple(%first, %narrow)
}
""")
    (emitted,) = found.collectives
    assert (emitted.total, emitted.requested_total) == (1.5 * (8 * 4 + 64 * 4), 1.5 * (8 * 4 + 64 * 2))
    assert emitted.requested_dtype == "bf16"
