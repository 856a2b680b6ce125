"""Primitives of other libraries run as they were traced, also those that compare types when compiled."""

from __future__ import annotations

import functools

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import ad, batching, mlir

import jshard


# A linear map whose parameters store what it was traced with, as Equinox's linear solves do: run or compiled with
# arrays of another type, it raises.
kept_p = jex.Primitive("someones_kept")
kept_p.multiple_results = True


def types_of(*arrays):
    return tuple(
        map(str, (jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding(a)) for a in arrays))
    ) + tuple(bool(jax.typeof(a).weak_type) for a in arrays)


def sharding(a):
    found = getattr(jax.typeof(a), "sharding", None)
    return found if found is not None and not found.mesh.empty else None


def kept(a, b):
    """``(a @ b + flip(a) @ b, its rows' order)``: of the second, integers have no derivative."""
    a, b = jnp.asarray(a), jnp.asarray(b)
    return kept_p.bind(a, b, types=types_of(a, b))


def impl(a, b, *, types):
    if types_of(a, b) != types:
        raise ValueError(f"pytree does not match out_structure: {types_of(a, b)} for {types}")
    out = a @ b + a[::-1] @ b
    return [out, jnp.argsort(b.sum(-1))]


def abstract(a, b, *, types):
    out = jax.eval_shape(lambda a, b: a @ b, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (a, b)))
    make = jax.core.ShapedArray
    return [make(out.shape, out.dtype), make(b.shape[:-1], jnp.int32)]


def jvp(primals, tangents, *, types):
    a, b = primals
    outs = kept_p.bind(a, b, types=types)
    ta, tb = (ad.instantiate_zeros(t) for t in tangents)
    moved = kept(ta, b)[0] + kept(a, tb)[0]
    return outs, [moved, ad.Zero(jax.typeof(outs[1]).to_tangent_aval())]


def transpose(cts, a, b, *, types):
    c = ad.instantiate_zeros(cts[0])
    if ad.is_undefined_primal(a):
        return [kept(c, b.T)[0], None]
    return [None, (a + a[::-1]).T @ c]


def batch(args, dims, *, types):
    a, b = (jnp.moveaxis(x, d, 0) if d is not None else x for x, d in zip(args, dims, strict=True))
    n = next(x.shape[0] for x, d in zip((a, b), dims, strict=True) if d is not None)
    rows = [
        kept(*(x[i] if d is not None else x for x, d in zip((a, b), dims, strict=True))) for i in range(n)
    ]
    return [jnp.stack(r) for r in zip(*rows, strict=True)], [0, 0]


kept_p.def_impl(impl)
kept_p.def_abstract_eval(abstract)
ad.primitive_jvps[kept_p] = jvp
ad.primitive_transposes[kept_p] = transpose
batching.primitive_batchers[kept_p] = batch
mlir.register_lowering(kept_p, mlir.lower_fun(impl))

A = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)) / 3, "float32")
B = jnp.asarray(np.random.default_rng(1).normal(size=(8, 8)) / 3, "float32")


def plain(a, b):
    y, order = kept(jnp.tanh(a), b)
    return y[order] * 2


def weak(a, b):
    return kept(jnp.tanh(a), b)[0] + kept(jnp.full((1, 8), 2.0 * a.sum()), b)[0]


def scanned(a, b):
    return jax.lax.scan(lambda c, x: (jnp.tanh(kept(c, b)[0] + x), kept(c, b)[0].sum()), a, jnp.stack([a, b]))


def repeated(a, b):
    return jax.lax.fori_loop(0, 3, lambda i, c: jnp.tanh(kept(c, b)[0]), a)


def while_looped(a, b):
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(kept(c[1], b)[0])), (0, a))[1]


def branched(a, b):
    return jax.lax.cond(a.sum() > 0, lambda a: kept(a, b)[0], lambda a: kept(b, a)[0] * 2, a)


def mapped(a, b):
    return jax.vmap(lambda x: kept(x, b)[0])(jnp.stack([a, a * 2]))


def remembered(a, b):
    return jax.checkpoint(lambda a: jnp.sin(kept(jnp.sin(a), b)[0]))(a)


PROGRAMS = {
    f.__name__: f for f in (plain, weak, scanned, repeated, while_looped, branched, mapped, remembered)
}
STRATEGIES = (None, ((2, 4), None), ((8, 1), (1, 8)))


def loss(f):
    return lambda a, b: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(a, b)))


def close(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype and jax.typeof(x).weak_type == jax.typeof(y).weak_type
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=1e-4 * float(jnp.abs(y).max() + 1e-6))


def test_in_a_plain_shard_map_the_primitive_fails():
    """It was traced with plain arrays, and is compiled with such that are typed by the mesh."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:8])
    spec, types = jax.sharding.PartitionSpec(), types_of(A, B)
    body = jax.shard_map(
        lambda a, b: kept_p.bind(a, b, types=types), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    with pytest.raises(ValueError, match="pytree does not match out_structure"):
        jax.jit(body).lower(A, B)
    jax.jit(lambda a, b: kept_p.bind(a, b, types=types)).lower(A, B)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_runs_as_it_was_traced(name, strategy):
    f = PROGRAMS[name]
    sharded = jshard.shard(f, strategy)
    close(sharded(A, B), jax.jit(f)(A, B))
    assert sharded.plan(A, B).unknown == ("someones_kept",)


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n != "while_looped"])
def test_derivatives_inside_and_from_outside(name):
    f = PROGRAMS[name]
    want = jax.jit(jax.value_and_grad(loss(f), (0, 1)))(A, B)
    close(jshard.shard(jax.value_and_grad(loss(f), (0, 1)), ((2, 4), None))(A, B), want)
    sharded = jshard.shard(f, ((2, 4), None))
    close(jax.jit(jax.value_and_grad(loss(sharded), (0, 1)))(A, B), want)
    _, pushed = jax.jvp(sharded, (A, B), (B, A))
    close(pushed, jax.jvp(f, (A, B), (B, A))[1])


def test_forward_and_second_derivatives_from_outside():
    sharded = jshard.shard(plain, ((2, 4), None))
    small = functools.partial(jax.jacfwd, argnums=0)
    close(jax.jit(small(sharded))(A, B), jax.jit(small(plain))(A, B))
    twice = jax.grad(lambda f, a: jnp.sum(jax.grad(lambda a: loss(f)(a, B))(a) ** 2), 1)
    close(jax.jit(functools.partial(twice, sharded))(A), jax.jit(functools.partial(twice, plain))(A))
    scan = jshard.shard(while_looped, ((2, 4), None))
    close(jax.jvp(scan, (A, B), (B, A))[1], jax.jvp(while_looped, (A, B), (B, A))[1])


def test_inside_a_loop_outside():
    """From there JAX differentiates the sharded program itself: no joint plan."""
    sharded = jshard.shard(plain, ((2, 4), None))

    def total(f):
        return lambda a, b: jnp.sum(
            jax.lax.scan(lambda c, _: (jnp.tanh(f(c, b)), c.sum()), a, None, length=3)[1]
        )

    close(jax.jit(jax.grad(total(sharded), (0, 1)))(A, B), jax.jit(jax.grad(total(plain), (0, 1)))(A, B))
