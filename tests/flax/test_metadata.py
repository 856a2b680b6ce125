"""Flax's partitioning metadata is read as pins, by `.shard` and by `jshard.shard` of a function over modules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax.sharding import Mesh

import jshard.flax


MESH = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
X = jax.random.normal(jax.random.key(1), (16, 32))
RULES = (("embed", None), ("mlp", "model"))
lecun = nn.initializers.lecun_normal()


class Mlp(nnx.Module):
    def __init__(self, rngs, up, down):
        self.up = nnx.Linear(32, 64, rngs=rngs, kernel_init=up)
        self.down = nnx.Linear(64, 32, rngs=rngs, kernel_init=down)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


class LinenMlp(nn.Module):
    up: object
    down: object

    @nn.compact
    def __call__(self, x):
        return nn.Dense(32, kernel_init=self.down, name="down")(
            nn.relu(nn.Dense(64, kernel_init=self.up, name="up")(x))
        )


def pinned(plan):
    return {
        r.path.removeprefix("state.").removeprefix("variables.params."): r.layout.spec
        for r in plan.inputs
        if r.pinned
    }


WANTED = {"up.kernel": jax.P(None, "model"), "down.kernel": jax.P("model")}


def same(spec, other):
    def parts(s):
        parts = [d if isinstance(d, tuple) or d is None else (d,) for d in s]
        while parts and parts[-1] in (None, ()):
            parts.pop()
        return parts

    return parts(spec) == parts(other)


def check(plan, wanted):
    found = pinned(plan)
    assert found.keys() == wanted.keys()
    assert all(same(found[k], wanted[k]) for k in wanted), found


@pytest.mark.parametrize("logical", [False, True])
def test_nnx_metadata(logical):
    names = (("embed", "mlp"), ("mlp", "embed")) if logical else ((None, "model"), ("model", None))
    rules = dict(sharding_rules=RULES) if logical else {}
    with nnx.use_eager_sharding(False):
        up, down = (nnx.with_partitioning(lecun, n, **rules) for n in names)
        model = Mlp(nnx.Rngs(0), up, down)
        plain = Mlp(nnx.Rngs(0), lecun, lecun)(X)
        check(jshard.flax.plan_of(model.shard(mesh=MESH), X), WANTED)
        np.testing.assert_allclose(model(X), plain, rtol=1e-5, atol=1e-5)
        with jax.set_mesh(MESH):  # a mesh in context is a mesh
            model = Mlp(nnx.Rngs(0), up, down).shard()
            check(jshard.flax.plan_of(model, X), WANTED)


@pytest.mark.parametrize("logical", [False, True])
def test_linen_metadata(logical):
    if logical:
        up, down = (nn.with_logical_partitioning(lecun, n) for n in (("embed", "mlp"), ("mlp", "embed")))
    else:
        up, down = (nn.with_partitioning(lecun, n) for n in ((None, "model"), ("model", None)))
    module = LinenMlp(up, down)
    variables = module.init(jax.random.key(0), X)
    with nn.logical_axis_rules(RULES if logical else ()):
        sharded = module.shard(mesh=MESH)
        check(jshard.flax.plan_of(sharded, variables, X), WANTED)
        np.testing.assert_allclose(
            sharded.apply(variables, X), module.apply(variables, X), rtol=1e-5, atol=1e-5
        )


def test_what_the_user_writes_goes_before_and_unknown_axes_are_left_to_the_search():
    module = LinenMlp(
        nn.with_partitioning(lecun, ("expert", "model")), nn.with_partitioning(lecun, ("model", None))
    )
    variables = module.init(jax.random.key(0), X)
    plan = jshard.flax.plan_of(module.shard(parameter_plan={"up.kernel": (1, 2)}, mesh=MESH), variables, X)
    check(plan, {"up.kernel": jax.P(None, "data"), "down.kernel": jax.P("model")})
    plan = jshard.flax.plan_of(module.shard(mesh=MESH), variables, X)
    (up,) = [r for r in plan.inputs if r.path.endswith("up.kernel")]
    assert up.pinned and up.layout.dims[1] == ("model",)
    assert not pinned(jshard.flax.plan_of(module.shard(), variables, X))  # no mesh says what `model` is


def test_a_train_step_reads_the_metadata_of_its_arguments():
    module = LinenMlp(
        nn.with_partitioning(lecun, (None, "model")), nn.with_partitioning(lecun, ("model", None))
    )
    variables = module.init(jax.random.key(0), X)

    def step(params, x):
        return jax.tree.map(
            lambda p, g: p - 0.1 * g, params, jax.grad(lambda p: jnp.mean(module.apply(p, x) ** 2))(params)
        )

    sharded = jshard.shard(step, mesh=MESH)
    plan = sharded.plan(variables, X)
    check(plan, {f"params.params.{k}": v for k, v in WANTED.items()})
    got, want = sharded(variables, X), step(variables, X)
    assert jax.tree.structure(got) == jax.tree.structure(want)  # still in their boxes
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_init_and_place_keep_the_boxes():
    up, down = nn.with_partitioning(lecun, (None, "model")), nn.with_partitioning(lecun, ("model", None))
    module = LinenMlp(up, down)
    build = lambda: module.init(jax.random.key(0), X)  # noqa: E731
    plan = jshard.flax.plan_of(module.shard(mesh=MESH), jax.eval_shape(build), X)
    for made in (jshard.flax.init(build, plan), jshard.flax.place(build(), plan)):
        kernel = made["params"]["up"]["kernel"]
        assert isinstance(kernel, nn.Partitioned) and kernel.value.sharding.shard_shape((32, 64)) == (32, 16)
