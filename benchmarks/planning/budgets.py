"""Planning at the memory limit: time beside the trace, gap, and when the first feasible plan was there.

python benchmarks/planning/budgets.py                                   # every row, one process each (long)
python benchmarks/planning/budgets.py --model llama-8b --mesh 4x8       # some rows
python benchmarks/planning/budgets.py --model gpt-32 --budget 1.02      # 1.02 times the least peak found
python benchmarks/planning/budgets.py --model llama-8b --profile        # where the time goes, function by function
python benchmarks/planning/budgets.py --search-seconds 5                # every budget with so much effort of search

Training steps (forward, backward, AdamW) of full-size models on TPUs v5e, known by shapes only. `-scan` is a scan
over the layers, everything else is unrolled; layers are rematerialised by `jax.checkpoint` but in GPT. Budgets: `chip`
is the default, 90% of the chip; a number is times the least peak that level 1 finds; `level1` is that search itself.
`make bench-search` ends with these rows. The last of each is kept in `budgets.jsonl`, and `budgets.md` is written anew.
Times are CPU seconds of a process, `first` is the share of the planning time after which a plan within the budget
was known, `ratio` is planning over tracing.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import functools
import gc
import json
import math
import os
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock


sys.path[:0] = [str(Path(__file__).parents[2])]

from benchmarks.compilers.kept_rows import keep_rows, kept_rows  # noqa: E402
from benchmarks.planning.row_process import ask, line  # noqa: E402


ROWS, PAGE = Path(__file__).with_suffix(".jsonl"), Path(__file__).with_suffix(".md")


BUDGETS = ("chip", "level1", "1.02", "1.1", "1.5")
MESHES = ("4x8", "4x4x2")
COLUMNS = (
    ("model", 13), ("mesh", 7), ("budget", 7), ("operators", 9), ("trace", 6), ("plan", 7), ("ratio", 6), ("first", 6),
    ("gap", 8), ("cost", 10), ("peak", 9), ("limit", 9),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a decoder-only transformer with grouped queries and a gated MLP."""

    layers: int
    width: int
    heads: int
    kv: int
    head: int
    hidden: int
    vocab: int
    batch: int = 32
    length: int = 2048
    query_norm: bool = False  # queries and keys normalised, as in Qwen 3 and Gemma 3
    window_every: int = 0  # of so many layers all but one attend to a window of 1,024, as in Gemma 3
    scan: bool = False
    remat: bool = True
    tied: bool = False
    policy: str = "nothing_saveable"  # of `jax.checkpoint`


LLAMA_8B = Config(32, 4096, 32, 8, 128, 14_336, 128_256, batch=64, length=4096)  # arXiv 2407.21783, table 3
LLAMA_70B = Config(80, 8192, 64, 8, 128, 28_672, 128_256, batch=512)
# google-deepmind/gemma, gm.nn.Gemma3_27B.
GEMMA_27B = Config(
    62, 5376, 32, 16, 128, 21_504, 262_144, batch=256, query_norm=True, window_every=6, tied=True
)
# Qwen/Qwen3-8B, config.json.
QWEN_8B = Config(36, 4096, 32, 8, 128, 12_288, 151_936, batch=128, query_norm=True)
MODELS: dict[str, Config] = {
    "llama-8b": LLAMA_8B,
    "llama-8b-scan": dataclasses.replace(LLAMA_8B, scan=True),
    "llama-70b": LLAMA_70B,
    "gemma-27b": GEMMA_27B,
    "qwen-8b": QWEN_8B,
}
GPTS = {"gpt-32": 32, "gpt-126": 126}
# Devices that a model needs; the mesh's first axis grows by the factor.
LARGER = {"llama-70b": 8, "gemma-27b": 4, "gpt-126": 4}


