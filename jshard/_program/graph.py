"""The program: operators and tensors in one flat list, and the blocks that say how to run them.

A jaxpr nests: calls, loops, branches. The search wants it flat: one list of operators joined by tensors.
So calls (`jit`, `remat`, custom rules) are walked into and their variables become the caller's tensors, and
loops and branches get *boundary operators*: a scan's carry, for one, is an operator with two operands
(initial value, value after a turn) and two results (value seen by the body, final value), all of one layout;
a `while` loop's has a result for the test as well.
An operator in a loop body counts `repeat` times.

The blocks keep the nesting for the lowering: a block is a sequence of steps, each one operator or one call
with blocks of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jshard import _jaxcompat
from jshard._program.scopes import Scopes, scopes_of
from jshard._program.use_def import UseDef, use_def_of


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One value of the program: shape, dtype, and the name the reports use."""

    id: int
    shape: tuple[int, ...]
    dtype: Any
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
        return _jaxcompat.itemsize(self.dtype)

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.itemsize


@dataclasses.dataclass(frozen=True, eq=False)
class Literal:
    """A constant scalar written into the program."""

    value: Any
    aval: Any


Atom = int | Literal  # a tensor's id, or a literal


@dataclasses.dataclass(frozen=True, eq=False)
class Operator:
    """One equation of the program, or one boundary (`kind` says which).

    `operands` are tensor ids or literals, `results` tensor ids. `repeat` is how often the operator runs in one
    call of the program; `operand_repeat` the same for moving each operand to it, and `turns` how often each
    result of a loop's boundary comes into being. `prefix` is the name stack of the calls around it.
    """

    id: int
    kind: str
    primitive: str
    operands: tuple[Atom, ...]
    results: tuple[int, ...]
    repeat: float
    operand_repeat: tuple[float, ...]
    eqn: Any = None
    prefix: str = ""
    name: str = ""
    boundary_repeat: tuple[float, ...] = ()

    @property
    def result_repeat(self) -> tuple[float, ...]:
        """How often each result comes into being in one call of the program.

        What a loop hands to its body (constants, carries, slices) is there once a turn, what it hands out once a loop.
        """
        return self.boundary_repeat or (self.repeat,) * len(self.results)

    @property
    def module(self) -> str:
        """Module path or named scope, as traced: `blocks.3/attn`; empty when there is none."""
        return _jaxcompat.module_path(self.prefix, self.eqn)

    @property
    def source(self) -> str:
        """`file.py:line` of the user's code, or an empty string."""
        return _jaxcompat.source_line(self.eqn)


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """Run blocks: `kind` is "remat", "custom_jvp", "custom_vjp", "scan", "while" or "cond".

    `boundary` holds the ids of the boundary operators by role ("test", "const", "carry", "xs", "ys", "pred", "join");
    calls that only alias have none. `turns` is how often a loop's body runs; None when nobody knows: it counts once.
    """

    kind: str
    eqn: Any
    operands: tuple[Atom, ...]
    results: tuple[int, ...]
    blocks: tuple[Block, ...]
    boundary: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    prefix: str = ""
    trip_count: int | None = 1

    @property
    def inner_operators(self) -> list[int]:
        """The operators of all its bodies, in the program's order."""
        return [i for block in self.blocks for i in operators_of(block)]

    @property
    def has_scope(self) -> bool:
        """Whether what is moved inside stays inside: in loops and branches, and in a `remat` that computes again.

        Compilers see no other calls, and would merge what is moved in two of them.
        """
        p = self.eqn.params
        again = bool(p.get("differentiated")) and bool(p.get("prevent_cse", True))
        given = any(not isinstance(a, Literal) for a in self.operands)
        return bool(self.boundary) or self.kind == "remat" and again and given


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """Steps in program order (an operator's number or a call), the tensors they start from and the atoms they end in."""

    inputs: tuple[int, ...]
    outputs: tuple[Atom, ...]
    steps: tuple[int | Call, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The whole traced function.

    `inputs` are the ids of the input operators, one for each flat argument, then one for each captured array
    (`constants` holds those values); `outputs` the ids of the output operators, one for each flat result.
    `pins` holds what `jshard.op` and constraints in the user's code fixed: (operator, "operand" or "result",
    index, what was written). `traced` are the operators in the order of the trace, where that is another. `context`
    is the mesh with Explicit axes in which it was traced, None for any other.
    """

    name: str
    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: tuple[Any, ...]
    body: Block
    jaxpr: Any
    pins: tuple[tuple[int, str, int, Any], ...] = ()
    trace_order: tuple[int, ...] = ()
    explicit_mesh: Any = None

    def uses(self) -> Sequence[Sequence[tuple[int, int]]]:
        """For each tensor the (operator, operand index) pairs that read it."""
        return self._uses

    def defs(self) -> Sequence[tuple[int, int]]:
        """For each tensor the (operator, result index) that makes it."""
        return self._defs

    @functools.cached_property
    def use_def(self) -> UseDef:
        """Reads, makers and kinds of tensors as arrays."""
        return use_def_of(self)

    @functools.cached_property
    def scopes(self) -> Scopes:
        """In which body each tensor is made and each operand is read."""
        return scopes_of(self)

    @functools.cached_property
    def in_unbounded_loops(self) -> frozenset[int]:
        """Operators in loops whose turns nobody knows, the boundaries of those loops included."""
        open_ = [call for call in calls_of(self.body) if call.trip_count is None]
        return frozenset(
            i for call in open_ for ids in (call.inner_operators, *call.boundary.values()) for i in ids
        )

    @functools.cached_property
    def memo(self) -> dict[Any, Any]:
        """What was worked out about this program, for whoever asks again."""
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


def operator_name(op: Operator) -> str:
    """Short unique name: primitive and number."""
    return op.name or f"{op.primitive}.{op.id}"


def rule_boundaries(program: Program) -> list[tuple[int, str, int]]:
    """(operator, side, index) of every value that enters or leaves a call with a derivative rule of its own.

    A rule is written for values, not for addends of them, so who reads a tensor there never takes a partial sum;
    a sum that is made inside is finished before it leaves.
    """
    out: list[tuple[int, str, int]] = []

    def walk(block: Block) -> None:
        for step in block.steps:
            if isinstance(step, int):
                continue
            for inner in step.blocks:
                consumers = program.uses()
                if step.kind in ("custom_jvp", "custom_vjp"):
                    entering = set(inner.inputs)
                    for op in operators_of(inner):
                        reads = program.operators[op].operands
                        out.extend((op, "operand", k) for k, a in enumerate(reads) if a in entering)
                    leaving = [a for a in inner.outputs if not isinstance(a, Literal)]
                    out.extend((op, "operand", k) for a in leaving for op, k in consumers[a])
                walk(inner)

    walk(program.body)
    return list(dict.fromkeys(out))


def calls_of(block: Block) -> Iterator[Call]:
    """The calls of a block, each before those inside it."""
    for step in block.steps:
        if not isinstance(step, int):
            yield step
            for inner in step.blocks:
                yield from calls_of(inner)


def operators_of(block: Block) -> list[int]:
    """The operators of a block, those of inner blocks and boundaries included, in program order."""
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
