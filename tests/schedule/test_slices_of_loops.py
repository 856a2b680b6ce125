"""What a loop slices is read from its stack, unless a loop inside reads the slice: then it is copied."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

import jshard


MESH = {"x": 4}
TURNS, LAYERS, ROWS, WIDTH = 3, 5, 8, 16
STACK = jax.ShapeDtypeStruct((TURNS, LAYERS, ROWS, WIDTH), jnp.float32)
STATE = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
SLICE = LAYERS * ROWS * WIDTH * 4


def nested(state: jax.Array, stack: jax.Array) -> jax.Array:
    def turn(h: jax.Array, layers: jax.Array) -> tuple[jax.Array, None]:
        return lax.scan(lambda h, x: (jnp.tanh(h * x), None), h, layers)[0], None

    return lax.scan(turn, state, stack)[0]


def flat(state: jax.Array, stack: jax.Array) -> jax.Array:
    def turn(h: jax.Array, layers: jax.Array) -> tuple[jax.Array, None]:
        for k in range(LAYERS):
            h = jnp.tanh(h * layers[k])
        return h, None

    return lax.scan(turn, state, stack)[0]


def planned(f) -> jshard.Plan:
    whole = (jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec())
    return jshard.shard(f, whole, mesh=jshard.topology("v5e:2x2", MESH)).plan(STATE, STACK)


def slices_of_a_turn(plan: jshard.Plan) -> list[float]:
    return [r.bytes for r in plan.live if r.tensor.startswith("scan xs") and r.bytes >= SLICE]


def test_a_slice_that_a_loop_inside_reads_is_in_memory_beside_its_stack():
    plan = planned(nested)
    assert slices_of_a_turn(plan) == [SLICE]
    assert max(plan.memory.curve) >= TURNS * SLICE + SLICE


def test_other_slices_are_read_from_the_stack():
    plan = planned(flat)
    assert not slices_of_a_turn(plan)
    assert max(plan.memory.curve) < TURNS * SLICE + SLICE
