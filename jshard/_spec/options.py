"""The arguments of `shard` other than strategies and mesh, checked.

>>> parse_bytes("14GiB"), parse_bytes("1.5e9"), parse_bytes(1024)
(15032385536, 1500000000, 1024)
>>> check_options(level=2, memory_budget="500MB").memory_budget
500000000
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jshard._core.errors import MeshError, ShardError
from jshard._core.hardware import Chip
from jshard._core.messages import describe_value, suggest, type_with_article
from jshard._spec.mesh_checks import check_device
from jshard._spec.pipeline_option import PipelineOption, check_pipeline


class DefaultInt(int):
    """An int that is the default of an argument: the same number, given by a user, is another object."""


class DefaultFloat(float):
    """A float that is the default of an argument."""


class DefaultStr(str):
    """A string that is the default of an argument."""


HBM_FRACTION = 0.9
"""Part of a chip's memory that a plan may use unless the user sets `memory_budget`: the rest is left to the runtime,
to fragmentation and to buffers that XLA adds."""

DEFAULT_LEVEL = DefaultInt(0)
DEFAULT_SEARCH = DefaultStr("optimal")
DEFAULT_REPLICATION_PRICE = DefaultFloat(1000.0)

LEVELS = {0: "compute-to-communication ratio", 1: "memory", 2: "speed"}
LEVEL_WORDS = {0: ("communication", "ratio"), 1: ("memory",), 2: ("speed", "time")}
SEARCHES = ("optimal", "propagation")
REMATS = ("auto", "policy")

UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
"""Bytes per unit: SI prefixes are powers of 1000, IEC prefixes of 1024 (ISO/IEC 80000-13)."""


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """The checked arguments of `shard` that configure planning; `memory_budget` in bytes per device.

    No arguments of `shard`, but for trials of remedies: `search_in_budget`, False to plan for least time only, also
    where that plan exceeds the budget; `gap`, relative, at which that search ends; `estimate`, as in `PlanRequest`;
    `traced_is_refused`: of `remat=`, the call that computes nothing again was refused.
    """

    level: int = 0
    device: str | None = None
    memory_budget: int | None = None
    search: str = "optimal"
    strict: bool = False
    hardware: Chip | str | None = None
    replication_price: float = 1000.0
    search_seconds: float | None = None
    remat: str | None = None
    microbatches: int | str | None = None
    search_in_budget: bool = True
    traced_is_refused: bool = False
    gap: float = 0.0
    estimate: bool = False
    memory_slack: float = 0.0
    local_batch: tuple[str, ...] = ()
    check_host_arrays: bool = True
    process_seconds: float | None = None
    pad: bool | tuple[str, ...] | None = None
    pipeline: PipelineOption | str | None = None
    overlap: bool | Literal["search"] = True

    @property
    def effort_share(self) -> float:
        """Of the effort that is left, for the next plan: half where numbers of pieces, or pipelines, are compared.

        >>> PlanOptions(pipeline="auto").effort_share, PlanOptions(pipeline=PipelineOption("stage", 4)).effort_share
        (0.5, 1.0)
        """
        return 0.5 if "auto" in (self.microbatches, self.pipeline) else 1.0


_CONFIG_ONLY = {
    "replication_price": "0",
    "search_seconds": "5",
    "prefer": '"memory:1%"',
    "local_batch": '["batch"]',
    "check_host_arrays": "False",
    "process_seconds": "60",
    "pad": "True",
    "pipeline": '{"axis": "stage", "microbatches": 16}',
    "overlap": "False",
}
"""Options that only a configuration holds, each with an example of a value."""

CONFIG_ONLY_ADVICE = {
    name: f'config={{"{name}": {value}}}: an option of the configuration'
    for name, value in _CONFIG_ONLY.items()
}
"""What to write in place of a keyword of `shard` that only a configuration holds."""

KEYWORD_ADVICE = {
    **CONFIG_ONLY_ADVICE,
    "recipe": 'config="fsdp+megatron", or config={"recipe": "fsdp+megatron"}',
    **{f"in_{word}": "in_strategy=..., which takes PartitionSpecs too" for word in ("shardings", "specs")},
    **{f"out_{word}": "out_strategy=..., which takes PartitionSpecs too" for word in ("shardings", "specs")},
}
"""The same for these, a recipe, and the keywords of `jax.jit` and `jax.shard_map`."""


def with_rare_options(options: PlanOptions, rare: Mapping[str, object]) -> PlanOptions:
    """The options with those of `CONFIG_ONLY_ADVICE`, checked.

    >>> with_rare_options(PlanOptions(), {"prefer": "memory:1%"}).memory_slack
    0.01
    """
    return dataclasses.replace(
        options,
        replication_price=check_replication_price(rare.get("replication_price", DEFAULT_REPLICATION_PRICE)),
        search_seconds=check_search_seconds(rare.get("search_seconds")),
        memory_slack=check_prefer(rare.get("prefer"), options.level),
        local_batch=_check_names(rare.get("local_batch"), "local_batch"),
        check_host_arrays=check_flag(rare.get("check_host_arrays", True), "check_host_arrays"),
        process_seconds=check_process_seconds(rare.get("process_seconds")),
        pad=check_pad(rare.get("pad")),
        pipeline=check_pipeline(rare.get("pipeline")),
        overlap=check_overlap(rare.get("overlap", True)),
    )


@dataclasses.dataclass(frozen=True)
class CallOptions:
    """The checked static and donated arguments, as in `jax.jit`."""

    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()


def check_options(
    *,
    level: object = 0,
    device: str | None = None,
    memory_budget: object = None,
    search: object = "optimal",
    strict: object = False,
    hardware: object = None,
    replication_price: object = 1000.0,
    search_seconds: object = None,
    remat: object = None,
    microbatches: object = None,
    prefer: object = None,
    pad: object = None,
    pipeline: object = None,
    local_batch: object = None,
    check_host_arrays: object = True,
    process_seconds: object = None,
    overlap: object = True,
) -> PlanOptions:
    """The planning options; raises `ShardError` for the first wrong argument."""
    check_device(device)
    if not isinstance(strict, bool | np.bool_ | None):
        raise ShardError(
            f"strict is {describe_value(strict)}", where="strict", fix="strict=True or strict=False"
        )
    return PlanOptions(
        check_level(level),
        device,
        parse_bytes(memory_budget),
        check_search(search),
        bool(strict),
        check_hardware(hardware),
        check_replication_price(replication_price),
        check_search_seconds(search_seconds),
        check_remat(remat),
        check_microbatches(microbatches),
        memory_slack=check_prefer(prefer, level),
        local_batch=_check_names(local_batch, "local_batch"),
        check_host_arrays=check_flag(check_host_arrays, "check_host_arrays"),
        process_seconds=check_process_seconds(process_seconds),
        pad=check_pad(pad),
        pipeline=check_pipeline(pipeline),
        overlap=check_overlap(overlap),
    )


def check_flag(value: object, what: str) -> bool:
    """True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ShardError(f"{what} is {describe_value(value)}", where=what, fix=f"{what}: true or false")
    return bool(value)


