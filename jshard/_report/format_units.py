"""Numbers as people read them.

>>> format_seconds(0.0012), format_bytes(229376), format_bytes(12), format_percent(0.5), format_count(3.0)
('1.2 ms', '224 KiB', '12 B', '50%', '3')
"""

from __future__ import annotations

from collections.abc import Sequence

from jshard._core.messages import format_seconds as format_seconds


def format_bytes(b: float) -> str:
    """Bytes with a binary unit."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if b >= scale:
            return f"{b / scale:.3g} {unit}" if b / scale < 999.5 else f"{b / scale:.0f} {unit}"
    return f"{b:.0f} B"


def format_percent(x: float) -> str:
    """A fraction in percent."""
    return f"{100 * x:.0f}%" if x >= 0.1 or x == 0 else f"{100 * x:.1f}%"


def format_count(x: float) -> str:
    """A number of times."""
    return f"{x:.0f}" if x == int(x) else f"{x:.1f}"


def format_tuple(numbers: Sequence[int]) -> str:
    """Pieces per dimension, written as a Python tuple.

    >>> format_tuple((2, 4)), format_tuple((8,)), format_tuple(())
    ('(2, 4)', '(8,)', '()')
    """
    return "(" + ", ".join(map(str, numbers)) + ("," if len(numbers) == 1 else "") + ")"
