"""What families of models bring along, each on a small model: its layout, and values and gradients equal to plain."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard.flax
from benchmarks import workloads


MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
B, T, H, S, WORDS = 8, 6, 4, 4, 32
D = H * S


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.3, "float32")


def attend(q, k, v):
    q, k, v = (x.reshape(*x.shape[:2], -1, S) for x in (q, k, v))
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(*q.shape[:2], -1)


def check(recipe, fn, params, *batch):
    """Run the gradient under a recipe; equal to plain, as planned; the layouts of the arguments by path."""
    step = jax.value_and_grad(fn)
    f = jshard.shard(step, config=recipe, mesh=MESH)
    plan = f.plan(params, *batch, verify=True)
    assert plan.verification is not None and plan.verification.ok
    for a, b in zip(jax.tree.leaves(f(params, *batch)), jax.tree.leaves(step(params, *batch)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    return {r.path.partition(".")[2]: str(r.layout) for r in plan.inputs}


TOKENS = jnp.asarray(np.random.default_rng(9).integers(0, WORDS, (B, T)), "int32")


def test_tied_embeddings_and_position_tables():
    """One table is read and gives the scores: one layout; positions are looked up too, by no data, and stay whole."""
    p = {
        "embed": normal(WORDS, D), "position": normal(16, D, seed=1), "up": normal(D, 32, seed=2),
        "down": normal(32, D, seed=3),
    }  # fmt: skip

    def loss(p, tokens):
        x = p["embed"][tokens] + p["position"][jnp.arange(tokens.shape[1])]
        x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
        return workloads.cross_entropy(x @ p["embed"].T, tokens)

    layouts = check("megatron", loss, p, TOKENS)
    assert layouts == {
        "embed": "(model, -)", "position": "(-, -)", "up": "(-, model)", "down": "(model, -)", "": "(data, -)",
    }  # fmt: skip


@pytest.mark.parametrize("order", ["head by head", "blocks"])
def test_fused_queries_keys_and_values(order):
    """Stored head by head (BLOOM), or `[q | k | v]` put in block order: cut by heads, nothing moves between them."""
    p = {"qkv": normal(D, 3 * D), "o": normal(D, D, seed=1)}
    blocks = jshard.flax.BlockOrder((D, D, D), 4)

    def loss(p, x):
        y = x @ p["qkv"]
        if order == "blocks":
            q, k, v = blocks.split(y)
        else:
            q, k, v = (a.reshape(B, T, D) for a in jnp.moveaxis(y.reshape(B, T, H, 3, S), 3, 0))
        return ((attend(q, k, v) @ p["o"]) ** 2).mean()

    assert check("megatron", loss, p, normal(B, T, D, seed=2))[""] == "(data, -, -)"
    plan = jshard.shard(loss, config="megatron", mesh=MESH).plan(p, normal(B, T, D))
    assert {r.path: str(r.layout) for r in plan.inputs[:2]} == {"p.o": "(model, -)", "p.qkv": "(-, model)"}
    config = jshard.Config.from_recipe("megatron", loss, p, normal(B, T, D), mesh=MESH)
    scores = {r.key: r.text for r in config.products}["{qkv @ qkv,qkv @ qkv @ qkv}"]
    assert scores == "[data, model, null, null]"
    side_by_side = p["qkv"]
    np.testing.assert_array_equal(blocks.undo(blocks.apply(side_by_side)), side_by_side)
    for a, b in zip(blocks.split(blocks.apply(side_by_side)), jnp.split(side_by_side, 3, -1), strict=True):
        np.testing.assert_array_equal(a, b)


def test_blocks_that_do_not_divide_are_refused():
    with pytest.raises(jshard.ShardError, match=r"4 blocks do not divide the fused parts \(16, 6\)"):
        jshard.flax.BlockOrder((16, 6), 4)


def test_stacks_of_experts():
    w = workloads.get("moe", small=True, devices=8)
    rng = np.random.default_rng(0)
    state, x = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) * 0.1, "float32"), w.args)
    f = jshard.shard(w.step, config="fsdp+expert", mesh=MESH)
    plan = f.plan(state, x, verify=True)
    assert plan.verification is not None and plan.verification.ok
    assert [str(r.layout) for r in plan.inputs[:3]] == [
        "(model, data, -)",
        "(data*model, -)",
        "(model, -, data)",
    ]
    assert "all_to_all" in {c.kind for c in plan.collectives}
    for a, b in zip(jax.tree.leaves(f(state, x)), jax.tree.leaves(w.step(state, x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_batch_statistics_are_those_of_the_whole_batch():
    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(32, rngs=rngs, use_running_average=False)

        def __call__(self, x):
            return self.down(nnx.relu(self.norm(self.up(x))))

    x = normal(16, 8, seed=4)
    for recipe in ("fsdp", "megatron"):
        plain, sharded = Net(), Net()
        f = jshard.shard(lambda m, x: (m(x) ** 2).mean(), config=recipe, mesh=MESH)
        np.testing.assert_allclose(f(sharded, x), (plain(x) ** 2).mean(), rtol=1e-5)
        for a, b in zip(jax.tree.leaves(nnx.state(sharded)), jax.tree.leaves(nnx.state(plain)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        plan = f.plan(sharded, x)
        rows = {r.path: str(r.layout) for r in plan.inputs}
        assert rows["m.up.kernel"] == {"fsdp": "(-, data*model)", "megatron": "(-, model)"}[recipe]


def test_layers_in_a_scan_are_cut_as_unrolled_ones():
    def layer(x, p):
        return x + jnp.tanh(x @ p["up"]) @ p["down"], None

    def scanned(p, x):
        return (jax.lax.scan(layer, x, p)[0] ** 2).mean()

    def unrolled(p, x):
        for i in range(3):
            x, _ = layer(x, jax.tree.map(lambda a, i=i: a[i], p))
        return (x**2).mean()

    p = {"down": normal(3, 32, 8), "up": normal(3, 8, 32, seed=1)}
    for fn in (scanned, functools.partial(unrolled)):
        layouts = check("megatron", fn, p, normal(B, 8, seed=2))
        assert layouts["up"] == "(-, -, model)" and layouts["down"] == "(-, model, -)"
