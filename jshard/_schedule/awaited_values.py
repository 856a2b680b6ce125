"""What a copy that is made again waits for: values in memory from which the reader's other operands are computed.

Compilers would merge equal collectives, or begin the second long before its result is used. A barrier keeps it behind
these values. It must not be behind an operand that is fused into its readers: the barrier would have that written to memory
(the derivative of a loss by the logits, in a training step), which holds more than the copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from jshard._program.graph import Program


def awaited_values(program: Program, materialized: Sequence[bool], reader: int, tensor: int) -> list[int]:
    """The tensors in memory from which operands of a reader other than a tensor are computed, no arguments; memoised."""
    # The sequence is kept, so that no other has its identity.
    _, known = program.memo.setdefault(("awaited values", id(materialized)), (materialized, {}))
    if (reader, tensor) not in known:
        known[reader, tensor] = _awaited_values(program, materialized, reader, tensor)
    return known[reader, tensor]


def _awaited_values(program: Program, materialized: Sequence[bool], reader: int, tensor: int) -> list[int]:
    operators, producers = program.operators, program.defs()
    found: dict[int, None] = {}
    seen, left = {tensor}, [a for a in operators[reader].operands if isinstance(a, int)]
    while left:
        t = left.pop()
        if t in seen:
            continue
        seen.add(t)
        op = operators[producers[t][0]]
        if materialized[t] and op.kind == "eqn":
            found[t] = None
        elif op.kind == "eqn":
            left += [a for a in op.operands if isinstance(a, int)]
    return sorted(found)
