"""Rules for values inside that have a name: `jax.named_scope`, `checkpoint_name`; forward pins of a training step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jshard
import jshard.flax  # noqa: F401  modules get `.shard`


LAYERS, WIDTH, BATCH = 3, 8, 12


def layer(x: jax.Array, w: dict[str, jax.Array], i: int | None) -> jax.Array:
    """A block with a scope of one output and one of two, and a named value."""
    with jax.named_scope("layers" if i is None else f"layers.{i}"):
        with jax.named_scope("core"):
            h = jax.nn.relu(jnp.tanh(x @ w["up"]) + 1)
        h = checkpoint_name(h * 2, "hidden")
        with jax.named_scope("pair"):
            y, gate = jnp.sin(h @ w["down"]), jax.nn.sigmoid(h)
        return x + y * gate[:, :WIDTH]


def loss(params: Any, x: jax.Array, scanned: bool, again: bool) -> jax.Array:
    run = jax.checkpoint(layer, static_argnums=2) if again else layer
    if scanned:
        x, _ = jax.lax.scan(lambda x, w: (run(x, w, None), None), x, params)
    else:
        for i in range(len(params["up"])):
            x = run(x, jax.tree.map(lambda a, i=i: a[i], params), i)
    return (x**2).mean()


def step(params: Any, x: jax.Array, scanned: bool, again: bool) -> Any:
    value, grads = jax.value_and_grad(loss)(params, x, scanned, again)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def arguments(layers: int = LAYERS) -> tuple[Any, jax.Array]:
    k = jax.random.split(jax.random.key(7), 3)
    params = {
        "up": 0.3 * jax.random.normal(k[0], (layers, WIDTH, 16)),
        "down": 0.3 * jax.random.normal(k[1], (layers, 16, WIDTH)),
    }
    return params, jax.random.normal(k[2], (BATCH, WIDTH))


RULES = {
    "layers.*.core": [None, "b"],
    "hidden": ["a", "b"],
    "layers.*.pair[0]": [["b", "a"], None],
    "pair[1]": [None, "a"],
}  # fmt: skip
CONFIG = {"mesh": {"a": 2, "b": 2}, "activations": RULES, "static_argnames": ["scanned", "again"]}


@pytest.mark.parametrize("scanned, again", [(False, False), (True, False), (True, True), (False, True)])
def test_forward_pins_hold_in_a_training_step(scanned: bool, again: bool) -> None:
    sharded = jshard.shard(step, config=CONFIG)
    params, x = arguments()
    plan = sharded.plan(params, x, scanned, again, verify=True)
    assert plan.verification.ok
    named = [o for o in plan.operators if o.primitive in ("jshard_module_output", "name")]
    copies = 1 if scanned else LAYERS
    for at, layout in (("core", "(-, b)"), ("pair", "(a*b, -)")):
        found = [str(o.results[0]) for o in named if o.module.endswith(f"/{at}") or o.module == at]
        assert found.count(layout) >= copies, (at, found)
    assert [str(o.results[0]) for o in named if o.primitive == "name"].count("(a, b)") >= copies
    ours, theirs = sharded(params, x, scanned, again), step(params, x, scanned, again)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_elements_of_a_scope_are_reported() -> None:
    params, x = arguments()
    report = jshard.Config.of(CONFIG).check(step, params, x, True, False)
    assert report.ok, str(report)
    inner = {t.path: t.kind for t in report.tensors if t.kind in ("scope", "name")}
    assert inner == {"layers.core": "scope", "hidden": "name", "layers.pair": "scope"}
    wrong = jshard.Config.of(CONFIG | {"activations": {"pair": ["a", None], "layers.*.coer": [None, None]}})
    report = wrong.check(step, params, x, True, False)
    assert [(p.kind, p.fix) for p in report.errors][1:] == [
        ("element", f"pair[{i}] for one of them") for i in range(2)
    ]
    assert report.errors[0].kind == "unmatched" and "layers.core" in report.errors[0].fix
    beyond = jshard.Config.of(CONFIG | {"activations": {"core": [None, None], "pair[2]": [None, None]}})
    [problem] = beyond.check(step, params, x, True, False).errors
    assert problem.kind == "unmatched" and problem.fix == "[0] to [1]"


def test_values_computed_again_keep_their_pins_in_the_forward_pass() -> None:
    params, x = arguments(layers=2)
    config = CONFIG | {"level": 2, "pad": False, "search_seconds": 0.5}  # any plan that fits will do
    peak = jshard.shard(step, config=config).plan(params, x, False, False).cost.peak_bytes
    # Down to 0.63 of it other layouts are enough.
    limited = config | {"remat": "auto", "memory_budget": int(0.57 * peak)}
    plan = jshard.shard(step, config=limited).plan(params, x, False, False)
    assert plan.kept is not None and plan.cost.peak_bytes < peak
    named = [o for o in plan.operators if o.module.endswith("core") and o.primitive == "jshard_module_output"]
    assert [str(o.results[0]) for o in named].count("(-, b)") >= 2


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.q, self.o = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        q = self.q(x)
        with jax.named_scope("core_attention"):
            y = jax.nn.softmax(q @ q.T) @ q
        return self.o(y)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attn = Attention(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.attn(x)


class Model(nnx.Module):
    def __init__(self, scanned: bool, rngs: nnx.Rngs):
        self.scanned = scanned
        if scanned:
            self.layers = nnx.vmap(Layer, in_axes=0, out_axes=0)(rngs.split(LAYERS))
        else:
            self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.scanned:
            return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.layers
            )
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("scanned", [False, True])
def test_a_scope_in_a_module_has_the_modules_path(scanned: bool) -> None:
    model = Model(scanned, nnx.Rngs(0))
    config = jshard.Config.of(
        {"mesh": {"a": 2, "b": 2}, "activations": {"layers.*.attn.core_attention": ["a", "b"]}}
    )

    def train(model: Model, x: jax.Array) -> jax.Array:
        value, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))
        return value

    x = jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
    report = config.check(train, model, x)
    assert report.ok, str(report)
    pinned = [t.path.removeprefix("Model.") for t in report.tensors if t.kind == "scope"]
    assert pinned == (
        ["layers.attn.core_attention"]
        if scanned
        else [f"layers.{i}.attn.core_attention" for i in range(LAYERS)]
    )
    sharded, plain = jshard.shard(train, config=config), Model(scanned, nnx.Rngs(0))
    plan = sharded.plan(model, x)
    named = [o for o in plan.operators if o.primitive == "jshard_module_output"]
    assert [str(o.results[0]) for o in named].count("(a, b)") == (1 if scanned else LAYERS)
    np.testing.assert_allclose(sharded(model, x), nnx.jit(train)(plain, x), rtol=2e-5)
    for a, b in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(plain)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
