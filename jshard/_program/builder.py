"""The walk over a jaxpr that builds the flat dataflow graph: calls are entered, equal operators are merged.

Loops and branches are written by the functions of `loops.py`, which are passed to the constructor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding

from jshard._core import jaxcompat as compat
from jshard._core.errors import NestedShardError
from jshard._core.jax_types import ClosedJaxpr, Jaxpr, JaxprAtom, JaxprEqn
from jshard._core.layout import ArrayType
from jshard._core.marker_primitives import ARGUMENT_MARKER
from jshard._program import pin_primitives
from jshard._program.common_subexpressions import LiteralValue, ValueNumbering, literal_value
from jshard._program.graph import Program
from jshard._program.loop_invariants import INLINED_CALLS, Path, body_of
from jshard._program.operators import Atom, Block, Call, CallKind, Literal, Operator, OperatorKind, Tensor
from jshard._program.scalar_predicate import with_scalar_predicate
from jshard._program.stage_shift import STAGE_SHIFT
from jshard._program.user_shard_map import SHARD_MAP, pins_of


T = TypeVar("T")

KEPT_CALLS: Mapping[str, CallKind] = {
    "remat2": "remat",
    "checkpoint": "remat",
    "custom_jvp_call": "custom_jvp",
    "custom_vjp_call": "custom_vjp",
}
"""Calls whose variables become the caller's tensors, but which are rebuilt as calls when the plan is run."""

Frame = dict[int, int]  # outer tensors that a loop's body reads -> the tensors of their values in the body

# Variables of one jaxpr -> atoms, `_PinnedAtom`s, or None where the body of a loop does not read a constant.
Env = dict[JaxprAtom, Any]
# equation of a named value (a module's output, a `checkpoint_name`) -> the user's pin on it, or None
PinOfName = Callable[[JaxprEqn], object]

# (builder, equation, environment, repeat, name stack) -> steps
LoopWriter = Callable[["Builder", JaxprEqn, Env, float, str], Sequence[int | Call]]


@dataclasses.dataclass(frozen=True, eq=False)
class _PinnedAtom:
    """An atom with a sharding constraint on the operators that read it directly."""

    atom: Atom
    pin: object


A = TypeVar("A", bound=Atom | _PinnedAtom)


def _frozen(cls: type[T], fields: dict[str, Any]) -> T:
    """An instance of a frozen dataclass; its own `__init__` sets field by field, which is a quarter of the walk."""
    instance = object.__new__(cls)
    object.__setattr__(instance, "__dict__", fields)
    return instance


