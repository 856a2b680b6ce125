"""`search_seconds` is the effort of a call: plans that are compared share it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jshard
from jshard._plan.level_search import LevelSearch
from jshard._plan.request import LEAST_EFFORT, effort_of_call


def step(params, x):
    """A training step of two layers."""

    def loss(params):
        return ((jax.nn.gelu(x @ params["up"]) @ params["down"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def args(batch=64, width=48):
    """Shapes for `step`."""
    shape = jax.ShapeDtypeStruct
    return {
        "up": shape((width, 4 * width), jnp.float32),
        "down": shape((4 * width, width), jnp.float32),
    }, shape((batch, width), jnp.float32)


@pytest.fixture
def efforts(monkeypatch):
    """The efforts that searches begin with; each is spent to its end."""
    limits, run = [], LevelSearch.run

    def spent(self):
        limits.append(self.effort.limit)
        found = run(self)
        self.effort.spend(max(0.0, self.effort.limit - self.effort.spent))
        return found

    monkeypatch.setattr(LevelSearch, "run", spent)
    return limits


MACHINE = jshard.topology("v5e:2x4", {"x": 2, "y": 4}, compiles=False)
ONE_SECOND = effort_of_call(1.0).limit


def test_a_call_of_one_plan_has_all_of_it(efforts):
    jshard.shard(step, mesh=MACHINE, config={"search_seconds": 1}).plan(*args())
    assert efforts[0] == ONE_SECOND


def test_without_it_no_search_has_a_limit(efforts):
    jshard.shard(step, mesh="auto:v5e:2x4").plan(*args())
    assert len(efforts) > 1 and set(efforts) == {float("inf")}


def test_meshes_share_it(efforts):
    jshard.shard(step, mesh="auto:v5e:2x4", config={"search_seconds": 1}).plan(*args())
    assert len(efforts) > 2
    assert efforts[0] < ONE_SECOND and sum(efforts) <= ONE_SECOND * (1 + LEAST_EFFORT * len(efforts))


@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": "auto", "memory_budget": "40KiB"},
        {"config": {"pad": True}},
        {"config": {"pad": True}, "mesh": "auto:v5e:2x4"},
    ],
)
def test_comparisons_share_it_and_none_is_without(efforts, options: dict[str, Any]):
    config = {**options.pop("config", {}), "search_seconds": 1}
    try:
        jshard.shard(step, **{"mesh": MACHINE, **options}, config=config).plan(*args(batch=60, width=50))
    except jshard.ShardError:
        pass  # a budget that nothing meets: what matters is how long that took
    assert len(efforts) > 1 and min(efforts) > 0
    assert sum(efforts) <= ONE_SECOND * (1 + LEAST_EFFORT * len(efforts))
