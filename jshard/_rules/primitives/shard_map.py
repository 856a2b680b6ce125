"""The user's own `jax.shard_map` as an operator: its specs fix the candidate, its body runs unchanged on the shards.

Each mesh axis in its specs is a factor of that axis' size; a dimension sharded over `("d", "m")` has the factors d and
m, then a blocked one. The pins from tracing leave the one candidate in which axis d shards factor d, and m factor m.

The body was traced with or without `check_vma`, and is run under the same setting, whatever the plan runs under.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax import lax
from jax.sharding import PartitionSpec

from jshard._core import jaxcompat as compat
from jshard._core.layout import ArrayType
from jshard._program.user_shard_map import SHARD_MAP, USER_SHARD_MAP_SCOPE
from jshard._rules.factors import Factors
from jshard._rules.registry import LocalContext, OpView, family
from jshard._rules.rule import Dims, Rule


def _axes(entry: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _local(ctx: LocalContext, *operands: jax.Array) -> Sequence[jax.Array]:
    p, where = ctx.op.params, f"the shard_map over {', '.join(map(str, ctx.op.params['mesh'].axis_names))}"
    body_typed, plan_typed = bool(p["check_vma"]), compat.check_vma_enabled()
    if plan_typed and not body_typed:
        operands = tuple(compat.retyped(x, frozenset(), where) for x in operands)
    with compat.check_vma(body_typed), jax.named_scope(USER_SHARD_MAP_SCOPE):
        if body_typed:
            operands = tuple(
                compat.cast_vma(x, (a for entry in spec for a in _axes(entry)))
                for x, spec in zip(operands, p["in_specs"], strict=True)
            )
        results = compat.run_jaxpr(p["jaxpr"], operands)
    layouts = [
        frozenset(ctx.result_layout(k).axes) if plan_typed else frozenset() for k in range(len(results))
    ]
    if body_typed != plan_typed:
        return [compat.retyped(x, axes, where) for x, axes in zip(results, layouts, strict=True)]
    return [_without_unit_axes(x, axes) for x, axes in zip(results, layouts, strict=True)]


def _without_unit_axes(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """The value typed as varying over `axes` only: others are of size one, which the planner leaves out."""
    extra = tuple(sorted(compat.vma(x) - axes))
    if not extra:
        return x
    return compat.all_gather_invariant(x, extra, axis=0) if x.ndim else lax.psum(x, extra)


@family("other")(SHARD_MAP, local=_local)
def mapped(op: OpView) -> Rule:
    """Factors for the axes of the specs."""
    mesh, f = op.params["mesh"], Factors()
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    factor: dict[str, int] = {}
    blocked: list[int] = []

    def dims(aval: ArrayType, spec: PartitionSpec) -> Dims:
        out = []
        for size, entry in zip(aval.shape, (*spec, *[None] * (len(aval.shape) - len(spec))), strict=True):
            axes = [a for a in _axes(entry) if sizes[a] > 1]
            for a in axes:
                if a not in factor:
                    factor[a] = f.new(sizes[a])
            factors = [factor[a] for a in axes]
            local_size = size // math.prod(sizes[a] for a in axes)
            if axes and local_size != 1:
                factors.append(f.new(local_size))
                blocked.append(factors[-1])
            out.append(tuple(factors))
        return tuple(out)

    ins = tuple(map(dims, op.ins, op.params["in_specs"]))
    outs = tuple(map(dims, op.outs, op.params["out_specs"]))
    # No work: the costs of the body are computed from its jaxpr (`_network/shard_map_cost.py`).
    return Rule(
        ins, outs, f.sizes, blocked=tuple(blocked), work=0.0,
        note="written for devices by the user: its cuts are given",
    )  # fmt: skip
