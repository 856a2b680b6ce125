"""Layers that no pipeline or microbatches take: the error names them, and what it advises runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.experimental import pallas
from jax.sharding import PartitionSpec as P

import jshard
from tests.batch.test_microbatches import BATCH, largest_error, normal
from tests.batch.test_pipelines import GOOD, mesh_of


WIDTH, LAYERS = 4, 4
PIPELINE = {"config": {"pipeline": GOOD}}


def sharded(f: Callable, options: dict[str, Any] = PIPELINE, sizes: tuple[int, int] = (2, 1)) -> Any:
    return jshard.shard(f, mesh=mesh_of(*sizes), level=0, **options)


def scanned(layer: Callable) -> Callable:
    return lambda w, x: jnp.mean(lax.scan(lambda h, one: (layer(h, one), None), x, w)[0] ** 2)


def in_python(layer: Callable) -> Callable:
    return lambda ws, x: jnp.mean(functools.reduce(layer, ws, x) ** 2)


def dense(h: jax.Array, one: jax.Array) -> jax.Array:
    return jnp.tanh(h @ one)


class Normed(nnx.Module):
    """Layers with a norm each."""

    def __init__(self, norm: Callable, rngs: nnx.Rngs):
        self.dense = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.norm = nnx.List([norm(WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, h: jax.Array) -> jax.Array:
        for one, norm in zip(self.dense, self.norm, strict=True):
            h = jnp.tanh(norm(one(h)))
        return h


def test_a_batch_norm_is_named_and_a_layer_norm_runs() -> None:
    def loss(model: Normed, x: jax.Array) -> jax.Array:
        return jnp.mean(model(x) ** 2)

    x = normal(1, BATCH, WIDTH).astype(jnp.float32)
    with pytest.raises(jshard.ShardError, match="couples the examples of the batch") as error:
        sharded(nnx.value_and_grad(loss))(Normed(nnx.BatchNorm, nnx.Rngs(0)), x)
    assert "in Normed/norm.0: it combines a sum over examples" in error.value.where
    assert "LayerNorm" in error.value.fix
    model = Normed(nnx.LayerNorm, nnx.Rngs(0))
    wanted = nnx.value_and_grad(loss)(model, x)
    assert largest_error(sharded(nnx.value_and_grad(loss))(model, x), wanted) < 1e-5


def test_a_carry_that_changes_shape() -> None:
    """JAX refuses such a scan itself, with both types; layers of a Python loop are not alike."""
    w, x = normal(1, LAYERS, WIDTH, WIDTH), normal(2, BATCH, WIDTH)
    with pytest.raises(TypeError, match="so the shapes do not match"):
        sharded(scanned(lambda h, one: dense(h, one)[:, :2]))(w, x)
    ws = [normal(k, 8 - k, 7 - k) for k in range(LAYERS)]
    with pytest.raises(jshard.ShardError, match="no layers outside loops are alike") as error:
        sharded(in_python(dense))(ws, normal(2, BATCH, 8))
    assert "the same operators on the same shapes" in error.value.fix
    alike, f = list(w), jax.value_and_grad(in_python(dense))
    assert largest_error(sharded(f)(alike, x), f(alike, x)) < 1e-12


def test_stages_that_do_not_divide_layers_in_python() -> None:
    ws, x, f = list(normal(1, 3, WIDTH, WIDTH)), normal(2, BATCH, WIDTH), jax.value_and_grad(in_python(dense))
    with pytest.raises(jshard.ShardError, match="2 stages do not divide 3 layers") as error:
        sharded(f)(ws, x)
    assert "test_refused_layers.py:" in error.value.where and '"uneven": True' in error.value.fix
    uneven = {"config": {"pipeline": {**GOOD, "uneven": True}}}
    assert largest_error(sharded(f, uneven)(ws, x), f(ws, x)) < 1e-12


def kernel(x: jax.Array) -> jax.Array:
    def body(x_ref: Any, y_ref: Any) -> None:
        y_ref[...] = jnp.tanh(x_ref[...])

    return pallas.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


@pytest.mark.parametrize("loop", [scanned, in_python])
def test_a_kernel_of_fixed_shapes_and_one_with_a_rule(loop: Callable) -> None:
    w, x = normal(1, LAYERS, WIDTH, WIDTH), normal(2, BATCH, WIDTH)
    ws = w if loop is scanned else list(w)
    with pytest.raises(jshard.ShardError) as error:
        sharded(loop(lambda h, one: kernel(h @ one)))(ws, x)
    assert 'jshard.op(fn, rule="...") for the pallas_call' in error.value.fix
    with_rule = loop(lambda h, one: jshard.op(kernel, rule="m n -> m n")(h @ one))
    assert largest_error(sharded(with_rule)(ws, x), loop(dense)(ws, x)) < 1e-12


@pytest.mark.parametrize("options", [PIPELINE, {"microbatches": 4}])
def test_a_shard_map_over_the_stages(options: dict[str, Any]) -> None:
    w, x, mesh = normal(1, LAYERS, WIDTH, WIDTH), normal(2, BATCH, WIDTH), mesh_of(2, 1)
    tanh = jax.shard_map(jnp.tanh, mesh=mesh, in_specs=P("stage"), out_specs=P("stage"))
    with pytest.raises(jshard.ShardError) as error:
        sharded(scanned(lambda h, one: tanh(h @ one)), options)(w, x)
    assert "shard_map" in error.value.where and "the same without shard_map" in error.value.fix
    assert largest_error(sharded(scanned(dense), options)(w, x), scanned(dense)(w, x)) < 1e-12


@pytest.mark.parametrize("options", [PIPELINE, {"microbatches": 4}])
def test_products_in_a_shard_map_alone_and_as_operators_with_rules(options: dict[str, Any]) -> None:
    """A model without any other product: the refusal says what to write, and the rule then says which dimension is kept."""
    mesh = mesh_of(1, 2)
    mapped = jax.shard_map(jnp.dot, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    args = normal(1, LAYERS, WIDTH, WIDTH), normal(2, BATCH, WIDTH)
    with pytest.raises(jshard.ShardError, match="no argument has a batch") as error:
        sharded(scanned(lambda h, one: jnp.tanh(mapped(h, one))), options).plan(*args)
    assert 'jshard.op(fn, rule="...") for the shard_map' in error.value.fix
    stated = jshard.op(jnp.dot, rule="batch i, i o -> batch o", reduction=("i",))
    f = jax.value_and_grad(scanned(lambda h, one: jnp.tanh(stated(h, one))))
    f_sharded = sharded(f, options)
    assert f_sharded.plan(*args).batch.places == "dimension 0 of x"
    wanted = jax.jit(jax.value_and_grad(scanned(dense)))(*args)
    assert largest_error(f_sharded(*args), wanted) < 1e-12
