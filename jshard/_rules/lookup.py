"""Look-up of the rule and local implementation of any operator; never raises.

A primitive without a rule, or whose rule raises or does not fit the operator, runs replicated; its opaque rule has a
note with the reason, which reports print.

>>> op = OpView("no_such_primitive", {}, (), ())
>>> r, entry = rules_for(op)
>>> r.opaque, entry, r.note
(True, None, "no rule for primitive 'no_such_primitive'")
"""

from __future__ import annotations

from jshard._rules.factors import validate
from jshard._rules.primitives import (
    attention,
    callbacks,
    control_flow,
    convolution,
    cumulative,
    data_movement,
    dot_general,
    elementwise,
    fused_operator,
    gather,
    identity,
    linalg,
    linear_solve,
    opaque_operators,
    pipeline_shift,
    ragged_dot,
    random,
    reduce_window,
    reductions,
    reshape,
    scatter,
    shard_map,
    shifts,
    slicing,
    sorting,
    tails,
)
from jshard._rules.registry import REGISTRY, OpView, RuleEntry, opaque_rule
from jshard._rules.rule import Rule


# Importing a family registers its rules.
FAMILIES = (
    attention,
    callbacks,
    control_flow,
    convolution,
    cumulative,
    dot_general,
    elementwise,
    fused_operator,
    gather,
    linalg,
    shard_map,
    identity,
    data_movement,
    opaque_operators,
    pipeline_shift,
    ragged_dot,
    reductions,
    reshape,
    random,
    scatter,
    shifts,
    slicing,
    sorting,
    linear_solve,
    reduce_window,
    tails,
)


def rules_for(op: OpView) -> tuple[Rule, RuleEntry | None]:
    """The operator's rule and registry entry; without a usable rule, the opaque rule and None."""
    entry = REGISTRY.get(op.primitive)
    if entry is None:
        return opaque_rule(op, f"no rule for primitive {op.primitive!r}"), None
    try:
        r = entry.rule(op)
        validate(r, op)
    except Exception as e:  # rules may be the user's code: on any error replicate, with a note
        return opaque_rule(op, f"the rule of {op.primitive!r} failed: {type(e).__name__}: {e}"), None
    return r, entry
