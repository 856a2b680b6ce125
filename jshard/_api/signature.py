"""What tells one call from another: structure, shapes and dtypes, static values, the mesh in context, JAX's options.

A function is traced, planned and compiled once per signature. When a call is planned anew under
`jax.log_compiles`, the difference from the closest known signature is said in the user's words.

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

from jshard import _jaxcompat as compat
from jshard._api.call_state import not_an_array
from jshard._api.shard_request import ShardRequest, named_traced_arguments, static_values, traced_arguments
from jshard._core.errors import ShardError
from jshard._spec.committed_shardings import Placement, describe_sharding, placement


class Signature(NamedTuple):
    """A hashable description of a call; `avals` are (shape, dtype, weak type) of the leaves, `placement` where they are."""

    tree: Any
    avals: tuple[Any, ...]
    statics: tuple[Any, ...]
    context: Any
    settings: tuple[tuple[str, Any], ...]
    placement: Placement = Placement()

    @property
    def without_placement(self) -> Signature:
        """The same wherever the arguments lie."""
        return self._replace(placement=Placement())


def signature(request: ShardRequest, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
    """The signature of a call; raises `ShardError` for what is no array, or static and cannot be hashed."""
    left, left_kw = traced_arguments(request, args, kwargs)
    leaves, tree = jax.tree.flatten((left, left_kw))
    avals = tuple(map(_aval, leaves))
    if None in avals:
        left, left_kw, names = named_traced_arguments(request, args, kwargs)
        raise not_an_array(request.name, *request.view.arguments(left, left_kw), names)
    # A mesh that the user gave is the one that counts, whatever is in context.
    context = None if request.mesh is not None else compat.context_mesh()
    follow = context is None and request.mesh is None
    lying = placement(leaves, use_argument_mesh=follow) if request.plan is None else Placement()
    statics = checked_statics(request, args, kwargs)
    return Signature(tree, avals, statics, context, compat.trace_options(), lying)


def checked_statics(request: ShardRequest, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The static arguments of a call, all hashable."""
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
    """How a signature differs from the closest known one."""
    return "; ".join(min((_differences(old, new) for old in known), key=len))


def _differences(old: Signature, new: Signature) -> list[str]:
    if old.tree != new.tree:
        return [f"the structure of the arguments: {old.tree} -> {new.tree}"]
    numbered = jax.tree.unflatten(new.tree, range(len(new.avals)))
    paths = jax.tree_util.tree_flatten_with_path(numbered)[0]
    told = [
        f"argument {jax.tree_util.keystr(path)}: {_format_aval(was)} -> {_format_aval(now)}"
        for (path, _), was, now in zip(paths, old.avals, new.avals, strict=True)
        if was != now
    ]
    for which, now in new.statics:
        was = dict(old.statics).get(which)
        if was != now:
            told.append(f"static argument {which}: {was!r} -> {now!r}")
    if old.context != new.context:
        told.append(f"mesh in context: {old.context} -> {new.context}")
    was_at, now_at = dict(old.placement.sharded), dict(new.placement.sharded)
    told += [
        f"argument {jax.tree_util.keystr(path)} lies {_describe_placement(was_at.get(i))} -> {_describe_placement(now_at.get(i))}"
        for i, (path, _) in enumerate(paths)
        if was_at.get(i) != now_at.get(i)
    ]
    before = dict(old.settings)
    return told + [f"option {n}: {before.get(n)} -> {v}" for n, v in new.settings if before.get(n) != v]


def _aval(x: Any) -> Any:
    """(shape, dtype, weak type); None for what JAX takes for no array."""
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return x.shape, x.dtype, bool(getattr(x, "weak_type", False))
    a = compat.array_type(x)
    return None if a is None or compat.is_ref(x) else (a.shape, a.dtype, bool(getattr(a, "weak_type", False)))


def _describe_placement(sharding: Any) -> str:
    return "anywhere" if sharding is None else describe_sharding(sharding)


def _format_aval(aval: Any) -> str:
    shape, dtype, weak = aval
    return f"{dtype}[{','.join(map(str, shape))}]" + (" (weak)" if weak else "")
