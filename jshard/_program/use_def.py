"""The program as arrays of numbers: who reads what, who makes it, and what kind of tensor it is.

Problem.  A training step of 126 layers has fifty thousand operators, and a dozen passes over them ask the same:
who reads this tensor, how large is it, when is it read last.

Idea.  One walk in Python, the others in numpy. A *read* is an operand that is a tensor; reads are numbered in
program order, so those of an operator lie together. `by_tensor` lists them tensor by tensor instead.

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
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jshard import _jaxcompat
from jshard._core.row_codes import Ints as Ints


if TYPE_CHECKING:
    from jshard._program.graph import Program

BODY_ENTRY_KINDS = ("scan_const", "scan_carry", "scan_sum", "scan_xs", "while_const", "while_carry")
"""Boundary operators with a result that lives in the body of a loop."""

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, eq=False)
class UseDef:
    """Reads are those of operator i from `begin[i]` to `begin[i + 1]`, results likewise by `result_begin`."""

    use_op: Ints  # (reads,) the operator that reads
    use_operand: Ints  # (reads,) as which operand
    use_tensor: Ints  # (reads,) which tensor
    use_begin: Ints  # (operators + 1,)
    result: Ints  # (results,) tensors in the order of their makers
    result_begin: Ints  # (operators + 1,)
    def_op: Ints  # (tensors,) the operator that makes it
    def_result: Ints  # (tensors,) as which result
    aval_id: Ints  # (tensors,) number of its shape and dtype
    aval_ids: dict[Any, int]  # those numbers
    primitive_id: Ints  # (operators,) number of its kind and primitive
    primitive_ids: dict[tuple[str, str], int]
    repeat: Floats  # (operators,)
    result_repeat: Floats  # (tensors,) how often each comes into being
    literals: list[Any]  # those among the operands
    literal_op: Ints  # (literals,) whose operand each is
    literal_operand: Ints  # (literals,) which

    @functools.cached_property
    def nbytes(self) -> Floats:
        """(tensors,) bytes of each."""
        return self.aval_nbytes[self.aval_id]

    @functools.cached_property
    def aval_nbytes(self) -> Floats:
        """Bytes of a tensor of each kind."""
        return np.array([_jaxcompat.itemsize(d) * math.prod(s) for s, d in self.aval_ids], dtype=np.float64)

    @functools.cached_property
    def uses_by_tensor(self) -> tuple[Ints, Ints]:
        """(reads, tensor by tensor and in program order; where each tensor's begin, and the end)."""
        order = np.argsort(self.use_tensor, kind="stable")
        counts = np.bincount(self.use_tensor, minlength=len(self.def_op))
        return order, np.concatenate([[0], np.cumsum(counts)])

    def has_primitive(self, names: frozenset[str]) -> Bools:
        """(operators,) whether it is an equation with one of these primitives."""
        said = np.array([kind == "eqn" and name in names for kind, name in self.primitive_ids], dtype=bool)
        return said[self.primitive_id]

    def primitive_starts_with(self, beginnings: tuple[str, ...]) -> Bools:
        """(operators,) whether the name of its primitive, or kind, begins so."""
        return np.array([name.startswith(beginnings) for _, name in self.primitive_ids], dtype=bool)[
            self.primitive_id
        ]

    def has_kind(self, *kinds: str) -> Bools:
        """(operators,) whether it is of one of these kinds."""
        return np.array([kind in kinds for kind, _ in self.primitive_ids], dtype=bool)[self.primitive_id]


def use_def_of(program: Program) -> UseDef:
    """The arrays of a program."""
    ops, tensors = program.operators, program.tensors
    n = len(ops)
    begin, reader, operand, atoms = _listed([op.operands for op in ops])
    # Literals are objects; a tensor is its number.
    read = np.fromiter([a if type(a) is int else -1 for a in atoms], np.int64, len(atoms))
    there = read >= 0
    gone = np.flatnonzero(~there)
    literals = [atoms[i] for i in gone.tolist()], reader[gone], operand[gone]
    if len(gone):
        begin = np.concatenate([[0], np.cumsum(there)])[begin]
        reader, operand, read = reader[there], operand[there], read[there]
    result_begin, makers, places, made = _listed([op.results for op in ops])
    result = np.fromiter(made, np.int64, len(made))
    maker, place = np.full(len(tensors), -1), np.zeros(len(tensors), dtype=np.int64)
    maker[result], place[result] = makers, places
    kinds: dict[Any, int] = {}
    kind = [kinds.setdefault((t.shape, t.dtype), len(kinds)) for t in tensors]
    names: dict[tuple[str, str], int] = {}
    primitive = [names.setdefault((op.kind, op.primitive), len(names)) for op in ops]
    repeat = np.fromiter([op.repeat for op in ops], np.float64, n)
    result_repeat = repeat[maker]
    entering = [(kind, name) for kind, name in names if kind in BODY_ENTRY_KINDS]
    for i in np.flatnonzero(np.isin(primitive, [names[e] for e in entering])).tolist():
        result_repeat[list(ops[i].results)] = ops[i].result_repeat
    return UseDef(
        reader, operand, read, begin, result, result_begin, maker, place,
        np.array(kind, dtype=np.int64), kinds, np.array(primitive, dtype=np.int64), names, repeat, result_repeat,
        *literals,
    )  # fmt: skip


def _listed(lists: list[tuple]) -> tuple[Ints, Ints, Ints, list[Any]]:
    """Lists end to end: where each begins, whose each entry is, its place there, and the entries."""
    counts = np.fromiter(map(len, lists), np.int64, len(lists))
    begin = np.concatenate([[0], np.cumsum(counts)])
    whose = np.repeat(np.arange(len(lists)), counts)
    return begin, whose, np.arange(begin[-1]) - begin[whose], list(itertools.chain.from_iterable(lists))
