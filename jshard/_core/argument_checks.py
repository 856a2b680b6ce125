"""Calls with wrong arguments: a misspelt, missing or superfluous one gets an error that says what to write.

>>> @checked
... def machine(name, axes, *, slices=1):
...     return name
>>> machine("v5e:2x4", {"x": 8}, slice=2)
Traceback (most recent call last):
...
jshard._core.errors.ArgumentError: machine takes no argument 'slice'
  where: machine
  write instead: 'slices' (its arguments: slices)
>>> machine("v5e:2x4")
Traceback (most recent call last):
...
jshard._core.errors.ArgumentError: machine is called without axes
  where: machine
  write instead: machine(name, axes, ...)
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from jshard._core.errors import ArgumentError


P = ParamSpec("P")
R = TypeVar("R")


def checked(fn: Callable[P, R]) -> Callable[P, R]:
    """A public function whose wrong calls are `ArgumentError`s."""
    name, signature = fn.__qualname__, inspect.signature(fn)

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            check_call(fn, args, kwargs, name)
        return fn(*args, **kwargs)

    return call


def check_call(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], name: str, *,
    where: str = "", own_arguments: Sequence[str] = (), advice: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Raise an `ArgumentError` if a function cannot be called so.

    `settings`: arguments of `where` itself, which calls the function with the others. `elsewhere`: for names that
    belong to another function what to write instead.
    """
    try:
        signature = inspect.signature(fn)
        signature.bind(*args, **kwargs)
        return
    except TypeError as error:
        told = str(error)
    except ValueError:  # no signature to be had
        return
    raise _call_error(
        signature, args, kwargs, name, where or name, own_arguments, advice or {}, told
    ) from None


def _call_error(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any], name: str, where: str,
    settings: Sequence[str], elsewhere: Mapping[str, str], told: str,
) -> ArgumentError:  # fmt: skip
    own = {n: p for n, p in signature.parameters.items() if n != "self"}
    count = len(args) - ("self" in signature.parameters)
    kinds = {p.kind for p in own.values()}
    by_place = [n for n, p in own.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [n for n, p in own.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    left = [n for n in named if n not in by_place[:count]] or named
    listed = f"its arguments: {', '.join(left)}" if left else "it takes none"
    if inspect.Parameter.VAR_KEYWORD in kinds:
        listed = "all of them by name"
    unknown = [k for k in kwargs if k not in named]
    if unknown:
        key, who = unknown[0], f"{name} takes no argument"
        if settings:
            who = f"neither {where} nor {name} takes an argument"
            listed = f"of {where}: {', '.join(settings)}; of {name}: {', '.join(named)}"
        near = difflib.get_close_matches(key, [*settings, *named], n=2, cutoff=0.5)
        fix = elsewhere.get(key) or (f"{' or '.join(map(repr, near))} ({listed})" if near else listed)
        return ArgumentError(f"{who} {key!r}", where=where, fix=fix)
    if count > len(by_place) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        more = [n for n in named if n not in by_place]
        fix = f"the others by name: {', '.join(f'{n}=' for n in more)}" if more else listed
        takes = f"{len(by_place) or 'no'} argument{'' if len(by_place) == 1 else 's'} by place"
        return ArgumentError(f"{name} takes {takes}, and was given {count}", where=where, fix=fix)
    given = set(by_place[:count]) | set(kwargs)
    missing = [
        n for n, p in own.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and n not in given
    ]  # fmt: skip
    if missing:
        needed = [n for n, p in own.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        more = ", ..." if len(needed) < len(own) else ""
        return ArgumentError(
            f"{name} is called without {', '.join(missing)}",
            where=where,
            fix=f"{name}({', '.join(needed)}{more})",
        )
    return ArgumentError(f"{name}: {told}", where=where, fix=listed)
