"""Peak memory of plans against that of the compiler: `make bench-memory`.

For each workload of `workloads.py` on one machine (TPU v5e 2x4 by default, where libtpu is installed) a plan at
level 0 and at level 1, and for the GPT step budgets of 90, 50, 25 and 10% of the peak of the free plan. Each is
compiled in a process of its own; `memory_analysis()` gives what the compiler needs. The table goes to memory.md.

The compiled peak includes what is on the chip (up to 128 MB on a v5e, where a program prefetches its weights), so
beside it stands what is allocated off the chip: arguments, results that are no argument's, and temporaries.

    python benchmarks/compilers/memory.py --on v5e:2x4 gpt mlp-64k
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time


ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.compilers.kept_rows import compilers_python, in_process  # noqa: E402


NAMES = ("gpt", "gpt-scan", "mlp-512", "mlp-64k", "lm-head", "conv", "moe", "llama", "vit", "lora")
AXES = {"v5e:2x4": {"x": 2, "y": 4}, "v5e:4x8": {"x": 4, "y": 8}}
BUDGETS = (0.9, 0.5, 0.25, 0.1)


def one(name: str, machine: str, level: int, budget: int | None) -> dict:
    """Plan and compile one workload here; bytes a device."""
    import jshard
    from benchmarks import workloads

    mesh = jshard.topology(machine, AXES[machine])
    w = workloads.get(name, devices=mesh.devices)
    f = jshard.shard(
        w.step, w.in_strategy(mesh.devices), mesh=mesh, level=level, donate_argnums=0, memory_budget=budget
    )
    row: dict = {"workload": name, "level": level, "budget": budget}
    begun = time.monotonic()
    try:
        plan = f.plan(*w.args)
    except jshard.ShardError as error:
        return row | {"refused": str(error).splitlines()[0]}
    row |= {"planned": plan.cost.peak_bytes, "bound": plan.cost.bound if level == 1 else None}
    row["seconds"] = round(time.monotonic() - begun, 1)
    stats = f.lower(*w.args).compile().memory_analysis()
    apart = stats.output_size_in_bytes - stats.alias_size_in_bytes + stats.temp_size_in_bytes
    return row | {"compiled": stats.peak_memory_in_bytes, "off_chip": stats.argument_size_in_bytes + apart}


def rows(names: list[str], machine: str, seconds: float) -> list[dict]:
    """All rows, each made in a process of its own, since compilers abort."""
    out: list[dict] = []
    for name in names:
        out += [_spawn(name, machine, level, None, seconds) for level in (0, 1)]
        if name == "gpt" and "planned" in out[-2]:
            free = out[-2]["planned"]
            out += [_spawn(name, machine, 0, int(free * share), seconds) for share in BUDGETS]
    return out


def _spawn(name: str, machine: str, level: int, budget: int | None, seconds: float) -> dict:
    ask = json.dumps([name, machine, level, budget])
    row = in_process(compilers_python(), __file__, ["--one", ask], seconds)
    row = {"workload": name, "level": level, "budget": budget} | row
    print(line(row), flush=True)
    return row


def line(row: dict) -> str:
    """One row of the table."""
    budget = "" if row["budget"] is None else f"{row['budget'] / 1e6:,.1f}"
    head = f"| {row['workload']} | {row['level']} | {budget} |"
    if "compiled" in row:
        ratio = row["planned"] / row["compiled"]
        sizes = " | ".join(f"{row[k] / 1e6:,.1f}" for k in ("planned", "compiled", "off_chip"))
        return f"{head} {sizes} | {ratio:.3f} | {row['seconds']} |"
    return f"{head} {row.get('refused', row.get('failed', ''))} | | | | |"


HEAD = """| workload | level | budget, MB | planned peak, MB | compiled peak, MB | off the chip, MB | ratio | planning, s |
|---|---|---|---|---|---|---|---|"""


def main() -> None:
    """Ask for rows, write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(NAMES))
    parser.add_argument("--on", default="v5e:2x4", choices=sorted(AXES))
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--one")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(*json.loads(given.one))))
        return
    print(HEAD)
    table = "\n".join(line(r) for r in rows(given.names, given.on, given.seconds))
    command = " ".join(["python benchmarks/compilers/memory.py", *sys.argv[1:]])
    text = f"# Peak memory, plan against compiler, {given.on}\n\n`{command}`\n\n{HEAD}\n{table}\n"
    (pathlib.Path(__file__).with_suffix(".md")).write_text(text)


if __name__ == "__main__":
    main()
