"""Thousands of random programs, sharded against unsharded: values, gradients, requested shardings, warnings.

    python benchmarks/correctness/fuzz.py [--count 3000] [--seed 0] [--state fuzz.json] [--only NUMBER ...] [--show]
    python benchmarks/correctness/fuzz.py --odd              # sizes that no mesh divides, padded
    python benchmarks/correctness/fuzz.py --shifts           # rolls, shifts, prefixes; such sizes and others, padded
    python benchmarks/correctness/fuzz.py --explore 200      # hypothesis draws the programs, and makes a failure small

Program `n` of seed `s` is the same on every machine, so a number is a report: `--only n` runs it again, and
`--show` prints its source. With `--state` an interrupted run continues. Refused: the pins
of a program contradict each other and jshard says so. Unstable: rounding decides what the plain program gives.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any


# Programs that run once on a few numbers: what counts is the time to compile them.
_QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
_DEVICES = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = f"{_DEVICES} {_QUICK} " + os.environ.get("XLA_FLAGS", "")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path[:0] = [str(Path(__file__).parents[2])]


def main() -> int:
    """Judge the programs; the exit status is 1 if any failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path)
    parser.add_argument("--only", type=int, nargs="*")
    parser.add_argument("--high", type=int, default=40)
    parser.add_argument("--explore", type=int, metavar="COUNT")
    parser.add_argument("--show", action="store_true")
    parser.add_argument(
        "--odd", action="store_true", help="sizes that no mesh divides, with config={'pad': True}"
    )
    parser.add_argument("--shifts", action="store_true", help="programs of shifts, with config={'pad': True}")
    args = parser.parse_args()

    import jax

    from tests.laws.fuzz_judge import judge
    from tests.laws.fuzz_programs import ODD_SIZES, SHIFTED_SIZES, SIZES, numbered_program

    sizes = SHIFTED_SIZES if args.shifts else ODD_SIZES if args.odd else SIZES
    if args.explore:
        return explore(args.explore, args.high)
    done: dict[str, str] = json.loads(args.state.read_text()) if args.state and args.state.exists() else {}
    start = time.perf_counter()
    failed = [int(n) for n, kind in done.items() if kind in ("different", "warning", "error")]
    for n in args.only or range(args.start, args.start + args.count):
        if str(n) in done and not args.only:
            continue
        p = numbered_program(args.seed, n, args.high, sizes)
        if args.show:
            print(p)
        verdict = judge(p, {"pad": True} if args.odd or args.shifts else None)
        done[str(n)] = verdict.kind
        if verdict.failed:
            failed.append(n)
            print(f"==== program {n} of seed {args.seed}: {verdict.kind}\n{p}\n{verdict.text}\n", flush=True)
        if args.state:
            args.state.write_text(json.dumps(done))
        if n % 50 == 49:
            jax.clear_caches()
            print(
                f"{n + 1}: {dict(Counter(done.values()))} {time.perf_counter() - start:.0f} s",
                file=sys.stderr,
            )
    print(f"{len(done)} programs of seed {args.seed}, jax {jax.__version__}: {dict(Counter(done.values()))}")
    print(f"failed: {sorted(failed)}" if failed else "0 failures, 0 unexplained warnings")
    return bool(failed)


def explore(count: int, high: int) -> int:
    """Let hypothesis draw other programs every time, and shrink the first that fails."""
    import hypothesis

    from tests.laws.fuzz_judge import judge
    from tests.laws.fuzz_programs import programs

    every: Any = list(hypothesis.HealthCheck)

    @hypothesis.settings(max_examples=count, deadline=None, database=None, suppress_health_check=every)
    @hypothesis.given(programs(high=high))
    def law(p) -> None:
        verdict = judge(p)
        assert not verdict.failed, f"{verdict.kind}\n{p}\n{verdict.text}"

    law()
    print(f"{count} programs of hypothesis, 0 failures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
