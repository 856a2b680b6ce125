"""Random programs, planned and run in two processes with different hash seeds, one of them slowed: all must be alike.

    python benchmarks/correctness/hosts.py [--count 200] [--seed 23] [--page benchmarks/correctness/hosts.md]

The programs are those of `fuzz`, over devices of both processes. Compared are the plans (JSON) and the results, bit for
bit. With `--page` the result is written there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path


sys.path[:0] = [str(Path(__file__).parents[2])]

_AT_ONCE = 10


def main() -> int:
    """Run the programs; the exit status is 1 if any differed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=23)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()

    import jax

    from tests.hosts.launch import Processes

    processes = Processes(2, [4, 4])
    kinds: Counter[str] = Counter()
    different, begun = [], time.perf_counter()
    try:
        assert [processes.result(p)["value"] for p in (0, 1)] == [[8, 0], [8, 1]]
        for first in range(0, args.count, _AT_ONCE):
            numbers = list(range(first, min(first + _AT_ONCE, args.count)))
            one, other = processes.values("fuzzed", seed=args.seed, numbers=numbers)
            different += [n for n in one if one[n] != other[n]]
            kinds.update(
                "planned and run" if isinstance(r, list) else f"refused ({r.split(':')[0]})"
                for _, r in one.values()
            )
            print(f"{numbers[-1] + 1} programs, {len(different)} different: {dict(kinds)}", flush=True)
    finally:
        processes.stop()
    counts = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())
    text = (
        f"`python benchmarks/correctness/hosts.py --count {args.count} --seed {args.seed}`, JAX {jax.__version__}: "
        f"{args.count} random programs in two processes with hash seeds 1 and 2, 4 CPU devices each, the second slowed "
        f"by 50 ms a plan: {counts}; plans or results that differ between the processes: {len(different)}"
        f"{' (' + ', '.join(different) + ')' if different else ''}. {time.perf_counter() - begun:.0f} s."
    )
    print(text)
    if args.page:
        args.page.write_text(f"# Random programs in two processes\n\n{text}\n")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
