"""Small random programs, and the cost and peak of every assignment of their networks, each table written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jshard._network.build import PlanningNetwork
from jshard._program.memory.liveness import liveness
from jshard._schedule.peak import peak_bytes
from jshard._schedule.schedule import assignment_of, schedule
from jshard._search import CostNetwork


def every_cost(net: CostNetwork) -> np.ndarray:
    """Cost of every assignment: one axis for each variable."""
    sizes = [net.num_states(v) for v in range(net.size)]
    total = np.zeros(sizes)
    for v in range(net.size):
        total += _along(net.unary[net.node_table[v]], (v,), net.size)
    for (i, j), k in zip(net.edges, net.edge_table, strict=True):
        total += _along(net.pairwise[k], (int(i), int(j)), net.size)
    return total


def every_peak(built: PlanningNetwork, cost: np.ndarray, most: int = 4000) -> np.ndarray:
    """True peak of every assignment that is possible, counted over its schedule; inf elsewhere."""
    possible = np.argwhere(np.isfinite(cost))
    assert len(possible) <= most
    life = liveness(built.program, built.donated)
    out = np.full(cost.shape, np.inf)
    for a in possible:
        out[tuple(a)] = peak_bytes(schedule(assignment_of(built, tuple(a.tolist()))), life, built.donated)
    return out


def _along(table: np.ndarray, axes: tuple[int, ...], n: int) -> np.ndarray:
    if axes[0] > axes[-1]:
        table, axes = table.T, axes[::-1]
    shape = [1] * n
    for a, s in zip(axes, table.shape, strict=True):
        shape[a] = s
    return np.asarray(table).reshape(shape)


def random_program(seed: int) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """Two to six operators on two arrays; the last value and sometimes one more are the results."""
    rng = np.random.default_rng(seed)
    n, m = (int(s) for s in rng.choice([4, 6, 8], 2))
    picks = rng.integers(0, 7, int(rng.integers(2, 6)))
    second = bool(rng.random() < 0.3)

    def fn(x: Any, w: Any) -> Any:
        values = [x]
        for p in picks:
            v = values[-1]
            if p == 0:
                v = v @ w if v.shape[-1] == w.shape[0] else v @ w.T
            elif p == 1:
                v = jnp.tanh(v)
            elif p == 2:
                v = v + values[int(p) % len(values)] if v.shape == values[int(p) % len(values)].shape else -v
            elif p == 3:
                v = v.T @ v
                v = v if v.shape[0] == w.shape[0] else v @ w.T
            elif p == 4:
                v = v * v.sum(0)
            elif p == 5:
                v = v - v.max()
            else:
                v = jnp.flip(v, 0)
            values.append(v)
        return (values[-1], values[1]) if second else values[-1]

    return fn, [jax.ShapeDtypeStruct((n, m), "float32"), jax.ShapeDtypeStruct((m, m), "float32")]
