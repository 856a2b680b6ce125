"""Mistakes that come naturally: each is answered with what is wrong, where, and what to write, which then works.

`instead` is the call that the advice leads to.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
import jshard.flax
from jshard._api.command_line import example_arguments, parse_mesh


S = functools.partial(jax.ShapeDtypeStruct, dtype="float32")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """A class that a newcomer gives to `shard`."""

    x: Any

    def double(self):
        return self.x * 2


def dense(x, w, b):
    return jax.nn.relu(x @ w + b)


def product(x, w):
    return jshard.op(jnp.dot, in_strategy=(8, 1))(x, w)


SHAPES = (S((32, 128)), S((128, 16)), S((16,)))
ARRAYS = tuple(np.ones(s.shape, "float32") for s in SHAPES)
PIN = ((4, 2), None, None)
OF_SWEEP = (
    "of sweep: mesh, level, hardware, batch, memory_budget, search, device, show_progress; of dense: x, w, b"
)


@functools.lru_cache
def machine() -> Any:
    return jshard.topology("v5e:2x4", {"x": 2, "y": 4}, compiles=False)


@functools.lru_cache
def eight() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:8])


@functools.lru_cache
def sharded() -> jshard.Sharded:
    return jshard.shard(dense, in_strategy=PIN)


@functools.lru_cache
def plan() -> jshard.Plan:
    return sharded().plan(*SHAPES)


def with_options(**options: Any) -> jshard.Plan:
    return jshard.shard(dense, **options).plan(*SHAPES)


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A call, the three parts of its error, and the call that follows the advice (None: it is tried elsewhere)."""

    name: str
    call: Callable[[], Any]
    what: str
    where: str
    fix: str
    instead: Callable[[], Any]


