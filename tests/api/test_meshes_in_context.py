"""Meshes in context and Explicit meshes: a sharded function works under any, and its results match the context."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jshard
from jshard._core.errors import MeshError


DEVICES = np.array(jax.devices()[:8])
EXPLICIT = AxisType.Explicit
MESHES = {
    "none": None,
    "other axes": Mesh(DEVICES.reshape(2, 4), ("p", "q")),
    "explicit": Mesh(DEVICES.reshape(4, 2), ("x", "y"), axis_types=(EXPLICIT,) * 2),
    "explicit, to be split": Mesh(DEVICES, ("d",), axis_types=(EXPLICIT,)),
}
A = jnp.arange(64.0).reshape(8, 8) / 64
B = jnp.cos(A)


def fn(a, b):
    return jnp.tanh(a @ b)


def entered(name):
    return contextlib.nullcontext() if MESHES[name] is None else jax.set_mesh(MESHES[name])


def loss(f):
    return lambda a, b: f(a, b).sum()


@pytest.mark.parametrize(
    ("name", "placed"), [(n, p) for n in MESHES for p in (False, True) if MESHES[n] is not None or not p]
)
def test_every_context(name, placed):
    f, want, slope = jshard.shard(fn, ((4, 2), None)), fn(A, B), jax.grad(loss(fn))(A, B)
    with entered(name):
        a = A
        if placed:
            a = jax.device_put(A, NamedSharding(MESHES[name], P(MESHES[name].axis_names[0])))
        for _ in range(2):
            np.testing.assert_allclose(f(a, B) + 0, want, atol=1e-6)
        np.testing.assert_allclose(jax.jit(f)(a, B), want, atol=1e-6)
        np.testing.assert_allclose(jax.grad(loss(f))(a, B), slope, atol=1e-5)
        np.testing.assert_allclose(jax.jit(jax.grad(loss(f)))(a, B), slope, atol=1e-5)


def test_results_carry_the_explicit_mesh_in_the_planned_blocks():
    mesh = MESHES["explicit"]
    f = jshard.shard(fn, (P("x", None), None), out_strategy=(P("x", "y"),))
    with jax.set_mesh(mesh):
        out = f(A, B)
        assert out.sharding == NamedSharding(mesh, P("x", "y")) == f(A, B).sharding
        assert str(jax.typeof(out)) == "float32[8@x,8@y]" == str(jax.typeof(jax.jit(f)(A, B)))
        assert out.sharding.is_equivalent_to(f.plan(A, B).out_shardings, 2)


def test_a_change_of_context_is_seen():
    f = jshard.shard(fn, ((4, 2), None))
    with jax.set_mesh(MESHES["other axes"]):
        f(A, B), f(A, B)
        first = f(A, B).sharding.mesh
    f(A, B), f(A, B)
    assert f(A, B).sharding.mesh != first
    with jax.set_mesh(MESHES["explicit"]):
        assert f(A, B).sharding.mesh == MESHES["explicit"]
    with jax.set_mesh(MESHES["other axes"]):
        assert f(A, B).sharding.mesh == first


def test_explicit_argument_without_context():
    mesh = MESHES["explicit"]
    a = jax.device_put(A, NamedSharding(mesh, P("x")))
    f = jshard.shard(fn, ((4, 2), None), mesh=mesh)
    np.testing.assert_allclose(f(a, B), fn(A, B), atol=1e-6)
    got = jax.jit(jax.grad(loss(f)))(a, B)
    np.testing.assert_allclose(got, jax.grad(loss(fn))(A, B), atol=1e-5)
    out, pull = jax.vjp(f, a, B)
    assert str(jax.typeof(pull(out)[0])) == str(jax.typeof(a))


def test_explicit_mesh_of_other_size():
    mesh = MESHES["explicit"]
    a = jax.device_put(A, NamedSharding(mesh, P("x")))
    follows = jshard.shard(fn, ((4, 2), None))  # the mesh of its argument, not all 16 devices
    np.testing.assert_allclose(jax.jit(follows)(a, B), fn(A, B), atol=1e-6)
    assert follows(a, B).sharding.device_set == a.sharding.device_set
    assert follows.plan(a, B).mesh.total == 8
    every = Mesh(np.array(jax.devices()), ("d",))
    f = jshard.shard(fn, ((4, 2), None), mesh=every)
    with pytest.raises(MeshError) as caught:
        jax.jit(f)(a, B)
    assert (
        caught.value.what == "fn is planned for 16 devices, but an Explicit mesh of 8 is in use: ('x', 'y')"
    )
    assert caught.value.where == "call of fn"
    assert caught.value.fix == "jshard.shard(fn, ..., mesh=...) with that mesh"
    np.testing.assert_allclose(f(a, B), fn(A, B), atol=1e-6)
