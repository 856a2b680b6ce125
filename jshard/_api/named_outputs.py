"""Tracing with the outputs of Flax modules named (`flax/_module_outputs.py`); the core does not import Flax.

>>> with_marked_outputs(lambda x: x + 1)(1)
2
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys

from jshard._core.jax_types import Function, PyTree


def with_marked_outputs(fn: Function) -> Function:
    """A new function that is `fn` with the outputs of its modules named, so that JAX does not reuse a trace of `fn`."""

    @functools.wraps(fn)
    def marked(*args: PyTree, **kwargs: PyTree) -> PyTree:
        with _marked_outputs():
            return fn(*args, **kwargs)

    return marked


def _marked_outputs() -> contextlib.AbstractContextManager[object]:
    if "flax" not in sys.modules:
        return contextlib.nullcontext()
    return importlib.import_module("jshard.flax._module_outputs").marked_outputs()
