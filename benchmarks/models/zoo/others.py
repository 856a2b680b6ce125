"""Models of equinox, haiku and diffrax. Each function imports its library, so that one may be missing."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.models.zoo.kinds import Model, cross_entropy


BATCH = 8


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def equinox_mlp() -> Model:
    """A module whose leaves are partly functions: its arrays are the parameters."""
    import equinox as eqx

    arrays, rest = eqx.partition(eqx.nn.MLP(16, 8, 64, 2, key=jax.random.key(0)), eqx.is_array)

    def apply(params, state, batch, train):
        return jax.vmap(eqx.combine(params, rest))(batch["x"]), state

    batch = {"x": _normal(1, BATCH, 16), "labels": np.arange(BATCH, dtype=np.int32) % 8}
    return Model(arrays, batch, apply, cross_entropy)


def haiku_lstm() -> Model:
    """A scan over time whose carry is two tensors."""
    import haiku as hk

    def network(x):
        core = hk.LSTM(32)
        out, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[0]), time_major=False)
        return hk.Linear(10)(out)

    pure = hk.without_apply_rng(hk.transform(network))
    x = _normal(2, BATCH, 12, 16)

    def apply(params, state, batch, train):
        return pure.apply(params, batch["x"]), state

    labels = np.random.default_rng(3).integers(0, 10, (BATCH, 12), dtype=np.int32)
    return Model(pure.init(jax.random.key(0), x), {"x": x, "labels": labels}, apply, cross_entropy)


def diffrax_ode() -> Model:
    """A neural ODE with adaptive steps, a loop with a trip count of its own for each sample."""
    import diffrax
    import equinox as eqx

    arrays, rest = eqx.partition(
        eqx.nn.MLP(4, 4, 32, 2, jax.nn.softplus, key=jax.random.key(0)), eqx.is_array
    )
    times = jnp.linspace(0.0, 1.0, 5)

    def solve(params: Any, y0: Any) -> Any:
        term = diffrax.ODETerm(lambda t, y, args: eqx.combine(params, rest)(y))
        return diffrax.diffeqsolve(
            term, diffrax.Tsit5(), 0.0, 1.0, 0.1, y0, saveat=diffrax.SaveAt(ts=times),
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6), max_steps=64,
        ).ys  # fmt: skip

    def apply(params, state, batch, train):
        return jax.vmap(solve, (None, 0))(params, batch["y0"]), state

    def loss(out, batch):
        return jnp.mean((out - batch["ys"]) ** 2)

    return Model(arrays, {"y0": _normal(4, BATCH, 4), "ys": _normal(5, BATCH, 5, 4)}, apply, loss)


MODELS = {"equinox MLP": equinox_mlp, "haiku LSTM": haiku_lstm, "diffrax neural ODE": diffrax_ode}
