"""Programs in pipelines: values, gradients, state and random bits as without, in float64; what is refused, by its text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import jshard
from jshard._batch.batch_class import SHARED, BatchClass, per_example
from jshard._batch.pipeline_shape import PipelineShape
from jshard._batch.pipelines import Pipelined, in_pipeline, with_loops_over_layers
from jshard._core import jaxcompat as compat
from jshard._report.chrome_trace import chrome_trace
from jshard._report.format_units import format_bytes
from jshard._report.html import html_page
from tests.batch.test_microbatches import BATCH, largest_error, normal
from tests.helpers.pipeline_models import (
    experts,
    experts_arguments,
    gpt,
    gpt_arguments,
    mlp,
    mlp_arguments,
    momentum_step,
)


Case = tuple[Callable, Callable, int, PipelineShape]


def shape(stages: int, microbatches: int, rounds: int = 1, uneven: bool = False) -> PipelineShape:
    return PipelineShape(("stage",), stages, microbatches, rounds, uneven)


def staged_of(f: Callable, args: tuple, classes: list[BatchClass], pipeline: PipelineShape) -> Pipelined:
    layers = with_loops_over_layers(jax.make_jaxpr(f)(*args), classes, BATCH, pipeline.microbatches)
    return in_pipeline(layers, classes, BATCH, pipeline)


CASES: list[Case] = [  # more in benchmarks/correctness/pipeline_laws.py
    (mlp(False), mlp_arguments, 7, shape(2, 4, 2, uneven=True)),
    (gpt(True), gpt_arguments, 6, shape(2, 4, 3)),
    (experts(0.7), experts_arguments, 4, shape(4, 2)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0].__qualname__.partition('.')[0]}-{c[2]}-{c[3]}")
def test_values_and_gradients_are_those_of_the_program(case: Case) -> None:
    loss, arguments, layers, pipeline = case
    f, args = jax.value_and_grad(loss), arguments(layers)
    wanted = jax.jit(f)(*args)
    classes = [*[SHARED] * len(jax.tree.leaves(args[0])), per_example(0)]
    staged = staged_of(f, args, classes, pipeline)
    assert staged.layers == (layers, layers)  # forward and backward
    loops = [
        e.params["length"] for e in compat.open_jaxpr(staged.closed)[0].eqns if e.primitive.name == "scan"
    ]
    assert loops.count(pipeline.ticks) == 2
    found = jax.jit(compat.as_function(staged.closed))(*jax.tree.leaves(args))
    assert largest_error(found, wanted) < 1e-12


def test_what_idle_stages_compute_changes_nothing() -> None:
    """A layer that is added where stages do not divide repeats the last one, which may give NaN: it is dropped."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, one: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = jnp.log(1 + h @ one)
            return h, jnp.sum(h)

        h, sums = lax.scan(layer, x, w)
        return jnp.mean(h**2) + jnp.sum(sums) / 100

    w = jnp.stack([jnp.eye(4), -jnp.eye(4) / 9, 5 * jnp.eye(4)])
    x = jax.random.uniform(jax.random.key(1), (BATCH, 4))
    assert bool(jnp.isnan(loss(jnp.concatenate([w, w[-1:]]), x)))
    f = jax.value_and_grad(loss)
    wanted = jax.jit(f)(w, x)
    staged = staged_of(f, (w, x), [SHARED, per_example(0)], shape(2, 4, uneven=True))
    assert largest_error(jax.jit(compat.as_function(staged.closed))(w, x), wanted) < 1e-12


def mesh_of(*sizes: int, names: tuple[str, ...] = ("stage", "data")) -> jax.sharding.Mesh:
    return jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))


def pipelined(f: Callable, mesh: jax.sharding.Mesh, **pipeline: Any) -> jshard.Sharded:
    return jshard.shard(f, mesh=mesh, level=2, config={"pipeline": {"axis": "stage", **pipeline}})


