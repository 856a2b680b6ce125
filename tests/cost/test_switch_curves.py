"""Collectives of GPUs by size: the published points, and farther links that are never faster."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from jshard._core import hardware
from jshard._core.layout import MeshAxes
from jshard._core.topology import from_mesh
from jshard._cost.collectives import collective


KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")
NCCL = {2**20: 79e-6, 2**24: 294e-6, 2**28: 2358e-6, 2**30: 8141e-6}


def test_the_published_points_of_eight_gpus() -> None:
    t = from_mesh(MeshAxes(("x",), (8,)), hardware.get("a100"))
    for nbytes, seconds in NCCL.items():
        assert collective("all_reduce", ("x",), nbytes, t).seconds == pytest.approx(seconds, rel=0.15)
    # The scaling-book's H100s: 58 MB at 150 GB/s or so of 450, which no straight line through the peak gives.
    h100 = from_mesh(MeshAxes(("x",), (8,)), hardware.get("h100"))
    assert 100e9 < 58e6 / collective("all_reduce", ("x",), 58e6, h100).seconds < 200e9


@pytest.mark.parametrize(("left_out", "off"), [(2**20, -0.59), (2**24, -0.28), (2**28, -0.08), (2**30, 0.10)])
def test_a_point_that_is_left_out_is_met_by_the_others(left_out, off) -> None:
    """As far as docs/modelled.md says."""
    curve = next(c for c in hardware.get("a100").curves if c.kind == "all_reduce")
    others = dataclasses.replace(curve, knots=tuple(k for k in curve.knots if k[0] != left_out))
    assert others.seconds(left_out) / NCCL[left_out] - 1 == pytest.approx(off, abs=0.01)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ("a100", "h100", "h200", "b200"))
def test_gpus_that_are_farther_apart_take_longer(kind, name) -> None:
    chip = hardware.get(name)
    t = from_mesh(MeshAxes(("nodes", "gpus"), (4, 8)), chip)
    for nbytes in np.geomspace(64, 1e9, 40):
        near = collective(kind, ("gpus",), nbytes, t).seconds
        both = collective(kind, ("nodes", "gpus"), nbytes, t).seconds
        assert 0 < near <= both * (1 + 1e-9)
    times = [collective(kind, ("nodes", "gpus"), b, t).seconds for b in np.geomspace(64, 1e9, 40)]
    assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(times))


@pytest.mark.parametrize("name", ("a100", "h100", "h200", "b200"))
def test_a_gather_over_hosts_takes_as_long_as_the_sum_that_it_undoes(name) -> None:
    """What a device has of its own host after the far links is gathered by the near ones, for a part of any size."""
    t = from_mesh(MeshAxes(("nodes", "gpus"), (4, 8)), hardware.get(name))
    for whole in np.geomspace(1e4, 1e9, 20):
        gather = collective("all_gather", ("nodes", "gpus"), whole / 32, t).seconds
        assert gather >= collective("all_gather", ("gpus",), whole / 8, t).seconds
        assert gather == pytest.approx(
            collective("reduce_scatter", ("nodes", "gpus"), whole, t).seconds, rel=1e-6
        )


def test_groups_that_share_the_network_cards_of_a_host_share_their_bandwidth() -> None:
    """One group over two hosts has all cards; of groups with one GPU a host, eight run at once."""
    chip = hardware.get("a100")
    one = from_mesh(MeshAxes(("x",), (16,)), chip)
    strided = from_mesh(MeshAxes(("hosts", "gpus"), (2, 8)), chip)
    b = 1e9
    whole = 2 * b * 15 / 16 / collective("all_reduce", ("x",), b, one).seconds
    each = 2 * b * 1 / 2 / collective("all_reduce", ("hosts",), b, strided).seconds
    assert each == pytest.approx(chip.nic_bandwidth * chip.efficiency, rel=0.25)
    assert whole > 4 * each
