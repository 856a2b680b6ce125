"""Marks in a traced program that carry a pin: those of `jshard.op`, and the shardings that JAX's functions take.

An operand mark pins how the operators that read the value directly take it; a result mark pins the layout in
which a value is made. Marks are primitives of our own, so they survive `jit`, `grad`, `vmap` and caches, and
compile to nothing. Derivatives pass unmarked: what the user said about the forward operator says nothing about
the backward one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jshard import _jaxcompat as compat


PIN_OPERAND = "jshard_pin_operand"
_RESULT = "jshard_pin_result"

OWN_RESULT = "jshard_own_result"
OUT_SHARDING = "out_sharding"

pin_operand_p = compat.identity_primitive(PIN_OPERAND)
pin_result_p = compat.identity_primitive(_RESULT)
own_result_p = compat.identity_primitive(OWN_RESULT)
out_sharding_p = compat.identity_primitive(OUT_SHARDING)


def _constraint(eqn: Any) -> Any:
    return compat.constraint_of(eqn)


def _reshard(eqn: Any) -> Any:
    return _of_typed(compat.constraint_of(eqn))


def _of_typed(sharding: Any) -> Any:
    """A sharding of a mesh with Explicit axes, with what they leave to other axes open; None if it has none."""
    kinds = getattr(getattr(sharding, "mesh", None), "axis_types", None) or ()
    if AxisType.Explicit not in kinds:
        return None  # what `auto_axes` does to types
    if all(k == AxisType.Explicit for k in kinds):
        return sharding
    spec = PartitionSpec(*(PartitionSpec.UNCONSTRAINED if d is None else d for d in sharding.spec))
    return NamedSharding(sharding.mesh, spec)


RESULT_PIN_READERS: Mapping[str, Callable[[Any], Any]] = {
    _RESULT: lambda eqn: eqn.params["pin"],
    "sharding_constraint": _constraint,
    "reshard": _reshard,
}
"""Identities of the program whose result is pinned, and how to read the pin off the equation; it may be None."""

_REPEATS = frozenset(("broadcast_in_dim", "iota"))
"""Of these JAX repeats the type even where it says nothing."""


def requested_result_shardings(eqn: Any) -> tuple[Any, ...]:
    """The sharding that the user's code asks of each result: `out_sharding=`, `device_put`, `jit(out_shardings=)`."""
    name, params = eqn.primitive.name, eqn.params
    if name == "device_put":
        return tuple(params.get("devices", ()))
    if "out_shardings" in params:
        return tuple(params["out_shardings"])
    wanted = params.get("out_sharding", params.get("sharding"))
    if wanted is None or name in RESULT_PIN_READERS:
        return ()
    if name in _REPEATS and not any(d is not None for d in getattr(wanted, "spec", ())):
        return ()
    return (_of_typed(wanted),)


def pin_operand(x: Any, pin: Any) -> Any:
    """`x`, with `pin` for the operators that read it."""
    return pin_operand_p.bind(x, pin=pin)


def pin_result(x: Any, pin: Any) -> Any:
    """`x`, made in the layout that `pin` asks for."""
    return pin_result_p.bind(x, pin=pin)
