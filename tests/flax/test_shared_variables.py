"""Arguments that share variables of `flax.nnx`: shared inside the sharded function too, as without it and in `nnx.jit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard


def dense() -> nnx.Linear:
    return nnx.Linear(2, 2, rngs=nnx.Rngs(0))


def module_and_its_state(run: Callable) -> list[Any]:
    """A running average that begins as the state of the model itself, which the call then changes."""

    def step(model: nnx.Linear, average: nnx.State, x: jax.Array) -> nnx.State:
        model.bias[...] += x.sum(0)
        return jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, average, nnx.state(model, nnx.Param))

    model = dense()
    average = run(step)(model, nnx.state(model, nnx.Param), jnp.ones((2, 2)))
    return [model.bias[...], average["bias"][...]]


def one_state_twice(run: Callable) -> list[Any]:
    """Two modules merged from one state, one of them changed."""
    graph, state = nnx.split(dense())

    def step(one: nnx.State, other: nnx.State) -> tuple[nnx.State, nnx.State]:
        first, second = nnx.merge(graph, one), nnx.merge(graph, other)
        first.bias[...] += 1.0
        return nnx.state(first), nnx.state(second)

    one, other = run(step)(state, state)
    return [one["bias"][...], other["bias"][...], state["bias"][...]]


def new_states_from_one(run: Callable) -> list[Any]:
    """Nothing is changed in place: the results are apart, and the argument stays."""
    _, state = nnx.split(dense())
    one, other = run(lambda a, b: (jax.tree.map(lambda x: x + 1, a), jax.tree.map(lambda x: x - 1, b)))(
        state, state
    )
    return [one["bias"][...], other["bias"][...], state["bias"][...]]


@pytest.mark.parametrize("case", [module_and_its_state, one_state_twice, new_states_from_one])
def test_variables_that_two_arguments_share(case: Callable[[Callable], list[Any]]) -> None:
    wanted = case(lambda f: f)
    for found in (case(nnx.jit), case(jshard.shard)):
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
    if case is one_state_twice:
        assert float(wanted[1][0]) == 1.0  # both see the change
