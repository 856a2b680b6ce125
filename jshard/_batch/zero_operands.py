"""Checkpointed calls that lack operands which alike ones have, since these would be zero.

The last layer has no gradient from a layer after it: if it has a loss of its own, its backward pass begins with that alone.
Under `jax.checkpoint` this is one call, without the operand, and without the sum of both gradients. It becomes the call of
another layer with zeros for the operand, if what that call computes of zeros is what it computes.

>>> import jax, jax.numpy as jnp
>>> from jshard._program.inlining import with_calls_inlined
>>> @jax.checkpoint
... def layer(h, w):
...     h = jnp.tanh(h @ w)
...     return h, jnp.sum(h ** 2)
>>> def loss(ws, x):
...     total = 0.0
...     for w in ws:
...         x, own = layer(x, w)
...         total += own
...     return total
>>> traced = jax.make_jaxpr(jax.grad(loss))([jnp.ones((2, 2))] * 3, jnp.ones((4, 2))).jaxpr
>>> last, before = [e for e in traced.eqns if e.primitive.name == "remat2"][:2]
>>> len(last.invars), len(before.invars)
(3, 4)
>>> [e.primitive.name for e in with_zero_operands(last, before)], with_zero_operands(before, last)
(['broadcast_in_dim', 'remat2'], None)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import jax.numpy as jnp

from jshard._batch.alike_equations import own_params, text_of
from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Jaxpr, JaxprAtom, JaxprEqn
from jshard._program.inlining import substituted, with_calls_inlined
from jshard._program.loop_invariants import CHECKPOINTED


_MOST_TRIED = 64  # choices of the operands that may be zero
_SUMS = frozenset(("add_any", "add"))
_ZERO_OF_ANY = frozenset(("mul", "dot_general"))
"""Primitives whose result is zero if one operand is."""
_ZERO_OF_FIRST = frozenset(
    ("neg", "convert_element_type", "transpose", "reshape", "broadcast_in_dim", "reduce_sum", "squeeze", "expand_dims",
     "div", "slice", "copy", "cumsum", "rev", "real", "imag", "reduce_precision")
)  # fmt: skip
"""Primitives whose result is zero if their first operand is."""


def with_zero_operands(eqn: JaxprEqn, other: JaxprEqn) -> list[JaxprEqn] | None:
    """The checkpointed call `eqn` as one of the function of `other`, after the zeros that it reads; None if it is none."""
    missing = len(other.invars) - len(eqn.invars)
    if missing <= 0 or eqn.primitive.name not in CHECKPOINTED or not _alike_but_for_bodies(eqn, other):
        return None
    body, wanted = _opened(other), _opened(eqn)
    if body is None or wanted is None:
        return None
    text = text_of(compat.without_dead_code(wanted))
    for zero in _choices(other.invars, eqn.invars):
        simpler = _of_zeros(body, zero)
        if simpler is not None and text_of(simpler) == text:
            operands, eqns = iter(eqn.invars), list[JaxprEqn]()
            read: list[JaxprAtom] = []
            for n, v in enumerate(other.invars):
                made_by, zeros = zeros_like(v) if n in zero else ([], next(operands))
                eqns += made_by
                read.append(zeros)
            return [*eqns, other.replace(invars=read, outvars=eqn.outvars, source_info=eqn.source_info)]
    return None


def _alike_but_for_bodies(eqn: JaxprEqn, other: JaxprEqn) -> bool:
    """Whether two calls have the same results and parameters, their functions aside."""
    params = [[(n, text_of(p)) for n, p in own_params(e) if n != "jaxpr"] for e in (eqn, other)]
    types = [[_type(v) for v in e.outvars] for e in (eqn, other)]
    return eqn.primitive is other.primitive and params[0] == params[1] and types[0] == types[1]


def _type(v: JaxprAtom) -> str:
    return v.aval.str_short()


def _opened(call: JaxprEqn) -> Jaxpr | None:
    """The function of a call, its calls written out; None with constants."""
    body, consts = compat.open_jaxpr(call.params["jaxpr"])
    return None if consts or body.constvars or body.effects else with_calls_inlined(body)


def _choices(atoms: Sequence[JaxprAtom], wanted: Sequence[JaxprAtom]) -> Iterator[frozenset[int]]:
    """Which of the inexact operands may be zero, so that the others have the types of `wanted`."""
    types = [_type(v) for v in wanted]
    inexact = [n for n, v in enumerate(atoms) if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
    choices = itertools.combinations(reversed(inexact), len(atoms) - len(wanted))
    for zero in itertools.islice(choices, _MOST_TRIED):
        if [_type(v) for n, v in enumerate(atoms) if n not in zero] == types:
            yield frozenset(zero)


def _of_zeros(body: Jaxpr, numbers: frozenset[int]) -> Jaxpr | None:
    """The function without inputs of these numbers, which are zero; None where their zeros are not seen through."""
    zeros = {body.invars[n] for n in numbers}
    env: dict[JaxprAtom, JaxprAtom] = {}
    eqns: list[JaxprEqn] = []
    for eqn in body.eqns:
        operands = substituted(eqn.invars, env)
        is_zero = [not compat.is_literal(v) and v in zeros for v in operands]
        name = eqn.primitive.name
        if not any(is_zero):
            eqns.append(eqn.replace(invars=operands))
        elif all(is_zero) and name in _SUMS or name in _ZERO_OF_ANY or is_zero[0] and name in _ZERO_OF_FIRST:
            zeros.update(eqn.outvars)
        elif name in _SUMS and _type(rest := operands[is_zero.index(False)]) == _type(eqn.outvars[0]):
            env[eqn.outvars[0]] = rest
        else:
            return None
    results = substituted(body.outvars, env)
    if any(not compat.is_literal(v) and v in zeros for v in results):
        return None
    inputs = [v for n, v in enumerate(body.invars) if n not in numbers]
    return compat.without_dead_code(body.replace(invars=inputs, outvars=results, eqns=eqns))


def zeros_like(v: JaxprAtom) -> tuple[list[JaxprEqn], JaxprAtom]:
    """Zeros of the type of a variable, and the equations that make them: none for a scalar, a literal."""
    traced, _ = compat.open_jaxpr(compat.make_jaxpr(lambda: [jnp.zeros(v.aval.shape, v.aval.dtype)]))
    return list(traced.eqns), traced.outvars[0]
