"""Layers of a Python loop in pipelines: values, gradients and state as without; what is no loop, by its text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jshard
from jshard._batch.batch_class import SHARED, per_example
from jshard._batch.microbatches import in_microbatches
from jshard._batch.pipeline_shape import PipelineShape
from jshard._batch.pipelines import in_pipeline, with_loops_over_layers
from jshard._core import jaxcompat as compat
from tests.batch.test_microbatches import BATCH, largest_error, normal
from tests.batch.test_pipelines import mesh_of, pipelined
from tests.helpers import unrolled_models as models
from tests.helpers.pipeline_models import momentum_step


CASES: list[tuple[Callable[[int], models.Model], int, tuple[int, int]]] = [
    # model, layers, layers of the loops; more in benchmarks/correctness/pipeline_laws.py
    (models.mlp, 5, (5, 5)),
    (lambda n: models.gpt(n, keys="split"), 3, (3, 3)),
    (lambda n: models.gpt(n, remat=True, keys="folded in"), 2, (2, 2)),
    (models.llama, 2, (2, 2)),
    (models.of_data, 4, (4, 4)),
    (models.checkpointed_of_data, 4, (4, 4)),
    (models.experts, 4, (4, 4)),
    (lambda n: models.experts(n, jax.checkpoint_policies.dots_saveable), 3, (3, 3)),
    (lambda n: models.experts(n, embedded=False), 4, (4, 4)),
    (models.gated, 4, (4, 4)),
    (models.alternating, 6, (3, 3)),
    (models.with_constants, 4, (4, 4)),
    (models.with_custom_rules, 4, (4, 4)),
    (models.numbered, 4, (4, 4)),
    (models.indexed, 4, (4, 4)),
    (models.collected, 4, (4, 4)),
    (models.masked_after, 4, (4, 4)),
    *(
        (lambda n, remat=remat, embedded=embedded: models.supervised(n, remat, embedded), 4, (4, 4))
        for remat, embedded in (("", False), ("layer", True), ("loss", False), ("both", True))
    ),
    (models.with_keys_of_a_split, 4, (4, 4)),
    (lambda n: models.with_keys_of_a_split(n, remat=True), 4, (4, 4)),
    *(
        (lambda n, p=p, remat=remat: models.penalized(n, p, remat), 4, (4, 4))
        for p, remat in (
            (models.in_branches, True),
            (models.in_a_loop, True),
            (models.of_means, True),
            (lambda x: jnp.mean(x**2), False),
            (models.of_means_in_branches, False),
            (models.of_other_means_in_branches, True),
        )
    ),  # fmt: skip
]


@pytest.mark.parametrize(("model", "layers", "loops"), CASES)
def test_values_and_gradients_are_those_of_the_program(
    model: Any, layers: int, loops: tuple[int, int]
) -> None:
    loss, args = model(layers)
    f = jax.value_and_grad(loss)
    classes = [*[SHARED] * len(jax.tree.leaves(args[0])), per_example(0)]
    found = with_loops_over_layers(jax.make_jaxpr(f)(*args), classes, BATCH, 4)
    staged = in_pipeline(found, classes, BATCH, PipelineShape(("stage",), 2, 4, 1, True))
    assert found.unrolled and staged.layers == loops and not staged.outside
    run = jax.jit(compat.as_function(staged.closed))
    assert largest_error(run(*jax.tree.leaves(args)), jax.jit(f)(*args)) < 1e-12


def test_a_sharded_step_keeps_the_parameters_of_each_layer() -> None:
    loss, (w, x) = models.mlp(4)
    x = jnp.concatenate([x] * 2)[:32]
    state = jax.tree.map(jnp.zeros_like, w)
    f = momentum_step(loss)
    f_pipelined = pipelined(f, mesh_of(4, 2), microbatches=8)
    plan = f_pipelined.plan(w, state, x, verify=True)
    assert plan.verification is not None and plan.verification.ok
    assert plan.pipeline is not None and plan.pipeline.unrolled and plan.pipeline.layers == (4, 4)
    assert "unrolled layers are stacked for it" in str(plan)
    kernels = [i for i in plan.inputs if i.path.endswith("kernel")]
    assert len(kernels) == 8 and all(
        i.shape == (8, 8) for i in kernels
    )  # of parameters and their state, as they were
    shifts = [c for c in plan.collectives if c.operator.startswith("stage_shift")]
    assert sum(c.count for c in shifts) == 2 * plan.pipeline.ticks
    others = [c for c in plan.collectives if not c.operator.startswith("stage_shift")]
    assert all(c.count == 1 for c in others)  # parameters and gradients move once a step, not once a tick
    assert largest_error(f_pipelined(w, state, x), jax.jit(f)(w, state, x)) < 1e-12
    again = jshard.Plan.from_json(plan.to_json())
    assert again.pipeline == plan.pipeline


@pytest.mark.parametrize("remat", ["", "both"])
def test_a_loss_after_each_layer_is_in_the_pipeline(remat: str) -> None:
    loss, args = models.supervised(8, remat)
    step = jax.value_and_grad(loss)
    f = pipelined(step, mesh_of(4, 2), microbatches=4, rounds=2)
    assert largest_error(f(*args), jax.jit(step)(*args)) < 1e-12
    plan = f.plan(*args)
    shifts = sum(c.count for c in plan.collectives if c.operator.startswith("stage_shift"))
    assert plan.pipeline is not None and plan.pipeline.layers == (8, 8) and not plan.pipeline.outside
    assert shifts == 2 * plan.pipeline.ticks == 2 * (2 * 4 + 4 - 1)


def test_parameters_of_a_layer_lie_on_all_stages_and_move_by_all_to_all() -> None:
    """Each device holds a part of every layer at rest, and all of its stage's layers, cut over the other axis, inside."""
    ws = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 8
    x = jax.ShapeDtypeStruct((4096, 2048), jnp.float32)

    def loss(ws: Any, x: jax.Array) -> jax.Array:
        for w in ws:
            x = x + jnp.tanh(x @ w)
        return jnp.mean(x**2)

    topology = jshard.topology("v5e:4x4", {"stage": 4, "data": 4})
    step = jax.value_and_grad(loss)
    config = {"pipeline": {"axis": "stage", "microbatches": 8}}
    cut = (jax.P("stage", "data"), None)
    plan = jshard.shard(step, cut, mesh=topology, level=2, config=config).plan(ws, x)
    weights = [i.layout for i in plan.inputs if i.shape == (2048, 2048)]
    assert len(weights) == 8 and all("stage" in (*layout.dims[0], *layout.dims[1]) for layout in weights)
    moved = [c for c in plan.collectives if c.kind == "all_to_all" and c.axes == ("stage",)]
    assert moved and all(c.count == 1 for c in moved)
    plain = jshard.shard(step, mesh=topology, level=2).plan(ws, x)
    assert plain.pipeline is None and plan.cost.bound <= plan.cost.objective


