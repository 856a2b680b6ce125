"""Predicted against emitted collectives: rows by number, combined and unnamed ones, extras, notes, wrong programs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jshard._core.errors import PlanMismatchError
from jshard._verify import (
    Emitted,
    EmittedProgram,
    Predicted,
    compare,
    hlo_shape,
    read_program,
    verify_program,
)
from tests.helpers import known_traffic


MESH = known_traffic.mesh_of(jax.devices("cpu"))


def emitted(kind: str, bytes_: float, name: str = "", **more) -> Emitted:
    return Emitted(kind, bytes_, 4, "{}", op_name=name, **more)


def program(*collectives: Emitted, **more) -> EmittedProgram:
    return EmittedProgram(collectives, partitions=8, **more)


def predictions(p: known_traffic.Program, itemsize: int) -> list[Predicted]:
    """What a plan would say of a program with one collective of each kind; `scan` gathers twice."""
    if p.name == "scan":
        n, c = 64 * 128, 128
        return [
            Predicted("all_gather", ("y",), 3 * c * c / 4 * itemsize, "weights", 5),
            Predicted("reduce_scatter", ("x",), n / 2 * itemsize, "product", 5),
            Predicted("all_gather", ("x",), n / 2 * itemsize, "rows", 5),
        ]
    return [Predicted(kind, ("x",), b * itemsize, p.name) for kind, b in p.expected.items()]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", ["gather_x", "psum_xy", "scatter_y", "all_to_all", "permute", "scan"])
def test_a_right_prediction_agrees_to_the_byte(name: str, dtype) -> None:
    p = next(p for p in known_traffic.programs() if p.name == name)
    plan = predictions(p, jnp.dtype(dtype).itemsize)
    v = verify_program(plan, p.lower(MESH, dtype).compile(), devices=8)
    assert v.ok and v.error == 0 and not v.extra and not v.missing
    assert [row.bytes for row in v.rows] == [(q.total, q.total) for q in plan]
    assert v.wire == v.emitted * (1 if dtype == jnp.float32 else 2)
    assert ("widened by the compiler" in str(v)) == (dtype == jnp.bfloat16)


@pytest.mark.parametrize("name", ["gather_x", "psum_xy", "scan"])
def test_a_wrong_prediction_is_found(name: str) -> None:
    p = next(p for p in known_traffic.programs() if p.name == name)
    compiled = read_program(p.lower(MESH, jnp.float32).compile())
    plan = predictions(p, 4)
    for k, change in ((0, {"bytes": plan[0].bytes * 1.05}), (0, {"kind": "all_to_all"}), (-1, {"count": 7})):
        wrong = list(plan)
        wrong[k] = dataclasses.replace(plan[k], **change)
        assert not compare(wrong, compiled).ok
    assert not compare(plan[1:], compiled).ok
    assert not compare([*plan, Predicted("permute", ("y",), 1e6)], compiled).ok


def test_agreement_is_two_percent_of_a_kind() -> None:
    plan = [Predicted("all_gather", ("x",), 1000)]
    assert compare(plan, program(emitted("all_gather", 1019, "jshard.0"))).ok
    assert not compare(plan, program(emitted("all_gather", 1021, "jshard.0"))).ok


def test_a_stray_scalar_is_named_but_does_not_spoil_the_verdict() -> None:
    v = compare(
        [Predicted("all_gather", ("x",), 1e6)],
        program(emitted("all_gather", 1e6, "jshard.0"), emitted("all_reduce", 8, source="m.py:3", line=9)),
    )
    assert v.ok and [e.bytes for e in v.extra] == [8]
    assert "not planned: all_reduce of  over 4: 8 B; no metadata (m.py:3), line 9" in str(v)


def test_combined_collectives_are_compared_as_a_group() -> None:
    plan = [Predicted("all_reduce", ("x",), 100, "a"), Predicted("all_reduce", ("x",), 50, "b")]
    v = compare(plan, program(emitted("all_reduce", 150, "f/(jshard.0/psum:jshard.1/psum)")))
    assert v.ok and len(v.rows) == 1 and v.rows[0].agrees and "(2 planned, 1 emitted)" in str(v)
    assert "a and 1 more" in str(v)


def test_of_equal_collectives_that_a_compiler_merged_the_emitted_one_is_named() -> None:
    """As XLA of jaxlib 0.10 does on CPU, which drops the barriers that set them apart."""
    first = Predicted("all_gather", ("x",), 100, "sin", moved="h 4x8 -> 16x8")
    v = compare(
        [first, dataclasses.replace(first, operator="cos")], program(emitted("all_gather", 100, "jshard.0"))
    )
    assert not v.ok
    assert "not emitted: all_gather over x of cos: 100 B; that of sin moves the same and is emitted" in str(v)
    for other in ({"moved": "h 8x4 -> 8x16"}, {"axes": ("y",)}, {"kind": "permute"}, {"bytes": 80}):
        plan = [first, dataclasses.replace(first, operator="cos", **other)]
        text = str(compare(plan, program(emitted("all_gather", 100, "jshard.0"))))
        assert "not emitted" in text and "moves the same" not in text
    unknown = [dataclasses.replace(first, moved="", operator=name) for name in ("sin", "cos")]
    assert "moves the same" not in str(compare(unknown, program(emitted("all_gather", 100, "jshard.0"))))


def test_combined_collectives_that_kept_one_name_agree_by_kind() -> None:
    plan = [Predicted("all_reduce", ("x",), 100, "a"), Predicted("all_reduce", ("x",), 50, "b")]
    v = compare(plan, program(emitted("all_reduce", 150, "jshard.0/psum")))
    assert v.ok
    assert [p.operator for p in v.missing] == ["b"]  # the name is gone, the bytes are not


def test_collectives_without_a_name_are_matched_by_kind_and_bytes() -> None:
    plan = [
        Predicted("reduce_scatter", ("x",), 100, "a"),
        Predicted("reduce_scatter", ("x",), 70, "b"),
        Predicted("all_reduce", ("x",), 30, "c"),
        Predicted("all_reduce", ("y",), 20, "d"),
    ]
    v = compare(
        plan,
        program(emitted("reduce_scatter", 70), emitted("all_reduce", 50), emitted("reduce_scatter", 100)),
    )
    assert v.ok and not v.extra and not v.missing
    by_operator = {tuple(p.operator for p in r.predicted): r.bytes for r in v.rows}
    assert by_operator == {("a",): (100, 100), ("b",): (70, 70), ("c", "d"): (50, 50)}


def test_a_rewritten_kind_shows_in_its_row() -> None:
    v = compare(
        [Predicted("reduce_scatter", ("x",), 75, "w")], program(emitted("all_reduce", 150, "jshard.0"))
    )
    assert not v.ok and "as all_reduce" in str(v)
    assert v.by_kind == {"reduce_scatter": (75, 0), "all_reduce": (0, 150)}


def test_padding_is_a_note() -> None:
    plan = [Predicted("reduce_scatter", ("x",), 100, "w")]
    padded = emitted(
        "reduce_scatter", 104, "jshard.0", requested_bytes=100, form="all-reduce + slice, padded by 4.0%"
    )
    edge = emitted("permute", 4, requested_bytes=0.0, form="edge of a padded reduce-scatter")
    v = compare(plan, program(padded, edge))
    assert v.ok and v.error == 0 and v.wire == 108 and not v.extra
    assert "padded by the compiler: 2 collectives, 8 B more to move" in str(v)


def test_lines_that_could_not_be_read_make_the_total_incomplete() -> None:
    v = compare([], program(unread=("line 7: ???",)))
    assert not v.ok
    assert v.summary == (
        "emitted differs from the plan, 1 line not read, the total is incomplete: "
        "at least 0 B per device for 0 predicted"
    )
    assert "not read: line 7: ???" in str(v)


def test_a_plan_without_traffic_agrees_with_a_program_without() -> None:
    v = compare([Predicted("all_gather", (), 0)], program())
    assert v.ok and v.error == 0 and str(v) == "emitted as planned: 0 B per device for 0 predicted"


def test_numbers_of_other_plans_are_not_ours() -> None:
    v = compare(
        [Predicted("all_gather", ("x",), 8, id=3)], program(emitted("all_gather", 8, "jshard.33/all_gather"))
    )
    assert v.ok and v.rows[0].emitted[0].tags == (33,)  # matched by bytes, as one without a number
    v = compare(
        [Predicted("all_gather", ("x",), 8, id=3)], program(emitted("all_gather", 9, "jshard.33/all_gather"))
    )
    assert v.extra and v.missing


FIX = "  write instead: plan.verify(f.lower(...).compile()) with the function, mesh and arguments of the plan"


def test_a_program_of_another_mesh_is_refused() -> None:
    p = next(p for p in known_traffic.programs() if p.name == "gather_x")
    with pytest.raises(PlanMismatchError) as error:
        verify_program([], p.lower(MESH, jnp.float32).compile(), devices=16)
    assert str(error.value) == (
        "the compiled program runs on 8 devices, the plan is for 16\n  where: program jit_g\n" + FIX
    )


def test_a_program_of_other_arguments_is_refused() -> None:
    p = next(p for p in known_traffic.programs() if p.name == "three")
    compiled = p.lower(MESH, jnp.float32).compile()
    mine = [hlo_shape(s, jnp.float32) for s in ((32, 32), (16, 32), (32, 32))]
    assert verify_program(predictions(p, 4), compiled, devices=8, inputs=mine).by_kind
    extra = [mine[0], "s32[]", *mine[1:]]  # an argument that nothing reads is dropped by the compiler
    assert verify_program(predictions(p, 4), compiled, devices=8, inputs=extra).by_kind
    with pytest.raises(PlanMismatchError) as error:
        verify_program([], compiled, devices=8, inputs=[mine[0], mine[2]])
    assert str(error.value) == (
        "argument 1 of the compiled program is f32[16,32] on each device; the plan's arguments are "
        "f32[32,32], f32[32,32]\n  where: program jit_three\n" + FIX
    )


@pytest.mark.parametrize(
    "dtype, text",
    [
        ("float16", "f16[3]"), ("float64", "f64[3]"), ("int8", "s8[3]"), ("uint32", "u32[3]"),
        ("bool", "pred[3]"), ("complex64", "c64[3]"), (jnp.bfloat16, "bf16[3]"), (jnp.int4, "s4[3]"),
        (jnp.float8_e4m3fn, "f8e4m3fn[3]"),
    ],
)  # fmt: skip
def test_types_are_written_as_hlo_does(dtype, text: str) -> None:
    assert hlo_shape((3,), dtype) == text
