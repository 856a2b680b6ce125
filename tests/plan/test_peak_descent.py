"""Level 1: changes of single operators that lower the peak of the schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jshard
from benchmarks.planning.budgets import Config, transformer
from jshard._plan import level_search


ARGUMENTS = [
    jax.ShapeDtypeStruct(*t) for t in (((16, 24), "int8"), ((24,), "float32"), ((10, 16), "float32"))
]


def quantized_gram(w, s, x, gram=None):
    """Products of int8: the partial sum of the second one is larger than its operands gathered."""
    y = lax.dot(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), preferred_element_type=jnp.float32) * s
    q = jnp.clip(jnp.round(y / jnp.abs(y).max(-1, keepdims=True) * 127), -127, 127).astype(jnp.int8)
    return (gram or _gram)(q, q), y.astype(jnp.float16)


def _gram(a, b):
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)


def pinned_gram(w, s, x):
    """The same with the operands of the second product gathered."""
    return quantized_gram(w, s, x, jshard.op(_gram, in_strategy=((1, 1), (1, 1))))


def plan_of(function):
    """The plan of least peak on eight devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("x",))
    return jshard.shard(function, in_strategy=((1, 8), None, None), level=1, mesh=mesh).plan(*ARGUMENTS)


def test_the_peak_is_lower_than_without(monkeypatch):
    after = plan_of(quantized_gram)
    monkeypatch.setattr(level_search, "descend_peak", lambda solution, *_: solution)
    before = plan_of(quantized_gram)
    assert after.cost.bound <= after.cost.objective < before.cost.objective


def test_no_operator_pinned_otherwise_holds_less():
    """The gathered operands, written as a pin, were the better plan: they are found without."""
    free, pinned = plan_of(quantized_gram), plan_of(pinned_gram)
    assert free.cost.objective <= pinned.cost.objective


def test_bounds_on_a_peak_are_whole_bytes():
    pinned = plan_of(pinned_gram)
    assert pinned.cost.bound == round(pinned.cost.bound)


@pytest.mark.parametrize(("layers", "vocabulary"), [(4, 32_000), (2, 64_000)])
def test_the_live_range_of_a_copy_held_at_the_peak_of_a_large_program_is_split(
    layers, vocabulary, monkeypatch
):
    """The gathered weights of the last product wait for their derivative while the loss is computed, uncounted."""
    step, args = transformer(Config(layers, 1024, 8, 4, 128, 2816, vocabulary, batch=64, length=1024))
    mesh = jax.sharding.AbstractMesh((4, 8), ("x", "y"))
    sharded = jshard.shard(step, mesh=mesh, hardware="tpu-v5e", level=1, donate_argnums=(0, 1))
    after = sharded.plan(*args)
    sharded.clear_cache()
    monkeypatch.setattr(level_search, "descend_peak", lambda solution, *_: solution)
    before = sharded.plan(*args)
    assert len(after.operators) > 1000
    assert after.cost.bound == before.cost.bound <= after.cost.objective < 0.97 * before.cost.objective
    assert after.cost.gap < 0.02


def test_a_budget_near_the_least_peak_of_a_large_program_is_planned():
    """Only plans with a split live range keep it, which no memory network tells from others."""
    step, args = transformer(Config(6, 1024, 8, 4, 128, 2816, 32_000, batch=64, length=1024))
    options = dict(
        mesh=jax.sharding.AbstractMesh((4, 8), ("x", "y")), hardware="tpu-v5e", donate_argnums=(0, 1)
    )
    least = jshard.shard(step, level=1, **options).plan(*args)
    budget = int(1.02 * least.cost.peak_bytes)
    plan = jshard.shard(step, memory_budget=budget, **options).plan(*args)
    assert len(plan.operators) > 2000
    assert plan.cost.peak_bytes <= budget and plan.cost.bound <= plan.cost.objective
