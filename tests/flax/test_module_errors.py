"""Error texts of `.shard` on Flax modules for wrong input, in nnx and in linen."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn, nnx
from flax.errors import CallCompactUnboundModuleError

import jshard.flax
from jshard._core.errors import NestedShardError, PlanMismatchError, ShardError, StrategyError


X = jnp.ones((16, 32))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.dense1, self.dense2 = nnx.Linear(32, 32, rngs=rngs), nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, x):
        return self.dense2(nnx.gelu(self.dense1(x)))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.block1, self.block2 = Block(rngs), Block(rngs)

    def __call__(self, x):
        return self.block2(self.block1(x))


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(32, name="dense2")(nn.gelu(nn.Dense(32, name="dense1")(x)))


class LinenNet(nn.Module):
    def setup(self):
        self.block1, self.block2 = LinenBlock().shard(in_strategy=((8, 1),)), LinenBlock()

    def __call__(self, x):
        return self.block2(self.block1(x))


class Silent(nnx.Module):
    def encode(self, x):
        return x


class LinenSilent(nn.Module):
    def encode(self, x):
        return x


def block():
    return Block(nnx.Rngs(0))


def call(**options):
    """A call of a sharded nnx block."""
    return lambda: block().shard(**options)(X)


def apply(**options):
    """The same in linen."""
    variables = LinenBlock().init(jax.random.key(0), X)
    return lambda: LinenBlock().shard(**options).apply(variables, X)


def inner_first():
    net = Net(nnx.Rngs(0))
    net.block1.shard(in_strategy=((8, 1),))
    return net.shard(in_strategy=((8, 1),))


def outer_first():
    net = Net(nnx.Rngs(0)).shard(in_strategy=((8, 1),))
    net.block2.shard(in_strategy=((8, 1),))
    return net(X)


def linen_nested():
    net = LinenNet()
    return net.shard(in_strategy=((8, 1),)).apply(net.init(jax.random.key(0), X), X)


def other_plan():
    return jshard.flax.plan_of(nnx.Linear(32, 8, rngs=nnx.Rngs(0)).shard(), X)


NOT_ONE_EACH = (
    "in_strategy of {} is (8, 1), not one entry per argument\n  where: {}.shard\n"
    "  write instead: in_strategy=((8, 1),) for x"
)
RANK = "{} has 3 dimensions"
ON_CLASS = "shard was called on the class {0}\n  where: {0}.shard\n  write instead: make a module first: {0}(...).shard(...)"
UNKNOWN = (
    "{}.__call__ has no argument 'y'\n  where: in_strategy['y']\n  write instead: one of x; nearest: 'x'"
)
NO_CALL = "{0} has no __call__\n  where: {0}.shard\n  write instead: shard a function of the module instead: "
NESTED = (
    "{0} has the sharded module {2} ({1}) inside\n  where: {3}\n"
    "  write instead: shard either {0} or {2}; pin {2} through parameter_plan of {0}"
)
ROWS = {
    "on a class": (lambda: Block.shard(in_strategy=((8, 1),)), ShardError, ON_CLASS.format("Block")),
    "on a linen class": (lambda: LinenBlock.shard(in_strategy=((8, 1),)), ShardError, ON_CLASS.format("LinenBlock")),
    "function of a class": (
        lambda: jshard.flax.shard_module(Block, in_strategy=((8, 1),)), ShardError, ON_CLASS.format("Block"),
    ),
    "one entry": (call(in_strategy=(8, 1)), StrategyError, NOT_ONE_EACH.format("Block", "Block")),
    "one entry, linen": (apply(in_strategy=(8, 1)), StrategyError, NOT_ONE_EACH.format("LinenBlock", "LinenBlock")),
    "too many entries": (
        call(in_strategy=((8, 1), None)), StrategyError,
        "in_strategy of Block has 2 entries, and the call takes 1: x\n  where: Block.shard\n"
        "  write instead: one entry per argument of the call, without self",
    ),
    "unknown argument": (call(in_strategy={"y": (8, 1)}), StrategyError, UNKNOWN.format("Block")),
    "unknown argument, linen": (apply(in_strategy={"y": (8, 1)}), StrategyError, UNKNOWN.format("LinenBlock")),
    "rank": (call(in_strategy=((8, 1, 1),)), StrategyError, "RANK x"),
    "rank, linen": (apply(in_strategy=((8, 1, 1),)), StrategyError, "RANK x"),
    "rank of a parameter": (call(parameter_plan={"dense1.bias": (8, 1)}), StrategyError, "RANK state.dense1.bias"),
    "rank of a parameter, linen": (
        apply(parameter_plan={"dense1.bias": (8, 1)}), StrategyError, "RANK variables.params.dense1.bias",
    ),
    "unknown names": (
        call(parameter_plan={"dense1.kernal": (8, 1), "dens2.bias": (8,)}, strict=True), StrategyError,
        "parameter_plan names no tensor of the arguments: 'dense1.kernal' (nearest: state.dense1.kernel, ",
    ),
    "unknown names, linen": (
        apply(parameter_plan={"self.dense1.kernal": (8, 1)}, strict=True), StrategyError,
        "parameter_plan names no tensor of the arguments: 'self.dense1.kernal' (nearest: variables.params.dense1.kernel, ",
    ),
    "nested": (inner_first, NestedShardError, NESTED.format("Net", "Block", "block1", "Net.block1")),
    "nested, the parent first": (outer_first, NestedShardError, NESTED.format("Net", "Block", "block2", "Net.block2")),
    "nested, linen": (
        linen_nested, NestedShardError, NESTED.format("LinenNet", "LinenBlock", "block1", "LinenBlock.shard"),
    ),
    "a plan for another model": (
        lambda: block().shard(plan=other_plan())(X), PlanMismatchError,
        "the plan is for state.bias float32[8], this call has float32[32]\n  where: plan= of Block\n",
    ),
    "no call": (lambda: Silent().shard(), ShardError, NO_CALL.format("Silent")),
    "no call, linen": (lambda: LinenSilent().shard(), ShardError, NO_CALL.format("LinenSilent")),
    "static_argnums": (
        lambda: block().shard(static_argnums=1), ShardError,
        "static_argnums counts the arguments of a function, and Block is a module\n  where: Block.shard\n"
        "  write instead: static_argnames, or shard a function over the module",
    ),
    "level": (lambda: block().shard(level=3), ShardError, "level"),
    "no module": (
        lambda: jshard.flax.shard_module(jnp.tanh), ShardError,
        "a PjitFunction is no Flax module\n  where: shard\n  write instead: a flax.nnx.Module or flax.linen.Module",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_bad_input(name):
    run, kind, text = ROWS[name]
    with pytest.raises(kind) as caught:
        run()
    if text.startswith("RANK "):
        assert "argument " + text[5:] in str(caught.value) and "dimension" in str(caught.value), caught.value
    else:
        assert str(caught.value).startswith(text), caught.value


def test_unknown_names_are_a_warning_with_the_nearest_names():
    with pytest.warns(UserWarning, match=r"'kernal' \(nearest: .*; .*'blok1.bias' \(n"):
        call(parameter_plan={"kernal": (8, 1), "blok1.bias": (8,)})()


def test_a_linen_module_without_variables_gets_what_flax_says():
    with pytest.raises(CallCompactUnboundModuleError):
        LinenBlock().shard(in_strategy=((8, 1),))(X)
    with pytest.raises(ShardError, match="^LinenBlock has no variables yet, and was given"):
        jshard.flax.plan_of(LinenBlock().shard(in_strategy=((8, 1),)), X)


def test_a_failing_call_changes_nothing():
    module = block()
    before = jax.tree.map(lambda a: a, nnx.state(module))
    with pytest.raises(StrategyError):
        module.shard(in_strategy={"y": (8, 1)})
    assert not hasattr(module, "_jshard")
    module.shard(in_strategy=((8, 1, 1),))
    with pytest.raises(StrategyError):
        module(X)
    jax.tree.map(lambda a, b: (a == b).all() or 1 / 0, nnx.state(module), before)
    module.shard(in_strategy=((8, 1),))
    assert module(X).shape == X.shape
