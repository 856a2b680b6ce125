"""A plan survives the round trip through JSON, runs again from it, and refuses to search without its function."""

from __future__ import annotations

import dataclasses
import json

import jax
import pytest

import jshard
from jshard._core.errors import PlanMismatchError
from tests.helpers.report_plans import NAMES, plan, sharded


@pytest.mark.parametrize("name", [n for n in NAMES if n != "tall126"] + ["tall8"])
def test_json_round_trip_is_identity(name):
    before = plan(name)
    text = before.to_json()
    after = jshard.Plan.from_json(text)
    assert after == before
    assert after.to_json() == text
    for form in (str, jshard.Plan.ir, lambda p: p.ir(local=True), repr):
        assert form(after) == form(dataclasses.replace(before, steps=()))


def test_partial_layouts_and_loops_are_among_the_plans():
    layouts = [lay for n in NAMES for r in plan(n).operators for lay in (*r.operands, *r.results)]
    assert any(lay.partial for lay in layouts)
    assert any(r.repeat == 3 for r in plan("scan").operators)


def test_the_form_has_a_version_and_the_fields_that_are_documented():
    data = json.loads(plan("dense").to_json())
    assert data["jshard"] == 2
    compared = {f.name for f in dataclasses.fields(jshard.Plan) if f.compare}
    assert set(data) == compared | {"jshard"}
    assert data["inputs"][0]["layout"] == {"layout": [["x"], ["y"]], "partial": []}


def test_one_row_a_line():
    p = plan("gpt")
    lines = p.to_json().splitlines()
    assert sum(line.startswith(' {"name"') for line in lines) == len(p.operators)


def test_another_version_is_refused():
    text = plan("dense").to_json().replace('"jshard": 2', '"jshard": 99')
    with pytest.raises(jshard.ShardError, match="version 99, this jshard reads version 2"):
        jshard.Plan.from_json(text)


def test_a_file_is_lowered_without_a_search(tmp_path):
    f, args = sharded("ffn")
    plan("ffn").save(tmp_path / "plan.json")
    loaded = jshard.Plan.load(tmp_path / "plan.json")
    again = jshard.shard(
        f.__wrapped__, {"x": (2, 1)}, parameter_plan={"w1": (1, 4), "w2": (4, 1)}, plan=loaded
    )
    assert again.plan(*args) == plan("ffn")


@pytest.mark.parametrize("method", ["why", "what_if"])
def test_a_plan_from_a_file_says_that_it_cannot_search(method):
    loaded = jshard.Plan.from_json(plan("dense").to_json())
    with pytest.raises(
        jshard.ShardError, match=rf"cannot search\n  where: Plan.{method}\n  write instead: plan the"
    ):
        loaded.why("w") if method == "why" else loaded.what_if(w=(1, 2))


def test_a_plan_keeps_no_arrays_alive():
    captured = jax.numpy.ones((8, 8))
    p = jshard.shard(lambda x: x @ captured, ((8, 1),)).plan(jax.ShapeDtypeStruct((8, 8), "float32"))
    assert p.search_again is not None and p.search_again.program.constants == ()
    assert p.why("x").alternatives


def test_a_saved_plan_brings_its_mesh_and_says_when_devices_are_missing():
    """Without `mesh=` a plan runs on its own axes over the first devices, if there are so many."""
    n = jax.device_count()

    def f(x, w):
        return x @ w

    x = jax.numpy.ones((8, 8))
    small = jshard.shard(
        f,
        (jax.sharding.PartitionSpec("a"), None),
        mesh=jax.make_mesh((2,), ("a",), devices=jax.devices()[:2]),
    )
    saved = jshard.Plan.from_json(small.plan(x, x).to_json())
    result = jshard.shard(f, plan=saved)(x, x)
    assert (result == x @ x).all() and len(result.sharding.device_set) == 2
    large = jshard.shard(
        f,
        (jax.sharding.PartitionSpec("a"), None),
        mesh=jshard.topology("v5e:16x16", {"a": 256}, compiles=False),
    )
    with pytest.raises(PlanMismatchError) as e:
        jshard.shard(f, plan=large.plan(jax.numpy.ones((256, 8)), x))(jax.numpy.ones((256, 8)), x)
    assert str(e.value) == (
        f"the plan was made for 256 devices (a=256), there are {n}\n"
        "  where: plan= of f\n"
        "  write instead: give mesh= the machine that the plan is for, or plan again"
    )


def test_a_plan_of_another_program_is_refused_with_what_makes_it_another():
    """Donated arguments do: operators are in the order of least memory. The message had twice the same number alone."""
    x, w = [jax.ShapeDtypeStruct((8, 8), "float32")] * 2
    mesh = jax.sharding.AbstractMesh((2,), ("a",))
    plan = jshard.shard(lambda x, w: jax.numpy.sin(x) @ w, mesh=mesh).plan(x, w)
    with pytest.raises(PlanMismatchError) as e:
        jshard.shard(lambda x, w: jax.numpy.cos(x) @ w, mesh=mesh, plan=plan).plan(x, w)
    assert str(e.value) == (
        "the plan is of another program: <lambda> with 2 operators, this one is <lambda> with 2\n"
        "  where: plan= of <lambda>\n"
        "  write instead: load the plan of this function, shapes, dtypes and donated arguments, or plan again"
    )
