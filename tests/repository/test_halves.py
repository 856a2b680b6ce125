"""The halves of the suite that continuous integration runs: together they are all of it."""

from __future__ import annotations

import pathlib
from types import SimpleNamespace
from typing import Any

import pytest

import conftest


def selected(half: str, names: list[str]) -> list[str]:
    """Of some tests, by node id, those of a half."""
    items: list[Any] = []
    for name in names:
        kind = type("Item", (pytest.DoctestItem,) if name.startswith("jshard/") else (), {"nodeid": name})
        item: Any = object.__new__(kind)  # hashed by identity, as pytest's own
        item.path = pathlib.Path(name.partition("::")[0])
        item.get_closest_marker = lambda mark, name=name: mark if "marked" in name else None
        if "[" in name:
            item.callspec = None
        items.append(item)
    dropped: list[Any] = []
    config: Any = SimpleNamespace(
        getoption=lambda _: half,
        hook=SimpleNamespace(pytest_deselected=lambda items: dropped.extend(items)),
    )
    conftest.pytest_collection_modifyitems(config, items)
    assert sorted(i.nodeid for i in (*items, *dropped)) == sorted(names)
    return [i.nodeid for i in items]


ON_ONE = [
    *(f"tests/search/test_a.py::test_{k}" for k in range(6)),
    *(f"tests/flax/test_b.py::test_cases[{k}]" for k in range(8)),
    *(f"tests/laws/test_c.py::test_cases[{k}]" for k in range(4)),
    *(f"tests/api/test_marked.py::test_{k}" for k in range(4)),
    "jshard/_search/effort.py::jshard._search.effort",
    "jshard/_search/solve.py::jshard._search.solve",
]
ALONE = [f"tests/rules/test_alone_{k}.py::test_one" for k in range(8)]
ON_BOTH = [
    "tests/api/test_d.py::test_one",
    "tests/lower/test_e.py::test_one",
    "tests/api/test_d.py::test_one_case[0]",
]


def test_every_test_is_in_a_half_and_those_of_the_public_functions_in_both() -> None:
    names = [*ON_ONE, *ON_BOTH]
    even, odd = selected("even", names), selected("odd", names)
    assert set(even) | set(odd) == set(names) and set(even) & set(odd) == set(ON_BOTH)
    assert len(even) == len(odd) and selected("all", names) == names
    assert selected("even", names) == even


def test_a_single_test_of_a_file_below_the_public_functions_is_in_one_half() -> None:
    even, odd = selected("even", ALONE), selected("odd", ALONE)
    assert sorted(even + odd) == ALONE and even and odd