def transformer(c: Config) -> tuple[Callable, tuple]:
    """A training step of AdamW, and the shapes of its arguments."""
    import jax
    import jax.numpy as jnp
    import optax

    half = jnp.bfloat16

    def norm(w: Any, x: Any) -> Any:
        y = x.astype(jnp.float32)
        return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * w.astype(x.dtype)

    def rotate(x: Any, cos: Any, sin: Any) -> Any:
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def block(p: Any, x: Any, cos: Any, sin: Any, window: int) -> Any:
        p = jax.tree.map(lambda w: w.astype(half), p)
        y = norm(p["norm1"], x)
        q, k = jnp.einsum("btd,dngh->btngh", y, p["q"]), jnp.einsum("btd,dnh->btnh", y, p["k"])
        v = jnp.einsum("btd,dnh->btnh", y, p["v"])
        if c.query_norm:
            q, k = norm(p["q_norm"], q), norm(p["k_norm"], k)
        q, k = rotate(q, cos[:, None, None], sin[:, None, None]), rotate(k, cos[:, None], sin[:, None])
        scores = jnp.einsum("bqngh,bsnh->bngqs", q, k).astype(jnp.float32) / c.head**0.5
        mask = jnp.tril(jnp.ones((c.length, c.length), bool))
        if window:
            mask &= ~jnp.tril(jnp.ones((c.length, c.length), bool), -window)
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e30)).astype(half)
        x = x + jnp.einsum("bqngh,nghd->bqd", jnp.einsum("bngqs,bsnh->bqngh", weights, v), p["o"])
        y = norm(p["norm2"], x)
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]

    def loss(params: Any, batch: Any) -> Any:
        angle = jnp.arange(c.length)[:, None] / 5e5 ** (jnp.arange(c.head // 2) / (c.head // 2))
        cos, sin = jnp.cos(angle).astype(half), jnp.sin(angle).astype(half)
        policy = getattr(jax.checkpoint_policies, c.policy)
        run = jax.checkpoint(block, static_argnums=(4,), policy=policy) if c.remat else block
        x = params["embed"].astype(half)[batch[:, :-1]]
        if c.scan:
            x, _ = jax.lax.scan(lambda x, p: (run(p, x, cos, sin, 0), None), x, params["blocks"])
        else:
            for i, p in enumerate(params["blocks"]):
                local = c.window_every and (i + 1) % c.window_every
                x = run(p, x, cos, sin, 1024 if local else 0)
        x = norm(params["norm"], x)
        head = params["embed"].T if c.tied else params["head"]
        log_p = jax.nn.log_softmax((x @ head.astype(half)).astype(jnp.float32))
        return -jnp.take_along_axis(log_p, batch[:, 1:, None], axis=-1).mean()

    adamw = optax.adamw(1e-4, b1=0.9, b2=0.95, weight_decay=0.1)

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = adamw.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    d, group = c.width, c.heads // c.kv
    one: dict[str, tuple[int, ...]] = {
        "norm1": (d,), "q": (d, c.kv, group, c.head), "k": (d, c.kv, c.head), "v": (d, c.kv, c.head),
        "o": (c.kv, group, c.head, d), "norm2": (d,), "gate": (d, c.hidden), "up": (d, c.hidden), "down": (c.hidden, d),
    }  # fmt: skip
    if c.query_norm:
        one |= {"q_norm": (c.head,), "k_norm": (c.head,)}
    blocks: Any = {k: (c.layers, *s) for k, s in one.items()} if c.scan else [one] * c.layers
    sizes: dict[str, Any] = {"embed": (c.vocab, d), "blocks": blocks, "norm": (d,)}
    if not c.tied:
        sizes["head"] = (d, c.vocab)
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, "float32"), sizes, is_leaf=lambda s: isinstance(s, tuple)
    )
    tokens = jax.ShapeDtypeStruct((c.batch, c.length + 1), "int32")
    return step, (params, jax.eval_shape(adamw.init, params), tokens)


def program(model: str) -> tuple[Callable, tuple]:
    """A model's training step and the shapes of its arguments."""
    if model in GPTS:
        import jax

        from demo.chargpt import Config as GptConfig, init, train_step

        config = GptConfig(
            layers=GPTS[model], width=4096, heads=32, context=2048, batch=32, vocab=50_304, scan=False
        )
        params, state = jax.eval_shape(functools.partial(init, config, 0))
        return train_step(config), (params, state, jax.ShapeDtypeStruct((32, 2049), "int32"))
    return transformer(MODELS[model])


def mesh_of(model: str, grid: str) -> Any:
    """An abstract mesh: the grid with its first axis as much larger as the model needs."""
    import jax

    first, *rest = [int(s) for s in grid.split("x")]
    sizes = (first * LARGER.get(model, 1), *rest)
    return jax.sharding.AbstractMesh(sizes, tuple("xyz"[: len(sizes)]))


