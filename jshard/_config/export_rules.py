"""A plan's argument layouts as rules of other libraries: regular expressions, a tree of specs, logical axis rules."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from jshard._config.config_record import Entry
from jshard._config.export import entry_of, tensor_of
from jshard._config.fewest_rules import fewest_rules
from jshard._config.logical_rules import rules_of_entries
from jshard._config.path_patterns import expand, specificity
from jshard._config.tensors import TensorName
from jshard._core.errors import ShardError
from jshard._core.messages import suggest
from jshard._plan.record import PlanRecord
from jshard._spec.parameter_plan import name_parts


_SpecTree = dict[str, "_SpecTree | Entry"]
FORMS = ("regexes", "specs", "logical")
_IMPORT = "from jax.sharding import PartitionSpec as P\n\n"


def rules_text(plan: PlanRecord, form: str, names: Mapping[str, Sequence[str | None]] | None = None) -> str:
    """The text of `Plan.to_rules`."""
    tensors = [tensor_of(r) for r in plan.inputs]
    entries = [entry_of(r.layout) for r in plan.inputs]
    if form == "regexes":
        lines = [f"    (r{_quoted(regex)}, {spec_text(e)}),\n" for regex, e in regexes(tensors, entries)]
        return f"{_IMPORT}PARTITION_RULES = (\n{''.join(lines)})\n"
    if form == "specs":
        tree: _SpecTree = {}
        for t, entry in zip(tensors, entries, strict=True):
            node = tree
            *above, last = t.path.split(".")
            for part in above:
                below = node.setdefault(part, {})
                assert isinstance(below, dict), "a path to an array is no beginning of another one"
                node = below
            node[last] = entry
        return f"{_IMPORT}SPECS = {_tree_text(tree, '')}\n"
    if form != "logical":
        raise ShardError(f"form={form!r} is not known", where="Plan.to_rules", fix=suggest(str(form), FORMS))
    if names is None:
        raise ShardError(
            "logical axis rules need the logical axes of the arguments",
            where='Plan.to_rules("logical")',
            fix='names={"params.embed.embedding": ("vocab", "embed"), ...}, by path',
        )
    own = {t.path: e for t, e in zip(tensors, entries, strict=True) if t.shape and any(e)}
    for path, entry in own.items():
        if path in names and len(names[path]) != len(entry):
            raise ShardError(
                f"{path} has {len(entry)} dimensions, and the logical axes {tuple(names[path])!r}",
                where='Plan.to_rules("logical")',
                fix="a name or None for each dimension",
            )
    pairs, missing = rules_of_entries(own, names, {t.path: t.nbytes for t in tensors})
    lines = [f"    ({_quoted(n)}, {_axes_text(axes)}),\n" for n, axes in pairs]
    rest = [f"# not expressible: {p} {spec_text(own[p])}\n" for p in missing]
    return f"LOGICAL_AXIS_RULES = (\n{''.join(lines)})\n{''.join(rest)}"


def regexes(tensors: Sequence[TensorName], entries: Sequence[Entry]) -> list[tuple[str, Entry]]:
    """Regular expressions on paths with `/`, of which the first that `re.search` finds holds; exact for each tensor.

    >>> tensors = [TensorName(f"p.h.{i}.w", (4, 4), "float32", "p") for i in range(2)]
    >>> regexes(tensors, [(("x",), ())] * 2)
    [('(^|/)h/\\\\d+/w$', (('x',), ()))]
    """
    rules = fewest_rules(tensors, entries)
    pairs = [(specificity(n), n, r.entry) for r in rules for n in expand(r.name)]
    pairs.sort(key=lambda p: p[0], reverse=True)
    out = [(_regex(n), e) for _, n, e in pairs]
    wrong: list[tuple[str, Entry]] = []
    for t, entry in zip(tensors, entries, strict=True):
        if t.shape and _first(out, t) != entry:
            wrong.append((f"^{re.escape('/'.join(t.parts))}$", entry))
    return [*wrong, *out]


def _first(rules: Sequence[tuple[str, Entry]], t: TensorName) -> Entry | None:
    path = "/".join(t.parts)
    return next((e for regex, e in rules if re.search(regex, path)), None)


def _regex(name: str) -> str:
    out = ""
    for part in name_parts(name):
        if part == "**":
            continue
        out += ("/" if out else "(^|/)") + (
            r"\d+" if part == "*" else "".join("[^/]*" if c == "*" else re.escape(c) for c in part)
        )
    return out + "$"


def spec_text(entry: Entry) -> str:
    """An entry as the call that makes its `PartitionSpec`.

    >>> spec_text((("data", "fsdp"), (), ("tensor",), ()))
    'P(("data", "fsdp"), None, "tensor")'
    """
    dims = list(entry) if not isinstance(entry, str) else []
    while dims and not dims[-1]:
        dims.pop()
    return f"P({', '.join(_axes_text(d if isinstance(d, tuple) else ()) for d in dims)})"


def _axes_text(axes: tuple[str, ...] | None) -> str:
    if not axes:
        return "None"
    if len(axes) == 1:
        return _quoted(axes[0])
    return f"({', '.join(map(_quoted, axes))})"


def _tree_text(node: _SpecTree | Entry, indent: str) -> str:
    if not isinstance(node, dict):
        return spec_text(node)
    inner = indent + "    "
    rows = [f"{inner}{_quoted(k)}: {_tree_text(v, inner)},\n" for k, v in node.items()]
    return "{\n" + "".join(rows) + indent + "}"


def _quoted(text: str) -> str:
    return json.dumps(text) if "\\" not in text else f'"{text}"'
