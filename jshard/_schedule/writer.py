"""The schedule writer: actions in order, scope by scope. The reference for `vectorized.py`.

A reshard is written once in a scope, and later readers of the same layout use its result. Scopes are the bodies of loops
and branches, and those of `remat` calls that recompute: what is resharded inside stays inside. Where JAX differentiates
the program, calls with a derivative rule of their own are scopes too; elsewhere compilers see no call, and would merge
what is resharded in two of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jshard._core.layout import Layout
from jshard._cost.resharding import ReshardStep
from jshard._program.graph import Atom, Block, Call, Literal, operators_of
from jshard._schedule.assignment import Assignment, Value


@dataclasses.dataclass(frozen=True, eq=False)
class Reshard:
    """Bring a tensor from one layout into another.

    - `repeat`: how often it runs in one call of the program.
    - `reader`: the operator that it is for, -1 for several.
    - `collective_ids`: for each step its number among the program's collectives, -1 for local slices.
    - `regathered`: made again for this reader; compilers must not merge it with the earlier copy.
    - `unknown_trip_count`: in a loop whose trip count is unknown, of which `repeat` counts one iteration.
    - `loop_invariant`: the same in every iteration, and yet in each, as memory may demand; compilers must not hoist it.
    """

    tensor: int
    source: Layout
    target: Layout
    steps: tuple[ReshardStep, ...]
    repeat: float
    reader: int
    collective_ids: tuple[int, ...]
    regathered: bool = False
    unknown_trip_count: bool = False
    loop_invariant: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class RunOperator:
    """Run an operator on values (or literals); `collective_ids` are those of the collectives that it emits itself."""

    op: int
    reads: tuple[Value | Literal, ...]
    repeat: float = 1.0
    collective_ids: tuple[int, ...] = ()
    unknown_trip_count: bool = False
    loop_invariant: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class RunCall:
    """Run a call: `entry` are the values that enter each body, `bodies` their actions, `returns` their results.

    `loop_invariant`: it communicates, and is the same in every iteration of the loop around it.
    """

    call: Call
    reads: tuple[Value | Literal, ...]
    entry: tuple[tuple[Value, ...], ...]
    bodies: tuple[tuple[Action, ...], ...]
    returns: tuple[tuple[Value | Literal, ...], ...]
    loop_invariant: bool = False


Action = Reshard | RunOperator | RunCall


@dataclasses.dataclass(frozen=True, eq=False)
class WrittenSchedule:
    """The actions of a program, its results, and those of the actions that communicate, in order."""

    actions: tuple[Action, ...]
    outputs: tuple[Value | Literal, ...]
    communicating: tuple[Reshard | RunOperator, ...]


def communicates(action: Action) -> bool:
    """Whether an action, or one inside it, has collectives."""
    if isinstance(action, RunCall):
        return any(communicates(a) for body in action.bodies for a in body)
    return any(n >= 0 for n in action.collective_ids)


def write_schedule(assignment: Assignment, keep_calls: bool) -> WrittenSchedule:
    """The schedule of an assignment; `keep_calls`: calls with a derivative rule of their own stay calls."""
    writer = _ScheduleWriter(assignment, keep_calls)
    program, scope = assignment.program, _Scope({}, 1.0)
    for i in program.inputs:
        for t in program.operators[i].results:
            writer.add_result(scope, t)
    captured = {op.results[0] for op in program.operators if op.kind == "const"}
    for t in sorted(captured):
        # Inner bodies read captured arrays directly, so they are stored first.
        writer.store(scope, t)
    writer.constants = {v: v for v in scope.values if v[0] in captured}
    writer.block(program.body, scope)
    outputs = tuple(writer.read(scope, i, 0) for i in program.outputs)
    return WrittenSchedule(tuple(scope.actions), outputs, tuple(writer.communicating))


@dataclasses.dataclass(eq=False)
class _Scope:
    """A list of actions being written, and the values that it may read.

    - `values`: each value to itself, so that a value that is read many times is one object.
    - `loop_invariants`: in a loop, the tensors that are the same in every iteration.
    - `entry_layouts`: of an aliasing call, the layouts in which its operands enter.
    - `made_for`: each copy that was made in this scope to the reader that it was made for.
    """

    values: dict[Value, Value]
    repeat: float
    actions: list[Action] = dataclasses.field(default_factory=list)
    unknown_trip_count: bool = False
    loop_invariants: set[int] = dataclasses.field(default_factory=set)
    in_loop: bool = False
    entry_layouts: dict[int, Layout] = dataclasses.field(default_factory=dict)
    made_for: dict[Value, int] = dataclasses.field(default_factory=dict)

    def is_loop_invariant(self, tensors: Sequence[int]) -> bool:
        """Whether what is computed from some tensors is the same in every iteration of the loop around."""
        return self.in_loop and self.loop_invariants.issuperset(tensors)


class _ScheduleWriter:
    """Writes actions scope by scope; used once."""

    def __init__(self, assignment: Assignment, keep_calls: bool):
        self.assignment, self.keep_calls = assignment, keep_calls
        self.operators = assignment.program.operators
        self.communicating: list[Reshard | RunOperator] = []
        self.num_collectives = 0
        self.constants: dict[Value, Value] = {}
        self.read_inside: dict[int, frozenset[int]] = {}  # by call, the tensors that its bodies read

    def add_result(self, scope: _Scope, tensor: int) -> None:
        value = self.assignment.values[tensor]
        scope.values[value] = value

    def reshard(
        self,
        scope: _Scope,
        tensor: int,
        source: Layout,
        target: Layout,
        reader: int,
        regathered: bool = False,
    ) -> Value:
        """A tensor in a layout, resharded unless the scope has it; `regathered`: though it has."""
        value = (tensor, target)
        if regathered or value not in scope.values:
            steps = self.assignment.reshard_steps(tensor, source, target)
            ids = tuple(-1 if s.kind == "slice" else self.next_collective_id() for s in steps)
            communicating = any(n >= 0 for n in ids)
            invariant = communicating and tensor in scope.loop_invariants
            action = Reshard(
                tensor, source, target, steps, scope.repeat, reader, ids, regathered,
                scope.unknown_trip_count, invariant,
            )  # fmt: skip
            if communicating:
                self.communicating.append(action)
            scope.actions.append(action)
            scope.values[value], scope.made_for[value] = value, reader
        return scope.values[value]

    def next_collective_id(self) -> int:
        self.num_collectives += 1
        return self.num_collectives - 1

    def store(self, scope: _Scope, tensor: int) -> Value:
        """A tensor in its stored layout."""
        assignment = self.assignment
        return self.reshard(
            scope, tensor, assignment.result_layout(tensor), assignment.stored_layout(tensor), -1
        )

    def value_in(self, scope: _Scope, tensor: int, target: Layout, reader: int) -> Value:
        """A tensor in the layout in which a reader needs it."""
        existing = scope.values.get((tensor, target))
        stored = self.assignment.stored_layout(tensor)
        original = target in (stored, self.assignment.result_layout(tensor))
        regathered = (
            existing is not None
            and not original
            and (tensor, reader) in self.assignment.regather
            and scope.made_for.get((tensor, target)) != reader
        )
        if existing is not None and not regathered:
            return existing
        if (tensor, stored) not in scope.values and tensor in scope.entry_layouts:
            stored = scope.entry_layouts[tensor]
        else:
            self.store(scope, tensor)
        return self.reshard(scope, tensor, stored, target, reader, regathered)

    def read(self, scope: _Scope, op: int, operand: int) -> Value | Literal:
        """An operand in the layout in which its operator reads it."""
        a = self.operators[op].operands[operand]
        if isinstance(a, Literal):
            return a
        return self.value_in(scope, a, self.assignment.operand_layout(op, operand), op)

    def block(self, block: Block, scope: _Scope) -> None:
        """The actions of a block's steps."""
        writers = {"scan": self.scan, "while": self.while_loop, "cond": self.cond}
        for step in block.steps:
            if isinstance(step, int):
                self.run(scope, step)
            elif not step.has_scope and not self.keep_calls:
                self.block(step.blocks[0], scope)
            else:
                writers.get(step.kind, self.aliasing_call)(scope, step)

    def run(self, scope: _Scope, op: int) -> None:
        """The action of an operator, after the reshards of its operands."""
        operator = self.operators[op]
        reads = tuple([self.read(scope, op, i) for i in range(len(operator.operands))])
        ids = tuple([self.next_collective_id() for _ in self.assignment.internal_collectives(op)])
        invariant = scope.is_loop_invariant([a for a in operator.operands if not isinstance(a, Literal)])
        if invariant:
            scope.loop_invariants.update(operator.results)
        action = RunOperator(
            op, reads, scope.repeat, ids, scope.unknown_trip_count, invariant and bool(ids)
        )  # fmt: skip
        if ids:
            self.communicating.append(action)
        scope.actions.append(action)
        for t in operator.results:
            self.add_result(scope, t)

    def inner_scope(self, scope: _Scope, values: tuple[Value, ...]) -> _Scope:
        """The scope of a body that some values enter."""
        return _Scope(
            {**self.constants, **dict(zip(values, values, strict=True))},
            scope.repeat,
            unknown_trip_count=scope.unknown_trip_count,
            loop_invariants=scope.loop_invariants,
            in_loop=scope.in_loop,
        )

    def loop_scope(self, scope: _Scope, values: tuple[Value, ...], call: Call, extra_runs: int = 0) -> _Scope:
        """The scope of a loop's body, or of its test, which has one of `extra_runs`."""
        inner = self.inner_scope(scope, values)
        carries = [self.operators[i] for i in call.boundary["carry"]]
        consts = [self.operators[i] for i in (*call.boundary.get("test", ()), *call.boundary["const"])]
        unchanged = {t for op in carries for t in op.results[:-1] if op.operands[1] in op.results[:-1]}
        inner.repeat *= call.trip_count + extra_runs if call.trip_count else 1
        inner.unknown_trip_count = scope.unknown_trip_count or call.trip_count is None
        inner.in_loop = True
        inner.loop_invariants = {t for t, _ in self.constants} | {op.results[0] for op in consts} | unchanged
        return inner

    def call_operands(self, scope: _Scope, call: Call) -> tuple[Value, ...]:
        """The operands of an aliasing call, stored; a partial sum is finished before it enters a rule of its own."""
        operands = dict.fromkeys(a for a in call.operands if not isinstance(a, Literal))
        values = [self.entry_value(scope, call, t) for t in operands]
        if call.kind == "remat":
            return tuple(values)
        inside = operators_of(call.blocks[0])
        for i, (t, layout) in enumerate(values):
            if layout.partial:
                reader, k = self.first_reader(inside, t)
                needed = self.assignment.operand_layout(reader, k) if reader >= 0 else None
                values[i] = self.reshard(scope, t, layout, needed or layout.without_partial(), reader)
        return tuple(values)

    def entry_value(self, scope: _Scope, call: Call, tensor: int) -> Value:
        """An operand of a call: stored, or as it is in the scope if nothing inside reads it."""
        if id(call) not in self.read_inside:
            inside = [self.operators[i] for i in (*call.inner_operators, *call.boundary.get("join", ()))]
            self.read_inside[id(call)] = frozenset(
                a for op in inside for a in op.operands if not isinstance(a, Literal)
            )
        if tensor not in self.read_inside[id(call)]:
            existing = next((v for v in scope.values if v[0] == tensor), None)
            if existing is not None:
                return existing
        return self.store(scope, tensor)

    def first_reader(self, inside: Sequence[int], tensor: int) -> tuple[int, int]:
        """(operator, operand) of the first reader of a tensor among some operators; (-1, 0) for none."""
        for op in inside:
            for k, a in enumerate(self.operators[op].operands):
                if not isinstance(a, Literal) and a == tensor:
                    return op, k
        return -1, 0

    def add_call(
        self, scope: _Scope, call: Call, reads: tuple[Value | Literal, ...],
        entry: tuple[tuple[Value, ...], ...], bodies: Sequence[_Scope],
        returns: tuple[tuple[Value | Literal, ...], ...],
    ) -> None:  # fmt: skip
        """The action of a loop or branch whose bodies are written."""
        actions = tuple(tuple(body.actions) for body in bodies)
        operands = [v[0] for v in reads if not isinstance(v, Literal)]
        invariant = bool(call.boundary) and scope.is_loop_invariant(operands)
        if invariant:
            scope.loop_invariants.update(call.results)
        hoistable = invariant and any(any(map(communicates, body)) for body in actions)
        scope.actions.append(RunCall(call, reads, entry, actions, returns, hoistable))
        for t in call.results:
            self.add_result(scope, t)

    def aliasing_call(self, scope: _Scope, call: Call) -> None:
        """A call whose results are the tensors of its body: a `remat`, or one with a derivative rule of its own."""
        entry = self.call_operands(scope, call)
        inner = self.inner_scope(scope, entry)
        inner.entry_layouts = dict(entry)
        self.block(call.blocks[0], inner)
        own_rule = call.kind != "remat"
        returns = tuple(self.returned(inner, a, own_rule) for a in call.blocks[0].outputs)
        scope.actions.append(RunCall(call, entry, (entry,), (tuple(inner.actions),), (returns,)))
        for v in returns:
            if not isinstance(v, Literal):
                scope.values[v] = v

    def returned(self, scope: _Scope, atom: Atom, own_rule: bool) -> Value | Literal:
        """A result of an aliasing call: stored if it has a relay; a partial sum is finished if it leaves a rule."""
        if isinstance(atom, Literal):
            return atom
        value = self.assignment.values[atom]
        if atom in scope.entry_layouts:
            return atom, scope.entry_layouts[atom]  # an operand that the call returns
        if value not in scope.values:
            return atom, self.assignment.stored_layout(atom)
        if atom in self.assignment.relay:
            return self.store(scope, atom)
        if own_rule and value[1].partial:
            return self.reshard(scope, atom, value[1], self.layout_after_sum(atom), -1)
        return value

    def layout_after_sum(self, tensor: int) -> Layout:
        """The layout in which a finished sum leaves a call: that of its one reader."""
        reader, k = self.first_reader(range(len(self.operators)), tensor)
        if reader >= 0:
            return self.assignment.operand_layout(reader, k)
        return self.assignment.result_layout(tensor).without_partial()

    def results_of(self, ops: tuple[int, ...], k: int = 0) -> tuple[Value, ...]:
        """The k-th result of some operators, as they are made."""
        return tuple(self.assignment.values[self.operators[i].results[k]] for i in ops)

    def scan(self, scope: _Scope, call: Call) -> None:
        b = call.boundary
        entering = (*b["const"], *b["carry"], *b["xs"])
        reads = tuple(self.read(scope, i, 0) for i in entering)
        entry = self.results_of(entering)
        body = self.loop_scope(scope, entry, call)
        self.block(call.blocks[0], body)
        carries = tuple(self.read(body, i, 1) for i in b["carry"])
        stacked = tuple(self.read(body, i, 0) for i in b["ys"])
        self.add_call(scope, call, reads, (entry,), (body,), (carries + stacked,))

    def while_loop(self, scope: _Scope, call: Call) -> None:
        b = call.boundary
        reads = tuple(self.read(scope, i, 0) for i in (*b["test"], *b["const"], *b["carry"]))
        test_entry = self.results_of(b["test"]) + self.results_of(b["carry"])
        body_entry = self.results_of(b["const"]) + self.results_of(b["carry"], 1)
        test = self.loop_scope(scope, test_entry, call, extra_runs=1)
        self.block(call.blocks[0], test)
        predicate = (self.read(test, b["pred"][0], 0),)
        body = self.loop_scope(scope, body_entry, call)
        self.block(call.blocks[1], body)
        carries = tuple(self.read(body, i, 1) for i in b["carry"])
        self.add_call(scope, call, reads, (test_entry, body_entry), (test, body), (predicate, carries))

    def cond(self, scope: _Scope, call: Call) -> None:
        b = call.boundary
        index = self.read(scope, b["pred"][0], 0)
        operands = dict.fromkeys(a for a in call.operands[1:] if not isinstance(a, Literal))
        entry = tuple(self.entry_value(scope, call, a) for a in operands)
        branches, returns = [], []
        for k, block in enumerate(call.blocks):
            branch = self.inner_scope(scope, entry)
            branch.in_loop, branch.loop_invariants = False, set()  # compilers hoist nothing out of a branch
            self.block(block, branch)
            returns.append(tuple(self.read(branch, i, k) for i in b["join"]))
            branches.append(branch)
        self.add_call(scope, call, (index, *entry), (entry,) * len(branches), branches, tuple(returns))
