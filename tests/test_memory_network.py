"""The cost network with memory holds no more than the schedule of the same plan: its bound is one on the plan's peak."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from benchmarks import workloads
from jshard._plan import make
from jshard._plan.limited import limited
from jshard._plan.network import Problem
from jshard._plan.peak import peak_bytes
from jshard._plan.schedule import choice_of, schedule
from jshard._search import CostNetwork, solve


MESH = jax.sharding.AbstractMesh((2, 4), ("x", "y"))


def problem_of(fn, args, **options) -> Problem:
    """The problem that planning a function poses at level 1."""
    seen: list[Problem] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "limited", lambda built: seen.append(built) or limited(built))
        jshard.shard(fn, mesh=MESH, hardware="tpu-v5e", level=1, **options).plan(*args)
    return seen[0]


def plans(network: CostNetwork, count: int) -> list[np.ndarray]:
    """Assignments that are nobody's best: each is the cheapest under costs of its own."""
    rng = np.random.default_rng(7)
    out = []
    for _ in range(count):
        unary = tuple(t + rng.random(t.shape) * 1e-3 for t in network.unary)
        moved = dataclasses.replace(network, unary=unary)
        out.append(solve(moved, gap=1.0, seconds=20).assignment)
    return out


def scanned(params, x):
    def loss(params):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def repeated(x, w):
    return jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ w) @ w.T, x)


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, "float32")


STEPS = {
    "scan": (scanned, (shape(4, 512, 512), shape(256, 512)), {"donate_argnums": 0}),
    "fori": (repeated, (shape(256, 512), shape(512, 512)), {}),
}


@functools.cache
def built(name: str) -> Problem:
    if name in STEPS:
        fn, args, options = STEPS[name]
        return problem_of(fn, args, **options)
    w = workloads.get(name, small=True, devices=8)
    return problem_of(w.step, w.args, in_strategy=w.in_strategy(8), donate_argnums=0)


@pytest.mark.parametrize("name", [*STEPS, "mlp-512"])
def test_the_least_that_the_network_counts_is_a_bound_on_every_plan(name):
    problem = built(name)
    least = solve(limited(problem), objective="peak", gap=0.02, seconds=10)
    for x in (*plans(problem.network, 6), least.assignment[: problem.network.size]):
        made = schedule(choice_of(problem, tuple(x.tolist())))
        assert least.bound <= peak_bytes(made, problem.residency, problem.donated) * (1 + 1e-9)


def test_what_a_loop_reads_is_held_until_it_ends():
    """A stacked weight that is gathered before the loop counts as a whole; gathered in it, as one layer."""
    problem = built("scan")
    network = limited(problem)
    found = solve(network, objective="peak", seconds=20)
    made = schedule(choice_of(problem, tuple(found.assignment[: problem.network.size].tolist())))
    assert peak_bytes(made, problem.residency, problem.donated) <= found.peak * 1.15
