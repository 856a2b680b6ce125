"""`config={"pipeline": ...}`: over which mesh axis a program's layers are dealt to stages, in how many microbatches.

>>> check_pipeline({"axis": "stage", "microbatches": 16, "rounds": 2})
PipelineOption(axis='stage', microbatches=16, rounds=2, uneven=False)
>>> check_pipeline({"axis": "stage", "microbatch": 16})
Traceback (most recent call last):
...
jshard._core.errors.ShardError: 'microbatch' is no key of a pipeline
  where: pipeline
  write instead: 'microbatches'
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from jshard._core.errors import ShardError
from jshard._core.messages import describe_value, suggest


EXAMPLE = 'config={"pipeline": {"axis": "stage", "microbatches": 16}}'

_KEYS = ("axis", "microbatches", "rounds", "uneven")


@dataclasses.dataclass(frozen=True)
class PipelineOption:
    """The checked option: the axis of the stages, pieces of the batch, rounds; whether layers need not divide."""

    axis: str
    microbatches: int
    rounds: int = 1
    uneven: bool = False


def check_pipeline(value: object) -> PipelineOption | str | None:
    """None, "auto", or a map with `axis`, `microbatches` and perhaps `rounds` and `uneven`; raises `ShardError`."""
    if value is None or isinstance(value, PipelineOption) or isinstance(value, str) and value == "auto":
        return value
    if not isinstance(value, Mapping):
        fix = f'{EXAMPLE}, or "auto" to compare pipelines with none'
        raise ShardError(f"pipeline is {describe_value(value)}", where="pipeline", fix=fix)
    for key in value:
        if key not in _KEYS:
            raise ShardError(
                f"{key!r} is no key of a pipeline", where="pipeline", fix=suggest(str(key), _KEYS)
            )
    for key in _KEYS[:2]:
        if key not in value:
            raise ShardError(f"pipeline has no {key!r}", where="pipeline", fix=EXAMPLE)
    if not isinstance(value["axis"], str):
        what = f"the axis of the pipeline is {describe_value(value['axis'])}"
        raise ShardError(what, where="pipeline", fix=f"the name of one axis of the mesh: {EXAMPLE}")
    if not isinstance(value.get("uneven", False), bool | np.bool_):
        what = f"uneven is {describe_value(value['uneven'])}"
        raise ShardError(what, where="pipeline", fix='"uneven": True or "uneven": False')
    return PipelineOption(
        value["axis"],
        _count(value, "microbatches", 2),
        _count(value, "rounds", 1),
        bool(value.get("uneven", False)),
    )


def _count(value: Mapping[object, object], key: str, least: int) -> int:
    n = value.get(key, least)
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < least:
        described = n if isinstance(n, int) and not isinstance(n, bool) else describe_value(n)
        raise ShardError(
            f"{key} of the pipeline is {described}",
            where="pipeline",
            fix=f"a whole number of at least {least}",
        )
    return int(n)
