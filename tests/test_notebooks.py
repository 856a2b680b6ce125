"""Notebooks say first what they are for, and are kept with the outputs of a run (`make render`)."""

from __future__ import annotations

import ast
import json
import pathlib

import pytest


FOLDER = pathlib.Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_opens_with_what_the_reader_will_be_able_to_do(path):
    first = json.loads(path.read_text())["cells"][0]
    text = "".join(first["source"])
    assert first["cell_type"] == "markdown" and text.startswith("# ") and "you can" in text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_kept_as_it_ran(path):
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    assert [c["execution_count"] for c in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        last = ast.parse("".join(cell["source"])).body[-1]
        shows = isinstance(last, ast.Expr) and not isinstance(last.value, ast.Call)
        assert cell["outputs"] or not shows, cell["source"]
    assert not any(o["output_type"] == "error" for c in cells for o in c["outputs"])
    assert any(c["outputs"] for c in cells)
