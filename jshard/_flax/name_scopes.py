"""While a program is traced, calls of nnx modules are named by their path, as linen names them itself.

The plan then lists every operator under its module, in gradients too: `Net/blocks.3.attn.q_proj`. A class's
`__call__` gets a thin wrapper, once and for good, that does nothing unless this thread is naming; so several
threads may trace at the same time.

>>> import jax, jax.numpy as jnp
>>> from flax import nnx
>>> model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
>>> with module_scopes(model):
...     jaxpr = jax.make_jaxpr(lambda x: model(x))(jnp.ones((2, 4)))
>>> [str(e.source_info.name_stack) for e in jaxpr.eqns if e.primitive.name == "dot_general"]
['Sequential/layers.0', 'Sequential/layers.1']
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import nnx

from jshard._spec.flax_protocol import SCOPED_CALL


@dataclasses.dataclass(frozen=True)
class _ScopeState:
    """Paths of the modules that are known, by identity, and the path of the call that is running."""

    paths: Mapping[
        int, tuple[tuple[str, ...], Any]
    ]  # with the module, so that its identity is not used again
    here: tuple[str, ...] | None


_SCOPES: contextvars.ContextVar[_ScopeState | None] = contextvars.ContextVar("naming", default=None)


@contextlib.contextmanager
def module_scopes(module: Any, inside: bool = False) -> Iterator[None]:
    """Name the calls of a module and of those in it, in this thread; `inside`: the module's own has begun."""
    around = _SCOPES.get()
    paths = {**(around.paths if around is not None else {}), **_paths(module, ())}
    here = () if inside else around.here if around is not None else None
    kept = _SCOPES.set(_ScopeState(paths, here))
    try:
        with jax.named_scope(type(module).__name__) if inside else contextlib.nullcontext():
            yield
    finally:
        _SCOPES.reset(kept)


def _paths(module: Any, root: tuple[str, ...]) -> dict[int, tuple[tuple[str, ...], Any]]:
    found = {}
    for path, m in nnx.iter_modules(module):
        found[id(m)] = ((*root, *map(str, path)), m)
        _wrap_call(type(m))
    return found


def _wrap_call(cls: type) -> None:
    """Let the `__call__` of a class say its name; done once, where the method is defined."""
    owner = next((c for c in cls.__mro__ if "__call__" in vars(c)), None)
    if owner is None or owner is object:
        return
    method = vars(owner)["__call__"]
    if hasattr(method, SCOPED_CALL):
        return

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        now = _SCOPES.get()
        if now is None:
            return method(self, *args, **kwargs)
        if id(self) not in now.paths:  # a copy that a transformation made, known by its class
            path, name = now.here or (), type(self).__name__
            now = dataclasses.replace(now, paths={**now.paths, **_paths(self, path)})
        elif (path := now.paths[id(self)][0]) == now.here:  # `super().__call__`
            name = ""
        elif path == ():
            name = type(self).__name__
        else:
            inside = now.here is not None and path[: len(now.here)] == now.here
            name = ".".join(path[len(now.here or ()) :] if inside else path)
        kept = _SCOPES.set(dataclasses.replace(now, here=path))
        try:
            with jax.named_scope(name) if name else contextlib.nullcontext():
                return method(self, *args, **kwargs)
        finally:
            _SCOPES.reset(kept)

    setattr(call, SCOPED_CALL, method)
    owner.__call__ = call
