"""The registry: primitive name -> op sharding rule, and local implementation on one device's shards.

A rule function maps an operator (`OpView`: name, parameters, shapes, literal operands) to its `Rule`. A local
implementation runs the operator on one device's shards. Most operators need none: the same primitive with the same
parameters is correct on shards. Operators with shapes or positions in their parameters (broadcast, reshape, iota,
gather, random bits) have one, which gets local shapes and offsets from the `LocalContext`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jshard._core.errors import RuleError
from jshard._core.jax_types import Index, JaxprEqn, Params
from jshard._core.jaxcompat import is_literal
from jshard._core.layout import ArrayType, Layout, MeshAxes
from jshard._rules.rule import Candidate, Rule, operand_layouts, reduced_axes, result_layouts


T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class OpView:
    """An operator without its place in the program, as the argument of rule functions.

    `ins` and `outs` are abstract values with global `shape` and `dtype`; `literals` has the value of each literal
    operand (a scalar) and `None` for the others.
    """

    primitive: str
    params: Params
    ins: tuple[ArrayType, ...]
    outs: tuple[ArrayType, ...]
    literals: tuple[ArrayLike | None, ...] = ()


def op_view(eqn: JaxprEqn) -> OpView:
    """An equation as its rule function sees it."""
    literals = tuple(v.val if is_literal(v) else None for v in eqn.invars)
    ins, outs = tuple(v.aval for v in eqn.invars), tuple(v.aval for v in eqn.outvars)
    return OpView(eqn.primitive.name, eqn.params, ins, outs, literals)


@dataclasses.dataclass(frozen=True, eq=False)
class StackSlice:
    """One slice of a stacked array along its first dimension, read and updated in place."""

    stack: jax.Array
    index: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        return tuple(self.stack.shape[1:])

    def array(self) -> jax.Array:
        """The slice as an array."""
        return lax.dynamic_index_in_dim(self.stack, self.index, 0, keepdims=False)

    def part(self, starts: Sequence[ArrayLike], sizes: Sequence[int]) -> jax.Array:
        """A part of the slice, read from the stack; `starts` are in range.

        A part of the slice as an array would be read from a copy of the whole slice where several parts are read.
        """
        at = (self.index, *(jnp.asarray(i, self.index.dtype) for i in starts))
        return lax.dynamic_slice(self.stack, at, (1, *sizes)).reshape(tuple(sizes))

    def updated(
        self, update: jax.Array, starts: Sequence[ArrayLike], row_major: Callable[[jax.Array], jax.Array]
    ) -> StackSlice:
        """The slice after an update at `starts`, which are in range; `row_major` constrains the stack's layout."""
        at = (self.index, *(jnp.asarray(i, self.index.dtype) for i in starts))
        return StackSlice(
            row_major(lax.dynamic_update_slice(row_major(self.stack), update[None], at)), self.index
        )


def write_back(ctx: LocalContext, x: StackSlice, y: jax.Array | StackSlice) -> StackSlice:
    """The slice of a stack with all of it replaced."""
    return x.updated(materialized(y), (0,) * len(x.shape), ctx.keep_row_major)


def materialized(x: T | StackSlice) -> T | jax.Array:
    """A value as an array, also if it is a slice of a stack."""
    return x.array() if isinstance(x, StackSlice) else x


Edges = dict[tuple[int, int], jax.Array]
"""What arrived of an operand's edges: (dimension, number of the piece of the exchange) -> the rows."""


@dataclasses.dataclass(frozen=True, eq=False)
class LocalContext:
    """Shapes and offsets of this device's shards, and the primitive itself, for a local implementation."""

    op: OpView
    rule: Rule
    candidate: Candidate
    mesh: MeshAxes
    bind_plain: Callable[..., list[jax.Array]]  # (*operands, **params) -> list of results
    differentiable_loop: bool = False  # inside a loop of a program that is differentiated from outside
    collective_ids: tuple[int, ...] = ()  # of the rule's internal collectives, in the plan
    row_major: bool = False  # whether the first operand is updated in place in row-major order
    chip: str = ""  # the name of the chip that the program is for
    for_products: bool = False  # whether matrix products alone read the first result
    # By operand the edges that arrived, or where to put them, if another operator uses them too.
    edges: Mapping[int, Edges] = dataclasses.field(default_factory=dict)
    # By operand how many operators before have exchanged edges of the same value.
    exchanged_before: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def axes(self, factor: int) -> tuple[str, ...]:
        """Mesh axes that shard a factor, major first."""
        return self.candidate.cut(factor, self.mesh)

    def size(self, factor: int) -> int:
        """Local length of a factor."""
        return self.rule.sizes[factor] // self.mesh.size(*self.axes(factor))

    def offset(self, factor: int) -> Index:
        """Index of the first point of a factor on this device: a traced int32 scalar, or 0 if it is not sharded."""
        return block_index(self.axes(factor), self.mesh) * self.size(factor) if self.axes(factor) else 0

    def operand_layout(self, i: int) -> Layout:
        """Layout of operand `i`."""
        return operand_layouts(self.rule, self.candidate, self.mesh)[i]

    def result_layout(self, i: int) -> Layout:
        """Layout of result `i`."""
        return result_layouts(self.rule, self.candidate, self.mesh)[i]

    def operand_shape(self, i: int) -> tuple[int, ...]:
        """Local shape of operand `i`."""
        return self.operand_layout(i).local_shape(self.op.ins[i].shape, self.mesh)

    def result_shape(self, i: int = 0) -> tuple[int, ...]:
        """Local shape of result `i`."""
        return self.result_layout(i).local_shape(self.op.outs[i].shape, self.mesh)

    def result_offset(self, i: int, dim: int) -> Index:
        """Global index of the first element of this device's shard of result `i` along `dim`."""
        layout = self.result_layout(i)
        return block_index(layout.dims[dim], self.mesh) * self.result_shape(i)[dim] if layout.dims[dim] else 0

    def operand_offset(self, i: int, dim: int) -> Index:
        """Global index of the first element of this device's shard of operand `i` along `dim`."""
        layout = self.operand_layout(i)
        if not layout.dims[dim]:
            return 0
        return block_index(layout.dims[dim], self.mesh) * self.operand_shape(i)[dim]

    def reduced_axes(self) -> tuple[str, ...]:
        """Mesh axes over which the local implementation must finish a reduction that is not a sum."""
        return reduced_axes(self.rule, self.candidate, self.mesh)

    def keep_row_major(self, x: jax.Array) -> jax.Array:
        """An array that is updated in place, constrained to the row-major memory layout.

        Without the constraint XLA may transpose it for the update and back: a copy each time.
        """
        return in_row_major(x, self.chip) if self.row_major else x

    def collective_scope(self, k: int) -> contextlib.AbstractContextManager[object]:
        """The name scope for internal collective `k`, by which verification finds it."""
        return plan_scope(self.collective_ids[k] if k < len(self.collective_ids) else -1)

    def bind(self, *operands: ArrayLike, **changed: Any) -> list[jax.Array]:
        """The results of the primitive on local operands, with some parameters `changed`."""
        return self.bind_plain(*operands, **{**self.op.params, **changed})


