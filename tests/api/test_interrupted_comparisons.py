"""Ctrl-C while several programs or meshes are compared: the best plan known then, with what was not compared."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

import jshard
from jshard._api import prepare
from jshard._api.pipeline_choice import cheapest_pipeline
from jshard._plan import planner
from jshard._plan.request import NoBetterPlan
from jshard._spec.pipeline_option import PipelineOption
from tests.program.test_recompute import LOSSES, step_of


OPTIONS: Any = dict(
    level=2, hardware="v5e", in_strategy=(None, (4, 1)), mesh=jax.sharding.AbstractMesh((4,), ("x",))
)
W, X = np.zeros((3, 32, 96), "float32"), np.zeros((2048, 32), "float32")


@functools.cache
def free_peak() -> float:
    return jshard.shard(step_of(LOSSES["scanned"]), memory_budget="1TB", **OPTIONS).plan(W, X).cost.peak_bytes


def chain(x: Any, w: Any) -> Any:
    for _ in range(2):
        x = jax.numpy.tanh(x @ w)
    return (x**2).mean(0)


LONG = jax.ShapeDtypeStruct((1001, 2003), "float32"), jax.ShapeDtypeStruct((2003, 2003), "float32")
EVEN = jax.ShapeDtypeStruct((1024, 512), "float32"), jax.ShapeDtypeStruct((512, 512), "float32")


def comparison(name: str) -> tuple[Any, tuple[Any, ...]]:
    """A sharded function whose plan is the best of several, and its arguments."""
    if name == "remat":
        limit = int(0.6 * free_peak())
        return jshard.shard(step_of(LOSSES["scanned"]), remat="auto", memory_budget=limit, **OPTIONS), (W, X)
    if name == "meshes":
        return jshard.shard(chain, mesh="auto:v5e:2x4", memory_budget="1TB"), EVEN
    if name == "padding":
        mesh = jax.sharding.AbstractMesh((4,), ("x",))
        return jshard.shard(chain, mesh=mesh, hardware="v5e", level=2, config={"pad": True}), LONG
    mesh = jax.sharding.AbstractMesh((4,), ("x",))
    options: Any = dict(mesh=mesh, hardware="v5e", level=2, microbatches="auto", memory_budget="320KB")
    options |= {"config": {"search_seconds": 0.02}, "in_strategy": (None, (4, 1))}
    return jshard.shard(jax.grad(lambda w, x: chain(x, w).sum()), **options), (
        jax.ShapeDtypeStruct((32, 32), "float32"),
        jax.ShapeDtypeStruct((4096, 32), "float32"),
    )


@pytest.mark.parametrize("name", ["remat", "meshes", "padding", "microbatches"])
@pytest.mark.parametrize("kept", [False, True], ids=["raised", "returned"])
def test_an_interruption_gives_the_best_plan_known(name: str, kept: bool, monkeypatch: Any) -> None:
    """`kept`: the interrupted search itself has a plan, as where Ctrl-C comes late in it."""
    free_peak()
    real, calls, at = planner.LevelSearch.run, 0, 0

    def run(self: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at and not kept:
            raise KeyboardInterrupt
        try:
            found = real(self)
        except NoBetterPlan:  # it has no plan to return
            if calls == at:
                raise KeyboardInterrupt from None
            raise
        return found if calls != at else found.after(_interrupted(found))

    monkeypatch.setattr(planner.LevelSearch, "run", run)
    sharded, args = comparison(name)
    best = sharded.plan(*args)
    stages, given = calls, 0
    assert stages >= 2 and not best.interrupted
    for stage in range(1, stages + 1):
        calls, at = 0, stage
        sharded, args = comparison(name)
        try:
            plan = sharded.plan(*args)
        except KeyboardInterrupt:
            assert not given  # once a plan is known, one is given
            continue
        given += 1
        assert plan.interrupted and calls == stage, (stage, calls, plan.steps)  # nothing is searched after it
        assert plan.memory_budget is None or plan.cost.peak_bytes <= plan.memory_budget
        assert plan.cost.bound <= plan.cost.objective and plan.cost.objective >= best.cost.objective * (
            1 - 1e-9
        )
    assert given


def _interrupted(found: Any) -> Any:
    return dataclasses.replace(found, steps=(*found.steps, "interrupted"))


@pytest.mark.parametrize("kept", [False, True], ids=["raised", "returned"])
def test_an_interruption_among_pipelines_names_those_not_planned(kept: bool) -> None:
    options = [(PipelineOption("x", 8 * k), 0.1 * k) for k in (1, 2, 3)]
    plan = jshard.shard(chain, mesh=OPTIONS["mesh"], hardware="v5e").plan(*EVEN)
    ended = dataclasses.replace(plan, steps=(*plan.steps, "interrupted"))

    def planned_with(option: PipelineOption | None, _: float) -> Any:
        if option is None or option.microbatches < 16:
            return plan
        if not kept:
            raise KeyboardInterrupt
        return ended

    best = cheapest_pipeline(options, planned_with, lambda p: p, lambda _, p: p)
    assert best.interrupted and best.cost.objective == plan.cost.objective
    left = [s.partition(":")[0] for s in best.steps if s.endswith("not planned, interrupted")]
    numbers = (24,) if kept else (16, 24)
    assert left == [f"pipeline over x, {n} microbatches, 1 round" for n in numbers]
    tried = 2 if kept else 1
    assert f"{tried} pipeline" in best.cost.space

    def nothing_known(option: PipelineOption | None, _: float) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cheapest_pipeline(options, nothing_known, lambda p: p, lambda _, p: p)


@pytest.mark.parametrize("kept", [False, True], ids=["raised", "returned"])
@pytest.mark.parametrize("of", ["sweep", "pareto"])
def test_an_interruption_of_many_plans_gives_those_known(of: str, kept: bool, monkeypatch: Any) -> None:
    real, calls, at = prepare.plan_traced, 0, 3

    def plan_traced(traced: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at and not kept:
            raise KeyboardInterrupt
        planned = real(traced)
        return planned.with_plan(steps=(*planned.plan.steps, "interrupted")) if calls == at else planned

    monkeypatch.setattr(prepare, "plan_traced", plan_traced)
    f = jshard.shard(chain, mesh=OPTIONS["mesh"], hardware="v5e")
    if of == "sweep":
        found: Any = jshard.sweep(f, *EVEN, level=[0, 1, 2], memory_budget=["1TB", "2TB"])
        assert len(found) == 6 and len(found.plans) == (3 if kept else 2)
        assert {p.error for p in found.points[3:]} == {"not planned: interrupted"}
        assert "not planned: interrupted" in str(found)
    else:
        found = jshard.pareto(f, *EVEN)
        assert found.interrupted and found.tried == (3 if kept else 2)
        assert "interrupted" in str(found).splitlines()[0]
    assert calls == at
    calls, at, kept = 0, 1, False
    with pytest.raises(KeyboardInterrupt):
        jshard.sweep(f, *EVEN, level=[0, 1]) if of == "sweep" else jshard.pareto(f, *EVEN)
