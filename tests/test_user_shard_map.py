"""A `jax.shard_map` that the user wrote inside a sharded function: one operator, cut as its specs say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import jshard
from jshard._errors import ShardError


def grid(sizes=(2, 4), names=("d", "m")):
    n = int(np.prod(sizes))
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=jax.devices()[:n])


X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 32)), "float32")
W = jnp.asarray(np.random.default_rng(1).normal(size=(32, 8)), "float32") / 4


def body(typed):
    """Products, sums, permutations and exchanges over both axes."""

    def run(x, w):
        y = lax.psum(x @ w, "m")
        gathered = lax.all_gather(y, "d", axis=0, tiled=True)
        turned = lax.ppermute(w, "m", [(k, (k + 1) % 4) for k in range(4)])
        s = lax.psum_scatter(x @ turned, "m", scatter_dimension=0, tiled=True)
        swapped = lax.all_to_all(s, "d", 1, 0, tiled=True)
        total = lax.psum(gathered.sum(), "d") if typed else lax.pmean(gathered.sum(), "d")
        return y * total, s * lax.axis_index("m"), jnp.tanh(swapped) + y.sum()

    return run


def model(mesh, typed):
    outs = (P("d"), P(("d", "m")), P(("m", "d")) if not typed else P(("d", "m")))
    mapped = jax.shard_map(
        body(typed), mesh=mesh, in_specs=(P("d", "m"), P("m")), out_specs=outs, check_vma=typed
    )

    def f(x, w):
        h = jnp.sin(x) * 2
        y, s, t = mapped(h, w)
        return y @ w.T / 30, s + jnp.cos(w[:16]), t

    return f


def loss(f):
    return lambda x, w: sum(jnp.sum(jnp.sin(y)) for y in f(x, w))


def close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-3 * float(jnp.abs(b).max() + 1e-6))


@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize("pins", [((2, 4), None), ((8, 1), (1, 8))])
def test_values_and_the_gradient_inside(typed, pins):
    mesh = grid()
    f = model(mesh, typed)
    sharded = jshard.shard(f, pins, mesh=mesh)
    close(sharded(X, W), jax.jit(f)(X, W))
    step = jax.value_and_grad(loss(f), (0, 1))
    close(jshard.shard(step, pins, mesh=mesh)(X, W), jax.jit(step)(X, W))


def test_the_gradient_from_outside():
    mesh = grid()
    f = model(mesh, True)
    sharded = jshard.shard(f, ((2, 4), None), mesh=mesh)
    close(jax.jit(jax.grad(loss(sharded), (0, 1)))(X, W), jax.jit(jax.grad(loss(f), (0, 1)))(X, W))
    untyped = jshard.shard(model(mesh, False), mesh=mesh)
    close(jax.jit(untyped)(X, W), model(mesh, False)(X, W))
    with pytest.raises(ShardError) as caught:
        jax.grad(loss(untyped))(X, W)
    assert caught.value.what == (
        "the derivative, taken from outside a sharded function, of a jax.shard_map(..., check_vma=False) inside it"
    )
    assert caught.value.where == "the shard_map over d, m"
    assert caught.value.fix == (
        "check_vma=True in that shard_map, or the derivative inside: jshard.shard(jax.grad(f), ...)"
    )


def summed(mesh, **options):
    """Rows normalized by the sum over all of them."""
    axes = mesh.axis_names
    return jax.shard_map(
        lambda b: b / lax.psum(b.sum(), axes), mesh=mesh, in_specs=P(axes), out_specs=P(axes), **options
    )


def looped(mesh, around=lambda f: f):
    def turn(h, w):
        h = around(summed(mesh))(jnp.sin(h) + w)
        return lax.cond(h.sum() > 0, lambda h: around(summed(mesh))(h * h), lambda h: h, h), h[:2]

    return lambda x, w: lax.scan(turn, x, w)


@pytest.mark.parametrize(
    "around", [lambda f: f, jax.checkpoint, lambda f: jax.vmap(f, in_axes=1, out_axes=1)]
)
@pytest.mark.parametrize("outside", [False, True])
def test_in_loops_branches_and_transformations(around, outside):
    mesh = grid()
    x, w = jnp.abs(X), jnp.ones((3, 1, 32))
    f = looped(mesh, around)

    def total(f):
        return lambda x, w: sum(jnp.sum(jnp.cos(y)) for y in jax.tree.leaves(f(x, w)))

    if outside:
        got = jax.jit(jax.grad(total(jshard.shard(f, mesh=mesh))))(x, w)
    else:
        got = jshard.shard(jax.grad(total(f)), mesh=mesh)(x, w)
    close(got, jax.jit(jax.grad(total(f)))(x, w))


def test_the_mesh_is_the_shard_maps_own():
    mesh = grid((4, 2), ("rows", "columns"))
    f = jshard.shard(lambda x: summed(mesh)(x) + 1)
    np.testing.assert_allclose(f(X), X / X.sum() + 1, rtol=1e-4)
    plan = f.plan(X)
    assert str(plan.mesh) == "rows=4 x columns=2"
    (row,) = [r for r in plan.operators if r.primitive == "shard_map"]
    assert row.strategy == ((8, 1),) and str(row.operands[0]) == str(row.results[0]) == "(rows*columns, -)"
    assert not plan.unknown


def test_axes_of_size_one():
    mesh = grid((8, 1), ("d", "one"))
    f = jshard.shard(lambda x: summed(mesh)(x) + 1, mesh=mesh)
    np.testing.assert_allclose(f(X), X / X.sum() + 1, rtol=1e-4)
    got = jax.grad(lambda x: jnp.sum(f(x) ** 2))(X)
    np.testing.assert_allclose(
        got, jax.grad(lambda x: jnp.sum((x / x.sum() + 1) ** 2))(X), rtol=1e-3, atol=1e-5
    )


def test_its_collectives_are_named_as_the_users_own():
    mesh = grid()
    f = jshard.shard(lambda x, w: jnp.tanh(summed(mesh)(x)) @ w, mesh=mesh, out_strategy=P())
    plan = f.plan(X, W)
    verdict = plan.verify(f.lower(X, W).compile())
    assert verdict.ok, str(verdict)
    assert not verdict.extra and [e.kind for e in verdict.own] == ["all_reduce"]
    assert "the user's own: all_reduce of f32[]" in str(verdict)


def test_another_mesh_is_refused():
    mine, other = grid(), grid((8,), ("rows",))
    for planned, where in ((mine, "d=2 x m=4"), (grid((4, 2), ("rows", "m")), "rows=4 x m=2")):
        with pytest.raises(ShardError) as caught:
            jshard.shard(lambda x: summed(other)(x) + 1, mesh=planned)(X)
        assert caught.value.what == (
            "jax.shard_map over the mesh rows=8 inside the sharded function <lambda>, which is planned for the mesh "
            + where
        )
        assert "test_user_shard_map.py:" in caught.value.where
        assert caught.value.fix == (
            "one mesh for both: jshard.shard(..., mesh=mesh) with the mesh of the shard_map, and cuts that its axes "
            "can express; or the same on whole arrays, for which the collectives are planned"
        )


def test_a_map_over_some_axes_is_refused():
    mesh = grid()
    mapped = jax.shard_map(
        lambda b: lax.psum(b, "d"), mesh=mesh, in_specs=P("d"), out_specs=P(), axis_names={"d"}
    )
    with pytest.raises(ShardError) as caught:
        jshard.shard(lambda x: mapped(x) + 1, mesh=mesh)(X)
    assert caught.value.what == (
        "jax.shard_map over d of the mesh d=2 x m=4 inside the sharded function <lambda>"
    )
    assert caught.value.fix == (
        "axis_names of all axes of the mesh: m would be left to the compiler, but a plan leaves none"
    )
