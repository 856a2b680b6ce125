"""The repeated module of a differentiated program: the layers that one would wrap in `jax.checkpoint`.

Problem.  Advice such as "checkpoint the layers" needs to know what a layer is. A traced training step has no modules,
only equations with name stacks and source lines, and its backward pass is there already.

Idea.  The layers are what the forward pass repeats.

- Named modules: the scopes of the forward pass that differ in one number, such as `layer0/...` to `layer31/...`.
- No names: the same source lines are traced once for every layer. If most lines occur n times, the k-th n-th part
  of the occurrences of each line is layer k.
- Loops: the body of a `scan` whose stacked results are sliced again by a loop of the backward pass, and by nothing else.

The forward pass are the equations of a `jvp` that are not transposed.

>>> import jax, jax.numpy as jnp
>>> from jshard._program.trace import build
>>> def loss(ws, x):
...     for w in ws:
...         x = jnp.sin(x @ w)
...     return x.sum()
>>> shapes = [jax.ShapeDtypeStruct((4, 4), "float32")] * 3, jax.ShapeDtypeStruct((8, 4), "float32")
>>> traced = jax.jit(jax.grad(loss)).trace(*shapes)
>>> found = repeated_modules(build(traced.jaxpr, name="f", input_names=list("abcx")))
>>> found.count, found.name, sorted(set(found.instance))
(3, 'loss', [-1, 0, 1, 2])
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Hashable, Mapping, Sequence

from jshard._core import jaxcompat as compat
from jshard._program.graph import Call, Literal, Operator, Program, calls_of


_FRAMES = 40  # of the stack in which common functions are looked for
_NEARLY_MOST = 0.9  # of the repeated equations: so many that are repeated more often are the layers
_MIN_SHARE = 0.4  # of the forward equations that must be repeated for the repetition to count as layers


@dataclasses.dataclass(frozen=True, eq=False)
class RepeatedModules:
    """The layers of a straight-line forward pass: `instance` has the layer of every operator, -1 for none."""

    name: str
    count: int
    instance: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class ResidualStacks:
    """What the forward loop of a differentiated `scan` stacks for the backward loop.

    - `name`: the function that is the body. `iterations`: of the loop. `forward`: the operators of its body,
        `backward`: those of the loops that slice the stacks.
    - `dropped`: tensors of stacks that a checkpointed body would not save, as its backward pass computes them again.
    - `unsaved_carries`: results of carries in the body of which there is no stack yet, though a checkpoint would save them.
    """

    name: str
    iterations: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    dropped: tuple[int, ...]
    unsaved_carries: tuple[int, ...]


def repeated_modules(program: Program) -> RepeatedModules | None:
    """The layers of an unrolled forward pass; None where nothing is repeated, or no derivative is taken."""
    forward = [op for op in program.operators if is_forward(op)]
    if not forward:
        return None
    modules = [op.module for op in forward]
    found = _by_number(forward, modules) or _by_source(forward)
    if not found or len(found) < _MIN_SHARE * len(forward):
        return None
    instance = [-1] * len(program.operators)
    for k, ops in enumerate(_by_layer(found)):
        first, last = min(ops), max(ops)
        for op in forward:
            if first <= op.id <= last and found.get(op.id, k) == k:
                instance[op.id] = k
    inside = [op for op in forward if instance[op.id] >= 0]
    count = 1 + max(found.values())
    numbered = [m for op, m in zip(forward, modules, strict=True) if instance[op.id] == 0 and m]
    names = {_numbered_scope(m) for m in numbered} - {""}
    scope = next(iter(names)) if len(names) == 1 else ""
    return RepeatedModules(scope or common_function(inside), count, tuple(instance))


def is_forward(op: Operator) -> bool:
    """Whether an operator is an equation of the forward pass of a derivative."""
    if op.kind != "eqn":
        return False
    stack = compat.name_stack(op.prefix, op.eqn)
    return "jvp(" in stack and "transpose(" not in stack


def common_function(operators: Sequence[Operator]) -> str:
    """The innermost function of the user's in which all of some equations were traced, by name; "" for none.

    Where they have none in common (frames of a transformation may hide those around them), that of most equations.
    """
    stacks = [_functions(op) for op in operators]
    counts = collections.Counter(f for stack in stacks for f in dict.fromkeys(stack))
    if not counts:
        return ""
    most = max(counts.values())
    name = next(f for stack in stacks for f in stack if counts[f] == most)
    return name.rsplit(".", 1)[-1]


def _functions(op: Operator) -> list[str]:
    """The user's functions on the stack when an equation was traced, innermost first."""
    frames = compat.source_line(op.eqn, _FRAMES).splitlines()
    return [frame.partition(" (")[2].removesuffix(")") for frame in reversed(frames) if " (" in frame]


