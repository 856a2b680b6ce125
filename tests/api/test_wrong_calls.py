"""Wrong arguments anywhere in the public interface: each has its error text, and following its advice works."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AbstractMesh

import jshard
import jshard.flax
from jshard._core.errors import ArgumentError, MeshError, PlanMismatchError, ShardError


X = jax.ShapeDtypeStruct((8, 8), "float32")
ARRAY = jnp.ones((8, 8))
DESCRIPTION = jshard.topology("v5e:2x4", {"d": 2, "m": 4}, compiles=False)
ON_DESCRIPTION = jax.NamedSharding(DESCRIPTION.jax_mesh, jax.P("d"))


def fn(x, w):
    return jnp.tanh(x @ w)


def keyword_only(x, *, w):
    return jnp.tanh(x @ w)


@functools.lru_cache
def sharded():
    return jshard.shard(fn)


@functools.lru_cache
def described():
    return jshard.shard(fn, mesh=DESCRIPTION)


def plan():
    return sharded().plan(X, X)


def linear():
    return nnx.Linear(8, 8, rngs=nnx.Rngs(0))


@dataclasses.dataclass(frozen=True)
class Row:
    """A call, and the error that answers it."""

    name: str
    call: Callable[[], Any]
    what: str
    where: str
    fix: str
    error: type[ShardError] = ArgumentError


OPTIONS = (
    "its arguments: in_strategy, out_strategy, parameter_plan, device, level, config, mesh, hardware, memory_budget, "
    "search, plan, strict, static_argnums, static_argnames, donate_argnums, donate_argnames, remat, "
    "microbatches"
)
NEAR = f"'in_strategy' or 'out_strategy' ({OPTIONS})"
SWEEP = "(of sweep: mesh, level, hardware, batch, memory_budget, search, device, show_progress; of fn: x, w)"
COMPILED = "plan.verify(f.lower(*args).compile()), or f.plan(*args, verify=True)"
PLAN = "a Plan, as f.plan(*args) or jshard.Plan.load(path) gives it"
PLAN_OF = "jshard.flax.plan_of(module, x), or f.plan(...) of a function from jshard.shard"
RUN = (
    "its plan, which needs none: .plan(...) of a function, jshard.flax.plan_of(...) of a module; a mesh of devices "
    "that are here to run it; jshard.topology(...) where its compiler is installed, libtpu or JAX's CUDA plugin, to "
    "compile it"
)
V5E = "is planned for d=2 x m=4, a description of v5e:2x4 without devices"
HERE = "level where the function is sharded: jshard.shard(fn, level=...)"

# fmt: off
ROWS: tuple[Row, ...] = (
    Row("call on a description", lambda: described()(ARRAY, ARRAY), f"fn {V5E}", "call of fn", RUN, MeshError),
    Row("lower on a description", lambda: described().lower(X, X), f"fn {V5E}", "fn.lower", RUN, MeshError),
    Row("jit on a description", lambda: jax.jit(described())(ARRAY, ARRAY), f"fn {V5E}", "call of fn", RUN, MeshError),
    Row("gradient on a description", lambda: jax.grad(lambda a: described()(a, ARRAY).sum())(ARRAY),
        f"fn {V5E}", "call of fn", RUN, MeshError),
    Row("call on an abstract mesh", lambda: jshard.shard(fn, mesh=AbstractMesh((8,), ("x",)))(ARRAY, ARRAY),
        "fn is planned for x=8, a description without devices", "call of fn", RUN, MeshError),
    Row("call on a machine by name", lambda: jshard.shard(fn, mesh="auto:v5e:2x4")(ARRAY, ARRAY),
        "fn is planned for x=4 x y=2, a description of v5e:2x4 without devices", "call of fn", RUN, MeshError),
    Row("lower for shapes on a description",
        lambda: jshard.shard(fn).lower(*[jax.ShapeDtypeStruct((8, 8), "float32", sharding=ON_DESCRIPTION)] * 2),
        "fn is planned for d=2 x m=4, a description without devices", "fn.lower", RUN, MeshError),
    Row("a module on a description", lambda: linear().shard(mesh=DESCRIPTION)(ARRAY), f"Linear {V5E}",
        "call of Linear", RUN, MeshError),
    Row("strategy of an nnx module", lambda: linear().shard(strategy=((8, 1),)),
        "Linear.shard takes no argument 'strategy'", "Linear.shard", NEAR),
    Row("strategy of a linen module", lambda: linen.Dense(8).shard(strategy=((8, 1),)),
        "Dense.shard takes no argument 'strategy'", "Dense.shard", NEAR),
    Row("another option of a module", lambda: jshard.flax.shard_module(linear(), in_strategies=((8, 1),)),
        "Linear.shard takes no argument 'in_strategies'", "Linear.shard", NEAR),
    Row("strategy of shard", lambda: jshard.shard(fn, strategy=((8, 1), None)), "shard takes no argument 'strategy'",
        "shard", NEAR),
    Row("shard by place", lambda: jshard.shard(fn, None, None, None, None, 0, DESCRIPTION),
        "shard takes 6 arguments by place, and was given 7", "shard",
        "the others by name: config=, mesh=, hardware=, memory_budget=, search=, plan=, strict=, static_argnums=, "
        "static_argnames=, donate_argnums=, donate_argnames=, remat=, microbatches="),
    Row("preference as an argument", lambda: jshard.shard(fn, prefer="memory:1%"), "shard takes no argument 'prefer'",
        "shard", 'config={"prefer": "memory:1%"}: an option of the configuration'),
    Row("preference of a module", lambda: linear().shard(prefer="memory:1%"), "Linear.shard takes no argument 'prefer'",
        "Linear.shard", 'config={"prefer": "memory:1%"}: an option of the configuration'),
    Row("seconds of the search as an argument", lambda: jshard.shard(search_seconds=5),
        "shard takes no argument 'search_seconds'", "shard",
        'config={"search_seconds": 5}: an option of the configuration'),
    Row("shard twice", lambda: jshard.shard(fn, None, in_strategy=None),
        "shard: multiple values for argument 'in_strategy'", "shard",
        OPTIONS.replace("in_strategy, ", "", 1)),
    Row("strategy of op", lambda: jshard.op(jnp.dot, strategy=1), "op takes no argument 'strategy'", "op",
        "'in_strategy' or 'out_strategy' (its arguments: in_strategy, out_strategy, rule, reduction, sizes, work)"),
    Row("topology's axes misspelt", lambda: jshard.topology("v5e:2x4", axis={"x": 8}),
        "topology takes no argument 'axis'", "topology", "'axes' (its arguments: axes, num_slices, compiles)"),
    Row("topology without axes", lambda: jshard.topology("v5e:2x4"), "topology is called without axes", "topology",
        "topology(name, axes, ...)"),
    Row("topology of a number", lambda: jshard.topology(8, {"x": 8}), "the machine is an int, 8", "topology",
        'its name, such as "v5e:4x8"', MeshError),
    Row("topology's axes a list", lambda: jshard.topology("v5e:2x4", [2, 4]), "the axes are a list, [2, 4]",
        "topology 'v5e:2x4'", 'names and sizes: {"data": 4, "model": 8}', MeshError),
    Row("topology's slices", lambda: jshard.topology("v5e:2x4", {"x": 8}, num_slices="2"), "num_slices is a str, '2'",
        "topology 'v5e:2x4'", "num_slices=2", MeshError),
    Row("sweep of meshes", lambda: jshard.sweep(fn, X, X, meshes=[DESCRIPTION]),
        "neither sweep nor fn takes an argument 'meshes'", "sweep", f"'mesh' {SWEEP}"),
    Row("sweep's pins", lambda: jshard.sweep(fn, X, X, in_strategy=((8, 1), None)),
        "neither sweep nor fn takes an argument 'in_strategy'", "sweep",
        "jshard.sweep(jshard.shard(fn, in_strategy=...), ...)"),
    Row("sweep without an argument", lambda: jshard.sweep(fn, X), "fn is called without w", "sweep",
        "jshard.sweep(fn, x, w)"),
    Row("sweep of no mesh", lambda: jshard.sweep(fn, X, X, mesh=[(4, 2)]), "mesh is a tuple", "mesh",
        "a mesh of that grid: mesh=jax.make_mesh((4, 2), ('x', 'y'))", MeshError),
    Row("sweep of a machine's name", lambda: jshard.sweep(fn, X, X, mesh="v5e:2x4"), "mesh='v5e:2x4' is not known",
        "mesh", 'mesh="auto:v5e:2x4", whose axes are chosen, or mesh=jshard.topology("v5e:2x4", {axis: size})', MeshError),
    Row("pareto of a level", lambda: jshard.pareto(fn, X, X, level=2),
        "neither pareto nor fn takes an argument 'level'", "pareto",
        "nothing: a frontier has the plans of every level"),
    Row("pareto on a mesh", lambda: jshard.pareto(fn, X, X, mesh=DESCRIPTION),
        "neither pareto nor fn takes an argument 'mesh'", "pareto",
        "jshard.pareto(jshard.shard(fn, mesh=...), ...)"),
    Row("pareto's points misspelt", lambda: jshard.pareto(fn, X, X, point=3),
        "neither pareto nor fn takes an argument 'point'", "pareto",
        "'points' (of pareto: points, show_progress; of fn: x, w)"),
    Row("plan of another level", lambda: sharded().plan(X, X, level=2), "fn takes no argument 'level'", "call of fn",
        HERE),
    Row("call of another level", lambda: sharded()(ARRAY, ARRAY, level=2), "fn takes no argument 'level'", "call of fn",
        HERE),
    Row("lower on a mesh", lambda: sharded().lower(X, X, mesh=DESCRIPTION), "fn takes no argument 'mesh'", "call of fn",
        "mesh where the function is sharded: jshard.shard(fn, mesh=...)"),
    Row("plan without an argument", lambda: sharded().plan(X), "fn is called without w", "call of fn", "fn(x, w)"),
    Row("plan without an argument by name", lambda: jshard.shard(keyword_only).plan(X),
        "keyword_only is called without w", "call of keyword_only", "keyword_only(x, w=...)"),
    Row("a plan that is none", lambda: jshard.shard(fn, plan=3).plan(X, X), "plan is an int", "plan",
        "a Plan, as f.plan(*args) or jshard.Plan.load(path) gives it", error=ShardError),
    Row("mesh of an unknown chip", lambda: jshard.shard(fn, mesh="v9:2x2").plan(X, X), "unknown chip 'v9'", "hardware.get",
        "one of tpu-v5p, tpu-v4, ... or hardware.register(...)", error=MeshError),
    Row("mesh of a slice that the chip has not", lambda: jshard.shard(fn, mesh="v5e:3x5").plan(X, X),
        "tpu-v5e has no slice of shape 3x5", "topology 'v5e:3x5'",
        "one of 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16", error=MeshError),
    Row("a file that is none to save to", lambda: plan().save(3), "Plan.save takes a path, not an int", "Plan.save",
        "the path of a file", error=ShardError),
    Row("a configuration from no file", lambda: jshard.Config.load(3), "Config.load takes a path, not an int",
        "Config.load", "the path of a file", error=ShardError),
    Row("a plan from no text", lambda: jshard.Plan.from_json(3), "from_json takes a text, not an int", "Plan.from_json",
        "what plan.to_json() gives", error=ShardError),
    Row("call with one too many", lambda: sharded()(ARRAY, ARRAY, ARRAY),
        "fn takes 2 arguments by place, and was given 3", "call of fn", "its arguments: x, w"),
    Row("plan verified by a word", lambda: sharded().plan(X, X, verify="yes"), "verify is a str, 'yes'", "fn.plan",
        "verify=True or verify=False", ShardError),
    Row("verify a function", lambda: plan().verify(sharded()), "verify takes a compiled program, not a Sharded",
        "Plan.verify", COMPILED, ShardError),
    Row("verify a plan", lambda: plan().verify(plan()), "verify takes a compiled program, not a Plan", "Plan.verify",
        COMPILED, ShardError),
    Row("verify what is lowered", lambda: plan().verify(sharded().lower(X, X)),
        "verify takes a compiled program, not a Lowered", "Plan.verify", "plan.verify(lowered.compile())", ShardError),
    Row("verify any text", lambda: plan().verify("hello"), "verify takes a compiled program, not a str", "Plan.verify",
        COMPILED, ShardError),
    Row("verify nothing", lambda: plan().verify(), "Plan.verify is called without compiled", "Plan.verify",
        "Plan.verify(compiled)"),
    Row("diff with a function", lambda: plan().diff(sharded()), "diff takes a plan, not a Sharded", "Plan.diff", PLAN,
        ShardError),
    Row("diff with a path", lambda: plan().diff("a.json"), "diff takes a plan, not a str", "Plan.diff", PLAN, ShardError),
    Row("why a number", lambda: plan().why(3), "why takes a name, not an int", "Plan.why",
        "a name as plan.ir() shows it, such as 'x'", ShardError),
    Row("what_if by place", lambda: plan().what_if((8, 1)),
        "Plan.what_if takes no arguments by place, and was given 1", "Plan.what_if", "all of them by name"),
    Row("ir's option misspelt", lambda: plan().ir(locals=True), "Plan.ir takes no argument 'locals'", "Plan.ir",
        "'local' (its arguments: local)"),
    Row("save without a path", lambda: plan().save(), "Plan.save is called without path", "Plan.save",
        "Plan.save(path)"),
    Row("trace of a word", lambda: plan().to_trace("t.json", devices="2"), "devices='2'", "Plan.to_trace",
        "how many to draw: devices=2", ShardError),
    Row("load a plan", lambda: jshard.Plan.load(plan()), "load takes a path, not a Plan", "Plan.load", "Plan.load(path)",
        ShardError),
    Row("read no plan", lambda: jshard.Plan.from_json("{"), "this is no plan", "Plan.load",
        "a file that plan.save(path) wrote, or plan.to_json()", PlanMismatchError),
    Row("read a part of a plan", lambda: jshard.Plan.from_json('{"jshard": 2}'), "this plan lacks name, level, search",
        "Plan.load", "a file that plan.save(path) wrote, whole", PlanMismatchError),
    Row("plan_of a function", lambda: jshard.flax.plan_of(sharded(), X, X), "a Sharded is no Flax module",
        "jshard.flax.plan_of",
        "fn.plan(...), for a function of jshard.shard; here a flax.nnx.Module or flax.linen.Module", ShardError),
    Row("plan_of without arguments", lambda: jshard.flax.plan_of(linear().shard()), "Linear is called without inputs",
        "Linear", "Linear(inputs, ...)"),
    Row("plan_of what is not sharded", lambda: jshard.flax.plan_of(linear(), X), "this Linear is not sharded",
        "jshard.flax.plan_of", "module.shard(...) first", ShardError),
    Row("place in a function's layouts", lambda: jshard.flax.place(linear(), sharded()),
        "place takes a plan, not a Sharded", "jshard.flax.place", PLAN_OF, ShardError),
    Row("place with the arguments swapped", lambda: jshard.flax.place(plan(), linear()),
        "place takes a plan, not a Linear", "jshard.flax.place", PLAN_OF, ShardError),
    Row("place without a plan", lambda: jshard.flax.place(linear()), "place is called without plan", "place",
        "place(tree, plan)"),
    Row("shardings_for a function", lambda: jshard.flax.shardings_for({"a": ARRAY}, sharded()),
        "shardings_for takes a plan, not a Sharded", "jshard.flax.shardings_for", PLAN_OF, ShardError),
    Row("init of a class", lambda: jshard.flax.init(nnx.Linear, plan()),
        "init calls Linear without arguments, and Linear is called without in_features, out_features, rngs",
        "jshard.flax.init", "init(lambda: Linear(in_features, out_features, rngs=..., ...), plan)", ShardError),
    Row("init of a function with arguments", lambda: jshard.flax.init(lambda rngs: linear(), plan()),
        "init calls <lambda> without arguments, and <lambda> is called without rngs", "jshard.flax.init",
        "init(lambda: build(rngs), plan)", ShardError),
    Row("a rule misspelt", lambda: jshard.register_rule("foo", rules="b -> b"),
        "register_rule takes no argument 'rules'", "register_rule",
        "'rule' (its arguments: rule, reduction, blocked, sizes, reducer, work, local)"),
    Row("a chip by number", lambda: jshard.hardware.get(5), "5 is not the name of a chip", "hardware.get",
        'text, such as "tpu-v5e"', MeshError),
    Row("a chip that is none", lambda: jshard.hardware.register("x"), "register takes a chip, not a str",
        "hardware.register",
        'one like those of the table: dataclasses.replace(hardware.get("h100"), name=..., ...)', MeshError),
    Row("no device", lambda: jshard.hardware.for_device("x"), "'x' is not a device", "hardware.for_device",
        "one of jax.devices()", MeshError),
)
# fmt: on


@pytest.mark.parametrize("row", ROWS, ids=[r.name for r in ROWS])
def test_text(row: Row):
    with pytest.raises(ShardError) as caught:
        row.call()
    assert type(caught.value) is row.error
    assert (caught.value.what, caught.value.where, caught.value.fix) == (row.what, row.where, row.fix)


def test_wrong_calls_are_type_errors_too():
    with pytest.raises(TypeError):
        sharded()(ARRAY)
    with pytest.raises(TypeError):
        jshard.topology("v5e:2x4")


def test_the_advice_works():
    described_plan = described().plan(ARRAY, ARRAY)
    assert described_plan.mesh.total == 8
    assert jax.eval_shape(described(), ARRAY, ARRAY).shape == (8, 8)  # only what is compiled needs devices
    assert jshard.flax.plan_of(linear().shard(mesh=DESCRIPTION), X).mesh.total == 8
    np.testing.assert_allclose(jshard.shard(fn, plan=None)(ARRAY, ARRAY), fn(ARRAY, ARRAY), rtol=1e-5)
    assert linear().shard(in_strategy=((8, 1),))(ARRAY).shape == (8, 8)
    assert (
        plan().verify(sharded().lower(X, X).compile()).ok
        and sharded().plan(X, X, verify=True).verification.ok
    )
    assert len(jshard.sweep(fn, X, X, mesh=[DESCRIPTION])) == 1
    assert len(jshard.sweep(jshard.shard(fn, in_strategy=((8, 1), None)), X, X)) == 1
    assert jshard.pareto(jshard.shard(fn, mesh=DESCRIPTION), X, X, points=2).plans
    assert jshard.shard(fn, level=2).plan(X, X).level == 2
    assert not plan().diff(sharded().plan(X, X))
    pinned, _ = plan().what_if(x=(1, 1))
    assert pinned.inputs[0].pinned
    step = jshard.shard(lambda m, x: m(x))
    assert jshard.flax.init(lambda: linear(), step.plan(linear(), X)).kernel.shape == (8, 8)


def test_signatures_are_still_there():
    import inspect

    assert list(inspect.signature(jshard.shard).parameters)[:3] == ["fn", "in_strategy", "out_strategy"]
    assert jshard.shard.__doc__ and jshard.Plan.verify.__doc__ and jshard.topology.__name__ == "topology"
