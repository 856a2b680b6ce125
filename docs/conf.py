"""Sphinx with MyST-NB, as JAX and Flax build theirs: Markdown, notebooks with stored outputs, API from docstrings.

`make docs` builds in an environment of its own, without network: nothing is executed, no inventory of another project is
fetched. Notebooks are run by `make notebooks`, the code of the pages by `tests/repository/test_pages.py`.
"""

from __future__ import annotations

import pathlib
import re
import shutil

import jshard


ROOT = pathlib.Path(__file__).parents[1]

project = "jshard"
author = "the authors of jshard"
release = version = jshard.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"jshard {release}"
html_copy_source = False

add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True, "undoc-members": True}
python_maximum_signature_line_length = 90

ITEM = re.compile(r"(\s*)- ")
CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")


def docstring_as_rst(
    app: object, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Docstrings are in Markdown: an item of a list goes on with an indent of four, code stands in single backquotes."""
    indent: str | None = None  # of the item that a line goes on with
    example = False
    for i, line in enumerate(lines):
        example = line.lstrip().startswith(">>>") or example and bool(line.strip())
        if example:
            indent = None
            continue
        if match := ITEM.match(line):
            indent = match[1]
        elif indent is not None and line.startswith(indent + "    "):
            line = f"{indent}  {line.strip()}"
        else:
            indent = None
        lines[i] = CODE.sub(r"``\1``\\ ", line)


def notebooks_beside_the_pages(app: object, config: object) -> None:
    """Notebooks are sources of Sphinx only below its folder: a copy for the build, which git ignores."""
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        shutil.copyfile(notebook, ROOT / "docs" / "tutorials" / notebook.name)


def setup(app) -> None:
    """Connect the steps above."""
    app.connect("config-inited", notebooks_beside_the_pages)
    app.connect("autodoc-process-docstring", docstring_as_rst)
