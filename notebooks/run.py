"""Runs the code cells of a notebook in one namespace, without Jupyter: enough to know that it still works.

`python notebooks/run.py NOTEBOOK` executes it and compares the text that its cells print and show with what is kept in
it, but for measured times; `python notebooks/run.py --write NOTEBOOK` keeps what they print and show, as Jupyter would:
text, HTML, pictures. That is how the committed outputs are made.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import difflib
import io
import json
import os
import re
import sys
import time
from typing import Any


# An empty value is none: continuous integration clears the flags of the machine it runs on so. Programs run once on a few
# numbers: what counts is the time to compile them. HLO passes are as ever.
_QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS") or f"--xla_force_host_platform_device_count=8 {_QUICK}"
os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS") or "cpu"


def run(path: str, write: bool = False) -> None:
    """Execute a notebook; the traceback of a failing cell names the cell, `cell_3:2` its second line.

    Raises `SystemExit` where a cell says something else than is kept, unless that is to be written.
    """
    with open(path, encoding="utf-8") as file:
        notebook = json.load(file)
    begun = time.monotonic()
    namespace: dict[str, object] = {"__name__": "__main__"}
    count, differences = 0, []
    for i, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "code":
            continue
        count += 1
        try:
            said, shown = _executed("".join(cell["source"]), f"cell_{i}", namespace)
        except BaseException:
            print(f"{path}: cell {i} failed", file=sys.stderr)
            raise
        kept = _text(cell["outputs"])
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
        now = _text(cell["outputs"])
        differences += difflib.unified_diff(
            kept, now, f"{path}: cell {i}, as kept", "as it runs", lineterm=""
        )
    if write:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(notebook, file, indent=1, ensure_ascii=False)
            file.write("\n")
    elif differences:
        print("\n".join(differences))
        raise SystemExit(f"{path}: outputs are not what its cells say today; `make render` writes them anew")
    print(f"{path}: {count} cells ran in {time.monotonic() - begun:.0f} s")


def _text(outputs: list[Any]) -> list[str]:
    """The lines of text among a cell's outputs, without measured times (`0.41s`) and addresses."""
    text = [
        part for o in outputs for part in (*o.get("text", ()), *o.get("data", {}).get("text/plain", ()), "\n")
    ]
    return re.sub(r"\b\d+\.\d+s\b|0x[0-9a-f]{6,}", "-", "".join(text)).splitlines()


def _executed(source: str, where: str, namespace: dict[str, object]) -> tuple[str, Any]:
    """What a cell prints, and the value of its last expression."""
    tree = ast.parse(source, where)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
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
