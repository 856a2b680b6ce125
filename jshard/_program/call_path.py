"""Which of the user's functions called each other where an equation was traced: modules of programs without scopes."""

from __future__ import annotations

import bisect
import functools
import os
import sysconfig
from collections.abc import Sequence
from types import CodeType
from typing import Protocol, cast

import jax

from jshard._core.jax_types import JaxprEqn


class _Traceback(Protocol):
    """JAX's traceback of an equation."""

    def raw_frames(self) -> tuple[Sequence[CodeType], Sequence[int]]: ...


class _SourceInfo(Protocol):
    @property
    def traceback(self) -> _Traceback | None: ...


def call_path(eqn: JaxprEqn | None, tracer: str) -> tuple[str, ...]:
    """The functions that were running, the outermost first, each `name:line`; empty without an equation.

    `line` is where its caller calls it, 0 for the outermost. Frames outside of that in the file `tracer`, in which jshard
    starts to trace, belong to the program that plans; functions of JAX and of jshard are left out.
    """
    frames: list[tuple[str, int]] = []
    traceback = None if eqn is None else cast(_SourceInfo, eqn.source_info).traceback
    for code, position in () if traceback is None else zip(*traceback.raw_frames(), strict=True):
        if code.co_filename.endswith(tracer):
            break
        if _is_user_file(code.co_filename):
            frames.append((code.co_name, _line(code, position)))
    frames.reverse()
    lines = [0, *(line for _, line in frames)]
    return tuple([f"{name}:{line}" for (name, _), line in zip(frames, lines, strict=False)])


def _line(code: CodeType, position: int) -> int:
    """The line of a position (in bytes) in compiled code."""
    starts, lines = _lines(code)
    return lines[bisect.bisect_right(starts, position) - 1] or code.co_firstlineno


@functools.lru_cache(maxsize=4096)
def _lines(code: CodeType) -> tuple[list[int], list[int]]:
    found = [(start, line or 0) for start, _, line in code.co_lines()]
    return [start for start, _ in found], [line for _, line in found]


@functools.lru_cache(maxsize=4096)
def _is_user_file(name: str) -> bool:
    """Whether code is neither JAX's, nor jshard's, nor of Python's own library."""
    own = os.path.dirname(os.path.dirname(__file__)) + os.sep, os.path.dirname(jax.__file__) + os.sep
    library = name.startswith(sysconfig.get_path("stdlib")) and "site-packages" not in name
    return not (name.startswith(own) or library or name.startswith("<"))
