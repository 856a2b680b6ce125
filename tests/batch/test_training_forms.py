"""Steps as they are written with Flax and Optax, in microbatches and in pipelines: the same results, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jshard
from jshard._core import jaxcompat as compat
from jshard._verify.emitted import Emitted
from jshard._verify.read_collectives import read_program
from tests.batch.test_microbatches import BATCH, decoder_arguments, largest_error, looped, normal
from tests.batch.test_pipelines import mesh_of, plain
from tests.helpers.pipeline_models import experts, experts_arguments


WIDTH, LAYERS = 6, 4
PIPELINE = {"axis": "stage", "microbatches": 4}
FORMS: list[Any] = [
    pytest.param({"microbatches": 4}, id="microbatches"),
    pytest.param({"config": {"pipeline": PIPELINE}}, id="pipeline"),
]


class LinenBlock(nn.Module):
    """A residual layer."""

    @nn.compact
    def __call__(self, h: jax.Array, _: None) -> tuple[jax.Array, None]:
        return h + jnp.tanh(
            nn.Dense(WIDTH, param_dtype=jnp.float64, name="dense")(nn.LayerNorm(param_dtype=jnp.float64)(h))
        ), None


class LinenStack(nn.Module):
    """Residual layers by `nn.scan`, with or without `nn.remat`."""

    remat: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = nn.remat(LinenBlock, prevent_cse=False) if self.remat else LinenBlock
        scanned = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        return scanned(name="layers")(x, None)[0]


def linen_loss(remat: bool) -> tuple[Callable, Any]:
    model = LinenStack(remat)
    params = model.init(jax.random.key(1), jnp.zeros((2, WIDTH)))
    return lambda w, x: jnp.mean((model.apply(w, x) - 1) ** 2), params


class NnxBlock(nnx.Module):
    """A residual layer."""

    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, h: jax.Array) -> jax.Array:
        return h + jnp.tanh(self.dense(h))


def nnx_loss(remat: bool) -> tuple[Callable, Any]:
    @nnx.vmap(in_axes=0, out_axes=0)
    def blocks(key: jax.Array) -> NnxBlock:
        return NnxBlock(nnx.Rngs(key))

    graph, state = nnx.split(blocks(jax.random.split(jax.random.key(2), LAYERS)))

    def loss(w: Any, x: jax.Array) -> jax.Array:
        def run(h: jax.Array, block: NnxBlock) -> jax.Array:
            return block(h)

        layer = nnx.remat(run) if remat else run
        h = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, nnx.merge(graph, w))
        return jnp.mean((h - 1) ** 2)

    return loss, state


@pytest.mark.parametrize("options", FORMS)
@pytest.mark.parametrize(("make", "remat"), [(linen_loss, True), (nnx_loss, False)])
def test_layers_of_flax(make: Callable, remat: bool, options: dict[str, Any]) -> None:
    loss, w = make(remat)
    x, f = normal(1, BATCH, WIDTH), jax.value_and_grad(loss)
    sharded = jshard.shard(f, mesh=mesh_of(2, 1), level=0, **options)
    assert largest_error(sharded(w, x), jax.jit(f)(w, x)) < 1e-12
    plan = sharded.plan(w, x)
    assert plan.microbatches == 4 or plan.pipeline is not None and plan.pipeline.layers == (LAYERS, LAYERS)


def weighted_loss(w: Any, tokens: jax.Array, weights: jax.Array) -> jax.Array:
    """A loss that divides by the number of tokens that count, of the whole batch."""
    h = jnp.tanh(w["embedding"][tokens] @ w["layers"][0])
    each = jnp.take_along_axis(jax.nn.log_softmax(h @ w["embedding"].T), tokens[..., None], -1)[..., 0]
    return -jnp.sum(each * weights) / jnp.sum(weights)


def test_outer_gradient_and_token_weights() -> None:
    """Weights differ between the microbatches, so a mean of their means would be wrong."""
    w, tokens = decoder_arguments()
    weights = (jnp.arange(BATCH * 5).reshape(BATCH, 5) < 70) * jnp.arange(5.0)
    f = jshard.shard(weighted_loss, mesh=mesh_of(2, 1), level=0, microbatches=4)
    found = jax.jit(jax.value_and_grad(f))(w, tokens, weights)
    assert largest_error(found, jax.jit(jax.value_and_grad(weighted_loss))(w, tokens, weights)) < 1e-12


def compiled(f: Callable, *args: Any) -> list[Emitted]:
    """The collectives of a function as compiled."""
    return list(read_program(jax.jit(f).lower(*args).compile()).collectives)


@pytest.mark.parametrize("rounds", [1, 2])
def test_outer_gradient_of_a_pipeline(rounds: int) -> None:
    """Both passes are planned together; weight gradients are summed once, after the ticks."""
    w, x = normal(6, LAYERS, WIDTH, WIDTH) / 3, normal(1, BATCH, WIDTH)
    f = jshard.shard(plain, mesh=mesh_of(2, 2), level=0, config={"pipeline": {**PIPELINE, "rounds": rounds}})
    found = compiled(jax.value_and_grad(f), w, x)
    assert largest_error(jax.value_and_grad(f)(w, x), jax.jit(jax.value_and_grad(plain))(w, x)) < 1e-12
    plan = f.plan(w, x)
    assert plan.pipeline is not None and not any("differentiated from outside" in s for s in plan.steps)
    in_ticks = [c for c in found if c.count > 1]
    assert [(c.kind, c.count) for c in in_ticks] == [("permute", plan.pipeline.ticks)] * 2, in_ticks
    assert any(c.kind == "all_reduce" and "f64[" in c.shape for c in found)


@pytest.mark.parametrize("remat", [False, True])
def test_outer_gradients_of_microbatches_are_summed_once(remat: bool) -> None:
    def loss(w: Any, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, one: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ one.T @ w["shared"]), None

        h, _ = lax.scan(jax.checkpoint(layer) if remat else layer, x, w["layers"])
        return jnp.mean(h**2)

    w, x = (
        {"layers": normal(6, LAYERS, WIDTH, WIDTH) / 3, "shared": normal(7, WIDTH, WIDTH)},
        normal(1, BATCH, WIDTH),
    )
    cuts = {"w": jax.P(), "x": jax.P("data")}
    f = jax.value_and_grad(jshard.shard(loss, mesh=mesh_of(1, 2), level=0, microbatches=4, in_strategy=cuts))
    found = compiled(f, w, x)
    assert {c.kind for c in found} == {"all_reduce"} and {c.count for c in found} == {1}, found
    assert largest_error(f(w, x), jax.jit(jax.value_and_grad(loss))(w, x)) < 1e-12


@pytest.mark.parametrize("options", FORMS)
def test_outer_gradient_of_checkpointed_experts(options: dict[str, Any]) -> None:
    """The forward pass alone: a checkpointed layer adds a product of sums over the batch to a carry."""
    loss, (w, x) = experts(0.7, True), experts_arguments(LAYERS)
    f = jax.value_and_grad(jshard.shard(loss, mesh=mesh_of(2, 1), level=0, **options))
    assert largest_error(f(w, x), jax.jit(jax.value_and_grad(loss))(w, x)) < 1e-12


@pytest.mark.parametrize("options", FORMS)
def test_outer_gradient_in_bfloat16(options: dict[str, Any]) -> None:
    """Sums over pieces are rounded to the loss's own dtype, which is differentiated too."""
    w, x = (a.astype(jnp.bfloat16) for a in (normal(6, LAYERS, WIDTH, WIDTH) / 3, normal(1, BATCH, WIDTH)))
    found = jax.grad(jshard.shard(plain, mesh=mesh_of(2, 1), level=0, **options))(w, x)
    wanted = jax.grad(plain)(*(a.astype(jnp.float64) for a in (w, x)))
    assert found.dtype == jnp.bfloat16 and largest_error(found.astype(jnp.float64), wanted) < 0.02


