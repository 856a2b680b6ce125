"""The dimensions along which a linear solver's systems are separate, and the solver at other lengths of them.

Problem.  The four functions of `custom_linear_solve` are the user's: nothing says which dimensions are a batch. But
`jnp.linalg.solve` of 1,000 matrices is 1,000 solves, as are the columns of a right-hand side, and each device can have some.

Idea.  In the functions' own equations: union-find over (variable, dimension) pairs, united where a rule carries them as one
loop index that stands in every result, and excluded where an operator reduces them, orders them, or is no single operator
(a loop, so that an iterative solver keeps its systems together). What is united with a dimension of the result, and nowhere
excluded, is such a dimension. The same equations run at other lengths of it, as `padded_params` states them.

>>> from jshard._program.equation_bodies import every_equation
>>> closed = jax.make_jaxpr(jnp.linalg.solve)(jnp.ones((5, 3, 3)), jnp.ones((5, 3, 2)))
>>> eqn = next(e for e in every_equation(closed.jaxpr) if e.primitive.name == "custom_linear_solve")
>>> systems = SeparateSystems(op_view(eqn))
>>> systems.of_results(), systems.of_operands()[0]
([(0, 1, None)], (0, None, None))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import ClosedJaxpr, Jaxpr, JaxprAtom, JaxprEqn
from jshard._core.union_find import UnionFind
from jshard._program.equation_bodies import bodies_of
from jshard._program.loop_invariants import CALLS_WITH_BODY, body_of
from jshard._rules.padding import padded_factors, padded_params
from jshard._rules.registry import REGISTRY, OpView, op_view
from jshard._rules.rule import Rule


Place = tuple[object, int]
"""A variable, or the side and number of an operand or result of the solver, and a dimension."""

Numbers = tuple[int | None, ...]
"""For each dimension of a tensor the number of its separate dimension, or None."""


class SolverFunction(NamedTuple):
    """One of a solver's functions: its jaxpr, the operands that are its constants, and whether it maps x to b."""

    body: Jaxpr | ClosedJaxpr
    constants: tuple[int, ...]
    from_x: bool


def functions_of(op: OpView) -> dict[str, SolverFunction]:
    """The functions of a solver by name: the product and its transpose, the solver and its transpose."""
    lengths, out, first = op.params["const_lengths"], {}, 0
    for name, from_x in (("matvec", True), ("vecmat", False), ("solve", False), ("transpose_solve", True)):
        count = getattr(lengths, name)
        body = getattr(op.params["jaxprs"], name)
        if body is not None:
            out[name] = SolverFunction(body, tuple(range(first, first + count)), from_x)
        first += count
    return out


