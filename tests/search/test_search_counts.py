"""The search does as much work as it did, and finds what it found: counts, which no clock moves, are compared exactly."""

from __future__ import annotations

import json

import pytest

from tests.helpers.search_counts import JAX_VERSION, PROGRAMS, STORED, counted, counts


STORED_COUNTS = json.loads(STORED.read_text())


def test_every_program_is_stored_for_both_versions() -> None:
    assert {version: list(rows) for version, rows in STORED_COUNTS.items()} == {
        "jax 0.10": list(PROGRAMS),
        "jax 0.12": list(PROGRAMS),
    }


@pytest.mark.parametrize("name", PROGRAMS)
def test_counts_are_those_stored(name: str) -> None:
    if JAX_VERSION not in STORED_COUNTS:
        pytest.skip(f"no counts of {JAX_VERSION}; `make counts` writes them")
    assert counts(name) == STORED_COUNTS[JAX_VERSION][name], "`make counts` writes them anew"


def test_a_search_that_does_more_is_found() -> None:
    with counted() as once:
        PROGRAMS["ffn"]()
    with counted() as twice:
        PROGRAMS["ffn"]()
        PROGRAMS["ffn"]()
    assert once["searches"] > 0 and twice == {
        **{k: 2 * v for k, v in once.items()},
        "variables": once["variables"],
    }
