"""Prices of sorts and cumulative operators: what they grow with, and that a long sort is done over devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jshard
from jshard._core import hardware
from jshard._cost.sorts_and_prefixes import (
    SortedArrays,
    prefix_seconds,
    sort_seconds,
    transform_seconds,
)


ONE = SortedArrays(1, 4, 4, 1)


@pytest.mark.parametrize("chip", ["v5e", "h100", "cpu"])
def test_a_sort_takes_longer_the_longer_it_is_and_as_often_as_it_is_done(chip):
    c = hardware.get(chip)
    lengths = np.array([2.0, 2**10, 2**14, 2**20])
    seconds = sort_seconds(lengths, 2**20, ONE, c)
    assert (np.diff(seconds) >= 0).all() and seconds[-1] > seconds[0]
    assert np.isclose(2 * seconds, sort_seconds(lengths, 2**21, ONE, c)).all()
    more = sort_seconds(lengths, 2**20, SortedArrays(2, 8, 12, 3), c)
    assert (more >= seconds).all() and ((more > seconds).all() or chip == "cpu")


def test_a_sorting_network_has_a_round_for_each_pair_of_levels():
    c = hardware.get("v5e")
    rounds = sort_seconds(np.array([2.0, 4, 8, 2**20]), 2**20, ONE, c) / sort_seconds(2, 2**20, ONE, c)
    assert rounds.tolist() == pytest.approx([1, 3, 6, 210])


def test_a_plan_counts_them():
    machine = jshard.topology("v5e:1x1", {"x": 1}, compiles=False)
    x = jax.ShapeDtypeStruct((1 << 20,), "float32")

    def seconds(fn) -> float:
        return jshard.shard(fn, mesh=machine, level=2).plan(x).cost.compute

    assert seconds(lambda x: lax.sort(x, is_stable=False)) == pytest.approx(
        float(sort_seconds(1 << 20, 1 << 20, ONE, machine.hardware)), abs=3e-6
    )
    assert seconds(lambda x: lax.cumsum(x)) == pytest.approx(
        float(prefix_seconds(1 << 20, machine.hardware)), abs=3e-6
    )
    assert float(prefix_seconds(1 << 20, hardware.get("h100"))) == 0


def test_a_long_sort_is_done_over_devices_and_a_short_one_is_not():
    machine = jshard.topology("v5e:4x4", {"x": 16}, compiles=False)

    def permutes(n: int) -> int:
        f = jshard.shard(lambda x: jnp.sort(2 * x) + 1, mesh=machine, level=2)
        plan = f.plan(jax.ShapeDtypeStruct((n,), "float32"))
        return sum(c.kind == "permute" for c in plan.collectives)

    assert permutes(1 << 22) > 0 == permutes(1 << 10)


def test_a_transform_takes_what_its_products_read_and_write():
    """Of 128 points it is one product, of 128 x 128 two; each real one is as long as the complex one of its length."""
    c = hardware.get("v5e")
    one, two = (float(transform_seconds((n,), 2**20, 8, c)) for n in (128, 128 * 128))
    assert two == pytest.approx(2 * one) and one == pytest.approx(4 * 8 * 2**20 / c.hbm_bandwidth)
    assert float(transform_seconds((128, 128), 2**20, 8, c)) == pytest.approx(two)

    machine = jshard.topology("v5e:1x1", {"x": 1}, compiles=False)

    def plan(fn, *shape):
        return jshard.shard(fn, mesh=machine, level=2).plan(jax.ShapeDtypeStruct(shape, "float32"))

    real = plan(lambda x: jnp.abs(jnp.fft.rfft(x)), 768, 16384)
    assert real.cost.compute > float(transform_seconds((16384,), 768 * 2 * 8193, 8, c)) * 0.99
    # The argument, half a complex array, and a whole one while the transform runs.
    assert real.cost.peak_bytes == pytest.approx(768 * (16384 * 4 + 8193 * 8 + 16384 * 8), rel=0.01)
