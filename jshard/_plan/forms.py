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

from jshard._cost.memory import Lifetimes
from jshard._numbers import Ints, numbered, packed
from jshard._plan.states import States
from jshard._program.graph import Program


_WIDTH = 4  # operands: those of operators with more are compared one by one


def forms(program: Program) -> Ints:
    """(operators,) a number that is only the same for operators that have the same states when nothing is pinned."""
    a, n = program.arrays, len(program.operators)
    literal: dict[Any, int] = {}
    first = len(a.kinds) + 1
    kinds = [literal.setdefault((x.aval.shape, x.aval.dtype), first + len(literal)) for x in a.literals]
    operands = np.zeros((n, _WIDTH), dtype=np.int64)  # 0: there is none
    results = np.zeros((n, 1), dtype=np.int64)
    read = a.operand < _WIDTH
    operands[a.reader[read], a.operand[read]] = a.kind[a.read[read]] + 1
    written = a.literal_operand < _WIDTH
    operands[a.literal_op[written], a.literal_operand[written]] = np.array(kinds, dtype=np.int64)[written]
    made = a.place == 0
    results[a.maker[made], 0] = a.kind[made] + 1
    wide = np.diff(a.result_begin) > 1
    wide[a.reader[~read]] = True
    wide[a.literal_op[~written]] = True
    parameters, others = _parameters(program)
    code = packed(a.primitive, *operands.T, results[:, 0], parameters)
    some = np.flatnonzero(wide)
    alone: dict[Any, int] = {}
    tensor = a.kind.tolist()
    by_op: dict[int, list[tuple[int, int]]] = {int(i): [] for i in some.tolist()}
    for whose, place, kind in (
        (a.reader, a.operand, a.kind[a.read] + 1), (a.literal_op, a.literal_operand, np.array(kinds, dtype=np.int64))
    ):  # fmt: skip
        here = np.flatnonzero(wide[whose])
        for i, k, v in zip(whose[here].tolist(), place[here].tolist(), kind[here].tolist(), strict=True):
            by_op[i].append((k, v))
    top = 1 + int(code.max(initial=0))
    for i in some.tolist():
        made_kinds = tuple([tensor[r] for r in program.operators[i].results])
        key = (int(a.primitive[i]), tuple(by_op[i]), made_kinds, int(parameters[i]))
        code[i] = top + alone.setdefault(key, len(alone))
    code[others] = top + len(alone) + np.arange(len(others))
    return numbered(code)[0]


def _parameters(program: Program) -> tuple[Ints, list[int]]:
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


def owned(program: Program, form: Ints, life: Lifetimes) -> Ints:
    """(operators,) a number that is only the same for operators whose own table is the same.

    `form` numbers their states.
    """
    a = program.arrays
    stored = np.array(life.stored, dtype=bool)
    folded = np.zeros(len(form), dtype=bool)
    folded[list(life.folded)] = True
    reads = stored[a.read] & (a.operand < 60) & ~folded[a.reader]
    writes = stored & (a.place < 60) & ~folded[a.maker]
    masks = []
    for whose, place, which in ((a.reader, a.operand, reads), (a.maker, a.place, writes)):
        low, high = np.zeros(len(form), dtype=np.int64), np.zeros(len(form), dtype=np.int64)
        for mask, begin in ((low, 0), (high, 30)):
            part = which & (place >= begin) & (place < begin + 30)
            np.add.at(mask, whose[part], 1 << (place[part] - begin))
        masks += [np.unique(m, return_inverse=True)[1] for m in (low, high) if m.any()]
    over = np.zeros(len(form), dtype=np.int64)
    over[list(life.over)] = 1
    alone = np.zeros(len(form), dtype=np.int64)
    wide = np.unique(np.concatenate([a.reader[a.operand >= 60], a.maker[a.place >= 60]]))
    alone[wide] = 1 + np.arange(len(wide))
    return packed(form, np.unique(a.repeat, return_inverse=True)[1], alone, over, *masks)


def times_of(program: Program) -> np.ndarray:
    """(reads,) how often each operand is moved to its reader."""
    a = program.arrays
    out = a.repeat[a.reader]
    other = ~a.of_kind("eqn", "input", "const", "output")
    for r in np.flatnonzero(other[a.reader]).tolist():
        out[r] = program.operators[a.reader[r]].operand_repeat[a.operand[r]]
    return out


def states_of(alike: Ints, every: Sequence[States]) -> tuple[Ints, list[States]]:
    """Numbers for different states: `every` are those of the numbers in `alike`."""
    known: dict[int, int] = {}
    number = np.array([known.setdefault(id(s), len(known)) for s in every], dtype=np.int64)
    first = np.unique(number, return_index=True)[1].tolist()
    return number[alike], [every[i] for i in first]


def special(n: int, *groups: Collection[int]) -> Ints:
    """(n,) 0, but for what is in some groups a number of its own."""
    out = np.zeros(n, dtype=np.int64)
    some = np.array(sorted({i for g in groups for i in g}), dtype=np.int64)
    out[some] = 1 + np.arange(len(some))
    return out
