"""Writing a schedule: what happens, in order, scope by scope.

A move is written once in a scope and found again by later readers of the same layout. Scopes are the bodies of loops
and branches, and those that a `remat` computes again: what is moved inside stays inside. Where JAX differentiates the
program, calls with a derivative rule of their own are scopes too; elsewhere compilers see no call, and would merge
what is moved in two of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jshard._cost.redistribute import Step as RedistributionStep
from jshard._layout import Layout
from jshard._plan.choice import Choice, Value
from jshard._program.graph import Atom, Block, Call, Literal, operators_of


@dataclasses.dataclass(frozen=True, eq=False)
class Move:
    """Bring a tensor from one layout into another; `reader` is the operator it is for (-1: several).

    `numbers` gives each step its number among the program's collectives, -1 for slices. What is moved `again` is not
    to be joined with what was moved before. `turn`: in a loop whose turns nobody knows, of which `repeat` counts one.
    `steady`: the same in every turn of a loop, and yet to be moved in each, as memory may demand: compilers are not to
    move it out of the loop.
    """

    tensor: int
    source: Layout
    target: Layout
    steps: tuple[RedistributionStep, ...]
    repeat: float
    reader: int
    numbers: tuple[int, ...]
    again: bool = False
    turn: bool = False
    steady: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """Run an operator on values (or literals); `numbers` are those of the collectives that it writes itself."""

    op: int
    reads: tuple[Value | Literal, ...]
    repeat: float = 1.0
    numbers: tuple[int, ...] = ()
    turn: bool = False
    steady: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Nested:
    """Run a call: `entry` are the values that enter each body, `bodies` their schedules and what they return.

    `steady`: all of it is the same in every turn of the loop around it.
    """

    call: Call
    reads: tuple[Value | Literal, ...]
    entry: tuple[tuple[Value, ...], ...]
    bodies: tuple[tuple[Action, ...], ...]
    returns: tuple[tuple[Value | Literal, ...], ...]
    steady: bool = False


Action = Move | Run | Nested


Written = tuple[tuple[Action, ...], tuple[Value | Literal, ...], tuple[Move | Run, ...]]


def communicates(action: Action) -> bool:
    """Whether an action sends anything, or what is inside it does."""
    if isinstance(action, Nested):
        return any(communicates(a) for body in action.bodies for a in body)
    return any(n >= 0 for n in action.numbers)


def write(choice: Choice, calls: bool) -> Written:
    """The actions of a choice as objects."""
    writer = _Writer(choice, calls)
    scope = _Scope({}, 1.0, [])
    for i in choice.program.inputs:
        for t in choice.program.operators[i].results:
            writer.have(scope, t)
    captured = {op.results[0] for op in choice.program.operators if op.kind == "const"}
    for t in sorted(captured):
        # Captured arrays are read by inner bodies directly, so they are brought into place first.
        writer.keep(scope, t)
    writer.constants = {v: v for v in scope.values if v[0] in captured}
    writer.block(choice.program.body, scope)
    outputs = tuple(writer.read(scope, i, 0) for i in choice.program.outputs)
    return tuple(scope.actions), outputs, tuple(writer.communicating)


@dataclasses.dataclass(eq=False)
class _Scope:
    values: dict[Value, Value]  # to itself, so that a value that is read many times is one object
    repeat: float
    actions: list[Action]
    turn: bool = False
    steady: set[int] = dataclasses.field(
        default_factory=set
    )  # in a loop: tensors that are the same in every turn
    loop: bool = False


class _Writer:
    """Writes actions scope by scope; used once."""

    def __init__(self, choice: Choice, calls: bool):
        self.choice, self.calls = choice, calls
        self.communicating: list[Move | Run] = []
        self.count = 0
        self.entered: dict[int, dict[int, Layout]] = {}
        self.constants: dict[Value, Value] = {}
        self.read_inside: dict[int, frozenset[int]] = {}  # by call, the tensors that its bodies read
        self.again: set[Value] = set()  # what the backward pass has moved for itself

    def have(self, scope: _Scope, tensor: int) -> None:
        value = self.choice.values[tensor]
        scope.values[value] = value

    def move(self, scope: _Scope, tensor: int, source: Layout, target: Layout, reader: int) -> Value:
        value = (tensor, target)
        again = (
            reader >= 0 and bool(self.choice.anew[reader]) and value not in self.again and source != target
        )
        if again:
            self.again.add(value)
        if again or value not in scope.values:
            steps = self.choice.path(tensor, source, target)
            numbers = tuple(-1 if s.kind == "slice" else self.number() for s in steps)
            moves = any(n >= 0 for n in numbers)
            steady = moves and tensor in scope.steady
            m = Move(tensor, source, target, steps, scope.repeat, reader, numbers, again, scope.turn, steady)
            if moves:
                self.communicating.append(m)
            scope.actions.append(m)
            scope.values[value] = value
        return scope.values[value]

    def number(self) -> int:
        self.count += 1
        return self.count - 1

    def keep(self, scope: _Scope, tensor: int) -> Value:
        """The value in which a tensor is kept, made now if it is not there yet."""
        return self.move(scope, tensor, self.choice.made(tensor), self.choice.kept(tensor), -1)

    def value(self, scope: _Scope, tensor: int, target: Layout, reader: int) -> Value:
        there = scope.values.get((tensor, target))
        kept = self.choice.kept(tensor)
        at_hand = target in (kept, self.choice.made(tensor)) or not self.choice.anew[reader]
        if there is not None and (at_hand or (tensor, target) in self.again):
            return there
        if (tensor, kept) not in scope.values and tensor in self.entered.get(id(scope), {}):
            kept = self.entered[id(scope)][tensor]
        else:
            self.keep(scope, tensor)
        return self.move(scope, tensor, kept, target, reader)

    def read(self, scope: _Scope, op: int, operand: int) -> Value | Literal:
        a = self.choice.program.operators[op].operands[operand]
        if isinstance(a, Literal):
            return a
        return self.value(scope, a, self.choice.needed(op, operand), op)

    def block(self, block: Block, scope: _Scope) -> None:
        for step in block.steps:
            if isinstance(step, int):
                self.run(scope, step)
            elif not step.has_scope and not self.calls:
                self.block(step.blocks[0], scope)
            else:
                write = {"scan": self.scan, "while": self.while_loop, "cond": self.cond}.get(
                    step.kind, self.alias
                )
                write(scope, step)

    def steady(self, scope: _Scope, tensors: Sequence[int]) -> bool:
        """Whether what is computed from some tensors is the same in every turn of the loop around."""
        return scope.loop and scope.steady.issuperset(tensors)

    def run(self, scope: _Scope, op: int) -> None:
        operator = self.choice.program.operators[op]
        reads = tuple([self.read(scope, op, i) for i in range(len(operator.operands))])
        numbers = tuple([self.number() for _ in self.choice.own(op)])
        tensors = [a for a in operator.operands if not isinstance(a, Literal)]
        steady = self.steady(scope, tensors)
        if steady:
            scope.steady.update(operator.results)
        action = Run(op, reads, scope.repeat, numbers, scope.turn, steady and bool(numbers))
        if numbers:
            self.communicating.append(action)
        scope.actions.append(action)
        for t in operator.results:
            self.have(scope, t)

    def inner(self, scope: _Scope, values: tuple[Value, ...]) -> _Scope:
        held = {**self.constants, **dict(zip(values, values, strict=True))}
        return _Scope(held, scope.repeat, [], scope.turn, scope.steady, scope.loop)

    def turning(self, scope: _Scope, values: tuple[Value, ...], call: Call, more: int = 0) -> _Scope:
        """The scope of a loop's body, or of its test, which runs once `more`."""
        inner, ops = self.inner(scope, values), self.choice.program.operators
        carries = [ops[i] for i in call.boundary["carry"]]
        consts = [ops[i] for i in (*call.boundary.get("test", ()), *call.boundary["const"])]
        kept = {t for op in carries for t in op.results[:-1] if op.operands[1] in op.results[:-1]}
        inner.repeat *= call.turns + more if call.turns else 1
        inner.turn, inner.loop = scope.turn or call.turns is None, True
        inner.steady = {t for t, _ in self.constants} | {op.results[0] for op in consts} | kept
        return inner

    def operands(self, scope: _Scope, call: Call) -> tuple[Value, ...]:
        """The kept values of a call's operands; a sum is finished before it enters a rule of its own."""
        seen = dict.fromkeys(a for a in call.operands if not isinstance(a, Literal))
        values = [self.entering(scope, call, t) for t in seen]
        if call.kind == "remat":
            return tuple(values)
        inside = operators_of(call.blocks[0])
        for i, (t, layout) in enumerate(values):
            if layout.partial:
                reader, k = self.first_reader(inside, t)
                target = self.choice.needed(reader, k) if reader >= 0 else layout.without_partial()
                values[i] = self.move(scope, t, layout, target, reader)
        return tuple(values)

    def entering(self, scope: _Scope, call: Call, tensor: int) -> Value:
        """An operand of a call: as it is kept, or as it lies if nothing inside reads it."""
        if id(call) not in self.read_inside:
            operators = self.choice.program.operators
            inside = [operators[i] for i in (*call.inside, *call.boundary.get("join", ()))]
            self.read_inside[id(call)] = frozenset(
                a for op in inside for a in op.operands if not isinstance(a, Literal)
            )
        here = next((v for v in scope.values if v[0] == tensor), None)
        if tensor not in self.read_inside[id(call)] and here is not None:
            return here
        return self.keep(scope, tensor)

    def first_reader(self, inside: Sequence[int], tensor: int) -> tuple[int, int]:
        for op in inside:
            for k, a in enumerate(self.choice.program.operators[op].operands):
                if a == tensor and not isinstance(a, Literal):
                    return op, k
        return -1, 0

    def body(self, call: Call, k: int, scope: _Scope) -> None:
        self.block(call.blocks[k], scope)

    def finish(
        self, outer: _Scope, call: Call, reads: tuple, entry: tuple, scopes: tuple, returns: tuple
    ) -> None:
        bodies = tuple(tuple(s.actions) for s in scopes)
        steady = bool(call.boundary) and self.steady(
            outer, [v[0] for v in reads if not isinstance(v, Literal)]
        )
        if steady:
            outer.steady.update(call.results)
        moves = steady and any(any(map(communicates, actions)) for actions in bodies)
        outer.actions.append(Nested(call, reads, entry, bodies, returns, moves))
        for t in call.results:
            self.have(outer, t)

    def alias(self, scope: _Scope, call: Call) -> None:
        entry = self.operands(scope, call)
        inner = self.inner(scope, entry)
        self.entered[id(inner)] = dict(entry)
        self.body(call, 0, inner)
        own_rule = call.kind != "remat"
        returns = tuple(self.returned(inner, a, own_rule) for a in call.blocks[0].outputs)
        scope.actions.append(Nested(call, entry, (entry,), (tuple(inner.actions),), (returns,)))
        for v in returns:
            if not isinstance(v, Literal):
                scope.values[v] = v

    def returned(self, scope: _Scope, atom: Atom, own_rule: bool) -> Value | Literal:
        """What an aliasing call hands back: the tensor as it is kept; finished first if it is a sum under a rule."""
        if isinstance(atom, Literal):
            return atom
        made = self.choice.values[atom]
        if atom in self.entered[id(scope)]:
            return atom, self.entered[id(scope)][atom]  # an operand handed through
        if made not in scope.values:
            return atom, self.choice.kept(atom)
        if atom in self.choice.relay:
            return self.keep(scope, atom)
        return (
            self.move(scope, atom, made[1], self.wanted(atom), -1) if own_rule and made[1].partial else made
        )

    def wanted(self, tensor: int) -> Layout:
        """The layout in which a finished sum leaves that one operator reads."""
        for op in self.choice.program.operators:
            for k, a in enumerate(op.operands):
                if not isinstance(a, Literal) and a == tensor:
                    return self.choice.needed(op.id, k)
        return self.choice.made(tensor).without_partial()

    def results_of(self, ops: tuple[int, ...], k: int = 0) -> tuple[Value, ...]:
        tensors = [self.choice.program.operators[i].results[k] for i in ops]
        return tuple(self.choice.values[t] for t in tensors)

    def scan(self, scope: _Scope, call: Call) -> None:
        b = call.boundary
        enter = (*b["const"], *b["carry"], *b["xs"])
        reads = tuple(self.read(scope, i, 0) for i in enter)
        entry = self.results_of(enter)
        inner = self.turning(scope, entry, call)
        self.body(call, 0, inner)
        returns = tuple(self.read(inner, i, 1) for i in b["carry"]) + tuple(
            self.read(inner, i, 0) for i in b["ys"]
        )
        self.finish(scope, call, reads, (entry,), (inner,), (returns,))

    def while_loop(self, scope: _Scope, call: Call) -> None:
        b = call.boundary
        reads = tuple(self.read(scope, i, 0) for i in (*b["test"], *b["const"], *b["carry"]))
        tested, const = self.results_of(b["test"]), self.results_of(b["const"])
        seen, carry = self.results_of(b["carry"]), self.results_of(b["carry"], 1)
        tests = self.turning(scope, tested + seen, call, 1)
        self.body(call, 0, tests)
        test = (self.read(tests, b["pred"][0], 0),)
        turn = self.turning(scope, const + carry, call)
        self.body(call, 1, turn)
        returns = tuple(self.read(turn, i, 1) for i in b["carry"])
        self.finish(scope, call, reads, (tested + seen, const + carry), (tests, turn), (test, returns))

    def cond(self, scope: _Scope, call: Call) -> None:
        b = call.boundary
        index = self.read(scope, b["pred"][0], 0)
        entering = dict.fromkeys(a for a in call.operands[1:] if not isinstance(a, Literal))
        entry = tuple(self.entering(scope, call, a) for a in entering)
        scopes, returns = [], []
        for k in range(len(call.blocks)):
            inner = self.inner(scope, entry)
            inner.loop, inner.steady = False, set()  # compilers move nothing out of a branch
            self.body(call, k, inner)
            returns.append(tuple(self.read(inner, i, k) for i in b["join"]))
            scopes.append(inner)
        self.finish(scope, call, (index, *entry), (entry,) * len(scopes), tuple(scopes), tuple(returns))
