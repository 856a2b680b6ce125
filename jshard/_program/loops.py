"""Loops and branches of a jaxpr: their boundary operators, and their bodies in terms of inner tensors.

A scan's carry, for example, is an operator with two operands (initial value, value after an iteration) and two results
(value inside the body, final value), all of one layout; outer values that a body only reads enter it through a `const`
operator each. Loop-invariant equations are hoisted in front of the loop (`loop_invariants.py`), so one equation may
become several steps.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Literal as OneOf

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import ClosedJaxpr, Jaxpr, JaxprAtom, JaxprEqn
from jshard._program.builder import Builder, Env, Frame
from jshard._program.common_subexpressions import ValueNumbering
from jshard._program.loop_invariants import Path, hoist, still_read
from jshard._program.operators import Atom, Block, Call, Literal, Operator
from jshard._program.stage_shift import ADD_TO_ROUND
from jshard._program.trip_counts import as_int, trip_count_of


_ADDITIVE = frozenset(("add", "add_any", "sub", "scan_sum"))
# Linear operators of one sum, through which the walk from a total to its addends goes.
_PASSING = frozenset(
    "zero_unless rounded_sum convert_element_type transpose reshape squeeze broadcast_in_dim neg copy".split()
)

SUMMED_STACK = "scan_summed_ys"
"""The primitive of a `scan_ys` whose results an outer loop only adds up."""


def scan(b: Builder, eqn: JaxprEqn, env: Env, repeat: float, prefix: str) -> list[int | Call]:
    """The steps of a scan: its hoisted equations, then the loop."""
    num_consts, num_carry = compat.scan_split(eqn.params)
    body, length = eqn.params["jaxpr"], max(1, int(eqn.params["length"]))
    operands = [b.read(v, env) for v in eqn.invars]
    consts, carries, stacks = (
        operands[:num_consts],
        operands[num_consts : num_consts + num_carry],
        operands[num_consts + num_carry :],
    )
    inside = repeat * length
    steps: list[int | Call] = []
    outer = _hoist_invariants(b, body, consts, (), repeat, prefix, steps)
    const_ops, frame = _constants(b, "scan_const", outer, 0, eqn, repeat, prefix, inside)
    inner: list[Atom | None] = [_inner_constant(b, a, frame) for a in consts]
    body_avals = [v.aval for v in compat.open_jaxpr(body)[0].invars[num_consts:]]

    carry_ops, results = [], []
    for k, a in enumerate(carries):
        avals = [body_avals[k], eqn.outvars[k].aval]
        names = [f"scan carry {num_consts + k}", f"scan result {k}"]
        i, (in_body, final) = b.boundary(
            "scan_carry", [a], avals, names, repeat, [repeat, inside], eqn, prefix, [inside, repeat]
        )
        carry_ops.append(i)
        inner.append(in_body)
        results.append(final)
    xs_ops, slices = [], []
    for k, a in enumerate(stacks, num_carry):
        i, (in_body,) = b.boundary(
            "scan_xs", [a], [body_avals[k]], [f"scan xs {num_consts + k}"], repeat, [repeat], eqn, prefix, [inside]
        )  # fmt: skip
        xs_ops.append(i)
        slices.append(in_body)
    inner += _first_of_equal(slices, list(map(b.key, stacks)))

    first_inner = len(b.operators)
    block = _body(b, body, inner, inside, prefix, frame, ())
    for i, a in zip(carry_ops, block.outputs[:num_carry], strict=True):
        sums = _is_accumulator(b, b.operators[i].results[0], a, first_inner)
        b.set_loop_value(i, a, "scan_sum" if sums else None)
        if sums:
            _mark_summed_stacks(b, a, first_inner)
    ys_ops = []
    for k, a in enumerate(block.outputs[num_carry:]):
        aval = eqn.outvars[num_carry + k].aval
        i, (stacked,) = b.boundary(
            "scan_ys", [a], [aval], [f"scan stacked {k}"], repeat, [inside], eqn, prefix
        )
        ys_ops.append(i)
        results.append(stacked)
    first_stacks = _first_of_equal(results[num_carry:], list(map(b.key, block.outputs[num_carry:])))
    env.update(zip(eqn.outvars, [*results[:num_carry], *first_stacks], strict=True))
    boundary = {
        "const": tuple(const_ops), "carry": tuple(carry_ops), "xs": tuple(xs_ops), "ys": tuple(ys_ops),
    }  # fmt: skip
    return [
        *steps, Call("scan", eqn, tuple(operands), tuple(results), (block,), boundary, prefix, length)
    ]  # fmt: skip


def while_loop(b: Builder, eqn: JaxprEqn, env: Env, repeat: float, prefix: str) -> list[int | Call]:
    """The steps of a `while`: its hoisted equations, then the loop."""
    p = eqn.params
    n_test, n_body = p["cond_nconsts"], p["body_nconsts"]
    operands = [b.read(v, env) for v in eqn.invars]
    test_consts, body_consts, carries = (
        operands[:n_test],
        operands[n_test : n_test + n_body],
        operands[n_test + n_body :],
    )
    trip_count = trip_count_of(eqn, [as_int(a.value) if isinstance(a, Literal) else None for a in operands])
    # With an unknown trip count, condition and body count once. A known one evaluates its condition once more.
    inside, tests = repeat * (trip_count or 1), repeat * (trip_count + 1 if trip_count else 1)
    test, body = p["cond_jaxpr"], p["body_jaxpr"]
    steps: list[int | Call] = []
    test_outer = _hoist_invariants(b, test, test_consts, ("test",), repeat, prefix, steps)
    body_outer = _hoist_invariants(b, body, body_consts, ("turn",), repeat, prefix, steps)
    test_ops, test_frame = _constants(b, "while_const", test_outer, 0, eqn, repeat, prefix, tests)
    const_ops, body_frame = _constants(
        b, "while_const", body_outer, len(test_ops), eqn, repeat, prefix, inside
    )
    carry_ops, in_test, in_body, results = [], [], [], []
    for k, a in enumerate(carries):
        # Condition and body have a value each: a copy resharded for one is not visible to the other.
        names = [f"while test carry {k}", f"while carry {k}", f"while result {k}"]
        i, values = b.boundary(
            "while_carry", [a], [eqn.outvars[k].aval] * 3, names, repeat, [repeat, inside], eqn, prefix,
            [tests, inside, repeat],
        )  # fmt: skip
        carry_ops.append(i)
        for values_there, t in zip((in_test, in_body, results), values, strict=True):
            values_there.append(t)

    inner = [_inner_constant(b, a, test_frame) for a in test_consts] + in_test
    test_block = _body(b, test, inner, tests, prefix, test_frame, ("test",))
    aval = compat.open_jaxpr(test)[0].outvars[0].aval
    pred, (predicate,) = b.boundary(
        "predicate", [test_block.outputs[0]], [aval], ["while test"], tests, [tests], eqn, prefix
    )
    test_block = Block(test_block.inputs, (predicate,), test_block.steps)
    inner = [_inner_constant(b, a, body_frame) for a in body_consts] + in_body
    body_block = _body(b, body, inner, inside, prefix, body_frame, ("turn",))
    for i, a in zip(carry_ops, body_block.outputs, strict=True):
        b.set_loop_value(i, a)
    env.update(zip(eqn.outvars, results, strict=True))
    boundary = {
        "test": tuple(test_ops), "const": tuple(const_ops), "carry": tuple(carry_ops), "pred": (pred,),
    }  # fmt: skip
    blocks = test_block, body_block
    return [
        *steps, Call("while", eqn, tuple(operands), tuple(results), blocks, boundary, prefix, trip_count)
    ]  # fmt: skip


def cond(b: Builder, eqn: JaxprEqn, env: Env, repeat: float, prefix: str) -> list[int | Call]:
    """The one step of a branch: its bodies, and a `cond_join` operator per result."""
    operands = [b.read(v, env) for v in eqn.invars]
    pred, _ = b.boundary(
        "predicate", [operands[0]], [eqn.invars[0].aval], ["branch index"], repeat, [repeat], eqn, prefix
    )
    blocks, values = [], []
    outer = b.value_numbering
    for k, branch in enumerate(eqn.params["branches"]):
        b.path.append(
            f"branch {k}"
        )  # what is hoisted in one branch is known by its place, which another has too
        b.value_numbering = ValueNumbering()
        blocks.append(b.enter(branch, operands[1:], repeat, prefix, separate=False))
        values.append([b.value_numbering.first_equal(b.key(a)) for a in blocks[-1].outputs])
        b.path.pop()
    b.value_numbering = outer
    joins, results = [], []
    for k, v in enumerate(eqn.outvars):
        ends = [block.outputs[k] for block in blocks]
        i, (joined,) = b.boundary(
            "cond_join", ends, [v.aval], [f"cond result {k}"], repeat, [repeat] * len(blocks), eqn, prefix
        )
        joins.append(i)
        results.append(joined)
    env.update(zip(eqn.outvars, _first_of_equal(results, list(zip(*values, strict=True))), strict=True))
    boundary = {"pred": (pred,), "join": tuple(joins)}
    return [Call("cond", eqn, tuple(operands), tuple(results), tuple(blocks), boundary, prefix)]


def _first_of_equal(atoms: Sequence[int], values: Sequence[Hashable]) -> list[int]:
    """The atoms, each replaced by the first one of an equal value: XLA keeps, stacks and moves that one alone.

    >>> _first_of_equal([7, 8, 9], ["x", "y", "x"])
    [7, 8, 7]
    """
    first: dict[Hashable, int] = {}
    return [first.setdefault(value, a) for a, value in zip(atoms, values, strict=True)]


def _hoist_invariants(
    b: Builder, body: Jaxpr | ClosedJaxpr, consts: Sequence[Atom], part: Path, repeat: float, prefix: str,
    steps: list[int | Call],
) -> list[int]:  # fmt: skip
    """Append a body's loop-invariant equations to the `steps` before the loop; the outer tensors it still reads."""
    jaxpr, arrays = compat.open_jaxpr(body)
    path = (*b.path, *part)
    invariant: dict[JaxprAtom, Atom] = dict(zip(jaxpr.invars, consts, strict=False))
    b.bind(jaxpr.constvars, arrays, invariant)

    def write(equation: JaxprEqn, place: Path, operands: list[Atom], stack: str) -> Sequence[Atom]:
        values = {v: a for v, a in zip(equation.invars, operands, strict=True) if not compat.is_literal(v)}
        # Equations hoisted inside this one are recorded by its own path, not by that of the loop it leaves.
        outer_path, b.path = b.path, list(place)
        steps.extend(b.step(equation, values, repeat, stack))
        b.path = outer_path
        return [values[v] for v in equation.outvars]

    hoisted = hoist(jaxpr, dict(invariant), path, prefix, write, b.bind, b.hoisted)
    b.hoisted.update({p: (len(b.frames), atoms) for p, atoms in hoisted.items()})
    values = {p: b.in_current_body(*entry) for p, entry in b.hoisted.items() if p[: len(path)] == path}
    return [
        a
        for a in still_read(jaxpr, {**invariant}, path, values)
        if isinstance(a, int) and a not in b.captured
    ]


