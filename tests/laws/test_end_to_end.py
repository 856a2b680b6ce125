"""Sharded equals unsharded in values and gradients, over the constructs of JAX; and the first acceptance cases."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jshard
from jshard._verify.replica_groups import read_groups
from tests.helpers.models import dense_relu, dense_relu_inputs, ffn, ffn_inputs


def mesh(*sizes: int, kind: AxisType = AxisType.Auto) -> Mesh:
    """The first devices as a grid with axes x, y, z."""
    count = int(np.prod(sizes))
    return jax.make_mesh(
        sizes, tuple("xyz"[: len(sizes)]), axis_types=(kind,) * len(sizes), devices=jax.devices()[:count]
    )


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) / shape[0] ** 0.5, jnp.float32)


X, W = normal(16, 8), normal(8, 8, seed=1)


def collectives(compiled: jax.stages.Compiled) -> list[tuple[str, str, int]]:
    """(kind, result type, devices in a group) of every collective in the compiled text."""
    found = re.findall(
        r"= \(?(\w+\[[\d,]*\])\S* (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?"
        r"\(.*?replica_groups=(\{\{.*?\}\}|\[\S+|mesh\[.*?\] \{.*?\}),? ",
        compiled.as_text() or "",
    )
    return [(kind, result, len(read_groups(groups.rstrip(","), 8)[0])) for result, kind, groups in found]


def equal(a: Any, b: Any) -> None:
    chex.assert_trees_all_close(a, b, rtol=2e-5, atol=2e-5)


# --- the tutorial's networks


def test_dense_relu_is_one_all_reduce_of_the_local_block():
    args = dense_relu_inputs()
    f = jshard.shard(dense_relu, in_strategy=((4, 2), None, None), mesh=mesh(8))
    compiled = f.lower(*args).compile()
    assert collectives(compiled) == [("all-reduce", "f32[8,10]", 2)]
    chex.assert_trees_all_close(f(*args), dense_relu(*args), rtol=1e-6, atol=1e-6)


def pinned_ffn(x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
    first = jshard.op(lambda x, w: x @ w, in_strategy=((2, 1), (1, 4)))
    return jax.nn.relu(first(x, w1) + b1) @ w2 + b2


def test_pinned_ffn_by_propagation_is_the_answer_of_the_tutorial():
    args = ffn_inputs()
    f = jshard.shard(pinned_ffn, mesh=mesh(8), search="propagation")
    rows = [r for r in f.plan(*args).operators if r.primitive in ("dot_general", "add", "max")]
    assert [r.strategy[0] for r in rows] == [(2, 1), (2, 4), (2, 4), (2, 4), (2, 1)]
    assert [r.strategy[1] for r in rows if r.primitive == "dot_general"] == [(1, 4), (4, 1)]
    assert collectives(f.lower(*args).compile()) == [("all-reduce", "f32[32,64]", 4)]
    equal(f(*args), ffn(*args))


def test_pinned_ffn_by_optimal_receives_less_than_the_all_reduce():
    args = ffn_inputs()
    f = jshard.shard(pinned_ffn, mesh=mesh(8))
    plan = f.plan(*args)
    assert plan.cost.optimal
    assert sum(plan.bytes_by_kind.values()) < 2 * 32 * 64 * 4 * 3 / 4  # the all-reduce of the answer above
    equal(f(*args), ffn(*args))


def test_cuts_pinned_together_are_placed_together():
    args = ffn_inputs()
    f = jshard.shard(ffn, {"x": (2, 1)}, parameter_plan={"w1": (1, 4), "w2": (4, 1)}, mesh=mesh(8))
    assert collectives(f.lower(*args).compile()) == [("all-reduce", "f32[32,64]", 4)]
    assert f.plan(*args).cost.optimal
    equal(f(*args), ffn(*args))


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 8, 12, 16])
@pytest.mark.parametrize("sizes", [(48, 84), (10, 7)], ids=str)
def test_any_number_of_devices(count, sizes):
    batch, hidden = sizes
    args = (
        normal(batch, 8),
        normal(8, hidden, seed=1),
        normal(hidden),
        normal(hidden, 8, seed=2),
        normal(8, seed=3),
    )
    f = jshard.shard(ffn, mesh=mesh(count))
    plan = f.plan(*args)
    assert plan.cost.optimal
    if batch % count == 0:  # rows of the batch are shared for nothing
        assert not plan.collectives
    equal(f(*args), ffn(*args))


# --- the laws: every program, its value and gradients, as if it were not sharded

clip_gradient = jax.custom_vjp(lambda x, w: x @ w)
clip_gradient.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda r, g: (jnp.clip(g, -0.1, 0.1) @ r[1].T, r[0].T @ jnp.clip(g, -0.1, 0.1)),
)


@jax.custom_jvp
def triple_slope(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


@triple_slope.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return jnp.sin(primals[0]), 3.0 * tangents[0]


def scanned(x: Any, ws: Any) -> Any:
    return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), x, ws)


def nested_scan(x: Any, ws: Any) -> Any:
    def outer(c: Any, w: Any) -> Any:
        c, _ = jax.lax.scan(lambda d, _: (jnp.tanh(d @ w), None), c, None, length=2)
        return c, c.max()

    return jax.lax.scan(outer, x, ws, reverse=True)


def branched(x: Any, w: Any) -> Any:
    return jax.lax.cond(x.sum() > 0, lambda x: jnp.sin(x @ w), lambda x: x @ w + 1, x)


def counted(x: Any, w: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ w) + i, x)


def rematerialised(x: Any, w: Any) -> Any:
    block = jax.checkpoint(lambda x, w: jnp.tanh(x @ w) @ w.T)
    saving = jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable)
    return saving(block(x, w), w)


def per_row(x: Any, w: Any) -> Any:
    return jax.vmap(lambda row: jax.nn.softmax(row @ w))(x)


def pinned_inside(x: Any, w: Any) -> Any:
    return jnp.tanh(jshard.op(lambda x, w: x @ w, ((2, 1), (1, 4)), out_strategy=(8, 1))(x, w))


def tree(p: Any, x: Any) -> Any:
    return {"y": x @ p["w"] + p["b"][0], "z": (p["b"][1], x.sum())}


def inner_jit(x: Any, w: Any) -> Any:
    g = jax.jit(lambda x: jnp.tanh(x @ w))
    return g(x) + g(2 * x)


def shapes(x: Any) -> Any:
    return x.reshape(-1), x[::2], x[:, None], x.T, x.astype(jnp.bfloat16), jnp.pad(x, 1), x[3], jnp.flip(x, 0)


PARAMS = {"w": W, "b": [normal(8), normal(4, seed=2)]}


@dataclasses.dataclass(frozen=True)
class Law:
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    in_strategy: Any
    out_strategy: Any = None
    plan: Any = None
    sizes: tuple[int, ...] = (8,)


LAWS = {
    "scan": Law(scanned, (X, normal(3, 8, 8)), ((4, 2), None)),
    "scan, stacked cut": Law(scanned, (X, normal(3, 8, 8)), (None, (1, 1, 4))),
    "nested scan": Law(nested_scan, (X, normal(3, 8, 8)), ((4, 2), None)),
    "cond": Law(branched, (X, W), ((2, 4), None)),
    "fori": Law(lambda x, w: counted(x, w), (X, W), ((4, 2), None)),
    "remat": Law(rematerialised, (X, W), ((4, 2), None)),
    "remat, weights cut": Law(rematerialised, (X, W), (None, (2, 4))),
    "custom_jvp": Law(lambda x, w: triple_slope(x @ w) * 2, (X, W), ((4, 2), None)),
    "custom_vjp": Law(lambda x, w: jnp.sin(clip_gradient(x, w)), (X, W), ((4, 2), None)),
    "vmap": Law(per_row, (X, W), ((4, 2), None)),
    "op": Law(pinned_inside, (X, W), None),
    "jit": Law(inner_jit, (X, W), ((4, 2), None)),
    "pytree": Law(tree, (PARAMS, X), ({"w": (4, 2), "b": None}, (2, 1))),
    "pytree prefix": Law(tree, (PARAMS, X), (None, P("x")), {"y": P("x", "y"), "z": None}, sizes=(4, 2)),
    "parameter plan": Law(tree, (PARAMS, X), None, plan={"w": (2, 2), "b.0": (8,)}),
    "specs": Law(lambda x, w: x @ w, (X, W), (P(("y", "x")), P(None, "y")), P("y", "x"), sizes=(4, 2)),
    "unconstrained": Law(lambda x, w: x @ w, (X, W), (P(P.UNCONSTRAINED, "y"), P()), sizes=(4, 2)),
    "full batch": Law(lambda x, w: x @ w, (X, W), ((2, 4), None), "full_batch"),
    "data parallel": Law(lambda x, w: x @ w, (X, W), ((2, 4), None), "data_parallel"),
    "result cut": Law(lambda x, w: x @ w, (X, W), ((2, 4), None), (4, 2)),
    "shapes": Law(shapes, (X,), ((8, 1),)),
}


def total(fn: Callable[..., Any], *args: Any) -> Any:
    leaves = jax.tree.leaves(fn(*args))
    return sum(jnp.sum(jnp.cos(leaf.astype(jnp.float32))) for leaf in leaves)


@pytest.mark.parametrize("name", LAWS)
def test_values_and_gradients_computed_inside(name):
    law = LAWS[name]

    def both(*args: Any) -> Any:
        return law.fn(*args), jax.grad(functools.partial(total, law.fn), argnums=tuple(range(len(args))))(
            *args
        )

    out = (
        law.out_strategy
        if law.out_strategy is None or isinstance(law.out_strategy, str)
        else (law.out_strategy, None)
    )
    f = jshard.shard(both, law.in_strategy, out, parameter_plan_of(law, both), mesh=mesh(*law.sizes))
    equal(f(*law.args), jax.jit(both)(*law.args))


@pytest.mark.parametrize(
    "name", ["scan", "cond", "remat", "custom_jvp", "custom_vjp", "op", "pytree", "full batch"]
)
def test_gradients_taken_outside(name):
    law = LAWS[name]
    numbers = tuple(range(len(law.args)))
    f = jshard.shard(
        law.fn, law.in_strategy, law.out_strategy, parameter_plan_of(law, law.fn), mesh=mesh(*law.sizes)
    )
    ours = jax.jit(jax.value_and_grad(functools.partial(total, f), argnums=numbers))
    plain = jax.jit(jax.value_and_grad(functools.partial(total, law.fn), argnums=numbers))
    equal(ours(*law.args), plain(*law.args))


def parameter_plan_of(law: Law, fn: Callable[..., Any]) -> Any:
    return law.plan if law.plan is None or fn is law.fn else {f"args.0.{k}": v for k, v in law.plan.items()}


@pytest.mark.parametrize("pins", [((2, 2), (4, 1)), ((4, 1), (1, 2)), ((1, 2), (2, 1))], ids=str)
@pytest.mark.parametrize("search", ["optimal", "propagation"])
def test_pinned_arguments_enter_branches_as_their_readers_take_them(pins, search):
    def f(x: Any, w: Any) -> Any:
        a = jax.lax.cond(x[0, 0] > 0, lambda u: u @ w, lambda u: u + 1, x)
        return jax.checkpoint(lambda u, w: jnp.sin(u @ w) * w)(a, w) * w

    lowered = jshard.shard(f, pins, mesh=mesh(8), search=search).lower(W, W)
    if pins == ((2, 2), (4, 1)):
        equal(lowered.compile()(W, W), f(W, W))


# --- calls as JAX has them


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_meshes_given_and_in_context(kind):
    user, want = mesh(4, 2, kind=kind), X @ W
    given = jshard.shard(lambda x, w: x @ w, (P("x", "y"), None), mesh=user)
    assert given.plan(X, W).mesh.names == ("x", "y")
    equal(given(X, W), want)
    # Placed elsewhere, after the first call.
    equal(given(jax.device_put(X, NamedSharding(user, P("y"))), W), want)
    found = jshard.shard(lambda x, w: x @ w, (P("x"), None))
    with jax.set_mesh(user):
        equal(found(X, W), want)
        equal(found(jax.device_put(X, P("x", "y")), W), want)
        equal(jax.jit(found)(X, W), want)
        equal(jax.grad(lambda x: jnp.sum(found(x, W)))(X), jnp.ones_like(want) @ W.T)
    pinned = jshard.shard(lambda x, w: x @ w, (NamedSharding(mesh(2, 4), P("y", "x")), None))
    assert pinned.plan(X, W).mesh.sizes == (2, 4) and pinned.plan(X, W).inputs[0].layout.dims == (
        ("y",),
        ("x",),
    )


def test_constraints_inside_are_pins():
    user = mesh(4, 2)
    f = jshard.shard(
        lambda x, w: jax.lax.with_sharding_constraint(x @ w, NamedSharding(user, P("y", "x"))), mesh=user
    )
    (row,) = [r for r in f.plan(X, W).operators if r.primitive == "sharding_constraint"]
    assert row.results[0].dims == (("y",), ("x",))
    equal(
        jax.value_and_grad(functools.partial(total, f))(X, W),
        jax.value_and_grad(lambda *a: total(jnp.dot, *a))(X, W),
    )


def test_donated_arguments_are_gone_and_their_layout_is_kept():
    for how in ({"donate_argnums": 0}, {"donate_argnames": "x"}):
        f = jshard.shard(lambda x, w: (x + 1, w @ w.T), ((8, 1), None), mesh=mesh(8), **how)
        x = jax.device_put(X + 0, f.plan(X, W).in_shardings[0][0])
        equal(f(x, W), (X + 1, W @ W.T))
        assert x.is_deleted()
        assert f.plan(X, W).outputs[0].layout == f.plan(X, W).inputs[0].layout


def test_static_arguments_and_keywords():
    def power(x: Any, n: int, w: Any, *, flip: bool = False) -> Any:
        for _ in range(n):
            x = jnp.tanh(x @ w)
        return -x if flip else x

    f = jshard.shard(power, {"x": (8, 1)}, static_argnums=1, static_argnames="flip", mesh=mesh(8))
    for call, keywords in [((X, 1, W), {}), ((X, 2, W), {}), ((X, 1, W), {}), ((X, 2, W), {"flip": True})]:
        equal(f(*call, **keywords), power(*call, **keywords))
    equal(f(X, n=2, w=W), power(X, 2, W))
    g = jshard.shard(lambda x, *, w, b=0.0: x @ w + b, {"x": (4, 1), "w": (1, 2)}, mesh=mesh(8))
    equal(g(X, w=W), X @ W)
    equal(g(b=2.0, w=W, x=X), X @ W + 2)


def test_inside_other_transformations():
    f = jshard.shard(lambda x, w: jnp.sum(jnp.tanh(x @ w) ** 2), ((4, 1), None), mesh=mesh(4))

    def g(x: Any, w: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    x, w = X[:4, :3], W[:3, :2]
    equal(jax.jit(jax.hessian(f, 1))(x, w), jax.jit(jax.hessian(g, 1))(x, w))
    equal(jax.jvp(f, (x, w), (x, w)), jax.jvp(g, (x, w), (x, w)))
    step = jshard.shard(lambda c, w: jnp.tanh(c @ w), ((4, 1), None), mesh=mesh(4))
    ours, _ = jax.lax.scan(lambda c, _: (step(c, W), None), X, None, length=3)
    plain, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ W), None), X, None, length=3)
    equal(ours, plain)


def test_results_that_no_operator_makes():
    def f(x: Any, w: Any) -> Any:
        return x, w, 3, x, jnp.ones(3), W

    equal(jshard.shard(f, ((4, 2), None), mesh=mesh(8))(X, W), f(X, W))
    equal(jshard.shard(lambda: jnp.arange(4), mesh=mesh(2))(), jnp.arange(4))
    assert jshard.shard(lambda p: {}, mesh=mesh(2))({"a": X}) == {}


def test_scalars_integers_keys_and_half_precision():
    f = jshard.shard(lambda s: s * 2 + 1, mesh=mesh(2))
    assert f(2.0) == 5.0 and f(3) == 7 and f(3).dtype == jnp.int32
    key = jax.random.key(1)
    noisy = jshard.shard(lambda k, x: x + jax.random.normal(k, x.shape), (None, (8, 1)), mesh=mesh(8))
    equal(noisy(key, X), X + jax.random.normal(key, X.shape))
    half = jshard.shard(jnp.dot, ((1, 8), None), mesh=mesh(8))(X.astype(jnp.bfloat16), W.astype(jnp.bfloat16))
    chex.assert_trees_all_close(half.astype(jnp.float32), X @ W, rtol=0.03, atol=0.03)


def test_methods():
    class Model:
        w = W

        @functools.partial(jshard.shard, static_argnums=0, mesh=mesh(8))
        def apply(self, x: Any) -> Any:
            return x @ self.w

    equal(Model().apply(X), X @ W)


def test_mesh_auto_takes_the_best_grid_and_names_the_others():
    def f(x, w1, w2):
        return jax.nn.relu(x @ w1) @ w2

    args = [jnp.ones((64, 64))] * 3
    pins = dict(in_strategy=((2, None), (1, 2), (2, 1)))
    auto = jshard.shard(f, mesh="auto", **pins).plan(*args)
    told = [line for line in auto.steps if line.startswith("mesh ")]
    assert len(told) >= 2 and told[0].startswith(f"mesh {auto.mesh}:")
    assert auto.cost.objective <= jshard.shard(f, **pins).plan(*args).cost.objective
    assert jnp.allclose(jshard.shard(f, mesh="auto", **pins)(*args), f(*args))
