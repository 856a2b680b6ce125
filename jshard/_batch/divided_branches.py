"""Branches that compute with finished sums over the batch, as two `cond`s: what is summed, and what follows from it.

Problem.  A branch squares the mean of its examples: no piece of the batch has a share of the square, though the mean is a
sum over them, and which branch is taken no example decides.

Method.  The first `cond` returns the sums that each branch computes with, each in a place of its own; a branch that has no
such sum returns zeros there, since what adds nothing is zero. The second, on the same index, computes from them what waits
for finished sums. Results that do not wait are those of the first.

>>> import jax, jax.numpy as jnp
>>> from jshard._batch.batch_class import SHARED, per_example
>>> from jshard._batch.body_classes import Analysis
>>> from jshard._batch.body_walk import divided_call
>>> squared, plain = (lambda x: jnp.sum(x) ** 2), jnp.sum
>>> eqn = jax.make_jaxpr(lambda p, x: jax.lax.cond(p, squared, plain, x))(True, jnp.ones(8)).eqns[-1]
>>> call = divided_call(eqn, [SHARED, per_example(0)], Analysis(8, 4))
>>> [(e.primitive.name, len(e.invars), len(e.outvars)) for e in call.eqns]
[('cond', 2, 1), ('cond', 2, 1)]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp

from jshard._batch.batch_class import BatchClass
from jshard._batch.body_classes import Classes, class_in
from jshard._batch.zero_operands import zeros_like
from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Jaxpr, JaxprAtom, JaxprEqn
from jshard._program.equation_bodies import with_bodies
from jshard._program.inlining import fresh, substituted


@dataclasses.dataclass(frozen=True, eq=False)
class DividedCall:
    """A call as the equations `eqns`; `results`: of the call, their values."""

    eqns: tuple[JaxprEqn, ...]
    results: tuple[JaxprAtom, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class WalkedBranch:
    """A branch with the classes of its values and the positions of its equations that wait for finished sums."""

    jaxpr: Jaxpr
    classes: Classes
    late_eqns: frozenset[int]

    @property
    def late(self) -> list[JaxprEqn]:
        """The equations that wait."""
        return [e for k, e in enumerate(self.jaxpr.eqns) if k in self.late_eqns]

    @property
    def not_late(self) -> list[JaxprEqn]:
        """The equations that do not."""
        return [e for k, e in enumerate(self.jaxpr.eqns) if k not in self.late_eqns]

    def waits(self) -> list[bool]:
        """Which results wait."""
        made = {v for e in self.late for v in e.outvars}
        return [not compat.is_literal(v) and v in made for v in self.jaxpr.outvars]

    def crossing(self, results: Iterable[JaxprAtom]) -> list[JaxprAtom]:
        """What the equations that wait, and some results, read of those that do not."""
        given = {*self.jaxpr.invars, *(v for e in self.late for v in e.outvars)}
        read = [*(v for e in self.late for v in e.invars), *results]
        return list(dict.fromkeys(v for v in read if not compat.is_literal(v) and v not in given))


def divided_branches(
    eqn: JaxprEqn, operands: Sequence[BatchClass], branches: Sequence[WalkedBranch]
) -> DividedCall | None:
    """The `cond` divided, whose operands have some classes; None where values per example would wait for sums."""
    waits = [any(each) for each in zip(*(b.waits() for b in branches), strict=True)]
    slots = list[JaxprAtom]()
    places: list[dict[JaxprAtom, int]] = []
    for b in branches:
        last = _where(b.jaxpr.outvars, waits, True)
        crossing = b.crossing(last)
        if any(class_in(b.classes, v).is_example for v in (*crossing, *last)) or not all(
            map(_has_zeros, crossing)
        ):
            return None
        places.append(_places(crossing, slots))
    kept, made, last = (
        fresh(_where(eqn.outvars, waits, False)),
        fresh(slots),
        fresh(_where(eqn.outvars, waits, True)),
    )
    firsts = [_first(b, waits, own, slots) for b, own in zip(branches, places, strict=True)]
    shared = [n for n, c in enumerate(operands) if not c.is_example]
    seconds = [_second(b, waits, own, slots, shared[1:]) for b, own in zip(branches, places, strict=True)]
    first = with_bodies(eqn, lambda place, _: firsts[place[1]]).replace(outvars=[*kept, *made])
    second = with_bodies(eqn, lambda place, _: seconds[place[1]])
    second = second.replace(invars=[*(eqn.invars[n] for n in shared), *made], outvars=last)
    from_first, from_second = iter(kept), iter(last)
    return DividedCall((first, second), tuple(next(from_second if w else from_first) for w in waits))


def _where(values: Sequence[JaxprAtom], flags: Sequence[bool], flag: bool) -> list[JaxprAtom]:
    return [v for v, f in zip(values, flags, strict=True) if f == flag]


def _has_zeros(v: JaxprAtom) -> bool:
    return hasattr(v.aval, "shape") and not jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)


def _places(crossing: Sequence[JaxprAtom], slots: list[JaxprAtom]) -> dict[JaxprAtom, int]:
    """A place for each value among those of the same type that no other value of the branch has; new ones are added."""
    out: dict[JaxprAtom, int] = {}
    for v in crossing:
        free = (n for n, s in enumerate(slots) if s.aval == v.aval and n not in out.values())
        out[v] = next(free, len(slots))
        if out[v] == len(slots):
            slots.append(v)
    return out


def _first(
    branch: WalkedBranch, waits: Sequence[bool], own: dict[JaxprAtom, int], slots: Sequence[JaxprAtom]
) -> Jaxpr:
    """What of a branch does not wait, with what the rest reads of it."""
    values: dict[int, JaxprAtom] = {n: v for v, n in own.items()}
    eqns = branch.not_late
    for n, v in enumerate(slots):
        if n not in values:
            made_by, values[n] = zeros_like(v)
            eqns += made_by
    results = [*_where(branch.jaxpr.outvars, waits, False), *(values[n] for n in range(len(slots)))]
    return compat.without_dead_code(branch.jaxpr.replace(eqns=eqns, outvars=results))


def _second(
    branch: WalkedBranch, waits: Sequence[bool], own: dict[JaxprAtom, int], slots: Sequence[JaxprAtom],
    shared: Sequence[int],
) -> Jaxpr:  # fmt: skip
    """What of a branch waits; `shared`: the operands of the `cond` that it gets beside what it reads of the first part."""
    entering = fresh(slots)
    env: dict[JaxprAtom, JaxprAtom] = {v: entering[n] for v, n in own.items()}
    return branch.jaxpr.replace(
        invars=[*(branch.jaxpr.invars[n - 1] for n in shared), *entering],
        eqns=[e.replace(invars=substituted(e.invars, env)) for e in branch.late],
        outvars=substituted(_where(branch.jaxpr.outvars, waits, True), env),
    )
