"""State of `flax.nnx` among the arguments of a sharded function: the interface that `jshard/flax/_function.py` has.

The core does not import Flax. Once a program has imported `flax.nnx`, arguments may hold its modules; then
`jshard.flax._function` is loaded by name.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar, cast

from jshard._api.shard_request import ShardRequest
from jshard._core.jax_types import Function, PyTree


ArrayFunction = TypeVar("ArrayFunction", covariant=True)
"""`Sharded`; a parameter here, because `Sharded` uses this file."""


class StatefulFunction(Protocol[ArrayFunction]):
    """A sharded function whose arguments hold state: split into arrays before the call, written back after it."""

    @property
    def inner(self) -> ArrayFunction:
        """The sharded function of arrays."""
        ...

    def __call__(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> PyTree:
        """Call the function and write changed state back into the objects among the arguments."""
        ...

    def split_arguments(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> contextlib.AbstractContextManager[tuple[tuple, dict[str, PyTree]]]:
        """A context with the arguments of `inner`."""
        ...


Made = TypeVar("Made")


class StateLibrary(Protocol):
    """A library whose objects hold arrays that a function may change in place."""

    def holds_state(self, tree: PyTree) -> bool:
        """Whether a pytree has such an object in it."""
        ...

    def StatefulFunction(
        self, request: ShardRequest, make: Callable[[ShardRequest], Made]
    ) -> StatefulFunction[Made]:
        """The function of `request`, with `make` turning a request over arrays into its `inner`."""
        ...

    def explain_trace_error(self, error: Exception, fn: Function, name: str) -> Exception:
        """A `ShardError` in place of an error about captured state; any other error as it is."""
        ...

    def refuse_bound_method(self, fn: Function) -> None:
        """Raise `ShardError` for a method bound to a stateful object, and for such an object itself."""
        ...


def state_library() -> StateLibrary | None:
    """`jshard.flax._function`; None while `flax.nnx` is not imported, when no argument can hold its state."""
    if "flax.nnx" not in sys.modules:
        return None
    return cast(StateLibrary, importlib.import_module("jshard.flax._function"))
