"""What blocks of one dimension read of another dimension, and the permutes that bring it to them.

Problem.  A convolution cut along its space reads, for each block of the result, an interval of the operand that no
device holds: its own block and edges of its neighbours' (a halo). The same is true of pooling, slices and padding.

Idea.  The interval is static for each block, so the whole exchange is: which device sends which rows to which. Where the
intervals lie alike in all blocks, neighbours at each distance exchange one edge; a window wider than a block takes
several. Otherwise rows lie at positions that depend on the device, and distances with disjoint devices share a permute.
Costs (`sent_collectives.py`) and local implementations (`neighbour_exchange.py`) both read the same `Exchange`.

Worked case.  A window of 3 points with padding 1 over 16 rows on 4 devices: block j reads rows 4 j - 1 to 4 j + 4.

>>> reads = WindowReads(size=16, points=16, low=1, span=2)
>>> reads.starts(4).tolist(), reads.length(4)
([-1, 3, 7, 11], 6)
>>> [(p.hop, p.rows, p.pairs) for p in exchange(reads, 4).pieces]
[(-1, 1, ((0, 1), (1, 2), (2, 3))), (0, 4, ()), (1, 1, ((1, 0), (2, 1), (3, 2)))]
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Protocol

import numpy as np


class BlockReads(Protocol):
    """The interval of a dimension that each of n equal blocks of another dimension reads; values are hashable."""

    @property
    def size(self) -> int:
        """Length of the dimension that is read."""
        ...

    def starts(self, n: int) -> np.ndarray:
        """(n,) first position of each block's interval; may be negative."""
        ...

    def length(self, n: int) -> int:
        """Length of the longest interval; may end beyond the dimension."""
        ...


