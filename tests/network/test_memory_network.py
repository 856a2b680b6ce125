"""The lower-bound memory network holds no more than the schedule of any plan, so its bound is one on the plan's peak."""

from __future__ import annotations

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from benchmarks import workloads
from benchmarks.planning.budgets import Config, transformer
from jshard._core.errors import ShardError
from jshard._network.build import PlanningNetwork
from jshard._network.memory_network import memory_network, with_copies
from jshard._program.memory.live_intervals import LowerBoundIntervals
from jshard._program.memory.remat_flow import remat_flow
from jshard._schedule.peak import peak_bytes
from jshard._schedule.schedule import assignment_of, schedule
from jshard._search import evaluate, peak, solve
from tests.helpers.memory_networks import (
    network_of,
    random_plans,
    relative_excess,
)
from tests.laws.fuzz_judge import mesh_of
from tests.laws.fuzz_programs import program


def scanned(params, x):
    def loss(params):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def repeated(x, w):
    return jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ w) @ w.T, x)


def flows_of(problem: PlanningNetwork):
    """What flows from each stored tensor of a problem, and through each other one."""
    live = LowerBoundIntervals(problem.program, problem.liveness, problem.donated)
    stored = [
        t for t, kept in enumerate(problem.liveness.materialized) if kept and not live.counted_elsewhere(t)
    ]
    return remat_flow(live, stored, problem.topology.mesh.total)


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, "float32")


STEPS = {
    "scan": (scanned, (shape(4, 512, 512), shape(256, 512)), {"donate_argnums": 0}),
    "fori": (repeated, (shape(256, 512), shape(512, 512)), {}),
}


@functools.cache
def built(name: str) -> PlanningNetwork:
    if name in STEPS:
        fn, args, options = STEPS[name]
        return network_of(fn, args, **options)
    w = workloads.get(name, small=True, devices=8)
    return network_of(w.step, w.args, in_strategy=w.in_strategy(8), donate_argnums=0)


@pytest.mark.parametrize("name", [*STEPS, "mlp-512", "moe"])
def test_no_plan_of_a_step_holds_less_than_the_sure_network_counts(name):
    problem = built(name)
    assert max(relative_excess(problem, random_plans(problem.cost_network, 6))) <= 1e-9


def test_no_plan_of_a_random_program_holds_less_than_the_sure_network_counts():
    """Loops, branches, custom rules, donated arguments: whatever `fuzz_programs.py` draws."""
    seen = 0
    for seed in range(0, 60, 5):
        drawn = program(random.Random(seed), high=25)
        mesh, args = mesh_of(drawn.mesh), drawn.arguments()
        donated = tuple(i for i in range(len(args)) if (seed + i) % 2)
        with jax.enable_x64(drawn.x64):
            try:
                problem = network_of(drawn.function(False, mesh), args, mesh, donate_argnums=donated)
            except ShardError:
                continue  # what constraints in the program ask for cannot be
            assert max(relative_excess(problem, random_plans(problem.cost_network, 3, seed))) <= 1e-9, seed
            seen += 1
    assert seen >= 10


@pytest.mark.parametrize("name", [*STEPS, "mlp-512"])
def test_the_least_that_the_sure_network_counts_is_a_bound_on_every_plan(name):
    problem = built(name)
    bound = solve(memory_network(problem, lower_bound=True), objective="peak", gap=0.02, seconds=10).bound
    near = solve(memory_network(problem), objective="peak", gap=0.02, seconds=10).assignment[
        : problem.cost_network.size
    ]
    for x in (*random_plans(problem.cost_network, 6), near):
        made = schedule(assignment_of(problem, tuple(x.tolist())))
        assert bound <= peak_bytes(made, problem.liveness, problem.donated) * (1 + 1e-9)


def test_the_other_network_counts_what_the_schedule_of_its_answer_holds():
    """What the search sees is what the plan holds, or it would look in the wrong places."""
    problem = built("moe")
    found = solve(memory_network(problem), objective="peak", gap=0.02, seconds=20)
    made = schedule(assignment_of(problem, tuple(found.assignment[: problem.cost_network.size].tolist())))
    assert found.cost == pytest.approx(peak_bytes(made, problem.liveness, problem.donated), rel=0.05)


def test_what_a_program_returns_is_held_to_its_end():
    """Results that are gathered one after the other are all there at the end."""
    weights = [shape(256, 512)] * 6
    problem = network_of(
        lambda ws: [2 * w for w in ws], (weights,), in_strategy=([(2, 4)] * 6,), out_strategy=[(1, 1)] * 6
    )
    states = random_plans(problem.cost_network, 1)[0]
    held = peak_bytes(schedule(assignment_of(problem, tuple(states.tolist()))), problem.liveness, ())
    least, estimate = [memory_network(problem, lower_bound=lower_bound) for lower_bound in (True, False)]
    assert 6 * 256 * 512 * 4 <= peak(least, with_copies(least, states)) <= held
    assert peak(estimate, with_copies(estimate, states)) == pytest.approx(held, rel=0.05)


def normed(layers, x):
    def norm(x, scale):
        y = x - x.mean(-1, keepdims=True)
        return y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5) * scale

    def loss(layers):
        stream = x
        for scale, up, down in layers:
            stream = stream + jnp.tanh(norm(stream, scale) @ up) @ down
        return (stream * stream).mean()

    return jax.grad(loss)(layers)


