"""Rolls, shifts, interleavings and reversals over a cut dimension: values, gradients, and the bytes of edges."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jshard
from jshard import hardware
from jshard._rules.block_reads import RolledReads, exchange
from tests.helpers import rules_examples as examples
from tests.laws import rules_validator as validator


@pytest.mark.parametrize("devices, vma", [(2, False), (8, True)])
def test_blocks_of_shifts_are_those_of_the_whole(devices: int, vma: bool) -> None:
    fn, *args = examples.EXAMPLES["shifts"]()
    names = ("roll", "pad", "rev", "slice")
    cases = [c for c in validator.cases(fn, *args) if c.op.primitive in names]
    tried, wrong = validator.check(cases[devices % 3 :: 3], devices, limit=2, vma=vma, seed=devices)
    assert not wrong, "\n".join(wrong[:3])
    assert tried > 10


def test_a_rolled_block_gets_its_rows_around_the_ring() -> None:
    for n in (2, 3, 4, 8):
        for by in range(1, 24):
            e, rolled = exchange(RolledReads(24, by), n), np.roll(np.arange(24), by).reshape(n, -1)
            blocks = np.arange(24).reshape(n, -1)
            for j in range(n):
                got = np.full(e.length, -1)
                for p in e.pieces:
                    source = next((q for q, target in p.pairs if target == j), j)
                    rows = blocks[source][p.begins[source] : p.begins[source] + p.rows]
                    got[p.places[j] : p.places[j] + p.rows] = rows
                assert got.tolist() == rolled[j].tolist(), (n, by, j)


def _mesh(devices: int) -> Any:
    return jax.make_mesh(
        (devices,), ("t",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices]
    )


def _shifts(x: Any) -> Any:
    """A token shift, a window of four, a ring, and a last position."""
    n = x.shape[1]
    before = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
    window = sum(jnp.pad(x, ((0, 0), (3, 0), (0, 0)))[:, k : k + n] * (k + 1) for k in range(4))
    first = jnp.concatenate([x[:, :1] * 2, x[:, 1:] * 0.9], 1)
    return jnp.tanh(before * window + jnp.roll(x, 5, 1)) + first + x[:, -1:]


def _next(x: Any) -> Any:
    """The loss of predicting what comes next: one position less than there are."""
    return ((jnp.sin(x[:, :-1]) - x[:, 1:]) ** 2).mean()


def _both_ends(x: Any) -> Any:
    """Each position beside its mirror image, and sums of what comes after."""
    return jnp.sin(jnp.flip(x, 1)) * x + jnp.flip(jnp.cumsum(jnp.flip(x, 1), 1), 1) / x.shape[1]


@pytest.mark.parametrize("f", [_shifts, _next, _both_ends])
@pytest.mark.parametrize("devices, n", [(8, 512), (4, 1001)])
def test_programs_cut_along_time(f: Any, devices: int, n: int) -> None:
    """Float64 values and gradients, inside and outside; planned bytes are emitted, and there are no others than edges."""
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.RandomState(0).randn(1, n, 256))

        def step(x: Any) -> Any:
            return jax.value_and_grad(lambda x: (f(x) ** 2).sum())(x)

        cut = ((1, devices, 1),)
        sharded = jshard.shard(
            step, mesh=_mesh(devices), in_strategy=cut, out_strategy=(None, cut[0]), config={"pad": True}
        )
        plan = sharded.plan(x, verify=True)
        assert plan.verification is not None and plan.verification.ok
        value, gradient = jax.jit(step)(x)
        for got, want in zip(sharded(x), (value, gradient), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11)
        if f is _next and n % devices == 0:
            assert {c.kind for c in plan.collectives} <= {"permute", "all_reduce"}
        plain = jshard.shard(f, mesh=_mesh(devices), in_strategy=cut, config={"pad": True})
        outer = jax.grad(lambda x: (plain(x) ** 2).sum())(x)
        np.testing.assert_allclose(outer, gradient, rtol=1e-11, atol=1e-11)


def test_a_shift_sends_one_row() -> None:
    """Planned for 16 chips: one permute of a row for a token shift and for its gradient, several for more than a block."""
    machine = jshard.topology("v5e:4x4", {"t": 16})
    x = jax.ShapeDtypeStruct((1, 65536, 1024), jnp.float32)

    def planned(f: Any) -> list[tuple[str, float]]:
        cut = (1, 16, 1)
        plan = jshard.shard(f, mesh=machine, in_strategy=(cut,), out_strategy=cut).plan(x)
        return [(c.kind, c.bytes) for c in plan.collectives]

    row = 1024 * 4
    shift = lambda x: jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))  # noqa: E731
    assert planned(shift) == [("permute", row)]
    assert planned(jax.grad(lambda x: (shift(x) * jnp.arange(1024.0)).sum())) == [("permute", row)]
    assert planned(lambda x: jnp.roll(x, 3, 1)) == [("permute", 3 * row)]
    assert planned(lambda x: jnp.roll(x, 4097, 1)) == [("permute", row), ("permute", 4095 * row)]
    assert planned(lambda x: x[:, -1:] + x) == [("all_reduce", 2 * 15 / 16 * row)]
    assert {kind for kind, _ in planned(jax.grad(lambda x: (_shifts(x) ** 2).sum()))} == {
        "permute",
        "all_reduce",
    }
    assert planned(lambda x: lax.rev(x, (1,))) == [("permute", 4096 * row)]


def test_an_associative_scan_is_cut_along_time() -> None:
    """Forward and backward: edges of its levels are sent, and at a short level the little that is left."""
    machine = jshard.topology("v5e:4x4", {"t": 16})
    x = jax.ShapeDtypeStruct((1, 65536, 1024), jnp.float32)

    def scan(x: Any) -> Any:
        combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])  # noqa: E731
        return lax.associative_scan(combine, (jax.nn.sigmoid(x), x), axis=1)[1]

    block, cut = 65536 // 16 * 1024 * 4, (1, 16, 1)
    for f, most in ((scan, 0.1), (jax.grad(lambda x: (scan(x) ** 2).sum()), 0.2)):
        plan = jshard.shard(f, mesh=machine, in_strategy=(cut,), out_strategy=cut).plan(x)
        assert sum(c.bytes * c.count for c in plan.collectives) < most * block
        assert plan.cost.optimal


@pytest.mark.parametrize("reverse", [False, True])
def test_an_associative_scan_cut_along_time_runs(reverse: bool) -> None:
    """Values, gradients and emitted bytes of a linear recurrence whose plan is cut along time on eight devices."""
    cheap = dataclasses.replace(
        hardware.get("cpu"), name="no-latency", alpha=0.0, nic_alpha=0.0, f32_flops=1e9
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("t",))

    def loss(w: Any, x: Any) -> Any:
        combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])  # noqa: E731
        return (
            lax.associative_scan(combine, (jax.nn.sigmoid(x * w), x), axis=1, reverse=reverse)[1] ** 2
        ).mean()

    with jax.enable_x64(True):
        w, x = jnp.ones(6), jnp.asarray(np.random.RandomState(0).randn(1, 256, 6))
        step = jax.value_and_grad(loss, argnums=(0, 1))
        sharded = jshard.shard(
            step, in_strategy=(None, (1, 8, 1)), level=2, mesh=mesh, hardware=cheap, config={"pad": True}
        )
        plan = sharded.plan(w, x, verify=True)
        whole = x.size * 8
        gathered = sum(c.bytes for c in plan.collectives if c.kind != "permute")
        assert any(c.kind == "permute" for c in plan.collectives) and gathered < whole / 4
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14),
            sharded(w, x),
            jax.jit(step)(w, x),
        )
        assert plan.verification is not None
        assert plan.verification.emitted == sum(c.bytes for c in plan.collectives)