class SeparateSystems:
    """The separate dimensions of one solver."""

    def __init__(self, op: OpView):
        self.op, self.functions = op, functions_of(op)
        self.right_sides = range(sum(op.params["const_lengths"]), len(op.ins))
        self._united = UnionFind[Place]()
        self._excluded: list[Place] = []
        self._walked: list[Jaxpr] = []  # kept, so that no id is reused
        for function in self.functions.values():
            self._walk_function(function)
        self._numbers = self._numbered()

    def of_operands(self) -> list[Numbers]:
        """The numbers of separate dimensions of each operand."""
        return [self._of(("operand", i), a.shape) for i, a in enumerate(self.op.ins)]

    def of_results(self) -> list[Numbers]:
        """The numbers of separate dimensions of each result."""
        return [self._of(("result", i), a.shape) for i, a in enumerate(self.op.outs)]

    def solve(self, *operands: ArrayLike) -> list[jax.Array]:
        """The solver alone, on operands with other lengths of separate dimensions."""
        constants = [operands[i] for i in self.functions["solve"].constants]
        return self._run("solve", constants, [operands[i] for i in self.right_sides])

    def solve_differentiably(self, *operands: ArrayLike) -> list[jax.Array]:
        """As `solve`, by a solver of its own that has the functions of this one."""

        def function(name: str) -> Callable[[Sequence[ArrayLike]], list[jax.Array]]:
            constants = [operands[i] for i in self.functions[name].constants]
            return lambda xs: self._run(name, constants, xs)

        solve = function("solve")
        back = function("transpose_solve") if "transpose_solve" in self.functions else None
        return lax.custom_linear_solve(
            function("matvec"),
            [jnp.asarray(operands[i]) for i in self.right_sides],
            solve=lambda _, b: solve(b),
            transpose_solve=None if back is None else lambda _, b: back(b),
            symmetric=_is_symmetric(self.functions),
        )

    # -- classes -------------------------------------------------------------------------------------------------

    def _of(self, tensor: object, shape: Sequence[int]) -> Numbers:
        return tuple(self._numbers.get(self._united.root((tensor, d))) for d in range(len(shape)))

    def _walk_function(self, function: SolverFunction) -> None:
        jaxpr, consts = compat.open_jaxpr(function.body)
        b = [("operand", i) for i in self.right_sides]
        x = [("result", i) for i in range(len(self.op.outs))]
        constants = [("operand", i) for i in function.constants]
        into, out = (x, b) if function.from_x else (b, x)
        if consts or len(into) != len(out):  # auxiliary results are the user's
            self._excluded += [(t, d) for i, t in enumerate(x) for d in range(len(self.op.outs[i].shape))]
            return
        self._bind([*constants, *into], jaxpr.invars)
        self._bind(out, jaxpr.outvars)
        self._walk(jaxpr)

    def _bind(self, outer: Sequence[object], inner: Sequence[JaxprAtom]) -> None:
        for a, b in zip(outer, inner, strict=True):
            for d in range(len(b.aval.shape)):
                if compat.is_literal(a) or compat.is_literal(b):
                    self._excluded.append((b if compat.is_literal(a) else a, d))
                else:
                    self._united.unite((a, d), (b, d))

    def _walk(self, jaxpr: Jaxpr) -> None:
        if any(jaxpr is j for j in self._walked):
            return
        self._walked.append(jaxpr)
        self._excluded += [(v, d) for v in jaxpr.constvars for d in range(len(v.aval.shape))]
        for eqn in jaxpr.eqns:
            called = body_of(eqn) if eqn.primitive.name in CALLS_WITH_BODY else None
            if called is not None:
                body, _ = compat.open_jaxpr(called)
                self._bind(eqn.invars, body.invars)
                self._bind(eqn.outvars, body.outvars)
                self._walk(body)
                continue
            united = [] if any(True for _ in bodies_of(eqn)) or eqn.effects else list(_loop_indices(eqn))
            for places in united:
                for place in places[1:]:
                    self._united.unite(places[0], place)
            known = {place for places in united for place in places}
            variables = [v for v in (*eqn.invars, *eqn.outvars) if not compat.is_literal(v)]
            every = ((v, d) for v in variables for d in range(len(v.aval.shape)))
            self._excluded += [place for place in every if place not in known]

    def _numbered(self) -> dict[Place, int]:
        excluded = {self._united.root(place) for place in self._excluded}
        roots = [
            [self._united.root((("result", i), d)) for d in range(len(a.shape))]
            for i, a in enumerate(self.op.outs)
        ]
        everywhere = set(roots[0]).intersection(*roots[1:]) if roots else set()
        tensors = [(("operand", i), a) for i, a in enumerate(self.op.ins)]
        tensors += [(("result", i), a) for i, a in enumerate(self.op.outs)]
        for tensor, aval in tensors:  # no tensor has one of them twice
            own = [self._united.root((tensor, d)) for d in range(len(aval.shape))]
            excluded |= {r for r in own if own.count(r) > 1}
        sizes = {r: n for r, n in zip(roots[0], self.op.outs[0].shape, strict=True)} if roots else {}
        separate = (
            [r for r in dict.fromkeys(roots[0]) if r in everywhere - excluded and sizes[r] > 1]
            if roots
            else []
        )
        return {r: k for k, r in enumerate(separate)}

    # -- at other lengths ----------------------------------------------------------------------------------------

    def _run(
        self, name: str, constants: Sequence[ArrayLike], arguments: Sequence[ArrayLike]
    ) -> list[jax.Array]:
        """A function at the lengths of its constants and arguments."""
        jaxpr, _ = compat.open_jaxpr(self.functions[name].body)
        lengths: dict[Place, int] = {}
        for v, x in zip(jaxpr.invars, (*constants, *arguments), strict=True):
            lengths |= {self._united.root((v, d)): n for d, n in enumerate(jnp.shape(x))}
        return self._evaluated(jaxpr, [*constants, *arguments], lengths)

    def _evaluated(
        self, jaxpr: Jaxpr, arguments: Sequence[ArrayLike], lengths: Mapping[Place, int]
    ) -> list[jax.Array]:
        env: dict[JaxprAtom, ArrayLike] = dict(zip(jaxpr.invars, arguments, strict=True))

        def read(v: JaxprAtom) -> ArrayLike:
            return v.val if compat.is_literal(v) else env[v]

        for eqn in jaxpr.eqns:
            operands = [read(v) for v in eqn.invars]
            called = body_of(eqn) if eqn.primitive.name in CALLS_WITH_BODY else None
            if called is not None:
                results = self._evaluated(compat.open_jaxpr(called)[0], operands, lengths)
            else:
                results = self._bound(eqn, operands, lengths)
            env.update(zip(eqn.outvars, results, strict=True))
        return [jnp.asarray(read(v)) for v in jaxpr.outvars]

    def _bound(
        self, eqn: JaxprEqn, operands: Sequence[ArrayLike], lengths: Mapping[Place, int]
    ) -> list[jax.Array]:
        shapes = [
            [lengths.get(self._united.root((v, d)), n) if self._united.root((v, d)) in self._numbers else n
             for d, n in enumerate(v.aval.shape)]
            for v in eqn.outvars
        ]  # fmt: skip
        params = padded_params(op_view(eqn), [jnp.shape(x) for x in operands], shapes)
        params = {k: None if k in ("sharding", "out_sharding") else v for k, v in params.items()}
        if compat.check_vma_enabled():
            operands = compat.to_common_vma(operands)
        out = eqn.primitive.bind(*operands, **compat.bind_params(eqn, params))
        return list(out) if eqn.primitive.multiple_results else [out]