@pytest.mark.parametrize("options", FORMS)
def test_a_training_loop_around_a_sharded_loss(options: dict[str, Any]) -> None:
    """Steps in a scan: gradients from outside with auxiliary results, Optax accumulating over steps, dropout by step."""
    w, x = {"layers": normal(6, LAYERS, WIDTH, WIDTH) / 3, "scale": normal(7, WIDTH)}, normal(1, BATCH, WIDTH)
    optimizer = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, 0.9)), 2)

    def loss(w: Any, x: jax.Array, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        def layer(carry: Any, kernel: jax.Array) -> tuple[Any, jax.Array]:
            h, key = carry
            key, own = jax.random.split(key)
            kept = jax.random.bernoulli(own, 0.8, h.shape)
            return (h + jnp.where(kept, jnp.tanh(h @ kernel), 0), key), jnp.max(h)

        (h, _), largest = lax.scan(jax.checkpoint(layer), (x * w["scale"], key), w["layers"])
        return jnp.mean(h**2), {"largest": largest, "first": h[:, 0]}

    def trained(loss: Callable) -> Any:
        def step(carry: Any, i: jax.Array) -> tuple[Any, Any]:
            w, state = carry
            value, g = jax.value_and_grad(loss, has_aux=True)(w, x, jax.random.fold_in(jax.random.key(3), i))
            updates, state = optimizer.update(g, state, w)
            return (optax.apply_updates(w, updates), state), value

        (new, _), values = jax.jit(lambda w: lax.scan(step, (w, optimizer.init(w)), jnp.arange(4)))(w)
        return new, values

    found = trained(jshard.shard(loss, mesh=mesh_of(2, 1), level=0, **options))
    assert largest_error(found, trained(loss)) < 1e-12


def test_optax_multi_steps_outside() -> None:
    """Optax accumulates over calls, jshard over pieces of each call's batch."""
    loss, w = linen_loss(False)
    optimizer = optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2)

    def step(w: Any, state: Any, x: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(w, x)
        updates, state = optimizer.update(gradient, state, w)
        return optax.apply_updates(w, updates), state, value

    sharded = jshard.shard(step, mesh=mesh_of(2, 1), level=0, microbatches=4)
    found = wanted = (w, optimizer.init(w))
    for i in range(2):
        x = normal(10 + i, BATCH, WIDTH)
        found, wanted = sharded(*found[:2], x), jax.jit(step)(*wanted[:2], x)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)  # Adam divides by roots of squares
    assert not bool(
        jnp.all(found[0]["params"]["layers"]["dense"]["kernel"] == w["params"]["layers"]["dense"]["kernel"])
    )


@pytest.mark.parametrize(("rate", "count"), [(0.0, 8), (0.7, 2)])
def test_an_auxiliary_loss_that_layers_carry(rate: float, count: int) -> None:
    """Of every layer a product of two sums over the batch: the loop is divided, and experts run in pieces."""
    f, args = jax.value_and_grad(experts(rate)), experts_arguments(3)
    new, found = looped(f, args, [False] * 3 + [True], count)
    assert largest_error(found, jax.jit(f)(*args)) < 1e-12
    loops = [e for e in compat.open_jaxpr(new)[0].eqns if e.primitive.name == "scan"]
    assert [e.params["length"] for e in loops].count(count) == 2  # the loads first, then all else
