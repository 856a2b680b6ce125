"""Five steps under `jshard.shard` leave the state that they leave under `nnx.jit`, whatever object holds it.

Every number here is a multiple of a small power of two, so that sums are exact in any order, and the losses and
final states are compared bit by bit; so are the structures, in which shared references show.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct
from jax.sharding import AxisType, Mesh

import jshard


MESH = Mesh(np.array(jax.devices()[:2]), ("x",), axis_types=(AxisType.Auto,))
BATCHES = [jnp.asarray(np.random.default_rng(s).integers(-4, 5, (8, 4)), jnp.float32) for s in range(5)]


class Seen(nnx.Variable):
    """A kind of state of the test's own."""


class Net(nnx.Module):
    """A layer, a random stream, of which calls are counted, and a statistic."""

    def __init__(self, rngs: nnx.Rngs):
        self.layer = nnx.Linear(4, 4, rngs=rngs, kernel_init=dyadic, bias_init=dyadic)
        self.noise = nnx.RngStream(1, tag="noise")
        self.seen = Seen(jnp.zeros((4,)))

    def __call__(self, x):
        self.seen[...] += x.sum(0)
        self.noise.count[...] += 1
        return self.layer(x)


def dyadic(key, shape, dtype=jnp.float32, out_sharding=None):
    return jax.random.randint(key, shape, -8, 9).astype(dtype) / 8


def loss(model, x):
    return model(x).mean()


def train(model, optimizer, x):
    value, grads = nnx.value_and_grad(loss)(model, x)
    optimizer.update(model, grads)
    return value


TX = optax.sgd(0.25, momentum=0.5)


def pair():
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    model: Any
    optimizer: Any


@struct.dataclass
class Struct:
    model: Any
    optimizer: Any


class Named(NamedTuple):
    model: Any
    optimizer: Any


@jax.tree_util.register_pytree_node_class
class Own:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def tree_flatten(self):
        return (self.model, self.optimizer), None

    @classmethod
    def tree_unflatten(cls, _, parts):
        return cls(*parts)


class TrainState(nnx.Pytree):
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer


class Holder(nnx.Module):
    """A module of modules, one of them shared, with its optimizer and metric."""

    def __init__(self, model, optimizer):
        self.model, self.again, self.optimizer = model, model, optimizer
        self.metric = nnx.metrics.Average()

    def step(self, x):
        value = train(self.model, self.optimizer, x)
        self.metric.update(values=value)
        return value + self.metric.compute() + self.again.seen[...].sum()


class Stepping(Holder):
    """Its step as a sharded method, and as one of `nnx.jit`."""

    def whole_step(self, x):
        return self.step(x)

    by_jit = nnx.jit(whole_step)
    by_shard = jshard.shard(whole_step, in_strategy={"x": (2, None)}, mesh=MESH)


def in_fields(state, x):
    return train(state.model, state.optimizer, x)


def in_items(state, x):
    return train(*state, x)


def in_keys(state, x):
    return train(state["model"], state["optimizer"], x)


