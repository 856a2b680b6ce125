"""`why`: a plan forced to an alternative costs what is listed for it; `diff` and `what_if` state what changed."""

from __future__ import annotations

import re

import jax
import pytest

import jshard
from jshard._core.errors import MemoryBudgetError
from jshard._core.messages import short_source
from jshard._plan.replan import Replanner
from tests.helpers.report_plans import f32, mesh, plan


CASES = [
    ("dense", "w"), ("dense", "dot_general.3"), ("dense", "result"), ("ffn", "b1"), ("ffn", "dot_general.5"),
    ("scan", "w"), ("scan", "dot_general.4"), ("scan", "scan carry 0"), ("pinned", "w1"),
]  # fmt: skip


@pytest.mark.parametrize("name, what", CASES)
def test_forcing_an_alternative_costs_what_why_said(name, what):
    p = plan(name)
    why = p.why(what)
    possible = [a for a in why.alternatives if a.cost is not None]
    assert len(possible) >= 2 and sum(a.chosen for a in why.alternatives) == 1
    for a in possible:
        forced, difference = p.what_if(**{what: a.cuts})
        assert forced.cost.objective == a.cost
        cost = next(f for f in difference.figures if f.name == "cost")
        assert (cost.before, cost.after) == (p.cost.objective, a.cost)


def test_the_cases_are_fifty_choices():
    assert sum(a.cost is not None for n, w in CASES for a in plan(n).why(w).alternatives) >= 50


@pytest.mark.parametrize("name, what", [c for c in CASES if c[1] != "result"])
def test_nothing_forced_is_better_than_the_plan_and_the_chosen_costs_the_same(name, what):
    p = plan(name)
    for a in p.why(what).alternatives:
        if a.cost is not None:
            assert a.cost >= p.cost.objective * (1 - 1e-9)
        if a.chosen:
            assert a.cost == pytest.approx(p.cost.objective, rel=1e-9)


def test_forcing_an_argument_is_what_in_strategy_does():
    p = plan("dense")
    for a in p.why("w").alternatives:
        if a.cost is not None:
            from tests.helpers.models import dense_relu

            own = jshard.shard(dense_relu, ((4, 2), a.cuts, None), mesh=mesh(4, 2))
            assert own.plan(f32(32, 128), f32(128, 10), f32(10)).cost.objective == pytest.approx(
                a.cost, rel=1e-12
            )


def test_a_file_and_line_names_the_operator_written_there():
    p = plan("dense")
    product = next(r for r in p.operators if r.primitive == "dot_general")
    line = short_source(product.source)
    assert p.why(line) == p.why(product.name)
    forced, _ = p.what_if(**{line: product.strategy})
    assert forced.cost.objective == pytest.approx(p.cost.objective)
    with pytest.raises(jshard.ShardError, match="has no argument, result, tensor or operator 'nowhere.py:1'"):
        p.why("nowhere.py:1")


def test_what_if_prints_the_difference_and_a_plan_is_one_line():
    p = plan("dense")
    found = p.what_if(w=None)
    other, difference = found
    assert str(found) == str(difference) and found.plan is other
    assert repr(p).startswith(f"<Plan of {p.name} on ") and "\n" not in repr(p) and "optimal" in repr(p)


def test_what_cannot_be_says_why():
    text = str(plan("dense").why("w"))
    assert "unavailable: (1, 4) (2, 4): 4 does not divide dimension 1, of size 10" in text
    assert "unavailable: (1, 1) (1, 2) (1, 4) and 5 more: pinned as (4, 2)" in str(plan("dense").why("x"))
    pinned = plan("pinned").why("dot_general.5")
    assert {a.reason for a in pinned.alternatives if a.cost is None} == {
        "pinned by jshard.op or a constraint"
    }
    assert "((2, 1), (1, 4))" in str(pinned)


def test_padding_that_was_tried_has_its_cost_and_other_padding_a_reason():
    def why(words, **config):
        mesh = jax.make_mesh((8,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:8])
        step = jshard.shard(lambda w, x: jax.nn.logsumexp(x @ w), mesh=mesh, level=2, config=config)
        p = step.plan(*(jax.ShapeDtypeStruct(s, "float32") for s in ((512, words), (64, 512))))
        return p, str(p.why("w"))

    p, text = why(1025)
    tried = re.search(r"padding to 1,032: (?:the whole plan costs|no plan costs less than) ([\d.]+) us", text)
    assert p.padding == () and tried is not None and float(tried[1]) > 1e6 * p.cost.objective
    for words, config, reason in (
        (1025, {"pad": False}, 'with config={"pad": False}, host callbacks, Explicit axes or'),
        (101, {}, 'its tensors are small; config={"pad": True} tries them too'),
        (13, {}, "it would add more than 12.5%"),
    ):
        assert f"padding not tried: {reason}" in why(words, **config)[1]


