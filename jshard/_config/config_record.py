"""The data of a configuration: rules from names of tensors to entries, a mesh, and options of `shard`.

An entry has one item per dimension: a tuple of mesh axes (empty: not cut), a number of pieces, or None where the search
decides. `WHOLE` stands for a tensor that is not cut at all, whatever its rank, and `DERIVED` for one left to the search.

>>> Rule("lm_head.kernel", ((), ("tensor",))).text
'[null, tensor]'
>>> Rule("x", (("data", "fsdp"), None)).text, Rule("x", DERIVED).text, Rule("x", (4, 1)).text
("[[data, fsdp], '?']", "'?'", '[4, 1]')
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping


WHOLE = "whole"
DERIVED = "?"
WORDS = ("full_batch", "data_parallel")
"""Entries of `outputs` that are words, as in `out_strategy`."""

Dimension = tuple[str, ...] | int | None
Entry = tuple[Dimension, ...] | str

RULE_SECTIONS = (
    "parameters",
    "activations",
    "inputs",
    "outputs",
    "torch",
    "products",
    "gradients",
    "regexes",
)


@dataclasses.dataclass(frozen=True)
class Rule:
    """One line of a configuration.

    - `name`: a path with globs, or a regular expression in the section `regexes`.
    - `element`: of `name[i]`, the element of a module's output; None without it.
    - `where`: file and line, for messages; not compared.
    """

    name: str
    entry: Entry
    where: str = dataclasses.field(default="", compare=False)
    element: int | None = None

    @property
    def key(self) -> str:
        """The name as written: `layers.*[0]`."""
        return self.name if self.element is None else f"{self.name}[{self.element}]"

    @property
    def text(self) -> str:
        """The entry in YAML's flow style."""
        return entry_text(self.entry)


def entry_text(entry: Entry) -> str:
    """An entry in YAML's flow style."""
    if isinstance(entry, str):
        return {"?": "'?'", WHOLE: "null"}.get(entry, entry)
    counted = any(isinstance(d, int) for d in entry)
    return f"[{', '.join(_dimension_text(d, counted) for d in entry)}]"


def _dimension_text(dimension: Dimension, counted: bool) -> str:
    if dimension is None:
        return "'?'"
    if isinstance(dimension, int):
        return str(dimension)
    if len(dimension) == 1:
        return dimension[0]
    return f"[{', '.join(dimension)}]" if dimension else "1" if counted else "null"


@dataclasses.dataclass(frozen=True)
class MeshSection:
    """The section `mesh`: sizes by axis (-1: what is left), over the network by `dcn`, or a machine by name.

    >>> MeshSection((("data", 2), ("fsdp", -1))).text
    '{data: 2, fsdp: -1}'
    """

    axes: tuple[tuple[str, int], ...] = ()
    dcn: tuple[tuple[str, int], ...] = ()
    machine: str = ""
    slices: int = 1
    where: str = dataclasses.field(default="", compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The axes, major first; empty where the mesh is chosen by the search."""
        return tuple(dict.fromkeys(n for n, _ in (*self.axes, *self.dcn)))

    @property
    def sizes(self) -> dict[str, int]:
        """Known sizes by axis."""
        out = dict.fromkeys(self.names, 1)
        for name, size in (*self.axes, *self.dcn):
            out[name] = -1 if size < 0 or out[name] < 0 else out[name] * size
        return {n: s for n, s in out.items() if s > 0}

    @property
    def text(self) -> str:
        """The section in YAML's flow style."""
        axes, dcn = ("{" + ", ".join(f"{n}: {s}" for n, s in a) + "}" for a in (self.axes, self.dcn))
        if self.machine and not self.axes:
            return f'"{self.machine}"'
        if self.machine:
            slices = f", slices: {self.slices}" if self.slices > 1 else ""
            return f'{{machine: "{self.machine}", axes: {axes}{slices}}}'
        return f"{{ici: {axes}, dcn: {dcn}}}" if self.dcn else axes


@dataclasses.dataclass(frozen=True)
class ConfigRecord:
    """A configuration as data; equal to another if it says the same, wherever it was written.

    - `parameters`, `inputs`, `outputs`: rules for arguments and results by path. `activations`: for outputs of modules,
        named scopes and `checkpoint_name`s.
    - `torch`: rules in torchprime's form, for parameters or outputs of modules, with torch's [out, in] weights.
    - `products`: rules for the complete outputs of products, by the path of the parameter; `gradients`: for its gradient.
    - `recipe`: layouts by name, `fsdp+megatron`, for what no rule says.
    - `regexes`: rules by regular expression on paths with `/`, in order; `regex_match` "first" takes the first that is
        found in the path, "only" refuses two, "full" too, and matches the whole path.
    - `optional`: globs of rules that may match nothing.
    - `unlisted`: what a parameter without a rule is: "derived" by the search, or "replicated". Parameters are the
        tensors of an argument of which some tensor has a rule.
    - `notes`: what reading the rules of another library showed; not part of what the configuration says.
    - `strict`: whether what does not match is an error.
    """

    parameters: tuple[Rule, ...] = ()
    activations: tuple[Rule, ...] = ()
    inputs: tuple[Rule, ...] = ()
    outputs: tuple[Rule, ...] = ()
    torch: tuple[Rule, ...] = ()
    products: tuple[Rule, ...] = ()
    gradients: tuple[Rule, ...] = ()
    regexes: tuple[Rule, ...] = ()
    regex_match: str = "first"
    mesh: MeshSection | None = None
    options: tuple[tuple[str, object], ...] = ()
    optional: tuple[str, ...] = ()
    unlisted: str = "derived"
    recipe: str = ""
    strict: bool = True
    source: str = dataclasses.field(default="config", compare=False)
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @property
    def rules(self) -> tuple[tuple[str, Rule], ...]:
        """All rules as (section, rule), in the order of sections."""
        return tuple((s, r) for s in RULE_SECTIONS for r in getattr(self, s))

    @property
    def says_layouts(self) -> bool:
        """Whether it has rules or a recipe, or says what tensors without a rule are."""
        return bool(self.rules or self.recipe or self.unlisted != "derived")

    def option(self, name: str, default: object = None) -> object:
        """The value of an option of `shard`."""
        return dict(self.options).get(name, default)

    def with_default(self, name: str, value: object) -> ConfigRecord:
        """The configuration with an option of `shard` where it has none."""
        options = tuple(sorted({name: value, **dict(self.options)}.items()))
        return dataclasses.replace(self, options=options)

    def axes_in_rules(self) -> tuple[str, ...]:
        """The mesh axes that rules name, in order of appearance."""
        dims = (d for _, r in self.rules if not isinstance(r.entry, str) for d in r.entry)
        return tuple(dict.fromkeys(a for d in dims if isinstance(d, tuple) for a in d))


ConfigSource = ConfigRecord | Mapping[str, object] | str | os.PathLike[str]
"""What a configuration is read from: one that is read already, a dict, YAML text, or the path of a file."""