def keys(kind):
    return lambda: (kind(model=(p := pair())[0], optimizer=p[1]),)


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments made anew, the step over them and a batch, and which of them are passed by name."""

    make: Callable[[], tuple]
    step: Callable
    named: tuple[str, ...] = ()
    ways: str = "two"  # all four for each kind of arguments; what holds the state in two of them, in turn


def noise(rngs, x):
    keep = jax.random.bernoulli(rngs.dropout(), shape=x.shape)
    return (x * keep).mean() + jax.random.randint(rngs(), (), 0, 5)


def metrics(metric, x):
    metric.update(values=x.mean(), total=x.sum())
    return metric.compute()


def bare(scale, x):
    scale[...] = scale[...] * 2 + x.sum(0)
    return (scale[...] * x).mean()


def two_views(a, b, x):
    a.layer.kernel[...] += 1
    b["again"].layer.kernel[...] *= 2
    return a(x).mean() + b["again"](x).mean()


def grows(holder, x):
    if not hasattr(holder, "extra"):
        holder.extra = Net(nnx.Rngs(3))  # made inside, and kept
        holder.rows = x.shape[0]  # an attribute that is no array
    holder.extra.seen[...] += x.sum(0)
    return holder.extra(x).mean() + holder.rows


def swaps(state, x):
    a, b = state["a"], state["b"]
    a.layer, b.layer = b.layer, a.layer  # references change, values do not
    return a(x).mean() - b(x).mean()


def returns(model, optimizer, x):
    value = train(model, optimizer, x)
    return {"loss": value, "model": model, "fresh": nnx.Param(x.sum(0))}


def state_of(state, x):
    for variable in jax.tree.leaves(state, is_leaf=lambda v: isinstance(v, nnx.Variable)):
        if variable[...].dtype == jnp.float32:
            variable[...] += x.mean()
    return jnp.float32(0)


def mixed(state, x):
    params, (model, _) = state["params"], state["pair"]
    return (x @ params).mean() + loss(model, x)


CASES = {
    "arguments": Case(pair, train, ways="all"),
    "keywords": Case(
        pair, lambda x, *, model, optimizer: train(model, optimizer, x), ("model", "optimizer"), "all"
    ),
    "tuple": Case(lambda: (pair(),), in_items),
    "list": Case(lambda: (list(pair()),), in_items, ways="other two"),
    "dict": Case(keys(dict), in_keys),
    "ordered dict": Case(keys(collections.OrderedDict), in_keys, ways="other two"),
    "named tuple": Case(lambda: (Named(*pair()),), in_fields),
    "registered dataclass": Case(lambda: (Registered(*pair()),), in_fields, ways="other two"),
    "struct dataclass": Case(lambda: (Struct(*pair()),), in_fields),
    "a pytree class": Case(lambda: (Own(*pair()),), in_fields, ways="other two"),
    "nnx.Pytree": Case(lambda: (TrainState(*pair()),), in_fields),
    "nnx.List": Case(lambda: (nnx.List(pair()),), in_items, ways="other two"),
    "nnx.Dict": Case(keys(nnx.Dict), in_keys),
    "module of modules": Case(lambda: (Holder(*pair()),), lambda holder, x: holder.step(x), ways="all"),
    "nested": Case(
        lambda: ({"a": [(Holder(*pair()), None)]},), lambda s, x: s["a"][0][0].step(x), ways="other two"
    ),
    "ModelAndOptimizer": Case(
        lambda: (nnx.ModelAndOptimizer(Net(nnx.Rngs(0)), TX),),
        lambda o, x: (v := nnx.value_and_grad(loss)(o.model, x), o.update(v[1]), v[0])[-1],
    ),
    "metrics": Case(
        lambda: (nnx.MultiMetric(mean=nnx.metrics.Average(), total=nnx.metrics.Average("total")),),
        metrics,
    ),
    "rngs": Case(lambda: (nnx.Rngs(0, dropout=1),), noise, ways="other two"),
    "nested rngs": Case(lambda: ({"r": [nnx.Rngs(0, dropout=1)]},), lambda state, x: noise(state["r"][0], x)),
    "a variable": Case(lambda: (nnx.Param(jnp.ones(4)),), bare),
    "an nnx.State": Case(lambda: (nnx.state(Net(nnx.Rngs(0))),), state_of),
    "shared between arguments": Case(lambda: (m := Net(nnx.Rngs(0)), {"again": m}), two_views),
    "made inside": Case(lambda: (Holder(*pair()),), grows),
    "references change": Case(lambda: ({"a": Net(nnx.Rngs(0)), "b": Net(nnx.Rngs(1))},), swaps),
    "returned": Case(pair, returns),
    "beside arrays": Case(lambda: ({"params": jnp.ones((4, 2)), "pair": pair()},), mixed, ways="one"),
}


def five_steps(step: Callable, case: Case) -> tuple[list, Any, Any]:
    """What five steps return, and the structure and the arrays of the state after them."""
    args, kwargs = case.make(), {}
    if case.named:
        args, kwargs = (), dict(zip(case.named, args, strict=True))
    returned = []
    for x in BATCHES:
        out = step(*args, x=x, **kwargs)
        for a in jax.tree.leaves((args, kwargs), is_leaf=lambda v: isinstance(v, nnx.Module)):
            # A module that comes back is the one that went in.
            assert (
                not isinstance(out, dict) or "model" not in out or out["model"] is args[0] or a is not args[0]
            )
        returned.append(out)
    graph, state = nnx.split((args, kwargs, returned))
    return returned, graph, state


def same(got: Any, want: Any) -> None:
    a, b = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


def donated(case: Case) -> dict[str, Any]:
    return dict(donate_argnames=case.named) if case.named else dict(donate_argnums=0)


@pytest.fixture(autouse=True)
def compiled_fast():
    """A hundred programs are compiled here, and none of them runs long."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.lru_cache
def wanted(name: str) -> tuple[list, Any, Any]:
    return five_steps(nnx.jit(CASES[name].step), CASES[name])


WAYS = {
    "all": ((False, False), (False, True), (True, False), (True, True)),
    "two": ((False, False), (True, True)),
    "other two": ((False, True), (True, False)),
    "one": ((False, False),),
}


@pytest.mark.parametrize(
    ("name", "inside", "donate"),
    [
        pytest.param(name, i, d, id=name + ", inside jit" * i + ", donated" * d)
        for name, case in CASES.items()
        for i, d in WAYS[case.ways]
    ],
)
def test_five_steps_are_those_of_nnx_jit(name, inside, donate):
    case = CASES[name]
    options = donated(case) if donate else {}
    step = jshard.shard(case.step, in_strategy={"x": (2, None)}, mesh=MESH, **({} if inside else options))
    if inside:
        step = nnx.jit(lambda *args, step=step, **kwargs: step(*args, **kwargs), **options)
    returned, graph, state = five_steps(step, case)
    want, want_graph, want_state = wanted(name)
    same(returned, want)
    same(state, want_state)
    assert graph == want_graph


def test_a_method_of_the_state():
    a, b = (Stepping(*pair()) for _ in range(2))
    for x in BATCHES:
        np.testing.assert_array_equal(a.by_shard(x), b.by_jit(x))
    same(nnx.state(a), nnx.state(b))
    assert {r.path.partition(".")[0] for r in a.by_shard.plan(BATCHES[0]).inputs} == {"self", "x"}


def test_a_function_that_nnx_jits_already():
    model, optimizer = pair()
    step = jshard.shard(nnx.jit(train), mesh=MESH)
    want = five_steps(nnx.jit(train), CASES["arguments"])[0]
    assert [float(step(model, optimizer, x)) for x in BATCHES] == [float(v) for v in want]


def test_only_what_changes_is_a_result():
    model, optimizer = pair()
    whole, read = (jshard.shard(f, mesh=MESH) for f in (train, lambda model, x: model.layer(x)))
    changed = {r.path for r in whole.plan(model, optimizer, BATCHES[0]).outputs}
    assert changed == {
        "result", "model.layer.kernel", "model.layer.bias", "model.seen", "model.noise.count", "optimizer.step",
        "optimizer.opt_state.0.trace.layer.kernel", "optimizer.opt_state.0.trace.layer.bias",
    }  # fmt: skip
    assert [r.path for r in read.plan(model, BATCHES[0]).outputs] == ["result"]
    kernel = model.layer.kernel[...]
    read(model, BATCHES[0])
    assert model.layer.kernel[...] is kernel