@dataclasses.dataclass(frozen=True)
class WindowReads:
    """Reads of windows: point `o` reads positions `stride * o - low` to that plus `span` of the dilated dimension.

    Arguments:

    - `size`: of the dimension that is read; `points`: of the one whose blocks read.
    - `stride`, `low`: of the windows; `low` is the padding before the first element.
    - `span`: distance of the last element of a window from its first.
    - `base`: dilation of the dimension that is read: element `i` is at position `base * i`.

    >>> WindowReads(size=8, points=16, low=1, span=2, base=2).starts(4).tolist()
    [0, 2, 4, 6]
    """

    size: int
    points: int
    stride: int = 1
    low: int = 0
    span: int = 0
    base: int = 1

    def starts(self, n: int) -> np.ndarray:
        """(n,) first element that each block reads."""
        return -(-self._first(n) // self.base)

    def length(self, n: int) -> int:
        """Most elements that a block reads."""
        last = (self._first(n) + self.extent(n) - 1) // self.base
        return max(1, int((last + 1 - self.starts(n)).max()))

    def extent(self, n: int) -> int:
        """Positions of the dilated dimension that a block's windows cover."""
        return self.stride * (self.points // n - 1) + self.span + 1

    def phases(self, n: int) -> np.ndarray:
        """(n,) positions before the first element that each block reads, less than `base`."""
        return self.base * self.starts(n) - self._first(n)

    @property
    def regular(self) -> bool:
        """Whether the intervals lie alike in all blocks, however many there are."""
        return self.size * self.base == self.points * self.stride

    def reading(self, n: int, piece: Piece) -> range:
        """The points of a block that read a piece of its interval, where the intervals lie alike."""
        first = int(self.phases(n)[0]) + self.base * piece.places[0]
        last = first + self.base * (piece.rows - 1)
        return range(
            max(0, -((self.span - first) // self.stride)),
            min(self.points // n - 1, last // self.stride) + 1,
        )

    def edge_points(self, n: int) -> int:
        """Points of a block that read what others send, counted once for each piece."""
        return sum(len(self.reading(n, p)) for p in exchange(self, n).pieces if p.pairs)

    def _first(self, n: int) -> np.ndarray:
        return self.stride * (self.points // n) * np.arange(n, dtype=np.int64) - self.low


@dataclasses.dataclass(frozen=True)
class ReadsOfWindows:
    """What the windows read that a block reads: `windows` says which, `stride`, `low` and `span` what each reads."""

    size: int
    windows: WindowReads
    stride: int
    low: int
    span: int

    def starts(self, n: int) -> np.ndarray:
        """(n,) first position of each block's first window."""
        return self.stride * self.windows.starts(n) - self.low

    def length(self, n: int) -> int:
        """Positions that all windows of a block cover."""
        return self.stride * (self.windows.length(n) - 1) + self.span + 1


@dataclasses.dataclass(frozen=True)
class RolledReads:
    """Reads of a dimension rolled by `by` positions, from 1 to `size - 1`: point `o` reads position `o - by` modulo `size`.

    >>> [(p.hop, p.rows, p.pairs) for p in exchange(RolledReads(size=16, by=1), 4).pieces]
    [(-1, 1, ((3, 0), (0, 1), (1, 2), (2, 3))), (0, 3, ())]
    """

    size: int
    by: int

    def starts(self, n: int) -> np.ndarray:
        """(n,) first position of each block's interval, in the direction in which rows have the shorter way."""
        back = self.by if 2 * self.by <= self.size else self.by - self.size
        return self.size // n * np.arange(n, dtype=np.int64) - back

    def length(self, n: int) -> int:
        """Length of a block."""
        return self.size // n


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows that devices send to others at once, or keep (`pairs` is empty, `hop` 0), or that nobody has (`hop` None).

    - `pairs`: (source, target) devices.
    - `rows`: number of rows, the same for all.
    - `begins`: per source, the first row of its block; `places`: per target, where they go in what it reads.
    - `hop`: source minus target, where that is the same for all pairs (modulo the number of devices, if it is `circular`).
    """

    pairs: tuple[tuple[int, int], ...]
    rows: int
    begins: tuple[int, ...]
    places: tuple[int, ...]
    hop: int | None


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How each device gets the interval of `length` rows that it reads, of blocks of `block` rows.

    - `aligned`: the intervals lie alike in all blocks: the pieces, one after another, are the interval.
    """

    block: int
    length: int
    starts: tuple[int, ...]
    aligned: bool
    pieces: tuple[Piece, ...]


@functools.lru_cache(maxsize=4096)
def exchange(reads: BlockReads, n: int) -> Exchange:
    """The exchange over n devices, which hold equal blocks of the dimension that is read.

    >>> reads = WindowReads(size=16, points=12, low=-4)          # a slice from 4 on
    >>> e = exchange(reads, 4)
    >>> e.aligned, [(p.hop, p.rows, p.pairs) for p in e.pieces]
    (False, [(0, 3, ()), (1, 3, ((1, 0), (2, 1), (3, 2)))])
    """
    block, starts, length = reads.size // n, reads.starts(n), reads.length(n)
    relative = starts - block * np.arange(n)
    aligned = bool((relative == relative[0]).all())
    circular = isinstance(reads, RolledReads)
    if aligned:
        pieces = _aligned(int(relative[0]), length, block, n, circular)
    else:
        pieces = _unaligned(starts, length, block, n)
    return Exchange(block, length, tuple(starts.tolist()), aligned, pieces)


def _aligned(first: int, length: int, block: int, n: int, circular: bool) -> tuple[Piece, ...]:
    """The pieces by distance, where device j reads `length` rows from `j * block + first` on; `circular`: modulo n."""
    out = []
    for hop in range(first // block, (first + length - 1) // block + 1):
        begin, place = max(first - hop * block, 0), max(hop * block - first, 0)
        rows = min(first + length - hop * block, block) - begin
        pairs = tuple(((j + hop) % n, j) for j in range(n) if circular or 0 <= j + hop < n)
        sent = pairs if hop else ()
        out.append(Piece(sent, rows, (begin,) * n, (place,) * n, hop if pairs else None))
    return tuple(out)


def _unaligned(starts: np.ndarray, length: int, block: int, n: int) -> tuple[Piece, ...]:
    """The pieces where intervals lie at other places in each block; distances with disjoint devices share one."""
    held = block * np.arange(n)
    begin = np.maximum(starts[:, None], held)  # (targets, sources)
    rows = np.minimum(starts[:, None] + length, held + block) - begin
    rounds: list[dict[int, int]] = []  # target -> source
    for hop in sorted(range(1 - n, n), key=abs):
        targets = [j for j in range(n) if 0 <= j + hop < n and rows[j, j + hop] > 0]
        pairs = {j: j + hop for j in targets}
        if not pairs:
            continue
        for other in rounds if hop else ():
            kept = any(j == q for j, q in other.items())
            if not kept and not (set(other) & set(pairs) or set(other.values()) & set(pairs.values())):
                other.update(pairs)
                break
        else:
            rounds.append(pairs)
    return tuple(_piece(pairs, begin, rows, starts, length, block) for pairs in rounds)


def _piece(
    pairs: dict[int, int], begin: np.ndarray, rows: np.ndarray, starts: np.ndarray, length: int, block: int
) -> Piece:
    """The piece of some (target, source) pairs: as many rows for each as the pair that needs most."""
    n, most = len(starts), max(int(rows[j, q]) for j, q in pairs.items())
    begins, places = [0] * n, [length] * n  # where nothing arrives, the place is behind the interval
    for j, q in pairs.items():
        begins[q] = min(int(begin[j, q]) - q * block, block - most)
        places[j] = q * block + begins[q] - int(starts[j])
    hops = {q - j for j, q in pairs.items()}
    hop = hops.pop() if len(hops) == 1 else None
    sent = tuple((q, j) for j, q in pairs.items()) if hop != 0 else ()
    return Piece(sent, most, tuple(begins), tuple(places), hop)
