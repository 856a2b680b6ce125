"""From strategies to pins: every form of entry, every kind of container, names of parameters."""

from __future__ import annotations

import dataclasses
import math
import warnings

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P

from jshard._core.errors import ShardError, StrategyError
from jshard._core.layout import Layout, MeshAxes
from jshard._spec.entry import Pin, parse_entry, satisfies
from jshard._spec.options import parse_bytes
from jshard._spec.parameter_plan import specificity
from jshard._spec.strategies import pins_for_inputs, pins_for_outputs, without_static
from jshard._spec.tree_paths import argument_names, input_leaves, key_name, one_level, path_name


def S(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Block:
    kernel: object
    bias: object


def texts(pins) -> list[str]:
    return [str(p) for p in pins]


def inputs(args, in_strategy, plan=None, *, names=None, kwargs=None, strict=False):
    names = names or [f"a{i}" for i in range(len(args))]
    return pins_for_inputs(args, kwargs or {}, in_strategy, plan, names=names, strict=strict)


# Entries


def test_forms_of_one_entry():
    assert parse_entry(None, (4,), "w") is None
    assert parse_entry((4, 2), (8, 8), "w") == Pin((4, 2), None, "w")
    assert parse_entry((np.int64(4), None), (8, 8), "w") == Pin((4, None), None, "w")
    assert parse_entry((), (), "w") == Pin((), None, "w")
    assert parse_entry((None,), (8,), "w") == Pin((None,), None, "w")
    assert parse_entry(P("x"), (8, 8), "w") == Pin((None, 1), (("x",), ()), "w")
    assert parse_entry(P(("x", "y"), P.UNCONSTRAINED), (8, 8), "w") == Pin(
        (None, None), (("x", "y"), None), "w"
    )
    # A dimension of no elements is cut by anything.
    assert parse_entry((3,), (0,), "w") == Pin((3,), None, "w")


def test_spec_without_axes_is_the_strategy_of_ones():
    whole = parse_entry(P(None, None), (8, 8), "spec")
    assert whole is not None and whole.same_constraint(Pin((1, 1), None, "elsewhere"))
    assert parse_entry(P(), (), "spec") == Pin((), None, "spec")
    assert parse_entry(P(None, P.UNCONSTRAINED), (8, 8), "spec") == Pin((1, None), None, "spec")


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(1, 24), st.integers(1, 24)), max_size=4))
def test_a_strategy_is_taken_exactly_when_it_divides(pairs):
    shape, cuts = tuple(s for s, _ in pairs), tuple(c for _, c in pairs)
    devices = math.prod(cuts)
    # How many devices there are is not known yet.
    assert parse_entry(cuts, shape, "w") == Pin(cuts, None, "w")
    if all(s % c == 0 for s, c in pairs):
        pin = parse_entry(cuts, shape, "w", devices)
        assert pin == Pin(cuts, None, "w")
        axes = MeshAxes(tuple(f"m{i}" for i in range(len(cuts))), cuts)
        assert satisfies(pin, Layout(tuple((n,) for n in axes.names)), axes)
    else:
        with pytest.raises(StrategyError, match="does not divide dimension"):
            parse_entry(cuts, shape, "w", devices)


