"""An all-to-all by permutes: equal to XLA's, for groups of one and of two axes, and verified as the all-to-all it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

from jshard._core import hardware
from jshard._core.layout import Layout, MeshAxes
from jshard._core.topology import from_mesh
from jshard._cost.all_to_all_kind import all_to_all_in_permutes
from jshard._cost.reshard_steps import ReshardStep
from jshard._lower.all_to_all_permutes import all_to_all_by_permutes
from jshard._lower.emit_collectives import apply_reshard
from jshard._verify import read_program


MESH = MeshAxes(("x", "y"), (2, 4))


def jax_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh(MESH.sizes, MESH.names, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])


AXES = [("x",), ("y",), ("x", "y"), ("y", "x")]
DIMENSIONS = [(0, 1), (1, 0), (2, 1), (0, 2)]
DTYPES = ["float32", "bool", "complex64"]


@pytest.mark.parametrize(
    "axes, dims, dtype",
    [(a, d, DTYPES[(i + k) % 3]) for i, a in enumerate(AXES) for k, d in enumerate(DIMENSIONS)],
)
def test_equals_the_all_to_all_of_xla(axes, dims, dtype):
    """Each order of axes with each pair of dimensions; each type with each of both."""
    (split, join), spec = dims, P(("x", "y"))
    x = jnp.asarray(np.random.default_rng(0).integers(0, 9, (8 * 8, 16, 24)).astype(dtype))

    def both(block):
        one = lax.all_to_all(block, axes, split, join, tiled=True)
        return one, all_to_all_by_permutes(block, axes, split, join, MESH)

    f = jax.shard_map(both, mesh=jax_mesh(), in_specs=spec, out_specs=spec, check_vma=False)
    one, other = jax.jit(f)(x)
    assert (one == other).all() and one.dtype == other.dtype


def test_a_large_block_on_a_torus_is_sent_by_permutes_and_verified_as_an_all_to_all():
    a, b = Layout((("y",), ())), Layout(((), ("y",)))
    step = ReshardStep("all_to_all", ("y",), 0, 1)

    def compiled(chip: str):
        def exchanged(x):
            return apply_reshard(
                x, a, b, (step,), MESH, vma=False, topology=from_mesh(MESH, hardware.get(chip))
            )

        f = jax.shard_map(exchanged, mesh=jax_mesh(), in_specs=a.spec, out_specs=b.spec, check_vma=False)
        return jax.jit(f).lower(jax.ShapeDtypeStruct((4096, 1024), "float32")).compile()

    own, permuted = (read_program(compiled(chip)).collectives for chip in ("h100", "v5e"))
    assert [e.written_kind for e in own] == [""] and [e.written_kind for e in permuted] == ["permute"] * 3
    assert {e.kind for e in (*own, *permuted)} == {"all_to_all"}
    assert sum(e.total for e in permuted) == sum(e.total for e in own) == 4 * 1024 * 1024 * 3 / 4


def test_small_blocks_larger_groups_and_switches_have_the_all_to_all_of_xla():
    def asks(chip: str, axes: tuple[str, ...], nbytes: float) -> bool:
        return all_to_all_in_permutes(axes, nbytes, from_mesh(MESH, hardware.get(chip)))

    assert asks("v5e", ("y",), 1 << 22) and asks("v5e", ("x",), 1 << 22)
    assert not asks("v5e", ("y",), 1 << 16)
    assert not asks("v5e", ("x", "y"), 1 << 22)
    assert not asks("h100", ("y",), 1 << 22) and not asks("cpu", ("y",), 1 << 22)
