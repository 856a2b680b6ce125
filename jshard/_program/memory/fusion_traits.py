"""What compilers may do with each operator when they fuse: duplicate it, compute its operands in place, alias one.

The rules follow XLA's instruction fusion: a cheap producer is duplicated into all its consumers, so its value is never
materialized; reductions and random numbers are not duplicated.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jshard._core.arrays import Bools
from jshard._program.graph import Operator, Program
from jshard._program.memory.in_place import is_update
from jshard._program.memory.unfusible import is_unfusible
from jshard._program.operators import PRODUCTS


REDUCTION_PREFIXES = ("reduce_", "argm", "cum")
# Unfusible operators whose kernels can compute their operands on the fly.
_FUSES_OPERANDS = PRODUCTS | {"dynamic_update_slice", "top_k"}
NEVER_DUPLICATED = (*REDUCTION_PREFIXES, "random_", "threefry", "rng_")


def is_duplicable(op: Operator) -> bool:
    """Whether an operator is recomputed inside each of its readers instead of being materialized."""
    if op.kind != "eqn" or op.primitive.startswith(NEVER_DUPLICATED):
        return False
    return not (is_unfusible(op) or is_update(op.primitive)) or _is_one_hot_scatter(op)


def _is_one_hot_scatter(op: Operator) -> bool:
    """Whether a scatter sets one element a row: the gradient of `take_along_axis`, as in a cross entropy.

    Compilers compare each row's index with the element's own and select, so it fuses as elementwise operators do.
    """
    if not op.primitive.startswith("scatter"):
        return False
    numbers, (into, _, updates) = (
        op.equation.params["dimension_numbers"],
        (v.aval for v in op.equation.invars),
    )
    axes = numbers.scatter_dims_to_operand_dims
    one_per_row = len(axes) == 1 and updates.size * into.shape[axes[0]] == into.size
    return not numbers.update_window_dims and one_per_row


def fuses_operands(op: Operator) -> bool:
    """Whether an operator's kernel can recompute its operands from what they were computed from."""
    if op.kind != "eqn":
        return False
    return op.primitive in _FUSES_OPERANDS or not is_unfusible(op) or _is_one_hot_scatter(op)


def may_alias_operand(op: Operator) -> bool:
    """Whether an operator may write its result into the buffer of an operand at that operand's last use."""
    return is_duplicable(op) or is_update(op.primitive)


@dataclasses.dataclass(frozen=True, eq=False)
class FusionTraits:
    """The three predicates of this module for all operators: (operators,) each."""

    duplicable: Bools
    fuses_operands: Bools
    may_alias_operand: Bools


def fusion_traits(program: Program) -> FusionTraits:
    """The traits of a program's operators: evaluated once a primitive, for scatters and pads once an operator; memoised."""
    if "traits" in program.memo:
        return program.memo["traits"]
    a = program.use_def
    predicates = (is_duplicable, fuses_operands, may_alias_operand)
    first = np.unique(a.primitive_id, return_index=True)[1].tolist()
    representatives = [program.operators[i] for i in first]
    singly = np.flatnonzero(
        a.primitive_starts_with(("scatter",)) | a.has_primitive(frozenset(("pad",)))
    ).tolist()
    columns = []
    for predicate in predicates:
        column = np.array([predicate(op) for op in representatives], dtype=bool)[a.primitive_id]
        column[singly] = [predicate(program.operators[i]) for i in singly]
        columns.append(column)
    program.memo["traits"] = FusionTraits(*columns)
    return program.memo["traits"]
