"""A tuple of rows that is built at its first use.

A plan of 126 layers has fifty thousand rows for its operators, and running it needs none of them: only a report,
a file or a comparison does. A `LazyTuple` takes the place of the tuple, knows its length, and builds it at the first
access; then it keeps the rows and drops what they were built from.

>>> made = []
>>> rows = LazyTuple(3, lambda: made.append("now") or tuple("abc"))
>>> len(rows), made
(3, [])
>>> rows[1], rows == ("a", "b", "c"), made
('b', True, ['now'])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar


Row = TypeVar("Row")


class LazyTuple(Sequence[Row]):
    """The tuple that `make` returns, built at first use and equal to it; `count` is its length, None if unknown."""

    def __init__(self, count: int | None, make: Callable[[], tuple[Row, ...]]):
        self._count = count
        self._make: Callable[[], tuple[Row, ...]] | None = make
        self._rows: tuple[Row, ...] = ()

    def rows(self) -> tuple[Row, ...]:
        """The tuple itself."""
        if self._make is not None:
            self._rows, self._make = self._make(), None
        return self._rows

    def __len__(self) -> int:
        return len(self.rows()) if self._count is None else self._count

    def __getitem__(self, index: Any) -> Any:
        return self.rows()[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LazyTuple):
            return other is self or self.rows() == other.rows()
        return self.rows() == other

    def __add__(self, other: Iterable[Row]) -> tuple[Row, ...]:
        return (*self, *other)

    def __radd__(self, other: Iterable[Row]) -> tuple[Row, ...]:
        return (*other, *self)

    def __hash__(self) -> int:
        return hash(self.rows())

    def __repr__(self) -> str:
        return repr(self.rows())

    def __reduce__(self) -> tuple:
        return tuple, (self.rows(),)  # pickled as the tuple: `make` is not
