"""Error texts that need a search: which pins contradict each other and where, and the least budget.

Texts that need no search are in `bad_inputs`.
"""

from __future__ import annotations

import contextlib
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jshard
from jshard._api import shard
from jshard._core.errors import SearchError
from jshard._core.named_topology import TopologyMesh
from jshard._plan import level_search
from tests.helpers import training_steps


def machine() -> TopologyMesh:
    return jshard.topology("v5e:2x4", {"data": 2, "model": 4}, compiles=False)


SQUARE = jax.ShapeDtypeStruct((64, 64), "float32")


def dense(x, w):
    return x @ w


def text_of(fn, *args, error=jshard.ShardError, **options) -> str:
    with pytest.raises(error) as e:
        jshard.shard(fn, mesh=options.pop("mesh", machine()), **options).plan(*args)
    return re.sub(r"(where: \w+ ).*?test_pin_conflicts.py:\d+:\d+", r"\1HERE", str(e.value))


@pytest.mark.parametrize("search", ["optimal", "propagation"])
def test_pins_of_one_operator_contradict(search):
    def pinned(x, w):
        return jshard.op(dense, ((2, 4), (1, 4)))(x, w)

    assert text_of(pinned, SQUARE, SQUARE, search=search) == (
        "the pins of dot_general contradict each other: operand 0 (2, 4) and operand 1 (1, 4)\n"
        "  where: dense HERE (dense)\n"
        "  write instead: cut a dimension that two operands share equally in both, or leave one of them None"
    )


def test_a_cut_that_the_operator_cannot_take():
    def pinned(x):
        return jshard.op(lambda y: jnp.fft.fft(y, axis=-1), ((1, 8),))(x)

    assert text_of(pinned, jax.ShapeDtypeStruct((64, 64), "complex64")) == (
        "no way to run fft has its operand 0 cut as (1, 8) asks\n"
        "  where: op\n"
        "  write instead: pin a cut that the operator's rule allows: (1, 1), (2, 1), (4, 1), (8, 1)"
    )


def step(state, x):
    return {"w": state["w"] - x @ state["w"]}, x.sum()


@pytest.mark.parametrize("level", [0, 1, 2])
def test_pins_that_meet_only_in_the_search_are_named_with_the_place(level):
    """State comes back as it lies, so its result cannot be forced otherwise."""
    f = jshard.shard(step, ({"w": P("data")}, None), mesh=machine(), level=level, donate_argnums=0)
    with pytest.raises(SearchError) as e:
        f.plan({"w": SQUARE}, SQUARE).what_if(**{"0.w": (1, 8)})
    assert str(e.value) == (
        "the pins of result 0.w ((1, 8)) and argument state.w ((data, -)) contradict each other\n"
        "  where: a result that is an argument's next value lies as that argument does\n"
        "  write instead: leave one of them None, or free a dimension of it"
    )


def test_state_may_lie_in_any_order_of_axes():
    """What it becomes lies in the same order; axes of a free result are in the mesh's."""
    lies = P(("model", "data"), None)
    plan = jshard.shard(step, ({"w": lies}, None), mesh=machine(), donate_argnums=0).plan(
        {"w": SQUARE}, SQUARE
    )
    assert str(plan.inputs[0].layout) == str(plan.outputs[0].layout) == "(model*data, -)"


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_budget_that_nothing_fits_names_the_least(level):
    text = text_of(dense, SQUARE, SQUARE, memory_budget=1000, level=level, error=jshard.ShardError)
    found = re.match(
        r"no plan fits 1,000 bytes a device; the least found needs ([\d,]+)(, and none needs less than ([\d,]+))?\n"
        r"  where: memory_budget of data=2 x model=4 \(8 x [-\w]+\); the peak is held by\n",
        text,
    )
    budget_row = re.search(r"^    memory_budget=(\d+) ", text, re.MULTILINE)
    assert found is not None and budget_row is not None, text
    budget = int(budget_row[1])
    plan = jshard.shard(dense, mesh=machine(), memory_budget=budget, level=level).plan(SQUARE, SQUARE)
    assert plan.cost.peak_bytes <= budget
    if found[3]:
        assert int(found[3].replace(",", "")) <= plan.cost.peak_bytes