def check_overlap(value: object) -> bool | Literal["search"]:
    """True, False, or "search"."""
    if value == "search":
        return "search"
    if not isinstance(value, bool | np.bool_):
        raise ShardError(
            f"overlap is {describe_value(value)}",
            where="overlap",
            fix='overlap: true, false, or "search" for a second search that counts what products do not hide',
        )
    return bool(value)


def check_process_seconds(seconds: object) -> float | None:
    """None, or a finite number above 0."""
    if seconds is None:
        return None
    if isinstance(seconds, int | float | np.integer | np.floating) and not isinstance(seconds, bool):
        if 0 < seconds < math.inf:
            return float(seconds)
    raise ShardError(
        f"process_seconds is {describe_value(seconds)}",
        where="process_seconds",
        fix='how long a process waits for the same call of the others: config={"process_seconds": 300}',
    )


def check_replication_price(price: object) -> float:
    """A finite number, at least 0."""
    if isinstance(price, int | float | np.integer | np.floating) and not isinstance(price, bool):
        if 0 <= price < math.inf:
            return float(price)
    raise ShardError(
        f"replication_price is {describe_value(price)}",
        where="replication_price",
        fix="what a second of repeated product work counts: 1000, or 0 for no price beside its time",
    )


def check_search_seconds(seconds: object) -> float | None:
    """None, or a finite number above 0.

    >>> check_search_seconds(0)
    Traceback (most recent call last):
    ...
    jshard._core.errors.ShardError: search_seconds is 0, which leaves no search
      where: search_seconds
      write instead: seconds of search above 0: config={"search_seconds": 5}; without it, until the proof or 60 to 240 s
    """
    if seconds is None:
        return None
    fix = (
        'seconds of search above 0: config={"search_seconds": 5}; without it, until the proof or 60 to 240 s'
    )
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, int | float | np.integer | np.floating)
        or not math.isfinite(seconds)
    ):
        raise ShardError(f"search_seconds is {describe_value(seconds)}", where="search_seconds", fix=fix)
    if seconds <= 0:
        raise ShardError(
            f"search_seconds is {seconds}, which leaves no search", where="search_seconds", fix=fix
        )
    return float(seconds)


