"""Measured times of collectives: fits, files, and costs of reshards and plans that are linear in pieces."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from jshard._core import hardware
from jshard._core.collective_curves import CollectiveCurve, nearest_curve
from jshard._core.errors import MeshError
from jshard._core.layout import Layout, MeshAxes
from jshard._core.saved_chip import chip_from_json, chip_to_json, load_chip, named_chip
from jshard._core.topology import from_mesh
from jshard._cost import resharding
from jshard._cost.collectives import collective
from jshard._cost.curve_fit import fit_curve


KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")


def measured_chip(seed: int, groups: tuple[int, ...] = (2, 4, 8)) -> hardware.Chip:
    """A CPU with random curves: flat, then steep, then less steep, as such measurements are."""
    rng = np.random.default_rng(seed)
    curves = []
    for kind, group, strided in itertools.product(KINDS, groups, (False, True)):
        sizes = np.cumsum(rng.uniform(1e2, 1e5, 4))
        times = np.cumsum(rng.uniform(1e-6, 1e-3, 4))
        knots = tuple((float(b), float(t)) for b, t in zip(sizes, times, strict=True))
        curves.append(CollectiveCurve(kind, group, knots, "shared", strided))
    return dataclasses.replace(hardware.get("cpu"), name=f"cpu-random-{seed}", curves=tuple(curves))


@pytest.mark.parametrize("seed", range(4))
def test_pieces_meet_and_never_fall(seed: int) -> None:
    for curve in measured_chip(seed).curves:
        for b, t in curve.knots:
            assert (
                curve.seconds(b) == pytest.approx(t) == pytest.approx(curve.seconds(b * (1 + 1e-9)), rel=1e-6)
            )
        times = [curve.seconds(b) for b in np.geomspace(1, 1e9, 200)]
        assert all(x <= y * (1 + 1e-12) for x, y in itertools.pairwise(times))
        assert curve.piece(math.inf)[0] > 0


@pytest.mark.parametrize("seed", range(6))
def test_a_fit_finds_the_pieces_that_are_there(seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth = measured_chip(seed).curves[0]
    sizes = np.geomspace(truth.knots[0][0], 10 * truth.knots[-1][0], 12)
    exact = [truth.seconds(b) for b in sizes]
    knots, error = fit_curve(sizes, [t * rng.uniform(0.98, 1.02) for t in exact])
    assert error < 0.12 and len(knots) <= 4
    fitted = CollectiveCurve("permute", 2, knots)
    assert np.median([abs(fitted.seconds(b) / t - 1) for b, t in zip(sizes, exact, strict=True)]) < 0.08
    assert fit_curve([8.0], [1e-5]) == (((8.0, 1e-5),), 0.0)


def test_the_nearest_curve_is_of_the_nearest_group_and_grouping() -> None:
    curves = measured_chip(0).curves
    found = nearest_curve(curves, "all_reduce", 16, "shared", True)
    assert found is not None and (found.group, found.strided) == (8, True)
    assert nearest_curve(curves, "all_reduce", 8, "nvlink", False) is None


@pytest.mark.parametrize("seed", range(3))
def test_tables_are_the_sums_of_their_collectives(seed: int) -> None:
    """The table of seconds, the list of collectives and every single collective agree, on the fastest of all paths."""
    rng = np.random.default_rng(seed)
    t = from_mesh(MeshAxes(("x", "y"), (2, 4)), measured_chip(seed))
    layouts = [
        Layout((("x",), ("y",))),
        Layout((("x", "y"), ())),
        Layout(((), ())),
        Layout((("y",), ()), ("x",)),
    ]
    layouts += [Layout(((), ("x", "y"))), Layout(((), ()), ("x", "y")), Layout((("y", "x"), ()))]
    for nbytes in rng.uniform(1e2, 1e7, 3):
        table = resharding.seconds_table(layouts, layouts, (64, 64), nbytes / 4096, t)
        for (i, a), (j, b) in itertools.product(enumerate(layouts), enumerate(layouts)):
            seconds, received, path = resharding.reshard_cost(a, b, (64, 64), nbytes / 4096, t)
            assert table[i, j] == pytest.approx(seconds) or math.isinf(seconds) and math.isinf(table[i, j])
            for c in path:
                assert c.seconds > 0
            assert received == pytest.approx(sum(c.bytes for c in path)) or math.isinf(received)
        via = (table[:, :, None] + table[None, :, :]).min(axis=1)
        assert (table <= via * (1 + 1e-9)).all()


def test_sums_that_are_combined_share_one_curve() -> None:
    t = from_mesh(MeshAxes(("x",), (8,)), measured_chip(1))
    whole = collective("all_reduce", ("x",), 3e5, t).seconds
    assert collective("all_reduce", ("x",), 1e5, t, combined=3).seconds == pytest.approx(whole / 3)


@pytest.mark.parametrize("level", (0, 2))
def test_a_plan_costs_what_its_collectives_do(level: int) -> None:
    def step(w, x):
        return w - jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)

    mesh = jshard.topology("cpu:8", {"x": 2, "y": 4})
    f = jshard.shard(step, in_strategy=(None, (8, 1)), mesh=mesh, level=level, hardware=measured_chip(2))
    plan = f.plan(jax.ShapeDtypeStruct((96, 40), "float32"), jax.ShapeDtypeStruct((48, 96), "float32"))
    assert plan.cost.communication == pytest.approx(sum(c.seconds * c.count for c in plan.collectives))
    assert plan.cost.optimal and plan.cost.objective >= plan.cost.bound * (1 - 1e-9)


def test_a_chip_is_read_back_equal(tmp_path) -> None:
    chip = measured_chip(5)
    path = tmp_path / "my-cluster.json"
    path.write_text(chip_to_json(chip, {"date": "2026-11-23"}))
    assert load_chip(path) == chip == jshard.hardware.get(chip.name) == named_chip(str(path))
    f = jshard.shard(lambda x: x.sum(), in_strategy=((8,),), hardware=str(path))
    assert f.plan(jnp.ones(16)).chip == chip.name


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda d: d.update(jshard_chip=99), "version 99, this jshard reads version 1"),
        (lambda d: d.pop("jshard_chip"), "no chip that was measured"),
        (lambda d: d["chip"].update(speed=3), "speed: not a field"),
        (lambda d: d["chip"].pop("bf16_flops"), "without all its figures"),
        (lambda d: d["chip"]["curves"][0].pop("knots"), "without all its figures"),
        (lambda d: d.update(chip=3), "chip: not a field"),
    ],
)
def test_a_file_that_is_not_one_is_an_error(change, said) -> None:
    data = json.loads(chip_to_json(measured_chip(6), {}))
    change(data)
    with pytest.raises(MeshError, match=said) as error:
        chip_from_json(json.dumps(data), "hardware='c.json'")
    assert "jshard.calibrate(save=" in str(error.value)


def test_a_file_that_is_missing_is_an_error() -> None:
    with pytest.raises(MeshError, match="cannot be read") as error:
        jshard.shard(lambda x: x * 2, hardware="nowhere/my-cluster.json").plan(jnp.ones(8))
    assert "calibrate(save=" in str(error.value)
