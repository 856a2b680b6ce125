"""Every function of `tests/law_functions.py` under every transformation, against plain JAX: `make bench-laws`."""

from __future__ import annotations

import os


os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import collections  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402

import jax  # noqa: E402

from tests.law_functions import FUNCTIONS, TRANSFORMATIONS, check  # noqa: E402


def main() -> int:
    """Run the product; 1 if a law is broken."""
    counts: collections.Counter[str] = collections.Counter()
    dtypes = sys.argv[1:] or ("float64", "float32")
    start = time.perf_counter()
    for function in FUNCTIONS:
        for transformation in TRANSFORMATIONS:
            for dtype in dtypes:
                try:
                    outcome = check(function, transformation, dtype)
                except Exception as e:
                    outcome = "broken"
                    print(f"{function} under {transformation}, {dtype}: {str(e).strip()[:300]}", flush=True)
                counts[outcome] += 1
        print(f"{function}: {dict(counts)}", flush=True)
        jax.clear_caches()
    kinds = f"{len(FUNCTIONS)} functions x {len(TRANSFORMATIONS)} transformations x {len(dtypes)} dtypes"
    print(f"JAX {jax.__version__}: {kinds} in {time.perf_counter() - start:.0f} s: {dict(counts)}")
    return int(counts["broken"] > 0)


if __name__ == "__main__":
    sys.exit(main())
