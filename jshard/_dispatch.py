"""From a planned signature to a running program: compile it once, place what lies elsewhere, or write it inline.

A compiled program takes its arguments in the planned layouts. JAX itself brings there what is on the host or not
committed to a device; what is committed elsewhere is moved first. Under another transformation (`jit`, `grad`,
`scan`) nothing is compiled: the planned program is written into that trace, in the form JAX can differentiate.

>>> import jax.numpy as jnp, jshard
>>> from jshard._prepare import prepare
>>> f = jshard.shard(lambda x, w: x @ w)
>>> program = Program(prepare(f._request, (jnp.ones((4, 2)), jnp.ones((2, 3))), {}))
>>> program.run((jnp.ones((4, 2)), jnp.ones((2, 3))), {})[0].shape
(4, 3)
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding

from jshard import _jaxcompat as compat
from jshard._errors import MeshError
from jshard._lower.interpret import spmd
from jshard._prepare import Prepared, Request
from jshard._signature import without_statics


class Program:
    """One planned signature, compiled when it is first run."""

    def __init__(self, prepared: Prepared):
        self.prepared = prepared
        self._lock = threading.RLock()
        self._compiled: jax.stages.Compiled | None = None

    def lower(self) -> jax.stages.Lowered:
        """The planned program for arguments in the planned layouts."""
        return _lower(self.prepared)

    def compile(self) -> jax.stages.Compiled:
        """The program compiled, once."""
        if self._compiled is None:
            with self._lock:
                if self._compiled is None:
                    self._compiled = self.lower().compile()  # kept only when whole
        return self._compiled

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Results of a call, and what JAX's dispatch needs to repeat it; None where it could not know better."""
        compiled = self.compile()
        left, left_kw = without_statics(self.prepared.request, args, kwargs)
        left, left_kw, repeatable = _place(self.prepared, left, left_kw)
        out, again = compat.first_call(compiled, left, left_kw)
        return out, again if repeatable else None


def _lower(prepared: Prepared) -> jax.stages.Lowered:
    mesh = prepared.chosen.mesh
    body = spmd(prepared.schedule, mesh)
    constants = prepared.schedule.choice.program.constants

    def run(*args: Any, **kwargs: Any) -> Any:
        # A compiled call of its own: its arguments come in our shardings, a mesh in context says nothing of them.
        with compat.inside_mesh(mesh):
            return jax.tree.unflatten(prepared.out_tree, body(*jax.tree.leaves((args, kwargs)), *constants))

    run.__name__ = run.__qualname__ = prepared.request.name
    shardings = jax.tree.leaves(prepared.plan.in_shardings)
    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s, weak_type=a.weak_type)
        for a, s in zip(prepared.in_avals, shardings, strict=True)
    ]
    args, kwargs = jax.tree.unflatten(prepared.in_tree, shapes)
    given, named = _donated(prepared)
    jitted = jax.jit(
        run,
        out_shardings=prepared.plan.out_shardings,
        donate_argnums=given or None,
        donate_argnames=named or None,
    )
    return jitted.lower(*args, **kwargs)


def _donated(prepared: Prepared) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Donated arguments by position and by keyword, static ones not counted."""
    donated = set(prepared.donated)
    numbered = jax.tree.unflatten(prepared.in_tree, range(len(prepared.in_avals)))
    args, kwargs = numbered
    given = tuple(i for i, a in enumerate(args) if donated.intersection(jax.tree.leaves(a)))
    return given, tuple(n for n, a in kwargs.items() if donated.intersection(jax.tree.leaves(a)))


def inline(prepared: Prepared, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The planned program inside another trace, in the form JAX can differentiate."""
    leaves = jax.tree.leaves(without_statics(prepared.request, args, kwargs))
    body = spmd(prepared.schedule, prepared.chosen.mesh, vma=True)
    marked = [compat.boundary(x, prepared.request.name) for x in leaves]
    choice = prepared.schedule.choice
    context = jax.sharding.get_abstract_mesh()
    if not context.empty and AxisType.Explicit in context.axis_types:
        specs = tuple(choice.needed(i, 0).spec for i in choice.program.outputs)
        body = jax.sharding.auto_axes(body, out_sharding=list(specs))
    out: Any = body(*marked, *choice.program.constants)
    return jax.tree.unflatten(prepared.out_tree, out)


def _place(prepared: Prepared, args: tuple, kwargs: dict) -> tuple[tuple, dict, bool]:
    """The arguments where the plan wants them, and whether JAX's own dispatch can do the same next time."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    shardings = jax.tree.leaves(prepared.plan.in_shardings)
    elsewhere = [i for i, (x, s) in enumerate(zip(leaves, shardings, strict=True)) if _elsewhere(x, s)]
    if not elsewhere:
        return args, kwargs, True
    for i in elsewhere:
        _check_devices(prepared.request, leaves[i], shardings[i])
    # It takes arrays on as many devices as the program has as they are, and brings others to their places.
    repeatable = all(len(leaves[i].sharding.device_set) != shardings[i].num_devices for i in elsewhere)
    moved = jax.device_put([leaves[i] for i in elsewhere], [shardings[i] for i in elsewhere])
    for i, x in zip(elsewhere, moved, strict=True):
        leaves[i] = x
    return (*jax.tree.unflatten(tree, leaves), repeatable)


def _elsewhere(x: Any, sharding: NamedSharding) -> bool:
    if not isinstance(x, jax.Array) or not getattr(x, "committed", True) or x.sharding is sharding:
        return False  # JAX itself places what is on the host or not committed to a device
    return not x.sharding.is_equivalent_to(sharding, x.ndim)


def _check_devices(request: Request, x: Any, sharding: NamedSharding) -> None:
    foreign = x.sharding.device_set - sharding.device_set
    if foreign:
        names = ", ".join(str(d) for d in sorted(foreign, key=lambda d: d.id)[:3])
        raise MeshError(
            f"an argument of shape {x.shape} lies on {names}, outside the mesh of {len(sharding.device_set)} devices",
            where=f"call of {request.name}",
            fix="jax.device_put(x, f.plan(x).in_shardings[0][0]), or give shard a mesh with these devices",
        )
