"""How much a kernel computes again: values that several kernels would compute from many arrays are written once.

A value that is not stored (`kernel_fusion.py`) is computed again by each kernel that reads it. In a chain of such
values, as the gradient of a recurrent state that is unrolled in time, each step's kernel would compute all steps after it
again. The TPU compiler does not: in the gradient of an LSTM over 24 steps its largest kernels read nine arrays, one kernel
a step (libtpu 0.0.42). A sum that one kernel reads may have any number of terms: of 40 steps, 81.

>>> import jax, jax.numpy as jnp
>>> from jshard._program.trace import build
>>> def f(w, *x):
...     y = sum(x)
...     return y @ w, jnp.tanh(y).sum(0)
>>> def stored(terms):
...     x = [jax.ShapeDtypeStruct((64, 64), "float32")] * (1 + terms)
...     program = build(jax.make_jaxpr(f)(*x), name="f", input_names=[""] * (1 + terms))
...     fused = program.use_def.has_primitive(frozenset(("add", "tanh")))[program.use_def.def_op]
...     return computed_from_many_arrays(program, fused)
>>> stored(8), len(stored(9))
([], 1)
"""

from __future__ import annotations

from jshard._core.arrays import Bools
from jshard._program.graph import Literal, Program


_MOST_ARRAYS = 8  # from which several kernels compute one value


def computed_from_many_arrays(program: Program, fused: Bools) -> list[int]:
    """Tensors that several kernels would compute, each from more than `_MOST_ARRAYS` arrays of at least half their size.

    Arguments:

    - `fused`: (tensors,) whether each is computed again by its readers; products are not.
    """
    is_fused, several = fused.tolist(), _read_by_several_kernels(program, fused)
    size = [t.size for t in program.tensors]
    arrays: dict[
        int, frozenset[int]
    ] = {}  # of a fused tensor: those it is computed from, up to one more than the most
    found: list[int] = []
    for op in program.operators:
        if not any(is_fused[r] for r in op.results):
            continue
        read = {t for t in op.operands if not isinstance(t, Literal)}
        own = min(size[r] for r in op.results)
        large = {t for t in read if t not in arrays}.union(*[arrays[t] for t in read if t in arrays])
        large = {t for t in large if 2 * size[t] >= own}
        for r in op.results:
            if not is_fused[r]:
                continue
            if len(large) > _MOST_ARRAYS and several[r]:
                found.append(r)  # it counts as one array from here on
            else:
                arrays[r] = frozenset(sorted(large)[-_MOST_ARRAYS - 1 :])
    return found


def _read_by_several_kernels(program: Program, fused: Bools) -> list[bool]:
    """(tensors,) whether several operators read a fused tensor, and what they compute of it is stored by several kernels.

    An addend of a sum that several kernels read has one reader: the sum is what is stored.
    """
    none, many = -1, -2
    is_fused = fused.tolist()
    kernel = [none] * len(is_fused)  # the one operator whose kernel computes the tensor
    readers = [0] * len(is_fused)
    for op in reversed(program.operators):
        root = op.id
        if op.results and all(is_fused[r] for r in op.results):
            roots = {kernel[r] for r in op.results} - {none}
            root = roots.pop() if len(roots) == 1 else many if roots else none
        if root == none:
            continue
        for t in {t for t in op.operands if not isinstance(t, Literal)}:
            if is_fused[t]:
                kernel[t] = root if kernel[t] in (none, root) else many
                readers[t] += 1
    return [k == many and n > 1 for k, n in zip(kernel, readers, strict=True)]
