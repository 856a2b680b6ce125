"""Processes that the tests of this folder share: starting them takes longer than most tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.launch import Processes


@pytest.fixture(scope="session")
def two() -> Iterator[Processes]:
    """Two processes with four CPU devices each, joined by gloo."""
    yield from _started(2, 4)


@pytest.fixture(scope="session")
def four() -> Iterator[Processes]:
    """Four processes with two CPU devices each."""
    yield from _started(4, 2)


def _started(count: int, devices: int) -> Iterator[Processes]:
    processes = Processes(count, [devices] * count)
    try:
        for p in range(count):
            assert processes.result(p) == {"value": [8, p]}
        yield processes
    finally:
        processes.stop()
