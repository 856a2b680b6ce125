"""What makes a value and what reads it, where compilers for TPUs write other kernels for it."""

from __future__ import annotations

from jshard._core.layout import Layout
from jshard._program.graph import Program
from jshard._program.memory.unfusible import is_unfusible
from jshard._program.operators import PRODUCTS, Literal, Operator
from jshard._program.tail_primitives import PAD_TAIL
from jshard._schedule.assignment import Assignment


_LOOPS = frozenset(("scan_carry", "scan_sum", "scan_ys", "while_carry"))
_VIEWS = frozenset(("transpose", "reshape", "squeeze", "expand_dims"))


def is_made_by_loop(program: Program, tensor: int) -> bool:
    """Whether a value is the result of a loop, or of elementwise work on one."""
    pending, seen = [tensor], {tensor}
    while pending:
        op = program.operators[program.defs()[pending.pop()][0]]
        if op.kind in _LOOPS:
            return True
        if op.kind == "eqn" and not is_unfusible(op):
            above = {a for a in op.operands if not isinstance(a, Literal)} - seen
            seen |= above
            pending += above
    return False


def pads_for_products(assignment: Assignment, op: Operator) -> bool:
    """Whether an operator pads what matrix products alone read, in the layout that it gives it."""
    if op.primitive != PAD_TAIL:
        return False
    (result,) = op.results
    return products_alone_read(assignment, result, assignment.result_layout(result))


def products_alone_read(assignment: Assignment, tensor: int, layout: Layout) -> bool:
    """Whether matrix products and nothing else read a value in a layout, themselves or as a view of it."""
    program, found = assignment.program, False
    for reader, operand in program.uses()[tensor]:
        op = program.operators[reader]
        if assignment.operand_layout(reader, operand) != layout:
            continue
        if op.kind == "eqn" and op.primitive in _VIEWS:
            (result,) = op.results
            found = products_alone_read(assignment, result, assignment.result_layout(result))
        else:
            found = op.kind == "eqn" and op.primitive in PRODUCTS
        if not found:
            return False
    return found
