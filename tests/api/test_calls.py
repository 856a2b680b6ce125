"""Calls of sharded functions take and return what calls of the jitted function do.

Each case is called twice: the first call plans, the second is JAX's own dispatch.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import inspect
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard


X = jnp.arange(16.0).reshape(8, 2)
Pair = collections.namedtuple("Pair", "a b")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    w: jax.Array
    name: str = dataclasses.field(default="state", metadata=dict(static=True))


@jax.tree_util.register_pytree_node_class
class Net:
    def __init__(self, w):
        self.w = w

    def tree_flatten(self):
        return (self.w,), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)

    def __call__(self, y):
        return self.w + y

    @jshard.shard
    def method(self, y):
        return self.w * y

    @classmethod
    @functools.partial(jshard.shard, static_argnums=0)
    def made(cls, y):
        return cls(y * 2).w

    @staticmethod
    @jshard.shard
    def alone(y):
        return y * 3


def many(x, y=2.0, *rest, z=None, **named):
    return {"s": x * y + sum(rest), "z": z, "named": named}


def same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype) and type(a) is type(b)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert a.weak_type == b.weak_type
        kind = complex if jnp.issubdtype(a.dtype, jnp.complexfloating) else float
        np.testing.assert_allclose(
            np.asarray(a).astype(kind), np.asarray(b).astype(kind), rtol=1e-5, atol=1e-6
        )


CALLS: dict[str, tuple] = {  # function, arguments, keywords, options
    "defaults": (many, (X,), {}),
    "star arguments": (many, (X, 3.0, X, X), {}),
    "keywords": (many, (X,), {"y": X, "q": X, "p": {"a": 1}}),
    "keywords in another order": (many, (), {"z": X, "y": 1, "x": X}),
    "Python scalars": (lambda a, b, c, d: (a + b, c, d * 2j, a), (1, 2.5, True, 1j), {}),
    "numpy": (lambda a, b: a @ b, (np.ones((4, 4)), np.arange(16).reshape(4, 4)), {}),
    "numpy scalar": (lambda a, b: a * b, (np.float32(3), X), {}),
    "None": (lambda a: a, (None,), {}),
    "None leaves": (lambda a: (a[0], a[1]), ((None, X),), {}),
    "no arguments": (lambda: jnp.ones(8) * 2, (), {}),
    "no result": (lambda x: None, (X,), {}),
    "argument handed through": (lambda x, y: (y, x, x), (X, 1), {}),
    "unused argument": (lambda x, y: x + 1, (X, X), {}),
    "typed key": (lambda k: (jax.random.normal(k, (8,)), jax.random.split(k, 4)), (jax.random.key(0),), {}),
    "array of keys": (lambda k: k[::-1], (jax.random.split(jax.random.key(0), 8),), {}),
    "raw key": (lambda k: jax.random.normal(k, (8,)), (jax.random.PRNGKey(0),), {}),
    "bfloat16": (lambda a: a @ a.T, (X.astype(jnp.bfloat16),), {}),
    "float8": (lambda a: (a.astype("float32") * 2).astype(a.dtype), (X.astype(jnp.float8_e4m3fn),), {}),
    "int4": (lambda a: (a.astype("int32") + 1).astype(a.dtype), (jnp.arange(8).astype(jnp.int4),), {}),
    "bool": (lambda a: ~a, (X > 3,), {}),
    "complex": (lambda a: a * (1 + 2j), (X,), {}),
    "zero size": (lambda a: (a * 2, a.sum(), a @ jnp.ones((2, 3))), (jnp.ones((0, 2)),), {}),
    "scalar": (lambda a: a + 1, (jnp.float32(3),), {}),
    "dataclass": (lambda s: State(s.w * 2, s.name), (State(X),), {}),
    "namedtuple": (lambda s: Pair(s.b, s.a * 2), (Pair(X, X + 1),), {}),
    "ordered dict": (lambda s: s, (collections.OrderedDict(b=X, a=X * 2),), {}),
    "static number": (lambda x, n: x * n, (X, 3), {}, {"static_argnums": 1}),
    "static number from the end": (lambda x, n: x * n, (X, 3), {}, {"static_argnums": -1}),
    "static number as keyword": (lambda x, n=2: x * n, (X,), {"n": 3}, {"static_argnums": 1}),
    "static default": (lambda x, n=2: x * n, (X,), {}, {"static_argnums": 1}),
    "static name": (lambda x, n=2: x * n, (X,), {"n": 3}, {"static_argnames": "n"}),
    "static name by position": (lambda x, n=2: x * n, (X, 3), {}, {"static_argnames": "n"}),
    "static first": (lambda mode, x: x * 2 if mode == "a" else x, ("a", X), {}, {"static_argnums": 0}),
    "callable object": (Net(X), (X,), {}),
    "bound method": (Net(X).__call__, (X,), {}),
    "partial": (functools.partial(lambda a, b, c: a * b + c, X, c=1.0), (X,), {}),
    "JAX's own": (jnp.sin, (X,), {}),
    "jitted": (jax.jit(lambda x: x + 1), (X,), {}),
    "a print inside": (lambda x: (jax.debug.print("{}", x[0, 0]), x * 2)[1], (X,), {}),
}


# Calls that a compiled function takes too: of every way that leaves and trees go in and come out.
COMPILED = (
    "star arguments", "keywords in another order", "Python scalars", "numpy", "None leaves", "no arguments", "no result",
    "argument handed through", "unused argument", "typed key", "zero size", "dataclass", "bound method",
)  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    fn, args, kwargs, *rest = CALLS[name]
    options = rest[0] if rest else {}
    want = jax.jit(fn, **options)(*args, **kwargs)
    f = jshard.shard(fn, **options)
    for _ in range(2):
        same(f(*args, **kwargs), want)
    shardings = jax.tree.leaves(f.plan(*args, **kwargs).out_shardings)
    leaves = jax.tree.leaves(f(*args, **kwargs))
    assert all(y.sharding.is_equivalent_to(s, y.ndim) for y, s in zip(leaves, shardings, strict=True))
    if name in COMPILED:
        same(f.lower(*args, **kwargs).compile()(*args, **kwargs), want)


def test_x64():
    with jax.enable_x64(True):
        f = jshard.shard(lambda a, b: (a @ a.T) * b)
        for _ in range(2):
            same(f(np.ones((8, 2)), 2), jax.jit(lambda a, b: (a @ a.T) * b)(np.ones((8, 2)), 2))
    assert f(np.ones((8, 2)), 2).dtype == jnp.float32


def test_methods():
    net = Net(X)
    for _ in range(2):
        same(net.method(X), X * X)
        same(Net.made(X), X * 2)
        same(net.made(X), X * 2)
        same(Net.alone(X), X * 3)
    assert net.method.plan(X).inputs[1].path == "y"
    same(net.method.lower(X).compile()(net, X), X * X)
    net.method.clear_cache()


def test_it_looks_like_the_function():
    f = jshard.shard(many)
    assert f.__name__ == "many" and f.__wrapped__ is many and f.__doc__ == many.__doc__
    assert inspect.signature(f) == inspect.signature(many) and callable(f)
    assert copy.deepcopy(f) is f and copy.copy(f) is f
    assert repr(f) == "<sharded many(x, y=2.0, *rest, z=None, **named)>"


def test_closures_over_arrays_are_kept_apart():
    for f, w in [(jshard.shard(lambda y, w=w: y @ w), w) for w in (X.T, X.T + 1)]:
        same(f(X), X @ w)
    slope = jax.grad(lambda w: jshard.shard(lambda y: y * w)(X).sum())(X + 1)
    same(slope, X)  # a tracer closed over


@pytest.mark.parametrize("options", [{"donate_argnums": 0}, {"donate_argnames": "s"}])
@pytest.mark.parametrize("keyword", [False, True])
def test_donation(options, keyword):
    f = jshard.shard(lambda s, x: (s + x, x.sum()), **options)
    s = jnp.ones((8, 2))
    for k in range(3):
        if not keyword:
            s = jax.device_put(s, f.plan(s, X).in_shardings[0][0])
            old, s = s, f(s, X)[0]
        elif "donate_argnames" in options:
            s = jax.device_put(s, f.plan(x=X, s=s).in_shardings[1]["s"])
            old, s = s, f(x=X, s=s)[0]
        else:
            pytest.skip("jit too donates what is passed by position only")
        assert old.is_deleted()
        same(s, 1 + (k + 1) * X)


def test_differentiation_of_mixed_arguments():
    index, key = jnp.array([1, 0]), jax.random.key(0)

    def fn(x, i, k):
        return (x[i] * jax.random.normal(k, (2, 2))).sum(), jnp.argmax(x)

    f = jshard.shard(fn)
    same(
        jax.value_and_grad(f, has_aux=True)(X, index, key),
        jax.value_and_grad(fn, has_aux=True)(X, index, key),
    )


def test_disable_jit_runs_the_plain_function():
    seen = []
    f = jshard.shard(lambda x: seen.append(x) or x * 2)
    with jax.disable_jit():
        same(f(X), X * 2)
    assert seen == [X] or seen[0] is X


FAILING = {
    "missing argument": (lambda x, n: x, (X,)),
    "text": (lambda x, n: x, (X, "abc")),
    "an object": (lambda x, n: x, (X, object())),
    "result that is no array": (lambda x: "abc", (X,)),
    "error inside": (lambda x: x @ jnp.ones((3, 3)), (X,)),
    "value of a tracer": (lambda x: x if x[0, 0] > 0 else -x, (X,)),
}


@pytest.mark.parametrize("name", FAILING)
def test_errors_are_those_of_jit_and_harm_nothing(name):
    fn, args = FAILING[name]
    with pytest.raises(Exception) as want:
        jax.jit(fn)(*args)
    calls = []

    def also(*a):
        calls.append(a)
        return fn(*a) if len(calls) == 1 else a[0] + 1

    f = jshard.shard(fn)
    for _ in range(2):
        with pytest.raises(type(want.value)):
            f(*args)
    mended = jshard.shard(also)
    if name not in ("missing argument", "text", "an object"):
        with pytest.raises(type(want.value)):
            mended(*args)
        same(mended(*args), X + 1)
    assert not X.is_deleted()


def test_tracebacks_show_the_user_not_us():
    f = jshard.shard(lambda x: x @ jnp.ones((3, 3)))
    with pytest.raises(TypeError) as caught:
        f(X)
    files = {os.path.basename(str(e.path)) for e in caught.traceback}
    assert "test_calls.py" in files and not files & {
        "shard.py",
        "prepare.py",
        "trace_call.py",
        "executable.py",
        "trace.py",
    }


def test_operators_of_op_name_the_user_s_line():
    f = jshard.shard(lambda x, w: jshard.op(jnp.dot, in_strategy=((1, 1), None))(x, w))
    dots = [o for o in f.plan(X, X.T).operators if o.primitive == "dot_general"]
    assert all("test_calls.py" in o.source for o in dots) and dots


PROGRAM = """
import sys, jax, jax.numpy as jnp, jshard
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
hits = []
jax.monitoring.register_event_listener(lambda e, **k: hits.append(e) if e.endswith("cache_hits") else None)
x = jnp.arange(16.0).reshape(8, 2)
hits.clear()
out = jshard.shard(lambda x: jnp.tanh(x) @ x.T)(x)
print(len(hits), float(out.sum()))
"""


def test_the_persistent_compilation_cache(tmp_path):
    def run():
        command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    first, second = run(), run()
    assert first[0] == "0" and int(second[0]) >= 1 and first[1] == second[1]


@pytest.mark.parametrize("kind", ["arrays", "cut", "keys", "with one that is not read"])
def test_arguments_all_of_size_zero(kind):
    # XLA refuses a plain `shard_map` of two of them with several results (JAX 0.10.2 and 0.12.0).
    a, b = jnp.zeros((4, 0)), jnp.zeros((4, 0), "uint8")
    if kind == "keys":
        a = b = jax.random.split(jax.random.key(0), 4)[:0]
    f = (lambda x, y, *_: (x, y, 3.0)) if kind == "keys" else lambda x, y, *_: (x + 1, y + 1, x.sum() + 2)
    args = (a, b, jnp.ones(4)) if kind == "with one that is not read" else (a, b)
    g = jshard.shard(f, in_strategy=((4, 1),) + (None,) * (len(args) - 1) if kind == "cut" else None)
    for got in (g(*args), jax.jit(g)(*args)):
        want = jax.jit(f)(*args)
        for x, y in zip(got, want, strict=True):
            assert jax.typeof(x).str_short() == jax.typeof(y).str_short()
        assert float(got[2]) == float(want[2])
    if kind != "keys":
        assert jax.jit(jax.grad(lambda x, y: g(x, y, *args[2:])[2]))(a, b).shape == (4, 0)
