"""Plans that are searched for what products hide, against those of least sum, on the timeline of the compiled programs.

`python benchmarks/compilers/overlap.py [--only WORKLOAD ...] [--on MACHINE ...]` plans every workload as `exposure.py` does,
as it is and with `config={"overlap": "search"}`. Where the two plans differ it compiles both; one line of JSON a run goes
to `overlap.jsonl`, and `overlap.md` is written anew after each.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any


ROOT = pathlib.Path(__file__).parents[2]
HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(ROOT))

from benchmarks.compilers.fidelity import MACHINES, WORKLOADS  # noqa: E402
from benchmarks.compilers.kept_rows import (  # noqa: E402
    arguments,
    compilers_python,
    in_process,
    keep_rows,
    kept_rows,
)


RESULTS, TABLE = HERE / "overlap.jsonl", HERE / "overlap.md"
COMPILED = ("v5e:2x4", "v5e:4x8", "h100:1x8")


def run_one(name: str, machine: str) -> dict[str, Any]:
    """Plan a workload both ways, and compile both plans where they differ."""
    import time

    import jax

    import jshard
    from benchmarks import workloads

    found: dict[str, Any] = {"jax": jax.__version__}
    decisions = []
    mesh = jshard.topology(machine, MACHINES[machine], compiles=True)
    w = workloads.get(name, devices=mesh.devices)
    made = []
    for way, overlap in (("first", True), ("sum", True), ("search", "search")):
        f = jshard.shard(
            w.step, in_strategy=w.in_strategy(mesh.devices), level=2, mesh=mesh, donate_argnums=(0,),
            config={"overlap": overlap},
        )  # fmt: skip
        start = time.process_time()
        plan = f.plan(*w.args)
        found[f"{way}_plan_s"] = time.process_time() - start
        if way == "first":  # what caches of the process keep is there for both that are compared
            continue
        found[f"{way}_step"], found[f"{way}_hidden"] = plan.step_seconds, plan.cost.hidden
        decisions.append(plan.decision)
        made.append((way, f, plan))
    found["same"] = decisions[0] == decisions[1]
    for way, f, plan in [] if found["same"] else made:
        t = plan.verify(f.lower(*w.args).compile()).timeline
        if t is None:
            return {"failed": "no timeline"}
        found[f"{way}_compiled"] = t.compute + t.exposed
    return found


def write_table(results: dict[tuple[str, str], dict[str, Any]]) -> str:
    """The Markdown table of all results."""
    good = {k: r for k, r in results.items() if "failed" not in r}
    other = {k: r for k, r in good.items() if not r["same"]}
    cost = sorted(r["search_plan_s"] / r["sum_plan_s"] for r in good.values() if "sum_plan_s" in r) or [1.0]
    lines = [
        "# Plans that are searched for what products hide",
        "",
        "Written by `make bench-overlap`, 25 November 2026. Each workload of `benchmarks/workloads.py` is planned at level",
        '2 from the cut of its batch alone, for the least sum and with `config={"overlap": "search"}`: a second search',
        "counts what the first plan's schedule does not hide, and its plan is taken if its own schedule is shorter by 1%",
        "(`jshard/_plan/overlap_choice.py`). Compiled steps are compute and exposed communication of the schedule, as in",
        "[exposure.md](exposure.md), of both plans where they differ.",
        "",
        f"Another plan is taken in **{len(other)} of {len(good)} runs**. In the others no plan that was found has a step",
        f"shorter by 1% than that of least sum, and nothing is compiled. Of {len(cost)} runs planning took",
        f"{cost[len(cost) // 2]:.2f} times the CPU seconds in the median, {cost[-1]:.2f} at most: so it is an option.",
        "",
        "| workload | machine | step: sum | search | hidden: sum | search | compiled: sum | search | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (name, machine), r in sorted(
        results.items(), key=lambda i: (COMPILED.index(i[0][1]), WORKLOADS.index(i[0][0]))
    ):
        if "failed" in r:
            lines.append(f"| {name} | {machine} | {r['failed']} | | | | | | |")
            continue
        keys = ("sum_step", "search_step", "sum_hidden", "search_hidden")
        ms = " | ".join(f"{1e3 * r[k]:.4g} ms" for k in keys)
        compiled = "one plan | | 1.000"
        if not r["same"]:
            a, b = r["sum_compiled"], r["search_compiled"]
            compiled = f"{1e3 * a:.4g} ms | {1e3 * b:.4g} ms | {b / a:.3f}"
        lines.append(f"| {name} | {machine} | {ms} | {compiled} |")
    return "\n".join(lines) + "\n"


def stored() -> dict[tuple[str, str], dict[str, Any]]:
    """The last result of each run."""
    return kept_rows(RESULTS, "workload", "machine")


def main() -> int:
    """All runs."""
    parser = arguments(__doc__, WORKLOADS, COMPILED, nargs=2, metavar=("WORKLOAD", "MACHINE"))
    a = parser.parse_args()
    if a.one:
        print(json.dumps(run_one(*a.one)))
        return 0
    python = compilers_python()
    for name in a.only:
        for machine in a.on:
            if (name, machine) in stored() and not a.again:
                continue
            row = {"workload": name, "machine": machine}
            row |= in_process(python, __file__, ["--one", name, machine], a.seconds)
            results = {**stored(), (name, machine): row}
            keep_rows(RESULTS, results.values())
            TABLE.write_text(write_table(results))
            print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
