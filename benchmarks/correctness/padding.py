"""Padding: every operator with hostile padding, and programs of sizes that do not divide on 2, 4 and 8 devices.

    python benchmarks/correctness/padding.py [--sizes 7 13 50] [--devices 2 4 8] [--page padding.md] [--no-operators]
    python benchmarks/correctness/padding.py --impossible    # the page of dimensions that stay whole: runs nothing, a minute

Operators: each dimension that may be padded is padded, with NaN or other values in the padding before the operator reads
it, and the results are compared with the plain operator's. Programs: value and gradients in float64, planned with
`config={"pad": True}` at the objectives 1 and 2, against the plain function; planned and emitted bytes are compared too.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any


os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path[:0] = [str(Path(__file__).parents[2])]

IMPOSSIBLE = """# Cuts that do not divide and stay impossible

`python benchmarks/correctness/padding.py --impossible` goes through the operators of `tests/helpers/rules_examples.py`,
the examples on which every rule is tried, and lists those with a dimension that is not padded: there the true size is
restored, so a cut that does not divide it is impossible. A number is that of
dimensions in the examples, out of all of the primitive's. With `plan.why(tensor)` a plan says so of its own dimensions.
{date}

| primitive | dimensions | reason |
|---|---|---|
{rows}
"""

PAGE = """# Padding on trial

`python benchmarks/correctness/padding.py --page ...`: its first lines say what is compared.

{summary}

Dimensions of the operators that cannot be padded, by primitive; there the true size is restored, and the dimension stays
whole:

```
{refused}
```

Programs, by size and devices: the largest difference from the plain function, the classes that the plan of each
objective pads, planned and emitted bytes.

```
{programs}
```
"""


def operators() -> tuple[int, list[str], Counter[str], Counter[str]]:
    """Tried programs, what was wrong, and by primitive the dimensions that cannot be padded and those that can."""
    from tests.helpers.rules_examples import all_cases
    from tests.laws.padding_judge import judge

    tried, wrong, refused, padded = 0, [], Counter(), Counter()
    for case in all_cases():
        verdict = judge(case)
        tried, wrong = tried + verdict.tried, [*wrong, *verdict.wrong]
        refused[case.op.primitive] += verdict.refused
        padded[case.op.primitive] += verdict.tried
    return tried, wrong, refused, padded


def impossible() -> str:
    """The rows of the page: primitive, dimensions that are not padded of all, and why."""
    from jshard._rules.lookup import rules_for
    from jshard._rules.padding import padded_factors
    from tests.helpers.rules_examples import all_cases

    found: dict[tuple[str, str], int] = Counter()
    total: Counter[str] = Counter()
    for case in all_cases():
        op, rule = case.op, rules_for(case.op)[0]
        padded = padded_factors(op, rule)
        alone = {d[0] for t in (*rule.operands, *rule.results) for d in t if len(d) == 1}
        joined = {f for t in (*rule.operands, *rule.results) for d in t if len(d) > 1 for f in d}
        places = sum(n > 1 for a in (*op.ins, *op.outs) for n in a.shape) if rule.opaque else 0
        total[op.primitive] += places or sum(n > 1 for n in rule.sizes)
        if rule.opaque:
            found[op.primitive, rule.note or "it has no rule"] += places
            continue
        for f, size in enumerate(rule.sizes):
            if (
                size > 1
                and f not in padded
                and not (op.primitive in SHIFTED and f in rule.blocked and f in alone)
            ):
                found[op.primitive, _reason(op.primitive, f, rule, joined)] += 1
    return "\n".join(f"| `{p}` | {n} of {total[p]} | {why} |" for (p, why), n in sorted(found.items()) if n)


SHIFTED = ("slice", "pad", "rev", "concatenate")
"""Primitives along whose dimensions elements move: padded as shifts (`jshard/_plan/padded_shifts.py`)."""


def _reason(primitive: str, factor: int, rule: Any, joined: set[int]) -> str:
    from jshard._rules.padding import has_meaning

    if factor in joined:
        return (
            "the dimension is the product of several: padding at its end is padding in the last of them only"
        )
    if primitive.startswith("random_"):
        return rule.note or "the numbers that are drawn depend on the shape"
    if not has_meaning(primitive):
        return rule.note or "what padding means for it is not stated"
    if factor in rule.blocked:
        return rule.note or "the operator needs the whole dimension"
    return "the operator has no neutral element for it, or elements that padding would change"


def programs(sizes: list[int], devices: list[int]) -> tuple[list[str], list[str]]:
    """A line for each program, size and number of devices, and what was wrong."""
    import jax
    import numpy as np

    import jshard
    from tests.laws.padding_judge import PROGRAMS, step_of

    lines, wrong = [], []
    for name, make in PROGRAMS.items():
        for n in sizes:
            fn, *args = make(n)
            step = step_of(fn, args)
            want = jax.tree.leaves(step(*args))
            for k in devices:
                mesh = jax.make_mesh((k,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:k])
                row = f"{name:12}{n:>4}{k:>3}"
                for level in (1, 2):
                    sharded = jshard.shard(step, mesh=mesh, level=level, config={"pad": True})
                    plan = sharded.plan(*args, verify=True)
                    got = jax.tree.leaves(sharded(*args))
                    gap = max(float(np.max(np.abs(a - b))) for a, b in zip(got, want, strict=True))
                    ok = bool(plan.verification and plan.verification.ok)
                    row += f"{gap:>10.1e}{len(plan.padding):>3}{'' if ok else ' NOT AS PLANNED'}"
                    if gap > 1e-8 or not ok:
                        wrong.append(f"{name} {n} on {k} devices, level {level}: {gap:.1e} {ok}")
                lines.append(row)
                print(row, flush=True, file=sys.stderr)
    return lines, wrong


def main() -> int:
    """Judge; the exit status is the number of wrong results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="*", type=int, default=[7, 13, 50])
    parser.add_argument("--devices", nargs="*", type=int, default=[2, 4, 8])
    parser.add_argument("--page", type=Path)
    parser.add_argument("--no-operators", action="store_true")
    parser.add_argument("--impossible", action="store_true")
    options = parser.parse_args()

    import jax

    if options.impossible:
        text = IMPOSSIBLE.format(
            date=f"Written on {time.strftime('%Y-%m-%d')}, JAX {jax.__version__}.", rows=impossible()
        )
        (options.page or Path(__file__).with_suffix(".md")).write_text(text)
        return 0
    start = time.perf_counter()
    tried, wrong, refused, padded = (0, [], Counter(), Counter()) if options.no_operators else operators()
    jax.config.update("jax_enable_x64", True)
    lines, wrong_programs = programs(options.sizes, options.devices)
    shown = "\n".join(f"{p:32}{n:>4} of {n + padded[p]:>4}" for p, n in sorted(refused.items()) if n)
    summary = (
        f"JAX {jax.__version__}: {tried} padded operators, {len(wrong)} wrong; {len(lines)} programs at two objectives, "
        f"{len(wrong_programs)} wrong; {time.perf_counter() - start:.0f} s"
    )
    if options.page:
        options.page.write_text(PAGE.format(summary=summary, refused=shown, programs="\n".join(lines)))
    for line in (*wrong, *wrong_programs):
        print(f"WRONG {line}")
    print(summary)
    return len(wrong) + len(wrong_programs)


if __name__ == "__main__":
    sys.exit(main())
