"""Operators and tensors of the flat dataflow graph, and the blocks that keep the jaxpr's nesting.

A jaxpr nests calls, loops and branches; the search needs one flat list of operators joined by tensors. Calls (`jit`,
`remat`, custom derivative rules) are entered, and their variables become the caller's tensors. Loops and branches get
*boundary operators*. A scan's carry, for example, is an operator with two operands (initial value, value after an
iteration) and two results (value inside the body, final value), all of one layout; the carry of a `while` loop has one
more result, for the condition. An operator in a loop body counts `repeat` times.

Blocks keep the nesting for lowering: a block is a sequence of steps, each one operator or one call with inner blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Iterator, Mapping

import numpy as np
from jax.typing import ArrayLike

from jshard._core import jaxcompat
from jshard._core.jax_types import JaxprEqn
from jshard._core.layout import ArrayType


OperatorKind = typing.Literal[
    "input", "const", "output", "eqn", "predicate", "cond_join",
    "scan_const", "scan_carry", "scan_sum", "scan_xs", "scan_ys", "while_const", "while_carry",
]  # fmt: skip
"""An argument, a captured array, a result, an equation; the others are boundary operators of loops and branches."""

PRODUCTS = frozenset("dot_general ragged_dot ragged_dot_general conv_general_dilated".split())
"""Primitives of matrix products and convolutions."""

CallKind = typing.Literal["remat", "custom_jvp", "custom_vjp", "scan", "while", "cond"]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One value of the program: its global shape, its dtype, and its name in reports."""

    id: int
    shape: tuple[int, ...]
    dtype: np.dtype
    name: str
    weak_type: bool = False

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return jaxcompat.itemsize(self.dtype)

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.itemsize


@dataclasses.dataclass(frozen=True, eq=False)
class Literal:
    """A constant scalar of the jaxpr."""

    value: ArrayLike
    aval: ArrayType


Atom = int | Literal  # a tensor's id, or a literal


@dataclasses.dataclass(frozen=True, eq=False)
class Operator:
    """One equation of the program, or one boundary operator.

    Arguments:

    - `id`: index into `Program.operators`.
    - `kind`, `primitive`: both are the kind, except that the primitive of an `"eqn"` is JAX's name of it.
    - `operands`, `results`: tensor ids or literals; tensor ids.
    - `repeat`: executions per call of the program; a loop of unknown trip count counts once.
    - `operand_repeat`: the same for resharding each operand.
    - `boundary_repeat`: for boundary operators of loops, how often each result is defined per call of the program;
        empty for all others, whose results are defined `repeat` times.
    - `prefix`: name stack of the enclosing calls.
    - `name`: path of an argument or result; empty for equations.
    """

    id: int
    kind: OperatorKind
    primitive: str
    operands: tuple[Atom, ...]
    results: tuple[int, ...]
    repeat: float
    operand_repeat: tuple[float, ...]
    eqn: JaxprEqn | None = None
    prefix: str = ""
    name: str = ""
    boundary_repeat: tuple[float, ...] = ()

    @property
    def equation(self) -> JaxprEqn:
        """The equation of an operator of kind `"eqn"`."""
        assert self.eqn is not None, f"{self.kind} {self.name} has no equation"
        return self.eqn

    @property
    def result_repeat(self) -> tuple[float, ...]:
        """How often each result is defined per call of the program.

        Values inside a loop's body (constants, carries, slices) are defined once per iteration, its results once.
        """
        return self.boundary_repeat or (self.repeat,) * len(self.results)

    @property
    def module(self) -> str:
        """Module path or named scope at tracing time, such as `blocks.3/attn`; empty without one."""
        return jaxcompat.module_path(self.prefix, self.eqn)

    @property
    def source(self) -> str:
        """`file.py:line` of the user's code, or an empty string."""
        return jaxcompat.source_line(self.eqn)


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A step that runs inner blocks: a loop, a branch, a `remat` or a function with custom derivative rules.

    Arguments:

    - `blocks`: the bodies; condition and body of a `while`, all branches of a `cond`.
    - `boundary`: ids of the boundary operators by role (`"test"`, `"const"`, `"carry"`, `"xs"`, `"ys"`, `"pred"`,
        `"join"`); empty for `remat` and custom derivatives, whose variables are those of the caller.
    - `trip_count`: iterations of a loop; None when unknown: costs then count one iteration.
    """

    kind: CallKind
    eqn: JaxprEqn
    operands: tuple[Atom, ...]
    results: tuple[int, ...]
    blocks: tuple[Block, ...]
    boundary: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    prefix: str = ""
    trip_count: int | None = 1

    @property
    def inner_operators(self) -> list[int]:
        """Ids of the operators of all bodies, in program order."""
        return [i for block in self.blocks for i in operators_of(block)]

    @property
    def has_scope(self) -> bool:
        """Whether resharded copies made inside are not visible outside.

        True for loops and branches, and for a `remat` that is recomputed. All other calls are inlined before XLA's
        common-subexpression elimination, which merges equal collectives of two of them.
        """
        p = self.eqn.params
        recomputes = bool(p.get("differentiated")) and bool(p.get("prevent_cse", True))
        has_inputs = any(not isinstance(a, Literal) for a in self.operands)
        return bool(self.boundary) or self.kind == "remat" and recomputes and has_inputs


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """A body: input tensors, output atoms, and steps in program order (an operator's id, or a call)."""

    inputs: tuple[int | None, ...]  # None for a constant of a loop that its body does not read
    outputs: tuple[Atom, ...]
    steps: tuple[int | Call, ...]


def operator_name(op: Operator) -> str:
    """Short unique name: that of an argument or result, else primitive and id."""
    return op.name or f"{op.primitive}.{op.id}"


def calls_of(block: Block) -> Iterator[Call]:
    """The calls of a block in pre-order: each before those inside it."""
    for step in block.steps:
        if not isinstance(step, int):
            yield step
            for inner in step.blocks:
                yield from calls_of(inner)


def operators_of(block: Block) -> list[int]:
    """Ids of the operators of a block in program order, including inner blocks and their boundary operators."""
    out: list[int] = []
    for step in block.steps:
        if isinstance(step, int):
            out.append(step)
            continue
        for inner in step.blocks:
            out += operators_of(inner)
        for ids in step.boundary.values():
            out += ids
    return out
