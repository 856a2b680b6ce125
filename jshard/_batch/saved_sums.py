"""Sums over the batch that a checkpointed layer computes again, saved by the forward loop instead.

Problem.  Under `jax.checkpoint` the backward loop computes a layer again, and with it the loads of its experts: sums over
the whole batch, which the gradient of the auxiliary loss reads for every example. No piece of the batch passes such a layer
alone, though its forward pass does: there the sums are results, and only the loss reads them.

Idea.  A sum that the backward loop computes from what the forward loop read or stacked, and from no gradient, is the forward
loop's own. That loop computes it in its place and returns it stacked over the layers; the backward loop reads a slice of
the stack. A named policy of `jax.checkpoint` that saves the sums writes the same. Each equation stays as it was traced.

>>> import jax, jax.numpy as jnp
>>> from jax.extend.core import jaxpr_as_fun
>>> from jshard._batch.batch_class import SHARED, per_example
>>> def loss(w, x):
...     def layer(carry, w):
...         h, balance = carry
...         return (h + jnp.tanh(h @ w), balance + jnp.sum(jnp.mean(jnp.tanh(h @ w), 0) ** 2)), None
...     h, balance = jax.lax.scan(jax.checkpoint(layer), (x, 0.0), w)[0]
...     return jnp.mean(h ** 2) + balance
>>> w, x = jnp.ones((4, 3, 3)) / 3, jnp.arange(24.0).reshape(8, 3) / 24
>>> closed = jax.make_jaxpr(jax.grad(loss))(w, x)
>>> saved = with_sums_saved(closed, [SHARED, per_example(0)], Analysis(8, 4))
>>> [len(e.outvars) for c in (closed, saved) for e in c.jaxpr.eqns if e.primitive.name == "scan"]
[3, 3, 4, 3]
>>> bool(jnp.allclose(jaxpr_as_fun(saved)(w, x)[0], jax.grad(loss)(w, x)))
True
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jshard._batch.batch_class import SHARED, SUM, BatchClass, CoupledError
from jshard._batch.body_classes import Analysis, class_in
from jshard._batch.free_sums import (
    WRITTEN_OUT,
    KnownEquations,
    free_sums,
    needed,
    written_again,
)
from jshard._batch.loop_parts import loop_parts
from jshard._batch.saved_call_sums import with_call_sums_saved
from jshard._core import jaxcompat as compat
from jshard._core.jax_types import ClosedJaxpr, Jaxpr, JaxprAtom, JaxprEqn
from jshard._program.inlining import fresh, substituted, with_calls_inlined
from jshard._program.traced_scan import is_plain_scan, traced_scan


@dataclasses.dataclass(frozen=True, eq=False)
class _Saved:
    """The sums of a loop, by position `later`, that the loop at `earlier` can return.

    - `body`: of the later loop, its checkpointed calls written out; `sums`: its values, made by the equations `made_by`.
    - `own`: what those read -> the same values in the earlier loop's body; `consts`: what it lacks of them, constants of
        the later loop, with their operands.
    """

    earlier: int
    later: int
    body: Jaxpr
    sums: tuple[JaxprAtom, ...]
    made_by: tuple[JaxprEqn, ...]
    own: Mapping[JaxprAtom, JaxprAtom]
    consts: tuple[JaxprAtom, ...]
    operands: tuple[JaxprAtom, ...]


def with_sums_saved(closed: ClosedJaxpr, inputs: Sequence[BatchClass], analysis: Analysis) -> ClosedJaxpr:
    """The program with such sums saved, the same object if it has none; `inputs` are the classes of its arguments."""
    opened, _ = compat.open_jaxpr(closed)
    inlined = with_calls_inlined(opened, lines=True)
    jaxpr = with_call_sums_saved(inlined, inputs, analysis)
    saved = _saved_sums(jaxpr, inputs, analysis)
    if not saved and jaxpr is inlined:
        return closed
    eqns: dict[int, list[JaxprEqn]] = {k: [e] for k, e in enumerate(jaxpr.eqns)}
    for one in saved:
        eqns[one.earlier], stacks = _returning(jaxpr.eqns[one.earlier], one, analysis)
        eqns[one.later] = _reading(jaxpr.eqns[one.later], one, stacks)
    return closed.replace(jaxpr=jaxpr.replace(eqns=[e for k in sorted(eqns) for e in eqns[k]]))


def _saved_sums(jaxpr: Jaxpr, inputs: Sequence[BatchClass], analysis: Analysis) -> list[_Saved]:
    """What can be saved for the loops that couple the examples; a loop returns the sums of one other."""
    if sum(map(is_plain_scan, jaxpr.eqns)) < 2:
        return []
    classes: dict[JaxprAtom, BatchClass] = dict.fromkeys(jaxpr.constvars, SHARED)
    classes.update(zip(jaxpr.invars, inputs, strict=True))
    out: list[_Saved] = []
    for k, eqn in enumerate(jaxpr.eqns):
        operands = [class_in(classes, v) for v in eqn.invars]
        results: Sequence[BatchClass] = [SHARED] * len(eqn.outvars)
        try:
            results = analysis.cut(eqn, operands).results
        except CoupledError:
            if is_plain_scan(eqn):
                try:
                    results = loop_parts(eqn, operands, analysis).results()
                except CoupledError:
                    found = _sums_of(jaxpr, k, operands, analysis)
                    if found is not None and found.earlier not in [s.earlier for s in out]:
                        out.append(found)
        classes.update((v, SHARED if c == SUM else c) for v, c in zip(eqn.outvars, results, strict=True))
    return out


def _sums_of(jaxpr: Jaxpr, k: int, operands: Sequence[BatchClass], analysis: Analysis) -> _Saved | None:
    """The sums that the loop at position `k` computes from what an earlier loop has; None for none."""
    eqn = jaxpr.eqns[k]
    n_consts, n_carry = compat.scan_split(eqn.params)
    body = with_calls_inlined(compat.open_jaxpr(eqn.params["jaxpr"])[0], lines=True, calls=WRITTEN_OUT)
    first_slice = n_consts + n_carry
    if any(c.is_example and c.dim == 0 for c in operands[first_slice:]):
        return None  # the loop goes over the examples
    entering = [*operands[:first_slice], *(c.moved(-1) for c in operands[first_slice:])]
    classes = dict(zip(body.invars, entering, strict=True))
    outer = {v: x for v, x in zip(body.invars, eqn.invars, strict=True)
             if v not in body.invars[n_consts:first_slice]}  # fmt: skip
    for earlier in range(k - 1, -1, -1):
        first = jaxpr.eqns[earlier]
        if not is_plain_scan(first) or int(first.params["length"]) != int(eqn.params["length"]):
            continue
        own, handed = _in_earlier_body(jaxpr, earlier, body.invars[:n_consts], outer, analysis)
        known = {v: classes[v] for v in (*own, *handed)}
        divided, sums = free_sums(body, known, analysis)
        if sums:
            eqns, read = needed(divided, sums)
            handed = [v for v in handed if v in read]
            operands_of = tuple(outer[v] for v in handed)
            return _Saved(earlier, k, divided, tuple(sums), tuple(eqns), own, tuple(handed), operands_of)
    return None


def _in_earlier_body(
    jaxpr: Jaxpr, earlier: int, consts: Sequence[JaxprAtom], outer: Mapping[JaxprAtom, JaxprAtom], analysis: Analysis
) -> tuple[dict[JaxprAtom, JaxprAtom], list[JaxprAtom]]:  # fmt: skip
    """Of the inputs of a later loop's body: those that the earlier one's has, with its values, and those handed to it.

    `outer`: the operands that the inputs are or are slices of; those that are computed after the earlier loop are neither.
    """
    first = jaxpr.eqns[earlier]
    n_consts, n_carry = compat.scan_split(first.params)
    body, _ = analysis.open(first.params["jaxpr"])
    inside = [(x, v) for x, v in zip(first.invars, body.invars, strict=True) if not compat.is_literal(x)]
    carries = set(body.invars[n_consts : n_consts + n_carry])
    constants = set(body.invars[:n_consts])
    of_const = {x: v for x, v in inside if v in constants}
    of_slice = {x: v for x, v in inside if v not in constants and v not in carries}
    of_slice.update(zip(first.outvars[n_carry:], body.outvars[n_carry:], strict=True))
    before = {*jaxpr.invars, *jaxpr.constvars, *(v for e in jaxpr.eqns[:earlier] for v in e.outvars)}
    own: dict[JaxprAtom, JaxprAtom] = {}
    handed = []
    for v, x in outer.items():
        known = of_const if v in consts else of_slice
        if not compat.is_literal(x) and x in known:
            own[v] = known[x]
        elif v in consts and (compat.is_literal(x) or x in before):
            handed.append(v)
    return own, handed


def _returning(first: JaxprEqn, one: _Saved, analysis: Analysis) -> tuple[list[JaxprEqn], list[JaxprAtom]]:
    """The earlier loop with the sums among its stacked results; and those. What it computes anyway is computed once."""
    n_consts, n_carry = compat.scan_split(first.params)
    body, _ = analysis.open(first.params["jaxpr"])
    constants = fresh(one.consts)
    env: dict[JaxprAtom, JaxprAtom] = {**one.own, **dict(zip(one.consts, constants, strict=True))}
    eqns, known = list(body.eqns), KnownEquations(body.eqns)
    written_again(one.made_by, env, known, eqns)
    body = body.replace(
        invars=[*body.invars[:n_consts], *constants, *body.invars[n_consts:]],
        outvars=[*body.outvars, *substituted(one.sums, env)], eqns=eqns,
    )  # fmt: skip
    operands = [*first.invars[:n_consts], *one.operands, *first.invars[n_consts:]]
    new, found = traced_scan(first, body, n_consts + len(constants), n_carry, operands)
    renamed = dict(zip(found, first.outvars, strict=False))
    return [e.replace(outvars=substituted(e.outvars, renamed)) for e in new], found[len(first.outvars) :]


def _reading(second: JaxprEqn, one: _Saved, stacks: Sequence[JaxprAtom]) -> list[JaxprEqn]:
    """The later loop with slices of the stacks in place of the sums that it computes."""
    n_consts, n_carry = compat.scan_split(second.params)
    slices = fresh(one.sums)
    env = dict(zip(one.sums, slices, strict=True))
    body = one.body.replace(
        invars=[*one.body.invars, *slices], outvars=substituted(one.body.outvars, env),
        eqns=[e.replace(invars=substituted(e.invars, env)) for e in one.body.eqns],
    )  # fmt: skip
    new, found = traced_scan(
        second, compat.without_dead_code(body), n_consts, n_carry, [*second.invars, *stacks]
    )
    renamed = dict(zip(found, second.outvars, strict=True))
    return [e.replace(outvars=substituted(e.outvars, renamed)) for e in new]
