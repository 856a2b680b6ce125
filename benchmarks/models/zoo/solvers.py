"""Programs of the Equinox family that solve something: lineax, optimistix, OTT, implicit steps of diffrax.

Their primitives hold the types of what they were traced with, and are run as they were traced
(`jshard/_lower/as_traced.py`). Problems are well conditioned, so that two float32 runs agree to rounding, and solved
to within rounding, so that one step more or less makes no difference.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.models.zoo.kinds import OPTIMIZER, Model, cross_entropy


BATCH, SIZE = 8, 8


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def _squares(out: Any, batch: Any) -> Any:
    return jnp.mean((out - batch["y"]) ** 2)


def _matrix(seed: int, *batch: int) -> np.ndarray:
    """Matrices whose singular values lie near 1."""
    return np.eye(SIZE, dtype=np.float32) + _normal(seed, *batch, SIZE, SIZE) / 12


def linear(solver: Callable[[Any], Any], symmetric: bool = False) -> Callable[[], Model]:
    """A parameter's matrix, solved for every row of the batch; `solver` is made from lineax."""

    def made() -> Model:
        import lineax as lx

        def apply(params: Any, state: Any, batch: Any, train: bool) -> Any:
            matrix = params["a"] @ params["a"].T if symmetric else params["a"]
            tags = lx.positive_semidefinite_tag if symmetric else ()
            operator = lx.MatrixLinearOperator(matrix, tags)
            solved = jax.vmap(lambda x: lx.linear_solve(operator, x, solver(lx)).value)(batch["x"])
            return jnp.tanh(solved) @ params["w"], state

        params = {"a": _matrix(1), "w": _normal(2, SIZE, 8)}
        return Model(params, {"x": _normal(3, BATCH, SIZE), "y": _normal(4, BATCH, 8)}, apply, _squares)

    return made


def batched() -> Model:
    """A matrix of its own for every row."""
    import lineax as lx

    def apply(params: Any, state: Any, batch: Any, train: bool) -> Any:
        def one(a: Any, x: Any) -> Any:
            return lx.linear_solve(lx.MatrixLinearOperator(a * params["scale"]), x).value

        return jax.vmap(one)(batch["a"], batch["x"]) @ params["w"], state

    params = {"scale": np.ones(SIZE, np.float32), "w": _normal(2, SIZE, 8)}
    batch = {"a": _matrix(5, BATCH), "x": _normal(3, BATCH, SIZE), "y": _normal(4, BATCH, 8)}
    return Model(params, batch, apply, _squares)


def least_squares() -> Model:
    """A regression of a parameter's features, differentiated through its solution."""
    import optimistix

    def apply(params: Any, state: Any, batch: Any, train: bool) -> Any:
        features = jnp.tanh(batch["x"] @ params["w"])

        def residual(z: Any, _: Any) -> Any:
            return jnp.concatenate([features @ z + 0.1 * jnp.tanh(z[0]) - batch["y"][:, 0], z])

        solver = optimistix.LevenbergMarquardt(rtol=1e-7, atol=1e-7)
        found = optimistix.least_squares(residual, solver, jnp.zeros(8), max_steps=40, throw=False)
        return batch["y"] * (features @ found.value)[:, None], state

    batch = {"x": _normal(3, 2 * BATCH, SIZE), "y": _normal(4, 2 * BATCH, 8)}
    return Model({"w": _normal(2, SIZE, 8) / 3}, batch, apply, _squares)


def root_finding() -> Model:
    """A layer that is a fixed point: ``z = tanh(z w + x u) / 2``, by Newton's method."""
    import optimistix

    def apply(params: Any, state: Any, batch: Any, train: bool) -> Any:
        def off(z: Any, x: Any) -> Any:
            return z - 0.5 * jnp.tanh(z @ params["w"] + x @ params["u"])

        solver = optimistix.Newton(rtol=1e-7, atol=1e-7)

        def one(x: Any) -> Any:
            return optimistix.root_find(off, solver, jnp.zeros(8), args=x, max_steps=20, throw=False).value

        return jax.vmap(one)(batch["x"]), state

    params = {"w": _normal(1, 8, 8) / 3, "u": _normal(2, SIZE, 8) / 2}
    return Model(params, {"x": _normal(3, BATCH, SIZE), "y": _normal(4, BATCH, 8)}, apply, _squares)


