"""The README's code runs as pasted, on a machine with one device, and prints what the README shows."""

from __future__ import annotations

import pytest

from tests.helpers.readme import ROOT, blocks, check, printed, with_output


def test_blocks_are_found_with_their_output() -> None:
    assert blocks("```python\na\n```\n\n```text\nb\n```\nwords\n```python\nc\n```\n") == [
        ("a\n", "b\n"),
        ("c\n", None),
    ]


def test_the_readme_prints_what_it_says() -> None:
    check(ROOT / "README.md")


def test_code_that_fails_is_found() -> None:
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        printed(["1 / 0"])


def test_the_output_is_written_after_its_block() -> None:
    readme = "```python\na\n```\n\n```text\nold\n```\nwords\n```python\nb\n```\n"
    assert with_output(readme, ["new\n", "unwanted\n"]) == readme.replace("old", "new")
