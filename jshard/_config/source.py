"""A configuration from whatever a user gives: a path, YAML text, a dict, a configuration; and overrides of its parts.

>>> record = read_config({"parameters": {"lm_head.kernel": ["tensor", None]}, "level": 1})
>>> record = override(record, "level=2", "parameters.lm_head.kernel=[null, tensor]", "mesh.tensor=4")
>>> record.option("level"), record.parameters[0].text, record.mesh.text
(2, '[null, tensor]', '{tensor: 4}')
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from jshard._config.config_record import RULE_SECTIONS, ConfigRecord, MeshSection, Rule
from jshard._config.sections import (
    KEYS,
    NAMED_SECTIONS,
    OPTIONS,
    merge,
    parse,
    parse_rule,
    parse_value,
    read_file,
)
from jshard._config.yaml_reader import Located, read_yaml
from jshard._core.errors import ShardError
from jshard._core.messages import suggest, type_with_article


SETTINGS_WITH_DEFAULT = ("strict", "unlisted", "recipe", "regex_match", "mesh")

HELP = "the path of a YAML file, YAML text, a dict, the name of a recipe, or a jshard.Config"


def read_config(value: object, source: str = "config") -> ConfigRecord:
    """The configuration that a value stands for; a string is a path if it is one line that names a file."""
    if isinstance(value, ConfigRecord):
        return value
    if isinstance(value, os.PathLike):
        return read_file(Path(value))
    if isinstance(value, str):
        if is_path(value):
            return read_file(Path(value))
        return parse_value(value, source)
    if isinstance(value, Mapping):
        return parse_value(value, source)
    fix = HELP
    if hasattr(value, "to_config"):  # a Plan
        fix = "plan=..., which runs that plan; or config=plan.to_config(), its layouts as rules"
    raise ShardError(f"config is {type_with_article(value)}", where="config", fix=fix)


def is_path(text: str) -> bool:
    """Whether a text is the path of a file, and not YAML itself.

    >>> is_path("llama.json"), is_path("level: 2"), is_path("a: [x]\\nb: [y]")
    (True, False, False)
    """
    one_line = "\n" not in text.strip() and ": " not in text
    return one_line and (text.strip().endswith((".yaml", ".yml", ".json")) or Path(text).is_file())


def override(record: ConfigRecord, *texts: str) -> ConfigRecord:
    """The configuration with some parts replaced, as Hydra and OmegaConf write it on a command line.

    Each text is `path=value`: `parameters.lm_head.kernel=[null, tensor]`, `mesh.fsdp=8`, `level=2`; a `+` in front
    changes nothing, `~parameters.lm_head.kernel` removes a rule. In a file of torchprime's form, a name without section
    is a rule of that form.
    """
    for text in texts:
        record = _override(record, text)
    return record


def _override(record: ConfigRecord, text: str) -> ConfigRecord:
    where = f"override {text!r}"
    if not isinstance(text, str) or not text.strip():
        raise ShardError(f"an override is {type_with_article(text)}", where="override", fix='text: "level=2"')
    if text.startswith("~"):
        return _removed(record, text[1:].strip(), where)
    path, equals, value_text = text.strip().removeprefix("+").partition("=")
    if not equals:
        raise ShardError("an override has no '='", where=where, fix=f"{text}=VALUE, or ~{text} to remove it")
    value = Located(read_yaml(value_text, where).value, where)
    head, _, rest = path.partition(".")
    if head in NAMED_SECTIONS and (rest or head in ("torch", "activations")):
        return _with_rule(record, head, rest, value)
    if head in ("mesh", "ici_mesh", "dcn_mesh") and rest:
        return _with_axis(record, head, rest, value)
    if path in KEYS or path in ("ici_mesh", "dcn_mesh"):
        own = parse(Located({path: value}, where), record.source)
        if path in SETTINGS_WITH_DEFAULT:  # `merge` would take the default for nothing said
            return dataclasses.replace(record, **{path: getattr(own, path)})
        return merge(record, own)
    if record.torch or not any(getattr(record, s) for s in RULE_SECTIONS):
        return _with_rule(record, "torch", path, value)
    raise ShardError(f"{head!r} is no section of a configuration", where=where, fix=suggest(head, KEYS))


def _with_rule(record: ConfigRecord, section: str, name: str, value: Located) -> ConfigRecord:
    if isinstance(value.value, Mapping):
        for key, inner in value.value.items():
            record = _with_rule(record, section, f"{name}.{key}" if name else key, inner)
        return record
    rule = parse_rule(section, name, value)
    rules: dict[str, Rule] = {r.key: r for r in getattr(record, section)}
    return dataclasses.replace(record, **{section: tuple({**rules, rule.key: rule}.values())})


def _with_axis(record: ConfigRecord, key: str, axis: str, value: Located) -> ConfigRecord:
    if not isinstance(value.value, int) or isinstance(value.value, bool):
        raise ShardError(
            f"the size of mesh axis {axis!r} is {value.value!r}", where=value.where, fix=f"{key}.{axis}=8"
        )
    mesh = record.mesh or MeshSection()
    part = "dcn" if key == "dcn_mesh" else "axes"
    sizes = {**dict(getattr(mesh, part)), axis: value.value}
    return dataclasses.replace(record, mesh=dataclasses.replace(mesh, **{part: tuple(sizes.items())}))


def _removed(record: ConfigRecord, path: str, where: str) -> ConfigRecord:
    head, _, rest = path.partition(".")
    section, name = (head, rest) if head in NAMED_SECTIONS else ("torch", path)
    if path == "mesh":
        return dataclasses.replace(record, mesh=None)
    if path in OPTIONS:
        return dataclasses.replace(record, options=tuple(o for o in record.options if o[0] != path))
    rules: tuple[Rule, ...] = getattr(record, section)
    kept = tuple(r for r in rules if r.key != name)
    if len(kept) == len(rules):
        raise ShardError(
            f"there is no rule {name!r} in {section}",
            where=where,
            fix=suggest(name, [r.key for r in rules]) if rules else "nothing to remove",
        )
    return dataclasses.replace(record, **{section: kept})
