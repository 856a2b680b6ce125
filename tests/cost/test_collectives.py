"""Costs of collectives: the formulas of `hardware.md`, section 2, and monotonicity that any such formula has."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from jshard._core import hardware as hardware
from jshard._core.layout import MeshAxes
from jshard._core.topology import from_mesh
from jshard._cost.collectives import coefficients, collective
from jshard._cost.roofline import peak_flops, roofline


KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")
CHIPS = ("v4", "v5e", "v5p", "v6e", "7x", "a100", "h100", "b200", "cpu")


def mesh(**axes: int) -> MeshAxes:
    return MeshAxes(tuple(axes), tuple(axes.values()))


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("kind", KINDS)
def test_received_bytes_do_not_depend_on_the_machine(kind, chip):
    t = from_mesh(mesh(x=4, y=8), hardware.get(chip))
    for axes in (("x",), ("y",), ("x", "y")):
        n, b = t.mesh.size(*axes), 1024.0
        want = {
            "all_gather": b * (n - 1),
            "reduce_scatter": b * (n - 1) / n,
            "all_reduce": 2 * b * (n - 1) / n,
            "all_to_all": b * (n - 1) / n,
            "permute": b,
        }
        c = collective(kind, axes, b, t)
        assert c.bytes == want[kind] and c.seconds > 0 and c.axes == axes
        assert collective(kind, axes[::-1], b, t).seconds == c.seconds


V, W = 1e9, 5e10 * 0.82  # bytes of the whole tensor of the group; one v5e link


def ordering(chip: str) -> float:
    """Seconds per byte held to put the blocks of an all-to-all in order, before and after it."""
    return 4 / (0.4 * hardware.get(chip).hbm_bandwidth)


@pytest.mark.parametrize(
    ("kind", "held", "line", "ring"),
    [
        ("all_gather", V / 16, V * 15 / (16 * W), V * 15 / (2 * 16 * W)),
        ("reduce_scatter", V, V * 15 / (16 * W), V * 15 / (2 * 16 * W)),
        ("all_reduce", V, 2 * V * 15 / (16 * W), V * 15 / (16 * W)),
        ("all_to_all", V / 16, V / (4 * W), V / (8 * W)),
    ],
)
def test_line_and_ring_of_a_torus(kind, held, line, ring):
    # v5e wraps at 16; a v5p axis is a line when another one is not a multiple of 4.
    c = coefficients(kind, ("x",), from_mesh(mesh(y=8, x=16), hardware.get("v5e")))
    more = (lambda chip: held * ordering(chip)) if kind == "all_to_all" else (lambda chip: 0.0)
    assert held * c.slope == pytest.approx(ring + more("v5e"))
    open_ended = from_mesh(mesh(x=16, y=16, z=2), hardware.get("v5p"), physical=(16, 16, 2))
    w = 1e11 / 5e10
    assert held * coefficients(kind, ("x",), open_ended).slope == pytest.approx(line / w + more("v5p"))


def test_torus_axes_work_together():
    t = from_mesh(mesh(x=16, y=16), hardware.get("v5e"))
    full = V
    c = coefficients("all_gather", ("x", "y"), t)
    assert full / 256 * c.slope == pytest.approx(full * 255 / (2 * 2 * 256 * W))
    c = coefficients("all_to_all", ("x", "y"), t)
    assert full / 256 * c.slope == pytest.approx(full * 16 / (8 * 256 * W) + full / 256 * ordering("v5e"))
    folded = from_mesh(mesh(x=256), hardware.get("v5e"))
    for kind in KINDS:
        assert coefficients(kind, ("x",), folded) == coefficients(kind, ("x", "y"), t)


def test_parts_of_one_torus_axis_are_not_two_axes():
    whole = from_mesh(mesh(y=8, x=16), hardware.get("v5e"))
    cut = from_mesh(mesh(y=8, a=4, b=4), hardware.get("v5e"))
    for kind in KINDS:
        assert coefficients(kind, ("a", "b"), cut) == coefficients(kind, ("x",), whole)


def test_a_hierarchy_costs_its_slowest_level():
    # hardware.md section 2: V * max over levels of (D - 1) / (D * W), W of a node being that of its cards.
    t = from_mesh(mesh(data=32), hardware.get("h100"))
    inside, outside = 4.5e11 * 0.82, 8 * 5e10 * 0.82
    split = from_mesh(mesh(node=4, gpu=8), hardware.get("h100"))
    near = coefficients("all_gather", ("gpu",), split).slope / 8  # seconds per byte of the whole, measured
    assert near == pytest.approx(7 / 8 / inside, rel=0.02)
    for kind, parts in (("all_gather", 32), ("reduce_scatter", 1)):
        c = coefficients(kind, ("data",), t)
        assert V / parts * c.slope == pytest.approx(V * max(near, 3 / 4 / outside))
    for kind in KINDS:
        assert coefficients(kind, ("node", "gpu"), split) == coefficients(kind, ("data",), t)
    # An exchange over nodes cannot be shared out: each device's own card carries 3/4 of what it holds.
    assert coefficients("all_to_all", ("data",), t).slope == pytest.approx(0.75 / (5e10 * 0.82))


def test_the_books_h100_bandwidths():
    """Effective V / T of a big all-gather: 514 GB/s on 8 GPUs, 413 on 32 nodes (scaling-book gpus.md)."""
    one = from_mesh(mesh(x=8), hardware.get("h100"))
    assert 8 / coefficients("all_gather", ("x",), one).slope == pytest.approx(514e9 * 0.82, rel=0.01)
    many = from_mesh(mesh(x=256), hardware.get("h100"))
    assert 256 / coefficients("all_gather", ("x",), many).slope == pytest.approx(413e9 * 0.82, rel=0.01)


@pytest.mark.parametrize("chip", ["v4", "v5p"])
def test_over_a_whole_torus_of_three_axes_gathers_and_scatters_are_all_reduces(chip):
    rings, lines = (from_mesh(mesh(a=k, b=k, c=k), hardware.get(chip)) for k in (4, 2))
    assert rings.link("a").wrap and not lines.link("a").wrap
    for t, twice in ((rings, ("all_gather", "reduce_scatter")), (lines, ("reduce_scatter",))):
        n = t.mesh.total
        whole, plain = (
            tuple("abc"),
            dataclasses.replace(t, chip=dataclasses.replace(t.chip, all_reduced_kinds=())),
        )
        for kind in ("all_gather", "reduce_scatter"):
            all_reduce = collective("all_reduce", whole, 1e6 * (n if kind == "all_gather" else 1), t)
            found, alone = collective(kind, whole, 1e6, t), collective(kind, whole, 1e6, plain)
            assert found.seconds == pytest.approx(all_reduce.seconds if kind in twice else alone.seconds)
            assert found.bytes == alone.bytes == all_reduce.bytes / 2
            assert collective(kind, ("a", "b"), 1e6, t) == collective(kind, ("a", "b"), 1e6, plain)


@pytest.mark.parametrize("chip", CHIPS)
def test_laws(chip):
    t = from_mesh(mesh(a=2, b=4, c=8), dataclasses.replace(hardware.get(chip), all_reduced_kinds=()))
    groups = [g for r in (1, 2, 3) for g in itertools.combinations("abc", r)]
    for g in groups:
        ag, rs, ar, aa, pp = (coefficients(k, g, t) for k in KINDS)
        n = t.mesh.size(*g)
        assert ag.slope == pytest.approx(n * rs.slope) and ar.slope == pytest.approx(2 * rs.slope)
        assert ar.alpha > 0 and min(x.slope for x in (ag, rs, ar, aa, pp)) > 0
        # One collective over two axes takes no longer than one after the other (the wires are the same).
        for k in range(1, len(g)):
            one, two = coefficients("all_gather", g[:k], t), coefficients("all_gather", g[k:], t)
            after = two.slope + t.mesh.size(*g[k:]) * one.slope
            assert ag.slope <= after * (1 + 1e-9)


def test_a_group_of_one_costs_nothing():
    t = from_mesh(mesh(x=1, y=8), hardware.get("v5e"))
    for kind in KINDS:
        assert collective(kind, ("x",), 1e9, t).seconds == 0.0 == collective(kind, (), 1e9, t).bytes
        assert coefficients(kind, ("x", "y"), t) == coefficients(kind, ("y",), t)


def test_latency_counts_steps_on_a_torus_and_calls_in_shared_memory():
    chip = hardware.get("v5e")
    t = from_mesh(mesh(y=8, x=16), chip)
    assert coefficients("all_gather", ("x",), t).alpha == pytest.approx(chip.startup + 8 * chip.alpha)
    assert coefficients("all_gather", ("y",), t).alpha == pytest.approx(chip.startup + 7 * chip.alpha)
    assert coefficients("all_reduce", ("y",), t).alpha == pytest.approx(chip.startup + 14 * chip.alpha)
    cpu = from_mesh(mesh(x=2, y=4), hardware.get("cpu"))
    assert {coefficients(k, ("x", "y"), cpu).alpha for k in KINDS} == {hardware.get("cpu").alpha}


def test_printing():
    t = from_mesh(mesh(x=2, y=4), hardware.get("cpu"))
    assert str(collective("all_reduce", ("x", "y"), 1000.0, t)) == "all_reduce[x*y] 1750 B 4.09e-05 s"


def test_roofline_is_the_slower_of_two():
    chip = hardware.get("h100")
    assert roofline(9.9e14, 1.0, "bfloat16", chip) == 1.0 and roofline(1.0, 3.35e12, "bfloat16", chip) == 1.0
    assert roofline(0.0, 0.0, "float32", chip) == 0.0


@pytest.mark.parametrize("chip", CHIPS)
def test_peaks_of_dtypes(chip):
    c = hardware.get(chip)
    assert (
        peak_flops("bfloat16", c) == peak_flops("float16", c) == c.bf16_flops
        and peak_flops(np.float32, c) == c.f32_flops
    )
    assert peak_flops("float8_e4m3fn", c) == (c.fp8_flops or c.bf16_flops)
    assert peak_flops("int8", c) == (c.int8_flops or c.bf16_flops)
    assert peak_flops("float64", c) < peak_flops("float32", c) and peak_flops("complex64", c) < peak_flops(
        "float32", c
    )
    assert peak_flops("bool", c) == peak_flops("int32", c) == c.f32_flops
