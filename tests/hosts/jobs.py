"""What the processes of the tests run: every function is called in all of them, with the same arguments."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np

import jshard


def digest(x: Any) -> str:
    """A hash of an array of all processes."""
    from jax.experimental import multihost_utils

    whole = x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True)
    return hashlib.sha256(np.ascontiguousarray(np.asarray(whole)).tobytes()).hexdigest()[:12]


def two_layers(p: Any, x: Any) -> Any:
    """A small network."""
    return jax.nn.relu(x @ p["in"]) @ p["out"]


def parameters(n: int = 16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"in": rng.normal(size=(n, 4 * n)).astype("f"), "out": rng.normal(size=(4 * n, n)).astype("f")}


def batch(rows: int = 32, n: int = 16, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, n)).astype("f")


def same_plan_and_results(level: int) -> Any:
    """Plan, run twice and verify: (plan, values, whether emitted as planned, exchanges)."""
    f = jshard.shard(two_layers, in_strategy=(None, (8, 1)), level=level)
    p, x = parameters(), batch()
    before = exchanges()
    y = f(p, x)
    again, after = f(p, x), exchanges()
    f(p, x)
    plan = f.plan(p, x, verify=True)
    error = float(np.abs(np.asarray(digest_array(y)) - two_layers(p, x)).max())
    same = digest(y) == digest(again)
    ok = plan.verification is not None and plan.verification.ok
    return [hashlib.sha256(plan.to_json().encode()).hexdigest(), digest(y), error < 1e-4, same, ok, after - before,
            exchanges() - after]  # fmt: skip


def digest_array(x: Any) -> np.ndarray:
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def exchanges() -> int:
    """How many exchanges this process has begun."""
    from jshard import _jaxcompat as compat

    client: Any = compat.coordination_client()
    group = "-".join(map(str, range(jax.process_count())))
    return int(client.key_value_increment(f"jshard/{group}/count/{jax.process_index()}", 0))
