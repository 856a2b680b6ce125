"""The batch classes of the values of a body, and of loops, branches and calls with bodies.

A loop's carry has one class in every iteration: the least one that holds before and after, found by repeating the body's
analysis until nothing changes. A shared value may become a slice for the piece, or an addend (itself in the first piece,
zero in the others), but neither of these becomes the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from jshard._batch.batch_class import SHARED, BatchClass, CoupledError
from jshard._batch.operator_cut import OperatorCut, operator_cut, slice_cut
from jshard._batch.piece_operator import check_positions
from jshard._core import jaxcompat as compat
from jshard._core.jax_types import ClosedJaxpr, Jaxpr, JaxprAtom, JaxprEqn
from jshard._program.inlining import with_calls_inlined
from jshard._program.loop_invariants import CALLS_WITH_BODY, body_of


Classes = Mapping[JaxprAtom, BatchClass]
Need = tuple[JaxprAtom, BatchClass]
"""A variable, and the class in which it is read."""

CutOf = Callable[[int], OperatorCut | None]

WITH_BODIES = frozenset((*CALLS_WITH_BODY, "scan", "while", "cond"))
"""Primitives whose bodies are analysed."""


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """One body of an equation with the classes of its inputs, of all its values, and those that its results must have."""

    jaxpr: Jaxpr
    consts: Sequence[object]
    inputs: tuple[BatchClass, ...]
    classes: Classes
    results: tuple[BatchClass, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class BodyCut(OperatorCut):
    """The cut of an equation with bodies."""

    bodies: tuple[Body, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """An equation to be run on a piece: as it is, or only the slice `wanted` of its shared result."""

    eqn: JaxprEqn
    cut: OperatorCut
    wanted: Need | None = None


class Analysis:
    """The analysis of a program with `examples` examples; its bodies are written without calls, once each."""

    def __init__(self, examples: int, count: int):
        """`count`: of the pieces, which divides `examples`."""
        self.examples, self.count = examples, count
        self._inlined: dict[int, tuple[object, Jaxpr]] = {}
        self._cuts: dict[tuple[int, tuple[BatchClass, ...]], tuple[JaxprEqn, OperatorCut]] = {}

    def open(self, body: Jaxpr | ClosedJaxpr) -> tuple[Jaxpr, Sequence[object]]:
        """A body without calls, and its constants."""
        opened, consts = compat.open_jaxpr(body)
        if id(opened) not in self._inlined:
            self._inlined[id(opened)] = opened, with_calls_inlined(opened, lines=True)
        return self._inlined[id(opened)][1], consts

    def cut(self, eqn: JaxprEqn, classes: Sequence[BatchClass]) -> OperatorCut:
        """The cut of an equation whose operands have some classes; raises `CoupledError`."""
        key = id(eqn), tuple(classes)
        if key not in self._cuts:
            shared = all(c == SHARED for c in classes)
            own = eqn.primitive.name not in WITH_BODIES or shared or not self._has_body(eqn)
            cut = operator_cut(eqn, classes, self.examples) if own else self._cut_with_body(eqn, classes)
            check_positions(eqn, cut, self.count)
            self._cuts[key] = eqn, cut
        return self._cuts[key][1]

    def slice(self, eqn: JaxprEqn, result: int, wanted: BatchClass) -> OperatorCut | None:
        """How an operator of shared values makes only the slice of a result for a piece; None if it cannot."""
        cut = slice_cut(eqn, result, wanted, self.examples)
        try:
            if cut is not None:
                check_positions(eqn, cut, self.count)
        except CoupledError:
            return None
        return cut

    def loop_of_slice(
        self, eqn: JaxprEqn, cut: OperatorCut, result: int, wanted: BatchClass
    ) -> OperatorCut | None:
        """The cut of a `scan` that stacks only the slice `wanted` of a shared result; None for other equations and results.

        So a loop over layers draws the dropout masks that its backward pass reads for the examples of the piece alone.
        """
        if eqn.primitive.name != "scan" or wanted.dim == 0:
            return None
        _, n_carry = compat.scan_split(eqn.params)
        if result < n_carry:
            return None
        stacked = [wanted if k == result else c for k, c in enumerate(cut.results)][n_carry:]
        try:
            new = self._scan(eqn, cut.operands, [*[SHARED] * n_carry, *(c.moved(-1) for c in stacked)])
            check_positions(eqn, new, self.count)
        except CoupledError:
            return None
        return new

    @staticmethod
    def _has_body(eqn: JaxprEqn) -> bool:
        if eqn.primitive.name in ("while", "cond"):
            return True
        return hasattr(body_of(eqn), "eqns")

    def classes(self, jaxpr: Jaxpr, inputs: Sequence[BatchClass]) -> dict[JaxprAtom, BatchClass]:
        """The classes of the values of an open jaxpr; its constants are shared. Raises `CoupledError`."""
        out: dict[JaxprAtom, BatchClass] = dict.fromkeys(jaxpr.constvars, SHARED)
        out.update(zip(jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.eqns:
            cut = self.cut(eqn, [class_in(out, v) for v in eqn.invars])
            out.update(zip(eqn.outvars, cut.results, strict=True))
        return out

    def body(
        self, eqn: JaxprEqn, jaxpr: Jaxpr | ClosedJaxpr, inputs: Sequence[BatchClass],
        results: Sequence[BatchClass] | None = None, fixed: Iterable[int] = (),
    ) -> Body:  # fmt: skip
        """A body analysed; shared inputs of which only a slice is read become `per example`, but not the `fixed` ones."""
        opened, consts = self.open(jaxpr)
        fixed = set(fixed)
        while True:
            classes = self.classes(opened, inputs)
            own = [class_in(classes, v) for v in opened.outvars]
            wanted = [joined(eqn, a, b) for a, b in zip(own, results, strict=True)] if results else own
            _, needs = steps_for(opened, classes, zip(opened.outvars, wanted, strict=True), self)
            promoted = list(inputs)
            for k, v in enumerate(opened.invars):
                read = needs.get(v, {})
                if (
                    inputs[k] == SHARED
                    and k not in fixed
                    and len(read) == 1
                    and (only := next(iter(read))).is_example
                ):
                    promoted[k] = only
            if promoted == list(inputs):
                return Body(opened, consts, tuple(inputs), classes, tuple(wanted))
            inputs = promoted

    def _cut_with_body(self, eqn: JaxprEqn, classes: Sequence[BatchClass]) -> BodyCut:
        if eqn.effects:
            raise CoupledError(eqn, "it has effects, and runs once for the whole batch")
        name, p = eqn.primitive.name, eqn.params
        if name == "scan":
            return self._scan(eqn, classes)
        if name == "while":
            return self._while(eqn, classes)
        if name == "cond":
            if classes[0] != SHARED:
                raise CoupledError(eqn, "its branch depends on the examples")
            bodies = [self.body(eqn, b, classes[1:], fixed=range(len(classes))) for b in p["branches"]]
            results = list(bodies[0].results)
            for b in bodies[1:]:
                results = [joined(eqn, x, y) for x, y in zip(results, b.results, strict=True)]
            bodies = [self.body(eqn, b, classes[1:], results, range(len(classes))) for b in p["branches"]]
            return BodyCut(tuple(classes), tuple(results), bodies=tuple(bodies))
        called = body_of(eqn)
        assert called is not None
        body = self.body(eqn, called, classes)
        return BodyCut(body.inputs, body.results, bodies=(body,))

    def _scan(
        self, eqn: JaxprEqn, classes: Sequence[BatchClass], results: Sequence[BatchClass] | None = None
    ) -> BodyCut:
        n_consts, n_carry = compat.scan_split(eqn.params)
        first = n_consts + n_carry
        for c in classes[first:]:
            if c.is_example and c.dim == 0:
                raise CoupledError(eqn, "the loop goes over the examples")
        carry, inputs = list(classes[n_consts:first]), [c.moved(-1) for c in classes[first:]]
        consts = list(classes[:n_consts])
        while True:
            entering = [*consts, *carry, *inputs]
            body = self.body(eqn, eqn.params["jaxpr"], entering, results, range(n_consts, first))
            after = [joined(eqn, a, b) for a, b in zip(carry, body.results[:n_carry], strict=True)]
            if after == carry:
                break
            carry = after
        body = dataclasses.replace(body, results=(*carry, *body.results[n_carry:]))
        operands = (*body.inputs[:first], *(c.moved(1) for c in body.inputs[first:]))
        stacked = (c.moved(1) for c in body.results[n_carry:])
        return BodyCut(operands, (*carry, *stacked), bodies=(body,))

    def _while(self, eqn: JaxprEqn, classes: Sequence[BatchClass]) -> BodyCut:
        p = eqn.params
        n_test, n_consts = p["cond_nconsts"], p["body_nconsts"]
        test_consts, consts = classes[:n_test], classes[n_test : n_test + n_consts]
        carry = list(classes[n_test + n_consts :])
        while True:
            every = range(len(classes))
            body = self.body(eqn, p["body_jaxpr"], [*consts, *carry], carry, every)
            if list(body.results) == carry:
                break
            carry = list(body.results)
        test = self.body(eqn, p["cond_jaxpr"], [*test_consts, *carry], fixed=range(len(classes)))
        if test.results != (SHARED,):
            raise CoupledError(eqn, "the number of iterations depends on the examples")
        return BodyCut((*test_consts, *consts, *carry), tuple(carry), bodies=(test, body))


def class_in(classes: Classes, v: JaxprAtom) -> BatchClass:
    """The class of an atom; literals are shared."""
    return SHARED if compat.is_literal(v) else classes[v]


def joined(eqn: JaxprEqn, a: BatchClass, b: BatchClass) -> BatchClass:
    """The class of a value that has class `a` on one way and `b` on another; raises `CoupledError` if there is none."""
    if a == b or b == SHARED:
        return a
    if a == SHARED:
        return b
    raise CoupledError(eqn, f"a value is {a} on one way and {b} on another")


def steps_for(
    jaxpr: Jaxpr, classes: Classes, wanted: Iterable[Need], analysis: Analysis, cut_of: CutOf | None = None
) -> tuple[list[Step], dict[JaxprAtom, dict[BatchClass, None]]]:
    """The equations that some results need, in order, and the classes in which every variable is read.

    An equation of shared values of which only a slice is read runs on the slices of its operands alone. `cut_of` gives
    the cut of the equation at a position, and None for one that runs elsewhere; by default the analysis' own.
    """

    def own_cut(k: int) -> OperatorCut | None:
        return analysis.cut(jaxpr.eqns[k], [class_in(classes, v) for v in jaxpr.eqns[k].invars])

    cut_at = cut_of or own_cut
    needs: dict[JaxprAtom, dict[BatchClass, None]] = {}
    steps: list[Step] = []

    def need(atoms: Sequence[JaxprAtom], read_as: Sequence[BatchClass]) -> None:
        for v, c in zip(atoms, read_as, strict=True):
            if not compat.is_literal(v):
                needs.setdefault(v, {})[c] = None

    for v, c in wanted:
        need([v], [c])
    for position in range(len(jaxpr.eqns) - 1, -1, -1):
        eqn = jaxpr.eqns[position]
        whole = bool(eqn.effects)
        for k, v in enumerate(eqn.outvars):
            for c in list(needs.get(v, ())):
                cut = None
                if c != classes[v] and classes[v] != SHARED:
                    continue  # a finished sum, from outside
                if classes[v] == SHARED and c.is_example and eqn.primitive.name not in WITH_BODIES:
                    cut = analysis.slice(eqn, k, c)
                if cut is None:
                    whole = True
                else:
                    steps.append(Step(eqn, cut, (v, c)))
                    need(eqn.invars, cut.operands)
        cut = cut_at(position) if whole else None
        if cut is not None:
            steps.append(Step(eqn, cut))
            need(eqn.invars, cut.operands)
    return steps[::-1], needs
