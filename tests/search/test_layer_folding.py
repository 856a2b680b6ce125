"""Layer folding: repeated layers are found, folding changes no answer, and networks of any depth are solved."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from jshard._search import branch_and_bound, evaluate, solve
from jshard._search.cost_network import CostNetwork, build
from jshard._search.dual import layer_folding
from jshard._search.dual.layer_folding import fold_layers
from jshard._search.exact import bucket_elimination
from jshard._search.exact.working_network import working_network
from jshard._search.search_state import SearchState, reduce_and_eliminate


def layered(layers: int, seed: int = 0, width: int = 6, states: int = 6) -> CostNetwork:
    """Equal layers of `width` variables, each joined to all of its own and to several of the next layer.

    Forward and back as in training: the layers' second halves come in reverse order. Both ends have a variable more.
    Neighbours pay for the distance of their states, so that messages can close the gap (submodular costs).
    """
    rng = np.random.default_rng(seed)
    distance = np.abs(np.subtract.outer(np.arange(states), np.arange(states)))

    def table(*shape: int) -> np.ndarray:
        if len(shape) == 1:
            return np.round(rng.uniform(0, 10, shape), 3)
        return np.round(rng.uniform(0.1, 1), 3) * distance

    own = [table(states) for _ in range(width)]
    inside = {(i, j): table(states, states) for i in range(width) for j in range(i)}
    across = {(i, j): table(states, states) for i in range(width) for j in range(width) if (i + j) % 2}
    half = width // 2

    def number(layer: int, i: int) -> int:
        return layer * half + i if i < half else layers * width - (layer + 1) * half + i - half

    unary: list[np.ndarray] = [np.zeros(0)] * (layers * width)
    edges = []
    for k in range(layers):
        for i in range(width):
            unary[number(k, i)] = own[i]
        edges += [(number(k, i), number(k, j), t) for (i, j), t in inside.items()]
        if k:
            edges += [(number(k - 1, i), number(k, j), t) for (i, j), t in across.items()]
    unary += [table(states), table(states)]
    edges += [(layers * width, number(0, i), table(states, states)) for i in range(3)]
    edges += [(layers * width + 1, number(layers - 1, i), table(states, states)) for i in range(3)]
    return build(unary, edges)


@pytest.mark.parametrize("seed", range(4))
def test_the_short_core_is_the_same_network_of_fewer_layers(seed):
    _, rest = reduce_and_eliminate(working_network(layered(40, seed)), table_limit=1, work_limit=1)
    folded = fold_layers(rest)
    assert folded is not None and len(folded.short.core) < 0.5 * len(rest.core)

    def like(graph, v):
        return graph.unary[v], sorted(graph.adj[v].values())

    # Every variable that is left sees the tables that it saw; every one cut out looks like its image.
    for v in folded.short.core:
        assert like(folded.short, v) == like(rest, v)
        for w, t in folded.short.adj[v].items():
            assert folded.short.adj[w][v] == rest.tables.transpose(t)
    assert {*folded.short.core, *folded.representative[:, 0].tolist()} == set(rest.core)
    for v, image in folded.representative.tolist():
        assert image in folded.short.core and like(rest, v) == like(rest, image)
    for v, w, a, b in folded.seam_edges.tolist():
        assert rest.adj[v][w] == folded.short.adj[a][b]


def test_layers_that_differ_are_not_folded():
    rng = np.random.default_rng(1)
    unary = [rng.uniform(0, 1, 4) for _ in range(60)]
    edges = [(i, j, rng.uniform(0, 1, (4, 4))) for i in range(60) for j in range(i + 1, min(60, i + 4))]
    assert fold_layers(working_network(build(unary, edges))) is None


def two_kinds(layers: int) -> CostNetwork:
    """Layers of which every sixth has a variable with a table of its own, as global attention among local."""
    rng = np.random.default_rng(3)
    states = range(3, 8)

    def tables(*pairs: tuple[int, int]) -> dict[tuple[int, int], np.ndarray]:
        return {(i, j): rng.uniform(0, 1, (states[i], states[j])) for i, j in pairs}

    own, other = [rng.uniform(0, 1, n) for n in states], rng.uniform(0, 1, states[2])
    inside = tables(*((i, j) for i in range(5) for j in range(i)))
    across = tables(*((i, j) for i in range(5) for j in range(5) if (i + j) % 2))
    unary = [other if i == 2 and k % 6 == 5 else own[i] for k in range(layers) for i in range(5)]
    edges = [(5 * k + i, 5 * k + j, t) for k in range(layers) for (i, j), t in inside.items()]
    edges += [(5 * k - 5 + i, 5 * k + j, t) for k in range(1, layers) for (i, j), t in across.items()]
    return build(unary, edges)


@pytest.mark.parametrize("layers", [62, 80])
def test_layers_of_two_kinds_are_folded(layers, monkeypatch):
    net = two_kinds(layers)
    _, rest = reduce_and_eliminate(working_network(net), table_limit=1, work_limit=1)
    folded = fold_layers(rest)
    assert folded is not None and 4 * len(folded.short.core) < len(rest.core)
    assert {*folded.short.core, *folded.representative[:, 0].tolist()} == set(rest.core)
    assert all(rest.states[v] == rest.states[image] for v, image in folded.representative.tolist())
    monkeypatch.setattr(bucket_elimination, "TABLE_LIMIT", 1000)
    monkeypatch.setattr(branch_and_bound, "FOLD_FROM", 100)
    steps: list[str] = []
    search = SearchState(np.inf, 0.0, steps.append, net.size)
    branch_and_bound.branch_and_bound(search, working_network(net), max_rounds=10, may_branch=False)
    assert any("folding" in step for step in steps) and search.assignment is not None
    assert evaluate(net, search.assignment) == pytest.approx(search.incumbent_cost, rel=1e-9)
    assert search.bound <= search.incumbent_cost


def with_variables_of_a_layer(hub: bool) -> CostNetwork:
    """Forty layers; each has a variable beside whose number of states is its own, or one variable is beside all layers."""
    layers, rng = 40, np.random.default_rng(5)
    own, inside, across = rng.uniform(0, 1, 4), rng.uniform(0, 1, (4, 4)), rng.uniform(0, 1, (4, 4))
    unary = [own] * (2 * layers)
    edges = [(2 * k, 2 * k + 1, inside) for k in range(layers)]
    edges += [
        (2 * k + i, 2 * k + 2 + j, across) for k in range(layers - 1) for i, j in ((0, 0), (1, 1), (1, 0))
    ]
    sizes = [3] if hub else [5 + k for k in range(layers)]
    tables = [rng.uniform(0, 1, (4, n)) for n in sizes]
    edges += [(2 * k + 1, 2 * layers + (0 if hub else k), tables[0 if hub else k]) for k in range(layers)]
    return build([*unary, *(rng.uniform(0, 1, n) for n in sizes)], edges)


@pytest.mark.parametrize("hub", [False, True])
def test_variables_that_do_not_repeat_keep_their_neighbours(hub):
    """A variable of one layer would be left without any in the short core; one beside all layers keeps those left."""
    graph = working_network(with_variables_of_a_layer(hub))
    edges, first = layer_folding._directed_edges(graph)
    layering = layer_folding._find_layers(edges, layer_folding._refine_colours(graph, edges, first, 1, False))
    if not hub:  # each layer looks unlike all others, beside a variable like no other
        colour = np.array([v % 2 if v < 80 else -1 for v in graph.core])
        layer = np.array([v // 2 if v < 80 else 0 for v in graph.core])
        layering = layer_folding._Layering(colour, layer, 0, 40)
    assert layering is not None
    folded = layer_folding._remove_middle(graph, edges, layering)
    assert (folded is not None) == hub
    if folded is not None:
        assert len(folded.short.core) < 30 and len(folded.short.adj[80]) == (len(folded.short.core) - 1) // 2


@pytest.mark.parametrize("seed", range(3))
def test_folding_changes_no_answer_and_no_proof(seed, monkeypatch):
    # Or elimination finishes it before there is a core.
    monkeypatch.setattr(bucket_elimination, "TABLE_LIMIT", 1000)
    net = layered(200, seed, states=5)
    quick = solve(net)
    assert any("folding" in step for step in quick.steps), quick.steps
    monkeypatch.setattr(branch_and_bound, "fold_layers", lambda graph: None)
    plain = solve(net)
    for s in (quick, plain):
        assert s.optimal and evaluate(net, s.assignment) == pytest.approx(s.cost, rel=1e-12)
    assert quick.cost == pytest.approx(plain.cost, rel=1e-9)


DEEP = """
import sys, jax, jax.numpy as jnp, jshard
sys.setrecursionlimit(600)
def step(params, x):
    def loss(params):
        h = x
        for w, v in params:
            h = h + jnp.tanh(h @ w) @ v
        return (h * h).mean()
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))
S = lambda *s: jax.ShapeDtypeStruct(s, "float32")
args = [(S(1024, 4096), S(4096, 1024))] * {layers}, S(4096, 1024)
mesh = jax.sharding.AbstractMesh((4, 8), ("x", "y"))
plan = jshard.shard(step, mesh=mesh, hardware="tpu-v5e", memory_budget="1e6 GiB").plan(*args)
assert plan.cost.optimal, plan.cost
print(len(plan.operators), len(str(plan)) > 0, file=sys.stderr)
text = plan.to_json()
print(text if isinstance(text, str) else __import__("json").dumps(text))
"""


def run(layers: int, seed: str) -> str:
    code = DEEP.format(layers=layers)
    env = {
        **os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(pathlib.Path(__file__).parents[2]),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_two_processes_with_two_hash_seeds_write_one_plan_126_layers_deep():
    """Byte for byte; and no part of the planner recurses along the depth (the limit is 600 frames)."""
    assert run(126, "1") == run(126, "2")
