"""Seconds of kernels: rates of products, padding to tiles, the vector unit."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, ShapeDtypeStruct as S

import jshard
from jshard._core import hardware
from jshard._core.layout import MeshAxes
from jshard._network.kernel_seconds import padding_of_product, product_rate
from jshard._rules.primitives.dot_general import dot_general
from jshard._rules.registry import OpView


V5E = hardware.get("v5e")


def product(m: int, k: int, n: int, dtype: str = "bfloat16", precision=None) -> OpView:
    numbers = (((1,), (0,)), ((), ()))
    params = {"dimension_numbers": numbers, "precision": precision}
    return OpView("dot_general", params, (S((m, k), dtype), S((k, n), dtype)), (S((m, n), "float32"),))


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ((1024, 1024, 1024), 1.0),
        ((1024, 64, 1024), 2.0),  # half of the rows of the unit
        ((1024, 1024, 64), 1.0),  # 64 of the sublanes' side
        ((12, 1024, 1024), 16 / 12),
        ((1, 1024, 1024), 8.0),
        ((100, 1024, 100), 128 / 100 * 104 / 100),
    ],
)
def test_two_sizes_count_in_tiles_and_the_third_in_sublanes(sizes, expected):
    op = product(*sizes)
    mesh, whole = MeshAxes(("x",), (8,)), np.array([[-1]])
    found = padding_of_product(op, dot_general(op), whole, mesh, V5E.units)
    assert found == pytest.approx([expected])
    assert padding_of_product(op, dot_general(op), whole, mesh, hardware.get("h100").units) == [1.0]


def test_what_counts_is_the_block_of_a_device():
    """1024 columns over eight devices fill a tile, over sixteen half of one; then rows take the tile's place."""
    op, mesh = product(8, 1024, 1024), MeshAxes(("x", "y"), (8, 2))
    codes = np.array([[2, -1], [2, 2]])
    assert padding_of_product(op, dot_general(op), codes, mesh, V5E.units) == pytest.approx([1.0, 2.0])


def test_products_run_at_the_rate_of_their_operands():
    rate = {d: product_rate(product(8, 8, 8, d), V5E) for d in ("int8", "bfloat16", "float32")}
    assert rate["int8"] == 2 * rate["bfloat16"] == 2 * rate["float32"]
    highest = product_rate(product(8, 8, 8, "float32", (jax.lax.Precision.HIGHEST,) * 2), V5E)
    assert rate["float32"] == 6 * highest
    assert product_rate(product(8, 8, 8, "bfloat16", jax.lax.Precision.HIGHEST), V5E) == rate["bfloat16"]


def test_a_chain_of_many_operations_is_bound_by_the_vector_unit():
    """Forty polynomial terms on bfloat16 take longer than to read and write them; on a GPU's figures they do not."""

    def f(x):
        y = x
        for _ in range(40):
            y = y * x + 1
        return y

    x = S((8192, 1024), "bfloat16")
    for name, longer in (("v5e", True), ("h100", False)):
        mesh = jshard.topology(f"{name}:1x8" if name == "h100" else "v5e:2x4", {"x": 8}, compiles=False)
        chip = hardware.get(name)
        moved = 2 * 2 * 1024 * 1024 / chip.hbm_bandwidth
        seconds = jshard.shard(f, (P("x"),), level=2, mesh=mesh).plan(x).cost.compute
        assert (seconds > 2 * moved) if longer else seconds == pytest.approx(moved, rel=0.2)


def test_an_epilogue_after_a_partial_sum_is_a_kernel_of_its_own():
    """It waits for the sum, of which each device has an eighth: that is written and read once more."""

    def f(x, w):
        return jax.nn.relu(x @ w)

    x, w = S((4096, 4096), "bfloat16"), S((4096, 4096), "bfloat16")
    mesh = jshard.topology("v5e:2x4", {"x": 8}, compiles=False)
    columns = jshard.shard(f, (None, P(None, "x")), level=2, mesh=mesh).plan(x, w)
    rows = jshard.shard(f, (P(None, "x"), P("x", None)), level=2, mesh=mesh, out_strategy=P()).plan(x, w)
    chip = hardware.get("v5e")
    assert rows.cost.compute - columns.cost.compute > 4096 * 4096 * 2 * 2 / 8 / chip.hbm_bandwidth


def test_a_chip_without_units_costs_memory_alone():
    bare = hardware.register(dataclasses.replace(V5E, name="tpu-bare", units=type(V5E.units)()))

    def f(x):
        return jnp.exp(x) * 2

    x = S((8192, 1024), "bfloat16")
    mesh = jshard.topology("v5e:2x4", {"x": 8}, compiles=False)
    with_units = jshard.shard(f, (P("x"),), level=2, mesh=mesh).plan(x).cost.compute
    without = jshard.shard(f, (P("x"),), level=2, mesh=mesh, hardware=bare.name).plan(x).cost.compute
    moved = 2 * 2 * 1024 * 1024 / V5E.hbm_bandwidth
    assert without == pytest.approx(moved, rel=0.01) and with_units > without


@pytest.mark.parametrize("factor", (1.0, 3.0))
def test_written_bytes_count_as_often_as_the_chip_says(factor):
    """One array is read and one is written; a sum writes next to nothing."""
    cpu = hardware.get("cpu")
    units = dataclasses.replace(cpu.units, write_factor=factor)
    chip = hardware.register(dataclasses.replace(cpu, name=f"cpu-writes-{factor}", units=units))

    def seconds(f) -> float:
        mesh = jshard.topology("cpu:8", {"x": 8})
        made = jshard.shard(f, in_strategy=((8, 1),), mesh=mesh, hardware=chip.name, level=2)
        return made.plan(S((1024, 512), "float32")).cost.compute

    array = 1024 * 512 * 4 / 8 / cpu.hbm_bandwidth
    assert seconds(lambda x: x * 2) == pytest.approx((1 + factor) * array)
    assert seconds(lambda x: x.sum(1)) == pytest.approx(array, rel=0.01)
