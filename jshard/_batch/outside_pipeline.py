"""What of a loop over layers runs before and after its pipeline: on shared values, layer by layer or all at once.

Where nothing is carried from layer to layer, the equations run under `vmap` over the layers, so that their operands may be
cut along the layers as the pipeline has them; else in a loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jshard._batch.batch_class import SHARED
from jshard._batch.body_classes import class_in
from jshard._batch.loop_parts import LoopParts
from jshard._batch.piece_operator import run_whole
from jshard._core import jaxcompat as compat
from jshard._core.jax_types import JaxprAtom


Values = Mapping[JaxprAtom, jax.Array]
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, eq=False)
class Outside:
    """What a part outside the pipeline computed.

    - `final`: of carries, by number, after the last layer.
    - `stacked`: results of every layer. `entering`: values of carries with which each layer begins.
    """

    final: Mapping[int, jax.Array]
    stacked: Values
    entering: Values


def run_early(parts: LoopParts, shared: Values, stacks: Values, initial: Values) -> Outside:
    """The carries and results of shared values, which the pipeline reads."""
    return _run_outside(parts, "shared", parts.early, _shared_equations(parts), shared, stacks, initial)


def run_late(parts: LoopParts, shared: Values, stacks: Values, sums: Values, initial: Values) -> Outside:
    """The carries and results that are computed from finished sums."""
    eqns = _shared_equations(parts) | parts.late_eqns
    return _run_outside(parts, "late", parts.late, eqns, shared, {**stacks, **sums}, initial)


def results_of_loop(
    parts: LoopParts, initial: Mapping[JaxprAtom, Result], outside: Sequence[Outside], moved: Sequence[Result],
    examples: Sequence[Result], sums: Sequence[Result],
) -> list[jax.Array | Result]:  # fmt: skip
    """The results of the whole loop from those of its parts: carries after the last layer, then stacks over layers.

    `initial`: carries before the first layer; `moved`, `examples`, `sums`: as `parts` names them, of the loop between.
    """
    final: dict[int, jax.Array | Result] = dict(zip(parts.moving, moved, strict=True))
    final.update((j, initial[parts.carries[j]]) for j in parts.fixed)
    stacked: dict[JaxprAtom, jax.Array | Result] = dict(zip(parts.sums, sums, strict=True))
    stacked.update(zip(parts.examples, examples, strict=True))
    for part in outside:
        final.update(part.final)
        stacked.update(part.stacked)
    filled = {
        k: jnp.full((parts.layers, *v.aval.shape), v.val, v.aval.dtype)  # type: ignore[attr-defined]
        for k, v in enumerate(parts.stacked)
        if compat.is_literal(v)
    }
    return [
        *(final[j] for j in range(len(parts.carries))),
        *(filled[k] if k in filled else stacked[v] for k, v in enumerate(parts.stacked)),
    ]


def _run_outside(
    parts: LoopParts, kind: str, numbers: Sequence[int], eqns: frozenset[int], shared: Values, stacks: Values,
    initial: Values,
) -> Outside:  # fmt: skip
    """The carries of some numbers, and the results of a kind, by some equations of the body."""
    results = dict.fromkeys(v for v in parts.stacked if not compat.is_literal(v))
    wanted = [v for v in results if parts.kind(v) == kind]
    final, entering = _carried(parts, numbers, eqns, shared, stacks, initial)
    each = _of_all_layers(parts, eqns, shared, {**stacks, **entering}, wanted)
    return Outside(final, dict(zip(wanted, each, strict=True)), entering)


def _shared_equations(parts: LoopParts) -> frozenset[int]:
    """Positions of the equations of shared values."""
    return frozenset(
        k
        for k, eqn in enumerate(parts.jaxpr.eqns)
        if k not in parts.late_eqns
        and all(class_in(parts.classes, v) == SHARED for v in (*eqn.invars, *eqn.outvars))
    )


def _carried(
    parts: LoopParts, numbers: Sequence[int], eqns: frozenset[int], shared: Values, stacks: Values, initial: Values
) -> tuple[dict[int, jax.Array], dict[JaxprAtom, jax.Array]]:  # fmt: skip
    """Carries after the last layer, and as each layer begins."""
    if not numbers:
        return {}, {}
    carries, after = [parts.carries[j] for j in numbers], [parts.carried[j] for j in numbers]
    positions, read = needed(parts, eqns, after, {*shared, *stacks, *carries})
    names = [v for v in stacks if v in read]

    def layer(
        carry: tuple[jax.Array, ...], slices: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        known = {**shared, **dict(zip(names, slices, strict=True)), **dict(zip(carries, carry, strict=True))}
        return tuple(run_equations(parts, positions, known, after)), carry

    last, each = lax.scan(
        layer, tuple(initial[v] for v in carries), tuple(stacks[v] for v in names), length=parts.layers,
        reverse=parts.reverse,
    )  # fmt: skip
    return dict(zip(numbers, last, strict=True)), dict(zip(carries, each, strict=True))


def _of_all_layers(
    parts: LoopParts, eqns: frozenset[int], shared: Values, stacks: Values, wanted: Sequence[JaxprAtom]
) -> list[jax.Array]:  # fmt: skip
    """Values of every layer, stacked."""
    if not wanted:
        return []
    positions, read = needed(parts, eqns, wanted, {*shared, *stacks})
    names = [v for v in stacks if v in read]

    def layer(slices: tuple[jax.Array, ...]) -> list[jax.Array]:
        return run_equations(parts, positions, {**shared, **dict(zip(names, slices, strict=True))}, wanted)

    run: Callable[[tuple[jax.Array, ...]], list[jax.Array]] = jax.vmap(layer, axis_size=parts.layers)
    return run(tuple(stacks[v] for v in names))


def needed(
    parts: LoopParts, eqns: frozenset[int], wanted: Sequence[JaxprAtom], known: set[JaxprAtom]
) -> tuple[list[int], set[JaxprAtom]]:
    """The equations, of `eqns`, that some values need, in order; and what is read."""
    read = {v for v in wanted if not compat.is_literal(v)}
    positions = []
    for k in range(len(parts.jaxpr.eqns) - 1, -1, -1):
        eqn = parts.jaxpr.eqns[k]
        if k in eqns and any(v in read and v not in known for v in eqn.outvars):
            positions.append(k)
            read.update(v for v in eqn.invars if not compat.is_literal(v))
    return positions[::-1], read


def run_equations(
    parts: LoopParts, positions: Sequence[int], known: Values, wanted: Sequence[JaxprAtom]
) -> list[jax.Array]:
    """Equations of the body on whole values."""
    values = dict(known)

    def whole(v: JaxprAtom) -> jax.Array:
        return v.val if compat.is_literal(v) else values[v]  # type: ignore[return-value]

    for k in positions:
        eqn = parts.jaxpr.eqns[k]
        with compat.eqn_context(eqn):
            values.update(zip(eqn.outvars, run_whole(eqn, list(map(whole, eqn.invars))), strict=True))
    return [jnp.asarray(whole(v), v.aval.dtype) for v in wanted]
