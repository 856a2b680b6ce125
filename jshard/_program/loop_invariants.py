"""What a loop computes anew in every turn though it never changes, found before the loop is walked.

Problem.  A body may sum, cast or multiply values that it only reads: the mean of its data, a weight in bfloat16.
Compilers move such operators out of the loop, and their collectives with them; a plan that counts them once a turn is
wrong, and one that keeps them there by force is slow.

Idea.  An equation of a body whose operands are all the loop's constants is walked in front of the loop, in nested
loops in front of the outermost that it may leave. What makes more bytes than it reads stays inside, as compilers leave
it, since it would be held all through the loop: masks, casts to wider types, outer products. So does what the user
pins, and what has a reverse rule of its own. Loops and branches inside a body are moved out as wholes.

Source: XLA's WhileLoopInvariantCodeMotion (hoist_size_inflating_ops=false).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jshard import _jaxcompat as compat
from jshard._program import pin_primitives
from jshard._program.common_subexpressions import never_merged, runs_custom_vjp
from jshard._program.graph import Literal


Path = tuple[Any, ...]  # the places of equations in their jaxprs, from the outermost to an inner one
INLINED_CALLS = frozenset(
    {"jit", "pjit", "closed_call", "call", "core_call", "eval_jaxpr", "custom_vmap_call"}
)
"""Calls that mean nothing but their body."""

BODY_PARAMS = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")
"""Parameters that may hold the body of a call."""


def body_of(eqn: Any) -> Any:
    """The body of a call; None where there is none."""
    return next((eqn.params[k] for k in BODY_PARAMS if k in eqn.params), None)


@dataclasses.dataclass(frozen=True, eq=False)
class InnerBody:
    """A body inside an equation: where it stands, and which outer variables its first inputs are."""

    path: Path
    jaxpr: Any
    consts: Sequence[Any]
    given: Sequence[Any]


def inner_bodies(eqn: Any, path: Path) -> tuple[list[InnerBody], Sequence[Any]]:
    """The bodies through which an equation's constants can be followed, of plain calls and of loops; its other operands."""
    name, p = eqn.primitive.name, eqn.params
    if name in INLINED_CALLS and hasattr(body_of(eqn), "eqns"):
        return [InnerBody(path, *compat.open_jaxpr(body_of(eqn)), eqn.invars)], ()
    if name == "scan":
        n = compat.scan_split(p)[0]
        return [InnerBody(path, *compat.open_jaxpr(p["jaxpr"]), eqn.invars[:n])], eqn.invars[n:]
    if name == "while":
        p = compat.with_scalar_predicate(eqn).params
        n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        test = InnerBody((*path, "test"), *compat.open_jaxpr(p["cond_jaxpr"]), eqn.invars[:n])
        return [
            test,
            InnerBody((*path, "turn"), *compat.open_jaxpr(p["body_jaxpr"]), eqn.invars[n:m]),
        ], eqn.invars[m:]
    return [], eqn.invars


# (equation, its place, its operands as atoms, name stack) -> results
Write = Callable[[Any, Path, list[Any], str], Sequence[Any]]


def hoist(
    jaxpr: Any, known: dict[Any, Any], path: Path, prefix: str, write: Write, bind: Callable[..., None],
    done: Mapping[Path, Any],
) -> dict[Path, Sequence[Any]]:  # fmt: skip
    """Writes the equations of a loop's body that do not change, and says which they were and what they gave.

    `known` are the body's variables that do not change, as atoms outside, and gets more; `done` what was moved out of
    here before, and `bind(variables, arrays, known)` makes atoms of captured arrays.
    """
    out: dict[Path, Sequence[Any]] = {}
    for k, eqn in enumerate(jaxpr.eqns):
        here = (*path, k)
        if here in done:
            continue
        for inner in inner_bodies(eqn, here)[0]:
            given = zip(inner.jaxpr.invars, inner.given, strict=False)
            held = {v: _atom(a, known) for v, a in given if compat.is_literal(a) or a in known}
            bind(inner.jaxpr.constvars, inner.consts, held)
            stack = compat.name_stack(prefix, eqn)
            if eqn.primitive.name in INLINED_CALLS or not is_loop_invariant(eqn, known):
                out |= hoist(inner.jaxpr, held, inner.path, stack, write, bind, done)
            if eqn.primitive.name in INLINED_CALLS:
                ends = zip(eqn.outvars, inner.jaxpr.outvars, strict=True)
                known.update((v, _atom(a, held)) for v, a in ends if compat.is_literal(a) or a in held)
        if eqn.primitive.name not in INLINED_CALLS and is_loop_invariant(eqn, known):
            results = write(eqn, here, [_atom(v, known) for v in eqn.invars], prefix)
            known.update(zip(eqn.outvars, results, strict=True))
            out[here] = results
    return out


def is_loop_invariant(eqn: Any, known: Mapping[Any, Any]) -> bool:
    """Whether an equation can be moved out of a loop in which the `known` variables do not change."""
    name = eqn.primitive.name
    if (
        eqn.effects
        or never_merged(name)
        or name == pin_primitives.PIN_OPERAND
        or name == compat.ARGUMENT_MARKER
    ):
        return False
    if not all(compat.is_literal(v) or v in known for v in eqn.invars) or runs_custom_vjp(eqn):
        return False
    read = sum(_bytes(v) for v in eqn.invars if not compat.is_literal(v))
    return 0 < sum(map(_bytes, eqn.outvars)) <= read


def _bytes(v: Any) -> int:
    return math.prod(v.aval.shape) * compat.itemsize(v.aval.dtype) if hasattr(v.aval, "shape") else 0


def _atom(v: Any, known: Mapping[Any, Any]) -> Any:
    return Literal(v.val, v.aval) if compat.is_literal(v) else known[v]


def still_read(
    jaxpr: Any, known: dict[Any, Any], path: Path, moved: Mapping[Path, Sequence[Any]]
) -> dict[Any, None]:
    """The atoms from outside that a loop's body still reads, in order, after some of its equations were moved out."""
    out: dict[Any, None] = {}

    def reads(variables: Sequence[Any]) -> None:
        out.update((known[v], None) for v in variables if not compat.is_literal(v) and v in known)

    for k, eqn in enumerate(jaxpr.eqns):
        here = (*path, k)
        if here in moved:
            known.update(zip(eqn.outvars, moved[here], strict=True))
            continue
        bodies, others = inner_bodies(eqn, here)
        reads(others)
        for inner in bodies:
            given = zip(inner.jaxpr.invars, inner.given, strict=False)
            held = {v: known[a] for v, a in given if not compat.is_literal(a) and a in known}
            out.update(still_read(inner.jaxpr, held, inner.path, moved))
            if eqn.primitive.name in INLINED_CALLS:
                ends = zip(eqn.outvars, inner.jaxpr.outvars, strict=True)
                known.update((v, held[a]) for v, a in ends if not compat.is_literal(a) and a in held)
    reads(jaxpr.outvars)
    return out
