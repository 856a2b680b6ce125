"""From a located value to a configuration: known sections and keys, entries of the right form, files that it extends.

>>> record = parse(locate({"mesh": {"data": 2}, "parameters": {"w": ["data", None]}, "level": 2}, "config"))
>>> record.mesh.text, [(r.name, r.text) for r in record.parameters], record.options
('{data: 2}', [('w', '[data, null]')], (('level', 2),))
>>> parse(locate({"paramters": {"w": ["data"]}}, "config"))
Traceback (most recent call last):
...
jshard._core.errors.ShardError: 'paramters' is no section of a configuration
  where: config
  write instead: 'parameters', 'prefer' or 'static_argnames'
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

from jshard._config.config_record import DERIVED, WHOLE, WORDS, ConfigRecord, Dimension, Entry, Rule
from jshard._config.mesh_section import parse_mesh
from jshard._config.yaml_reader import Located, locate, read_yaml
from jshard._core.errors import ShardError
from jshard._core.messages import describe_value, suggest, type_with_article
from jshard._spec.options import check_call_options, check_options


OPTIONS = (
    "microbatches",
    "device", "level", "hardware", "memory_budget", "search", "static_argnums", "static_argnames", "donate_argnums",
    "donate_argnames", "replication_price", "search_seconds", "remat", "prefer", "local_batch",
    "check_host_arrays", "process_seconds", "pad", "pipeline", "overlap",
)  # fmt: skip
"""The arguments of `shard` that a configuration may hold, beside strategies and the mesh."""

NAMED_SECTIONS = ("parameters", "activations", "inputs", "outputs", "torch", "products", "gradients")
SETTINGS = ("mesh", "recipe", "regexes", "regex_match", "optional", "unlisted", "strict", "extends")
TORCH_MESHES = ("ici_mesh", "dcn_mesh")
KEYS = (*NAMED_SECTIONS, *SETTINGS, *OPTIONS)

ENTRY_HELP = (
    'a list with one axis, list of axes, null (not cut) or "?" (derived) per dimension: [[data, fsdp], null]'
)


def parse(node: Located, source: str = "config", above: tuple[Path, ...] = ()) -> ConfigRecord:
    """The configuration of a document; `above` are the files that extend it. Raises `ShardError` with the place."""
    if node.value is None:
        return ConfigRecord(source=source)
    if isinstance(node.value, str) and re.fullmatch(r"[\w+(), -]+", node.value):
        return ConfigRecord(recipe=node.value, source=source)
    if not isinstance(node.value, Mapping):
        raise ShardError(
            f"a configuration is a map from sections to rules, not {type_with_article(node.value)}",
            where=node.where,
            fix="parameters: {lm_head.kernel: [null, tensor]}",
        )
    sections = dict(node.value)
    base = _bases(sections.pop("extends", None), source, above)
    if is_flat(sections):
        return merge(base, _flat_record(sections, source))
    for key, value in sections.items():
        if key not in KEYS and key not in TORCH_MESHES:
            raise ShardError(
                f"{key!r} is no section of a configuration", where=value.where, fix=suggest(key, KEYS)
            )
    fields: dict[str, object] = {"source": source}
    for section in NAMED_SECTIONS:
        if section in sections:
            fields[section] = parse_rules(section, sections[section])
    if "regexes" in sections:
        fields["regexes"] = _parse_regexes(sections["regexes"])
    mesh = parse_mesh(sections.get("mesh"), sections.get("ici_mesh"), sections.get("dcn_mesh"))
    fields |= {"mesh": mesh} | _settings(sections)
    return merge(base, dataclasses.replace(ConfigRecord(), **fields))


def is_flat(sections: Mapping[str, Located]) -> bool:
    """Whether a document has torchprime's form: names with lists, beside options and meshes; no section."""
    if any(key in sections for key in (*NAMED_SECTIONS, "regexes")):
        return False
    names = [v for k, v in sections.items() if k not in KEYS and k not in TORCH_MESHES]
    return bool(names) and all(v.value is None or isinstance(v.value, list) for v in names)


def _flat_record(sections: Mapping[str, Located], source: str) -> ConfigRecord:
    names = {k: v for k, v in sections.items() if k not in KEYS and k not in TORCH_MESHES}
    mesh = parse_mesh(sections.get("mesh"), sections.get("ici_mesh"), sections.get("dcn_mesh"))
    rules = parse_rules("torch", Located(names, source))
    record = ConfigRecord(torch=rules, mesh=mesh, source=source)
    return dataclasses.replace(record, **_settings(sections))


