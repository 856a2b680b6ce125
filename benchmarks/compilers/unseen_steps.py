"""Planned peak memory, seconds and bytes of steps that nobody tuned the plans for, against the TPU compiler's.

    python benchmarks/compilers/unseen_steps.py [NAME ...]          # all rows, or those whose name contains a NAME
    python benchmarks/compilers/unseen_steps.py --held NAME         # what plan and compiler hold at their peaks

Each step of `unseen_sequences.py` and `unseen_fields.py` is planned at level 2 for all sixteen chips of a v5e:4x4, a mesh of
4 x 4, from the cut of its batch alone, and compiled, in a process of its own; rows are kept in `unseen_steps.jsonl`, and the
page is written anew after each. `--plans` plans again and compiles only what is laid out otherwise than what was compiled.
`UNSEEN_DUMP` names a folder for the texts of compiled programs and their buffers.

- "In use" is the compiler's own peak (`peak_memory_in_bytes`), of some programs with what lies on the chip, of others not;
  "alive" is the most that lives at once in the memory and on the chip together, copies that are fetched ahead counted twice.
  A plan counts arrays once, wherever they lie. "Allocated" has the gaps between buffers too. "In tiles" is what the plan
  says of arrays of convolutions in a TPU's tiles.
- Compute is the compiler's `estimated_cycles` over the clock, loops times their turns. "Without": instructions of which it
  states no cycles (sorts, scatters, transforms, pads between elements); then the roofline of their bytes stands in the sum,
  and no ratio is given.
- "As planned": every collective of the compiled program is one of the plan, with its bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import re
import sys
import time
from typing import Any


ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.compilers.kept_rows import (  # noqa: E402
    compilers_python,
    in_process,
    keep_rows,
    kept_rows,
)


ROWS, PAGE = pathlib.Path(__file__).with_suffix(".jsonl"), pathlib.Path(__file__).with_suffix(".md")
MACHINE, AXES = "v5e:4x4", {"x": 4, "y": 4}
NEAR = 0.25
_WITHOUT_CYCLES = re.compile(
    r" (?:(sort|custom-call|scatter|fft|reduce-window|select-and-scatter)\(|(pad)\(.*padding=\S*\d_-?\d+_[1-9])"
)


def cases() -> dict[str, Any]:
    """All steps by name."""
    from benchmarks.compilers.unseen_fields import FIELDS
    from benchmarks.compilers.unseen_sequences import SEQUENCES

    return {**SEQUENCES, **FIELDS}


def planned(name: str) -> tuple[Any, Any, tuple[Any, ...]]:
    """The sharded step, its plan and the shapes of its arguments."""
    import jshard

    case = cases()[name]()
    mesh = jshard.topology(MACHINE, AXES, compiles=True)
    f = jshard.shard(case.step, case.in_strategy, mesh=mesh, level=2, donate_argnums=case.donated)
    return f, f.plan(*case.args), case.args


def of_plan(plan: Any) -> dict[str, Any]:
    """What a plan says."""
    c = plan.cost
    tiled = {"tiled": plan.memory.tiled} if plan.memory.tiled else {}
    laid_out = [(o.name, o.operands, o.results) for o in plan.operators]
    moved = [(m.kind, m.bytes, m.count, m.operator) for m in plan.collectives]
    layouts = hashlib.sha256(repr((laid_out, moved)).encode()).hexdigest()[:12]
    return {
        "peak": c.peak_bytes, **tiled, "compute": c.compute, "step": plan.step_seconds, "gap": c.gap, "layouts": layouts,
    }  # fmt: skip


def one(name: str) -> dict[str, Any]:
    """Plan and compile a step here."""
    import jax

    from benchmarks.compilers.live_bytes import compiled_with_buffers, most_live

    begun = time.process_time()
    f, plan, args = planned(name)
    row = {"plan": of_plan(plan), "plan_cpu_s": round(time.process_time() - begun, 1)}
    begun = time.process_time()
    compiled, ranges, places = compiled_with_buffers(f.lower(*args))
    row["compile_cpu_s"] = round(time.process_time() - begun, 1)
    if dump := os.environ.get("UNSEEN_DUMP"):
        for kind, text in (("hlo", compiled.as_text()), ("ranges", ranges), ("places", places)):
            (pathlib.Path(dump) / f"{name.replace(' ', '_')}.{kind}").write_text(text)
    checked = plan.verify(compiled)
    stats, timeline = compiled.memory_analysis(), checked.timeline
    live, on_chip = most_live(ranges, places)
    own = stats.output_size_in_bytes - stats.alias_size_in_bytes
    without = {
        m[1] or m[2] for line in compiled.as_text().splitlines()
        if (m := _WITHOUT_CYCLES.search(line)) and "estimated_cycles" not in line and "AssumeGather" not in line
    }  # fmt: skip
    return row | {
        "jax": jax.__version__, "in_use": stats.peak_memory_in_bytes, "live": live, "on_chip": on_chip,
        "allocated": stats.argument_size_in_bytes + own + stats.temp_size_in_bytes,
        "compute": timeline.compute if timeline else None, "without": sorted(without - {"custom-call"}),
        "predicted": checked.predicted, "emitted": checked.emitted, "verified": checked.ok,
    }  # fmt: skip


def held(name: str) -> None:
    """Print what the plan and the compiled program hold at their peaks, largest first."""
    from benchmarks.compilers.live_bytes import compiled_with_buffers, held_at_peak

    f, plan, args = planned(name)
    curve = plan.memory.curve
    at = max(range(len(curve)), key=curve.__getitem__)
    print(f"plan: {curve[at] / 2**20:,.1f} MiB while {plan.operators[at].name} runs")
    rows = [r for r in plan.live if r.first <= at <= r.last]
    for r in sorted(rows, key=lambda r: -r.bytes)[:30]:
        print(f"  {r.bytes / 2**20:10,.1f}  {r.kind:12} {r.tensor}  {r.first}-{r.last}")
    compiled, ranges, places = compiled_with_buffers(f.lower(*args))
    lines = {
        m[1]: line
        for line in compiled.as_text().splitlines()
        if (m := re.match(r"\s*(?:ROOT )?%(\S+) = ", line))
    }
    found = held_at_peak(ranges, places)
    print(f"compiled: {sum(size for size, _, _ in found) / 2**20:,.1f} MiB")
    for size, value, on_chip in found[:40]:
        line = lines.get(value.partition("{")[0], "")
        said = re.search(r'op_name="([^"]*)"', line)
        what = re.search(r"= (\S+) (\w[\w-]*)\(", line)
        print(
            f"  {size / 2**20:10,.1f}  {'chip' * on_chip:4} {value} {what[1] if what else ''} "
            f"{what[2] if what else ''} {said[1] if said else ''}"
        )


def page(rows: dict[str, dict[str, Any]]) -> str:
    """The tables in Markdown."""
    title, intro = (__doc__ or "").split("\n\n", 1)
    good = [r for r in rows.values() if "in_use" in r]
    near = [r for r in good if abs(_of_peak(r) - 1) <= NEAR]
    timed = [r for r in good if r["compute"] and not r["without"]]
    close = [r for r in timed if abs(r["plan"]["compute"] / r["compute"] - 1) <= NEAR]
    heads = (
        "step", "peak, MiB", "in tiles", "in use, MiB", "planned / in use", "alive, MiB", "allocated, MiB",
        "compute, ms", "compiled, ms", "planned / compiled", "without", "sent a device, MB", "as planned", "date",
    )  # fmt: skip
    out = [f"# {title.strip()}", "", intro.rstrip(), ""]
    out += [
        f"Of {len(good)} steps the planned peak of {len(near)} is within {NEAR:.0%} of what is in use, and compute of",
        f"{len(close)} of {len(timed)} whose cycles are all stated.",
        "",
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
    ]
    for name in cases():
        row = rows.get(name)
        if row is None:
            continue
        if "in_use" not in row:
            out.append(f"| {name} | {row.get('failed', '')[:80]} |" + " |" * (len(heads) - 2))
            continue
        p, mib = row["plan"], 2**20
        ratio = f"{p['compute'] / row['compute']:.2f}" if row["compute"] and not row["without"] else ""
        cells = [
            name, f"{p['peak'] / mib:,.1f}", f"{p['tiled'] / mib:,.1f}" if "tiled" in p else "",
            f"{row['in_use'] / mib:,.1f}", f"{_of_peak(row):.2f}", f"{(row['live'] + row['on_chip']) / mib:,.1f}",
            f"{row['allocated'] / mib:,.1f}", f"{p['compute'] * 1e3:.3g}",
            f"{row['compute'] * 1e3:.3g}" if row["compute"] else "", ratio, ", ".join(row["without"]),
            f"{row['emitted'] / 1e6:,.1f}", "yes" if row["verified"] else "no", row["date"],
        ]  # fmt: skip
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join([*out, ""])


def _of_peak(row: dict[str, Any]) -> float:
    """Planned peak, in tiles where the plan says so, over what is in use."""
    return row["plan"].get("tiled", row["plan"]["peak"]) / row["in_use"]


def main() -> None:
    """Make the rows that are asked for and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--held")
    parser.add_argument("--seconds", type=float, default=900.0, help="limit of one row")
    parser.add_argument("--one", help="one row, in this process")
    given = parser.parse_args()
    if given.held:
        held(given.held)
        return
    if given.one:
        print(json.dumps(of_plan(planned(given.one)[1]) if given.plans else one(given.one)))
        return
    python, rows = compilers_python(), kept_rows(ROWS, "name")
    for name in cases():
        if given.names and not any(part in name for part in given.names):
            continue
        last = rows.get(name, {})
        if given.plans and "plan" in last:
            plan = in_process(python, __file__, ["--one", name, "--plans"], given.seconds)
            same = "failed" not in plan and plan["layouts"] == last["plan"].get("layouts")
            print(name, json.dumps(plan), "the stored plan" if same else "another plan", flush=True)
            if same:
                rows[name] = last | {"plan": plan}
                keep_rows(ROWS, (rows[n] for n in cases() if n in rows))
                PAGE.write_text(page(rows))
                continue
        row = in_process(python, __file__, ["--one", name], given.seconds)
        rows[name] = {"name": name, "date": time.strftime("%Y-%m-%d")} | row
        print(json.dumps(rows[name]), flush=True)
        keep_rows(ROWS, (rows[n] for n in cases() if n in rows))
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
