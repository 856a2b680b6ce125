"""Level 1 looks within budgets below the peak that its networks find, since they count too little of some plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

import jshard
from jshard._plan.least_peak import lower_by_budgets
from jshard._search.effort import ENTRIES_PER_SECOND, Effort


@dataclasses.dataclass(frozen=True)
class Planned:
    """What is read of a scheduled solution."""

    peak: float
    bound: float = 50.0
    interrupted: bool = False
    request: str = "level 1"
    steps: tuple[str, ...] = ("first",)


@pytest.mark.parametrize(
    ("lowest", "tried", "reached"),
    [
        (30.0, [80.0, 60.8, 46.208], 44.0),  # each 5% below its budget, until 1.1 times the bound
        (70.0, [80.0, 60.8, 72.2], 70.0),
        (90.0, [80.0, 95.0, 85.738], 90.25),
        (99.0, [80.0, 95.0], 100.0),
    ],
)
def test_budgets_follow_what_is_found_and_end_soon(lowest: float, tried: list[float], reached: float) -> None:
    budgets, efforts = [], []

    def searches(gap: float, each: float) -> Any:
        efforts.append(each)

        def plans(budget: float, most: float) -> Sequence[Planned]:
            budgets.append(budget)
            if budget < lowest:
                return [Planned(120.0, request="a budget")]
            return [Planned(max(lowest, 0.95 * budget), bound=1.0, request="a budget")]

        return plans

    best: Any = lower_by_budgets(Planned(100.0), searches, Effort(spent=4 * ENTRIES_PER_SECOND))  # type: ignore[arg-type]
    assert budgets[: len(tried)] == pytest.approx(tried, rel=1e-4)
    assert best.peak == pytest.approx(reached, abs=0.2) and best.bound == 50.0 and best.request == "level 1"
    assert efforts == [3 * ENTRIES_PER_SECOND]
    assert (len(best.steps) == 2) == (reached < 100.0)


@pytest.mark.filterwarnings(
    "ignore:scatter inputs have incompatible types:FutureWarning"
)  # of Flax's BatchNorm
def test_a_block_with_batch_normalisation_and_dropout() -> None:
    """The network counts 26,476 bytes of a plan that holds 65,324, and no less of one that holds 28,460."""
    nnx = pytest.importorskip("flax.nnx")
    import jshard.flax as jf

    class Block(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self, rngs: Any) -> None:
            kind = dict(rngs=rngs, param_dtype=jax.numpy.float64, dtype=jax.numpy.float64)
            self.norm, self.dropout = nnx.BatchNorm(32, **kind), nnx.Dropout(0.3, rngs=rngs)
            self.up, self.down = nnx.Linear(32, 128, **kind), nnx.Linear(128, 32, **kind)

        def __call__(self, x: Any) -> Any:
            return x + self.dropout(self.down(nnx.gelu(self.up(self.norm(x)))))

    mesh = AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(1), (48, 32), jax.numpy.float64)
        block = Block(nnx.Rngs(0)).shard(level=1, mesh=mesh, hardware="tpu-v5e")
        plan: jshard.Plan = jf.plan_of(block, x)
    assert plan.cost.bound <= plan.cost.peak_bytes <= 30_000
