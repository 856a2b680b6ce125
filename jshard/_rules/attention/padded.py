"""What padding of the batch, of heads or of a sequence means for attention, forward and backward.

Forward, a padded query, head or example has a result that nobody reads. Padded keys must have no weight: under a causal
mask true queries come before them; else the operator is told how many keys there are (`Attention.num_keys`). Keys and
values there are zero, since a weight of zero does not undo an infinity.

Backward, what sums over a padded dimension gets zeros from there: queries, results and cotangents are zero, and the
softmax has a largest logit of zero and a sum of one. Of a bias that is broadcast the gradient sums over its dimensions.

The size of a head, and heads of keys that are fewer than those of queries, are not padded.
"""

from __future__ import annotations

import dataclasses

from jshard._core.jax_types import Params
from jshard._rules.attention.definition import Attention
from jshard._rules.registry import OpView
from jshard._rules.rule import Rule


def attention_masks(op: OpView, rule: Rule, f: int) -> tuple[tuple[int, float], ...] | None:
    """(operand, value) that the padding of a factor must have there; None where it cannot be padded."""
    spec: Attention = op.params["spec"]
    queries, keys = rule.operands[0], rule.operands[1]
    head, key_heads = queries[-1], keys[-2]
    if (f,) in (head, rule.operands[2][-1]) or key_heads != queries[-2] and (f,) in (key_heads, queries[-2]):
        return None
    if (f,) == keys[-3]:
        return ((1, 0.0), (2, 0.0))
    num = spec.num_operands
    backward = len(op.ins) > num
    if not backward or all((f,) in dims for dims in rule.results):
        return ()
    zeros = [i for i in (*range(3 + spec.has_bias), num, num + 1, num + 3) if (f,) in rule.operands[i]]
    return (*((i, 0.0) for i in zeros), (num + 2, 1.0))


def attention_params(op: OpView, keys: int) -> Params:
    """The parameters where the keys have length `keys` after padding."""
    spec: Attention = op.params["spec"]
    queries, true = op.ins[0].shape[-3], op.ins[1].shape[-3]
    if keys == true or spec.causal and queries <= true:
        return op.params
    return {**op.params, "spec": dataclasses.replace(spec, num_keys=spec.num_keys or true)}
