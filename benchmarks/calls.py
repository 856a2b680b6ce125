"""Random argument structures against `jax.jit`: `make bench-calls` (10,000; or `benchmarks/calls.py FIRST LAST`)."""

from __future__ import annotations

import os


os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import collections  # noqa: E402
import sys  # noqa: E402

import jax  # noqa: E402

from tests.call_structures import check  # noqa: E402


def main() -> int:
    """Run the seeds; 1 if one breaks the law."""
    first, last = map(int, sys.argv[1:3] or (0, 10_000))
    counts: collections.Counter[str] = collections.Counter()
    for seed in range(first, last):
        try:
            outcome = check(seed)
        except Exception as e:
            outcome = "broken"
            print(f"seed {seed}: {type(e).__name__}: {str(e)[:300]}", flush=True)
        counts[outcome.partition(":")[0]] += 1
        if seed % 100 == 99:
            print(f"{seed + 1 - first} structures: {dict(counts)}", flush=True)
            jax.clear_caches()
    return int(counts["broken"] + counts["ShardError"] > 0)


if __name__ == "__main__":
    sys.exit(main())