def check_prefer(prefer: object, level: object = 0) -> float:
    """The share of the least cost that may be spent on less memory; 0 for None.

    >>> check_prefer("memory:1%"), check_prefer("memory: 2.5%"), check_prefer(None)
    (0.01, 0.025, 0.0)
    """
    if prefer is None:
        return 0.0
    fix = 'config={"prefer": "memory:1%"}: the least peak memory for at most 1% more of what the level minimises'
    match = re.fullmatch(r"memory:\s*(\d+(?:\.\d+)?)\s*%", prefer) if isinstance(prefer, str) else None
    if match is None:
        raise ShardError(f"prefer is {describe_value(prefer)}", where="prefer", fix=fix)
    if level == 1:
        raise ShardError(
            "level=1 minimises memory already", where="prefer", fix="no prefer, or level=0 or level=2"
        )
    share = float(match[1]) / 100
    if not 0 < share <= 1:
        raise ShardError(f"prefer={prefer!r} is not a share above 0% and up to 100%", where="prefer", fix=fix)
    return share


def check_pad(pad: object) -> bool | tuple[str, ...] | None:
    """None, whether dimensions may be padded, or the paths of arguments that are padded at rest.

    >>> check_pad(["params.**"])
    ('params.**',)

    >>> check_pad("no")
    Traceback (most recent call last):
    ...
    jshard._core.errors.ShardError: pad is a str, 'no'
      where: pad
      write instead: config={"pad": False} to pad nothing, True to pad small tensors too, paths to pad arguments at rest
    """
    if pad is None or isinstance(pad, bool | np.bool_):
        return None if pad is None else bool(pad)
    if isinstance(pad, tuple | list) and pad and all(isinstance(p, str) and p for p in pad):
        return tuple(pad)
    raise ShardError(
        f"pad is {describe_value(pad)}",
        where="pad",
        fix='config={"pad": False} to pad nothing, True to pad small tensors too, paths to pad arguments at rest',
    )


def check_level(level: object) -> int:
    """0, 1 or 2.

    >>> check_level(3)
    Traceback (most recent call last):
    ...
    jshard._core.errors.ShardError: level=3 is not a level
      where: level
      write instead: 0 (compute-to-communication ratio), 1 (memory) or 2 (speed)
    """
    fix = "0 (compute-to-communication ratio), 1 (memory) or 2 (speed)"
    named = [n for n, words in LEVEL_WORDS.items() if isinstance(level, str) and level.lower() in words]
    if named:
        raise ShardError(
            f"level is {describe_value(level)}", where="level", fix=f"level={named[0]} ({LEVELS[named[0]]})"
        )
    if isinstance(level, bool | np.bool_) or not isinstance(level, int | np.integer):
        raise ShardError(f"level is {describe_value(level)}", where="level", fix=fix)
    if int(level) not in LEVELS:
        raise ShardError(f"level={level} is not a level", where="level", fix=fix)
    return int(level)


def check_search(search: object) -> str:
    """ "optimal" or "propagation"."""
    if not isinstance(search, str):
        raise ShardError(
            f"search is {describe_value(search)}", where="search", fix="'optimal' or 'propagation'"
        )
    if search not in SEARCHES:
        raise ShardError(f"search={search!r} is not known", where="search", fix=suggest(search, SEARCHES))
    return str(search)


def check_remat(remat: object) -> str | None:
    """None, "auto" or "policy"."""
    if remat is None:
        return None
    if not isinstance(remat, str):
        raise ShardError(f"remat is {describe_value(remat)}", where="remat", fix="None, 'auto' or 'policy'")
    if remat not in REMATS:
        raise ShardError(f"remat={remat!r} is not known", where="remat", fix=suggest(remat, REMATS))
    return remat