def trace_seconds(model: str, repeats: int = 3) -> float:
    """The least CPU seconds of some traces by `jax.jit`, each of a new function: JAX caches traces."""
    import jax

    seconds = []
    for _ in range(repeats):
        fn, args = program(model)
        gc.collect()
        start = time.process_time()
        traced = jax.jit(fn, donate_argnums=(0, 1)).trace(*args)
        seconds.append(time.process_time() - start)
        del traced
    return min(seconds)


class FirstPlan:
    """Notes when the first schedule within the budget was known, in CPU seconds."""

    def __init__(self) -> None:
        self.at = math.inf

    def noting(self, known: Callable) -> Callable:
        """`LevelSearch._known_plan`, watched."""

        def watched(search: Any, solution: Any) -> Any:
            if solution.peak <= (search.request.memory_limit or math.inf) and math.isinf(self.at):
                self.at = time.process_time()
            return known(search, solution)

        return watched


def row(
    model: str, grid: str, budget: str, limit: float | None, profile: bool, effort: float | None = None
) -> dict[str, Any]:
    """Trace and plan one program in this process; `effort`: seconds of search, as `search_seconds` counts them."""
    import jshard

    donate: Any = dict(donate_argnums=(0, 1))
    trace = trace_seconds(model, 1 if profile else 3)
    from jshard._api import prepare
    from jshard._plan.level_search import LevelSearch

    fn, args = program(model)
    first = FirstPlan()
    traced_for = [0.0]
    trace_on_shapes = prepare.trace_on_shapes

    def timed(*a: Any, **k: Any) -> Any:
        start = time.process_time()
        try:
            return trace_on_shapes(*a, **k)
        finally:
            traced_for[0] += time.process_time() - start

    options: dict[str, Any] = (
        {"level": 1, "memory_budget": "1e9 GiB"}
        if budget == "level1"
        else {"memory_budget": limit and int(limit)}
    )
    if effort is not None:
        options["config"] = {"search_seconds": effort}
    sharded = jshard.shard(fn, mesh=mesh_of(model, grid), hardware="tpu-v5e", **options, **donate)
    profiler = cProfile.Profile()
    gc.collect()
    noting = mock.patch.object(LevelSearch, "_known_plan", first.noting(LevelSearch._known_plan))
    with mock.patch.object(prepare, "trace_on_shapes", timed), noting:
        start = time.process_time()
        if profile:
            profiler.enable()
        try:
            plan = sharded.plan(*args)
        except jshard.ShardError as e:
            plan = e
        profiler.disable()
    seconds = time.process_time() - start - traced_for[0]
    if profile:
        stats = pstats.Stats(profiler)
        stats.sort_stats("tottime").print_stats(35)
        stats.sort_stats("cumtime").print_stats(60)
    found = dict(model=model, mesh=grid, budget=budget, trace=trace, plan=seconds, ratio=seconds / trace)
    if isinstance(plan, Exception):
        return dict(**found, error=f"{type(plan).__name__}: {plan}")
    first_at = (first.at - start - traced_for[0]) / seconds
    return dict(
        **found, operators=len(plan.operators), first=first_at, gap=plan.cost.gap, cost=plan.cost.objective,
        peak=plan.cost.peak_bytes, limit=limit or 0.0, steps=plan.steps,
    )  # fmt: skip


def shown(name: str, value: Any) -> str:
    if name in ("peak", "limit"):
        return f"{value / 2**30:.2f}GiB"
    if name in ("gap", "first"):
        return f"{value:.2%}" if math.isfinite(value) else "inf"
    if name == "cost":
        return f"{value:.5g}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def keep(values: dict[str, Any]) -> None:
    """Keep a row beside the others, and write the page."""
    keys = ("model", "mesh", "budget", "seconds")
    rows = kept_rows(ROWS, *keys)
    about = {"date": time.strftime("%Y-%m-%d"), "load": round(os.getloadavg()[1], 1)}
    row = {k: v for k, v in values.items() if k != "steps"} | about
    if "error" in row:
        row["error"] = row["error"].splitlines()[0]
    keep_rows(ROWS, {**rows, tuple(row[k] for k in keys): row}.values())
    write_page()


def page_line(row: dict[str, Any]) -> str:
    """A row of the page's table."""
    about = f"| {row['model']} | {row['mesh']} | {row['budget']} "
    plan = f"| {row['plan']:.1f} | {row['ratio']:.1f} "
    if "error" in row:
        return (
            f"{about}| {row['trace']:.2f} {plan}| | | | | | {row['date']} | {row['load']} | {row['error']} |"
        )
    cells = [shown(k, row[k]) for k in ("first", "gap", "cost", "peak")]
    limit = shown("limit", row["limit"]) if row["limit"] else ""
    return f"{about}| {row['trace']:.2f} {plan}| {' | '.join(cells)} | {limit} | {row['date']} | {row['load']} | |"


