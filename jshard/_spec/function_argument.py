"""The function given to `shard`: something to call, with the arguments that static and donated ones name.

>>> check_function(abs)
<built-in function abs>
>>> check_function(int)
Traceback (most recent call last):
...
jshard._core.errors.ShardError: shard takes a function, not the class int
  where: fn
  write instead: a function that uses it: jshard.shard(lambda *args: int(*args), ...)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from jshard._core.argument_checks import parameters_of
from jshard._core.errors import ArgumentError, ShardError
from jshard._core.messages import suggest, type_with_article
from jshard._spec.flax_protocol import SHARD_MODULE
from jshard._spec.options import CallOptions


def check_function(fn: object, caller: str = "shard", call: CallOptions | None = None) -> Callable:
    """`fn` if it is callable and no class.

    Arguments:

    - `caller`: the function of jshard that it was given to.
    - `call`: static and donated arguments, which the function must have where its signature is known.

    Raises `ShardError` otherwise, `ArgumentError` for a static or donated argument that the function lacks.
    """
    if isinstance(fn, type):
        raise ShardError(
            f"{caller} takes a function, not the class {fn.__name__}",
            where="fn",
            fix=f"a function that uses it: jshard.{caller}(lambda *args: {fn.__name__}(*args), ...)",
        )
    if callable(fn):
        if call is not None:
            _check_named_arguments(fn, call)
        return fn
    fix = f"jshard.{caller}(f, in_strategy=...)"
    if caller == "shard":
        fix += ", or @jshard.shard(in_strategy=...) above the function"
    raise ShardError(f"{caller} takes a function, not {type_with_article(fn)}", where="fn", fix=fix)


def _check_named_arguments(fn: Callable, call: CallOptions) -> None:
    """Raise `ArgumentError` for static and donated arguments that the function lacks, as `jax.jit` does."""
    parameters = parameters_of(fn)
    kinds = {p.kind for p in parameters.values()}
    name = getattr(fn, "__name__", type(fn).__name__)
    positional = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not parameters:
        return
    for option, positions, names in (
        ("static", call.static_argnums, call.static_argnames),
        ("donate", call.donate_argnums, call.donate_argnames),
    ):
        outside = [n for n in positions if not -len(positional) <= n < len(positional)]
        if outside and inspect.Parameter.VAR_POSITIONAL not in kinds:
            raise ArgumentError(
                f"{option}_argnums names position {outside[0]}, and {name} takes {len(positional)} by position",
                where=f"{option}_argnums of {name}",
                fix=f"one of {', '.join(f'{i} ({n})' for i, n in enumerate(positional))}",
            )
        unknown = [n for n in names if n not in by_name]
        if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
            raise ArgumentError(
                f"{option}_argnames names {unknown[0]!r}, which {name} does not take",
                where=f"{option}_argnames of {name}",
                fix=f"one of its arguments: {suggest(unknown[0], by_name)}",
            )


def flax_entry_point(fn: object) -> Callable | None:
    """The function that shards a Flax module, which `jshard.flax` sets on the class; None if `fn` is no module.

    >>> flax_entry_point(lambda x: x) is None
    True
    """
    shard_module = getattr(type(fn), SHARD_MODULE, None)
    if shard_module is not None:
        return shard_module
    library = next((c for c in type(fn).__mro__ if c.__name__ == "Module"), object).__module__
    if library.startswith(("flax.nnx.", "flax.linen.")):
        raise ShardError(
            f"{type(fn).__name__} is a Flax module",
            where="fn",
            fix="import jshard.flax first; then jshard.shard(module, ...) and module.shard(...) work",
        )
    return None
