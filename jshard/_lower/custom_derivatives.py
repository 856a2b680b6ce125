"""Custom derivative rules inside a planned program, kept when the program is differentiated from outside.

A `custom_jvp` or `custom_vjp` call is planned through its body, so its rule would be lost if the body were simply run.
Here the call is rebuilt: its body runs on local blocks, and when JAX differentiates it, its rule is traced on global
shapes, planned with the layouts that its values already have, and run on local blocks too.

>>> import jax, jax.numpy as jnp, jshard
>>> @jax.custom_jvp
... def f(x):
...     return x * x
>>> f.defjvps(lambda t, out, x: 100 * t)
>>> float(jax.grad(jshard.shard(lambda x: f(x) + x))(3.0))
101.0
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AbstractMesh, Mesh

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import ArrayFunction, PyTree, PyTreeDef
from jshard._core.layout import ArrayType, Layout
from jshard._core.topology import Topology
from jshard._program.graph import Call, Literal, Program
from jshard._schedule.schedule import Assignment, Schedule


T = TypeVar("T")

PlanRule = Callable[
    [
        ArrayFunction,
        Sequence[ArrayType],
        Sequence[Layout],
        Sequence[Layout],
        Topology,
        Mesh | AbstractMesh | None,
    ],
    Schedule,
]
"""(function, types of its arguments, their layouts, layouts of its first results, topology, mesh with Explicit axes in
which the program was traced or None) -> schedule."""

RunRule = Callable[[Schedule, Sequence[jax.Array]], list[jax.Array]]
"""Runs the schedule of a rule on local blocks."""


def rebuild_with_rule(
    call: Call,
    assignment: Assignment,
    operand_layouts: Sequence[Layout],
    result_layouts: Sequence[Layout],
    body: Callable[..., list[jax.Array]],
    plan_rule: PlanRule,
    run_rule: RunRule,
) -> Callable[..., Sequence[jax.Array]]:
    """The call as a function of the local blocks of its tensor operands, with its derivative rule.

    Arguments:

    - `call`: a custom_jvp or custom_vjp call of the program that `assignment` is for.
    - `operand_layouts`: of the tensor operands; literals are left out.
    - `result_layouts`: of the results.
    - `body`: runs the planned body on local blocks.
    """
    program, eqn = assignment.program, call.eqn
    tensors = [a for a in call.operands if not isinstance(a, Literal)]

    def on_global_values(*values: jax.Array) -> list[jax.Array]:
        """The equation itself."""
        remaining = iter(values)
        operands = [a.value if isinstance(a, Literal) else next(remaining) for a in call.operands]
        out = eqn.primitive.bind(*operands, **compat.bind_params(eqn, eqn.params))
        return list(out) if eqn.primitive.multiple_results else [out]

    avals = [_struct(program.tensors[t]) for t in tensors]
    # Captured values come first and have no derivative: the rule is about the function's arguments alone.
    num_captured = eqn.params.get("num_consts", 0)
    is_argument = [i >= num_captured for i, a in enumerate(call.operands) if not isinstance(a, Literal)]
    rebuilt = _CustomCall(
        on_global_values,
        avals,
        [argument and _is_inexact(aval) for argument, aval in zip(is_argument, avals, strict=True)],
        list(operand_layouts),
        list(result_layouts),
        body,
        lambda fn, avals, ins, outs: plan_rule(
            fn, avals, ins, outs, assignment.topology, program.explicit_mesh
        ),
        run_rule,
        bool(eqn.params.get("symbolic_zeros")),
        program.explicit_mesh,
    )
    return rebuilt.custom_jvp() if call.kind == "custom_jvp" else rebuilt.custom_vjp()


@dataclasses.dataclass(frozen=True)
class _Residuals:
    """What the forward pass of a vjp leaves for the backward pass, beside the arrays."""

    pullback: PyTreeDef  # the structure of `jax.vjp`'s function, whose leaves are the residual arrays
    avals: list[jax.ShapeDtypeStruct]
    layouts: list[Layout]
    perturbed: list[bool]  # the operands with respect to which the call is differentiated


@dataclasses.dataclass(frozen=True)
class _CustomCall:
    """A call with a derivative rule: `function` on global values, `body` on local blocks."""

    function: Callable[..., list[jax.Array]]
    avals: list[jax.ShapeDtypeStruct]
    differentiable: list[bool]
    operand_layouts: list[Layout]
    result_layouts: list[Layout]
    body: Callable[..., list[jax.Array]]
    plan: Callable[[ArrayFunction, Sequence[ArrayType], Sequence[Layout], Sequence[Layout]], Schedule]
    run: RunRule
    symbolic_zeros: bool
    explicit_mesh: Mesh | AbstractMesh | None

    def custom_jvp(self) -> ArrayFunction:
        """The call as a `jax.custom_jvp`."""
        f = jax.custom_jvp(lambda *blocks: tuple(self.body(*blocks)))
        f.defjvp(self._jvp, symbolic_zeros=self.symbolic_zeros)
        return f

    def custom_vjp(self) -> ArrayFunction:
        """The call as a `jax.custom_vjp`."""
        f = jax.custom_vjp(lambda *blocks: tuple(self.body(*blocks)))
        left: list[_Residuals] = []  # by the forward pass, which JAX traces before the backward pass

        def forward(*operands: PyTree) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
            results, residual_arrays, residuals = self._forward(*operands)
            left[:] = [residuals]
            return results, residual_arrays

        def backward(
            residual_arrays: tuple[jax.Array, ...], cotangents: Sequence[jax.Array | SymbolicZero]
        ) -> tuple[jax.Array | None, ...]:
            return self._backward(left[0], residual_arrays, cotangents)

        f.defvjp(forward, backward, symbolic_zeros=self.symbolic_zeros)
        return f

    def _jvp(
        self, primals: Sequence[jax.Array], tangents: Sequence[jax.Array | SymbolicZero]
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        # Rules with symbolic zeros learn which operands are not perturbed, as the user's own does.
        perturbed = [
            m and not isinstance(t, SymbolicZero) for m, t in zip(self.differentiable, tangents, strict=True)
        ]

        def pushforward(*values: jax.Array) -> list[jax.Array]:
            primals, tangents = values[: len(self.avals)], values[len(self.avals) :]
            function = self._of_perturbed(primals, perturbed)
            out, out_tangents = jax.jvp(function, tuple(_select(primals, perturbed)), tangents)
            return [*out, *out_tangents]

        schedule = self.plan(
            pushforward,
            [*self.avals, *_select(self.avals, perturbed)],
            [*self.operand_layouts, *_select(self.operand_layouts, perturbed)],
            [*self.result_layouts, *self.result_layouts],
        )
        perturbed_tangents = [
            t for t, m in zip(tangents, perturbed, strict=True) if m and not isinstance(t, SymbolicZero)
        ]
        out = self.run(schedule, [*primals, *perturbed_tangents])
        n = len(self.result_layouts)
        return tuple(out[:n]), tuple(out[n:])

    def _forward(self, *operands: PyTree) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...], _Residuals]:
        perturbed, blocks = self.differentiable, operands
        if self.symbolic_zeros:
            perturbed = [m and bool(o.perturbed) for m, o in zip(perturbed, operands, strict=True)]
            blocks = tuple(o.value for o in operands)
        structures: list[PyTreeDef] = []

        def forward(*values: jax.Array) -> list[jax.Array]:
            out, pullback = jax.vjp(self._of_perturbed(values, perturbed), *_select(values, perturbed))
            leaves, structure = jax.tree.flatten(pullback)
            structures[:] = [structure]
            return [*out, *leaves]

        schedule = self.plan(forward, self.avals, self.operand_layouts, self.result_layouts)
        assignment, n = schedule.assignment, len(self.result_layouts)
        ends = assignment.program.outputs[n:]
        residuals = _Residuals(
            structures[0],
            [_output_struct(assignment.program, i) for i in ends],
            [assignment.operand_layout(i, 0) for i in ends],
            perturbed,
        )
        out = self.run(schedule, blocks)
        return tuple(out[:n]), tuple(out[n:]), residuals

    def _backward(
        self,
        residuals: _Residuals,
        arrays: Sequence[jax.Array],
        cotangents: Sequence[jax.Array | SymbolicZero],
    ) -> tuple[jax.Array | None, ...]:
        with compat.context_of_trace(self.explicit_mesh):
            results = [
                jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jax.eval_shape(self.function, *self.avals)
            ]
        has_cotangent = [_is_inexact(r) for r in results]

        def backward(*values: jax.Array) -> list[jax.Array]:
            pullback = jax.tree.unflatten(residuals.pullback, values[: len(residuals.avals)])
            remaining = iter(values[len(residuals.avals) :])
            results_with_flag = zip(results, has_cotangent, strict=True)
            return list(pullback([next(remaining) if m else _float0_zeros(r) for r, m in results_with_flag]))

        schedule = self.plan(
            backward,
            [*residuals.avals, *_select(results, has_cotangent)],
            [*residuals.layouts, *_select(self.result_layouts, has_cotangent)],
            _select(self.operand_layouts, residuals.perturbed),
        )
        given_cotangents = map(_instantiate_zero, _select(cotangents, has_cotangent))
        out = iter(self.run(schedule, [*arrays, *given_cotangents]))
        return tuple(next(out) if m else None for m in residuals.perturbed)

    def _of_perturbed(self, values: Sequence[jax.Array], perturbed: Sequence[bool]) -> ArrayFunction:
        """The function of the perturbed operands alone, with the other values fixed."""

        def function(*operands: jax.Array) -> Sequence[jax.Array]:
            remaining = iter(operands)
            return self.function(
                *(next(remaining) if m else v for v, m in zip(values, perturbed, strict=True))
            )

        return function


def _select(values: Sequence[T], mask: Sequence[bool]) -> list[T]:
    return [v for v, m in zip(values, mask, strict=True) if m]


def _output_struct(program: Program, output: int) -> jax.ShapeDtypeStruct:
    a = program.operators[output].operands[0]
    return _struct(a.aval if isinstance(a, Literal) else program.tensors[a])


def _struct(t: ArrayType) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=bool(getattr(t, "weak_type", False)))


def _instantiate_zero(x: jax.Array | SymbolicZero) -> jax.Array:
    """A cotangent as an array varying over the axes of its type, where it may be a symbolic zero."""
    if not isinstance(x, SymbolicZero):
        return x
    aval: Any = x.aval
    return compat.cast_vma(jax.numpy.zeros(aval.shape, aval.dtype), compat.vma_of_type(aval))


def _is_inexact(aval: ArrayType) -> bool:
    return jax.numpy.issubdtype(aval.dtype, np.inexact)


def _float0_zeros(aval: ArrayType) -> np.ndarray:
    return np.zeros(aval.shape, jax.dtypes.float0)
