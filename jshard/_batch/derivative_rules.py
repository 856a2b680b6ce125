"""Calls with derivative rules on a piece of the batch: the rule stays the user's when JAX differentiates the loop.

A rule is a function of whole values. It is traced on their shapes when JAX first differentiates the call, and its
operators are classified and run on pieces like all others. The gradient of a shared operand is the addend of the piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jshard._batch.batch_class import SHARED, SUM, BatchClass
from jshard._batch.body_classes import Analysis, Body, BodyCut
from jshard._batch.piece_operator import run_whole
from jshard._core import jaxcompat as compat
from jshard._core.jax_types import ArrayFunction, Aval, JaxprEqn, PyTreeDef


RunBody = Callable[[jax.Array, Body, Sequence[jax.Array]], list[jax.Array]]
"""Runs a body on the piece of some index."""


class RuledCall:
    """A custom_jvp or custom_vjp call on a piece; its function takes the piece's index, then the call's operands."""

    def __init__(self, eqn: JaxprEqn, cut: BodyCut, analysis: Analysis, run: RunBody):
        self.eqn, self.cut, self.analysis, self.run = eqn, cut, analysis, run
        # Captured values come first and have no derivative.
        captured = int(eqn.params.get("num_consts", 0))
        self.has_tangent = [
            k >= captured and _is_inexact(v.aval) and not compat.is_literal(v)
            for k, v in enumerate(eqn.invars)
        ]
        self.result_is_inexact = [_is_inexact(v.aval) for v in eqn.outvars]

    def function(self) -> ArrayFunction:
        """The call as a function with its rule."""

        def forward(index: jax.Array, *operands: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(self.run(index, self.cut.bodies[0], operands))

        if self.eqn.primitive.name == "custom_jvp_call":
            f = jax.custom_jvp(forward)
            f.defjvp(self._jvp)
            return f
        g = jax.custom_vjp(forward)
        left: list[tuple[PyTreeDef, list[jax.ShapeDtypeStruct], tuple[BatchClass, ...]]] = []

        def with_residuals(index: jax.Array, *operands: jax.Array) -> tuple[tuple, tuple]:
            results, arrays, of_residuals = self._forward(index, operands)
            left[:] = [of_residuals]
            return tuple(results), (index, *arrays)

        def backward(residuals: tuple[jax.Array, ...], cotangents: Sequence[jax.Array]) -> tuple:
            return None, *self._backward(left[0], residuals[0], residuals[1:], cotangents)

        g.defvjp(with_residuals, backward)
        return g

    def _on_whole(self, values: Sequence[jax.Array], differentiated: Sequence[jax.Array]) -> list[jax.Array]:
        """The equation on whole values, some of them replaced."""
        changed = iter(differentiated)
        operands = [next(changed) if m else x for m, x in zip(self.has_tangent, values, strict=True)]
        return run_whole(self.eqn, operands)

    def _body(
        self, f: ArrayFunction, avals: Sequence[jax.ShapeDtypeStruct], classes: Sequence[BatchClass],
        results: Sequence[BatchClass] | None,
    ) -> Body:  # fmt: skip
        closed = compat.make_jaxpr(f, *avals)
        return self.analysis.body(self.eqn, closed, classes, results, range(len(avals)))

    def _avals(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.eqn.invars]

    def _jvp(self, primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple[tuple, tuple]:
        avals, n = self._avals(), len(self.eqn.invars)
        moving = [k for k, m in enumerate(self.has_tangent) if m]

        def pushforward(*values: jax.Array) -> list[jax.Array]:
            fixed = values[:n]
            out, out_tangents = jax.jvp(
                lambda *xs: self._on_whole(fixed, xs), [fixed[k] for k in moving], list(values[n:])
            )
            return [*out, *(t for t, m in zip(out_tangents, self.result_is_inexact, strict=True) if m)]

        classes = self.cut.operands
        results = [c for c, m in zip(self.cut.results, self.result_is_inexact, strict=True) if m]
        body = self._body(
            pushforward, [*avals, *(avals[k] for k in moving)], [*classes, *(classes[k] for k in moving)],
            [*self.cut.results, *results],
        )  # fmt: skip
        index, *operands = primals
        given = [tangents[1 + k] for k in moving]
        out = self.run(index, body, [*operands, *given])
        count = len(self.cut.results)
        values, found = out[:count], iter(out[count:])
        return tuple(values), tuple(
            next(found) if m else np.zeros(x.shape, jax.dtypes.float0)
            for x, m in zip(values, self.result_is_inexact, strict=True)
        )

    def _forward(
        self, index: jax.Array, operands: Sequence[jax.Array]
    ) -> tuple[
        list[jax.Array], list[jax.Array], tuple[PyTreeDef, list[jax.ShapeDtypeStruct], tuple[BatchClass, ...]]
    ]:
        structures: list[PyTreeDef] = []

        def forward(*values: jax.Array) -> list[jax.Array]:
            moving = [x for x, m in zip(values, self.has_tangent, strict=True) if m]
            out, pullback = jax.vjp(lambda *xs: self._on_whole(values, xs), *moving)
            leaves, structure = jax.tree.flatten(pullback)
            structures[:] = [structure]
            return [*out, *leaves]

        body = self._body(forward, self._avals(), self.cut.operands, None)
        count = len(self.cut.results)
        wanted = (*self.cut.results, *body.results[count:])
        body = self._body(forward, self._avals(), self.cut.operands, wanted)
        residuals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in body.jaxpr.outvars[count:]]
        out = self.run(index, body, operands)
        return out[:count], out[count:], (structures[0], residuals, wanted[count:])

    def _backward(
        self, left: tuple[PyTreeDef, list[jax.ShapeDtypeStruct], tuple[BatchClass, ...]], index: jax.Array,
        arrays: Sequence[jax.Array], cotangents: Sequence[jax.Array],
    ) -> list[jax.Array | None]:  # fmt: skip
        structure, residuals, classes = left
        outs = [v.aval for v in self.eqn.outvars]

        def backward(*values: jax.Array) -> list[jax.Array]:
            pullback = jax.tree.unflatten(structure, values[: len(residuals)])
            given = iter(values[len(residuals) :])
            return list(pullback([next(given) if m else np.zeros(a.shape, jax.dtypes.float0)
                                  for a, m in zip(outs, self.result_is_inexact, strict=True)]))  # fmt: skip

        inexact = [k for k, m in enumerate(self.result_is_inexact) if m]
        avals = [*residuals, *(jax.ShapeDtypeStruct(outs[k].shape, outs[k].dtype) for k in inexact)]
        gradients = [
            SUM if c == SHARED else c for c, m in zip(self.cut.operands, self.has_tangent, strict=True) if m
        ]
        body = self._body(backward, avals, [*classes, *(self.cut.results[k] for k in inexact)], gradients)
        found = iter(self.run(index, body, [*arrays, *(cotangents[k] for k in inexact)]))
        return [next(found) if m else None for m in self.has_tangent]


def _is_inexact(aval: Aval) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))
