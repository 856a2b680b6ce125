"""What is done so that compilers hold no more than a plan: blocks of reduce-scatters, memory layouts of complex arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType

from jshard._core import hardware
from jshard._core.layout import Layout, MeshAxes
from jshard._core.topology import from_mesh
from jshard._cost.reshard_steps import ReshardStep
from jshard._lower.emit_collectives import apply_reshard
from jshard._lower.made_and_read import is_made_by_loop
from jshard._program.trace import build
from jshard._rules.registry import in_row_major


MESH = MeshAxes(("x", "y"), (2, 4))


@pytest.mark.parametrize(
    "chip, rows, after_loop, barriers",
    [("v5e", 16, True, 2), ("v5e", 16, False, 1), ("v5e", 1024, True, 1), ("h100", 16, True, 0)],
)
def test_the_block_of_a_reduce_scatter_is_in_memory_before_its_readers_on_tpus(
    chip, rows, after_loop, barriers
):
    """libtpu makes an all-reduce and a slice of some, and would fuse the slice into each reader.

    Where blocks are no multiple of 128 it would also have a loop before hold the sum in the layout of the all-reduce.
    """
    a, b = Layout(((), ()), ("x", "y")), Layout((("x", "y"), ()))
    step = ReshardStep("reduce_scatter", ("x", "y"), None, 0)

    def scattered(x):
        topology = from_mesh(MESH, hardware.get(chip))
        return apply_reshard(x, a, b, (step,), MESH, vma=False, topology=topology, after_loop=after_loop) * 2

    mesh = jax.make_mesh(MESH.sizes, MESH.names, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])
    f = jax.shard_map(scattered, mesh=mesh, in_specs=jax.P(), out_specs=b.spec, check_vma=False)
    text = str(jax.make_jaxpr(f)(jnp.ones((rows, 4))))
    assert "reduce_scatter" in text
    assert text.count("optimization_barrier") == barriers
    assert (jax.jit(f)(jnp.ones((rows, 4))) == 16).all()


def test_sums_of_loops_are_known():
    """Through elementwise work on them; a product of such a sum is none."""

    def step(x, w):
        def body(total, row):
            return total + row, row.sum()

        total, sums = lax.scan(body, jnp.zeros(4), x)
        return (total * 2).astype("bfloat16"), sums, total @ w, (x @ w) * 3

    program = build(jax.jit(step).trace(jnp.ones((8, 4)), jnp.ones((4, 4))).jaxpr, name="f", input_names=[])
    results = [program.operators[i].operands[0] for i in program.outputs]
    assert [is_made_by_loop(program, r) for r in results] == [True, True, False, False]


@pytest.mark.parametrize(
    "dtype, chip, constrained",
    [("float32", "tpu-v5e", True), ("complex64", "tpu-v5e", False), ("complex64", "cpu", True)],
)
def test_complex_arrays_have_no_constraint_on_their_memory_layout_on_tpus(dtype, chip, constrained):
    """The TPU compiler writes complex arrays as two and refuses the constraint."""
    text = str(jax.make_jaxpr(lambda x: in_row_major(x, chip))(jnp.ones((4, 4), dtype)))
    assert ("layout_constraint" in text) == constrained
