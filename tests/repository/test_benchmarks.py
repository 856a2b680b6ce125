"""Benchmark programs import, time functions that exist, and are listed in the index; none is run."""

from __future__ import annotations

import json
import re
import subprocess
import sys

from benchmarks.models import recipes
from tests.helpers.import_graph import ROOT


PROGRAMS = sorted(p for p in (ROOT / "benchmarks").glob("*/*.py") if "__main__" in p.read_text())
CHECK = """
import importlib
import operator
import sys

for name in sys.argv[1:]:
    importlib.import_module(name)
search = importlib.import_module("benchmarks.planning.search")
for module, function, _ in search.PHASES:
    assert callable(operator.attrgetter(function)(importlib.import_module(module)))
"""


def test_programs_import_and_time_functions_that_exist() -> None:
    names = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in PROGRAMS]
    run = subprocess.run([sys.executable, "-c", CHECK, *names], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def links(index: str) -> set[str]:
    """The pages that a Markdown text links to."""
    return set(re.findall(r"\]\(([^)]+)\)", index))


def test_the_index_names_every_program_and_page() -> None:
    folder = ROOT / "benchmarks"
    index = (folder / "README.md").read_text()
    assert not [p.stem for p in PROGRAMS if f"`{p.stem}`" not in index]
    assert links(index) == {str(p.relative_to(folder)) for p in folder.glob("*/*.md")}


def test_pages_lie_beside_their_programs() -> None:
    pages = (ROOT / "benchmarks").glob("*/*.md")
    assert not [p for p in pages if not p.with_suffix(".py").exists()]


def test_the_table_of_recipes_in_the_documentation_is_that_of_its_rows() -> None:
    rows = json.loads(recipes.RESULTS.read_text())
    assert recipes.PAGE.read_text() == recipes.page(rows)
    assert {r["model"] for r in rows} <= set(recipes.FAMILIES)