def test_a_mesh_that_the_pins_cannot_use():
    assert text_of(dense, SQUARE, SQUARE, in_strategy=(P("tp"), None)) == (
        "the spec P('tp', None) names mesh axis 'tp', which the mesh lacks\n"
        "  where: in_strategy[0] (argument x)\n"
        "  write instead: 'data' or 'model' (axes of the mesh: data, model)"
    )
    x = jax.ShapeDtypeStruct((63, 64), "float32")
    for mesh in (machine(), "auto"):
        text = text_of(dense, x, SQUARE, in_strategy=((3, 1), None), mesh=mesh)
        n = jax.device_count() if mesh == "auto" else 8
        assert text == (
            f"a cut of 3 in dimension 0: no grid of {n} devices has it\n"
            "  where: in_strategy[0] (argument x)\n"
            "  write instead: 1 piece there"
        )


def test_an_unknown_chip_gets_the_nearest_names():
    text = (
        "unknown chip 'v5g'\n  where: hardware.get\n"
        "  write instead: one of tpu-v5p, tpu-v5e, ... or hardware.register(...)"
    )
    assert text_of(dense, SQUARE, SQUARE, hardware="v5g") == text
    with pytest.raises(jshard.ShardError) as e:
        jshard.topology("v5g:2x4", {"x": 8})
    assert str(e.value) == text


def chain(x, *weights):
    for w in weights:
        x = jax.nn.relu(x @ w)
    return x.sum()


@pytest.mark.parametrize("budget", [None, 70_000])
def test_an_interrupted_search_gives_the_best_so_far_with_its_gap(budget, monkeypatch, caplog):
    """Ctrl-C at the first sign of an answer ends the search; the plan says so, is whole, and is kept."""
    real, calls = level_search.solve, []

    def interrupted(network, **options):
        def stop(stage, best, bound):
            calls.append(stage)
            if best < float("inf"):
                raise KeyboardInterrupt

        return real(network, **{**options, "on_progress": stop})

    w = training_steps.gpt()
    fn, args = (training_steps.step(w), w.arguments()) if budget is None else (chain, [SQUARE] * 4)
    monkeypatch.setattr(level_search, "solve", interrupted)
    f = jshard.shard(fn, mesh=machine(), memory_budget=budget)
    plan = f.plan(*args)
    assert calls and 0 < plan.cost.bound <= plan.cost.objective and plan.cost.gap >= 0
    assert budget is None or plan.cost.peak_bytes <= budget
    ended = any("interrupted" in s for s in plan.steps)
    assert ended or budget is not None
    told = [r.getMessage() for r in caplog.records if r.name == "jshard"]
    name = f.__name__
    assert (
        told
        == [
            f"{name}: the search was interrupted; the best plan it had (gap {100 * plan.cost.gap:.2g}%) is used from "
            f"now on, until {name}.clear_cache()"
        ]
        * ended
    )
    monkeypatch.undo()
    assert f.plan(*args).cost == plan.cost
    f.clear_cache()
    assert not any("interrupted" in s for s in f.plan(*args).steps)
    best = jshard.shard(fn, mesh=machine()).plan(*args).cost
    assert best.optimal and best.objective <= plan.cost.objective


def test_an_interruption_before_any_answer_is_raised(monkeypatch):
    real = level_search.solve

    def interrupted(network, **options):
        def stop(*_):
            raise KeyboardInterrupt

        return real(network, **{**options, "on_progress": stop})

    monkeypatch.setattr(level_search, "solve", interrupted)
    f = jshard.shard(chain, mesh=machine())
    with pytest.raises(KeyboardInterrupt):
        f.plan(*[SQUARE] * 4)
    monkeypatch.undo()
    assert f.plan(*[SQUARE] * 4).cost.optimal


@pytest.mark.parametrize("how", ["call", "lower", "plan"])
def test_every_way_to_plan_shows_its_progress(how, monkeypatch):
    shown = []

    @contextlib.contextmanager
    def progress(title, *, after):
        shown.append((title, after))
        yield lambda done, text: shown.append(text)

    monkeypatch.setattr(shard, "progress", progress)
    f = jshard.shard(chain)
    args = [jnp.ones((16, 16))] * 3
    {"call": f, "lower": f.lower, "plan": f.plan}[how](*args)
    assert shown[0] == ("planning chain", 2.0) and shown[1:]
    del shown[:]
    f(*args)
    assert not shown
