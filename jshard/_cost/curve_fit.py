"""Measured seconds by size as few straight pieces: least squares of the relative errors, never falling.

The values at the knots are sums of differences that are at least zero (non-negative least squares, Lawson and Hanson,
"Solving least squares problems", 1974). Knots are some of the measured sizes; a piece more is taken where it lowers the
error markedly.

>>> sizes = [1e3, 1e4, 1e5, 1e6, 1e7]
>>> knots, error = fit_curve(sizes, [2e-5 + b / 1e9 if b < 1e6 else 5e-4 + b / 2e9 for b in sizes])
>>> len(knots), error < 0.02
(3, True)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from jshard._core.arrays import Floats


MAX_PIECES = 3
WORTH_A_PIECE = 0.02  # of relative error


def fit_curve(
    sizes: Sequence[float], seconds: Sequence[float], most: int = MAX_PIECES
) -> tuple[tuple[tuple[float, float], ...], float]:
    """Knots (size, seconds) of the fit, and its root mean square relative error.

    - `sizes`: ascending, distinct; `seconds`: positive, one for each.
    """
    x, y = np.array(sizes, dtype=float), np.array(seconds, dtype=float)
    if len(x) == 1:
        return ((float(x[0]), float(y[0])),), 0.0
    best: tuple[tuple[tuple[float, float], ...], float] | None = None
    for pieces in range(1, min(most, len(x) - 1) + 1):
        tried = [
            _fit(x, y, np.array((x[0], *inner, x[-1])))
            for inner in itertools.combinations(x[1:-1], pieces - 1)
        ]
        found = min(tried, key=lambda f: f[1])
        if best is None or found[1] < best[1] - WORTH_A_PIECE:
            best = found
    assert best is not None
    return best


def _fit(x: Floats, y: Floats, knots: Floats) -> tuple[tuple[tuple[float, float], ...], float]:
    from scipy.optimize import nnls  # here, since `import jshard` loads no scipy

    # Column k: how far a size is into piece k, from 0 to 1; the first column is the value at the first knot.
    steps = np.clip((x[:, None] - knots[:-1]) / np.diff(knots), 0.0, 1.0)
    rows = np.hstack([np.ones((len(x), 1)), steps]) / y[:, None]
    rises, _ = nnls(rows, np.ones(len(x)))
    error = float(np.sqrt(np.mean((rows @ rises - 1) ** 2)))
    values = np.cumsum(rises)
    return tuple((float(b), float(s)) for b, s in zip(knots, values, strict=True)), error
