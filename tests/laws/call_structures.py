"""Random argument structures, and the law for calls: results are those of `jax.jit`, errors `ShardError`s or JAX's own."""

from __future__ import annotations

import collections
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jshard
from jshard._core.errors import ShardError


Pair = collections.namedtuple("Pair", "left right")
SHAPES = ((), (1,), (4,), (0,), (8,), (2, 4), (8, 3), (4, 0), (1, 8), (2, 2, 4))
DTYPES = ("float32", "bfloat16", "int32", "uint8", "bool", "complex64", "float16", "int8")


def leaf(rng: random.Random) -> Any:
    """An argument without structure: arrays anywhere, numpy, scalars, keys, None, and a few that nothing takes."""
    kind = rng.choices(
        ["array", "placed", "numpy", "scalar", "none", "key", "wrong"], [6, 3, 4, 4, 2, 1, 0.3]
    )[0]
    shape, dtype = rng.choice(SHAPES), rng.choice(DTYPES)
    values = np.arange(int(np.prod(shape))).reshape(shape)
    if kind == "array":
        return jnp.asarray(values).astype(dtype)
    if kind == "placed":
        return jax.device_put(values.astype("float32"), rng.choice(jax.devices()[:8]))
    if kind == "numpy":
        return values.astype(rng.choice(["float32", "float64", "int64", "bool"]))
    if kind == "scalar":
        return rng.choice([1, 2.5, True, 1j, np.float32(2), np.int8(3), -(2**31)])
    if kind == "key":
        return (
            jax.random.split(jax.random.key(0), rng.choice([1, 4]))
            if rng.random() < 0.5
            else jax.random.key(1)
        )
    return None if kind == "none" else rng.choice(["text", object(), {1, 2}, np.array(["a"]), jnp.sin])


def tree(rng: random.Random, depth: int) -> Any:
    """A random pytree."""
    if depth == 0 or rng.random() < 0.4:
        return leaf(rng)
    parts = [tree(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    kind = rng.choice(["tuple", "list", "dict", "ordered", "pair"])
    if kind == "pair":
        return Pair(tree(rng, depth - 1), tree(rng, depth - 1))
    if kind in ("dict", "ordered"):
        names = rng.sample("abcdef", len(parts))
        return (dict if kind == "dict" else collections.OrderedDict)(zip(names, parts, strict=True))
    return tuple(parts) if kind == "tuple" else parts


def function(*args: Any, **kwargs: Any) -> Any:
    """Every array changed a little, and a sum over all that can be summed."""

    def changed(x: Any) -> Any:
        numeric = hasattr(x, "dtype") and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return x + 1 if numeric and x.dtype != bool else x

    leaves = [
        x for x in jax.tree.leaves((args, kwargs)) if jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)
    ]
    return jax.tree.map(changed, (args, kwargs)), sum(jnp.sum(x).astype("float32") for x in leaves)


def outcome(call: Any) -> Any:
    try:
        return call()
    except Exception as e:
        return e


def check(seed: int) -> str:
    """The law for one structure; says "equal" or "refused alike"."""
    rng = random.Random(seed)
    args = tuple(tree(rng, 3) for _ in range(rng.randint(0, 3)))
    kwargs = {n: tree(rng, 2) for n in rng.sample(["u", "v", "w"], rng.randint(0, 2))}
    # What lies on several devices `jit` refuses and a sharded function places, so the law is about it placed.
    here = jax.tree.map(
        lambda x: jax.device_put(x, jax.devices()[0]) if isinstance(x, jax.Array) else x, (args, kwargs)
    )
    want = outcome(lambda: jax.jit(function)(*here[0], **here[1]))
    f = jshard.shard(function)
    for _ in range(2):
        got = outcome(lambda: f(*args, **kwargs))
        if isinstance(got, ShardError):
            return f"refused: {got.what}" if isinstance(want, Exception) else f"ShardError: {got.what}"
        if isinstance(want, Exception) or isinstance(got, Exception):
            assert type(got) is type(want), (seed, got, want)
            return "refused alike"
        assert jax.tree.structure(got) == jax.tree.structure(want), seed
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), (seed, a, b)
            if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            np.testing.assert_allclose(
                np.asarray(a, complex), np.asarray(b, complex), rtol=1e-2, err_msg=str(seed)
            )
    return "equal"
