"""A GPT training step with only the batch pinned: equal losses, proved optimal, emitted as planned."""

from __future__ import annotations

import chex
import jax
import pytest
from jax.sharding import AxisType

import jshard
from demo.chargpt import batches, standard_library_text
from tests.helpers.models import Config, gpt_step


CONFIGS = {
    "plain": Config(layers=1, width=32, heads=2, context=16, batch=16),
    "scan, remat": Config(layers=2, width=32, heads=2, context=16, batch=16, scan=True, remat=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_training_is_the_same_and_its_traffic_is_the_plan(name):
    config = CONFIGS[name]
    step, (params, state, batch) = gpt_step(config)
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])
    sharded = jshard.shard(step, {"batch": (8, 1)}, mesh=mesh)
    plan = sharded.plan(params, state, batch)
    assert plan.cost.optimal and plan.cost.gap == 0 and not plan.unknown

    compiled = sharded.lower(params, state, batch).compile()
    verification = plan.verify(compiled)
    assert verification.ok, str(verification)
    assert plan.collectives

    ours, plain = (params, state), (params, state)
    plain_step = jax.jit(step)
    for batch, _ in zip(batches(standard_library_text(100_000), config, 1), range(6), strict=False):
        *ours, our_loss = compiled(*ours, batch)
        *plain, loss = plain_step(*plain, batch)
        assert abs(our_loss - loss) <= 1e-4 * loss
    chex.assert_trees_all_close(ours[0], plain[0], rtol=1e-3, atol=1e-4)