def parse_rules(section: str, node: Located) -> tuple[Rule, ...]:
    """The rules of a section; nested maps are flattened, `{attn: {q: e}}` is `{attn.q: e}`."""
    if node.value is None:
        return ()
    if not isinstance(node.value, Mapping):
        raise ShardError(
            f"{section} is {type_with_article(node.value)}",
            where=node.where,
            fix=f"a map from names to entries: {section}: {{lm_head.kernel: [null, tensor]}}",
        )
    rules: list[Rule] = []
    for key, value in node.value.items():
        if isinstance(value.value, Mapping):
            inner = parse_rules(section, value)
            rules += [dataclasses.replace(r, name=f"{key}.{r.name}") for r in inner]
        else:
            rules.append(parse_rule(section, key, value))
    return tuple(rules)


_WITH_ELEMENTS = ("torch", "activations", "products")
"""Sections in which `name[0]` is an element of a module's output, or one of several products with one weight."""


def parse_rule(section: str, key: str, value: Located) -> Rule:
    """One rule: `layers.*[0]` is the name `layers.*` with the element 0."""
    if not key.strip() and section not in ("torch", "activations"):
        raise ShardError("a rule has an empty name", where=value.where, fix="the path of a tensor")
    indexed = re.fullmatch(r"(.*)\[(\d+)\]", key) if section in _WITH_ELEMENTS else None
    entry = parse_entry_of(value, words=section == "outputs")
    if indexed:
        return Rule(indexed[1], entry, value.where, int(indexed[2]))
    return Rule(key, entry, value.where)


def parse_entry_of(node: Located, words: bool = False) -> Entry:
    """The entry of one tensor; `words`: whether "full_batch" and "data_parallel" are allowed."""
    value = node.value
    if isinstance(value, PartitionSpec):
        dims = [DERIVED if d is PartitionSpec.UNCONSTRAINED else d for d in value]
        node = locate([list(d) if isinstance(d, tuple) else d for d in dims], node.where)
        value = node.value
    if value is None:
        return WHOLE
    if isinstance(value, str) and (value == DERIVED or words and value in WORDS):
        return value
    if not isinstance(value, list):
        raise ShardError(
            f"an entry is {describe_value(value)}", where=node.where, fix=f"{ENTRY_HELP}; here [{value}]"
            if isinstance(value, str)
            else ENTRY_HELP,
        )  # fmt: skip
    dims = [_parse_dimension(d) for d in value]
    if any(isinstance(d, int) for d in dims):
        if any(d and isinstance(d, tuple) for d in dims):
            raise ShardError(
                "an entry mixes numbers of pieces with mesh axes",
                where=node.where,
                fix="[4, 1] or [data, null]",
            )
        dims = [1 if d == () else d for d in dims]
    axes = [a for d in dims if isinstance(d, tuple) for a in d]
    for axis in axes:
        if axes.count(axis) > 1:
            raise ShardError(
                f"an entry names the axis {axis!r} {axes.count(axis)} times",
                where=node.where,
                fix="each mesh axis at most once in an entry",
            )
    return tuple(dims)


def _parse_dimension(node: Located) -> Dimension:
    value = node.value
    if value is None:
        return ()
    if value == DERIVED:
        return None
    if isinstance(value, str) and value.strip():
        return (value,)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, list):
        axes = tuple(a.value for a in value if isinstance(a.value, str) and a.value.strip())
        if len(axes) == len(value):
            return axes
    shown = [v.value for v in value] if isinstance(value, list) else value
    raise ShardError(f"a dimension is {describe_value(shown)}", where=node.where, fix=ENTRY_HELP)


def _parse_regexes(node: Located) -> tuple[Rule, ...]:
    if not isinstance(node.value, list):
        raise ShardError(
            f"regexes is {type_with_article(node.value)}",
            where=node.where,
            fix='a list, in the order in which they are tried: [["attn/wq/kernel", [fsdp, tensor]]]',
        )
    rules = []
    for item in node.value:
        pair = item.value if isinstance(item.value, list) else []
        if len(pair) != 2 or not isinstance(pair[0].value, str):
            raise ShardError(
                "an item of regexes is not a pair of a regular expression and an entry",
                where=item.where,
                fix='["attn/wq/kernel", [fsdp, tensor]]',
            )
        try:
            re.compile(pair[0].value)
        except re.error as error:
            raise ShardError(
                f"{pair[0].value!r} is no regular expression: {error}",
                where=item.where,
                fix="an expression of Python's re",
            ) from None
        rules.append(Rule(pair[0].value, parse_entry_of(pair[1]), item.where))
    return tuple(rules)


