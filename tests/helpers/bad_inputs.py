"""Wrong strategies, meshes and options, each with the exact text of its error.

Every row is a call of `shard` as data, so that it goes through `_spec` alone (`read`) and the public functions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

from jshard._config.source import read_config
from jshard._core.errors import MeshError, ShardError, StrategyError
from jshard._spec.function_argument import check_function
from jshard._spec.mesh_selection import ChosenMesh, choose_mesh, mesh_device_count
from jshard._spec.options import check_call_options, check_options, with_rare_options
from jshard._spec.strategies import pins_for_inputs, pins_for_outputs, without_static
from jshard._spec.tree_paths import argument_names, shape_of


def S(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def dense(x, w, b):
    return x @ w + b


def one(x):
    return 2 * x


def two(params, x):
    return x @ params["w1"], (x @ params["w1"]).sum()


def optional(x, b=None):
    return x


@dataclasses.dataclass(frozen=True)
class Call:
    """A function and what it is called with."""

    fn: Callable
    args: tuple
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


DENSE = Call(dense, (S(32, 128), S(128, 16), S(16)))
ONE = Call(one, (S(32, 128),))
SCALAR = Call(one, (S(),))
TWO = Call(two, ({"w1": S(128, 16), "w2": S(16, 128), "b": [S(16), S(16)]}, S(32, 128)))
KEYWORD = Call(dense, (S(32, 128),), {"w": S(128, 16), "b": S(16)})


@functools.lru_cache
def mesh(shape: tuple[int, ...] = (4, 2), names: tuple = ("data", "model"), reverse: bool = False) -> Mesh:
    devices = jax.devices()[: int(np.prod(shape))]
    return Mesh(np.array(devices[::-1] if reverse else devices).reshape(shape), names)


def on(of: Mesh, *spec: str) -> NamedSharding:
    return NamedSharding(of, P(*spec))


def read(
    call: Call,
    *,
    in_strategy=None,
    out_strategy=None,
    parameter_plan=None,
    device=None,
    mesh=None,
    static_argnums=None,
    static_argnames=None,
    donate_argnums=None,
    donate_argnames=None,
    config=None,
    **options: Any,
) -> ChosenMesh:
    """What the doors do with the arguments of `shard`, up to the mesh."""
    check_function(call.fn)
    checked = check_options(device=device, **options)
    if config is not None:
        checked = with_rare_options(checked, dict(read_config(config).options))
    statics = check_call_options(
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
    )
    names = argument_names(call.fn, len(call.args))
    in_strategy = without_static(in_strategy, names, statics.static_argnames)
    dynamic = [n for n in names if n not in statics.static_argnames]
    devices = mesh_device_count(mesh, device, (in_strategy, parameter_plan, out_strategy))
    pins = pins_for_inputs(
        call.args,
        call.kwargs,
        in_strategy,
        parameter_plan,
        names=dynamic,
        strict=checked.strict,
        devices=devices,
    )
    results = jax.eval_shape(call.fn, *call.args, **call.kwargs)
    pins += pins_for_outputs(results, out_strategy, devices=devices)
    shapes = [shape_of(leaf) for leaf in jax.tree.leaves((call.args, call.kwargs, results))]
    return choose_mesh(mesh, device, pins, shapes)


@dataclasses.dataclass(frozen=True)
class Row:
    """A bad input: its name, the arguments of `shard` (or a function that makes them), error and text."""

    name: str
    given: dict[str, Any] | Callable[[], dict[str, Any]]
    what: str
    where: str
    fix: str
    call: Call = DENSE
    error: type[ShardError] = StrategyError

    @property
    def arguments(self) -> dict[str, Any]:
        return self.given() if callable(self.given) else self.given


ENTRY_FORMS = "None, a tuple of pieces per dimension such as (4, 2), a PartitionSpec or a NamedSharding"
PAD = ', or config={{"pad": True}} to pad it to {}'
CUT_FIX = "a positive int for each dimension, or None to leave it to the search"
MESH_FIX = 'a jax.sharding.Mesh or AbstractMesh, jshard.topology(...), "auto" or None'
DEVICE_FIX = "device='tpu', 'gpu' or 'cpu', or None for the default backend"
LEVEL_FIX = "0 (compute-to-communication ratio), 1 (memory) or 2 (speed)"
PREFER_FIX = (
    'config={"prefer": "memory:1%"}: the least peak memory for at most 1% more of what the level minimises'
)
BUDGET_FIX = 'memory_budget=15_000_000_000, or text with a unit such as "14GiB" or "500MB"'
OTHER_FIX = "a NamedSharding on the mesh in use, or a PartitionSpec of its axes"

# fmt: off
ROWS: tuple[Row, ...] = (
    Row("entries missing", {"in_strategy": ((4, 2), None)},
        "in_strategy has 2 entries, but there are 3 arguments: x, w, b", "in_strategy",
        "one entry per positional argument: in_strategy=((4, 2), None, None)"),
    Row("entries too many", {"in_strategy": ((4, 2), None, None, None)},
        "in_strategy has 4 entries, but there are 3 arguments: x, w, b", "in_strategy",
        "one entry per positional argument: in_strategy=((4, 2), None, None)"),
    Row("entries none for an argument", {"in_strategy": ()},
        "in_strategy has no entries, but there is 1 argument: x", "in_strategy",
        "one entry per positional argument: in_strategy=(None,)", call=ONE),
    Row("one strategy for all", {"in_strategy": (4, 2)},
        "in_strategy is one entry, (4, 2), not one entry per argument", "in_strategy",
        "in_strategy=((4, 2), None, None)"),
    Row("one strategy for one argument", {"in_strategy": (4, 2)},
        "in_strategy is one entry, (4, 2), not one entry per argument", "in_strategy",
        "in_strategy=((4, 2),)", call=ONE),
    Row("one strategy with a free dimension", {"in_strategy": (4, None)},
        "in_strategy is one entry, (4, None), not one entry per argument", "in_strategy",
        "in_strategy=((4, None),)", call=ONE),
    Row("one spec", {"in_strategy": P("data")},
        "in_strategy is one entry, P('data'), not one entry per argument", "in_strategy",
        "in_strategy=(P('data'),)", call=ONE),
    Row("a list of cuts", {"in_strategy": [4, 2]},
        "in_strategy is a list of cuts, [4, 2], not one entry per argument", "in_strategy",
        "in_strategy=((4, 2),)", call=ONE),
    Row("a string", {"in_strategy": "data_parallel"}, "in_strategy is a str, 'data_parallel'", "in_strategy",
        "a tuple with one entry per positional argument, a dict by argument name, or None"),
    Row("an int", {"in_strategy": 8}, "in_strategy is an int, 8", "in_strategy",
        "a tuple with one entry per positional argument, a dict by argument name, or None"),
    Row("a set", {"in_strategy": {(4, 2)}}, "in_strategy is a set, {(4, 2)}", "in_strategy",
        "a tuple with one entry per positional argument, a dict by argument name, or None"),
    Row("keyword arguments need entries too", {"in_strategy": ((4, 2),)},
        "in_strategy has 1 entry, but there are 3 arguments: x, w, b", "in_strategy",
        "one entry per positional argument: in_strategy=((4, 2), None, None)", call=KEYWORD),
    Row("unknown argument name", {"in_strategy": {"X": (4, 2)}}, "no argument is named 'X'", "in_strategy",
        "'x', 'w' or 'b'"),
    Row("unknown argument name, nothing near", {"in_strategy": {"tokens": (4, 2)}},
        "no argument is named 'tokens'", "in_strategy", "'x', 'w' or 'b'"),
    Row("argument name that is no string", {"in_strategy": {0: (4, 2)}}, "no argument is named 0",
        "in_strategy", "'x', 'w' or 'b'"),
    Row("rank too small", {"in_strategy": ((4,), None, None)},
        "strategy (4,) has 1 cut, but the tensor has 2 dimensions, (32, 128)", "in_strategy[0] (argument x)",
        "one cut per dimension: (4, 1)"),
    Row("rank too large", {"in_strategy": (None, None, (2, 2))},
        "strategy (2, 2) has 2 cuts, but the tensor has 1 dimension, (16,)", "in_strategy[2] (argument b)",
        "one cut per dimension: (2,)"),
    Row("cuts for a scalar", {"in_strategy": ((2,),)},
        "strategy (2,) has 1 cut, but the tensor has no dimensions, ()", "in_strategy[0] (argument x)",
        "one cut per dimension: ()", call=SCALAR),
    Row("scalar's strategy for a matrix", {"in_strategy": ((), None, None)},
        "strategy () has no cuts, but the tensor has 2 dimensions, (32, 128)", "in_strategy[0] (argument x)",
        "one cut per dimension: (1, 1)"),
    Row("rank by name", {"in_strategy": {"b": (2, 2)}},
        "strategy (2, 2) has 2 cuts, but the tensor has 1 dimension, (16,)", "in_strategy['b'] (argument b)",
        "one cut per dimension: (2,)", call=KEYWORD),
    Row("brackets too many", {"in_strategy": (((4, 2),), None, None)},
        "((4, 2),) holds one entry, for a tensor that is not a container", "in_strategy[0] (argument x)",
        "without the outer brackets: (4, 2)"),
    Row("float cut", {"in_strategy": ((4.0, 2), None, None)}, "cut 0 of (4.0, 2) is 4.0, a float",
        "in_strategy[0] (argument x)", CUT_FIX),
    Row("bool cut", {"in_strategy": ((True, 2), None, None)}, "cut 0 of (True, 2) is True, a bool",
        "in_strategy[0] (argument x)", CUT_FIX),
    Row("numpy float cut", {"in_strategy": ((np.float32(4), 2), None, None)},
        "cut 0 of (np.float32(4.0), 2) is np.float32(4.0), a float32", "in_strategy[0] (argument x)",
        CUT_FIX),
    Row("string cut", {"in_strategy": (("data", None), None, None)},
        "cut 0 of ('data', None) is 'data', a str", "in_strategy[0] (argument x)",
        "P('data', None) for mesh axes of that name"),
    Row("string among cuts", {"in_strategy": ((4, "2"), None, None)}, "cut 1 of (4, '2') is '2', a str",
        "in_strategy[0] (argument x)", CUT_FIX),
    Row("nested cut", {"in_strategy": ((4, (2,)), None, None)}, "cut 1 of (4, (2,)) is (2,), a tuple",
        "in_strategy[0] (argument x)", CUT_FIX),
    Row("zero cut", {"in_strategy": ((0, 2), None, None)},
        "cut 0 of (0, 2) is 0; a dimension has at least 1 piece", "in_strategy[0] (argument x)",
        "1 to leave the dimension whole, None to leave it to the search"),
    Row("negative cut", {"in_strategy": ((4, -2), None, None)},
        "cut 1 of (4, -2) is -2; a dimension has at least 1 piece", "in_strategy[0] (argument x)",
        "1 to leave the dimension whole, None to leave it to the search"),
    Row("cut that does not divide", {"in_strategy": (None, (1, 3), None)},
        "a cut of 3 does not divide dimension 1, of size 16", "in_strategy[1] (argument w)",
        "1, 2, 4, 8 or 16 pieces there, or None to leave the dimension to the search"),
    Row("cut larger than the dimension", {"in_strategy": (None, None, (32,))},
        "a cut of 32 does not divide dimension 0, of size 16", "in_strategy[2] (argument b)",
        "1, 2, 4, 8 or 16 pieces there, or None to leave the dimension to the search"),
    Row("cut of a prime dimension", {"in_strategy": ((2, 1),)},
        "a cut of 2 does not divide dimension 0, of size 7", "in_strategy[0] (argument x)",
        "1 piece there, or None to leave the dimension to the search" + PAD.format(8), call=Call(one, (S(7, 8),))),
    Row("over the device count", {"in_strategy": ((8, 4), None, None)},
        "strategy (8, 4) makes 32 pieces, over the device count: 16 devices", "in_strategy[0] (argument x)",
        "cuts whose product divides 16, such as (8, 2), or 32 devices"),
    Row("over the device count in one dimension", {"in_strategy": ((32, 1), None, None)},
        "strategy (32, 1) makes 32 pieces, over the device count: 16 devices", "in_strategy[0] (argument x)",
        "cuts whose product divides 16, such as (16, 1), or 32 devices"),
    Row("no grid has the cut", {"in_strategy": ((3, 1),)},
        "a cut of 3 in dimension 0: no grid of 16 devices has it", "in_strategy[0] (argument x)",
        "1 piece there", call=Call(one, (S(9, 9),))),
    Row("over one device", lambda: {"in_strategy": ((2, 1), None, None), "mesh": mesh((1,), ("x",))},
        "strategy (2, 1) makes 2 pieces, over the device count: 1 device", "in_strategy[0] (argument x)",
        "cuts whose product divides 1, such as (1, 1), or 2 devices"),
    Row("pieces do not divide the devices",
        lambda: {"in_strategy": ((2, 2), None, None), "mesh": mesh((6,), ("x",))},
        "strategy (2, 2) makes 4 pieces, which do not divide 6 devices", "in_strategy[0] (argument x)",
        "cuts whose product divides 6, such as (2, 1)"),
    Row("no grid of six", lambda: {"in_strategy": ((4, 1), None, None), "mesh": mesh((6,), ("x",))},
        "a cut of 4 in dimension 0: no grid of 6 devices has it", "in_strategy[0] (argument x)",
        "1 or 2 pieces there"),
    Row("list entry", {"in_strategy": (None, None, [2])}, "a list is not a strategy: [2]",
        "in_strategy[2] (argument b)", "a tuple, (2,)"),
    Row("list entry for a matrix", {"in_strategy": ([4, 2], None, None)}, "a list is not a strategy: [4, 2]",
        "in_strategy[0] (argument x)", "a tuple, (4, 2)"),
    Row("string entry", {"in_strategy": {"x": "data"}}, "'data' is not an entry",
        "in_strategy['x'] (argument x)", "P('data') for a mesh axis of that name"),
    Row("bare int entry", {"in_strategy": {"x": 4}}, "4 is not an entry", "in_strategy['x'] (argument x)",
        "a tuple, (4, 1)"),
    Row("bare int entry of a scalar", {"in_strategy": {"x": 1}}, "1 is not an entry",
        "in_strategy['x'] (argument x)", "() for a scalar", call=SCALAR),
    Row("float entry", {"in_strategy": {"x": 4.0}}, "4.0 is not an entry", "in_strategy['x'] (argument x)",
        "a tuple, (4, 1)"),
    Row("set entry", {"in_strategy": {"x": {4, 2}}}, "a set is not an entry", "in_strategy['x'] (argument x)",
        ENTRY_FORMS),
    Row("function entry", {"in_strategy": {"x": jax.numpy.sin}}, "a PjitFunction is not an entry",
        "in_strategy['x'] (argument x)", ENTRY_FORMS),
    Row("dict entry for an array", {"in_strategy": {"x": {"w": (4, 2)}}}, "a dict is not an entry",
        "in_strategy['x'] (argument x)", ENTRY_FORMS),
    Row("array entry", {"in_strategy": (np.array([4, 2]), None, None)}, "a ndarray is not an entry",
        "in_strategy[0] (argument x)", ENTRY_FORMS),
    Row("strategy of what is no array", {"in_strategy": ((1,),)}, "a str is not an array and cannot be cut",
        "in_strategy[0] (argument x)", "None", call=Call(one, ("text",))),
    Row("prefix of the wrong rank", {"in_strategy": ((2, 2), None)},
        "strategy (2, 2) has 2 cuts, but the tensor has 1 dimension, (16,)",
        "in_strategy[0] (argument params.b.0)", "one cut per dimension: (2,)", call=TWO),
    Row("unknown part", {"in_strategy": ({"w3": (2, 2)}, None)}, "no part is named 'w3'",
        "in_strategy[0] (argument params)", "'w2' or 'w1'", call=TWO),
    Row("too few parts", {"in_strategy": ({"b": [(2,)]}, None)}, "1 entry for 2 parts",
        "in_strategy[0]['b'] (argument params.b)", "one entry for each part: 0, 1", call=TWO),
    Row("wrong part", {"in_strategy": ({"w1": (2, 2.5)}, None)}, "cut 1 of (2, 2.5) is 2.5, a float",
        "in_strategy[0]['w1'] (argument params.w1)", CUT_FIX, call=TWO),
    Row("deep part", {"in_strategy": ({"b": [None, (3,)]}, None)},
        "a cut of 3 does not divide dimension 0, of size 16", "in_strategy[0]['b'][1] (argument params.b.1)",
        "1, 2, 4, 8 or 16 pieces there, or None to leave the dimension to the search", call=TWO),
    Row("wrong container", {"in_strategy": (P, None)}, "a type is not an entry",
        "in_strategy[0] (argument params)",
        "None, a tuple of pieces per dimension such as (4, 2), a PartitionSpec or a NamedSharding; "
        "or a dict, tuple or list of these for the parts of a pytree", call=TWO),
    Row("axis without a mesh", {"in_strategy": (P("data"), None, None)},
        "the spec P('data', None) names mesh axis 'data', but there is no mesh",
        "in_strategy[0] (argument x)",
        "mesh=..., or `with jax.set_mesh(mesh):` around the call, or pieces per dimension"),
    Row("axis the mesh lacks", lambda: {"in_strategy": (P("date"), None, None), "mesh": mesh()},
        "the spec P('date', None) names mesh axis 'date', which the mesh lacks",
        "in_strategy[0] (argument x)", "'data' (axes of the mesh: data, model)"),
    Row("axis the context lacks",
        lambda: {"in_strategy": (P(None, "rows"), None, None), "mesh": mesh().abstract_mesh},
        "the spec P(None, 'rows') names mesh axis 'rows', which the mesh lacks",
        "in_strategy[0] (argument x)", "'data' or 'model' (axes of the mesh: data, model)"),
    Row("spec too long", lambda: {"in_strategy": (None, None, P("data", None)), "mesh": mesh()},
        "spec P('data', None) has 2 entries, but the tensor has 1 dimension, (16,)",
        "in_strategy[2] (argument b)", "at most 1 entry: P('data')"),
    Row("axis twice", lambda: {"in_strategy": (P("data", "data"), None, None), "mesh": mesh()},
        "spec P('data', 'data') uses axis 'data' 2 times", "in_strategy[0] (argument x)",
        "each mesh axis at most once in a spec"),
    Row("axis twice in one dimension",
        lambda: {"in_strategy": (P(("data", "data")), None, None), "mesh": mesh()},
        "spec P(('data', 'data')) uses axis 'data' 2 times", "in_strategy[0] (argument x)",
        "each mesh axis at most once in a spec"),
    Row("number in a spec", lambda: {"in_strategy": (P(4, 2), None, None), "mesh": mesh()},
        "spec P(4, 2) holds 4, which is not the name of a mesh axis", "in_strategy[0] (argument x)",
        "axis names; to say how many pieces, write a plain tuple such as (4, 2)"),
    Row("spec that does not divide", lambda: {"in_strategy": (P("data"),), "mesh": mesh()},
        "a cut of 4, by mesh axis 'data', does not divide dimension 0, of size 6",
        "in_strategy[0] (argument x)",
        "'model' or None there, or P.UNCONSTRAINED to leave it to the search" + PAD.format(8), call=Call(one, (S(6, 6),))),
    Row("spec of two axes that does not divide",
        lambda: {"in_strategy": (P(None, ("data", "model")),), "mesh": mesh()},
        "a cut of 8, by mesh axes 'data' and 'model', does not divide dimension 1, of size 12",
        "in_strategy[0] (argument x)",
        "'data', 'model' or None there, or P.UNCONSTRAINED to leave it to the search" + PAD.format(16),
        call=Call(one, (S(8, 12),))),
    Row("unreduced spec",
        lambda: {"in_strategy": (P("data", unreduced={"model"}), None, None), "mesh": mesh()},
        "spec P('data') has unreduced axes; a pinned tensor is whole, not a sum of parts",
        "in_strategy[0] (argument x)", "the spec without unreduced={...}"),
    Row("sharding of other devices",
        lambda: {"in_strategy": (on(mesh((4,), ("data",)), "data"), None, None), "mesh": mesh()},
        "the NamedSharding is of another mesh, data=4, whose devices are not those of the mesh in "
        "use, data=4 x model=2", "in_strategy[0] (argument x)", OTHER_FIX),
    Row("sharding of devices in another order",
        lambda: {"in_strategy": (on(mesh((8,), ("d",), True), "d"), None, None), "mesh": mesh()},
        "the NamedSharding is of another mesh, d=8, whose devices are in another order than those "
        "of the mesh in use, data=4 x model=2", "in_strategy[0] (argument x)", OTHER_FIX),
    Row("sharding of a mesh that cannot be told",
        lambda: {"in_strategy": (on(mesh((2, 3), ("a", "b")), "a"), None, None), "mesh": mesh((3, 2))},
        "the NamedSharding is of another mesh, a=2 x b=3, whose axes cannot be told in those of "
        "the mesh in use, data=3 x model=2", "in_strategy[0] (argument x)", OTHER_FIX),
    Row("unknown out_strategy", {"out_strategy": "fullbatch"}, "out_strategy='fullbatch' is not known",
        "out_strategy", "'full_batch'"),
    Row("unknown out_strategy, nothing near", {"out_strategy": "x"}, "out_strategy='x' is not known",
        "out_strategy", "'full_batch' or 'data_parallel'"),
    Row("results' entries too many", {"out_strategy": ((4, 2), None)},
        "out_strategy has 2 entries, but the function returns 1 result", "out_strategy",
        "one entry per result: out_strategy=((4, 2),)"),
    Row("results' entries missing", {"out_strategy": ((4, 2),)},
        "out_strategy has 1 entry, but the function returns 2 results", "out_strategy",
        "one entry per result: out_strategy=((4, 2), None)", call=TWO),
    Row("one strategy for two results", {"out_strategy": (4, 2)},
        "out_strategy is one entry, (4, 2), but the function returns 2 results", "out_strategy",
        "one entry per result: out_strategy=((4, 2), None)", call=TWO),
    Row("result's rank", {"out_strategy": (4, 2, 1)},
        "strategy (4, 2, 1) has 3 cuts, but the tensor has 2 dimensions, (32, 16)",
        "out_strategy (the result)", "one cut per dimension: (4, 2)"),
    Row("result's rank in a tuple", {"out_strategy": (None, (2,))},
        "strategy (2,) has 1 cut, but the tensor has no dimensions, ()", "out_strategy[1] (result 1)",
        "one cut per dimension: ()", call=TWO),
    Row("result's cut does not divide", {"out_strategy": ((3, 1),)},
        "a cut of 3 does not divide dimension 0, of size 32", "out_strategy[0] (the result)",
        "1, 2, 4, 8 or 16 pieces there, or None to leave the dimension to the search"),
    Row("cut whose divisors no grid has", {"in_strategy": ((8, 1),)},
        "a cut of 8 does not divide dimension 0, of size 10", "in_strategy[0] (argument x)",
        "1 or 2 pieces there, or None to leave the dimension to the search" + PAD.format(16), call=Call(one, (S(10, 8),))),
    Row("cut that leaves no room for the divisors beside it",
        lambda: {"in_strategy": ((3, 4),), "mesh": mesh((8,), ("x",))},
        "a cut of 3 does not divide dimension 0, of size 8", "in_strategy[0] (argument x)",
        "1 or 2 pieces there, or None to leave the dimension to the search", call=Call(one, (S(8, 8),))),
    Row("bare int that no grid has", {"in_strategy": {"x": 3}}, "3 is not an entry", "in_strategy['x'] (argument x)",
        "a tuple, (1, 1)", call=Call(one, (S(9, 9),))),
    Row("rank too small, with a cut that no grid has", {"in_strategy": ((3,),)},
        "strategy (3,) has 1 cut, but the tensor has 2 dimensions, (9, 8)", "in_strategy[0] (argument x)",
        "one cut per dimension: (1, 1)", call=Call(one, (S(9, 8),))),
    Row("list of cuts that no grid has", {"in_strategy": ([8, 4],)}, "a list is not a strategy: [8, 4]",
        "in_strategy[0] (argument x)", "a tuple, (8, 2)", call=ONE),
    Row("result's wrong type", {"out_strategy": 4}, "4 is not an entry", "out_strategy (the result)",
        "a tuple, (4, 1)"),
    Row("data parallel over an odd batch", {"out_strategy": "data_parallel"},
        "16 devices do not divide dimension 0, of size 6", "out_strategy='data_parallel' (the result)",
        "'full_batch', or one entry per result", call=Call(one, (S(6, 8),))),
    Row("parameter plan of a list", {"parameter_plan": [("w", (1, 4))]}, "parameter_plan is a list",
        "parameter_plan", 'a dict from parameter names to entries: parameter_plan={"w1": (1, 4)}'),
    Row("parameter plan of a strategy", {"parameter_plan": (1, 4)}, "parameter_plan is a tuple",
        "parameter_plan", 'a dict from parameter names to entries: parameter_plan={"w1": (1, 4)}'),
    Row("parameter name a number", {"parameter_plan": {1.5: (1, 4)}},
        "parameter_plan has the key 1.5, a float", "parameter_plan", "parameter names as strings"),
    Row("parameter name empty", {"parameter_plan": {"": (1, 4)}}, "parameter_plan has an empty name, ''",
        "parameter_plan", "parameter names such as 'w1'"),
    Row("unknown parameter",
        {"parameter_plan": {"self.w3": (1, 4), "bias": (4,), "w": (1, 4)}, "strict": True},
        "parameter_plan names no tensor of the arguments: 'self.w3' (nearest: w); 'bias' (nearest: b)",
        "parameter_plan", "one of the nearest names, or strict=False to skip such names"),
    Row("unknown deep parameter", {"parameter_plan": {"w3": (1, 4)}, "strict": True},
        "parameter_plan names no tensor of the arguments: 'w3' (nearest: params.w2, params.w1)",
        "parameter_plan", "one of the nearest names, or strict=False to skip such names", call=TWO),
    Row("glob that matches nothing", {"parameter_plan": {"blocks.*.w1": (1, 4)}, "strict": True},
        "parameter_plan names no tensor of the arguments: 'blocks.*.w1' (nearest: params.b.1, params.w1)",
        "parameter_plan", "one of the nearest names, or strict=False to skip such names", call=TWO),
    Row("parameter's rank", {"parameter_plan": {"w1": (4,)}},
        "strategy (4,) has 1 cut, but the tensor has 2 dimensions, (128, 16)",
        "parameter_plan['w1'] (argument params.w1)", "one cut per dimension: (4, 1)", call=TWO),
    Row("parameter's cut does not divide", {"parameter_plan": {"b.*": (3,)}},
        "a cut of 3 does not divide dimension 0, of size 16", "parameter_plan['b.*'] (argument params.b.0)",
        "1, 2, 4, 8 or 16 pieces there, or None to leave the dimension to the search", call=TWO),
    Row("parameter pinned twice", {"in_strategy": (None, (4, 1), None), "parameter_plan": {"w": (1, 4)}},
        "one tensor is pinned twice, to (4, 1) and to (1, 4)",
        "in_strategy[1] (argument w) and parameter_plan['w'] (argument w)",
        "one of the two, or the same in both"),
    Row("two names for one parameter", {"parameter_plan": {"w1": (4, 1), "self.w1": (1, 4)}},
        "two names, equally specific, pin one tensor to (4, 1) and to (1, 4)",
        "parameter_plan['w1'] and parameter_plan['self.w1'] (argument params.w1)",
        "the full name: parameter_plan['params.w1']", call=TWO),
    Row("two globs for one parameter", {"parameter_plan": {"*s.w1": (4, 1), "p*.w1": (1, 4)}},
        "two names, equally specific, pin one tensor to (4, 1) and to (1, 4)",
        "parameter_plan['*s.w1'] and parameter_plan['p*.w1'] (argument params.w1)",
        "the full name: parameter_plan['params.w1']", call=TWO),
    Row("mesh of the wrong type", {"mesh": 7}, "mesh is an int", "mesh", MESH_FIX, error=MeshError),
    Row("mesh a string", {"mesh": "best"}, "mesh='best' is not known", "mesh", MESH_FIX, error=MeshError),
    Row("empty mesh", lambda: {"mesh": AbstractMesh((), ())}, "the mesh is empty", "mesh",
        "a mesh with at least one axis", error=MeshError),
    Row("axis name that is no string", lambda: {"mesh": Mesh(np.array(jax.devices()), (1,))},
        "mesh axis 1 is an int", "mesh", "axis names as strings", error=MeshError),
    Row("inside shard_map", lambda: {"mesh": AbstractMesh((8,), ("x",), axis_types=(AxisType.Manual,))},
        "mesh axis 'x' is Manual: this is the inside of a shard_map", "mesh",
        "call the sharded function outside of shard_map", error=MeshError),
    Row("Ascend", {"device": "Ascend"}, "device='Ascend' is MindSpore's; JAX has no Ascend backend", "device",
        DEVICE_FIX, error=MeshError),
    Row("unknown device", {"device": "npu"}, "device='npu' is not known", "device", DEVICE_FIX,
        error=MeshError),
    Row("device in capitals", {"device": "TPU"}, "device='TPU' is not known", "device", "device='tpu'",
        error=MeshError),
    Row("device of the wrong type", {"device": 0}, "device is an int", "device", DEVICE_FIX, error=MeshError),
    Row("device that is not here", {"device": "tpu"}, "no tpu device here", "device",
        "another device, or mesh=jshard.topology(...) to plan without devices", error=MeshError),
    Row("device is not the mesh's", lambda: {"device": "gpu", "mesh": mesh()},
        "device='gpu', but the mesh is of cpu devices", "device and mesh",
        "a mesh of gpu devices, or device=None", error=MeshError),
    Row("level 3", {"level": 3}, "level=3 is not a level", "level", LEVEL_FIX, error=ShardError),
    Row("negative level", {"level": -1}, "level=-1 is not a level", "level", LEVEL_FIX, error=ShardError),
    Row("level of the wrong type", {"level": "2"}, "level is a str, '2'", "level", LEVEL_FIX,
        error=ShardError),
    Row("level a bool", {"level": True}, "level is a bool, True", "level", LEVEL_FIX, error=ShardError),
    Row("level a float", {"level": 1.0}, "level is a float, 1.0", "level", LEVEL_FIX, error=ShardError),
    Row("search unknown", {"search": "optimum"}, "search='optimum' is not known", "search", "'optimal'",
        error=ShardError),
    Row("search of the wrong type", {"search": None}, "search is None", "search",
        "'optimal' or 'propagation'", error=ShardError),
    Row("strict of the wrong type", {"strict": 1}, "strict is an int, 1", "strict",
        "strict=True or strict=False", error=ShardError),
    Row("budget unit", {"memory_budget": "14 gigs"}, "memory_budget='14 gigs' is not an amount of memory",
        "memory_budget", BUDGET_FIX, error=ShardError),
    Row("budget without number", {"memory_budget": "GiB"}, "memory_budget='GiB' is not an amount of memory",
        "memory_budget", BUDGET_FIX, error=ShardError),
    Row("preference without share", {"config": {"prefer": "memory"}}, "prefer is a str, 'memory'", "config", PREFER_FIX,
        error=ShardError),
    Row("preference of the wrong type", {"config": {"prefer": 0.01}}, "prefer is a float, 0.01", "config", PREFER_FIX,
        error=ShardError),
    Row("preference of nothing", {"config": {"prefer": "memory:0%"}},
        "prefer='memory:0%' is not a share above 0% and up to 100%", "config", PREFER_FIX, error=ShardError),
    Row("preference at level 1", {"config": {"prefer": "memory:1%"}, "level": 1}, "level=1 minimises memory already",
        "prefer", "no prefer, or level=0 or level=2", error=ShardError),
    Row("budget zero", {"memory_budget": 0}, "memory_budget=0 is less than one byte", "memory_budget",
        BUDGET_FIX, error=ShardError),
    Row("budget negative", {"memory_budget": "-1GiB"}, "memory_budget='-1GiB' is less than one byte",
        "memory_budget", BUDGET_FIX, error=ShardError),
    Row("budget infinite", {"memory_budget": float("inf")}, "memory_budget=inf is not finite",
        "memory_budget", "memory_budget=None for no limit of your own", error=ShardError),
    Row("budget a bool", {"memory_budget": True}, "memory_budget is a bool, True", "memory_budget",
        BUDGET_FIX, error=ShardError),
    Row("budget of the wrong type", {"memory_budget": [14]}, "memory_budget is a list, [14]", "memory_budget",
        BUDGET_FIX, error=ShardError),
    Row("hardware of the wrong type", {"hardware": 5}, "hardware is an int, 5", "hardware",
        'the name of a chip such as "tpu-v5e", or jshard.hardware.get(...)', error=MeshError),
    Row("hardware empty", {"hardware": ""}, "hardware is a str, ''", "hardware",
        'the name of a chip such as "tpu-v5e", or jshard.hardware.get(...)', error=MeshError),
    Row("no function", {}, "shard takes a function, not None", "fn",
        "jshard.shard(f, in_strategy=...), or @jshard.shard(in_strategy=...) above the function",
        call=Call(None, ()), error=ShardError),
    Row("function already called", {}, "shard takes a function, not a ShapeDtypeStruct", "fn",
        "jshard.shard(f, in_strategy=...), or @jshard.shard(in_strategy=...) above the function",
        call=Call(S(4), ()), error=ShardError),
    Row("static number a string", {"static_argnums": "x"}, "static_argnums holds 'x', a str",
        "static_argnums", "positions as ints: static_argnums=(0, 1)", error=ShardError),
    Row("static number a bool", {"static_argnums": (True,)}, "static_argnums holds True, a bool",
        "static_argnums", "positions as ints: static_argnums=(0, 1)", error=ShardError),
    Row("static name a number", {"static_argnames": 0}, "static_argnames holds 0, an int", "static_argnames",
        'names as strings: static_argnames=("cfg",)', error=ShardError),
    Row("donated number a float", {"donate_argnums": (0.0,)}, "donate_argnums holds 0.0, a float",
        "donate_argnums", "positions as ints: donate_argnums=(0, 1)", error=ShardError),
    Row("donated name a number", {"donate_argnames": ("x", 1)}, "donate_argnames holds 1, an int",
        "donate_argnames", 'names as strings: donate_argnames=("cfg",)', error=ShardError),
    Row("static and donated", {"static_argnums": 1, "donate_argnums": (0, 1)},
        "argument 1 is both static and donated", "static_argnums and donate_argnums",
        "one of the two: only arrays can be donated", error=ShardError),
    Row("static argument with a strategy", {"in_strategy": (None, (2,)), "static_argnames": "b"},
        "argument b is static and has no layout", "in_strategy (argument b)", "None for it",
        call=Call(optional, (S(4, 4),))),
)
# fmt: on
