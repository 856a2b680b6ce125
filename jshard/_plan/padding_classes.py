"""Which dimensions of a program must be padded together.

Problem.  A vocabulary of 50,257 is a dimension of an embedding, of logits, of their gradient and of an optimizer's
state. If one of them is padded, the operators between them want the others padded by as much.

Idea.  Union-find over the (variable, dimension) pairs of a jaxpr: two are in one class where an operator carries them as
one factor that may be padded (`_rules/padding.py`), where it is shifted (`padded_shifts.py`), and where a variable enters
or leaves the body of a call, loop or branch. At all other operators a class ends: there the true size is restored.

>>> import jax, jax.numpy as jnp
>>> closed = jax.make_jaxpr(lambda x, w: jnp.sum(x @ w, 1))(jnp.ones((4, 6)), jnp.ones((6, 7)))
>>> classes = PaddingClasses(closed, frozenset([7]))
>>> [(c.size, c.largest_bytes) for c in classes.all()]
[(7, 168)]
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import ClosedJaxpr, Jaxpr, JaxprAtom, JaxprEqn
from jshard._core.union_find import UnionFind
from jshard._plan.padded_shifts import shifted_dims
from jshard._program.loop_invariants import CALLS_WITH_BODY, body_of
from jshard._program.pin_primitives import PIN_OPERAND, PIN_RESULT
from jshard._rules.lookup import rules_for
from jshard._rules.padding import PaddedFactor, padded_factors
from jshard._rules.registry import op_view


Place = tuple[JaxprAtom, int]
"""A variable and one of its dimensions."""


@dataclasses.dataclass(frozen=True)
class EquationFactor:
    """A factor of an equation that may be padded.

    `operands`, `results`: the (index, dimension) pairs that carry it.
    """

    operands: tuple[tuple[int, int], ...]
    results: tuple[tuple[int, int], ...]
    padding: PaddedFactor


@dataclasses.dataclass
class PaddingClass:
    """Dimensions that are padded together.

    Arguments:

    - `size`: their true size; `number`: among the classes of this size, in the order in which the program reaches them.
    - `largest_bytes`: of the largest tensor with such a dimension.
    - `carried`: whether any operator computes with it padded.
    """

    size: int
    number: int
    largest_bytes: int = 0
    carried: bool = False


class PaddingClasses:
    """The classes of the dimensions of some `sizes` in one jaxpr."""

    def __init__(self, closed: ClosedJaxpr, sizes: frozenset[int]):
        self.sizes = sizes
        self._united = UnionFind[Place]()
        self._factors: dict[Hashable, tuple[EquationFactor, ...]] = {}
        self._carried: list[Place] = []
        self._walked: set[int] = set()
        self._bodies: list[Jaxpr] = []  # kept, so that no id is reused
        self._walk(compat.open_jaxpr(closed)[0])
        self._classes = self._numbered()

    def all(self) -> Sequence[PaddingClass]:
        """The classes, in the order in which the program reaches them."""
        return list(self._classes.values())

    def class_of(self, v: JaxprAtom, dim: int) -> PaddingClass | None:
        """The class of a variable's dimension; None where it has none."""
        if (v, dim) not in self._united:
            return None
        return self._classes[self._united.root((v, dim))]

    def factors(self, eqn: JaxprEqn) -> tuple[EquationFactor, ...]:
        """The factors of an equation of these sizes that may be padded."""
        if not any(s in self.sizes for v in (*eqn.invars, *eqn.outvars) for s in shape_of(v)):
            return ()
        key = _key(eqn)
        if key not in self._factors:
            self._factors[key] = self._look_up(eqn)
        return self._factors[key]

    def _look_up(self, eqn: JaxprEqn) -> tuple[EquationFactor, ...]:
        op = op_view(eqn)
        # Pins of operands are read when the program is built; they are identities as those of results are.
        rule, _ = rules_for(
            dataclasses.replace(op, primitive=PIN_RESULT) if op.primitive == PIN_OPERAND else op
        )
        out = []
        for f, padding in padded_factors(op, rule).items():
            if rule.sizes[f] not in self.sizes:
                continue
            sides = [
                tuple(
                    (i, d) for i, dims in enumerate(side) for d, factors in enumerate(dims) if factors == (f,)
                )
                for side in (rule.operands, rule.results)
            ]
            out.append(EquationFactor(sides[0], sides[1], padding))
        return tuple(out)

    # -- union-find ----------------------------------------------------------------------------------------------

    def _walk(self, jaxpr: Jaxpr) -> None:
        if id(jaxpr) in self._walked:
            return
        self._walked.add(id(jaxpr))
        self._bodies.append(jaxpr)
        for eqn in jaxpr.eqns:
            bodies = inner_bodies(eqn)
            if not bodies:
                self._join(eqn)
            for body in bodies:
                self._walk(body.jaxpr)
                for outer, inner, shift in body.bound:
                    self._bind(outer, inner, shift)

    def _join(self, eqn: JaxprEqn) -> None:
        for factor in self.factors(eqn):
            places = [(eqn.invars[i], d) for i, d in factor.operands]
            places = [p for p in places if not compat.is_literal(p[0])]
            places += [(eqn.outvars[i], d) for i, d in factor.results]
            for place in places:
                self._united.unite(places[0], place)
            self._carried += places[:1]
        for d in shifted_dims(eqn):
            ends = [(v, d) for v in (*eqn.invars, *eqn.outvars) if d < len(shape_of(v))]
            ends = [place for place in ends if not compat.is_literal(place[0])]
            ends = [place for place in ends if shape_of(place[0])[d] in self.sizes]
            self._carried += [self._united.root(place) for place in ends]
            if len(ends) == 2 and shape_of(ends[0][0])[d] == shape_of(ends[1][0])[d]:
                self._united.unite(*ends)

    def _bind(self, outer: JaxprAtom, inner: JaxprAtom, shift: int) -> None:
        if compat.is_literal(outer) or compat.is_literal(inner):
            return
        for d, size in enumerate(shape_of(inner)):
            if size in self.sizes:
                self._united.unite((outer, d + shift), (inner, d))

    def _numbered(self) -> dict[Place, PaddingClass]:
        classes: dict[Place, PaddingClass] = {}
        count: Counter[int] = Counter()
        for v, d in self._united:
            root = self._united.root((v, d))
            if root not in classes:
                size = v.aval.shape[d]
                classes[root] = PaddingClass(size, count[size])
                count[size] += 1
            of = classes[root]
            of.largest_bytes = max(of.largest_bytes, math.prod(v.aval.shape) * compat.itemsize(v.aval.dtype))
        for place in self._carried:
            classes[self._united.root(place)].carried = True
        return classes


