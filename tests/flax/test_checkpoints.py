"""Orbax checkpoints saved under one plan are restored under another, on fewer devices, bit for bit."""

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn, nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh

import jshard.flax


X = jax.ShapeDtypeStruct((16, 30), "float32")
TX = optax.adam(1e-2)


class Net(nnx.Module):
    def __init__(self, rngs):
        # 30 is no multiple of 8: what a plan cannot cut it leaves whole, and pads nothing.
        self.fc1, self.fc2 = nnx.Linear(30, 64, rngs=rngs), nnx.Linear(64, 30, rngs=rngs)
        self.norm = nnx.BatchNorm(30, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.fc2(nnx.relu(self.fc1(x))))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(30, name="fc2")(nn.relu(nn.Dense(64, name="fc1")(x)))


def nnx_state():
    model = Net(nnx.Rngs(0))
    return {"model": nnx.state(model), "optimizer": nnx.state(nnx.Optimizer(model, TX, wrt=nnx.Param))}


def linen_state():
    params = LinenNet().init(jax.random.key(0), np.zeros(X.shape, "float32"))["params"]
    return TrainState.create(apply_fn=None, params=params, tx=TX)


def plan_for(kind, devices, cuts):
    pins = dict(parameter_plan=cuts, mesh=Mesh(np.array(jax.devices()[:devices]), ("x",)))
    if kind == "nnx":
        return jshard.flax.plan_of(nnx.eval_shape(lambda: Net(nnx.Rngs(0))).shard(**pins), X)
    shapes = {"params": jax.eval_shape(linen_state).params}
    return jshard.flax.plan_of(LinenNet().shard(**pins), shapes, X)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_a_checkpoint_of_one_plan_is_restored_under_another(kind, tmp_path):
    build = {"nnx": nnx_state, "linen": linen_state}[kind]
    state = build()
    plan = plan_for(kind, 8, {"fc1.kernel": (1, 8), "fc2.kernel": (8, 1)})
    placed = jshard.flax.place(state, plan)
    cut = [a for a in jax.tree.leaves(placed) if not a.sharding.is_fully_replicated]
    assert len(cut) >= 6  # two kernels, with two moments each
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", placed)
        checkpointer.wait_until_finished()
        written = checkpointer.metadata(tmp_path / "saved")
        named = {
            ".".join(str(getattr(k, "key", k)) for k in path).removesuffix(".value"): tuple(leaf.shape)
            for path, leaf in jax.tree_util.tree_leaves_with_path(written.item_metadata.tree)
            if leaf.shape
        }
        for name, shape in {
            "fc1.kernel": (30, 64),
            "fc1.bias": (64,),
            "fc2.kernel": (64, 30),
            "fc2.bias": (30,),
        }.items():
            assert [s for n, s in named.items() if n.endswith(name)] == [shape] * 3, (name, named)
        for devices in (8, 4, 2):
            other = plan_for(kind, devices, {"fc1.kernel": (2, 1), "fc2.kernel": (1, 2)})
            wanted = jshard.flax.shardings_for(placed, other)
            shapes = jax.tree.map(
                lambda a, s: jax.ShapeDtypeStruct(np.shape(a), a.dtype, sharding=s), placed, wanted
            )
            restored = checkpointer.restore(tmp_path / "saved", shapes)
            assert jax.tree.structure(restored) == jax.tree.structure(placed)
            for a, b, s in zip(*map(jax.tree.leaves, (restored, placed, wanted)), strict=True):
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
                assert a.sharding.is_equivalent_to(s, a.ndim) and len(a.sharding.device_set) == devices
            kernels = [a for a in jax.tree.leaves(restored) if a.shape == (30, 64)]
            assert {a.sharding.shard_shape(a.shape) for a in kernels} == {(15, 64)}
