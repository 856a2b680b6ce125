"""Running one operator on one piece of the batch, with the local implementation of its rule.

A local implementation that computes with the positions of a block has no result on a piece, whose examples are not
contiguous: `check_positions` finds that out on shapes alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jshard._batch.batch_class import SUM, BatchClass, CoupledError
from jshard._batch.operator_cut import OperatorCut
from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Aval, Index, JaxprAtom, JaxprEqn, Params
from jshard._core.layout import MeshAxes
from jshard._rules.registry import LocalContext
from jshard._rules.rule import Candidate


AXIS = "piece of the batch"
"""The axis that a loop over pieces stands for, in the contexts of local implementations."""

_BY_POSITION = ("gather", "scatter", "dynamic_")  # prefixes of primitives that may compute with positions


class _PositionError(Exception):
    """A local implementation needs positions along the batch, which are not contiguous in a piece."""


@dataclasses.dataclass(frozen=True, eq=False)
class PieceContext(LocalContext):
    """A local context in which the only axis is the loop; with `index`, that of a factor cut into single points."""

    index: jax.Array | None = None

    def _position(self) -> Index:
        if self.index is None:
            raise _PositionError
        return self.index

    def offset(self, factor: int) -> Index:
        """The index of the point, where the factor is cut into points."""
        return self._position() * self.size(factor) if self.axes(factor) else 0

    def result_offset(self, i: int, dim: int) -> Index:
        """The index of the point, where the dimension is cut into points."""
        return self._position() if self.result_layout(i).dims[dim] else 0

    def operand_offset(self, i: int, dim: int) -> Index:
        """The index of the point, where the dimension is cut into points."""
        return self._position() if self.operand_layout(i).dims[dim] else 0


def binder(eqn: JaxprEqn) -> Callable[..., list[jax.Array]]:
    """The primitive of an equation as a function of operands and parameters."""

    def bind(*operands: ArrayLike, **params: object) -> list[jax.Array]:
        # Shardings of results are those of the whole batch.
        return _bound(
            eqn, operands, {k: None if k in ("sharding", "out_sharding") else v for k, v in params.items()}
        )

    return bind


def run_whole(eqn: JaxprEqn, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """An equation as it was traced."""
    return _bound(eqn, operands, eqn.params)


def _bound(eqn: JaxprEqn, operands: Sequence[ArrayLike], params: Params) -> list[jax.Array]:
    out = eqn.primitive.bind(*operands, **compat.bind_params(eqn, params))
    return list(out) if eqn.primitive.multiple_results else [out]


def run_cut(
    eqn: JaxprEqn, cut: OperatorCut, mesh: MeshAxes, operands: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    """An operator without a body on a piece."""
    if cut.factor < 0 or cut.rule is None or cut.view is None:
        return run_whole(eqn, operands)
    bind = binder(eqn)
    local = cut.entry.local_impl if cut.entry is not None else None
    if local is None or SUM in cut.operands:
        return bind(*operands, **cut.view.params)
    try:
        context = PieceContext(cut.view, cut.rule, Candidate((cut.factor,)), mesh, bind)
        return [jnp.asarray(y) for y in local(context, *operands)]
    # JAX raises NameError for the position on an axis that is not one of a mesh.
    except (_PositionError, NameError):
        raise CoupledError(eqn, "its result depends on the positions of the examples") from None


def check_positions(eqn: JaxprEqn, cut: OperatorCut, count: int) -> None:
    """Raise `CoupledError` if an operator cannot run on one of `count` pieces."""
    if cut.factor < 0 or not eqn.primitive.name.startswith(_BY_POSITION):
        return
    mesh = MeshAxes((AXIS,), (count,))
    shapes = [piece_type(v.aval, c, count) for v, c in zip(eqn.invars, cut.operands, strict=True)]
    found = jax.eval_shape(lambda *operands: list(run_cut(eqn, cut, mesh, operands)), *shapes)
    for v, c, y in zip(eqn.outvars, cut.results, found, strict=True):
        if tuple(y.shape) != piece_type(v.aval, c, count).shape:
            raise CoupledError(eqn, "it has no result for a piece of the batch")


def shape_of(v: JaxprAtom) -> jax.ShapeDtypeStruct:
    """The type of a variable, on which a program is traced again."""
    aval = v.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))


def piece_type(aval: Aval, c: BatchClass, count: int) -> jax.ShapeDtypeStruct:
    """The type of a value on a piece."""
    shape = list(aval.shape)
    if c.is_example:
        shape[c.dim] //= count
    return jax.ShapeDtypeStruct(tuple(shape), aval.dtype)
