"""Writing a schedule: what happens, in order, scope by scope.

A move is written once in a scope and found again by later readers of the same layout. Scopes are the bodies of loops
and branches, and those that a `remat` computes again: what is moved inside stays inside. Where JAX differentiates the
program, calls with a derivative rule of their own are scopes too; elsewhere compilers see no call, and would merge
what is moved in two of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jshard._core.layout import Layout
from jshard._cost.resharding import ReshardStep as RedistributionStep
from jshard._program.graph import Atom, Block, Call, Literal, operators_of
from jshard._schedule.assignment import Assignment, Value


@dataclasses.dataclass(frozen=True, eq=False)
class Reshard:
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
    collective_ids: tuple[int, ...]
    regathered: bool = False
    unknown_trip_count: bool = False
    loop_invariant: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class RunOperator:
    """Run an operator on values (or literals); `numbers` are those of the collectives that it writes itself."""

    op: int
    reads: tuple[Value | Literal, ...]
    repeat: float = 1.0
    collective_ids: tuple[int, ...] = ()
    unknown_trip_count: bool = False
    loop_invariant: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class RunCall:
    """Run a call: `entry` are the values that enter each body, `bodies` their schedules and what they return.

    `steady`: all of it is the same in every turn of the loop around it.
    """

    call: Call
    reads: tuple[Value | Literal, ...]
    entry: tuple[tuple[Value, ...], ...]
    bodies: tuple[tuple[Action, ...], ...]
    returns: tuple[tuple[Value | Literal, ...], ...]
    loop_invariant: bool = False


Action = Reshard | RunOperator | RunCall


WrittenSchedule = tuple[tuple[Action, ...], tuple[Value | Literal, ...], tuple[Reshard | RunOperator, ...]]


def communicates(action: Action) -> bool:
    """Whether an action sends anything, or what is inside it does."""
    if isinstance(action, RunCall):
        return any(communicates(a) for body in action.bodies for a in body)
    return any(n >= 0 for n in action.collective_ids)


def write_schedule(assignment: Assignment, keep_calls: bool) -> WrittenSchedule:
    """The actions of a choice as objects."""
    writer = _ScheduleWriter(assignment, keep_calls)
    scope = _Scope({}, 1.0, [])
    for i in assignment.program.inputs:
        for t in assignment.program.operators[i].results:
            writer.add_result(scope, t)
    captured = {op.results[0] for op in assignment.program.operators if op.kind == "const"}
    for t in sorted(captured):
        # Captured arrays are read by inner bodies directly, so they are brought into place first.
        writer.store(scope, t)
    writer.constants = {v: v for v in scope.values if v[0] in captured}
    writer.block(assignment.program.body, scope)
    outputs = tuple(writer.read(scope, i, 0) for i in assignment.program.outputs)
    return tuple(scope.actions), outputs, tuple(writer.communicating)


@dataclasses.dataclass(eq=False)
class _Scope:
    values: dict[Value, Value]  # to itself, so that a value that is read many times is one object
    repeat: float
    actions: list[Action]
    unknown_trip_count: bool = False
    loop_invariants: set[int] = dataclasses.field(
        default_factory=set
    )  # in a loop: tensors that are the same in every turn
    in_loop: bool = False


class _ScheduleWriter:
    """Writes actions scope by scope; used once."""

    def __init__(self, assignment: Assignment, keep_calls: bool):
        self.choice, self.calls = assignment, keep_calls
        self.communicating: list[Reshard | RunOperator] = []
        self.num_collectives = 0
        self.entry_layouts: dict[int, dict[int, Layout]] = {}
        self.constants: dict[Value, Value] = {}
        self.read_inside: dict[int, frozenset[int]] = {}  # by call, the tensors that its bodies read
        self.regathered: set[Value] = set()  # what the backward pass has moved for itself

    def add_result(self, scope: _Scope, tensor: int) -> None:
        value_in = self.choice.values[tensor]
        scope.values[value_in] = value_in

    def reshard(self, scope: _Scope, tensor: int, source: Layout, target: Layout, reader: int) -> Value:
        value = (tensor, target)
        again = (
            reader >= 0
            and bool(self.choice.reshards_again[reader])
            and value not in self.regathered
            and source != target
        )
        if again:
            self.regathered.add(value)
        if again or value not in scope.values:
            steps = self.choice.reshard_steps(tensor, source, target)
            numbers = tuple(-1 if s.kind == "slice" else self.next_collective_id() for s in steps)
            moves = any(n >= 0 for n in numbers)
            is_loop_invariant = moves and tensor in scope.loop_invariants
            m = Reshard(
                tensor,
                source,
                target,
                steps,
                scope.repeat,
                reader,
                numbers,
                again,
                scope.unknown_trip_count,
                is_loop_invariant,
            )
            if moves:
                self.communicating.append(m)
            scope.actions.append(m)
            scope.values[value] = value
        return scope.values[value]

    def next_collective_id(self) -> int:
        self.num_collectives += 1
        return self.num_collectives - 1

    def store(self, scope: _Scope, tensor: int) -> Value:
        """The value in which a tensor is kept, made now if it is not there yet."""
        return self.reshard(
            scope, tensor, self.choice.result_layout(tensor), self.choice.stored_layout(tensor), -1
        )

    def value(self, scope: _Scope, tensor: int, target: Layout, reader: int) -> Value:
        there = scope.values.get((tensor, target))
        kept = self.choice.stored_layout(tensor)
        at_hand = (
            target in (kept, self.choice.result_layout(tensor)) or not self.choice.reshards_again[reader]
        )
        if there is not None and (at_hand or (tensor, target) in self.regathered):
            return there
        if (tensor, kept) not in scope.values and tensor in self.entry_layouts.get(id(scope), {}):
            kept = self.entry_layouts[id(scope)][tensor]
        else:
            self.store(scope, tensor)
        return self.reshard(scope, tensor, kept, target, reader)

    def read(self, scope: _Scope, op: int, operand: int) -> Value | Literal:
        a = self.choice.program.operators[op].operands[operand]
        if isinstance(a, Literal):
            return a
        return self.value(scope, a, self.choice.operand_layout(op, operand), op)

    def block(self, block: Block, scope: _Scope) -> None:
        for step in block.steps:
            if isinstance(step, int):
                self.run(scope, step)
            elif not step.has_scope and not self.calls:
                self.block(step.blocks[0], scope)
            else:
                write = {"scan": self.scan, "while": self.while_loop, "cond": self.cond}.get(
                    step.kind, self.aliasing_call
                )
                write(scope, step)

    def steady(self, scope: _Scope, tensors: Sequence[int]) -> bool:
        """Whether what is computed from some tensors is the same in every turn of the loop around."""
        return scope.in_loop and scope.loop_invariants.issuperset(tensors)

    def run(self, scope: _Scope, op: int) -> None:
        operator = self.choice.program.operators[op]
        reads = tuple([self.read(scope, op, i) for i in range(len(operator.operands))])
        numbers = tuple([self.next_collective_id() for _ in self.choice.internal_collectives(op)])
        tensors = [a for a in operator.operands if not isinstance(a, Literal)]
        steady = self.steady(scope, tensors)
        if steady:
            scope.loop_invariants.update(operator.results)
        action = RunOperator(
            op, reads, scope.repeat, numbers, scope.unknown_trip_count, steady and bool(numbers)
        )
        if numbers:
            self.communicating.append(action)
        scope.actions.append(action)
        for t in operator.results:
            self.add_result(scope, t)

    def inner_scope(self, scope: _Scope, values: tuple[Value, ...]) -> _Scope:
        held = {**self.constants, **dict(zip(values, values, strict=True))}
        return _Scope(held, scope.repeat, [], scope.unknown_trip_count, scope.loop_invariants, scope.in_loop)

    def loop_scope(self, scope: _Scope, values: tuple[Value, ...], call: Call, more: int = 0) -> _Scope:
        """The scope of a loop's body, or of its test, which runs once `more`."""
        inner, ops = self.inner_scope(scope, values), self.choice.program.operators
        carries = [ops[i] for i in call.boundary["carry"]]
        consts = [ops[i] for i in (*call.boundary.get("test", ()), *call.boundary["const"])]
        kept = {t for op in carries for t in op.results[:-1] if op.operands[1] in op.results[:-1]}
        inner.repeat *= call.trip_count + more if call.trip_count else 1
        inner.unknown_trip_count, inner.in_loop = scope.unknown_trip_count or call.trip_count is None, True
        inner.loop_invariants = {t for t, _ in self.constants} | {op.results[0] for op in consts} | kept
        return inner

    def call_operands(self, scope: _Scope, call: Call) -> tuple[Value, ...]:
        """The kept values of a call's operands; a sum is finished before it enters a rule of its own."""
        seen = dict.fromkeys(a for a in call.operands if not isinstance(a, Literal))
        values = [self.entry_value(scope, call, t) for t in seen]
        if call.kind == "remat":
            return tuple(values)
        inside = operators_of(call.blocks[0])
        for i, (t, layout) in enumerate(values):
            if layout.partial:
                reader, k = self.first_reader(inside, t)
                target = self.choice.operand_layout(reader, k) if reader >= 0 else layout.without_partial()
                values[i] = self.reshard(scope, t, layout, target, reader)
        return tuple(values)

    def entry_value(self, scope: _Scope, call: Call, tensor: int) -> Value:
        """An operand of a call: as it is kept, or as it lies if nothing inside reads it."""
        if id(call) not in self.read_inside:
            operators = self.choice.program.operators
            inside = [operators[i] for i in (*call.inner_operators, *call.boundary.get("join", ()))]
            self.read_inside[id(call)] = frozenset(
                a for op in inside for a in op.operands if not isinstance(a, Literal)
            )
        here = next((v for v in scope.values if v[0] == tensor), None)
        if tensor not in self.read_inside[id(call)] and here is not None:
            return here
        return self.store(scope, tensor)

    def first_reader(self, inside: Sequence[int], tensor: int) -> tuple[int, int]:
        for op in inside:
            for k, a in enumerate(self.choice.program.operators[op].operands):
                if a == tensor and not isinstance(a, Literal):
                    return op, k
        return -1, 0

    def body(self, call: Call, k: int, scope: _Scope) -> None:
        self.block(call.blocks[k], scope)

    def add_call(
        self, outer: _Scope, call: Call, reads: tuple, entry: tuple, scopes: tuple, returns: tuple
    ) -> None:
        bodies = tuple(tuple(s.actions) for s in scopes)
        steady = bool(call.boundary) and self.steady(
            outer, [v[0] for v in reads if not isinstance(v, Literal)]
        )
        if steady:
            outer.loop_invariants.update(call.results)
        moves = steady and any(any(map(communicates, actions)) for actions in bodies)
        outer.actions.append(RunCall(call, reads, entry, bodies, returns, moves))
        for t in call.results:
            self.add_result(outer, t)

    def aliasing_call(self, scope: _Scope, call: Call) -> None:
        entry = self.call_operands(scope, call)
        inner = self.inner_scope(scope, entry)
        self.entry_layouts[id(inner)] = dict(entry)
        self.body(call, 0, inner)
        own_rule = call.kind != "remat"
        returns = tuple(self.returned(inner, a, own_rule) for a in call.blocks[0].outputs)
        scope.actions.append(RunCall(call, entry, (entry,), (tuple(inner.actions),), (returns,)))
        for v in returns:
            if not isinstance(v, Literal):
                scope.values[v] = v

    def returned(self, scope: _Scope, atom: Atom, own_rule: bool) -> Value | Literal:
        """What an aliasing call hands back: the tensor as it is kept; finished first if it is a sum under a rule."""
        if isinstance(atom, Literal):
            return atom
        made = self.choice.values[atom]
        if atom in self.entry_layouts[id(scope)]:
            return atom, self.entry_layouts[id(scope)][atom]  # an operand handed through
        if made not in scope.values:
            return atom, self.choice.stored_layout(atom)
        if atom in self.choice.relay:
            return self.store(scope, atom)
        return (
            self.reshard(scope, atom, made[1], self.layout_after_sum(atom), -1)
            if own_rule and made[1].partial
            else made
        )

    def layout_after_sum(self, tensor: int) -> Layout:
        """The layout in which a finished sum leaves that one operator reads."""
        for op in self.choice.program.operators:
            for k, a in enumerate(op.operands):
                if not isinstance(a, Literal) and a == tensor:
                    return self.choice.operand_layout(op.id, k)
        return self.choice.result_layout(tensor).without_partial()

    def results_of(self, ops: tuple[int, ...], k: int = 0) -> tuple[Value, ...]:
        tensors = [self.choice.program.operators[i].results[k] for i in ops]
        return tuple(self.choice.values[t] for t in tensors)

    def scan(self, scope: _Scope, call: Call) -> None:
        b = call.boundary
        enter = (*b["const"], *b["carry"], *b["xs"])
        reads = tuple(self.read(scope, i, 0) for i in enter)
        entry = self.results_of(enter)
        inner = self.loop_scope(scope, entry, call)
        self.body(call, 0, inner)
        returns = tuple(self.read(inner, i, 1) for i in b["carry"]) + tuple(
            self.read(inner, i, 0) for i in b["ys"]
        )
        self.add_call(scope, call, reads, (entry,), (inner,), (returns,))

    def while_loop(self, scope: _Scope, call: Call) -> None:
        b = call.boundary
        reads = tuple(self.read(scope, i, 0) for i in (*b["test"], *b["const"], *b["carry"]))
        tested, const = self.results_of(b["test"]), self.results_of(b["const"])
        seen, carry = self.results_of(b["carry"]), self.results_of(b["carry"], 1)
        tests = self.loop_scope(scope, tested + seen, call, 1)
        self.body(call, 0, tests)
        test = (self.read(tests, b["pred"][0], 0),)
        turn = self.loop_scope(scope, const + carry, call)
        self.body(call, 1, turn)
        returns = tuple(self.read(turn, i, 1) for i in b["carry"])
        self.add_call(scope, call, reads, (tested + seen, const + carry), (tests, turn), (test, returns))

    def cond(self, scope: _Scope, call: Call) -> None:
        b = call.boundary
        index = self.read(scope, b["pred"][0], 0)
        entering = dict.fromkeys(a for a in call.operands[1:] if not isinstance(a, Literal))
        entry = tuple(self.entry_value(scope, call, a) for a in entering)
        scopes, returns = [], []
        for k in range(len(call.blocks)):
            inner = self.inner_scope(scope, entry)
            inner.in_loop, inner.loop_invariants = False, set()  # compilers move nothing out of a branch
            self.body(call, k, inner)
            returns.append(tuple(self.read(inner, i, k) for i in b["join"]))
            scopes.append(inner)
        self.add_call(scope, call, (index, *entry), (entry,) * len(scopes), tuple(scopes), tuple(returns))