def in_row_major(x: jax.Array, chip: str = "") -> jax.Array:
    """An array constrained to the row-major memory layout, XLA's default; complex ones on TPUs, which refuse it, as is."""
    from jax.experimental.layout import Layout, with_layout_constraint

    if x.ndim < 2 or (chip.startswith("tpu") and jnp.issubdtype(x.dtype, jnp.complexfloating)):
        return x
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


RuleFunction = Callable[[OpView], Rule]
LocalFunction = Callable[..., Sequence[jax.Array | StackSlice]]  # (ctx, *operands) -> local results
KernelFunction = Callable[
    [OpView, Rule, Candidate, MeshAxes, str], str
]  # (..., "tpu" or "gpu") -> what computes it


@dataclasses.dataclass(frozen=True)
class RuleEntry:
    """A registered primitive: its family (a file of `primitives/`, or "user"), rule, and local implementation if any.

    `kernel` says which kernel of an accelerator the local implementation uses for a candidate.
    """

    family: str
    rule: RuleFunction
    local_impl: LocalFunction | None = None
    kernel: KernelFunction | None = None


class Registry:
    """Primitive name -> `RuleEntry`; users add to `REGISTRY` by `register_rule`."""

    def __init__(self) -> None:
        self._entries: dict[str, RuleEntry] = {}

    def add(self, names: str | Sequence[str], entry: RuleEntry) -> None:
        """Add an entry under one or several primitive names; raises `RuleError` for a name that has one."""
        names = [names] if isinstance(names, str) else list(names)
        for name in names:
            if name in self._entries:
                raise RuleError(
                    f"primitive {name!r} already has a rule (family {self._entries[name].family!r})",
                    where="register_rule",
                    fix="register a rule once for each primitive",
                )
        for name in names:
            self._entries[name] = entry

    def get(self, name: str) -> RuleEntry | None:
        """The entry of a primitive, or None."""
        return self._entries.get(name)

    def names(self) -> tuple[str, ...]:
        """All registered primitive names, sorted."""
        return tuple(sorted(self._entries))


REGISTRY = Registry()


def family(name: str) -> Callable[..., Callable[[RuleFunction], RuleFunction]]:
    """A decorator factory for one family of rules: `rule = family("reduce"); @rule("reduce_sum", ...)`."""

    def register(
        *primitives: str, local: LocalFunction | None = None, kernel: KernelFunction | None = None
    ) -> Callable[[RuleFunction], RuleFunction]:
        def decorate(f: RuleFunction) -> RuleFunction:
            REGISTRY.add(primitives, RuleEntry(name, f, local, kernel))
            return f

        return decorate

    return register


def plan_scope(number: int) -> contextlib.AbstractContextManager[object]:
    """The name scope by which verification finds collective `number` of a plan in the HLO; none for -1."""
    return jax.named_scope(f"jshard.{number}") if number >= 0 else contextlib.nullcontext()


def block_index(axes: Sequence[str], mesh: MeshAxes) -> Index:
    """Index of this device's shard along a dimension sharded over `axes` (major first), inside `shard_map`."""
    index: Index = 0
    for a in axes:
        index = index * mesh.size(a) + lax.axis_index(a)
    return index


def opaque_rule(op: OpView, note: str) -> Rule:
    """The rule of an unknown operator: operands and results replicated, marked for reports."""
    return Rule(
        operands=tuple(((),) * len(a.shape) for a in op.ins),
        results=tuple(((),) * len(a.shape) for a in op.outs),
        sizes=(),
        note=note,
        opaque=True,
    )
