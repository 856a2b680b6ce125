"""What arrays of convolutions take in a TPU's tiles: printed beside the peak, where it is more."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jshard
from jshard._plan.tiled_memory import in_tiles


@pytest.mark.parametrize(
    ("shape", "minor", "factor"),
    [
        ((2, 64, 64, 32), (0, 3), 4.0),  # features in lanes, the two images in tiles of two sublanes
        ((128, 64, 64, 3), (0, 3), 4 / 3),  # the batch in lanes, three features in four sublanes
        ((2, 3, 64, 64), (0, 1), 128 / 3),
        ((12, 64, 64, 128), (0, 3), 16 / 12),
        ((8, 64, 256), (0, 2), 1.0),
        ((1, 64, 1), (0, 2), 128.0),
    ],
)
def test_tiles_of_an_array(shape: tuple[int, ...], minor: tuple[int, int], factor: float) -> None:
    assert in_tiles(shape, minor) == pytest.approx(factor)


def network(w, v, x):
    def loss(w, v):
        y = jax.nn.relu(
            lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        )
        y = lax.conv_general_dilated(y, v, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.mean(y.astype("float32") ** 2)

    return jax.value_and_grad(loss, (0, 1))(w, v)


def planned(machine: str, mesh: dict[str, int], channels: int, **options) -> jshard.Plan:
    s = jax.ShapeDtypeStruct
    args = s((3, 3, 64, channels), "bfloat16"), s((3, 3, channels, 64), "bfloat16")
    image = s((2, 512, 512, 64), "bfloat16")
    devices = jshard.topology(machine, mesh, compiles=False)
    return jshard.shard(network, mesh=devices, level=2, **options).plan(*args, image)


def test_few_channels_are_said_to_take_more_than_their_elements() -> None:
    plan = planned("v5e:2x2", {"x": 4}, 32)
    assert 1.5 * plan.cost.peak_bytes < plan.memory.tiled < 4 * plan.cost.peak_bytes
    line = next(line for line in str(plan).splitlines() if "tiles" in line)
    assert line.endswith("MiB or more in tiles of 8 x 128: convolutions of few channels")
    few = planned("v5e:2x2", {"x": 4}, 32, memory_budget=int(1.2 * plan.cost.peak_bytes))
    assert few.memory_budget is not None and few.memory.tiled > few.memory_budget
    assert "more than is allowed: the compiler may refuse the program" in " ".join(str(few).split())


def test_cut_channels_take_no_less() -> None:
    space = planned("v5e:2x2", {"x": 4}, 128, in_strategy=(None, None, (1, 4, 1, 1)))
    channels = planned("v5e:2x2", {"x": 4}, 128, in_strategy=((1, 1, 1, 4), (1, 1, 4, 1), (1, 1, 1, 1)))
    more = [plan.memory.tiled / plan.cost.peak_bytes for plan in (space, channels)]
    assert more[0] < 1.3 < 1.4 < more[1]  # 128 channels fill their lanes, 32 of them take as much as 128


def test_a_gpu_has_no_tiles() -> None:
    plan = planned("h100:1x4", {"x": 4}, 32)
    assert plan.memory.tiled == 0 and "tiles" not in str(plan)


def cut_dimensions(plan: jshard.Plan) -> set[int]:
    """Of images, as convolutions read them."""
    convolutions = [r for r in plan.operators if r.primitive == "conv_general_dilated"]
    return {d for r in convolutions for d, axes in enumerate(r.operands[0].dims) if axes}


def test_rows_are_cut_where_long_ones_would_not_fit() -> None:
    plan = planned("v5e:2x2", {"x": 4}, 32)
    assert cut_dimensions(plan) == {1} and not any("rows of at most" in step for step in plan.steps)
    few = planned("v5e:2x2", {"x": 4}, 32, memory_budget=int(1.2 * plan.cost.peak_bytes))
    assert cut_dimensions(few) == {2} and few.cost.optimal
    assert few.cost.objective == pytest.approx(plan.cost.objective)
    note = next(step for step in few.steps if "rows of at most 256 pixels a device" in step)
    after, before = (float(x) for x in re.findall(r"about ([\d.]+) GiB in place of ([\d.]+),", note)[0])
    assert after < before
    pinned = planned(
        "v5e:2x2", {"x": 4}, 32, memory_budget=few.memory_budget, in_strategy=(None, None, (1, 4, 1, 1))
    )
    assert cut_dimensions(pinned) == {1}
