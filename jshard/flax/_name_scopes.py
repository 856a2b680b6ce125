"""Name scopes for calls of nnx modules, by module path, while a program is traced; linen enters such scopes itself.

The plan then lists every operator under its module, also in gradients: `Net/blocks.3.attn.q_proj`.

This replaces `__call__` of the module classes of the model, user classes included, once and for the life of the process
(the original is the attribute `flax_protocol.SCOPED_CALL` of the wrapper). Outside of `module_scopes` the wrapper only
calls the original. The scopes are in a context variable, so threads can trace at the same time.

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

from jshard._core.jax_types import PyTree
from jshard._spec.flax_protocol import SCOPED_CALL
from jshard.flax._module_outputs import mark_output


@dataclasses.dataclass(frozen=True)
class _ScopeState:
    """Scopes of the current context.

    `paths`: `id` of a module -> (its path, the module itself, so that the `id` stays valid). `current`: path of the module
    whose call is running, None outside of calls. `originals`: `id` of a copy that a transformation made -> the path of
    its original, where that is known.
    """

    paths: Mapping[int, tuple[tuple[str, ...], nnx.Pytree]]
    current: tuple[str, ...] | None
    originals: Mapping[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)


_SCOPES: contextvars.ContextVar[_ScopeState | None] = contextvars.ContextVar("scopes", default=None)


@contextlib.contextmanager
def module_scopes(module: nnx.Pytree, inside: bool = False) -> Iterator[None]:
    """Name the calls of a module and of its submodules; `inside`: whether the module's own call has begun."""
    outer = _SCOPES.get()
    paths = {**(outer.paths if outer is not None else {}), **_paths(module, ())}
    current = () if inside else outer.current if outer is not None else None
    originals = outer.originals if outer is not None else {}
    token = _SCOPES.set(_ScopeState(paths, current, originals))
    try:
        with jax.named_scope(type(module).__name__) if inside else contextlib.nullcontext():
            yield
    finally:
        _SCOPES.reset(token)


# Any: `iter_modules` takes every `nnx.Pytree`, its annotation says `nnx.Module`.
def _paths(module: Any, root: tuple[str, ...]) -> dict[int, tuple[tuple[str, ...], nnx.Pytree]]:
    out = {}
    for path, m in nnx.iter_modules(module):
        out[id(m)] = ((*root, *map(str, path)), m)
        _wrap_call(type(m))
    return out


def _original_path(copy: nnx.Pytree, scopes: _ScopeState) -> tuple[str, ...]:
    """The path of the module of which a transformation made a copy: the one of its class, without indices of layers.

    Where several modules could be it, the copy has the name of its class.
    """
    current = scopes.current or ()
    below = {
        tuple(p for p in path if not p.isdigit())
        for path, m in scopes.paths.values()
        if type(m) is type(copy) and len(path) > len(current) and path[: len(current)] == current
    }
    return below.pop() if len(below) == 1 else (*current, type(copy).__name__)


def _wrap_call(cls: type) -> None:
    """Replace `__call__`, in the class of the MRO that defines it, by a wrapper that enters the module's scope."""
    owner = next((c for c in cls.__mro__ if "__call__" in vars(c)), None)
    if owner is None or owner is object:
        return
    method = vars(owner)["__call__"]
    if hasattr(method, SCOPED_CALL):
        return

    @functools.wraps(method)
    def call(self: nnx.Pytree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        scopes = _SCOPES.get()
        if scopes is None:
            return method(self, *args, **kwargs)
        if id(self) not in scopes.paths:  # a copy made by a transformation: named by its class
            path, name = scopes.current or (), type(self).__name__
            copies = {i: p for i, (p, _) in _paths(self, _original_path(self, scopes)).items()}
            scopes = dataclasses.replace(
                scopes,
                paths={**scopes.paths, **_paths(self, path)},
                originals={**scopes.originals, **copies},
            )
        elif (path := scopes.paths[id(self)][0]) == scopes.current:  # `super().__call__`
            name = ""
        elif path == ():
            name = type(self).__name__
        else:
            inside = scopes.current is not None and path[: len(scopes.current)] == scopes.current
            name = ".".join(path[len(scopes.current or ()) :] if inside else path)
        token = _SCOPES.set(dataclasses.replace(scopes, current=path))
        try:
            with jax.named_scope(name) if name else contextlib.nullcontext():
                y = method(self, *args, **kwargs)
                return y if name == "" else mark_output(y, scopes.originals.get(id(self), path))
        finally:
            _SCOPES.reset(token)

    setattr(call, SCOPED_CALL, method)
    owner.__call__ = call
