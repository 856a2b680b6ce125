"""What a value is with respect to the batch: per example, shared by all examples, or a sum over them.

>>> per_example(0), per_example(0, inner=16), SHARED, SUM
(BatchClass(kind='per example', dim=0, inner=1), BatchClass(kind='per example', dim=0, inner=16), \
BatchClass(kind='shared', dim=-1, inner=1), BatchClass(kind='sum', dim=-1, inner=1))
>>> print(per_example(0, inner=16), SHARED, SUM, sep="; ")
per example (dimension 0, 16 of each); shared; sum over examples
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

from jshard._core import jaxcompat as compat
from jshard._core.errors import ShardError
from jshard._core.jax_types import Jaxpr, JaxprEqn
from jshard._program.equation_bodies import every_equation
from jshard._program.loop_invariants import CHECKPOINTED


@dataclasses.dataclass(frozen=True)
class BatchClass:
    """The class of one value.

    - `dim`: of a value per example, the dimension with the examples, each with `inner` consecutive elements: after
        `(batch, sequence, d) -> (batch * sequence, d)` dimension 0 has `sequence` elements of each example.
    """

    kind: Literal["shared", "per example", "sum"]
    dim: int = -1
    inner: int = 1

    def __str__(self) -> str:
        if self.kind != "per example":
            return "shared" if self.kind == "shared" else "sum over examples"
        return f"per example (dimension {self.dim}{f', {self.inner} of each' if self.inner > 1 else ''})"

    @property
    def is_example(self) -> bool:
        """Whether the value has elements of its own for each example."""
        return self.kind == "per example"

    def moved(self, by: int) -> BatchClass:
        """The class of the value with `by` more (fewer) dimensions before the others."""
        return dataclasses.replace(self, dim=self.dim + by) if self.is_example else self


SHARED = BatchClass("shared")
"""The same for all examples: weights, constants, results of finished sums."""

FIXED_SHAPES = frozenset(("shard_map", "pallas_call"))
"""Primitives whose bodies have the shapes of what they were traced for."""

SUM = BatchClass("sum")
"""A sum over examples: of a piece of the batch, one addend of it."""


def per_example(dim: int, inner: int = 1) -> BatchClass:
    """The class of a value with the examples along `dim`."""
    return BatchClass("per example", dim, inner)


class CoupledError(Exception):
    """Signals that an operator has no result for a piece of the batch alone; handled inside this package.

    `eqn` is the operator, `why` the reason.
    """

    def __init__(self, eqn: JaxprEqn, why: str):
        super().__init__(why)
        self.eqn, self.why = eqn, why

    def __str__(self) -> str:
        return f"{described(self.eqn)}: {self.why}"


def described(eqn: JaxprEqn) -> str:
    """An operator by its primitive, result type, source line and the module that it is in."""
    kind = eqn.outvars[0].aval.str_short(short_dtypes=True) if eqn.outvars else ""
    module = compat.module_path("", eqn)
    line = compat.source_line(eqn).partition(" (")[0]
    return " ".join(p for p in (eqn.primitive.name, kind, line, module and f"in {module}") if p)


def fixed_shapes_advice(eqns: Iterable[JaxprEqn]) -> str:
    """What to write for the first operator whose shapes are fixed, or an empty string."""
    name = next((e.primitive.name for e in eqns if e.primitive.name in FIXED_SHAPES), "")
    own = f'jshard.op(fn, rule="...") for the {name}, which says how it is cut'
    if name == "shard_map":
        return f"the same without shard_map, as on one device, since jshard cuts it itself, or {own}"
    return name and own


def no_batch(jaxpr: Jaxpr, where: str, without: str) -> ShardError:
    """The error for a program without a batch; `without`: what to write to leave the option away."""
    fixed = fixed_shapes_advice(e for e in every_equation(jaxpr) if e.primitive.name in FIXED_SHAPES)
    return ShardError(
        "no argument has a batch: no product keeps a dimension of an argument",
        where=where,
        fix=(f"{fixed}; or " if fixed else "") + f"{without}, or pass the data as arguments of the function, all examples "
        "at once: vmap belongs inside, jshard.shard(jax.vmap(f), ...)",
    )  # fmt: skip


def checkpoint_advice(eqns: Iterable[JaxprEqn]) -> str:
    """What to write where a loop in a checkpointed layer computes a sum over the batch again, which couples its examples.

    `eqns`: those in which operators are coupled. Empty where no call of theirs is checkpointed and has a loop: sums that are
    computed again outside loops are saved anyway, and batch statistics couple the layers themselves.
    """
    if not any(_checkpointed(e) for e in eqns):
        return ""
    return (
        "; sums over the batch in a layer under jax.checkpoint are saved, not computed again: "
        's = jax.ad_checkpoint.checkpoint_name(s, "sums") in the layer, after "import jax.ad_checkpoint", and '
        'jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names("sums"))'
    )


def _checkpointed(eqn: JaxprEqn, inside: bool = False) -> bool:
    """Whether an equation is or has a checkpointed call with a loop."""
    if inside and eqn.primitive.name in ("scan", "while"):
        return True
    inside |= eqn.primitive.name in CHECKPOINTED
    bodies = (p for p in eqn.params.values() if hasattr(p, "eqns") or hasattr(p, "jaxpr"))
    return any(_checkpointed(e, inside) for b in bodies for e in getattr(b, "jaxpr", b).eqns)
