"""Casts that some readers recompute, in the lower-bound network: no more than schedules hold, and the bound that gives."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jshard
from jshard._network.build import PlanningNetwork
from jshard._network.memory_network import memory_network, with_copies
from jshard._plan.cast_probing import cast_variables, without_costly_casts
from jshard._schedule.peak import peak_bytes
from jshard._schedule.schedule import assignment_of, schedule
from jshard._search import Effort, evaluate
from tests.helpers.memory_networks import MESH, network_of, random_plans, relative_excess


def training(loss_of):
    """A step of a head over 1,024 words whose logits are cast before the loss reads them."""

    def step(params, x, targets):
        def loss(params):
            return loss_of((jnp.tanh(x @ params["up"]) @ params["head"]).astype("float32"), targets)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    return step


def gathered_first(logits, targets):
    own = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - own).mean()


def gathered_last(logits, targets):
    total = jax.nn.logsumexp(logits, -1)
    targets = targets + (total > 0)
    return (total - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]).mean()


def gathered_twice(logits, targets):
    return gathered_first(logits, targets) + jnp.sort(logits, -1)[..., -4:].sum()


def smoothed(logits, targets):
    soft = 0.9 * jax.nn.one_hot(targets, 1024, dtype=jnp.bfloat16) + 0.1 / 1024
    return -(soft * jax.nn.log_softmax(logits)).sum(-1).mean()


LOSSES = {f.__name__: f for f in (gathered_first, gathered_last, gathered_twice, smoothed)}
SHAPES = (
    {
        "up": jax.ShapeDtypeStruct((64, 128), "bfloat16"),
        "head": jax.ShapeDtypeStruct((128, 1024), "bfloat16"),
    },
    jax.ShapeDtypeStruct((8, 64, 64), "bfloat16"),
    jax.ShapeDtypeStruct((8, 64), "int32"),
)


@functools.cache
def built(name: str) -> PlanningNetwork:
    return network_of(training(LOSSES[name]), SHAPES, donate_argnums=0)


@pytest.mark.parametrize("name", LOSSES)
def test_no_plan_holds_less_than_is_counted(name):
    problem = built(name)
    assert max(relative_excess(problem, random_plans(problem.cost_network, 30, seed=11))) <= 1e-9


@pytest.mark.parametrize("name", LOSSES)
def test_plans_cost_the_same_with_the_variables_of_casts(name):
    base = built(name).cost_network
    network = memory_network(built(name), lower_bound=True)
    assert len(cast_variables(network, base.size)) == (name != "smoothed")
    for x in random_plans(base, 20, seed=5):
        assert evaluate(network, with_copies(network, x)) == pytest.approx(evaluate(base, x), rel=1e-12)


@pytest.mark.parametrize("name", ["gathered_first", "gathered_last"])
def test_probing_leaves_every_plan_below_the_limit(name):
    problem = built(name)
    base, network = problem.cost_network, memory_network(problem, lower_bound=True)
    plans = random_plans(base, 40, seed=3)
    peaks = [
        peak_bytes(schedule(assignment_of(problem, tuple(x.tolist()))), problem.liveness, problem.donated)
        for x in plans
    ]
    f = jshard.shard(training(LOSSES[name]), mesh=MESH, hardware="tpu-v5e", level=1, donate_argnums=0)
    left = []
    for limit in (f.plan(*SHAPES).cost.peak_bytes, *np.quantile(peaks, (0.2, 0.5, 1.0))):
        probed = without_costly_casts(network, base.size, float(limit), Effort())
        for x, peak in zip(plans, peaks, strict=True):
            assert peak > limit or np.isfinite(evaluate(probed, with_copies(network, x)))
        (cast,) = cast_variables(network, base.size)
        left.append(int(np.isfinite(probed.unary[int(probed.node_table[cast])]).sum()))
    assert left == sorted(left) and left[0] < left[-1]  # low limits take states out


@pytest.mark.parametrize("name", ["gathered_first", "gathered_last", "smoothed"])
def test_the_least_peak_is_nearly_proved(name):
    """Without the variables of casts, and of gathered copies beside what is kept, the gaps are 20 to 40%."""
    shapes = (
        {
            "up": jax.ShapeDtypeStruct((64, 128), "bfloat16"),
            "head": jax.ShapeDtypeStruct((128, 1024), "bfloat16"),
        },
        jax.ShapeDtypeStruct((64, 1024, 64), "bfloat16"),
        jax.ShapeDtypeStruct((64, 1024), "int32"),
    )
    mesh = jax.sharding.AbstractMesh((4, 4), ("x", "y"))
    f = jshard.shard(
        training(LOSSES[name]),
        (None, P(("x", "y")), None),
        mesh=mesh,
        hardware="tpu-v5e",
        level=1,
        donate_argnums=0,
    )
    assert f.plan(*shapes).cost.gap < 0.06
