"""Equivalence classes of operators, so that candidates and tables are built once per class.

Problem.  126 layers have 126 times the same operators, and a network needs for each its candidates, its table and the
tables of its edges.

Idea.  Value numbering: equivalent are operators of one primitive, with operands and results of the same shapes and
dtypes, and equal parameters. Numpy compares them as rows of integers; what is built for one of a class serves all.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

import numpy as np

from jshard._core.arrays import Bools, Ints
from jshard._core.row_codes import first_occurrence_codes, row_codes
from jshard._network.candidates import CandidateSet
from jshard._program.graph import Program
from jshard._program.memory.kernel_parts import Kernels


_MAX_OPERANDS = 4  # operators with more operands, or with several results, are compared one by one


def operator_classes(program: Program) -> Ints:
    """(operators,) a number that is equal only for operators that have the same candidates when nothing is pinned."""
    a, n = program.use_def, len(program.operators)
    literal_ids: dict[Hashable, int] = {}
    first = len(a.aval_ids) + 1
    literal_avals = np.array(
        [literal_ids.setdefault((x.aval.shape, x.aval.dtype), first + len(literal_ids)) for x in a.literals],
        dtype=np.int64,
    )
    operands = np.zeros((n, _MAX_OPERANDS), dtype=np.int64)  # 0: there is none
    use_fits, literal_fits = a.use_operand < _MAX_OPERANDS, a.literal_operand < _MAX_OPERANDS
    operands[a.use_op[use_fits], a.use_operand[use_fits]] = a.aval_id[a.use_tensor[use_fits]] + 1
    operands[a.literal_op[literal_fits], a.literal_operand[literal_fits]] = literal_avals[literal_fits]
    first_result = np.zeros(n, dtype=np.int64)
    is_first = a.def_result == 0
    first_result[a.def_op[is_first]] = a.aval_id[is_first] + 1
    parameters, unhashable = _parameter_classes(program)
    code = row_codes(a.primitive_id, *operands.T, first_result, parameters)

    wide = np.diff(a.result_begin) > 1
    wide[a.use_op[~use_fits]] = True
    wide[a.literal_op[~literal_fits]] = True
    by_op = _operands_of(program, wide, literal_avals)
    wide_ids: dict[Hashable, int] = {}
    aval_of_tensor = a.aval_id.tolist()
    top = 1 + int(code.max(initial=0))
    for i, avals in by_op.items():
        results = tuple([aval_of_tensor[r] for r in program.operators[i].results])
        key = (int(a.primitive_id[i]), tuple(avals), results, int(parameters[i]))
        code[i] = top + wide_ids.setdefault(key, len(wide_ids))
    code[unhashable] = top + len(wide_ids) + np.arange(len(unhashable))
    return first_occurrence_codes(code)[0]


def _operands_of(program: Program, which: Bools, literal_avals: Ints) -> dict[int, list[tuple[int, int]]]:
    """For some operators the (operand, number of its aval) pairs, tensors before literals."""
    a = program.use_def
    out: dict[int, list[tuple[int, int]]] = {i: [] for i in np.flatnonzero(which).tolist()}
    for ops, places, avals in (
        (a.use_op, a.use_operand, a.aval_id[a.use_tensor] + 1),
        (a.literal_op, a.literal_operand, literal_avals),
    ):
        at = np.flatnonzero(which[ops])
        for i, operand, aval in zip(ops[at].tolist(), places[at].tolist(), avals[at].tolist(), strict=True):
            out[i].append((operand, aval))
    return out


def _parameter_classes(program: Program) -> tuple[Ints, list[int]]:
    """Numbers for the parameters of equations, and the operators whose parameters are not hashable."""
    ids: dict[Hashable, int] = {}
    out, unhashable = [], []
    for op in program.operators:
        params = op.equation.params if op.kind == "eqn" else None
        try:
            out.append(ids.setdefault(tuple(params.items()), 1 + len(ids)) if params else 0)
        except TypeError:
            out.append(0)
            unhashable.append(op.id)
    return np.array(out, dtype=np.int64), unhashable


def cost_classes(program: Program, operator_class: Ints, kernels: Kernels) -> Ints:
    """(operators,) a number that is equal only for operators with equal tables of their own.

    `operator_class` numbers their candidate sets. Beside these a table depends on the kernel whose root the operator is,
    and on how often the operator runs.
    """
    repeat = np.unique(program.use_def.repeat, return_inverse=True)[1]
    return row_codes(operator_class, repeat, kernels.class_id)


def reshard_counts(program: Program) -> np.ndarray:
    """(uses,) how often each operand is resharded for its reader in one call."""
    a = program.use_def
    out = a.repeat[a.use_op]
    at_boundary = ~a.has_kind("eqn", "input", "const", "output")
    for use in np.flatnonzero(at_boundary[a.use_op]).tolist():
        out[use] = program.operators[a.use_op[use]].operand_repeat[a.use_operand[use]]
    return out


def distinct_candidate_sets(classes: Ints, sets: Sequence[CandidateSet]) -> tuple[Ints, list[CandidateSet]]:
    """(operators,) numbers of distinct candidate sets, and these; `sets` are those of the numbers in `classes`."""
    ids: dict[int, int] = {}
    number = np.array([ids.setdefault(id(s), len(ids)) for s in sets], dtype=np.int64)
    first = np.unique(number, return_index=True)[1].tolist()
    return number[classes], [sets[i] for i in first]


def singleton_classes(n: int, *groups: Collection[int]) -> Ints:
    """(n,) a number of its own for each member of some groups, 0 for the rest."""
    out = np.zeros(n, dtype=np.int64)
    members = np.array(sorted({i for g in groups for i in g}), dtype=np.int64)
    out[members] = 1 + np.arange(len(members))
    return out
