"""Convolutions whose rows are to be short: those with rows that some layout leaves long, and no others."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jshard._core import hardware, topology
from jshard._core.layout import MeshAxes
from jshard._plan.short_rows import ROW, short_rows
from jshard._program.trace import build


def convolution(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@pytest.mark.parametrize(("row", "forced"), [(224, 0), (256, 0), (257, 2), (512, 2), (1024, 2), (1040, 0)])
def test_rows_that_are_short_in_every_layout_are_left_free(row, forced):
    """Of operand and result: on four devices a row of 1,024 can be cut to 256, one of 1,040 cannot."""
    shapes = (
        jax.ShapeDtypeStruct((8, row, row, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.bfloat16),
    )
    program = build(jax.jit(convolution).trace(*shapes).jaxpr, name="f", input_names=["x", "w"])
    v5e = topology.from_mesh(MeshAxes(("x",), (4,)), hardware.get("v5e"))
    assert len(short_rows(program, v5e, limit=1.0)) == forced
    assert ROW == 256
