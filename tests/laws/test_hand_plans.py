"""No hand-written sharding costs less than the plan, and the plan equals the known ones where they are best.

A hand-written sharding is priced by the same model: everything it gives is pinned, the rest is completed by the search.
"""

from __future__ import annotations

import functools
import math

import jax
import pytest

import jshard
from jshard._core.named_topology import TopologyMesh
from tests.helpers import training_steps
from tests.helpers.hand_plans import BOTH, PLANS, WORKLOADS, HandPlan, free, sharded


@functools.cache
def machine(**axes: int) -> TopologyMesh:
    return jshard.topology("v5e:2x4", axes or {"data": 2, "model": 4}, compiles=False)


@functools.cache
def workload(name: str) -> training_steps.Workload:
    return WORKLOADS[name]()


@functools.cache
def best(name: str, level: int = 0) -> jshard.Plan:
    w = workload(name)
    return free(w, machine(), level=level).plan(*w.arguments())


@functools.cache
def by_hand(h: HandPlan, level: int = 0) -> jshard.Plan:
    w = workload(h.workload)
    return sharded(h, w, machine(), level=level).plan(*w.arguments())


def nbytes(tree: object) -> int:
    return sum(math.prod(s.shape) * s.dtype.itemsize for s in jax.tree.leaves(tree))


def layouts(plan: jshard.Plan) -> dict[str, str]:
    return {r.path: str(r.layout) for r in plan.inputs}


def moved(plan: jshard.Plan) -> set[tuple[str, str]]:
    """Kind and blocks of the collectives that move more than a value for each row."""
    return {(c.kind, c.local) for c in plan.collectives if c.bytes > 100_000}


@pytest.mark.parametrize("h", PLANS, ids=str)
def test_no_hand_plan_costs_less(h):
    plan = best(h.workload)
    assert plan.cost.objective <= by_hand(h).cost.objective * (1 + 1e-9)
    assert plan.cost.bound <= by_hand(h).cost.objective
    assert plan.cost.optimal
    for p in (plan, by_hand(h)):
        assert p.physics.bytes <= sum(p.bytes_by_kind.values())
        assert p.physics.seconds <= p.cost.compute + p.cost.communication


@pytest.mark.parametrize("name", ["convnet", "embedding", "moe"])
def test_nor_is_one_faster_a_step(name):
    for h in (h for h in PLANS if h.workload == name):
        step = [p.cost.compute + p.cost.communication for p in (best(name, 2), by_hand(h, 2))]
        assert step[0] <= step[1] * (1 + 1e-9), h


@pytest.mark.parametrize("h", [h for h in PLANS if not h.parameters], ids=str)
def test_the_peers_are_not_weak(h):
    """A hand plan moves no more than its paper says: in units of the parameters, per step and device.

    All-reduced gradients are 2; gathering what each device has updated 1; reduce-scattered gradients 1; cut
    parameters are gathered for the forward and for the backward pass (ZeRO, section 7). The losses' own sums and
    the norms of uneven parameters are small.
    """
    units = {"": 2, "o": 3, "go": 2, "pgo": 3}[h.spread]
    w = workload(h.workload)
    paper = units * nbytes(w.params) * 7 / 8
    tokens = 8 * nbytes(w.batch) if h.workload == "moe" else 2**21  # experts: the tokens must travel as well
    assert sum(by_hand(h).bytes_by_kind.values()) <= paper + tokens
    cut = {r.path for r in by_hand(h).inputs if r.layout.axes and r.path.startswith("params")}
    assert bool(cut) == ("p" in h.spread)
    moments = [r for r in by_hand(h).inputs if ".mu." in r.path]
    assert any(r.layout.axes for r in moments) == ("o" in h.spread)


