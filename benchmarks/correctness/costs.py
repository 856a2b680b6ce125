"""Objective, cost network and schedule give one cost, on thousands of random training programs.

    python benchmarks/correctness/costs.py [--count 3000] [--seed 0] [--start 0] [--rivals 300]

Each program is planned at levels 0 and 2, for CPU devices and for TPU v5p. Checked are

- the plan: its objective is its schedule's own cost, and the bound is not above it;
- three random assignments of its cost network: their cost by the network is that of their schedules, and none
  is below the bound;
- for the first `--rivals` programs: no plan by propagation and none of 20 random what-ifs (a tensor that is not pinned,
  or an operator, cut another way) costs less than a plan called optimal.

Program `n` of seed `s` is that of `benchmarks/correctness/fuzz.py`. Nothing runs on devices, so this takes about a
second a plan.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any


os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path[:0] = [str(Path(__file__).parents[2])]

SETTINGS = ((0, None), (0, "v5p"), (2, None), (2, "v5p"))


def main() -> int:
    """Judge the programs; the exit status is 1 if any broke the law."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rivals", type=int, default=300)
    parser.add_argument("--high", type=int, default=40)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    import jax

    from tests.laws.fuzz_programs import numbered_program

    found: Counter[str] = Counter()
    start = time.perf_counter()
    for n in range(args.start, args.start + args.count):
        p = numbered_program(args.seed, n, args.high)
        for level, chip in SETTINGS:
            with jax.enable_x64(p.x64):
                try:
                    plan = judge(p, level, chip, n, found)
                    if plan is not None and n < args.rivals:
                        rivals(p, plan, level, chip, n, found)
                except Exception:
                    found["error"] += 1
                    print(n, level, chip, traceback.format_exc(limit=-6), flush=True)
        if (n + 1) % 100 == 0:
            print(f"{n + 1}: {dict(found)} {time.perf_counter() - start:.0f} s", flush=True)
    print(f"{args.count} programs of seed {args.seed}, jax {jax.__version__}: {dict(found)}")
    broken = sum(v for k, v in found.items() if k.startswith("broken") or k == "error")
    print(f"{broken} broken")
    return int(broken > 0)


def judge(p: Any, level: int, chip: str | None, n: int, found: Counter[str]) -> Any:
    """The plan of a program, with its objective against its schedule and some assignments against theirs."""
    import numpy as np

    from jshard._core.errors import SearchError, StrategyError
    from tests.laws.law_costs import both_costs, close, random_assignments, searched, training

    with searched() as seen:
        try:
            step, args = training(p, level=level, hardware=chip)
            plan = step.plan(*args)
        except (SearchError, StrategyError):
            found["refused"] += 1
            return None
        except (TypeError, ValueError, NotImplementedError):
            found["invalid"] += 1
            return None
    found["plans"] += 1
    found["optimal"] += plan.cost.optimal
    built = seen.problems[0][0]
    schedules = [both_costs(b, a)[1] for b, a in seen.problems]  # the plan's is one of them
    if not any(close(s, plan.cost.objective) for s in schedules):
        found["broken: plan"] += 1
        print(n, level, chip, f"objective {plan.cost.objective:.6g}, schedules {schedules}", flush=True)
    for other in random_assignments(built, seen.problems[0][1], np.random.default_rng(n), 3):
        by_network, by_schedule = both_costs(built, other)
        found["assignments"] += 1
        if not close(by_network, by_schedule):
            found["broken: assignment"] += 1
            print(n, level, chip, f"network {by_network:.6g}, schedule {by_schedule:.6g}", flush=True)
        if by_schedule < plan.cost.bound * (1 - 1e-9):
            found["broken: bound"] += 1
            print(n, level, chip, f"bound {plan.cost.bound:.6g}, schedule {by_schedule:.6g}", flush=True)
    return plan


def rivals(p: Any, plan: Any, level: int, chip: str | None, n: int, found: Counter[str]) -> None:
    """Other plans of a program, none of which may cost less than one called optimal."""
    from jshard._core.errors import ShardError
    from tests.laws.law_costs import training

    if not plan.cost.optimal:
        return
    rng = random.Random(n)
    # A what-if of a pinned tensor replaces its pin: its plan solves another problem, and may cost less.
    names = [r.name for r in plan.operators]
    names += [r.path for r in (*plan.inputs, *plan.outputs) if not r.pinned]
    for k in range(21):
        try:
            if k == 20:
                step, args = training(p, level=level, hardware=chip, search="propagation")
                name, other = "propagation", step.plan(*args)
            else:
                name = rng.choice(names)
                free = [a.cuts for a in plan.search_again.alternatives(name) if not a.reason]
                other = plan.what_if(**{name: rng.choice(free)})[0]
        except ShardError:
            found["rival refused"] += 1
            continue
        found["rivals"] += 1
        if other.cost.objective < plan.cost.objective * (1 - 1e-9):
            found["broken: rival"] += 1
            print(
                n,
                level,
                chip,
                name,
                f"{other.cost.objective:.6g} below {plan.cost.objective:.6g}",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
