"""`.shard(...)` on linen modules: the module behaves as the original under everything that Flax does with one."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jshard.flax
from jshard._core.errors import NestedShardError, ShardError


CUT = dict(in_strategy=((8, 1),))
X = jax.random.normal(jax.random.key(1), (64, 32))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(32, name="dense2")(nn.gelu(nn.Dense(32, name="dense1")(x)))


class Noisy(nn.Module):
    """Everything a module can have: statistics, random keys, a flag, something sown, a variable of its own."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(32)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        self.sow("intermediates", "hidden", x)
        calls = self.variable("counts", "calls", lambda: jnp.zeros((), "int32"))
        if self.is_mutable_collection("counts"):
            calls.value += 1
        return x


class Net(nn.Module):
    """Three blocks of one kind, some of them sharded, made in `setup`."""

    block: type = Block
    cut: tuple = (1,)
    options: tuple = ()

    def setup(self):
        for i in (1, 2, 3):
            block = self.block(name=f"block{i}")
            setattr(self, f"block{i}", block.shard(**dict(self.options)) if i in self.cut else block)

    def __call__(self, x, *flags):
        return self.block3(self.block2(self.block1(x, *flags), *flags), *flags)


def close(a, b, tolerance=1e-5):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def same(sharded, plain, x, *flags, **apply):
    """Init, results, changed variables and gradients of the two agree; the results."""
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(3)}
    variables = plain.init(keys, x, *flags)
    close(sharded.init(keys, x, *flags), variables, 0)
    got, want = (m.apply(variables, x, *flags, **apply) for m in (sharded, plain))
    close(got, want)
    rest = {k: v for k, v in variables.items() if k != "params"}

    def loss(params, m):
        out = m.apply({"params": params, **rest}, x, *flags, **apply)
        return jnp.sum((out[0] if apply.get("mutable") else out) ** 2)

    close(
        *(jax.jit(jax.grad(loss), static_argnums=1)(variables["params"], m) for m in (sharded, plain)), 1e-4
    )
    return got


def test_a_sharded_module_initialises_and_computes_as_the_plain_one():
    sharded = Block().shard(**CUT)
    y = same(sharded, Block(), X)
    assert not y.sharding.is_fully_replicated
    assert isinstance(sharded, Block) and type(sharded).__name__ == "Block"
    assert sharded == Block().shard(**CUT) and sharded != Block() and sharded != Block().shard(((1, 8),))


def test_statistics_random_keys_flags_and_sown_values_are_those_of_the_plain_module():
    apply = dict(rngs={"dropout": jax.random.key(7)}, mutable=["batch_stats", "intermediates", "counts"])
    y, changed = same(Noisy().shard(in_strategy=((8, 1),)), Noisy(), X, True, **apply)
    assert set(changed) == {"batch_stats", "intermediates", "counts"}
    same(Noisy().shard(**CUT), Noisy(), X)


def test_children_made_in_setup_draw_the_keys_of_the_plain_ones():
    apply = dict(rngs={"dropout": jax.random.key(7)}, mutable=["batch_stats", "counts"])
    for cut in ((1,), (1, 3)):
        sharded = Net(Noisy, cut, tuple(CUT.items()))
        same(sharded, Net(Noisy, ()), X, True, **apply)


def test_only_the_blocks_that_are_sharded_have_plans():
    plain, sharded = Net(cut=()), Net(cut=(1, 3), options=tuple(CUT.items()))
    variables = plain.init(jax.random.key(0), X)
    assert list(jshard.flax.plans_of(sharded, variables, X)) == ["block1", "block3"]
    with pytest.raises(ShardError, match="this Net is not sharded"):
        jshard.flax.plan_of(plain, variables, X)
    with pytest.raises(ShardError, match="2 modules of this Net are sharded: block1, block3"):
        jshard.flax.plan_of(sharded, variables, X)


def test_a_module_called_twice_draws_other_keys_the_second_time():
    class Twice(nn.Module):
        cut: bool = False

        @nn.compact
        def __call__(self, x):
            drop = nn.Dropout(0.5, deterministic=False)
            drop = drop.shard(**CUT) if self.cut else drop
            x = drop(x)
            return x, drop(x), drop(x) + jax.random.uniform(self.make_rng("dropout"))

    rngs = {"dropout": jax.random.key(0)}
    want = Twice().apply({}, X, rngs=rngs)
    for _ in range(2):  # the second time nothing is traced again
        close(Twice(True).apply({}, X, rngs=rngs), want, 0)


