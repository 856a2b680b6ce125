"""Sizes that do not divide and cuts along space and time on the TPU compiler: 16 and 64 devices of v5e.

    python benchmarks/compilers/odd_sizes.py [--plans] [NAME ...]        # all rows, or those whose name contains a NAME

Each row is a training step in bfloat16, planned at level 2 and compiled for v5e:4x4, or v5e:8x8 where the name says 64, in
a process of its own (`make test-compilers` makes the environment), kept in `odd_sizes.jsonl`; the page is written anew after
each. `--plans` compiles nothing.

- The networks of `benchmarks/quality/space.py`: images of 2 x 4096 x 4096, sequences of 65,536 tokens, GPT-2's own
  vocabulary at 2 x 8,192 tokens, 197 tokens of a vision transformer.
- "In tiles": what arrays of convolutions take at least in the tiles of a TPU's memory. The compiler allocates 2.3 to 2.4
  times that for rows of 1,024 pixels and more a device, 1.1 times for rows of 256. So `unet` is planned with rows of 256 on
  16 devices; cut along height alone, at the same cost, it wants 15.85 GiB for its arrays and is refused.
- `convolutions by hand`: the first of them as `shard_map` with `ppermute` of one row of pixels.
- `vocabulary-V`: the head of GPT-2 with V words, and `edges-E`: a layer of message passing over E edges between 2,449,029
  nodes of 100 features (ogbn-products), each beside the next size that 16 divides. `at rest`: the table is placed padded,
  once. Not at rest, the gradient of the table is exchanged by permutes, which run beside a product in the plan and in the
  compiled schedule, and put together by four `dynamic-update-slice` of 1.2 MB, of which the compiler estimates no cycles;
  the copy that XLA's all-to-all needs in their place is 72 us. What remains beside 50,304 words: 107 us of links, which the
  product hides, and 79 us for the slice of 48 of the 768 columns of the old table, no multiple of the 128 lanes of a tile.
  That is the price of where the table lies, whose rows no cut divides, and not of padding: 50,304 words `placed alike`
  (the old table whole, the new one by columns) compile to 2.52 ms too.
  Beside 50,304 words, 50,257 are within 5% as planned (2.55 against 2.48 ms: 2.8% more, where 10.3 against 2.6 were planned
  once) and by the compiled schedule (2.60 against 2.52: 3.2%); with no link hidden they are 7% more (2.52 against 2.36).
- "Compiled, ms" adds the compiler's cycles and the seconds of all links, none of them hidden; "schedule, ms" is the time
  at which the compiled schedule ends, in which permutes run beside what is between their start and their end, with the
  plan's own seconds for each collective.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from typing import Any


ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.compilers.kept_rows import (  # noqa: E402
    compilers_python,
    in_process,
    keep_rows,
    kept_rows,
)


ROWS, PAGE = pathlib.Path(__file__).with_suffix(".jsonl"), pathlib.Path(__file__).with_suffix(".md")
SECONDS = 3600.0  # limit of one row
ALIKE = " placed alike"
NODES, FEATURES = 2_449_029, 100
NAMES = (
    "convolutions", "convolutions by hand", "vocabulary-50257", "vocabulary-50257 at rest",
    "vocabulary-50304", "vocabulary-50304 placed alike", "edges-61859140", "edges-61859152",
    "rg_lru", "mamba2", "rwkv", "next_token", "vit", "unet", "resnet50", "convnext",
    "unet on 64", "resnet50 on 64", "convnext on 64",
)  # fmt: skip


def vocabulary(words: int) -> tuple[Any, tuple[Any, ...]]:
    """Loss and gradients of a head over so many words at 16,384 tokens."""
    import jax
    import jax.numpy as jnp

    def loss(table: Any, x: Any, targets: Any) -> Any:
        logits = (x @ table.T).astype("float32")
        own = jnp.take_along_axis(logits, targets[:, None], -1)[:, 0]
        return (jax.nn.logsumexp(logits, -1) - own).mean()

    def step(table: Any, x: Any, targets: Any) -> Any:
        value, (g, dx) = jax.value_and_grad(loss, (0, 1))(table, x, targets)
        return value, (table - 1e-3 * g).astype(table.dtype), dx

    s = jax.ShapeDtypeStruct
    return step, (s((words, 768), "bfloat16"), s((16_384, 768), "bfloat16"), s((16_384,), "int32"))


def edges(number: int) -> tuple[Any, tuple[Any, ...]]:
    """A layer of message passing and the gradient of its weight; features are replicated, edges may be cut."""
    import jax
    import jax.numpy as jnp

    def loss(w: Any, x: Any, senders: Any, receivers: Any, weights: Any) -> Any:
        messages = x[senders] * weights[:, None]
        received = jax.ops.segment_sum(messages, receivers, NODES)
        return (jax.nn.relu(received @ w).astype("float32") ** 2).mean()

    def step(w: Any, *rest: Any) -> Any:
        value, g = jax.value_and_grad(loss)(w, *rest)
        return value, w - jnp.asarray(1e-3, w.dtype) * g

    s = jax.ShapeDtypeStruct
    index = s((number,), "int32")
    args = s((FEATURES, FEATURES), "bfloat16"), s((NODES, FEATURES), "bfloat16"), index, index
    return step, (*args, s((number,), "bfloat16"))


def program(name: str, machine: Any) -> tuple[Any, tuple[Any, ...]]:
    """The step of a row and the shapes of its arguments."""
    from benchmarks.quality import space

    kind, _, size = name.removesuffix(" at rest").removesuffix(ALIKE).partition("-")
    if size:
        return {"vocabulary": vocabulary, "edges": edges}[kind](int(size))
    network, shape, _ = space.NETWORKS[name.partition(" ")[0]]
    step, args = space.training(network, shape, "bfloat16")
    return (space.by_hand(machine.jax_mesh, shape[1]), args) if "hand" in name else (step, args)


def one(name: str, compiles: bool) -> dict[str, Any]:
    """Plan and, if wanted, compile a row here."""
    import jax

    import jshard
    from benchmarks.quality.quality import measures

    side = 8 if name.endswith(" on 64") else 4
    machine = jshard.topology(f"v5e:{side}x{side}", {"x": side, "y": side}, compiles=compiles)
    fn, args = program(name, machine)
    config = {"pad": ["table"]} if name.endswith(" at rest") else None
    pins: dict[str, Any] = {}
    if name.endswith(ALIKE):
        columns, rows = jax.P(None, ("x", "y")), jax.P("x")
        pins = {"in_strategy": (jax.P(), rows, rows), "out_strategy": (jax.P(), columns, rows)}
    f = jshard.shard(fn, mesh=machine, level=2, config=config, **pins)
    begun = time.process_time()
    plan = f.plan(*args)
    row = {
        "step": plan.step_seconds, "gap": plan.cost.gap, "peak": plan.cost.peak_bytes, "tiled": plan.memory.tiled,
        "planned": sum(c.bytes * c.count for c in plan.collectives),
        "plan_seconds": round(time.process_time() - begun, 1),
        "padded": [[true, padded] for true, _, padded in plan.padding],
    }  # fmt: skip
    if not compiles:
        return row
    compiled = f.lower(*args).compile()
    checked = plan.verify(compiled)
    found = measures(compiled, machine, plan.model_flops.flops or 1.0)
    by_hand = "hand" in name  # nothing is planned inside a `shard_map` of the user
    return row | {
        "planned": None if by_hand else checked.predicted, "verified": None if by_hand else checked.ok,
        "emitted": found["bytes"] if by_hand else checked.emitted,
        "compiled_peak": found["off_chip"], "seconds": found["by_links"],
        "schedule": checked.timeline.step if checked.timeline is not None and not by_hand else None,
    }  # fmt: skip


def spawn(name: str, compiles: bool) -> dict[str, Any]:
    """A row, made in a process of its own, since compilers abort."""
    row = in_process(compilers_python(), __file__, ["--one", json.dumps([name, compiles])], SECONDS)
    return {"name": name, "date": time.strftime("%Y-%m-%d")} | row


def page(rows: dict[str, dict[str, Any]]) -> str:
    """The table in Markdown."""
    title, intro = (__doc__ or "").split("\n\n", 1)
    heads = (
        "step", "padded", "planned, ms", "compiled, ms", "schedule, ms", "sent a device, MB", "compiled, MB",
        "as planned", "peak, GiB", "in tiles, GiB", "compiled, GiB", "gap", "planning, CPU s", "date",
    )  # fmt: skip
    out = [f"# {title.strip()}", "", intro.rstrip(), ""]
    out += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in NAMES:
        row = rows.get(name)
        if row is None:
            continue
        if "step" not in row:
            out.append(f"| {name} | {row.get('failed', '')[:80]} |" + " |" * (len(heads) - 2))
            continue
        compiled = "emitted" in row
        cells = [
            name, ", ".join(f"{a:,} to {b:,}" for a, b in row["padded"]), f"{row['step'] * 1e3:.2f}",
            f"{row['seconds'] * 1e3:.2f}" if compiled else "",
            f"{row['schedule'] * 1e3:.2f}" if row.get("schedule") else "",
            "" if row["planned"] is None else f"{row['planned'] / 1e6:.1f}",
            f"{row['emitted'] / 1e6:.1f}" if compiled else "",
            {True: "yes", False: "no", None: ""}[row["verified"]] if compiled else "not compiled",
            f"{row['peak'] / 2**30:.2f}", f"{row['tiled'] / 2**30:.2f}" if row.get("tiled") else "",
            f"{row['compiled_peak'] / 2**30:.2f}" if compiled else "",
            "proved" if row["gap"] == 0 else f"{row['gap']:.1%}", f"{row['plan_seconds']:.0f}", row["date"],
        ]  # fmt: skip
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join([*out, ""])


def main() -> None:
    """Make the rows that are asked for and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--one")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(*json.loads(given.one))))
        return
    rows = kept_rows(ROWS, "name")
    for name in NAMES:
        if given.names and not any(part in name for part in given.names):
            continue
        rows[name] = spawn(name, not given.plans)
        print(json.dumps(rows[name]), flush=True)
        keep_rows(ROWS, (rows[n] for n in NAMES if n in rows))
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
