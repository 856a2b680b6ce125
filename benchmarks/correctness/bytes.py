"""Planned bytes equal emitted bytes, operator by operator and program by program.

    python benchmarks/correctness/bytes.py [--seed 0] [--each 1] [--programs 300] [--only reduce_max ...] [--page bytes.md]

Operators: every operator of `tests/helpers/rules_examples.py` on every element type that it takes (bool to
complex128), in `--each` random choices of layouts on 2 to 8 devices; own collectives and every step of redistribution
are compared with the compiled program, and the values with the plain operator. Programs: random training programs,
planned on machines with and without latency, whose kinds of bytes must agree within the 2% of `plan.verify`.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any


os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path[:0] = [str(Path(__file__).parents[2])]

PAGE = """# Planned and emitted bytes

Written by `python benchmarks/correctness/bytes.py`. {total}

Operators, by family: trials are choices of layouts for one operator on one element type, on 2 to 8 devices; `bytes` are
trials in which a byte, a kind or a number differed, `values` those whose results differ from the plain operator's.

```
{table}
```

{programs}
"""


def operators(seed: int, each: int, only: list[str]) -> tuple[Counter, dict[str, list[str]], Counter]:
    """Trials by family, what failed, and how many collectives of each kind were compared."""
    import jax

    from jshard._rules.registry import REGISTRY
    from tests.helpers import rules_examples
    from tests.laws import rules_bytes

    cases = [c for c in rules_examples.all_cases() if not only or c.op.primitive in only]
    tried: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    failed: dict[str, list[str]] = defaultdict(list)
    with jax.enable_x64(True):
        for k, case in enumerate(cases):
            rng = random.Random(f"{seed} {k}")
            entry = REGISTRY.get(case.op.primitive)
            family = entry.family if entry else "none"
            for single in rules_bytes.singles([case]):
                for _ in range(each):
                    try:
                        found = rules_bytes.trial(single, rng.choice((2, 4, 8, 88)), rng)
                    except Exception as e:
                        found = rules_bytes.Outcome(f"{single.name}\n{type(e).__name__}: {str(e)[:400]}")
                    tried[family] += 1
                    kinds.update(found.kinds)
                    if found.text:
                        failed[family].append(found.text)
                        print(found.text, flush=True)
            print(".", end="" if (k + 1) % 80 else "\n", flush=True, file=sys.stderr)
    return tried, failed, kinds


def programs(seed: int, count: int) -> tuple[int, list[str]]:
    """Random training programs: how many were compared, and the verdict on each that differs."""
    from tests.laws import program_bytes

    compared, failed = 0, []
    for n in range(count):
        found = program_bytes.judged(seed + n)
        compared += found is not None
        if found:
            failed.append(f"seed {seed + n}: {found}")
            print(failed[-1], flush=True)
    return compared, failed


def main() -> int:
    """Both parts; the exit status is the number of trials that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=1)
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--page", type=Path, help="write the table there too, as Markdown")
    a = parser.parse_args()
    warnings.simplefilter("ignore")
    import jax

    start = time.perf_counter()
    tried, failed, kinds = operators(a.seed, a.each, a.only)
    lines = [f"{'family':16}{'trials':>8}{'bytes':>8}{'values':>8}"]
    for family in sorted(tried):
        wrong = [t for t in failed[family] if "differs:" in t]
        lines.append(f"{family:16}{tried[family]:>8}{len(failed[family]) - len(wrong):>8}{len(wrong):>8}")
    compared = ", ".join(f"{n} {k}" for k, n in sorted(kinds.items()))
    total = (
        f"JAX {jax.__version__}, seed {a.seed}: {tried.total()} trials, {sum(map(len, failed.values()))} failed; "
        f"compared {compared}; {time.perf_counter() - start:.0f} s."
    )
    count, off = programs(1_000_000 + a.seed, a.programs) if a.programs else (0, [])
    said = f"Programs: {count} random training programs compiled, {len(off)} differ."
    print("\n".join((*lines, total, said)))
    if a.page:
        notes: list[Any] = [said, *(f"- {line}" for line in off)]
        a.page.write_text(PAGE.format(total=total, table="\n".join(lines), programs="\n".join(notes)))
    return sum(map(len, failed.values())) + len(off)


if __name__ == "__main__":
    sys.exit(main())
