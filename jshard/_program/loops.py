"""Loops and branches of a jaxpr: boundary operators, and bodies walked with values that stand for the outer ones.

A scan's carry, for one, is an operator with two operands (initial value, value after a turn) and two results (value
seen by the body, final value), all of one layout; what a body only reads comes in through an operator of its own. What
never changes in a loop is computed in front of it (`loop_invariants.py`), so each function gives several steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jshard import _jaxcompat as compat
from jshard._program.graph import Atom, Block, Call, Literal
from jshard._program.loop_invariants import Path, hoist, still_read
from jshard._program.trip_counts import as_int, trip_count_of


if TYPE_CHECKING:
    from jshard._program.trace import Builder

_ADDING = frozenset(("add", "add_any", "sub", "scan_sum"))

Frame = dict[int, int]  # outer tensors that a body reads, and the tensors by which it has them


def scan(b: Builder, eqn: Any, env: dict[Any, Any], repeat: float, prefix: str) -> list[int | Call]:
    """The steps of a scan: what it need not repeat, then the loop."""
    n_const, n_carry = compat.scan_split(eqn.params)
    body, length = eqn.params["jaxpr"], max(1, int(eqn.params["length"]))
    operands = [b.read(v, env) for v in eqn.invars]
    jaxpr, _ = compat.open_jaxpr(body)
    inside = repeat * length
    before: list[int | Call] = []
    read = _hoist_invariants(b, body, operands[:n_const], (), repeat, prefix, before)
    const, frame = _constants(b, "scan", read, 0, eqn, repeat, prefix, inside)
    roles: dict[str, list[int]] = {"const": const, "carry": [], "xs": [], "ys": []}
    inner: list[Any] = [_inside(b, a, frame) for a in operands[:n_const]]
    results: list[int] = []
    for k, (a, v) in enumerate(zip(operands[n_const:], jaxpr.invars[n_const:], strict=True), n_const):
        role = "carry" if k < n_const + n_carry else "xs"
        avals = [v.aval, eqn.outvars[k - n_const].aval] if role == "carry" else [v.aval]
        names = [f"scan {role} {k}", f"scan result {k - n_const}"][: len(avals)]
        times, turns = [repeat, inside][: len(avals)], [inside, repeat][: len(avals)]
        i, made = b.boundary("scan_" + role, [a], avals, names, repeat, times, eqn, prefix, turns)
        roles[role].append(i)
        inner.append(made[0])
        results += made[1:]
    start = len(b.operators)
    block = _body(b, body, inner, inside, prefix, frame, ())
    for i, a in zip(roles["carry"], block.outputs[:n_carry], strict=True):
        sums = _is_accumulator(b, b.operators[i].results[0], a, start)
        b.set_loop_value(i, a, "scan_sum" if sums else "")
    for k, a in enumerate(block.outputs[n_carry:]):
        aval = eqn.outvars[n_carry + k].aval
        i, made = b.boundary("scan_ys", [a], [aval], [f"scan stacked {k}"], repeat, [inside], eqn, prefix)
        roles["ys"].append(i)
        results += made
    env.update(zip(eqn.outvars, results, strict=True))
    bound = {k: tuple(v) for k, v in roles.items()}
    call = Call("scan", eqn, tuple(operands), tuple(results), (block,), bound, prefix, length)
    return [*before, call]


def while_loop(b: Builder, eqn: Any, env: dict[Any, Any], repeat: float, prefix: str) -> list[int | Call]:
    """The steps of a `while`: what it need not repeat, then the loop."""
    p = eqn.params
    nc, nb = p["cond_nconsts"], p["body_nconsts"]
    operands = [b.read(v, env) for v in eqn.invars]
    turns = trip_count_of(eqn, [as_int(a.value) if isinstance(a, Literal) else None for a in operands])
    # Where nobody knows the turns, test and body count as run once. A loop that is known ends in one test more.
    inside, tests = repeat * (turns or 1), repeat * (turns + 1 if turns else 1)
    test, turn = p["cond_jaxpr"], p["body_jaxpr"]
    before: list[int | Call] = []
    given = operands[:nc], operands[nc : nc + nb]
    reads = [
        _hoist_invariants(b, body, consts, (part,), repeat, prefix, before)
        for body, consts, part in zip((test, turn), given, ("test", "turn"), strict=True)
    ]
    tested, frame = _constants(b, "while", reads[0], 0, eqn, repeat, prefix, tests)
    const, other = _constants(b, "while", reads[1], len(tested), eqn, repeat, prefix, inside)
    carry_ops, seen, carried, results = [], [], [], []
    for k, a in enumerate(operands[nc + nb :]):
        # The test and the body see a value each: what one of them moves is not there for the other.
        names = [f"while test carry {k}", f"while carry {k}", f"while result {k}"]
        i, made = b.boundary(
            "while_carry", [a], [eqn.outvars[k].aval] * 3, names, repeat, [repeat, inside], eqn, prefix,
            [tests, inside, repeat],
        )  # fmt: skip
        carry_ops.append(i)
        for group, t in zip((seen, carried, results), made, strict=True):
            group.append(t)
    given_test = [_inside(b, a, frame) for a in given[0]]
    cond = _body(b, test, given_test + seen, tests, prefix, frame, ("test",))
    aval = compat.open_jaxpr(test)[0].outvars[0].aval
    pred, made = b.boundary(
        "predicate", [cond.outputs[0]], [aval], ["while test"], tests, [tests], eqn, prefix
    )
    cond = Block(cond.inputs, (made[0],), cond.steps)
    inner = [_inside(b, a, other) for a in given[1]] + carried
    body = _body(b, turn, inner, inside, prefix, other, ("turn",))
    for i, a in zip(carry_ops, body.outputs, strict=True):
        b.set_loop_value(i, a)
    env.update(zip(eqn.outvars, results, strict=True))
    bound = {"test": tuple(tested), "const": tuple(const), "carry": tuple(carry_ops), "pred": (pred,)}
    call = Call("while", eqn, tuple(operands), tuple(results), (cond, body), bound, prefix, turns)
    return [*before, call]


def cond(b: Builder, eqn: Any, env: dict[Any, Any], repeat: float, prefix: str) -> list[int | Call]:
    """The branches, and where they join: one step."""
    operands = [b.read(v, env) for v in eqn.invars]
    pred, _ = b.boundary(
        "predicate", [operands[0]], [eqn.invars[0].aval], ["branch index"], repeat, [repeat], eqn, prefix
    )
    blocks = [b.enter(branch, operands[1:], repeat, prefix) for branch in eqn.params["branches"]]
    joins, results = [], []
    for k, v in enumerate(eqn.outvars):
        ends = [block.outputs[k] for block in blocks]
        i, made = b.boundary(
            "cond_join", ends, [v.aval], [f"cond result {k}"], repeat, [repeat] * len(blocks), eqn, prefix
        )
        joins.append(i)
        results += made
    env.update(zip(eqn.outvars, results, strict=True))
    bound = {"pred": (pred,), "join": tuple(joins)}
    return [Call("cond", eqn, tuple(operands), tuple(results), tuple(blocks), bound, prefix)]


def _hoist_invariants(
    b: Builder, body: Any, consts: Sequence[Atom], part: Path, repeat: float, prefix: str, steps: list[int | Call]
) -> list[int]:  # fmt: skip
    """Writes what a body need not repeat to the steps before the loop; the outer tensors that it still reads."""
    jaxpr, arrays = compat.open_jaxpr(body)
    path = (*b.path, *part)
    known: dict[Any, Any] = dict(zip(jaxpr.invars, consts, strict=False))
    b.bind(jaxpr.constvars, arrays, known)

    def write(equation: Any, place: Path, operands: list[Any], stack: str) -> Sequence[Any]:
        atoms = {v: a for v, a in zip(equation.invars, operands, strict=True) if not compat.is_literal(v)}
        # What leaves a loop inside it is known by its own place, not by one in the body that is lifted.
        around, b.path = b.path, list(place)
        steps.extend(b.step(equation, atoms, repeat, stack))
        b.path = around
        return [atoms[v] for v in equation.outvars]

    moved = hoist(jaxpr, dict(known), path, prefix, write, b.bind, b.hoisted)
    b.hoisted.update({p: (len(b.frames), atoms) for p, atoms in moved.items()})
    seen = {p: b.in_current_body(*found) for p, found in b.hoisted.items() if p[: len(path)] == path}
    return [a for a in still_read(jaxpr, known, path, seen) if isinstance(a, int) and a not in b.captured]


def _constants(
    b: Builder, kind: str, read: Sequence[int], first: int, eqn: Any, repeat: float, prefix: str, turns: float
) -> tuple[list[int], Frame]:
    """The boundary operators by which a body that runs so many `turns` has outer tensors, numbered from `first` on."""
    ops, frame = [], {}
    for k, t in enumerate(read, first):
        i, made = b.boundary(
            f"{kind}_const",
            [t],
            [b.tensors[t]],
            [f"{kind} const {k}"],
            repeat,
            [repeat],
            eqn,
            prefix,
            [turns],
        )
        ops.append(i)
        frame[t] = made[0]
    return ops, frame


def _inside(b: Builder, a: Atom, frame: Frame) -> Any:
    """A constant of a loop as its body has it; None where the body does not read it."""
    return a if isinstance(a, Literal) or a in b.captured else frame.get(a)


def _body(
    b: Builder, body: Any, operands: Sequence[Any], repeat: float, prefix: str, frame: Frame, part: Path
) -> Block:
    b.frames.append(frame)
    b.path.extend(part)
    block = b.enter(body, operands, repeat, prefix)
    del b.path[len(b.path) - len(part) :]
    b.frames.pop()
    return block


def _is_accumulator(b: Builder, carried: int, after: Atom, start: int) -> bool:
    """Whether a turn only adds to what it is given: such a carry may stay a partial sum until the loop ends."""
    makers = {r: op for op in b.operators[start:] for r in op.results}
    seen: set[Any] = set()
    ahead = [after]
    while ahead:
        here = ahead.pop()
        op = None if isinstance(here, Literal) or here in seen else makers.get(here)
        seen.add(here)
        if op is not None and op.primitive in _ADDING:
            onward = op.operands[:1] if op.primitive in ("sub", "scan_sum") else op.operands
            if carried in onward:
                return True
            ahead += onward
    return False
