"""Arithmetic on arrays of numbers that stand for other things: runs of them, rows of them, equal ones.

Problem.  Tens of thousands of operators, edges or states are worked on as arrays, and an array of places is often
made from where runs begin, or one number for each row of several columns is asked for.

Idea.  Three functions that numpy has no name for. They know nothing of programs or networks, so all floors use them.

>>> concat_ranges(np.array([5, 0]), np.array([7, 3])).tolist()
[5, 6, 0, 1, 2]
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


Ints = NDArray[np.int64]


def concat_ranges(begin: Ints, end: Ints) -> Ints:
    """All numbers from each beginning to its end, one after the other."""
    count = end - begin
    start = np.cumsum(count) - count
    return np.arange(int(count.sum())) + np.repeat(begin - start, count)


def row_codes(*columns: Ints) -> Ints:
    """One number for each row of some columns of numbers from 0, the same where the rows are.

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
    """Numbers for equal codes in the order in which they come, and where each comes first.

    >>> first_occurrence_codes(np.array([7, 2, 7, 5]))
    (array([0, 1, 0, 2]), [0, 1, 3])
    """
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return rank[inverse], first[order].tolist()