def _constants(
    b: Builder, kind: OneOf["scan_const", "while_const"], outer: Sequence[int], first: int, eqn: JaxprEqn, repeat: float,
    prefix: str, inside: float,
) -> tuple[list[int], Frame]:  # fmt: skip
    """Boundary operators for the outer tensors of a body that runs `inside` times, named from number `first`."""
    ops, frame = [], {}
    loop = kind.removesuffix("_const")
    for k, t in enumerate(outer, first):
        i, (in_body,) = b.boundary(
            kind, [t], [b.tensors[t]], [f"{loop} const {k}"], repeat, [repeat], eqn, prefix, [inside]
        )
        ops.append(i)
        frame[t] = in_body
    return ops, frame


def _inner_constant(b: Builder, a: Atom, frame: Frame) -> Atom | None:
    """A constant of a loop as an atom of its body; None where the body does not read it."""
    return a if isinstance(a, Literal) or a in b.captured else frame.get(a)


def _body(
    b: Builder,
    body: Jaxpr | ClosedJaxpr,
    operands: Sequence[Atom | None],
    repeat: float,
    prefix: str,
    frame: Frame,
    part: Path,
) -> Block:
    """Walk a loop's body; `part` tells the condition and the body of a `while` apart."""
    b.frames.append(frame)
    b.path.extend(part)
    block = b.enter(body, operands, repeat, prefix)
    del b.path[len(b.path) - len(part) :]
    b.frames.pop()
    return block


