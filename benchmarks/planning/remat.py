"""`remat="auto"` at the memory limit, beside `jax.checkpoint` on every layer with JAX's named policies.

python benchmarks/planning/remat.py                              # every row, one process each (long)
python benchmarks/planning/remat.py --model llama-8b-scan        # Llama-8B on 32 v5e, its layers a scan
python benchmarks/planning/remat.py --model gpt --compile PYTHON # GPT, 4 layers; PYTHON: of an environment with libtpu

Training steps known by shapes only. Llama-8B (`budgets.py`) on 4x8 TPUs v5e with the default budget, 90% of the chip: a
row for each way, the same budget for all. GPT of four layers (`demo/chargpt.py`, width 1024, 512 tokens) on 2x4 v5e, with
budgets of 90, 70, 50 and 30% of the peak of its free plan; `compiled` is the peak of the TPU compiler
(`memory_analysis()`). `step` is predicted, `plan` is CPU seconds of planning beside `trace`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.planning.row_process import ask, line  # noqa: E402


LLAMAS, GPTS = ("llama-8b-scan", "llama-8b"), ("gpt-scan", "gpt")
POLICIES = ("nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")
SHARES = ("1", "0.9", "0.7", "0.5", "0.3")
COLUMNS = (
    ("model", 13), ("way", 32), ("trace", 6), ("plan", 7), ("choices", 7), ("step", 9), ("peak", 9), ("limit", 9),
    ("compiled", 9), ("of the limit", 12),
)  # fmt: skip
COMPILER = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def llama(model: str, way: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Llama-8B without `jax.checkpoint`, or with it on every layer and a named policy."""
    from benchmarks.planning.budgets import LLAMA_8B, transformer

    config = dataclasses.replace(LLAMA_8B, scan=model.endswith("-scan"), remat=way in POLICIES)
    return transformer(dataclasses.replace(config, policy=way) if way in POLICIES else config)


def gpt(model: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A GPT step of four layers, and the shapes of its arguments."""
    import jax

    from demo.chargpt import Config, init, train_step

    config = Config(
        layers=4, width=1024, heads=16, context=512, batch=64, vocab=8192, scan=model.endswith("-scan")
    )
    params, state = jax.eval_shape(functools.partial(init, config, 0))
    return train_step(config), (params, state, jax.ShapeDtypeStruct((64, 513), "int32"))


def row(model: str, way: str) -> dict[str, Any]:
    """Plan one program here, and compile it where the environment has libtpu."""
    import jax

    import jshard

    if model in LLAMAS:
        fn, args = llama(model, way)
        mesh: Any = jax.sharding.AbstractMesh((4, 8), ("x", "y"))
        options: dict[str, Any] = dict(hardware="tpu-v5e", remat="auto" if way == "auto" else None)
    else:
        fn, args = gpt(model)
        mesh = jshard.topology("v5e:2x4", {"x": 2, "y": 4})
        free = jshard.shard(fn, mesh=mesh, donate_argnums=(0, 1), memory_budget="1TB").plan(*args)
        share = float(way)
        options = dict(memory_budget=int(share * free.cost.peak_bytes), remat="auto" if share < 1 else None)
    start = time.process_time()
    jax.jit(fn, donate_argnums=(0, 1)).trace(*args)
    trace = time.process_time() - start
    f = jshard.shard(fn, mesh=mesh, donate_argnums=(0, 1), **options)
    start = time.process_time()
    try:
        plan = f.plan(*args)
    except jshard.ShardError as error:
        return {"model": model, "way": way, "error": error.what, "plan": time.process_time() - start}
    out: dict[str, Any] = dict(
        model=model, way=way, trace=trace, plan=time.process_time() - start - trace, step=plan.step_seconds,
        peak=plan.cost.peak_bytes, limit=plan.memory_budget,
        choices=next((s.split()[1] for s in plan.steps if s.startswith("remat: ")), ""),
    )  # fmt: skip
    if os.environ.get("ALLOW_MULTIPLE_LIBTPU_LOAD") and model in GPTS:
        compiled = f.lower(*args).compile().memory_analysis().peak_memory_in_bytes
        out |= {"compiled": compiled, "of the limit": compiled / out["limit"]}
    return out


def shown(name: str, value: Any) -> str:
    """A cell of the table."""
    if value == "" or value is None:
        return ""
    if name in ("peak", "limit", "compiled"):
        return f"{value / 2**30:.2f}GiB"
    if name == "of the limit":
        return f"{value:.3f}"
    if name == "step":
        return f"{value:.4g} s"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def main() -> None:
    """Measure rows and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=",".join((*LLAMAS, *GPTS)))
    parser.add_argument("--way", help="auto or a policy of jax.checkpoint; for GPT a share of the free peak")
    parser.add_argument("--compile", metavar="PYTHON", help="compile GPT in the environment of this Python")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row:
        print(json.dumps(row(*given.row.split(","))))
        return
    print(line(COLUMNS, shown), flush=True)
    for model in given.model.split(","):
        ways = ("auto", *POLICIES) if model in LLAMAS else SHARES
        for way in given.way.split(",") if given.way else ways:
            if given.compile and model in GPTS:
                environment = {**os.environ, **COMPILER, "PYTHONPATH": str(ROOT)}
                values = ask(__file__, (model, way), python=given.compile, environment=environment)
            else:
                values = ask(__file__, (model, way))
            if values is None:
                continue
            if "error" in values:
                print(f"{model} {way}: after {values['plan']:.1f} s: {values['error']}", flush=True)
            else:
                print(line(COLUMNS, shown, values), flush=True)


if __name__ == "__main__":
    main()
