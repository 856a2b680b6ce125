"""The pages of `docs/`: their code runs and prints what they show, their links lead somewhere, the reference is complete."""

from __future__ import annotations

import pathlib
import re
import sys

import pytest

import jshard
from jshard._plan import rows
from tests.helpers.pages import differences, pages_with_code
from tests.helpers.readme import ROOT
from tests.repository.test_architecture import PUBLIC


DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(markdown: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    prose = re.sub(r"```.*?```", "", markdown, flags=re.DOTALL)
    heads = re.findall(r"^#+ +(.+?) *$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}


def broken_links(page: pathlib.Path, text: str) -> list[str]:
    """Relative links of a page to files that do not exist, or to headings that a page lacks."""
    broken = []
    for target, anchor in LINK.findall(re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)):
        file = (page.parent / target) if target else page
        if file.parent == DOCS / "tutorials" and file.suffix == ".ipynb":
            file = ROOT / "notebooks" / file.name  # conf.py copies them there
        if not file.exists() or anchor and anchor not in anchors(file.read_text()):
            broken.append(target + (f"#{anchor}" if anchor else ""))
    return broken


def test_the_code_of_the_pages_prints_what_they_show() -> None:
    # Half of the pages on each version of Python that continuous integration runs; `make pages` runs them all.
    pages = pages_with_code()
    assert len(pages) >= 10
    assert differences(pages[sys.version_info.minor % 2 :: 2]) == []


def test_a_page_that_shows_something_else_is_found(tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n")
    assert differences([page]) == ["page.md: print(1 + 1)\n\nprints:\n2\n"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links_lead_somewhere(page: pathlib.Path) -> None:
    assert broken_links(page, page.read_text()) == []


def test_a_broken_link_is_found() -> None:
    text = "[a](nothing.md) [b](index.md) [c](howto/read_a_plan.md#figures) [d](howto/read_a_plan.md#nothing) `[e](f.md)`"
    assert broken_links(DOCS / "index.md", text) == ["nothing.md", "howto/read_a_plan.md#nothing"]


def test_every_page_is_in_a_table_of_contents() -> None:
    listed = {
        (page.parent / entry).resolve()
        for page in DOCS.rglob("*.md")
        for tree in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), flags=re.DOTALL)
        for entry in tree.split()
        if not entry.startswith(":")
    }
    missing = [p.name for p in DOCS.rglob("*.md") if p.with_suffix("") not in listed and p.name != "index.md"]
    assert missing == []


def test_the_reference_has_every_public_name() -> None:
    pages = "\n".join(p.read_text() for p in (DOCS / "reference").glob("*.md"))
    named = {n.split(".")[-1] for n in re.findall(r":: ([\w.]+)", pages)}
    named |= {n for line in re.findall(r":: jshard\.([\w.]+)", pages) for n in line.split(".")}
    assert [n for n in PUBLIC if n not in named] == []
    assert "jshard._plan.rows" in pages and rows.__name__ == "jshard._plan.rows"
    methods = [n for n in dir(jshard.Plan) if not n.startswith("_") and callable(getattr(jshard.Plan, n))]
    assert [n for n in methods if n not in pages] == []


def test_ten_questions_have_an_answer_each() -> None:
    questions = (DOCS / "questions.md").read_text().split("And then:")[0]
    table = [line for line in questions.splitlines() if line.startswith("|")][2:]
    assert len(table) == 10
    assert all(len(LINK.findall(line)) >= 1 for line in table)
