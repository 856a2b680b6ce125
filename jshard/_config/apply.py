"""`shard(config=...)`: the options and the mesh of a configuration where the arguments of `shard` leave them open.

>>> import inspect
>>> default = object()
>>> signature = inspect.Signature(
...     [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=default) for n in ("level", "mesh", "strict")]
... )
>>> config = {"level": 2, "search_seconds": 5}
>>> given = {"config": config, "level": default, "mesh": None, "strict": None}
>>> own, rare, _ = options_and_rules(given, signature)
>>> own, rare
({'level': 2, 'mesh': None, 'strict': None}, {'search_seconds': 5})
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from jshard._config.config_record import ConfigRecord
from jshard._config.mesh_section import build_mesh
from jshard._config.source import read_config
from jshard._spec.options import CONFIG_ONLY_ADVICE


def options_and_rules(
    options: Mapping[str, Any], signature: inspect.Signature
) -> tuple[dict[str, Any], dict[str, object], ConfigRecord]:
    """The arguments of `shard` without `config`, completed by it; the options that are no arguments; the configuration.

    `signature`: that of `shard`; an argument that is its default object was not given.
    """
    record = read_config(options["config"])
    out = {k: v for k, v in options.items() if k != "config"}
    rare = {k: v for k, v in record.options if k in CONFIG_ONLY_ADVICE}
    for name, value in record.options:
        if name not in rare and out[name] is signature.parameters[name].default:
            out[name] = value
    if record.mesh is not None and out["mesh"] is None:
        out["mesh"] = build_mesh(record.mesh, out.get("device"))
    if out["strict"] is not None:
        record = dataclasses.replace(record, strict=bool(out["strict"]))
    return out, rare, record
