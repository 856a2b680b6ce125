"""A `with_sharding_constraint` in the user's code is a pin; its open dimensions stay open. Opaque operators run."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jshard
from jshard._program.pin_primitives import PIN_OPERAND, PIN_RESULT, pin_operand, pin_result
from jshard._spec.entry import Pin


MESH = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])
X = jnp.arange(64.0).reshape(8, 8) / 64


def rows(plan, primitive):
    return [r for r in plan.operators if r.primitive == primitive]


@pytest.mark.parametrize(
    "spec, cut",
    [
        (P("x", "y"), (4, 2)), (P("y"), (2, 1)), (P(None, ("x", "y")), (1, 8)), (P(), (1, 1)),
        (P("x", P.UNCONSTRAINED), (4, None)), (P(P.UNCONSTRAINED, "y"), (None, 2)),
    ],
)  # fmt: skip
def test_a_constraint_is_a_pin(spec, cut):
    def f(x):
        return jnp.sin(lax.with_sharding_constraint(x * 2, NamedSharding(MESH, spec))) + 1

    sharded = jshard.shard(f, mesh=MESH)
    (row,) = rows(sharded.plan(X), "sharding_constraint")
    assert all(c is None or c == n for c, n in zip(cut, row.strategy[0], strict=True))
    np.testing.assert_allclose(sharded(X), jnp.sin(X * 2) + 1, rtol=1e-6)


def test_open_dimensions_are_the_searchs():
    """The same constraint, open in dimension 1: what is asked of the argument there goes through."""

    def f(x):
        return lax.with_sharding_constraint(jnp.sin(x), NamedSharding(MESH, P("x", P.UNCONSTRAINED)))

    def closed(x):
        return lax.with_sharding_constraint(jnp.sin(x), NamedSharding(MESH, P("x", None)))

    strategies = [
        rows(jshard.shard(g, (P("x", "y"),), P("x", "y"), mesh=MESH).plan(X), "sharding_constraint")[
            0
        ].strategy
        for g in (f, closed)
    ]
    assert strategies == [((4, 2),), ((4, 1),)]


def kernel(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2


def pallas(x):
    from jax.experimental import pallas as pl

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def solve(x):
    a = jnp.eye(8) * 2
    return lax.custom_linear_solve(lambda v: a @ v @ a, x, lambda _, b: b / 4, symmetric=True)


@pytest.mark.parametrize("name, f", [("pallas_call", pallas), ("custom_linear_solve", solve)])
def test_opaque_operators_run_on_whole_arrays_and_are_named(name, f):
    sharded = jshard.shard(lambda x: jnp.sin(f(x)) + x, ((4, 2),), mesh=MESH)
    (row,) = rows(sharded.plan(X), name)
    # Of a solver's operands the matrix, which only derivatives read, may stay cut.
    read = row.strategy if name == "pallas_call" else row.strategy[-1:]
    assert row.note and all(n == 1 for s in read for n in s)
    np.testing.assert_allclose(sharded(X), jnp.sin(f(X)) + X, rtol=1e-6)


def test_an_operator_whose_rule_raises_is_named_and_replicated():
    from jax.extend.core import Primitive
    from jax.interpreters import mlir

    p = Primitive("jshard_test_rule_that_raises")
    p.def_abstract_eval(lambda x: x)
    mlir.register_lowering(p, lambda ctx, x: [x])

    def rule(op):
        raise KeyError("axis")

    jshard.register_rule("jshard_test_rule_that_raises", rule)
    sharded = jshard.shard(lambda x: p.bind(x) + 1, ((4, 2),), mesh=MESH)
    (row,) = rows(sharded.plan(X), "jshard_test_rule_that_raises")
    assert row.note == "the rule of 'jshard_test_rule_that_raises' failed: KeyError: 'axis'"
    assert row.strategy == ((1, 1),)
    np.testing.assert_allclose(sharded(X), X + 1)
    with pytest.raises(jshard.ShardError) as twice:
        jshard.register_rule("jshard_test_rule_that_raises", rule)
    assert "already has a rule" in twice.value.what


@pytest.mark.parametrize("spec, cut", [((4, 2), (4, 2)), (P("x", "y"), (4, 2)), ((None, 2), (None, 2))])
@pytest.mark.parametrize("side", ["in_strategy", "out_strategy"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_operator_pin_under_vmap_leaves_the_mapped_dimension_open(spec, cut, side, at):
    xs = jnp.stack([X, X + 1, X - 1], axis=at)
    pinned = jshard.op(jnp.tanh, **{side: (spec,)})
    f = jax.vmap(pinned, in_axes=at, out_axes=at)
    sharded = jshard.shard(lambda xs: f(xs) * 2, mesh=MESH)
    (row,) = rows(sharded.plan(xs), "tanh")
    have = row.strategy[0][:at] + row.strategy[0][at + 1 :]
    assert all(w is None or w == h for w, h in zip(cut, have, strict=True)), row.strategy
    np.testing.assert_allclose(sharded(xs), jnp.tanh(xs) * 2, rtol=1e-6)


@pytest.mark.parametrize("spec, cut", [(P("x", "y"), (4, 2)), (P(None, ("x", "y")), (1, 8)), (P(), (1, 1))])
@pytest.mark.parametrize("how", ["named", "spec in a context"])
def test_a_reshard_is_a_pin(spec, cut, how):
    """JAX has it for typed meshes only; the planned program is the same."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:8])
    target = NamedSharding(mesh, spec) if how == "named" else spec

    def f(x):
        return jnp.sum(jnp.sin(jax.sharding.reshard(x * 2, target)) + 1)

    sharded = jshard.shard(f, (P("y", "x"),), mesh=mesh)
    with jax.set_mesh(mesh) if how != "named" else contextlib.nullcontext():
        (row,) = rows(sharded.plan(X), "reshard")
        assert row.strategy == (cut,)
        np.testing.assert_allclose(sharded(X), jnp.sum(jnp.sin(X * 2) + 1), rtol=1e-6)
        inside = jshard.shard(jax.grad(f), mesh=mesh)
        np.testing.assert_allclose(inside(X), 2 * jnp.cos(X * 2), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(jax.grad(sharded)(X), 2 * jnp.cos(X * 2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kept", [False, True])
def test_cotangents_are_pinned_where_the_pin_says_so(kept: bool) -> None:
    """A cotangent is defined as its value is read, and read as its value is defined."""
    pin = Pin((None,), (("x",),), "here", of_cotangent=kept)

    def f(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(pin_operand(pin_result(x, pin), pin)))

    eqns = jax.make_jaxpr(jax.grad(f))(jnp.ones(4)).jaxpr.eqns
    pins = [e.primitive.name for e in eqns if "pin" in e.primitive.name]
    assert pins == [PIN_RESULT, PIN_OPERAND] * (2 if kept else 1)
    assert jnp.allclose(jax.grad(f)(jnp.ones(4)), jnp.cos(1.0))
    assert jnp.allclose(jax.jvp(f, (jnp.ones(4),), (jnp.ones(4),))[1], 4 * jnp.cos(1.0))
