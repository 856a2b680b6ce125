"""`python -m benchmarks.models.zoo.recipes MODEL [COLUMN ...]`: loss and gradients of a model under recipes and the search.

Prints one JSON object: by column the largest error against the plain run, whether the compiled collectives are the
planned ones, and the step over that of the search; or why a recipe does not apply.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from typing import Any

import jax
import numpy as np

import jshard
from benchmarks.models.zoo import decoders, windows
from benchmarks.models.zoo.__main__ import CHIP, error
from benchmarks.models.zoo.kinds import Model
from jshard import hardware


RECIPES = ("megatron", "fsdp+megatron", "megatron+sequence", "ulysses", "vocab", "fsdp", "expert")
FUSED = {"fused attention": ("attention",), "fused norm": ("norm",)}
COLUMNS = (*RECIPES, "search", *FUSED, "lazy")
SHAPE, OF_IMAGES = {"data": 2, "model": 4}, {"data": 4, "model": 2}


OWN = {**decoders.MODELS, **windows.MODELS}


def loss_and_gradients(model: Model) -> tuple[Any, tuple[Any, ...]]:
    """The function from parameters, state and batch to loss and gradients, in training; and its arguments."""

    def step(params, state, batch):
        def loss(p):
            return model.loss(model.apply(p, state, batch, True)[0], batch)

        return jax.value_and_grad(loss)(params)

    return step, (model.params, model.state, model.batch)


def cell(column: str, step: Any, args: tuple[Any, ...], wanted: Any, mesh: Any) -> dict[str, Any]:
    """One column: error, whether what is emitted is what is planned, objective; or the reason."""
    config: dict[str, Any] = {"level": 0, "hardware": CHIP.name, "strict": False}
    if column in FUSED:
        config["recipe"] = "fsdp+megatron"
    elif column == "search":
        config["inputs"] = {f"batch.{k}": ["data"] + ["?"] * (np.ndim(v) - 1) for k, v in args[-1].items()}
    else:
        config["recipe"] = column
    sharded = jshard.shard(step, config=config, mesh=mesh)
    try:
        plan = sharded.plan(*args, verify=True)
    except jshard.ShardError as refused:
        if "does not apply" not in refused.what:
            raise
        return {"reason": refused.what.partition("does not apply: ")[2]}
    worst, at = error(jax.block_until_ready(sharded(*args)), wanted)
    assert plan.verification is not None
    return {
        "error": worst,
        "at": at,
        "verified": plan.verification.ok,
        "objective": plan.cost.objective,
        "gap": plan.cost.gap,
    }


def lazily(model: Model, step: Any, args: tuple[Any, ...], mesh: Any) -> dict[str, Any]:
    """Parameters created in the shardings of `fsdp+megatron`, from shapes alone."""
    if model.create is None:
        return {"reason": "not tried: its library makes parameters on the host"}
    shapes = jax.eval_shape(model.create)
    plan = jshard.shard(step, config={"recipe": "fsdp+megatron", "strict": False}, mesh=mesh).plan(
        shapes, *args[1:]
    )
    shardings = plan.in_shardings[0][0]
    created = jax.jit(model.create, out_shardings=shardings)()
    worst, at = error(created, jax.jit(model.create)())
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(created))
    return {"error": worst, "at": at, "share": held / sum(x.nbytes for x in jax.tree.leaves(created))}


def fused(column: str, model: Model, mesh: Any) -> dict[str, Any]:
    """By `fsdp+megatron`, with functions replaced by name, against the model without."""
    if model.fused is None:
        return {"reason": "it has no attention or norm of features"}
    plain = model.fused(())
    step, args = loss_and_gradients(plain)
    wanted = jax.jit(step)(*args)
    replaced, args = loss_and_gradients(dataclasses.replace(model.fused(FUSED[column]), params=plain.params))
    return cell(column, replaced, args, wanted, mesh)


def main(name: str, columns: tuple[str, ...]) -> None:
    """Print the figures of one model, column by column, so that what is found before a fault stays."""
    hardware.register(CHIP)
    texts = importlib.import_module("benchmarks.models.zoo.texts") if name not in OWN else None
    model = OWN[name]() if texts is None else texts.model_of(name)
    step, args = loss_and_gradients(model)
    wanted = jax.jit(step)(*args)
    shape = OF_IMAGES if name in ("ViT", "BEiT", "CLIP") else SHAPE
    kinds = (jax.sharding.AxisType.Auto,) * len(shape)
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=kinds)
    out: dict[str, Any] = {"model": name}
    for column in columns or COLUMNS:
        if column == "lazy":
            out[column] = lazily(model, step, args, mesh)
        elif column in FUSED:
            out[column] = fused(column, model, mesh)
        else:
            out[column] = cell(column, step, args, wanted, mesh)
        print("RESULT " + json.dumps(out), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], tuple(sys.argv[2:]))
