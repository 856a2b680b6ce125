"""What a file costs beside the search: figures, what it leaves whole, slips."""

from __future__ import annotations

import functools
import pathlib

import jax
import jax.numpy as jnp
import pytest

import jshard


F32 = jax.ShapeDtypeStruct


def attention(p: dict, x: jax.Array) -> jax.Array:
    q, k, v = (x @ p[n]["kernel"] for n in ("q", "k", "v"))
    y = jax.nn.softmax(q @ k.T) @ v
    return (y @ p["o"]["kernel"]).sum() + jnp.tanh(x @ p["expert"]).sum()


PARAMETERS = {n: {"kernel": F32((256, 256), "float32")} for n in "qkvo"} | {
    "expert": F32((256, 2048), "float32")
}
X = F32((512, 256), "float32")
CONFIG = """
mesh: {data: 2, tensor: 4}
inputs: {x: [data, null]}
unlisted: replicated
parameters:
  "q.kernel": [tensor, null]
  "{k,v}.kernel": [null, tensor]
  "o.kernel": [tensor, null]
"""


def test_an_audit_names_the_hole_and_the_slip(tmp_path: pathlib.Path) -> None:
    report = jshard.audit(attention, CONFIG, PARAMETERS, X, each_rule=True)
    assert report.file.step >= report.search.step and report.slower >= 1
    assert report.search.mfu is not None and 0 < report.search.mfu <= 1
    assert [w.path for w in report.whole] == ["p.expert"] and report.whole_bytes == 256 * 2048 * 4
    assert {"cut otherwise", "without rule"} <= {p.kind for p in report.problems}
    slip = next(p for p in report.problems if p.kind == "cut otherwise")
    assert "p.q.kernel" in slip.what and slip.where == "config:6"
    # Freeing a rule never makes the proved optimum slower.
    assert len(report.rules) == 3 and all(r.seconds >= -1e-9 * report.file.step for r in report.rules)
    assert [r.seconds for r in report.rules] == sorted((r.seconds for r in report.rules), reverse=True)
    text = str(report)
    assert (
        "whole on every device: 2 MiB" in text
        and "q.kernel" in text
        and "times the step of the search" in text
    )
    report.to_html(tmp_path / "audit.html")
    assert "p.expert" in (tmp_path / "audit.html").read_text()


def test_an_audit_of_the_searchs_own_plan_costs_nothing() -> None:
    plan = jshard.shard(
        attention, config={"mesh": {"data": 2, "tensor": 4}, "inputs": {"x": ["data", None]}, "level": 2}
    )
    report = jshard.audit(attention, plan.plan(PARAMETERS, X).to_config(), PARAMETERS, X)
    assert report.slower == pytest.approx(1.0, rel=1e-9) and not report.rules
    assert not [p for p in report.problems if p.kind not in ("cut otherwise", "unused axis")]


def test_parameters_alone_are_not_priced() -> None:
    with pytest.raises(jshard.ShardError, match="there are only parameters"):
        jshard.audit(PARAMETERS, CONFIG)


def test_the_mesh_and_the_arguments_of_a_sharded_function_hold():
    """`recipes`, `audit`, `Config.check` and `from_recipe` of what `shard` gave: its mesh, machine and static arguments."""

    def step(p, x, layers):
        for _ in range(layers):
            x = jax.nn.relu(x @ p["up"]) @ p["down"]
        return x.mean()

    f32 = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
    args = {"up": f32((64, 256)), "down": f32((256, 64))}, f32((128, 64)), 2
    sharded = jshard.shard(
        step,
        mesh=jax.sharding.AbstractMesh((2, 4), ("data", "model")),
        hardware="v5p",
        static_argnames=("layers",),
    )
    table = jshard.recipes(sharded, *args, names=["megatron"])
    assert table.mesh == str(sharded.plan(*args).mesh) == "data=2 x model=4" and table["megatron"].applies
    assert table.search.step == pytest.approx(jshard.shard(
        step, mesh=jax.sharding.AbstractMesh((2, 4), ("data", "model")), hardware="v5p", static_argnames="layers", level=2
    ).plan(*args).step_seconds)  # fmt: skip
    config = jshard.Config.from_recipe("megatron", sharded, *args)
    assert config.check(sharded, *args).ok
    report = jshard.audit(sharded, {"parameters": {"up": [None, "model"]}}, *args)
    assert report.mesh == "data=2 x model=4" and report.slower >= 1
    with pytest.raises(jshard.ShardError, match="there is none"):
        jshard.recipes(jshard.shard(step, static_argnames="layers"), *args, names=["megatron"])
