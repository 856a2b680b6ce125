"""A sample of the table of `benchmarks/models/recipes.py`: families of models under recipes, drawn anew by a seed."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from benchmarks.models import recipes as table
from benchmarks.models.zoo import decoders, recipes
from jshard import hardware


SEED = 19


def sample(count: int) -> list[tuple[str, str]]:
    """Pairs of a model of our own and a column."""
    pairs = [(name, c) for name in recipes.OWN for c in (*recipes.RECIPES, *recipes.FUSED, "search")]
    return [pairs[i] for i in np.random.default_rng(SEED).choice(len(pairs), count, replace=False)]


@pytest.mark.parametrize("name, column", [*sample(1), ("Mixtral", "lazy")])
def test_loss_and_gradients_are_those_of_the_plain_run(name, column, monkeypatch):
    monkeypatch.setattr(decoders, "LAYERS", 1)
    hardware.register(recipes.CHIP)
    model = recipes.OWN[name]()
    step, args = recipes.loss_and_gradients(model)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    if column == "lazy":
        found = recipes.lazily(model, step, args, mesh)
        assert found["share"] < 0.5
    elif column in recipes.FUSED:
        found = recipes.fused(column, model, mesh)
    else:
        found = recipes.cell(column, step, args, jax.jit(step)(*args), mesh)
    if "reason" in found:  # nothing of the recipe is in the model, which is said
        assert column in ("expert", "ulysses", "megatron+sequence") and found["reason"]
        return
    assert not table.failures({"model": name, column: found})