class Builder:
    """Collects tensors and operators while a jaxpr is walked; used once.

    An environment (`env`) maps the variables of one jaxpr to atoms. `repeat` is how often the walked body is executed
    per call of the program, `prefix` the name stack of the enclosing calls.
    """

    def __init__(self, name: str, loops: Mapping[str, LoopWriter], pin_of_name: PinOfName | None = None):
        self.name = name
        self.pin_of_name = pin_of_name
        self.loops = loops  # by primitive
        self.entered = frozenset({*INLINED_CALLS, *KEPT_CALLS, *loops})  # primitives whose bodies are walked
        self.tensors: list[Tensor] = []
        self.operators: list[Operator] = []
        self.constants: list[jax.Array] = []
        self.const_ids: dict[int, int] = {}  # id of a captured array -> its tensor
        self.any_pinned = False  # whether an operand has been pinned so far
        self.path: list[int | str] = []  # positions of the enclosing calls and loops in their jaxprs
        # Equations hoisted out of loops, by their path: depth of the loop they left, and their results there.
        self.hoisted: dict[Path, tuple[int, Sequence[Atom]]] = {}
        self.frames: list[Frame] = []  # one per enclosing loop
        self.captured: set[Atom] = set()  # tensors of captured arrays, which every body reads directly
        self.names: set[str] = set()  # of tensors
        self.value_numbering = ValueNumbering()
        self.literals: dict[
            int, tuple[Literal, LiteralValue]
        ] = {}  # by id(); holds the literal, so that no id is reused
        self.repeats: dict[tuple[float, int], tuple[float, ...]] = {}
        self.input_ops: list[int] = []
        self.pins: list[tuple[int, str, int, object]] = []

    def program(
        self,
        closed: Jaxpr | ClosedJaxpr,
        jaxpr: Jaxpr,
        consts: Sequence[jax.Array],
        input_names: list[str],
        output_names: list[str],
        captured: list[jax.Array],
    ) -> Program:
        """Walk a whole jaxpr; its first inputs are `captured`, the others the arguments."""
        env: Env = {}
        invars = list(jaxpr.invars)[len(captured) :]
        input_names += [f"argument {i}" for i in range(len(input_names), len(invars))]
        for v, n in zip(invars, input_names, strict=False):
            env[v] = self.source("input", n, v.aval)
        arguments = list(self.input_ops)
        self.bind([*jaxpr.constvars, *jaxpr.invars[: len(captured)]], [*consts, *captured], env)
        steps = self.walk(jaxpr, env, 1.0, "")
        outputs = [self.read(v, env) for v in jaxpr.outvars]
        numbered = [f"result {i}" for i in range(len(outputs))] if len(outputs) > 1 else ["result"]
        output_names += numbered[len(output_names) :]
        out_ops = [
            self.op("output", "output", (a,), (), 1.0, name=n)
            for a, n in zip(outputs, output_names, strict=False)
        ]
        inputs = arguments + sorted(set(self.input_ops) - set(arguments))
        tensors = [self.operators[i].results[0] for i in inputs]
        body = Block(tuple(tensors), tuple(outputs), tuple(steps))
        return Program(
            self.name, tuple(self.tensors), tuple(self.operators), tuple(inputs), tuple(out_ops),
            tuple(self.constants), body, closed, tuple(self.pins),
        )  # fmt: skip

    def tensor(self, aval: ArrayType, name: str) -> int:
        """A new tensor; its id."""
        i = len(self.tensors)
        weak = bool(getattr(aval, "weak_type", False))
        if name in self.names:  # two loops have a carry 0 each
            name = f"{name}.{len(self.operators)}"
        self.names.add(name)
        fields = dict(id=i, shape=tuple(aval.shape), dtype=aval.dtype, name=name, weak_type=weak)
        self.tensors.append(_frozen(Tensor, fields))
        return i

    def op(
        self, kind: OperatorKind, primitive: str, operands: Sequence[Atom], results: Sequence[int], repeat: float,
        *, operand_repeat: Sequence[float] | None = None, eqn: JaxprEqn | None = None, prefix: str = "", name: str = "",
        boundary_repeat: tuple[float, ...] = (),
    ) -> int:  # fmt: skip
        """A new operator; its id. Arguments as in `Operator`."""
        if operand_repeat is None:
            repeats = self.repeats.setdefault((repeat, len(operands)), (repeat,) * len(operands))
        else:
            repeats = tuple(operand_repeat)
        i = len(self.operators)
        fields = dict(
            id=i, kind=kind, primitive=primitive, operands=tuple(operands), results=tuple(results), repeat=repeat,
            operand_repeat=repeats, eqn=eqn, prefix=prefix, name=name, boundary_repeat=boundary_repeat,
        )  # fmt: skip
        self.operators.append(_frozen(Operator, fields))
        return i

    def source(self, kind: OperatorKind, name: str, aval: ArrayType) -> int:
        """An argument or captured array; its tensor's id."""
        t = self.tensor(aval, name)
        self.input_ops.append(self.op(kind, kind, (), (t,), 1.0, name=name))
        return t

    def read(self, v: JaxprAtom, env: Env) -> Atom:
        """The atom of a variable or literal, without its pin."""
        atom = Literal(v.val, v.aval) if compat.is_literal(v) else env[v]
        return atom.atom if isinstance(atom, _PinnedAtom) else atom

    def read_pinned(self, v: JaxprAtom, env: Env) -> Atom | _PinnedAtom:
        """An operand of a call, with the pin of a `jshard.op` outside: it applies to the operators inside."""
        return env[v] if not compat.is_literal(v) and isinstance(env[v], _PinnedAtom) else self.read(v, env)

    def pin_operands(self, op: int, eqn: JaxprEqn, prefix: str, env: Env) -> None:
        """Record the pins on an operator's operands; those of the forward pass do not apply to the backward pass.

        The stages of a pipeline, which is made after differentiation, are pinned in both.
        """
        if compat.is_backward(prefix, eqn) and eqn.primitive.name != STAGE_SHIFT:
            return
        for k, v in enumerate(eqn.invars):
            if not compat.is_literal(v) and isinstance(env[v], _PinnedAtom):
                self.pins.append((op, "operand", k, env[v].pin))

    def bind(self, variables: Sequence[JaxprAtom], consts: Sequence[jax.Array], env: Env) -> None:
        """Make inputs of captured arrays; an array captured by several inner jaxprs is one input."""
        for v, c in zip(variables, consts, strict=True):
            if id(c) not in self.const_ids:
                self.constants.append(c)
                self.const_ids[id(c)] = self.source(
                    "const", f"captured array {len(self.constants) - 1}", v.aval
                )
            env[v] = self.const_ids[id(c)]
            self.captured.add(env[v])

    def walk(self, jaxpr: Jaxpr, env: Env, repeat: float, prefix: str) -> list[int | Call]:
        """The steps of an open jaxpr; values of its variables are added to `env`."""
        steps: list[int | Call] = []
        for k, eqn in enumerate(jaxpr.eqns):
            hoisted = self.hoisted.get((*self.path, k)) if self.hoisted else None
            if hoisted:
                env.update(zip(eqn.outvars, self.in_current_body(*hoisted), strict=True))
            elif eqn.primitive.name in self.entered:
                self.path.append(k)
                steps += self.step(eqn, env, repeat, prefix)
                self.path.pop()
            else:
                steps += self.step(eqn, env, repeat, prefix)
        return steps

    def step(self, eqn: JaxprEqn, env: Env, repeat: float, prefix: str) -> Sequence[int | Call]:
        """The steps of one equation; its results are added to `env`."""
        name = eqn.primitive.name
        if name in self.entered:  # rare: tested first, in one look-up
            body, inner = body_of(eqn), compat.name_stack(prefix, eqn)
            if name in INLINED_CALLS and body is not None and hasattr(body, "eqns"):
                return self.inline(eqn, body, env, repeat, inner)
            if name in KEPT_CALLS and body is not None and hasattr(body, "eqns"):
                return [self.kept_call(eqn, body, env, repeat, inner)]
            if name in self.loops:
                return self.loop(eqn, env, repeat, inner)
        if name == ARGUMENT_MARKER:
            raise NestedShardError(
                f"the sharded function {eqn.params['name']} is called inside the sharded function {self.name}",
                where=f"{compat.module_path(prefix, eqn)} {compat.source_line(eqn)}".strip(),
                fix=f"shard only {self.name}, and pin what {eqn.params['name']} fixed with jshard.op",
            )
        if name == pin_primitives.PIN_OPERAND:
            env[eqn.outvars[0]] = _PinnedAtom(self.read(eqn.invars[0], env), eqn.params["pin"])
            self.any_pinned = True
            return ()
        if name == pin_primitives.MODULE_OUTPUT and self.pin_on_name(eqn, prefix) is None:
            env[eqn.outvars[0]] = self.read_pinned(eqn.invars[0], env)
            return ()
        return self.equation(eqn, env, repeat, prefix)

    def pin_on_name(self, eqn: JaxprEqn, prefix: str) -> object:
        """The pin on a named value; None in the backward pass, which is left to the search."""
        if self.pin_of_name is None or compat.is_backward(prefix, eqn):
            return None
        return self.pin_of_name(eqn)

    def loop(self, eqn: JaxprEqn, env: Env, repeat: float, prefix: str) -> Sequence[int | Call]:
        """A loop or branch, unless value numbering finds an equal one."""
        eqn = with_scalar_predicate(eqn) if eqn.primitive.name == "while" else eqn
        keys = self.value_keys(eqn, [self.read(v, env) for v in eqn.invars], env)
        equal, key = self.value_numbering.lookup(eqn, keys)
        if equal is not None:
            env.update(zip(eqn.outvars, equal, strict=True))
            return ()
        steps = self.loops[eqn.primitive.name](self, eqn, env, repeat, prefix)
        self.value_numbering.record(eqn, key, [env[v] for v in eqn.outvars])
        return steps

    def equation(self, eqn: JaxprEqn, env: Env, repeat: float, prefix: str) -> Sequence[int | Call]:
        """An equation without a body: an operator, unless value numbering finds an equal one."""
        name = eqn.primitive.name
        # Most programs pin no operands: then the value of a variable is its entry in `env`.
        if self.any_pinned:
            operands = [self.read(v, env) for v in eqn.invars]
        else:
            operands = [env[v] if type(v) is compat.VARIABLE else self.read(v, env) for v in eqn.invars]
        equal, key = self.value_numbering.lookup(eqn, self.value_keys(eqn, operands, env))
        if equal is not None:
            env.update(zip(eqn.outvars, equal, strict=True))
            return ()
        i = len(self.operators)
        if self.any_pinned:
            self.pin_operands(i, eqn, prefix, env)
        if name == SHARD_MAP:
            where = f"{compat.module_path(prefix, eqn)} {compat.source_line(eqn)}".strip()
            self.pins += [(i, *pin) for pin in pins_of(eqn, self.name, where)]
        result_pin = pin_primitives.RESULT_PIN_READERS.get(name)
        pin = result_pin(eqn) if result_pin else None
        # A constraint is the user's in the backward pass too; a `reshard` there only restores a type.
        if pin is None and name in pin_primitives.NAMED_VALUES:
            pin = self.pin_on_name(eqn, prefix)
        if pin is not None and (name != "reshard" or not compat.is_backward(prefix, eqn)):
            self.pins.append((i, "result", 0, pin))
        results = [self.tensor(eqn.outvars[0].aval, f"{name}.{i}")] if eqn.outvars else []
        results += [self.tensor(v.aval, f"{name}.{i}[{k}]") for k, v in enumerate(eqn.outvars[1:], 1)]
        self.op("eqn", name, operands, results, repeat, eqn=eqn, prefix=prefix)
        steps = [i]
        if shardings := pin_primitives.requested_result_shardings(eqn):
            results, identities = self.with_requested_shardings(
                shardings, results, eqn.outvars, eqn, repeat, prefix
            )
            steps += identities
        self.value_numbering.record(eqn, key, results)
        env.update(zip(eqn.outvars, results, strict=True))
        return steps

    def in_current_body(self, depth: int, atoms: Sequence[Atom]) -> list[Atom | None]:
        """Values defined inside `depth` loops, as tensors of the current body; None for those it does not read."""
        for frame in self.frames[depth:]:
            atoms = [a if isinstance(a, Literal) or a in self.captured else frame.get(a) for a in atoms]  # type: ignore[misc]
        return list(atoms)

    def value_keys(self, eqn: JaxprEqn, operands: Sequence[Atom], env: Env) -> list[Hashable]:
        """The operands of an equation as keys for value numbering: literals by value, tensors with their pins."""
        if self.any_pinned:
            values = [None if compat.is_literal(v) else env.get(v) for v in eqn.invars]
            operands = [
                ("pinned", a, v.pin) if isinstance(v, _PinnedAtom) else a
                for a, v in zip(operands, values, strict=True)
            ]  # type: ignore[assignment]
        return [a if type(a) is int else self.literal(a) if isinstance(a, Literal) else a for a in operands]

    def key(self, a: Atom) -> Hashable:
        """An atom as a key for value numbering."""
        return self.literal(a) if isinstance(a, Literal) else a

    def literal(self, a: Literal) -> LiteralValue:
        """The value of a literal as a key; many literals share one object."""
        key = id(a.value)
        if key not in self.literals:
            self.literals[key] = a, literal_value(a.value, a.aval)
        return self.literals[key][1]

    def enter(
        self,
        body: Jaxpr | ClosedJaxpr,
        operands: Sequence[Atom | _PinnedAtom | None],
        repeat: float,
        prefix: str,
        separate: bool = True,
    ) -> Block:
        """Walk an inner jaxpr whose inputs are the caller's atoms.

        A `separate` body, such as a loop's, is not merged with equal operators outside it.
        """
        jaxpr, consts = compat.open_jaxpr(body)
        env: Env = dict(zip(jaxpr.invars, operands, strict=True))
        self.bind(jaxpr.constvars, consts, env)
        outer = self.value_numbering
        if separate:
            self.value_numbering = ValueNumbering()
        steps = self.walk(jaxpr, env, repeat, prefix)
        self.value_numbering = outer
        operands = [a.atom if isinstance(a, _PinnedAtom) else a for a in operands]
        inputs = tuple(a for a in operands if not isinstance(a, Literal))
        return Block(inputs, tuple(self.read(v, env) for v in jaxpr.outvars), tuple(steps))

    def inline(
        self, eqn: JaxprEqn, body: Jaxpr | ClosedJaxpr, env: Env, repeat: float, prefix: str
    ) -> Sequence[int | Call]:
        """A call without meaning of its own (`jit`): its body's steps, between pinned arguments and results."""
        operands, before = [self.read_pinned(v, env) for v in eqn.invars], []
        if shardings := eqn.params.get("in_shardings"):
            operands, before = self.with_requested_shardings(
                shardings, operands, eqn.invars, eqn, repeat, prefix
            )
        block = self.enter(body, operands, repeat, prefix, separate=False)
        results, after = self.with_requested_shardings(
            pin_primitives.requested_result_shardings(eqn), block.outputs, eqn.outvars, eqn, repeat, prefix
        )
        env.update(zip(eqn.outvars, results, strict=True))
        return [*before, *block.steps, *after]

    def with_requested_shardings(
        self, shardings: Sequence[object], atoms: Sequence[A], variables: Sequence[JaxprAtom], eqn: JaxprEqn,
        repeat: float, prefix: str,
    ) -> tuple[list[A | int], list[int]]:  # fmt: skip
        """Values under `out_sharding=`, `jit(in_shardings=)` and the like: identities with pinned results, and their ids.

        The pin is on the identity, not on the operator before it, which may still give partial sums.
        """
        out: list[A | int] = list(atoms)
        steps: list[int] = []
        if compat.is_backward(prefix, eqn):
            return out, steps
        for k, (sharding, a, v) in enumerate(zip(shardings, atoms, variables, strict=False)):
            if not isinstance(sharding, NamedSharding) or isinstance(a, Literal | _PinnedAtom):
                continue
            identity = compat.new_equation(pin_primitives.out_sharding_p, [v], [v], {}, set(), eqn)
            name, i = pin_primitives.OUT_SHARDING, len(self.operators)
            out[k] = copy = self.tensor(v.aval, f"{name}.{i}")
            steps.append(self.op("eqn", name, [a], [copy], repeat, eqn=identity, prefix=prefix))
            self.pins.append((i, "result", 0, sharding))
        return out, steps

    def kept_call(
        self, eqn: JaxprEqn, body: Jaxpr | ClosedJaxpr, env: Env, repeat: float, prefix: str
    ) -> Call:
        """A `remat`, or a function with custom derivative rules."""
        operands = tuple(self.read(v, env) for v in eqn.invars)
        block = self.enter(body, [self.read_pinned(v, env) for v in eqn.invars], repeat, prefix)
        if eqn.primitive.name.startswith("custom_"):
            block = self.unaliased_results(block, eqn, body, repeat, prefix)
        env.update(zip(eqn.outvars, block.outputs, strict=True))
        results = tuple(a for a in block.outputs if not isinstance(a, Literal))
        return Call(KEPT_CALLS[eqn.primitive.name], eqn, operands, results, (block,), {}, prefix)

    def unaliased_results(
        self, block: Block, eqn: JaxprEqn, body: Jaxpr | ClosedJaxpr, repeat: float, prefix: str
    ) -> Block:
        """The body with an identity for each result that it only passes on: the derivative rule acts on a new tensor."""
        taken: set[Atom | None] = set(block.inputs)
        steps, outputs = list(block.steps), []
        for a, v, result in zip(block.outputs, compat.open_jaxpr(body)[0].outvars, eqn.outvars, strict=True):
            if isinstance(a, Literal) or a in taken or a in self.captured:
                identity = compat.new_equation(pin_primitives.own_result_p, [v], [result], {}, set(), eqn)
                name = pin_primitives.OWN_RESULT
                copy = self.tensor(result.aval, f"{name}.{len(self.operators)}")
                steps.append(self.op("eqn", name, [a], [copy], repeat, eqn=identity, prefix=prefix))
                a = copy
            taken.add(a)
            outputs.append(a)
        return Block(block.inputs, tuple(outputs), tuple(steps))

    def boundary(
        self, kind: OperatorKind, operands: Sequence[Atom], avals: Sequence[ArrayType], names: Sequence[str], repeat: float,
        operand_repeat: Sequence[float], eqn: JaxprEqn, prefix: str, result_repeat: Sequence[float] = (),
    ) -> tuple[int, tuple[int, ...]]:  # fmt: skip
        """A new boundary operator: its id and its results."""
        results = tuple(self.tensor(a, n) for a, n in zip(avals, names, strict=True))
        i = self.op(
            kind, kind, operands, results, repeat, operand_repeat=operand_repeat, eqn=eqn, prefix=prefix,
            boundary_repeat=tuple(result_repeat),
        )  # fmt: skip
        return i, results

    def set_loop_value(self, op: int, operand: Atom, kind: OperatorKind | None = None) -> None:
        """Append a carry's value after an iteration, known once the body is walked; `kind` replaces the operator's."""
        carry = self.operators[op]
        kind = kind or carry.kind
        self.operators[op] = dataclasses.replace(
            carry, kind=kind, primitive=kind, operands=(*carry.operands, operand)
        )
