"""`python -m benchmarks.correctness.pipeline_laws`: steps in pipelines and in microbatches beside the same steps without.

Residual MLP, GPT with dropout, grouped-query Llama, experts with an auxiliary loss and dropout, with and without
`jax.checkpoint` (`tests/helpers/pipeline_models.py`), in float64 on eight CPU devices. A case fails unless loss, state and
new weights of a step with momentum agree to 1e-12, the stages' permutes are 2 (R M + S - 1), and emitted bytes are planned
bytes; other collectives that run more than once are counted. `grad outside`: loss and gradients of a sharded loss that JAX
differentiates, with as many permutes compiled. Microbatches: loss and gradients with the derivative inside and outside the
sharded function, tokens with weights, and three calls of a step whose `optax.MultiSteps` updates at every second. `masks`:
dropout masks of every layer are returned, and are the same bits.

Cases run in an order shuffled by a fixed seed, and finished ones are kept in `pipeline_laws.jsonl`, from which `--page`
writes `pipeline_laws.md`. `--only NAME` runs those with this in their names, `--anew` those that are kept as well.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_x64", True)

import jshard  # noqa: E402
from jshard._verify.read_collectives import read_program  # noqa: E402
from tests.batch.test_microbatches import largest_error  # noqa: E402
from tests.helpers import pipeline_models as models  # noqa: E402


ROWS = Path(__file__).with_suffix(".jsonl")
PAGE = Path(__file__).with_suffix(".md")
LIMIT = 1e-12


def masked(w: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A residual network; (loss, the dropout masks of all layers)."""

    def layer(carry: Any, kernel: jax.Array) -> tuple[Any, jax.Array]:
        h, key = carry
        key, own = jax.random.split(key)
        mask = jax.random.bernoulli(own, 0.7, h.shape)
        return (h + jnp.where(mask, jnp.tanh(h @ kernel), 0), key), mask

    (h, _), masks = lax.scan(layer, (x @ w["in"], jax.random.key(11)), w["kernel"])
    return jnp.mean((h @ w["out"]) ** 2), masks


