"""Products and convolutions are cut over all devices where they can be, and repeated only where somebody asks."""

from __future__ import annotations

import math

import jax
import pytest
from hypothesis import given, strategies as st

import jshard
from benchmarks import workloads
from jshard._errors import SearchError
from jshard._plan import make
from jshard._plan.spread import PRODUCTS, free_of
from jshard._plan.states import Interner


MESH = {"x": 2, "y": 4}


def machine(name: str = "cpu:8", axes: dict[str, int] = MESH):
    return jshard.topology(name, axes, compiles=False)


def over_ideal(plan: jshard.Plan) -> float:
    """Work of one device in products and convolutions, over an even share of it."""
    program = plan.search_again.program
    interner, whole, here = Interner(program, plan.mesh), 0.0, 0.0
    for op, axes in zip(program.operators, plan.decision.candidates, strict=True):
        if op.primitive in PRODUCTS:
            rule = interner.rule(op)[1]
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
    free = free_of(products, devices)
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


SMALL = [jax.ShapeDtypeStruct((8, 8), "float32")] * 2


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


def test_where_nothing_else_is_possible_the_plan_says_so(monkeypatch):
    real, seen = make.solve, []

    def impossible_at_first(network, **options):
        seen.append(network)
        if len(seen) == 1:
            raise SearchError("nothing")
        return real(network, **options)

    monkeypatch.setattr(make, "solve", impossible_at_first)
    plan = jshard.shard(dense, out_strategy=(1, 1), mesh=machine(), level=2).plan(*SMALL)
    assert (
        over_ideal(plan) == 8
        and plan.steps[-1] == "the pins leave only plans that repeat products or scatter free results"
    )
    assert seen[0].states(2) < seen[1].states(2)


def test_a_budget_comes_first():
    """Level 1 may scatter a free result, and has less in memory by it; so has a plan that is told to fit there."""

    def gram(x, w):
        return (x.T @ x) @ w

    shapes = [jax.ShapeDtypeStruct((32, 32), "float32")] * 2
    free = jshard.shard(gram, mesh=machine(), level=1).plan(*shapes)
    plan = jshard.shard(gram, mesh=machine(), memory_budget=math.ceil(free.cost.peak_bytes)).plan(*shapes)
    assert plan.cost.peak_bytes <= free.cost.peak_bytes
    assert plan.cost.bound <= plan.cost.objective
    assert plan.steps[-1] == "the budget left only plans that repeat products or scatter free results"


def test_why_tells_what_repeating_would_save():
    plan = jshard.shard(dense, out_strategy=(1, 1), mesh=machine(), level=2).plan(*SMALL)
    text = str(plan.why("dot_general.2"))
    assert "(2) products are computed several times over: a plan does so only when asked to" in text
