"""Strategies and communication of MindSpore 2.10's planner on small networks, as one table.

Each `Case` is one row of a run of MindSpore (planning only, float32, 8 devices unless it says otherwise): what
was configured, the strategy it gives every operator, and the communication of its compiled forward graph, both
in MindSpore's own words (`a->b` local shapes before and after, `[0-1]` the ranks of one group). Rows of
bad input and repetitions are left out.

`free` names the operators of a row whose strategy is not forced by what is configured, so that another answer
of the propagation stands: MindSpore's choice there comes from a tie, from its fixed placement of cuts on devices,
from having no all-to-all, or from an operator that is several primitives in JAX.

>>> received(CASES[0].communication, 8)                   # an all-reduce of 32x64 float32 among 4: 2 V (n-1)/n
12288.0
>>> parse("d1.MatMul (2,1),(1,4); ReLU (2,4)")
{'d1.MatMul': ((2, 1), (1, 4)), 'ReLU': ((2, 4),)}
"""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jshard


Pins = Mapping[str, Any]
Operators = Mapping[str, tuple[str, int]]  # the peer's name -> (primitive, which of its occurrences)


@dataclasses.dataclass(frozen=True)
class Built:
    """A function, the shapes of its arguments ("i" before integers below a bound), and its operators' names."""

    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    operators: Operators
    integers: Mapping[int, int] = dataclasses.field(default_factory=dict)  # argument -> exclusive upper bound


@dataclasses.dataclass(frozen=True)
class Case:
    """One row; `pins` are strategies by operator (through `jshard.op`), as (in_strategy, out_strategy)."""

    number: int
    name: str
    build: Callable[..., Built]
    strategies: str
    communication: str
    pins: Pins = dataclasses.field(default_factory=dict)
    in_strategy: Any = None
    out_strategy: Any = None
    parameter_plan: Any = None
    sizes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)  # a given mesh; inferred when empty
    devices: int = 8
    free: str = ""

    def built(self) -> Built:
        """The function with its pins, and what else a test needs."""
        return self.build(self.pins, **self.sizes)

    def __str__(self) -> str:
        return f"{self.number} {self.name}"


def parse(text: str) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Operator -> strategy, from the peer's listing."""
    out = {}
    for part in text.split("; "):
        name, _, strategy = part.partition(" ")
        value = ast.literal_eval(f"({strategy.replace(')', ',)').replace('(,)', '()')},)")
        out[name] = value
    return out


def received(text: str, devices: int) -> float:
    """Bytes that a device receives in the communication of a row, by the formulas of the design."""
    total = 0.0
    for kind, group, before, after in re.findall(r"(\w+)(?:\(max\))?\[([^\]]*)\] ([\dx]*)->([\dx]*)", text):
        n = devices if group == "all" else len(group.split("-"))
        a, b = (4 * math.prod(int(s) for s in shape.split("x") if s) for shape in (before, after))
        total += {
            "AllGather": b - a,
            "AllReduce": 2 * a * (n - 1) / n,
            "ReduceScatter": a * (n - 1) / n,
            "AlltoAll": a * (n - 1) / n,
        }[kind]
    return total


