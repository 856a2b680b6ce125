"""`python -m benchmarks.correctness.config_round_trip`: forty plans as files, read back and planned again.

Plans of the workloads (`benchmarks/workloads.py`) at two levels, of the decoders of `tests/helpers/decoder_models.py` and
the linen one, unrolled and scanned, of the published rule lists on models of full size (`benchmarks/quality/audit.py`), of
the zoo where its libraries are installed, and of 126 layers, unrolled and scanned. Each is written by `plan.to_config()`
and read again: the file equal, every argument and result pinned to its layout in the second plan, and equal costs; an
assertion fails otherwise. `config_round_trip.md`: rules beside the distinct layouts of each class of parameters, and the
lines of the file. `--only NAME` runs those with this in their names and leaves the page alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jshard
from benchmarks import workloads
from benchmarks.quality import audit
from jshard._config.export import entry_of, tensors_of
from jshard._config.path_patterns import without_numbers
from jshard._config.tensors import is_state
from tests.helpers.decoder_models import SIZES, Decoder, LinenDecoder, loss_of, nnx_step


ROWS = Path(__file__).with_suffix(".jsonl")
PAGE = Path(__file__).with_suffix(".md")
LARGE = ("MaxText base, fsdp 16", "EasyLM Llama", "EasyLM GPT-J", "tunix Llama 3", "tunix Gemma")

Case = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function, its arguments, and the options of `shard`."""


def cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """The names of all plans, with functions that make them."""
    for name, level in itertools.product(workloads.NAMES, (0, 2)):
        yield f"{name}, level {level}", functools.partial(_workload, name, level)
    for family, scanned in itertools.product(SIZES, (False, True)):
        if family != "llama4":
            yield f"nnx {family}{', scanned' * scanned}", functools.partial(_decoder, family, scanned)
    for scanned in (False, True):
        yield f"linen llama{', scanned' * scanned}", functools.partial(_linen, scanned)
        yield f"126 layers{', scanned' * scanned}", functools.partial(_deep, 126, scanned)
    for name, (model, config, mesh) in audit.cases().items():
        if name.startswith(LARGE):
            yield f"{name}, {model.layers} layers", functools.partial(_published, model, config, mesh)
    for name in ("gpt2", "bert", "mistral"):
        yield f"zoo {name}", functools.partial(_zoo, name)


def _workload(name: str, level: int) -> Case:
    w = workloads.get(name, small=True, devices=8)
    mesh = jshard.topology("v5e:2x4", {"data": 4, "model": 2})
    return w.step, w.args, {"in_strategy": w.in_strategy(4), "mesh": mesh, "level": level}


def _decoder(family: str, scanned: bool) -> Case:
    def make() -> tuple[Decoder, nnx.Optimizer]:
        model = Decoder(dataclasses.replace(SIZES[family], scanned=scanned, layers=3), nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    args = (*nnx.eval_shape(make), jax.ShapeDtypeStruct((16, 8), jnp.int32))
    mesh = jshard.topology("v5e:2x4", {"fsdp": 4, "tensor": 2})
    return nnx_step, args, {"mesh": mesh, "level": 2, "in_strategy": {"tokens": (4, 1)}}


def _linen(scanned: bool) -> Case:
    model, tokens = (
        LinenDecoder(dataclasses.replace(SIZES["llama"], scanned=scanned)),
        jax.ShapeDtypeStruct((16, 8), jnp.int32),
    )
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))

    def step(variables: Any, state: Any, tokens: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda v: loss_of(jnp.asarray(model.apply(v, tokens)), tokens))(
            variables
        )
        updates, state = tx.update(grads, state)
        return optax.apply_updates(variables, updates), state, loss

    mesh = jshard.topology("v5e:2x4", {"fsdp": 4, "tensor": 2})
    return step, (variables, jax.eval_shape(tx.init, variables), tokens), {"mesh": mesh, "level": 2}


def _deep(layers: int, scanned: bool) -> Case:
    model = dataclasses.replace(
        audit.EASYLM_LLAMA if not scanned else audit.MAXTEXT_LLAMA, layers=layers, width=1024, hidden=4096, vocab=8192,
        heads=8,
    )  # fmt: skip
    tokens = jax.ShapeDtypeStruct((16, 512), jnp.int32)
    mesh = jshard.topology("v5e:2x4", {"fsdp": 4, "tensor": 2})
    return audit.step_of(model.loss), (model.parameters(), tokens), {"mesh": mesh, "level": 2}


