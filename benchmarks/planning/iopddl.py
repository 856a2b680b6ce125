"""The public instances of the ASPLOS / EuroSys 2025 contest: cost only, then with the memory limit; a line for each.

python benchmarks/planning/iopddl.py                 # B and G
python benchmarks/planning/iopddl.py A C K P         # the large ones (minutes)
python benchmarks/planning/iopddl.py --seconds 30 A
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from pathlib import Path

from jshard._core.errors import ShardError
from jshard._search import iopddl, solve


DATA = Path(os.environ.get("JSHARD_IOPDDL", Path(__file__).parents[3] / "shared/data/iopddl"))
BEST = {  # best published cost within the memory limit, and the contest's seconds
    "B": (532_843, 60),
    "G": (217_039, 120),
    "A": (6_548_641_531, 60),
    "C": (84_102_445_260, 60),
    "K": (2_274_276_676, 180),
    "P": (651_833_115_436, 240),  # the organisers' own entry; the best team has 662,197,407,330
}
USED = 0.95  # of the time given: the rest is for the last step, which is not cut short


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["B", "G"])
    parser.add_argument("--seconds", type=float, help="instead of the contest's")
    parser.add_argument("--steps", action="store_true", help="print every stage")
    options = parser.parse_args()
    print(f"{'':2}{'objective':10}{'cost':>16}{'bound':>16}{'gap':>9}{'published':>11}{'seconds':>9}")
    for name in options.names:
        best, seconds = BEST[name]
        for memory in (False, True):
            begun = time.monotonic()
            network = iopddl.read(DATA / f"{name}.json.gz", memory=memory)
            reading = time.monotonic() - begun
            try:
                found = solve(network, seconds=USED * (options.seconds or seconds) - reading)
            except ShardError as error:
                print(f"{name:2}{'limited' if memory else 'free':10} {str(error).splitlines()[0]}")
                continue
            against = f"{found.cost / best - 1:+11.3%}" if memory else f"{'':11}"
            print(
                f"{name:2}{'limited' if memory else 'free':10}{found.cost:16.0f}{found.bound:16.0f}"
                f"{found.gap:9.3%}{against}{found.seconds + reading:9.2f}",
                flush=True,
            )
            if options.steps:
                print(*found.steps, sep="\n")
    print(f"peak memory of this process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")


if __name__ == "__main__":
    main()
