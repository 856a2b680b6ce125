"""MindSpore's cases: its strategies where they are forced, and never more bytes than it moves."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jshard
from tests.helpers.mindspore_cases import CASES, Built, Case, parse, received


def sharded(case: Case, built: Built, search: str) -> jshard.Sharded:
    """The row's function on as many devices as the row has."""
    axes = dict(case.axes) or {"d": case.devices}
    auto = (AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=auto, devices=jax.devices()[: case.devices]
    )
    return jshard.shard(
        built.fn, case.in_strategy, case.out_strategy, case.parameter_plan, mesh=mesh, search=search
    )


def arguments(built: Built) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.integers(0, built.integers[i], s), jnp.int32)
        if i in built.integers
        else jnp.asarray(rng.normal(size=s) / max(1, s[0] ** 0.5 if i else 1), jnp.float32)
        for i, s in enumerate(built.shapes)
    ]


def received_by(plan: jshard.Plan) -> float:
    return sum(plan.bytes_by_kind.values())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_propagation_gives_the_forced_strategies(case):
    built = case.built()
    plan = sharded(case, built, "propagation").plan(*arguments(built))
    forced = {k: v for k, v in parse(case.strategies).items() if k not in case.free.split()}
    given = {}
    for name, strategy in forced.items():
        primitive, which = built.operators[name]
        rows = [r for r in plan.operators if r.primitive == primitive]
        # Elementwise: the second operand of the peer's Add is the bias before its broadcast.
        operands = len(strategy) if primitive in ("dot_general", "gather", "conv_general_dilated") else 1
        given[name] = rows[which].strategy[:operands]
        forced[name] = strategy[:operands]
    assert given == forced


@pytest.mark.parametrize("case", CASES, ids=str)
def test_optimal_receives_at_most_the_bytes_of_the_peer(case):
    built = case.built()
    plan = sharded(case, built, "optimal").plan(*arguments(built))
    assert received_by(plan) <= received(case.communication, case.devices)
    assert plan.cost.optimal


def one_of_each_builder() -> list[Case]:
    """The rows that a run must see: the first of each function, mesh and kind of pin."""
    seen: dict[object, Case] = {}
    for c in CASES:
        key = (
            c.build,
            c.sizes.get("fn"),
            c.devices,
            tuple(c.axes),
            bool(c.parameter_plan),
            bool(c.out_strategy),
        )
        seen.setdefault(key, c)
    return list(seen.values())


@pytest.mark.parametrize("i, case", list(enumerate(one_of_each_builder())), ids=str)
def test_results_equal_the_plain_function(i, case):
    search = ("optimal", "propagation")[i % 2]
    built = case.built()
    args = arguments(built)
    chex.assert_trees_all_close(
        sharded(case, built, search)(*args), jax.jit(built.fn)(*args), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("search", ["propagation", "optimal"])
def test_row_47_an_unknown_name_is_passed_over(search):
    """The plan of row 27, with a warning."""
    case = next(c for c in CASES if c.number == 27)
    built = case.built()
    named = dataclasses.replace(case, parameter_plan={"nothing_of_that_name": (1, 4)})
    with pytest.warns(UserWarning, match="nothing_of_that_name"):
        plan = sharded(named, built, search).plan(*arguments(built))
    plain = sharded(case, built, search).plan(*arguments(built))
    assert [r.strategy for r in plan.operators] == [r.strategy for r in plain.operators]
    assert received_by(plan) <= received(case.communication, case.devices)
