"""Outputs of products and gradients under the names by which rules find them, and rules made from a recipe's pins."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jshard._config.config_record import ConfigRecord, Rule
from jshard._config.fewest_rules import fewest_result_rules, fewest_rules
from jshard._config.recipes.attention_operands import attention_operands
from jshard._config.recipes.gradients import gradients_of
from jshard._config.recipes.recipe_pins import RecipePins, ValueEntry
from jshard._config.recipes.structure import Structure
from jshard._config.tensors import TensorName


Place = tuple[int, str, int]


@dataclasses.dataclass(frozen=True, eq=False)
class NamedValues:
    """The values of a program that the sections `products` and `gradients` are about.

    `names`: by section; of several products with one weight, such as look-ups in a table that an encoder and a decoder
    share, each is an element: `embed:lookup[1]`. `places`: by section, path and element, (operator, "result" or "operand",
    number); others that have a path in common (of both passes) are one value.
    """

    names: Mapping[str, Sequence[TensorName]]
    places: Mapping[tuple[str, str, int], Sequence[Place]]
    path_of: Mapping[str, str]


def named_values(s: Structure) -> NamedValues:
    """The named products and gradients of a program; a weight is named without its argument where that is unambiguous."""
    short = _short_names(s)
    found = [("products", p.name, (p.place[0], "result", p.place[1])) for p in s.products]
    found += [("products", a.name, (a.op, "operand", a.operand)) for a in attention_operands(s)]
    found += [("gradients", s.name(n), (i, "result", k)) for n, (i, k) in sorted(gradients_of(s).items())]
    names: dict[str, list[TensorName]] = {"products": [], "gradients": []}
    places: dict[tuple[str, str, int], list[Place]] = {}
    of_path: dict[tuple[str, str], list[Place]] = {}
    for section, name, place in found:
        own = of_path.setdefault((section, _renamed(name, short)), [])
        if place not in own:
            own.append(place)
    for (section, path), own in of_path.items():
        several = section == "products" and all(side == "result" for _, side, _ in own) and len(own) > 1
        for k, group in enumerate([[p] for p in own] if several else [own]):
            t = s.program.tensors[_tensor(s, group[0])]
            count = len(own) if several else 0
            names[section].append(
                TensorName(path, t.shape, t.dtype, kind=section[:-1], element=k, elements=count)
            )
            places[section, path, k] = group
    return NamedValues({k: tuple(v) for k, v in names.items()}, places, short)


def _tensor(s: Structure, place: Place) -> int:
    op, side, number = place
    tensor = getattr(s.program.operators[op], f"{side}s")[number]
    return tensor


def _argument(s: Structure, number: int) -> TensorName:
    t = s.program.tensors[s.argument(number)]
    return TensorName.of_argument(s.name(number), t.shape, t.dtype)


def _short_names(s: Structure) -> dict[str, str]:
    own: dict[str, list[str]] = {}
    for n in range(len(s.program.inputs)):
        name = _argument(s, n)
        own.setdefault(".".join(name.own) or name.path, []).append(name.path)
    return {paths[0]: short for short, paths in own.items() if len(paths) == 1}


def _renamed(name: str, short: Mapping[str, str]) -> str:
    def one(part: str) -> str:
        path, colon, rest = part.partition(":")
        return short.get(path, path) + colon + rest

    return " @ ".join(map(one, name.split(" @ ")))


def record_of(pins: RecipePins, s: Structure) -> ConfigRecord:
    """A recipe's pins as rules: the fewest that say the same of every tensor."""
    short = _short_names(s)
    inside = {n: e for n, e in pins.arguments.items() if _argument(s, n).inner and n not in s.data}
    arrays = {n: e for n, e in pins.arguments.items() if n not in inside}
    unnamed = [_argument(s, n) for n in range(len(s.program.inputs)) if n not in pins.arguments]
    left_alone = [t for t in unnamed if t.inner]

    def rules(section: str, values: Sequence[ValueEntry]) -> tuple[Rule, ...]:
        by_path: dict[str, dict[tuple[int, int], ValueEntry]] = {}
        for v in values:
            by_path.setdefault(_renamed(v.name, short), {}).setdefault(v.place, v)
        alike: dict[str, ValueEntry] = {}
        apart: list[Rule] = []
        for path, own in by_path.items():
            if len({v.entry for v in own.values()}) == 1 or any(v.side == "operand" for v in own.values()):
                alike[path] = next(iter(own.values()))
            else:
                apart += [Rule(path, v.entry, element=k) for k, v in enumerate(own.values())]
        kind = section[:-1]
        entries = {TensorName(p, v.shape, "float32", kind=kind): v.entry for p, v in alike.items()}
        return (*fewest_result_rules(entries), *apart)

    said = {v.name for v in pins.products}
    left_open = {
        a.name: ValueEntry(
            a.name, (a.op, a.operand), s.program.tensors[a.tensor].shape, (None,) * 4, "operand"
        )
        for a in attention_operands(s)
        if a.name not in said
    }
    return ConfigRecord(
        parameters=fewest_rules([_argument(s, n) for n in inside], list(inside.values()), left_alone),
        inputs=tuple(Rule(s.name(n), e) for n, e in arrays.items()),
        source=f"recipe {pins.recipe!r}",
        notes=pins.notes,
        products=rules("products", (*pins.products, *left_open.values())),
        gradients=rules("gradients", pins.gradients),
    )
