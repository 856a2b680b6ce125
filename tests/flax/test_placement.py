"""Parameters and optimizer state created in their planned shardings: no device ever holds more than its share."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh

import jshard.flax
from jshard._core.errors import PlanMismatchError, ShardError


MESH = Mesh(np.array(jax.devices()[:8]), ("x",))
WIDTH = 512
X = jax.ShapeDtypeStruct((16, WIDTH), "float32")
CUT = dict(
    in_strategy={"x": (1, 1)}, parameter_plan={"**.fc1.kernel": (1, 8), "**.fc2.kernel": (8, 1)}, mesh=MESH
)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.fc1 = nnx.Linear(WIDTH, WIDTH, rngs=rngs, use_bias=False)
        self.fc2 = nnx.Linear(WIDTH, WIDTH, rngs=rngs, use_bias=False)

    def __call__(self, x):
        return self.fc2(nnx.relu(self.fc1(x)))


class Deep(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(3)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(WIDTH, name="fc1", use_bias=False)(x))
        return nn.Dense(WIDTH, name="fc2", use_bias=False)(x)


class LinenDeep(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = LinenLayer()(x)
        return x


TX = optax.adam(1e-3)


def nnx_pair():
    model = Deep(nnx.Rngs(0))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


def train_state():
    module = LinenDeep()
    params = module.init(jax.random.key(0), jnp.zeros(X.shape))["params"]
    return TrainState.create(apply_fn=module.apply, params=params, tx=TX)


def nnx_plan():
    return jshard.flax.plan_of(nnx.eval_shape(lambda: Deep(nnx.Rngs(0))).shard(**CUT), X)


def linen_plan():
    shapes = {"params": jax.eval_shape(train_state).params}
    return jshard.flax.plan_of(LinenDeep().shard(**CUT), shapes, X)


def bytes_per_device():
    """Bytes of every live buffer, by device."""
    held: dict[object, int] = {}
    for a in jax.live_arrays():
        for s in a.addressable_shards:
            held[s.device] = held.get(s.device, 0) + s.data.nbytes
    return held


@pytest.mark.parametrize(("build", "plan"), [(nnx_pair, nnx_plan), (train_state, linen_plan)])
def test_init_holds_one_share_a_device(build, plan):
    plan, before = plan(), bytes_per_device()
    made = jshard.flax.init(build, plan)
    arrays = [a for a in jax.tree.leaves(nnx.state(made) if build is nnx_pair else made)]
    total = sum(a.nbytes for a in arrays)
    assert total > 3 * 6 * WIDTH * WIDTH * 4
    after = bytes_per_device()
    for device in MESH.devices.flat:
        assert after[device] - before.get(device, 0) < 1.2 * total / 8
    for a in arrays:
        assert a.ndim < 2 or {s.data.nbytes for s in a.addressable_shards} == {a.nbytes // 8}


@pytest.mark.parametrize(("build", "plan"), [(nnx_pair, nnx_plan), (train_state, linen_plan)])
def test_the_compiled_initialisation_never_holds_a_whole_kernel(build, plan):
    shapes = nnx.split(nnx.eval_shape(build))[1] if build is nnx_pair else jax.eval_shape(build)
    make = (lambda: nnx.split(build())[1]) if build is nnx_pair else build
    wanted = jshard.flax.shardings_for(shapes, plan())
    compiled = jax.jit(make, out_shardings=wanted).lower().compile()
    total = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(shapes) if a.ndim)
    assert compiled.memory_analysis().output_size_in_bytes < 1.01 * total / 8
    assert f"[{WIDTH},{WIDTH // 8}]" in compiled.as_text()
    assert f"[{WIDTH},{WIDTH}]" not in compiled.as_text()  # nothing whole, however briefly


def test_values_are_those_of_the_plain_initialisation():
    made, plain = jshard.flax.init(nnx_pair, nnx_plan()), nnx_pair()
    for a, b in zip(jax.tree.leaves(nnx.state(made)), jax.tree.leaves(nnx.state(plain)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    assert type(made[0]) is Deep and made[0](jnp.ones(X.shape)).shape == X.shape


def test_place_moves_what_exists_and_keeps_the_values():
    plan, model = nnx_plan(), Deep(nnx.Rngs(0))
    want = jax.tree.map(np.asarray, nnx.state(model))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    assert jshard.flax.place(model, plan) is model and jshard.flax.place(optimizer, plan) is optimizer
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), want)
    for tree in (nnx.state(model), nnx.state(optimizer), jshard.flax.place(train_state(), linen_plan())):
        assert all(len(a.sharding.device_set) == 8 for a in jax.tree.leaves(tree))
        assert not any(a.ndim > 1 and a.sharding.is_fully_replicated for a in jax.tree.leaves(tree))


def test_a_plan_of_another_model_or_none_is_refused():
    class Other(nnx.Module):
        def __init__(self, rngs):
            self.fc1, self.head = nnx.Linear(8, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)

    rows = [
        (lambda p: jshard.flax.place(Other(nnx.Rngs(0)), p), PlanMismatchError,
         r"^the plan of Deep has no fc1.bias of shape \(4,\), nor 3 more of the 4 parameters\n  where: fc1.bias\n"
         r"  write instead: the plan of this model; nearest in the plan: "),
        (lambda p: jshard.flax.place({"layers": {"0": {"fc1": {"kernel": jnp.ones((8, 4))}}}}, p), PlanMismatchError,
         r"no layers.0.fc1.kernel of shape \(8, 4\)\n.*\n.*; the plan has it as \(512, 512\)$"),
        (lambda p: jshard.flax.init(lambda: Other(nnx.Rngs(0)), p), PlanMismatchError, "has no fc1.bias of shape"),
        (lambda p: jshard.flax.init(Deep(nnx.Rngs(0)), p), ShardError,
         r"^init takes a function that makes the model, not a Deep\n.*\n  write instead: init\(lambda: Net"),
        (lambda p: jshard.flax.place(LinenDeep(), p), ShardError,
         r"^place takes parameters, and LinenDeep holds none\n.*\n.*place\(module.init\(key, x\), plan\)"),
        (lambda p: jshard.flax.place(Deep, p), ShardError, "^place takes parameters, and Deep holds none"),
        (lambda p: jshard.flax.place({}, p.inputs), ShardError, "^place takes a plan, not a tuple\n"),
    ]  # fmt: skip
    plan = nnx_plan()
    for call, kind, text in rows:
        with pytest.raises(kind, match=text):
            call(plan)
