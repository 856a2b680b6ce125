"""Runs the code cells of a notebook in one namespace, without Jupyter: enough to know that it still works.

`python notebooks/run.py NOTEBOOK` executes it, `python notebooks/run.py --write NOTEBOOK` also writes into it what
its cells print and show, as Jupyter would: text, HTML, pictures. That is how the committed outputs are made.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
import time
from typing import Any


# An empty value is none: continuous integration clears the flags of the machine it runs on so.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS") or "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS") or "cpu"


def run(path: str, write: bool = False) -> None:
    """Execute a notebook; the traceback of a failing cell names the cell, `cell_3:2` its second line."""
    with open(path, encoding="utf-8") as file:
        notebook = json.load(file)
    begun = time.monotonic()
    namespace: dict[str, object] = {"__name__": "__main__"}
    count = 0
    for i, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "code":
            continue
        count += 1
        try:
            said, shown = _executed("".join(cell["source"]), f"cell_{i}", namespace, quiet=write)
        except BaseException:
            print(f"{path}: cell {i} failed", file=sys.stderr)
            raise
        cell["execution_count"] = count
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": _lines(said)}] if said else []
        if shown is not None:
            cell["outputs"].append(
                {
                    "output_type": "execute_result",
                    "execution_count": count,
                    "metadata": {},
                    "data": _data(shown),
                }
            )
    if write:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(notebook, file, indent=1, ensure_ascii=False)
            file.write("\n")
    print(f"{path}: {count} cells ran in {time.monotonic() - begun:.0f} s")


def _executed(source: str, where: str, namespace: dict[str, object], quiet: bool) -> tuple[str, Any]:
    """What a cell prints, and the value of its last expression."""
    tree = ast.parse(source, where)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    said = io.StringIO()
    with contextlib.redirect_stdout(said) if quiet else contextlib.nullcontext():
        exec(compile(tree, where, "exec"), namespace)
        shown = None if last is None else eval(compile(ast.Expression(last.value), where, "eval"), namespace)
    return said.getvalue(), shown


def _data(value: Any) -> dict[str, Any]:
    """A value in the forms in which a notebook keeps it."""
    data: dict[str, Any] = {"text/plain": _lines(repr(value))}
    if hasattr(value, "savefig"):
        picture = io.BytesIO()
        value.savefig(picture, format="png", dpi=80)
        data = {"text/plain": ["<Figure>"], "image/png": base64.b64encode(picture.getvalue()).decode()}
    elif hasattr(value, "_repr_html_"):
        data = {"text/plain": _lines(str(value)), "text/html": _lines(value._repr_html_())}
    return data


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    run(sys.argv[-1], write="--write" in sys.argv)
