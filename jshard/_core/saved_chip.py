"""Measured chips as JSON files: written by `jshard.calibrate(save=...)`, read by `hardware="my-cluster.json"`.

One object: `jshard_chip` (the version of this form), `date`, `versions` of what measured it, `devices`, `chip` with the
fields of `hardware.Chip`, and `samples`, what was measured beside what the chip says.

>>> from jshard._core.hardware import get
>>> chip_from_json(chip_to_json(get("h100"), {"date": "2026-11-23"}), "h100.json") == get("h100")
True
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path

from jshard._core.collective_curves import CollectiveCurve
from jshard._core.compute_units import NO_UNITS, ComputeUnits, VectorUnit
from jshard._core.errors import MeshError
from jshard._core.hardware import Chip, get, register


FORM = 1


def chip_to_json(chip: Chip, about: Mapping[str, object]) -> str:
    """A chip as JSON text, after what is said about its measurement."""
    fields = dataclasses.asdict(chip)
    fields["sources"] = dict(chip.sources)
    return json.dumps({"jshard_chip": FORM, **about, "chip": fields}, indent=1) + "\n"


def chip_from_json(text: str, where: str) -> Chip:
    """The chip in a JSON text; `MeshError` for another form, or another version of it."""
    again = "jshard.calibrate(save=...) on the machine, with this version"
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    if not isinstance(data, dict) or "jshard_chip" not in data:
        raise MeshError("this is no chip that was measured", where=where, fix=again)
    if data["jshard_chip"] != FORM:
        raise MeshError(
            f"this chip was saved in version {data['jshard_chip']!r}, this jshard reads version {FORM}",
            where=where,
            fix=again,
        )
    known = {f.name for f in dataclasses.fields(Chip)}
    fields = data.get("chip")
    if not isinstance(fields, dict) or not set(fields) <= known:
        extra = sorted(set(fields) - known) if isinstance(fields, dict) else ["chip"]
        raise MeshError(f"{', '.join(extra)}: not a field of a chip", where=where, fix=again)
    try:
        curves = tuple(
            CollectiveCurve(**{**c, "knots": tuple((float(b), float(s)) for b, s in c["knots"])})
            for c in fields.pop("curves", ())
        )
        lists = ("max_slice", "async_kinds", "all_reduced_kinds")
        units = _units(fields.pop("units", None))
        return Chip(**{**fields, **{k: tuple(fields.get(k, ())) for k in lists}}, curves=curves, units=units)
    except (TypeError, KeyError, ValueError) as error:
        raise MeshError(f"a chip without all its figures: {error}", where=where, fix=again) from None


def _units(data: Mapping | None) -> ComputeUnits:
    """The units in a JSON text; those of a file that was written before there were any."""
    if data is None:
        return NO_UNITS
    vector = data["vector"]
    return ComputeUnits(**{**data, "vector": None if vector is None else VectorUnit(**vector)})


def load_chip(path: str | os.PathLike[str]) -> Chip:
    """Read a chip from a file and add it to the table; another one of its name there is an error."""
    where = f"hardware={str(path)!r}"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise MeshError(
            f"the file cannot be read: {error.strerror}",
            where=where,
            fix="a file that jshard.calibrate(save=...) wrote",
        ) from None
    return register(chip_from_json(text, where))


def named_chip(name: str) -> Chip:
    """The chip that `hardware=` of `shard` names: one of the table, or the path of a file that ends in `.json`."""
    return load_chip(name) if name.endswith(".json") else get(name)
