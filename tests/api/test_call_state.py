"""State that cannot be carried is refused by name, the advice works, and an error leaves all objects unchanged."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from jshard._api.call_state import captured
from jshard._core.errors import ShardError


X = jnp.ones((8, 4))


class Plain:
    """An object with arrays that is no pytree."""

    def __init__(self):
        self.w = jnp.ones(4)


@dataclasses.dataclass
class Record:
    net: nnx.Linear
    rate: float = 0.5


class ArrayLike:
    def __jax_array__(self):
        return jnp.ones(4)


def linear():
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0))


def pair():
    net = linear()
    return net, nnx.Optimizer(net, optax.sgd(0.5), wrt=nnx.Param)


def train(net, optimizer, x):
    value, grads = nnx.value_and_grad(lambda m: m(x).mean())(net)
    optimizer.update(net, grads)
    return value


def use(state, x):
    return x * state.w


def refused(what: str, where: str, fix: str, call, *args):
    for _ in range(2):  # the second time too
        with pytest.raises(ShardError) as caught:
            call(*args)
        assert (caught.value.what, caught.value.where, caught.value.fix) == (what, where, fix)


def test_an_object_that_is_no_pytree():
    refused(
        "argument state is a Plain, which holds arrays (w) and is no pytree: what use changes in it would be lost",
        "call of use, argument state",
        "Plain as a pytree (jax.tree_util.register_pytree_node_class, or a registered dataclass), with what changes "
        "as a result; or its arrays as arguments",
        jshard.shard(use), Plain(), X,
    )  # fmt: skip
    refused(
        "argument state.0.a is a Plain, which holds arrays (w) and is no pytree: what use changes in it would be lost",
        "call of use, argument state.0.a",
        "Plain as a pytree (jax.tree_util.register_pytree_node_class, or a registered dataclass), with what changes "
        "as a result; or its arrays as arguments",
        jshard.shard(use), [{"a": Plain()}], X,
    )  # fmt: skip

    @jax.tree_util.register_pytree_node_class
    class Registered(Plain):
        def tree_flatten(self):
            return (self.w,), None

        @classmethod
        def tree_unflatten(cls, _, parts):
            self = object.__new__(cls)
            (self.w,) = parts
            return self

    np.testing.assert_array_equal(jshard.shard(use)(Registered(), X), X)
    np.testing.assert_array_equal(jshard.shard(lambda w, x: x * w)(Plain().w, X), X)


def test_a_dataclass_that_is_no_pytree():
    step = jshard.shard(lambda state, x: state.net(x) * state.rate)
    refused(
        "argument state is a Record, which holds arrays (net) and is no pytree: what <lambda> "
        "changes in it would be lost",
        "call of <lambda>, argument state",
        "jax.tree_util.register_dataclass(Record), so that JAX knows its fields, with what changes as a result; or "
        "its arrays as arguments",
        step, Record(linear()), X,
    )  # fmt: skip
    known = jax.tree_util.register_dataclass(dataclasses.dataclass(type("Known", (Record,), {})))
    np.testing.assert_allclose(step(known(linear()), X), linear()(X) * 0.5, rtol=1e-6)


def test_what_holds_no_arrays():
    f = lambda x, mode: x * (mode == "train")  # noqa: E731
    refused(
        "argument mode is a str, 'train', neither an array nor a container of arrays",
        "call of <lambda>, argument mode",
        "static_argnames='mode', which makes it part of the program",
        jshard.shard(f), X, "train",
    )  # fmt: skip
    np.testing.assert_array_equal(jshard.shard(f, static_argnames="mode")(X, "train"), X)
    refused(
        "argument x.mode is a str, 'train', neither an array nor a container of arrays",
        "call of <lambda>, argument x.mode",
        "only arrays and numbers inside x; what is part of the program goes into a static argument",
        jshard.shard(lambda x: x["a"]), {"a": X, "mode": "train"},
    )  # fmt: skip
    refused(
        "argument scale is an ArrayLike, which only its __jax_array__ makes an array",
        "call of <lambda>, argument scale",
        "its array: jax.numpy.asarray(scale)",
        jshard.shard(lambda x, scale: x * scale), X, ArrayLike(),
    )  # fmt: skip
    words = np.array(["a", "b"])
    with pytest.raises(ShardError, match="argument x is a ndarray, array.*neither an array"):
        jshard.shard(lambda x: x)(words)


def test_refs():
    ref = jax.new_ref(jnp.ones(4))

    def add(r, x):
        return r[...] + x.sum(0)

    refused(
        "argument r is a Ref, an array that is changed in place",
        "call of add, argument r",
        "its value as the argument, r[...], and the new value as a result",
        jshard.shard(add), ref, X,
    )  # fmt: skip
    refused(
        "<lambda> captures ref, a Ref, an array that is changed in place",
        "ref, captured by <lambda>",
        "its value as an argument, <lambda>(ref[...], ...), and the new value as a result",
        jshard.shard(lambda x: ref[...] + x.sum(0)), X,
    )  # fmt: skip
    np.testing.assert_array_equal(
        jshard.shard(lambda value, x: value + x.sum(0))(ref[...], X), np.full(4, 9.0)
    )


def test_state_of_nnx_that_is_captured_and_changed():
    net, optimizer = pair()
    before = net.kernel[...]

    def step(x):
        return train(net, optimizer, x)

    refused(
        "step changes state that is not among its arguments; it captures net (Linear), optimizer (Optimizer)",
        "net, captured by step",
        "it as an argument: step(net, optimizer, ...)",
        jshard.shard(step), X,
    )  # fmt: skip
    assert net.kernel[...] is before and int(optimizer.step[...]) == 0
    want_net, want_optimizer = pair()
    want = [nnx.jit(train)(want_net, want_optimizer, X) for _ in range(3)]
    got = [jshard.shard(train)(net, optimizer, X) for _ in range(3)]
    np.testing.assert_allclose(got, want, rtol=1e-6)
    with pytest.raises(ShardError) as caught:
        jshard.shard(functools.partial(train, *pair()))(X)
    assert caught.value.what == (
        "partial changes state that is not among its arguments; it captures argument 0 of the partial (Linear), "
        "argument 1 of the partial (Optimizer)"
    )
    assert caught.value.fix == "all as arguments: jshard.shard(train) instead of a partial"


def test_state_of_nnx_that_is_only_read_is_a_constant_as_under_nnx_jit():
    net = linear()
    f, g = jshard.shard(lambda x: net(x)), nnx.jit(lambda x: net(x))
    for _ in range(2):
        np.testing.assert_allclose(f(X), g(X), rtol=1e-6)
        net.kernel[...] *= 2


def test_bound_methods_and_callable_state():
    class Scale(nnx.Pytree):
        def __init__(self):
            self.by = nnx.Param(jnp.full(4, 2.0))

        def __call__(self, x):
            return x * self.by[...]

    scale = Scale()
    for fn in (scale, scale.__call__):
        refused(
            "Scale.__call__ is bound to a Scale, whose state the function would capture",
            "fn",
            "jshard.shard(Scale.__call__), called with the object first; or module.shard(...) of jshard.flax",
            jshard.shard, fn,
        )  # fmt: skip
    f = jshard.shard(Scale.__call__)
    for by in (2.0, 3.0):
        scale.by[...] = jnp.full(4, by)
        np.testing.assert_array_equal(f(scale, X), by * X)


LOG = {"total": 0.0}


def test_captured_objects_that_a_step_sets():
    state, params = Plain(), {"layers": [{"w": jnp.ones(4)}]}

    def attribute(x):
        state.w = state.w + x.sum(0)
        return state.w

    def item(x):
        params["layers"][0]["w"] = params["layers"][0]["w"] * x[0]
        return x

    def of_module(x):
        LOG["total"] = LOG["total"] + x.sum()
        return x

    def both(x):
        attribute(x)
        return item(x)

    for fn, path, told in (
        (attribute, "state.w", "state.w"),
        (item, "params['layers'][0]['w']", "params['layers'][0]['w']"),
        (of_module, "LOG['total']", "LOG['total']"),
        (both, "state.w", "state.w and 1 more"),
    ):
        refused(
            f"{fn.__name__} sets {told}, which it captures: only its trace would see that",
            f"{path}, captured by {fn.__name__}",
            f"{path} as an argument of {fn.__name__}, and its new value as a result",
            jshard.shard(fn), X,
        )  # fmt: skip
    assert LOG == {"total": 0.0}
    np.testing.assert_array_equal(state.w, np.ones(4))
    np.testing.assert_array_equal(params["layers"][0]["w"], np.ones(4))

    class Model:
        def __init__(self):
            self.w = jnp.ones(4)

        @functools.partial(jshard.shard, static_argnums=0)
        def step(self, x):
            self.w = self.w + x.sum(0)
            return self.w

    model = Model()
    with pytest.raises(ShardError) as caught:
        model.step(X)
    assert (
        caught.value.what == "step sets static argument 0.w, which it captures: only its trace would see that"
    )
    np.testing.assert_array_equal(model.w, np.ones(4))


total = np.zeros(3)


def test_names_of_attributes_are_not_those_of_the_module():
    assert dict(captured(lambda state: (state.total, state.LOG))) == {}
    assert list(dict(captured(lambda: (total, LOG)))) == ["LOG"]  # an array cannot be set from inside


def test_what_a_step_may_set():
    shapes, seen = [], {}

    def f(x):
        shapes.append(x.shape)
        seen["last"] = x.shape
        return x + 1

    np.testing.assert_array_equal(jshard.shard(f)(X), X + 1)
    assert shapes == [(8, 4)] and seen == {"last": (8, 4)}


@pytest.mark.parametrize("when", ["in Python", "in a callback"])
def test_nothing_is_half_updated(when):
    armed = [False]

    def check(value):
        if armed[0]:
            raise RuntimeError("stop")
        return value

    def step(state, x):
        state["a"][...] += x.sum(0)
        if when == "in Python":
            check(None)
        else:
            x = x * jax.pure_callback(check, jax.ShapeDtypeStruct((), x.dtype), x[0, 0])
        state["b"][...] += x.sum(0)
        return x.sum()

    state = {"a": nnx.Param(jnp.zeros(4)), "b": nnx.Param(jnp.zeros(4))}
    f = jshard.shard(step, in_strategy={"x": (8, 1)})
    if when == "in a callback":  # a program that is there already
        f(state, X)
    before = {k: v[...] for k, v in state.items()}
    armed[0] = True
    with pytest.raises((RuntimeError, ValueError)):
        f(state, X)
    assert all(v[...] is before[k] for k, v in state.items())
    armed[0] = False
    f(state, X)
    for k, v in state.items():
        np.testing.assert_array_equal(v[...], np.asarray(before[k]) + 8)


def test_without_importing_the_flax_part():
    program = """
import jax.numpy as jnp, jshard
from flax import nnx
def step(state, x):
    state["net"].bias[...] += x.sum(0)
    return state["net"](x)
state = {"net": nnx.Linear(2, 2, rngs=nnx.Rngs(0))}
f = jshard.shard(step)
for _ in range(3):
    f(state, jnp.ones((3, 2)))
print(state["net"].bias[...].tolist())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[9.0, 9.0]\n"