def test_a_padded_plan_says_that_its_bound_is_of_the_sizes_tried():
    mesh = jax.make_mesh((8,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:8])
    args = [jax.ShapeDtypeStruct(s, "float32") for s in ((512, 50257), (4097, 512))]
    texts = []
    for pad in (True, False):
        step = jshard.shard(lambda w, x: jax.nn.softmax(x @ w).max(1), mesh=mesh, config={"pad": pad})
        p = step.plan(*args)
        texts.append((bool(p.padding), str(p), repr(p)))
    assert texts[0][0] and ", for the padded sizes tried" in texts[0][1]
    assert texts[0][2].endswith(", optimal for the padded sizes tried>")
    assert not texts[1][0] and "padded sizes" not in texts[1][1] and texts[1][2].endswith(", optimal>")


def test_memory_is_a_reason(monkeypatch):
    def refuse(self):
        raise MemoryBudgetError("no plan fits 10 bytes a device; the least found needs 20")

    monkeypatch.setattr(Replanner, "run", refuse)
    assert "unavailable: (2, 1) <- chosen (1, 1) (1, 2) and 3 more: memory: no plan fits 10 b" in str(
        plan("dense").why("w")
    )


def test_no_line_is_longer_than_the_page():
    for name, what in CASES:
        assert max(map(len, str(plan(name).why(what)).splitlines())) <= 100


def test_the_end_of_a_path_is_enough_where_it_is_unique():
    p = plan("gpt")
    assert p.search_again.names_matching("params.head") == ["params.head"]
    assert p.search_again.names_matching("blocks.0.up.w") == ["params.blocks.0.up.w"]
    with pytest.raises(jshard.ShardError, match="has no argument, result, tensor or operator 'scale'"):
        p.why("scale")


def test_progress_counts_the_searches():
    seen = []
    why = plan("dense").why("w", lambda done, all_: seen.append((done, all_)))
    n = sum(not a.reason or a.cost is not None for a in why.alternatives)
    assert seen == [(i + 1, n) for i in range(n)]


def test_a_plan_does_not_differ_from_itself():
    difference = plan("ffn").diff(plan("ffn"))
    assert not difference and str(difference) == "the two plans of ffn are the same"


def test_what_if_frees_pins_and_reports_the_change():
    p = plan("ffn")
    free, difference = p.what_if(w1=None, w2=None)
    assert not any(r.pinned for r in free.inputs if r.path != "x")
    assert free.cost.objective <= p.cost.objective and difference
    assert {a.path for a, _ in difference.tensors} >= {"w1", "w2"}
    text = str(difference)
    assert "all_reduce over y: 1 -> 0 times, 12,288 -> 0 B" in text and "w1: (-, y) pinned -> " in text
    jax.tree.map(lambda s: s.spec, free.in_shardings)  # it still knows its mesh and trees


def test_what_if_takes_patterns_specs_and_operators():
    p = plan("gpt")
    other, _ = p.what_if(**{"params.blocks.*.up.w": (1, 8)})
    assert [
        r.layout.cuts(p.mesh) for r in other.inputs if r.path.startswith("params") and "up.w" in r.path
    ] == [
        (1, 8),
        (1, 8),
    ]
    dense = plan("dense")
    spec, _ = dense.what_if(w=jax.sharding.PartitionSpec("y"))
    assert spec.inputs[1].layout.dims == (("y",), ())
    forced, _ = dense.what_if(**{"dot_general.3": ((4, 1), (1, 2))})
    assert forced.operators[0].strategy == ((4, 1), (1, 2))


@pytest.mark.parametrize(
    "pins, message",
    [
        ({"weight": (1, 1)}, "dense_relu has no argument, result, tensor or operator 'weight'"),
        ({"w": (1, 4)}, "cut of 4 does not divide"),
        ({"w": jax.sharding.PartitionSpec("q")}, "the plan's mesh x=4 x y=2 has no axis 'q'"),
        ({"dot_general.3": (4, 1)}, "is not a strategy of dot_general.3, which has 2 operands"),
    ],
)
def test_what_if_of_something_else(pins, message):
    with pytest.raises(jshard.ShardError, match=message.replace("(", r"\(")):
        plan("dense").what_if(**pins)
