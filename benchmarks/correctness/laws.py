"""Every function of `tests/laws/law_functions.py` under every transformation, against plain JAX: `make bench-laws`.

An interrupted run continues: the result of each function is kept in `benchmarks/correctness/laws.jsonl`, a line for
each version of JAX, and `benchmarks/correctness/laws.md` is the table of it. `--again` runs all anew; names of
functions run those alone.
"""

from __future__ import annotations

import os


os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import argparse  # noqa: E402
import collections  # noqa: E402
import json  # noqa: E402
import pathlib  # noqa: E402
import sys  # noqa: E402

import jax  # noqa: E402

from tests.laws.law_functions import FUNCTIONS, TRANSFORMATIONS, check  # noqa: E402


HERE = pathlib.Path(__file__).parent
STATE, PAGE = HERE / "laws.jsonl", HERE / "laws.md"
DTYPES = {"float64": 1e-12, "float32": 1e-6}


def one(function: str) -> dict:
    """Outcomes of one function under every transformation, in both precisions."""
    row: dict = dict(jax=jax.__version__, function=function, broken=[])
    for dtype in DTYPES:
        counts: collections.Counter[str] = collections.Counter()
        for transformation in TRANSFORMATIONS:
            try:
                counts[check(function, transformation, dtype)] += 1
            except Exception as e:
                counts["broken"] += 1
                row["broken"].append(f"{transformation}, {dtype}: {str(e).strip()[:300]}")
        row[dtype] = dict(counts)
    return row


def page(rows: list[dict]) -> str:
    """The table, and what is left."""
    lines = [
        f"# {len(FUNCTIONS)} functions under {len(TRANSFORMATIONS)} transformations, against plain JAX", "",
        "`make bench-laws`: rows in `laws.jsonl`. Equal: structure, dtype, weak type, shape and "
        "values within rtol and atol (times the largest value) of 1e-12 in float64, 1e-6 in float32; 4 devices as 2 x 2, "
        "the first argument cut 2 x 2. Refused: plain JAX refuses the same call, with the same error.", "",
        "| JAX | dtype | functions run | equal | refused as plain | broken | of |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for version in sorted({r["jax"] for r in rows}):
        mine = [r for r in rows if r["jax"] == version]
        for dtype in DTYPES:
            counts = sum((collections.Counter(r[dtype]) for r in mine), collections.Counter())
            lines.append(
                f"| {version} | {dtype} | {len(mine)} of {len(FUNCTIONS)} | {counts['equal']} | {counts['refused']} "
                f"| {counts['broken']} | {len(FUNCTIONS) * len(TRANSFORMATIONS)} |"
            )
    lines.append("")
    for version in sorted({r["jax"] for r in rows}):
        missing = [f for f in FUNCTIONS if (version, f) not in {(r["jax"], r["function"]) for r in rows}]
        if missing:
            lines += [f"Not run yet on JAX {version}: {', '.join(missing)}.", ""]
    lines += [f"- JAX {r['jax']}, {r['function']} under {b}" for r in rows for b in r["broken"]]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Run what is not recorded; 1 if a law is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("functions", nargs="*", default=list(FUNCTIONS), metavar="function")
    parser.add_argument("--again", action="store_true", help="run what is recorded too")
    given = parser.parse_args()

    def recorded() -> dict[tuple[str, str], dict]:
        lines = STATE.read_text().splitlines() if STATE.exists() else []
        return {(r["jax"], r["function"]): r for r in map(json.loads, lines)}

    broken = 0
    for function in given.functions:
        if not given.again and (jax.__version__, function) in recorded():
            continue
        row = one(function)
        broken += len(row["broken"])
        print(
            f"JAX {jax.__version__}, {function}:",
            *(f"{d} {row[d]}" for d in DTYPES),
            *row["broken"],
            flush=True,
        )
        rows = {**recorded(), (row["jax"], function): row}
        rows = dict(sorted(rows.items(), key=lambda kv: (kv[0][0], list(FUNCTIONS).index(kv[0][1]))))
        STATE.write_text("".join(json.dumps(r) + "\n" for r in rows.values()))
        PAGE.write_text(page(list(rows.values())))
        jax.clear_caches()
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
