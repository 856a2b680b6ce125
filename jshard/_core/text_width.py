"""How wide text may be: a hundred columns, or those of the terminal that it is printed on where that has fewer."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable


WIDTH = 100
LEAST_WIDTH = 60  # columns below which tables are not made narrower


def text_width() -> int:
    """Columns of a line; a file, a pipe and a notebook have a hundred."""
    return terminal_width() or WIDTH


def terminal_width() -> int:
    """Columns of the terminal that is printed on, at most a hundred; 0 where text goes elsewhere."""
    stream = sys.stdout
    if stream is None or not hasattr(stream, "isatty") or not stream.isatty():
        return 0
    return max(LEAST_WIDTH, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))


def clip(line: str, width: int) -> str:
    """A line of at most `width` columns.

    >>> clip("abcdef", 5), clip("abc", 5)
    ('abc..', 'abc')
    """
    return line if len(line) <= width else line[: width - 2] + ".."


def wrapped(lines: Iterable[str], width: int | None = None) -> str:
    """Lines of words as text, on a terminal of at most its columns; what follows in a new line stands further in.

    Only a word that is longer than that is broken.

    >>> print(wrapped(["  arguments: 2 per example, 9 shared"], 20))
      arguments: 2 per
          example, 9
          shared
    """
    width = terminal_width() if width is None else width
    if not width:
        return "\n".join(lines)
    out: list[str] = []
    for line in lines:
        start = line[: len(line) - len(line.lstrip())]
        out += textwrap.wrap(line, width, subsequent_indent=start + "    ", break_on_hyphens=False) or [""]
    return "\n".join(out)
