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
from jshard._core.messages import type_with_article


def path_of(path: object, where: str) -> Path:
    """The path that a call was given.

    >>> path_of(3, "Plan.save")
    Traceback (most recent call last):
    ...
    jshard._core.errors.ShardError: Plan.save takes a path, not an int
      where: Plan.save
      write instead: the path of a file
    """
    if not isinstance(path, str | os.PathLike):
        text = f"{where} takes a path, not {type_with_article(path)}"
        raise ShardError(text, where=where, fix="the path of a file")
    return Path(path)


def write_file(path: str | os.PathLike[str], text: str, where: str) -> None:
    """Write a text to a file; a `ShardError` where that cannot be."""
    target = path_of(path, where)
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ShardError(
            f"{path} cannot be written: {error.strerror}", where=where, fix="a file in a folder that exists"
        ) from None


def check_writable(path: str | os.PathLike[str], where: str) -> None:
    """A `ShardError` for a file that `write_file` could not write, known before what it shall hold."""
    target = path_of(path, where)
    if target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK):
        reason = "it is a folder" if target.is_dir() else "there is no such folder, or it is not writable"
        raise ShardError(
            f"{path} cannot be written: {reason}", where=where, fix="a file in a folder that exists"
        )
