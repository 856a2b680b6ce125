"""The headline names what a rule keeps whole and what that costs; `why` names the exchanges of its alternatives."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jshard
from jshard._report.left_whole import LEAST_SHARE, left_whole


def planned(f: Any, *shapes: tuple[int, ...], level: int = 2) -> Any:
    machine = jshard.topology("v5e:2x4", {"x": 8})
    return jshard.shard(f, mesh=machine, level=level).plan(
        *(jax.ShapeDtypeStruct(s, "float32") for s in shapes)
    )


def test_a_transform_along_the_only_dimension_is_named_with_its_cost() -> None:
    plan = planned(lambda x: jnp.abs(jnp.fft.fft(x * 2)) + jnp.cumsum(x), (1 << 22,))
    (found,) = left_whole(plan)
    (row,) = [r for r in plan.operators if r.primitive == "fft"]
    gathered = sum(c.seconds for c in plan.collectives if c.id in row.collectives)
    assert found.seconds == pytest.approx(row.redundant + gathered) and found.count == 1
    assert re.search(
        r"kept whole: fft\.\d+ \(every frequency depends on every sample\), .* of copies "
        r"and repeated work, \d+% of the step",
        " ".join(str(plan).split()),
    )


def test_what_is_cut_or_cheap_is_not_named() -> None:
    assert not left_whole(planned(lambda x: jnp.sort(x, 1), (512, 4096)))  # the other dimension is cut
    assert not left_whole(planned(lambda x: jnp.cumsum(x), (1 << 22,)))  # a prefix of blocks
    assert not left_whole(planned(lambda x: jnp.sort(x), (1 << 22,)))  # whole, since a network takes longer
    mirrored = planned(lambda x: jnp.flip(jnp.cumsum(jnp.flip(x * 2))), (1 << 22,))
    assert mirrored.cost.redundant > 0 and not left_whole(mirrored)  # whole, since that is faster
    plan = planned(lambda x, w: (x @ w).sum() + jnp.sort(x[0])[0], (8192, 4096), (4096, 4096))
    assert not left_whole(plan) and "kept whole" not in str(plan)
    assert 0 < LEAST_SHARE < 1


def test_sizes_that_no_cut_divides_are_a_reason_and_pins_are_none() -> None:
    f = jshard.shard(
        lambda x: jnp.tanh(x) * 2, mesh=jshard.topology("v5e:2x4", {"x": 8}), level=2, config={"pad": False}
    )
    (found,) = left_whole(f.plan(jax.ShapeDtypeStruct(((1 << 22) + 1,), "float32")))[:1]
    assert found.reason == "no cut divides its sizes"
    pinned = jshard.shard(
        lambda x: jnp.tanh(x) * 2, (None,), mesh=jshard.topology("v5e:2x4", {"x": 8}), level=2
    )
    assert not left_whole(pinned.plan(jax.ShapeDtypeStruct((1 << 22,), "float32")))


def _conv(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))


CUTS = [
    (_conv, ((1, 4096, 64), (3, 64, 64)), "conv_general_dilated", ((1, 8, 1), (1, 1, 1)), "halo"),
    (lambda x: jnp.roll(x, 3, 1), ((1, 4096, 64),), "roll", ((1, 8, 1),), "roll"),
    (lambda x: jnp.cumsum(x, 1), ((4, 4096),), "cumsum", ((1, 8),), "prefix"),
    (lambda x: lax.top_k(x, 5), ((3, 64),), "top_k", ((1, 8),), "merge"),
    (lambda x: jnp.flip(x, 1), ((4, 4096),), "rev", ((1, 8),), "reverse"),
    (lambda x: jnp.sort(x, 1), ((4, 4096),), "sort", ((1, 8),), "network"),
]


@pytest.mark.parametrize("f, shapes, primitive, cuts, how", CUTS, ids=[c[-1] for c in CUTS])
def test_why_names_the_exchange_of_a_cut(f: Any, shapes: Any, primitive: str, cuts: Any, how: str) -> None:
    plan = planned(f, *shapes)
    name = next(r.name for r in plan.operators if r.primitive.endswith(primitive))
    why = plan.why(name)
    (found,) = [a for a in why.alternatives if a.cuts == cuts]
    assert found.how == how and found.cost is not None and f"by {how}; " in str(why)
    whole = [a for a in why.alternatives if all(c == 1 for t in a.cuts for c in t)]
    assert all(a.how == "" for a in whole)


def test_an_exchange_that_blocks_are_too_short_for_is_named() -> None:
    plan = planned(lambda x: lax.top_k(x, 20), (3, 64))
    reasons = [a.reason for a in plan.why("top_k.1").alternatives if a.cuts == ((1, 8),)]
    assert reasons == [
        "top_k compares elements along the whole dimension; merge: blocks of 8 are less than the 20 elements that each needs"
    ]
    undivided = [
        a.reason for a in planned(lambda x: jnp.cumsum(x), (63,)).why("cumsum.1").alternatives if a.reason
    ]
    assert any("8 does not divide dimension 0, of size 63" in r for r in undivided)
