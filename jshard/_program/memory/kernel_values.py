"""Which values kernels read from memory, where that is not what liveness says.

Liveness (`liveness.py`) says which values a compiled program holds. Three things differ for the time of its kernels:

- Products of a GPU's library read and write memory: nothing else is computed in their kernels.
- A scan stacks a value for the backward pass by an update in place of the stack, a kernel that computes it as any other
  reader does. So a value that could be computed in all its readers is, though it is in memory as a part of the stack:
  the exponentials of a softmax are computed once for the stack, once for their sum, and once in the product.
- What several products read as an operand is computed in each of them, as long as that moves fewer bytes than to write
  it once: not the gradient of a softmax that reads two arrays of a stack.

The last two were read off programs that the TPU compiler made of scanned and of unrolled GPT layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jshard._program.graph import Literal, Program
from jshard._program.memory.liveness import Liveness
from jshard._program.operators import PRODUCTS


VIEWS = frozenset(
    ("reshape", "squeeze", "expand_dims", "copy", "stop_gradient", "name", "optimization_barrier")
)
_SAME_ELEMENTS = VIEWS | {"convert_element_type", "rounded_sum", "transpose", "broadcast_in_dim"}
_MOST_VALUES = 256  # that are followed from an operand of a product


def stored_for_library(program: Program, live: Liveness) -> list[bool]:
    """(tensors,) whether each is in memory if products read and write nothing else: all but views and casts of others."""
    stored, defs = list(live.materialized), program.defs()
    for op in program.operators:
        if op.primitive not in PRODUCTS or op.kind != "eqn":
            continue
        for t in op.operands:
            while not isinstance(t, Literal) and not stored[t]:
                maker = program.operators[defs[t][0]]
                if maker.primitive not in _SAME_ELEMENTS:
                    stored[t] = True
                    break
                t = maker.operands[0]
        for r in op.results:
            stored[r] = True
    return stored


def stacked_values(program: Program, live: Liveness) -> frozenset[int]:
    """Tensors that a scan stacks and that every other reader computes for itself."""
    a = program.use_def
    at = np.flatnonzero(a.has_kind("scan_ys"))
    if not len(at):
        return frozenset()
    stacks = np.isin(a.use_op, at)
    refusing = ~live.traits.fuses_operands[a.use_op] & ~stacks
    refusing |= ~stacks & (a.repeat[a.use_op] != a.repeat[a.def_op[a.use_tensor]])
    refused = np.bincount(a.use_tensor, refusing, len(a.def_op)) > 0
    candidates = np.unique(a.use_tensor[stacks])
    found = candidates[live.traits.duplicable[a.def_op[candidates]] & ~refused[candidates]]
    return frozenset(found.tolist())


def stored_for_products(program: Program, stored: Sequence[bool]) -> frozenset[int]:
    """Tensors that are written once, since the products that read them would together read more to compute them.

    Arguments:

    - `stored`: (tensors,) whether each is in memory as it is.
    """
    stored, defs = list(stored), program.defs()
    readers: dict[int, set[int]] = {}  # what products would compute -> those products
    for op in program.operators:
        if op.kind != "eqn" or op.primitive not in PRODUCTS:
            continue
        for a in op.operands:
            value = None if isinstance(a, Literal) or stored[a] else _smallest(program, a, stored, defs)
            if value is not None:
                readers.setdefault(value, set()).add(op.id)
    found = set()
    # In the order of the program: later values are computed from those that are stored. The residual stream of a backward
    # pass is a sum of terms of all layers, and each layer's products would otherwise read those of all layers before.
    for value in sorted(readers, key=lambda t: defs[t]):
        n, own = len(readers[value]), program.tensors[value].nbytes
        if n > 1 and n * (read := _bytes_read(program, value, stored, defs)) >= read + (n + 1) * own:
            found.add(value)
            stored[value] = True
    return frozenset(found)


def _smallest(
    program: Program, tensor: int, stored: Sequence[bool], defs: Sequence[tuple[int, int]]
) -> int | None:
    """Of a tensor and the casts and views that it is of another, the one of fewest bytes; None if that other is stored."""
    best = t = tensor
    while True:
        maker = program.operators[defs[t][0]]
        if maker.kind != "eqn" or maker.primitive not in _SAME_ELEMENTS:
            return best
        (source,) = maker.operands[:1]
        if isinstance(source, Literal) or stored[source]:
            return None
        t = source
        if program.tensors[t].nbytes <= program.tensors[best].nbytes:
            best = t


def _bytes_read(
    program: Program, tensor: int, stored: Sequence[bool], defs: Sequence[tuple[int, int]]
) -> float:
    """Bytes of what a tensor is computed from; 0 if a product makes it, in whose kernel it is computed; infinite if by too
    many operators."""
    total, stack, seen = 0.0, [tensor], {tensor}
    while stack:
        maker = program.operators[defs[stack.pop()][0]]
        if maker.kind != "eqn" or maker.primitive in PRODUCTS:
            return 0.0
        if len(seen) > _MOST_VALUES:
            return math.inf  # no compiler makes such kernels
        for a in maker.operands:
            if isinstance(a, Literal) or a in seen:
                continue
            seen.add(a)
            if stored[a]:
                total += program.tensors[a].nbytes
            else:
                stack.append(a)
    return total
