"""Dispatch: one trace and one compilation per signature, threads, interruptions, JAX's log of compilations."""

from __future__ import annotations

import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from jshard._api import prepare, shard


def normal(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def counted():
    traces = []

    def f(x, w):
        traces.append(x.shape)
        return jnp.tanh(x @ w)

    return f, traces


def test_one_trace_wherever_arguments_lie(caplog):
    f, traces = counted()
    g = jshard.shard(f, ((4, 2), None))
    x, w = normal(8, 8), normal(8, 8)
    with jax.log_compiles(True), caplog.at_level(logging.WARNING):
        plan = g.plan(x, w)
        planned = jax.device_put(x, plan.in_shardings[0][0])
        for y in (x, x, x, planned, planned, np.asarray(x), jax.device_put(x, jax.devices()[1]), planned, x):
            np.testing.assert_allclose(g(y, w), jnp.tanh(x @ w), atol=1e-6)
    compiled = [r for r in caplog.records if r.message.startswith("Finished XLA compilation of jit(f)")]
    assert traces == [(8, 8)] and len(compiled) == 1


def misses(g, monkeypatch):
    """The calls of `g` that JAX's dispatch did not serve alone."""
    seen = []
    real = shard.Sharded._executable
    monkeypatch.setattr(
        shard.Sharded, "_executable", lambda self, a, k, *p: seen.append(a) or real(self, a, k)
    )
    return seen


def test_calls_once_seen_run_no_python(monkeypatch):
    f, traces = counted()
    g = jshard.shard(f, ((4, 2), None))
    x, w = normal(8, 8), normal(8, 8)
    planned = jax.device_put(x, g.plan(x, w).in_shardings[0][0])
    seen = misses(g, monkeypatch)
    for y in (x, planned, np.asarray(x), jax.device_put(x, jax.devices()[1])):
        for _ in range(5):
            np.testing.assert_allclose(g(y, w), jnp.tanh(x @ w), atol=1e-6)
        assert len(seen) == 1
        seen.clear()
    for _ in range(5):
        g(x, w=w)
        g(normal(4, 8), w)  # signatures in turn do not push each other out
    assert len(seen) == 2 and len(traces) == 3
    # Blocks of another layout on the same devices would be taken for ours, so those are brought into place here.
    other = jax.device_put(x, jax.sharding.NamedSharding(g.plan(x, w).jax_mesh, jax.P(None, "x")))
    for _ in range(3):
        np.testing.assert_allclose(g(other, w), jnp.tanh(x @ w), atol=1e-6)


def test_a_failed_first_call_does_not_slow_later_ones(monkeypatch):
    f, _ = counted()
    g = jshard.shard(f, ((4, 2), None))
    x, w = normal(8, 8), normal(8, 8)
    with monkeypatch.context() as m:
        m.setattr("jshard._api.shard.prepare", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            g(x, w)
    g(x, w), g(x, w)
    seen = misses(g, monkeypatch)
    g(x, w)
    assert not seen


def test_threads_plan_once(monkeypatch):
    planned = []
    real = prepare.prepare
    monkeypatch.setattr(
        shard, "prepare", lambda r, a, k, *p, **o: planned.append(a[0].shape) or real(r, a, k)
    )
    f, _ = counted()
    g = jshard.shard(f, ((2, 1), None))
    w = normal(4, 4)
    inputs = [normal(2 * n, 4) for n in range(1, 5)]
    wants = [np.tanh(np.asarray(x) @ np.asarray(w)) for x in inputs]
    errors = []

    def work(k):
        try:
            for i in range(40):
                j = (i + k) % 4
                # One execution in flight a thread: with more than 32, JAX's CPU client stops, plain `jit` as well.
                out = jax.block_until_ready(g(inputs[j], w))
                if i % 10 == 0:
                    np.testing.assert_allclose(out, wants[j], atol=1e-5)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    assert sorted(planned) == [(2, 4), (4, 4), (6, 4), (8, 4)]


def test_planning_does_not_hold_up_other_signatures(monkeypatch):
    go, began = threading.Event(), threading.Event()
    real = prepare.prepare

    def slow(r, a, k, *progress, **programs):
        if a[0].shape == (4, 4):
            began.set()
            assert go.wait(60)
        return real(r, a, k)

    monkeypatch.setattr(shard, "prepare", slow)
    f, _ = counted()
    g = jshard.shard(f, ((2, 1), None))
    w = normal(4, 4)
    thread = threading.Thread(target=lambda: g(normal(4, 4), w))
    thread.start()
    assert began.wait(60)
    assert g(normal(2, 4), w).shape == (2, 4)
    assert thread.is_alive()
    go.set()
    thread.join()


@pytest.mark.parametrize(
    "where",
    [
        "jshard._api.plan_on_mesh.plan_program",
        "jshard._api.trace_call.build",
        "jshard._plan.level_search.solve",
        "jshard._api.executable.spmd",
        "jax.stages.Lowered.compile",
        "jshard._core.jaxcompat.call_and_fastpath_data",
    ],
)
def test_interrupted(where, monkeypatch):
    f, _ = counted()
    g = jshard.shard(f, ((2, 1), None))
    x, w = normal(4, 4), normal(4, 4)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            g(x, w)
    np.testing.assert_allclose(g(x, w), f(x, w), atol=1e-6)


def test_a_new_signature_is_explained(caplog):
    f, _ = counted()
    g = jshard.shard(f, None)
    g(normal(4, 4), normal(4, 4))
    with caplog.at_level(logging.WARNING, "jshard"), jax.log_compiles(True):
        g(normal(2, 4), normal(4, 4))
    said = [r.getMessage() for r in caplog.records if r.name == "jshard"]
    assert said == ["f is planned anew; changed: argument [0][0]: float32[4,4] -> float32[2,4]"]


def test_clear_cache_and_plans_given(tmp_path):
    f, _ = counted()
    g = jshard.shard(f, ((4, 2), None))
    x, w = normal(8, 8), normal(8, 8)
    g(x, w)
    old = g.plan(x, w)
    assert g.plan(x, w) is old
    g.clear_cache()
    assert g.plan(x, w) is not old
    g(x, w)
    g.plan(x, w).save(tmp_path / "plan.json")
    again = jshard.shard(f, ((4, 2), None), plan=jshard.Plan.load(tmp_path / "plan.json"))
    np.testing.assert_allclose(again(x, w), f(x, w), atol=1e-6)


def test_a_saved_plan_brings_its_own_mesh(tmp_path):
    def f(x, w):
        return jax.nn.relu(x @ w)

    x, w = jnp.ones((32, 16)), jnp.ones((16, 8))
    plan = jshard.shard(f, in_strategy=((4, 2), None)).plan(x, w)
    plan.save(tmp_path / "plan.json")
    again = jshard.shard(f, plan=jshard.Plan.load(tmp_path / "plan.json"))
    assert again.plan(x, w) == plan
    assert jnp.allclose(again(x, w), f(x, w))
