"""A loop over layers in three parts: what precedes the pipeline, the pipeline itself, what follows it.

Problem.  A loop over layers carries more than its values per example: counters of random keys, sums of auxiliary losses,
gradients of weights that every layer reads. A pipeline works on one piece of the batch in each layer at a time, so only
what is per example may pass from stage to stage.

Method.  The body's values are classified (`body_classes.py`), its carries until nothing changes. A carry of shared values
is computed by a loop of its own *before* the pipeline (`early`), from shared values alone. A carry of sums over examples,
and all that is computed from sums and is not linear in them, is computed by a loop *after* the pipeline (`late`), from the
finished sums of each layer. What is left carries values per example from layer to layer. Where that reads a sum over
examples, the layer couples the examples (batch statistics), and the pipeline is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from jshard._batch.added_carries import is_only_added_to
from jshard._batch.batch_class import SHARED, SUM, BatchClass, CoupledError
from jshard._batch.body_classes import Analysis, Step, class_in, joined, steps_for
from jshard._batch.body_walk import DividedCallError, Walk, with_call_divided
from jshard._batch.operator_cut import OperatorCut
from jshard._batch.shared_results import with_shared_results_outside
from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Jaxpr, JaxprAtom, JaxprEqn


@dataclasses.dataclass(frozen=True, eq=False)
class LoopParts:
    """A loop over layers, its body classified.

    - `jaxpr`: the body; `layers`: its length; `reverse`: whether it begins with the last layer.
    - `constants`: captured arrays. `consts`, `carries`, `slices`: the body's inputs; `carried`, `stacked`: its results.
    - `fixed`: carries that no layer changes. `moving`: those per example that pass from stage to stage. `early`: shared
        ones that the body changes. `late`: those computed after the pipeline. All by number.
    - `classes`: of the body's values; those of `late` equations are shared.
    - `cuts`: of the equations of the pipeline, by position; `late_eqns`: positions of those after it.
    - `crossing`: sums that `late` equations read; `crossing_examples`: values per example (`extremes.py`).
    - `steps`: what runs on a piece of the batch in a layer.
    """

    jaxpr: Jaxpr
    layers: int
    reverse: bool
    operands: tuple[BatchClass, ...]
    constants: Mapping[JaxprAtom, jax.Array]
    consts: tuple[JaxprAtom, ...]
    carries: tuple[JaxprAtom, ...]
    slices: tuple[JaxprAtom, ...]
    carried: tuple[JaxprAtom, ...]
    stacked: tuple[JaxprAtom, ...]
    fixed: tuple[int, ...]
    moving: tuple[int, ...]
    early: tuple[int, ...]
    late: tuple[int, ...]
    classes: Mapping[JaxprAtom, BatchClass]
    cuts: Mapping[int, OperatorCut]
    late_eqns: frozenset[int]
    late_values: frozenset[JaxprAtom]
    crossing: tuple[JaxprAtom, ...]
    crossing_examples: tuple[JaxprAtom, ...]
    steps: tuple[Step, ...]
    read: frozenset[JaxprAtom]

    @property
    def targets(self) -> tuple[tuple[JaxprAtom, BatchClass], ...]:
        """What a layer of the pipeline computes: the carries that move, then results per example, then sums."""
        moved = [(self.carried[j], self.classes[self.carries[j]]) for j in self.moving]
        return (
            *moved,
            *((v, self.classes[v]) for v in self.examples),
            *((v, SUM) for v in self.sums),
        )

    @property
    def added(self) -> tuple[int, ...]:
        """Carries that move, by number, but that no layer reads: each layer adds to them."""
        return tuple(j for j in self.moving if is_only_added_to(self.jaxpr, self.carries[j], self.carried[j]))

    @property
    def examples(self) -> tuple[JaxprAtom, ...]:
        """Results per example, stacked over layers, and what crosses to the late part; each once."""
        found = [v for v in self.stacked if self.kind(v) == "per example"]
        return tuple(dict.fromkeys((*found, *self.crossing_examples)))

    @property
    def sums(self) -> tuple[JaxprAtom, ...]:
        """Sums over examples that are results, stacked over layers, or cross to the late part; each once.

        A sum crosses too that the next layer alone reads, as a carry.
        """
        found = [v for v in (*self.stacked, *(self.carried[j] for j in self.late)) if self.kind(v) == "sum"]
        return tuple(dict.fromkeys((*found, *self.crossing)))

    def kind(self, v: JaxprAtom) -> str:
        """`"late"`, or the kind of the value's class."""
        is_late = not compat.is_literal(v) and v in self.late_values
        return "late" if is_late else class_in(self.classes, v).kind

    def results(self) -> tuple[BatchClass, ...]:
        """The classes of the loop's results, finished."""
        carried = [self.classes[v] if j in self.moving or j in self.fixed else SHARED
                   for j, v in enumerate(self.carries)]  # fmt: skip
        stacked = [class_in(self.classes, v) for v in self.stacked]
        return (*carried, *(c.moved(1) if c.is_example else SHARED for c in stacked))


