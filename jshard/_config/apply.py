"""`shard(config=...)`: the options and the mesh of a configuration where the arguments of `shard` leave them open.

>>> import inspect
>>> default = object()
>>> signature = inspect.Signature(
...     [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=default) for n in ("level", "mesh", "strict")]
... )
>>> own, _ = options_and_rules({"config": {"level": 2}, "level": default, "mesh": None, "strict": None}, signature)
>>> own
{'level': 2, 'mesh': None, 'strict': None}
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from jshard._config.config_record import ConfigRecord
from jshard._config.mesh_section import build_mesh
from jshard._config.source import read_config


def options_and_rules(
    options: Mapping[str, Any], signature: inspect.Signature
) -> tuple[dict[str, Any], ConfigRecord]:
    """The arguments of `shard` without `config`, completed by it; and the configuration.

    `signature`: that of `shard`; an argument that is its default object was not given.
    """
    record = read_config(options["config"])
    out = {k: v for k, v in options.items() if k != "config"}
    for name, value in record.options:
        if out[name] is signature.parameters[name].default:
            out[name] = value
    if record.mesh is not None and out["mesh"] is None:
        out["mesh"] = build_mesh(record.mesh, out.get("device"))
    if out["strict"] is not None:
        record = dataclasses.replace(record, strict=bool(out["strict"]))
    return out, record
