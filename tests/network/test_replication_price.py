"""The price of repeated products and convolutions: they are sharded over all devices where they can be."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, strategies as st

import jshard
from benchmarks import workloads
from jshard._network.candidates import CandidateCache
from jshard._network.replication_price import unpriced_work
from jshard._program.memory.unfusible import ALL_PRODUCTS


MESH = {"x": 2, "y": 4}


def machine(name: str = "cpu:8", axes: dict[str, int] = MESH):
    return jshard.topology(name, axes, compiles=False)


def over_ideal(plan: jshard.Plan) -> float:
    """Work of one device in products and convolutions, over an even share of it."""
    program = plan.search_again.program
    interner, whole, here = CandidateCache(program, plan.mesh), 0.0, 0.0
    for op, axes in zip(program.operators, plan.decision.candidates, strict=True):
        if op.primitive in ALL_PRODUCTS:
            rule = interner.rule_of(op)[1]
            work = rule.work * math.prod(rule.sizes) * op.repeat
            whole += work
            here += work / math.prod(n for n, f in zip(plan.mesh.sizes, axes, strict=True) if f >= 0)
    return here * plan.mesh.total / whole


@given(
    st.dictionaries(st.integers(1, 10**9), st.integers(1, 20), min_size=1, max_size=30),
    st.integers(2, 512),
)
def test_repeating_all_that_is_free_adds_at_most_a_twentieth(products, devices):
    products = list(products.items())
    free = unpriced_work(products, devices)
    total = sum(w * n for w, n in products)
    repeated = sum(w * n for w, n in products if w <= free)
    assert (total - repeated) / devices + repeated <= 1.05 * total / devices * (1 + 1e-12)


@pytest.mark.parametrize("name", ["mlp-512", "moe", "lm-head", "conv", "lora"])
@pytest.mark.parametrize("level", [0, 2])
def test_no_workload_repeats_a_product(name, level):
    """At sizes where all of the work takes less time than one collective."""
    w = workloads.get(name, small=True, devices=8)
    plan = jshard.shard(w.step, w.in_strategy(8), level=level, mesh=machine()).plan(*w.args)
    assert over_ideal(plan) <= 1.05
    assert plan.cost.optimal


SMALL = [jax.ShapeDtypeStruct((16, 16), "float32")] * 2


def dense(x, w):
    return x @ w


@pytest.mark.parametrize("out", [None, (1, 1)])
def test_a_small_product_is_cut_even_if_its_result_is_gathered(out):
    plan = jshard.shard(dense, out_strategy=out, mesh=machine(), level=2).plan(*SMALL)
    assert over_ideal(plan) == 1 and bool(plan.collectives) == (out is not None)


def test_pins_of_the_product_itself_come_first():
    def pinned(x, w):
        return jshard.op(dense, ((1, 1), (1, 1)))(x, w) @ w

    plan = jshard.shard(pinned, mesh=machine()).plan(*SMALL)
    assert [r.strategy for r in plan.operators if r.primitive == "dot_general"][0] == ((1, 1), (1, 1))
    assert over_ideal(plan) == (8 + 1) / 2


def test_what_does_not_divide_is_cut_as_far_as_it_goes():
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((6, 5), (5, 7))]
    assert over_ideal(jshard.shard(dense, mesh=machine()).plan(*shapes)) == 4


def small_ffn(x, w1, w2):
    return jshard.op(jnp.dot, ((1, 1), (1, 8)))(jnp.tanh(x @ w1), w2)


FFN = [jax.ShapeDtypeStruct((64, 64), "float32")] * 3


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("price", [0, 1000])
def test_propagation_never_beats_a_plan_called_optimal(level, price):
    options = dict(level=level, mesh=machine(axes={"x": 8}), config={"replication_price": price})
    best = jshard.shard(small_ffn, **options).plan(*FFN)
    other = jshard.shard(small_ffn, search="propagation", **options).plan(*FFN)
    assert best.cost.optimal and best.cost.objective <= other.cost.objective
    assert other.cost.price == pytest.approx(price * 2 * 64**3 * 7 / 8 / 1e11, rel=0.01)
    assert best.cost.price == 0.0


def test_without_a_price_the_quickest_plan_repeats_small_products_and_with_it_the_plan_says_what_that_costs():
    cut, quick = (
        jshard.shard(small_ffn, mesh=machine(axes={"x": 8}), config={"replication_price": price}).plan(*FFN)
        for price in (1000, 0)
    )
    assert over_ideal(cut) == 1 and over_ideal(quick) == 4.5
    assert quick.cost.objective < cut.cost.objective
    assert cut.cost.unpriced == quick.cost.objective and quick.cost.unpriced == 0.0
    assert "\n  with products repeated: 6.39 us (replication_price=0)\n" in str(cut)


def test_the_price_of_an_operator_is_counted_from_what_its_own_pins_allow():
    """A pinned product pays nothing for what it must do; a what-if pays the difference."""

    def pinned(x, w):
        return jshard.op(dense, ((1, 1), (1, 1)))(x, w)

    shapes = [jax.ShapeDtypeStruct((64, 64), "float32")] * 2
    assert jshard.shard(pinned, mesh=machine()).plan(*shapes).cost.price == 0.0
    plan = jshard.shard(dense, mesh=machine()).plan(*shapes)
    forced, _ = plan.what_if(**{"dot_general.2": ((1, 1), (1, 1))})
    assert plan.cost.price == 0.0 < forced.cost.price
    assert forced.cost.objective > plan.cost.objective


def test_where_nothing_else_is_possible_products_are_repeated_and_nothing_is_paid_for_it():
    shapes = [jax.ShapeDtypeStruct((7, 7), "float32")] * 2
    plan = jshard.shard(dense, mesh=machine(), level=2).plan(*shapes)
    assert over_ideal(plan) == 8 and plan.cost.price == 0.0 and plan.cost.optimal


def test_a_budget_comes_first():
    """What is said of plans without the price keeps to the budget as well."""

    def gram(x, w):
        return (x.T @ x) @ w

    shapes = [jax.ShapeDtypeStruct((32, 32), "float32")] * 2
    mesh = machine("cpu:4", {"x": 2, "y": 2})
    free = jshard.shard(gram, mesh=mesh, level=1).plan(*shapes)
    plan = jshard.shard(gram, mesh=mesh, memory_budget=math.ceil(free.cost.peak_bytes)).plan(*shapes)
    assert plan.cost.peak_bytes <= free.cost.peak_bytes
    assert plan.cost.bound <= plan.cost.objective
    assert plan.cost.unpriced == 0
