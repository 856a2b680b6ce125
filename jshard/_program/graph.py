"""The traced function as one value: the flat dataflow graph of `operators.py`, its nesting, and the user's pins.

Derived views (use-def chains, scopes) are computed on first access and cached.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from jshard._core.jax_types import ClosedJaxpr, JaxMesh, Jaxpr
from jshard._program.operators import (
    Atom as Atom,
    Block as Block,
    Call as Call,
    Literal as Literal,
    Operator as Operator,
    Tensor as Tensor,
    calls_of as calls_of,
    operator_name as operator_name,
    operators_of as operators_of,
)
from jshard._program.recompute import is_recomputed
from jshard._program.scopes import Scopes, scopes_of
from jshard._program.use_def import UseDef, use_def_of


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The whole traced function.

    Arguments:

    - `inputs`: ids of the input operators: one per flat argument, then one per captured array.
    - `outputs`: ids of the output operators, one per flat result.
    - `constants`: values of the captured arrays.
    - `body`: the outermost block.
    - `pins`: sharding constraints in the user's code: (operator, `"operand"` or `"result"`, index, the constraint).
    - `trace_order`: operator ids in trace order if the operators were reordered, else empty.
    - `explicit_mesh`: the mesh with Explicit axes under which the function was traced, or None.
    - `has_recomputed`: whether some equations were written a second time, to compute values again (`recompute.py`).
    """

    name: str
    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: tuple[jax.Array, ...]
    body: Block
    jaxpr: Jaxpr | ClosedJaxpr | None  # None in plans, which keep neither arrays nor traces
    pins: tuple[tuple[int, str, int, object], ...] = ()
    trace_order: tuple[int, ...] = ()
    explicit_mesh: JaxMesh | None = None
    has_recomputed: bool = False

    def uses(self) -> Sequence[Sequence[tuple[int, int]]]:
        """For each tensor the (operator, operand index) pairs of its uses."""
        return self._uses

    def defs(self) -> Sequence[tuple[int, int]]:
        """For each tensor the (operator, result index) that defines it."""
        return self._defs

    @functools.cached_property
    def use_def(self) -> UseDef:
        """Use-def chains as arrays."""
        return use_def_of(self.operators, self.tensors)

    @functools.cached_property
    def scopes(self) -> Scopes:
        """The body in which each tensor is defined and each operand is used."""
        return scopes_of(self.operators, self.body, self.use_def)

    @functools.cached_property
    def in_unbounded_loops(self) -> frozenset[int]:
        """Operators in loops of unknown trip count, including the boundary operators of those loops."""
        loops = [call for call in calls_of(self.body) if call.trip_count is None]
        return frozenset(
            i for call in loops for ids in (call.inner_operators, *call.boundary.values()) for i in ids
        )

    @functools.cached_property
    def recomputed(self) -> frozenset[int]:
        """Operators that were written a second time."""
        if not self.has_recomputed:
            return frozenset()
        return frozenset(
            op.id for op in self.operators if op.kind == "eqn" and is_recomputed(op.prefix, op.eqn)
        )

    @functools.cached_property
    def memo(self) -> dict[Any, Any]:
        """Cache of analyses of this program, by a key of each analysis' choice."""
        return {}

    @functools.cached_property
    def _uses(self) -> list[list[tuple[int, int]]]:
        out: list[list[tuple[int, int]]] = [[] for _ in self.tensors]
        for op in self.operators:
            for i, a in enumerate(op.operands):
                if not isinstance(a, Literal):
                    out[a].append((op.id, i))
        return out

    @functools.cached_property
    def _defs(self) -> list[tuple[int, int]]:
        out: list[tuple[int, int]] = [(-1, 0)] * len(self.tensors)
        for op in self.operators:
            for i, t in enumerate(op.results):
                out[t] = (op.id, i)
        return out

    def __str__(self) -> str:
        n = sum(op.kind == "eqn" for op in self.operators)
        return f"program {self.name}: {n} operators, {len(self.tensors)} tensors, {len(self.inputs)} inputs"


def rule_boundaries(program: Program) -> list[tuple[int, str, int]]:
    """(operator, side, index) of every operand that must not be a partial sum because of a custom derivative rule.

    A custom rule need not be linear, so it is applied to values, not to their addends: neither the inputs nor the
    results of such a call may be partial sums where they are read.
    """
    out: list[tuple[int, str, int]] = []
    uses = program.uses()

    def walk(block: Block) -> None:
        for step in block.steps:
            if isinstance(step, int):
                continue
            for inner in step.blocks:
                if step.kind in ("custom_jvp", "custom_vjp"):
                    entering = set(inner.inputs)
                    for op in operators_of(inner):
                        reads = program.operators[op].operands
                        out.extend((op, "operand", k) for k, a in enumerate(reads) if a in entering)
                    leaving = [a for a in inner.outputs if not isinstance(a, Literal)]
                    out.extend((op, "operand", k) for a in leaving for op, k in uses[a])
                walk(inner)

    walk(program.body)
    return list(dict.fromkeys(out))
