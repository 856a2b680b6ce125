"""Planning time beside JAX's own tracing, depth of the network planned, and the gap proved.

python benchmarks/planning/search.py                                # every row, one process each (many minutes)
python benchmarks/planning/search.py --layers 4 --mesh 4x8          # one row
python benchmarks/planning/search.py --layers 4,32 --mesh 2x4,4x8   # some rows
python benchmarks/planning/search.py --model llama --layers 126     # Llama-3-405B's shapes on v5p:8x16x16
python benchmarks/planning/search.py --profile --layers 4 --mesh 4x8  # where the time goes, function by function

The program is a whole training step (forward, backward, AdamW), known by shapes only: GPT of width 4096 on
32 x 2048 tokens, or Llama-3-405B's sizes with rematerialised layers. `scan` stands for a scan over 32 layers.
Times are CPU seconds of this process, so that a busy machine changes them little: `trace` is the least of
three traces of the function by `jax.jit`, `plan` everything that `f.plan` does after its own trace, the first
time in a fresh process (`again`: the second time). `memory` is the peak above what the traced program holds.
Without a choice of rows those of `budgets.py`, at the memory limit, follow.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import gc
import importlib
import json
import math
import operator
import platform
import pstats
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock


sys.path[:0] = [str(Path(__file__).parents[2])]

from benchmarks.planning.row_process import ask, line  # noqa: E402


LAYERS = ("4", "32", "126", "scan")
MESHES = ("2x4", "4x8", "16x16", "8x8x4", "4x8x8")
# Module, function in it, column in which its CPU seconds are added up; `search` includes the schedule.
PHASES = (
    ("jshard._api.prepare", "trace_on_shapes", "trace"),
    ("jshard._api.prepare", "build_program", "program"),
    ("jshard._plan.level_search", "build_network", "network"),
    ("jshard._plan.level_search", "LevelSearch.run", "search"),
    ("jshard._plan.scheduled_solution", "schedule", "rows"),
    ("jshard._plan.planner", "summarize", "rows"),
)
COLUMNS = (
    ("model", 6), ("layers", 6), ("mesh", 8), ("operators", 9), ("trace", 7), ("plan", 7), ("ratio", 6),
    ("again", 6), ("program", 7), ("network", 7), ("search", 7), ("rows", 7), ("gap", 8), ("memory", 9),
)  # fmt: skip


def gpt(layers: str, batch: int = 32) -> tuple[Callable, tuple]:
    """The demo's GPT training step, width 4096 on 32 x 2048 tokens, and the shapes of its arguments."""
    import jax

    from demo.chargpt import Config, init, train_step

    scan = layers == "scan"
    config = Config(
        layers=32 if scan else int(layers),
        width=4096,
        heads=32,
        context=2048,
        batch=batch,
        vocab=50_304,
        scan=scan,
    )
    params, state = _shapes(functools.partial(init, config, 0))
    return train_step(config), (params, state, jax.ShapeDtypeStruct((batch, 2049), "int32"))


