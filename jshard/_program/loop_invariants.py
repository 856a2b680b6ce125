"""Loop-invariant code motion, before the loop is walked.

A body may sum, cast or multiply values that do not change between iterations: the mean of its data, a weight in
bfloat16. XLA hoists such operators, and their collectives with them, so a plan that counted them per iteration would be
wrong. An equation of a body whose operands are all loop-invariant is therefore added in front of the loop; in nested
loops, in front of the outermost one that it can leave. Equations whose results are larger than their operands (masks,
casts to wider types, outer products) stay inside, as in XLA, since their results would be live throughout the loop. So
do equations with pins or custom reverse-mode rules. Loops and branches inside a body are hoisted as a whole.

Source: XLA's WhileLoopInvariantCodeMotion (hoist_size_inflating_ops=false).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import ClosedJaxpr, Jaxpr, JaxprAtom, JaxprEqn
from jshard._core.marker_primitives import ARGUMENT_MARKER
from jshard._program import pin_primitives
from jshard._program.common_subexpressions import never_merged, runs_custom_vjp
from jshard._program.operators import Atom, Literal
from jshard._program.scalar_predicate import with_scalar_predicate


Path = tuple[int | str, ...]  # positions of nested equations in their jaxprs, outermost first
INLINED_CALLS = frozenset(
    {"jit", "pjit", "closed_call", "call", "core_call", "eval_jaxpr", "custom_vmap_call"}
)
"""Calls equivalent to their body."""

CHECKPOINTED = frozenset({"remat2", "checkpoint"})
"""Primitives of `jax.checkpoint`."""

CALLS_WITH_BODY = frozenset({*INLINED_CALLS, *CHECKPOINTED, "custom_jvp_call", "custom_vjp_call"})
"""Calls whose body has the operands and results of the call: inlined ones, and those that are kept as calls."""

BODY_PARAMS = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")
"""Parameters that may hold the body of a call."""


def body_of(eqn: JaxprEqn) -> Jaxpr | ClosedJaxpr | None:
    """The body of a call, or None."""
    return next((eqn.params[k] for k in BODY_PARAMS if k in eqn.params), None)


@dataclasses.dataclass(frozen=True, eq=False)
class InnerBody:
    """A body of an equation: its path, open jaxpr and constants, and the outer variables of its first inputs."""

    path: Path
    jaxpr: Jaxpr
    consts: Sequence[jax.Array]
    inputs: Sequence[JaxprAtom]


def inner_bodies(eqn: JaxprEqn, path: Path) -> tuple[list[InnerBody], Sequence[JaxprAtom]]:
    """The bodies of an inlined call or a loop, with their invariant inputs; the equation's other operands."""
    name, p = eqn.primitive.name, eqn.params
    body = body_of(eqn) if name in INLINED_CALLS else None
    if body is not None and hasattr(body, "eqns"):
        return [InnerBody(path, *compat.open_jaxpr(body), eqn.invars)], ()
    if name == "scan":
        n = compat.scan_split(p)[0]
        return [InnerBody(path, *compat.open_jaxpr(p["jaxpr"]), eqn.invars[:n])], eqn.invars[n:]
    if name == "while":
        p = with_scalar_predicate(eqn).params
        n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        test = InnerBody((*path, "test"), *compat.open_jaxpr(p["cond_jaxpr"]), eqn.invars[:n])
        return [
            test,
            InnerBody((*path, "turn"), *compat.open_jaxpr(p["body_jaxpr"]), eqn.invars[n:m]),
        ], eqn.invars[m:]
    return [], eqn.invars


# (equation, its path, its operands as atoms, name stack) -> results
WriteEquation = Callable[[JaxprEqn, Path, list[Atom], str], Sequence[Atom]]


