"""Copies of one value that begin with the same gather: the later ones are made of a value behind a barrier."""

from __future__ import annotations

import types
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

from jshard._core.layout import Layout
from jshard._cost.reshard_steps import ReshardStep
from jshard._lower.unmerged_copies import UnmergedCopies
from jshard._schedule.schedule import Reshard


ROWS, COLUMNS, WHOLE = (Layout(dims) for dims in ((("x", "y"), ()), ((), ("x", "y")), ((), ())))
BOTH, MINOR = Layout((("y",), ("x",))), Layout((("y",), ()))


def copy(tensor: int, source: Layout, target: Layout) -> Reshard:
    gathered = [ReshardStep("all_gather", of, d) for d, of in enumerate(source.dims) if of]
    steps = (*gathered, *(ReshardStep("slice", of, dst_dim=d) for d, of in enumerate(target.dims) if of))
    return Reshard(tensor, source, target, steps, 1.0, -1, tuple(range(len(steps))))


@pytest.mark.parametrize(
    ("copies", "barriers"),
    [
        ([copy(0, ROWS, WHOLE)], 0),
        ([copy(0, ROWS, BOTH), copy(0, ROWS, MINOR)], 1),
        ([copy(0, ROWS, WHOLE), copy(0, ROWS, MINOR), copy(0, ROWS, BOTH)], 3),  # of one and of two
        ([copy(0, ROWS, WHOLE), copy(1, ROWS, MINOR), copy(0, COLUMNS, BOTH)], 0),
        ([copy(0, WHOLE, BOTH), copy(0, WHOLE, BOTH)], 0),
    ],
)  # fmt: skip
def test_a_later_copy_with_the_same_gather_is_set_apart(copies: list[Reshard], barriers: int) -> None:
    kept = UnmergedCopies(cast("Any", types.SimpleNamespace(regather_after=())))
    values = [jnp.ones((9, 6)), jnp.zeros((9, 6))]
    jaxpr = jax.make_jaxpr(lambda xs: [kept.behind_barrier(c, xs[c.tensor], {}) for c in copies])(values)
    assert str(jaxpr).count("optimization_barrier") == barriers