def test_copies_of_what_is_computed_again_count_until_then():
    """A fused reader that the backward pass computes again keeps the copy that it reads; each reader its own."""
    layers = [(shape(64), shape(64, 64), shape(64, 64))] * 2
    problem = network_of(normed, (layers, shape(8192, 64)), mesh=jax.sharding.AbstractMesh((4,), ("x",)))
    estimate = memory_network(problem)
    ratios = []
    for states in random_plans(problem.cost_network, 100):
        made = schedule(assignment_of(problem, tuple(states.tolist())))
        held = peak_bytes(made, problem.liveness, problem.donated)
        ratios.append(peak(estimate, with_copies(estimate, np.asarray(states))) / held)
    # An estimate, no bound: of plans drawn at random 1 to 3 in 100 are counted below nine tenths of what they hold, the
    # least at 0.68 (of 500, JAX 0.10.2); by the bounding network half of them are counted below 0.61.
    assert np.quantile(ratios, 0.05) >= 0.9 and min(ratios) >= 0.65


def test_what_a_loop_reads_is_held_until_it_ends():
    """A stacked weight that is gathered before the loop counts as a whole; gathered in it, as one layer."""
    problem = built("scan")
    network = memory_network(problem)
    found = solve(network, objective="peak", seconds=20)
    made = schedule(assignment_of(problem, tuple(found.assignment[: problem.cost_network.size].tolist())))
    assert peak_bytes(made, problem.liveness, problem.donated) <= found.peak * 1.15


def residual(params, x):
    def loss(params, x):
        for w in params:
            x = x + jnp.tanh((x - x.mean(-1, keepdims=True)) @ w)
        return jnp.sum(x**2)

    return jax.grad(loss)(params, x)


def test_every_layer_of_a_residual_stream_flows():
    """The gradient of the stream joins the chains of all layers; each is cut in its own forward pass already."""
    layers = 6
    problem = network_of(residual, ([shape(256, 256)] * layers, shape(512, 256)))
    flows, through = flows_of(problem)
    tensors = problem.program.tensors
    share = 512 * 256 * 4 // problem.topology.mesh.total
    streams = [
        t for t, of in flows.items() if tensors[t].shape == (512, 256) and sum(f.nbytes for f in of) == share
    ]
    assert len(streams) >= layers - 2
    assert all(through[t] <= tensors[t].nbytes // problem.topology.mesh.total for t in range(len(tensors)))
    assert max(relative_excess(problem, random_plans(problem.cost_network, 4))) <= 1e-9


def test_all_parts_of_a_value_flow_that_are_read_later():
    """Queries, keys and values are slices of one product, and all three are read in the backward pass."""

    def attention(params, x):
        def layer(x, w):
            q, k, v = jnp.split(x @ w, 3, axis=-1)
            return x + jax.nn.softmax(q @ k.T) @ v

        def loss(params):
            return jnp.sum(functools.reduce(layer, params, x) ** 2)

        return jax.grad(loss)(params)

    problem = network_of(attention, ([shape(64, 192)] * 2, shape(128, 64)))
    flows, through = flows_of(problem)
    tensors = problem.program.tensors
    share = 128 * 192 * 4 // problem.topology.mesh.total
    whole = [
        t for t, of in flows.items() if tensors[t].shape == (128, 192) and sum(f.nbytes for f in of) == share
    ]
    assert len(whole) == 2  # a third of that without the other slices
    assert all(through[t] <= tensors[t].nbytes // problem.topology.mesh.total for t in range(len(tensors)))
    assert max(relative_excess(problem, random_plans(problem.cost_network, 8))) <= 1e-9


@pytest.mark.parametrize("lower_bound", [False, True])
def test_the_states_of_copies_follow_from_the_others(lower_bound):
    problem = built("mlp-512")
    memory, n = memory_network(problem, lower_bound=lower_bound), problem.cost_network.size
    assert memory.size > n
    for states in random_plans(problem.cost_network, 4):
        whole = with_copies(memory, np.asarray(states))
        assert evaluate(memory, whole) == pytest.approx(evaluate(problem.cost_network, states), rel=1e-12)
    found = solve(memory).assignment
    assert evaluate(memory, with_copies(memory, found[:n])) == evaluate(memory, found)


def test_copies_count_that_are_large_beside_an_even_part_of_the_largest_tensor():
    """On 256 devices gathered weights are as large as a part of the logits, which no device holds whole."""
    step, args = transformer(Config(4, 1024, 8, 4, 128, 3584, 16_384, batch=512, length=256))
    mesh = jax.sharding.AbstractMesh((32, 8), ("x", "y"))
    plan = jshard.shard(step, mesh=mesh, hardware="tpu-v5e", level=1, donate_argnums=(0, 1)).plan(*args)
    assert plan.cost.bound <= plan.cost.peak_bytes < 1.01 * plan.cost.bound  # 1.10 without


def test_a_copy_of_an_argument_counts_until_what_is_computed_again_has_read_it():
    """The mean of an argument needs whole rows, kept for the backward pass; the residual sum reads slices of it as long."""

    def loss(weights, x, wanted):
        for w in weights:
            y = x - x.mean(-1, keepdims=True)
            x = x + jax.nn.gelu(y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5) @ w)
        return ((x - wanted) ** 2).mean()

    x, mesh = shape(91, 32), jax.sharding.AbstractMesh((4, 2), ("x", "y"))
    step = jshard.shard(jax.value_and_grad(loss), mesh=mesh, hardware="tpu-v5e", level=1)
    plan = step.plan([shape(32, 32)] * 3, x, x)
    assert (
        plan.cost.peak_bytes < 2 * plan.cost.bound
    )  # 2.8 where only the residual sum's slice counted: an estimate
