"""Paths named by the pages exist, and the terms of `docs/where.md` are in the files it names."""

from __future__ import annotations

import pathlib
import re
import tomllib

import pytest

import jshard
from tests.helpers.import_graph import ORDER, ROOT


PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PATH = re.compile(r"`((?:jshard/|tests/|benchmarks/|docs/|notebooks/|_[a-z]+/)[\w./-]*)`")
WHERE = re.compile(r"^\| (.+?) \| (`.+`) \| `(\S+)` \|$", re.M)


def missing_paths(text: str) -> list[str]:
    """Paths in code quotes that do not exist; those that begin with a folder of the package stand below `jshard/`."""
    paths = [m[1] for m in PATH.finditer(text)]
    return [p for p in paths if not (ROOT / p).exists() and not (ROOT / "jshard" / p).exists()]


def wrong_rows(text: str) -> list[str]:
    """Rows of a table `task | terms | file` whose file has one of the terms neither in its text nor in its name."""
    wrong = []
    for task, terms, path in WHERE.findall(text):
        file = ROOT / path
        content = (path.replace("_", " ") + "\n" + file.read_text() if file.exists() else "").lower()
        wrong += [
            f"{task}: {t} in {path}" for t in re.findall(r"`([^`]+)`", terms) if t.lower() not in content
        ]
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_paths_exist(page: pathlib.Path) -> None:
    assert missing_paths(page.read_text()) == []


def test_a_missing_path_is_found() -> None:
    text = "`jshard/_core/layout.py` `_core/layout.py` `docs/nothing.md` `jshard/_core/nothing.py` `_core/nothing.py`"
    assert missing_paths(text) == ["docs/nothing.md", "jshard/_core/nothing.py", "_core/nothing.py"]


def test_terms_are_found_where_the_page_says() -> None:
    page = (ROOT / "docs" / "where.md").read_text()
    assert len(WHERE.findall(page)) >= 20
    assert wrong_rows(page) == []


def test_a_wrong_row_is_found() -> None:
    row = "| a task | `Layout`, `TRW-S` | `jshard/_core/layout.py` |"
    assert wrong_rows(row) == ["a task: TRW-S in jshard/_core/layout.py"]
    assert wrong_rows("| a task | `x` | `jshard/nothing.py` |") == ["a task: x in jshard/nothing.py"]


def test_contributing_gives_the_order_of_the_folders() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().split("wherever the import stands:")[1].split("\n\n")[1]
    assert re.findall(r"`(\w+)`", text) == [p for p in ORDER if p not in ("__init__", "__main__")]


def test_a_wheel_gets_its_version_from_the_one_place_that_has_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    source = (ROOT / project["tool"]["hatch"]["version"]["path"]).read_text()
    # As hatchling reads it.
    found = re.search(r"^(?:__version__|VERSION) *= *[\"'](.+?)[\"']", source, flags=re.MULTILINE)
    assert found and found[1] == jshard.__version__
