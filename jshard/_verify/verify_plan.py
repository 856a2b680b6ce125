"""Verification of a `Plan`: its own collectives, mesh and arguments against a compiled program.

`Plan.verify(compiled)` is `verify_plan(plan, compiled)`.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jshard._plan.record import PlanRecord
from jshard._verify.compare import Verification, hlo_shape, verify_program
from jshard._verify.exposed_communication import compiled_timeline
from jshard._verify.match import Predicted


def predicted_collectives(plan: PlanRecord) -> list[Predicted]:
    """The collectives of a plan with their numbers, without those in the user's own `shard_map`."""
    return [
        Predicted(
            c.kind,
            tuple(c.axes),
            float(c.bytes),
            f"{c.operator}",
            c.count,
            c.id,
            c.turn,
            c.dtype,
            f"{c.tensor} {c.local}",
        )  # fmt: skip
        for c in plan.collectives
        if not c.own
    ]


def verify_plan(plan: PlanRecord, compiled: jax.stages.Compiled | str, *, slices: int = 1) -> Verification:
    """Compare a compiled program with its plan.

    Arguments:

    - `plan`: the plan.
    - `compiled`: `f.lower(...).compile()`, its text, or the result of `read_program`.
    - `slices`: number of TPU slices of the mesh.

    Raises `PlanMismatchError` if the program has another number of devices or other arguments.
    """
    found = verify_program(
        predicted_collectives(plan),
        compiled,
        devices=plan.mesh.total,
        slices=slices,
        inputs=local_input_types(plan),
    )
    rows = {c.id: c for c in plan.collectives}
    return dataclasses.replace(found, timeline=compiled_timeline(rows, plan.chip, found))


def local_input_types(plan: PlanRecord) -> list[str] | None:
    """Types of the plan's flat arguments on one device; None if one of them has no HLO type."""
    out = []
    for row in plan.inputs:
        try:
            dtype = np.dtype(row.dtype)
        except TypeError:
            return None  # keys and other extended types are recorded by name only
        out.append(hlo_shape(row.layout.local_shape(row.shape, plan.mesh), dtype))
    return out
