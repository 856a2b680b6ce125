"""Training steps of small networks cut along space or time, whose sizes do not divide: gradients are those of plain JAX.

The networks are those of acceptance tests, shrunken: a ResNet (stem, pooling, a residual block), a ConvNeXt (patches,
depthwise windows, norm over features), a block like Mamba-2's (causal windows, a state space in chunks). The cut of what
they compute inside is pinned, so neighbours exchange edges over blocks that end in padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jshard


IMAGES, SEQUENCES = ("NHWC", "HWIO", "NHWC"), ("NHC", "HIO", "NHC")
Pinned = Callable[[jax.Array], jax.Array]


def conv(x: Any, w: Any, stride: int = 1, groups: int = 1, padding: str = "SAME") -> Any:
    return lax.conv_general_dilated(
        x, w, (stride, stride), padding, dimension_numbers=IMAGES, feature_group_count=groups
    )


def norm(x: Any, axes: tuple[int, ...]) -> Any:
    centred = x - x.mean(axes, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(axes, keepdims=True) + 1e-5)


def resnet(pinned: Pinned, w: Any, x: Any) -> Any:
    x = pinned(jax.nn.relu(norm(conv(x, w[0], 2), (0, 1, 2))))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    y = pinned(jax.nn.relu(conv(x, w[1], 2)))
    return jax.nn.relu(y @ w[2] + conv(x, w[3], 2)).mean((1, 2))


def convnext(pinned: Pinned, w: Any, x: Any) -> Any:
    x = pinned(conv(x, w[0], 4, padding="VALID"))
    y = norm(pinned(conv(x, w[1], groups=w[1].shape[-1])), (3,))
    x = x + jax.nn.gelu(y @ w[2]) @ w[3]
    x = pinned(conv(norm(x, (3,)), w[4], 2, padding="VALID"))
    return x.mean((1, 2)) @ w[5]


def mamba(pinned: Pinned, w: Any, x: Any, chunk: int = 4) -> Any:
    def causal(y: Any, kernel: Any) -> Any:
        features = y.shape[-1]
        edges = [(kernel.shape[0] - 1, 0)]
        y = lax.conv_general_dilated(
            y, kernel, (1,), edges, dimension_numbers=SEQUENCES, feature_group_count=features
        )
        return pinned(jax.nn.silu(y))

    batch, length, _ = x.shape
    values, b = (causal(x @ w[k], w[k + 1]) for k in (0, 2))
    rates = -jax.nn.softplus(x @ w[4])[..., 0].reshape(batch, -1, chunk)
    values, b, c = (y.reshape(batch, length // chunk, chunk, -1) for y in (values, b, x[..., :3]))
    total = jnp.cumsum(rates, 2)
    within = jnp.tril(jnp.ones((chunk, chunk), bool))
    decay = jnp.exp(jnp.where(within, total[..., None] - total[..., None, :], -jnp.inf))
    y = jnp.einsum("zcln,zcsn,zcls,zcsp->zclp", c, b, decay, values)
    states = jnp.einsum("zcsn,zcs,zcsp->zcpn", b, jnp.exp(total[..., -1:] - total), values)
    decays = jnp.exp(total[..., -1])[..., None, None]
    _, ends = lax.associative_scan(
        lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]),
        (jnp.broadcast_to(decays, states.shape), states),
        axis=1,
    )
    before = jnp.pad(ends, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
    y = y + jnp.einsum("zcln,zcpn,zcl->zclp", c, before, jnp.exp(total))
    return x + y.reshape(batch, length, -1) @ w[5]


SHAPES: dict[str, tuple[Any, P, tuple[int, ...], list[tuple[int, ...]]]] = {
    "resnet": (
        resnet, P(None, "x", None), (2, 54, 400, 3),
        [(7, 7, 3, 4), (3, 3, 4, 4), (4, 8), (1, 1, 4, 8)],
    ),
    "convnext": (
        convnext, P(None, "x", "y"), (2, 92, 52, 3),
        [(4, 4, 3, 4), (7, 7, 1, 4), (4, 8), (8, 4), (2, 2, 4, 6), (6, 5)],
    ),
    "mamba": (
        mamba, P(None, ("x", "y")), (1, 52, 6),
        [(6, 4), (4, 1, 4), (6, 3), (4, 1, 3), (6, 1), (4, 6)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_of_networks_whose_sizes_do_not_divide(name: str) -> None:
    network, spec, shape, weights = SHAPES[name]
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(5)
    with jax.enable_x64(True):
        x = rng.standard_normal(shape)
        w = [rng.standard_normal(s) / np.sqrt(np.prod(s[:-1])) for s in weights]

        def step(pinned: Pinned) -> Any:
            return jax.value_and_grad(lambda w, x: (network(pinned, w, x) ** 2).mean(), (0, 1))

        def pinned(y: jax.Array) -> jax.Array:
            return lax.with_sharding_constraint(y, NamedSharding(mesh, spec))

        f = jshard.shard(step(pinned), mesh=mesh, level=0, config={"pad": True})
        plan = f.plan(w, x, verify=True)
        assert plan.padding
        assert plan.verification is not None
        assert plan.verification.ok
        assert [c for c in plan.collectives if c.kind == "permute"]
        plain = jax.jit(step(lambda y: y)).lower(w, x)
        want = plain.compile(
            {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
        )(w, x)
        for a, b in zip(jax.tree.leaves(f(w, x)), jax.tree.leaves(want), strict=True):
            assert float(jnp.abs(a - b).max()) <= 1e-10 * float(jnp.abs(b).max())
