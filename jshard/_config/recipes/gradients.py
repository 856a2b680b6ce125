"""The gradient of each weight: the value that the backward pass hands to the rest of a training step."""

from __future__ import annotations

import collections
from collections.abc import Mapping

from jshard._config.recipes.products import is_forward
from jshard._config.recipes.structure import Structure
from jshard._program.graph import Literal


Place = tuple[int, int]
_STEPS = 400  # operators between a gradient and its weight's update; Adam has about twenty


def gradients_of(s: Structure) -> Mapping[int, Place]:
    """(operator, result) of the gradient by number of the weight, where there is one."""
    program = s.program
    kinds: dict[tuple[int, ...], list[int]] = collections.defaultdict(list)
    for n in sorted(s.weights):
        if shape := program.tensors[s.argument(n)].shape:
            kinds[shape].append(n)
    out: dict[int, Place] = {}
    for op in program.operators:
        if op.kind in ("input", "const", "output") or is_forward(op):
            continue
        for k, t in enumerate(op.results):
            alike = kinds.get(program.tensors[t].shape)
            if alike and any(is_forward(program.operators[u]) for u, _ in program.uses()[t]):
                weight = _updated_by(s, t, alike)
                if weight is not None:
                    out[weight] = (op.id, k)  # the last one: sums of several come after their addends
    return out


def _updated_by(s: Structure, gradient: int, alike: list[int]) -> int | None:
    """The weight to which values computed from a gradient are added; or whose path ends as that of a result does."""
    program, shape = s.program, s.program.tensors[gradient].shape
    queue, seen = collections.deque([gradient]), {gradient}
    while queue and len(seen) < _STEPS:
        t = queue.popleft()
        for u, _ in program.uses()[t]:
            op = program.operators[u]
            if not is_forward(op):
                continue
            if op.kind == "output":
                end = op.name.partition(".")[2]
                named = [n for n in alike if end and s.name(n).endswith(end)]
                if len(named) == 1 and t == gradient:
                    return named[0]
            behind = [s.origins.of[a] for a in op.operands if not isinstance(a, Literal) and a != t]
            for one in behind:
                if one is not None and len(one) == 1 and next(iter(one)) in alike:
                    return next(iter(one))
            for r in op.results:
                if r not in seen and program.tensors[r].shape == shape:
                    seen.add(r)
                    queue.append(r)
    return None
