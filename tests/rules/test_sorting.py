"""`sort` along a cut dimension by a sorting network, and `searchsorted` in a cut array: values, gradients, bytes."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jshard
from jshard._core import jaxcompat as compat
from jshard._program.equation_bodies import bodies_of
from jshard._program.searchsorted_primitive import with_searches
from jshard._rules.sorting_network import rounds
from tests.helpers import rules_examples as examples
from tests.laws import rules_validator as validator


def on_devices(n: int) -> Any:
    return jax.make_mesh((n,), ("t",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:n])


@pytest.mark.parametrize("n", range(1, 10))
def test_the_network_sorts_zeros_and_ones(n: int) -> None:
    """A network that sorts every sequence of zeros and ones sorts all (Knuth, 5.3.4, the 0-1 principle)."""
    for bits in itertools.product((0, 1), repeat=n):
        x = list(bits)
        for one in rounds(n):
            assert len({i for pair in one.pairs for i in pair}) == 2 * len(one.pairs)
            for i, j in one.pairs:
                x[i], x[j] = min(x[i], x[j]), max(x[i], x[j])
        assert x == sorted(bits)


def _sorts() -> list[validator.Case]:
    x = jnp.round(3 * examples.floats(3, 16, 2)).at[0, 3].set(jnp.nan).at[1, 5, 1].set(-0.0)  # with ties
    i, h = examples.ints(3, 16, 2, low=0, high=3, dtype=np.int8), x.astype("bfloat16")

    def run(x: Any, i: Any, h: Any) -> Any:
        keys = [jnp.sort(x, 1), jnp.sort(h, 0), lax.sort((i, x), dimension=1, num_keys=2, is_stable=False)]
        stable = [jnp.argsort(x, 1), jnp.argsort(-x, 1, descending=True), lax.sort((i, x), dimension=1)]
        mixed = [lax.sort((i > 0, i, x, h), dimension=1, num_keys=k) for k in (1, 2)]
        return keys, stable, mixed

    return [c for c in validator.cases(run, x, i, h) if c.op.primitive == "sort"]


@pytest.mark.parametrize("devices, vma", [(2, False), (8, True), (88, False)])
def test_blocks_that_are_merged_and_split_are_those_of_the_sorted_whole(devices: int, vma: bool) -> None:
    tried, wrong = validator.check(_sorts(), devices, limit=4, vma=vma, seed=devices)
    assert not wrong, "\n".join(wrong[:3])
    assert tried > 12


@pytest.mark.parametrize("devices", [4, 8])
def test_with_least_memory_it_is_sorted_by_blocks(devices: int) -> None:
    """Values, gradients and emitted bytes; the gradient takes positions along, and those of a stable sort are keys."""
    n = 4096
    with jax.enable_x64(True):
        args = [jnp.asarray(examples.floats(n, seed=seed), jnp.float64) for seed in (devices, 9)]
        step = jax.value_and_grad(lambda x, w: (jnp.sort(x * w) * jnp.arange(n)).sum(), (0, 1))
        pins = ((devices,), (devices,))
        f = jshard.shard(step, mesh=on_devices(devices), in_strategy=pins, level=1)
        plan = f.plan(*args, verify=True)
        assert plan.verification is not None and plan.verification.ok
        sent = [c for c in plan.collectives if c.kind == "permute"]
        assert len(sent) == 3 * len(rounds(devices)) and {c.bytes for c in sent} == {
            8 * n / devices,
            4 * n / devices,
        }
        wanted = jax.jit(step)(*args)
        for got, want in zip(jax.tree.leaves(f(*args)), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-10)
        outer = jax.grad(lambda x, w: f(x, w)[0])(*args)
        np.testing.assert_allclose(outer, wanted[1][0], rtol=1e-10)


def test_a_cut_sort_sends_a_block_in_each_round() -> None:
    mesh = jshard.topology("v5e:4x4", {"t": 16})
    f = jshard.shard(lambda x: jnp.sort(x), mesh=mesh, in_strategy=((16,),), level=1)
    plan = f.plan(jax.ShapeDtypeStruct((1 << 20,), jnp.float32))
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("permute", (1 << 18))] * 10
    assert plan.cost.peak_bytes <= 4 * (1 << 18)  # of 16 blocks: its own, one that arrives, and their pairs


def test_what_nobody_reads_is_not_sorted_along() -> None:
    """The derivative of `jnp.argsort` takes positions along for a gradient that is not there."""

    def loss(x: Any, w: Any) -> Any:
        return (x[jnp.argsort(w)] * jnp.arange(x.size)).sum()

    x = jnp.asarray(examples.floats(4096))
    step = jax.value_and_grad(loss)
    f = jshard.shard(step, mesh=on_devices(8), in_strategy=((8,), (8,)), level=1)
    plan = f.plan(x, x[::-1], verify=True)
    assert plan.verification is not None and plan.verification.ok, str(plan.verification)
    sent = [c for c in plan.collectives if c.kind == "permute"]
    assert len(sent) == 3 * len(
        rounds(8)
    )  # keys, the positions that are read, and those that tell equal keys apart
    for got, want in zip(jax.tree.leaves(f(x, x[::-1])), jax.tree.leaves(step(x, x[::-1])), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def _searched(a: Any, q: Any) -> Any:
    sides = [jnp.searchsorted(a, q, side=side) for side in ("left", "right")]
    methods = [jnp.searchsorted(a, q, method=m) for m in ("scan_unrolled", "sort", "compare_all")]
    many = (
        jax.vmap(lambda v: jnp.searchsorted(a, v))(q),
        jax.vmap(lambda b: jnp.searchsorted(b, q[0]))(jnp.stack([a, a + 1])),
    )
    return sides, methods, many, jnp.digitize(q, a), (q * jnp.searchsorted(a, q)).sum()


@pytest.mark.parametrize("pins", [((8,), None), (None, (4, 2)), ((2,), (4, 1))], ids=str)
def test_searches_in_a_cut_array(pins: Any) -> None:
    a = jnp.sort(jnp.asarray(examples.ints(64, low=0, high=30), "float32")).at[-2:].set(jnp.nan)
    q = jnp.asarray(examples.ints(4, 16, low=-2, high=33), "float32").at[0, 0].set(jnp.nan)
    f = jshard.shard(_searched, mesh=on_devices(8), in_strategy=pins)
    plan = f.plan(a, q, verify=True)
    assert plan.verification is not None and plan.verification.ok
    assert [r.primitive for r in plan.operators].count("searchsorted") >= 4
    for got, want in zip(jax.tree.leaves(f(a, q)), jax.tree.leaves(jax.jit(_searched)(a, q)), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    got, want = (
        jax.jit(jax.grad(lambda q, g=g: jnp.nansum(g(a, q)[-1])))(q.at[0, 0].set(1.0)) for g in (f, _searched)
    )
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("method", ["scan", "sort"])
def test_a_search_in_a_cut_array_adds_counts(method: str) -> None:
    mesh = jshard.topology("v5e:4x4", {"t": 16})
    f = jshard.shard(lambda a, q: jnp.searchsorted(a, q, method=method), mesh=mesh, in_strategy=((16,), None))
    plan = f.plan(jax.ShapeDtypeStruct((1 << 24,), "float32"), jax.ShapeDtypeStruct((1024,), "float32"))
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("reduce_scatter", 15 * 1024 / 16 * 4)]


@pytest.mark.parametrize("method", ["scan", "sort"])
@pytest.mark.parametrize("kind", ["float32", "int8", "bool"])
@pytest.mark.parametrize("size, devices", [(331, 8), (13, 4)])
def test_searches_in_an_array_whose_size_no_cut_divides(
    method: str, kind: str, size: int, devices: int
) -> None:
    """Queries as great as the padding, or NaN, count the elements of the array alone."""
    if kind == "bool":
        a, q = jnp.arange(size) > size // 2, jnp.array([[True, False], [True, True]])
    else:
        a = jnp.sort(jnp.asarray(examples.ints(size, low=-20, high=120), kind))
        great = jnp.nan if kind == "float32" else 127
        a = a.at[-2:].set(great)
        q = jnp.asarray(examples.ints(4, 7, low=-21, high=122), kind).at[0, :2].set(great)

    def fn(a: Any, q: Any) -> Any:
        sides = [jnp.searchsorted(a, q, side=side, method=method) for side in ("left", "right")]
        return sides, (q.astype("float32") * sides[0]).sum()

    f = jshard.shard(fn, mesh=on_devices(devices), in_strategy=((devices,), None), config={"pad": True})
    plan = f.plan(a, q, verify=True)
    assert plan.padding and plan.verification is not None and plan.verification.ok, str(plan.verification)
    assert not [c for c in plan.collectives if c.kind == "all_gather" and c.tensor == "a"]
    for got, want in zip(jax.tree.leaves(f(a, q)), jax.tree.leaves(jax.jit(fn)(a, q)), strict=True):
        np.testing.assert_array_equal(got, want)
    if kind == "float32":
        q = jnp.nan_to_num(q)
        got, want = (jax.jit(jax.grad(lambda q, g=g: g(a, q)[1]))(q) for g in (f, fn))
        np.testing.assert_array_equal(got, want)


def test_only_searches_of_one_array_are_found() -> None:
    def searchsorted(a: Any, q: Any) -> Any:
        return q * a[0] < a[1]

    def inside(jaxpr: Any) -> list[str]:
        return [
            n for e in jaxpr.eqns for n in (e.primitive.name, *(m for b in bodies_of(e) for m in inside(b)))
        ]

    def names(f: Any, *args: Any) -> list[str]:
        return inside(with_searches(compat.open_jaxpr(jax.make_jaxpr(f)(*args))[0]))

    a, q = jnp.arange(8.0), jnp.ones(3)
    assert "searchsorted" not in names(jax.jit(searchsorted), a, q)
    assert "searchsorted" not in names(jax.vmap(jnp.searchsorted), jnp.stack([a, a]), jnp.stack([q, q]))
    by_sort = functools.partial(jnp.searchsorted, method="sort")
    assert "searchsorted" in names(by_sort, a, q) and "searchsorted" in names(by_sort, a, q.reshape(1, 3))
    arrays, queries = jnp.stack([a, a]), jnp.stack([q, q])
    assert "searchsorted" not in names(jax.vmap(by_sort), arrays, queries)
    assert "searchsorted" not in names(jax.vmap(by_sort, (0, None)), arrays, q)
    opened = compat.open_jaxpr(jax.make_jaxpr(lambda x: jnp.sort(x))(a))[0]
    assert with_searches(opened) is opened


def test_masks_of_distinct_elements_of_a_cut_array() -> None:
    """`jnp.unique` with a size: sort, comparison with the element before, positions by a running sum."""

    def f(x: Any) -> Any:
        values, counts = jnp.unique(x, size=20, fill_value=-1, return_counts=True)
        ordered = jnp.sort(x)
        return values, counts, jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])

    x = examples.ints(4096, low=0, high=17)
    g = jshard.shard(f, mesh=on_devices(8), in_strategy=((8,),), level=2)
    plan = g.plan(x, verify=True)
    assert plan.verification is not None and plan.verification.ok
    for got, want in zip(g(x), f(x), strict=True):
        np.testing.assert_array_equal(got, want)
