"""Relations between all pairs of two lists of layouts, as arrays: which are equal, and which are local slices.

On three mesh axes a tensor has hundreds of layouts and a pair of lists 100,000 pairs, but each dimension has only some
dozen shardings: pairs are compared by those, dimension by dimension.

>>> whole, rows, both = Layout(((), ())), Layout((("x",), ())), Layout((("x", "y"), ()))
>>> slices([whole, rows], [rows, both]).tolist()
[[True, True], [True, True]]
>>> slices([both], [whole, rows, both]).tolist(), equal_layouts([both], [rows, both]).tolist()
([[False, False, True]], [[False, True]])
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence

import numpy as np

from jshard._core.arrays import Bools, Ints
from jshard._core.layout import Layout


def equal_layouts(sources: Sequence[Layout], targets: Sequence[Layout]) -> Bools:
    """(sources, targets): whether the two layouts are one."""
    codes = _codes([*sources, *targets])
    return codes[: len(sources), None] == codes[None, len(sources) :]


def slices(sources: Sequence[Layout], targets: Sequence[Layout]) -> Bools:
    """(sources, targets): whether each device can slice the target out of its own shard in the source layout."""
    if not sources or not targets:
        return np.zeros((len(sources), len(targets)), dtype=bool)
    partial = _codes([layout.partial for layout in (*sources, *targets)])
    out = partial[: len(sources), None] == partial[None, len(sources) :]
    for d in range(len(sources[0].dims)):
        of_source, of_target = [a.dims[d] for a in sources], [b.dims[d] for b in targets]
        rows, columns = list(dict.fromkeys(of_source)), list(dict.fromkeys(of_target))
        begins = np.array([[y[: len(x)] == x for y in columns] for x in rows])
        out &= begins[np.ix_([rows.index(x) for x in of_source], [columns.index(y) for y in of_target])]
    return out


@functools.lru_cache(maxsize=65536)
def is_local_slice_of(a: Layout, b: Layout) -> bool:
    """Whether each device can slice layout `a` out of its own shard in layout `b`."""
    return a.partial == b.partial and all(x[: len(y)] == y for x, y in zip(a.dims, b.dims, strict=True))


def _codes(values: Sequence[Hashable]) -> Ints:
    """Equal values have one number."""
    number: dict[Hashable, int] = {}
    return np.array([number.setdefault(v, len(number)) for v in values], dtype=np.int64)