def hoist(
    jaxpr: Jaxpr, invariant: dict[JaxprAtom, Atom], path: Path, prefix: str, write: WriteEquation, bind: Callable[..., None],
    done: Mapping[Path, object],
) -> dict[Path, Sequence[Atom]]:  # fmt: skip
    """Write the loop-invariant equations of a body before the loop; their paths and results.

    Arguments:

    - `invariant`: the body's loop-invariant variables as outer atoms; results of hoisted equations are added.
    - `path`: of the body.
    - `write`: adds an equation before the loop.
    - `bind`: `bind(variables, arrays, invariant)` makes atoms of captured arrays.
    - `done`: paths of the equations hoisted before, out of outer loops.
    """
    hoisted: dict[Path, Sequence[Atom]] = {}
    for k, eqn in enumerate(jaxpr.eqns):
        eqn_path = (*path, k)
        if eqn_path in done:
            continue
        inlined = eqn.primitive.name in INLINED_CALLS
        for inner in inner_bodies(eqn, eqn_path)[0]:
            pairs = zip(inner.jaxpr.invars, inner.inputs, strict=False)
            values = {v: _atom(a, invariant) for v, a in pairs if compat.is_literal(a) or a in invariant}
            bind(inner.jaxpr.constvars, inner.consts, values)
            stack = compat.name_stack(prefix, eqn)
            if inlined or not is_loop_invariant(eqn, invariant):
                hoisted |= hoist(inner.jaxpr, values, inner.path, stack, write, bind, done)
            if inlined:
                pairs = zip(eqn.outvars, inner.jaxpr.outvars, strict=True)
                invariant.update(
                    (v, _atom(a, values)) for v, a in pairs if compat.is_literal(a) or a in values
                )
        if not inlined and is_loop_invariant(eqn, invariant):
            results = write(eqn, eqn_path, [_atom(v, invariant) for v in eqn.invars], prefix)
            invariant.update(zip(eqn.outvars, results, strict=True))
            hoisted[eqn_path] = results
    return hoisted


NEVER_HOISTED = frozenset((pin_primitives.PIN_OPERAND, pin_primitives.MODULE_OUTPUT, ARGUMENT_MARKER))


def is_loop_invariant(eqn: JaxprEqn, invariant: Mapping[JaxprAtom, Atom]) -> bool:
    """Whether an equation can be hoisted out of a loop, given its loop-invariant variables."""
    name = eqn.primitive.name
    if eqn.effects or never_merged(name) or name in NEVER_HOISTED:
        return False
    if not all(compat.is_literal(v) or v in invariant for v in eqn.invars) or runs_custom_vjp(eqn):
        return False
    operand_bytes = sum(_bytes(v) for v in eqn.invars if not compat.is_literal(v))
    return 0 < sum(map(_bytes, eqn.outvars)) <= operand_bytes


def _bytes(v: JaxprAtom) -> int:
    return math.prod(v.aval.shape) * compat.itemsize(v.aval.dtype) if hasattr(v.aval, "shape") else 0


def _atom(v: JaxprAtom, values: Mapping[JaxprAtom, Atom]) -> Atom:
    return Literal(v.val, v.aval) if compat.is_literal(v) else values[v]


def still_read(
    jaxpr: Jaxpr,
    outer: dict[JaxprAtom, Atom | None],
    path: Path,
    hoisted: Mapping[Path, Sequence[Atom | None]],
) -> dict[Atom | None, None]:
    """The outer atoms that a loop's body reads after hoisting, in order.

    `outer` are the body's variables that are outer atoms, `hoisted` the results of hoisted equations by path.
    """
    out: dict[Atom | None, None] = {}

    def add_reads(variables: Sequence[JaxprAtom]) -> None:
        out.update((outer[v], None) for v in variables if not compat.is_literal(v) and v in outer)

    for k, eqn in enumerate(jaxpr.eqns):
        eqn_path = (*path, k)
        if eqn_path in hoisted:
            outer.update(zip(eqn.outvars, hoisted[eqn_path], strict=True))
            continue
        bodies, others = inner_bodies(eqn, eqn_path)
        add_reads(others)
        for inner in bodies:
            pairs = zip(inner.jaxpr.invars, inner.inputs, strict=False)
            values = {v: outer[a] for v, a in pairs if not compat.is_literal(a) and a in outer}
            out.update(still_read(inner.jaxpr, values, inner.path, hoisted))
            if eqn.primitive.name in INLINED_CALLS:
                pairs = zip(eqn.outvars, inner.jaxpr.outvars, strict=True)
                outer.update((v, values[a]) for v, a in pairs if not compat.is_literal(a) and a in values)
    add_reads(jaxpr.outvars)
    return out
