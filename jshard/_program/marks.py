"""Marks that `jshard.op` leaves in a traced program: identities that carry a pin.

An operand mark pins how the operators that read the value directly take it; a result mark pins the layout in
which a value is made. Marks are primitives of our own, so they survive `jit`, `grad`, `vmap` and caches, and
compile to nothing. Derivatives pass unmarked: what the user said about the forward operator says nothing about
the backward one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jshard import _jaxcompat as compat


PIN_OPERAND = "jshard_pin_operand"
_RESULT = "jshard_pin_result"

OWN_RESULT = "jshard_own_result"

operand_mark = compat.identity_primitive(PIN_OPERAND)
result_mark = compat.identity_primitive(_RESULT)
own_result = compat.identity_primitive(OWN_RESULT)


def _sharding(eqn: Any) -> Any:
    return compat.constraint_of(eqn)


PIN_RESULT: Mapping[str, Callable[[Any], Any]] = {
    _RESULT: lambda eqn: eqn.params["pin"],
    "sharding_constraint": _sharding,
    "reshard": _sharding,
}
"""Identities of the program whose result is pinned, and how to read the pin off the equation."""


def mark_operand(x: Any, pin: Any) -> Any:
    """`x`, with `pin` for the operators that read it."""
    return operand_mark.bind(x, pin=pin)


def mark_result(x: Any, pin: Any) -> Any:
    """`x`, made in the layout that `pin` asks for."""
    return result_mark.bind(x, pin=pin)
