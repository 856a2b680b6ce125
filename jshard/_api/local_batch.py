"""`local_batch`: arguments of which every process has its own rows, made into arrays over all processes.

Each process loads its part of the batch, of the same size in all; the parts are stacked along dimension 0 in the order
of the process indices. The function is planned for the whole batch. Where the plan cuts dimension 0 so that every
process needs its own rows only, nothing is sent; otherwise all rows are gathered on all hosts first, which is logged.

>>> rows_of(0, 2, (8, 4)), rows_of(1, 2, (8, 4))
((0, 4), (4, 8))
>>> from jax.sharding import NamedSharding, PartitionSpec
>>> mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
>>> needs_own_rows_only(NamedSharding(mesh, PartitionSpec("x")), (8, 4), (0,))
True
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard._api.plan import Plan
from jshard._api.plan_together import group_of
from jshard._api.shard_request import ShardRequest
from jshard._core import jaxcompat as compat
from jshard._core.errors import ArgumentError
from jshard._core.jax_types import PyTree
from jshard._core.messages import suggest
from jshard._spec.tree_paths import argument_names


_log = logging.getLogger("jshard")


class LocalBatches:
    """The calls of one function with local batches, and the shardings that were planned for them.

    `names`: of the arguments; none where no argument is a local batch.
    """

    def __init__(self, request: ShardRequest, names: Sequence[str]):
        self.request, self.names = request, tuple(names)
        self._shardings: dict[Hashable, Mapping[str, Sequence[NamedSharding]]] = {}

    def shapes(self, args: tuple, kwargs: dict[str, PyTree]) -> tuple[tuple, dict[str, PyTree]]:
        """The arguments with the type of the whole batch in place of every local array."""
        batch = self._of(args, kwargs)
        return (args, kwargs) if batch is None else batch.shapes()

    def arrays(
        self, args: tuple, kwargs: dict[str, PyTree], plan_of: Callable[[tuple, dict[str, PyTree]], Plan]
    ) -> tuple[tuple, dict[str, PyTree]]:
        """The arguments with an array over all processes in place of every local one; `plan_of` plans their types."""
        batch = self._of(args, kwargs)
        if batch is None:
            return args, kwargs
        key = batch.key
        if key not in self._shardings:
            self._shardings[key] = batch.shardings(plan_of(*batch.shapes()))
        return batch.arrays(self._shardings[key])

    def _of(self, args: tuple, kwargs: dict[str, PyTree]) -> LocalBatch | None:
        """The local batches of a call; None without, and where one process has all devices."""
        if not self.names:
            return None
        own = argument_names(self.request.fn, len(args))
        for name in self.names:
            if name not in own and name not in kwargs:
                raise ArgumentError(
                    f"local_batch names {name!r}, and {self.request.name} is called without such an argument",
                    where=f"local_batch of {self.request.name}",
                    fix=suggest(name, [*own, *kwargs]),
                )
        _, group = group_of(self.request, args, kwargs)
        if group is None:
            return None
        positions = tuple((i, n) for i, n in enumerate(own) if n in self.names)
        keywords = tuple(n for n in kwargs if n in self.names)
        return LocalBatch(args, kwargs, positions, keywords, group.processes)


@dataclasses.dataclass(frozen=True, eq=False)
class LocalBatch:
    """The arguments of one call that `local_batch` names, in a group of processes.

    `positions`, `names`: of these arguments among the positional ones and the keywords, each with its name.
    """

    args: tuple[PyTree, ...]
    kwargs: Mapping[str, PyTree]
    positions: tuple[tuple[int, str], ...]
    names: tuple[str, ...]
    processes: tuple[int, ...]

    @property
    def key(self) -> Hashable:
        """Hashable: equal for calls whose local batches have the same structure, shapes and dtypes."""
        leaves, tree = jax.tree.flatten([x for _, x in self._batches()])
        return tree, tuple((np.shape(x), str(getattr(x, "dtype", type(x))), _is_local(x)) for x in leaves)

    def shapes(self) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        """The arguments with the type of the whole batch in place of every local array."""
        return self._replaced(lambda name, x: jax.tree.map(self._whole_type, x))

    def shardings(self, plan: Plan) -> dict[str, list[NamedSharding]]:
        """The planned shardings of the arrays of each named argument, in the order of its leaves."""
        planned = jax.tree.leaves(plan.in_shardings)
        return {
            name: [
                s
                for row, s in zip(plan.inputs, planned, strict=True)
                if row.path == name or row.path.startswith((f"{name}.", f"{name}["))
            ]
            for name, _ in self._batches()
        }

    def arrays(
        self, shardings: Mapping[str, Sequence[NamedSharding]]
    ) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        """The arguments with an array over all processes in place of every local one."""

        def whole(name: str, value: PyTree) -> PyTree:
            leaves, tree = jax.tree.flatten(value)
            pairs = zip(leaves, shardings[name], strict=True)
            return jax.tree.unflatten(tree, [self._whole(x, s) if _is_local(x) else x for x, s in pairs])

        return self._replaced(whole)

    def _batches(self) -> list[tuple[str, PyTree]]:
        return [(n, self.args[i]) for i, n in self.positions] + [(n, self.kwargs[n]) for n in self.names]

    def _replaced(
        self, change: Callable[[str, PyTree], PyTree]
    ) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        args, kwargs = list(self.args), dict(self.kwargs)
        for i, name in self.positions:
            args[i] = change(name, args[i])
        for name in self.names:
            kwargs[name] = change(name, kwargs[name])
        return tuple(args), kwargs

    def _whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (shape[0] * len(self.processes), *shape[1:])

    def _whole_type(self, x: PyTree) -> PyTree:
        if not _is_local(x):
            return x
        return jax.ShapeDtypeStruct(self._whole_shape(x.shape), jax.dtypes.canonicalize_dtype(x.dtype))

    def _whole(self, x: PyTree, sharding: NamedSharding) -> jax.Array:
        """The array over all processes of this process's rows."""
        local = np.asarray(x)
        shape = self._whole_shape(local.shape)
        if needs_own_rows_only(sharding, shape, self.processes):
            first = rows_of(self.processes.index(jax.process_index()), len(self.processes), shape)[0]
        else:
            _log.warning(
                "a local batch of shape %s is gathered on every host in every call: the plan cuts it as %s, "
                "and not by rows of processes",
                local.shape,
                sharding.spec,
            )
            local, first = _all_rows(local, sharding), 0

        def block(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            begin, end, _ = index[0].indices(shape[0])
            return local[(slice(begin - first, end - first), *index[1:])]

        return jax.make_array_from_callback(shape, sharding, block)


def rows_of(part: int, parts: int, shape: Sequence[int]) -> tuple[int, int]:
    """First row, and the one after the last, of one of equal parts of an array."""
    rows = shape[0] // parts
    return part * rows, (part + 1) * rows


def needs_own_rows_only(sharding: NamedSharding, shape: tuple[int, ...], processes: tuple[int, ...]) -> bool:
    """Whether the devices of every process hold rows of that process's part only; the same answer in all of them."""
    for device, index in sharding.devices_indices_map(shape).items():
        begin, end, _ = index[0].indices(shape[0])
        first, after = rows_of(processes.index(device.process_index), len(processes), shape)
        if begin < first or end > after:
            return False
    return True


def _all_rows(local: np.ndarray, sharding: NamedSharding) -> np.ndarray:
    """The rows of all processes of a sharding, through one device of each: they may have different numbers of devices.

    `multihost_utils.process_allgather` reshapes the devices into as many for every process of the program.
    """
    devices = {d.process_index: d for d in sorted(sharding.device_set, key=lambda d: -d.id)}
    mesh = Mesh(np.array([devices[p] for p in sorted(devices)]), ("process",))
    rows = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("process")), local)
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(rows)
    return np.asarray(whole.addressable_data(0))


def _is_local(x: PyTree) -> bool:
    """Whether a leaf is an array of this process alone, with rows."""
    if compat.is_tracer(x) or isinstance(x, jax.ShapeDtypeStruct) or np.ndim(x) == 0:
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable
