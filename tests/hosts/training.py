"""Training of an nnx model with batches of rows, saved and restored by orbax, in any number of processes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh

import jshard.flax


class Net(nnx.Module):
    """Two layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner, self.outer = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(nnx.relu(self.inner(x)))


def build() -> tuple[Net, nnx.Optimizer]:
    """The model and its optimizer."""
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def step(model: Net, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    """A step of training."""
    loss, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


def rows(number: int) -> tuple[np.ndarray, np.ndarray]:
    """This process's rows of a batch of 32."""
    rng = np.random.default_rng(number)
    x = rng.normal(size=(32, 16)).astype("f")
    own = slice(*(jax.process_index() + k for k in (0, 1)))
    parts = np.split(x, jax.process_count())[own][0]
    return parts, np.tanh(parts)


def train(read: str, write: str, begin: int, steps: int, cut: bool) -> list[float]:
    """The losses of some steps from a checkpoint on; `cut`: the first layer is cut by columns."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    function = jshard.shard(
        step,
        mesh=mesh,
        in_strategy={"x": (4, 1)},
        parameter_plan={"model.inner.kernel": (1, 2)} if cut else None,
        config={"local_batch": ["x", "y"]},
    )
    plan = function.plan(*nnx.eval_shape(build), *rows(begin))
    model, optimizer = jshard.flax.init(build, plan)
    with ocp.StandardCheckpointer() as checkpoints:
        if read:
            state = nnx.state((model, optimizer))
            shapes = jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state
            )
            nnx.update((model, optimizer), checkpoints.restore(read, shapes))
        losses = [function(model, optimizer, *rows(k)) for k in range(begin, begin + steps)]
        if write:
            checkpoints.save(write, nnx.state((model, optimizer)))
    return [float(x) for x in losses]
