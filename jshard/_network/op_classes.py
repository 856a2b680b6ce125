"""Numbers for operators, the same for those that are alike: what holds for one is asked once.

Problem.  126 layers have 126 times the same operators, and to build a network asks each of them for its states, its
table and the tables of its edges.

Idea.  Alike are operators of one primitive, with operands and results of the same shapes and dtypes, and equal
parameters. Numpy finds them; then one of each is asked, and the others get what it got.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from jshard._core.row_codes import Ints, first_occurrence_codes, row_codes
from jshard._memory.hbm_traffic import HbmTraffic
from jshard._network.candidates import CandidateSet
from jshard._program.graph import Program


_MAX_OPERANDS = 4  # operands: those of operators with more are compared one by one


def operator_classes(program: Program) -> Ints:
    """(operators,) a number that is only the same for operators that have the same states when nothing is pinned."""
    a, n = program.use_def, len(program.operators)
    literal: dict[Any, int] = {}
    first = len(a.aval_ids) + 1
    kinds = [literal.setdefault((x.aval.shape, x.aval.dtype), first + len(literal)) for x in a.literals]
    operands = np.zeros((n, _MAX_OPERANDS), dtype=np.int64)  # 0: there is none
    results = np.zeros((n, 1), dtype=np.int64)
    read = a.use_operand < _MAX_OPERANDS
    operands[a.use_op[read], a.use_operand[read]] = a.aval_id[a.use_tensor[read]] + 1
    written = a.literal_operand < _MAX_OPERANDS
    operands[a.literal_op[written], a.literal_operand[written]] = np.array(kinds, dtype=np.int64)[written]
    made = a.def_result == 0
    results[a.def_op[made], 0] = a.aval_id[made] + 1
    wide = np.diff(a.result_begin) > 1
    wide[a.use_op[~read]] = True
    wide[a.literal_op[~written]] = True
    parameters, others = _parameter_classes(program)
    code = row_codes(a.primitive_id, *operands.T, results[:, 0], parameters)
    some = np.flatnonzero(wide)
    alone: dict[Any, int] = {}
    tensor = a.aval_id.tolist()
    by_op: dict[int, list[tuple[int, int]]] = {int(i): [] for i in some.tolist()}
    for whose, place, kind in (
        (a.use_op, a.use_operand, a.aval_id[a.use_tensor] + 1), (a.literal_op, a.literal_operand, np.array(kinds, dtype=np.int64))
    ):  # fmt: skip
        here = np.flatnonzero(wide[whose])
        for i, k, v in zip(whose[here].tolist(), place[here].tolist(), kind[here].tolist(), strict=True):
            by_op[i].append((k, v))
    top = 1 + int(code.max(initial=0))
    for i in some.tolist():
        made_kinds = tuple([tensor[r] for r in program.operators[i].results])
        key = (int(a.primitive_id[i]), tuple(by_op[i]), made_kinds, int(parameters[i]))
        code[i] = top + alone.setdefault(key, len(alone))
    code[others] = top + len(alone) + np.arange(len(others))
    return first_occurrence_codes(code)[0]


def _parameter_classes(program: Program) -> tuple[Ints, list[int]]:
    """Numbers for the parameters of equations, and the operators whose parameters cannot be compared."""
    seen: dict[Any, int] = {}
    out, others = [], []
    for op in program.operators:
        params = op.eqn.params if op.kind == "eqn" else None
        try:
            out.append(seen.setdefault(tuple(params.items()), 1 + len(seen)) if params else 0)
        except TypeError:
            out.append(0)
            others.append(op.id)
    return np.array(out, dtype=np.int64), others


def cost_classes(program: Program, operator_class: Ints, life: HbmTraffic) -> Ints:
    """(operators,) a number that is only the same for operators whose own table is the same.

    `form` numbers their states.
    """
    a = program.use_def
    stored = np.array(life.stored, dtype=bool)
    folded = np.zeros(len(operator_class), dtype=bool)
    folded[list(life.fused_transposes)] = True
    reads = stored[a.use_tensor] & (a.use_operand < 60) & ~folded[a.use_op]
    writes = stored & (a.def_result < 60) & ~folded[a.def_op]
    masks = []
    for whose, place, which in ((a.use_op, a.use_operand, reads), (a.def_op, a.def_result, writes)):
        low, high = (
            np.zeros(len(operator_class), dtype=np.int64),
            np.zeros(len(operator_class), dtype=np.int64),
        )
        for mask, begin in ((low, 0), (high, 30)):
            part = which & (place >= begin) & (place < begin + 30)
            np.add.at(mask, whose[part], 1 << (place[part] - begin))
        masks += [np.unique(m, return_inverse=True)[1] for m in (low, high) if m.any()]
    over = np.zeros(len(operator_class), dtype=np.int64)
    over[list(life.in_place)] = 1
    alone = np.zeros(len(operator_class), dtype=np.int64)
    wide = np.unique(np.concatenate([a.use_op[a.use_operand >= 60], a.def_op[a.def_result >= 60]]))
    alone[wide] = 1 + np.arange(len(wide))
    return row_codes(operator_class, np.unique(a.repeat, return_inverse=True)[1], alone, over, *masks)


def reshard_counts(program: Program) -> np.ndarray:
    """(reads,) how often each operand is moved to its reader."""
    a = program.use_def
    out = a.repeat[a.use_op]
    other = ~a.has_kind("eqn", "input", "const", "output")
    for r in np.flatnonzero(other[a.use_op]).tolist():
        out[r] = program.operators[a.use_op[r]].operand_repeat[a.use_operand[r]]
    return out


def distinct_candidate_sets(alike: Ints, every: Sequence[CandidateSet]) -> tuple[Ints, list[CandidateSet]]:
    """Numbers for different states: `every` are those of the numbers in `alike`."""
    known: dict[int, int] = {}
    number = np.array([known.setdefault(id(s), len(known)) for s in every], dtype=np.int64)
    first = np.unique(number, return_index=True)[1].tolist()
    return number[alike], [every[i] for i in first]


def singleton_classes(n: int, *groups: Collection[int]) -> Ints:
    """(n,) 0, but for what is in some groups a number of its own."""
    out = np.zeros(n, dtype=np.int64)
    some = np.array(sorted({i for g in groups for i in g}), dtype=np.int64)
    out[some] = 1 + np.arange(len(some))
    return out
