"""One operator on a piece of the batch: from the classes of its operands to those of its results, by its rule.

A loop over pieces cuts the batch in time as a mesh axis cuts it in space, so the sharding rule of an operator says the
same in both: a factor with the examples may be cut if no dimension mixes its elements, a reduction over it leaves an
addend of a sum, and addends pass operators that are linear in them.

Pieces are strided: piece i of k has the examples i, i + k, i + 2k, ... A mesh axis that cuts the batch into contiguous
blocks then cuts every piece, and no device waits while others work on a piece of theirs.

>>> import jax, jax.numpy as jnp
>>> eqn = jax.make_jaxpr(lambda x, w: x @ w)(jnp.ones((8, 4)), jnp.ones((4, 2))).eqns[0]
>>> [str(c) for c in operator_cut(eqn, [per_example(0), SHARED], 8).results]
['per example (dimension 0)']
>>> eqn = jax.make_jaxpr(lambda x: jax.lax.sort(x, dimension=0))(jnp.ones((8, 4))).eqns[0]
>>> operator_cut(eqn, [per_example(0)], 8)  # doctest: +ELLIPSIS
Traceback (most recent call last):
...
jshard._batch.batch_class.CoupledError: sort f32[8,4]...: sorting compares elements along the whole dimension
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jshard._batch.batch_class import FIXED_SHAPES, SHARED, SUM, BatchClass, CoupledError, per_example
from jshard._core.jax_types import JaxprEqn
from jshard._rules.lookup import rules_for
from jshard._rules.registry import OpView, RuleEntry, op_view
from jshard._rules.rule import NONE, Dims, Rule


DRAWS = frozenset(("random_bits", "random_split"))
"""Primitives whose elements depend on their positions in the whole draw."""

_SUMMING_SCATTERS = frozenset(("scatter-add", "scatter-sub"))


@dataclasses.dataclass(frozen=True, eq=False)
class OperatorCut:
    """How an operator runs on a piece.

    - `operands`: the class in which each is read: `per example` of a shared value is its slice for the piece, `sum` of
        a shared value is the value in the first piece and zero in the others.
    - `results`: their classes.
    - `factor`: the factor of the rule that is cut; `NONE` if the operator runs with the shapes of the traced program.
    """

    operands: tuple[BatchClass, ...]
    results: tuple[BatchClass, ...]
    factor: int = NONE
    view: OpView | None = None
    rule: Rule | None = None
    entry: RuleEntry | None = None


def operator_cut(eqn: JaxprEqn, classes: Sequence[BatchClass], examples: int) -> OperatorCut:
    """The cut of an operator without a body whose operands have these classes; raises `CoupledError`."""
    if all(c == SHARED for c in classes):
        return OperatorCut(tuple(classes), (SHARED,) * len(eqn.outvars))
    name = eqn.primitive.name
    if eqn.effects:
        raise CoupledError(eqn, "it has effects, and runs once for the whole batch")
    if name in FIXED_SHAPES:
        raise CoupledError(eqn, "its shapes are fixed")
    view = op_view(eqn)
    rule, entry = rules_for(view)
    if rule.opaque:
        raise CoupledError(eqn, rule.note)
    if any(c.is_example for c in classes):
        return _cut_by_factor(eqn, classes, examples, view, rule, entry)
    return _linear_in_sums(eqn, classes, view, rule)


def _linear_in_sums(eqn: JaxprEqn, classes: Sequence[BatchClass], view: OpView, rule: Rule) -> OperatorCut:
    """The operator on addends of sums, through which they pass if it is linear in them."""
    sums = {i for i, c in enumerate(classes) if c == SUM}
    fitting = [s for s in rule.linear if sums <= set(s)]
    if not fitting:
        raise CoupledError(eqn, "it is not linear in a sum over examples")
    joint = max(fitting, key=len)
    if eqn.primitive.name == "pad" and 1 not in joint:
        padding = view.literals[1] if len(view.literals) > 1 else None
        if padding is None or bool(np.asarray(padding) != 0):
            raise CoupledError(eqn, "every addend of the sum would have the padding")
    operands = tuple(SUM if i in joint else SHARED for i in range(len(classes)))
    return OperatorCut(operands, (SUM,) * len(eqn.outvars))


def _cut_by_factor(
    eqn: JaxprEqn, classes: Sequence[BatchClass], examples: int, view: OpView, rule: Rule, entry: RuleEntry | None
) -> OperatorCut:  # fmt: skip
    """The operator with the factor cut that carries the examples."""
    scatter = eqn.primitive.name in _SUMMING_SCATTERS
    if any(c == SUM for c in classes[1 if scatter else 0 :]):
        raise CoupledError(eqn, "it combines a sum over examples with values per example")
    found = {
        _major_factor(eqn, rule, rule.operands[i][c.dim], examples)
        for i, c in enumerate(classes)
        if c.is_example
    }
    if len(found) > 1:
        raise CoupledError(eqn, "it combines every example with every other one")
    (factor,) = found
    operands = []
    for i, (dims, aval) in enumerate(zip(rule.operands, view.ins, strict=True)):
        operands.append(_class_on(eqn, rule, dims, aval.shape, factor, examples))
        if operands[-1] == SHARED and (classes[i] == SUM or scatter and i == 0 and factor in rule.reduction):
            operands[-1] = SUM
    results = []
    for dims, aval in zip(rule.results, view.outs, strict=True):
        found_class = _class_on(eqn, rule, dims, aval.shape, factor, examples)
        if found_class == SHARED:
            if factor not in rule.reduction or rule.reducer != "sum":
                raise CoupledError(eqn, f"it takes the {rule.reducer} over all examples" if factor in rule.reduction
                                   else rule.note or "its result has no dimension for the examples")  # fmt: skip
            found_class = SUM
        results.append(found_class)
    return OperatorCut(tuple(operands), tuple(results), factor, view, rule, entry)


def _major_factor(eqn: JaxprEqn, rule: Rule, factors: tuple[int, ...], examples: int) -> int:
    """The factor of a dimension that carries the examples."""
    factor = next((f for f in factors if rule.sizes[f] > 1), None)
    if factor is None or factor in rule.blocked:
        raise CoupledError(eqn, rule.note or "it mixes the examples")
    if rule.sizes[factor] % examples:
        raise CoupledError(eqn, "it splits the dimension with the examples")
    return factor


def _class_on(
    eqn: JaxprEqn, rule: Rule, dims: Dims, shape: Sequence[int], factor: int, examples: int
) -> BatchClass:
    """The class of an operand or result when `factor` is cut."""
    for d, factors in enumerate(dims):
        if factor in factors:
            if any(rule.sizes[f] > 1 for f in factors[: factors.index(factor)]):
                raise CoupledError(eqn, "the examples are not the slowest index of their dimension")
            return per_example(d, shape[d] // examples)
    return SHARED


def slice_cut(eqn: JaxprEqn, result: int, wanted: BatchClass, examples: int) -> OperatorCut | None:
    """How an operator of shared values makes only the slice of a result for the piece; None if it cannot."""
    name = eqn.primitive.name
    if (
        eqn.effects
        or len(eqn.outvars) != 1
        or name in FIXED_SHAPES
        or not hasattr(eqn.outvars[0].aval, "shape")
    ):
        return None
    view = op_view(eqn)
    rule, entry = rules_for(view)
    if rule.opaque or not rule.results[result][wanted.dim]:
        return None
    try:
        factor = _major_factor(eqn, rule, rule.results[result][wanted.dim], examples)
        operands = tuple(
            _class_on(eqn, rule, dims, a.shape, factor, examples)
            for dims, a in zip(rule.operands, view.ins, strict=True)
        )
    except CoupledError:
        return None
    if factor in rule.reduction:
        return None
    return OperatorCut(operands, (wanted,), factor, view, rule, entry)
