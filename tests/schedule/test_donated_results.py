"""Results that are gathered over donated arguments: written by an elementwise operator, one after the other, and counted."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import jshard
from jshard._schedule.donated_results import gathered_over_arguments
from jshard._schedule.peak import peak_reference
from jshard._schedule.peak_vectorized import peak_of_arrays
from jshard._schedule.schedule import assignment_of, schedule
from tests.helpers.memory_networks import network_of, random_plans


S = jax.ShapeDtypeStruct
MESH = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:8])
D = 1024  # weights of 4 MB; stacks of four


def step(p, x):
    """New weights of stacks that a scan multiplies by."""

    def loss(p):
        y = [lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, q)[0] for q in p]
        return jnp.sum(sum(y) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(loss)(p))


def straight(p, x):
    """The same without a loop."""
    grads = jax.grad(lambda p: sum(jnp.sum(jnp.tanh(x @ w) ** 2) for w in p))(p)
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads)


def sharded(f, lead, **options):
    whole = [P(None, None, None) if lead else P(None, None)] * 2
    return jshard.shard(f, (whole, P("x", None)), whole, mesh=MESH, **options)


def of_predicates(text):
    """Barriers behind which the predicate of a selection stands."""
    return re.findall(r"optimization_barrier .* : tensor<i1>", text)


def of_pairs(text):
    """Barriers of two values, so that the second is selected after the first; a reduce-scatter has one of its block."""
    return re.findall(r"optimization_barrier %\w+, %\w+ :", text)


@pytest.mark.parametrize("f, lead", [(step, (4,)), (straight, ())])
def test_the_buffer_of_a_gather_is_counted_beside_the_argument(f, lead):
    args = [S((*lead, D, D), "float32")] * 2, S((64, D), "float32")
    weight = 4 * D * D * (4 if lead else 1)
    rows = sharded(f, lead, hardware="tpu-v5e", donate_argnums=0).plan(*args).collectives
    assert sum(c.kind == "all_gather" and c.bytes >= weight * 7 / 8 for c in rows) == 2
    peak = {
        (chip, donated): sharded(f, lead, hardware=chip, donate_argnums=donated).plan(*args).cost.peak_bytes
        for chip in ("tpu-v5e", "h100")
        for donated in (0, None)
    }
    # Two weights as arguments, one gathered; not donated, the two results beside the arguments.
    assert 3 * weight <= peak["tpu-v5e", 0] <= 3.5 * weight
    assert peak["h100", 0] < 3 * weight <= 4 * weight <= peak["tpu-v5e", None] <= 4.5 * weight


def test_both_walks_count_the_same():
    args = [S((256, 256), "float32")] * 3, S((64, 256), "float32")
    problem = network_of(straight, args, donate_argnums=0)
    counted = 0
    for x in random_plans(problem.cost_network, 12, 5):
        made = schedule(assignment_of(problem, tuple(x.tolist())))
        assert made.arrays is not None
        arrays = peak_of_arrays(made.arrays, problem.liveness, frozenset(problem.donated)).peak
        walked = peak_reference(made, problem.liveness, problem.donated).peak
        assert arrays == pytest.approx(walked)
        counted += bool(gathered_over_arguments(made, problem.donated))
    assert counted >= 3


def test_such_results_are_selected_one_after_the_other():
    rng = np.random.default_rng(2)
    p = [rng.standard_normal((4, D, D)).astype("float32") / 32 for _ in range(2)]
    x = rng.standard_normal((64, D)).astype("float32")
    want = jax.jit(step)(p, x)
    f = sharded(step, (4,), hardware="tpu-v5e", donate_argnums=0)
    # A barrier for each predicate, and one between the two.
    text = f.lower(p, x).as_text()
    assert len(of_predicates(text)) == 2 and len(of_pairs(text)) == 1
    for a, b in zip(want, f(jax.tree.map(jnp.array, p), x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_results_that_are_not_donated_or_small_are_left_alone():
    args = [S((4, D, D), "float32")] * 2, S((64, D), "float32")
    text = sharded(step, (4,), hardware="tpu-v5e").lower(*args).as_text()
    assert not of_predicates(text) and not of_pairs(text)
