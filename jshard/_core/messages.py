"""Phrases shared by error messages: values, counts and choices as readable text."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Sequence


def type_with_article(value: object) -> str:
    """The type of a value with its article: "an int", "a str"; None is just "None".

    >>> type_with_article(3), type_with_article("x"), type_with_article(None)
    ('an int', 'a str', 'None')
    """
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def describe_value(value: object) -> str:
    """A wrong value: its type, and its `repr`, shortened."""
    return "None" if value is None else f"{type_with_article(value)}, {reprlib.repr(value)}"


def format_seconds(s: float) -> str:
    """Seconds with a fitting unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if s >= scale:
            return f"{s / scale:.3g} {unit}"
    return "0" if not s else f"{s * 1e9:.3g} ns" if s >= 1e-10 else "<0.1 ns"


def count_of(n: int, one: str, many: str = "") -> str:
    """A number with its noun; the plural adds an "s" unless `many` is given.

    >>> count_of(1, "cut"), count_of(0, "cut"), count_of(2, "entry", "entries")
    ('1 cut', 'no cuts', '2 entries')
    """
    return f"{n or 'no'} {one if n == 1 else many or one + 's'}"


def say_interrupted(steps: Iterable[str]) -> bool:
    """Whether one of a plan's steps says that a search was interrupted; names and paths in steps do not count.

    >>> say_interrupted(["an earlier part was interrupted"]), say_interrupted(["computed again exp /interrupted/a.py:3"])
    (True, False)
    """
    return any(re.search(r"(^|\s)interrupted($|[:,])", step) for step in steps)


def join_choices(choices: Sequence[object]) -> str:
    """Choices as a list with "or": "1, 2 or 4"."""
    *head, last = map(str, choices)
    return f"{', '.join(head)} or {last}" if head else last


def abbreviate(names: Sequence[str], most: int = 8) -> str:
    """The first `most` names, and how many more there are."""
    return ", ".join(names[:most]) + (f", and {len(names) - most} more" if len(names) > most else "")


def suggest(name: str, known: Sequence[str], count: int = 3) -> str:
    """The known names closest to a misspelt one (`difflib.get_close_matches`), as a list with "or".

    >>> suggest("kernal", ["kernel", "bias"]), suggest("q", ["kernel", "bias"])
    ("'kernel'", "'kernel' or 'bias'")
    """
    close = difflib.get_close_matches(name, known, n=count, cutoff=0.5) or list(known)[:8]
    return join_choices([repr(str(n)) for n in close]) if close else "nothing there"


def short_source(source: str) -> str:
    """File and line without folders, column and function.

    >>> short_source("/home/me/net.py:12:4 (Net.__call__)"), short_source("")
    ('net.py:12', '')
    """
    place = source.split(" ")[0].rsplit("/", 1)[-1].split(":")
    return ":".join(place[:2])
