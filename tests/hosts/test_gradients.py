"""The plan of a gradient taken from outside is that of process 0 in all processes."""

from __future__ import annotations

import pytest

from tests.hosts.launch import Processes


@pytest.mark.parametrize("budget, pad, level", [(10**9, False, 0), (None, True, 2), (10**9, True, 0)])
def test_gradients_are_planned_alike_and_later_ones_exchange_nothing(
    two: Processes, budget: int | None, pad: bool, level: int
) -> None:
    one, other = two.values("gradient", what="same", budget=budget, pad=pad, level=level)
    assert one[:5] == other[:5]
    assert one[1:4] == [True, 1, 0]
    assert one[4] is pad
    if pad:
        assert "both passes run without the padding" in one[5]


@pytest.mark.parametrize("budget", [None, 10**9])
def test_a_slow_process_takes_the_gradient_plan_of_process_0(two: Processes, budget: int | None) -> None:
    before = len(two.logs[1])
    one, other = two.values("gradient", what="other_plan", budget=budget)
    assert one[:2] == other[:2]
    assert one[1] and one[3] == 1 and other[3] == (1 if budget is None else 0)
    assert not any("another plan" in step for step in other[2])
    told = any(
        "another plan of the derivative of loss than process 0" in line for line in two.logs[1][before:]
    )
    assert told == (budget is None)


FAULTS = {
    "arguments": (
        "call different functions",
        "derivative of step (p.in, p.out)",
        "derivative of step (x)",
    ),
    "function": ("call different functions", "process 0: derivative of step", "process 1: step"),
    "rule": ("traced different programs for the derivative of step", "mul(", "2.0"),
    "raises": (
        "raised an error where the derivative of step is planned",
        "",
        "RuntimeError: the search met a bug",
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_gradients_that_differ_are_an_error_in_both(two: Processes, kind: str) -> None:
    found = two.values("gradient", what="fault", kind=kind)
    about, zero, one = FAULTS[kind]
    for p, (text, goes_on) in enumerate(found):
        assert goes_on
        assert text.startswith("RuntimeError" if (p, kind) == (1, "raises") else "ProcessError"), text
        assert all(part in text for part in (zero, one)), text
        assert about in text or p == 1, text