@dataclasses.dataclass(frozen=True, eq=False)
class BoundBody:
    """A body inside an equation.

    `bound`: (variable outside, variable inside, dimensions that the outside has before those of the inside).
    """

    jaxpr: Jaxpr
    bound: tuple[tuple[JaxprAtom, JaxprAtom, int], ...]


def inner_bodies(eqn: JaxprEqn) -> list[BoundBody]:
    """The bodies of a call, loop or branch; none for all other equations."""
    name, p = eqn.primitive.name, eqn.params
    if name in CALLS_WITH_BODY:
        called = body_of(eqn)
        return [] if called is None or not hasattr(called, "eqns") else [_whole(eqn, called, eqn.invars)]
    if name == "cond":
        return [_whole(eqn, branch, eqn.invars[1:]) for branch in p["branches"]]
    if name == "while":
        n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        test, turn = (compat.open_jaxpr(p[k])[0] for k in ("cond_jaxpr", "body_jaxpr"))
        carry, results = eqn.invars[m:], eqn.outvars
        inside = [
            *zip(eqn.invars[n:m], turn.invars, strict=False),
            *zip(carry, turn.invars[m - n :], strict=True),
        ]
        inside += [*zip(results, turn.invars[m - n :], strict=True), *zip(results, turn.outvars, strict=True)]
        tested = zip((*eqn.invars[:n], *carry), test.invars, strict=True)
        return [BoundBody(test, _unshifted(tested)), BoundBody(turn, _unshifted(inside))]
    if name == "scan":
        body = compat.open_jaxpr(p["jaxpr"])[0]
        consts, carried = compat.scan_split(p)
        k = consts + carried
        bound = [*zip(eqn.invars[:k], body.invars[:k], strict=True)]
        bound += [*zip(eqn.outvars[:carried], body.outvars[:carried], strict=True)]
        bound += [*zip(eqn.outvars[:carried], body.invars[consts:k], strict=True)]
        slices = [*zip(eqn.invars[k:], body.invars[k:], strict=True)]
        slices += [*zip(eqn.outvars[carried:], body.outvars[carried:], strict=True)]
        return [BoundBody(body, (*_unshifted(bound), *((a, b, 1) for a, b in slices)))]
    return []


def stacked_from(eqn: JaxprEqn) -> tuple[int, int]:
    """The first operand and the first result of a scan that have a dimension for its turns; past the last for all others."""
    if eqn.primitive.name != "scan":
        return len(eqn.invars), len(eqn.outvars)
    consts, carried = compat.scan_split(eqn.params)
    return consts + carried, carried


def _whole(eqn: JaxprEqn, called: Jaxpr | ClosedJaxpr, operands: Sequence[JaxprAtom]) -> BoundBody:
    body = compat.open_jaxpr(called)[0]
    pairs = [*zip(operands, body.invars, strict=True), *zip(eqn.outvars, body.outvars, strict=True)]
    return BoundBody(body, _unshifted(pairs))


def _unshifted(
    pairs: Iterable[tuple[JaxprAtom, JaxprAtom]],
) -> tuple[tuple[JaxprAtom, JaxprAtom, int], ...]:
    return tuple((a, b, 0) for a, b in pairs)


def shape_of(v: JaxprAtom) -> tuple[int, ...]:
    """The shape of a variable or literal; () for what is no array."""
    return tuple(getattr(v.aval, "shape", ()))


def _key(eqn: JaxprEqn) -> Hashable:
    """Equal for equations with equal rules; of itself where a parameter has no hash."""
    avals = tuple(
        (shape_of(v), getattr(v.aval, "dtype", None), compat.is_literal(v))
        for v in (*eqn.invars, *eqn.outvars)
    )
    key = (eqn.primitive.name, len(eqn.invars), avals, tuple(eqn.params.items()))
    try:
        hash(key)
    except TypeError:
        return id(eqn)
    return key