def _numbered_scope(module: str) -> str:
    """The first scope of a module path with a number in it, that number replaced.

    >>> _numbered_scope("Net/blocks_12/attn"), _numbered_scope("Net/head")
    ('blocks_*', '')
    """
    part = next((p for p in re.split(r"/", module) if re.search(r"\d", p) and "->" not in p), "")
    return re.sub(r"\d+", "*", part)


def _by_number(forward: Sequence[Operator], modules: Sequence[str]) -> dict[int, int]:
    """Operator -> layer, from the numbers in scopes; the scope with most equations of those that are repeated."""
    groups: dict[str, dict[str, list[int]]] = {}
    for op, module in zip(forward, modules, strict=True):
        parts = module.split("/")
        at = next((i for i, p in enumerate(parts) if re.search(r"\d", p) and "->" not in p), None)
        if at is not None:
            path = "/".join(parts[: at + 1])
            groups.setdefault(re.sub(r"\d+", "*", path), {}).setdefault(path, []).append(op.id)
    repeated = [layers for layers in groups.values() if len(layers) > 1]
    if not repeated:
        return {}
    layers = max(repeated, key=lambda g: sum(map(len, g.values())))
    in_order = sorted(layers.values(), key=min)
    return {op: k for k, ops in enumerate(in_order) for op in ops}


def _by_source(forward: Sequence[Operator]) -> dict[int, int]:
    """Operator -> layer, from source lines that are traced equally often."""
    lines: dict[Hashable, list[int]] = {}
    for op in forward:
        lines.setdefault((op.primitive, op.source), []).append(op.id)
    # How often most are traced: a line of n layers counts for every divisor of its occurrences.
    weight: collections.Counter[int] = collections.Counter()
    counts = collections.Counter(len(ids) for ids in lines.values())
    for n in counts:
        weight[n] = sum(k * number for k, number in counts.items() if n > 1 and k % n == 0)
    most = max(weight.values(), default=0)
    n = max((n for n, w in weight.items() if n > 1 and w and w >= _NEARLY_MOST * most), default=0)
    if not n:
        return {}
    return {op: k * n // len(ids) for ids in lines.values() if len(ids) % n == 0 for k, op in enumerate(ids)}


def _by_layer(found: Mapping[int, int]) -> list[list[int]]:
    """The operators of each layer."""
    out: list[list[int]] = [[] for _ in range(1 + max(found.values()))]
    for op, k in found.items():
        out[k].append(op)
    return out


def residual_stacks(program: Program) -> list[ResidualStacks]:
    """The loops of the forward pass whose stacked results only the backward pass reads."""
    operators, uses = program.operators, program.uses()
    out = []
    calls = list(calls_of(program.body))
    backward = _backward_slices(calls)
    for call in calls:
        trips = call.trip_count or 1
        if call.kind != "scan" or trips < 2 or compat.is_backward(call.prefix, call.eqn):
            continue
        saved, dropped = set(), []
        readers_of_dropped: set[int] = set()
        entering = _entering(call, operators)
        for i in call.boundary["ys"]:
            inner, stack = operators[i].operands[0], operators[i].results[0]
            readers = uses[stack]
            if isinstance(inner, Literal) or not readers or any(r not in backward for r, _ in readers):
                continue
            if inner in entering:
                saved.add(inner)
            else:
                dropped.append(stack)
                readers_of_dropped.update(backward[r] for r, _ in readers)
        if not dropped:
            continue
        carries = [operators[i].results[0] for i in call.boundary["carry"]]
        unsaved = tuple(t for t in carries if t not in saved and program.tensors[t].ndim)
        forward = tuple(i for i in call.inner_operators if operators[i].kind == "eqn")
        name = common_function([operators[i] for i in forward if is_forward(operators[i])])
        inside = tuple(i for k in sorted(readers_of_dropped) for i in calls[k].inner_operators)
        out.append(ResidualStacks(name, trips, forward, inside, tuple(dropped), unsaved))
    return out


def _backward_slices(calls: Sequence[Call]) -> dict[int, int]:
    """The boundary operators that slice stacks for loops of the backward pass -> which of the calls that loop is."""
    return {
        i: k
        for k, call in enumerate(calls)
        if call.kind == "scan" and compat.is_backward(call.prefix, call.eqn)
        for i in call.boundary["xs"]
    }


def _entering(call: Call, operators: Sequence[Operator]) -> set[int]:
    """The values that an iteration of a loop starts from: constants, carries, slices."""
    return {operators[i].results[0] for role in ("const", "carry", "xs") for i in call.boundary[role]}
