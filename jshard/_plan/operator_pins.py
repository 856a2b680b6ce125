"""What the pins of one operator ask of the mesh together.

Problem.  A grid that has each pin of an operator need not have them all at once: an axis cuts one loop index of an
operator, so indices that are cut by different pins need axes of their own.

Idea.  The rule says which loop indices a pinned dimension carries. So the pins of an operator are one tuple of cuts,
one for each index, and the grid must express that tuple as it does the cuts of one tensor. Pins that give an index two
different cuts no grid can keep; the operator itself refuses them.

>>> product = Rule((((0,), (1,)), ((1,), (2,))), (((0,), (2,)),), (8, 4, 6), reduction=(1,))
>>> factor_cuts(product, [("operand", 0, (2, 1)), ("operand", 1, (1, 3))])
{0: 2, 1: 1, 2: 3}
>>> factor_cuts(product, [("operand", 0, (2, 1)), ("operand", 1, (2, 3))]) is None
True
"""

from __future__ import annotations

from collections.abc import Sequence

from jshard._core.layout import MeshAxes
from jshard._network.candidates import CandidateCache
from jshard._program.graph import Program, operator_name
from jshard._rules.rule import Rule
from jshard._spec.entry import JointConstraint, Pin


def joint_cuts(
    program: Program, pins: Sequence[tuple[int, str, int, Pin]], first: int
) -> tuple[JointConstraint, ...]:
    """The joint constraint of each operator with several pins.

    Arguments:

    - `pins`: (operator, side, index, pin).
    - `first`: the number of the first of them among all pins that are resolved.
    """
    by_op: dict[int, list[int]] = {}
    for k, (op, *_) in enumerate(pins):
        by_op.setdefault(op, []).append(k)
    cache = CandidateCache(program, MeshAxes((), ()))
    out = []
    for i, members in by_op.items():
        op = program.operators[i]
        if len(members) < 2 or op.kind != "eqn":
            continue
        rule = cache.rule_of(op)[1]
        by_count = [k for k in members if pins[k][3].axes is None]
        by_spec = [k for k in members if pins[k][3].axes is not None]
        factors = factor_cuts(rule, [(pins[k][1], pins[k][2], pins[k][3].cuts) for k in by_count])
        if not factors or not by_count:
            continue
        by_axes = {f for k in by_spec for f in _factors_with_axes(rule, *pins[k][1:])}
        cuts = tuple(c for f, c in factors.items() if c > 1 and f not in by_axes)
        texts = " and ".join(f"{pins[k][1]} {pins[k][2]} {pins[k][3]}" for k in members)
        where = f"{op.module or op.primitive} {op.source}".strip()
        out.append(
            JointConstraint(
                cuts, tuple(first + k for k in by_spec), f"the pins of {operator_name(op)}, {texts},", where
            )
        )
    return tuple(out)


def factor_cuts(rule: Rule, pins: Sequence[tuple[str, int, Sequence[int | None]]]) -> dict[int, int] | None:
    """Pieces of each factor that some pins, as (side, index, cuts), fix; None where they contradict each other.

    A dimension of several factors partitions the major one first, and the next only where that is partitioned fully.
    """
    out: dict[int, int] = {}
    for side, i, cuts in pins:
        for dim, cut in zip((rule.operands if side == "operand" else rule.results)[i], cuts, strict=True):
            if cut is None:
                continue
            for f in dim:
                size = rule.sizes[f]
                own = size if size and cut % size == 0 else cut
                if size % own or out.setdefault(f, own) != own:
                    return None
                cut //= own
            if cut > 1:
                return None
    return out


def _factors_with_axes(rule: Rule, side: str, i: int, pin: Pin) -> set[int]:
    """The factors of the dimensions for which a pin names axes."""
    dims = (rule.operands if side == "operand" else rule.results)[i]
    return {f for dim, axes in zip(dims, pin.axes or (), strict=True) if axes for f in dim}
