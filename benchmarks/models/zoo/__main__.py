"""`python -m benchmarks.models.zoo MODEL`: plan and run one model, forward and training step, and print the figures
as JSON.

The plan knows only that every leaf of the batch is cut along its first dimension. Results are compared with
the unsharded function, leaf by leaf.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import json
import sys
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jshard
from benchmarks.models.zoo.exact import exact
from benchmarks.models.zoo.kinds import Model, forward, train_step
from jshard import hardware


MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
# Gradients far below the largest are sums that cancel: rounding is all they hold, and it is measured against this
# part of the largest gradient.
FLOOR = 1e-3


# At tiny sizes the latency of a collective outweighs the whole network, and the cheapest plan computes everything
# everywhere. Planned is what a full-size batch would get: no latency, and computing as dear against moving as there.
CHIP = dataclasses.replace(hardware.get("cpu"), name="cpu-tiny", alpha=0.0, nic_alpha=0.0, f32_flops=1e9)


def models() -> dict[str, Any]:
    """Every model by name, as functions that make it; a library that is missing takes its models with it."""
    out: dict[str, Any] = {}
    for name in ("texts", "images", "others", "solvers", "windows", "decoders"):
        try:
            out |= importlib.import_module(f"benchmarks.models.zoo.{name}").MODELS
        except ModuleNotFoundError as missing:
            if (missing.name or "").startswith(("benchmarks", "jshard")):
                raise
            print(f"no {missing.name}: none of the models of {name}.py", file=sys.stderr)
    return out


def error(got: Any, wanted: Any) -> tuple[float, str]:
    """The largest difference of two pytrees, each leaf relative to its largest value, and the leaf's path."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    wanted_leaves = [np.asarray(_numbers(x)) for x in jax.tree.leaves(wanted)]
    largest = max((float(np.abs(x).max()) for x in wanted_leaves if x.size), default=0.0)
    worst, at = 0.0, ""
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), wanted_leaves, strict=True):
        x = np.asarray(_numbers(x))
        if not x.size:
            continue
        if not np.isfinite(y).all():
            raise AssertionError(f"the plain run gives no finite numbers at {jax.tree_util.keystr(path)}")
        scale = max(float(np.abs(y).max()), FLOOR * largest, np.finfo(np.float32).tiny)
        off = float(np.abs(x.astype(np.float64) - y.astype(np.float64)).max()) / scale
        if not off <= worst:
            worst, at = off, jax.tree_util.keystr(path)
    return float(worst), at


ROUNDING = 1e-5
# The parts of a training step's result, see `kinds.train_step`; each is compared by itself.
PARTS = ("loss", "gradients", "new parameters", "new state", "new optimizer state")


def _worst(got: Any, wanted: Any) -> tuple[float, str]:
    if not (type(wanted) is tuple and len(wanted) == len(PARTS)):
        return error(got, wanted)
    found = [(error(g, w), part) for g, w, part in zip(got, wanted, PARTS, strict=True)]
    (worst, at), part = max(found)
    return worst, f"{part}{at}"


def _in_float64(fn: Any, args: tuple[Any, ...], runs: dict[str, Any], shard: Any) -> dict[str, Any]:
    """How far each float32 run is from the same program in float64: what of the error is rounding.

    Where the runs differ by more than `ROUNDING`, the program in float64 is planned and run sharded too: between two
    float64 runs rounding is 29 bits smaller, a wrong plan is as wrong as before.
    """
    try:
        wider, wide_args = exact(fn, *args)
    except NotImplementedError as e:
        return {"inexact": str(e)}
    with jax.enable_x64(True):
        truth = jax.block_until_ready(jax.jit(wider)(*wide_args))
        out = {name: _worst(got, truth)[0] for name, got in runs.items()}
        if _worst(runs["sharded"], runs["plain"])[0] > ROUNDING:
            out["float64"] = _worst(shard(wider)(*wide_args), truth)[0]
    return out


def _numbers(x: Any) -> Any:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def figures(fn: Any, args: tuple[Any, ...], pieces: int) -> dict[str, Any]:
    """Plan `fn`, whose last argument is the batch, run it, and compare with the plain function."""
    batch = jax.tree.map(lambda x: (pieces,) + (None,) * (np.ndim(x) - 1), args[-1])
    strategy = (*(None for _ in args[:-1]), batch)

    def shard(fn: Any) -> Any:
        return jshard.shard(fn, in_strategy=strategy, hardware=CHIP.name)

    sharded = shard(fn)
    start = time.perf_counter()
    jaxpr = jax.make_jaxpr(fn)(*args)
    traced = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = sharded.plan(*args)
        planned = time.perf_counter()
        got = jax.block_until_ready(sharded(*args))
    ran = time.perf_counter()
    wanted = jax.jit(fn)(*args)
    worst, at = _worst(got, wanted)
    off = _in_float64(fn, args, {"plain": wanted, "sharded": got}, shard)
    moved = collections.Counter()
    for row in plan.collectives:
        moved[row.kind] += int(row.count)
    whole = [
        row.name
        for row in plan.operators
        if row.primitive in MATMULS and all(n == 1 for s in row.strategy for n in s)
    ]
    return {
        "equations": _equations(jaxpr.jaxpr),
        "operators": len(plan.operators),
        "unknown": sorted(set(plan.unknown)),
        "error": worst,
        "at": at,
        **off,
        "collectives": dict(sorted(moved.items())),
        "matmuls": sum(row.primitive in MATMULS for row in plan.operators),
        "replicated": whole,
        "gap": plan.cost.gap,
        "trace_s": round(traced - start, 2),
        "plan_s": round(planned - traced, 2),
        "run_s": round(ran - planned, 2),
        "warnings": sorted(
            {f"{w.category.__name__}: {w.message}" for w in caught if "jshard" in str(w.filename)}
        ),
    }


def _equations(jaxpr: Any) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        total += 1
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    total += _equations(inner)
    return total


def main(name: str, pieces: int = 8) -> None:
    """Print one JSON object: the figures of the forward function and of the training step."""
    hardware.register(CHIP)
    model: Model = models()[name]()
    out = {"model": name, "parameters": sum(int(np.size(x)) for x in jax.tree.leaves(model.params))}
    for part, made in (("forward", forward), ("train", train_step)):
        out[part] = figures(*made(model), pieces)
        # One line a part: what was found before a crash or a time limit is kept.
        print("RESULT " + json.dumps(out), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