def test_sums_of_rounds_stay_partial_until_the_loop_ends() -> None:
    """Slow memory beside fast links, two stages: additions to one round's sums are in place, and not to all rounds'."""
    topology = jshard.topology("v5e:4x4", {"stage": 2, "data": 16}, num_slices=2)
    w, x = (
        jax.ShapeDtypeStruct((8, 1024, 4096), jnp.bfloat16),
        jax.ShapeDtypeStruct((65536, 1024), jnp.bfloat16),
    )

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda h, one: (h + jnp.tanh(h @ one) @ one.T, None))
        return jnp.mean(lax.scan(layer, x, w)[0].astype(jnp.float32) ** 2)

    f = jshard.shard(
        jax.value_and_grad(loss), (None, P("data")), mesh=topology, level=2,
        config={"pipeline": {"axis": "stage", "microbatches": 8, "rounds": 2}},
    )  # fmt: skip
    plan = f.plan(w, x)
    (added,) = [o for o in plan.operators if o.primitive == "add_to_round"]
    assert added.operands[0] == added.results[0] and added.operands[0].partial == ("data",)
    repeated = [c for c in plan.collectives if c.count > 1]
    assert all(c.kind == "permute" and c.operator.startswith("stage_shift") for c in repeated)
    assert sum(c.count for c in repeated) == 2 * plan.pipeline.ticks


def test_gradients_move_between_stages_in_their_own_dtype() -> None:
    """Summed in float32 over the ticks and rounded, then summed over the data axis, then moved to where their weights lie.

    A product of the whole batch, without a pipeline, is rounded on each device as well before its parts are added.
    """

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(plain)(w, x)

    mesh = jshard.topology("v5e:2x4", {"stage": 2, "data": 4})
    config = {"pipeline": {"axis": "stage", "microbatches": 8, "rounds": 2}}
    args = jax.ShapeDtypeStruct((8, 512, 512), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 512), jnp.bfloat16)
    plan = jshard.shard(step, mesh=mesh, level=2, config=config).plan(*args)
    ((k, summed),) = [(k, c) for k, c in enumerate(plan.collectives) if c.kind == "reduce_scatter"]
    assert summed.dtype == "bfloat16" and summed.axes == ("data",) and summed.count == 1
    assert {(c.dtype, c.axes) for c in plan.collectives[k + 1 :]} == {("bfloat16", ("stage",))}


def test_a_sharded_step() -> None:
    loss, arguments, layers, sizes, microbatches, rounds = mlp(False), mlp_arguments, 8, (4, 2), 8, 1
    w, x = arguments(layers)
    state = jax.tree.map(jnp.zeros_like, w)
    x = jnp.concatenate([x] * 2)[:32]
    f, mesh = momentum_step(loss), mesh_of(*sizes)
    f_pipelined = pipelined(f, mesh, microbatches=microbatches, rounds=rounds)
    plan = f_pipelined.plan(w, state, x, verify=True)
    assert plan.verification is not None and plan.verification.ok and plan.pipeline is not None
    ticks = rounds * microbatches + sizes[0] - 1
    assert plan.pipeline.ticks == ticks and plan.pipeline.layers == (layers, layers)
    shifts = [c for c in plan.collectives if c.operator.startswith("stage_shift")]
    assert sum(c.count for c in shifts) == 2 * ticks and all(c.kind == "permute" for c in shifts)
    others = [c for c in plan.collectives if not c.operator.startswith("stage_shift")]
    assert all(c.count == 1 for c in others)  # weights' gradients are reduced once a step, not once a tick
    assert f"in a pipeline of {sizes[0]} stages over stage: {microbatches} microbatches" in str(plan)
    assert largest_error(f_pipelined(w, state, x), jax.jit(f)(w, state, x)) < 1e-12
    stacked = [i for i in plan.inputs if "kernel" in i.path or "bias" in i.path]
    assert len(stacked) == 4 and all(i.layout.dims[0] == ("stage",) for i in stacked)
    again = jshard.shard(f, plan=jshard.Plan.from_json(plan.to_json()), mesh=mesh)
    assert again.plan(w, state, x).pipeline == plan.pipeline
    assert largest_error(again(w, state, x), jax.jit(f)(w, state, x)) < 1e-12


def normed(w: jax.Array, x: jax.Array) -> jax.Array:
    def layer(h: jax.Array, one: jax.Array) -> tuple[jax.Array, None]:
        h = h @ one
        return jnp.tanh(h - h.mean(0)), None  # of the batch

    return jnp.mean(lax.scan(layer, x, w)[0] ** 2)


