"""Processes that differ, fail or die: the others end with an error that says what it was, in seconds."""

from __future__ import annotations

import pytest

from tests.hosts.launch import Processes


DIFFERENCES = {
    "shapes": ("with different arguments", "process 1: x: float32[24,16]"),
    "dtype": ("with different arguments", "process 1: x: int32[16,16]"),
    "name": ("call different functions", "process 1: evaluate"),
    "trace": ("traced different programs", "process 1: 1: float32[16,16] = cumsum(0) axis=1"),
    "literal": ("traced different programs", "process 1: 4: float32[16,16] = mul(3, 2.0)"),
    "option": ("with different options", "process 1: level=2"),
    "host values": ("with different host values", "process 1: x: float32[16,16] 76"),
    "other version": ("run different versions", "process 1: jshard 0.0.9"),
}


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_a_difference_is_an_error_in_all_with_the_first_difference(two: Processes, kind: str) -> None:
    one, other = two.values("fault", kind=kind)
    for name, text, seconds in (one, other):
        assert name == "ProcessError"
        assert all(part in text for part in DIFFERENCES[kind]), text
        assert "write instead" in text
        assert seconds < 30


@pytest.mark.parametrize(
    "kind, error, quoted",
    [
        ("raises in trace", "OSError", "process 1: OSError: no file here"),
        ("raises in search", "RuntimeError", "process 1: RuntimeError: the search met a bug"),
        ("wrong call", "StrategyError", "process 1: ArgumentError: argument x is a str"),
    ],
)
def test_a_process_that_fails_to_plan_stops_the_others(
    two: Processes, kind: str, error: str, quoted: str
) -> None:
    one, other = two.values("fault", kind=kind)
    assert one[0] == "ProcessError" and quoted in one[1], one
    assert other[0] == error
    assert two.values("fault", kind="none")[0][1] == ""  # both go on


def test_the_error_of_process_0_and_of_the_last_of_four(four: Processes) -> None:
    found = four.values("fault", kind="raises in search", process=0)
    assert [f[0] for f in found] == ["RuntimeError", *["ProcessError"] * 3]
    found = four.values("fault", kind="literal", process=3)
    assert all("process 3: 4: float32[16,16] = mul(3, 2.0)" in f[1] for f in found)


def test_a_process_that_does_not_call_is_waited_for_so_long_only(two: Processes) -> None:
    one, late = two.values("fault", kind="calls late")
    assert one[0] == late[0] == "ProcessError"
    assert "process 1 did not call step within 1 s of process 0" in one[1] and one[2] < 30
    assert "process 0: ProcessError" in late[1]
    assert two.values("fault", kind="none")[0][1] == ""


@pytest.mark.parametrize("where", ["planning", "step"])
def test_a_process_that_dies_ends_the_others(where: str) -> None:
    processes = Processes(2, [2, 2], heartbeat=10)
    try:
        assert processes.result(0)["value"] == [4, 0] and processes.result(1)["value"] == [4, 1]
        for p in (0, 1):
            processes.start(p, "die", where=where)
        survivor = processes.result(0, seconds=90)
        assert processes.result(1, seconds=90)["ended"] == 3
    finally:
        processes.stop()
    # JAX ends the process when heartbeats are missing, and the log has what it waited for.
    if where == "planning":
        assert survivor["ended"] != 0
        log = "".join(processes.logs[0])
        assert "process 0 waits for process 1 to plan step" in log
        assert "another task died" in log
    else:  # in a collective, gloo sees the connection closed
        assert "by peer" in str(survivor) or "another task died" in str(survivor)
