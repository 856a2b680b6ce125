"""Random programs that carry arrays through loops and update them in place or not: caches, accumulators, states.

A program is a function of some caches, a row and a weight, drawn from a seed: loops in loops, branches, `remat`, stacked
caches through a `scan`, updates by slices and scatters, readers before and after an update, swapped carries.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


ROWS, STEPS, WIDTH = 8, 16, 32
Step = Callable[[list[Any], Any, Any, Any], tuple[list[Any], Any]]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A program, its arguments, and those that may be donated."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    donated: tuple[int, ...]


def draw(seed: int, deep: int = 2) -> Drawn:
    """A program for a seed, with loops so deep."""
    rng = random.Random(seed)
    count, stacked = rng.randint(1, 3), rng.random() < 0.3
    body = _steps(rng, deep, count)

    def flat(caches: Any, x: Any, w: Any) -> Any:
        return body(list(caches), x, w, jnp.int32(0))

    def through(caches: Any, x: Any, w: Any) -> Any:
        def layer(x: Any, given: Any) -> Any:
            out, x = body(list(given), x, w, jnp.int32(1))
            return x, tuple(out)

        x, out = lax.scan(layer, x, tuple(caches))
        return list(out), x

    lead = (3,) if stacked else ()
    cache = jax.ShapeDtypeStruct((*lead, ROWS, STEPS, WIDTH), "float32")
    args = ([cache] * count, jax.ShapeDtypeStruct((ROWS, WIDTH), "float32"),
            jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32"))  # fmt: skip
    donated = tuple(i for i in range(3) if rng.random() < (0.7 if i == 0 else 0.3))
    return Drawn(through if stacked else flat, args, donated)


def _steps(rng: random.Random, deep: int, count: int) -> Step:
    steps = [_step(rng, deep, count) for _ in range(rng.randint(1, 3))]

    def run(caches: list[Any], x: Any, w: Any, i: Any) -> tuple[list[Any], Any]:
        for step in steps:
            caches, x = step(caches, x, w, i)
        return caches, x

    return run


def _step(rng: random.Random, deep: int, count: int) -> Step:
    kinds = ["slice", "slice", "scatter", "add", "read", "light", "product", "swap"]
    kinds += ["fori", "fori", "while", "scan", "cond", "remat"] if deep else []
    kind, k = rng.choice(kinds), rng.randrange(count)
    if kind in ("slice", "scatter", "add", "light", "product"):
        return _update(kind, k, rng.random() < 0.4)
    if kind == "read":
        return lambda c, x, w, i: (c, jnp.tanh(x + jnp.einsum("rsd,rd->rd", c[k], x) @ w))
    if kind == "swap":
        return lambda c, x, w, i: (c[::-1], x)
    inner = _steps(rng, deep - 1, count)
    return _nested(kind, inner, rng.random() < 0.5)


def _update(kind: str, k: int, before: bool) -> Step:
    def run(c: list[Any], x: Any, w: Any, i: Any) -> tuple[list[Any], Any]:
        c, old = list(c), c[k]
        at = i % STEPS
        c[k] = {
            "slice": lambda: lax.dynamic_update_slice(old, x[:, None], (0, at, 0)),
            "scatter": lambda: old.at[:, at].set(x),
            "add": lambda: old.at[:, at].add(x),
            "light": lambda: old * 0.5 + x[:, None],
            "product": lambda: jnp.einsum("rsd,de->rse", old, w),
        }[kind]()
        # A reader of what was there before: then the update is a copy.
        return c, x + jnp.sin(old[:, 3]) if before else x

    return run


def _nested(kind: str, inner: Step, which: bool) -> Step:
    def run(c: list[Any], x: Any, w: Any, i: Any) -> tuple[list[Any], Any]:
        if kind == "fori":
            return lax.fori_loop(0, 3, lambda j, s: inner(s[0], s[1], w, i + j), (c, x))
        if kind == "while":

            def turn(s: Any) -> Any:
                return s[0] + 1, *inner(s[1], s[2], w, s[0])

            return lax.while_loop(lambda s: s[0] < 3, turn, (jnp.int32(0), c, x))[1:]
        if kind == "scan":

            def go(s: Any, j: Any) -> Any:
                out, y = inner(s[0], s[1], w, j)
                return (out, y), (y, out[0][:, 0]) if which else y

            (c, x), _ = lax.scan(go, (c, x), jnp.arange(3))
            return c, x
        if kind == "cond":

            def other(c: list[Any], x: Any) -> Any:
                return (c, x) if which else ([a + 1 for a in c], x)

            return lax.cond(x.sum() > 0, lambda c, x: inner(c, x, w, i), other, c, x)
        return jax.checkpoint(lambda c, x: inner(c, x, w, i))(c, x)

    return run
