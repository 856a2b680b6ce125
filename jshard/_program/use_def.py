"""Use-def chains of a program as arrays: which operator uses a tensor, which defines it, and its type.

A training step of 126 layers has fifty thousand operators, and a dozen passes need the uses, sizes and last uses of its
tensors. The graph is walked once in Python; the passes work on these arrays with numpy. A *use* is an operand that is
a tensor. Uses are numbered in program order, so those of one operator are contiguous (compressed sparse rows);
`uses_by_tensor` orders them by tensor instead.

>>> import jax, jax.numpy as jnp
>>> from jshard._program.trace import build
>>> traced = jax.jit(lambda x: x * x + 1).trace(jax.ShapeDtypeStruct((4,), "float32"))
>>> a = build(traced.jaxpr, name="f", input_names=["x"]).use_def
>>> a.use_op.tolist(), a.use_tensor.tolist(), a.def_op.tolist()      # x is tensor 0, operator 0
([1, 1, 2, 3], [0, 0, 1, 2], [0, 1, 2])
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from jshard._core import jaxcompat
from jshard._core.arrays import Bools, Floats, Ints
from jshard._program.operators import Literal, Operator, Tensor


T = TypeVar("T")

BODY_ENTRY_KINDS = ("scan_const", "scan_carry", "scan_sum", "scan_xs", "while_const", "while_carry")
"""Boundary operators with a result that is defined in the body of a loop."""


@dataclasses.dataclass(frozen=True, eq=False)
class UseDef:
    """Uses of operator `i` are `use_begin[i]` to `use_begin[i + 1]`, its results likewise by `result_begin`.

    Dimensions: U uses, O operators, R results of all operators, T tensors, L literal operands.
    """

    use_op: Ints  # (U,) the operator
    use_operand: Ints  # (U,) the index among its operands
    use_tensor: Ints  # (U,) the tensor
    use_begin: Ints  # (O + 1,)
    result: Ints  # (R,) tensors in the order of the operators that define them
    result_begin: Ints  # (O + 1,)
    def_op: Ints  # (T,) the operator that defines the tensor
    def_result: Ints  # (T,) the index among its results
    aval_id: Ints  # (T,) id of shape and dtype
    aval_ids: dict[tuple[tuple[int, ...], np.dtype], int]  # (shape, dtype) -> id
    primitive_id: Ints  # (O,) id of kind and primitive
    primitive_ids: dict[tuple[str, str], int]  # (kind, primitive) -> id
    repeat: Floats  # (O,) executions per call of the program
    result_repeat: Floats  # (T,) definitions per call of the program
    literals: list[Literal]  # (L,)
    literal_op: Ints  # (L,) the operator that has it as operand
    literal_operand: Ints  # (L,) the index among its operands

    @functools.cached_property
    def nbytes(self) -> Floats:
        """(T,) bytes of each tensor."""
        return self.aval_nbytes[self.aval_id]

    @functools.cached_property
    def aval_nbytes(self) -> Floats:
        """Bytes of a tensor by `aval_id`."""
        return np.array(
            [jaxcompat.itemsize(dtype) * math.prod(shape) for shape, dtype in self.aval_ids],
            dtype=np.float64,
        )

    @functools.cached_property
    def uses_by_tensor(self) -> tuple[Ints, Ints]:
        """((U,) uses ordered by tensor, then program order; (T + 1,) where those of each tensor begin)."""
        order = np.argsort(self.use_tensor, kind="stable")
        counts = np.bincount(self.use_tensor, minlength=len(self.def_op))
        return order, np.concatenate([[0], np.cumsum(counts)])

    def has_primitive(self, names: frozenset[str]) -> Bools:
        """(O,) whether the operator is an equation with one of these primitives."""
        return self._of_primitives([kind == "eqn" and name in names for kind, name in self.primitive_ids])

    def primitive_starts_with(self, prefixes: tuple[str, ...]) -> Bools:
        """(O,) whether the name of the primitive starts with one of these prefixes."""
        return self._of_primitives([name.startswith(prefixes) for _, name in self.primitive_ids])

    def has_kind(self, *kinds: str) -> Bools:
        """(O,) whether the operator is of one of these kinds."""
        return self._of_primitives([kind in kinds for kind, _ in self.primitive_ids])

    def _of_primitives(self, values: list[bool]) -> Bools:
        return np.array(values, dtype=bool)[self.primitive_id]


def use_def_of(operators: Sequence[Operator], tensors: Sequence[Tensor]) -> UseDef:
    """The use-def chains of a program's operators and tensors."""
    begin, use_op, operand, atoms = _concatenated([op.operands for op in operators])
    # A tensor is its id, a literal an object.
    use_tensor = np.fromiter([a if type(a) is int else -1 for a in atoms], np.int64, len(atoms))
    is_tensor = use_tensor >= 0
    at_literal = np.flatnonzero(~is_tensor)
    literals = (
        [a for i in at_literal.tolist() if isinstance(a := atoms[i], Literal)],
        use_op[at_literal],
        operand[at_literal],
    )
    if len(at_literal):
        begin = np.concatenate([[0], np.cumsum(is_tensor)])[begin]
        use_op, operand, use_tensor = use_op[is_tensor], operand[is_tensor], use_tensor[is_tensor]

    result_begin, defining, result_index, results = _concatenated([op.results for op in operators])
    result = np.fromiter(results, np.int64, len(results))
    def_op, def_result = np.full(len(tensors), -1), np.zeros(len(tensors), dtype=np.int64)
    def_op[result], def_result[result] = defining, result_index

    aval_ids: dict[tuple[tuple[int, ...], np.dtype], int] = {}
    aval_id = [aval_ids.setdefault((t.shape, t.dtype), len(aval_ids)) for t in tensors]
    primitive_ids: dict[tuple[str, str], int] = {}
    primitive_id = [primitive_ids.setdefault((op.kind, op.primitive), len(primitive_ids)) for op in operators]

    repeat = np.fromiter([op.repeat for op in operators], np.float64, len(operators))
    result_repeat = repeat[def_op]
    entries = [number for (kind, _), number in primitive_ids.items() if kind in BODY_ENTRY_KINDS]
    for i in np.flatnonzero(np.isin(primitive_id, entries)).tolist():
        result_repeat[list(operators[i].results)] = operators[i].result_repeat
    return UseDef(
        use_op, operand, use_tensor, begin, result, result_begin, def_op, def_result,
        np.array(aval_id, dtype=np.int64), aval_ids, np.array(primitive_id, dtype=np.int64), primitive_ids, repeat,
        result_repeat, *literals,
    )  # fmt: skip


def _concatenated(lists: list[tuple[T, ...]]) -> tuple[Ints, Ints, Ints, list[T]]:
    """Lists end to end: where each begins; the list of each entry; its index in that list; the entries."""
    counts = np.fromiter(map(len, lists), np.int64, len(lists))
    begin = np.concatenate([[0], np.cumsum(counts)])
    owner = np.repeat(np.arange(len(lists)), counts)
    return begin, owner, np.arange(begin[-1]) - begin[owner], list(itertools.chain.from_iterable(lists))
