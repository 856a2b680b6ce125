"""Errors for calls with misspelt, missing or superfluous arguments, with the arguments to write instead.

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
from typing import ParamSpec, TypeVar

from jshard._core.errors import ArgumentError


P = ParamSpec("P")
R = TypeVar("R")


def checked(fn: Callable[P, R]) -> Callable[P, R]:
    """A decorator of public functions: calls that do not fit the signature raise `ArgumentError`."""
    return checked_with({})(fn)


def checked_with(advice: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """`checked` for a function with advice for keywords that it does not take."""

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        return _checked(fn, advice)

    return decorate


def _checked(fn: Callable[P, R], advice: Mapping[str, str]) -> Callable[P, R]:
    name, signature = fn.__qualname__, inspect.signature(fn)

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            check_call(fn, args, kwargs, name, advice=advice)
        return fn(*args, **kwargs)

    return call


def check_call(
    fn: Callable, args: Sequence[object], kwargs: Mapping[str, object], name: str, *,
    where: str = "", own_arguments: Sequence[str] = (), advice: Mapping[str, str] | None = None, form: str = "{}({})",
) -> None:  # fmt: skip
    """Raise an `ArgumentError` if a call does not fit the function's signature.

    Arguments:

    - `fn`, `args`, `kwargs`, `name`: the function, its arguments, and its name in the error.
    - `where`: the function that the user called, if it forwards the call; `own_arguments` are its own keywords.
    - `advice`: for keywords of other functions, what to write instead.
    - `form`: a whole call, from the name and the arguments that it needs.
    """
    try:
        signature = inspect.signature(fn)
    except ValueError:  # built-in functions may have no signature
        return
    try:
        signature.bind(*args, **kwargs)
        return
    except TypeError as error:
        message = str(error)
    raise _call_error(
        signature, args, kwargs, name, where or name, own_arguments, advice or {}, message, form
    ) from None


def _call_error(
    signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object], name: str, where: str,
    own_arguments: Sequence[str], advice: Mapping[str, str], message: str, form: str,
) -> ArgumentError:  # fmt: skip
    """The error of a call that `signature.bind` refuses with `message`."""
    parameters = {n: p for n, p in signature.parameters.items() if n != "self"}
    count = len(args) - ("self" in signature.parameters)
    kinds = {p.kind for p in parameters.values()}
    positional = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    remaining = [n for n in by_name if n not in positional[:count]] or by_name
    listed = f"its arguments: {', '.join(remaining)}" if remaining else "it takes none"
    if inspect.Parameter.VAR_KEYWORD in kinds:
        listed = "all of them by name"
    unknown = [k for k in kwargs if k not in by_name]
    if unknown:
        key, who = unknown[0], f"{name} takes no argument"
        if own_arguments:
            who = f"neither {where} nor {name} takes an argument"
            listed = f"of {where}: {', '.join(own_arguments)}; of {name}: {', '.join(by_name)}"
        close = difflib.get_close_matches(key, [*own_arguments, *by_name], n=2, cutoff=0.6)
        fix = advice.get(key) or (f"{' or '.join(map(repr, close))} ({listed})" if close else listed)
        return ArgumentError(f"{who} {key!r}", where=where, fix=fix)
    if count > len(positional) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        keyword_only = [n for n in by_name if n not in positional]
        fix = f"the others by name: {', '.join(f'{n}=' for n in keyword_only)}" if keyword_only else listed
        takes = f"{len(positional) or 'no'} argument{'' if len(positional) == 1 else 's'} by place"
        return ArgumentError(f"{name} takes {takes}, and was given {count}", where=where, fix=fix)
    passed = set(positional[:count]) | set(kwargs)
    missing = [
        n for n, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and n not in passed
    ]  # fmt: skip
    if missing:
        required = [
            f"{n}=..." if p.kind is p.KEYWORD_ONLY else n
            for n, p in parameters.items()
            if p.default is p.empty and p.kind is not p.VAR_KEYWORD
        ]
        optional = ", ..." if len(required) < len(parameters) else ""
        return ArgumentError(
            f"{name} is called without {', '.join(missing)}",
            where=where,
            fix=form.format(name, ", ".join(required) + optional),
        )
    return ArgumentError(f"{name}: {message}", where=where, fix=listed)


def parameters_of(fn: Callable) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function by name; none where Python does not know them."""
    try:
        return inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return {}


def signature_text(fn: Callable) -> str:
    """The signature of a function as text."""
    try:
        return str(inspect.signature(fn))
    except (TypeError, ValueError):
        return "(...)"
