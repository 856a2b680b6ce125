"""Programs in several loops over microbatches: how much of them runs again, and on which part of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jshard._batch.batch_class import SHARED, per_example
from jshard._batch.microbatches import in_microbatches
from jshard._core import jaxcompat as compat
from jshard._program.equation_bodies import every_equation
from tests.batch.test_microbatches import (
    BATCH,
    KEY,
    decoder,
    decoder_arguments,
    largest_error,
    looped,
    normal,
)


def masks_in(loop: Any) -> set[tuple[int, ...]]:
    """Shapes of the masks in a loop's body, and in what it calls."""
    eqns = every_equation(compat.open_jaxpr(loop.params["jaxpr"])[0])
    return {v.aval.shape for e in eqns for v in e.outvars if v.aval.dtype == bool and v.aval.shape}


def masked_layers(returned: bool) -> Callable[..., Any]:
    """Dropout layers in a scan that stacks its masks, weighted tokens; optionally the masks are results as well."""

    def loss(w: jax.Array, x: jax.Array, weight: jax.Array) -> Any:
        def layer(carry: Any, w: jax.Array) -> tuple[Any, jax.Array]:
            h, key = carry
            key, own = jax.random.split(key)
            mask = jax.random.bernoulli(own, 0.8, h.shape)
            return (h + jnp.where(mask, jnp.tanh(h @ w), 0), key), mask

        (h, _), masks = lax.scan(layer, (x, KEY), w)
        value = jnp.sum(jnp.mean(h**2, -1) * weight) / jnp.sum(weight)
        return value, masks if returned else None

    return loss


def masked_arguments() -> tuple[jax.Array, jax.Array, jax.Array]:
    return normal(0, 3, 6, 6) / 3, normal(1, BATCH, 6), jnp.arange(BATCH) % 5 * 1.0


@pytest.mark.parametrize("count", [2, 8])
def test_masks_that_a_forward_loop_stacks_are_drawn_for_the_piece_alone(count: int) -> None:
    """The loop that counts the tokens runs no layer, and the other draws no mask of the whole batch."""
    f, args = jax.value_and_grad(masked_layers(False), has_aux=True), masked_arguments()
    new, found = looped(f, args, [False, True, True], count)
    ((value, _), gradient) = jax.jit(f)(*args)
    assert largest_error(found, (value, gradient)) < 1e-12
    loops = [e for e in compat.open_jaxpr(new)[0].eqns if e.primitive.name == "scan"]
    assert [bool(masks_in(loop)) for loop in loops] == [False, True]
    assert masks_in(loops[1]) == {(BATCH // count, 6), (3, BATCH // count, 6)}


def test_masks_that_are_results_as_well_are_those_of_the_whole_batch() -> None:
    f, args = jax.value_and_grad(masked_layers(True), has_aux=True), masked_arguments()
    _, (value, masks, gradient) = looped(f, args, [False, True, True], 4)
    wanted = jax.jit(f)(*args)
    assert largest_error((value, gradient), (wanted[0][0], wanted[1])) < 1e-12
    assert np.array_equal(masks, wanted[0][1]) and 0 < np.mean(masks) < 1


def test_a_shared_result_read_by_two_slices_is_computed_in_the_loop_that_reads_it() -> None:
    """Of noise one loop reads a row for each example, another a column: it is drawn whole, but no layer runs again."""

    def loss(w: jax.Array, x: jax.Array, weight: jax.Array) -> jax.Array:
        def layer(h: jax.Array, one: Any) -> tuple[jax.Array, jax.Array]:
            return jnp.tanh(h @ one[0]), jax.random.normal(one[1], (BATCH, BATCH))

        h, noise = lax.scan(layer, x, (w, jax.random.split(KEY, 3)))
        each = weight / jnp.sum(weight) * jnp.mean(h**2, -1)
        rows, _ = lax.scan(lambda c, n: (c + each * n[:, 0], None), jnp.zeros(BATCH), noise)
        columns, _ = lax.scan(lambda c, n: (c + each * n[0], None), jnp.zeros(BATCH), noise)
        return jnp.sum(rows * columns)

    f, args = jax.value_and_grad(loss), masked_arguments()
    _, found = looped(f, args, [False, True, True], 4)
    assert largest_error(found, jax.jit(f)(*args)) < 1e-12


def test_steps_of_a_decoder_with_dropout_that_accumulate_over_calls() -> None:
    """Masked tokens, masks saved for the backward pass, and an update at every second call."""
    loss = decoder(False, 0.8)
    w, x = decoder_arguments()
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.01))
    optimizer = optax.MultiSteps(inner, every_k_schedule=2, accumulator_dtype=jnp.float64)

    def step(w: Any, state: Any, x: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(w, x)
        updates, state = optimizer.update(gradient, state, w)
        return optax.apply_updates(w, updates), state, value

    def state_after(run: Callable[..., Any]) -> list[jax.Array]:
        values = jax.tree.leaves((w, optimizer.init(w)))
        for turn in range(2):
            *values, loss_of_turn = run(*values, jnp.roll(x, turn, 0))
        return [*values, loss_of_turn]

    closed = jax.make_jaxpr(step)(w, optimizer.init(w), x)
    classes = [*[SHARED] * (len(closed.in_avals) - 1), per_example(0)]
    pieces = in_microbatches(closed, classes, BATCH, 4)
    run, plain = (jax.jit(compat.as_function(c)) for c in (pieces, closed))
    assert largest_error(state_after(run), state_after(plain)) < 1e-12
