"""A `jax.shard_map` that the user wrote inside a sharded function: one operator whose cuts are written down.

A plan runs as one `jax.shard_map` over all axes of its mesh. So the body of the user's own can run there as it is,
its collectives included, if it names the same mesh: same axes, same sizes, same order. Its `in_specs` and
`out_specs` are pins. What cannot be joined with the plan's own map is refused, and the text says what to write.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jshard._core.errors import ShardError
from jshard._core.layout import MeshAxes
from jshard._program.graph import Program


SHARD_MAP = "shard_map"
USER_SHARD_MAP_SCOPE = "jshard_own_map"
"""By this name in the metadata verification knows the collectives that the user wrote."""


def axes_of(mesh: Any) -> MeshAxes:
    """The axes of a mesh of JAX's, those of size one included."""
    return MeshAxes(tuple(mesh.axis_names), tuple(mesh.axis_sizes))


def pins_of(eqn: Any, function: str, where: str) -> list[tuple[str, int, NamedSharding]]:
    """(side, index, sharding) of every operand and result of the user's `shard_map`; refused if it maps few axes."""
    mesh = eqn.params["mesh"]
    left = [a for a in mesh.axis_names if a not in eqn.params["newly_manual_axes"]]
    if left:
        raise ShardError(
            f"jax.shard_map over {', '.join(sorted(map(str, eqn.params['newly_manual_axes']))) or 'no axis'} of the "
            f"mesh {axes_of(mesh)} inside the sharded function {function}",
            where=where,
            fix=f"axis_names of all axes of the mesh: {', '.join(map(str, left))} would be left to the compiler, "
            "but a plan leaves none",
        )
    sides = (
        ("operand", eqn.invars, eqn.params["in_specs"]),
        ("result", eqn.outvars, eqn.params["out_specs"]),
    )
    return [
        (side, k, NamedSharding(mesh, PartitionSpec(*spec, *[None] * (len(v.aval.shape) - len(spec)))))
        for side, variables, specs in sides
        for k, (v, spec) in enumerate(zip(variables, specs, strict=True))
        if v.aval.shape
    ]


def check_meshes(program: Program, axes: MeshAxes) -> None:
    """Refuse a `shard_map` of the user's over another mesh than the plan's."""
    for i in np.flatnonzero(program.use_def.has_primitive(frozenset((SHARD_MAP,)))).tolist():
        op = program.operators[i]
        user = axes_of(op.eqn.params["mesh"])
        if user != axes:
            raise ShardError(
                f"jax.shard_map over the mesh {user} inside the sharded function {program.name}, which is planned "
                f"for the mesh {axes}",
                where=f"{op.module} {op.source}".strip(),
                fix="one mesh for both: jshard.shard(..., mesh=mesh) with the mesh of the shard_map, and cuts that "
                "its axes can express; or the same on whole arrays, for which the collectives are planned",
            )
