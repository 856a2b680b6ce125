"""How much work the search does for some small programs, in counts that no clock moves, and what it finds.

`make counts` (this file as a program) writes `tests/search/search_counts.json` for the version of JAX that runs;
`tests/search/test_search_counts.py` compares. A count that rises is a slower search, one that falls a faster one: both are
looked at, and written anew with the change that made them.

- `rounds`: passes of messages; `entries`: table entries that they, reductions and integer programs are counted as.
- `tables`: distinct unary and pairwise tables of all networks that were searched; `variables` of the largest.
- `gap`: of the plan, in millionths; `collectives` and `bytes`: what it emits a device and call.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import jshard
from jshard._plan import least_peak, level_search
from jshard._search import CostNetwork, Effort, Solution


STORED = pathlib.Path(__file__).parents[1] / "search" / "search_counts.json"
JAX_VERSION = "jax " + ".".join(jax.__version__.split(".")[:2])


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    """A float32 shape."""
    return jax.ShapeDtypeStruct(shape, "float32")


def ffn(x, w1, w2):
    """Two products."""
    return jax.nn.relu(x @ w1) @ w2


def mlp_step(params, batch):
    """A training step of layers written out."""

    def loss(params):
        h = batch
        for layer in params:
            h = h + jax.nn.gelu(h @ layer["up"]) @ layer["down"]
        return (h**2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def scanned_step(params, batch):
    """A training step of layers in a scan."""

    def loss(params):
        def layer(h, w):
            return h + jax.nn.relu(h @ w["up"]) @ w["down"], None

        return (jax.lax.scan(layer, batch, params)[0] ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def attention(x, wq, wk, wv, wo):
    """Self-attention, written out."""
    q, k, v = (jnp.einsum("btm,mhd->bthd", x, w) for w in (wq, wk, wv))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bshd->bhqs", q, k))
    return jnp.einsum("bqhd,hdm->bqm", jnp.einsum("bhqs,bshd->bqhd", weights, v), wo)


def machine(**axes: int) -> Any:
    """Eight chips of v5e with these axes."""
    return jshard.topology("v5e:2x4", axes, compiles=False)


def layers(n: int) -> list[dict[str, jax.ShapeDtypeStruct]]:
    """Shapes of the parameters of `mlp_step`."""
    return [{"up": f32(512, 2048), "down": f32(2048, 512)} for _ in range(n)]


def planned(fn: Callable, *args: Any, **options: Any) -> Callable[[], jshard.Plan]:
    """A plan that is not made yet."""
    return lambda: jshard.shard(fn, **{"mesh": machine(x=2, y=4), **options}).plan(*args)


FFN = (f32(4096, 512), f32(512, 2048), f32(2048, 512))
STACKED = {"up": f32(8, 512, 2048), "down": f32(8, 2048, 512)}
HEADS = (f32(8, 256, 512), *(f32(512, 8, 64),) * 3, f32(8, 64, 512))
BATCH = {"in_strategy": {"batch": (8, 1)}}

PROGRAMS: dict[str, Callable[[], jshard.Plan]] = {
    "ffn": planned(ffn, *FFN),
    "ffn, rows and columns pinned": planned(ffn, *FFN, in_strategy={"x": (2, 1)}, parameter_plan={"w1": (1, 4)}),
    "ffn, level 2": planned(ffn, *FFN, level=2),
    "ffn, level 1": planned(ffn, *FFN, level=1),
    "ffn, three axes": planned(ffn, *FFN, mesh=machine(x=2, y=2, z=2)),
    "attention": planned(attention, *HEADS),
    "attention, level 2": planned(attention, *HEADS, level=2, in_strategy={"x": (2, 1, 1)}),
    "mlp of 2 layers": planned(mlp_step, layers(2), f32(4096, 512), **BATCH),
    "mlp of 2 layers, level 2": planned(mlp_step, layers(2), f32(4096, 512), level=2, **BATCH),
    "mlp of 4 layers": planned(mlp_step, layers(4), f32(4096, 512), **BATCH),
    "mlp of 4 layers, one axis, level 2": planned(mlp_step, layers(4), f32(4096, 512), level=2, mesh=machine(x=8)),
    "scan of 8 layers": planned(scanned_step, STACKED, f32(4096, 512), level=2, **BATCH),
    "scan of 8 layers, level 0": planned(scanned_step, STACKED, f32(4096, 512), **BATCH),
    "scan of 8 layers, level 1": planned(scanned_step, STACKED, f32(4096, 512), level=1, **BATCH),
    "mlp of 1 layer": planned(mlp_step, layers(1), f32(4096, 512), **BATCH),
    # Without a budget the step holds 27 MiB, at least 23 by level 1.
    "mlp of 2 layers, budget of 26 MiB": planned(mlp_step, layers(2), f32(4096, 512), memory_budget="26MiB", **BATCH),
    "mlp of 2 layers, budget of 25 MiB": planned(mlp_step, layers(2), f32(4096, 512), memory_budget="25MiB", **BATCH),
    "ffn, three axes, level 1": planned(ffn, *FFN, mesh=machine(x=2, y=2, z=2), level=1),
}  # fmt: skip


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Counts of the searches that run inside."""
    found = {"rounds": 0, "entries": 0, "searches": 0, "tables": 0, "variables": 0}
    spend, solve = Effort.spend, level_search.solve

    def counting_spend(self: Effort, entries: float = 0.0, variables: int = 0) -> None:
        if self.whole is None:
            found["rounds"] += bool(entries and variables)
            found["entries"] += int(entries)
        spend(self, entries, variables)

    def counting_solve(network: CostNetwork, **options: Any) -> Solution:
        found["searches"] += 1
        found["tables"] += len(network.unary) + len(network.pairwise)
        found["variables"] = max(found["variables"], network.size)
        return solve(network, **options)

    with (
        mock.patch.object(Effort, "spend", counting_spend),
        mock.patch.object(level_search, "solve", counting_solve),
        mock.patch.object(least_peak, "solve_network", counting_solve),
    ):
        yield found


def counts(name: str) -> dict[str, int]:
    """The counts of one program."""
    with counted() as found:
        plan = PROGRAMS[name]()
    return {
        **found,
        "gap": round(1e6 * plan.cost.gap),
        "operators": len(plan.operators),
        "collectives": round(sum(c.count for c in plan.collectives)),
        "bytes": round(sum(c.total for c in plan.collectives)),
    }


def write() -> None:
    """Store the counts of this version of JAX beside those of others."""
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    stored[JAX_VERSION] = {name: counts(name) for name in PROGRAMS}
    lines = []
    for version, rows in sorted(stored.items()):
        inner = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        lines.append(f" {json.dumps(version)}: {{\n{inner}\n }}")
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    write()