def plain(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(lax.scan(lambda h, one: (jnp.tanh(h @ one), None), x, w)[0] ** 2)


def without_layers(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(x @ w[0]) ** 2)


def constrained(w: jax.Array, x: jax.Array) -> jax.Array:
    on = NamedSharding(mesh_of(2, 4), P("stage"))
    return plain(w, x) + jnp.mean(
        lax.scan(lambda h, one: (lax.with_sharding_constraint(h @ one, on), None), x, w)[0]
    )


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A wrong request, and what the error says."""

    what: str
    fix: str
    pipeline: Any = None
    loss: Callable = plain
    where: str = ""
    options: Any = None
    sizes: tuple[int, int] = (2, 4)


GOOD = {"axis": "stage", "microbatches": 4}


@pytest.mark.parametrize(
    "wrong",
    [
        Wrong("pipeline is a str, 'stage'", '"auto" to compare', "stage"),
        Wrong("'stages' is no key of a pipeline", "axis", {**GOOD, "stages": 2}),
        Wrong("pipeline has no 'microbatches'", '"microbatches": 16', {"axis": "stage"}),
        Wrong("microbatches of the pipeline is 1", "at least 2", {**GOOD, "microbatches": 1}),
        Wrong("rounds of the pipeline is a float, 2.0", "at least 1", {**GOOD, "rounds": 2.0}),
        Wrong("uneven is a str, 'yes'", '"uneven": True', {**GOOD, "uneven": "yes"}),
        Wrong("the axis of the pipeline is an int, 1", "the name of one axis", {**GOOD, "axis": 1}),
        Wrong("'model' is no axis of the mesh", "'stage', 'data'", {**GOOD, "axis": "model"}),
        Wrong("has one device, so one stage", "two devices or more", GOOD, sizes=(1, 8)),
        Wrong("5 microbatches do not divide the batch of 24", "2, 3, 4, 6, 8", {**GOOD, "microbatches": 5}),
        Wrong("4 stages do not divide 6 layers", '"uneven": True in the pipeline, which adds 2', GOOD, sizes=(4, 2)),
        Wrong("6 layers are fewer than the 8 stages", "an axis of fewer devices", GOOD, sizes=(8, 1)),
        Wrong("2 microbatches in 3 rounds are fewer than the 4 stages", '"microbatches": 4 or more',
              {**GOOD, "microbatches": 2, "rounds": 3}, sizes=(4, 2)),
        Wrong("a loop over layers couples the examples", "LayerNorm", GOOD, normed, where="test_pipelines.py:"),
        Wrong("no loop over layers passes values per example", "a Python loop or a scan", GOOD, without_layers),
        Wrong("axis 'stage' is used twice", "another axis", GOOD, constrained),
        Wrong("a pipeline runs in microbatches of its own", "no microbatches=", GOOD, options={"microbatches": 2}),
    ],
    ids=lambda w: w.what.replace(" ", "-"),
)  # fmt: skip
def test_wrong_requests(wrong: Wrong) -> None:
    w, x = normal(1, 6, 4, 4), normal(2, BATCH, 4)
    with pytest.raises(jshard.ShardError) as error:
        jshard.shard(
            jax.value_and_grad(wrong.loss), mesh=mesh_of(*wrong.sizes), config={"pipeline": wrong.pipeline},
            **(wrong.options or {}),
        ).plan(w, x)  # fmt: skip
    assert (
        wrong.what in error.value.what and wrong.fix in error.value.fix and wrong.where in error.value.where
    )


def test_without_a_mesh_and_under_vmap() -> None:
    w, x = normal(1, 6, 4, 4), normal(2, BATCH, 4)
    with pytest.raises(jshard.ShardError, match="a pipeline needs a mesh with an axis for its stages"):
        jshard.shard(plain, config={"pipeline": GOOD}).plan(w, x)
    f = jshard.shard(plain, mesh=mesh_of(2, 4), config={"pipeline": GOOD})
    with pytest.raises(jshard.ShardError, match="vmap of the sharded function plain"):
        jax.vmap(f, in_axes=(None, 0))(w, x[None])


@pytest.mark.parametrize("options", [{"microbatches": 4}, {"config": {"pipeline": GOOD}}])
def test_a_function_of_one_example_under_vmap(options: dict[str, Any]) -> None:
    """The error names vmap, and its advice works; inside `jit` only the shapes of one example are known."""
    w, x, mesh = normal(1, 6, 4, 4), normal(2, BATCH, 4), mesh_of(2, 4)
    f = jshard.shard(plain, mesh=mesh, level=0, **options)
    for run in (jax.vmap(f, (None, 0)), jax.jit(jax.vmap(f, (None, 0))), jax.vmap(jax.grad(f), (None, 0))):
        with pytest.raises(jshard.ShardError, match="vmap of the sharded function plain") as error:
            run(w, x)
        assert "put vmap inside: jshard.shard(jax.vmap(f), ...)" in error.value.fix
    with pytest.raises(jshard.ShardError, match="no argument has a batch") as error:
        jax.vmap(jax.jit(f), (None, 0))(w, x)
    assert "vmap belongs inside, jshard.shard(jax.vmap(f), ...)" in error.value.fix
    inside = jax.vmap(plain, (None, 0))
    assert largest_error(jshard.shard(inside, mesh=mesh, level=0, **options)(w, x), inside(w, x)) < 1e-12


def test_the_cheapest_of_pipelines_and_none() -> None:
    """Two slices, many layers: a pipeline. The answer is that of planning each alone, most searches end at a bound."""
    w, x = (
        jax.ShapeDtypeStruct((32, 4096, 4096), jnp.bfloat16),
        jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16),
    )
    topology = jshard.topology("v5e:2x2", {"slice": 2, "data": 4}, num_slices=2)

    def planned(level: int, pipeline: Any) -> jshard.Plan:
        config = {"pipeline": pipeline} if pipeline else {}
        f = jax.value_and_grad(plain)
        return jshard.shard(f, (None, P("data")), mesh=topology, level=level, config=config).plan(w, x)

    alone = {
        option: planned(2, option and {"axis": option[0], "microbatches": option[1], "rounds": option[2], "uneven": True})
        for option in (None, ("slice", 16, 1), ("slice", 8, 1), ("slice", 16, 2), ("data", 32, 1), ("data", 16, 1),
                       ("data", 32, 2))
    }  # fmt: skip
    for level in (0, 2):
        plan = planned(level, "auto")
        assert plan.cost.bound <= plan.cost.objective and "6 pipelines tried" in plan.cost.space
        if level == 2:
            best = min(alone.values(), key=lambda p: p.step_seconds)
            assert plan.pipeline == best.pipeline is not None
            assert plan.step_seconds == pytest.approx(best.step_seconds)
        compared = [s for s in plan.steps if "pipeline" in s and (" idle" in s or "at least" in s)]
        ended = [s for s in compared if s.endswith("so its search ended")]
        assert len(compared) == 7 and 0 < len(ended) < 6


def test_stages_that_do_not_divide_the_layers_are_compared_too() -> None:
    w, x = normal(1, 5, 4, 4), normal(2, BATCH, 4)
    f = jshard.shard(jax.value_and_grad(plain), mesh=mesh_of(4, 1), level=2, config={"pipeline": "auto"})
    steps = [s for s in f.plan(w, x).steps if s.startswith("pipeline")]
    assert len([s for s in steps if "idle" in s or "at least" in s]) == 2
    assert (
        "pipeline over stage, 8 microbatches, 2 rounds: 5 layers are fewer than the 4 stages in 2 rounds"
        in steps
    )


def test_two_stages_pass_values_on_by_permutes_whatever_else_is_cut() -> None:
    """With two stages a gather of the other's row would cost as much: the stages' values are read cut, so it is none."""
    w, x = normal(1, 4, 16, 16) / 4, normal(2, 32, 16)
    f = pipelined(
        jax.value_and_grad(plain), mesh_of(2, 2, 2, names=("stage", "data", "model")), microbatches=16
    )
    plan = f.plan(w, x, verify=True)
    assert plan.verification is not None and plan.verification.ok
    over_stage = [c for c in plan.collectives if "stage" in c.axes and c.count > 1]
    assert {c.kind for c in over_stage} == {"permute"} and sum(c.count for c in over_stage) == 2 * 17


def test_the_report_shows_stages_ticks_and_other_schedules() -> None:
    w, x = normal(1, 7, 4, 4), normal(2, BATCH, 4)
    f = pipelined(jax.value_and_grad(plain), mesh_of(4, 2), microbatches=4, uneven=True)
    lines = [" ".join(line.split()) for line in str(f.plan(w, x)).splitlines()]
    layers, ticks = ("0-1", "2-3", "4-5", "6"), ("0123...", ".0123..", "..0123.", "...0123")
    for stage in range(4):
        (line,) = [line for line in lines if line.endswith(" " + ticks[stage])]
        assert line.startswith(f"{stage} {layers[stage]} ")
    assert "GPipe 43% 4 of 4 this plan" in lines and "1F1B 43% 4 of 4 not run" in lines
    assert "zero bubble (ZB-H1) 20% 4 of 4 not run" in lines


def test_the_report_shows_what_a_stage_holds() -> None:
    """All stages run one program, and hold as much; the last one has one layer of two, so half of its stacks is unused."""
    w, x = normal(1, 7, 64, 64), normal(2, 64 * BATCH, 64)
    step = jax.value_and_grad(plain)
    f = pipelined(step, mesh_of(4, 2), microbatches=4, uneven=True)
    plan = f.plan(w, x)
    held = dict(plan.memory.stage)
    piece = x.nbytes / 4 / 2  # microbatches, devices of a stage
    assert sum(held.values()) == pytest.approx(plan.cost.peak_bytes)
    assert {k: b for k, b in held.items() if k.startswith("argument")} == {
        k: b for k, b in plan.memory.held if k.startswith("argument")
    }
    values = held["activations in flight"] / (7 * 2 * piece)  # ticks, layers of a stage
    assert values == round(values) >= 1
    lines = [" ".join(line.split()) for line in str(plan).splitlines()]
    (title,) = [line for line in lines if line.startswith("memory of a device of any stage")]
    assert "all stages run one program" in title
    (in_flight,) = [line for line in lines if line.startswith("activations in flight")]
    assert format_bytes(held["activations in flight"]) in in_flight
    half = format_bytes((held["activations in flight"] + held.get("sums over microbatches", 0)) / 2)
    unused = ["0 B", "0 B", "0 B", half]
    for stage, ticks in enumerate(("0123...", ".0123..", "..0123.", "...0123")):
        (line,) = [line for line in lines if line.endswith(" " + ticks)]
        assert line.endswith(f" {unused[stage]} {format_bytes(plan.cost.peak_bytes)} {ticks}")
    assert title in html_page(plan) and "activations in flight" in plan.to_markdown()
    assert json.loads(plan.to_json())["memory"]["stage"] == [[k, b] for k, b in held.items()]
    assert jshard.Plan.from_json(plan.to_json()).memory == plan.memory
    assert jshard.shard(step, mesh=mesh_of(4, 2), level=2).plan(w, x).memory.stage == ()


def test_the_trace_has_the_ticks_of_each_stage() -> None:
    w, x = normal(1, 7, 4, 4), normal(2, BATCH, 4)
    plan = pipelined(jax.value_and_grad(plain), mesh_of(4, 2), microbatches=4, uneven=True).plan(w, x)
    ticks = [e for e in chrome_trace(plan)["traceEvents"] if e.get("cat") == "tick"]
    assert len(ticks) == 2 * 4 * 4  # loops, stages, microbatches
    for loop in (0, 1):
        for stage in range(4):
            own = [e for e in ticks if e["args"]["loop"] == loop and e["tid"] == stage + 1]
            order = sorted(own, key=lambda e: e["ts"])
            assert [e["args"]["tick"] for e in order] == [
                t + (stage if loop == 0 else 3 - stage) for t in range(4)
            ]
            numbers = [e["name"] for e in order]
            assert numbers == [f"microbatch {m}" for m in (range(4) if loop == 0 else range(3, -1, -1))]
    assert {e["args"]["layers"] for e in ticks if e["tid"] == 4} == {"6"}
    begins = [min(e["ts"] for e in ticks if e["args"]["loop"] == n) for n in (0, 1)]
    assert begins[1] >= max(e["ts"] + e["dur"] for e in ticks if e["args"]["loop"] == 0) - 1e-6 > begins[0]


def test_keys_per_example_do_not_pass_on() -> None:
    def f(w: jax.Array, x: jax.Array) -> jax.Array:
        def layer(carry: Any, one: jax.Array) -> tuple[Any, None]:
            h, keys = carry
            keys = jax.vmap(jax.random.split)(keys)[:, 0]
            return (h @ one + jax.vmap(jax.random.normal)(keys)[:, None], keys), None

        keys = jax.vmap(jax.random.key)(jnp.arange(BATCH) + x[:, 0].astype(int))
        return jnp.mean(lax.scan(layer, (x, keys), w)[0][0])

    with pytest.raises(
        jshard.ShardError, match="keys of random numbers per example pass from layer to layer"
    ):
        jshard.shard(f, mesh=mesh_of(2, 4), config={"pipeline": GOOD}).plan(
            normal(1, 6, 4, 4), normal(2, BATCH, 4)
        )


def test_carries_without_examples_of_checkpointed_layers() -> None:
    """The next key, which a checkpointed layer returns beside the activations, and its part of the loss."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        @jax.checkpoint
        def layer(carry: tuple[jax.Array, ...], one: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
            h, key, decay = carry
            key, own = jax.random.split(key)
            kept = jax.random.bernoulli(own, 0.7, (h.shape[1],))
            return (jnp.where(kept, jnp.tanh(h @ one), 0.0), key, decay + jnp.sum(one**2)), None

        (h, _, decay), _ = lax.scan(layer, (x, jax.random.key(3), jnp.zeros(())), w)
        return jnp.mean(h**2) + 0.1 * decay

    f, w, x = jax.value_and_grad(loss), normal(1, 6, 4, 4), normal(2, BATCH, 4)
    staged = staged_of(f, (w, x), [SHARED, per_example(0)], shape(2, 4))
    found = jax.jit(compat.as_function(staged.closed))(w, x)
    assert staged.layers == (6, 6) and largest_error(found, jax.jit(f)(w, x)) < 1e-12


@jax.custom_vjp
def normalized_gradient(x: jax.Array) -> jax.Array:
    """`x`, whose gradient is divided by its size over the whole batch."""
    return x


normalized_gradient.defvjp(lambda x: (x, None), lambda _, g: (g * lax.rsqrt(1 + jnp.sum(g**2)),))


def test_a_backward_pass_outside_the_pipeline_is_reported() -> None:
    """Its layers couple the examples, those of the forward pass do not; the gradient enters it as a constant."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        h, _ = lax.scan(lambda h, w: (normalized_gradient(jnp.tanh(h @ w)), None), x, w)
        return jnp.sum(h)

    args = normal(0, 4, 8, 8) / 3, normal(1, 32, 8)
    f = jax.value_and_grad(loss)
    sharded = pipelined(f, mesh_of(4, 2), microbatches=4)
    plan = sharded.plan(*args)
    assert plan.pipeline is not None and plan.pipeline.layers == (4,)
    assert "test_pipelines.py:" in plan.pipeline.outside and "sum over examples" in plan.pipeline.outside
    text = " ".join(str(plan).split())
    assert "1 round; 1 loop of 7 ticks, 43% idle" in text
    assert f"a backward pass through the layers runs outside the pipeline: {plan.pipeline.outside}" in text
    assert largest_error(sharded(*args), jax.jit(f)(*args)) < 1e-12
    whole = pipelined(jax.value_and_grad(plain), mesh_of(4, 2), microbatches=4).plan(*args)
    assert whole.pipeline is not None and not whole.pipeline.outside
    assert "2 loops of 7 ticks" in str(whole) and "outside the pipeline" not in str(whole)


def test_sums_over_the_batch_of_a_checkpointed_layer() -> None:
    """Computed again in the backward pass they would couple the examples: the forward loop returns them."""

    def loss_of(checkpoint: Callable, saved: Callable) -> Callable:
        def loss(w: Any, x: jax.Array) -> jax.Array:
            def layer(carry: Any, one: Any) -> tuple[Any, None]:
                h, balance = carry
                gates = jax.nn.softmax(h @ one["router"])
                h = h + jnp.einsum("bk,bf,kfd->bd", gates, h, one["experts"])
                load = saved(jnp.mean(gates, 0))
                return (h, balance + jnp.sum(load**2)), None

            (h, balance), _ = lax.scan(checkpoint(layer), (x @ w["in"], jnp.zeros(())), w["layers"])
            return jnp.mean(h**2) + 0.01 * balance

        return jax.value_and_grad(loss)

    names = jax.checkpoint_policies.save_only_these_names("sums")
    named = loss_of(
        lambda layer: jax.checkpoint(layer, policy=names),
        lambda load: jax.ad_checkpoint.checkpoint_name(load, "sums"),
    )
    again, args = loss_of(jax.checkpoint, lambda load: load), experts_arguments(4)
    wanted = jax.jit(named)(*args)
    pipeline = {"axis": "stage", "microbatches": 4}
    for step, config in ((named, {"pipeline": pipeline}), (again, {"microbatches": 4})):
        f = jshard.shard(step, mesh=mesh_of(2, 2), config=config)
        assert largest_error(f(*args), wanted) < 1e-12
    f = pipelined(again, mesh_of(2, 2), microbatches=4, rounds=2)
    assert largest_error(f(*args), wanted) < 1e-12
    plan = f.plan(*args)
    assert {c.count for c in plan.collectives if c.operator.startswith("stage_shift")} == {2 * 4 + 2 - 1}
    assert all(c.count == 1 for c in plan.collectives if not c.operator.startswith("stage_shift"))
