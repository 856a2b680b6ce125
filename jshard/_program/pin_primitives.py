"""Identity primitives that carry sharding constraints: those of `jshard.op`, and those of JAX's own functions.

An operand pin constrains the layout in which operators read a value directly, a result pin the layout in which it is
defined. They are primitives, so they survive `jit`, `grad`, `vmap` and JAX's caches, and they compile to nothing.
Tangents and cotangents are not pinned: a constraint on the forward operator does not apply to the backward one. Those of the
stages of a pipeline do: where a value is read as pinned, its cotangent is defined so, and the other way round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
from jax.interpreters import ad
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import JaxprEqn


PIN_OPERAND = "jshard_pin_operand"
PIN_RESULT = "jshard_pin_result"

OWN_RESULT = "jshard_own_result"
OUT_SHARDING = "out_sharding"
MODULE_OUTPUT = "jshard_module_output"

pin_operand_p = compat.identity_primitive(PIN_OPERAND)
pin_result_p = compat.identity_primitive(PIN_RESULT)


def _with_cotangents(primitive: compat.jex.Primitive, dual: compat.jex.Primitive) -> None:
    """Derivative rules that pin tangents and cotangents too where the pin says so; `dual` pins the other end of a value."""

    def tangents_of(primals: Sequence, tangents: Sequence, *, pin: object) -> tuple:
        (t,) = tangents
        keeps = getattr(pin, "of_cotangent", False) and not isinstance(t, ad.Zero)
        return primitive.bind(*primals, pin=pin), primitive.bind(t, pin=pin) if keeps else t

    def cotangent_of(ct: object, x: object, *, pin: object) -> list:
        return [ct if isinstance(ct, ad.Zero) else dual.bind(ct, pin=pin)]

    ad.primitive_jvps[primitive] = tangents_of
    ad.primitive_transposes[primitive] = cotangent_of


_with_cotangents(pin_operand_p, pin_result_p)
_with_cotangents(pin_result_p, pin_operand_p)

own_result_p = compat.identity_primitive(OWN_RESULT)
out_sharding_p = compat.identity_primitive(OUT_SHARDING)
NAMED_VALUES = frozenset((MODULE_OUTPUT, "name"))
"""Identity primitives that name a value: an output of a module or scope, and JAX's `checkpoint_name`."""

module_output_p = compat.identity_primitive(MODULE_OUTPUT)


@dataclasses.dataclass(frozen=True)
class ModuleOutput:
    """An array in the output of the module at `path`, or of the named scope where `kind` is "scope".

    - `element`: its number in an output of `elements` parts (a tuple or list); `elements` is 0 for a single array.
    - `added`: its dimensions that `vmap` added, in order.
    """

    path: str
    element: int = 0
    elements: int = 0
    added: tuple[int, ...] = ()
    kind: str = "module"

    def batched(self, dim: int) -> ModuleOutput:
        """The same output after `vmap`, which added dimension `dim`."""
        return dataclasses.replace(self, added=(*self.added, dim))


def mark_module_output(x: jax.Array, name: ModuleOutput) -> jax.Array:
    """`x`, named as an output of a module; the name survives `jit`, `grad`, `vmap` and `scan`."""
    return module_output_p.bind(x, pin=name)


def _constraint(eqn: JaxprEqn) -> Sharding | None:
    return compat.constraint_of(eqn)


def _reshard(eqn: JaxprEqn) -> Sharding | None:
    return _over_explicit_axes(compat.constraint_of(eqn))


def _over_explicit_axes(sharding: Sharding | None) -> Sharding | None:
    """A sharding over Explicit mesh axes, its other dimensions unconstrained; None if no axis is Explicit."""
    kinds = sharding.mesh.axis_types or () if isinstance(sharding, NamedSharding) else ()
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in kinds:
        return None  # types under `auto_axes`
    if all(k == AxisType.Explicit for k in kinds):
        return sharding
    spec = PartitionSpec(*(PartitionSpec.UNCONSTRAINED if d is None else d for d in sharding.spec))
    return NamedSharding(sharding.mesh, spec)


RESULT_PIN_READERS: Mapping[str, Callable[[JaxprEqn], object]] = {
    PIN_RESULT: lambda eqn: eqn.params["pin"],
    "sharding_constraint": _constraint,
    "reshard": _reshard,
}
"""Identity primitives with a pinned result -> how to read the pin, or None, from the equation."""

_ALWAYS_TYPED = frozenset(("broadcast_in_dim", "iota"))
"""Their `sharding` parameter is set even where the user asked for none; it then names no axis."""


def requested_result_shardings(eqn: JaxprEqn) -> tuple[object, ...]:
    """The shardings of an equation's results under `out_sharding=`, `device_put` or `jit(out_shardings=)`; or empty."""
    name, params = eqn.primitive.name, eqn.params
    if name == "device_put":
        return tuple(params.get("devices", ()))
    if "out_shardings" in params:
        return tuple(params["out_shardings"])
    sharding = params.get("out_sharding", params.get("sharding"))
    if sharding is None or name in RESULT_PIN_READERS:
        return ()
    if name in _ALWAYS_TYPED and not any(d is not None for d in getattr(sharding, "spec", ())):
        return ()
    return (_over_explicit_axes(sharding),)


def pin_operand(x: jax.Array, pin: object) -> jax.Array:
    """`x`, with a constraint on the operators that read it directly."""
    return pin_operand_p.bind(x, pin=pin)


def pin_result(x: jax.Array, pin: object) -> jax.Array:
    """`x`, defined in the layout of `pin`."""
    return pin_result_p.bind(x, pin=pin)
