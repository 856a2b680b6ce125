"""Text files that a call writes; a folder that does not exist is an error of jshard's.

>>> write_file("nowhere/plan.json", "{}", "Plan.save")
Traceback (most recent call last):
...
jshard._core.errors.ShardError: nowhere/plan.json cannot be written: No such file or directory
  where: Plan.save
  write instead: a file in a folder that exists
"""

from __future__ import annotations

import os
from pathlib import Path

from jshard._core.errors import ShardError


def write_file(path: str | Path, text: str, where: str) -> None:
    """Write a text to a file; a `ShardError` where that cannot be."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ShardError(
            f"{path} cannot be written: {error.strerror}", where=where, fix="a file in a folder that exists"
        ) from None


def check_writable(path: str | Path, where: str) -> None:
    """A `ShardError` for a file that `write_file` could not write, known before what it shall hold."""
    target = Path(path)
    if target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK):
        reason = "it is a folder" if target.is_dir() else "there is no such folder, or it is not writable"
        raise ShardError(
            f"{path} cannot be written: {reason}", where=where, fix="a file in a folder that exists"
        )
