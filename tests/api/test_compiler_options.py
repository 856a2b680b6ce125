"""An explicit memory budget becomes an option of the compiler for TPUs; a default one does not."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jshard
from jshard._api import compiler_options as module
from jshard._api.compiler_options import RESERVED, compiler_options, explicit_budget


CPUS = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))


@dataclasses.dataclass(frozen=True)
class Device:
    device_kind: str


def mesh_of(kind: str):
    """What is asked of a mesh of such devices."""
    return types.SimpleNamespace(devices=np.array([[Device(kind), Device(kind)]]))


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(module, "_is_known", lambda option, mesh: True)


def test_all_but_the_budget_over_nine_tenths_is_reserved(known):
    assert compiler_options(9 * 2**30, mesh_of("TPU v5 lite")) == {RESERVED: int(5.75 * 2**30)}
    assert compiler_options(9 * 2**30, mesh_of("TPU v6 lite")) == {RESERVED: int(21.25 * 2**30)}
    assert compiler_options(81 * 2**30, mesh_of("TPU7x")) == {RESERVED: int(4.75 * 2**30)}


def test_no_option_without_a_budget_below_the_memory_of_a_known_chip(known):
    assert compiler_options(None, mesh_of("TPU v5 lite")) is None
    assert compiler_options(15 * 2**30, mesh_of("TPU v5 lite")) is None
    assert compiler_options(10 * 2**30, mesh_of("TPU v4")) is None
    assert compiler_options(10 * 2**30, mesh_of("NVIDIA H100 80GB HBM3")) is None
    assert compiler_options(10 * 2**30, jax.sharding.AbstractMesh((2,), ("x",))) is None


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_compilers_are_asked_for_an_option(axes):
    """Also within a mesh of the user's: an error of that would be taken for one of the compiler."""
    for mesh in (CPUS, jax.make_mesh((2,), ("x",), axis_types=(axes,))):
        assert not module._is_known(RESERVED, mesh)
        assert module._is_known("xla_backend_optimization_level", mesh)
        module._is_known.cache_clear()
        with jax.set_mesh(mesh):
            assert module._is_known("xla_backend_optimization_level", mesh)
            assert module._is_known("xla_backend_optimization_level", CPUS)


def test_a_default_budget_is_not_explicit():
    x = jax.ShapeDtypeStruct((64, 64), "float32")
    mesh = jax.sharding.AbstractMesh((2,), ("x",))
    options = dict(mesh=mesh, hardware="tpu-v5e")
    assert explicit_budget(jshard.shard(jnp.sin, **options).plan(x)) is None
    assert explicit_budget(jshard.shard(jnp.sin, memory_budget="1GiB", **options).plan(x)) == 2**30
    # Without a limit of the chip there is no default.
    assert (
        explicit_budget(jshard.shard(jnp.sin, mesh=mesh, hardware="cpu", memory_budget=2**20).plan(x))
        == 2**20
    )
    assert explicit_budget(jshard.shard(jnp.sin, mesh=mesh, hardware="cpu").plan(x)) is None


def test_programs_are_compiled_with_the_options_of_their_plan(monkeypatch):
    """On CPUs an option of TPUs is refused by the compiler, so that it arrives there is seen by the error."""
    f = jshard.shard(lambda x: x + 1, mesh=CPUS, memory_budget=2**20)
    x = jnp.ones(8)
    np.testing.assert_array_equal(f(x), x + 1)
    monkeypatch.setattr(
        "jshard._api.executable.compiler_options", lambda budget, mesh: {RESERVED: int(budget)}
    )
    again = jshard.shard(lambda x: x + 1, mesh=CPUS, memory_budget=2**20)
    with pytest.raises(RuntimeError, match=RESERVED):
        again.lower(x).compile()
