"""A hash that identifies a program: two traces of the same function with the same shapes have the same."""

from __future__ import annotations

import functools
import hashlib

import numpy as np

from jshard._program.graph import Program


def fingerprint(program: Program) -> str:
    """A short hash of the program: operators, how they are joined, shapes and dtypes; not of names or sources."""
    a = program.use_def
    # Numbers are given in the order of the program, so they are the same in every process.
    avals = [(shape, dtype_name(dtype)) for shape, dtype in a.aval_ids]
    literals = [str(x.value) for x in a.literals]
    digest = hashlib.sha256(repr((list(a.primitive_ids), avals, literals)).encode())
    for numbers in (
        a.primitive_id, a.use_begin, a.use_tensor, a.use_operand, a.result_begin, a.result, a.aval_id,
        a.literal_op, a.literal_operand,
    ):  # fmt: skip
        digest.update(np.asarray(numbers, dtype="<i8").tobytes())
    digest.update(np.asarray(a.repeat, dtype="<f8").tobytes())
    return digest.hexdigest()[:16]


@functools.lru_cache(maxsize=256)
def dtype_name(dtype: np.dtype) -> str:
    """`str(dtype)`, cached: numpy composes the name at each call."""
    return str(dtype)
