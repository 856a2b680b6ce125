"""Peaks of plans within a budget against those of the TPU compiler, which needs no chip.

Each program of `peak_programs.py` is planned on v5e:4x4 without a budget and within a budget of `SHARES` of that plan's
peak, the first that has a plan, and compiled in a process of its own. The compiled peak is what the program allocates in
HBM: arguments, results that are no donated argument's, and temporaries (`memory_analysis()`).

    python benchmarks/compilers/peaks.py decode-list gpt      # these rows
    python benchmarks/compilers/peaks.py --free experts       # without a budget

`PEAKS_DUMP` names a file for the compiled program.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time


ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.compilers.kept_rows import compilers_python, in_process  # noqa: E402


ROWS = pathlib.Path(__file__).with_suffix(".jsonl")
SHARES = (0.9, 0.95, 0.98, 1.0)


def one(name: str, machine: str, free: bool, quick: bool) -> dict:
    """Plan and compile a program here; bytes a device."""
    import jshard
    from benchmarks.compilers.peak_programs import CASES

    rows, columns = map(int, machine.split(":")[1].split("x"))
    mesh = jshard.topology(machine, {"x": rows, "y": columns})
    case = CASES[name]()
    options = {"mesh": mesh, "donate_argnums": case.donated}
    begun = time.monotonic()
    f = jshard.shard(case.step, case.in_strategy, **options)
    plan = f.plan(*case.args)
    row: dict = {"free": plan.cost.peak_bytes, "budget": None}
    for share in () if free else SHARES:
        budget = int(row["free"] * share)
        try:
            f = jshard.shard(case.step, case.in_strategy, memory_budget=budget, **options)
            plan = f.plan(*case.args)
        except jshard.ShardError:
            continue
        row["budget"] = budget
        break
    row |= {"planned": plan.cost.peak_bytes, "plan_seconds": round(time.monotonic() - begun, 1)}
    begun = time.monotonic()
    compiler_options = {"exec_time_optimization_effort": -1.0} if quick else None
    compiled = f.lower(*case.args).compile(compiler_options=compiler_options)
    if dump := os.environ.get("PEAKS_DUMP"):
        pathlib.Path(dump).write_text(compiled.as_text())
    stats = compiled.memory_analysis()
    own = stats.output_size_in_bytes - stats.alias_size_in_bytes
    parts = {"arguments": stats.argument_size_in_bytes, "results": own, "temporary": stats.temp_size_in_bytes}
    peak = {"compiled": sum(parts.values()), "heap_peak": stats.peak_memory_in_bytes}
    return row | parts | peak | {"compile_seconds": round(time.monotonic() - begun, 1)}


def spawn(name: str, machine: str, free: bool, quick: bool, seconds: float) -> dict:
    """A row, made in a process of its own, since compilers abort."""
    row = in_process(
        compilers_python(), __file__, ["--one", json.dumps([name, machine, free, quick])], seconds
    )
    return {"name": name, "machine": machine, "within": not free} | row


HEAD = """| program | budget, MB | planned, MB | compiled, MB | ratio | of budget | heap peak, MB | plan, s | compile, s |
|---|---|---|---|---|---|---|---|---|"""


def line(row: dict) -> str:
    """One row of the table."""
    if "compiled" not in row:
        return f"| {row['name']} | {row.get('failed', '')} | | | | | | | |"
    mb = {k: f"{row[k] / 1e6:,.1f}" for k in ("planned", "compiled", "heap_peak")}
    budget, used = ("", "") if row["budget"] is None else (
        f"{row['budget'] / 1e6:,.1f} ({row['budget'] / row['free']:.0%})", f"{row['compiled'] / row['budget']:.3f}"
    )  # fmt: skip
    ratio = row["planned"] / row["compiled"]
    return (
        f"| {row['name']} | {budget} | {mb['planned']} | {mb['compiled']} | {ratio:.3f} | {used} | {mb['heap_peak']} "
        f"| {row['plan_seconds']} | {row['compile_seconds']} |"
    )


def main() -> None:
    """Make rows and keep them, or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--on", default="v5e:4x4")
    parser.add_argument("--free", action="store_true", help="without a budget")
    parser.add_argument("--quick", action="store_true", help="little effort of the compiler")
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--out", default=str(ROWS))
    parser.add_argument("--one")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(*json.loads(given.one))))
        return
    print(HEAD)
    from benchmarks.compilers.peak_programs import NAMES

    for name in given.names or NAMES:
        row = spawn(name, given.on, given.free, given.quick, given.seconds)
        print(line(row), flush=True)
        with open(given.out, "a") as f:
            f.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
