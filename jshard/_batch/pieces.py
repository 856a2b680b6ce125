"""Running operators and bodies on one piece of the batch, inside the loop over pieces.

Piece i of k has the examples i, i + k, i + 2k, ...: `x.reshape(n / k, k, ...)[:, i]`. Random bits and positions are those of
the whole batch, computed for the piece alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from jshard._batch.batch_class import SHARED, SUM, BatchClass
from jshard._batch.body_classes import Analysis, Body, BodyCut, Classes, Step, steps_for
from jshard._batch.derivative_rules import RuledCall
from jshard._batch.operator_cut import DRAWS
from jshard._batch.piece_operator import AXIS, PieceContext, binder, run_cut
from jshard._core import jaxcompat as compat
from jshard._core.jax_types import JaxprAtom, JaxprEqn, Params
from jshard._core.layout import MeshAxes
from jshard._program.loop_invariants import CHECKPOINTED
from jshard._rules.lookup import rules_for
from jshard._rules.registry import OpView
from jshard._rules.rule import Candidate


Values = dict[tuple[JaxprAtom, BatchClass], jax.Array]
Read = Callable[[JaxprAtom], jax.Array]


class Pieces:
    """The loop's body: the piece `index` of `count`."""

    def __init__(self, analysis: Analysis, count: int, index: jax.Array):
        self.analysis, self.count, self.index = analysis, count, index
        self.mesh = MeshAxes((AXIS,), (count,))

    # -- values ------------------------------------------------------------------------------------------------------

    def converted(self, x: jax.Array, c: BatchClass) -> jax.Array:
        """A shared value as a value of class `c`."""
        if c == SHARED:
            return x
        if c == SUM:
            return jnp.where(self.index == 0, x, jnp.zeros_like(x))
        shape, d = x.shape, c.dim
        split = (*shape[:d], shape[d] // (c.inner * self.count), self.count, c.inner, *shape[d + 1 :])
        piece = lax.dynamic_index_in_dim(x.reshape(split), self.index, d + 1, keepdims=False)
        return piece.reshape((*shape[:d], shape[d] // self.count, *shape[d + 1 :]))

    def run(
        self, steps: Sequence[Step], classes: Classes, values: Values, whole: Read | None = None
    ) -> Callable[[JaxprAtom, BatchClass], jax.Array]:
        """Run equations, and return how their results are read; `whole` gives shared values of the outside."""

        def read(v: JaxprAtom, c: BatchClass) -> jax.Array:
            if compat.is_literal(v):
                return (
                    self.converted(jnp.asarray(v.val, v.aval.dtype), c)
                    if c != SHARED
                    else cast("jax.Array", v.val)
                )
            if (v, c) not in values:
                shared = values.get((v, SHARED))
                if shared is None:
                    assert whole is not None, "a value of the piece is read before it is computed"
                    shared = whole(v)
                values[v, c] = self.converted(shared, c)
            return values[v, c]

        for step in steps:
            operands = [read(v, c) for v, c in zip(step.eqn.invars, step.cut.operands, strict=True)]
            with compat.eqn_context(step.eqn):
                results = self._results(step, operands)
            if step.wanted is not None:
                values[step.wanted] = results[0]
                continue
            for v, c, x in zip(step.eqn.outvars, step.cut.results, results, strict=True):
                values[v, c] = x
        return read

    def run_body(self, body: Body, operands: Iterable[jax.Array]) -> list[jax.Array]:
        """The results of a body on operands of the classes of its inputs."""
        jaxpr = body.jaxpr
        values: Values = {
            (v, SHARED): jnp.asarray(x) for v, x in zip(jaxpr.constvars, body.consts, strict=True)
        }
        values.update(((v, c), x) for v, c, x in zip(jaxpr.invars, body.inputs, operands, strict=True))
        wanted = list(zip(jaxpr.outvars, body.results, strict=True))
        steps, _ = steps_for(jaxpr, body.classes, wanted, self.analysis)
        read = self.run(steps, body.classes, values)
        return [jnp.asarray(read(v, c)) for v, c in wanted]

    # -- equations ---------------------------------------------------------------------------------------------------

    def _results(self, step: Step, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
        eqn, cut = step.eqn, step.cut
        if isinstance(cut, BodyCut) and cut.bodies:
            return self._with_bodies(eqn, cut, operands)
        if step.wanted is not None and eqn.primitive.name == "iota":
            return [self._iota(eqn, step.wanted[1])]
        if (
            step.wanted is not None
            and eqn.primitive.name in DRAWS
            and not operands[0].ndim > step.wanted[1].dim
        ):
            return [self._drawn(eqn, operands[0], step.wanted[1])]
        return run_cut(eqn, cut, self.mesh, operands)

    def _iota(self, eqn: JaxprEqn, c: BatchClass) -> jax.Array:
        """Positions of the piece: of element j along the batch `j // inner * k * inner + i * inner + j % inner`."""
        shape, dtype = list(eqn.outvars[0].aval.shape), eqn.params["dtype"]
        shape[c.dim] //= self.count
        j = lax.broadcasted_iota(dtype, tuple(shape), eqn.params["dimension"])
        if eqn.params["dimension"] != c.dim:
            return j
        inner, i = jnp.asarray(c.inner, dtype), self.index.astype(dtype)
        if c.inner == 1:
            return j * jnp.asarray(self.count, dtype) + i
        return lax.div(j, inner) * jnp.asarray(self.count * c.inner, dtype) + i * inner + lax.rem(j, inner)

    def _drawn(self, eqn: JaxprEqn, keys: jax.Array, c: BatchClass) -> jax.Array:
        """Random bits of the piece: the draw with its batch as (examples / k, k, inner), cut at point i of the second."""
        batch, shape = keys.ndim, tuple(eqn.params["shape"])
        d = c.dim - batch
        split = (*shape[:d], shape[d] // (c.inner * self.count), self.count, c.inner, *shape[d + 1 :])
        out = eqn.outvars[0].aval
        aval = jax.ShapeDtypeStruct((*out.shape[:batch], *split), out.dtype)
        view = OpView(
            eqn.primitive.name, {**eqn.params, "shape": split}, (eqn.invars[0].aval,), (aval,), (None,)
        )
        rule, entry = rules_for(view)
        assert entry is not None and entry.local_impl is not None
        context = PieceContext(
            view, rule, Candidate((batch + d + 1,)), self.mesh, binder(eqn), index=self.index
        )
        (bits,) = entry.local_impl(context, keys)
        local = list(out.shape)
        local[c.dim] //= self.count
        return cast("jax.Array", bits).reshape(tuple(local))

    def _with_bodies(self, eqn: JaxprEqn, cut: BodyCut, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
        name, p = eqn.primitive.name, eqn.params
        if name == "scan":
            return self._scan(p, cut.bodies[0], operands)
        if name == "while":
            n_test, n_consts = p["cond_nconsts"], p["body_nconsts"]
            test, body = cut.bodies
            fixed, carry = operands[: n_test + n_consts], tuple(operands[n_test + n_consts :])
            return lax.while_loop(
                lambda c: self.run_body(test, (*fixed[:n_test], *c))[0],
                lambda c: tuple(self.run_body(body, (*fixed[n_test:], *c))),
                carry,
            )
        if name == "cond":
            index = operands[0].astype("int32") if operands[0].dtype == bool else operands[0]
            return lax.switch(index, [_as_branch(self, b) for b in cut.bodies], *operands[1:])
        if name in CHECKPOINTED:
            return self._remat(eqn, cut.bodies[0], operands)
        if name in ("custom_jvp_call", "custom_vjp_call"):

            def run(index: jax.Array, body: Body, values: Sequence[jax.Array]) -> list[jax.Array]:
                return Pieces(self.analysis, self.count, index).run_body(body, values)

            operands = [jnp.asarray(x) for x in operands]
            return RuledCall(eqn, cut, self.analysis, run).function()(self.index, *operands)
        return self.run_body(cut.bodies[0], operands)

    def _scan(self, p: Params, body: Body, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
        n_consts, n_carry = compat.scan_split(p)
        consts, init = operands[:n_consts], operands[n_consts : n_consts + n_carry]

        def step(
            carry: tuple[jax.Array, ...], slices: tuple[jax.Array, ...]
        ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
            results = self.run_body(body, (*consts, *carry, *slices))
            return tuple(results[:n_carry]), tuple(results[n_carry:])

        carry, stacked = lax.scan(
            step, tuple(init), tuple(operands[n_consts + n_carry :]), length=int(p["length"]),
            reverse=p["reverse"], unroll=p["unroll"],
        )  # fmt: skip
        return [*carry, *stacked]

    def _remat(self, eqn: JaxprEqn, body: Body, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """The call with the same parameters: what of it is computed again, and its barrier, stay as they were."""

        def run(index: jax.Array, *values: jax.Array) -> list[jax.Array]:
            return Pieces(self.analysis, self.count, index).run_body(body, values)

        operands = [jnp.asarray(x) for x in operands]
        opened, consts = compat.open_jaxpr(compat.make_jaxpr(run, *map(_type_of, (self.index, *operands))))
        if consts:
            opened = opened.replace(constvars=[], invars=[*opened.constvars, *opened.invars])
        params = compat.bind_params(eqn, {**eqn.params, "jaxpr": opened})
        return eqn.primitive.bind(*consts, self.index, *operands, **params)


def assembled(stack: jax.Array, c: BatchClass) -> jax.Array:
    """The value of the whole batch from its pieces, stacked along dimension 0."""
    count, *shape = stack.shape
    d = c.dim
    split = stack.reshape((count, *shape[:d], shape[d] // c.inner, c.inner, *shape[d + 1 :]))
    moved = jnp.moveaxis(split, 0, d + 1)
    return moved.reshape((*shape[:d], shape[d] * count, *shape[d + 1 :]))


def _type_of(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=bool(getattr(jax.typeof(x), "weak_type", False)))


def _as_branch(pieces: Pieces, body: Body) -> Callable[..., tuple[jax.Array, ...]]:
    return lambda *operands: tuple(pieces.run_body(body, operands))
