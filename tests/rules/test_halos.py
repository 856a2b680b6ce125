"""Halos: windows of any stride, dilation and padding over a cut dimension, the exchange of edges, its bytes and time."""

from __future__ import annotations

import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jshard
from jshard._core import hardware
from jshard._core.layout import MeshAxes
from jshard._core.topology import from_mesh
from jshard._cost.collectives import collective, shift
from jshard._rules.block_reads import ReadsOfWindows, WindowReads, exchange
from tests.helpers import rules_examples as examples
from tests.laws import rules_validator as validator


@pytest.mark.parametrize("seed", range(4))
def test_every_block_gets_the_interval_it_reads(seed: int) -> None:
    """The pieces of an exchange, played on arrays, against the interval read from the whole array."""
    r = random.Random(seed)
    for _ in range(60):
        n = r.choice([2, 3, 4, 8])
        reads: Any = WindowReads(
            n * r.randint(1, 6),
            n * r.randint(1, 6),
            r.randint(1, 3),
            r.randint(-9, 9),
            r.randint(0, 9),
            r.randint(1, 3),
        )
        if r.random() < 0.3:
            reads = ReadsOfWindows(reads.size, reads, r.randint(1, 3), r.randint(-3, 3), r.randint(0, 4))
        e, whole = exchange(reads, n), np.arange(1, reads.size + 1)
        blocks = whole.reshape(n, -1)
        for j in range(n):
            want = [
                whole[p] if 0 <= p < reads.size else 0 for p in range(e.starts[j], e.starts[j] + e.length)
            ]
            got = np.zeros(3 * (e.length + reads.size), int)
            for p in e.pieces:
                source = next((q for q, target in p.pairs if target == j), j if p.hop == 0 else None)
                if source is not None:
                    at = e.length + reads.size + p.places[j]
                    got[at : at + p.rows] = blocks[source][p.begins[source] : p.begins[source] + p.rows]
            at = e.length + reads.size
            assert got[at : at + e.length].tolist() == want, (reads, n, j)
        for p in e.pieces:
            assert len({q for q, _ in p.pairs}) == len({j for _, j in p.pairs}) == len(p.pairs)


def _gradients(x: Any, w: Any, **params: Any) -> Any:
    return jax.grad(lambda x, w: (lax.conv_general_dilated(x, w, **params) ** 2).sum(), (0, 1))(x, w)


