"""Communication lower bounds: against the published table, against direct minimisation, and below real plans."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import minimize

from jshard._core import hardware as hardware
from jshard._core.layout import Layout, MeshAxes
from jshard._core.topology import from_mesh
from jshard._cost import communication_bounds
from jshard._cost.resharding import bytes_table


# hardware.md 3.2: Llama-3-405B's MLP matmul, 16M tokens, bfloat16.
TABLE = [(64, "1D", 1.72), (1024, "2D", 1.38), (2048, "2D", 1.08), (4096, "3D", 0.81), (8192, "3D", 0.58)]


@pytest.mark.parametrize(("devices", "regime", "gigabytes"), TABLE)
def test_the_405b_table(devices, regime, gigabytes):
    b = communication_bounds.matmul(16_000_000, 53248, 16384, devices, itemsize=2)
    assert b.regime == regime and b.bytes / 1e9 == pytest.approx(gigabytes, abs=0.011)


@pytest.mark.parametrize("sizes", [(64, 64, 64), (4096, 64, 16), (512, 512, 8), (1000, 300, 70)])
@pytest.mark.parametrize("devices", [1, 2, 8, 64, 1024])
def test_the_bound_is_the_least_footprint(sizes, devices):
    """Minimise x + y + z with x y z >= (mnk / P)^2 and every array touched once: the theorem's program."""
    m, n, k = sorted(sizes, reverse=True)
    faces = np.log([n * k / devices, m * k / devices, m * n / devices])
    volume = 2 * math.log(m * n * k / devices)
    best = min(
        minimize(
            lambda u: np.exp(u - faces.max()).sum(),
            start,
            bounds=[(f, None) for f in faces],
            constraints={"type": "ineq", "fun": lambda u: u.sum() - volume},
            options={"maxiter": 500, "ftol": 1e-12},
        ).fun
        for start in (faces + math.log(devices) / 3, np.full(3, volume / 3))
    ) * math.exp(faces.max())
    received = best - np.exp(faces).sum()
    b = communication_bounds.matmul(*sizes, devices, itemsize=1)
    assert b.bytes == pytest.approx(received, rel=1e-4, abs=1e-3)


@pytest.mark.parametrize("order", list(itertools.permutations((96, 32, 8))))
def test_the_order_of_sizes_does_not_matter(order):
    want = communication_bounds.matmul(96, 32, 8, 16, itemsize=4)
    assert communication_bounds.matmul(*order, 16, itemsize=4) == want


def test_with_more_devices_each_receives_less_and_all_receive_more():
    devices = (1, 2, 4, 16, 64, 256, 1024)
    one = [communication_bounds.matmul(4096, 1024, 256, p, itemsize=2).bytes for p in devices]
    assert one[0] == 0 and one[2:] == sorted(one[2:], reverse=True)
    every = [p * b for p, b in zip(devices, one, strict=True)]
    assert every == sorted(every)


def test_no_layout_of_a_matmul_beats_its_bound():
    """Every placement of x[m, k] @ w[k, n] on 8 devices, one copy of each before and of y after."""
    mesh = MeshAxes(("a", "b", "c"), (2, 2, 2))
    where = from_mesh(mesh, hardware.get("cpu"))

    def spread(ndim):
        out = set()
        for order in itertools.permutations("abc"):
            for place in itertools.product(range(ndim), repeat=3):
                at = dict(zip(order, place, strict=True))
                out.add(Layout(tuple(tuple(x for x in order if at[x] == d) for d in range(ndim))))
        return list(out)

    for m, n, k in [(64, 64, 64), (512, 64, 16), (32, 256, 128)]:
        best = math.inf
        start = spread(2)
        for cut in itertools.product(range(3), repeat=3):
            by = [tuple(x for x, c in zip("abc", cut, strict=True) if c == i) for i in range(3)]
            x, w, y = Layout((by[0], by[2])), Layout((by[2], by[1])), Layout((by[0], by[1]), by[2])
            moved = bytes_table(start, [x], (m, k), 4, where).min()
            moved += bytes_table(start, [w], (k, n), 4, where).min()
            moved += bytes_table([y], start, (m, n), 4, where).min()
            best = min(best, moved)
        bound = communication_bounds.matmul(m, n, k, 8, itemsize=4)
        assert bound.bytes <= best * (1 + 1e-9)
        if (m, n, k) == (64, 64, 64):  # 8 is a cube: the 2 x 2 x 2 grid attains the bound exactly
            assert best == pytest.approx(bound.bytes, rel=1e-9)


def test_copies_lower_the_bound():
    one = communication_bounds.matmul(64, 64, 64, 8, itemsize=4).bytes
    some = communication_bounds.matmul(64, 64, 64, 8, itemsize=4, local_elements=2048).bytes
    assert 0 < some < one
    assert communication_bounds.matmul(64, 64, 64, 8, itemsize=4, local_elements=3 * 64 * 64).bytes == 0
