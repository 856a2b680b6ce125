"""Figures of a step: model FLOPs and their utilization, rates, chip-hours, and what they leave out."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jshard
from jshard._core import hardware
from jshard._core.messages import format_seconds
from jshard._plan.rows import ModelFlops


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def on_v5e():
    return jshard.topology("v5e:2x4", {"x": 8}, compiles=False)


def mlp_loss(ws, x, layer):
    for w in ws:
        x = layer(x, w)
    return (x**2).sum()


def layer(x, w):
    return jnp.tanh(x @ w)


def test_model_flops_of_a_training_step_do_not_count_recomputation():
    shapes = ([f32(64, 64)] * 3, f32(256, 64))
    product = 2 * 256 * 64 * 64
    plain = jshard.shard(jax.grad(lambda ws, x: mlp_loss(ws, x, layer)), mesh=on_v5e()).plan(*shapes)
    remat = jshard.shard(jax.grad(lambda ws, x: mlp_loss(ws, x, jax.checkpoint(layer))), mesh=on_v5e()).plan(
        *shapes
    )
    # Three products forward, three gradients of weights, two of activations: x needs no gradient.
    assert plain.model_flops.flops == remat.model_flops.flops == 8 * product
    assert plain.model_flops.recomputed == 0
    assert remat.model_flops.recomputed > 0


def test_utilization_is_peak_seconds_over_the_step_and_below_one():
    plan = jshard.shard(lambda x, w: x @ w, in_strategy=((8, 1), None), mesh=on_v5e()).plan(
        f32(8192, 4096), f32(4096, 4096)
    )
    peak = hardware.get("v5e").f32_flops
    assert plan.model_flops.peak_seconds == pytest.approx(2 * 8192 * 4096 * 4096 / 8 / peak)
    assert plan.mfu == plan.model_flops.peak_seconds / plan.step_seconds
    assert 0 < plan.mfu <= 1
    assert plan.step_seconds == plan.cost.compute + plan.cost.communication
    assert "MFU" in str(plan) and "MFU" in plan._repr_html_()


def test_rates_hours_and_price():
    plan = jshard.shard(lambda x, w: x @ w, in_strategy=((8, 1), None), mesh=on_v5e()).plan(
        f32(8192, 4096), f32(4096, 4096)
    )
    found = plan.figures(tokens=8192 * 16, examples=8192, price=1.2)
    assert found.tokens_per_second == pytest.approx(8192 * 16 / plan.step_seconds)
    assert found.examples_per_second == pytest.approx(8192 / plan.step_seconds)
    assert found.chip_hours == pytest.approx(8 * plan.step_seconds / 3600)
    assert found.cost == pytest.approx(found.chip_hours * 1.2)
    assert "launches of kernels" in str(found)
    assert plan.figures().cost is None and plan.figures().tokens_per_second is None


def test_bytes_and_seconds_by_axes_are_those_of_the_plan():
    mesh = jshard.topology("v5e:2x4", {"x": 2, "y": 4}, compiles=False)
    plan = jshard.shard(lambda x, w: x @ w, in_strategy=((2, 4), (4, 1)), mesh=mesh).plan(
        f32(64, 64), f32(64, 64)
    )
    rows = plan.figures().by_axes
    assert sum(size for _, size, _ in rows) == pytest.approx(sum(c.total for c in plan.collectives))
    assert sum(s for *_, s in rows) == pytest.approx(plan.cost.communication)


def test_a_step_is_between_the_longer_of_both_and_their_sum():
    mesh = jshard.topology("v5e:2x4", {"x": 2, "y": 4}, compiles=False)
    plan = jshard.shard(lambda x, w: x @ w, in_strategy=((2, 4), (4, 1)), mesh=mesh).plan(
        f32(2048, 512), f32(512, 1024)
    )
    found = plan.figures()
    assert plan.cost.compute > 0 and plan.cost.communication > 0
    assert found.fastest_seconds == max(plan.cost.compute, plan.cost.communication) < found.step_seconds
    ends = format_seconds(found.fastest_seconds), format_seconds(found.step_seconds)
    assert f"step {ends[0]} to {ends[1]}, as far as collectives hide" in str(found)
    alone = jshard.shard(lambda x: x * 2, in_strategy=((8,),), mesh=mesh).plan(f32(64)).figures()
    assert alone.fastest_seconds == alone.step_seconds and " to " not in str(alone).splitlines()[0]


def test_what_is_not_counted_is_at_least():
    def branch(x, w):
        return lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x)

    def loop(x, w):
        return lax.while_loop(lambda c: c.sum() < 0, lambda c: c @ w, x)

    plan = jshard.shard(branch, mesh=on_v5e()).plan(f32(64, 64), f32(64, 64))
    assert not plan.model_flops.complete
    found = jshard.shard(loop, mesh=on_v5e()).plan(f32(64, 64), f32(64, 64)).figures()
    assert found.is_lower_bound and found.mfu is None
    assert "step at least" in str(found) and "MFU not known" in str(found)


def test_the_record_keeps_the_figures():
    plan = jshard.shard(lambda x, w: x @ w, mesh=on_v5e()).plan(f32(64, 64), f32(64, 64))
    again = jshard.Plan.from_json(plan.to_json())
    assert again.figures(tokens=64) == plan.figures(tokens=64)
    old = json.loads(plan.to_json())
    del old["model_flops"]  # as written before the key was there
    assert jshard.Plan.from_json(json.dumps(old)).model_flops == ModelFlops()


def test_a_sweep_has_the_figures():
    found = jshard.sweep(
        lambda x, w: x @ w, f32(64, 64), f32(64, 64), mesh=[on_v5e()], batch={"x": [64, 128]}
    )
    for p in found:
        assert p.row["mfu"] == p.plan.mfu
        assert p.row["examples_per_second"] == pytest.approx(p.setting("batch") / p.plan.step_seconds)


@pytest.mark.parametrize(
    "wrong, text",
    [
        (
            {"tokens": "many"},
            "tokens='many'\n  where: Plan.figures\n  write instead: how many a call processes: tokens=8 * 2048",
        ),
        ({"price": -1}, "price=-1\n  where: Plan.figures\n  write instead: a price per device and hour: price=1.2"),
    ],
)  # fmt: skip
def test_wrong_figures_are_refused(wrong, text):
    plan = jshard.shard(lambda x: x * 2, mesh=on_v5e()).plan(f32(64, 64))
    with pytest.raises(jshard.ShardError) as e:
        plan.figures(**wrong)
    assert str(e.value) == text
