"""Recipes and microbatches of experts: their batch is the tokens, though most products keep the experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jshard


def machine():
    return jshard.topology("v5e:2x4", {"x": 2, "y": 4}, compiles=False)


def experts_over_flat_tokens(p, mu, x):
    """A training step of a mixture of experts that dispatches (tokens, features) by products, as GShard does."""

    def loss(p, x):
        gates = jax.nn.softmax(x @ p["gate"])
        mask = jax.nn.one_hot(gates.argmax(-1), gates.shape[-1], dtype=x.dtype)
        place = (jnp.cumsum(mask, 0) * mask - 1).astype(int)
        send = jax.nn.one_hot(place, 16, dtype=x.dtype) * mask[..., None]
        hidden = jax.nn.relu(jnp.einsum("ecd,edf->ecf", jnp.einsum("nec,nd->ecd", send, x), p["w1"]))
        made = jnp.einsum("ecf,efd->ecd", hidden, p["w2"])
        return (jnp.einsum("nec,ecd->nd", send * gates.max(-1)[..., None, None], made) ** 2).sum()

    mu = jax.tree.map(lambda m, g: 0.9 * m + g, mu, jax.grad(loss)(p, x))
    return jax.tree.map(lambda p, m: p - 0.1 * m, p, mu), mu


def arguments_of_experts():
    S = jax.ShapeDtypeStruct
    p = {"gate": S((16, 8), "float32"), "w1": S((8, 16, 24), "float32"), "w2": S((8, 24, 16), "float32")}
    return p, p, S((32, 16), "float32")


WEIGHTS = {
    "data": '"{w1,w2}": [null, null, null]',
    "fsdp": "w1: [null, null, [x, y]]\n  w2: [null, [x, y], null]",
    "expert": '"{w1,w2}": [y, null, null]',
}


@pytest.mark.parametrize("recipe", WEIGHTS)
def test_the_batch_of_experts_is_the_tokens(recipe):
    """Four of five products keep the experts, two the tokens; but weights, which results replace, have no batch."""
    args = arguments_of_experts()
    text = jshard.Config.from_recipe(recipe, experts_over_flat_tokens, *args, mesh=machine()).to_yaml()
    assert "inputs:\n  x: [[x, y]" in text and WEIGHTS[recipe] in text


def test_microbatches_of_experts_are_of_tokens():
    with pytest.raises(jshard.ShardError, match="5 does not divide the batch of 32, dimension 0 of x"):
        jshard.shard(experts_over_flat_tokens, mesh=machine(), microbatches=5).plan(*arguments_of_experts())


@pytest.mark.parametrize("recipe", ["expert", "megatron", "fsdp"])
def test_experts_of_a_ragged_product_are_weights_whose_groups_stay_whole(recipe):
    """The recipes that the refusal of `expert` names apply."""
    S = jax.ShapeDtypeStruct

    def loss(p, x):
        gates = jax.nn.softmax(x @ p["gate"])
        expert = gates.argmax(-1)
        order, counts = jnp.argsort(expert), jnp.bincount(expert, length=8)
        hidden = jax.nn.relu(jax.lax.ragged_dot(x[order], p["w1"], counts))
        made = jax.lax.ragged_dot(hidden, p["w2"], counts)
        return ((jnp.zeros_like(x).at[order].set(made) * gates.max(-1, keepdims=True)) ** 2).mean()

    args = arguments_of_experts()[0], S((32, 16), "float32")
    grad = jax.value_and_grad(loss)
    if recipe == "expert":
        with pytest.raises(jshard.ShardError, match="groups of rows, which stay whole") as error:
            jshard.Config.from_recipe(recipe, grad, *args, mesh=machine())
        assert error.value.fix == "megatron or fsdp"
        return
    text = jshard.Config.from_recipe(recipe, grad, *args, mesh=machine()).to_yaml()
    cut = {"megatron": "w1: [null, null, y]\n  w2: [null, y, null]"}
    assert cut.get(recipe, WEIGHTS["fsdp"]) in text