odd = [P("x"), P(None), P(3), P("x", "x"), np.float32(2), np.int8(2), object, S(2), None, True, b"x", 0.5]
names = st.sampled_from(["a", "w1", "x", 0, "*", "**.b"])
junk = st.recursive(
    st.integers(-3, 40) | st.text(max_size=3) | st.sampled_from(odd),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(names, inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=300)
@given(junk, junk, junk, st.booleans())
def test_nothing_but_shard_errors(in_strategy, out_strategy, plan, strict):
    args = ({"w1": S(8, 8), "b": [S(8), None]}, S(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for attempt in (
            lambda: inputs(args, in_strategy, plan, names=("params", "x"), strict=strict),
            lambda: pins_for_outputs(args, out_strategy),
            lambda: pins_for_outputs(S(4, 4), out_strategy),
            lambda: parse_bytes(plan),
        ):
            try:
                attempt()
            except ShardError as error:
                assert error.what and error.where and error.fix


# Arguments


def test_flat_order_is_that_of_jax():
    args = ({"z": S(2, 2), "a": S(4)}, None, (S(6), [S(8), None]), Block(S(3), S(5)))
    kwargs = {"q": S(7), "k": {"y": S(9), "x": S(1)}}
    leaves = input_leaves(args, kwargs, ["d", "n", "t", "b"])
    assert [leaf.shape for leaf in leaves] == [x.shape for x in jax.tree.leaves((args, kwargs))]
    assert [leaf.path for leaf in leaves] == [
        "d.a", "d.z", "t.0", "t.1.0", "b.kernel", "b.bias", "k.x", "k.y", "q"]  # fmt: skip
    assert [leaf.argument for leaf in leaves] == ["d", "d", "t", "t", "b", "b", "k", "k", "q"]
    # Each leaf gets the entry that stands at its place.
    wish = {
        "d": {"z": (2, 1)},
        "t": (None, [(8,), None]),
        "b": Block((3,), None),
        "k": {"x": (1,)},
        "q": (7,),
    }
    assert texts(pins_for_inputs(args, kwargs, wish, names=["d", "n", "t", "b"])) == [
        "None", "(2, 1)", "None", "(8,)", "(3,)", "None", "(1,)", "None", "(7,)"]  # fmt: skip


def test_one_entry_for_a_whole_argument():
    tree = {"w": S(4, 4), "u": (S(8, 2), None)}
    pins = inputs((tree, S(4)), ((2, 1), None), names=("params", "x"))
    assert texts(pins) == ["(2, 1)", "(2, 1)", "None"]
    assert [p.where for p in pins[:2]] == [
        "in_strategy[0] (argument params.u.0)", "in_strategy[0] (argument params.w)"]  # fmt: skip
    assert texts(inputs((tree, S(4)), (P(), None))) == ["(1, 1)", "(1, 1)", "None"]
    # A tuple of ints is a strategy even where the argument is a tuple of as many parts.
    assert texts(inputs(((S(4, 4), S(8, 4)),), ((4, 2),))) == ["(4, 2)", "(4, 2)"]
    assert texts(inputs(((S(4), S(8)),), (((4,), (2,)),))) == ["(4,)", "(2,)"]
    assert texts(inputs((((), {}),), ((4, 2),))) == []


def test_dataclasses_by_name_and_by_position():
    args = (Block(S(4, 4), S(4)),)
    for entry in ({"kernel": (2, 2)}, [(2, 2), None], ((2, 2), None), Block((2, 2), None)):
        assert texts(inputs(args, (entry,))) == ["(2, 2)", "None"]
    (pin, _) = inputs(args, ({"kernel": (2, 2)},), names=["block"])
    assert pin.where == "in_strategy[0]['kernel'] (argument block.kernel)"


def test_arguments_by_position_reach_keywords_and_skip_defaults():
    x, w = S(4, 4), S(8, 8)
    names = argument_names(lambda x, w, b=None, *, k=None: x, 1)
    assert names == ("x", "w", "b")
    assert texts(inputs((x,), ((2, 1), (4, 1)), names=names, kwargs={"w": w})) == ["(2, 1)", "(4, 1)"]
    assert texts(inputs((x, w), ((2, 1), None, (9,)), names=names)) == ["(2, 1)", "None"]
    assert texts(inputs((x, w), {"b": (9,), "x": (1, 4)}, names=names)) == ["(1, 4)", "None"]
    assert texts(inputs((x,), ((2, 1),), names=names, kwargs={"k": w})) == ["(2, 1)", "None"]
    assert argument_names(lambda x, *rest, k: x, 3) == ("x", "rest.0", "rest.1")
    assert argument_names(object(), 2) == ("arg0", "arg1")  # type: ignore[arg-type]


def test_static_arguments_take_no_entry():
    names = ("x", "config", "w")
    assert without_static(((4, 2), (2,)), names, ("config",)) == ((4, 2), (2,))
    assert without_static(((4, 2), None, (2,)), names, ("config",)) == ((4, 2), (2,))
    assert without_static({"x": (4,), "config": None}, names, ("config",)) == {"x": (4,)}
    for bad in (((4, 2), (1,), None), {"config": (1,)}):
        with pytest.raises(StrategyError, match="argument config is static"):
            without_static(bad, names, ("config",))


# Results


def test_out_strategies():
    y, loss = S(32, 10), S()
    assert texts(pins_for_outputs((y, loss), "full_batch")) == ["(1, 1)", "()"]
    assert texts(pins_for_outputs((y, loss), "data_parallel")) == ["(every device, 1)", "()"]
    assert texts(pins_for_outputs((y, loss), None)) == ["None", "None"]
    assert texts(pins_for_outputs({"y": y, "loss": loss}, {"y": (4, 2)})) == ["None", "(4, 2)"]
    assert texts(pins_for_outputs(((y, y), loss), ((2, 1), ()))) == ["(2, 1)", "(2, 1)", "()"]
    for single in ((4, 2), ((4, 2),), [(4, 2)]):
        assert texts(pins_for_outputs(y, single)) == ["(4, 2)"]
    assert texts(pins_for_outputs(y, P("x"))) == texts(pins_for_outputs(y, (P("x"),))) == ["P('x', None)"]
    assert texts(pins_for_outputs(y, (None,))) == ["None"]
    assert texts(pins_for_outputs(S(8), (None,))) == ["None"]
    assert texts(pins_for_outputs((y,), (4, 2))) == texts(pins_for_outputs((y,), ((4, 2),))) == ["(4, 2)"]
    assert texts(pins_for_outputs(loss, ())) == texts(pins_for_outputs(loss, ((),))) == ["()"]
    (pin,) = pins_for_outputs(y, "full_batch")
    assert pin.where == "out_strategy='full_batch' (the result)"
    assert (
        pins_for_outputs((y, {"a": y}), (None, {"a": (2, 1)}))[1].where == "out_strategy[1]['a'] (result 1.a)"
    )


# Parameter names


LINEN = {"params": {"block1": {"dense2": {"kernel": S(8, 8), "bias": S(8)}}, "dense": {"kernel": S(8, 8)}}}


@pytest.mark.parametrize(
    "name",
    [
        "block1.dense2.kernel",
        "self.block1.dense2.kernel",
        "self.block1.self.dense2.kernel",
        "block1/dense2/kernel",
        "params.block1.dense2.kernel",
        "variables.params.block1.dense2.kernel",
        "variables/params/block1/dense2/kernel",
        "block1.dense2.kernel.value",
        "dense2.kernel",
        "block1.*.kernel",
        "block?.dense[12].kernel",
        "**.dense2.kernel",
        "block1.**.kernel",
        "**.block1.**.dense2.kernel",
        "dense?.kernel",
    ],
)
def test_ways_to_name_one_parameter(name):
    pins = inputs((LINEN, S(4, 8)), None, {name: (1, 8)}, names=("variables", "x"))
    assert texts(pins) == ["None", "(1, 8)", "None", "None"]
    assert pins[1].where == f"parameter_plan[{name!r}] (argument variables.params.block1.dense2.kernel)"


def test_a_whole_name_comes_before_the_end_of_a_longer_one():
    state = {"params": {"w": S(8, 8)}, "mu": {"w": S(8, 8)}}
    assert texts(inputs((state,), None, {"w": (8, 1)}, names=("state",))) == ["None", "(8, 1)"]
    # Where no name fits as a whole, all that end so are meant.
    assert texts(inputs(({"nu": state},), None, {"w": (8, 1)}, names=("s",))) == ["(8, 1)", "(8, 1)"]
    # The same parameter in two arguments: both.
    assert texts(inputs(({"w": S(8, 8)}, {"w": S(8, 8)}), None, {"w": (8, 1)})) == ["(8, 1)", "(8, 1)"]


def test_most_specific_name_wins():
    tree = {"blocks": [{"k": S(8, 8)} for _ in range(3)], "head": {"k": S(8, 8)}}
    plan = {
        "**.k": (1, 1),
        "blocks.*.k": (2, 1),
        "blocks.1.k": (4, 1),
        "model.blocks.2.k": (8, 1),
        "blocks.2.k": (1, 2),
    }
    for order in (plan, dict(reversed(plan.items()))):
        assert texts(inputs((tree,), None, order, names=("model",))) == [
            "(2, 1)",
            "(4, 1)",
            "(8, 1)",
            "(1, 1)",
        ]
    ranked = ["model.blocks.2.k", "blocks.2.k", "blocks.*.k", "*.*.k", "**.blocks.k", "**.k", "**"]
    assert sorted(ranked, key=specificity, reverse=True) == ranked


def test_nested_plans_and_derived_entries():
    plan = {"block1": {"dense2": {"kernel": (1, 8)}}, "dense": {"kernel": None}}
    assert texts(inputs((LINEN,), None, plan, names=("variables",), strict=True)) == [
        "None",
        "(1, 8)",
        "None",
    ]


def test_in_strategy_and_parameter_plan_may_agree():
    args = ({"w": S(8, 8)}, S(8, 8))
    same = inputs(args, ({"w": (2, 4)}, None), {"w": (2, 4)}, names=("p", "x"))
    assert texts(same) == ["(2, 4)", "None"]
    assert texts(inputs(args, ({"w": P()}, None), {"w": (1, 1)}, names=("p", "x"))) == ["(1, 1)", "None"]
    assert texts(inputs(args, (None, (2, 1)), {"w": (2, 4)}, names=("p", "x"))) == ["(2, 4)", "(2, 1)"]


def test_unknown_names_are_one_warning():
    plan = {"block1.dense3.kernel": (1, 8), "zzz": (8,), "dense.kernel": (8, 1)}
    with pytest.warns(UserWarning) as caught:
        pins = inputs((LINEN, S(4)), None, plan, names=("variables", "x"))
    assert texts(pins) == ["None", "None", "(8, 1)", "None"]
    assert [str(w.message) for w in caught] == [
        "parameter_plan names no tensor of the arguments: 'block1.dense3.kernel' (nearest: "
        "variables.params.block1.dense2.kernel, variables.params.dense.kernel); 'zzz' (none is near; there "
        "are variables.params.block1.dense2.bias, variables.params.block1.dense2.kernel, "
        "variables.params.dense.kernel)"
    ]


def test_plan_of_many_names_over_many_leaves():
    # 200 x 2000 of the pairs are compared only where a name is a glob; the rest is looked up.
    tree = {f"layer{i}": {"kernel": S(8, 8), "bias": S(8)} for i in range(1000)}
    plan = {f"layer{i}.kernel": (2, 4) for i in range(200)} | {"*.bias": (8,)}
    pins = inputs((tree,), None, plan, names=("params",))
    assert sum(p is not None for p in pins) == 1200


# Flax


def test_names_of_flax_modules():
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.block1 = nnx.List([nnx.Linear(8, 8, rngs=rngs)])
            self.head = nnx.Linear(8, 8, rngs=rngs)

    net = Net(nnx.Rngs(0))
    paths = ["block1.0.bias", "block1.0.kernel", "head.bias", "head.kernel"]
    for tree in (net, nnx.state(net), nnx.to_pure_dict(nnx.state(net))):
        assert [leaf.path for leaf in input_leaves((tree,), {}, ["m"])] == [f"m.{p}" for p in paths]
        pins = inputs(
            (tree,), None, {"self.head.kernel": (1, 8), "block1.*.bias": (2,)}, names=["m"], strict=True
        )
        assert texts(pins) == ["(2,)", "None", "None", "(1, 8)"]
        assert texts(inputs((tree,), ({"head": {"kernel": (8, 1)}},))) == ["None", "None", "None", "(8, 1)"]
    (pin,) = inputs((net.head.kernel,), ((8, 1),), {"w": (8, 1)}, names=["w"])
    assert pin.where == "in_strategy[0] (argument w)"


def test_a_dict_key_named_value_is_a_name():
    attention = {"query": S(8), "value": S(8)}
    assert [leaf.path for leaf in input_leaves((attention,), {}, ["p"])] == ["p.query", "p.value"]
    assert texts(inputs((attention,), None, {"value": (8,)}, names=["p"], strict=True)) == ["None", "(8,)"]


def test_children_are_one_level_of_flattening():
    for tree in ({"b": (1, None), "a": [2, {"c": 3}]}, Block(Block(1, 2), None), (((), {}), 4), None, 5, ()):
        below = one_level(tree)
        leaves = [x for _, child in below for x in jax.tree.leaves(child)]
        assert leaves == ([] if tree == 5 else jax.tree.leaves(tree))
    assert [key_name(k) for k, _ in one_level(Block(1, None))] == ["kernel", "bias"]
    assert path_name(()) == ""


# Options


@pytest.mark.parametrize(
    "text, count",
    [
        ("14GiB", 14 * 2**30), ("14 gib", 14 * 2**30), ("500MB", 500_000_000), ("1.5e9", 1_500_000_000),
        ("80G", 80 * 10**9), ("16Gi", 16 * 2**30), (".5KiB", 512),
        ("1_000", 1000), (" 7 B ", 7), (1e9, 10**9), (np.int64(5), 5), (12, 12), ("2TB", 2 * 10**12),
    ],
)  # fmt: skip
def test_amounts_of_memory(text, count):
    assert parse_bytes(text) == count
