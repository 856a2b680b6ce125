"""What padding adds to the planning of programs whose sizes the devices divide: CPU seconds with it and without.

    python benchmarks/planning/dividing.py [--repeats 5] [NAME ...]     # all rows, or those whose name contains a NAME

Training steps of `benchmarks/workloads.py` and `benchmarks/quality/space.py` on 16 v5e, planned at level 2 with
`config={"pad": False}`, as ever, and with `{"pad": True}`, in turn in one process. A ratio is that of the least CPU
seconds of the repeats; the three plans are compared as text and by their costs. Networks with 1,000 classes are not
among them: 16 does not divide 1,000, and `{"pad": True}` asks for small tensors to be tried padded too.

Rows are kept in `dividing.jsonl`; the page is written anew after each.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path[:0] = [str(Path(__file__).parents[2])]

ROWS, PAGE = Path(__file__).with_suffix(".jsonl"), Path(__file__).with_suffix(".md")
WORKLOADS = ("mlp-512", "gpt", "gpt-scan", "lm-head", "conv", "moe", "llama", "lora")
NETWORKS = ("convolutions", "unet", "mamba2", "rwkv")
WAYS: dict[str, dict[str, Any]] = {"off": {"pad": False}, "as ever": {}, "on": {"pad": True}}
Row = dict[str, Any]


def program(name: str) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
    """The step of a name, its arguments, and how they are cut."""
    import jax.numpy as jnp

    from benchmarks import workloads
    from benchmarks.quality.space import NETWORKS as SPACE, training

    if name in WORKLOADS:
        w = workloads.get(name, devices=16)
        return w.step, w.args, w.in_strategy(16)
    network, shape, _ = SPACE[name]
    return *training(network, shape, jnp.bfloat16), None


def row(name: str, repeats: int) -> Row:
    """The least CPU seconds of planning in each way, and whether the plans are one."""
    import jshard

    step, args, cut = program(name)
    machine = jshard.topology("v5e:4x4", {"x": 4, "y": 4})
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    plans: dict[str, Any] = {}
    for turn in range(repeats + 1):  # the first warms caches of JAX's own
        for way in WAYS if turn % 2 else reversed(WAYS):
            f = jshard.shard(step, mesh=machine, level=2, in_strategy=cut, config=WAYS[way])
            gc.collect()
            began = time.process_time()
            plans[way] = f.plan(*args)
            if turn:
                seconds[way].append(time.process_time() - began)
    least = {way: round(min(s), 4) for way, s in seconds.items()}
    same = len({(str(p), p.cost.objective, p.cost.bound) for p in plans.values()}) == 1
    padded = max(len(p.padding) for p in plans.values())
    return {"name": name, "seconds": least, "repeats": repeats, "same": same, "padded": padded}


def page(rows: list[Row]) -> str:
    """The table in Markdown."""
    title, intro = (__doc__ or "").split("\n\n", 1)
    out = [f"# {title.strip()}", "", intro.rstrip(), ""]
    out += ["| step | off, CPU s | as ever / off | on / off | plans are the same | date |", "|---" * 6 + "|"]
    for r in rows:
        s = r["seconds"]
        ratios = " | ".join(f"{s[way] / s['off']:.3f}" for way in ("as ever", "on"))
        same = "yes" if r["same"] and not r["padded"] else "**no**"
        out.append(f"| {r['name']} | {s['off']:.3f} | {ratios} | {same} | {r['date']} |")
    return "\n".join([*out, ""])


def main() -> None:
    """Measure the rows asked for, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    kept = {r["name"]: r for r in map(json.loads, ROWS.read_text().splitlines())} if ROWS.exists() else {}
    for name in (*WORKLOADS, *NETWORKS):
        if given.names and not any(n in name for n in given.names):
            continue
        kept[name] = row(name, given.repeats) | {"date": time.strftime("%Y-%m-%d")}
        print(json.dumps(kept[name]), flush=True)
        rows = [kept[n] for n in (*WORKLOADS, *NETWORKS) if n in kept]
        ROWS.write_text("".join(json.dumps(r) + "\n" for r in rows))
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