def check_microbatches(microbatches: object) -> int | str | None:
    """None, "auto" or a number of pieces, at least 1.

    >>> check_microbatches(0)
    Traceback (most recent call last):
    ...
    jshard._core.errors.ShardError: microbatches is 0, which leaves no batch
      where: microbatches
      write instead: microbatches=8, or "auto" for the least number that fits the memory budget
    """
    if microbatches is None or isinstance(microbatches, str) and microbatches == "auto":
        return microbatches
    fix = 'microbatches=8, or "auto" for the least number that fits the memory budget'
    if isinstance(microbatches, bool) or not isinstance(microbatches, int | np.integer):
        raise ShardError(f"microbatches is {describe_value(microbatches)}", where="microbatches", fix=fix)
    if microbatches < 1:
        raise ShardError(
            f"microbatches is {microbatches}, which leaves no batch", where="microbatches", fix=fix
        )
    return int(microbatches)


def check_hardware(hardware: Any) -> Chip | str | None:
    """None, the name of a chip, or a chip; unknown names are an error of the table (`_core/hardware.py`)."""
    if hardware is None or isinstance(hardware, str) and hardware.strip():
        return hardware
    if isinstance(hardware, str | bytes | bool | int | float | list | tuple | dict | set) or callable(
        hardware
    ):
        raise MeshError(
            f"hardware is {describe_value(hardware)}",
            where="hardware",
            fix='the name of a chip such as "tpu-v5e", or jshard.hardware.get(...)',
        )
    return hardware


def parse_bytes(amount: object, what: str = "memory_budget") -> int | None:
    """Bytes from an int, or from text such as "14GiB", "500 MB", "1.5e9"; None stays None."""
    fix = f'{what}=15_000_000_000, or text with a unit such as "14GiB" or "500MB"'
    if amount is None:
        return None
    if isinstance(amount, bool | np.bool_) or not isinstance(
        amount, int | float | np.integer | np.floating | str
    ):
        raise ShardError(f"{what} is {describe_value(amount)}", where=what, fix=fix)
    if isinstance(amount, str):
        match = re.fullmatch(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*", amount)
        unit = match[2].upper() if match else ""
        if match is None or unit not in UNITS and unit + "B" not in UNITS:
            raise ShardError(f"{what}={amount!r} is not an amount of memory", where=what, fix=fix)
        value = float(match[1]) * (UNITS[unit] if unit in UNITS else UNITS[unit + "B"])
    else:
        value = amount
    if not math.isfinite(value):
        raise ShardError(
            f"{what}={amount!r} is not finite", where=what, fix=f"{what}=None for no limit of your own"
        )
    if value < 1:
        raise ShardError(f"{what}={amount!r} is less than one byte", where=what, fix=fix)
    return int(value)


def check_call_options(
    *,
    static_argnums: object = None,
    static_argnames: object = None,
    donate_argnums: object = None,
    donate_argnames: object = None,
) -> CallOptions:
    """The call options, each an int or a sequence of ints, a name or a sequence of names.

    >>> check_call_options(static_argnums=1, donate_argnames=["state"])
    CallOptions(static_argnums=(1,), static_argnames=(), donate_argnums=(), donate_argnames=('state',))
    """
    options = CallOptions(
        _check_positions(static_argnums, "static_argnums"), _check_names(static_argnames, "static_argnames"),
        _check_positions(donate_argnums, "donate_argnums"), _check_names(donate_argnames, "donate_argnames"),
    )  # fmt: skip
    for statics, donated, kind in (
        (options.static_argnums, options.donate_argnums, "argnums"),
        (options.static_argnames, options.donate_argnames, "argnames"),
    ):
        both = [s for s in statics if s in donated]
        if both:
            raise ShardError(
                f"argument {both[0]!r} is both static and donated",
                where=f"static_{kind} and donate_{kind}",
                fix="one of the two: only arrays can be donated",
            )
    return options


def _check_positions(value: object, what: str) -> tuple[int, ...]:
    values = (
        ()
        if value is None
        else (value,)
        if not isinstance(value, Sequence) or isinstance(value, str)
        else value
    )
    out: list[int] = []
    for v in values:
        if isinstance(v, bool | np.bool_) or not isinstance(v, int | np.integer):
            raise ShardError(
                f"{what} holds {v!r}, {type_with_article(v)}",
                where=what,
                fix=f"positions as ints: {what}=(0, 1)",
            )
        out.append(int(v))
    return tuple(out)


def _check_names(value: object, what: str) -> tuple[str, ...]:
    listed = isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes)
    values: Iterable[object] = () if value is None else (value,)
    if isinstance(value, Iterable) and listed:
        values = value
    out: list[str] = []
    for v in values:
        if not isinstance(v, str):
            raise ShardError(
                f"{what} holds {v!r}, {type_with_article(v)}",
                where=what,
                fix=f'names as strings: {what}=("cfg",)',
            )
        out.append(v)
    return tuple(out)
