"""The vectorised schedule equals the reference: reshardings, peak, curve, values alive at the peak."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from jshard._core.layout import Layout
from jshard._plan import scheduled_solution
from jshard._plan.live_range_splits import after_products
from jshard._program.memory.liveness import liveness
from jshard._schedule import peak
from jshard._schedule.schedule import Reshard, RunCall, RunOperator, Schedule, schedule
from tests.helpers.memory_networks import every_read, with_every_live_range_split


def mlp(params: Any, x: Any) -> Any:
    for w, b in params:
        x = jax.nn.gelu(x @ w + b)
    return jnp.exp(x - x.max(-1, keepdims=True)).sum()


def attention(params: Any, x: Any) -> Any:
    q, k, v = (x @ w for w in params)
    weights = jax.nn.softmax((q @ k.T).astype(jnp.float32) / 8.0)
    return (weights.astype(x.dtype) @ v).T, weights.max(), x


def step(params: Any, x: Any) -> Any:
    loss, grads = jax.value_and_grad(mlp)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g / (1e-8 + jnp.abs(g)), params, grads), loss


def constant(x: Any) -> Any:
    table = jnp.arange(512.0 * 8).reshape(512, 8) + np.ones((512, 8), "float32")
    return jnp.sin(x @ table) @ table.T, jnp.fft.fft(x).real, jnp.sort(x, axis=0)


def residual(ws: Any, x: Any) -> Any:
    for a, b in ws:
        x = x + jax.nn.gelu(x @ a) @ b
    return (x * x).mean()


def descent(ws: Any, x: Any) -> Any:
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(residual)(ws, x))


def convolutions(ws: Any, x: Any) -> Any:
    def loss(ws: Any) -> Any:
        y = x
        for w in ws:
            y = jnp.tanh(
                jax.lax.conv_general_dilated(y, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            )
        return (y * y).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws))


W = [(jax.ShapeDtypeStruct((512, 512), "float32"), jax.ShapeDtypeStruct((512,), "float32"))] * 3
H = [jax.ShapeDtypeStruct((256, 256), "bfloat16")] * 3
CASES: dict[str, tuple[Callable, tuple]] = {
    "mlp": (mlp, (W, jax.ShapeDtypeStruct((4096, 512), "float32"))),
    "step": (step, (W, jax.ShapeDtypeStruct((4096, 512), "float32"))),
    "attention": (attention, (H, jax.ShapeDtypeStruct((1024, 256), "bfloat16"))),
    "convolutions": (
        convolutions,
        (
            [jax.ShapeDtypeStruct((3, 3, 8, 8), "float32")] * 3,
            jax.ShapeDtypeStruct((1, 1024, 1024, 8), "float32"),
        ),
    ),
    "constant": (constant, (jax.ShapeDtypeStruct((256, 512), "float32"),)),
}
MESH = jax.sharding.AbstractMesh((2, 4), ("x", "y"))


def choices_of(monkeypatch: pytest.MonkeyPatch, fn: Callable, args: tuple, **options: Any) -> list[Schedule]:
    """The schedules that planning makes."""
    seen: list[Schedule] = []

    def spy(choice: Any) -> Schedule:
        seen.append(schedule(choice))
        return seen[-1]

    monkeypatch.setattr(scheduled_solution, "schedule", spy)
    jshard.shard(fn, mesh=MESH, hardware="tpu-v5p", **options).plan(*args)
    assert seen
    return seen


def scattered(made: Schedule, seed: int) -> Schedule:
    """The schedule of other relays and states than were chosen: each tensor is kept as some state has it."""
    rng = np.random.default_rng(seed)
    choice = made.assignment
    some = {t: (lay.without_partial(), Layout.replicated(len(lay.dims))) for t, lay in choice.relay.items()}
    kept = {t: pair[rng.integers(2)] for t, pair in some.items() if rng.random() < 0.8}
    state = [
        int(rng.integers(len(s)))
        if s.op is not None and all(not lay.partial for c in (*s.operands, *s.results) for lay in c.layouts)
        else k
        for s, k in zip(choice.states, choice.state, strict=True)
    ]
    return schedule(dataclasses.replace(choice, relay=kept, state=tuple(state)))


def check(made: Schedule, donated: tuple[int, ...]) -> None:
    found, program = made.arrays, made.assignment.program
    assert found is not None
    assert not any(isinstance(x, RunCall) for x in made.actions)
    assert len(made.actions) == found.num_actions
    moves = [(k, x) for k, x in enumerate(made.actions) if isinstance(x, Reshard)]
    assert [k for k, _ in moves] == found.reshard_at.tolist()
    for m, (_, x) in enumerate(moves):
        assert (x.tensor, x.source) == (found.tensor[m], found.layouts[found.source[m]])
        assert (x.target, x.reader) == (found.layouts[found.target[m]], found.reader[m])
        assert x.steps == found.paths[found.path[m]]
    for k, x in enumerate(made.actions):
        if isinstance(x, RunOperator):
            assert found.run_at[x.op] == k
    written = made._written.communicating
    assert [dataclasses.astuple(x) for x in made.communicating] == [dataclasses.astuple(x) for x in written]
    life = liveness(program, donated)
    assert peak.peak_profile(made, life, donated) == peak.peak_reference(made, life, donated)
    assert peak.peak_bytes(made, life, donated) == peak.peak_reference(made, life, donated).peak


@pytest.mark.parametrize("name", CASES)
def test_arrays_say_what_objects_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, args = CASES[name]
    for made in choices_of(monkeypatch, fn, args):
        for donated in ((), tuple(range(len(made.assignment.program.inputs)))):
            check(made, donated)


@pytest.mark.parametrize("seed", range(6))
def test_arrays_say_what_objects_say_of_bad_choices_too(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, args = CASES["step" if seed % 2 else "attention"]
    made = scattered(choices_of(monkeypatch, fn, args)[0], seed)
    assert len(made.communicating) > 6
    check(made, (0, 2))


@pytest.mark.parametrize("seed", range(6))
def test_moved_again_arrays_say_what_objects_say(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, args = CASES["step"]
    held = scattered(choices_of(monkeypatch, fn, args)[0], seed)
    reads = sorted(every_read(held.assignment.program))
    some = np.random.default_rng(seed).random(len(reads)) < 0.5
    for pairs in (reads, [pair for pair, taken in zip(reads, some, strict=True) if taken]):
        again = schedule(dataclasses.replace(held.assignment, regather=frozenset(pairs)))
        check(again, ())
        assert again.arrays is not None and held.arrays is not None
        remade = np.flatnonzero(again.arrays.regathered)
        after = after_products(again.arrays, liveness(held.assignment.program), remade)
        check(schedule(dataclasses.replace(again.assignment, regather_after=after)), (0, 2))
        # A copy is made once, and again only for a reader that has it so.
        moves = {
            made: [(x.tensor, x.target) for x in made.actions if isinstance(x, Reshard)]
            for made in (held, again)
        }
        assert max(map(moves[held].count, moves[held])) == 1 and not held.arrays.regathered.any()
        if pairs is reads:
            assert again.arrays.regathered.any() and len(moves[again]) > len(set(moves[again]))
        for x in again.actions:
            assert not isinstance(x, Reshard) or not x.regathered or (x.tensor, x.reader) in pairs


def test_least_memory_moves_again() -> None:
    """Fully sharded weights: gathered for the forward pass, let go, gathered again for the backward pass."""

    ws = [(jax.ShapeDtypeStruct((1024, 4096), "float32"), jax.ShapeDtypeStruct((4096, 1024), "float32"))] * 2
    x = jax.ShapeDtypeStruct((4096, 1024), "float32")
    mesh = jax.sharding.AbstractMesh((8,), ("x",))
    cut = [((8, 1), (8, 1))] * 2

    def planned(**options: Any) -> Any:
        strategy = {"in_strategy": (cut, (8, 1)), "out_strategy": cut, "mesh": mesh, "donate_argnums": (0,)}
        f = jshard.shard(descent, hardware="tpu-v5e", **strategy, **options)
        return f.plan(ws, x)

    free, tight = planned(level=2), planned(level=1)
    assert tight.cost.peak_bytes < free.cost.peak_bytes
    for plan in (free, tight):
        again = jshard.Plan.from_json(plan.to_json())
        assert again == plan and again.decision.regather == plan.decision.regather
    assert tight.decision.regather
    names = [c.tensor for c in tight.collectives if c.kind == "all_gather"]
    assert names and max(map(names.count, names)) == 2


def test_what_has_inner_blocks_is_written_as_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    def looped(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (c @ c, c.sum()), x, None, length=3)

    (made, *_) = choices_of(monkeypatch, looped, (jax.ShapeDtypeStruct((64, 64), "float32"),))
    assert made.arrays is None and any(isinstance(x, RunCall) for x in made.actions)


def test_a_plan_without_inner_blocks_writes_no_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    fn, args = CASES["step"]
    (made, *_) = choices_of(monkeypatch, fn, args)
    assert "_written" not in vars(made)


def test_what_is_moved_again_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, with everything that the backward pass can move again moved again."""
    with_every_live_range_split(monkeypatch)

    rng = np.random.default_rng(0)
    ws = [tuple(jnp.array(rng.normal(size=s) / 8, "float32") for s in ((64, 256), (256, 64)))] * 2
    x = jnp.array(rng.normal(size=(512, 64)), "float32")
    mesh, cut = jax.make_mesh((8,), ("x",)), [((8, 1), (8, 1))] * 2
    f = jshard.shard(
        descent, in_strategy=(cut, (8, 1)), out_strategy=cut, mesh=mesh, hardware="tpu-v5e", level=1
    )
    plan = f.plan(ws, x)
    assert plan.decision.regather and plan.decision.regather_after
    for got, want in zip(jax.tree.leaves(f(ws, x)), jax.tree.leaves(jax.jit(descent)(ws, x)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
