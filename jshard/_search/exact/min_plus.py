"""Min-plus matrix products: min over x of a[i, x] + b[x, j], by what the tables allow.

Problem.  Eliminating a variable between two others is such a product. On meshes of three axes a variable has hundreds of
states, and products of tables with hundreds of rows and columns take most of the time of reductions.

Idea.  Constraints (entries 0 or inf) are multiplied as boolean matrices; tables whose columns have few finite entries, by
those entries. Others are Chebyshev distances: for a shift M above all sums

    min over x of a[i, x] + b[x, j]  =  M - max over x of |u[i, x] - v[j, x]|,  u[i, x] = -a[i, x],  v[j, x] = b[x, j] - M,

and SciPy computes those in compiled loops (`scipy.spatial.distance.cdist`): 0.35 ns an entry where NumPy's addition and
minimum take 1.1 to 1.7. Costs are multiples of a grid (`table_pool.py`), and so is M, a power of two: nothing is rounded.
"""

from __future__ import annotations

import numpy as np

from jshard._core.arrays import Floats


BROADCAST_ENTRIES = 20_000  # joint entries up to which a product is one broadcast operation
DISTANCE_ENTRIES = 100_000  # ... from which on distances take less time than a loop over x
BOOLEAN_ENTRIES = 500_000  # ... above which hard constraints are multiplied as boolean matrices
SPARSE_SHARE = 0.25  # finite entries of every column at most, where a product looks at those alone
_EXACT = 2.0**53  # multiples of a grid up to which floats are exact


def min_plus(a: Floats, b: Floats, grid: float) -> Floats:
    """min over x of a[i, x] + b[x, j].

    Where the columns of `b` or the rows of `a` allow few x each (copies of a tensor: each decides a layout), only those
    are looked at.

    Arguments:

    - `a`: (i, x). `b`: (x, j). Costs, inf where forbidden.
    - `grid`: of which all costs are multiples, a power of two.

    >>> inf = np.inf
    >>> min_plus(np.array([[1.0, 5.0], [2.0, inf]]), np.array([[0.0, inf], [3.0, 1.0]]), 1.0).tolist()
    [[1.0, 6.0], [2.0, inf]]
    """
    entries = a.size * b.shape[1]
    if entries <= BROADCAST_ENTRIES:
        return (a[:, :, None] + b[None]).min(axis=1)
    few = SPARSE_SHARE * len(b)
    if 2 * np.count_nonzero(np.isinf(b)) > b.size and np.isfinite(b).sum(axis=0).max() <= few:
        return _of_few(a, b)
    if 2 * np.count_nonzero(np.isinf(a)) > a.size and np.isfinite(a).sum(axis=1).max() <= few:
        return _of_few(b.T, a.T).T
    if entries >= DISTANCE_ENTRIES and (shift := _exact_shift(a, b, grid)) is not None:
        return _by_distances(a, b, shift)
    out = a[:, 0, None] + b[0]
    work = np.empty_like(out)
    for x in range(1, len(b)):
        np.add(a[:, x, None], b[x], out=work)
        np.minimum(out, work, out=out)
    return out


def _exact_shift(a: Floats, b: Floats, grid: float) -> float | None:
    """A power of two above every finite sum, above twice that where something is forbidden; None where sums may be rounded.

    >>> a, b = np.array([[1.0, 2.0]]), np.array([[3.0], [2.0]])
    >>> _exact_shift(a, b, 0.5), _exact_shift(a, np.array([[3.0], [np.inf]]), 0.5), _exact_shift(a, b, 2.0**-60)
    (8.0, 16.0, None)
    """
    if min(a.min(), b.min()) < 0:
        return None
    largest, shift = 0.0, 1.0
    for table in (a, b):
        most = float(table.max())
        if most == np.inf:
            most, shift = float(table.max(initial=0.0, where=np.isfinite(table))), 2.0
        largest += most
    shift *= 2.0 ** (np.floor(np.log2(max(largest, grid))) + 1)
    return float(shift) if shift <= _EXACT * grid else None


def _by_distances(a: Floats, b: Floats, shift: float) -> Floats:
    """The product as Chebyshev distances; `shift`: as of `_exact_shift`.

    Where something is forbidden, sums are less than half the shift: what is allowed is farther than that, and what stands
    for inf is not.

    >>> inf = np.inf
    >>> _by_distances(np.array([[1.0, 5.0], [inf, inf]]), np.array([[0.0, inf], [3.0, 1.0]]), 32.0).tolist()
    [[1.0, 6.0], [inf, inf]]
    """
    from scipy.spatial.distance import cdist  # here, so that `import jshard` stays light

    half, forbidden_a, forbidden_b = shift / 2, np.isinf(a), np.isinf(b)
    u = np.where(forbidden_a, -half, -a)
    v = np.ascontiguousarray(np.where(forbidden_b, -half, b - shift).T)
    distance = np.asarray(cdist(u, v, "chebyshev"), dtype=np.float64)
    if not (forbidden_a.any() or forbidden_b.any()):
        return shift - distance
    return np.where(distance > half, shift - distance, np.inf)


def min_plus_of_constraints(a: Floats, costs: Floats, b: Floats) -> Floats:
    """min over x of a[i, x] + costs[x] + b[x, j], where the entries of `a` and `b` are 0 or inf.

    For each cost, whether there is an x of that cost is a boolean matrix product.

    >>> a, b = np.array([[0, np.inf], [0, 0]]), np.array([[0, np.inf], [0, 0]])
    >>> min_plus_of_constraints(a, np.array([5.0, 3.0]), b).tolist()
    [[5.0, inf], [3.0, 3.0]]
    """
    allowed_a, allowed_b = np.isfinite(a).astype(np.float32), np.isfinite(b).astype(np.float32)
    out = np.full((len(a), b.shape[1]), np.inf)
    for cost in np.unique(costs[np.isfinite(costs)])[::-1]:  # the least last
        x = costs == cost
        out[allowed_a[:, x] @ allowed_b[x] > 0] = cost
    return out


def _of_few(a: Floats, b: Floats) -> Floats:
    """The product where the columns of `b` have few finite entries."""
    finite = np.isfinite(b)
    most = max(1, int(finite.sum(axis=0).max()))
    rows = np.argsort(~finite, axis=0, kind="stable")[:most]  # (most, columns): those of finite entries first
    entries = np.take_along_axis(b, rows, axis=0)
    by_row = np.ascontiguousarray(a.T)
    out = np.full((b.shape[1], len(a)), np.inf)
    for x, cost in zip(rows, entries, strict=True):
        np.minimum(out, by_row[x] + cost[:, None], out=out)
    return out.T
