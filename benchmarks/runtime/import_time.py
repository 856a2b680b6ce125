"""Time that `import jshard` adds to `import jax`: fresh processes of both kinds in turn, medians and their ratio.

Run with `make bench-import-time`; the argument is the number of processes of each kind.
"""

from __future__ import annotations

import statistics
import subprocess
import sys


def seconds(statement: str) -> float:
    """Wall seconds that one import takes inside a fresh interpreter."""
    code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    return float(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    )


def main(rounds: int) -> None:
    """Measure and print."""
    kinds = ["import jax", "import jax, jshard"]
    for kind in kinds:  # the first import of all reads the files from disk
        seconds(kind)
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for i in range(rounds):
        for kind in kinds if i % 2 else reversed(kinds):
            times[kind].append(seconds(kind))
    alone, both = (statistics.median(times[kind]) for kind in kinds)
    added = statistics.median(b - a for a, b in zip(*times.values(), strict=True))
    for kind in kinds:
        print(f"{kind:20} median {statistics.median(times[kind]):.3f} s, least {min(times[kind]):.3f} s")
    print(f"ratio {both / alone:.2f}, added {added:.3f} s (median of {rounds} pairs; the aim is under 0.2 s)")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