def _settings(sections: Mapping[str, Located]) -> dict[str, object]:
    out: dict[str, object] = {}
    options = [(k, _option(k, v)) for k, v in sections.items() if k in OPTIONS]
    if options:
        out["options"] = tuple(sorted(options, key=lambda option: option[0]))
    if "optional" in sections:
        node = sections["optional"]
        names = [node] if isinstance(node.value, str) else node.value
        if not isinstance(names, list) or not all(isinstance(n.value, str) for n in names):
            raise ShardError(
                f"optional is {type_with_article(node.value)}",
                where=node.where,
                fix='a list of names of rules that may match nothing: ["moe.**"]',
            )
        out["optional"] = tuple(n.value for n in names)
    if "recipe" in sections:
        node = sections["recipe"]
        if not isinstance(node.value, str) or not node.value.strip():
            raise ShardError(
                f"recipe is {describe_value(node.value)}",
                where=node.where,
                fix='the name of a recipe, or a sum: "fsdp+megatron"',
            )
        out["recipe"] = node.value
    for key, choices in (("unlisted", ("derived", "replicated")), ("regex_match", ("first", "only", "full"))):
        if key in sections:
            value = sections[key].value
            if value not in choices:
                raise ShardError(
                    f"{key} is {describe_value(value)}", where=sections[key].where, fix=" or ".join(choices)
                )
            out[key] = value
    if "strict" in sections:
        if not isinstance(sections["strict"].value, bool):
            raise ShardError(
                f"strict is {describe_value(sections['strict'].value)}",
                where=sections["strict"].where,
                fix="true or false",
            )
        out["strict"] = sections["strict"].value
    return out


def _option(name: str, node: Located) -> object:
    """The checked value of an option of `shard`; its errors have the place in the file."""
    value: dict[str, Any] = {name: _plain(node)}
    check = check_call_options if name.startswith(("static", "donate")) else check_options
    try:
        check(**value)
    except ShardError as error:
        raise type(error)(error.what, where=node.where, fix=error.fix) from None
    return value[name]


def _plain(node: Located) -> object:
    if isinstance(node.value, Mapping):
        return {k: _plain(v) for k, v in node.value.items()}
    return tuple(map(_plain, node.value)) if isinstance(node.value, list) else node.value


def _bases(node: Located | None, source: str, above: tuple[Path, ...]) -> ConfigRecord | None:
    """The configuration that `extends` names: one file, or several of which later ones win."""
    if node is None:
        return None
    names = node.value if isinstance(node.value, list) else [node]
    merged: ConfigRecord | None = None
    for name in names:
        if not isinstance(name.value, str):
            raise ShardError(
                f"extends is {describe_value(name.value)}", where=node.where, fix="the path of a file"
            )
        folder = above[-1].parent if above else Path()
        merged = merge(merged, read_file(folder / name.value, above, node.where))
    return merged


def read_file(path: Path, above: tuple[Path, ...] = (), where: str = "") -> ConfigRecord:
    """The configuration of a YAML file; `above` are the files that extend it, `where` names it."""
    resolved = path.resolve()
    if resolved in above:
        ring = " -> ".join(p.name for p in (*above[above.index(resolved) :], resolved))
        raise ShardError(
            f"the file extends itself: {ring}",
            where=where,
            fix="extends: a file that does not extend this one",
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        near = [p.name for p in sorted(path.parent.glob("*.y*ml"))] if path.parent.is_dir() else []
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ShardError(
            f"{path} cannot be read: {reason}",
            where=where or "jshard.Config",
            fix=f"the path of a YAML file{'; there: ' + suggest(path.name, near) if near else ''}",
        ) from None
    return parse(read_yaml(text, str(path)), str(path), (*above, resolved))


def merge(base: ConfigRecord | None, own: ConfigRecord) -> ConfigRecord:
    """`own` on top of `base`: its rules replace those of the same name, its settings win.

    >>> a = parse(locate({"parameters": {"w": ["x"], "b": [None]}, "level": 1}, "a"))
    >>> [(r.name, r.text) for r in merge(a, parse(locate({"parameters": {"w": ["y"]}}, "b"))).parameters]
    [('w', '[y]'), ('b', '[null]')]
    """
    if base is None:
        return own
    default = ConfigRecord()
    fields: dict[str, object] = {}
    for field in dataclasses.fields(ConfigRecord):
        theirs, mine = getattr(base, field.name), getattr(own, field.name)
        if field.name in (*NAMED_SECTIONS,):
            fields[field.name] = tuple({r.key: r for r in (*theirs, *mine)}.values())
        elif field.name == "options":
            fields["options"] = tuple(sorted({**dict(theirs), **dict(mine)}.items()))
        elif field.name in ("optional", "regexes"):
            fields[field.name] = tuple(dict.fromkeys((*mine, *theirs)))
        else:
            fields[field.name] = theirs if mine == getattr(default, field.name) else mine
    return dataclasses.replace(own, **{**fields, "source": own.source})


def parse_value(value: object, source: str, read: Callable[[str, str], Located] = read_yaml) -> ConfigRecord:
    """The configuration of a dict, or of YAML text."""
    return parse(read(value, source) if isinstance(value, str) else locate(value, source), source)
