"""Calls without a meaning of their own replaced by their equations, so that a jaxpr can be rewritten equation by equation.

A `jit` inside a traced function is a call; of a differentiated one there are two, a forward and a backward call, and what
the second reads of the first is seen only where both are written out. Calls that carry shardings stay calls.

>>> import jax, jax.numpy as jnp
>>> traced = jax.make_jaxpr(lambda x: jax.nn.silu(x) + 1)(jnp.ones(3))
>>> [e.primitive.name for e in traced.eqns], [e.primitive.name for e in with_calls_inlined(traced.jaxpr).eqns]
(['jit', 'add'], ['logistic', 'mul', 'add'])
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import NamedSharding

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Jaxpr, JaxprAtom, JaxprEqn, SourceInfo
from jshard._program.loop_invariants import INLINED_CALLS, body_of


def with_calls_inlined(
    jaxpr: Jaxpr, lines: bool = False, calls: frozenset[str] = frozenset(INLINED_CALLS)
) -> Jaxpr:
    """An open jaxpr in which every call of the primitives `calls` without shardings and constants is written out.

    `lines`: equations that have no source line of the user's get that of the call; a cached `jit` has kept none.
    """
    if not any(_is_inlined(eqn, calls) for eqn in jaxpr.eqns):
        return jaxpr
    eqns: list[JaxprEqn] = []
    env: dict[JaxprAtom, JaxprAtom] = {}
    _write(jaxpr, env, None, eqns, lines, calls)
    return jaxpr.replace(eqns=eqns, outvars=substituted(jaxpr.outvars, env))


def substituted(variables: Sequence[JaxprAtom], env: dict[JaxprAtom, JaxprAtom]) -> list[JaxprAtom]:
    """The atoms of an equation with some variables replaced."""
    return [v if compat.is_literal(v) else env.get(v, v) for v in variables]


def fresh(variables: Sequence[JaxprAtom]) -> list[JaxprAtom]:
    """New variables of the same types."""
    return [compat.VARIABLE(v.aval) for v in variables]


def _is_inlined(eqn: JaxprEqn, calls: frozenset[str]) -> bool:
    body = body_of(eqn)
    if eqn.primitive.name not in calls or body is None or not hasattr(body, "eqns"):
        return False
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    jaxpr, consts = compat.open_jaxpr(body)
    return not (consts or jaxpr.constvars or any(isinstance(s, NamedSharding) for s in shardings))


def _write(
    jaxpr: Jaxpr,
    env: dict[JaxprAtom, JaxprAtom],
    caller: SourceInfo | None,
    eqns: list[JaxprEqn],
    lines: bool,
    calls: frozenset[str],
) -> None:
    """Append the equations of a body; `env` replaces its variables, `caller` is where it is called, if it is."""
    for eqn in jaxpr.eqns:
        operands, info = substituted(eqn.invars, env), eqn.source_info
        if caller is not None:
            source = caller if lines and not compat.source_line(eqn) else info
            info = source.replace(name_stack=caller.name_stack + info.name_stack)
        if _is_inlined(eqn, calls) and (called := body_of(eqn)) is not None:
            body, _ = compat.open_jaxpr(called)
            inner = dict(zip(body.invars, operands, strict=True))
            _write(body, inner, info, eqns, lines, calls)
            env.update(zip(eqn.outvars, substituted(body.outvars, inner), strict=True))
            continue
        results = eqn.outvars
        if caller is not None:  # a body may be called several times
            results = fresh(eqn.outvars)
            env.update(zip(eqn.outvars, results, strict=True))
        eqns.append(eqn.replace(invars=operands, outvars=results, source_info=info))