def test_children_made_where_they_are_called():
    class Stack(nn.Module):
        cut: bool = False

        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                dense = nn.Dense(32, kernel_init=nn.initializers.normal(0.1))
                x = nn.relu((dense.shard(**CUT) if self.cut else dense)(x))
            return x

    same(Stack(True), Stack(), X)


@pytest.mark.parametrize("lift", ["scan", "remat", "jit", "vmap"])
def test_lifted_modules_shard_and_hold_sharded_children(lift):
    class Layer(nn.Module):
        cut: bool = False

        @nn.compact
        def __call__(self, x, _):
            block = Block(name="block")
            return (block.shard(**CUT) if self.cut else block)(x), None

    scan = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    lifted = {"scan": scan, "remat": nn.remat(Layer), "jit": nn.jit(Layer), "vmap": None}[lift]
    if lift == "vmap":
        inside = nn.vmap(Block, variable_axes={"params": None}, split_rngs={"params": False})
        same(inside().shard(in_strategy=((1, 8, 1),)), inside(), X[None].repeat(3, 0))
        return

    class Root(nn.Module):
        cut: bool = False
        whole: bool = False

        @nn.compact
        def __call__(self, x):
            layer = lifted(self.cut)
            return (layer.shard(in_strategy=((8, 1), None)) if self.whole else layer)(x, None)[0]

    same(Root(cut=True), Root(), X)
    same(Root(whole=True), Root(), X)


def test_a_bound_module_and_its_copies():
    variables = Block().init(jax.random.key(0), X)
    want = Block().apply(variables, X)
    close(Block().shard(**CUT).bind(variables)(X), want)
    close(Block().bind(variables).shard(**CUT)(X), want)
    again, _ = Block().shard(**CUT).bind(variables).unbind()
    close(again.apply(variables, X), want)
    close(again.clone().copy(name="other").apply(variables, X), want)
    again = pickle.loads(pickle.dumps(Block().shard(**CUT)))
    assert again == Block().shard(**CUT)


def test_names_of_parameters_are_paths_in_the_module_or_from_the_root():
    variables = Block().init(jax.random.key(0), X)
    for name in ("dense2.kernel", "self.dense2.kernel", "params/dense2/kernel", "self.block1.dense2.kernel"):
        block = Block().shard(in_strategy=((1, 8),), parameter_plan={name: (8, 1)})
        plan = jshard.flax.plan_of(block, variables, X)
        assert [r.path for r in plan.inputs if r.pinned] == ["variables.params.dense2.kernel", "x"], name


def test_operators_know_their_module():
    variables = Block().init(jax.random.key(0), X)
    plan = jshard.flax.plan_of(Block().shard(**CUT), variables, X)
    dots = [r.module for r in plan.operators if r.primitive == "dot_general"]
    assert dots == ["Block/dense1", "Block/dense2"]


def test_a_second_call_plans_and_compiles_nothing():
    variables = Net(cut=()).init(jax.random.key(0), X)
    net, traced = Net(cut=(1,), options=tuple(CUT.items())), []

    class Counted(nn.Module):
        @nn.compact
        def __call__(self, x):
            traced.append(1)
            return nn.Dense(32)(x)

    net = Net(Counted, (1, 2, 3), tuple(CUT.items()))
    variables = net.init(jax.random.key(0), X)
    traced.clear()
    net.apply(variables, X)
    assert len(traced) == 3
    net.apply(variables, X)
    jax.jit(net.apply)(variables, X)
    assert len(traced) == 3


def test_a_field_an_attribute_or_a_method_named_shard_stays_the_users():
    class Field(nn.Module):
        shard: int
        features: int

        @nn.compact
        def __call__(self, x):
            return nn.Dense(self.features)(x) * self.shard

    class Method(nn.Module):
        def shard(self):
            return "mine"

    assert Field(2, 32).shard == 2 and Method().shard() == "mine"
    assert [f.default for f in dataclasses.fields(Field) if f.name == "shard"] == [dataclasses.MISSING]
    same(jshard.flax.shard_module(Field(2, 32), **CUT), Field(2, 32), X)


def test_a_sharded_child_of_a_sharded_parent_is_refused():
    net = Net(options=tuple(CUT.items()))
    variables = net.init(jax.random.key(0), X)
    with pytest.raises(NestedShardError, match=r"^Net has the sharded module block1 \(Block\) inside"):
        net.shard(**CUT).apply(variables, X)
