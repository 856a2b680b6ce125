"""A configuration as YAML text, without PyYAML: written by hand so that one rule is one line.

>>> print(to_yaml(ConfigRecord(parameters=(Rule("**.scale", ((),)),), options=(("level", 2),))))
parameters:
  "**.scale": [null]
level: 2
<BLANKLINE>
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from jshard._config.config_record import ConfigRecord, Rule


def to_yaml(record: ConfigRecord) -> str:
    """The text; reading it gives an equal configuration."""
    lines = [f"mesh: {record.mesh.text}"] if record.mesh is not None else []
    lines += [f"recipe: {record.recipe}"] if record.recipe else []
    for section in ("parameters", "activations", "inputs", "outputs", "torch", "products", "gradients"):
        lines += _rules(section, getattr(record, section))
    if record.regexes:
        lines.append("regexes:")
        lines += [f"  - [{_quoted(r.name)}, {r.text}]" for r in record.regexes]
    if record.regex_match != "first":
        lines.append(f"regex_match: {record.regex_match}")
    lines += [f"{name}: {_plain(value)}" for name, value in record.options]
    if record.optional:
        lines.append(f"optional: [{', '.join(map(_quoted, record.optional))}]")
    if record.unlisted != "derived":
        lines.append(f"unlisted: {record.unlisted}")
    if not record.strict:
        lines.append("strict: false")
    return "\n".join(lines) + "\n"


def _rules(section: str, rules: Sequence[Rule]) -> list[str]:
    return [f"{section}:", *(f"  {_name(r.key)}: {r.text}" for r in rules)] if rules else []


def _name(name: str) -> str:
    """A key, in quotes where YAML would read something else."""
    plain = re.fullmatch(r"[A-Za-z_][\w.*/\-]*", name) and name.lower() not in _WORDS
    return name if plain else _quoted(name)


_WORDS = frozenset("null true false yes no on off y n".split())


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _plain(value: object) -> str:
    return json.dumps(value) if not isinstance(value, tuple) else json.dumps(list(value))
