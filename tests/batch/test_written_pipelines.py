"""Steps as users write them, in pipelines: a sample of those of `benchmarks/correctness/written_pipelines.py`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jshard
from tests.batch.test_microbatches import largest_error
from tests.batch.test_pipelines import mesh_of, pipelined
from tests.helpers import pipeline_networks, pipeline_objectives, pipeline_steps, pipeline_updates


PIPELINE = {"axis": "stage", "microbatches": 4}
SAMPLE = random.Random(22).sample(
    [
        pipeline_updates.clipped_adamw,
        pipeline_updates.loss_scale,
        pipeline_updates.skipped_update,
        pipeline_updates.layer_rates,
        pipeline_steps.alternating,
        pipeline_steps.example_masks,
        pipeline_steps.shared_temperature,
        pipeline_steps.quantized,
        pipeline_steps.mapped_heads,
        pipeline_networks.unrolled_cached,
        pipeline_networks.stochastic_depth,
        pipeline_networks.checkpointed_pairs,
        pipeline_networks.adapters,
        pipeline_networks.teacher,
    ],
    4,
)


@pytest.mark.parametrize("make", SAMPLE, ids=lambda f: f.__name__)
def test_a_step_in_a_pipeline(make: Callable[[int], pipeline_steps.Step]) -> None:
    with jax.enable_x64(True):
        step, args = make(4)
        f = pipelined(step, mesh_of(2, 4), microbatches=4, rounds=2)
        assert largest_error(f(*args), jax.jit(step)(*args)) < 1e-12


OBJECTIVES = random.Random(22).sample(
    [
        pipeline_objectives.weighted_tokens,
        pipeline_objectives.several_tokens,
        pipeline_objectives.preferences_at_once,
        pipeline_objectives.policy,
        pipeline_objectives.diffusion,
        pipeline_objectives.masked_patches,
        pipeline_objectives.recurrent,
        pipeline_objectives.keys_in_the_carry,
    ],
    2,
)


@pytest.mark.parametrize(
    ("make", "options"),
    list(zip(OBJECTIVES, [{"microbatches": 4}, {"config": {"pipeline": PIPELINE}}], strict=True)),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_an_objective(make: Callable[[int], pipeline_steps.Step], options: dict[str, Any]) -> None:
    step, args = make(2)
    f = jshard.shard(step, mesh=mesh_of(2, 2), **options)
    assert largest_error(f(*args), jax.jit(step)(*args)) < 1e-12


def test_the_products_of_an_optimizer_have_no_batch() -> None:
    """Newton-Schulz steps on stacked gradients keep the dimension of the layers in more products than the model has."""
    step, args = pipeline_objectives.orthogonal_updates(2)
    f = jshard.shard(step, mesh=mesh_of(2, 2), microbatches=4)
    assert f.plan(*args).microbatches == 4
    assert largest_error(f(*args), jax.jit(step)(*args)) < 1e-12


def test_a_gradient_at_weights_that_another_gradient_moved_is_refused() -> None:
    """Its pieces all wait for the whole first gradient."""
    step, args = pipeline_objectives.flat_minimum(2)
    with pytest.raises(jshard.ShardError, match="of its work would run again") as error:
        jshard.shard(step, mesh=mesh_of(2, 2), microbatches=4).plan(*args)
    assert "no microbatches=" in error.value.fix


def shifts(plan: jshard.Plan) -> list[Any]:
    return [c for c in plan.collectives if c.operator.startswith("stage_shift")]


@pytest.mark.parametrize(
    "make",
    [pipeline_networks.contrastive, pipeline_updates.unrolled_layer_rates, pipeline_steps.custom_gradient],
    ids=lambda f: f.__name__,
)
def test_a_norm_after_the_last_layer_is_no_part_of_the_layers(
    make: Callable[[int], pipeline_steps.Step],
) -> None:
    """A layer that began within its norm would pass on the norm's statistics; a norm alone would be one more layer."""
    step, args = make(4)
    plan = pipelined(step, mesh_of(4, 2), microbatches=4).plan(*args)
    assert plan.pipeline is not None and plan.pipeline.layers == (4, 4)
    assert sum(c.count for c in shifts(plan)) == 2 * plan.pipeline.ticks and "values pass" not in str(plan)


