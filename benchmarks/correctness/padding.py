"""Padding: every operator with hostile padding, and programs of sizes that do not divide on 2, 4 and 8 devices.

    python benchmarks/correctness/padding.py [--again]       # what is not yet in padding.jsonl, or all anew
    python benchmarks/correctness/padding.py operators programs impossible           # some of the three parts

- Operators: each dimension that may be padded is padded, and all at once, with NaN or other values in the padding before
  the operator reads it; results and derivatives are compared with the plain operator's.
- Programs: value and gradients in float64 of sizes 7, 13 and 50 on 2, 4 and 8 devices, against the plain function: with a
  dimension of that size pinned to a cut over all devices (7 to 4 of 8: a cut larger than the size is refused), and as
  planned at the objective 2 (of size 13, 1 too) with `config={"pad": True}`; planned and emitted bytes are compared too.
- Impossible: the dimensions of the examples on which every rule is tried (`tests/helpers/rules_examples.py`) that are not
  padded: there the true size is restored, so a cut that does not divide it is impossible. `plan.why(tensor)` says so of a
  plan's own dimensions.

Rows are kept in `padding.jsonl`, so that a run that was stopped goes on; the page is written anew after each part.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any


os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path[:0] = [str(Path(__file__).parents[2])]

ROWS, PAGE = Path(__file__).with_suffix(".jsonl"), Path(__file__).with_suffix(".md")
PARTS = ("operators", "programs", "impossible")
SIZES, DEVICES = (7, 13, 50), (2, 4, 8)
Row = dict[str, Any]


def operators(done: set[str]) -> Iterator[Row]:
    """A row for each primitive: the paddings tried, of values and of gradients, and what was wrong."""
    from tests.helpers.rules_examples import all_cases
    from tests.laws.padding_judge import judge, judge_gradient

    cases = defaultdict(list)
    for case in all_cases():
        cases[case.op.primitive].append(case)
    for primitive, some in sorted(cases.items()):
        if primitive in done:
            continue
        verdicts = [judge(case) for case in some], [judge_gradient(case) for case in some]
        values, gradients = (sum(v.tried for v in vs) for vs in verdicts)
        wrong = [w for vs in verdicts for v in vs for w in v.wrong]
        yield {"name": primitive, "values": values, "gradients": gradients, "wrong": wrong}


def programs(done: set[str]) -> Iterator[Row]:
    """A row for each program, size and number of devices: three plans, each with its largest difference."""
    import jax

    from tests.laws.padding_programs import PROGRAMS, step_of

    with jax.enable_x64(True):
        for name, make in PROGRAMS.items():
            for n in SIZES:
                fn, *args = make(n)
                step = step_of(fn, args)
                for k in DEVICES:
                    if f"{name} {n} on {k}" not in done:
                        yield {"name": f"{name} {n} on {k}", "plans": _plans(step, args, n, k)}
                jax.clear_caches()


def _plans(step: Any, args: list[Any], n: int, k: int) -> dict[str, Row]:
    import jax
    import numpy as np

    import jshard

    want = jax.tree.leaves(step(*args))
    mesh = jax.make_mesh((k,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:k])
    ways = {"pinned": (0, _pinned(args, n, k)), "objective 2": (2, None)}
    if n == 13:
        ways["objective 1"] = (1, None)
    rows = {}
    for name, (level, pins) in ways.items():
        f = jshard.shard(step, mesh=mesh, level=level, config={"pad": True}, in_strategy=pins)
        plan = f.plan(*args, verify=True)
        got = jax.tree.leaves(f(*args))
        gap = max(float(np.max(np.abs(a - b))) for a, b in zip(got, want, strict=True))
        ok = bool(plan.verification and plan.verification.ok)
        rows[name] = {"gap": gap, "padded": len(plan.padding), "as planned": ok}
    return rows


def _pinned(args: list[Any], n: int, k: int) -> tuple[Any, ...]:
    """The first argument with a dimension of size n has it cut over all devices, or four where there are more than n."""
    k = k if k <= n else 4
    i, d = next((i, x.shape.index(n)) for i, x in enumerate(args) if n in x.shape)
    cut = tuple(k if e == d else 1 for e in range(args[i].ndim))
    return tuple(cut if j == i else None for j in range(len(args)))


def impossible(done: set[str]) -> Iterator[Row]:
    """A row for each primitive and reason: how many of its dimensions are not padded, and of how many."""
    from jshard._rules.lookup import rules_for
    from jshard._rules.padding import padded_factors
    from tests.helpers.rules_examples import all_cases

    found: dict[tuple[str, str], int] = Counter()
    total: Counter[str] = Counter()
    for case in all_cases() if not done else ():
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
    for (p, why), n in sorted(found.items()):
        if n:
            yield {"name": f"{p}: {why}", "primitive": p, "dimensions": n, "of": total[p], "why": why}


SHIFTED = ("slice", "pad", "rev", "concatenate", "roll")
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


def wrong_in(row: Row) -> list[str]:
    """What a row found wrong."""
    texts = [f"{row['name']}, {p}: {r}" for p, r in row.get("plans", {}).items() if not _right(r)]
    return [*row.get("wrong", ()), *texts]


PLANS = ("pinned", "objective 2", "objective 1")


def _right(plan: Row) -> bool:
    return plan["gap"] <= 1e-8 and plan["as planned"]


def page(rows: dict[str, list[Row]]) -> str:
    """The three tables in Markdown."""
    title, intro = (__doc__ or "").split("\n\n", 1)
    of_operators, of_programs = rows["operators"], rows["programs"]
    values, gradients = (sum(r[key] for r in of_operators) for key in ("values", "gradients"))
    wrong = [w for part in rows.values() for r in part for w in wrong_in(r)]
    from tests.laws.padding_programs import PROGRAMS

    total = len(PROGRAMS) * len(SIZES) * len(DEVICES)
    out = [f"# {title.strip()}", "", intro.rstrip(), ""]
    out += [
        f"{values} padded operators and {gradients} padded derivatives of {len(of_operators)} primitives; "
        f"{len(of_programs)} of {total} programs with two or three plans each; **{len(wrong)} wrong**.", "",
    ]  # fmt: skip
    out += [f"- {w}" for w in wrong] + ([""] if wrong else [])
    out += ["## Programs", "", "The largest difference from the plain function, and how many classes of dimensions "
            "the plan pads.", ""]  # fmt: skip
    out += [f"| program | {' | '.join(f'{p} | padded' for p in PLANS)} | bytes as planned | date |"]
    out += ["|---" * (2 * len(PLANS) + 3) + "|"]
    for r in of_programs:
        found = [r["plans"].get(p) for p in PLANS]
        cells = [f"{p['gap']:.1e} | {p['padded']}" if p else " | " for p in found]
        as_planned = "yes" if all(p["as planned"] for p in r["plans"].values()) else "**no**"
        out.append(f"| {r['name']} | {' | '.join(cells)} | {as_planned} | {r['date']} |")
    out += [
        "",
        "## Operators",
        "",
        "| primitive | padded | derivatives padded | wrong | date |",
        "|---" * 5 + "|",
    ]
    for r in of_operators:
        out.append(f"| `{r['name']}` | {r['values']} | {r['gradients']} | {len(r['wrong'])} | {r['date']} |")
    out += [
        "",
        "## Cuts that do not divide and stay impossible",
        "",
        "| primitive | dimensions | reason |",
        "|---" * 3 + "|",
    ]
    out += [
        f"| `{r['primitive']}` | {r['dimensions']} of {r['of']} | {r['why']} |" for r in rows["impossible"]
    ]
    return "\n".join([*out, ""])


def main() -> int:
    """Judge; the exit status is 1 if anything was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="part", default=PARTS, help=", ".join(PARTS))
    parser.add_argument("--again", action="store_true", help="make rows that are kept anew")
    given = parser.parse_args()

    import jax

    lines = ROWS.read_text().splitlines() if ROWS.exists() else []
    rows: dict[str, list[Row]] = {part: [] for part in PARTS}
    for row in map(json.loads, lines):
        if not (given.again and row["part"] in given.parts):
            rows[row["part"]].append(row)
    for part in given.parts:
        make = {"operators": operators, "programs": programs, "impossible": impossible}[part]
        for row in make({r["name"] for r in rows[part]}):
            made = {"part": part, "date": time.strftime("%Y-%m-%d"), "jax": jax.__version__}
            rows[part].append(made | row)
            print(json.dumps(rows[part][-1]), flush=True)
            ROWS.write_text("".join(json.dumps(r) + "\n" for p in PARTS for r in rows[p]))
        PAGE.write_text(page(rows))
    wrong = [w for part in rows.values() for r in part for w in wrong_in(r)]
    print(*(f"WRONG {w}" for w in wrong), sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
