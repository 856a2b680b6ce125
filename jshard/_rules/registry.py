"""The table from primitive names to rules, and to the way an operator runs on local blocks.

A rule function sees one operator (`Op`: name, parameters, shapes, literal operands) and returns its `Rule`.
A local function runs the operator on one device's blocks; most need none, since the same primitive with the
same parameters is right on blocks. Those with shapes or positions in their parameters (broadcast, reshape,
iota, gather, random bits) have one, and ask the `LocalContext` for local shapes and offsets.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from jshard import _jaxcompat as compat
from jshard._core.errors import RuleError
from jshard._core.layout import Layout, MeshAxes
from jshard._rules.rule import Candidate, Rule, operand_layouts, reduced_axes, result_layouts


@dataclasses.dataclass(frozen=True, eq=False)
class OpView:
    """One operator as a rule sees it.

    `ins` and `outs` are abstract values with global `shape` and `dtype`; `literals` holds the value of a
    literal operand (a scalar) and `None` for the others.
    """

    primitive: str
    params: Mapping[str, Any]
    ins: tuple[Any, ...]
    outs: tuple[Any, ...]
    literals: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class LocalContext:
    """What a local function may ask: shapes and positions of this device's blocks, the plain primitive."""

    op: OpView
    rule: Rule
    candidate: Candidate
    mesh: MeshAxes
    bind_plain: Callable[..., Any]  # (*operands, **params) -> list of results
    differentiable_loop: bool = (
        False  # in the body of a loop of a program that is differentiated from outside
    )
    collective_ids: tuple[int, ...] = ()  # of the rule's own collectives, among those of the plan
    row_major: bool = False  # the first operand is updated in place, and stays row-major

    def axes(self, factor: int) -> tuple[str, ...]:
        """Mesh axes that cut a factor, major first; empty when it is whole."""
        return self.candidate.cut(factor, self.mesh)

    def size(self, factor: int) -> int:
        """Local length of a factor."""
        return self.rule.sizes[factor] // self.mesh.size(*self.axes(factor))

    def offset(self, factor: int) -> Any:
        """Where this device's part of a factor starts: an int32 scalar (traced), or 0 when it is whole."""
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

    def result_offset(self, i: int, dim: int) -> Any:
        """Global index of the first element of this device's block of result `i` along `dim`."""
        layout = self.result_layout(i)
        return block_index(layout.dims[dim], self.mesh) * self.result_shape(i)[dim] if layout.dims[dim] else 0

    def operand_offset(self, i: int, dim: int) -> Any:
        """Global index of the first element of this device's block of operand `i` along `dim`."""
        layout = self.operand_layout(i)
        if not layout.dims[dim]:
            return 0
        return block_index(layout.dims[dim], self.mesh) * self.operand_shape(i)[dim]

    def reduced_axes(self) -> tuple[str, ...]:
        """Mesh axes over which the operator itself must finish its (non-sum) reduction."""
        return reduced_axes(self.rule, self.candidate, self.mesh)

    def keep_row_major(self, x: Any) -> Any:
        """An array that is updated where it lies, kept in memory row by row.

        Left to themselves, compilers transpose it for the update and back again: a copy of it each time.
        """
        return compat.row_major(x) if self.row_major else x

    def collective_scope(self, k: int) -> Any:
        """The scope in which a local function writes its own collective `k`: verification finds it by that name."""
        return plan_scope(self.collective_ids[k] if k < len(self.collective_ids) else -1)

    def bind(self, *operands: Any, **changed: Any) -> Sequence[Any]:
        """Run the plain primitive on local operands with some parameters changed."""
        return self.bind_plain(*operands, **{**self.op.params, **changed})


RuleFunction = Callable[[OpView], Rule]
LocalFunction = Callable[..., Sequence[Any]]  # (ctx, *operands) -> local results


@dataclasses.dataclass(frozen=True)
class RuleEntry:
    """A registered primitive: its family (a file of rules), rule and, where needed, local function."""

    family: str
    rule: RuleFunction
    local_impl: LocalFunction | None = None
    user: bool = False


class Registry:
    """Primitive name -> `Entry`. One lives in this module; users extend it through `register_rule`."""

    def __init__(self) -> None:
        self._entries: dict[str, RuleEntry] = {}

    def add(self, names: str | Sequence[str], entry: RuleEntry) -> None:
        """Add an entry under one or several primitive names; a name already taken is an error."""
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
    """A decorator factory for one file of rules: `rule = family("reduce"); @rule("reduce_sum", ...)`."""

    def register(
        *primitives: str, local: LocalFunction | None = None
    ) -> Callable[[RuleFunction], RuleFunction]:
        def decorate(f: RuleFunction) -> RuleFunction:
            REGISTRY.add(primitives, RuleEntry(name, f, local))
            return f

        return decorate

    return register


def plan_scope(number: int) -> Any:
    """The name by which verification finds collective `number` of a plan in the compiled program; -1 for none."""
    return jax.named_scope(f"jshard.{number}") if number >= 0 else contextlib.nullcontext()


def block_index(axes: Sequence[str], mesh: MeshAxes) -> Any:
    """Index of this device's block along a dimension cut by `axes` (major first), inside `shard_map`."""
    index: Any = 0
    for a in axes:
        index = index * mesh.size(a) + lax.axis_index(a)
    return index


def opaque_rule(op: OpView, note: str) -> Rule:
    """The rule that cuts nothing: operands and results replicated, marked for the report."""
    return Rule(
        operands=tuple(((),) * len(a.shape) for a in op.ins),
        results=tuple(((),) * len(a.shape) for a in op.outs),
        sizes=(),
        note=note,
        opaque=True,
    )


def is_prng_key(aval: Any) -> bool:
    """Whether an abstract value is a typed PRNG key array."""
    return jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key)
