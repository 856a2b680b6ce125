"""No plan gathers zeros or positions from their pieces: compilers make them whole."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jshard
from jshard._network.made_of_constants import made_of_constants
from jshard._program.trace import build


def _ranks(x: Any) -> Any:
    """Zeros that are written over, far from where they are made, and positions that are read whole."""
    zeros = jnp.zeros(x.size, "int32")
    return zeros.at[jnp.argsort(x)].set(jnp.arange(x.size, dtype="int32"))


def test_with_least_memory_nothing_made_of_constants_is_sent() -> None:
    x = jnp.asarray(np.random.default_rng(3).normal(size=400), "float32")
    mesh = jax.make_mesh((8,), ("t",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jshard.shard(_ranks, mesh=mesh, level=1, in_strategy=((8,),))
    plan = f.plan(x, verify=True)
    assert not {c.tensor.split(".")[0] for c in plan.collectives if c.kind == "all_gather"} & {"iota"}
    assert plan.verification is not None and plan.verification.ok, str(plan.verification)
    np.testing.assert_array_equal(f(x), _ranks(x))


def test_what_depends_on_an_argument_or_is_expensive_is_not_among_them() -> None:
    def f(x: Any) -> Any:
        ones = jnp.ones((4, 8))
        return ones * x, jnp.cumsum(ones, 1), ones @ ones.T, jnp.exp(ones)

    program = build(jax.make_jaxpr(f)(1.0), name="f", input_names=["x"])
    names = {program.operators[program.use_def.def_op[t]].primitive for t in made_of_constants(program)}
    assert names == {"broadcast_in_dim", "exp", "transpose"}
