"""Numbers inside checkpointed layers as operands of theirs, where layers differ in nothing else.

A layer's number that a Python loop closes over (`jax.random.fold_in(key, i)` under `jax.checkpoint`) is a literal in the
body of the call, so that no two layers are alike. As an operand it is what each layer has of its own.

>>> import jax, jax.numpy as jnp
>>> def f(x):
...     for i in range(3):
...         x = jax.checkpoint(lambda x: jnp.sin(x) * (i + 1.0))(x)
...     return x
>>> eqns = jax.make_jaxpr(f)(jnp.ones(2)).eqns
>>> lifted = with_literals_lifted(eqns)
>>> [float(e.invars[0].val) for e in lifted], len({str(e.params["jaxpr"]) for e in lifted})
([1.0, 2.0, 3.0], 1)
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Sequence

from jshard._batch.alike_equations import text_of
from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Jaxpr, JaxprAtom, JaxprEqn
from jshard._program.common_subexpressions import literal_value
from jshard._program.equation_bodies import with_bodies
from jshard._program.inlining import with_calls_inlined
from jshard._program.loop_invariants import CHECKPOINTED


@dataclasses.dataclass(frozen=True, eq=False)
class _Lifted:
    """The body of an equation with some of its literals as its first inputs."""

    position: int
    body: Jaxpr
    literals: tuple[JaxprAtom, ...]


def with_literals_lifted(eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """The equations, checkpointed calls that differ in literals only with these as operands."""
    groups: dict[Hashable, list[_Lifted]] = collections.defaultdict(list)
    for k, eqn in enumerate(eqns):
        if eqn.primitive.name in CHECKPOINTED and not eqn.effects:
            inner, _ = compat.open_jaxpr(eqn.params["jaxpr"])
            one = _lifted(k, with_calls_inlined(inner), None)
            groups[text_of(one.body)].append(one)
    out = list(eqns)
    for group in groups.values():
        values = [[literal_value(v.val, v.aval) for v in one.literals] for one in group]  # type: ignore[attr-defined, arg-type]
        differ = {n for n, each in enumerate(zip(*values, strict=True)) if len(set(each)) > 1}
        for one in group if differ else ():
            eqn = eqns[one.position]
            inner, _ = compat.open_jaxpr(eqn.params["jaxpr"])
            new = _lifted(one.position, with_calls_inlined(inner), differ)
            eqn = with_bodies(eqn, lambda place, body, new=new: new.body)
            out[one.position] = eqn.replace(invars=[*new.literals, *eqn.invars])
    return out


def _lifted(position: int, body: Jaxpr, only: set[int] | None) -> _Lifted:
    """A body with its scalar literals, or only those of some numbers, as its first inputs."""
    literals: list[JaxprAtom] = []
    variables: list[JaxprAtom] = []
    count = 0
    out: list[JaxprEqn] = []
    for eqn in body.eqns:
        operands = list(eqn.invars)
        for n, v in enumerate(operands):
            if compat.is_literal(v):
                if only is None or count in only:
                    literals.append(v)
                    variables.append(compat.VARIABLE(v.aval))
                    operands[n] = variables[-1]
                count += 1
        out.append(eqn.replace(invars=operands))
    return _Lifted(position, body.replace(eqns=out, invars=[*variables, *body.invars]), tuple(literals))
