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
from jshard._errors import NestedShardError
from jshard._program import marks
from jshard._program.graph import Atom, Block, Call, Literal, Operator, Program, Tensor
from jshard._program.mapped import SHARD_MAP, pins_of
from jshard._program.uncollected import uncollected


_INLINE = {"jit", "pjit", "closed_call", "call", "core_call", "eval_jaxpr", "custom_vmap_call"}
_ALIAS = {
    "remat2": "remat",
    "checkpoint": "remat",
    "custom_jvp_call": "custom_jvp",
    "custom_vjp_call": "custom_vjp",
}
INNER_PROGRAMS = frozenset({*_INLINE, *_ALIAS, "scan", "while", "cond"})
"""Primitives that are walked into and rebuilt as themselves."""

_ADDING = frozenset(("add", "add_any", "sub", "scan_sum"))
_BODY = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")


@uncollected()
def build(
    jaxpr: Any, *, name: str, input_names: Sequence[str], output_names: Sequence[str] = (),
    captured: Sequence[Any] = (),
) -> Program:  # fmt: skip
    """Flatten a closed jaxpr into a `Program`; `input_names` are the paths of the flat arguments.

    `captured` are the values of its first inputs, where those are not arguments: tracers that the function closes over.
    """
    opened, consts = compat.open_jaxpr(jaxpr)
    opened = compat.without_dead_code(opened)
    return _Builder(name).program(
        jaxpr, opened, consts, list(input_names), list(output_names), list(captured)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Marked:
    """An atom that carries a pin for the operators that read it directly."""

    atom: Atom
    pin: Any


def _frozen(kind: Any, fields: dict[str, Any]) -> Any:
    """A frozen dataclass of all its fields: their own way sets one by one, which is a quarter of the walk."""
    made = object.__new__(kind)
    object.__setattr__(made, "__dict__", fields)
    return made


class _Builder:
    """Collects tensors and operators while the jaxpr is walked; used once and thrown away."""

    def __init__(self, name: str):
        self.name = name
        self.tensors: list[Tensor] = []
        self.operators: list[Operator] = []
        self.constants: list[Any] = []
        self.const_ids: dict[int, int] = {}
        self.marked = False  # has any operand been pinned yet?
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
        self._bind_consts([*jaxpr.constvars, *jaxpr.invars[: len(captured)]], [*consts, *captured], env)
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
        made = dict(id=i, shape=tuple(aval.shape), dtype=aval.dtype, name=name, weak_type=weak)
        self.tensors.append(_frozen(Tensor, made))
        return i

    def op(
        self, kind: str, primitive: str, operands: Sequence[Atom], results: Sequence[int], repeat: float,
        *, operand_repeat: Sequence[float] | None = None, eqn: Any = None, prefix: str = "", name: str = "",
    ) -> int:  # fmt: skip
        if operand_repeat is None:
            repeats = self.repeats.setdefault((repeat, len(operands)), (repeat,) * len(operands))
        else:
            repeats = tuple(operand_repeat)
        i = len(self.operators)
        made = dict(
            id=i, kind=kind, primitive=primitive, operands=tuple(operands), results=tuple(results), repeat=repeat,
            operand_repeat=repeats, eqn=eqn, prefix=prefix, name=name,
        )  # fmt: skip
        self.operators.append(_frozen(Operator, made))
        return i

    def source(self, kind: str, name: str, aval: Any) -> int:
        t = self.tensor(aval, name)
        self.input_ops.append(self.op(kind, kind, (), (t,), 1.0, name=name))
        return t

    def read(self, v: Any, env: dict[Any, Atom]) -> Atom:
        atom = Literal(v.val, v.aval) if compat.is_literal(v) else env[v]
        return atom.atom if isinstance(atom, _Marked) else atom

    def pass_in(self, v: Any, env: dict[Any, Any]) -> Any:
        """An operand of a call: a mark of `jshard.op` travels into the called program."""
        return env[v] if not compat.is_literal(v) and isinstance(env[v], _Marked) else self.read(v, env)

    def mark(self, op: int, eqn: Any, prefix: str, env: dict[Any, Any]) -> None:
        """Pin the operands that reach this operator marked; the backward pass is not what the user meant."""
        if compat.is_backward(prefix, eqn):
            return
        for k, v in enumerate(eqn.invars):
            if not compat.is_literal(v) and isinstance(env[v], _Marked):
                self.pins.append((op, "operand", k, env[v].pin))

    def _bind_consts(self, variables: Sequence[Any], consts: Sequence[Any], env: dict[Any, Atom]) -> None:
        # An array captured by several inner programs is one input.
        for v, c in zip(variables, consts, strict=True):
            if id(c) not in self.const_ids:
                self.constants.append(c)
                self.const_ids[id(c)] = self.source(
                    "const", f"captured array {len(self.constants) - 1}", v.aval
                )
            env[v] = self.const_ids[id(c)]

    def walk(self, jaxpr: Any, env: dict[Any, Any], repeat: float, prefix: str) -> list[int | Call]:
        steps: list[int | Call] = []
        variable = compat.VARIABLE
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            body, inner = None, ""
            if name in INNER_PROGRAMS:  # few are, and the others need neither
                body = next((eqn.params[k] for k in _BODY if k in eqn.params), None)
                inner = compat.name_stack(prefix, eqn)
            if name in _INLINE and hasattr(body, "eqns"):
                steps += self.inline(eqn, body, env, repeat, inner)
            elif name in _ALIAS and hasattr(body, "eqns"):
                steps.append(self.alias(eqn, body, env, repeat, inner))
            elif name == "scan":
                steps.append(self.scan(eqn, env, repeat, inner))
            elif name == "while":
                steps.append(self.while_loop(compat.one_test(eqn), env, repeat, inner))
            elif name == "cond":
                steps.append(self.cond(eqn, env, repeat, inner))
            elif name == compat.BOUNDARY:
                raise NestedShardError(
                    f"the sharded function {eqn.params['name']} is called inside the sharded function {self.name}",
                    where=f"{compat.module_path(prefix, eqn)} {compat.source_line(eqn)}".strip(),
                    fix=f"shard only {self.name}, and pin what {eqn.params['name']} fixed with jshard.op",
                )
            elif name == marks.PIN_OPERAND:
                env[eqn.outvars[0]] = _Marked(self.read(eqn.invars[0], env), eqn.params["pin"])
                self.marked = True
            else:
                # In most programs nothing is marked, and a variable is what it stands for.
                if self.marked:
                    operands = [self.read(v, env) for v in eqn.invars]
                else:
                    operands = [env[v] if type(v) is variable else self.read(v, env) for v in eqn.invars]
                i = len(self.operators)
                if self.marked:
                    self.mark(i, eqn, prefix, env)
                if name == SHARD_MAP:
                    where = f"{compat.module_path(prefix, eqn)} {compat.source_line(eqn)}".strip()
                    self.pins += [(i, *pin) for pin in pins_of(eqn, self.name, where)]
                if name in marks.PIN_RESULT and (pin := marks.PIN_RESULT[name](eqn)) is not None:
                    # A type that a transposition goes back to is nobody's wish, a constraint is.
                    if name != "reshard" or not compat.is_backward(prefix, eqn):
                        self.pins.append((i, "result", 0, pin))
                results = [self.tensor(eqn.outvars[0].aval, f"{name}.{i}")] if eqn.outvars else []
                results += [self.tensor(v.aval, f"{name}.{i}[{k}]") for k, v in enumerate(eqn.outvars[1:], 1)]
                steps.append(self.op("eqn", name, operands, results, repeat, eqn=eqn, prefix=prefix))
                if asked := marks.asked_of_results(eqn):
                    results, more = self.as_asked(asked, results, eqn.outvars, eqn, repeat, prefix)
                    steps += more
                env.update(zip(eqn.outvars, results, strict=True))
        return steps

    def enter(self, body: Any, operands: Sequence[Atom], repeat: float, prefix: str) -> Block:
        """Walk an inner program whose inputs are the caller's atoms."""
        jaxpr, consts = compat.open_jaxpr(body)
        env: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
        self._bind_consts(jaxpr.constvars, consts, env)
        steps = self.walk(jaxpr, env, repeat, prefix)
        operands = [a.atom if isinstance(a, _Marked) else a for a in operands]
        inputs = tuple(a for a in operands if not isinstance(a, Literal))
        return Block(inputs, tuple(self.read(v, env) for v in jaxpr.outvars), tuple(steps))

    def inline(
        self, eqn: Any, body: Any, env: dict[Any, Atom], repeat: float, prefix: str
    ) -> Sequence[int | Call]:
        given, before = [self.pass_in(v, env) for v in eqn.invars], []
        if wanted := eqn.params.get("in_shardings"):
            given, before = self.as_asked(wanted, given, eqn.invars, eqn, repeat, prefix)
        block = self.enter(body, given, repeat, prefix)
        results, after = self.as_asked(
            marks.asked_of_results(eqn), block.outputs, eqn.outvars, eqn, repeat, prefix
        )
        env.update(zip(eqn.outvars, results, strict=True))
        return [*before, *block.steps, *after]

    def as_asked(
        self, asked: Sequence[Any], atoms: Sequence[Any], variables: Sequence[Any], eqn: Any, repeat: float, prefix: str
    ) -> tuple[list[Any], list[int]]:  # fmt: skip
        """Values with the shardings that the user's code asks of them: each through an identity whose result is pinned.

        So an operator may make partial sums, and what is asked is asked of their sum.
        """
        out, steps = list(atoms), []
        if compat.is_backward(prefix, eqn):
            return out, steps
        for k, (sharding, a, v) in enumerate(zip(asked, atoms, variables, strict=False)):
            if not isinstance(sharding, NamedSharding) or isinstance(a, Literal | _Marked):
                continue
            same = compat.identity_equation(marks.out_sharding, v, v, eqn)
            i = len(self.operators)
            made = self.tensor(v.aval, f"{marks.OUT_SHARDING}.{i}")
            steps.append(self.op("eqn", marks.OUT_SHARDING, [a], [made], repeat, eqn=same, prefix=prefix))
            self.pins.append((i, "result", 0, sharding))
            out[k] = made
        return out, steps

    def alias(self, eqn: Any, body: Any, env: dict[Any, Atom], repeat: float, prefix: str) -> Call:
        operands = tuple(self.read(v, env) for v in eqn.invars)
        block = self.enter(body, [self.pass_in(v, env) for v in eqn.invars], repeat, prefix)
        if eqn.primitive.name.startswith("custom_"):
            block = self.own_results(block, eqn, body, repeat, prefix)
        env.update(zip(eqn.outvars, block.outputs, strict=True))
        results = tuple(a for a in block.outputs if not isinstance(a, Literal))
        return Call(_ALIAS[eqn.primitive.name], eqn, operands, results, (block,), {}, prefix)

    def own_results(self, block: Block, eqn: Any, body: Any, repeat: float, prefix: str) -> Block:
        """Results that the body only passes on get a tensor of their own: through it the derivative rule acts."""
        taken: set[Any] = {a for a in block.inputs}
        steps, outputs = list(block.steps), []
        for a, v, result in zip(block.outputs, compat.open_jaxpr(body)[0].outvars, eqn.outvars, strict=True):
            if isinstance(a, Literal) or a in taken or a in self.const_ids.values():
                same = compat.identity_equation(marks.own_result, v, result, eqn)
                made = [self.tensor(result.aval, f"{marks.OWN_RESULT}.{len(self.operators)}")]
                name = marks.OWN_RESULT
                steps.append(self.op("eqn", name, [a], made, repeat, eqn=same, prefix=prefix))
                a = made[0]
            taken.add(a)
            outputs.append(a)
        return Block(block.inputs, tuple(outputs), tuple(steps))

    def boundary(
        self, role: str, operands: Sequence[Atom], avals: Sequence[Any], names: Sequence[str], repeat: float,
        operand_repeat: Sequence[float], eqn: Any, prefix: str,
    ) -> tuple[int, tuple[int, ...]]:  # fmt: skip
        results = tuple(self.tensor(a, n) for a, n in zip(avals, names, strict=True))
        i = self.op(
            role, role, operands, results, repeat, operand_repeat=operand_repeat, eqn=eqn, prefix=prefix,
        )  # fmt: skip
        return i, results

    def close(self, op: int, operand: Atom, kind: str = "") -> None:
        """Give a boundary operator its last operand, known only after the body was walked, and maybe another kind."""
        old = self.operators[op]
        self.operators[op] = Operator(
            old.id, kind or old.kind, kind or old.primitive, (*old.operands, operand), old.results, old.repeat,
            old.operand_repeat, old.eqn, old.prefix, old.name,
        )  # fmt: skip

    def adds_up(self, carried: int, after: Atom, start: int) -> bool:
        """Whether a turn only adds to what it is given: such a carry may stay a partial sum until the loop ends."""
        makers = {r: op for op in self.operators[start:] for r in op.results}
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

    def scan(self, eqn: Any, env: dict[Any, Atom], repeat: float, prefix: str) -> Call:
        n_const, n_carry = compat.scan_split(eqn.params)
        body, length = eqn.params["jaxpr"], max(1, int(eqn.params["length"]))
        operands = [self.read(v, env) for v in eqn.invars]
        jaxpr, _ = compat.open_jaxpr(body)
        inner_avals = [v.aval for v in jaxpr.invars]
        inside = repeat * length
        roles: dict[str, list[int]] = {"const": [], "carry": [], "xs": [], "ys": []}
        inner: list[Atom] = []
        results: list[int] = []
        for k, (a, aval) in enumerate(zip(operands, inner_avals, strict=True)):
            if k < n_const:
                role, avals, times = "const", [aval], [repeat]
            elif k < n_const + n_carry:
                role, avals, times = "carry", [aval, eqn.outvars[k - n_const].aval], [repeat, inside]
            else:
                role, avals, times = "xs", [aval], [repeat]
            names = [f"scan {role} {k}", f"scan result {k - n_const}"][: len(avals)]
            i, made = self.boundary("scan_" + role, [a], avals, names, repeat, times, eqn, prefix)
            roles[role].append(i)
            inner.append(made[0])
            results += made[1:]
        start = len(self.operators)
        block = self.enter(body, inner, inside, prefix)
        for i, a in zip(roles["carry"], block.outputs[:n_carry], strict=True):
            sums = self.adds_up(self.operators[i].results[0], a, start)
            self.close(i, a, "scan_sum" if sums else "")
        for k, a in enumerate(block.outputs[n_carry:]):
            aval = eqn.outvars[n_carry + k].aval
            i, made = self.boundary(
                "scan_ys", [a], [aval], [f"scan stacked {k}"], repeat, [inside], eqn, prefix
            )
            roles["ys"].append(i)
            results += made
        env.update(zip(eqn.outvars, results, strict=True))
        bound = {k: tuple(v) for k, v in roles.items()}
        return Call("scan", eqn, tuple(operands), tuple(results), (block,), bound, prefix)

    def while_loop(self, eqn: Any, env: dict[Any, Atom], repeat: float, prefix: str) -> Call:
        # The trip count of a while loop is unknown: its body counts as one turn.
        p = eqn.params
        nc, nb = p["cond_nconsts"], p["body_nconsts"]
        operands = [self.read(v, env) for v in eqn.invars]
        consts, init = operands[: nc + nb], operands[nc + nb :]
        const_ops, carry_ops, const_in, carry_in, results = [], [], [], [], []
        for k, a in enumerate(consts):
            aval = eqn.invars[k].aval
            i, made = self.boundary(
                "while_const", [a], [aval], [f"while const {k}"], repeat, [repeat], eqn, prefix
            )
            const_ops.append(i)
            const_in.append(made[0])
        for k, a in enumerate(init):
            aval = eqn.outvars[k].aval
            names = [f"while carry {k}", f"while result {k}"]
            i, made = self.boundary("while_carry", [a], [aval] * 2, names, repeat, [repeat] * 2, eqn, prefix)
            carry_ops.append(i)
            carry_in.append(made[0])
            results.append(made[1])
        cond = self.enter(p["cond_jaxpr"], const_in[:nc] + carry_in, repeat, prefix)
        pred, made = self.boundary("predicate", [cond.outputs[0]], [_aval_of(p["cond_jaxpr"], 0)], ["while test"],
                                   repeat, [repeat], eqn, prefix)  # fmt: skip
        cond = Block(cond.inputs, (made[0],), cond.steps)
        body = self.enter(p["body_jaxpr"], const_in[nc:] + carry_in, repeat, prefix)
        for i, a in zip(carry_ops, body.outputs, strict=True):
            self.close(i, a)
        env.update(zip(eqn.outvars, results, strict=True))
        bound = {"const": tuple(const_ops), "carry": tuple(carry_ops), "pred": (pred,)}
        return Call("while", eqn, tuple(operands), tuple(results), (cond, body), bound, prefix)

    def cond(self, eqn: Any, env: dict[Any, Atom], repeat: float, prefix: str) -> Call:
        operands = [self.read(v, env) for v in eqn.invars]
        pred, made = self.boundary(
            "predicate", [operands[0]], [eqn.invars[0].aval], ["branch index"], repeat, [repeat], eqn, prefix
        )
        del made
        blocks = [self.enter(b, operands[1:], repeat, prefix) for b in eqn.params["branches"]]
        joins, results = [], []
        for k, v in enumerate(eqn.outvars):
            branch_outs = [b.outputs[k] for b in blocks]
            i, made = self.boundary(
                "cond_join",
                branch_outs,
                [v.aval],
                [f"cond result {k}"],
                repeat,
                [repeat] * len(blocks),
                eqn,
                prefix,
            )
            joins.append(i)
            results += made
        env.update(zip(eqn.outvars, results, strict=True))
        bound = {"pred": (pred,), "join": tuple(joins)}
        return Call("cond", eqn, tuple(operands), tuple(results), tuple(blocks), bound, prefix)


def _aval_of(closed: Any, k: int) -> Any:
    return compat.open_jaxpr(closed)[0].outvars[k].aval
