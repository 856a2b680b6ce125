"""`jshard.calibrate` and `plan.measure`: what they return and refuse; how long things take is not asserted."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from jshard._api.calibrate import (
    Calibration,
    Sample,
    fitted_chip,
    fitted_samples,
    picture,
    predicted_seconds,
)
from jshard._api.measure import Measurement, _least_waits
from jshard._api.microbenchmarks import KINDS, Measured, measure, operand_elements, tasks
from jshard._core.errors import MeshError, PlanMismatchError, ShardError
from jshard._core.saved_chip import named_chip
from jshard._core.topology import from_mesh
from jshard._cost.collectives import received_per_byte


pytestmark = pytest.mark.one_pair


CPU = jshard.hardware.get("cpu")


RATES = {"product": 3e9, "read": 5e9, "memory": 2.5e9, "simple": 8e9, "transcendental": 2e9, "call": 1e4}


def made_up(noise: float, seed: int = 0) -> list[Measured]:
    """Measurements of a machine with the `RATES` below and collectives of 30 us and 1 GB/s, with noise."""
    rng = np.random.default_rng(seed)
    found = []
    for t in tasks(4, 1e6):
        if t.group == 1:
            seconds = t.size / RATES[t.what]
        else:
            seconds = 3e-5 + t.size * received_per_byte(t.what, t.group) / 1e9
        found.append(Measured(t, seconds * float(np.exp(noise * rng.standard_normal())), 0.0))
    return found


def test_a_quiet_machine_gives_its_own_figures() -> None:
    found = made_up(0.0)
    chip, notes = fitted_chip(CPU, found, "quiet", "2026-11-23", 4)
    assert not notes and chip.f32_flops == pytest.approx(3e9) and chip.hbm_bandwidth == pytest.approx(5e9)
    assert chip.call_seconds == pytest.approx(1e-4)
    assert chip.units.write_factor == pytest.approx(4.0)  # two bytes at 5 GB/s and one make three at 2.5 GB/s
    assert len(chip.curves) == 5 * 3  # groups of two, of two strided, of four
    for m in found:
        assert predicted_seconds(chip, m.task, 4) == pytest.approx(m.seconds, rel=0.02)
    assert chip.sources["curves"].endswith("[M]") and chip.hbm_bytes == CPU.hbm_bytes


def test_turns_of_a_loop_are_no_work_of_the_device() -> None:
    """On an accelerator products and traffic are measured in loops, whose turns the host starts."""
    rates = {**RATES, "product": 7e14, "memory": 4e12}
    found = [
        Measured(t, t.size / rates[t.what] + (3e-5 if t.looped else 0.0), 0.0)
        for t in tasks(1, 1e6, host=False)
    ]
    chip, notes = fitted_chip(jshard.hardware.get("h200"), found, "loops", "2026-11-27", 1)
    assert not notes
    assert (chip.f32_flops, chip.bf16_flops) == pytest.approx((7e14, 7e14), rel=1e-6)
    assert chip.hbm_bandwidth == pytest.approx(4e12, rel=1e-6)
    samples = fitted_samples(chip, found, 1)
    assert all(abs(s.residual) < 1e-6 for s in samples)
    text = str(Calibration(chip, "gpu-h200", samples, notes, "2026-11-27", (), "1 x H200", 1.0))
    assert text.count("30 us a turn of the loop") == 3 and "turn" not in text.split("product")[0]


def test_a_busy_machine_keeps_the_table_and_says_so() -> None:
    found, h100 = made_up(2.5, seed=3), jshard.hardware.get("h100")
    chip, notes = fitted_chip(h100, found, "busy", "2026-11-23", 4)
    assert notes and all("is the machine busy? the table's figure stays" in n for n in notes)
    assert len(chip.curves) < 15
    assert ("product of float32" in " ".join(notes)) == (chip.f32_flops == h100.f32_flops)
    samples = tuple(Sample(m, predicted_seconds(chip, m.task, 4)) for m in found)
    text = str(Calibration(chip, "gpu-h100", samples, notes, "2026-11-23", (), "4 x H100", 1.0))
    assert "the table's figure stays" in text and "busy" in text
    lines = {line.split()[0]: line for line in text.splitlines() if "float32 " in line}
    assert "/s" not in lines["call"] and " op/s" in lines["simple"] and " B/s" in lines["memory"]


def test_a_measurement_is_better_than_a_stand_in() -> None:
    chip, notes = fitted_chip(CPU, made_up(2.5, seed=3), "busy", "2026-11-23", 4)
    assert notes and chip.f32_flops != CPU.f32_flops and chip.hbm_bandwidth != CPU.hbm_bandwidth


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", (2, 3, 8))
def test_operands_divide_and_grow(kind, group) -> None:
    sizes = operand_elements(kind, group, 1e6)
    assert sizes == sorted(set(sizes)) and len(sizes) >= 4
    assert all(n % group == 0 and 4 * n * received_per_byte(kind, group) <= 2e6 for n in sizes)


@pytest.mark.parametrize("strided", (False, True))
def test_every_measured_operation_is_in_its_program(strided) -> None:
    """Each task runs on four devices, in pairs, and its program has its collective."""
    from jshard._api.microbenchmarks import _program

    for task in tasks(4, 4096):
        if task.group == 2 and task.strided == strided:
            program, x = _program(task, jax.devices("cpu")[:4])
            text = program.lower(x, 3).compile().as_text()
            assert task.what.replace("_", "-").replace("permute", "collective-permute") in text
            assert measure(task, jax.devices("cpu")[:4], runs=3).seconds > 0


def test_calibration_registers_and_saves_a_chip(tmp_path) -> None:
    path = tmp_path / "here.json"
    found = jshard.calibrate(jax.devices("cpu")[:2], name="here-2", save=path, largest=4096)
    assert jshard.hardware.get("here-2") == found.chip == named_chip(str(path))
    assert "residual" in str(found) and "here-2" in str(found) and found.devices == "2 x cpu"
    assert picture(found).count("<circle") == sum(s.measured.task.group > 1 for s in found.samples)
    topology = from_mesh(jshard.topology("cpu:2", {"x": 2}).jax_mesh, found.chip)
    assert topology.chip.curves == found.chip.curves
    with pytest.raises(MeshError, match="already in the table"):
        jshard.hardware.register(dataclasses.replace(found.chip, f32_flops=1.0))


def test_calibrating_what_is_no_device_is_an_error() -> None:
    with pytest.raises(MeshError, match="devices is"):
        jshard.calibrate([1, 2])  # pyright: ignore[reportArgumentType]


def planned(donate: bool = False):
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)

    mesh = jshard.topology("cpu:8", {"x": 8})
    return jshard.shard(step, in_strategy=((8, 1), (8, 1)), mesh=mesh, donate_argnums=(0,) if donate else ())


@pytest.mark.parametrize("donate", (False, True))
def test_a_planned_step_is_measured_by_collective(donate) -> None:
    f, args = planned(donate), (jnp.ones((64, 32)), jnp.ones((48, 64)))
    plan = f.plan(*args)
    found = plan.measure(f, *args)
    assert isinstance(found, Measurement) and found.measured > 0 and found.predicted == plan.step_seconds
    assert found.call == 0 and "start of a call" not in str(found)  # of a chip that is not calibrated
    assert sum(c.predicted for c in found.collectives) == pytest.approx(plan.cost.communication)
    assert {c.kind for c in found.collectives} == {c.kind for c in plan.collectives}
    if found.profiled:
        assert all(c.measured is not None and 0 < c.measured for c in found.collectives)
    assert "predicted" in str(found) and not args[0].is_deleted()


def test_a_calibrated_chip_adds_the_start_of_a_call() -> None:
    chip = jshard.hardware.register(dataclasses.replace(CPU, name="cpu-with-start", call_seconds=1e-3))
    f = jshard.shard(
        lambda x: x * 2, in_strategy=((8,),), mesh=jshard.topology("cpu:8", {"x": 8}), hardware=chip.name
    )
    plan = f.plan(jnp.ones(64))
    found = plan.measure(f, jnp.ones(64))
    assert found.call == 1e-3 and found.predicted == plan.step_seconds + 1e-3
    assert "start of a call 1 ms" in str(found)


@pytest.mark.parametrize("host", (False, True))
def test_a_machine_whose_devices_share_memory_is_measured_by_calls(host) -> None:
    """Loops reuse pages that a program gets anew; an accelerator's vectors are larger than its caches."""
    found = list(tasks(4, 1e6, host))
    assert found[0].what == "call" and not found[0].looped
    memory = [t for t in found if t.what == "memory"]
    assert all(t.looped != host for t in memory) and min(t.size for t in memory) >= (2e6 if host else 1e8)
    large = [t.looped for t in found if t.group > 1 and t.size >= 131072]
    assert large and set(large) == {not host}


def test_another_function_or_other_arguments_are_refused() -> None:
    f, args = planned(), (jnp.ones((64, 32)), jnp.ones((48, 64)))
    plan = f.plan(*args)
    with pytest.raises(PlanMismatchError, match="another plan"):
        plan.measure(f, jnp.ones((64, 32)), jnp.ones((96, 64)))
    with pytest.raises(ShardError, match="measure takes the function"):
        plan.measure(lambda *a: a, *args)  # pyright: ignore[reportArgumentType]


def test_the_shortest_of_the_devices_counts_for_each_execution() -> None:
    # Two executions on three devices; the last to arrive waits least.
    spans = [(0.0, 9.0), (3.0, 6.0), (7.0, 2.0), (20.0, 4.0), (21.0, 3.0), (22.0, 2.5)]
    assert _least_waits(spans) == 2.0 + 2.5
    assert _least_waits(spans[:1]) == 9.0