def loop_parts(eqn: JaxprEqn, operands: Sequence[BatchClass], analysis: Analysis) -> LoopParts:
    """A scan over layers in parts; `operands` are the classes of its operands, none of them a sum.

    Raises `CoupledError` where a layer couples the examples.
    """
    jaxpr, consts = analysis.open(eqn.params["jaxpr"])
    n_consts, n_carry = compat.scan_split(eqn.params)
    first = n_consts + n_carry
    if any(c.is_example and c.dim == 0 for c in operands[first:]):
        raise CoupledError(eqn, "the loop goes over the examples")
    while True:
        try:
            walk, late = _walked(eqn, jaxpr, operands, analysis)
        except DividedCallError as error:
            jaxpr = with_call_divided(jaxpr, error.position, error.call)
            continue
        outside = with_shared_results_outside(jaxpr, walk.cuts)
        if outside is jaxpr:
            break
        jaxpr = outside
    parts = _parts(eqn, jaxpr, operands, walk, late)
    constants = {v: jnp.asarray(x) for v, x in zip(jaxpr.constvars, consts, strict=True)}
    steps, needs = steps_for(jaxpr, walk.classes, parts.targets, analysis, walk.cuts.get)
    return dataclasses.replace(parts, constants=constants, steps=tuple(steps), read=frozenset(needs))


def _walked(
    eqn: JaxprEqn, jaxpr: Jaxpr, operands: Sequence[BatchClass], analysis: Analysis
) -> tuple[Walk, set[int]]:
    """The body's values classified, and the numbers of the carries that are computed from finished sums."""
    n_consts, n_carry = compat.scan_split(eqn.params)
    first = n_consts + n_carry
    carry = list(operands[n_consts:first])
    carries, carried = jaxpr.invars[n_consts:first], jaxpr.outvars[:n_carry]
    late: set[int] = set()
    while True:
        walk = Walk(jaxpr, (*operands[:n_consts], *carry, *(c.moved(-1) for c in operands[first:])),
                     [carries[j] for j in sorted(late)], analysis)  # fmt: skip
        after = list(carry)
        for j, v in enumerate(carried):
            c = class_in(walk.classes, v)
            if c == SUM or j in late or not compat.is_literal(v) and v in walk.late:
                if carry[j].is_example:
                    raise CoupledError(
                        walk.maker(v, eqn), "a sum over all examples enters what passes from layer to layer"
                    )
                late.add(j)
            else:
                after[j] = joined(eqn, carry[j], c)
        if after == carry and {carries[j] for j in late} <= walk.late:
            return walk, late
        carry = after


def _parts(
    eqn: JaxprEqn, jaxpr: Jaxpr, operands: Sequence[BatchClass], walk: Walk, late: set[int]
) -> LoopParts:
    """The parts, without the steps of the pipeline."""
    n_consts, n_carry = compat.scan_split(eqn.params)
    first = n_consts + n_carry
    carries, carried = tuple(jaxpr.invars[n_consts:first]), tuple(jaxpr.outvars[:n_carry])
    fixed = tuple(j for j in range(n_carry) if carried[j] is carries[j] and j not in late)
    others = [j for j in range(n_carry) if j not in fixed and j not in late]
    return LoopParts(
        jaxpr, int(eqn.params["length"]), bool(eqn.params["reverse"]), tuple(operands), {},
        tuple(jaxpr.invars[:n_consts]), carries, tuple(jaxpr.invars[first:]), carried, tuple(jaxpr.outvars[n_carry:]),
        fixed,
        tuple(j for j in others if walk.classes[carries[j]].is_example),
        tuple(j for j in others if not walk.classes[carries[j]].is_example),
        tuple(sorted(late)), walk.classes, walk.cuts, frozenset(walk.late_eqns), frozenset(walk.late),
        walk.crossing(), walk.crossing_examples(), (), frozenset(),
    )  # fmt: skip