def _convolutions(seed: int, count: int) -> list[validator.Case]:
    r, found = random.Random(seed), {}
    while len(found) < count:
        size, places, window = r.choice([8, 16, 24]), r.choice([8, 16, 24]), r.choice([1, 2, 3, 4, 5, 7])
        stride, base = r.choice([1, 1, 2, 3]), r.choice([1, 1, 2, 3])
        dilation, low = r.choice([1, 1, 2]), r.randint(0, 6)
        high = (places - 1) * stride + (window - 1) * dilation - (size - 1) * base - low
        if not -3 <= high <= 40:
            continue
        groups = r.choice([1, 1, 2])
        run = functools.partial(
            _gradients, window_strides=(stride,), padding=[(low, high)], lhs_dilation=(base,),
            rhs_dilation=(dilation,), feature_group_count=groups,
        )  # fmt: skip
        x, w = examples.floats(2, 2, size, seed=len(found)), examples.floats(2, 2 // groups, window, seed=1)
        for c in validator.cases(run, x, w):
            if c.op.primitive == "conv_general_dilated":
                found[c.key] = c
    return list(found.values())


def _pooled(x: Any, *params: Any, **dilations: Any) -> Any:
    kinds = ((0.0, lax.add), (-jnp.inf, lax.max), (jnp.inf, lax.min))
    return [lax.reduce_window(x, init, f, *params, **dilations) for init, f in kinds]


def _pooled_with_derivatives(x: Any, *params: Any, **dilations: Any) -> Any:
    def pooled(x: Any) -> Any:
        return _pooled(x, *params, **dilations)

    both = jax.jvp(pooled, (x,), (jnp.cos(x),))
    return both, jax.grad(lambda x: sum((y**2).sum() for y in pooled(x)))(x)


def _windows(seed: int, count: int) -> list[validator.Case]:
    r, found = random.Random(seed), {}
    while len(found) < count:
        size, places, window = r.choice([8, 16, 24]), r.choice([8, 16, 24]), r.choice([2, 3, 4, 5])
        stride, base, dilation = r.choice([1, 1, 2, 3]), r.choice([1, 1, 2]), r.choice([1, 1, 2])
        low = r.randint(0, window - 1)
        high = (places - 1) * stride + (window - 1) * dilation - (size - 1) * base - low
        if not 0 <= high <= 30:
            continue
        run = functools.partial(
            _pooled_with_derivatives if base == dilation == 1 else _pooled,
            window_dimensions=(1, window), window_strides=(1, stride), padding=((0, 0), (low, high)),
            base_dilation=(1, base), window_dilation=(1, dilation),
        )  # fmt: skip
        some = validator.cases(run, examples.floats(2, size, seed=len(found)))
        found |= {c.key: c for c in some if "window" in c.op.primitive or "select_and" in c.op.primitive}
    return list(found.values())


def _regular(seed: int, count: int) -> list[validator.Case]:
    """Convolutions whose intervals lie alike in all blocks, also shifted far: what edges contribute is added."""
    r, found = random.Random(seed), {}
    while len(found) < count:
        window, stride, base = r.choice([2, 3, 4, 9]), r.choice([1, 1, 2]), r.choice([1, 1, 2])
        places, dilation, low = r.choice([8, 16]), r.choice([1, 1, 2]), r.randint(-4, 12)
        size = places * stride // base
        if places * stride % base or size % 8:
            continue
        high = (places - 1) * stride + (window - 1) * dilation - (size - 1) * base - low
        run = functools.partial(
            _gradients, window_strides=(stride, 1), padding=[(low, high), (1, 1)], lhs_dilation=(base, 1),
            rhs_dilation=(dilation, 1),
        )  # fmt: skip
        x, w = examples.floats(2, 2, size, 3, seed=len(found)), examples.floats(2, 2, window, 3, seed=1)
        some = validator.cases(run, x, w)
        found |= {c.key: c for c in some if c.op.primitive == "conv_general_dilated"}
    return list(found.values())


@pytest.mark.parametrize("devices, seed, vma", [(2, 0, False), (8, 1, False), (4, 2, True)])
def test_windows_of_blocks_are_those_of_the_whole(devices: int, seed: int, vma: bool) -> None:
    for cases in (_convolutions(seed, 3), _regular(seed, 3), _windows(seed, 5)):
        tried, wrong = validator.check(cases, devices, limit=2, seed=seed, vma=vma)
        assert not wrong, "\n".join(wrong[:3])
        assert tried >= len(cases)


def test_a_permute_to_a_neighbour_is_cheaper_than_any_permute() -> None:
    t = from_mesh(MeshAxes(("x", "y"), (4, 4)), hardware.get("v5e"))
    for axes in (("x",), ("y",), ("x", "y")):
        near, two, any_permute = (
            shift(axes, 1, 1e6, t),
            shift(axes, 2, 1e6, t),
            collective("permute", axes, 1e6, t),
        )
        assert near.bytes == any_permute.bytes == 1e6
        assert near.seconds <= two.seconds and near.seconds <= any_permute.seconds


def _net(ws: Any, x: Any) -> Any:
    """Strided, depthwise, dilated and transposed convolutions, maximum and average pooling with overlaps."""
    n = ("NHWC", "HWIO", "NHWC")
    x = jax.nn.relu(lax.conv_general_dilated(x, ws[0], (2, 2), "SAME", dimension_numbers=n))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    x = lax.conv_general_dilated(x, ws[1], (1, 1), "SAME", dimension_numbers=n, feature_group_count=4)
    x = lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
    x = lax.conv_general_dilated(x, ws[2], (1, 1), "SAME", dimension_numbers=n, rhs_dilation=(2, 2))
    return lax.conv_transpose(x, ws[3], (2, 2), "SAME", dimension_numbers=n)


def _step(ws: Any, x: Any) -> Any:
    loss, gradients = jax.value_and_grad(lambda ws: (_net(ws, x) ** 2).mean())(ws)
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradients), loss


def _arguments(size: int) -> Any:
    shapes = ((7, 7, 3, 4), (3, 3, 1, 4), (5, 5, 4, 4), (3, 3, 4, 4))
    return [examples.floats(*s, seed=i) for i, s in enumerate(shapes)], examples.floats(1, size, size, 3)


@pytest.mark.parametrize("pieces", [(1, 2, 4, 1)])
def test_a_convolution_net_cut_along_space(pieces: tuple[int, ...]) -> None:
    """A training step equals the plain one, and the permutes of its edges are emitted as planned."""
    with jax.enable_x64(True):
        mesh = jax.make_mesh(
            (2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:8]
        )
        ws, x = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), _arguments(32))
        sharded = jshard.shard(_step, mesh=mesh, in_strategy=(None, pieces), level=2)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12),
            sharded(ws, x), jax.jit(_step)(ws, x),
        )  # fmt: skip
        plan = sharded.plan(ws, x)
        permutes = [c for c in plan.collectives if c.kind == "permute"]
        assert permutes and plan.verify(sharded.lower(ws, x).compile()).ok


def test_large_images_on_many_chips_are_cut_along_space() -> None:
    """Two images on 16 chips: edges travel, and no image does."""
    ws, x = jax.eval_shape(lambda: _arguments(2048))
    mesh = jshard.topology("v5e:4x4", {"x": 4, "y": 4})
    plan = jshard.shard(_step, mesh=mesh, level=2).plan(ws, x)
    by_kind = {c.kind for c in plan.collectives if c.bytes > 1e6}
    assert not by_kind, by_kind
    assert sum(c.bytes * c.count for c in plan.collectives if c.kind == "permute") < 0.02 * x.size * 4
