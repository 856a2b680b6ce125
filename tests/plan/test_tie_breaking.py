"""Ties are broken towards what compilers handle well: order of sums and transpositions, sharded state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard


def step(p, x):
    def loss(p):
        return ((jnp.maximum(x @ p["w1"], 0) @ p["w2"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(p)
    return jax.tree.map(lambda p, g: p - 0.01 * g, p, grads), value


def planned(level, **more):
    shapes = {"w1": (1024, 4096), "w2": (4096, 1024)}
    p = {k: jax.ShapeDtypeStruct(s, "float32") for k, s in shapes.items()}
    mesh = jshard.topology("v5e:2x4", {"x": 2, "y": 4})
    f = jshard.shard(step, in_strategy=(None, (8, None)), level=level, mesh=mesh, donate_argnums=(0,), **more)
    # So many rows that weights are cheaper to move than activations.
    return f.plan(p, jax.ShapeDtypeStruct((1 << 18, 1024), "float32"))


@pytest.fixture(scope="module")
def plan():
    return planned(2)


def test_sums_are_scattered_after_the_transposition(plan):
    turns = [r for r in plan.operators if r.primitive == "transpose" and r.results[0].partial]
    assert len(turns) == 2, "both gradients of weights are transposed as partial sums"
    scattered = [c for c in plan.collectives if c.kind == "reduce_scatter"]
    assert len(scattered) == 2
    assert not any(c.operator.endswith("transpose") for c in scattered)
    assert all(r.seconds == 0 for r in turns), "the product writes its result that way round"


def test_state_stays_cut_between_calls(plan):
    weights = [r.layout.pieces(plan.mesh) for r in plan.inputs[:2]]
    assert weights == [8, 8]
    assert [r.layout for r in plan.outputs[:2]] == [r.layout for r in plan.inputs[:2]]
    gathers = [c for c in plan.collectives if c.kind == "all_gather"]
    names = {r.tensor for r in plan.inputs[:2]}
    assert {c.tensor for c in gathers} == names, "gathered as arguments, not as results"


def test_nothing_gets_dearer(plan):
    assert plan.cost.gap <= 1e-9
    assert plan.cost.compute + plan.cost.communication == pytest.approx(plan.cost.objective, rel=1e-6)


def test_a_pinned_argument_stays_as_it_is_pinned():
    mesh = jshard.topology("v5e:2x4", {"x": 2, "y": 4})
    p = {k: jax.ShapeDtypeStruct(s, "float32") for k, s in {"w1": (1024, 4096), "w2": (4096, 1024)}.items()}
    whole = {"w1": (1, 1), "w2": (1, 1)}
    f = jshard.shard(step, in_strategy=(whole, (8, None)), level=2, mesh=mesh, donate_argnums=(0,))
    plan = f.plan(p, jax.ShapeDtypeStruct((1 << 18, 1024), "float32"))
    assert [r.layout.pieces(plan.mesh) for r in plan.inputs[:2]] == [1, 1]


def test_values_are_those_of_the_plain_step():
    rng = np.random.default_rng(0)
    p = {"w1": rng.normal(size=(8, 16)), "w2": rng.normal(size=(16, 8))}
    p = {k: jnp.asarray(v, "float32") for k, v in p.items()}
    x = jnp.asarray(rng.normal(size=(4096, 8)), "float32")
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    f = jshard.shard(step, in_strategy=(None, (8, None)), level=2, mesh=mesh)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), f(p, x), step(p, x))
