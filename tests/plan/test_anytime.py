"""A search that ends early, by `search_seconds` or Ctrl-C, gives the best plan it had, with a bound that holds."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from jshard._core.errors import MemoryBudgetError, SearchError
from jshard._core.named_topology import TopologyMesh
from jshard._plan import least_peak, level_search, ranked_search
from jshard._plan.request import ENOUGH, PlanRequest
from jshard._search import Effort
from jshard._search.effort import ENTRIES_PER_SECOND
from tests.helpers import training_steps


def machine() -> TopologyMesh:
    return jshard.topology("v5e:2x4", {"data": 2, "model": 4}, compiles=False)


SQUARE = jax.ShapeDtypeStruct((64, 64), "float32")


def chain(x, a, b, c):
    return jax.nn.relu(jax.nn.relu(x @ a) @ b) @ c


STEP = training_steps.gpt()
PROGRAMS = {
    "chain": (chain, (SQUARE,) * 4),
    "gpt": (training_steps.step(STEP), STEP.arguments()),
}


def planned(name: str, **options):
    fn, args = PROGRAMS[name]
    return jshard.shard(fn, mesh=machine(), **options).plan(*args)


def test_search_seconds_end_the_search_alike_on_every_run():
    best = planned("gpt")
    assert best.cost.optimal
    for seconds in (1e-9, 0.01):
        plan = planned("gpt", config={"search_seconds": seconds})
        assert plan.cost.bound <= best.cost.objective <= plan.cost.objective
        assert plan.cost.gap >= 0
        again = planned("gpt", config={"search_seconds": seconds})
        assert (again.cost, again.operators) == (plan.cost, plan.operators)
    enough = planned("gpt", config={"search_seconds": 1e4})
    assert (enough.cost, enough.operators) == (best.cost, best.operators)


@pytest.mark.parametrize("share", [0.7, 0.9])
def test_a_budget_is_kept_however_little_is_searched(share):
    free = planned("chain")
    budget = int(share * free.cost.peak_bytes)
    best = planned("chain", memory_budget=budget)
    for seconds in (1e-9, 0.05):
        plan = planned("chain", memory_budget=budget, config={"search_seconds": seconds})
        assert plan.cost.peak_bytes <= budget
        assert plan.cost.bound <= best.cost.objective * (1 + 1e-9)
        assert plan.cost.objective >= free.cost.bound


def graph_attention(nodes: int = 24, edges: int = 48, width: int = 8, heads: int = 4):
    """A training step of a layer of graph attention, and its arguments."""

    def layer(q, x, senders, receivers):
        h = (x @ q["w"]).reshape(nodes, heads, -1)
        scores = (h * q["s"]).sum(-1)[senders] + (h * q["r"]).sum(-1)[receivers]
        weights = jax.numpy.exp(jax.nn.leaky_relu(scores))
        total = jax.ops.segment_sum(weights, receivers, nodes)
        values = (weights / (total[receivers] + 1e-9))[..., None] * h[senders]
        y = jax.ops.segment_sum(values, receivers, nodes).reshape(nodes, -1)
        return x + jax.nn.elu(y) @ q["o"]

    def step(q, *batch):
        loss, gradient = jax.value_and_grad(lambda q: (layer(q, *batch) ** 2).mean())(q)
        return jax.tree.map(lambda p, g: p - 0.1 * g, q, gradient), loss

    def f32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, "float32")

    q = dict(w=f32(width, 16), s=f32(heads, 4), r=f32(heads, 4), o=f32(16, width))
    return step, (q, f32(nodes, width), *[jax.ShapeDtypeStruct((edges,), "int32")] * 2)


def test_a_budget_that_the_plan_of_level_1_keeps_is_not_refused(monkeypatch):
    """Though the search within the budget finds nothing: 4,596 bytes were named as the least, level 1 has 4,500."""
    step, args = graph_attention()
    options = dict(mesh=jax.sharding.AbstractMesh((2, 2), ("x", "y")), hardware="tpu-v5e")
    lowest = jshard.shard(step, level=1, **options).plan(*args).cost.peak_bytes
    nothing = lambda self, network, fastest: fastest  # noqa: E731
    monkeypatch.setattr(level_search.LevelSearch, "minimize_time_under_budget", nothing)
    plan = jshard.shard(step, memory_budget=int(lowest), **options).plan(*args)
    assert plan.cost.peak_bytes <= lowest and plan.level == 0
    assert 0 < plan.cost.bound <= plan.cost.objective


def test_the_second_search_of_a_long_given_effort_has_no_more():
    """ENOUGH times as much: of 10 s a step with shifted windows on 2 x 2 x 2 took 290, and was refused."""
    request = PlanRequest((), (), (), 0, True, 1.0)
    given = [request.with_more(Effort.of_seconds(s), lowers=False) for s in (1.0, 10.0, 60.0)]
    assert [r and r.effort and r.effort.limit / ENTRIES_PER_SECOND for r in given] == [ENOUGH, 20.0, 60.0]
    assert [request.times_again(Effort(e)) for e in (0.0, 10 * ENTRIES_PER_SECOND)] == [ENOUGH, 2.0]


@pytest.mark.parametrize("fails", [False, True])
def test_where_a_given_effort_finds_no_plan_the_search_is_made_again_with_more(monkeypatch, fails):
    """Before the least peak is looked for. `fails`: neither finds anything, as of a large network without effort."""

    def least_peak_plan(self):
        assert fails and len(efforts) == 2
        raise SearchError("nothing found", where="there")

    monkeypatch.setattr(ranked_search, "_VARIABLES", 0)
    budget = int(0.7 * planned("chain").cost.peak_bytes)
    efforts, search = [], level_search.LevelSearch.minimize_time_under_budget

    def first_finds_nothing(self, network, fastest):
        efforts.append(self.effort.limit)
        return search(self, network, fastest) if len(efforts) > 1 and not fails else fastest

    monkeypatch.setattr(level_search.LevelSearch, "minimize_time_under_budget", first_finds_nothing)
    monkeypatch.setattr(level_search.LevelSearch, "minimize_peak", least_peak_plan)
    monkeypatch.setattr(level_search, "descend_peak", lambda best, *_: best)
    if fails:
        with pytest.raises(MemoryBudgetError):
            planned("chain", memory_budget=budget, config={"search_seconds": 0.01})
        assert efforts[:2] == pytest.approx([1e6, 4e6])
        return
    plan = planned("chain", memory_budget=budget, config={"search_seconds": 0.01})
    assert plan.cost.peak_bytes <= budget and 0 < plan.cost.bound <= plan.cost.objective
    assert efforts == pytest.approx([1e6, 4e6])
    assert plan.steps[0].startswith(
        "the given effort found no plan within the budget: searched again with 4 times"
    )


def test_a_search_made_again_begins_with_the_limit_that_the_first_would_have_lowered(monkeypatch):
    """With the effort spent the first ends above the budget; beginning with the same limit, the second found that again."""
    begun, budget = [], int(0.9 * planned("gpt").cost.peak_bytes)

    def recorded(limit, *given):
        begun.append((limit, given[-1]))
        return SimpleNamespace(run=lambda *_: ([], None))

    monkeypatch.setattr(level_search, "last_above", lambda plans, found, limit: (0.98 * limit, "plan"))
    monkeypatch.setattr(ranked_search, "_VARIABLES", 0)
    monkeypatch.setattr(level_search, "LimitSearch", recorded)
    monkeypatch.setattr(level_search.LevelSearch, "_solve_limited", lambda *_, **__: None)
    with contextlib.suppress(MemoryBudgetError):
        planned("gpt", memory_budget=budget, config={"search_seconds": 1.0})
    assert begun[:2] == [(budget, None), (budget, (0.98 * budget, "plan"))]


def test_a_program_whose_tables_are_many_begins_with_plans_as_a_large_one_does(monkeypatch):
    """And ends with one that is near the bound; without, prices on all times would follow."""
    budget, started, start = int(0.9 * planned("gpt").cost.peak_bytes), [], level_search.budget_start
    best = planned("gpt", memory_budget=budget)
    monkeypatch.setattr(ranked_search, "_VARIABLES", 0)
    monkeypatch.setattr(level_search, "budget_start", lambda *a: started.append(start(*a)) or started[-1])
    planned("gpt", memory_budget=budget)
    assert not started
    monkeypatch.setattr(level_search, "_MANY_ENTRIES", 0)
    plan = planned("gpt", memory_budget=budget)
    assert len(started) == 1 and plan.cost.peak_bytes <= budget
    assert plan.cost.bound <= best.cost.objective <= plan.cost.objective * (1 + 1e-9)


def test_a_search_is_made_again_once_and_of_programs_that_compute_again_with_as_much_at_most(monkeypatch):
    requests, begin = [], level_search.LevelSearch.__init__
    monkeypatch.setattr(
        level_search.LevelSearch, "__init__", lambda s, *a, **k: requests.append(a[2]) or begin(s, *a, **k)
    )
    planned("chain", remat="auto", memory_budget=int(0.7 * planned("chain").cost.peak_bytes))
    of_plain, *of_remat = requests
    spent = Effort(10.0, spent=11.0)
    for lowers in (False, True):
        again = of_plain.with_more(spent, lowers)
        assert again.effort == Effort(40.0, whole=spent)
        assert again.with_more(again.effort, lowers) is None and of_plain.with_more(Effort(), lowers) is None
    # So is the program as it was traced, beside which those that compute values again have once more as much at most.
    assert {r.effort_again for r in of_remat} == {1, ENOUGH}
    for r in of_remat:
        without, lower = (r.with_more(spent, lowers) for lowers in (False, True))
        assert (without is None) == (r.effort_again == 1) and lower.effort.limit == 10.0 * r.effort_again


def test_a_least_peak_of_little_search_has_a_bound_that_holds():
    best = planned("chain", level=1)
    plan = planned("chain", level=1, config={"search_seconds": 1e-9})
    assert 0 <= plan.cost.bound <= best.cost.objective * (1 + 1e-9)
    assert plan.cost.objective >= best.cost.bound


def merged_tokens(x: jax.Array, k: int) -> jax.Array:
    """(B, T, D) -> (B, T - k, D): the k even tokens that are most like an odd one are added to it."""
    even, odd = x[:, ::2], x[:, 1::2]
    similar = even @ odd.swapaxes(1, 2)
    order = jnp.argsort(-similar.max(-1), -1)
    to = jnp.take_along_axis(similar.argmax(-1), order[:, :k], 1)
    moved = jnp.take_along_axis(even, order[:, :k, None], 1)
    odd = jax.vmap(lambda o, at, m: o.at[at].add(m))(odd, to, moved)
    return jnp.concatenate([jnp.take_along_axis(even, order[:, k:, None], 1), odd], 1)


def test_little_search_for_the_least_peak_looks_below_what_it_found_first():
    """The first rounds of the search take the whole effort, and their answer held four times the least bytes."""

    def loss(p, x):
        for q in p:
            x += (jax.nn.gelu(jax.nn.standardize(x).swapaxes(1, 2) @ q["t"]) @ q["u"]).swapaxes(1, 2)
            x += jax.nn.gelu(jax.nn.standardize(x) @ q["c"]) @ q["d"]
            x = merged_tokens(x, 4) if x.shape[1] > 8 else x
        return (x**2).mean()

    def step(p, x):
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, jax.grad(loss)(p, x))

    sizes = [{"t": (n, 30), "u": (30, n), "c": (20, 50), "d": (50, 20)} for n in (16, 12, 8)]
    p = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, "float32"), sizes, is_leaf=lambda s: isinstance(s, tuple)
    )
    x = jax.ShapeDtypeStruct((6, 16, 20), "float32")
    mesh = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
    found = jshard.shard(step, mesh=mesh, hardware="h100", level=1, config={"search_seconds": 1})
    assert found.plan(p, x).cost.peak_bytes < 1.5 * 23_488  # a bound on every plan


@pytest.mark.parametrize("level", [0, 1])
def test_an_interruption_at_any_time_gives_the_best_plan_within_the_budget(level, monkeypatch):
    real = level_search.solve
    monkeypatch.setattr(ranked_search, "_VARIABLES", 0)  # so small a network is solved without these searches
    free = planned("chain")
    budget = int(0.7 * free.cost.peak_bytes) if level == 0 else None
    options = dict(level=level, memory_budget=budget)
    best = planned("chain", **options)
    calls, at = 0, np.inf

    def interrupted(network, **kwargs):
        def stop(*_):
            nonlocal calls
            calls += 1
            if calls == at:
                raise KeyboardInterrupt

        return real(network, **{**kwargs, "on_progress": stop})

    monkeypatch.setattr(level_search, "solve", interrupted)
    monkeypatch.setattr(least_peak, "solve_network", interrupted)
    planned("chain", **options)
    stages, given = calls, 0
    assert stages >= 3
    for stage in np.unique(np.linspace(1, stages, 7).astype(int)).tolist():
        calls, at = 0, stage
        try:
            plan = planned("chain", **options)
        except KeyboardInterrupt:
            assert not given  # once a plan is known, one is given
            continue
        given += 1
        assert budget is None or plan.cost.peak_bytes <= budget
        assert plan.cost.bound <= best.cost.objective * (1 + 1e-9) <= plan.cost.objective * (1 + 2e-9)
    assert given


def test_an_interruption_between_two_searches_gives_the_plan_of_the_first(monkeypatch):
    free = planned("chain")
    begun = []

    def probing(*_):
        begun.append(True)
        raise KeyboardInterrupt

    monkeypatch.setattr(least_peak, "without_costly_casts", probing)
    plan = planned("chain", level=1)
    assert begun and plan.steps[-1] == "interrupted"
    assert plan.cost.bound <= plan.cost.peak_bytes <= free.cost.peak_bytes


@pytest.mark.parametrize(
    ("seconds", "what"),
    [
        (0, "search_seconds is 0, which leaves no search"),
        (-2.5, "search_seconds is -2.5, which leaves no search"),
        (float("nan"), "search_seconds is a float, nan"),
        (float("inf"), "search_seconds is a float, inf"),
        ("5", "search_seconds is a str, '5'"),
        (True, "search_seconds is a bool, True"),
    ],
)
def test_wrong_search_seconds(seconds, what):
    with pytest.raises(jshard.ShardError) as e:
        jshard.shard(chain, mesh=machine(), config={"search_seconds": seconds})
    assert str(e.value).splitlines() == [
        what,
        "  where: config",
        '  write instead: seconds of search above 0: config={"search_seconds": 5}; '
        "without it, until the proof or 60 to 240 s",
    ]
    assert planned("chain", config={"search_seconds": 5}).cost.optimal


def test_of_a_large_program_a_plan_is_known_before_any_search(monkeypatch):
    """Interrupted as soon as it begins to search, planning returns a plan within the budget, proved of nothing."""
    size = 16

    def step(weights, x):
        def loss(weights):
            y = x
            for a, b in weights:
                y = y + jax.numpy.tanh(y @ a) @ b
            return (y * y).sum()

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    weight = jax.ShapeDtypeStruct((size, size), "float32")
    args = [(weight, weight)] * 300, jax.ShapeDtypeStruct((8192, size), "float32")
    sharded = jshard.shard(step, mesh=machine(), donate_argnums=0)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(level_search, "solve", interrupt)
    plan = sharded.plan(*args)
    assert plan.steps[-1] == "interrupted" and plan.cost.bound == 0
    assert plan.cost.peak_bytes < 14e9
    # Below its peak no plan is known, though one may exist; at half of it none does, which needs no search to refuse.
    for share, raised in ((0.95, KeyboardInterrupt), (0.5, MemoryBudgetError)):
        budget = int(share * plan.cost.peak_bytes)
        with pytest.raises(raised):
            jshard.shard(step, mesh=machine(), donate_argnums=0, memory_budget=budget).plan(*args)
