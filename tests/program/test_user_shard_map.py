"""A user's `jax.shard_map` inside a sharded function is one operator with the layouts of its specs."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import jshard
from jshard._core import hardware as hardware
from jshard._core.errors import ShardError
from jshard._cost.roofline import peak_flops


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


def counted(jaxpr, times=1.0):
    """Operations of products and convolutions, and bytes and counts of collectives, counted by hand from a jaxpr."""
    work, moved = 0.0, Counter()
    for eqn in jaxpr.eqns:
        name, p = eqn.primitive.name, eqn.params
        if name == "dot_general":
            ((contracted, _), _) = p["dimension_numbers"]
            size = np.prod([eqn.invars[0].aval.shape[d] for d in contracted])
            work += 2.0 * times * size * eqn.outvars[0].aval.size
        elif name == "conv_general_dilated":
            kernel, out = eqn.invars[1].aval, eqn.outvars[0].aval
            work += 2.0 * times * out.size * kernel.size / kernel.shape[p["dimension_numbers"].rhs_spec[0]]
        elif name in ("psum", "psum_invariant", "all_gather", "reduce_scatter", "all_to_all", "ppermute"):
            moved[name.removesuffix("_invariant")] += int(times)
        for inner in jax.tree.leaves(list(p.values()), is_leaf=lambda j: hasattr(j, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                more = counted(inner, times * int(p.get("length") or 1))
                work, moved = work + more[0], moved + more[1]
    return work, moved


def heavy(x, w, k):
    """Loops with products, a convolution and every kind of collective."""

    def turn(c, v):
        h = lax.psum(c @ v, "m")
        images = jnp.tanh(h).reshape(2, 4, 8, 8)
        images = lax.conv_general_dilated(images, k, (1, 1), "SAME")
        c = c + lax.all_gather(images.reshape(8, 64), "m", axis=1, tiled=True)[:, :64]
        return lax.ppermute(c, "d", [(0, 1), (1, 0)]), lax.psum_scatter(
            c, "m", scatter_dimension=1, tiled=True
        )

    c, ys = lax.scan(turn, x, w)
    swapped = lax.all_to_all(c, "m", 1, 0, tiled=True)
    return jnp.einsum("ij,kj->ik", swapped, swapped), ys


def heavy_map(mesh):
    specs = (P("d", "m"), P(None, "m"), P())
    return jax.shard_map(
        heavy, mesh=mesh, in_specs=specs, out_specs=(P(("d", "m")), P(None, "d")), check_vma=False
    )


HEAVY = (
    jax.ShapeDtypeStruct((16, 256), "float32"),
    jax.ShapeDtypeStruct((5, 256, 64), "float32"),
    jax.ShapeDtypeStruct((4, 4, 3, 3), "float32"),
)


@pytest.mark.parametrize("chip", ["v5p:2x2x2", "h100:1x8", "cpu:8"])
@pytest.mark.parametrize("level", [0, 2])
def test_its_work_and_collectives_are_counted(chip, level):
    where = jshard.topology(chip, {"d": 2, "m": 4}, compiles=False)
    f = heavy_map(where.jax_mesh)
    plan = jshard.shard(f, mesh=where, level=level).plan(*HEAVY)
    (eqn,) = jax.make_jaxpr(f)(*HEAVY).jaxpr.eqns
    work, moved = counted(eqn.params["jaxpr"])
    row = next(r for r in plan.operators if r.primitive == "shard_map")
    assert row.seconds >= work / peak_flops("float32", hardware.get(plan.chip)) > 0
    own = [c for c in plan.collectives if c.own]
    assert {c.id for c in own} <= set(row.collectives) and len({c.id for c in plan.collectives}) == len(
        plan.collectives
    )
    kinds = {"psum": "all_reduce", "ppermute": "permute"}
    found = Counter()
    for c in own:
        found[c.kind] += int(c.count)
    assert found == {kinds.get(k, k): n for k, n in moved.items()}
    assert found == {"all_reduce": 5, "all_gather": 5, "permute": 5, "reduce_scatter": 5, "all_to_all": 1}
    assert {c.kind: (c.axes, c.bytes) for c in own} == {
        "all_reduce": (("m",), 8 * 64 * 4 * 2 * 3 / 4),
        "all_gather": (("m",), 8 * 64 * 4 * 3),
        "permute": (("d",), 8 * 64 * 4),
        "reduce_scatter": (("m",), 8 * 64 * 4 * 3 / 4),
        "all_to_all": (("m",), 8 * 64 * 4 * 3 / 4),
    }
    assert 0 < plan.cost.communication == pytest.approx(sum(c.seconds * c.count for c in plan.collectives))
    assert plan.cost.optimal and plan.cost.objective >= sum(c.seconds * c.count for c in own)


def test_a_large_sum_takes_its_time():
    """The issue's own: a `psum` of 2 GB was priced 0 s, with "no collectives"."""
    where = jshard.topology("v5p:2x2x2", {"d": 2, "m": 4}, compiles=False)
    mapped = jax.shard_map(
        lambda x: lax.psum(x, ("d", "m")), mesh=where.jax_mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    plan = jshard.shard(mapped, mesh=where).plan(jax.ShapeDtypeStruct((1024, 1024, 512), "float32"))
    (row,) = plan.collectives
    assert row.own and row.kind == "all_reduce" and row.bytes == 2 * 2**31 * 7 / 8
    assert plan.cost.communication == row.seconds > 0.01
    text = str(plan)
    assert (
        "1024x1024x512, the user's own" in text
        and "all_reduce (own)" in text
        and "no collectives" not in text
    )
    assert "# all_reduce[d*m] of 1024x1024x512, the user's own, in shard_map." in plan.ir(local=True)
    assert jshard.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("typed", [True, False])
def test_what_is_counted_is_what_is_emitted(typed):
    """Its collectives in the compiled program: as many bytes, by kind, as the plan says."""
    mesh = grid()
    f = jshard.shard(model(mesh, typed), mesh=mesh, out_strategy=(P(), P(), P()))
    plan = f.plan(X, W)
    verdict = plan.verify(f.lower(X, W).compile())
    assert verdict.ok, str(verdict)
    planned, emitted = Counter(), Counter()
    for c in plan.collectives:
        if c.own:
            planned[c.kind] += c.total
    for e in verdict.own:
        emitted[e.kind] += e.bytes
    assert planned == emitted


def test_a_function_with_a_rule_is_not_faster_than_its_products():
    """Attention does two products, four operations a point of its rule, not two."""
    where = jshard.topology("v5p:2x2x2", {"d": 2, "m": 4}, compiles=False)

    def attention(q, k, v):
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v)

    rule = "b q h d, b k h d, b k h d -> b q h d"
    f = jshard.shard(jshard.op(attention, rule=rule), mesh=where, level=2)
    plan = f.plan(*[jax.ShapeDtypeStruct((8, 2048, 16, 128), "bfloat16")] * 3)
    work = 2 * 2 * 8 * 16 * 2048 * 2048 * 128 / 8
    assert plan.cost.compute >= work / peak_flops("bfloat16", hardware.get(plan.chip))