def write_page() -> None:
    """The page of the kept rows."""
    rows = list(kept_rows(ROWS, "model", "mesh", "budget", "seconds").values())
    order = {m: k for k, m in enumerate((*MODELS, *GPTS))}
    rows.sort(
        key=lambda r: (r["mesh"] != "4x8", order[r["model"]], r["mesh"])
    )  # rows of a model as they came
    head = (
        "| model | mesh | budget | trace, s | plan, s | ratio | first | gap | cost | peak | limit | date | load | |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    )
    lines = ["# Planning at the memory limit", "", "    python benchmarks/planning/budgets.py", ""]
    lines += [
        "CPU seconds on a machine of two cores, JAX 0.10.2; `load`: the machine's load average of five minutes, and where",
        "that is above 2, others' work makes CPU seconds up to 1.5 times as many. Machines of",
        "different days differ by up to three times, as the column `trace` shows. Level 0 but in rows `level1`, TPU v5e,",
        "layers rematerialised but in GPT. Budgets: `chip` is 90% of a v5e's memory, numbers are times the least peak that",
        "the row `level1` found. `first`: share of the planning time after which a schedule within the budget was known.",
        f"Meshes have a first axis {', '.join(f'{n} times as long for {m}' for m, n in LARGER.items())}.",
        "`ratio`: planning over tracing; asked are 3, or 5 s where the trace is short, and 10 on three axes. A row stands",
        "as it was on its date: those of other days are of older code.",
        "",
    ]
    for seconds in sorted({r["seconds"] for r in rows}, key=lambda s: s is not None and s):
        given = [page_line(r) for r in rows if r["seconds"] == seconds]
        title = [] if seconds is None else [f"## With `search_seconds={seconds:g}`", ""]
        lines += [*title, *head, *given, ""]
    PAGE.write_text("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=",".join((*MODELS, *GPTS)))
    parser.add_argument("--mesh", default=",".join(MESHES))
    parser.add_argument("--budget", default=",".join(BUDGETS))
    parser.add_argument("--least", type=float, help="the least peak in bytes, where it is known")
    parser.add_argument(
        "--search-seconds", type=float, help="effort of every search but that for the least peak"
    )
    parser.add_argument("--profile", action="store_true", help="where the time goes, by function")
    parser.add_argument("--steps", action="store_true", help="what the search did")
    parser.add_argument("--page", action="store_true", help="write the page from the kept rows, run nothing")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    given = parser.parse_args()
    more = ["--profile"] * given.profile
    effort = [f"--search-seconds={given.search_seconds}"] * (given.search_seconds is not None)
    if given.page:
        write_page()
        return
    if given.row:
        model, grid, budget, limit = given.row.split(",")
        limit = float(limit) if limit else None
        print(json.dumps(row(model, grid, budget, limit, given.profile, given.search_seconds)))
        return
    rows(given, more, effort)


def rows(given: argparse.Namespace, more: list[str], effort: list[str]) -> None:
    """Ask for every row, and print it."""
    print(line(COLUMNS, shown), flush=True)
    for model in given.model.split(","):
        for grid in given.mesh.split(","):
            least = given.least
            budgets = given.budget.split(",")
            if least is None and any(b[0].isdigit() for b in budgets):
                budgets = ["level1", *[b for b in budgets if b != "level1"]]
            for budget in budgets:
                if budget[0].isdigit() and least is None:
                    continue
                limit = float(budget) * least if budget[0].isdigit() and least else None
                values = ask(
                    __file__, (model, grid, budget, limit), [*more, *effort] if budget != "level1" else more
                )
                if values is None:
                    continue
                if budget == "level1" and "peak" in values:
                    least = values["peak"]
                if "error" in values:
                    print(f"{model} {grid} {budget}: after {values['plan']:.1f} s: {values['error']}")
                else:
                    print(line(COLUMNS, shown, values), flush=True)
                if given.steps:
                    print("\n".join(values.get("steps", ())))
                if not given.profile:
                    keep({**values, "seconds": given.search_seconds if budget != "level1" else None})


if __name__ == "__main__":
    main()
