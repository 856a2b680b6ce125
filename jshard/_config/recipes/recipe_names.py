"""Names of recipes, sums of them, and the mesh axes that each part cuts over.

>>> parse_recipe("fsdp+megatron")
(Part(name='fsdp', axes=()), Part(name='megatron', axes=()))
>>> axes_of(parse_recipe("fsdp+megatron"), {"data": 2, "model": 4})
Axes(batch=('data',), zero=('data',), tensor=('model',), sequence=(), expert=())
>>> axes_of(parse_recipe("fsdp+expert"), {"x": 2, "y": 4})
Axes(batch=('x', 'y'), zero=('x', 'y'), tensor=(), sequence=(), expert=('y',))
>>> axes_of(parse_recipe("fsdp(x)+megatron(y)"), {"x": 2, "y": 4}).tensor
('y',)
>>> parse_recipe("megatorn")
Traceback (most recent call last):
...
jshard._core.errors.ShardError: there is no recipe 'megatorn'
  where: recipe 'megatorn'
  write instead: 'megatron'
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from jshard._core.errors import ShardError
from jshard._core.messages import suggest


RECIPES: Mapping[str, str] = {
    "data": "the batch cut, weights whole",
    "zero1": "data, with the optimizer's state cut",
    "zero2": "zero1, with the gradients cut",
    "fsdp": "zero2, with the weights cut and gathered where they are read (ZeRO-3)",
    "megatron": "inner features and heads cut: products by columns, then by rows; vocabulary cut",
    "sequence": "the residual stream cut by tokens",
    "ulysses": "tokens cut outside of attention, heads inside",
    "ring": "tokens cut, keys and values passed round",
    "vocab": "tables, the last product and its scores cut by vocabulary",
    "expert": "experts cut",
}
"""The recipes with what each says."""

SUMS = (
    "fsdp+megatron",
    "megatron+sequence",
    "fsdp+megatron+sequence",
    "fsdp+vocab",
    "fsdp+expert",
    "fsdp+ulysses",
    "fsdp+ring",
)
"""Sums that `jshard.recipes` lists beside the single ones."""

_DATA_PARALLEL = frozenset(("data", "zero1", "zero2", "fsdp"))
_TENSOR_NAMES = ("tensor", "model", "tp", "mp")
_SEQUENCE_NAMES = ("sequence", "seq", "context", "sp", "cp")
_EXPERT_NAMES = ("expert", "experts", "ep")
_ZERO_NAMES = ("fsdp", "zero")


@dataclasses.dataclass(frozen=True)
class Part:
    """One recipe of a sum, with the mesh axes written behind it; without any they follow from the mesh."""

    name: str
    axes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Axes:
    """The mesh axes for each role; empty where the recipe does not cut it. `zero`: of state, gradients or weights (ZeRO)."""

    batch: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()
    tensor: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()
    expert: tuple[str, ...] = ()


def parse_recipe(text: str) -> tuple[Part, ...]:
    """The parts of a sum: `fsdp+megatron`, or with axes `fsdp(x)+megatron(y, z)`."""
    parts = []
    for term in re.findall(r"[^+(]+(?:\([^)]*\))?|[^+]+", text.replace(" ", "")):
        found = re.fullmatch(r"([A-Za-z_0-9]+)(?:\(([\w,\-]*)\))?", term)
        name = found[1] if found else term
        if found is None or name not in RECIPES:
            raise ShardError(
                f"there is no recipe {name!r}", where=f"recipe {text!r}", fix=suggest(name, tuple(RECIPES))
            )
        parts.append(Part(name, tuple(filter(None, (found[2] or "").split(",")))))
    names = [p.name for p in parts]
    if not parts or len(set(names)) < len(names):
        raise ShardError(
            f"a recipe names {'nothing' if not parts else 'a part twice'}",
            where=f"recipe {text!r}",
            fix="a sum of " + ", ".join(RECIPES),
        )
    stages = [n for n in names if n in _DATA_PARALLEL and n != "data"]  # of ZeRO
    if len(stages) > 1:
        raise ShardError(
            f"{stages[0]} and {stages[1]} say two things of the optimizer's state",
            where=f"recipe {text!r}",
            fix="one of them",
        )
    if {"ulysses", "ring"} <= set(names):
        raise ShardError(
            "ulysses cuts attention by heads, ring by positions", where=f"recipe {text!r}", fix="one of them"
        )
    return tuple(parts)


def _two_axes(devices: int) -> str:
    """What to write for a mesh of two axes on so many devices."""
    rows = next((n for n in (2, *range(3, devices, 2)) if devices % n == 0 and devices > n), None)
    if rows is None:
        return f"a mesh of two axes, for which {devices} is no product; or one of the parts"
    return f'config={{"mesh": {{"data": {rows}, "model": {devices // rows}}}}} in place of the mesh'


def _with_axes(parts: Iterable[str], names: Sequence[str]) -> str:
    """The sum with its batch on the first axis and the other parts on the last."""
    axis = {name: names[0] if name in _DATA_PARALLEL else names[-1] for name in parts}
    return "+".join(f"{name}({axis[name]})" for name in axis)


def axes_of(parts: Sequence[Part], sizes: Mapping[str, int]) -> Axes:
    """The axes of each role on a mesh with these sizes.

    An axis that is named for a role has it (`tensor` or `model`, `sequence`, `expert`, `fsdp`); else tensors, sequences
    and experts are cut over the last axis. The batch is cut over all axes but those of tensors and sequences.
    """
    by_name = {p.name: p for p in parts}
    for p in parts:
        for axis in p.axes:
            if axis not in sizes:
                raise ShardError(
                    f"the mesh has no axis {axis!r}",
                    where=f"recipe {p.name}({axis})",
                    fix=suggest(axis, tuple(sizes)),
                )
    names = tuple(sizes)

    def axes(recipe: str, known: Sequence[str], otherwise: tuple[str, ...]) -> tuple[str, ...]:
        if recipe not in by_name:
            return ()
        return by_name[recipe].axes or tuple(a for a in names if a in known)[:1] or otherwise

    tensor = axes("megatron", _TENSOR_NAMES, names[-1:])
    if "megatron" not in by_name:
        tensor = axes("vocab", _TENSOR_NAMES, names[-1:])
    elif "vocab" in by_name and by_name["vocab"].axes not in ((), tensor):
        raise ShardError(
            "megatron cuts the vocabulary over its own axes",
            where="recipe vocab",
            fix="megatron without vocab",
        )
    sequence = ()
    for recipe in ("sequence", "ulysses", "ring"):
        sequence = sequence or axes(recipe, _SEQUENCE_NAMES, tensor or names[-1:])
    expert = axes("expert", _EXPERT_NAMES, names[-1:])
    computing = {*sequence, *(tensor if "megatron" in by_name else ())}
    rest = tuple(a for a in names if a not in computing)
    said = tuple(dict.fromkeys(a for p in parts if p.name in _DATA_PARALLEL for a in p.axes))
    has_zero = bool(_DATA_PARALLEL & set(by_name) - {"data"})
    if (_DATA_PARALLEL & set(by_name)) and not (said or rest):
        recipe = "+".join(by_name)
        if len(names) > 1:
            raise ShardError(
                f"{recipe} leaves no axis of the mesh for the batch: {', '.join(names)} all cut tensors or tokens",
                where=f"recipe {recipe}",
                fix=f"fewer axes behind the other parts, as in {_with_axes(by_name, names)}",
            )
        raise ShardError(
            f"{recipe} needs a mesh of two axes, this one has {', '.join(names)}",
            where=f"recipe {recipe}",
            fix=_two_axes(math.prod(sizes.values())),
        )
    batch = by_name["data"].axes if "data" in by_name and by_name["data"].axes else rest
    batch = tuple(a for a in names if a in {*batch, *said})
    zero = said or tuple(a for a in rest if a in _ZERO_NAMES) or rest if has_zero else ()
    return Axes(batch, zero, tensor, sequence, expert)
