"""Seconds of single operators that are neither products nor elementwise: the plan's against the TPU compiler's.

    python benchmarks/compilers/primitives.py        # all rows, about five minutes of CPU

Each row is one operator on one device of v5e: what a plan counts of compute, and the `estimated_cycles` of the compiled
program at 1.5 GHz. "Not estimated": instructions of the kernel itself of which the compiler states no cycles; then the
estimate covers what stands around them, if anything, and all that is known is that the operator takes more. Sorts are
priced by a formula (`jshard/_cost/sorts_and_prefixes.py`), whose seconds for a GPU and a CPU are in its docstring.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import sys
import time
from collections.abc import Iterator
from typing import Any


ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
ROWS, PAGE = pathlib.Path(__file__).with_suffix(".jsonl"), pathlib.Path(__file__).with_suffix(".md")
SHAPES = (((1 << 20,), 0), ((1024, 1024), 1), ((1024, 1024), 0), ((64, 16384), 1))
UNPRICED = re.compile(r" (sort|while|custom-call|scatter|reduce-window|dynamic-update-slice)\(")


def cases() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Name, function and shapes of the arguments of each row."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    s = jax.ShapeDtypeStruct
    for name in ("sort", "cumsum", "cumprod", "cummax", "argmax"):
        for shape, axis in SHAPES:
            if name == "sort":
                yield (
                    f"sort {shape} along {axis}",
                    lambda x, a=axis: lax.sort(x, dimension=a),
                    (s(shape, "float32"),),
                )
            elif name == "argmax":
                yield (
                    f"argmax {shape} along {axis}",
                    lambda x, a=axis: jnp.argmax(x, a),
                    (s(shape, "float32"),),
                )
            else:
                fn = getattr(lax, name)
                yield (
                    f"{name} {shape} along {axis}",
                    lambda x, f=fn, a=axis: f(x, axis=a),
                    (s(shape, "float32"),),
                )
    for k in (2, 3, 4):
        arrays = (s((64, 16384), "float32"),) * k
        yield f"sort of {k} arrays (64, 16384)", lambda *x: lax.sort(x, dimension=1, num_keys=1), arrays
    for dtype in ("bfloat16", "int32"):
        yield f"cumsum (1024, 1024) of {dtype}", lambda x: lax.cumsum(x, axis=1), (s((1024, 1024), dtype),)
    for k in (2, 8, 64, 1024):
        yield f"top_k {k} of (64, 16384)", lambda x, k=k: lax.top_k(x, k), (s((64, 16384), "float32"),)
    yield "prod (1024, 1024)", lambda x: jnp.prod(x, -1), (s((1024, 1024), "float32"),)
    yield "transpose (1024, 1024)", lambda x: x.T, (s((1024, 1024), "float32"),)
    yield "roll (1024, 1024)", lambda x: jnp.roll(x, 3, 1), (s((1024, 1024), "float32"),)
    index = s((1 << 14,), "int32")
    for width in (1, 128):
        table, rows = s((50_000, width), "float32"), s((1 << 14, width), "float32")
        yield f"gather 16384 rows of {width}", lambda t, i: t[i], (table, index)
        yield f"scatter-add 16384 rows of {width}", lambda t, i, u: t.at[i].add(u), (table, index, rows)


def measured() -> Iterator[dict[str, Any]]:
    """The rows."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    import jshard
    from jshard._verify import read_program

    machine = jshard.topology("v5e:1x1", {"x": 1}, compiles=True)
    whole = NamedSharding(machine.jax_mesh, PartitionSpec())
    for name, fn, args in cases():
        plan = jshard.shard(fn, mesh=machine, level=2).plan(*args)
        placed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole) for a in args]
        compiled = jax.jit(fn).lower(*placed).compile()
        missing = {
            m[1] for line in (compiled.as_text() or "").splitlines()
            if (m := UNPRICED.search(line)) and "estimated_cycles" not in line
        }  # fmt: skip
        cycles = read_program(compiled).estimated_cycles or 0
        yield {
            "name": name, "planned": plan.cost.compute, "compiled": cycles / machine.hardware.clock,
            "missing": sorted(missing), "date": time.strftime("%Y-%m-%d"),
        }  # fmt: skip


def page(rows: list[dict[str, Any]]) -> str:
    """The table in Markdown."""
    title, intro = (__doc__ or "").split("\n\n", 1)
    out = [f"# {title.strip()}", "", intro.rstrip(), ""]
    out += [
        "| operator | planned, us | compiled, us | planned over compiled | not estimated | date |",
        "|---" * 6 + "|",
    ]
    for r in rows:
        ratio = f"{r['planned'] / r['compiled']:.2f}" if not r["missing"] else ""
        out.append(
            f"| {r['name']} | {r['planned'] * 1e6:.1f} | {r['compiled'] * 1e6:.1f} | {ratio} "
            f"| {', '.join(r['missing'])} | {r['date']} |"
        )
    return "\n".join([*out, ""])


def main() -> None:
    """Make all rows and write the page."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    rows = []
    for row in measured():
        rows.append(row)
        print(json.dumps(row), flush=True)
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
