"""`module.shard(...)` on nnx modules: the module stays the same object and returns the unsharded module's numbers."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard.flax
from jshard import ShardError
from jshard._core.errors import NestedShardError
from tests.helpers.nnx_blocks import Block, Net


class Noisy(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(32, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(self.linear(x)))


X = jax.random.normal(jax.random.key(1), (64, 32))


def close(a, b, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def pair(build, **pins):
    plain, sharded = build(nnx.Rngs(0)), build(nnx.Rngs(0))
    return plain, sharded


def loss(model, x):
    return (model(x) ** 2).mean()


def test_one_block_of_a_net_is_sharded_the_others_untouched():
    plain, net = pair(Net)
    block = net.block1
    assert net.block1.shard(in_strategy=((1, 8),), parameter_plan={"self.dense2.kernel": (8, 1)}) is block
    assert type(net.block1) is Block
    assert jshard.flax.plan_of(net.block1, X).inputs[-1].layout.cuts(
        jshard.flax.plan_of(net.block1, X).mesh
    ) == (1, 8)
    close(net(X), plain(X))
    with pytest.raises(ShardError, match="this Block is not sharded"):
        jshard.flax.plan_of(net.block2, X)
    assert [p for p, _ in nnx.to_flat_state(nnx.state(net))] == [
        p for p, _ in nnx.to_flat_state(nnx.state(plain))
    ]


def test_every_gradient_equals_the_plain_one():
    plain, net = pair(Net)
    net.block1.shard(in_strategy=((1, 8),), parameter_plan={"dense2.kernel": (8, 1)})
    close(nnx.grad(loss)(net, X), nnx.grad(loss)(plain, X))


def test_operators_know_their_module():
    block = Block(nnx.Rngs(0)).shard(in_strategy=((8, 1),))
    modules = {
        r.module.rsplit("/", 1)[-1]
        for r in jshard.flax.plan_of(block, X).operators
        if r.primitive == "dot_general"
    }
    assert modules == {"dense1", "dense2"}


def test_training_with_batch_norm_and_dropout_equals_plain():
    plain, model = pair(Noisy)
    model.shard(in_strategy=((8, 1),))

    @nnx.jit
    def step(m, opt, x):
        value, grads = nnx.value_and_grad(loss)(m, x)
        opt.update(m, grads)
        return value

    opts = [nnx.Optimizer(m, optax.adamw(1e-3), wrt=nnx.Param) for m in (plain, model)]
    for _ in range(3):
        np.testing.assert_allclose(step(model, opts[1], X), step(plain, opts[0], X), rtol=1e-5)
    close(nnx.state(model, nnx.BatchStat), nnx.state(plain, nnx.BatchStat), 1e-4)


def test_an_eager_call_updates_statistics_and_random_state():
    plain, model = pair(Noisy)
    model.shard(in_strategy=((8, 1),))
    for _ in range(2):
        close(model(X), plain(X), 1e-4)
    close(model.norm.mean[...], plain.norm.mean[...])


def test_split_and_merge_keep_the_sharding():
    model = Block(nnx.Rngs(0)).shard(in_strategy=((8, 1),))
    again = nnx.merge(*nnx.split(model))
    assert jshard.flax.plan_of(again, X) == jshard.flax.plan_of(model, X)


def test_nested_sharding_is_refused_with_both_names():
    net = Net(nnx.Rngs(0))
    net.block1.shard(in_strategy=((8, 1),))
    with pytest.raises(NestedShardError, match=r"Net has the sharded module block1 \(Block\) inside"):
        net.shard(in_strategy=((8, 1),))


def test_shard_on_a_class_and_an_unknown_argument_are_errors():
    with pytest.raises(ShardError, match="shard was called on the class Block"):
        jshard.flax.shard_module(Block)
    with pytest.raises(ShardError, match="Block.__call__ has no argument 'y'"):
        Block(nnx.Rngs(0)).shard(in_strategy={"y": (8, 1)})


def test_a_whole_step_over_a_module_state_takes_globs():
    graph, state = nnx.split(Net(nnx.Rngs(0)))

    def step(state, x):
        value, grads = jax.value_and_grad(lambda s: loss(nnx.merge(graph, s), x))(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    sharded = jshard.shard(step, in_strategy={"x": (8, 1)}, parameter_plan={"block*.dense1.kernel": (1, 8)})
    plan = sharded.plan(state, X)
    assert [r.path for r in plan.inputs if r.pinned] == [
        "state.block1.dense1.kernel", "state.block2.dense1.kernel", "state.block3.dense1.kernel", "x",
    ]  # fmt: skip
    new, value = sharded(state, X)
    want, wanted = step(state, X)
    close(new, want)
    assert jnp.allclose(value, wanted)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.drop = nnx.Linear(32, 32, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return self.drop(nnx.relu(self.linear(x)))


class Remat(nnx.Module):
    def __init__(self, rngs, cut=False):
        self.layers = nnx.List([Layer(rngs) for _ in range(2)])
        if cut:
            self.layers[0].shard(in_strategy=((8, 1),))

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.remat(lambda m, x: m(x))(layer, x)
        return x


class Scan(nnx.Module):
    def __init__(self, rngs, cut=False):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make(rngs):
            layer = Layer(rngs)
            return layer.shard(in_strategy=((8, 1),)) if cut else layer

        self.layers = make(rngs)

    def __call__(self, x):
        return nnx.scan(lambda x, m: m(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


@pytest.mark.parametrize("build", [Remat, Scan])
@pytest.mark.parametrize("inside", [False, True])
def test_lifted_modules_shard_and_hold_sharded_children(build, inside):
    plain, model = build(nnx.Rngs(0)), build(nnx.Rngs(0), inside)
    if not inside:
        model.shard(in_strategy=((8, 1),))
        modules = {r.module.split("/")[-1] for r in jshard.flax.plan_of(model, X).operators}
        assert {"linear", "drop"} <= modules
    for _ in range(2):
        close(model(X), plain(X))
    close(nnx.grad(loss)(model, X), nnx.grad(loss)(plain, X))
    states = (nnx.state(m, nnx.RngCount) for m in (model, plain))
    close(*states)


class Sows(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, x, scale=1.0, *, double=False):
        x = self.linear(x) * scale
        self.sow(nnx.Intermediate, "hidden", x)
        return x * 2 if double else x


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_sown_values_flags_and_numbers():
    plain, model = pair(Sows)
    model.shard(in_strategy=((8, 1), None))
    for args in ((X,), (X, 3.0)):
        for double in (False, True):
            close(model(*args, double=double), plain(*args, double=double))
            close(nnx.pop(model, nnx.Intermediate), nnx.pop(plain, nnx.Intermediate))


def test_a_subclass_that_calls_its_parents_call():
    class Twice(Block):
        def __call__(self, x):
            return super().__call__(super().__call__(x))

    plain, model = pair(Twice)
    Block(nnx.Rngs(0)).shard(in_strategy=((8, 1),))  # so that the parent's call looks for tokens too
    close(model.shard(in_strategy=((8, 1),))(X), plain(X))


def test_threads_that_plan_at_once_name_their_own_modules():
    def modules(kind):
        model = kind(nnx.Rngs(0)).shard(in_strategy=((8, 1),))
        return {r.module for r in jshard.flax.plan_of(model, X).operators if r.primitive == "dot_general"}

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(modules, [Block, Noisy, Block, Noisy]))
    assert found == [{"Block/dense1", "Block/dense2"}, {"Noisy/linear"}] * 2


def test_a_step_over_modules_keeps_what_it_changes():
    def step(model, optimizer, x):
        value, grads = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        return value

    plain, model = pair(Noisy)
    opts = [nnx.Optimizer(m, optax.adamw(1e-3), wrt=nnx.Param) for m in (plain, model)]
    sharded = jshard.shard(step, in_strategy={"x": (8, 1)}, parameter_plan={"**.linear.kernel": (1, 2)})
    for _ in range(2):
        np.testing.assert_allclose(sharded(model, opts[1], X), step(plain, opts[0], X), rtol=1e-5)
    assert int(opts[1].step[...]) == 2
    close(nnx.state(model, nnx.BatchStat), nnx.state(plain, nnx.BatchStat), 1e-4)
    plan = sharded.plan(model, opts[1], X)
    pinned = {r.path for r in plan.inputs if r.pinned}
    assert pinned == {
        "model.linear.kernel",
        "x",
        *(f"optimizer.opt_state.0.{m}.linear.kernel" for m in ("mu", "nu")),
    }
    dots = [r.module for r in plan.operators if r.primitive == "dot_general"]
    assert len(dots) >= 2 and set(dots) == {"Noisy/linear"}  # in the gradient too
