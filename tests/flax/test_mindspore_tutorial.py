"""The networks of MindSpore's tutorial on `shard`, in nnx and linen, as function and as method, against unsharded ones.

`Net1` is sharded by the function, `Net2` by the method: three blocks of Dense 32-32, GELU, Dense 32-32, the
first of them with `in_strategy=((1, 8),)` and `parameter_plan={"self.block1.dense2.kernel": (8, 1)}`.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax.sharding import Mesh

import jshard.flax
from jshard._spec.tree_paths import path_name
from tests.helpers.nnx_blocks import Net as Plain


MESH = Mesh(np.array(jax.devices()[:8]), ("x",))
PINS = dict(in_strategy=((1, 8),), parameter_plan={"self.block1.dense2.kernel": (8, 1)}, mesh=MESH)
X = jax.random.normal(jax.random.key(1), (64, 32))


class Net1(Plain):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.block1_sharded = jshard.shard(self.block1, **PINS)

    def __call__(self, x):
        return self.block3(self.block2(self.block1_sharded(x)))


class Net2(Plain):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.block1.shard(**PINS)


class Net3(Plain):
    """What MindSpore refuses: the result of the function under the block's own name."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.block1 = jshard.shard(self.block1, **PINS)


class LinenBlock(nn.Module):
    def setup(self):
        self.dense1, self.dense2 = nn.Dense(32), nn.Dense(32)

    def __call__(self, x):
        return self.dense2(nn.gelu(self.dense1(x)))


class LinenPlain(nn.Module):
    def setup(self):
        self.block1, self.block2, self.block3 = LinenBlock(), LinenBlock(), LinenBlock()

    def __call__(self, x):
        return self.block3(self.block2(self.block1(x)))


class LinenNet1(nn.Module):
    def setup(self):
        self.block1, self.block2, self.block3 = LinenBlock(), LinenBlock(), LinenBlock()
        self.block1_sharded = jshard.shard(self.block1, **PINS)

    def __call__(self, x):
        return self.block3(self.block2(self.block1_sharded(x)))


class LinenNet2(nn.Module):
    def setup(self):
        self.block1, self.block2, self.block3 = LinenBlock().shard(**PINS), LinenBlock(), LinenBlock()

    __call__ = LinenPlain.__call__


class LinenNet3(nn.Module):
    def setup(self):
        self.block1, self.block2, self.block3 = LinenBlock(), LinenBlock(), LinenBlock()
        self.block1 = jshard.shard(self.block1, **PINS)

    __call__ = LinenPlain.__call__


def functional(net):
    """A net as parameters by path, a pure function of them, and the plan of each sharded block."""
    if issubclass(net, nnx.Module):
        graph, state = nnx.split(net(nnx.Rngs(0)))
        return (
            state,
            lambda s, x: nnx.merge(graph, s)(x),
            lambda: jshard.flax.plans_of(nnx.merge(graph, state), X),
        )
    module = net()
    state = module.init(jax.random.key(0), X)
    return state, module.apply, lambda: jshard.flax.plans_of(module, state, X)


def compare(got, want, exact=False):
    """Every leaf: same paths, same values."""
    got, want = (
        {jax.tree_util.keystr(p): v for p, v in jax.tree_util.tree_leaves_with_path(t)} for t in (got, want)
    )
    assert got.keys() == want.keys()
    for name in want:
        tolerance = 0 if exact else 1e-5
        np.testing.assert_allclose(got[name], want[name], rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize(
    ("net", "plain"),
    [(Net1, Plain), (Net2, Plain), (Net3, Plain), (LinenNet1, LinenPlain), (LinenNet2, LinenPlain),
     (LinenNet3, LinenPlain)],
    ids=lambda n: n.__name__,
)  # fmt: skip
def test_a_net_with_one_sharded_block_computes_learns_and_lies_as_planned(net, plain):
    state, run, plans = functional(net)
    plain_state, plain_run, _ = functional(plain)
    compare(state, plain_state, exact=True)
    (path, plan), *others = plans().items()
    assert path.startswith("block1") and not others  # the other blocks are untouched

    mesh = plan.mesh
    assert {r.path.split(".", 1)[-1]: r.layout.cuts(mesh) for r in plan.inputs if r.pinned} == {
        "x": (1, 8), ("params." if issubclass(net, nn.Module) else "") + "dense2.kernel": (8, 1),
    }  # fmt: skip

    def loss(state, x, run):
        return jnp.mean(run(state, x) ** 2)

    # The block's parameters in their shardings, the rest on every device: what one training step gives back.
    placed = jax.device_put(state, jax.NamedSharding(MESH, jax.P()))
    inner = placed["params"] if "params" in state else placed
    inner["block1"] = jshard.flax.place(inner["block1"], plan)
    shardings = jax.tree.map(lambda a: a.sharding, placed)
    wanted = {r.path.split(".", 1)[-1].removeprefix("params."): r.layout.spec for r in plan.inputs}
    for where, leaf in jax.tree_util.tree_leaves_with_path(placed):
        name = path_name(where).removeprefix("params.")
        spec = wanted[name.removeprefix("block1.")] if name.startswith("block1.") else jax.P()
        assert leaf.sharding.is_equivalent_to(jax.NamedSharding(MESH, spec), leaf.ndim), name

    def step(state, x, run):
        value, grads = jax.value_and_grad(loss)(state, x, run)
        return value, grads, jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)

    outs = None, shardings, shardings
    value, grads, new = jax.jit(step, static_argnums=2, out_shardings=outs)(placed, X, run)
    want = jax.jit(step, static_argnums=2)(plain_state, X, plain_run)
    compare((value, grads, new), want)
    for tree in (grads, new):
        for a, s in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True):
            assert a.sharding.is_equivalent_to(s, a.ndim)
    np.testing.assert_allclose(run(placed, X), plain_run(plain_state, X), rtol=1e-5, atol=1e-5)

    # In the compiled net, what carries the plan's mark is what the plan foresees.
    x = jax.device_put(X, jax.NamedSharding(MESH, jax.P(None, "x")))
    text = jax.jit(run).lower(placed, x).compile().as_text()
    emitted = re.findall(r" (all-to-all|all-gather|all-reduce|reduce-scatter)(?:-start)?\(.*jshard\.", text)
    assert sorted(emitted) == sorted(c.kind.replace("_", "-") for c in plan.collectives)