def llama(layers: str) -> tuple[Callable, tuple]:
    """A training step of Llama 3's shapes (arXiv 2407.21783, table 3: 405B) on 4M tokens, layers rematerialised."""
    import jax
    import jax.numpy as jnp
    import optax

    scan = layers == "scan"
    n, d, heads, kv, hidden, vocab = 126 if scan else int(layers), 16_384, 128, 8, 53_248, 128_256
    batch, length, h = 1024, 4096, 128  # the first phase of its training
    half = jnp.bfloat16

    def norm(w: Any, x: Any) -> Any:
        y = x.astype(jnp.float32)
        return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * w.astype(x.dtype)

    def rotate(x: Any, cos: Any, sin: Any) -> Any:
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def block(p: Any, x: Any, cos: Any, sin: Any) -> Any:
        p = jax.tree.map(lambda w: w.astype(half), p)
        y = norm(p["norm1"], x)
        q = rotate(jnp.einsum("btd,dngh->btngh", y, p["q"]), cos[:, None, None], sin[:, None, None])
        k = rotate(jnp.einsum("btd,dnh->btnh", y, p["k"]), cos[:, None], sin[:, None])
        v = jnp.einsum("btd,dnh->btnh", y, p["v"])
        scores = jnp.einsum("bqngh,bsnh->bngqs", q, k).astype(jnp.float32) / h**0.5
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e30)).astype(half)
        x = x + jnp.einsum("bqngh,nghd->bqd", jnp.einsum("bngqs,bsnh->bqngh", weights, v), p["o"])
        y = norm(p["norm2"], x)
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]

    def loss(params: Any, batch: Any) -> Any:
        angle = jnp.arange(length)[:, None] / 5e5 ** (jnp.arange(h // 2) / (h // 2))
        cos, sin = jnp.cos(angle).astype(half), jnp.sin(angle).astype(half)
        run = jax.checkpoint(block)
        x = params["embed"].astype(half)[batch[:, :-1]]
        if scan:
            x, _ = jax.lax.scan(lambda x, p: (run(p, x, cos, sin), None), x, params["blocks"])
        else:
            for p in params["blocks"]:
                x = run(p, x, cos, sin)
        log_p = jax.nn.log_softmax(
            (norm(params["norm"], x) @ params["head"].astype(half)).astype(jnp.float32)
        )
        return -jnp.take_along_axis(log_p, batch[:, 1:, None], axis=-1).mean()

    adamw = optax.adamw(1e-4, b1=0.9, b2=0.95, weight_decay=0.1)

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = adamw.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    one = {
        "norm1": (d,), "q": (d, kv, heads // kv, h), "k": (d, kv, h), "v": (d, kv, h), "o": (kv, heads // kv, h, d),
        "norm2": (d,), "gate": (d, hidden), "up": (d, hidden), "down": (hidden, d),
    }  # fmt: skip
    blocks = {k: (n, *s) for k, s in one.items()} if scan else [one] * n
    sizes = {"embed": (vocab, d), "blocks": blocks, "norm": (d,), "head": (d, vocab)}
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, "float32"), sizes, is_leaf=lambda s: isinstance(s, tuple)
    )
    return step, (
        params,
        jax.eval_shape(adamw.init, params),
        jax.ShapeDtypeStruct((batch, length + 1), "int32"),
    )


def _shapes(make: Callable) -> Any:
    """Shapes of what a function would return, nothing computed."""
    import jax

    return jax.eval_shape(make)


def mesh_of(text: str) -> Any:
    """Devices by name alone, as one writes them without owning any: `v5p:8x16x16`, or `4x8` of a v5p pod."""
    import jshard

    name, _, grid = text.rpartition(":")
    sizes = [int(s) for s in grid.split("x")]
    if name:
        return jshard.topology(text, dict(zip("xyz", sizes, strict=False)))
    import jax

    return jax.sharding.AbstractMesh(tuple(sizes), tuple("xyz"[: len(sizes)]))


class Phases:
    """CPU seconds by phase: the library's own functions, timed from outside."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, fn: Callable) -> Callable:
        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return fn(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - start

        return run

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Start from zero, and time the functions of `PHASES` meanwhile."""
        self.seconds.clear()
        with contextlib.ExitStack() as stack:
            for module, function, column in PHASES:
                timed = self.timed(column, operator.attrgetter(function)(importlib.import_module(module)))
                stack.enter_context(mock.patch(f"{module}.{function}", timed))
            yield


def peak_memory() -> float:
    """Highest resident bytes since the last reset."""
    status = Path("/proc/self/status").read_text()
    return 1024.0 * int(status.split("VmHWM:")[1].split()[0])


def reset_peak() -> None:
    """Let the highest resident bytes start from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def trace_seconds(model: str, layers: str, donate: dict[str, Any], repeats: int = 3) -> float:
    """The least CPU seconds of some traces by `jax.jit`, each of a new function: JAX caches traces."""
    import jax

    seconds = []
    for _ in range(repeats):
        fn, args = (llama if model == "llama" else gpt)(layers)
        gc.collect()
        start = time.process_time()
        traced = jax.jit(fn, **donate).trace(*args)
        seconds.append(time.process_time() - start)
        del traced  # a user holds one trace, and the garbage collector walks over all that are alive
    return min(seconds)


def row(model: str, layers: str, grid: str, profile: bool, level: int, budget: str | None) -> dict[str, Any]:
    """Trace and plan one program in this process."""
    import jshard

    donate: Any = dict(donate_argnums=(0, 1))
    trace = trace_seconds(model, layers, donate)
    fn, args = (llama if model == "llama" else gpt)(layers)
    chip: Any = {} if ":" in grid else dict(hardware="tpu-v5p")
    phases, profiler = Phases(), cProfile.Profile()

    def planned() -> tuple[Any, float]:
        """A plan by a newly decorated function, and the CPU seconds without its trace."""
        sharded = jshard.shard(fn, level=level, mesh=mesh_of(grid), memory_budget=budget, **chip, **donate)
        with phases.measured():
            start = time.process_time()
            plan = sharded.plan(*args)
            return plan, time.process_time() - start - phases.seconds["trace"]

    gc.collect()
    reset_peak()
    memory_before, start = peak_memory(), time.perf_counter()
    if profile:
        profiler.enable()
    plan, first = planned()
    profiler.disable()
    wall, memory, by_phase = time.perf_counter() - start, peak_memory() - memory_before, dict(phases.seconds)
    gc.collect()
    second = planned()[1] if first <= 60 else first
    if profile:
        stats = pstats.Stats(profiler)
        stats.sort_stats("tottime").print_stats(35)
        stats.sort_stats("cumtime").print_stats(45)
    return dict(
        model=model, layers=layers, mesh=grid, operators=len(plan.operators), trace=trace, plan=first,
        ratio=first / trace, again=second / trace, gap=plan.cost.gap, memory=memory, wall=wall,
        cost=plan.cost.objective, peak=plan.cost.peak_bytes, steps=plan.steps,
        **{k: by_phase.get(k, 0.0) for k in ("program", "network", "search", "rows")},
    )  # fmt: skip


def shown(name: str, value: Any) -> str:
    if name == "memory":
        return f"{value / 1e6:.0f} MB"
    if name == "gap":
        return "0" if value == 0 else f"{value:.3%}" if math.isfinite(value) else "inf"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt,llama", help="gpt, llama or both")
    parser.add_argument("--layers", default=None, help="4, 32, 126 or scan, joined by commas")
    parser.add_argument("--mesh", default=None, help="4x8 or a name like v5p:8x16x16, joined by commas")
    parser.add_argument("--level", type=int, default=0)
    parser.add_argument("--budget", default=None, help="memory_budget of shard; GPT's default is none at all")
    parser.add_argument("--profile", action="store_true", help="where the time goes, by function")
    parser.add_argument("--steps", action="store_true", help="what the search did")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    given = parser.parse_args()
    more = [f"--level={given.level}"] + ["--profile"] * given.profile
    more += [f"--budget={given.budget}"] * bool(given.budget)
    if given.row:
        model, layers, grid = given.row.split(",")
        budget = given.budget or ("1e9 GiB" if model == "gpt" else None)
        print(json.dumps(row(model, layers, grid, given.profile, given.level, budget)))
        return
    import jax

    rows: list[tuple[str, str, str]] = []
    models = given.model.split(",")
    if given.mesh or given.layers:
        models = models[:1]
    for model in models:
        meshes = ("v5p:8x16x16",) if model == "llama" else MESHES
        depths = ("126", "scan") if model == "llama" else LAYERS
        meshes = given.mesh.split(",") if given.mesh else meshes
        depths = given.layers.split(",") if given.layers else depths
        rows += [(model, n, m) for m in meshes for n in depths]
    print(
        f"jax {jax.__version__}, python {platform.python_version()}, {platform.machine()}, level {given.level}"
    )
    print(line(COLUMNS, shown), flush=True)
    found = {}
    for key in rows:
        model, depth, mesh = key
        values = found[key] = ask(__file__, (model, depth, mesh), more)
        if values:
            print(line(COLUMNS, shown, values), flush=True)
            if given.steps:
                print("\n".join(values["steps"]))
    deep = [(m, g) for m, n, g in rows if n == "126" and found[m, n, g] and found.get((m, "32", g))]
    for model, grid in deep:
        a, b = found[model, "126", grid], found[model, "32", grid]
        whole = [r["plan"] - r["program"] for r in (a, b)]
        print(
            f"{model} {grid}, 126 layers over 32: search {a['search'] / b['search']:.2f}, "
            f"network and search {(a['network'] + a['search']) / (b['network'] + b['search']):.2f}, "
            f"all after the program is built {whole[0] / whole[1]:.2f}"
        )
    if len(sys.argv) == 1:
        subprocess.run([sys.executable, str(Path(__file__).with_name("budgets.py"))], check=True)


if __name__ == "__main__":
    main()
