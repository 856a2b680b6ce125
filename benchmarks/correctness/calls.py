"""Calls with random argument structures against `jax.jit`: `make bench-calls`, 10,000 of them.

An interrupted run continues: each hundred is a line of `benchmarks/correctness/calls.jsonl`, a seed counts once
for all versions of JAX, and `benchmarks/correctness/calls.md` is the table. `benchmarks/correctness/calls.py FIRST
LAST` runs those hundreds alone.
"""

from __future__ import annotations

import os


os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import collections  # noqa: E402
import json  # noqa: E402
import pathlib  # noqa: E402
import sys  # noqa: E402

import jax  # noqa: E402

from tests.laws.call_structures import check  # noqa: E402


HERE = pathlib.Path(__file__).parent
STATE, PAGE = HERE / "calls.jsonl", HERE / "calls.md"
GOOD = ("equal", "refused alike", "refused")


def hundred(first: int) -> dict:
    """Outcomes of a hundred seeds."""
    counts: collections.Counter[str] = collections.Counter()
    row: dict = dict(jax=jax.__version__, first=first, broken=[])
    for seed in range(first, first + 100):
        try:
            outcome = check(seed)
        except Exception as e:
            outcome = f"broken: {type(e).__name__}: {str(e)[:300]}"
        kind = outcome.partition(":")[0]
        counts[kind] += 1
        if kind not in GOOD:
            row["broken"].append(f"seed {seed}: {outcome}")
    return {**row, **counts}


def page(rows: list[dict]) -> str:
    """The table, and what broke."""
    lines = [
        "# 10,000 random argument structures, against jax.jit", "",
        "`make bench-calls`: rows in `calls.jsonl`; 200 of them are in CI on both versions. "
        "Equal: results, types and trees of `jax.jit`, at the first call and the second. Refused alike: the error of "
        "JAX for the same call. Refused: a `ShardError` where JAX refuses too.", "",
        "| JAX | structures | equal | refused alike | refused | broken |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for version in (*sorted({r["jax"] for r in rows}), None):
        mine = [r for r in rows if version in (r["jax"], None)]
        cells = [sum(r.get(k, 0) for r in mine) for k in GOOD] + [sum(len(r["broken"]) for r in mine)]
        lines.append(f"| {version or 'all'} | {100 * len(mine)} | " + " | ".join(map(str, cells)) + " |")
    lines += ["", *(f"- JAX {r['jax']}, {b}" for r in rows for b in r["broken"])]
    return "\n".join(lines).rstrip() + "\n"


def recorded() -> dict[int, dict]:
    """Hundreds by their first seed."""
    lines = STATE.read_text().splitlines() if STATE.exists() else []
    return {r["first"]: r for r in map(json.loads, lines)}


def main() -> int:
    """Run the hundreds that are not recorded; 1 if a seed breaks the law."""
    first, last = map(int, sys.argv[1:3] or (0, 10_000))
    broken = 0
    for start in range(first, last, 100):
        if start in recorded():
            continue
        row = hundred(start)
        broken += len(row["broken"])
        print(row, flush=True)
        rows = [r for _, r in sorted({**recorded(), start: row}.items())]
        STATE.write_text("".join(json.dumps(r) + "\n" for r in rows))
        PAGE.write_text(page(rows))
        jax.clear_caches()
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
