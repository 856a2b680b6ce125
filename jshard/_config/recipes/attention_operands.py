"""The queries and keys of attention operators, which `ring` cuts by positions and `ulysses` by heads, with names for rules.

Problem.  With the result of an attention cut by tokens, each device may have all keys gathered, or pass its own round. What
tells the two apart is how the operator takes its keys, not where these are stored.

Idea.  A cut of queries and keys along one axis is the ring's, forward and backward. So the operands of each attention
operator have names of their own, `wq @ wk @ wv:queries` and `wq @ wk @ wv:keys`, which stand for the operator itself, for
its backward pass and for its repetition in a checkpointed layer.
"""

from __future__ import annotations

import dataclasses

from jshard._config.recipes.products import ATTENTION, largest_first, product_name
from jshard._config.recipes.structure import Structure
from jshard._program.graph import Literal
from jshard._program.operators import PRODUCTS


_OPERATORS = frozenset((ATTENTION, f"{ATTENTION}_backward"))
OPERANDS = ("queries", "keys")
"""Names of the first operands."""


@dataclasses.dataclass(frozen=True)
class AttentionOperand:
    """Operand number `operand` (queries or keys) of operator `op`, the value `tensor`.

    `positions`: (dimension of the queries', of the keys' positions) as classes of the model.
    """

    name: str
    op: int
    operand: int
    tensor: int
    positions: tuple[int, int]


def attention_operands(s: Structure) -> list[AttentionOperand]:
    """Queries and keys of every attention operator of both passes."""
    found = [op for op in s.program.operators if op.primitive in _OPERATORS]
    if not found:
        return []
    inputs_of, name_of_op = _products_with_weights(s), {p.op: p.name for p in s.products}
    out = []
    for op in found:
        q, k, v = op.operands[:3]
        if isinstance(q, Literal) or isinstance(k, Literal):
            continue
        name = name_of_op.get(op.id) or product_name(s.program, (q, k, v), inputs_of)
        positions = (s.classes.of(q)[-3], s.classes.of(k)[-3])
        out += [
            AttentionOperand(f"{name}:{what}", op.id, i, t, positions)
            for i, (what, t) in enumerate(zip(OPERANDS, (q, k), strict=True))
        ]
    return out


def _products_with_weights(s: Structure) -> dict[int, str]:
    """The names of products by operator: those of the forward pass, and repeated ones by the weight that they read."""
    out = {p.op: p.name for p in s.products if s.program.operators[p.op].primitive != ATTENTION}
    for op in s.program.operators:
        if op.primitive not in PRODUCTS or op.id in out:
            continue
        behind = [s.origins.of[a] for a in op.operands[:2] if not isinstance(a, Literal)]
        weights = [n for b in behind for n in largest_first(s.program, b or frozenset())]
        if weights:
            out[op.id] = s.name(weights[0])
    return out
