"""Every candidate of every sharding rule against the unsharded operator, and candidates that are missing: `make rules`.

    python benchmarks/correctness/rules.py [--devices 2 4 8] [--limit 12] [--no-missing] [--page rules.md] [primitive ...]

Wrong: a candidate whose blocks, put together, differ from the plain operator. Missing: a cut in two that the
plain operator survives without communication and that no candidate offers, outside `REASONED`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path


os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path[:0] = [str(Path(__file__).parents[2])]

# Cuts that work on slices and that no rule offers, each with its reason.
REASONED = {
    "optimization_barrier": "a mesh axis cuts one factor: operands with dimensions of equal length are cut together",
    "jshard_attention": "the size of a head of the values: all devices would compute the same scores",
    "jshard_attention_backward": "the size of a head of the values: all devices would compute the same scores",
}

PAGE = """# Every rule on trial

`make rules LIMIT=8` runs each candidate of each rule on small arrays through the real lowering and compares with the
plain operator (wrong), and tries cuts in two that no candidate offers on the plain operator (missing). The last
column says why a primitive is opaque, has no example of its own, or may miss a cut.

{total}

```
{table}
```
"""


def main() -> int:
    """Judge all rules; the exit status is the number of primitives with a wrong rule or an unreasoned gap."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("primitives", nargs="*")
    parser.add_argument("--devices", nargs="*", type=int, default=[2, 4, 8])
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--no-missing", action="store_true")
    parser.add_argument("--page", type=Path, help="write the table there too, as Markdown")
    args = parser.parse_args()

    import jax

    from jshard._rules.primitives.opaque_operators import OPAQUE
    from jshard._rules.registry import REGISTRY
    from tests.helpers import rules_examples
    from tests.helpers.rules_table import NO_EXAMPLE
    from tests.laws import rules_validator

    start = time.perf_counter()
    by_primitive = defaultdict(list)
    for case in rules_examples.all_cases():
        if not args.primitives or case.op.primitive in args.primitives:
            by_primitive[case.op.primitive].append(case)
    tried: Counter[str] = Counter()
    wrong, gaps = defaultdict(list), defaultdict(list)
    for primitive, cases in sorted(by_primitive.items()):
        for n in args.devices:
            for i in range(0, len(cases), 16):
                k, bad = rules_validator.check(cases[i : i + 16], n, limit=args.limit)
                tried[primitive] += k
                wrong[primitive] += bad
        if not args.no_missing:
            for case in cases:
                gaps[primitive] += rules_validator.missing(case)[1]
        print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    lines = [f"{'primitive':38}{'family':14}{'operators':>10}{'candidates':>11}{'wrong':>7}{'missing':>9}"]
    failures = 0
    for name in sorted({*by_primitive, *REGISTRY.names()} if not args.primitives else by_primitive):
        entry = REGISTRY.get(name)
        family = entry.family if entry else "none"
        reason = (gaps[name] and REASONED.get(name)) or OPAQUE.get(name, "")
        if not by_primitive[name] and not reason:
            reason = NO_EXAMPLE.get(name, "no example")
        failures += bool(wrong[name]) or (bool(gaps[name]) and name not in REASONED and name not in OPAQUE)
        row = f"{name:38}{family:14}{len(by_primitive[name]):>10}{tried[name]:>11}"
        lines.append(f"{row}{len(wrong[name]):>7}{len(gaps[name]):>9}  {reason}".rstrip())
    unreasoned = sum(len(g) for n, g in gaps.items() if n not in REASONED and n not in OPAQUE)
    total = (
        f"JAX {jax.__version__}, {' '.join(map(str, args.devices))} devices, at most {args.limit} candidates an "
        f"operator: {len(by_primitive)} primitives, {sum(map(len, by_primitive.values()))} operators, "
        f"{tried.total()} candidates, {sum(map(len, wrong.values()))} wrong, {sum(map(len, gaps.values()))} missing, "
        f"{unreasoned} of them without a written reason, {time.perf_counter() - start:.0f} s"
    )
    print("\n".join(lines))
    if args.page:
        args.page.write_text(PAGE.format(total=total, table="\n".join(lines)))
    for title, found in (("WRONG", wrong), ("MISSING", gaps)):
        for name, lines in found.items():
            if title == "WRONG" or name not in REASONED:
                for line in lines[:3]:
                    print(f"{title} {line}")
    print(total)
    return failures


if __name__ == "__main__":
    sys.exit(main())
