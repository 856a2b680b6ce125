"""`sweep`: one function planned over meshes, levels, chips and batch sizes, side by side.

Every combination is one row. A combination that cannot be planned is a row with the reason, because one purpose of a
sweep over machines is to see which of them are too small.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jshard._api.plan import Plan
from jshard._api.prepare import prepare
from jshard._api.shard import Sharded, shard
from jshard._api.shard_request import ShardRequest
from jshard._api.trace_call import abstract
from jshard._core.argument_checks import checked
from jshard._core.errors import ShardError
from jshard._core.hardware import Chip
from jshard._core.jax_types import Function, PyTree
from jshard._core.layout import MeshAxes
from jshard._core.saved_chip import named_chip
from jshard._core.text_files import write_file
from jshard._report import comparison_table as report, plots
from jshard._report.comparison_table import PlanPoint
from jshard._report.progress import progress
from jshard._spec.mesh_selection import check_mesh
from jshard._spec.options import check_device, check_level, check_search, parse_bytes
from jshard._spec.tree_paths import argument_names


Batch = int | Sequence[int] | Mapping[str | tuple[str, ...], Sequence[int]] | None
"""Batch sizes to try, of the first argument or of the named ones."""


SWEPT_OPTIONS = {
    "hardware": lambda v: named_chip(v) if isinstance(v, str) else v,
    "device": lambda v: check_device(v) or v, "level": check_level, "memory_budget": parse_bytes, "search": check_search,
}  # fmt: skip
"""Options of `shard` that a sweep varies, beside mesh and batch, with the function that checks a value."""


_NOT_PLANNED = "not planned: interrupted"


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Plans of one function under several settings: printable, and a table in Jupyter.

    `points` has one `Point` for each combination, in the order of the settings: its `settings`, its `plan`, or
    the `error` that stands in its place. After an interruption (Ctrl-C) the combinations that were left have none.
    """

    name: str
    points: tuple[PlanPoint[Plan], ...]

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of all points that have one."""
        return tuple(p.plan for p in self.points if p.plan is not None)

    @property
    def fastest(self) -> PlanPoint | None:
        """The point of least step time (for one entry of the batch where batches differ); None without a plan."""
        planned = [p for p in self.points if p.plan is not None]
        return min(planned, key=lambda p: p.plan.step_seconds / (p.setting("batch") or 1), default=None)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.points)

    def __iter__(self) -> Iterator[PlanPoint]:
        return iter(self.points)

    def __getitem__(self, index: int) -> PlanPoint:
        return self.points[index]

    def __str__(self) -> str:
        return report.table(self._title, self.points)

    def _repr_html_(self) -> str:
        return report.html_table(self._title, self.points)

    def to_html(self, path: str | Path) -> None:
        """Write the table as one self-contained page."""
        write_file(path, report.html_page(self._title, self.points), "Sweep.to_html")

    @property
    def _title(self) -> str:
        return f"{len(self.points)} plans of {self.name}"

    def to_pandas(self) -> Any:
        """One row a point as a `pandas.DataFrame`: settings, seconds (`_s`), bytes (`_bytes`), gap, error."""
        return report.to_dataframe(self.points, "Sweep.to_pandas")

    def plot(self) -> Any:
        """A matplotlib figure: step time, bytes moved and peak memory of every point."""
        return plots.bars(str(self).splitlines()[0], self.points, "Sweep.plot")


@checked
def sweep(
    fn: Function,
    *args: PyTree,
    mesh: object = None,
    level: int | Sequence[int] | None = None,
    hardware: Chip | str | Sequence[Chip | str] | None = None,
    batch: Batch = None,
    memory_budget: object = None,
    search: str | Sequence[str] | None = None,
    device: str | Sequence[str] | None = None,
    show_progress: bool | None = None,
    **kwargs: PyTree,
) -> Sweep:
    """Plan a function under every combination of settings.

    >>> import jax, jshard
    >>> f32 = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
    >>> machines = [jshard.topology(n, {"x": 2, "y": 4}, compiles=False) for n in ("v5e:2x4", "v5p:2x2x2")]
    >>> net = lambda x, w: x @ w
    >>> found = jshard.sweep(net, f32(64, 64), f32(64, 64), mesh=machines, level=[1, 2], batch={"x": [64, 65]})
    >>> len(found), found.fastest.setting("chip"), len(found.plans)
    (8, 'tpu-v5p', 8)

    Arguments:

    - `fn`: a function, or a sharded one, whose strategies and options are kept where they are not varied.
    - `args`, `kwargs`: arrays or `ShapeDtypeStruct`s. An argument with the name of a setting is passed by position.
    - `mesh`: meshes or topologies, as a list or as a dict of names.
    - `level`, `hardware`, `memory_budget`, `search`, `device`: one value for `shard`, or a list.
    - `batch`: sizes of dimension 0: a dict from the name of an argument (or a tuple of names) to sizes, or a list for
        the argument named `batch`. In a pytree, all leaves are resized.
    - `show_progress`: whether to show a progress bar; None: on a terminal and in Jupyter only.

    Returns a `Sweep`. A combination that cannot be planned is a row with the reason; only a wrong setting is an error.
    """
    sharded = fn if isinstance(fn, Sharded) else shard(fn)
    settings = {
        "hardware": hardware, "device": device, "level": level, "memory_budget": memory_budget, "search": search
    }  # fmt: skip
    options = {
        name: [(v, SWEPT_OPTIONS[name](v)) for v in _as_list(values)]
        for name, values in settings.items()
        if values is not None
    }
    sharded.check_arguments(args, kwargs, "sweep", tuple(inspect.signature(sweep).parameters)[2:-1])
    with sharded.as_array_function(args, kwargs) as (function, args, kwargs):
        points = _points(function.request, args, kwargs, _meshes(mesh), options, batch, show_progress)
    return Sweep(sharded.__name__, tuple(points))


@dataclasses.dataclass(frozen=True)
class _NamedMesh:
    """A mesh of the sweep, and its name in the table."""

    name: str
    mesh: object


@dataclasses.dataclass(frozen=True)
class _Combination:
    """One point of the grid: None where a setting is not varied; option -> value as the user wrote it."""

    mesh: _NamedMesh | None
    labels: Mapping[str, object]
    batch: int | None


def _points(
    request: ShardRequest, args: tuple, kwargs: dict[str, PyTree], meshes: Sequence[_NamedMesh],
    options: Mapping[str, Sequence[tuple[object, object]]], batch: Batch, show_progress: bool | None,
) -> list[PlanPoint]:  # fmt: skip
    """A point for each combination; `options`: name -> (value as the user wrote it, checked value)."""
    batched, sizes = _parse_batch(request, batch, args, kwargs)
    total = max(len(meshes), 1) * max(len(sizes), 1)
    for values in options.values():
        total *= len(values)
    points: list[PlanPoint] = []
    interrupted = False
    with progress(f"sweep of {request.name}", total, shown=show_progress) as show:
        for mesh, values, size in itertools.product(
            meshes or [None], itertools.product(*options.values()), sizes or [None]
        ):
            at = _Combination(mesh, {n: label for n, (label, _) in zip(options, values, strict=True)}, size)
            show(
                len(points),
                ", ".join(map(str, [mesh.name if mesh else "", *at.labels.values(), size or ""])),
            )
            chosen = {n: value for n, (_, value) in zip(options, values, strict=True)}
            changed = dataclasses.replace(
                request, options=dataclasses.replace(request.options, **chosen), plan=None,
                mesh=mesh.mesh if mesh else request.mesh,
            )  # fmt: skip
            planned, error = None, _NOT_PLANNED
            if not interrupted:
                try:
                    planned, error = _planned(changed, *_resize_batch(request, batched, size, args, kwargs))
                    interrupted = planned is not None and planned.interrupted
                except KeyboardInterrupt:
                    if not any(p.plan for p in points):
                        raise
                    interrupted = True
            points.append(_point(changed, at, planned, error))
    return points


def plan_with_options(
    request: ShardRequest, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], **options: object
) -> Plan:
    """The plan of a request with other options."""
    changed = dataclasses.replace(request, options=dataclasses.replace(request.options, **options), plan=None)
    return prepare(changed, args, kwargs).plan


def _device_count(mesh: object) -> int | None:
    """Devices of a mesh of JAX, concrete or abstract, or of a topology; None where it is inferred."""
    devices = (
        getattr(mesh, "size", None)
        if isinstance(mesh, Mesh | AbstractMesh)
        else getattr(mesh, "devices", None)
    )
    return devices if isinstance(devices, int) else None


def _planned(request: ShardRequest, args: tuple, kwargs: dict) -> tuple[Plan | None, str]:
    """The plan of a combination, or why there is none."""
    try:
        return prepare(request, args, kwargs).plan, ""
    except ShardError as e:
        return None, e.what
    except Exception as e:  # the user's function may fail for a batch size: a row like any other
        text = str(e).strip()
        return None, f"{type(e).__name__}: {text.splitlines()[0] if text else ''}".rstrip(": ")


def _point(request: ShardRequest, at: _Combination, plan: Plan | None, error: str) -> PlanPoint:
    columns: dict[str, object] = {"mesh": at.mesh.name if at.mesh else plan and str(plan.mesh)}
    mesh = at.mesh.mesh if at.mesh else request.mesh
    devices = plan.mesh.total if plan else _device_count(mesh)
    columns["chip"] = plan.chip if plan else at.labels.get("hardware") or getattr(mesh, "chip", None)
    columns["devices"] = devices
    columns["level"] = request.options.level
    columns |= {n: v for n, v in at.labels.items() if n not in ("hardware", "level")}
    if at.batch is not None:
        columns["batch"] = at.batch
    return PlanPoint(tuple(columns.items()), plan, error)


def _as_list(values: Any) -> list[Any]:
    if isinstance(values, list | tuple | range | set | frozenset):
        if not values:
            raise ShardError("an empty list leaves nothing to plan", where="sweep", fix="at least one value")
        return list(values)
    return [values]


def _meshes(mesh: object) -> list[_NamedMesh]:
    if mesh is None:
        return []
    named = [*mesh.items()] if isinstance(mesh, Mapping) else [(None, m) for m in _as_list(mesh)]
    for _, m in named:
        check_mesh(m)
    return [_NamedMesh(_mesh_name(m) if name is None else str(name), m) for name, m in named]


def _mesh_name(mesh: object) -> str:
    if isinstance(mesh, str):
        return mesh
    shape = getattr(getattr(mesh, "jax_mesh", mesh), "shape", None)
    axes = str(MeshAxes(tuple(map(str, shape)), tuple(shape.values()))) if isinstance(shape, Mapping) else ""
    name = getattr(mesh, "name", "") if hasattr(mesh, "jax_mesh") else ""
    return f"{name} {axes}".strip() or type(mesh).__name__


def _parse_batch(
    request: ShardRequest,
    batch: Batch,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
) -> tuple[tuple[str, ...], list[int]]:
    """Names of the arguments whose dimension 0 is the batch, and the batch sizes."""
    if batch is None:
        return (), []
    names = [*argument_names(request.fn, len(args)), *kwargs]
    if isinstance(batch, Mapping):
        if len(batch) != 1:
            raise ShardError(
                f"batch names {len(batch)} groups of arguments",
                where="sweep",
                fix='one group, resized together: batch={("inputs", "labels"): [64, 128]}',
            )
        [(key, sizes)] = batch.items()
    else:
        key, sizes = "batch", batch
    batched = (key,) if isinstance(key, str) else tuple(key)
    unknown = [b for b in batched if b not in names]
    if unknown:
        raise ShardError(
            f"{request.name} has no argument {unknown[0]!r} whose dimension 0 is the batch",
            where="sweep",
            fix=f'its name and the sizes: batch={{"{names[-1] if names else "x"}": [64, 128]}}',
        )
    sizes = _as_list(sizes)
    wrong = [s for s in sizes if isinstance(s, bool) or not isinstance(s, int) or s < 1]
    if wrong:
        raise ShardError(
            f"a batch of {wrong[0]!r}", where="sweep", fix="positive whole numbers: batch=[64, 128]"
        )
    return batched, sizes


def _resize_batch(
    request: ShardRequest, batched: tuple[str, ...], size: int | None, args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    """The arguments, those of the batch as shapes with dimension 0 of another size."""
    if size is None:
        return args, kwargs
    names = argument_names(request.fn, len(args))
    resize = functools.partial(jax.tree.map, lambda x: _with_leading_size(x, size))
    return (
        tuple(resize(abstract(a)) if n in batched else a for n, a in zip(names, args, strict=False)),
        {k: resize(abstract(v)) if k in batched else v for k, v in kwargs.items()},
    )


def _with_leading_size(x: PyTree, size: int) -> PyTree:
    if not getattr(x, "shape", ()):
        return x
    return jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype, weak_type=getattr(x, "weak_type", False))
