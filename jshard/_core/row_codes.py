"""Concatenated index ranges, and integer codes of the rows of several columns: what numpy has no function for.

>>> concat_ranges(np.array([5, 0]), np.array([7, 3])).tolist()
[5, 6, 0, 1, 2]
"""

from __future__ import annotations

import numpy as np

from jshard._core.arrays import Ints


def concat_ranges(begin: Ints, end: Ints) -> Ints:
    """The ranges `begin[i]:end[i]`, concatenated."""
    count = end - begin
    start = np.cumsum(count) - count
    return np.arange(int(count.sum())) + np.repeat(begin - start, count)


def row_codes(*columns: Ints) -> Ints:
    """One integer per row of columns of integers >= 0, equal if and only if the rows are equal.

    >>> a, b, c = row_codes(np.array([3, 3, 0]), np.array([1, 1, 2])).tolist()
    >>> a == b, a == c
    (True, False)
    """
    code, size = columns[0], 1 + int(columns[0].max(initial=0))
    for column in columns[1:]:
        n = 1 + int(column.max(initial=0))
        if size * n >= 2**62:
            code = np.unique(code, return_inverse=True)[1]
            size = 1 + int(code.max(initial=0))
        code, size = code * n + column, size * n
    return code


def first_occurrence_codes(code: Ints) -> tuple[Ints, list[int]]:
    """Codes renumbered 0, 1, ... by first occurrence, and the index of each first occurrence.

    >>> first_occurrence_codes(np.array([7, 2, 7, 5]))
    (array([0, 1, 0, 2]), [0, 1, 3])
    """
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return rank[inverse], first[order].tolist()