def _published(model: audit.Model, config: jshard.Config, sizes: dict[str, int]) -> Case:
    mesh = jshard.topology("v5p:4x4x4", {a: n for a, n in sizes.items() if n > 1})
    tokens = jax.ShapeDtypeStruct((64, 2048), jnp.int32)
    options = {"mesh": mesh, "level": 2, "in_strategy": {"tokens": (16, 1)}, "memory_budget": "10TiB"}
    return audit.step_of(model.loss), (model.parameters(), tokens), options


def _zoo(name: str) -> Case:
    from benchmarks.models.zoo import kinds
    from benchmarks.models.zoo.__main__ import models

    full = next(n for n in models() if name in n.lower())
    step, args = kinds.train_step(models()[full]())
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.asarray(a).dtype), args)
    return step, shapes, {"mesh": jshard.topology("v5e:2x4", {"data": 4, "model": 2}), "level": 2}


def round_trip(case: Case) -> dict[str, Any]:
    """Plan, write, read, plan again; the figures of the file. Raises `AssertionError` where the plans differ."""
    step, args, options = case
    plan = jshard.shard(step, **options).plan(*args)
    config = plan.to_config()
    text = config.to_yaml()
    again = jshard.Config.of(text)
    assert again == config and again.to_yaml() == text
    rest = {k: v for k, v in options.items() if k in ("mesh", "memory_budget")}
    back = jshard.shard(step, config=again, **rest).plan(*args)
    for before, after in ((plan.inputs, back.inputs), (plan.outputs, back.outputs)):
        for a, b in zip(before, after, strict=True):
            assert a.layout == b.layout, (a.path, str(a.layout), str(b.layout))
    assert all(r.pinned for r in back.inputs if r.shape), [r.path for r in back.inputs if not r.pinned]
    assert abs(back.cost.objective - plan.cost.objective) <= 1e-9 * plan.cost.objective
    assert (
        abs(back.cost.peak_bytes - plan.cost.peak_bytes) <= 1e-9 * plan.cost.peak_bytes
        or not plan.cost.optimal
    )
    inside = zip(
        tensors_of(plan.inputs, plan.in_tree), [entry_of(r.layout) for r in plan.inputs], strict=True
    )
    layouts = {(without_numbers(t.own), e) for t, e in inside if t.shape and t.inner and not is_state(t)}
    return {
        "tensors": len(plan.inputs), "layouts": len(layouts), "rules": len(config.parameters), "lines": text.count("\n"),
        "cost": plan.cost.objective, "optimal": plan.cost.optimal,
    }  # fmt: skip


def page(rows: list[dict[str, Any]]) -> str:
    """The page of all rows."""
    ratio = sum(r["rules"] / r["layouts"] for r in rows if r["layouts"]) / sum(
        bool(r["layouts"]) for r in rows
    )
    lines = [
        "# Plans as files, read back",
        "",
        f"Written by `python -m benchmarks.correctness.config_round_trip`: {len(rows)} plans, each exported by"
        " `plan.to_config()`, read again and planned with that file alone: the same layouts of all arguments and results,"
        " the same cost. Layouts: distinct pairs of a class of parameters (paths that differ in numbers only) and a"
        f" layout, optimizer state aside; rules: of the section `parameters`, for all tensors. Rules over layouts:"
        f" {ratio:.2f} on average.",
        "",
        "| plan | arrays | layouts | rules | lines |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['name']} | {r['tensors']} | {r['layouts']} | {r['rules']} | {r['lines']} |" for r in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the plans that have no row yet, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    for name, make in cases():
        if options.only not in name or not options.only and name in [r["name"] for r in rows]:
            continue
        begin = time.process_time()
        try:
            case = make()
        except ImportError as missing:
            print(f"{name}: left out, {missing}", flush=True)
            continue
        row = {"name": name, **round_trip(case), "cpu": round(time.process_time() - begin, 1)}
        print(json.dumps(row), flush=True)
        if not options.only:
            rows.append(row)
            ROWS.write_text("".join(json.dumps(r) + "\n" for r in rows))
    PAGE.write_text(page(rows)) if rows else None


if __name__ == "__main__":
    main()
