"""The user's own `jax.shard_map` inside a sharded function: one operator with pinned operands and results.

A plan runs as one `jax.shard_map` over all axes of its mesh. The body of the user's `shard_map` runs inside it
unchanged, collectives included, if it is over an equal mesh: same axes, sizes and order. Its `in_specs` and `out_specs`
are pins. A `shard_map` over another mesh, or over some of the axes, is an error.
"""

from __future__ import annotations

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jshard._core.errors import ShardError
from jshard._core.jax_types import JaxprEqn
from jshard._core.layout import MeshAxes
from jshard._core.topology import mesh_axes
from jshard._program.graph import Program


SHARD_MAP = "shard_map"
USER_SHARD_MAP_SCOPE = "jshard_own_map"
"""Name scope of the body: verification recognises the user's collectives by it in the HLO metadata."""


def pins_of(eqn: JaxprEqn, function: str, where: str) -> list[tuple[str, int, NamedSharding]]:
    """(side, index, sharding) of every operand and result of a `shard_map` equation.

    Raises: `ShardError` if it does not map all axes of its mesh.
    """
    mesh = eqn.params["mesh"]
    unmapped = [a for a in mesh.axis_names if a not in eqn.params["newly_manual_axes"]]
    if unmapped:
        raise ShardError(
            f"jax.shard_map over {', '.join(sorted(map(str, eqn.params['newly_manual_axes']))) or 'no axis'} of the "
            f"mesh {mesh_axes(mesh)} inside the sharded function {function}",
            where=where,
            fix=f"axis_names of all axes of the mesh: {', '.join(map(str, unmapped))} would be left to the compiler, "
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
    """Raise `ShardError` for a `shard_map` of the user's over another mesh than the plan's."""
    for i in np.flatnonzero(program.use_def.has_primitive(frozenset((SHARD_MAP,)))).tolist():
        op = program.operators[i]
        user = mesh_axes(op.equation.params["mesh"])
        if user != axes:
            raise ShardError(
                f"jax.shard_map over the mesh {user} inside the sharded function {program.name}, which is planned "
                f"for the mesh {axes}",
                where=f"{op.module} {op.source}".strip(),
                fix="one mesh for both: jshard.shard(..., mesh=mesh) with the mesh of the shard_map, and cuts that "
                "its axes can express; or the same on whole arrays, for which the collectives are planned",
            )
