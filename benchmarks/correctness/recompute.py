"""`remat="auto"` against the enumeration of every layout of every choice of what is computed again.

    python benchmarks/correctness/recompute.py [--programs 50] [--seed 0] [--most 600] [--json FILE]

Programs are those of `tests/laws/test_recompute_laws.py`: values of a first half are read in reverse order by a second.
Of each, every subset of the values in between is written out as a program, and of that the cost and the peak of every
assignment, up to `--most` a program; larger ones are passed over. It is planned at levels 0 and 2 on two TPUs v5e under
four budgets, from the least peak of all to the peak of the plan without a budget.
Judged are the plan (it costs what the cheapest that fits costs, and fits) and its bound (not above that). The exit
status is 1 if any differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path[:0] = [str(Path(__file__).parents[2])]

SHARES = (0.0, 0.3, 0.6, 0.9)  # of the way from the least peak to the peak without a budget
ROUNDING = 1e-9


def judged(seed: int, level: int, most: int) -> dict[str, Any] | None:
    """The answers for one program; None where it is too large to enumerate."""
    import jax

    import jshard
    from jshard._core.topology import from_mesh
    from tests.laws.test_recompute_laws import CHIP, least_costs, mesh, there_and_back

    fn, shapes = there_and_back(seed)
    every = least_costs(jax.jit(fn).trace(*shapes).jaxpr, from_mesh(mesh(), CHIP), level, most)
    if every is None:
        return None
    options: Any = dict(mesh=mesh(), level=level, hardware=CHIP)
    free = jshard.shard(fn, memory_budget="1TB", **options).plan(*shapes).cost.peak_bytes
    lowest = min(peak for _, peak in every)
    out: dict[str, Any] = dict(seed=seed, level=level, assignments=len(every), answers=[])
    for share in SHARES:
        limit = int(lowest + share * (free - lowest)) + 1
        if limit >= free:  # nothing binds
            continue
        least = min(cost for cost, peak in every if peak <= limit)
        try:
            cost = jshard.shard(fn, remat="auto", memory_budget=limit, **options).plan(*shapes).cost
        except jshard.ShardError:
            out["answers"].append("refused")
            continue
        if cost.bound > least * (1 + ROUNDING):
            answer = "bound above the least"
        elif cost.peak_bytes > limit or cost.objective > least * (1 + ROUNDING):
            answer = f"{cost.objective / least:.4g} times the least"
        elif cost.objective < least * (1 - ROUNDING):
            answer = "below the least"
        else:
            answer = "proved" if cost.bound >= cost.objective else "equal"
        out["answers"].append(answer)
    return out


def main() -> int:
    """Judge programs until enough of them had a budget that binds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--most", type=int, default=600)
    parser.add_argument("--json", type=Path, help="append rows to this file")
    given = parser.parse_args()
    found: dict[int, dict[str, int]] = {0: {}, 2: {}}
    programs, seed, start = 0, given.seed, time.process_time()
    too_large = unlimited = 0
    while programs < given.programs:
        rows = [row for level in found if (row := judged(seed, level, given.most)) is not None]
        seed += 1
        if not any(row["answers"] for row in rows):
            too_large, unlimited = too_large + (not rows), unlimited + bool(rows)
            continue
        programs += 1
        for row in rows:
            print(json.dumps(row), flush=True)
            if given.json:
                with given.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            for answer in row["answers"]:
                found[row["level"]][answer] = found[row["level"]].get(answer, 0) + 1
    print(f"{programs} programs, seeds {given.seed} to {seed - 1}, {time.process_time() - start:.0f} CPU s")
    print(
        f"passed over: {too_large} with more than {given.most} assignments, {unlimited} where no budget binds"
    )
    for level, counts in found.items():
        print(f"level {level}: {sum(counts.values())} budgets, {counts}")
    return int(any(set(counts) - {"proved", "equal"} for counts in found.values()))


if __name__ == "__main__":
    sys.exit(main())
