"""The products of the forward pass, each named by the weights that it reads, and where its output is complete.

A value inside a function has no name in general, but the product that makes it has: `params.up` is the product with that
weight, `params.wq @ params.wk` the one of the outputs of two others (attention scores). The output of a product is
complete after the casts and additions that follow it (bias, residual), where nothing else reads the addends: a cut
there leaves the additions their partial sums. Attention as one operator (`jshard.ops.attention`) is a product of three
activations, `wq @ wk @ wv`, as its second product is where it is written as two.

>>> import jax, jax.numpy as jnp
>>> from jshard._program.trace import build
>>> f = lambda x, w: jax.nn.relu(x @ w["up"] + w["bias"]) @ w["down"]
>>> w = {"bias": jnp.ones(6), "down": jnp.ones((6, 4)), "up": jnp.ones((4, 6))}
>>> program = build(jax.jit(f).trace(jnp.ones((8, 4)), w).jaxpr, name="f", input_names=["x", "bias", "down", "up"])
>>> found = products_of(program, origins(program, data=frozenset({0})))
>>> [(p.name, program.operators[p.op].primitive, program.operators[p.place[0]].primitive) for p in found]
[('up', 'dot_general', 'add'), ('down', 'dot_general', 'dot_general')]
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from jshard._core import jaxcompat as compat
from jshard._program.graph import Literal, Operator, Program
from jshard._program.operators import PRODUCTS


LOOKUP = "gather"
ATTENTION = "jshard_attention"
CONTRACTIONS = PRODUCTS | {ATTENTION}
"""Primitives that sum products of their operands."""
_COMPLETED_BY = frozenset(
    ("add", "add_any", "sub", "neg", "convert_element_type", "rounded_sum", "copy", "name", "jshard_module_output",
     "jshard_pin_result", "sharding_constraint")
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Product:
    """A product or table look-up of the forward pass.

    - `op`: its operator. `name`: by the weights it reads. `weights`: numbers of the arguments behind the operand `side`;
        empty, and None, for a product of activations.
    - `place`: (operator, result) where the output is complete; `result`: that tensor.
    """

    op: int
    name: str
    weights: tuple[int, ...]
    side: int | None
    place: tuple[int, int]
    result: int


@dataclasses.dataclass(frozen=True, eq=False)
class Origins:
    """For each tensor the arguments that it is computed from, as far as no data argument is among them; else None."""

    of: tuple[frozenset[int] | None, ...]


def is_forward(op: Operator) -> bool:
    """Whether an operator belongs to no transposed (backward) computation."""
    return not compat.is_backward(op.prefix, op.eqn)


def is_differentiated(op: Operator) -> bool:
    """Whether an operator is traced under a derivative, as a model in a training step is and its optimizer is not."""
    return "jvp(" in compat.name_stack(op.prefix, op.eqn)


def origins(program: Program, data: frozenset[int]) -> Origins:
    """The origins of all tensors; `data`: numbers of the arguments that hold the batch."""
    of: list[frozenset[int] | None] = [frozenset()] * len(program.tensors)
    for number, i in enumerate(program.inputs):
        for t in program.operators[i].results:
            of[t] = None if number in data else frozenset((number,))
    for _ in range(2):  # the second time with what loops carry round
        for op in program.operators:
            if op.kind == "input":
                continue
            behind: frozenset[int] | None = frozenset()
            for a in op.operands:
                if not isinstance(a, Literal):
                    more = of[a]
                    behind = None if behind is None or more is None else behind | more
            for t in op.results:
                of[t] = behind
    return Origins(tuple(of))


def products_of(program: Program, behind: Origins) -> list[Product]:
    """The products and look-ups of the forward pass, in program order."""
    name_of_op: dict[int, str] = {}
    out = []
    for op in program.operators:
        if op.primitive not in CONTRACTIONS and op.primitive != LOOKUP or not is_forward(op):
            continue
        multiplied = op.operands[: 3 if op.primitive == ATTENTION else 2]
        sides = [None if isinstance(a, Literal) else behind.of[a] for a in multiplied]
        if op.primitive == LOOKUP:
            if not sides[0] or sides[1] is not None:
                continue
            sides = [sides[0], None]
        if all(s is not None for s in sides):
            continue  # of weights alone, such as merged adapters
        # Attention has no dimension of a weight in its result, also where its keys or queries are learned.
        side = next((k for k, s in enumerate(sides) if s), None) if op.primitive != ATTENTION else None
        behind_side = None if side is None else sides[side]
        weights = largest_first(program, behind_side or frozenset())
        if weights:
            name = program.operators[program.inputs[weights[0]]].name
            name = f"{name}:lookup" if op.primitive == LOOKUP else name
        else:
            name = product_name(program, multiplied, name_of_op)
        name_of_op[op.id] = name
        place = _completed(program, op)
        result = program.operators[place[0]].results[place[1]]
        out.append(Product(op.id, name, weights, side, place, result))
    return out


def product_name(program: Program, atoms: Sequence[int | Literal], name_of_op: Mapping[int, str]) -> str:
    """The name of a product of activations: of the products that they come from."""
    return " @ ".join(filter(None, (_nearest(program, a, name_of_op) for a in atoms)))


def largest_first(program: Program, weights: frozenset[int]) -> tuple[int, ...]:
    """Numbers of arguments by their size."""

    def size(number: int) -> int:
        return program.tensors[program.operators[program.inputs[number]].results[0]].size

    return tuple(sorted(weights, key=lambda n: (-size(n), n)))


def _nearest(program: Program, atom: int | Literal, name_of_op: Mapping[int, str]) -> str:
    """The name of the product from which a value is computed by the fewest other operators; the argument's without one."""
    if isinstance(atom, Literal):
        return ""
    queue, seen, first = collections.deque([atom]), {atom}, ""
    while queue:
        t = queue.popleft()
        op = program.operators[program.defs()[t][0]]
        if op.id in name_of_op:
            return name_of_op[op.id]
        if op.kind == "input":
            first = first or op.name
        for a in op.operands:
            if not isinstance(a, Literal) and a not in seen:
                seen.add(a)
                queue.append(a)
    return first


def _completed(program: Program, op: Operator) -> tuple[int, int]:
    """(operator, result) at the end of the casts and additions that alone read the output in the forward pass."""
    at, tensor = (op.id, 0), op.results[0]
    shape = program.tensors[tensor].shape
    while True:
        readers = [u for u, _ in program.uses()[tensor] if is_forward(program.operators[u])]
        if len(readers) != 1:
            return at
        reader = program.operators[readers[0]]
        if reader.primitive not in _COMPLETED_BY or len(reader.results) != 1:
            return at
        # A reshape ends the walk: a cut of its result is of other dimensions than those of the product.
        if program.tensors[reader.results[0]].shape != shape:
            return at
        at, tensor = (reader.id, 0), reader.results[0]