def _op(pins: Pins, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    if name not in pins:
        return fn
    ins, outs = pins[name]
    return jshard.op(fn, ins, outs)


def _dense(x: Any, w: Any) -> Any:
    return x @ w


def ffn(pins: Pins, batch: int = 64, hidden: int = 64, bias: bool = True) -> Built:
    """Dense, ReLU, Dense on x (batch, 64)."""
    d1, d2, relu = _op(pins, "d1", _dense), _op(pins, "d2", _dense), _op(pins, "relu", jax.nn.relu)

    def with_bias(x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
        return d2(relu(d1(x, w1) + b1), w2) + b2

    def plain(x: Any, w1: Any, w2: Any) -> Any:
        return d2(relu(d1(x, w1)), w2)

    names = {"d1.MatMul": ("dot_general", 0), "ReLU": ("max", 0), "d2.MatMul": ("dot_general", 1)}
    if not bias:
        return Built(plain, ((batch, 64), (64, hidden), (hidden, 64)), names)
    names |= {"d1.Add": ("add", 0), "d2.Add": ("add", 1)}
    return Built(with_bias, ((batch, 64), (64, hidden), (hidden,), (hidden, 64), (64,)), names)


def block(pins: Pins) -> Built:
    """The tutorial's block: weights stored (out, in), a smooth activation between."""

    def run(x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
        h = jnp.tanh(jnp.einsum("nk,hk->nh", x, w1) + b1)
        return jnp.einsum("nk,hk->nh", h, w2) + b2

    names = {
        "d1.MatMul": ("dot_general", 0), "d1.BiasAdd": ("add", 0), "GeLU": ("tanh", 0),
        "d2.MatMul": ("dot_general", 1), "d2.BiasAdd": ("add", 1),
    }  # fmt: skip
    return Built(run, ((64, 64), (32, 64), (32,), (64, 32), (64,)), names)


def dense_relu(pins: Pins, width: int = 10) -> Built:
    """The tutorial's layer: x 32x128, w 128 x width, b."""

    def run(x: Any, w: Any, b: Any) -> Any:
        return jax.nn.relu(x @ w + b)

    names = {"MatMulExt": ("dot_general", 0), "BiasAdd": ("add", 0), "ReLU": ("max", 0)}
    return Built(run, ((32, 128), (128, width), (width,)), names)


def after_relu(
    pins: Pins, fn: Callable[..., Any], names: Operators, shape: Any = (64, 64), more: Any = ()
) -> Built:
    """A pinned ReLU of x, then `fn` of it and of further arguments."""
    relu = _op(pins, "relu", jax.nn.relu)

    def run(x: Any, *others: Any) -> Any:
        return fn(relu(x), *others)

    return Built(run, (shape, *more), {"ReLU": ("max", 0), **names})


def before_relu(
    pins: Pins, fn: Callable[..., Any], names: Operators, shapes: Any, integers: Any = None
) -> Built:
    """A pinned `fn`, then ReLU."""
    pinned = _op(pins, "fn", fn)

    def run(*args: Any) -> Any:
        return jax.nn.relu(pinned(*args))

    return Built(run, shapes, {"ReLU": ("max", 0), **names}, integers or {})


def chain(pins: Pins) -> Built:
    """sigmoid(x) + y, + z, ReLU; only the last is pinned."""
    relu = _op(pins, "relu", jax.nn.relu)

    def run(x: Any, y: Any) -> Any:
        return relu(jax.nn.sigmoid(x) + y)

    names = {"Sigmoid": ("logistic", 0), "Add": ("add", 0), "ReLU": ("max", 0)}
    return Built(run, ((64, 64), (64, 64)), names)


def diamond(pins: Pins) -> Built:
    """relu(s) + tanh(s) of s = sigmoid(x)."""
    sigmoid = _op(pins, "sigmoid", jax.nn.sigmoid)

    def run(x: Any) -> Any:
        s = sigmoid(x)
        return jax.nn.relu(s) + jnp.tanh(s)

    names = {"Sigmoid": ("logistic", 0), "ReLU": ("max", 0), "Tanh": ("tanh", 0), "Add": ("add", 0)}
    return Built(run, ((64, 64),), names)


def branches(pins: Pins) -> Built:
    """sigmoid(x) + tanh(y), both pinned, differently."""
    sigmoid, tanh = _op(pins, "sigmoid", jax.nn.sigmoid), _op(pins, "tanh", jnp.tanh)

    def run(x: Any, y: Any) -> Any:
        return sigmoid(x) + tanh(y)

    names = {"Sigmoid": ("logistic", 0), "Tanh": ("tanh", 0), "Add": ("add", 0)}
    return Built(run, ((64, 64), (64, 64)), names)


def language_model(pins: Pins) -> Built:
    """Embedding, ReLU, logits, softmax."""
    take, dot = _op(pins, "gather", lambda table, ids: table[ids]), _op(pins, "dot", _dense)

    def run(ids: Any, table: Any, w: Any) -> Any:
        return jax.nn.softmax(dot(jax.nn.relu(take(table, ids)), w))

    names = {"Gather": ("gather", 0), "ReLU": ("max", 0), "MatMul": ("dot_general", 0)}
    return Built(run, ((64,), (128, 64), (64, 128)), names, {0: 128})


def cross_entropy(pins: Pins) -> Built:
    """Logits cut along the vocabulary, then the loss of every row."""
    dot = _op(pins, "dot", _dense)

    def run(x: Any, w: Any, labels: Any) -> Any:
        return -(labels * jax.nn.log_softmax(dot(x, w))).sum(-1)

    return Built(run, ((64, 64), (64, 128), (64, 128)), {"MatMul": ("dot_general", 0)})


def _take(table: Any, ids: Any) -> Any:
    return table[ids]


def _conv(x: Any, w: Any) -> Any:
    return jax.lax.conv(x, w, (1, 1), "SAME")


def _attention(q: Any, k: Any) -> Any:
    return jnp.einsum("bhqd,bhkd->bhqk", q, k)


def _batch_softmax(pins: Pins) -> Built:
    dot = _op(pins, "fn", _attention)

    def run(q: Any, k: Any) -> Any:
        return jax.nn.softmax(dot(q, k))

    return Built(run, ((4, 8, 16, 64), (4, 8, 16, 64)), {"BatchMatMul": ("dot_general", 0)})


def _norm(x: Any, scale: Any, bias: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * scale + bias


def _relu_then(
    fn: Callable[..., Any], names: Operators | None = None, shape: Any = (64, 64), more: Any = ()
) -> Any:
    return dict(build=after_relu, sizes=dict(fn=fn, names=names or {}, shape=shape, more=more))


def _relu_pin(*cuts: int) -> dict[str, Any]:
    return {"relu": ((cuts,), None)}


COLUMN = {"d1": (((2, 1), (1, 4)), None)}
FFN_2X4 = "d1.MatMul (2,1),(1,4); d1.Add (2,4),(4); ReLU (2,4); d2.MatMul (2,4),(4,1); d2.Add (2,1),(1)"
FFN_1X8 = "d1.MatMul (1,1),(1,8); d1.Add (1,8),(8); ReLU (1,8); d2.MatMul (1,8),(8,1); d2.Add (1,1),(1)"
FFN_DP8 = "d1.MatMul (8,1),(1,1); d1.Add (8,1),(1); ReLU (8,1); d2.MatMul (8,1),(1,1); d2.Add (8,1),(1)"
FFN_DP4 = "d1.MatMul (4,1),(1,1); d1.Add (4,1),(1); ReLU (4,1); d2.MatMul (4,1),(1,2); d2.Add (4,2),(2)"
REDUCE_2X4 = "AllReduce[0-1-2-3] 32x64->32x64"
REDUCE_ALL = "AllReduce[all] 64x64->64x64"
GATHER_4 = "AllGather[0-1-2-3] 32x16->128x16"
EVERY_FFN = "d1.MatMul d1.Add ReLU d2.MatMul d2.Add"

CASES = (
    Case(1, "seed 2x4 column", ffn, FFN_2X4, REDUCE_2X4, COLUMN),
    Case(2, "full batch", ffn, FFN_1X8, REDUCE_ALL, in_strategy=((1, 1), None, None, None, None)),
    Case(4, "first dp8", ffn, FFN_DP8, "none", {"d1": (((8, 1), (1, 1)), None)}),
    Case(5, "first column 8", ffn, FFN_1X8, REDUCE_ALL, {"d1": (((1, 1), (1, 8)), None)}),
    Case(7, "first 2x4 row", ffn,
         "d1.MatMul (2,4),(4,1); d1.Add (2,1),(1); ReLU (2,1); d2.MatMul (2,1),(1,4); d2.Add (2,4),(4)",
         REDUCE_2X4, {"d1": (((2, 4), (4, 1)), None)}),
    # Placement: on the peer's devices (2,2) after this product would be a gather, so it cuts further.
    Case(8, "first 2x2x2", ffn,
         "d1.MatMul (2,2),(2,2); d1.Add (4,2),(2); ReLU (4,2); d2.MatMul (4,2),(2,1); d2.Add (4,1),(1)",
         "AllReduce[0-2] 32x32->32x32; AllReduce[0-1] 16x64->16x64",
         {"d1": (((2, 2), (2, 2)), None)}, free="d1.Add ReLU d2.MatMul d2.Add"),
    Case(10, "first all ones", ffn,
         "d1.MatMul (1,1),(1,1); d1.Add (1,1),(1); ReLU (1,1); d2.MatMul (1,1),(1,8); d2.Add (1,8),(8)",
         "none", {"d1": (((1, 1), (1, 1)), None)}),
    Case(11, "second 2x4 row only", ffn, FFN_2X4, REDUCE_2X4, {"d2": (((2, 4), (4, 1)), None)}),
    Case(13, "relu 2x4 only", ffn, FFN_2X4, REDUCE_2X4, _relu_pin(2, 4)),
    Case(14, "relu 8x1 only", ffn, FFN_DP8, "none", _relu_pin(8, 1)),
    Case(16, "dp8 then column 8", ffn,
         "d1.MatMul (8,1),(1,1); d1.Add (8,1),(1); ReLU (8,1); d2.MatMul (1,1),(1,8); d2.Add (1,8),(8)",
         "AllGather[all] 8x64->64x64",
         {"d1": (((8, 1), (1, 1)), None), "d2": (((1, 1), (1, 8)), None)}),
    Case(17, "column 8 then dp8", ffn,
         "d1.MatMul (1,1),(1,8); d1.Add (1,8),(8); ReLU (1,8); d2.MatMul (8,1),(1,1); d2.Add (8,1),(1)",
         "AllGather[all] 64x8->512x8",
         {"d1": (((1, 1), (1, 8)), None), "d2": (((8, 1), (1, 1)), None)}),
    Case(19, "64-256-64 seed", ffn, FFN_2X4, REDUCE_2X4, COLUMN, sizes={"hidden": 256}),
    Case(20, "seed, data parallel", ffn, FFN_2X4, f"AllGather[0-1-2-3] 8x64->32x64; {REDUCE_2X4}", COLUMN,
         in_strategy=((8, 1), None, None, None, None)),
    Case(22, "seed 16 devices 2x8", ffn,
         "d1.MatMul (2,1),(1,8); d1.Add (2,8),(8); ReLU (2,8); d2.MatMul (2,8),(8,1); d2.Add (2,1),(1)",
         "AllReduce[all] 32x64->32x64", {"d1": (((2, 1), (1, 8)), None)}, devices=16),
    # Nothing is configured: the peer's own searches, whose answers are ties.
    Case(23, "dynamic programming", ffn, FFN_DP4, "none", free=EVERY_FFN),
    Case(25, "batch 512, dynamic programming", ffn, FFN_DP4, "none", sizes={"batch": 512}, free=EVERY_FFN),
    Case(26, "batch 512, recursive programming", ffn, FFN_DP8, "none", sizes={"batch": 512}),
    Case(27, "shard in 2x1", ffn, FFN_2X4, REDUCE_2X4, in_strategy=((2, 1), None, None, None, None),
         axes={"x": 2, "y": 4}),
    Case(28, "shard in 8x1", ffn, FFN_DP8, "none", in_strategy=((8, 1), None, None, None, None)),
    Case(29, "shard in 1x8", ffn,
         "d1.MatMul (1,8),(8,1); d1.Add (1,1),(1); ReLU (1,1); d2.MatMul (1,1),(1,8); d2.Add (1,8),(8)",
         REDUCE_ALL, in_strategy=((1, 8), None, None, None, None)),
    Case(31, "shard in 1x1", ffn, FFN_1X8, REDUCE_ALL, in_strategy=((1, 1), None, None, None, None)),
    Case(32, "tutorial block1, plan w2 8x1", block,
         "d1.MatMul (1,8),(1,8); d1.BiasAdd (1,1),(1); GeLU (1,1); d2.MatMul (1,1),(8,1); d2.BiasAdd (1,8),(8)",
         "AllReduce[all] 64x32->64x32", in_strategy=((1, 8), None, None, None, None),
         parameter_plan={"w2": (8, 1)}),
    Case(34, "tutorial block2", block,
         "d1.MatMul (1,8),(1,8); d1.BiasAdd (1,1),(1); GeLU (1,1); d2.MatMul (1,1),(8,1); d2.BiasAdd (1,8),(8)",
         "AllReduce[all] 64x32->64x32", in_strategy=((1, 8), None, None, None, None)),
    Case(35, "dense_relu, w 8x1", dense_relu, "MatMulExt (4,2),(2,1); BiasAdd (4,1),(1); ReLU (4,1)",
         "AllGather[0-1] 16x10->32x10; AllGather[0-2-4-6] 1x32x10->4x32x10; AllReduce[0-1] 8x10->8x10",
         in_strategy=((4, 2), (8, 1), (1,))),
    Case(36, "dense_relu by hand", dense_relu, "MatMulExt (4,2),(2,1); BiasAdd (4,1),(1); ReLU (4,1)",
         "AllGather[0-4] 64x10->128x10; AllReduce[0-1] 8x10->8x10", in_strategy=((4, 2), (2, 1), (1,))),
    Case(37, "layout in, plan w1", ffn, FFN_2X4, REDUCE_2X4, in_strategy=(P("dp", None), None, None, None, None),
         parameter_plan={"w1": P(None, "tp")}, axes={"dp": 2, "tp": 4}),
    Case(38, "layout in, plan w1 w2", ffn, FFN_2X4, REDUCE_2X4, in_strategy=(P("dp", None), None, None, None, None),
         parameter_plan={"w1": P(None, "tp"), "w2": P("tp", None)}, axes={"dp": 2, "tp": 4}),
    # The peer lets x come data parallel; here x is derived, and the same cuts fit together.
    Case(39, "plan w1 1x4 w2 4x1", ffn,
         "d1.MatMul (8,1),(1,1); d1.Add (8,1),(1); ReLU (8,1); d2.MatMul (1,4),(4,1); d2.Add (1,1),(1)",
         "AllGather[0-2-4-6] 64x16->256x16; AllGather[0-1] 8x64->16x64; AllGather[0-2-4-6] 1x16x64->4x16x64; "
         "AllReduce[0-2-4-6] 64x64->64x64",
         parameter_plan={"w1": (1, 4), "w2": (4, 1)}, free=EVERY_FFN),
    # A tie between gathering x and gathering w1.
    Case(40, "in 8x1 plan w1 1x8", ffn, FFN_1X8, f"AllGather[all] 8x64->64x64; {REDUCE_ALL}",
         in_strategy=((8, 1), None, None, None, None), parameter_plan={"w1": (1, 8)}, free=EVERY_FFN),
    Case(41, "Cell.shard in 8x1", ffn, FFN_DP8, "none", in_strategy=((8, 1), None, None, None, None)),
    # With all-to-all, moving h costs less than gathering w2.
    Case(43, "plan self.inner w2 8x1", ffn, FFN_DP8, "AllGather[all] 8x64->64x64",
         in_strategy=((8, 1), None, None, None, None), parameter_plan={"self.w2": (8, 1)}, free="d2.MatMul d2.Add"),
    Case(44, "in 1x8 plan w2 8x1", ffn,
         "d1.MatMul (1,8),(8,1); d1.Add (1,1),(1); ReLU (1,1); d2.MatMul (1,8),(8,1); d2.Add (1,1),(1)",
         f"{REDUCE_ALL}; {REDUCE_ALL}", in_strategy=((1, 8), None, None, None, None), parameter_plan={"w2": (8, 1)}),
    Case(46, "out 2x1 in 2x4", ffn, "d1.MatMul (2,4),(4,1); ReLU (2,1); d2.MatMul (2,1),(1,1)", REDUCE_2X4,
         in_strategy=((2, 4), None, None), out_strategy=(2, 1), sizes={"bias": False}),
    Case(49, "fn dense_relu 16", dense_relu, "MatMulExt (4,2),(2,1); BiasAdd (4,1),(1); ReLU (4,1)",
         "AllGather[0-4] 64x16->128x16; AllReduce[0-1] 8x16->8x16", in_strategy=((4, 2), (2, 1), (1,)),
         sizes={"width": 16}),
    # Placement: the peer's cut of w lies on devices where the product cannot use it.
    Case(50, "fn dense_relu 16, w 1x2", dense_relu, "MatMulExt (4,1),(1,1); BiasAdd (4,1),(1); ReLU (4,1)",
         "AllGather[0-4] 128x8->256x8; AllGather[0-4] 8->16", in_strategy=((4, 1), (1, 2), (2,)),
         sizes={"width": 16}, free="MatMulExt BiasAdd ReLU"),
    Case(52, "not divisible free op", strategies="ReLU (4,1); ReduceSum (4,1)",
         communication="AllReduce[0-2-4-6] ->", pins=_relu_pin(4, 1),
         **_relu_then(jnp.sum, {"ReduceSum": ("reduce_sum", 0)}, (12, 10))),
    Case(53, "transpose", strategies="ReLU (2,4); Transpose (2,4)", communication="none", pins=_relu_pin(2, 4),
         **_relu_then(jnp.transpose, {"Transpose": ("transpose", 0)})),
    Case(55, "reshape 64x64->8x8x64", strategies="ReLU (8,1); Sigmoid (8,1,1)", communication="none",
         pins=_relu_pin(8, 1),
         **_relu_then(lambda x: jax.nn.sigmoid(x.reshape(8, 8, 64)), {"Sigmoid": ("logistic", 0)})),
    Case(56, "reshape 64x64->64x8x8", strategies="ReLU (2,4); Sigmoid (2,4,1)", communication="none",
         pins=_relu_pin(2, 4),
         **_relu_then(lambda x: jax.nn.sigmoid(x.reshape(64, 8, 8)), {"Sigmoid": ("logistic", 0)})),
    Case(58, "reducesum axis 0", strategies="ReLU (2,4); ReduceSum (2,4)", communication="AllReduce[0-4] 16->16",
         pins=_relu_pin(2, 4), **_relu_then(lambda x: x.sum(0), {"ReduceSum": ("reduce_sum", 0)})),
    Case(59, "reducesum axis 1", strategies="ReLU (2,4); ReduceSum (2,4)",
         communication="AllReduce[0-1-2-3] 32->32", pins=_relu_pin(2, 4),
         **_relu_then(lambda x: x.sum(1), {"ReduceSum": ("reduce_sum", 0)})),
    Case(61, "reducemax axis 1", strategies="ReLU (2,4); ReduceMax (2,4)",
         communication="AllReduce(max)[0-1-2-3] 32->32", pins=_relu_pin(2, 4),
         **_relu_then(lambda x: x.max(1), {"ReduceMax": ("reduce_max", 0)})),
    Case(62, "softmax", strategies="ReLU (2,4); Softmax (2,1)", communication=GATHER_4, pins=_relu_pin(2, 4),
         free="Softmax", **_relu_then(jax.nn.softmax)),
    Case(64, "layernorm", strategies="ReLU (2,4); LayerNorm (2,1),(1),(1)", communication=GATHER_4,
         pins=_relu_pin(2, 4), free="LayerNorm", **_relu_then(_norm, more=((64,), (64,)))),
    # With all-to-all, (8,1) is nearer than (2,1).
    Case(65, "concat axis 1", strategies="ReLU (2,4); Concat (2,1),(2,1)", communication=GATHER_4,
         pins=_relu_pin(2, 4), free="Concat",
         **_relu_then(lambda x, y: jnp.concatenate([x, y], 1), {"Concat": ("concatenate", 0)}, more=((64, 64),))),
    # The peer's vocabulary-cut lookup scatters its sum by itself.
    Case(67, "gather vocab split", before_relu, "Gather (8,1),(1,1); ReLU (8,1,1)",
         "ReduceScatter[all] 16x8x64->2x8x64", {"fn": (((8, 1), (1, 1)), None)}, free="Gather ReLU",
         sizes=dict(fn=_take, names={"Gather": ("gather", 0)}, shapes=((64, 64), (16, 8)), integers={1: 64})),
    Case(68, "gather hidden split", before_relu, "Gather (1,8),(1,1); ReLU (1,1,8)", "none",
         {"fn": (((1, 8), (1, 1)), None)}, free="Gather",
         sizes=dict(fn=_take, names={"Gather": ("gather", 0)}, shapes=((64, 64), (16, 8)), integers={1: 64})),
    Case(70, "broadcast add", strategies="ReLU (2,4); Add (2,4),(4)", communication="none", pins=_relu_pin(2, 4),
         **_relu_then(lambda x, b: x + b, {"Add": ("add", 0)}, more=((64,),))),
    Case(71, "broadcast mul", strategies="ReLU (2,4); Mul (2,4),(2,1)", communication="none", pins=_relu_pin(2, 4),
         **_relu_then(lambda x, b: x * b, {"Mul": ("mul", 0)}, more=((64, 1),))),
    Case(73, "batchmatmul contracted split", strategies="BatchMatMul (2,1,1,4),(2,1,1,4); Softmax (2,1,1,1)",
         communication="AllReduce[0-1-2-3] 2x8x16x16->2x8x16x16", build=_batch_softmax,
         pins={"fn": (((2, 1, 1, 4), (2, 1, 1, 4)), None)}, free="Softmax"),
    Case(74, "matmul out_strategy reduce-scatter", before_relu, "MatMul (2,4),(4,1); ReLU (8,1)",
         "ReduceScatter[0-1-2-3] 32x64->8x64", {"fn": (((2, 4), (4, 1)), (8, 1))},
         sizes=dict(fn=_dense, names={"MatMul": ("dot_general", 0)}, shapes=((64, 64), (64, 64)))),
    Case(76, "matmul transpose_b", before_relu, "MatMul (2,1),(4,1); ReLU (2,4)", "none",
         {"fn": (((2, 1), (4, 1)), None)},
         sizes=dict(fn=lambda x, w: jnp.einsum("nk,hk->nh", x, w), names={"MatMul": ("dot_general", 0)},
                    shapes=((64, 64), (64, 64)))),
    Case(77, "chain from the end", chain, "Sigmoid (4,2); Add (4,2),(4,2); ReLU (4,2)", "none", _relu_pin(4, 2)),
    Case(79, "diamond", diamond, "Sigmoid (2,4); ReLU (2,4); Tanh (2,4); Add (2,4),(2,4)", "none",
         {"sigmoid": (((2, 4),), None)}),
    # A tie between moving one branch and the other.
    Case(80, "branches disagree", branches, "Sigmoid (8,1); Tanh (1,8); Add (1,8),(1,8)", "AllGather[all] 8x64->64x64",
         {"sigmoid": (((8, 1),), None), "tanh": (((1, 8),), None)}, free="Add"),
    Case(82, "embedding lm", language_model, "Gather (1,1),(8); ReLU (8,1); MatMul (1,1),(1,8); Softmax (4,1)",
         "AllGather[all] 8x64->64x64; AllGather[0-1] 64x1x16->128x1x16; AllGather[0-2-4-6] 64x1x32->256x1x32",
         {"gather": (((1, 1), (8,)), None), "dot": (((1, 1), (1, 8)), None)}, free="Gather Softmax"),
    Case(83, "softmax, all-to-all on", strategies="ReLU (1,8); Softmax (8,1)", communication="AlltoAll[all] 64x8->8x64",
         pins=_relu_pin(1, 8), free="Softmax", **_relu_then(jax.nn.softmax)),
    Case(85, "conv out channels", before_relu, "Conv2D (2,1,1,1),(4,1,1,1); ReLU (2,4,1,1)", "none",
         {"fn": (((2, 1, 1, 1), (4, 1, 1, 1)), None)},
         sizes=dict(fn=_conv, names={"Conv2D": ("conv_general_dilated", 0)}, shapes=((8, 4, 8, 8), (16, 4, 3, 3)))),
    Case(86, "cross entropy after vocab split", cross_entropy,
         "MatMul (2,1),(1,4); SoftmaxCrossEntropyWithLogits (2,1),(2,1)", "AllGather[0-1-2-3] 32x32->128x32",
         {"dot": (((2, 1), (1, 4)), None)}, free="SoftmaxCrossEntropyWithLogits"),
)  # fmt: skip
"""The rows in scope; 47 is row 27 with a warning that the tests of bad input see."""
