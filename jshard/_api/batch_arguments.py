"""The arguments of a call that hold its batch, and the call with another batch.

State does not count: it is donated, or a result replaces it. What is left with one size in common in its first dimension
is a batch. Where a recurrence runs over that dimension (`_program/time_major.py`) the batch is the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import jax

from jshard._api.prepare import trace_call
from jshard._api.shard_request import ShardRequest
from jshard._api.trace_call import abstract
from jshard._core import jaxcompat as compat
from jshard._core.jax_types import PyTree
from jshard._program.time_major import time_major_inputs
from jshard._spec.tree_paths import argument_names


def batches(
    request: ShardRequest, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], state: Collection[int]
) -> list[tuple[tuple[str, ...], int, int]]:
    """(names, size, dimension) of the arguments that may be a batch: all of one leading size together.

    `state`: positions of arguments that are not.
    """
    kept = {*state, *request.statics[0]}
    names = argument_names(request.fn, len(args))
    values = {n: a for i, (n, a) in enumerate(zip(names, args, strict=False)) if i not in kept}
    values |= {k: v for k, v in kwargs.items() if k not in request.call.donate_argnames}
    by_size: dict[int, list[str]] = {}
    for name, value in values.items():
        if size := _common_size(value, 0):
            by_size.setdefault(size, []).append(name)
    time_major, out = _time_major(request, args, kwargs) if by_size else set(), []
    for size, group in by_size.items():
        dim = int(not time_major.isdisjoint(group))
        found = _common_size([values[n] for n in group], dim) if dim else size
        if found:
            out.append((tuple(group), found, dim))
    return out


def resized(
    request: ShardRequest,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    place: tuple[Collection[str], int],
    size: int,
) -> tuple[list[PyTree], dict[str, PyTree]]:
    """The arguments as shapes, with another size of a dimension of some; `place`: their names, and the dimension."""
    named, dim = place

    def resize(value: PyTree) -> PyTree:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((*x.shape[:dim], size, *x.shape[dim + 1 :]), x.dtype),
            abstract(value),
        )

    names = argument_names(request.fn, len(args))
    changed = [resize(a) if n in named else a for n, a in zip(names, args, strict=False)]
    return changed, {k: resize(v) if k in named else v for k, v in kwargs.items()}


def _common_size(value: PyTree, dim: int) -> int:
    """The size of a dimension that all leaves have in common; 0 where that is one, or there is none."""
    sizes = {x.shape[dim] if getattr(x, "ndim", 0) > dim else 0 for x in jax.tree.leaves(abstract(value))}
    return size if len(sizes) == 1 and (size := sizes.pop()) > 1 else 0


def _time_major(request: ShardRequest, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> set[str]:
    """Names of the time-major arguments."""
    traced = trace_call(request, args, kwargs)
    captured = len(compat.captured_tracers(traced.jax_traced))  # the first inputs of the jaxpr
    positions = time_major_inputs(compat.open_jaxpr(traced.jaxpr)[0])
    return {traced.call.leaves[i - captured].argument for i in positions if i >= captured}