M = Mistake
# fmt: off
MISTAKES = (
    M("sweep(meshes=)", lambda: jshard.sweep(dense, *SHAPES, meshes=[machine()]),
      "neither sweep nor dense takes an argument 'meshes'", "sweep", f"'mesh' ({OF_SWEEP})",
      lambda: jshard.sweep(dense, *SHAPES, mesh=[machine()])),
    M("option of shard given to sweep", lambda: jshard.sweep(dense, *SHAPES, in_strategy=PIN),
      "neither sweep nor dense takes an argument 'in_strategy'", "sweep",
      "jshard.sweep(jshard.shard(dense, in_strategy=...), ...)",
      lambda: jshard.sweep(jshard.shard(dense, in_strategy=PIN), *SHAPES, mesh=[machine()])),
    M("sweep over a name", lambda: jshard.sweep(dense, *SHAPES, mesh=["v5e:2x4"]),
      "mesh='v5e:2x4' is not known", "mesh",
      'mesh="auto:v5e:2x4", whose axes are chosen, or mesh=jshard.topology("v5e:2x4", {axis: size})',
      lambda: jshard.sweep(dense, *SHAPES, mesh="auto:v5e:2x4")),
    M("pareto without arguments", lambda: jshard.pareto(dense), "dense is called without x, w, b", "pareto",
      "jshard.pareto(dense, x, w, b)", lambda: jshard.pareto(dense, *SHAPES, points=2)),
    M("verify of a lowered program", lambda: plan().verify(sharded().lower(*ARRAYS)),
      "verify takes a compiled program, not a Lowered", "Plan.verify", "plan.verify(lowered.compile())",
      lambda: plan().verify(sharded().lower(*ARRAYS).compile())),
    M("verify of the function", lambda: plan().verify(sharded()),
      "verify takes a compiled program, not a Sharded", "Plan.verify",
      "plan.verify(f.lower(*args).compile()), or f.plan(*args, verify=True)",
      lambda: sharded().plan(*SHAPES, verify=True)),
    M("machine called", lambda: machine()(dense), "v5e:2x4 is a machine, not a function",
      "call of jshard.topology(...)",
      "jshard.shard(fn, mesh=machine), jshard.sweep(fn, *args, mesh=[machine]); jax.set_mesh(machine.jax_mesh) as a "
      "context", lambda: with_options(mesh=machine())),
    M("topology not called", lambda: with_options(mesh=jshard.topology), "mesh is a function", "mesh",
      'a call of it: mesh=jshard.topology("v5e:2x4", {"x": 2, "y": 4})',
      lambda: with_options(mesh=jshard.topology("v5e:2x4", {"x": 2, "y": 4}, compiles=False))),
    M("axes without names", lambda: jshard.topology("v5e:2x4", (2, 4)), "the axes are a tuple, (2, 4)",
      "topology 'v5e:2x4'", 'names and sizes: {"data": 4, "model": 8}',
      lambda: jshard.topology("v5e:2x4", {"data": 2, "model": 4}, compiles=False)),
    M("axes of another product", lambda: jshard.topology("v5e:2x4", {"x": 4, "y": 4}),
      "v5e:2x4 has 8 devices, the axes {'x': 4, 'y': 4} are 16", "topology 'v5e:2x4'",
      "axes whose sizes multiply to 8, such as {'x': 8, 'y': 1}",
      lambda: jshard.topology("v5e:2x4", {"x": 8, "y": 1}, compiles=False)),
    M("mesh as a dict", lambda: with_options(mesh={"x": 4, "y": 2}), "mesh is a dict", "mesh",
      "a mesh of that grid: mesh=jax.make_mesh((4, 2), ('x', 'y'))",
      lambda: with_options(mesh=jax.make_mesh((4, 2), ("x", "y"), devices=jax.devices()[:8]))),
    M("mesh as devices", lambda: with_options(mesh=jax.devices()[:8]), "mesh is a list", "mesh",
      'a mesh of them: mesh=jax.make_mesh((8,), ("x",), devices=...)',
      lambda: with_options(mesh=jax.make_mesh((8,), ("x",), devices=jax.devices()[:8]))),
    M("plan of other shapes", lambda: jshard.shard(dense, plan=plan())(np.ones((64, 128), "float32"), *ARRAYS[1:]),
      "the plan is for x float32[32,128], this call has float32[64,128]", "plan= of dense",
      "a plan of these shapes: dense.plan(*args), or the plan that was saved for them",
      lambda: jshard.shard(dense, plan=sharded().plan(S((64, 128)), *SHAPES[1:]))),
    M("strategy as text", lambda: with_options(in_strategy=("4,2", None, None)), "'4,2' is a str",
      "in_strategy[0]", "a tuple, (4, 2)", lambda: with_options(in_strategy=PIN)),
    M("strategy as a list", lambda: with_options(in_strategy=([4, 2], None, None)),
      "a list is not a strategy: [4, 2]", "in_strategy[0] (argument x)", "a tuple, (4, 2)",
      lambda: with_options(in_strategy=PIN)),
    M("too many strategies", lambda: with_options(in_strategy=((4, 2), None, None, None)),
      "in_strategy has 4 entries, but there are 3 arguments: x, w, b", "in_strategy",
      "one entry per positional argument: in_strategy=((4, 2), None, None)", lambda: with_options(in_strategy=PIN)),
    M("misspelt mesh axis", lambda: with_options(in_strategy=(jax.P("X", None), None, None), mesh=eight()),
      "the spec P('X', None) names mesh axis 'X', which the mesh lacks",
      "in_strategy[0] (argument x)", "'x' (axes of the mesh: x)",
      lambda: with_options(in_strategy=(jax.P("x"), None, None), mesh=eight())),
    M("axis names in a tuple", lambda: with_options(in_strategy=(("x", None), None, None), mesh=eight()),
      "cut 0 of ('x', None) is 'x', a str", "in_strategy[0] (argument x)", "P('x', None) for mesh axes of that name",
      lambda: with_options(in_strategy=(jax.P("x", None), None, None), mesh=eight())),
    M("word of out_strategy in a tuple", lambda: with_options(out_strategy=("full_batch",)),
      "'full_batch' is about all results, and stands in a tuple", "out_strategy",
      "out_strategy='full_batch', or one entry per result", lambda: with_options(out_strategy="full_batch")),
    M("in_shardings", lambda: jshard.shard(dense, in_shardings=PIN), "shard takes no argument 'in_shardings'", "shard",
      "in_strategy=..., which takes PartitionSpecs too", lambda: with_options(in_strategy=(jax.P(), None, None))),
    M("sharded twice", lambda: jshard.shard(sharded()), "dense is sharded already", "shard(dense)",
      "shard the plain function: jshard.shard(dense.__wrapped__, ...)",
      lambda: jshard.shard(sharded().__wrapped__, in_strategy=PIN)),
    M("strategy as the function", lambda: jshard.shard(PIN), "shard takes a function, not a tuple", "fn",
      "jshard.shard(f, in_strategy=...), or @jshard.shard(in_strategy=...) above the function",
      lambda: jshard.shard(in_strategy=PIN)(dense).plan(*SHAPES)),
    M("level as a word", lambda: jshard.shard(dense, level="memory"), "level is a str, 'memory'", "level",
      "level=1 (memory)", lambda: with_options(level=1)),
    M("budget in words", lambda: with_options(memory_budget="16 gigs"),
      "memory_budget='16 gigs' is not an amount of memory", "memory_budget",
      'memory_budget=15_000_000_000, or text with a unit such as "14GiB" or "500MB"',
      lambda: with_options(memory_budget="14GiB")),
    M("op of a name", lambda: jshard.op("dot", in_strategy=((8, 1), None)), "op takes a function, not a str", "fn",
      "jshard.op(f, in_strategy=...)", lambda: jshard.op(jnp.dot, in_strategy=((8, 1), None))),
    M("one entry for all arguments of op", lambda: jshard.shard(product).plan(*SHAPES[:2]),
      "in_strategy of op dot is one entry, (8, 1), not one entry per argument", "in_strategy of op dot",
      "one entry per argument: ((8, 1), None,)",
      lambda: jshard.shard(jshard.op(jnp.dot, in_strategy=((8, 1), None))).plan(*SHAPES[:2])),
    M("plan of shapes as tuples", lambda: sharded().plan((32, 128), (128, 16), (16,)),
      "argument 0 is a tuple, (32, 128), a shape and not an array", "call of dense",
      'jax.ShapeDtypeStruct((32, 128), "float32")', lambda: sharded().plan(*SHAPES)),
    M("plan of shapes as text", lambda: sharded().plan("f32[32,128]", "f32[128,16]", "f32[16]"),
      "argument 0 is a str, 'f32[32,128]', a shape and not an array", "call of dense",
      'jax.ShapeDtypeStruct((32, 128), "float32")', lambda: sharded().plan(*SHAPES)),
    M("a word as an argument", lambda: jshard.shard(lambda x, how: x)(ARRAYS[0], "relu"),
      "argument how is a str, 'relu', neither an array nor a container of arrays", "call of <lambda>, argument how",
      "static_argnames='how', which makes it part of the program",
      lambda: jshard.shard(lambda x, how: x, static_argnames="how").plan(ARRAYS[0], "relu")),
    M("plan as config", lambda: jshard.shard(dense, config=plan()), "config is a Plan", "config",
      "plan=..., which runs that plan; or config=plan.to_config(), its layouts as rules",
      lambda: with_options(config=plan().to_config())),
    M("config as plan", lambda: jshard.shard(dense, plan=jshard.Config.of({"level": 2})), "plan is a Config", "plan",
      "config=..., for a configuration; here a Plan, as f.plan(*args) or jshard.Plan.load(path) gives it",
      lambda: with_options(config=jshard.Config.of({"level": 2}))),
    M("path as plan", lambda: jshard.shard(dense, plan="plan.json"), "plan is a str", "plan",
      "plan=jshard.Plan.load('plan.json')", lambda: with_options(plan=jshard.Plan.from_json(plan().to_json()))),
    M("plan file that is not there", lambda: jshard.Plan.load("/no/such/plan.json"),
      "/no/such/plan.json cannot be read: No such file or directory", "Plan.load",
      "the path of a file that plan.save(path) wrote", lambda: jshard.Plan.from_json(plan().to_json())),
    M("folder that is not there", lambda: plan().to_html("/no/such/plan.html"),
      "/no/such/plan.html cannot be written: No such file or directory", "Plan.to_html",
      "a file in a folder that exists", lambda: plan().to_markdown()),
    M("config file that is not there", lambda: jshard.shard(dense, config="/no/such/file.yaml"),
      "/no/such/file.yaml cannot be read: No such file or directory", "jshard.Config", "the path of a YAML file",
      lambda: with_options(config="level: 2")),
    M("section of a config", lambda: jshard.Config.of({"parameter": {"w": None}}),
      "'parameter' is no section of a configuration", "config", "'parameters' or 'prefer'",
      lambda: jshard.Config.of({"parameters": {"w": None}})),
    M("one recipe as text", lambda: jshard.recipes(dense, *SHAPES, names="data"), "names is a str, 'data'",
      "jshard.recipes", "a list: names=['data']", lambda: jshard.recipes(dense, *SHAPES, names=["data"], mesh=machine())),
    M("misspelt recipe", lambda: with_options(config="megatorn"), "there is no recipe 'megatorn'",
      "recipe 'megatorn'", "'megatron'", lambda: jshard.Config.of({"recipe": "megatron"})),
    M("chip that is not known", lambda: with_options(hardware="v5e:2x4"), "unknown chip 'v5e:2x4'", "hardware.get",
      "one of tpu-v5e, tpu-v5p, ... or hardware.register(...)", lambda: with_options(hardware="tpu-v5e")),
    M("name that a plan lacks", lambda: plan().why("kernel"),
      "dense has no argument, result, tensor or operator 'kernel'", "Plan.why, Plan.what_if",
      "a name as plan.ir() shows it, such as 'result'", lambda: plan().why("result")),
    M("vmap outside", lambda: jax.vmap(sharded(), (0, None, None))(np.ones((2, 32, 128), "float32"), *ARRAYS[1:]),
      "vmap of the sharded function dense", "jax.vmap(dense)",
      "put vmap inside: jshard.shard(jax.vmap(f), ...) instead of jax.vmap(jshard.shard(f, ...)) for f = dense",
      lambda: jshard.shard(jax.vmap(dense, (0, None, None))).plan(S((2, 32, 128)), *SHAPES[1:])),
    M("recipe as a keyword", lambda: jshard.shard(dense, recipe="fsdp"), "shard takes no argument 'recipe'", "shard",
      'config="fsdp+megatron", or config={"recipe": "fsdp+megatron"}', lambda: with_options(config="data", mesh=eight())),
    M("pipeline as a keyword", lambda: jshard.shard(dense, pipeline="auto"), "shard takes no argument 'pipeline'",
      "shard", 'config={"pipeline": {"axis": "stage", "microbatches": 16}}: an option of the configuration',
      lambda: with_options(config={"pipeline": "auto"}, mesh=eight())),
    M("donated argument that is not there", lambda: jshard.shard(dense, donate_argnums=5),
      "donate_argnums names position 5, and dense takes 3 by position", "donate_argnums of dense",
      "one of 0 (x), 1 (w), 2 (b)", lambda: with_options(donate_argnums=0)),
    M("static argument that is not there", lambda: jshard.shard(dense, static_argnames="mode"),
      "static_argnames names 'mode', which dense does not take", "static_argnames of dense",
      "one of its arguments: 'x', 'w' or 'b'", lambda: jshard.shard(dense, donate_argnames="x")),
    M("a class as the function", lambda: jshard.shard(Layer), "shard takes a function, not the class Layer", "fn",
      "a function that uses it: jshard.shard(lambda *args: Layer(*args), ...)",
      lambda: jshard.shard(lambda x: Layer(x).double()).plan(SHAPES[0])),
    M("an argument too many", lambda: sharded().plan(*SHAPES, SHAPES[2]),
      "dense takes 3 arguments by place, and was given 4", "call of dense", "its arguments: x, w, b",
      lambda: sharded().plan(*SHAPES)),
    M("one entry for one argument", lambda: jshard.shard(jnp.sin, (4, 2)).plan(SHAPES[0]),
      "in_strategy is one entry, (4, 2), not one entry per argument", "in_strategy", "in_strategy=((4, 2),)",
      lambda: jshard.shard(jnp.sin, ((4, 2),)).plan(SHAPES[0])),
    M("a cut that does not divide", lambda: jshard.shard(jnp.sin, ((8,),)).plan(S((30,))),
      "a cut of 8 does not divide dimension 0, of size 30", "in_strategy[0] (argument x)",
      "1 or 2 pieces there, or None to leave the dimension to the search, or config={\"pad\": True} to pad it to 32",
      lambda: jshard.shard(jnp.sin, ((8,),), config={"pad": True}).plan(S((30,)))),
    M("a search that is not known", lambda: with_options(search="fast"), "search='fast' is not known", "search",
      "'optimal' or 'propagation'", lambda: with_options(search="propagation")),
    M("an index of a device", lambda: with_options(device="cuda:0"), "device='cuda:0' is not known", "device",
      "device='tpu', 'gpu' or 'cpu', or None for the default backend", lambda: with_options(device="cpu")),
    M("microbatches that do not divide", lambda: with_options(microbatches=3),
      "3 does not divide the batch of 16, dimension 1 of w and dimension 0 of b", "microbatches=3 of dense",
      "microbatches= one of 1, 2, 4, 8, 16", lambda: with_options(microbatches=2)),
    M("a mesh axis twice", lambda: with_options(in_strategy=(jax.P("x", "x"), None, None), mesh=eight()),
      "spec P('x', 'x') uses axis 'x' 2 times", "in_strategy[0] (argument x)", "each mesh axis at most once in a spec",
      lambda: with_options(in_strategy=(jax.P("x"), None, None), mesh=eight())),
    M("a plan given to place as the function", lambda: jshard.flax.place({"w": ARRAYS[1]}, sharded()),
      "place takes a plan, not a Sharded", "jshard.flax.place",
      "jshard.flax.plan_of(module, x), or f.plan(...) of a function from jshard.shard",
      lambda: jshard.flax.place({"w": ARRAYS[1]}, jshard.shard(lambda p: p["w"] * 2).plan({"w": SHAPES[1]}))),
    M("a calibration without a folder", lambda: jshard.calibrate(save="/no/such/chip.json"),
      "/no/such/chip.json cannot be written: there is no such folder, or it is not writable", "calibrate(save=...)",
      "a file in a folder that exists", lambda: None),
    M("a grid for the command line", lambda: parse_mesh("4x8", None), "'4x8' names no chip and no axes",
      "python -m jshard plan --mesh", "a machine, v5e:4x8, or names of the axes, x=4,y=8",
      lambda: (parse_mesh("v5e:4x8", None), parse_mesh("x=4,y=8", None))),
    M("a shape without a type for the command line", lambda: example_arguments(["8x8"]), "'8x8' is no shape",
      "python -m jshard plan --args",
      'type and sizes: "f32[8,128]", "int32[]"; or MODULE:NAME of a value or of a function that makes the arguments',
      lambda: example_arguments(["f32[8,8]"])),
)
# fmt: on


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.name)
def test_a_natural_mistake_is_answered(mistake: Mistake) -> None:
    with pytest.raises(jshard.ShardError) as caught:
        mistake.call()
    error = caught.value
    assert (error.what, error.where, error.fix) == (mistake.what, mistake.where, mistake.fix)
    mistake.instead()


def test_every_mistake_has_a_name_of_its_own() -> None:
    assert len({m.name for m in MISTAKES}) == len(MISTAKES) >= 45


def test_what_looks_like_a_mistake_and_is_none() -> None:
    """The decorator without parentheses, NumPy scalars and budgets such as "16G" are taken."""

    @jshard.shard
    def scaled(x, s):
        return x * s

    assert float(scaled(np.ones(8, "float32"), np.float32(2)).sum()) == 16.0
    assert with_options(memory_budget="16G").memory_budget == 16e9