def weighted(w: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """A residual network over tokens whose weights differ between microbatches; their sum divides the loss."""
    tokens, weights = batch
    h, _ = lax.scan(lambda h, kernel: (h + jnp.tanh(h @ kernel), None), w["embedding"][tokens], w["layers"])
    logits = jax.nn.log_softmax(h @ w["embedding"].T)
    each = jnp.take_along_axis(logits, jnp.roll(tokens, -1, 1)[..., None], -1)[..., 0]
    return -jnp.sum(each * weights) / jnp.sum(weights)


def weighted_arguments(layers: int) -> tuple[Any, Any]:
    """Most weights of the first examples are 0."""
    w, tokens = models.gpt_arguments(layers)
    n = tokens.shape[0]
    return w, (
        tokens,
        jnp.arange(tokens.size).reshape(tokens.shape) % (3 + jnp.arange(n)[:, None] // 8) * 1.0,
    )


MODELS: dict[str, tuple[Callable[..., Any], Callable[[int], tuple]]] = {
    "mlp": (models.mlp(False), models.mlp_arguments),
    "mlp, remat": (models.mlp(True), models.mlp_arguments),
    "gpt": (models.gpt(False), models.gpt_arguments),
    "gpt, remat": (models.gpt(True), models.gpt_arguments),
    "llama": (models.llama(False), models.llama_arguments),
    "llama, remat": (models.llama(True), models.llama_arguments),
    "experts": (models.experts(0.7), models.experts_arguments),
    "experts, remat": (models.experts(0.7, True), models.experts_arguments),
    "experts without dropout": (models.experts(0.0), models.experts_arguments),
    "weighted tokens": (weighted, weighted_arguments),
}
SHAPES = [  # stages, data, model, microbatches, rounds, layers, uneven
    (2, 4, 1, 2, 1, 4, False),
    (2, 2, 2, 4, 1, 5, True),
    (2, 2, 2, 16, 1, 4, False),
    (4, 2, 1, 8, 1, 8, False),
    (4, 1, 2, 16, 1, 7, True),
    (8, 1, 1, 4, 1, 8, False),
    (8, 1, 1, 16, 1, 13, True),
    (2, 4, 1, 4, 2, 4, False),
    (4, 2, 1, 4, 2, 8, False),
    (8, 1, 1, 8, 2, 16, False),
    (2, 2, 2, 8, 3, 11, True),
    (4, 2, 1, 16, 3, 12, False),
    (8, 1, 1, 16, 3, 24, False),
]
OUTSIDE = [SHAPES[k] for k in (0, 1, 2, 3, 8, 9, 10)]
MICROBATCHES = list(itertools.product((2, 4, 8), ("inside", "outside"), ((8, 1), (2, 4))))
Case = tuple[str, Callable[[], dict[str, Any]]]


def cases() -> list[Case]:
    """Title of every case, and what checks it."""
    found: list[Case] = []
    for name, one in itertools.product(MODELS, SHAPES):
        found.append((title(name, one), lambda name=name, one=one: check_pipeline(name, one)))
    for name, one in itertools.product(MODELS, OUTSIDE):
        found.append(
            (title(name, one) + ", grad outside", lambda name=name, one=one: check_outside(name, one))
        )
    for name, k in itertools.product(MODELS, (2, 4, 8)):
        found.append(
            (
                f"{name}: microbatches {k}, MultiSteps outside",
                lambda name=name, k=k: check_multi_steps(name, k),
            )
        )
    for one in SHAPES:
        found.append((title("masks", one), lambda one=one: check_masks(one)))
    for name, (k, grad, sizes) in itertools.product(MODELS, MICROBATCHES):
        mesh = f"data {sizes[0]} x model {sizes[1]}"
        found.append((f"{name}: microbatches {k}, {mesh}, grad {grad}",
                      lambda name=name, k=k, grad=grad, sizes=sizes: check_microbatches(name, k, grad, sizes)))  # fmt: skip
    random.Random(22).shuffle(found)
    return found


def title(name: str, one: tuple) -> str:
    """The words of a case in a pipeline."""
    stages, data, model, m, r, layers, _ = one
    return f"{name}: {layers} layers, stage {stages} x data {data} x model {model}, M {m}, R {r}"


def mesh_of(**sizes: int) -> jax.sharding.Mesh:
    """A mesh of the axes of more than one device."""
    kept = {n: s for n, s in sizes.items() if s > 1}
    return jax.make_mesh(
        tuple(kept.values()), tuple(kept), axis_types=(jax.sharding.AxisType.Auto,) * len(kept)
    )


def in_pipeline(f: Callable, one: tuple) -> jshard.Sharded:
    """A function in the pipeline of a shape."""
    stages, data, model, m, r, _, uneven = one
    pipeline = {"axis": "stage", "microbatches": m, "rounds": r, "uneven": uneven}
    return jshard.shard(
        f, mesh=mesh_of(stage=stages, data=data, model=model), level=2, config={"pipeline": pipeline}
    )


def check_pipeline(name: str, one: tuple) -> dict[str, Any]:
    """The laws of a training step with momentum."""
    loss, arguments = MODELS[name]
    stages, *_, m, r, layers, _ = one
    w, x = arguments(layers)
    x, state, step = doubled(x), jax.tree.map(jnp.zeros_like, w), models.momentum_step(loss)
    f = in_pipeline(step, one)
    plan = f.plan(w, state, x, verify=True)
    assert plan.pipeline is not None and plan.verification is not None and plan.verification.ok, (
        plan.verification
    )
    shifts = [c for c in plan.collectives if c.operator.startswith("stage_shift")]
    assert sum(c.count for c in shifts) == 2 * plan.pipeline.ticks == 2 * (r * m + stages - 1), shifts
    error = largest_error(f(w, state, x), jax.jit(step)(w, state, x))
    assert error < LIMIT, error
    repeated = [c for c in plan.collectives if c.count > 1 and c not in shifts]
    return {
        "error": error,
        "received": sum(plan.bytes_by_kind.values()),
        "proved": plan.cost.optimal,
        "permutes": sum(c.count for c in shifts),
        "repeated": len(repeated),
    }


def check_outside(name: str, one: tuple) -> dict[str, Any]:
    """The laws of a loss in a pipeline that JAX differentiates from outside."""
    loss, arguments = MODELS[name]
    stages, *_, m, r, layers, _ = one
    w, x = arguments(layers)
    x, f = doubled(x), jax.jit(jax.value_and_grad(in_pipeline(loss, one)))
    error = largest_error(f(w, x), jax.jit(jax.value_and_grad(loss))(w, x))
    assert error < LIMIT, error
    ticks = r * m + stages - 1
    repeated = [c for c in read_program(f.lower(w, x).compile()).collectives if c.count > 1]
    shifts = [c for c in repeated if c.kind == "permute" and c.count == ticks]
    assert sum(c.count for c in shifts) == 2 * ticks, repeated
    return {"error": error, "permutes": 2 * ticks, "repeated": len(repeated) - len(shifts)}


def check_multi_steps(name: str, k: int) -> dict[str, Any]:
    """Calls of a step that accumulates over two calls, each in microbatches; the update is of momentum."""
    loss, arguments = MODELS[name]
    w, x = arguments(3)
    optimizer = optax.MultiSteps(
        optax.sgd(0.1, momentum=0.9), every_k_schedule=2, accumulator_dtype=jnp.float64
    )

    def step(w: Any, state: Any, x: Any) -> tuple[Any, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(w, x)
        updates, state = optimizer.update(gradient, state, w)
        return optax.apply_updates(w, updates), state, value

    f = jshard.shard(step, mesh=mesh_of(data=2, model=4), level=2, microbatches=k)
    found = wanted = (w, optimizer.init(w), jnp.zeros(()))
    for turn in range(3):
        x = jax.tree.map(lambda a, turn=turn: jnp.roll(a, turn, 0), doubled(x))
        found, wanted = f(*found[:2], x), jax.jit(step)(*wanted[:2], x)
    error = largest_error(found, wanted)
    assert error < LIMIT, error
    return {"error": error}


def check_masks(one: tuple) -> dict[str, Any]:
    """Dropout masks of a forward pass are the same bits, and its loss the same."""
    w, x = models.mlp_arguments(one[5])
    x = doubled(x)
    found, wanted = in_pipeline(masked, one)(w, x), jax.jit(masked)(w, x)
    assert np.array_equal(found[1], wanted[1]) and not np.all(found[1])
    error = largest_error(found[0], wanted[0])
    assert error < LIMIT, error
    return {"error": error}


def check_microbatches(name: str, k: int, grad: str, sizes: tuple[int, int]) -> dict[str, Any]:
    """Loss and gradients in microbatches, the derivative taken inside or outside the sharded function."""
    loss, arguments = MODELS[name]
    w, x = arguments(3)
    x, mesh = doubled(x), mesh_of(data=sizes[0], model=sizes[1])
    if grad == "inside":
        f: Callable = jshard.shard(jax.value_and_grad(loss), mesh=mesh, level=2, microbatches=k)
    else:
        f = jax.value_and_grad(jshard.shard(loss, mesh=mesh, level=2, microbatches=k))
    error = largest_error(f(w, x), jax.jit(jax.value_and_grad(loss))(w, x))
    assert error < LIMIT, error
    return {"error": error}


def doubled(x: Any) -> Any:
    """A batch of 32 of one of 24: 16 microbatches divide it."""
    return jax.tree.map(lambda a: jnp.concatenate([a] * 2)[:32], x)


def page(rows: list[dict[str, Any]]) -> str:
    """The rows as a page."""
    total = len(cases())
    wrong = [r for r in rows if "failed" in r]
    errors = [r["error"] for r in rows if "error" in r]
    head = [
        "# Pipelines and microbatches beside the same steps without", "",
        f"`python -m benchmarks.correctness.pipeline_laws`: {len(rows)} of {total} cases were run, {len(wrong)} failed; the "
        f"largest relative error is {max(errors):.1e} (limit {LIMIT:.0e}). Float64, 8 CPU devices, JAX {jax.__version__}. "
        "Cases run in an order shuffled by a fixed seed.", "",
        "Permutes: those of the stages, as compiled, 2 (R M + S - 1) in every row. Repeated: other collectives of the plan "
        "(of the compiled program with `grad outside`) that run more than once a step. Proved: the search closed its gap. "
        "`masks`: dropout masks are the same bits.", "",
        "| case | relative error | permutes | repeated | received, B | proved |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    lines = [
        f"| {r['case']} | {r['failed']} | | | | |" if "failed" in r else
        f"| {r['case']} | {r['error']:.1e} | {_cell(r, 'permutes')} | {_cell(r, 'repeated')} | {_cell(r, 'received')} | "
        f"{'' if 'proved' not in r else 'yes' if r['proved'] else 'no'} |"
        for r in sorted(rows, key=lambda r: r["case"])
    ]  # fmt: skip
    return "\n".join([*head, *lines, ""])


def _cell(row: dict[str, Any], key: str) -> str:
    return f"{row[key]:,.0f}" if key in row else ""


def main() -> None:
    """Run the cases that are not kept."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args()
    lines = ROWS.read_text().splitlines() if ROWS.exists() else []
    kept = {row["case"]: row for row in map(json.loads, lines)}
    if args.page:
        PAGE.write_text(page(list(kept.values())))
        return
    for name, check in cases():
        if args.only in name and (args.anew or name not in kept):
            begin = time.process_time()
            try:
                row = check()
            except Exception as error:  # a row says which case failed, and the others run
                row = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
            seconds = time.process_time() - begin
            with ROWS.open("a") as f:
                f.write(json.dumps({"case": name, **row}) + "\n")
            print(name, row, f"{seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
