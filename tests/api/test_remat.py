"""`remat=` of `shard`: it acts where the budget needs it, runs, is saved and read, and keeps callbacks."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jshard
from jshard._api import plan_recomputed, remedies
from jshard._core import hardware
from jshard._core.errors import MemoryBudgetError
from jshard._plan.memory_refusal import MemoryRefusal, with_other_bound
from jshard._plan.recompute_search import RecomputeSearch, Trial
from jshard._plan.request import ENOUGH
from jshard._search.effort import ENTRIES_PER_SECOND
from tests.program.test_recompute import LOSSES, step_of


pytestmark = pytest.mark.one_pair


OPTIONS: Any = dict(level=2, hardware="v5e", in_strategy=(None, (4, 1)))
W, X = np.zeros((3, 32, 96), "float32"), np.zeros((2048, 32), "float32")


def mesh() -> Any:
    return jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])


def sharded(name: str, **options: Any) -> Any:
    return jshard.shard(step_of(LOSSES[name]), mesh=mesh(), **OPTIONS, **options)


@functools.cache
def free_plan(name: str) -> jshard.Plan:
    return sharded(name, memory_budget="1TB").plan(W, X)


def free_peak(name: str) -> float:
    return free_plan(name).cost.peak_bytes


def test_nothing_is_computed_again_where_the_budget_does_not_need_it() -> None:
    plain = free_plan("scanned")
    auto = sharded("scanned", memory_budget="1TB", remat="auto").plan(W, X)
    assert auto == plain and auto.kept is None
    assert sharded("scanned", remat="auto", memory_budget="1TB").plan(W, X).memory_budget == 1e12


@pytest.mark.parametrize("name", ["scanned", "unrolled", "dropout"])
def test_a_budget_that_nothing_else_meets_is_met_and_the_numbers_are_equal(
    name: str, monkeypatch: Any
) -> None:
    limit = int(0.6 * free_peak(name))
    monkeypatch.setattr(remedies, "REMEDIES", ())  # `remat="auto"` is planned below
    with pytest.raises(jshard.ShardError, match="no plan fits"):
        sharded(name, memory_budget=limit).plan(W, X)
    f = sharded(name, memory_budget=limit, remat="auto")
    plan = f.plan(W, X)
    assert plan.kept is not None and plan.cost.peak_bytes <= limit == plan.memory_budget
    assert any(step.startswith("remat: computed again") for step in plan.steps)
    assert plan.cost.bound <= plan.cost.objective and "choices of what is kept" in plan.cost.space
    rng = np.random.default_rng(1)
    w, x = rng.normal(size=W.shape).astype("float32") / 6, rng.normal(size=X.shape).astype("float32")
    for got, want in zip(f(w, x), jax.jit(step_of(LOSSES[name]))(w, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("name", "share"), [("scanned", 0.3), ("unrolled", 0.6)])
def test_products_that_are_computed_again_are_no_model_flops(name: str, share: float) -> None:
    free = free_plan(name)
    limit = int(share * free.cost.peak_bytes)
    again = sharded(name, memory_budget=limit, remat="auto").plan(W, X)
    assert again.model_flops.recomputed > 0
    assert again.model_flops.flops == free.model_flops.flops
    assert again.mfu == pytest.approx(free.model_flops.peak_seconds / again.step_seconds)


def test_a_plan_is_saved_and_used_again(tmp_path: Any) -> None:
    limit = int(0.6 * free_peak("scanned"))
    plan = sharded("scanned", memory_budget=limit, remat="auto").plan(W, X)
    plan.save(tmp_path / "plan.json")
    read = jshard.Plan.load(tmp_path / "plan.json")
    assert read == plan and read.kept == plan.kept
    again = sharded("scanned", plan=read).plan(W, X)
    assert again.kept == plan.kept and again.cost.peak_bytes == plan.cost.peak_bytes
    with pytest.raises(jshard.ShardError, match="of another program"):
        jshard.shard(step_of(LOSSES["branches"]), mesh=mesh(), plan=read).plan(W, X)


def test_the_policy_names_what_to_save() -> None:
    limit = int(0.6 * free_peak("scanned"))
    steps = sharded("scanned", memory_budget=limit, remat="policy").plan(W, X).steps
    (line,) = [s for s in steps if s.startswith("jax.checkpoint policy")]
    assert "save_only_these_names" in line or "jax.checkpoint(layer)" in line
    (line,) = [
        s for s in sharded("scanned", memory_budget="1TB", remat="policy").plan(W, X).steps if "policy" in s
    ]
    assert line == "jax.checkpoint policy: none needed, nothing is computed again"


def test_results_of_callbacks_are_kept_and_named() -> None:
    shape = jax.ShapeDtypeStruct((2048, 96), "float32")

    def loss(w: Any, x: Any) -> Any:
        for v in w:
            y = x @ v
            scale = jax.pure_callback(np.cos, shape, jax.lax.stop_gradient(y), vmap_method="sequential")
            x = x + (jnp.tanh(y) * scale) @ v.T
        return (x**2).sum()

    def plan(**options: Any) -> jshard.Plan:
        return jshard.shard(step_of(loss), mesh=mesh(), **OPTIONS, **options).plan(W, X)

    free = plan(memory_budget="1TB").cost.peak_bytes
    steps = plan(memory_budget=int(0.93 * free), remat="auto").steps
    assert any(s.startswith("remat: never run twice") and "pure_callback" in s for s in steps), steps


def test_wrong_values_say_what_to_write() -> None:
    with pytest.raises(jshard.ShardError, match="remat='full' is not known"):
        jshard.shard(step_of(LOSSES["scanned"]), remat="full")
    with pytest.raises(jshard.ShardError, match="remat is a bool, True"):
        jshard.shard(step_of(LOSSES["scanned"]), remat=True)  # type: ignore[arg-type]


def test_a_budget_below_the_arguments_is_refused() -> None:
    with pytest.raises(
        jshard.MemoryBudgetError if hasattr(jshard, "MemoryBudgetError") else jshard.ShardError
    ):
        sharded("scanned", memory_budget=1000, remat="auto").plan(W, X)


@jax.custom_jvp
def softcap(x: Any) -> Any:
    return jnp.tanh(x / 5) * 5


softcap.defjvp(
    lambda primals, tangents: (softcap(*primals), (1 - jnp.tanh(primals[0] / 5) ** 2) * tangents[0])
)


def mixed_loss(ws: Any, x: Any) -> Any:
    """Half precision in a loop of loops with dropout, a custom derivative, and one product in full precision."""

    def inner(carry: Any, w: Any) -> Any:
        y, key = carry
        key, use = jax.random.split(key)
        hidden = softcap((y @ w.astype(y.dtype)).astype("float32"))
        hidden = jnp.where(jax.random.bernoulli(use, 0.75, hidden.shape), hidden, 0).astype(y.dtype)
        return (y + hidden @ w.T.astype(y.dtype), key), None

    def outer(carry: Any, w: Any) -> Any:
        carry, _ = jax.lax.scan(inner, carry, w)
        return carry, carry[0].astype("float32").mean()

    groups = ws.reshape(2, 2, *ws.shape[1:])
    (y, _), means = jax.lax.scan(outer, (x.astype("bfloat16"), jax.random.key(5)), groups)
    return (y.astype("float32") ** 2).mean() + means.sum()


def test_mixed_types_and_random_bits_on_two_axes() -> None:
    rows = 1030
    grid = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    rng = np.random.default_rng(rows)
    w = (rng.normal(size=(4, 24, 40)) / 6).astype("float32")
    x = rng.normal(size=(rows, 24)).astype("float32")
    options: Any = dict(mesh=grid, level=2, hardware="v5e")
    step = step_of(mixed_loss)
    free = jshard.shard(step, memory_budget="1TB", **options).plan(w, x).cost.peak_bytes
    f = jshard.shard(
        step, memory_budget=int(0.97 * free), remat="auto", config={"search_seconds": 1}, **options
    )
    plan = f.plan(w, x)
    assert plan.kept is not None and plan.cost.peak_bytes <= 0.97 * free
    for got, want in zip(f(w, x), jax.jit(step)(w, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2)


def actor_and_critic(params: Any, observed: Any, rewards: Any) -> Any:
    """Three steps of gradient descent, in a loop, on a policy whose advantages are summed backwards in time."""

    def loss(p: Any) -> Any:
        hidden = jnp.tanh(observed @ p["in"])
        value = (hidden @ p["value"])[..., 0]
        delta = rewards + 0.99 * jnp.roll(value, -1, 0) - value
        _, advantage = jax.lax.scan(
            lambda c, d: (d + 0.9 * c,) * 2, jnp.zeros(rewards.shape[1]), delta, reverse=True
        )
        chosen = jax.nn.log_softmax(hidden @ p["policy"])[..., 0]
        return (value**2).mean() - (chosen * jax.lax.stop_gradient(advantage)).mean()

    def update(_: Any, p: Any) -> Any:
        return jax.tree.map(lambda a, g: a - 0.01 * g, p, jax.grad(loss)(p))

    return jax.lax.fori_loop(0, 3, update, params)


def test_other_layouts_of_the_program_as_traced_are_compared() -> None:
    """A budget that layouts alone meet cheaply: recomputation was planned in its place, at three times the cost."""
    params = {"in": np.zeros((12, 32)), "policy": np.zeros((32, 6)), "value": np.zeros((32, 1))}
    args = params, np.zeros((16, 8, 12)), np.zeros((16, 8))
    grid = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
    options: Any = dict(mesh=grid, hardware="v5e", config={"search_seconds": 1})
    free = jshard.shard(actor_and_critic, **options).plan(*args)
    options["memory_budget"] = int(0.9 * free.cost.peak_bytes)
    layouts = jshard.shard(actor_and_critic, **options).plan(*args)
    again = jshard.shard(actor_and_critic, remat="auto", **options).plan(*args)
    assert again.cost.objective <= layouts.cost.objective * 1.01
    assert again.cost.peak_bytes <= options["memory_budget"]


def recurrent(params: Any, x: Any, y: Any) -> Any:
    """Gradient descent on a recurrent network whose states are read after its loop: its residuals are in memory anyway."""

    def loss(params: Any) -> Any:
        embedded = jnp.tanh(x @ params["in"])

        def cell(h: Any, e: Any) -> Any:
            h = jnp.tanh(jnp.concatenate([h, e], -1) @ params["cell"])
            return h, h

        start = jnp.zeros((x.shape[1], params["out"].shape[0]), x.dtype)
        states = jax.lax.scan(cell, start, embedded)[1]
        logits = states @ params["out"]

        def forward(a: Any, row: Any) -> Any:
            return jax.nn.logsumexp(a[:, :, None] + params["moves"], 1) + row, None

        last, _ = jax.lax.scan(forward, logits[0], logits[1:])
        return jax.nn.logsumexp(last, -1).mean() - jnp.take_along_axis(logits, y[..., None], -1).sum(0).mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def test_residuals_that_are_results_of_the_loop_as_well() -> None:
    """Between what keeps all and the choice that fits they are no difference: it raised `KeyError`."""
    rng = np.random.default_rng(3)
    with jax.enable_x64(True):
        shapes = {"in": (10, 12), "cell": (24, 12), "out": (12, 6), "moves": (6, 6)}
        params = {name: jnp.asarray(rng.normal(size=s) / 4) for name, s in shapes.items()}
        args = params, jnp.asarray(rng.normal(size=(9, 64, 10))), jnp.asarray(rng.integers(0, 6, (9, 64)))
        options: Any = dict(mesh=mesh(), hardware="v5e")
        free = jshard.shard(recurrent, **options).plan(*args).cost.peak_bytes
        f = jshard.shard(recurrent, memory_budget=int(0.85 * free), remat="auto", **options)
        plan, want = f.plan(*args), jax.jit(recurrent)(*args)
        assert plan.kept is not None and plan.cost.peak_bytes <= 0.85 * free
        for got, expected in zip(jax.tree.leaves(f(*args)), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.jit])
def test_a_loop_that_returns_its_slices_as_they_are(wrap: Any) -> None:
    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.sin(jnp.tanh(x @ w))
        return x + jnp.where(h > 0, h, jnp.zeros((64, 64))) @ w, w

    def loss(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, same = jax.lax.scan(wrap(body), x, w)
        return (y**2).mean(), same

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        (value, same), g = jax.value_and_grad(loss, has_aux=True)(w, x)
        return same - 0.1 * g, value

    w, x = jax.random.normal(jax.random.key(0), (5, 64, 64)) / 8, jnp.eye(64) / 2
    options: Any = dict(mesh=mesh(), hardware="v5e", config={"search_seconds": 1})
    free = jshard.shard(step, **options).plan(w, x).cost.peak_bytes
    f = jshard.shard(step, memory_budget=int(0.75 * free), remat="auto", **options)
    assert f.plan(w, x).cost.peak_bytes <= 0.75 * free
    for a, b in zip(f(w, x), jax.jit(step)(w, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("bound", "seconds", "again"), [(0.0, 3.0, True), (float("inf"), 3.0, False), (0.0, None, False)]
)
def test_before_a_refusal_the_traced_program_has_the_effort_of_a_call_without_remat(bound, seconds, again):
    """A step of speculative decoding was refused with `remat="auto"`, in a budget that it kept without.

    Not where it is proved that it cannot fit (`bound`), or where every search had as much as it takes.
    """
    refusal = MemoryBudgetError("no plan fits", where="there", fix="more", least_found=9.0)
    search = RecomputeSearch(None, None, None, 1.0, seconds)
    search.refusal, search.planned = refusal, {(None, True): SimpleNamespace(bound=bound)}
    efforts = []

    def plan_jaxpr(jaxpr, limited, most, effort):
        assert jaxpr is None and limited and most == float("inf")
        efforts.append(effort.limit / ENTRIES_PER_SECOND)
        return "plan"

    if again:
        assert plan_recomputed._original_within_budget(search, plan_jaxpr, seconds) == "plan"
        assert efforts == [seconds]
    else:
        with pytest.raises(MemoryBudgetError) as caught:
            plan_recomputed._original_within_budget(search, plan_jaxpr, seconds)
        assert caught.value is refusal and not efforts


def test_what_is_proved_of_one_choice_is_not_said_of_all(monkeypatch: Any) -> None:
    """A refusal said "none needs less than 30,728" of a budget that another effort keeps with a plan of 27,136."""
    monkeypatch.setattr(remedies, "REMEDIES", ())
    args = jnp.ones((64, 64)), jnp.ones((8, 64))
    with pytest.raises(MemoryBudgetError) as caught:
        jshard.shard(lambda w, x: jnp.tanh(x @ w), mesh=mesh(), hardware="v5e", memory_budget=6000).plan(
            *args
        )
    refused = caught.value
    assert (
        isinstance(refused.refusal, MemoryRefusal) and refused.proved_least > refused.refusal.argument_bytes
    )

    def plan_of(choice: Any, limited: bool, most: float, effort: Any) -> Any:
        raise with_other_bound(refused, {None: 120e3, "first": 90e3, "second": 150e3}[choice])

    search: Any = RecomputeSearch(None, plan_of, lambda planned: planned, 6000.0)  # type: ignore[arg-type]
    search.trials.append(Trial(None, object(), 1.0, 0.0, 1e6))
    for choice in (None, "first", "second"):
        search.plan(choice, limited=True)
        assert search.proved_least == 0.0  # others were not planned
    search.complete = True
    assert search.proved_least == 90e3
    of_all = with_other_bound(search.refusal, search.proved_least)
    assert of_all.proved_least == 90e3 and of_all.least_found == refused.least_found
    of_some = with_other_bound(search.refusal, 0.0)
    assert of_some.proved_least == refused.refusal.argument_bytes
    assert f"none needs less than {of_some.proved_least:,.0f}" in of_some.what


@pytest.mark.parametrize(("trial", "limit"), [(True, 1.0), (False, ENOUGH)])
def test_the_trial_of_a_refusal_ends_with_its_effort(trial: bool, limit: float) -> None:
    """A row `remat="auto"` took 33 of the 48 CPU s of a refusal, though a second of search was given."""
    planned = SimpleNamespace(
        cost=SimpleNamespace(objective=1.0, bound=0.5, peak_bytes=9.0), level=0, operators=()
    )
    search: Any = RecomputeSearch(None, None, lambda p: p, 5.0, 1.0, traced_is_refused=trial)  # type: ignore[arg-type]
    search.trials.append(Trial(None, planned, 1.0, 0.5, 9.0))
    search.planned[None, False] = search.trials[0]
    search._effort.spend(0.99 * limit * ENTRIES_PER_SECOND)
    assert not search._is_spent
    search._effort.spend(0.02 * limit * ENTRIES_PER_SECOND)
    assert search._is_spent
    assert search._is_settled(None) == search.traced_is_settled == trial != search._traced_may_fit()


def test_the_trial_of_a_refusal_does_not_plan_a_program_again_that_keeps_nothing() -> None:
    """What reads no value late has nothing to compute again: the call that was refused is all that there is."""

    def plan_jaxpr(*_: Any) -> Any:
        raise AssertionError("planned again")

    closed = jax.make_jaxpr(lambda x: x + 1)(jnp.ones(8))
    with pytest.raises(MemoryBudgetError) as caught:
        plan_recomputed.plan_recomputed(
            closed, plan_jaxpr, lambda call: call, hardware.get("tpu-v5e"), 100.0, (), None, 1.0, True
        )
    assert str(caught.value) == (
        "no plan fits 100 bytes a device, whatever is computed again of what was tried\n"
        "  where: memory_budget with remat=\n"
        "  write instead: a larger memory_budget=, or more devices"
    )
