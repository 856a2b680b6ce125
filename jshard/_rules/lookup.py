"""The one door to the rules: the rule of any operator, and how it runs on blocks. Never raises.

A primitive without a rule, or whose rule raises, or gives something that does not fit, runs replicated; the
note says why and the report prints it.

>>> op = OpView("no_such_primitive", {}, (), ())
>>> r, entry = rules_for(op)
>>> r.opaque, entry, r.note
(True, None, "no rule for primitive 'no_such_primitive'")
"""

from __future__ import annotations

from jshard._rules.factors import validate
from jshard._rules.primitives import (
    control_flow,
    convolution,
    data_movement,
    dot_general,
    elementwise,
    fused_operator,
    gather,
    identity,
    linalg,
    linear_solve,
    opaque_operators,
    ragged_dot,
    random,
    reduce_window,
    reductions,
    reshape,
    scatter,
    shard_map,
    slicing,
)
from jshard._rules.registry import REGISTRY, OpView, RuleEntry, opaque_rule
from jshard._rules.rule import Rule


# Importing a family registers its rules.
FAMILIES = (
    control_flow,
    convolution,
    dot_general,
    elementwise,
    fused_operator,
    gather,
    linalg,
    shard_map,
    identity,
    data_movement,
    opaque_operators,
    ragged_dot,
    reductions,
    reshape,
    random,
    scatter,
    slicing,
    linear_solve,
    reduce_window,
)


def rules_for(op: OpView) -> tuple[Rule, RuleEntry | None]:
    """The operator's rule and registry entry; without a usable rule, the opaque rule and None."""
    entry = REGISTRY.get(op.primitive)
    if entry is None:
        return opaque_rule(op, f"no rule for primitive {op.primitive!r}"), None
    try:
        r = entry.rule(op)
        validate(r, op)
    except Exception as e:  # a rule is often the user's: any failure means "replicate and say so"
        return opaque_rule(op, f"the rule of {op.primitive!r} failed: {type(e).__name__}: {e}"), None
    return r, entry