def test_what_a_loop_passes_on_is_stated() -> None:
    """A reversible network passes on two values, and its backward loop their two gradients."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        a, b = lax.scan(lambda c, one: ((c[1], c[0] + jnp.tanh(c[1] @ one)), None), (x, x), w)[0]
        return jnp.mean((a * b) ** 2)

    args = pipeline_steps.normal(1, 4, 6, 6) / 2, pipeline_steps.normal(2, pipeline_steps.BATCH, 6)
    f = jax.value_and_grad(loss)
    f_pipelined = jshard.shard(f, mesh=mesh_of(2, 1), level=0, config={"pipeline": PIPELINE})
    plan = f_pipelined.plan(*args)
    assert plan.pipeline is not None and len(plan.pipeline.layers) == 2 and len(shifts(plan)) == 4
    assert "4 values pass from stage to stage in its 2 loops" in str(plan)
    assert largest_error(f_pipelined(*args), jax.jit(f)(*args)) < 1e-12


def with_memory(w: jax.Array, x: jax.Array) -> jax.Array:
    """Layers that all read one value of each example, and add to a penalty of each example."""
    memory = jnp.sin(x @ w[0])

    def layer(carry: tuple[jax.Array, jax.Array], one: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        h, penalty = carry
        h = jnp.tanh(h @ one + memory)
        return (h, penalty + jnp.mean(h**2, -1)), None

    h, penalty = lax.scan(layer, (x, x[:, 0]), w)[0]
    return jnp.mean(h**2) + jnp.mean(jnp.sin(penalty))


def side_by_side(w: jax.Array, x: jax.Array) -> jax.Array:
    """Layers that all read the same, so that nothing passes from one to the next."""
    return jnp.mean(lax.scan(lambda total, one: (total + jnp.tanh(x @ one), None), x, w)[0] ** 3)


@pytest.mark.parametrize(("loss", "passed"), [(with_memory, 2), (side_by_side, 0)])
def test_values_that_layers_only_add_to_stay_on_their_stages(loss: Callable, passed: int) -> None:
    args = pipeline_steps.normal(1, 5, 6, 6) / 2, pipeline_steps.normal(2, pipeline_steps.BATCH, 6)
    f = jax.value_and_grad(loss, (0, 1))
    config = {"pipeline": {**PIPELINE, "rounds": 2, "uneven": True}}
    f_pipelined = jshard.shard(f, mesh=mesh_of(2, 1), level=0, config=config)
    plan = f_pipelined.plan(*args, verify=True)
    assert plan.pipeline is not None and plan.pipeline.layers == (5, 5) and len(shifts(plan)) == passed
    assert plan.verification is not None and plan.verification.ok
    assert largest_error(f_pipelined(*args), jax.jit(f)(*args)) < 1e-12


def test_layers_that_all_add_the_first_values_again_pass_one_value_on() -> None:
    """Of unrolled layers: the first adds to the gradient otherwise than the rest, and its addend is left out of the loop."""

    def loss(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        h = first = jnp.sin(x @ ws[0])
        for w in ws:
            h = jnp.tanh((h + 0.1 * first) @ w)
        return jnp.mean(h**2)

    args = list(pipeline_steps.normal(1, 4, 6, 6) / 2), pipeline_steps.normal(2, pipeline_steps.BATCH, 6)
    f = jax.value_and_grad(loss, (0, 1))
    f_pipelined = jshard.shard(f, mesh=mesh_of(2, 1), level=0, config={"pipeline": PIPELINE})
    plan = f_pipelined.plan(*args)
    assert plan.pipeline is not None and plan.pipeline.layers == (4, 4) and len(shifts(plan)) == 2
    assert largest_error(f_pipelined(*args), jax.jit(f)(*args)) < 1e-12


def metrics(kind: Callable[..., jax.Array]) -> Callable[..., Any]:
    """(loss, an extreme of each layer's activations, the greatest so far that the loop carries)."""

    def loss(w: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
        def layer(carry: Any, w: jax.Array) -> tuple[Any, jax.Array]:
            h, most = carry
            h = jnp.tanh(h @ w)
            return (h, jnp.maximum(most, jnp.max(jnp.abs(h)))), kind(h)

        (h, most), each = lax.scan(layer, (x, jnp.zeros(())), w)
        return jnp.mean(h**2), (each, most)

    return jax.value_and_grad(loss, has_aux=True)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("kind", [jnp.max, lambda h: jnp.min(h, 0), lambda h: jnp.any(h > 0.9)])
def test_extremes_of_the_batch_as_metrics(kind: Callable[..., jax.Array], remat: bool) -> None:
    f = metrics(jax.checkpoint(kind) if remat else kind)
    args = pipeline_steps.normal(1, 4, 6, 6) / 2, pipeline_steps.normal(2, pipeline_steps.BATCH, 6)
    f_pipelined = pipelined(f, mesh_of(2, 4), microbatches=4, rounds=2)
    found, wanted = (jax.tree.map(jnp.float64, g(*args)) for g in (f_pipelined, jax.jit(f)))
    assert largest_error(found, wanted) < 1e-12


def test_an_extreme_that_examples_read_couples_them() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(lax.scan(lambda h, w: (h @ w / jnp.max(h), None), x, w)[0])

    args = pipeline_steps.normal(1, 4, 6, 6), pipeline_steps.normal(2, pipeline_steps.BATCH, 6)
    with pytest.raises(jshard.ShardError, match="couples the examples of the batch") as error:
        pipelined(loss, mesh_of(2, 4), microbatches=4).plan(*args)
    assert "test_written_pipelines.py:" in error.value.where


def test_layers_that_index_their_parameters_are_refused_and_a_scan_is_not() -> None:
    step, args = pipeline_steps.by_index(4)
    with pytest.raises(jshard.ShardError, match="reads all parameters in each layer") as error:
        pipelined(step, mesh_of(2, 4), microbatches=4).plan(*args)
    assert "lax.scan(layer, x, w)" in error.value.fix and "pipeline_steps.py:" in error.value.where
    step, args = pipeline_steps.sgd(pipeline_steps.decoder_loss()), args
    assert pipelined(step, mesh_of(2, 4), microbatches=4).plan(*args).pipeline is not None
