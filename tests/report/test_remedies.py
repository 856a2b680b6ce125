"""A refusal for want of memory: what holds the memory, and remedies whose figures are those of the plans they give."""

from __future__ import annotations

import dataclasses
import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

import jshard
from jshard._api import prepare as prepare_module, remedies
from jshard._api.prepare import prepare
from jshard._core.errors import MemoryBudgetError
from jshard._plan import early_plans, level_search
from jshard._program.memory.liveness import liveness
from jshard._report.format_units import format_bytes
from jshard._schedule.checkpoint_estimate import checkpoint_estimate
from jshard._schedule.peak import peak_bytes, peak_profile
from jshard._spec.options import CallOptions


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def on(*sizes: int) -> AbstractMesh:
    return AbstractMesh(sizes, ("x", "y")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


def layer(p, x):
    y = jnp.tanh(x @ p["a"])
    return x + jax.nn.silu(y * y.mean(-1, keepdims=True)) @ p["b"]


def training(layers: int, batch: int, width: int, scan: bool = False, checkpoint: bool = False):
    """A step of SGD with momentum on a residual network, and the shapes of its arguments."""
    run = jax.checkpoint(layer) if checkpoint else layer

    def loss(params, batch):
        if scan:
            batch, _ = jax.lax.scan(lambda x, p: (run(p, x), None), batch, params)
        else:
            for p in params:
                batch = run(p, batch)
        return (batch**2).mean()

    def step(params, state, batch):
        grads = jax.grad(loss)(params, batch)
        state = jax.tree.map(lambda s, g: 0.9 * s + g, state, grads)
        return jax.tree.map(lambda p, s: p - 0.1 * s, params, state), state

    one = {"a": (width, 2 * width), "b": (2 * width, width)}
    if scan:
        params = {k: f32(layers, *s) for k, s in one.items()}
    else:
        params = [{k: f32(*s) for k, s in one.items()} for _ in range(layers)]
    return step, (params, params, f32(batch, width))


def refused(step, args, budget, mesh=None, **options) -> MemoryBudgetError:
    options.setdefault("hardware", "tpu-v5e")
    with pytest.raises(MemoryBudgetError) as error:
        jshard.shard(step, mesh=mesh or on(2, 4), memory_budget=budget, **options).plan(*args)
    assert max(map(len, str(error.value).splitlines())) <= 140
    assert error.value.least_found == error.value.refusal.peak >= error.value.proved_least
    return error.value


def row(error: MemoryBudgetError, pattern: str):
    found = [r for r in error.remedies if re.search(pattern, r.advice)]
    assert len(found) == 1, str(error)
    assert format_bytes(found[0].peak) in str(error)
    return found[0]


WIDE = training(1, 64, 500)  # state holds the memory
DEEP = training(4, 320_000, 96)  # activations do


@functools.cache
def donated(deep: bool):
    """The plan without a budget that takes over parameters and state."""
    step, args = DEEP if deep else WIDE
    return jshard.shard(step, mesh=on(2, 4), hardware="tpu-v5e", donate_argnums=(0, 1)).plan(*args)


@pytest.fixture
def _nothing_computed_again(monkeypatch):
    """The table without the row of `remat="auto"`, which takes longer to plan than all other rows."""
    rest = [find for find in remedies.REMEDIES if find is not remedies.recompute]
    monkeypatch.setattr(remedies, "REMEDIES", tuple(rest))


@pytest.mark.usefixtures("_nothing_computed_again")
def test_donating_state_gives_the_plan_of_the_table():
    step, args = WIDE
    free = donated(deep=False)
    budget = int(free.cost.peak_bytes * 1.02)
    error = refused(step, args, budget)
    advised = row(error, r"^donate_argnums=\(0, 1\)$")
    assert advised.peak == free.cost.peak_bytes and advised.peak <= error.refusal.limit
    plan = jshard.shard(step, mesh=on(2, 4), hardware="tpu-v5e", memory_budget=budget, donate_argnums=(0, 1))
    assert plan.plan(*args).cost.peak_bytes == advised.peak
    assert "argument params" in str(error) and "not donated" in str(error)


def test_nothing_is_said_of_donating_what_is_donated():
    step, args = training(1, 64, 64)
    error = refused(step, args, "1KB", donate_argnums=(0, 1))
    assert not any("donate" in r.advice for r in error.remedies)
    assert re.search(r"argument params +\S+ \w+  donated", str(error))
    assert "the arguments alone take " in str(error)


def test_a_smaller_batch_and_more_devices_give_the_plans_of_the_table():
    step, args = DEEP
    free = donated(deep=True)
    budget = int(free.cost.peak_bytes * 0.5)
    error = refused(step, args, budget, donate_argnums=(0, 1))
    assert error.refusal.bound > budget
    smaller = row(error, "^batch of ")
    size = int(re.findall(r"\d+", smaller.advice)[0])
    assert 320_000 % size == 0 and "in place of 320000 (batch)" in smaller.advice
    options = dict(hardware="tpu-v5e", memory_budget=budget, donate_argnums=(0, 1))
    plan = jshard.shard(step, mesh=on(2, 4), **options).plan(*args[:2], f32(size, 96))
    assert plan.cost.peak_bytes == smaller.peak <= budget
    larger = row(error, r"^\d+ devices: mesh x=")
    devices, x, y = map(int, re.findall(r"\d+", larger.advice))
    assert devices == x * y > 8
    plan = jshard.shard(step, mesh=on(x, y), **options).plan(*args)
    assert plan.cost.peak_bytes == larger.peak <= budget


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize(("layers", "batch", "width"), [(5, 6000, 96), (9, 2100, 60)])
def test_the_estimate_of_a_checkpoint_is_near_the_plan_with_it(scan, layers, batch, width):
    made = {}
    for checkpointed in (False, True):
        step, args = training(layers, batch, width, scan, checkpointed)
        f = jshard.shard(step, mesh=on(2, 4), hardware="tpu-v5e", donate_argnums=(0, 1), level=2)
        made[checkpointed] = prepare(f._request, args, {})
    call = made[False]
    life = liveness(call.schedule.assignment.program, call.donated)
    estimate = checkpoint_estimate(call.schedule, life, call.donated)
    assert estimate is not None and estimate.count == layers and estimate.in_loop is scan
    assert estimate.name == "layer"
    real = made[True].plan.cost.peak_bytes
    assert 0.75 * real <= estimate.peak <= 1.3 * real < call.plan.cost.peak_bytes
    again = made[True].schedule
    known = checkpoint_estimate(again, liveness(again.assignment.program, call.donated), call.donated)
    assert known is None or known.peak >= 0.8 * real


@pytest.mark.usefixtures("_nothing_computed_again")
def test_layers_that_are_named_are_named_in_the_advice():
    def step(params, x):
        def loss(params):
            y = x
            for i, p in enumerate(params):
                with jax.named_scope(f"block_{i}"):
                    y = layer(p, y)
            return (y**2).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    params, _, x = DEEP[1]
    error = refused(step, (params, x), 40_000_000)
    assert row(error, r"^jax.checkpoint around block_\* \(4 times\)$").estimated
    assert re.search(r"activations .*block_\*", str(error))


@pytest.mark.parametrize("case", [WIDE, DEEP, training(5, 600, 64, scan=True)])
def test_what_is_held_at_the_peak_adds_up_to_it(case):
    step, args = case
    call = prepare(jshard.shard(step, mesh=on(2, 4), hardware="tpu-v5e")._request, args, {})
    life = liveness(call.schedule.assignment.program)
    held = peak_profile(call.schedule, life).held
    by_kind = dict(call.plan.memory.held)
    for kind in {h.kind for h in held} - {"intermediate values"}:
        assert sum(h.nbytes for h in held if h.kind == kind) == pytest.approx(by_kind[kind])
    assert sum(h.nbytes for h in held) <= peak_bytes(call.schedule, life) * (1 + 1e-9)


def test_no_budget_above_the_chip_is_advised():
    args = (f32(1 << 16, 1 << 16), f32(1 << 16, 1 << 16))
    error = refused(lambda x, y: (x @ y) @ x, args, None, mesh=on(1, 2))
    assert not any("memory_budget=" in r.advice for r in error.remedies)
    assert "memory_budget=" not in str(error)
    assert row(error, "devices: mesh").peak < error.refusal.peak


def test_devices_that_cannot_suffice_are_said_not_to() -> None:
    """A matrix of 1,021 x 8 is cut over eight devices, and over no more: that needs no search."""
    args = (f32(1021, 8), f32(8, 1021))
    least = (
        jshard.shard(lambda x, y: x * y.T, mesh=on(8), hardware="tpu-v5e", level=1)
        .plan(*args)
        .cost.peak_bytes
    )
    error = refused(lambda x, y: x * y.T, args, int(0.9 * least), mesh=on(8), config={"pad": False})
    assert error.proved_least > error.refusal.limit
    advised = row(error, "devices: mesh")
    assert advised.searched and advised.peak > error.refusal.limit
    assert "may fit" not in str(error) and "not enough alone" in str(error)


@pytest.mark.usefixtures("_nothing_computed_again")
def test_a_machine_by_name_grows_by_name():
    step, args = DEEP
    mesh = jshard.topology("v5e:2x4", {"x": 2, "y": 4}, compiles=False)
    free = jshard.shard(step, mesh=mesh, donate_argnums=(0, 1)).plan(*args).cost.peak_bytes
    error = refused(step, args, int(0.55 * free), mesh=mesh, hardware=None, donate_argnums=(0, 1))
    larger = row(error, "devices: ")
    assert larger.advice == "16 devices: topology('v5e:4x4', {'x': 4, 'y': 4})"
    machine = jshard.topology("v5e:4x4", {"x": 4, "y": 4}, compiles=False)
    plan = jshard.shard(step, mesh=machine, donate_argnums=(0, 1)).plan(*args)
    assert plan.cost.peak_bytes == larger.peak <= 0.55 * free


def test_a_batch_that_the_function_refuses_is_no_remedy():
    def fixed(w, x):
        return jnp.tanh(x.reshape(40, 100, 64) @ w) @ w.T

    error = refused(fixed, (f32(64, 512), f32(4000, 64)), "500KB")
    assert not any("batch" in r.advice for r in error.remedies)


@pytest.mark.usefixtures("_nothing_computed_again")
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_batch_of_a_time_major_network_is_its_second_dimension(wrapped):
    """It advised a batch of 15 in place of 30, which were steps of time."""

    def loss(w, x, y):
        def cell(state, x):
            state = jnp.tanh(jnp.concatenate([state, x], -1) @ w)
            return state, state

        run = jax.checkpoint(cell) if wrapped else cell
        start = jnp.zeros((x.shape[1], w.shape[1]))
        return ((jax.lax.scan(run, start, jax.nn.relu(x))[1] - y) ** 2).mean()

    def step(w, x, y):
        gradient = jax.jit(jax.grad(loss))(w, x, y) if wrapped else jax.grad(loss)(w, x, y)
        return w - 0.1 * gradient

    args = f32(256 + 64, 256), f32(30, 96, 64), f32(30, 96, 256)
    free = jshard.shard(step, mesh=on(2), hardware="tpu-v5e", level=1).plan(*args).cost.peak_bytes
    error = refused(step, args, int(0.7 * free), on(2), donate_argnums=0)
    smaller = row(error, "^batch of ")
    size = int(re.findall(r"batch of (\d+) in place of 96 \(dimension 1 of x, y\)", smaller.advice)[0])
    followed = args[0], f32(30, size, 64), f32(30, size, 256)
    options = dict(mesh=on(2), hardware="tpu-v5e", donate_argnums=0, memory_budget=int(0.7 * free))
    plan = jshard.shard(step, **options).plan(*followed)
    assert plan.cost.peak_bytes == smaller.peak <= 0.7 * free


def test_a_captured_array_does_not_shift_which_arguments_are_time_major():
    def outer(start, x):
        def total(x):
            cell, zero = lambda s, x: (jnp.tanh(s + x + start),) * 2, jnp.zeros(x.shape[1:])
            states = jax.lax.scan(cell, zero, x)[1]
            return (states * jnp.exp(states)).sum()

        def gradient(x):
            return jax.grad(total)(x).astype("bfloat16")

        return jshard.shard(gradient, mesh=on(2), hardware="tpu-v5e", memory_budget="900KB")(x)

    with pytest.raises(MemoryBudgetError) as raised:
        jax.jit(outer).lower(f32(), f32(30, 64, 128))
    assert "in place of 64 (dimension 1 of x)" in row(raised.value, "^batch of ").advice


def test_what_takes_too_long_is_not_tried(monkeypatch):
    monkeypatch.setattr(remedies, "_OPERATORS", 0)
    step, args = DEEP
    free = jshard.shard(step, mesh=on(2, 4), hardware="tpu-v5e").plan(*args)
    error = refused(step, args, int(free.cost.peak_bytes * 0.4))
    tried = [r for r in error.remedies if not r.estimated and not r.own_budget]
    assert len(tried) <= 1
    batch = row(error, "^batch of ")
    assert batch.estimated and "about " + format_bytes(batch.peak) in str(error)


def test_recomputation_of_a_large_program_is_estimated_by_its_first_choice(monkeypatch):
    step, args = DEEP
    free = donated(deep=True)
    budget = int(free.cost.peak_bytes * 0.75)
    monkeypatch.setattr(remedies, "_OPERATORS", 0)
    error = refused(step, args, budget, donate_argnums=(0, 1))
    advised = row(error, '^remat="auto"$')
    assert advised.estimated and advised.peak <= budget
    plan = jshard.shard(
        step, mesh=on(2, 4), hardware="tpu-v5e", memory_budget=budget, donate_argnums=(0, 1), remat="auto"
    ).plan(*args)
    assert plan.cost.peak_bytes <= budget and advised.peak == pytest.approx(plan.cost.peak_bytes, rel=0.3)
    assert advised.seconds == pytest.approx(plan.step_seconds, rel=0.3)


def test_the_devices_of_a_large_program_are_estimated_by_a_first_plan_of_little_memory(monkeypatch):
    step, args = DEEP
    free = donated(deep=True)
    monkeypatch.setattr(remedies, "_PADDED_OPERATORS", 0)
    monkeypatch.setattr(early_plans, "LARGE_NETWORK", 50)
    searched, run = [], level_search.LevelSearch.run
    monkeypatch.setattr(
        level_search.LevelSearch, "run", lambda s: searched.append(s.topology.mesh.sizes) or run(s)
    )
    error = refused(step, args, int(free.cost.peak_bytes * 0.3), donate_argnums=(0, 1))
    devices = row(error, r"^\d+ devices: mesh x=")
    sizes = tuple(map(int, re.findall(r"=(\d+)", devices.advice)))
    assert devices.estimated and sizes not in searched
    monkeypatch.undo()
    plan = jshard.shard(step, mesh=on(*sizes), hardware="tpu-v5e", donate_argnums=(0, 1)).plan(*args)
    assert devices.peak == pytest.approx(plan.cost.peak_bytes, rel=0.1)
    assert devices.seconds == pytest.approx(plan.step_seconds, rel=0.1)


def test_the_program_of_a_refused_call_is_built_once_for_all_meshes(monkeypatch):
    built = []
    build = prepare_module.build_program
    monkeypatch.setattr(prepare_module, "build_program", lambda *a, **k: built.append(1) or build(*a, **k))
    step, args = DEEP
    error = refused(step, args, "8MB", donate_argnums=(0, 1))
    devices = row(error, r"^\d+ devices: mesh x=")
    smaller = [r for r in error.remedies if r.advice.startswith("batch of")]
    assert not devices.estimated and len(built) <= 1 + 2 * len(smaller)


def test_a_refusal_names_a_low_peak_though_it_is_proved_that_nothing_fits():
    """It named the peak of the fastest plan where the program had more than a hundred variables."""

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    def step(weights, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

    args = [f32(64, 64)] * 8, f32(128, 64)
    fastest = jshard.shard(step, mesh=on(2, 4), hardware="tpu-v5e").plan(*args).cost.peak_bytes
    error = refused(step, args, 20_000, on(2, 4))
    least, bound = (
        int(re.search(rf"{words} ([\d,]+)", str(error))[1].replace(",", ""))
        for words in ("the least found needs", "none needs less than")
    )
    assert bound <= least < 0.6 * fastest


def test_the_row_of_recomputation_names_the_effort_with_which_one_gets_its_plan(monkeypatch):
    """It was planned without one, which took minutes of some programs of a hundred operators."""
    monkeypatch.setattr(remedies, "_SEARCH_SECONDS", 0.1)
    monkeypatch.setattr(remedies, "REMEDIES", (remedies.recompute,))
    step, args = training(4, 4000, 48)
    free = jshard.shard(step, mesh=on(4), hardware="tpu-v5e", donate_argnums=(0, 1)).plan(*args)
    budget = int(free.cost.peak_bytes * 0.7)
    error = refused(step, args, budget, on(4), donate_argnums=(0, 1))
    advised = row(error, '^remat="auto", config=')
    assert not advised.estimated and advised.peak <= budget
    options = dict(mesh=on(4), hardware="tpu-v5e", memory_budget=budget, donate_argnums=(0, 1))
    followed = jshard.shard(step, **options, **eval(f"dict({advised.advice})")).plan(*args)
    assert followed.cost.peak_bytes == advised.peak and followed.step_seconds == advised.seconds
    own = jshard.shard(step, **options, config={"search_seconds": 0.1})
    found = list(remedies.recompute(remedies.Trials(own._request, args, {}, error.refusal, {})))
    assert found == [dataclasses.replace(advised, advice='remat="auto"')]


def test_remedies_of_a_call_with_recomputation_predict_what_it_does(monkeypatch):
    """Each was searched with all choices of what is computed again, so a refusal of Hyena's step took 89 s."""
    step, args = training(4, 32_000, 64)
    options = dict(hardware="tpu-v5e", donate_argnums=(0, 1), remat="auto", config={"search_seconds": 1})
    free = jshard.shard(step, mesh=on(2, 4), **options).plan(*args).cost.peak_bytes
    requests = []
    tried = remedies.Trials.tried
    monkeypatch.setattr(
        remedies.Trials, "tried", lambda s, r, *a: requests.append(r.options.remat) or tried(s, r, *a)
    )
    budget = int(free * 0.4)
    error = refused(step, args, budget, **options)
    assert requests and not any(requests)
    devices = row(error, r"^\d+ devices: mesh x=")
    assert devices.estimated and devices.peak <= budget
    sizes = tuple(map(int, re.findall(r"=(\d+)", devices.advice)))
    followed = jshard.shard(step, mesh=on(*sizes), memory_budget=budget, **options).plan(*args)
    assert followed.kept is not None and followed.cost.peak_bytes <= budget
    assert devices.peak == pytest.approx(followed.cost.peak_bytes, rel=0.3)
    assert devices.seconds == pytest.approx(followed.step_seconds, rel=0.3)


def test_the_peak_that_a_refusal_names_is_near_the_least_though_it_is_proved_that_nothing_fits(monkeypatch):
    """Of a mapped Kalman filter it named 3.3 times the peak that level 1 finds."""

    def loss(p, y):
        q, s = jnp.diag(jnp.exp(p["q"])), jnp.diag(jnp.exp(p["s"]))

        def update(carry, y):
            x, cov = p["f"] @ carry[0], p["f"] @ carry[1] @ p["f"].T + q
            e, lower = y - p["h"] @ x, jnp.linalg.cholesky(p["h"] @ cov @ p["h"].T + s)
            z = jax.scipy.linalg.solve_triangular(lower, e, lower=True)
            gain = cov @ p["h"].T
            return (x + gain @ e, cov - gain @ gain.T), 0.5 * z @ z + jnp.log(jnp.diag(lower)).sum()

        start = jnp.zeros(6), jnp.eye(6)
        return jax.lax.scan(update, start, y)[1].sum()

    def step(p, ys):
        grads = jax.grad(lambda p: jax.vmap(loss, (None, 0))(p, ys).mean())(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads)

    monkeypatch.setattr(remedies, "REMEDIES", ())
    args = {"f": f32(6, 6), "h": f32(3, 6), "q": f32(6), "s": f32(3)}, f32(40, 15, 3)
    least = jshard.shard(step, mesh=on(2, 4), hardware="tpu-v5e", level=1).plan(*args).cost.peak_bytes
    error = refused(step, args, int(0.85 * least))
    assert error.proved_least > 0.85 * least and error.least_found < 1.1 * least


@pytest.mark.parametrize(
    ("free", "searched", "expected"),
    [
        (90.0, None, ("donate_argnums=(0,)", 90.0, False)),  # what donating alone gives
        (150.0, 95.0, ("donate_argnums=(0,), for a second", 95.0, False)),
        (110.0, None, ("donate_argnums=(0,)", 110.0, False)),
        (150.0, None, ("donate_argnums=(0,)", 115.0, True)),  # of the refused plan, by an estimate
    ],
)
@pytest.mark.parametrize("may_search", [True, False])
def test_donation_is_advised_though_the_plan_of_least_time_holds_more(free, searched, expected, may_search):
    """A step of a mixture of experts with Adam fits a budget of 130,000 bytes donated, where 168,200 are needed else."""
    x = jax.ShapeDtypeStruct((8,), "float32")
    found = remedies.Remedy("donate_argnums=(0,), for a second", searched or 0.0, 1.0)
    trials = SimpleNamespace(
        request=SimpleNamespace(
            fn=lambda x: x + 1, call=CallOptions(donate_argnums=()), statics=((), ()), options=None
        ),
        args=(x,),
        kwargs={},
        refusal=SimpleNamespace(peak=120.0, peak_if_donated=115.0, limit=100.0, step_seconds=1.0),
        plan=lambda advice, call: remedies.Remedy(advice, free, 1.0, searched=False),
        searched=lambda advice, options, call: found if searched else None,
        may_search=may_search,
    )
    (row,) = remedies.donate(trials)
    if may_search or not searched:
        assert (row.advice, row.peak, row.estimated) == expected
    # "may fit, not searched" is not said of what a search was made for.
    assert row.peak <= 100.0 or row.searched == may_search
