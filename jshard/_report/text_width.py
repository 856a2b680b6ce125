"""How wide text may be: a hundred columns, or those of the terminal that it is printed on where that has fewer."""

from __future__ import annotations

import shutil
import sys


WIDTH = 100
LEAST_WIDTH = 60  # columns below which tables are not made narrower


def text_width() -> int:
    """Columns of a line; a file, a pipe and a notebook have a hundred."""
    stream = sys.stdout
    if stream is None or not hasattr(stream, "isatty") or not stream.isatty():
        return WIDTH
    return max(LEAST_WIDTH, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))


def clip(line: str, width: int) -> str:
    """A line of at most `width` columns.

    >>> clip("abcdef", 5), clip("abc", 5)
    ('abc..', 'abc')
    """
    return line if len(line) <= width else line[: width - 2] + ".."