def _addends(
    b: Builder, after: Atom, first: int, passing: frozenset[str] = frozenset()
) -> Iterator[tuple[Atom, Operator | None]]:
    """The value `after` an iteration, then what it adds up, each with the operator that defines it in the iteration.

    Walks through additions, whole and to parts, of the operators from `first` on, and through the primitives `passing`.
    """
    defining = {t: op for op in b.operators[first:] for t in op.results}
    visited: set[Atom] = set()
    pending = [after]
    while pending:
        atom = pending.pop()
        op = None if isinstance(atom, Literal) or atom in visited else defining.get(atom)
        visited.add(atom)
        yield atom, op
        if op is None:
            continue
        if op.primitive in ("sub", "scan_sum") or op.primitive in passing:
            pending += op.operands[:1]
        elif op.primitive == ADD_TO_ROUND:
            pending += op.operands[:2]
        elif op.primitive in _ADDITIVE:
            pending += op.operands


def _is_accumulator(b: Builder, carried: int, after: Atom, first: int) -> bool:
    """Whether an iteration only adds to a carry, which may then stay a partial sum until the loop ends.

    `carried` is its value before the iteration, `after` that behind it; `first`: of the iteration's operators.
    """
    return any(atom == carried for atom, _ in itertools.islice(_addends(b, after, first), 1, None))


def _mark_summed_stacks(b: Builder, after: Atom, first: int) -> None:
    """Mark the stacked results of inner loops that an iteration only adds to a carry, `after` it.

    Such a stack lives for one iteration, so it may stay a partial sum where the carry does, however large it is.
    """
    for _, op in _addends(b, after, first, _PASSING):
        if op is not None and op.kind == "scan_ys":
            b.operators[op.id] = dataclasses.replace(op, primitive=SUMMED_STACK)
