"""Functions that are differentiated from outside are planned with forward and backward pass priced together."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from jshard._api import remedies
from jshard._api.differentiation import plan_for_gradient
from jshard._api.prepare import prepare
from jshard._core.errors import MemoryBudgetError
from jshard._verify import read_program


def loss(params, x):
    h = jax.nn.relu(x @ params["w1"])
    return jnp.mean((h @ params["w2"]) ** 2)


def inputs():
    rng = np.random.default_rng(0)
    shapes = {"w1": (256, 512), "w2": (512, 256)}
    params = {k: jnp.asarray(rng.normal(size=s) / 20, jnp.float32) for k, s in shapes.items()}
    return params, jnp.asarray(rng.normal(size=(64, 256)), jnp.float32)


MESH = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:8])


def collectives(compiled):
    """Bytes by kind that the compiler emitted."""
    return read_program(compiled).by_kind


def test_gradients_compile_to_the_jointly_best_plan():
    params, x = inputs()
    f = jshard.shard(loss, mesh=MESH)
    alone = f.plan(params, x)
    joint = jshard.shard(jax.grad(loss), mesh=MESH).plan(params, x)
    # Forward only, the batch is cut and nothing but the loss is summed; in training that sums both gradients.
    assert sum(alone.bytes_by_kind.values()) < sum(joint.bytes_by_kind.values()) / 1000
    compiled = jax.jit(jax.grad(f)).lower(params, x).compile()
    assert collectives(compiled) == pytest.approx(joint.bytes_by_kind)
    transposed = 2 * 7 / 8 * 4 * (256 * 512 * 2)  # an all-reduce of both weights' gradients
    assert sum(joint.bytes_by_kind.values()) < transposed / 4
    got, want = jax.grad(f)(params, x), jax.grad(loss)(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want)


def test_pins_hold_in_training():
    params, x = inputs()
    f = jshard.shard(loss, in_strategy=(None, (8, 1)), mesh=MESH)
    p = prepare(f._request, (params, x), {})
    for moving in ((0, 1), (0, 1, 2), (2,)):
        made = plan_for_gradient(p, moving).schedule.assignment
        assert made.result_layout(made.program.operators[made.program.inputs[2]].results[0]).dims == (
            ("x",),
            (),
        )


def test_operator_pins_hold_in_training():
    pinned = jshard.op(jnp.dot, in_strategy=((1, 1), (1, 8)))
    f = jshard.shard(lambda w, x: jnp.sum(pinned(x, w) ** 2), mesh=MESH)
    w, x = jnp.ones((64, 64)), jnp.ones((512, 64))
    made = plan_for_gradient(prepare(f._request, (w, x), {}), (0,)).schedule.assignment
    dot = next(op for op in made.program.operators if op.primitive == "dot_general")
    assert made.operand_layout(dot.id, 1).dims == ((), ("x",))


def test_a_plan_given_is_kept():
    params, x = inputs()
    plan = jshard.shard(loss, mesh=MESH).plan(params, x)
    f = jshard.shard(loss, mesh=MESH, plan=plan)
    compiled = jax.jit(jax.grad(f)).lower(params, x).compile()
    assert sum(collectives(compiled).values()) > 7 / 8 * 4 * (256 * 512 * 2)


def test_a_padded_plan_is_differentiated_on_its_own_devices():
    def mean_square(w, x):
        return jnp.mean((x @ w) ** 2)

    rng = np.random.default_rng(7)
    w, x = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((18, 18), (36, 18)))
    plan = jshard.shard(mean_square, mesh=MESH, in_strategy=(None, (8, 1)), config={"pad": True}).plan(w, x)
    assert plan.padding
    f = jshard.shard(mean_square, plan=plan)
    np.testing.assert_allclose(jax.jit(jax.grad(f))(w, x), jax.grad(mean_square)(w, x), rtol=1e-5)


def test_what_has_no_pull_back_is_planned_forward():
    f = jshard.shard(lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c * 2, x), mesh=MESH)
    x = jnp.ones((8, 8))
    p = prepare(f._request, (x,), {})
    found = plan_for_gradient(p, (0,))
    assert found.schedule is p.schedule and "JAX gives no pull-back of it: ValueError" in found.note
    assert float(jax.jvp(f, (x,), (x,))[1][0, 0]) == 16
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(lambda x: f(x).sum())(x)


def test_user_function_is_traced_once_under_every_transformation():
    traces = []

    def counted(w, x):
        traces.append(1)
        return jnp.sum((x @ w) ** 2)

    f = jshard.shard(counted, mesh=MESH)
    w, x = jnp.ones((8, 8)), jnp.ones((16, 8))
    f(w, x)
    for _ in range(2):
        jax.grad(f)(w, x)
        jax.jit(jax.grad(f, (0, 1)))(w, x)
        jax.jvp(f, (w, x), (w, x))
    assert len(traces) == 1


def test_a_budget_that_only_the_forward_pass_fits_is_said_in_the_report(monkeypatch):
    """The derivative comes after the plan: no error, but a note with the bytes. With it inside, the budget is refused."""
    params, x = inputs()
    least = jshard.shard(loss, mesh=MESH, level=1, microbatches=2).plan(params, x).cost.peak_bytes
    budget = int(1.05 * least)
    f = jshard.shard(loss, mesh=MESH, memory_budget=budget, microbatches=2)
    jax.eval_shape(jax.grad(f), params, x)
    text = " ".join(str(f.plan(params, x)).split())
    assert f"no plan of both together: no plan fits {budget:,} bytes a device" in text
    assert (
        "with the derivative inside, jshard.shard(jax.value_and_grad(f)), both passes are planned in the budget"
        in text
    )
    inside = jshard.shard(jax.value_and_grad(loss), mesh=MESH, memory_budget=budget, microbatches=2)
    monkeypatch.setattr(remedies, "REMEDIES", ())  # nothing here reads the table of what would help
    with pytest.raises(MemoryBudgetError):
        inside.plan(params, x)
