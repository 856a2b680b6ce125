"""Checkpointed calls outside loops that couple the examples: unrolled layers, whose sums are those of the forward pass.

Problem.  The backward pass of a layer under `jax.checkpoint` is one call that computes the layer again, with it the loads of
its experts, which the gradient of the auxiliary loss reads for every example. No piece of the batch passes that call alone.

Method.  What the call computes from no gradient is what the forward pass has computed: its sums over examples are written
before the call, where an equation that is equal to one of the forward pass is that one, and the call reads them. A call
that only returns what is computed from finished sums is divided (`body_walk.py`).

>>> import jax, jax.numpy as jnp
>>> from jshard._batch.batch_class import SHARED, per_example
>>> @jax.checkpoint
... def layer(h, w):
...     return h + jnp.tanh(h @ w), jnp.sum(jnp.mean(jnp.tanh(h @ w), 0) ** 2)
>>> def loss(w, x):
...     h, balance = layer(x, w)
...     return jnp.mean(h ** 2) + balance
>>> w, x = jnp.ones((3, 3)) / 3, jnp.arange(24.0).reshape(8, 3) / 24
>>> traced, classes = jax.make_jaxpr(jax.grad(loss))(w, x), [SHARED, per_example(0)]
>>> saved = with_call_sums_saved(traced.jaxpr, classes, Analysis(8, 4))
>>> [len(e.invars) for j in (traced.jaxpr, saved) for e in j.eqns if e.primitive.name == "remat2"]
[4, 5]
>>> [[e.primitive.name for e in j.eqns].count("tanh") for j in (traced.jaxpr, saved)]
[2, 2]
"""

from __future__ import annotations

from collections.abc import Sequence

from jshard._batch.batch_class import SHARED, SUM, BatchClass, CoupledError
from jshard._batch.body_classes import Analysis, class_in
from jshard._batch.body_walk import DividedCall, divided_call
from jshard._batch.free_sums import (
    WRITTEN_OUT,
    KnownEquations,
    free_sums,
    needed,
    written_again,
)
from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Jaxpr, JaxprAtom, JaxprEqn
from jshard._program.inlining import fresh, substituted, with_calls_inlined
from jshard._program.loop_invariants import CHECKPOINTED


def with_call_sums_saved(jaxpr: Jaxpr, inputs: Sequence[BatchClass], analysis: Analysis) -> Jaxpr:
    """The open jaxpr with such calls reading their sums, the same object if it has none; `inputs`: classes of its inputs."""
    if not any(e.primitive.name in CHECKPOINTED for e in jaxpr.eqns):
        return jaxpr
    classes: dict[JaxprAtom, BatchClass] = dict.fromkeys(jaxpr.constvars, SHARED)
    classes.update(zip(jaxpr.invars, inputs, strict=True))
    env: dict[JaxprAtom, JaxprAtom] = {}
    eqns: list[JaxprEqn] = []
    known, seen = KnownEquations(), 0

    def add(eqn: JaxprEqn) -> None:
        eqns.append(eqn)
        classes.update(zip(eqn.outvars, _results(eqn, classes, analysis), strict=True))

    for traced in jaxpr.eqns:
        eqn = traced.replace(invars=substituted(traced.invars, env)) if env else traced
        if eqn.primitive.name in CHECKPOINTED and _couples(eqn, classes, analysis):
            divided = _divided(eqn, classes, analysis)
            if divided is None:
                for one in eqns[seen:]:
                    known.add(one)
                seen = len(eqns)
                *made_by, eqn = _reading_sums(eqn, classes, known, analysis)
                for one in made_by:
                    add(one)
                divided = _divided(eqn, classes, analysis)
            if divided is not None:
                env.update(zip(eqn.outvars, divided.results, strict=True))
                *before, eqn = divided.eqns
                for one in before:
                    add(one)
        add(eqn)
    same = len(eqns) == len(jaxpr.eqns) and all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if same else jaxpr.replace(eqns=eqns, outvars=substituted(jaxpr.outvars, env))


def _couples(eqn: JaxprEqn, classes: dict[JaxprAtom, BatchClass], analysis: Analysis) -> bool:
    try:
        analysis.cut(eqn, [class_in(classes, v) for v in eqn.invars])
    except CoupledError:
        return True
    return False


def _divided(eqn: JaxprEqn, classes: dict[JaxprAtom, BatchClass], analysis: Analysis) -> DividedCall | None:
    return divided_call(eqn, [class_in(classes, v) for v in eqn.invars], analysis)


def _results(eqn: JaxprEqn, classes: dict[JaxprAtom, BatchClass], analysis: Analysis) -> Sequence[BatchClass]:
    """The classes of the results; finished sums and coupled values are shared."""
    try:
        results = analysis.cut(eqn, [class_in(classes, v) for v in eqn.invars]).results
    except CoupledError:
        return [SHARED] * len(eqn.outvars)
    return [SHARED if c == SUM else c for c in results]


def _reading_sums(
    eqn: JaxprEqn, classes: dict[JaxprAtom, BatchClass], known: KnownEquations, analysis: Analysis
) -> list[JaxprEqn]:
    """A checkpointed call with its sums as operands, after the equations that make them; as it is without such sums."""
    body = with_calls_inlined(compat.open_jaxpr(eqn.params["jaxpr"])[0], lines=True, calls=WRITTEN_OUT)
    if body.constvars:
        return [eqn]
    env = dict(zip(body.invars, eqn.invars, strict=True))
    before = {
        v: class_in(classes, x) for v, x in env.items() if compat.is_literal(x) or not known.is_gradient(x)
    }
    body, sums = free_sums(body, before, analysis)
    made_by, _ = needed(body, sums)
    eqns: list[JaxprEqn] = []
    written_again(made_by, env, known, eqns)
    slices = fresh(sums)
    read = dict(zip(sums, slices, strict=True))
    inside = body.replace(
        invars=[*body.invars, *slices], outvars=substituted(body.outvars, read),
        eqns=[e.replace(invars=substituted(e.invars, read)) for e in body.eqns],
    )  # fmt: skip
    params = {**eqn.params, "jaxpr": compat.without_dead_code(inside)}
    call = eqn.replace(params=params, invars=[*eqn.invars, *substituted(sums, env)])
    return [*eqns, call] if sums else [eqn]
