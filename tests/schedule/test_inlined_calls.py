"""Schedules of programs with recomputed calls as arrays: equal to those written as objects, copies of each call its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from jshard._program.memory.liveness import liveness
from jshard._schedule import peak
from jshard._schedule.overlap_windows import _inlined, overlap_windows
from jshard._schedule.schedule import Reshard, RunCall, RunOperator, Schedule, schedule
from tests.helpers.memory_networks import every_read, with_every_live_range_split
from tests.schedule.test_vectorized import choices_of, scattered


TABLE = np.linspace(0, 1, 64 * 64, dtype="float32").reshape(64, 64)


def layer(w: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ w[0]) @ w[1]


@jax.custom_vjp
def rectified(x: Any) -> Any:
    return jnp.maximum(x, 0)


rectified.defvjp(lambda x: (rectified(x), x), lambda x, g: (g * (x > 0),))


def plain(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jax.checkpoint(layer)(w, x)
    return (x * x).mean()


def nested(ws: Any, x: Any) -> Any:
    return (
        jax.checkpoint(lambda ws, x: jax.checkpoint(layer)(ws[1], jax.checkpoint(layer)(ws[0], x)))(ws, x)
    ).sum()


def own_rule(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jax.checkpoint(lambda w, x: x + rectified(x @ w[0]) @ w[1])(w, x)
    return jnp.sin(x).mean()


def captured(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jax.checkpoint(lambda w, x: layer(w, x) + jnp.cos(x @ TABLE) @ TABLE.T)(w, x)
    return (x * x).mean()


def shared(ws: Any, x: Any) -> Any:
    """One weight is read in all calls and outside; a cast is recomputed by its readers."""

    def inner(w: Any, v: Any, x: Any) -> Any:
        return layer(w, x).astype(jnp.bfloat16).astype(jnp.float32) + jnp.tanh(x @ v)

    for w in ws:
        x = jax.checkpoint(inner)(w, ws[0][0], x)
    return (x @ ws[0][0]).mean() + ws[0][0].sum()


def policy(ws: Any, x: Any) -> Any:
    """Some values are saved; two results leave each call."""
    total = jnp.float32(0)

    def inner(w: Any, x: Any) -> Any:
        y = jax.nn.softmax(x @ w[0])
        return x + y @ w[1], y.max()

    for w in ws:
        x, s = jax.checkpoint(inner, policy=jax.checkpoint_policies.dots_saveable)(w, x)
        total += s
    return (x * x).mean() + total


LOSSES = {f.__name__: f for f in (plain, nested, own_rule, captured, shared, policy)}
W = [(jax.ShapeDtypeStruct((64, 64), "float32"),) * 2] * 2
ARGUMENTS = (W, W, jax.ShapeDtypeStruct((512, 64), "float32"))


def step(loss: Callable) -> Callable:
    """A step with momentum, whose gradients are read twice: they are stored where their calls end."""

    def run(ws: Any, ms: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(ws, x)
        ms = jax.tree.map(lambda m, g: 0.9 * m + g, ms, grads)
        return jax.tree.map(lambda w, m, g: w - 0.1 * m + 0.01 * jnp.abs(g), ws, ms, grads), ms, value

    return run


def check(made: Schedule, donated: tuple[int, ...]) -> None:
    found = made.arrays
    assert found is not None and any(isinstance(a, RunCall) for a in made.actions)
    actions = list(_inlined(made.actions))
    places = [(k, True, m) for m, k in enumerate(found.reshard_at.tolist())]
    places += [(k, False, op) for op, k in enumerate(found.run_at.tolist()) if k >= 0]
    assert len(places) == len(actions)
    for (_, is_reshard, k), x in zip(sorted(places), actions, strict=True):
        if is_reshard:
            assert isinstance(x, Reshard)
            layouts = found.layouts[found.source[k]], found.layouts[found.target[k]]
            assert (x.tensor, x.source, x.target) == (found.tensor[k], *layouts)
            assert (x.reader, x.regathered) == (found.reader[k], found.regathered[k])
            assert x.steps == found.paths[found.path[k]]
        else:
            assert isinstance(x, RunOperator) and x.op == k
    written = made._written.communicating
    assert [dataclasses.astuple(x) for x in made.communicating] == [dataclasses.astuple(x) for x in written]
    if made.assignment.regather:
        return  # who walks knows a value by its tensor and layout, and would hold it
    life = liveness(made.assignment.program, donated)
    ours, reference = peak.peak_profile(made, life, donated), peak.peak_reference(made, life, donated)
    assert ours.peak == reference.peak and ours.curve == reference.curve
    assert dict(ours.by_class) == dict(reference.by_class) and sorted(ours.held) == sorted(reference.held)


@pytest.mark.parametrize("name", LOSSES)
def test_arrays_say_what_objects_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choices_of(monkeypatch, step(LOSSES[name]), ARGUMENTS)
    for seed, made in enumerate([chosen[0], *(scattered(chosen[0], seed) for seed in range(12))]):
        pairs = every_read(made.assignment.program) if seed % 3 == 2 else frozenset()
        some = dataclasses.replace(made.assignment, regather=pairs)
        for donated in ((), tuple(range(len(made.assignment.program.inputs)))):
            check(schedule(some), donated)


def test_a_copy_serves_its_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    (made, *_) = choices_of(monkeypatch, step(shared), ARGUMENTS)
    scopes = [scattered(made, seed) for seed in range(12)]
    again = 0
    for some in scopes:
        moves = [(a.tensor, a.target) for a in _inlined(some.actions) if isinstance(a, Reshard)]
        again += len(moves) - len(set(moves))
        assert overlap_windows(some).products == overlap_windows(some.with_calls).products
    assert again


def test_what_is_moved_again_in_calls_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, with everything that the backward pass can move again moved again."""
    with_every_live_range_split(monkeypatch)
    rng = np.random.default_rng(0)
    ws = [tuple(jnp.array(rng.normal(size=(64, 64)) / 8, "float32") for _ in range(2)) for _ in range(2)]
    arguments = ws, jax.tree.map(jnp.ones_like, ws), jnp.array(rng.normal(size=(512, 64)), "float32")
    cut = [((8, 1), (8, 1))] * 2
    f = jshard.shard(
        step(shared), in_strategy=(cut, cut, (8, 1)), mesh=jax.make_mesh((8,), ("x",)), hardware="tpu-v5e", level=1
    )  # fmt: skip
    decision = f.plan(*arguments).decision
    assert decision.regather and decision.regather_after
    for got, want in zip(
        jax.tree.leaves(f(*arguments)), jax.tree.leaves(step(shared)(*arguments)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
