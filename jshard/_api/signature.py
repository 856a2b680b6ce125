"""The signature of a call, the key of its plan: structure, avals, static values, mesh in context, JAX's options.

A function is traced, planned and compiled once per signature. When a call is planned anew under `jax.log_compiles`,
the difference from the closest known signature is logged.

>>> import jax, jax.numpy as jnp, jshard
>>> f = jshard.shard(lambda x, y: x + y)
>>> a, b = (signature(f._request, (jnp.ones(n), 2.0), {}) for n in (3, 4))
>>> explain_miss(a, [b])
'argument [0][0]: float32[4] -> float32[3]'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding

from jshard._api.call_state import not_an_array
from jshard._api.shard_request import ShardRequest, named_traced_arguments, static_values, traced_arguments
from jshard._core import jaxcompat as compat
from jshard._core.errors import ShardError
from jshard._core.jax_types import PyTree, PyTreeDef
from jshard._spec.committed_shardings import Placement, describe_sharding, placement


class Signature(NamedTuple):
    """A hashable description of a call.

    - `tree`: structure of the traced arguments; `avals`: (shape, dtype, weak type) of each leaf.
    - `statics`: (position or name, value). `context`: the mesh in context, unless the user gave one.
    - `settings`: the JAX options that change a trace. `placement`: the shardings that arguments are committed to.
    """

    tree: PyTreeDef
    avals: tuple[object, ...]
    statics: tuple[tuple[int | str, object], ...]
    context: object
    settings: tuple[tuple[str, object], ...]
    placement: Placement = Placement()

    @property
    def without_placement(self) -> Signature:
        """The signature of a call with the same shapes and uncommitted arguments."""
        return self._replace(placement=Placement())


def signature(request: ShardRequest, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> Signature:
    """The signature of a call.

    Raises `ArgumentError` for a traced argument that is no array, `ShardError` for a static one that is not hashable.
    """
    leaves, tree = jax.tree.flatten(traced_arguments(request, args, kwargs))
    avals = tuple(map(_aval, leaves))
    if None in avals:
        traced, traced_kw, names = named_traced_arguments(request, args, kwargs)
        raise not_an_array(request.name, *request.view.arguments(traced, traced_kw), names)
    # A mesh that the user gave takes precedence over the one in context.
    context = None if request.mesh is not None else compat.context_mesh()
    committed = Placement()
    if request.plan is None:
        committed = placement(leaves, use_argument_mesh=context is None and request.mesh is None)
    statics = checked_statics(request, args, kwargs)
    return Signature(tree, avals, statics, context, compat.trace_options(), committed)


def checked_statics(
    request: ShardRequest, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> tuple[tuple[int | str, object], ...]:
    """The static arguments of a call as (position or name, value); `ShardError` for one that is not hashable."""
    numbers, names = request.statics
    statics = static_values(request, args, kwargs) if numbers or names else ()
    for _, value in statics:
        try:
            hash(value)
        except TypeError:
            raise ShardError(
                f"a static argument of {request.name} cannot be hashed: {type(value).__name__}",
                where=f"call of {request.name}",
                fix="a hashable value (a tuple instead of a list), or leave it out of static_argnums, static_argnames",
            ) from None
    return statics


def explain_miss(new: Signature, known: Sequence[Signature]) -> str:
    """How a new signature differs from the closest known one, as text."""
    return "; ".join(min((_differences(old, new) for old in known), key=len))


def _differences(old: Signature, new: Signature) -> list[str]:
    if old.tree != new.tree:
        return [f"the structure of the arguments: {old.tree} -> {new.tree}"]
    numbered = jax.tree.unflatten(new.tree, range(len(new.avals)))
    names = [
        f"argument {jax.tree_util.keystr(p)}" for p, _ in jax.tree_util.tree_flatten_with_path(numbered)[0]
    ]
    out = [
        f"{name}: {_format_aval(before)} -> {_format_aval(now)}"
        for name, before, now in zip(names, old.avals, new.avals, strict=True)
        if before != now
    ]
    for which, now in new.statics:
        before = dict(old.statics).get(which)
        if before != now:
            out.append(f"static argument {which}: {before!r} -> {now!r}")
    if old.context != new.context:
        out.append(f"mesh in context: {old.context} -> {new.context}")
    old_shardings, new_shardings = dict(old.placement.sharded), dict(new.placement.sharded)
    for i, name in enumerate(names):
        before, now = old_shardings.get(i), new_shardings.get(i)
        if before != now:
            out.append(f"{name} lies {_describe_placement(before)} -> {_describe_placement(now)}")
    settings = dict(old.settings)
    return out + [f"option {n}: {settings.get(n)} -> {v}" for n, v in new.settings if settings.get(n) != v]


def _aval(x: PyTree) -> object:
    """(shape, dtype, weak type); None for anything that is no array in JAX."""
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return x.shape, x.dtype, bool(getattr(x, "weak_type", False))
    a = compat.array_type(x)
    return None if a is None or compat.is_ref(x) else (a.shape, a.dtype, bool(getattr(a, "weak_type", False)))


def _describe_placement(sharding: Sharding | None) -> str:
    return "anywhere" if sharding is None else describe_sharding(sharding)


def _format_aval(aval: Any) -> str:
    shape, dtype, weak = aval
    return f"{dtype}[{','.join(map(str, shape))}]" + (" (weak)" if weak else "")