def growing(ws: Any, x: jax.Array) -> jax.Array:
    """Every layer reads what all layers before it returned, so each has operators on other shapes."""
    for w in ws:
        x = jnp.concatenate([x, jnp.tanh(x @ w)], -1)
    return jnp.mean(x**2)


def of_other_widths(ws: Any, x: jax.Array) -> jax.Array:
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def tree(ws: Any, x: jax.Array) -> jax.Array:
    """Alike layers that form a tree, not a chain."""
    h = [x]
    for k, w in enumerate(ws):
        h.append(jnp.tanh(h[k // 2] @ w))
    return jnp.mean(h[-1] ** 2) + jnp.mean(h[-2] ** 2) + jnp.mean(h[-3] ** 2)


def test_layers_that_are_no_loop() -> None:
    widths = (4, 6, 5, 7, 3)
    cases = [
        (growing, [normal(k, 4 + 2 * k, 2) for k in range(5)], "no layers outside loops are alike"),
        (
            of_other_widths,
            [normal(k, *widths[k : k + 2]) for k in range(4)],
            "no layers outside loops are alike",
        ),
        (tree, [normal(k, 4, 4) for k in range(7)], "do not follow each other as in one"),
    ]
    for f, ws, what in cases:
        with pytest.raises(jshard.ShardError) as error:
            pipelined(jax.value_and_grad(f), mesh_of(2, 2), microbatches=4).plan(ws, normal(9, BATCH, 4))
        assert what in error.value.what, (f, error.value)
        assert "the same operators on the same shapes" in error.value.fix


def test_layers_whose_backward_passes_are_not_alike() -> None:
    """The parameters of the second layer are frozen; with those of all layers trained the same step runs."""

    def loss_of(frozen: int) -> Callable:
        def loss(ws: Any, x: jax.Array) -> jax.Array:
            for k, w in enumerate(ws):
                x = x + jnp.tanh(x @ (jax.lax.stop_gradient(w) if k == frozen else w))
            return jnp.mean(x**2)

        return jax.value_and_grad(loss)

    args = [normal(k, 8, 8) / 3 for k in range(4)], normal(9, 32, 8)
    with pytest.raises(jshard.ShardError) as error:
        pipelined(loss_of(1), mesh_of(4, 2), microbatches=4).plan(*args)
    assert "3 layers are fewer than the 4 stages" in str(error.value)
    assert str(error.value).endswith("alike, also in the parameters whose gradients are taken")
    trained = loss_of(-1)
    assert (
        largest_error(pipelined(trained, mesh_of(4, 2), microbatches=4)(*args), jax.jit(trained)(*args))
        < 1e-12
    )


def test_a_value_of_the_first_layer_that_all_others_read() -> None:
    """Its equations are in one layer alone: the first one, where it enters."""
    ws, x = [(normal(k, 4, 4), normal(9 + k, 4, 4)) for k in range(4)], normal(30, BATCH, 4)

    def loss(ws: Any, x: jax.Array) -> jax.Array:
        first = None
        for w, v in ws:
            value = x @ v
            first = value if first is None else first
            x = x + jnp.tanh(x @ w) * (value + first) / 2
        return jnp.mean(x**2)

    f = pipelined(jax.value_and_grad(loss), mesh_of(2, 2), microbatches=4, uneven=True)
    plan = f.plan(ws, x)
    assert plan.pipeline is not None and plan.pipeline.unrolled
    assert largest_error(f(ws, x), jax.jit(jax.value_and_grad(loss))(ws, x)) < 1e-12


def test_the_alike_layers_that_the_error_names_run_in_a_pipeline() -> None:
    """Layers of other widths, padded to the same shapes."""
    ws, x, mesh = [normal(k, 4, 4 + k % 2) for k in range(4)], normal(9, BATCH, 4), mesh_of(2, 2)

    def loss(ws: Any, x: jax.Array, alike: bool) -> jax.Array:
        for w in ws:
            w = jnp.pad(w, ((0, 0), (0, 5 - w.shape[1]))) if alike else w
            x = x + jnp.tanh(x @ w)[:, :4]
        return jnp.mean(x**2)

    def step(alike: bool) -> Callable:
        return jax.value_and_grad(lambda ws, x: loss(ws, x, alike))

    wanted = jax.jit(step(False))(ws, x)
    f = pipelined(step(True), mesh, microbatches=4, uneven=True)
    assert largest_error(f(ws, x), wanted) < 1e-12


@pytest.mark.parametrize("penalty", [models.of_means_in_branches, models.of_other_means_in_branches])
@pytest.mark.parametrize("remat", [False, True])
def test_branches_that_square_means_run_in_microbatches(penalty: Any, remat: bool) -> None:
    loss, args = models.penalized(3, penalty, remat)
    f = jax.value_and_grad(loss)
    classes = [*[SHARED] * len(jax.tree.leaves(args[0])), per_example(0)]
    looped = in_microbatches(jax.make_jaxpr(f)(*args), classes, BATCH, 4)
    assert largest_error(jax.jit(compat.as_function(looped))(*jax.tree.leaves(args)), f(*args)) < 1e-12


def test_a_branch_that_a_sum_decides_is_refused_and_the_advice_works() -> None:
    def loss_of(penalty: Callable[[jax.Array], jax.Array]) -> Callable:
        def loss(w: jax.Array, x: jax.Array) -> jax.Array:
            last, each = lax.scan(lambda h, one: (h + jnp.tanh(h @ one), penalty(h)), x, w)
            return jnp.mean(last**2) + jnp.sum(each)

        return jax.value_and_grad(loss)

    def square(x: jax.Array) -> jax.Array:
        return jnp.mean(x**2)

    args = jnp.stack([normal(k, 8, 8) / 3 for k in range(4)]), normal(9, BATCH, 8)
    in_branches = loss_of(lambda x: lax.cond(jnp.mean(x) > 0, square, jnp.mean, x))
    with pytest.raises(jshard.ShardError) as caught:
        pipelined(in_branches, mesh_of(4, 2), microbatches=4).plan(*args)
    assert "cond f64[]" in str(caught.value) and "jnp.where(decision, one, other)" in str(caught.value)
    selected = loss_of(lambda x: jnp.where(jnp.mean(x) > 0, square(x), jnp.mean(x)))
    f = pipelined(selected, mesh_of(4, 2), microbatches=4)
    assert largest_error(f(*args), jax.jit(in_branches)(*args)) < 1e-12
