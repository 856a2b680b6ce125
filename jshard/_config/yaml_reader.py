"""YAML with the line of every value, read safely: only maps, lists and plain values, nothing is executed.

PyYAML is optional; it is imported when the first YAML text is read. Keys may occur once, which PyYAML itself does not
check.

>>> node = read_yaml("mesh: {data: 2}\\nlevel: 1", "base.yaml")
>>> node.value["level"].where, node.value["mesh"].value["data"].value
('base.yaml:2', 2)
>>> read_yaml("level: [1", "base.yaml")
Traceback (most recent call last):
...
jshard._core.errors.ShardError: this is not YAML: expected ',' or ']', but got '<stream end>'
  where: base.yaml:1
  write instead: YAML; a name that begins with * or { stands in quotes: "**.scale": [null]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from jshard._core.errors import ShardError
from jshard._core.messages import type_with_article


if TYPE_CHECKING:
    import yaml

QUOTES = 'YAML; a name that begins with * or { stands in quotes: "**.scale": [null]'


@dataclasses.dataclass(frozen=True)
class Located:
    """A value with the place where it stands: a dict of `Located`, a list of `Located`, or a plain value."""

    value: dict[str, Located] | list[Located] | object
    where: str


def read_yaml(text: str, source: str) -> Located:
    """Parse a document; `source` is the name of the file or "config". Raises `ShardError` with file and line."""
    yaml = _yaml()
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        return Located(None, source) if node is None else _located(loader, node, source, ())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else 1
        # An unfinished list or map ends with the file; where it begins says more.
        if mark is not None and mark.line and "stream end" in (getattr(error, "problem", "") or ""):
            line = (getattr(error, "context_mark", None) or mark).line + 1
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ShardError(f"this is not YAML: {problem}", where=f"{source}:{line}", fix=QUOTES) from None
    finally:
        loader.dispose()


def locate(value: object, where: str) -> Located:
    """A Python value as `Located`, all of it at one place.

    >>> locate({"level": 2}, "config").value["level"]
    Located(value=2, where='config')
    """
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ShardError(
                    f"the key {key!r} is {type_with_article(key)}", where=where, fix="keys as strings"
                )
        return Located({k: locate(v, where) for k, v in value.items()}, where)
    if isinstance(value, list | tuple):
        return Located([locate(v, where) for v in value], where)
    return Located(value, where)


def _yaml() -> ModuleType:
    try:
        import yaml
    except ModuleNotFoundError:
        raise ShardError(
            "YAML needs PyYAML, which is not installed",
            where="jshard.Config",
            fix="pip install 'jshard[config]', or give the configuration as a dict",
        ) from None
    return yaml


def _located(loader: yaml.SafeLoader, node: yaml.Node, source: str, above: tuple[int, ...]) -> Located:
    from yaml import MappingNode, SequenceNode

    where = f"{source}:{node.start_mark.line + 1}"
    if id(node) in above:
        raise ShardError("a value contains itself", where=where, fix="the value written out")
    if node.tag.startswith(("!", "tag:yaml.org,2002:python")):
        raise ShardError(
            f"the tag {node.tag} is not plain YAML", where=where, fix="numbers, strings, lists and maps"
        )
    above = (*above, id(node))
    if isinstance(node, MappingNode):
        loader.flatten_mapping(node)
        out: dict[str, Located] = {}
        for key_node, value_node in node.value:
            key = _key(loader, key_node, source)
            at = f"{source}:{key_node.start_mark.line + 1}"
            if key in out:
                raise ShardError(
                    f"the name {key!r} is there twice",
                    where=f"{at} and {out[key].where}",
                    fix="one of the two",
                )
            out[key] = dataclasses.replace(_located(loader, value_node, source, above), where=at)
        return Located(out, where)
    if isinstance(node, SequenceNode):
        return Located([_located(loader, n, source, above) for n in node.value], where)
    return Located(loader.construct_object(node), where)


def _key(loader: yaml.SafeLoader, node: yaml.Node, source: str) -> str:
    from yaml import ScalarNode

    where = f"{source}:{node.start_mark.line + 1}"
    if not isinstance(node, ScalarNode):
        raise ShardError("a key is a list or a map", where=where, fix=QUOTES)
    return str(node.value)
