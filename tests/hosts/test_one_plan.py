"""Several processes plan alike, run alike, and exchange nothing after the first call of a signature."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import jshard
from jshard._core.saved_chip import chip_to_json
from tests.hosts.launch import Processes


pytestmark = pytest.mark.one_pair


@pytest.mark.parametrize("level", [0, 1, 2])
def test_plans_and_results_are_the_same_and_later_calls_exchange_nothing(two: Processes, level: int) -> None:
    one, other = two.values("same_plan_and_results", level=level)
    assert one == other
    _, _, right, again, verified, first, later = one
    assert right and again and verified
    assert (first, later) == (1, 0)


def test_four_processes_of_two_devices_plan_as_two_of_four(two: Processes, four: Processes) -> None:
    assert len({str(v) for v in four.values("same_plan_and_results", level=0)}) == 1
    plans = [p.values("same_plan_and_results", level=0)[0][0] for p in (two, four)]
    assert plans[0] == plans[1]


def test_a_slow_process_with_another_plan_takes_that_of_process_0(two: Processes) -> None:
    one, other = two.values("other_plan", seconds=0.3)
    assert one[:5] == other[:5]
    assert one[2:5] == [True, "optimal", True]
    assert other[5] == "searched by process 0" != one[5]
    assert any("found another plan" in line for line in two.logs[1])


@pytest.mark.parametrize(
    "level, budget, mesh", [(0, 10**9, None), (1, None, None), (2, 10**9, "auto"), (0, 10**9, "auto:8")]
)
def test_searches_with_memory_run_in_process_0_only(
    two: Processes, level: int, budget: int | None, mesh: str | None
) -> None:
    one, other = two.values("searched_by_one", level=level, budget=budget, mesh=mesh)
    assert one == other
    assert one[2:] == [True, 0]


def test_a_chip_with_memory_may_be_a_file(two: Processes, tmp_path: Path) -> None:
    saved = dataclasses.replace(jshard.hardware.get("v5e"), name="measured-v5e")
    (tmp_path / "chip.json").write_text(chip_to_json(saved, {"date": "2026-11-23"}))
    chip = str(tmp_path / "chip.json")
    one, other = two.values("searched_by_one", level=0, budget=None, chip=chip)
    assert one == other and one[2:] == [True, 0]


@pytest.mark.parametrize("process", [0, 1])
def test_one_process_may_plan_alone_first(two: Processes, process: int) -> None:
    one, other = two.values("planned_first", process=process)
    assert one == other


def test_under_jit_and_grad(two: Processes) -> None:
    one, other = two.values("under_transformations")
    assert one == other and one[1]


def test_all_kinds_of_containers(two: Processes) -> None:
    one, other = two.values("containers")
    assert one == other
    assert one[1:3] == [True, 3] and one[4]


def test_two_meshes_and_a_mesh_without_devices_of_a_process(two: Processes) -> None:
    one, other = two.values("meshes")
    assert one[0] == other[0]
    assert one[1] is True and one[2] and other[2]
    assert other[1] == (
        "process 1 has none of the 4 devices that two_layers is planned for: they belong to process 0\n"
        "  where: call of two_layers\n"
        "  write instead: a mesh with devices of every process, or the call only where they are: "
        "if jax.process_index() in (0,)"
    )
