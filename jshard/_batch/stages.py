"""The whole program in loops over pieces and what runs between them.

Problem.  A finished sum over examples may be read by values per example: the number of tokens by the gradient of every
token, the loads of experts by an auxiliary loss' gradient. Such a sum needs a loop of its own before the loop that reads
it, and the second loop computes again what both need.

Method.  Levels from the arguments on: a value per example is one level above the latest finished sum that it reads. Then,
from the results back, every sum is put into the last loop that is early enough, so that all that no one waits for runs in
one loop. An operator that has no result for a piece ("coupled") runs between loops, on the whole batch.

A linear operator on sums runs inside the loop only where that leaves fewer or smaller sums to keep. A loop over layers that
returns shared values beside those per example, as a forward pass its dropout masks, computes them in each loop that reads
them, and only the slice for the piece.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jshard._batch.batch_class import SHARED, SUM, BatchClass, CoupledError
from jshard._batch.body_classes import Analysis, class_in
from jshard._batch.operator_cut import OperatorCut
from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Jaxpr, JaxprAtom, JaxprEqn
from jshard._program.equation_bodies import bodies_of
from jshard._rules.lookup import rules_for
from jshard._rules.registry import op_view


@dataclasses.dataclass(frozen=True, eq=False)
class Stages:
    """A program in loops.

    - `classes`: of every variable: in the loops, for values per example and sums.
    - `cuts`: of the equations that run in loops, by position; all others run between loops.
    - `coupled`: by position, why an equation that reads values per example runs between loops.
    - `level`: of the equations in loops the first possible one; `loops` the number of loops.
    - `targets`: of each loop the variables whose whole values are read outside it.
    - `available`: how many loops come before an equation between loops.
    """

    jaxpr: Jaxpr
    classes: Mapping[JaxprAtom, BatchClass]
    cuts: Mapping[int, OperatorCut]
    coupled: Mapping[int, CoupledError]
    loops: int
    targets: tuple[tuple[JaxprAtom, ...], ...]
    available: Mapping[int, int]


class _Levels:
    """Classes and levels of the values, from the arguments on."""

    def __init__(self, jaxpr: Jaxpr, inputs: Sequence[BatchClass], analysis: Analysis):
        self.jaxpr, self.analysis = jaxpr, analysis
        self.classes: dict[JaxprAtom, BatchClass] = dict.fromkeys(jaxpr.constvars, SHARED)
        self.classes.update(zip(jaxpr.invars, inputs, strict=True))
        self.level: dict[JaxprAtom, int] = dict.fromkeys(self.classes, 0)
        self.given = frozenset(self.classes)  # whole from the start
        # Shared results of equations that run in loops, beside results per example.
        self.shared_inside: set[JaxprAtom] = set()
        self.cuts: dict[int, OperatorCut] = {}
        self.coupled: dict[int, CoupledError] = {}
        for k, eqn in enumerate(jaxpr.eqns):
            self._add(k, eqn)
        self._sums_inside()
        self._slices_inside()

    def _whole_level(self, v: JaxprAtom) -> int:
        """The number of loops before the whole value is known."""
        if compat.is_literal(v):
            return 0
        return self.level[v] + (
            (self.classes[v] != SHARED or v in self.shared_inside) and v not in self.given
        )

    def _add(self, k: int, eqn: JaxprEqn) -> None:
        classes = [class_in(self.classes, v) for v in eqn.invars]
        if any(c.is_example for c in classes):
            read = [SHARED if c == SUM else c for c in classes]
            levels = [
                self.level[v] if c.is_example or v in self.shared_inside else self._whole_level(v)
                for v, c in zip(eqn.invars, classes, strict=True)
                if not compat.is_literal(v)
            ]
        elif any(c == SUM for c in classes):
            read = classes
            addends = {self.level[v] for v, c in zip(eqn.invars, classes, strict=True) if c == SUM}
            others = [self._whole_level(v) for v, c in zip(eqn.invars, classes, strict=True) if c != SUM]
            levels = [*addends, *others]
            if len(addends) > 1 or max(levels) > min(addends):
                read = [SHARED] * len(classes)
        else:
            read, levels = classes, [0]
        try:
            cut = self.analysis.cut(eqn, read)
        except CoupledError as error:
            if any(c.is_example for c in classes):
                self.coupled[k] = error
            cut = None
        if cut is None or all(c == SHARED for c in read):
            self._between(eqn)
            return
        self.cuts[k] = cut
        for v, c in zip(eqn.outvars, cut.results, strict=True):
            self.classes[v], self.level[v] = c, max(levels)
            if c == SHARED:
                self.shared_inside.add(v)

    def _between(self, eqn: JaxprEqn) -> None:
        level = max(map(self._whole_level, eqn.invars), default=0)
        for v in eqn.outvars:
            self.classes[v], self.level[v] = SHARED, level

    def _sums_inside(self) -> None:
        """Decide which linear operators on sums run in the loop; the results of the others are whole after it."""
        inside: set[JaxprAtom] = set()
        for k in range(len(self.jaxpr.eqns) - 1, -1, -1):
            eqn = self.jaxpr.eqns[k]
            if k not in self.cuts or any(c.is_example for c in self.cuts[k].operands):
                continue
            sums = [v for v, c in zip(eqn.invars, self.cuts[k].operands, strict=True)
                    if c == SUM and not compat.is_literal(v) and self.classes[v] == SUM]  # fmt: skip
            smaller = sum(map(_size, eqn.outvars)) < sum(map(_size, set(sums)))
            if len(set(sums)) > 1 or smaller or any(v in inside for v in eqn.outvars):
                inside.update(sums)
                continue
            del self.cuts[k]
            level = max(map(self._whole_level, eqn.invars), default=0)
            for v in eqn.outvars:
                self.classes[v], self.level[v] = SHARED, level

    def _slices_inside(self) -> None:
        """Compute only the piece of a shared result of a loop over layers, if all that reads it in loops reads one slice."""
        reads: dict[JaxprAtom, set[BatchClass]] = {}
        for k in range(len(self.jaxpr.eqns) - 1, -1, -1):
            if k not in self.cuts:
                continue
            eqn = self.jaxpr.eqns[k]
            for j, v in enumerate(eqn.outvars):
                if v not in self.shared_inside or len(reads.get(v, ())) != 1:
                    continue
                (only,) = reads[v]
                cut = self.analysis.loop_of_slice(eqn, self.cuts[k], j, only) if only.is_example else None
                if cut is not None:
                    self.cuts[k], self.classes[v] = cut, only
                    self.shared_inside.discard(v)
            for v, c in zip(eqn.invars, self.cuts[k].operands, strict=True):
                if not compat.is_literal(v):
                    reads.setdefault(v, set()).add(c)


def _size(v: JaxprAtom) -> int:
    return math.prod(v.aval.shape) * compat.itemsize(v.aval.dtype)


def stages(jaxpr: Jaxpr, inputs: Sequence[BatchClass], analysis: Analysis) -> Stages:
    """A program, its calls written out, in loops; `inputs` are the classes of its arguments."""
    levels = _Levels(jaxpr, inputs, analysis)
    last = max((levels.level[v] for k in levels.cuts for v in jaxpr.eqns[k].outvars), default=0)
    whole = _latest_reads(levels, last)
    targets: list[list[JaxprAtom]] = [[] for _ in range(last + 1)]
    known: dict[JaxprAtom, int] = dict.fromkeys(levels.given, 0)
    for v, before in whole.items():
        if v not in levels.given and (levels.classes[v] != SHARED or v in levels.shared_inside):
            targets[before - 1].append(v)
            known[v] = before
    available: dict[int, int] = {}
    for k, eqn in enumerate(jaxpr.eqns):
        if k not in levels.cuts:
            reads = [v for v in eqn.invars if not compat.is_literal(v)]
            available[k] = max((known.get(v, 0) for v in reads), default=0)
            known.update((v, available[k]) for v in eqn.outvars)
    return Stages(
        jaxpr, levels.classes, levels.cuts, levels.coupled, last + 1, tuple(map(tuple, targets)), available
    )


def _latest_reads(levels: _Levels, last: int) -> dict[JaxprAtom, int]:
    """Of the variables whose whole value is read: the number of the loop before which it must be known."""
    whole: dict[JaxprAtom, int] = {}  # before which loop
    inside: dict[JaxprAtom, int] = {}  # in which loop

    def read(into: dict[JaxprAtom, int], v: JaxprAtom, at: int) -> None:
        if not compat.is_literal(v):
            into[v] = min(at, into.get(v, at))

    for v in levels.jaxpr.outvars:
        read(whole, v, last + 1)
    for k in range(len(levels.jaxpr.eqns) - 1, -1, -1):
        eqn = levels.jaxpr.eqns[k]
        cut = levels.cuts.get(k)
        times = [inside[v] for v in eqn.outvars if v in inside]
        wholes = [whole[v] for v in eqn.outvars if v in whole]
        if cut is None:
            at = min(wholes, default=last + 1 if eqn.effects else -1)
            if at >= 0:
                for v in eqn.invars:
                    read(whole, v, at)
            continue
        at = min([*times, *(n - 1 for n in wholes)], default=-1)
        if at < 0:
            continue
        for v, c in zip(eqn.invars, cut.operands, strict=True):
            if compat.is_literal(v):
                continue
            within = v in levels.shared_inside or (c != SHARED and levels.classes[v] == c)
            within = within and v not in levels.given
            read(inside if within else whole, v, at)
    return whole


def work_of(eqn: JaxprEqn) -> float:
    """Arithmetic operations of an equation on the whole batch."""
    inner = [sum(map(work_of, body.eqns)) for body in bodies_of(eqn)]
    if inner:
        name = eqn.primitive.name
        times = int(eqn.params["length"]) if name == "scan" else 1
        return times * (max(inner) if name == "cond" else sum(inner))
    if not eqn.outvars or not all(hasattr(v.aval, "shape") for v in (*eqn.invars, *eqn.outvars)):
        return 0.0
    rule, _ = rules_for(op_view(eqn))
    return rule.work * float(math.prod(rule.sizes)) if rule.sizes else 0.0
