"""What the epilogue of a product costs: nothing beside a long product in its layout, else a kernel of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, ShapeDtypeStruct as S, lax

import jshard
from jshard._core import hardware
from tests.laws.law_costs import both_costs, close, random_assignments, searched


N = 4096
ARRAY = S((N, N), "bfloat16")
V5E = hardware.get("v5e")
MESH = {"x": 8}


def update(p, x, g):
    return p - 0.1 * (x.T @ g).astype(p.dtype)


def compute(f, in_strategy, *args, out=None) -> float:
    mesh = jshard.topology("v5e:2x4", MESH, compiles=False)
    return jshard.shard(f, in_strategy, level=2, mesh=mesh, out_strategy=out).plan(*args).cost.compute


def test_an_update_in_the_layout_of_its_gradient_is_in_the_product():
    columns = P(None, "x")
    alone = compute(lambda x, g: x.T @ g, (None, columns), ARRAY, ARRAY, out=columns)
    updated = compute(update, (columns, None, columns), ARRAY, ARRAY, ARRAY, out=columns)
    assert updated == pytest.approx(alone, rel=0.01)


def test_an_update_after_a_sum_over_devices_is_a_kernel_of_its_own():
    """It reads the parameter and the sum and writes, each device an eighth."""
    rows, columns = P("x", None), P(None, "x")
    alone = compute(lambda x, g: x.T @ g, (rows, rows), ARRAY, ARRAY, out=columns)
    updated = compute(update, (columns, rows, rows), ARRAY, ARRAY, ARRAY, out=columns)
    assert updated - alone >= 3 * N * N * 2 / 8 / V5E.hbm_bandwidth


def test_the_layout_of_an_update_is_not_free():
    """Whole on each device it takes nearly eight times as long as in eighths, where the gradient is not laid out so."""
    mesh = jshard.topology("v5e:2x4", MESH, compiles=False)
    with searched() as found:
        jshard.shard(update, (None, P("x"), P("x")), level=2, mesh=mesh).plan(ARRAY, ARRAY, ARRAY)
    built, _ = found.problems[0]
    ((edge, charged),) = [(e, c) for e, c in built.epilogue_charges.items() if c[0].charge.table >= 0]
    target = built.tensor_edges.layouts[int(built.tensor_edges.target_layouts[edge])]
    source = built.tensor_edges.layouts[int(built.tensor_edges.source_layouts[edge])]
    seconds = built.cost_tables.charge_seconds(charged[0].charge, source, target)
    by_shards = {
        lay.pieces(built.topology.mesh): s for lay, s in zip(target.layouts, seconds.alone[0], strict=True)
    }
    assert by_shards[1] > 6 * by_shards[8] > 0


@pytest.mark.parametrize("level", [0, 2])
def test_network_and_schedule_agree_on_epilogues_inside_a_scan(level):
    """Casts, a nonlinear epilogue, maxima of its result, and an update with two readers of the gradient."""

    def f(w, m, x):
        def layer(x, w):
            y = jnp.tanh(x @ w.astype("bfloat16")).astype("float32")
            return (y - jnp.max(y, -1, keepdims=True)).astype("bfloat16"), y

        x, ys = lax.scan(layer, x, w)
        g = (x.T @ x).astype("float32")
        m = 0.9 * m + g
        return w[0] - 0.1 * m, m, jnp.sum(ys * ys)

    w, m, x = S((4, 256, 256), "float32"), S((256, 256), "float32"), S((512, 256), "bfloat16")
    mesh = jshard.topology("v5e:2x4", {"x": 2, "y": 4}, compiles=False)
    with searched() as found:
        plan = jshard.shard(f, (None, None, P("x")), level=level, mesh=mesh).plan(w, m, x)
    built, assignment = found.problems[0]
    assert built.epilogue_charges and plan.cost.optimal
    for states in random_assignments(built, assignment, np.random.default_rng(level), 12):
        assert close(*both_costs(built, states))


def cross_entropy(x, w, labels):
    """The gradient of a loss over labels, which sets one element a row of an array as large as the logits."""

    def loss(w):
        log_p = jax.nn.log_softmax((x @ w).astype("float32"))
        return -jnp.take_along_axis(log_p, labels[:, None], axis=-1).mean()

    return jax.grad(loss)(w)


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("mesh", [{"x": 8}, {"x": 2, "y": 4}])
def test_one_hot_rows_are_computed_in_the_layout_of_their_reader(level, mesh):
    """Cut along the classes, not whole with a slice of them read: compilers would write the whole."""
    args = S((2048, 1024), "bfloat16"), S((1024, 32_000), "bfloat16"), S((2048,), "int32")
    columns = P(None, tuple(mesh))
    machine = jshard.topology("v5e:2x4", mesh, compiles=False)
    plan = jshard.shard(cross_entropy, (None, columns, None), level=level, mesh=machine).plan(*args)
    (row,) = [r for r in plan.operators if r.primitive == "scatter-add"]
    cut = [d for d, axes in enumerate(row.results[0].dims) if axes]
    assert cut == [1] and plan.cost.gap < 0.001
    assert plan.cost.peak_bytes < 2 * 2048 * 32_000 * 4 / 2


@pytest.mark.parametrize("level", [0, 2])
def test_one_hot_rows_that_are_sliced_are_written_whole(level):
    """In the network as in the schedule, by the devices that compute them, beside what the slice holds."""
    args = S((256, 128), "bfloat16"), S((128, 4096), "bfloat16"), S((256,), "int32")
    machine = jshard.topology("v5e:2x4", {"x": 2, "y": 4}, compiles=False)
    with searched() as found:
        jshard.shard(cross_entropy, (None, P(None, "x"), None), level=level, mesh=machine).plan(*args)
    built, chosen = found.problems[0]
    one_hot = next(op for op in built.program.operators if op.primitive == "scatter-add")
    edges = [e for e, c in built.epilogue_charges.items() if c[0].root == one_hot.id]
    table = built.cost_network.pairwise[built.cost_network.edge_table[edges[0]]]
    assert table[0].max() >= 256 * 4096 * 4 / V5E.hbm_bandwidth and table.min() == 0.0
    for assignment in random_assignments(built, chosen, np.random.default_rng(level), 30):
        assert close(*both_costs(built, assignment))
