"""Functions that JAX differentiates from outside, in several processes; `tests/hosts/test_gradients.py` starts them."""

from __future__ import annotations

import contextlib
import hashlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jshard
from jshard._api import gradient_together
from tests.hosts.jobs import batch, close, digest, exchanges, fail, parameters, replaced, two_layers


def loss(p: Any, x: Any) -> Any:
    return jnp.mean(two_layers(p, x) ** 2)


def same(budget: int | None, pad: bool, level: int) -> Any:
    """(texts of the programs, values, whether right, exchanges of the first gradient and of later ones, note)."""
    rows, n = (36, 18) if pad else (64, 16)
    p, x = parameters(n), batch(rows, n)
    f = jshard.shard(loss, in_strategy=(None, (8, 1)), level=level, memory_budget=budget, config={"pad": pad})
    y = f(p, x)
    before = exchanges()
    gradient = jax.jit(jax.grad(f))
    text = gradient.lower(p, x).as_text()
    g = gradient(p, x)
    first = exchanges() - before
    value, again = jax.jit(jax.value_and_grad(f))(p, x)
    wanted = jax.grad(loss)(p, x)
    right = all(
        close(a, w) and close(b, w) for a, b, w in zip(*map(jax.tree.leaves, (g, again, wanted)), strict=True)
    )
    found = f.plan(p, x)
    return [
        [hashlib.sha256(text.encode()).hexdigest()[:12], digest(y), digest(value), *map(digest, jax.tree.leaves(g))],
        right and close(y, loss(p, x)), first, exchanges() - before - first, bool(found.padding), found.steps[-1],
    ]  # fmt: skip


def other_plan(budget: int | None) -> Any:
    """Process 1 is slow and finds another plan of both passes, or must not search: both run that of process 0."""
    original = gradient_together.plan_traced_gradient
    searched = []

    def slow_and_different(traced: Any) -> Any:
        searched.append(1)
        if jax.process_index() == 0:
            return original(traced)
        time.sleep(0.3)
        return gradient_together.ForwardSchedule(traced.prepared.schedule, "another plan")

    p, x = parameters(), batch(8)
    f = jshard.shard(loss, memory_budget=budget)
    with replaced(gradient_together, "plan_traced_gradient", slow_and_different):
        gradient = jax.jit(jax.grad(f))
        text = gradient.lower(p, x).as_text()
        g = gradient(p, x)
    right = all(close(a, b) for a, b in zip(*map(jax.tree.leaves, (g, jax.grad(loss)(p, x))), strict=True))
    return [hashlib.sha256(text.encode()).hexdigest()[:12], right, list(f.plan(p, x).steps), len(searched)]


def fault(kind: str) -> Any:
    """A gradient in which process 1 differs: the error of this process, and whether the next call is right."""
    differs = jax.process_index() == 1
    scale = 2.0 if differs and kind == "rule" else 1.0

    @jax.custom_vjp
    def scaled(x: Any) -> Any:
        return jnp.sin(x)

    scaled.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.cos(x) * g * scale,))

    def step(p: Any, x: Any) -> Any:
        return jnp.mean(scaled(x @ p["in"]) @ p["out"])

    p, x = parameters(), batch()
    f = jshard.shard(step)
    f(p, x)
    with contextlib.ExitStack() as stack:
        if differs and kind == "raises":
            stack.enter_context(replaced(gradient_together, "plan_traced_gradient", fail))
        try:
            if differs and kind == "function":
                found = digest(f(p, np.ones((24, 16), "f")))
            else:
                jax.jit(jax.grad(f, argnums=1 if differs and kind == "arguments" else 0)).lower(p, x)
                found = ""
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
    return [found, close(jshard.shard(jnp.sin)(x), np.sin(x))]
