"""Copies made again for a later reader in programs with loops: what is held then, what it costs, and that values stay."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from benchmarks.planning.budgets import Config, transformer
from jshard._plan.live_range_gaps import gaps_of, splits
from jshard._plan.live_range_splits import split_live_ranges
from jshard._plan.schedule_cost import schedule_cost
from jshard._schedule.peak import peak_bytes
from jshard._schedule.schedule import assignment_of, schedule
from jshard._search import evaluate
from tests.helpers.memory_networks import network_of, random_plans, with_every_live_range_split


def step(params: Any, batch: Any) -> Any:
    """Gradient descent through scanned layers that are computed again, between an embedding and a head."""

    def loss(params: Any) -> Any:
        first, layers, head = params

        @jax.checkpoint
        def layer(h: Any, w: Any) -> Any:
            return h + jnp.tanh(h @ w[0]) @ w[1], None

        return jax.nn.logsumexp(jax.lax.scan(layer, batch @ first, layers)[0] @ head, axis=-1).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments(rows: int, width: int, wide: int, words: int) -> Any:
    shapes = (width, width), ((3, width, wide), (3, wide, width)), (width, words)
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, "float32"), shapes, is_leaf=lambda s: isinstance(s[0], int)
    ), jax.ShapeDtypeStruct((rows, width), "float32")


MESH = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
CUT: Any = ((8, 1), ((1, 8, 1), (1, 8, 1)), (8, 1))  # weights that both passes gather


def test_a_limit_is_kept_and_what_is_split_costs_what_the_network_says_at_most() -> None:
    """Of random plans of a step with a loop: from all copies kept to none, whatever limit between the two peaks."""
    options: Any = dict(in_strategy=(CUT, (8, 1)), out_strategy=(CUT, None), donate_argnums=(0,))
    network = network_of(step, arguments(512, 256, 512, 1024), MESH, **options)
    lower = 0
    for states in random_plans(network.cost_network, 16):
        made = schedule(assignment_of(network, tuple(states.tolist())))
        assert made.arrays is None
        kept = peak_bytes(made, network.liveness, network.donated)
        least = split_live_ranges(made, network.liveness, network.donated, 0.0)
        if least is None or least.profile.peak >= kept:
            continue
        costs = [schedule_cost(made, network).objective(network.level)]
        for limit in np.linspace(kept - 1, least.profile.peak, 4).tolist():
            found = split_live_ranges(made, network.liveness, network.donated, limit)
            assert found is not None and found.profile.peak <= limit
            assert found.profile.peak == peak_bytes(found.schedule, network.liveness, network.donated)
            costs.append(schedule_cost(found.schedule, network).objective(network.level))
        assert min(costs) == costs[0] and costs[-1] <= evaluate(network.cost_network, states) * (1 + 1e-9)
        lower += 1
    assert lower >= 3


def test_keeping_a_copy_over_a_gap_takes_what_the_gap_says() -> None:
    """The bytes over time with some copies kept are those of the schedule that keeps them."""
    network = network_of(step, arguments(512, 256, 512, 1024), MESH, in_strategy=(CUT, (8, 1)))
    states = random_plans(network.cost_network, 1, seed=3)[0]
    made = schedule(assignment_of(network, tuple(states.tolist())))
    everywhere = splits(made, network.liveness, network.donated)
    assert everywhere
    again = schedule(dataclasses.replace(made.assignment, regather=everywhere))
    gaps = gaps_of(again, network.liveness, network.donated)
    assert set(gaps.pairs) == everywhere
    assert gaps.over_time.max() == peak_bytes(again, network.liveness, network.donated)
    assert gaps.kept_within(np.inf) == everywhere


def test_the_least_peak_of_scanned_layers_is_proved_with_copies_made_again() -> None:
    """The gathered weights of the head are not held from its product until its derivative: 48.3 MB otherwise."""
    program, args = transformer(Config(2, 512, 8, 4, 64, 1536, 4096, batch=32, length=256, scan=True))
    mesh = jax.sharding.AbstractMesh((8,), ("x",))
    plan = jshard.shard(program, mesh=mesh, hardware="tpu-v5e", donate_argnums=(0, 1), level=1).plan(*args)
    assert plan.decision.regather and plan.decision.regather_after
    assert plan.cost.gap < 0.005 and plan.cost.peak_bytes < 45e6
    assert jshard.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("level", [0, 1])
def test_values_stay_when_every_copy_is_made_again(level: int, monkeypatch) -> None:
    """In the loops' bodies and around them, at both levels, also from the plan as JSON."""
    with_every_live_range_split(monkeypatch)
    rng = np.random.default_rng(0)
    args = jax.tree.map(lambda s: jnp.array(rng.normal(size=s.shape) / 8, s.dtype), arguments(64, 16, 32, 64))
    budget = dict(memory_budget=20_000) if level == 0 else {}
    options: Any = dict(mesh=jax.make_mesh((2, 4), ("x", "y")), hardware="tpu-v5e", level=level, **budget)
    sharded = jshard.shard(step, in_strategy=(CUT, (8, 1)), out_strategy=(CUT, None), **options)
    plan = sharded.plan(*args)
    assert plan.decision.regather
    replayed = jshard.shard(step, plan=jshard.Plan.from_json(plan.to_json()), mesh=options["mesh"])
    want = jax.jit(step)(*args)
    for call in (sharded, replayed):
        for got, expected in zip(jax.tree.leaves(call(*args)), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)
