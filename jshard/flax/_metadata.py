"""Partitioning metadata of Flax's variables and boxes as `PartitionSpec`s (`flax_protocol.HasPartitionSpec`).

>>> import jax, jax.numpy as jnp
>>> from flax import linen as nn
>>> import jshard.flax
>>> init = nn.with_logical_partitioning(nn.initializers.zeros, ("embed", "mlp"))
>>> box = nn.Dense(4, kernel_init=init).init(jax.random.key(0), jnp.ones((2, 8)))["params"]["kernel"]
>>> with nn.logical_axis_rules((("mlp", "model"),)):
...     tuple(spec_of_box(box))
(None, 'model')
"""

from __future__ import annotations

from typing import Any

from flax import linen, nnx
from flax.nnx.spmd import get_var_pspec
from jax.sharding import PartitionSpec

from jshard._spec.flax_protocol import PARTITION_SPEC


def spec_of_box(box: linen.Partitioned) -> PartitionSpec | None:
    """The mesh axes of a linen box: its names, or its logical names under its own rules or those in context."""
    if isinstance(box, linen.LogicallyPartitioned):
        rules = box.rules or linen.get_logical_axis_rules()
        return linen.spmd.logical_to_mesh_axes(box.names, rules) if rules else None
    return PartitionSpec(*box.names)


def spec_of_variable(variable: Any) -> PartitionSpec | None:
    """The mesh axes of an nnx variable under its own rules and those in context; None without metadata."""
    return get_var_pspec(variable) if variable.get_metadata().get("out_sharding") else None


def install() -> None:
    """Add the method to the classes."""
    setattr(linen.Partitioned, PARTITION_SPEC, spec_of_box)
    setattr(nnx.Variable, PARTITION_SPEC, spec_of_variable)
