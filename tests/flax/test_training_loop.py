"""Fifty training steps on scikit-learn's digits: the losses of the unsharded loop, one plan, all state as planned.

BatchNorm, dropout, AdamW with a schedule and clipping, in nnx with `nnx.Optimizer` and in linen with `TrainState`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh
from sklearn.datasets import load_digits

import jshard.flax


pytestmark = pytest.mark.one_pair


MESH = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
CUT = dict(
    in_strategy={"x": (2, 1), "y": (2,)},
    parameter_plan={"**.fc1.kernel": (1, 4), "**.fc2.kernel": (4, 1)},
    mesh=MESH,
)
STEPS, BATCH = 50, 64
TX = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, STEPS))
)


def batches():
    digits: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.data))
    for i in range(STEPS):
        take = order[(i * BATCH + np.arange(BATCH)) % len(order)]
        yield (digits.data[take] / 16).astype("float32"), digits.target[take].astype("int32")


def cross_entropy(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


class Classifier(nnx.Module):
    def __init__(self, rngs):
        # A bias before BatchNorm has no gradient but noise, which Adam would blow up to steps of its own.
        self.fc1 = nnx.Linear(64, 64, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.fc2 = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.fc2(self.drop(nnx.relu(self.norm(self.fc1(x)))))


class LinenClassifier(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(
            nn.Dense(64, use_bias=False, name="fc1")(x)
        )
        x = nn.Dropout(0.1, deterministic=not train)(nn.relu(x))
        return nn.Dense(10, name="fc2")(x)


class State(TrainState):
    batch_stats: Any
    key: Any


def losses(step, *state):
    """The losses of fifty steps; `step` keeps its own state if it gives back only a loss."""
    out = []
    for x, y in batches():
        result = step(*state, x, y)
        if isinstance(result, tuple):
            *state, result = result
        out.append(float(result))
    return out, state


def lies_as_planned(leaves, plan):
    """Every leaf of the state, by the paths of the plan's arguments."""
    planned = {r.path: r.layout.spec for r in plan.inputs if r.path not in ("x", "y")}
    assert leaves.keys() == planned.keys()
    for path, leaf in leaves.items():
        assert leaf.sharding.is_equivalent_to(jax.NamedSharding(MESH, planned[path]), leaf.ndim), path


def test_nnx():
    traced = []

    def step(model, optimizer, x, y):
        traced.append(1)
        value, grads = nnx.value_and_grad(lambda m: cross_entropy(m(x), y))(model)
        optimizer.update(model, grads)
        return value

    def pair():
        model = Classifier(nnx.Rngs(0))
        return model, nnx.Optimizer(model, TX, wrt=nnx.Param)

    plain = pair()
    want, _ = losses(nnx.jit(step), *plain)
    traced.clear()
    sharded, (model, optimizer) = jshard.shard(step, **CUT), pair()
    plan = sharded.plan(model, optimizer, *next(batches()))
    jshard.flax.place(model, plan)
    got, _ = losses(sharded, model, optimizer)
    assert len(traced) == 1
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    assert got[-1] < 0.5 * got[0]

    kernels = [r for r in plan.inputs if r.path.endswith(("fc1.kernel", "fc2.kernel"))]
    assert len(kernels) == 6  # the parameters, and Adam's two moments, cut like them
    assert all(4 in r.layout.cuts(plan.mesh) for r in kernels)
    leaves = {}
    for name, module in (("model", model), ("optimizer", optimizer)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(module)):
            leaves[f"{name}.{jshard.flax.path_name(path)}"] = leaf
    lies_as_planned(leaves, plan)
    for a, b in zip(
        jax.tree.leaves(nnx.state((model, optimizer))), jax.tree.leaves(nnx.state(plain)), strict=True
    ):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    assert {r.module.split("/")[-1] for r in plan.operators if r.primitive == "dot_general"} == {"fc1", "fc2"}


def test_linen():
    traced = []

    def step(state, x, y):
        traced.append(1)
        key, new_key = jax.random.split(state.key)

        def loss(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, changed = state.apply_fn(
                variables, x, True, rngs={"dropout": key}, mutable=["batch_stats"]
            )
            return cross_entropy(logits, y), changed["batch_stats"]

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=stats, key=new_key), value

    module = LinenClassifier()

    def build():
        made = module.init(jax.random.key(0), jnp.zeros((1, 64)), False)
        return State.create(apply_fn=module.apply, tx=TX, key=jax.random.key(1), **made)

    want, _ = losses(jax.jit(step), build())
    traced.clear()
    sharded = jshard.shard(lambda state, x, y: step(state, x, y), **CUT)  # a function that nothing has traced
    plan = sharded.plan(jax.eval_shape(build), *next(batches()))
    got, (state,) = losses(sharded, jshard.flax.init(build, plan))
    assert len(traced) == 1
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    assert got[-1] < 0.5 * got[0]
    kernels = [r for r in plan.inputs if r.path.endswith(("fc1.kernel", "fc2.kernel"))]
    assert len(kernels) == 6 and all(4 in r.layout.cuts(plan.mesh) for r in kernels)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    lies_as_planned({f"state.{jshard.flax.path_name(p)}": a for p, a in leaves}, plan)
    modules = {r.module.split("/")[-1] for r in plan.operators if r.primitive == "dot_general"}
    assert modules == {"fc1", "fc2"}


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_a_sharded_module_in_a_plain_loop(kind):
    if kind == "nnx":

        def run(model):
            optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

            @nnx.jit
            def step(model, optimizer, x, y):
                value, grads = nnx.value_and_grad(lambda m: cross_entropy(m(x), y))(model)
                optimizer.update(model, grads)
                return value

            return losses(step, model, optimizer)[0]

        plain, sharded = (
            Classifier(nnx.Rngs(0)),
            Classifier(nnx.Rngs(0)).shard(
                in_strategy=((2, 1),), parameter_plan=CUT["parameter_plan"], mesh=MESH
            ),
        )
    else:
        plain = LinenClassifier()
        sharded = plain.shard(in_strategy={"x": (2, 1)}, parameter_plan=CUT["parameter_plan"], mesh=MESH)

        def run(module):
            made = plain.init(jax.random.key(0), jnp.zeros((1, 64)), False)

            @jax.jit
            def step(state, x, y):
                def loss(params):
                    variables = {"params": params, "batch_stats": state.batch_stats}
                    rngs = {"dropout": jax.random.fold_in(state.key, state.step)}
                    logits, changed = module.apply(variables, x, True, rngs=rngs, mutable=["batch_stats"])
                    return cross_entropy(logits, y), changed["batch_stats"]

                (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
                return state.apply_gradients(grads=grads, batch_stats=stats), value

            return losses(step, State.create(apply_fn=None, tx=TX, key=jax.random.key(1), **made))[0]

    np.testing.assert_allclose(run(sharded), run(plain), rtol=0, atol=1e-5)
