"""What the lower-bound memory network counts for fused values that the backward pass computes again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jshard._network.kept_operands import KeptPaths, kept_operands
from jshard._network.memory_network import memory_network
from jshard._program.memory.live_intervals import LowerBoundIntervals
from jshard._program.memory.remat_flow import remat_flow
from tests.helpers.memory_networks import network_of, random_plans, relative_excess


def step(dtype):
    """The gradients of layers whose products read what a normalisation, fused, makes of a residual stream."""

    def norm(x, scale, shift):
        y = x.astype(jnp.float32)
        y = y - y.mean(-1, keepdims=True)
        return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5) * scale + shift).astype(dtype)

    def loss(layers, x):
        for scale, shift, query, value, out in layers:
            y = norm(x, scale, shift)
            x = x + (jnp.tanh(y @ query) * (y @ value)) @ out
        return (x.astype(jnp.float32) ** 2).sum()

    return jax.grad(loss)


def problem_of(rows, width, dtype="float32", layers=3):
    def shape(*dims, dtype=dtype):
        return jax.ShapeDtypeStruct(dims, dtype)

    vector = shape(width, dtype="float32")
    one = (vector, vector, *[shape(width, width)] * 3)
    return network_of(step(jnp.dtype(dtype)), ([one] * layers, shape(8, rows, width)))


@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [(64, 32, "float32"), (64, 32, "bfloat16"), (9, 40, "float32"), (6, 7, "bfloat16")],
)
def test_no_plan_holds_less_than_is_counted_for_what_is_kept(rows, width, dtype):
    problem = problem_of(rows, width, dtype)
    assert max(relative_excess(problem, random_plans(problem.cost_network, 12))) <= 1e-9


def test_a_value_that_products_of_both_passes_read_keeps_a_block_as_it_is_stored():
    """Of each layer, between the two passes; less the share that flows in any case."""
    problem, layers = problem_of(64, 32), 3
    program, mesh = problem.program, problem.topology.mesh
    read_by = [
        [u for u, _ in uses if program.operators[u].primitive == "dot_general"] for uses in program.uses()
    ]
    normed = [t for t, products in enumerate(read_by) if len(products) == 4 and t not in program.inputs]
    assert len(normed) == layers
    live = LowerBoundIntervals(program, problem.liveness, problem.donated)
    stored = [
        t for t, kept in enumerate(problem.liveness.materialized) if kept and not live.counted_elsewhere(t)
    ]
    found = kept_operands(problem, live, stored, *remat_flow(live, stored, mesh.total), 0.0)
    begin, full = live.clock.begin, 8 * 64 * 32 * 4
    for t in normed[1:]:  # the first is made of an argument, which counts as it is
        forward, backward = read_by[t][1], read_by[t][-1]
        kept = found.kept[t]
        assert kept.nbytes == full and kept.counted <= full / mesh.total
        assert begin[forward + 1] <= kept.start < kept.end
        assert begin[backward - 1] <= kept.end <= begin[backward + 1]
    counted = memory_network(problem, lower_bound=True).memory
    assert counted is not None
    spanning = {(k.start, k.end) for k in found.kept.values()}
    assert spanning <= {tuple(interval) for interval in counted.intervals.tolist()}


def test_values_that_are_not_on_a_path_count_as_before():
    paths = KeptPaths({}, {7: (10, 20)})
    assert paths.outside(6, 5, 30) == [(5, 30)]
    assert paths.outside(7, 12, 18) == []
    assert paths.outside(7, 2, 9) == [(2, 9)]
