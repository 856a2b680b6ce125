"""The user's own `jax.shard_map` as an operator: its cuts are given, its body runs on the blocks as it is.

Each mesh axis that its specs name is a factor of that axis' size; a dimension cut by `("d", "m")` is the factors d
and m, then a rest that is never cut. The pins that tracing wrote leave the one candidate that cuts d by d and m by m.

The body was traced either with `check_vma`, so that values are typed by the axes they vary over, or without. It is
run under the setting that it was traced under, whatever the plan runs under.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jshard import _jaxcompat as compat
from jshard._program.user_shard_map import SHARD_MAP, USER_SHARD_MAP_SCOPE
from jshard._rules.factors import Factors
from jshard._rules.registry import LocalContext, OpView, family
from jshard._rules.rule import Dims, Rule


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _local(ctx: LocalContext, *operands: Any) -> Sequence[Any]:
    p, where = ctx.op.params, f"the shard_map over {', '.join(map(str, ctx.op.params['mesh'].axis_names))}"
    typed, outside = bool(p["check_vma"]), compat.check_vma_enabled()
    if outside and not typed:
        operands = tuple(compat.retyped(x, frozenset(), where) for x in operands)
    with compat.check_vma(typed), jax.named_scope(USER_SHARD_MAP_SCOPE):
        if typed:
            operands = tuple(
                compat.cast_vma(x, (a for entry in spec for a in _axes(entry)))
                for x, spec in zip(operands, p["in_specs"], strict=True)
            )
        results = compat.run_jaxpr(p["jaxpr"], operands)
    layouts = [frozenset(ctx.result_layout(k).axes) if outside else frozenset() for k in range(len(results))]
    if typed != outside:
        return [compat.retyped(x, axes, where) for x, axes in zip(results, layouts, strict=True)]
    return [_without_unit_axes(x, axes) for x, axes in zip(results, layouts, strict=True)]


def _without_unit_axes(x: Any, axes: frozenset[str]) -> Any:
    """The value typed as varying over no axes but `axes`: others are of size one, which the planner does not see."""
    extra = tuple(sorted(compat.vma(x) - axes))
    if not extra:
        return x
    return compat.all_gather_invariant(x, extra, axis=0) if x.ndim else lax.psum(x, extra)


@family("other")(SHARD_MAP, local=_local)
def mapped(op: OpView) -> Rule:
    """The cuts that the specs write."""
    mesh, f = op.params["mesh"], Factors()
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    factor: dict[str, int] = {}
    blocked: list[int] = []

    def dims(aval: Any, spec: Any) -> Dims:
        out = []
        for size, entry in zip(aval.shape, (*spec, *[None] * (len(aval.shape) - len(spec))), strict=True):
            axes = [a for a in _axes(entry) if sizes[a] > 1]
            for a in axes:
                if a not in factor:
                    factor[a] = f.new(sizes[a])
            here = [factor[a] for a in axes]
            rest = size // math.prod(sizes[a] for a in axes)
            if axes and rest != 1:
                here.append(f.new(rest))
                blocked.append(here[-1])
            out.append(tuple(here))
        return tuple(out)

    ins = tuple(map(dims, op.ins, op.params["in_specs"]))
    outs = tuple(map(dims, op.outs, op.params["out_specs"]))
    # What the body does is read from it (`_network/shard_map_cost.py`): no count of points says how much that is.
    return Rule(
        ins, outs, f.sizes, blocked=tuple(blocked), work=0.0,
        note="written for devices by the user: its cuts are given",
    )  # fmt: skip