def _is_symmetric(functions: Mapping[str, SolverFunction]) -> bool:
    """Whether the product is its own transpose, as `custom_linear_solve` keeps it."""
    return "vecmat" in functions and functions["vecmat"].body is functions["matvec"].body


def _loop_indices(eqn: JaxprEqn) -> Iterator[list[Place]]:
    """For each loop index of an operator that stands in every result, alone in its dimensions, the places with it."""
    op, entry = op_view(eqn), REGISTRY.get(eqn.primitive.name)
    rule = None if entry is None else entry.rule(op)
    if rule is None or rule.opaque:
        return
    for f, padding in padded_factors(op, rule).items():
        if padding.index is None and padding.most is None and _is_separate(op, rule, f):
            sides = ((eqn.invars, rule.operands), (eqn.outvars, rule.results))
            yield [
                (v, d)
                for variables, tensors in sides
                for v, dims in zip(variables, tensors, strict=True)
                if not compat.is_literal(v)
                for d, factors in enumerate(dims)
                if factors == (f,)
            ]


def _is_separate(op: OpView, rule: Rule, f: int) -> bool:
    if f in rule.blocked or f in rule.reduction or not all((f,) in dims for dims in rule.results):
        return False
    read = any((f,) in dims for dims in rule.operands)
    return read or op.primitive == "broadcast_in_dim"