def soft_ranks() -> Model:
    """Differentiable ranks and quantiles by optimal transport: differentiated through the loop, and implicitly."""
    from ott.tools import soft_sort

    def apply(params: Any, state: Any, batch: Any, train: bool) -> Any:
        scores = jnp.tanh(batch["x"] @ params["w"])
        # The implicit derivative of `ranks` is a singular system (plain runs fail as well): only that of quantiles.
        ranks = (
            soft_sort.ranks(scores, axis=0, epsilon=0.1, implicit_diff=None)
            if train
            else soft_sort.ranks(scores, axis=0)
        )
        levels = jnp.asarray([0.25, 0.75])
        return ranks / len(scores) + soft_sort.quantile(scores, levels, axis=0, epsilon=0.1).sum(0), state

    batch = {"x": _normal(3, BATCH, SIZE), "y": _normal(4, BATCH, 8)}
    return Model({"w": _normal(2, SIZE, 8)}, batch, apply, _squares)


def sinkhorn() -> Model:
    """The cost of moving one cloud of points to another."""
    from ott.geometry import pointcloud
    from ott.solvers import linear as solvers

    def apply(params: Any, state: Any, batch: Any, train: bool) -> Any:
        moved = batch["x"] @ params["w"]
        cloud = pointcloud.PointCloud(moved, batch["y"], epsilon=0.5)
        return moved * 0.1 + solvers.solve(cloud, threshold=1e-5).reg_ot_cost, state

    batch = {"x": _normal(3, BATCH, SIZE), "y": _normal(4, BATCH, 8)}
    return Model({"w": _normal(2, SIZE, 8) / 3}, batch, apply, _squares)


def implicit_ode() -> Model:
    """A stiff equation by an implicit Runge-Kutta method: a root find in every stage of every step."""
    import diffrax

    def apply(params: Any, state: Any, batch: Any, train: bool) -> Any:
        term = diffrax.ODETerm(lambda t, y, args: jnp.tanh(y @ params["w"]) - 2 * y)
        control = diffrax.PIDController(rtol=1e-3, atol=1e-5)

        def one(y0: Any) -> Any:
            return diffrax.diffeqsolve(
                term, diffrax.Kvaerno3(), 0.0, 1.0, 0.1, y0, stepsize_controller=control, max_steps=32
            ).ys[-1]  # fmt: skip

        return jax.vmap(one)(batch["x"]), state

    batch = {"x": _normal(3, BATCH, 8), "y": _normal(4, BATCH, 8)}
    return Model({"w": _normal(2, 8, 8) / 3}, batch, apply, _squares)


def equinox_step() -> Model:
    """A training step as Equinox' users write it: filtered gradients, updates applied to the module."""
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0), 3)
    network = eqx.nn.Sequential([
        eqx.nn.Conv1d(2, 8, 3, padding=1, key=keys[0]),
        eqx.nn.Lambda(jax.nn.gelu),
        eqx.nn.Lambda(jnp.ravel),
        eqx.nn.LayerNorm(8 * SIZE),
        eqx.nn.MLP(8 * SIZE, 8, 32, 1, key=keys[1]),
    ])  # fmt: skip
    arrays, rest = eqx.partition(network, eqx.is_array)

    def apply(params: Any, state: Any, batch: Any, train: bool) -> Any:
        return jax.vmap(eqx.combine(params, rest))(batch["x"]), state

    def step(params: Any, state: Any, optimizer: Any, batch: Any) -> Any:
        @eqx.filter_value_and_grad
        def loss(module: Any) -> Any:
            return cross_entropy(eqx.filter_vmap(module)(batch["x"]), batch)

        module = eqx.combine(params, rest)
        value, grads = loss(module)
        updates, optimizer = OPTIMIZER.update(grads, optimizer, eqx.filter(module, eqx.is_array))
        module = eqx.apply_updates(module, updates)
        return value, eqx.filter(grads, eqx.is_array), eqx.filter(module, eqx.is_array), state, optimizer

    batch = {"x": _normal(1, BATCH, 2, SIZE), "labels": np.arange(BATCH, dtype=np.int32) % 8}
    return Model(arrays, batch, apply, cross_entropy, step=step)


MODELS = {
    "lineax LU": linear(lambda lx: lx.LU()),
    "lineax QR": linear(lambda lx: lx.QR()),
    "lineax SVD": linear(lambda lx: lx.SVD()),
    "lineax GMRES": linear(lambda lx: lx.GMRES(rtol=1e-7, atol=1e-7, max_steps=30)),
    "lineax CG": linear(lambda lx: lx.CG(rtol=1e-7, atol=1e-7, max_steps=30), symmetric=True),
    "lineax batched": batched,
    "optimistix least squares": least_squares,
    "optimistix root finding": root_finding,
    "OTT soft ranks": soft_ranks,
    "OTT Sinkhorn": sinkhorn,
    "diffrax implicit": implicit_ode,
    "equinox training step": equinox_step,
}
