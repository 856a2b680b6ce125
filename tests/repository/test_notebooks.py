"""Notebooks begin with their purpose, and are stored with the outputs of a run (`make render`)."""

from __future__ import annotations

import ast
import json
import pathlib
import subprocess
import sys

import pytest


FOLDER = pathlib.Path(__file__).parents[2] / "notebooks"
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


def kept(folder: pathlib.Path, source: str, said: str) -> pathlib.Path:
    """A notebook of one cell with what it is kept to have said."""
    cell = {"cell_type": "code", "execution_count": 1, "source": [source],
            "outputs": [{"output_type": "stream", "name": "stdout", "text": [said]}]}  # fmt: skip
    path = folder / "one.ipynb"
    path.write_text(json.dumps({"cells": [cell]}))
    return path


def ran(path: pathlib.Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "run.py"), *options, str(path)]
    return subprocess.run(command, capture_output=True, text=True)


def test_outputs_that_are_not_what_the_code_prints_are_found(tmp_path):
    path = kept(tmp_path, "print('no plan fits')", "one of 12 GB is found\n")
    done = ran(path)
    assert done.returncode == 1 and "`make render` writes them anew" in done.stderr
    assert "-one of 12 GB is found" in done.stdout and "+no plan fits" in done.stdout
    assert ran(path, "--write").returncode == 0 and ran(path).returncode == 0


def test_measured_times_are_not_compared(tmp_path):
    assert (
        ran(
            kept(tmp_path, "print('  0.41s  messages: cost 2 us')", "  12.80s  messages: cost 2 us\n")
        ).returncode
        == 0
    )
    assert ran(kept(tmp_path, "print('cost 3 us')", "cost 2 us\n")).returncode == 1
