"""Data of each process: local batches, arrays of all processes, checkpoints over other numbers of processes."""

from __future__ import annotations

import math
import pathlib

import numpy as np
import pytest

from tests.hosts import training
from tests.hosts.launch import Processes


pytestmark = pytest.mark.one_pair


@pytest.mark.parametrize("cut", [(8, 1), (2, 4), (1, 8)])
def test_local_batches_give_the_results_of_the_whole_batch(two: Processes, cut: tuple[int, int]) -> None:
    one, other = two.values("local_batches", cut=cut)
    assert one == other == [True, True, 0, [32, 16]]
    gathered = any("is gathered on every host" in line for line in two.logs[0])
    assert gathered or cut != (1, 8)


def test_local_batches_of_four_processes(four: Processes) -> None:
    assert four.values("local_batches", cut=(4, 2)) == [[True, True, 0, [32, 16]]] * 4


def test_local_batches_of_different_sizes_and_wrong_names(two: Processes) -> None:
    for sizes, name in two.values("wrong_local_batches"):
        what, where, fix = sizes.rsplit("\n", 2)
        assert what == (
            "processes 0 and 1 call batch_network with different arguments\n"
            "    process 0: batch.x: 16 rows here, with those of the others float32[32,16]\n"
            "    process 1: batch.x: 12 rows here, with those of the others float32[24,16]"
        )
        assert where.startswith("  where: call of batch_network, plan ") and where.endswith(
            ", arguments, line 4"
        )
        assert fix == (
            "  write instead: as many rows in every process: drop the last batch where it is smaller, or add rows "
            "that count nothing"
        )
        assert name == (
            "local_batch names 'btch', and batch_network is called without such an argument\n"
            "  where: local_batch of batch_network\n"
            "  write instead: 'batch'"
        )


def test_arrays_of_all_processes_are_arguments_and_results(two: Processes) -> None:
    assert two.values("arrays_of_all_processes") == [[True, True, [4, False]]] * 2


def test_the_check_of_host_values_can_be_switched_off(two: Processes) -> None:
    assert two.values("unchecked_host_arrays") == [True, True]


def test_the_demo_trains(two: Processes) -> None:
    sizes = {"layers": 1, "width": 32, "heads": 2, "context": 8, "batch": 16, "learning_rate": 1e-2}
    one, other = two.values("demo", steps=4, **sizes)
    assert one == other
    assert abs(one[0] - math.log(128)) < 0.2  # nothing is learned yet: all characters are about as likely
    assert one[3] < one[0] - 0.1


def test_training_goes_on_in_one_process_and_again_in_two(two: Processes, tmp_path: pathlib.Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    losses, same = two.values("train", read="", write=first, begin=0, steps=2, cut=False)
    assert losses == same
    losses += training.train(first, second, 2, 2, cut=True)  # this process alone, another plan
    one, other = two.values("train", read=second, write="", begin=4, steps=2, cut=False)
    assert one == other
    whole = training.train("", "", 0, 6, cut=False)
    np.testing.assert_allclose([*losses, *one], whole, rtol=1e-4)
    assert whole[-1] < whole[0]


def test_with_the_persistent_cache_of_compiled_programs(two: Processes, tmp_path: pathlib.Path) -> None:
    assert two.values("cached_program", folder=str(tmp_path)) == [[True, True, True]] * 2


def test_random_programs_are_planned_and_run_alike(two: Processes) -> None:
    one, other = two.values("fuzzed", seed=5, numbers=[0, 1, 2, 3, 4, 5], high=12)
    assert one == other
    assert sum(isinstance(results, list) for _, results in one.values()) >= 4


def test_processes_with_four_and_two_devices() -> None:
    processes = Processes(2, [4, 2])
    try:
        assert [processes.result(p)["value"] for p in (0, 1)] == [[6, 0], [6, 1]]
        one, other = processes.values("unequal_devices")
    finally:
        processes.stop()
    assert one == other
    _, right, local, refused, gradient = one
    assert right == [True] * 6 and local and gradient
    assert "processes 0 and 1 call batch_network with different arguments" in refused
    assert "write instead: as many rows in every process" in refused
    assert any("is gathered on every host" in line for line in processes.logs[0])
