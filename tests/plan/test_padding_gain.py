"""What padding can gain at most: no padded plan is better by more, and where it is next to nothing none is looked for."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import jshard
from jshard._api.plan_padded import can_gain
from jshard._core import hardware, topology
from jshard._core.layout import MeshAxes
from jshard._plan.padding_gain import PaddingGain, padding_gain
from jshard._program.trace import build


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def vocabulary(w, x):
    """The vocabulary does not divide."""
    return jax.grad(lambda w: jax.nn.logsumexp(x @ w, -1).mean())(w)


def sequence(x, w):
    """The length does not divide."""
    return jnp.cumsum(jnp.tanh(x @ w), 1)[:, -1] @ w.T


def both(x, y):
    """Nothing divides, and the result is small."""
    return (jnp.exp(x) @ y.T).sum(0)


PROGRAMS = {
    "vocabulary": (vocabulary, (f32(512, 8191), f32(4096, 512)), {8191}),
    "sequence": (sequence, (f32(1, 8191, 1021), f32(1021, 1019)), {8191, 1021, 1019}),
    "both": (both, (f32(4093, 2039), f32(4093, 2039)), {4093, 2039}),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("level", [1, 2])
def test_no_padded_plan_is_better_by_more(name: str, level: int) -> None:
    fn, shapes, lengths = PROGRAMS[name]
    options = dict(
        mesh=AbstractMesh((2, 4), ("x", "y")), hardware="tpu-v5e", level=level, memory_budget="1TB"
    )
    whole = jshard.shard(fn, config={"pad": False}, **options).plan(*shapes).cost
    padded = jshard.shard(fn, config={"pad": True}, **options).plan(*shapes)
    assert padded.padding, "a test that compares nothing"
    program = build(jax.jit(fn).trace(*shapes).jaxpr, name="f", input_names=["a", "b"])
    bound = padding_gain(
        program, topology.from_mesh(MeshAxes(("x", "y"), (2, 4)), hardware.get("v5e")), lengths
    )
    most = bound.nbytes if level == 1 else bound.seconds
    assert whole.bound <= padded.cost.objective + most


def test_next_to_nothing_is_not_tried() -> None:
    def step(w, tokens):
        def loss(w):
            x = w["embed"][tokens[:, :-1]]
            x = jax.nn.gelu(x @ w["up"]) @ w["down"] + x
            log_p = jax.nn.log_softmax(x @ w["embed"].T)
            return -jnp.take_along_axis(log_p, tokens[:, 1:, None], -1).mean()

        return jax.grad(loss)(w)

    w = dict(embed=f32(32_768, 4096), up=f32(4096, 16_384), down=f32(16_384, 4096))
    tokens = jax.ShapeDtypeStruct((128, 2049), "int32")
    options = dict(mesh=AbstractMesh((4, 8), ("x", "y")), hardware="tpu-v5e", memory_budget="1TB")
    plan = jshard.shard(step, **options).plan(w, tokens)
    assert not plan.padding and plan.cost.space == "plans without padding"
    tried = jshard.shard(step, config={"pad": True}, **options).plan(w, tokens)
    assert tried.cost.objective >= plan.cost.objective * (1 - 1e-3)
    assert tried.cost.space == ""


def test_bytes_are_worth_a_search_where_they_are_asked_for_or_scarce() -> None:
    options = dict(mesh=AbstractMesh((2, 4), ("x", "y")), hardware="tpu-v5e")
    plans = [
        jshard.shard(vocabulary, config={"pad": False}, level=level, **options).plan(
            f32(512, 8191), f32(4096, 512)
        )
        for level in (1, 2)
    ]
    peak, step = plans[1].cost.peak_bytes, plans[1].step_seconds
    bytes_alone, little = PaddingGain(0.0, 0.02 * peak), PaddingGain(0.009 * step, 0.009 * peak)
    assert can_gain(plans[0], bytes_alone) and not can_gain(plans[1], bytes_alone)
    budgets = [dataclasses.replace(plans[1], memory_budget=b * peak) for b in (1.05, 1.2)]
    assert [can_gain(p, bytes_alone) for p in budgets] == [True, False]
    assert [can_gain(p, little) for p in (plans[1], *budgets)] == [False] * 3
    assert can_gain(plans[1], PaddingGain(0.011 * step, 0.0))
