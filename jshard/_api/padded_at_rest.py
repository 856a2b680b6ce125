"""Arguments that are padded at rest: `config={"pad": ["params.**"]}`.

Problem.  A parameter of 50,257 rows that no cut divides has to be whole between calls: each call pads and cuts it, and puts
its new value together again.

Idea.  The arrays that the patterns name are padded once, as `PaddedArray`s; the function is traced on their true shapes
(`padded_trace.py`), and its new values of them come back padded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import jax

from jshard._api.local_batch import LocalBatches
from jshard._api.machine import requested_mesh
from jshard._api.plan import Plan
from jshard._api.shard_request import ShardRequest, named_traced_arguments
from jshard._api.state_library import state_library
from jshard._core import jaxcompat as compat
from jshard._core.errors import ShardError
from jshard._core.jax_types import PyTree
from jshard._core.layout import MeshAxes
from jshard._core.messages import abbreviate
from jshard._core.padded_array import PaddedArray, is_padded
from jshard._spec.committed_shardings import placement
from jshard._spec.parameter_plan import LeafIndex
from jshard._spec.tree_paths import dtype_of, input_leaves


class PaddedArguments(LocalBatches):
    """The calls of one function whose arguments at some paths are padded at rest."""

    def __init__(self, request: ShardRequest, patterns: Sequence[str]):
        super().__init__(request, ())
        self.names = tuple(patterns)

    def shapes(self, args: tuple, kwargs: dict[str, PyTree]) -> tuple[tuple, dict[str, PyTree]]:
        """The arguments with a `PaddedArray` in place of every array, or type of one, that a pattern names."""
        request = self.request
        library = state_library()
        if library is not None and library.holds_state((args, kwargs)):
            raise ShardError(
                "pad names paths of arrays, and an argument is an nnx module",
                where=f"pad of {request.name}",
                fix="a function of the module's state, or jshard.flax.pad_vocabulary",
            )
        traced, traced_kw, names = named_traced_arguments(request, args, kwargs)
        values, tree = jax.tree.flatten((args, kwargs), is_leaf=is_padded)
        leaves = input_leaves(_true_types(traced), _true_types(traced_kw), names)
        index = LeafIndex.of(leaves)
        found = {p: index.find(p) for p in self.names}
        for pattern, at in found.items():
            if not at:
                raise ShardError(
                    f"pad names {pattern!r}, and no argument of {request.name} has such a path",
                    where=f"pad of {request.name}",
                    fix=f"a pattern of these paths: {abbreviate([leaf.path for leaf in leaves])}",
                )
        wanted = {i for at in found.values() for i in at}
        mesh = self._mesh((traced, traced_kw))
        traced_values = jax.tree.leaves((traced, traced_kw), is_leaf=is_padded)
        new = {id(x): _padded(x, mesh) for i, x in enumerate(traced_values) if i in wanted}
        return jax.tree.unflatten(tree, [new.get(id(x), x) for x in values])

    def arrays(
        self, args: tuple, kwargs: dict[str, PyTree], plan_of: Callable[[tuple, dict[str, PyTree]], Plan]
    ) -> tuple[tuple, dict[str, PyTree]]:
        """As `shapes`: arrays become padded arrays."""
        return self.shapes(args, kwargs)

    def _mesh(self, arguments: PyTree) -> MeshAxes:
        committed = placement(jax.tree.leaves(arguments), use_argument_mesh=True).mesh
        mesh = requested_mesh(self.request, committed)
        mesh = mesh if mesh is not None else compat.context_mesh() or committed
        for name in ("jax_mesh", "mesh"):
            mesh = mesh if hasattr(mesh, "shape") else getattr(mesh, name, mesh)
        shape: Mapping[str, int] | None = getattr(mesh, "shape", None)
        if shape is None:
            raise ShardError(
                "arrays are padded at rest for the cuts of a mesh, and none is given",
                where=f"pad of {self.request.name}",
                fix="mesh=..., or `with jax.set_mesh(mesh):` around the call",
            )
        return MeshAxes(tuple(shape), tuple(int(n) for n in shape.values()))


def call_arguments(request: ShardRequest, of_arrays: bool) -> LocalBatches:
    """What changes the arguments of a function's calls before they are planned: local batches, or padding at rest."""
    pad = request.options.pad
    if isinstance(pad, tuple) and not of_arrays:
        return PaddedArguments(request, pad)
    return LocalBatches(request, () if of_arrays else request.options.local_batch)


def _true_types(tree: PyTree) -> PyTree:
    """The types of a pytree's arrays, of their true shapes."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, PaddedArray) else x,
        tree,
        is_leaf=is_padded,
    )


def _padded(x: PyTree, mesh: MeshAxes) -> PyTree:
    """An array with every dimension padded that no cut of the mesh divides."""
    if isinstance(x, PaddedArray) or dtype_of(x) is None or not hasattr(x, "shape"):
        return x
    from jshard._plan.padding_search import padded_size  # here, so that `import jshard` stays light

    wide = tuple(padded_size(n, mesh) or n for n in x.shape)
    return x if wide == tuple(x.shape) else PaddedArray.of(x, wide)


class Step(Protocol):
    """A sharded function."""

    @property
    def call_arguments(self) -> LocalBatches: ...

    def plan(self, *args: PyTree, **kwargs: PyTree) -> Plan: ...


def place(step: Step, *args: PyTree, **kwargs: PyTree) -> tuple[PyTree, ...]:
    """The positional arguments of a call where its plan wants them, padded as `config={"pad": [...]}` says.

    >>> import jax, jshard, numpy as np
    >>> mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    >>> f = jshard.shard(lambda p, x: x @ p["w"], mesh=mesh, config={"pad": ["p.w"]}, in_strategy=({"w": (1, 4)}, None))
    >>> p, x = f.place({"w": np.ones((8, 50))}, np.ones((2, 8)))
    >>> p["w"].shape, p["w"].padded.shape, f(p, x).shape
    ((8, 50), (8, 52), (2, 50))

    - `step`: a function that `jshard.shard` returned; `args`, `kwargs`: of a call of it.
    """
    plan = step.plan(*args, **kwargs)
    changed, changed_kw = step.call_arguments.shapes(args, kwargs)
    shardings = jax.tree.leaves(plan.in_shardings)
    leaves, tree = jax.tree.flatten((changed, changed_kw))
    placed = [jax.device_put(x, s) for x, s in zip(leaves, shardings, strict=True)]
    return jax.tree.unflatten(tree, placed)[0]
