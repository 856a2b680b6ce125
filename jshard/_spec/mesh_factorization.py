"""Factorizations of a device count into axis sizes such that every pinned cut is a product of axis sizes.

`fewest_axes` factors a count into the axes of a new mesh; `split` factors the axes of a given mesh further. Both
enumerate candidates by ascending number of axes and test every pin. A *grid* here is a tuple of axis sizes.

The cuts of one tensor should use the axes in mesh order. So (4, 2) and (2, 4) on 8 devices give 2 x 2 x 2, where one
layout becomes the other by moving a single axis, and not 4 x 2, where no axes are common. Only if no such grid exists
may a tensor use the axes in any order.

>>> fewest_axes(8, [(4, 2)]), fewest_axes(8, [(2, 1), (1, 4), (4, 1)]), fewest_axes(8, [(4, 2), (2, 4)])
((4, 2), (2, 4), (2, 2, 2))
>>> split((8,), [(4,)]), split((2, 4), [(4, 2)]), split((3, 4), [(6,)])
(((4, 2),), ((2,), (4,)), ((3,), (2, 2)))
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence


Cuts = tuple[int, ...]


def fewest_axes(count: int, wanted: Sequence[Cuts]) -> tuple[int, ...] | None:
    """The factorization of `count` with the fewest axes that expresses every tuple of cuts; None if none does.

    Among equals: axis sizes in the order in which they appear among the cuts, then larger axes first.
    """
    wanted = _distinct(wanted)
    for ordered in (True, False):
        for grids in _by_length(count):
            fits = [g for g in grids if all(expresses(g, cuts, ordered=ordered) for cuts in wanted)]
            if fits:
                return min(fits, key=functools.partial(_appearance_order, wanted))
    return None


def grids(count: int, wanted: Sequence[Cuts]) -> tuple[tuple[int, ...], ...]:
    """The factorizations of `count`, up to the order of axes, that express every tuple of cuts; `fewest_axes` first.

    >>> grids(8, [(2, 1)])
    ((2, 4), (2, 2, 2))
    """
    wanted = _distinct(wanted)
    first = fewest_axes(count, wanted)
    found = [first] if first is not None else []
    for same_length in _by_length(count):
        unordered: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for grid in same_length:
            unordered.setdefault(tuple(sorted(grid)), []).append(grid)
        for key, orders in unordered.items():
            if (
                first is not None
                and key != tuple(sorted(first))
                and all(expresses(key, cuts, ordered=False) for cuts in wanted)
            ):
                found.append(min(orders, key=functools.partial(_appearance_order, wanted)))
    return tuple(found)


def split(
    sizes: Sequence[int], wanted: Sequence[Cuts], restricted: Sequence[tuple[Cuts, frozenset[int]]] = ()
) -> tuple[tuple[int, ...], ...] | None:
    """The fewest parts of each axis of a given grid that express all cuts; None if none do.

    `restricted`: further cuts, each with the numbers of the axes that must not be used for it.

    >>> split((2, 4), [], [((2,), frozenset((0,)))])
    ((2,), (2, 2))
    """
    wanted = _distinct(wanted)
    most = sum(len(prime_factors(s)) for s in sizes)
    for extra in range(most + 1):
        fits = [
            parts
            for parts in _partitions(tuple(sizes), extra)
            if all(expresses(tuple(itertools.chain(*parts)), cuts, ordered=False) for cuts in wanted)
            and all(_expressible_without(parts, cuts, taken) for cuts, taken in restricted)
        ]
        if fits:
            every = _distinct([*wanted, *(cuts for cuts, _ in restricted)])
            return min(fits, key=lambda parts: _appearance_order(every, tuple(itertools.chain(*parts))))
    return None


def _expressible_without(parts: Sequence[tuple[int, ...]], cuts: Cuts, taken: frozenset[int]) -> bool:
    """Whether the parts of all axes but those in `taken` express the cuts."""
    free = itertools.chain(*(own for i, own in enumerate(parts) if i not in taken))
    return expresses(tuple(free), cuts, ordered=False)


def expresses(grid: Sequence[int], cuts: Cuts, *, ordered: bool) -> bool:
    """Whether disjoint groups of axes have the products `cuts`; with `ordered`, groups of consecutive axes in order.

    >>> expresses((4, 2), (2, 4), ordered=False), expresses((4, 2), (2, 4), ordered=True)
    (True, False)
    """
    return _expresses(tuple(s for s in grid if s > 1), tuple(c for c in cuts if c > 1), ordered)


@functools.lru_cache(maxsize=65536)
def _expresses(grid: tuple[int, ...], cuts: Cuts, ordered: bool) -> bool:
    if not cuts:
        return True
    if ordered:
        # Groups in mesh order; an axis may be skipped.
        def place(axis: int, dim: int, left: int) -> bool:
            if left == 1:
                return dim + 1 == len(cuts) or place(axis, dim + 1, cuts[dim + 1])
            if axis == len(grid):
                return False
            taken = left % grid[axis] == 0 and place(axis + 1, dim, left // grid[axis])
            return taken or place(axis + 1, dim, left)

        return place(0, 0, cuts[0])
    first, rest = cuts[0], cuts[1:]
    # Axes of equal size are interchangeable, so a group is determined by how many axes of each size it has.
    sizes = sorted(set(grid))
    for counts in itertools.product(*(range(grid.count(s) + 1) for s in sizes)):
        if math.prod(s**n for s, n in zip(sizes, counts, strict=True)) == first:
            left = tuple(s for s, n in zip(sizes, counts, strict=True) for _ in range(grid.count(s) - n))
            if _expresses(left, rest, False):
                return True
    return False


def prime_factors(n: int) -> tuple[int, ...]:
    """Prime factors of `n` in ascending order, with repetition.

    >>> prime_factors(12), prime_factors(1)
    ((2, 2, 3), ())
    """
    factors, p = [], 2
    while n > 1:
        if p * p > n:
            p = n
        while n % p == 0:
            factors.append(p)
            n //= p
        p += 1
    return tuple(factors)


def divisors(n: int) -> tuple[int, ...]:
    """All divisors, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def factorizations(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    """The ordered factorizations of `n` into exactly `parts` factors above 1; `()` for 1 in no parts.

    >>> list(factorizations(8, 2)), list(factorizations(1, 0))
    ([(2, 4), (4, 2)], [()])
    """
    if parts == 0:
        if n == 1:
            yield ()
        return
    if parts == 1:
        if n > 1:
            yield (n,)
        return
    for first in divisors(n):
        if 1 < first < n:
            for rest in factorizations(n // first, parts - 1):
                yield (first, *rest)


def _by_length(count: int) -> Iterator[list[tuple[int, ...]]]:
    if count == 1:
        yield [()]
    for parts in range(1, len(prime_factors(count)) + 1):
        yield list(factorizations(count, parts))


def _partitions(sizes: tuple[int, ...], extra: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """The ways to split the axes into parts, with `extra` more parts than axes."""
    if not sizes:
        if extra == 0:
            yield ()
        return
    head, rest = sizes[0], sizes[1:]
    for more in range(min(extra, max(len(prime_factors(head)) - 1, 0)) + 1):
        own = [(1,)] if head == 1 else factorizations(head, more + 1)
        for parts in own:
            for others in _partitions(rest, extra - more):
                yield (parts, *others)


def _distinct(wanted: Sequence[Cuts]) -> tuple[Cuts, ...]:
    return tuple(dict.fromkeys(tuple(c for c in cuts if c > 1) for cuts in wanted))


def _appearance_order(wanted: Sequence[Cuts], grid: tuple[int, ...]) -> tuple:
    seen = list(dict.fromkeys(c for cuts in wanted for c in cuts))
    first = {size: i for i, size in enumerate(seen)}
    return tuple(first.get(s, len(seen)) for s in grid), tuple(-s for s in grid)
