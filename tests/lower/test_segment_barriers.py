"""A segment that computes values again begins after the loss: something of the backward pass goes through its barrier."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard


MESH = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def normalized(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def block(p, x):
    return x + jax.nn.gelu(normalized(x) * p["gain"] @ p["up"]) @ p["down"]


def loss(last, layers, x, target):
    for p in layers:
        x = jax.checkpoint(block)(p, x)
    return jnp.mean((last(x) - target) ** 2)


def arguments(layers: int):
    rng = np.random.default_rng(0)

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape) / 8, jnp.float32)

    weights = [dict(gain=array(64), up=array(64, 256), down=array(256, 64)) for _ in range(layers)]
    return weights, array(32, 16, 64), array(32, 16, 64)


def barriers(text: str, waits_for: str) -> list[bool]:
    """For each barrier of a program in StableHLO whether what goes through it depends on a value."""
    known, out = {waits_for}, []
    for line in text.splitlines():
        if found := re.match(r"\s*(%\w+)(?::\d+)? = (.*)", line):
            result, operation = found.groups()
            late = not known.isdisjoint(re.findall(r"%\w+", operation))
            if late:
                known.add(result)
            if "stablehlo.optimization_barrier" in operation:
                out.append(late)
    return out


@pytest.mark.parametrize("last", [normalized, lambda x: x, lambda x: jax.nn.softmax(x) @ jnp.eye(64)])
def test_what_is_computed_again_waits_for_the_loss(last):
    """Where elementwise operators alone come after the last block, its derivative is fused and goes around the barrier."""
    f = jshard.shard(jax.grad(functools.partial(loss, last)), mesh=MESH)
    text = f.lower(*arguments(2)).as_text()
    # The target is the last argument of the local program; the forward pass of the blocks knows nothing of it.
    (local,) = [line for line in text.splitlines() if "sdy.manual_computation" in line]
    target = re.findall(r"%arg\d+", local)[-1]
    found = barriers(text, target)
    assert len(found) >= 2 and all(found)
