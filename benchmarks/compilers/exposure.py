"""Exposed communication of compiled workloads: planned, emitted, waited for, read from the compilers' schedules.

`python benchmarks/compilers/exposure.py [--only WORKLOAD ...] [--on MACHINE ...] [--seconds 600]` plans every workload
from the cut of its batch alone, compiles it for the machine and appends one line of JSON a run to
`benchmarks/compilers/exposure.jsonl`; `exposure.md` is written anew after each. A run that is there is left out
(`--again` repeats it; `--changed` plans it again, and compiles it only if its plan communicates otherwise than the
stored one). A process a run, as in `fidelity.py`, whose environment and machines these are.
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


RESULTS, TABLE = HERE / "exposure.jsonl", HERE / "exposure.md"
NEAR = 0.25  # of the compiled program's communication
SAME = 1e-3  # relative: two plans that communicate for so nearly the same time are one
COMPILED = tuple(m for m in MACHINES if not m.startswith("cpu"))


def run_one(name: str, machine: str, only_plan: bool = False) -> dict[str, Any]:
    """Plan, compile and read one workload; of `only_plan` what the plan says."""
    import jax

    import jshard
    from benchmarks import workloads

    mesh = jshard.topology(machine, MACHINES[machine], compiles=True)
    w = workloads.get(name, devices=mesh.devices)
    f = jshard.shard(w.step, in_strategy=w.in_strategy(mesh.devices), level=2, mesh=mesh, donate_argnums=(0,))
    plan = f.plan(*w.args)
    if only_plan:
        return {"jax": jax.__version__, **_planned(plan)}
    t = plan.verify(f.lower(*w.args).compile()).timeline
    if t is None:
        return {"failed": "no timeline"}
    starts = [i for i in t.collectives if i.asynchronous]
    return {
        "jax": jax.__version__,
        **_planned(plan),
        "compute": t.compute,
        "communication": t.communication,
        "exposed": t.exposed,
        "asynchronous": len(starts),
        "collectives": len(t.collectives),
        "unread": len(t.unread),
    }


def _planned(plan: Any) -> dict[str, float]:
    """What a plan says of a step: compute, communication, and the part of it that nothing hides."""
    c = plan.cost
    return {"plan_compute": c.compute, "plan_communication": c.communication, "plan_exposed": c.exposed}


def write_table(results: dict[tuple[str, str], dict[str, Any]]) -> str:
    """The Markdown table of all results."""
    good = {k: r for k, r in results.items() if "failed" not in r}
    near = {k for k, r in good.items() if _error(r, "plan_exposed") <= NEAR}
    alone = {k for k, r in good.items() if _error(r, "plan_communication") <= NEAR}
    tpu = [k for k in results if k[1].startswith("v")]
    missed = [f"{n} on {m}" for n, m in good if (n, m) not in near]
    missed += [f"{n} on {m} (not compiled)" for n, m in results if (n, m) not in good]

    def within(some: dict[tuple[str, str], dict[str, Any]]) -> int:
        return sum(abs(r["plan_compute"] / r["compute"] - 1) <= 0.15 for r in some.values())

    compute, v5e = within(good), {k: r for k, r in good.items() if k[1] == "v5e:2x4"}
    lines = [
        "# Exposed communication",
        "",
        "Written by `make bench-exposure`. Each row is a training step of `benchmarks/workloads.py`, planned at level 2",
        "from the cut of its batch alone and compiled by the machine's own compiler, with no device. The schedule of the",
        "compiled program says which collectives run beside compute; their seconds are the plan's, for the bytes on the",
        "wire.",
        "Compute is the TPU compiler's `estimated_cycles` over the clock; on GPUs, whose compiler writes none, the roofline",
        "of each instruction.",
        "",
        "A plan's step counts the communication that no product hides (`docs/modelled.md`). What it counts and what the",
        "compiled program waits for differ by at most a quarter of the compiled program's communication in",
        f"**{len(near)} of {len(results)} runs**, {sum(k in near for k in tpu)} of {len(tpu)} on TPUs; if all communication "
        "were counted, in",
        f"{len(alone)} of {len(results)}, {sum(k in alone for k in tpu)} of {len(tpu)} on TPUs. The others:",
        f"{', '.join(missed)}.",
        "On v5e what hides are gathers of weights, the only kind that its compiler starts early in these programs: one of",
        "mlp-64k's two, whose product comes second, and the layers' of gpt and vit, from the second on. Reduce-scatters of",
        "gradients, all-reduces and all-to-alls stand in the schedule as synchronous, and so do gathers of scanned layers",
        "(gpt-scan). On v5p none is asynchronous. On h100 all kinds are, permutes were not seen: the all-reduce of a",
        "gradient hides under the products that follow (mlp-64k), unless XLA combines it with that of the last one (lora),",
        "gathers and all-to-alls where their readers come later (moe, lm-head). In loops XLA hides what unrolling them lets",
        "it (llama); the plan counts that as exposed.",
        "On v5p libtpu 0.0.42.1 compiles gathers and reduce-scatters over all three dimensions of the torus to all-reduces",
        "of twice the seconds (0.5 to 256 MB, mesh axes of 8 x 8, 16 x 4 and 4 x 4 x 4); over one or two dimensions it does",
        "not. They are priced as all-reduces.",
        "",
        "The search makes the sum of compute and all communication least; what a second search for what hides gains is in",
        "[overlap.md](overlap.md).",
        "",
        f"The plan's compute is within 15% of the compiled program's in {compute} of {len(good)} runs, on v5e:2x4 in",
        f"{within(v5e)} of {len(v5e)}; the vector unit's cycles were fitted there, and the GPU rows compare two rooflines.",
        "Eight of lora's fifteen large products are tiled so that their sums take 8 to 13 steps, and take 1.3 to 1.5 times",
        "as long as those of the same sizes that are not.",
        "Plans are those of 25 November 2026, but for conv on v5p:4x4x4, whose row is a day older.",
        "",
        "| workload | machine | compute: plan | compiled | communication: plan | emitted | exposed: plan | compiled "
        "| hidden: plan | compiled | async |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (name, machine), r in sorted(
        results.items(), key=lambda i: (COMPILED.index(i[0][1]), WORKLOADS.index(i[0][0]))
    ):
        if "failed" in r:
            lines.append(f"| {name} | {machine} | {r['failed']} | | | | | | | | |")
            continue
        keys = ("plan_compute", "compute", "plan_communication", "communication", "plan_exposed", "exposed")
        ms = " | ".join(f"{1e3 * r[k]:.3g} ms" for k in keys)
        hidden = [
            f"{1 - r[e] / r[c] if r[c] else 0.0:.0%}"
            for e, c in (("plan_exposed", "plan_communication"), ("exposed", "communication"))
        ]
        lines.append(
            f"| {name} | {machine} | {ms} | {' | '.join(hidden)} | {r['asynchronous']} of {r['collectives']} |"
        )
    return "\n".join(lines) + "\n"


def _error(r: dict[str, Any], planned: str) -> float:
    """Planned less exposed seconds of communication, as a part of those of the compiled program."""
    return abs(r[planned] - r["exposed"]) / r["communication"] if r["communication"] else 0.0


def stored() -> dict[tuple[str, str], dict[str, Any]]:
    """The last result of each run."""
    # Earlier plans counted all communication as exposed.
    rows = kept_rows(RESULTS, "workload", "machine")
    return {k: {"plan_exposed": r.get("plan_communication"), **r} for k, r in rows.items()}


def main() -> int:
    """All runs, cheap ones first."""
    parser = arguments(__doc__, WORKLOADS, COMPILED, nargs=2, metavar=("WORKLOAD", "MACHINE"))
    parser.add_argument("--plan", action="store_true", help="with --one: plan and compile nothing")
    a = parser.parse_args()
    if a.one:
        print(json.dumps(run_one(*a.one, only_plan=a.plan)))
        return 0
    python = compilers_python()
    for name in a.only:
        for machine in a.on:
            last = stored().get((name, machine))
            if last is not None and not (a.again or a.changed):
                continue
            one = ["--one", name, machine]
            if a.changed and last is not None:
                planned = in_process(python, __file__, [*one, "--plan"], a.seconds)
                if "failed" in last or _same(planned, last):
                    _store({**last, **({} if "failed" in last else planned)})
                    continue
            r = in_process(python, __file__, one, a.seconds)
            _store({"workload": name, "machine": machine, **r})
            print(name, machine, r, flush=True)
    return 0


def _same(planned: dict[str, Any], last: dict[str, Any]) -> bool:
    """Whether a plan communicates as the one that was compiled."""
    return abs(planned["plan_communication"] / last["plan_communication"] - 1) <= SAME


def _store(row: dict[str, Any]) -> None:
    """Store the result of a run in the place of an earlier one, and write the table."""
    results = {**stored(), (row["workload"], row["machine"]): row}
    keep_rows(RESULTS, results.values())
    TABLE.write_text(write_table(results))


if __name__ == "__main__":
    sys.exit(main())