def test_finds_megatron():
    """Few tokens and wide layers: columns then rows, so that a block costs one sum forward and one backward."""
    w = training_steps.gpt(batch=1, context=64, width=2048, heads=16, vocab=1024)
    plan = free(w, machine(model=8)).plan(*w.arguments())
    lies = layouts(plan)
    layer = "params.layers.0."
    assert {lies[layer + n] for n in ("query", "key", "value")} == {"(-, model, -)"}  # heads
    assert lies[layer + "up"] == "(-, model)" and lies[layer + "up_bias"] == "(model)"
    assert lies[layer + "down"] == "(model, -)" and lies[layer + "out"] == "(model, -, -)"
    # The gradient of the embedding, which is cut by columns, is reduce-scattered beside them.
    sums = [c for c in plan.collectives if c.kind == "all_reduce" and c.local.startswith("1x64x2048")]
    assert len(sums) == 4  # attention and MLP, forward and backward
    assert plan.cost.optimal


def test_finds_sequence_parallelism():
    """More tokens, and each of Megatron's sums is a reduce-scatter and a gather around norms on cut rows."""
    w = training_steps.gpt(batch=8, context=64, width=2048, heads=16, vocab=1024)
    plan = free(w, machine(model=8)).plan(*w.arguments())
    assert layouts(plan)["params.layers.0.down"] == "(model, -)"
    assert {"all_gather", "reduce_scatter"} <= {k for k, _ in moved(plan)}
    assert not any(k == "all_reduce" for k, _ in moved(plan))


def test_finds_the_vocabulary_parallel_softmax():
    plan = best("embedding")
    assert layouts(plan)["params.head"] == "(-, data*model)"
    # Of the logits only a maximum, a sum and the right one's score travel: one number for each row.
    rows = workload("embedding").batch.shape[0]
    reduced = [c for c in plan.collectives if c.kind == "all_reduce"]
    assert len(reduced) == 3 and all(c.bytes == 2 * rows * 4 * 7 / 8 for c in reduced)
    assert not any("65536" in c.local or "8192" in c.local for c in plan.collectives)
    hand = next(h for h in PLANS if str(h) == "embedding vocabulary parallel")
    assert plan.cost.objective < by_hand(hand).cost.objective


def test_finds_experts_over_both_axes_with_all_to_alls():
    plan = best("moe")
    lies = layouts(plan)
    assert lies["params.up"] == lies["params.down"] == f"({'*'.join(BOTH)}, -, -)"
    assert {k for k, _ in moved(plan)} == {"all_to_all"}
    assert all(c.axes == BOTH for c in plan.collectives if c.kind == "all_to_all")


# These fit too and cost less, but take 14 to 25 seconds each, most of the time that a search under a budget has:
# on a slow machine the one for GPT ends before it has found what it pays less with.
SLOW = {"gpt ZeRO-3", "llama ZeRO-3", "moe ZeRO-3"}


@pytest.mark.parametrize("h", [h for h in PLANS if str(h) not in SLOW], ids=str)
def test_a_budget_of_a_hand_plans_peak_is_kept_for_no_more(h):
    """With as much memory as a hand plan holds, the search never refuses and never pays more."""
    budget = math.ceil(by_hand(h).cost.peak_bytes)
    w = workload(h.workload)
    plan = best(h.workload)
    if plan.cost.peak_bytes > budget:
        plan = free(w, machine(), memory_budget=budget).plan(*w.arguments())
    assert plan.cost.peak_bytes <= budget
    assert plan.cost.objective <= by_hand(h).cost.objective * (1 + 1e-9)


def test_finds_zeros_sharded_optimizer_when_memory_is_short():
    """With less room than data parallelism needs the moments are cut, and no more is moved than it moves."""
    w = workload("convnet")
    pinned = next(h for h in PLANS if str(h) == "convnet data parallel")
    needs = by_hand(pinned).cost.peak_bytes
    params = nbytes(w.params)
    plan = free(w, machine(), memory_budget=math.ceil(needs - 1.6 * params)).plan(*w.arguments())
    moments = [r for r in plan.inputs if ".mu." in r.path or ".nu." in r.path]
    held = sum(math.prod(r.shape) * 4 / r.layout.pieces(plan.mesh) for r in moments)
    assert held <= 2 * params / 4
    assert sum(plan.bytes_by_kind.values()) <= 1.05 * sum(by_hand(pinned).bytes_by_kind.values())
