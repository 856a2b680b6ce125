"""From a Python function and its arguments to a `Program`.

`jax.jit(f).trace` does the tracing, so static and donated arguments, keywords and pytrees mean what they mean
in JAX. The jaxpr is then walked once: calls are entered, loops and branches get boundary operators
(see `graph`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding

from jshard import _jaxcompat as compat
from jshard._core.errors import NestedShardError
from jshard._core.gc_pause import gc_paused
from jshard._program import loops, pin_primitives
from jshard._program.common_subexpressions import ValueNumbering, literal_value
from jshard._program.graph import Atom, Block, Call, Literal, Operator, Program, Tensor
from jshard._program.loop_invariants import INLINED_CALLS, body_of
from jshard._program.user_shard_map import SHARD_MAP, pins_of


_ALIAS = {
    "remat2": "remat",
    "checkpoint": "remat",
    "custom_jvp_call": "custom_jvp",
    "custom_vjp_call": "custom_vjp",
}
_LOOPS = {"scan": loops.scan, "while": loops.while_loop, "cond": loops.cond}
CALL_PRIMITIVES = frozenset({*INLINED_CALLS, *_ALIAS, *_LOOPS})
"""Primitives that are walked into and rebuilt as themselves."""


@gc_paused()
def build(
    jaxpr: Any, *, name: str, input_names: Sequence[str], output_names: Sequence[str] = (),
    captured: Sequence[Any] = (),
) -> Program:  # fmt: skip
    """Flatten a closed jaxpr into a `Program`; `input_names` are the paths of the flat arguments.

    `captured` are the values of its first inputs, where those are not arguments: tracers that the function closes over.
    """
    opened, consts = compat.open_jaxpr(jaxpr)
    opened = compat.without_dead_code(opened)
    return Builder(name).program(jaxpr, opened, consts, list(input_names), list(output_names), list(captured))


@dataclasses.dataclass(frozen=True, eq=False)
class _PinnedAtom:
    """An atom that carries a pin for the operators that read it directly."""

    atom: Atom
    pin: Any


def _frozen(kind: Any, fields: dict[str, Any]) -> Any:
    """A frozen dataclass of all its fields: their own way sets one by one, which is a quarter of the walk."""
    made = object.__new__(kind)
    object.__setattr__(made, "__dict__", fields)
    return made


class Builder:
    """Collects tensors and operators while the jaxpr is walked, with `loops`; used once and thrown away."""

    def __init__(self, name: str):
        self.name = name
        self.tensors: list[Tensor] = []
        self.operators: list[Operator] = []
        self.constants: list[Any] = []
        self.const_ids: dict[int, int] = {}
        self.any_pinned = False  # has any operand been pinned yet?
        self.path: list[Any] = []  # places of the calls and loops around what is walked
        # What was moved out of loops, by the place of its equation: around how many loops, and the results there.
        self.hoisted: dict[tuple[Any, ...], tuple[int, Sequence[Any]]] = {}
        self.frames: list[loops.Frame] = []  # of the loops around
        self.captured: set[Atom] = set()  # tensors of captured arrays: every body reads them as they are
        self.names: set[str] = set()  # of tensors
        self.value_numbering = ValueNumbering()
        self.literals: dict[int, tuple[Literal, Any]] = {}  # by identity; kept, so that no other gets it
        self.repeats: dict[tuple[float, int], tuple[float, ...]] = {}
        self.input_ops: list[int] = []
        self.pins: list[tuple[int, str, int, Any]] = []

    def program(
        self,
        closed: Any,
        jaxpr: Any,
        consts: Sequence[Any],
        names: list[str],
        outs: list[str],
        captured: list[Any],
    ) -> Program:
        env: dict[Any, Atom] = {}
        invars = list(jaxpr.invars)[len(captured) :]
        names += [f"argument {i}" for i in range(len(names), len(invars))]
        for v, n in zip(invars, names, strict=False):
            env[v] = self.source("input", n, v.aval)
        arguments = list(self.input_ops)
        self.bind([*jaxpr.constvars, *jaxpr.invars[: len(captured)]], [*consts, *captured], env)
        steps = self.walk(jaxpr, env, 1.0, "")
        outputs = [self.read(v, env) for v in jaxpr.outvars]
        outs += (
            [f"result {i}" for i in range(len(outs), len(outputs))]
            if len(outputs) > 1
            else ["result"][len(outs) :]
        )
        out_ops = [
            self.op("output", "output", (a,), (), 1.0, name=n) for a, n in zip(outputs, outs, strict=False)
        ]
        others = sorted(set(self.input_ops) - set(arguments))
        made = [self.operators[i].results[0] for i in arguments + others]
        body = Block(tuple(made), tuple(outputs), tuple(steps))
        return Program(
            self.name, tuple(self.tensors), tuple(self.operators), tuple(arguments + others), tuple(out_ops),
            tuple(self.constants), body, closed, tuple(self.pins),
        )  # fmt: skip

    def tensor(self, aval: Any, name: str) -> int:
        i = len(self.tensors)
        weak = bool(getattr(aval, "weak_type", False))
        if name in self.names:  # two loops have a carry 0 each
            name = f"{name}.{len(self.operators)}"
        self.names.add(name)
        made = dict(id=i, shape=tuple(aval.shape), dtype=aval.dtype, name=name, weak_type=weak)
        self.tensors.append(_frozen(Tensor, made))
        return i

    def op(
        self, kind: str, primitive: str, operands: Sequence[Atom], results: Sequence[int], repeat: float,
        *, operand_repeat: Sequence[float] | None = None, eqn: Any = None, prefix: str = "", name: str = "",
        turns: tuple[float, ...] = (),
    ) -> int:  # fmt: skip
        if operand_repeat is None:
            repeats = self.repeats.setdefault((repeat, len(operands)), (repeat,) * len(operands))
        else:
            repeats = tuple(operand_repeat)
        i = len(self.operators)
        made = dict(
            id=i, kind=kind, primitive=primitive, operands=tuple(operands), results=tuple(results), repeat=repeat,
            operand_repeat=repeats, eqn=eqn, prefix=prefix, name=name, turns=turns,
        )  # fmt: skip
        self.operators.append(_frozen(Operator, made))
        return i

    def source(self, kind: str, name: str, aval: Any) -> int:
        t = self.tensor(aval, name)
        self.input_ops.append(self.op(kind, kind, (), (t,), 1.0, name=name))
        return t

    def read(self, v: Any, env: dict[Any, Atom]) -> Atom:
        atom = Literal(v.val, v.aval) if compat.is_literal(v) else env[v]
        return atom.atom if isinstance(atom, _PinnedAtom) else atom

    def read_pinned(self, v: Any, env: dict[Any, Any]) -> Any:
        """An operand of a call: a mark of `jshard.op` travels into the called program."""
        return env[v] if not compat.is_literal(v) and isinstance(env[v], _PinnedAtom) else self.read(v, env)

    def pin_operands(self, op: int, eqn: Any, prefix: str, env: dict[Any, Any]) -> None:
        """Pin the operands that reach this operator marked; the backward pass is not what the user meant."""
        if compat.is_backward(prefix, eqn):
            return
        for k, v in enumerate(eqn.invars):
            if not compat.is_literal(v) and isinstance(env[v], _PinnedAtom):
                self.pins.append((op, "operand", k, env[v].pin))

    def bind(self, variables: Sequence[Any], consts: Sequence[Any], env: dict[Any, Atom]) -> None:
        # An array captured by several inner programs is one input.
        for v, c in zip(variables, consts, strict=True):
            if id(c) not in self.const_ids:
                self.constants.append(c)
                self.const_ids[id(c)] = self.source(
                    "const", f"captured array {len(self.constants) - 1}", v.aval
                )
            env[v] = self.const_ids[id(c)]
            self.captured.add(env[v])

    def walk(self, jaxpr: Any, env: dict[Any, Any], repeat: float, prefix: str) -> list[int | Call]:
        steps: list[int | Call] = []
        for k, eqn in enumerate(jaxpr.eqns):
            moved = self.hoisted.get((*self.path, k)) if self.hoisted else None
            if moved:
                env.update(zip(eqn.outvars, self.in_current_body(*moved), strict=True))
            elif eqn.primitive.name in CALL_PRIMITIVES:
                self.path.append(k)
                steps += self.step(eqn, env, repeat, prefix)
                self.path.pop()
            else:
                steps += self.step(eqn, env, repeat, prefix)
        return steps

    def step(self, eqn: Any, env: dict[Any, Any], repeat: float, prefix: str) -> Sequence[int | Call]:
        """The steps that an equation is written as; its results go to `env`."""
        name = eqn.primitive.name
        if name in CALL_PRIMITIVES:  # few are
            body, inner = body_of(eqn), compat.name_stack(prefix, eqn)
            if name in INLINED_CALLS and hasattr(body, "eqns"):
                return self.inline(eqn, body, env, repeat, inner)
            if name in _ALIAS and hasattr(body, "eqns"):
                return [self.alias(eqn, body, env, repeat, inner)]
            if name in _LOOPS:
                return self.loop(eqn, env, repeat, inner)
        if name == compat.ARGUMENT_MARKER:
            raise NestedShardError(
                f"the sharded function {eqn.params['name']} is called inside the sharded function {self.name}",
                where=f"{compat.module_path(prefix, eqn)} {compat.source_line(eqn)}".strip(),
                fix=f"shard only {self.name}, and pin what {eqn.params['name']} fixed with jshard.op",
            )
        if name == pin_primitives.PIN_OPERAND:
            env[eqn.outvars[0]] = _PinnedAtom(self.read(eqn.invars[0], env), eqn.params["pin"])
            self.any_pinned = True
            return ()
        return self.equation(eqn, env, repeat, prefix)

    def loop(self, eqn: Any, env: dict[Any, Any], repeat: float, prefix: str) -> Sequence[int | Call]:
        """A loop or branch, unless an equal one was there."""
        eqn = compat.with_scalar_predicate(eqn) if eqn.primitive.name == "while" else eqn
        there, key = self.value_numbering.lookup(
            eqn, self.value_keys(eqn, [self.read(v, env) for v in eqn.invars], env)
        )
        if there is not None:
            env.update(zip(eqn.outvars, there, strict=True))
            return ()
        steps = _LOOPS[eqn.primitive.name](self, eqn, env, repeat, prefix)
        self.value_numbering.record(eqn, key, [env[v] for v in eqn.outvars])
        return steps

    def equation(self, eqn: Any, env: dict[Any, Any], repeat: float, prefix: str) -> Sequence[int | Call]:
        """An equation that has no body: an operator, unless an equal one was there."""
        name = eqn.primitive.name
        # In most programs nothing is marked, and a variable is what it stands for.
        if self.any_pinned:
            operands = [self.read(v, env) for v in eqn.invars]
        else:
            operands = [env[v] if type(v) is compat.VARIABLE else self.read(v, env) for v in eqn.invars]
        there, key = self.value_numbering.lookup(eqn, self.value_keys(eqn, operands, env))
        if there is not None:
            env.update(zip(eqn.outvars, there, strict=True))
            return ()
        i = len(self.operators)
        if self.any_pinned:
            self.pin_operands(i, eqn, prefix, env)
        if name == SHARD_MAP:
            where = f"{compat.module_path(prefix, eqn)} {compat.source_line(eqn)}".strip()
            self.pins += [(i, *pin) for pin in pins_of(eqn, self.name, where)]
        if (
            name in pin_primitives.RESULT_PIN_READERS
            and (pin := pin_primitives.RESULT_PIN_READERS[name](eqn)) is not None
        ):
            # A type that a transposition goes back to is nobody's wish, a constraint is.
            if name != "reshard" or not compat.is_backward(prefix, eqn):
                self.pins.append((i, "result", 0, pin))
        results = [self.tensor(eqn.outvars[0].aval, f"{name}.{i}")] if eqn.outvars else []
        results += [self.tensor(v.aval, f"{name}.{i}[{k}]") for k, v in enumerate(eqn.outvars[1:], 1)]
        self.op("eqn", name, operands, results, repeat, eqn=eqn, prefix=prefix)
        steps = [i]
        if asked := pin_primitives.requested_result_shardings(eqn):
            results, more = self.with_requested_shardings(asked, results, eqn.outvars, eqn, repeat, prefix)
            steps += more
        self.value_numbering.record(eqn, key, results)
        env.update(zip(eqn.outvars, results, strict=True))
        return steps

    def in_current_body(self, depth: int, atoms: Sequence[Atom]) -> list[Any]:
        """Values from so many loops around as the body that is walked has them; None where it has them not."""
        for frame in self.frames[depth:]:
            atoms = [a if isinstance(a, Literal) or a in self.captured else frame.get(a) for a in atoms]  # type: ignore[misc]
        return list(atoms)

    def value_keys(self, eqn: Any, operands: Sequence[Atom], env: dict[Any, Any]) -> list[Any]:
        """The operands of an equation as `Known` compares them: literals by value, others with the user's marks."""
        if self.any_pinned:
            marks_of = [None if compat.is_literal(v) else env.get(v) for v in eqn.invars]
            operands = [
                ("marked", a, m.pin) if isinstance(m, _PinnedAtom) else a
                for a, m in zip(operands, marks_of, strict=True)
            ]  # type: ignore[assignment]
        return [a if type(a) is int else self.literal(a) if isinstance(a, Literal) else a for a in operands]

    def literal(self, a: Literal) -> Any:
        """A literal by what it holds; many are one object."""
        key = id(a.value)
        if key not in self.literals:
            self.literals[key] = a, literal_value(a.value, a.aval)
        return self.literals[key][1]

    def enter(
        self, body: Any, operands: Sequence[Atom], repeat: float, prefix: str, apart: bool = True
    ) -> Block:
        """Walk an inner program whose inputs are the caller's atoms.

        What runs `apart`, such as a loop's body, shares no equal operators with what is around it.
        """
        jaxpr, consts = compat.open_jaxpr(body)
        env: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
        self.bind(jaxpr.constvars, consts, env)
        around, self.value_numbering = (
            self.value_numbering,
            ValueNumbering() if apart else self.value_numbering,
        )
        steps = self.walk(jaxpr, env, repeat, prefix)
        self.value_numbering = around
        operands = [a.atom if isinstance(a, _PinnedAtom) else a for a in operands]
        inputs = tuple(a for a in operands if not isinstance(a, Literal))
        return Block(inputs, tuple(self.read(v, env) for v in jaxpr.outvars), tuple(steps))

    def inline(
        self, eqn: Any, body: Any, env: dict[Any, Atom], repeat: float, prefix: str
    ) -> Sequence[int | Call]:
        given, before = [self.read_pinned(v, env) for v in eqn.invars], []
        if wanted := eqn.params.get("in_shardings"):
            given, before = self.with_requested_shardings(wanted, given, eqn.invars, eqn, repeat, prefix)
        block = self.enter(body, given, repeat, prefix, apart=False)
        results, after = self.with_requested_shardings(
            pin_primitives.requested_result_shardings(eqn), block.outputs, eqn.outvars, eqn, repeat, prefix
        )
        env.update(zip(eqn.outvars, results, strict=True))
        return [*before, *block.steps, *after]

    def with_requested_shardings(
        self, asked: Sequence[Any], atoms: Sequence[Any], variables: Sequence[Any], eqn: Any, repeat: float, prefix: str
    ) -> tuple[list[Any], list[int]]:  # fmt: skip
        """Values with the shardings that the user's code asks of them: each through an identity whose result is pinned.

        So an operator may make partial sums, and what is asked is asked of their sum.
        """
        out, steps = list(atoms), []
        if compat.is_backward(prefix, eqn):
            return out, steps
        for k, (sharding, a, v) in enumerate(zip(asked, atoms, variables, strict=False)):
            if not isinstance(sharding, NamedSharding) or isinstance(a, Literal | _PinnedAtom):
                continue
            same = compat.identity_equation(pin_primitives.out_sharding_p, v, v, eqn)
            i = len(self.operators)
            made = self.tensor(v.aval, f"{pin_primitives.OUT_SHARDING}.{i}")
            steps.append(
                self.op("eqn", pin_primitives.OUT_SHARDING, [a], [made], repeat, eqn=same, prefix=prefix)
            )
            self.pins.append((i, "result", 0, sharding))
            out[k] = made
        return out, steps

    def alias(self, eqn: Any, body: Any, env: dict[Any, Atom], repeat: float, prefix: str) -> Call:
        operands = tuple(self.read(v, env) for v in eqn.invars)
        block = self.enter(body, [self.read_pinned(v, env) for v in eqn.invars], repeat, prefix)
        if eqn.primitive.name.startswith("custom_"):
            block = self.unaliased_results(block, eqn, body, repeat, prefix)
        env.update(zip(eqn.outvars, block.outputs, strict=True))
        results = tuple(a for a in block.outputs if not isinstance(a, Literal))
        return Call(_ALIAS[eqn.primitive.name], eqn, operands, results, (block,), {}, prefix)

    def unaliased_results(self, block: Block, eqn: Any, body: Any, repeat: float, prefix: str) -> Block:
        """Results that the body only passes on get a tensor of their own: through it the derivative rule acts."""
        taken: set[Any] = {a for a in block.inputs}
        steps, outputs = list(block.steps), []
        for a, v, result in zip(block.outputs, compat.open_jaxpr(body)[0].outvars, eqn.outvars, strict=True):
            if isinstance(a, Literal) or a in taken or a in self.captured:
                same = compat.identity_equation(pin_primitives.own_result_p, v, result, eqn)
                made = [self.tensor(result.aval, f"{pin_primitives.OWN_RESULT}.{len(self.operators)}")]
                name = pin_primitives.OWN_RESULT
                steps.append(self.op("eqn", name, [a], made, repeat, eqn=same, prefix=prefix))
                a = made[0]
            taken.add(a)
            outputs.append(a)
        return Block(block.inputs, tuple(outputs), tuple(steps))

    def boundary(
        self, role: str, operands: Sequence[Atom], avals: Sequence[Any], names: Sequence[str], repeat: float,
        operand_repeat: Sequence[float], eqn: Any, prefix: str, turns: Sequence[float] = (),
    ) -> tuple[int, tuple[int, ...]]:  # fmt: skip
        """A boundary operator and its results; `turns` is how often each of those comes into being."""
        results = tuple(self.tensor(a, n) for a, n in zip(avals, names, strict=True))
        i = self.op(
            role, role, operands, results, repeat, operand_repeat=operand_repeat, eqn=eqn, prefix=prefix,
            turns=tuple(turns),
        )  # fmt: skip
        return i, results

    def set_loop_value(self, op: int, operand: Atom, kind: str = "") -> None:
        """Give a boundary operator its last operand, known only after the body was walked, and maybe another kind."""
        old = self.operators[op]
        self.operators[op] = Operator(
            old.id, kind or old.kind, kind or old.primitive, (*old.operands, operand), old.results, old.repeat,
            old.operand_repeat, old.eqn, old.prefix, old.name, old.boundary_repeat,
        )  # fmt: skip
