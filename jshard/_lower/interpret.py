"""Running a schedule on one device's blocks, inside `shard_map`.

The whole program is one `shard_map`: every operator runs on local blocks, every redistribution is an explicit
collective, and XLA's partitioner has nothing left to decide. So what the schedule says is what is compiled.

Two ways of running. `vma=False` is for compiled calls: no bookkeeping of which axes a value varies over.
`vma=True` is for programs that JAX may differentiate from outside: values are typed by the axes they vary
over (`check_vma`), which makes the transposes of the collectives the right and cheap ones, and custom
derivative rules are kept as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType

from jshard import _jaxcompat as compat
from jshard._cost.in_place import updates
from jshard._cost.lying import lying
from jshard._cost.steps import apply
from jshard._errors import ShardError
from jshard._layout import Layout
from jshard._lower.as_traced import run_as_traced
from jshard._lower.custom import rebuild
from jshard._lower.redistribute import run_steps
from jshard._plan.schedule import Action, Move, Nested, Run, Schedule, Value
from jshard._plan.stacks import Through, through
from jshard._program.graph import Literal
from jshard._program.mapped import SHARD_MAP
from jshard._rules.registry import LocalContext, block_index
from jshard._rules.slices import Part, whole


Env = dict[Value, Any]


def spmd(schedule: Schedule, mesh: Any, *, vma: bool = False) -> Callable[..., list[Any]]:
    """The program as a function of its flat arguments and captured arrays, giving its flat results.

    `mesh` is the JAX mesh (Auto axes) whose axes the schedule's layouts name.
    """
    choice = schedule.choice
    program, topology = choice.program, choice.topology
    in_layouts = [choice.made(program.operators[i].results[0]) for i in program.inputs]
    out_layouts = [choice.needed(i, 0) for i in program.outputs]
    avals = [program.tensors[program.operators[i].results[0]] for i in program.inputs]
    # XLA turns what holds nothing into constants, and refuses a manual computation that is left without an operand
    # ("expected at least one operand ... GlobalToLocalShape"). So arrays of size zero are made inside.
    given = [k for k, a in enumerate(avals) if 0 not in a.shape]
    local = local_program(schedule, vma=vma)

    def body(*blocks: Any) -> tuple[Any, ...]:
        present = dict(zip(given, blocks, strict=True))
        every = [present[k] if k in present else _empty(avals[k], lay, topology.mesh, vma)
                 for k, lay in enumerate(in_layouts)]  # fmt: skip
        return local(*every)

    mapped: Callable[..., Any] = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=tuple(in_layouts[k].spec for k in given),
        out_specs=tuple(lay.spec for lay in out_layouts),
        check_vma=vma,
    )

    def call(*every: Any) -> list[Any]:
        args = [every[k] for k in given]
        context = jax.sharding.get_abstract_mesh()
        results: Any
        if context.empty or AxisType.Explicit not in context.axis_types:
            results = mapped(*args)
        elif not vma:
            # A compiled call of its own: its arguments come in our shardings, the context says nothing about them.
            with jax.sharding.use_abstract_mesh(
                mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
            ):
                results = mapped(*args)
        else:
            specs = tuple(lay.spec for lay in out_layouts)
            results = jax.sharding.auto_axes(mapped, out_sharding=specs)(*args)
        return list(results)

    return call


def local_program(schedule: Schedule, *, vma: bool = False) -> Callable[..., tuple[Any, ...]]:
    """The program on one device's blocks of its arguments and captured arrays, for use inside `shard_map`."""
    choice = schedule.choice
    program = choice.program
    sources = [program.operators[i].results[0] for i in program.inputs]
    in_layouts = [choice.made(t) for t in sources]
    runner = _Runner(schedule, vma)

    def body(*blocks: Any) -> tuple[Any, ...]:
        env: Env = {(t, lay): x for t, lay, x in zip(sources, in_layouts, blocks, strict=True)}
        runner.constants = {
            k: v for k, v in env.items() if program.operators[choice.producers[k[0]][0]].kind == "const"
        }
        runner.run(schedule.actions, env, top=True)
        return tuple(runner.finish(v, env) for v in schedule.outputs)

    return body


class _Runner:
    """Executes actions on an environment of local values."""

    def __init__(self, schedule: Schedule, vma: bool):
        self.choice, self.program, self.vma = schedule.choice, schedule.choice.program, vma
        self.mesh = schedule.choice.topology.mesh
        self.constants: Env = {}
        self.settled = lying(self.program, self.choice.topology.chip).settled

    def run(self, actions: Sequence[Action], env: Env, top: bool = False) -> None:
        for action in actions:
            if isinstance(action, Move):
                self.move(action, env)
                tensor = self.program.operators[self.choice.producers[action.tensor][0]]
                if top and tensor.kind == "const":
                    self.constants[action.tensor, action.target] = env[action.tensor, action.target]
            elif isinstance(action, Run):
                self.operator(action, env)
            else:
                getattr(self, action.call.kind + "_call")(action, env)

    def read(self, v: Value | Literal, env: Env) -> Any:
        return v.value if isinstance(v, Literal) else whole(env[v])

    def finish(self, v: Value | Literal, env: Env) -> Any:
        """A result as `shard_map` wants it: an array, literals included."""
        if isinstance(v, Literal):
            return jnp.asarray(v.value, v.aval.dtype)
        return whole(env[v])

    def move(self, m: Move, env: Env) -> None:
        varying = frozenset(self._varying(m))
        x, layout = whole(env[m.tensor, m.source]), m.source
        if m.again:
            # Or the compiler makes one of two equal collectives, or begins the second long before it is read.
            others = [
                self.choice.values[t] for t in self.program.operators[m.reader].operands if type(t) is int
            ]
            x, *_ = lax.optimization_barrier(
                (x, *(whole(env[v]) for v in others if v in env and v[0] != m.tensor))
            )
        for step, number in zip(m.steps, m.numbers, strict=True):
            after = apply(step, layout)
            with _scope(number):
                x = run_steps(x, layout, after, (step,), self.mesh, vma=self.vma, varying=varying)
            layout = after
        env[m.tensor, m.target] = x

    def _varying(self, m: Move) -> tuple[str, ...]:
        """Axes over which the reader works on different blocks anyway: gathers for it need no common result."""
        if not self.vma or m.reader < 0:
            return ()
        candidate = self.choice.candidate(m.reader)
        # The user's own map takes values typed as its specs say.
        if candidate is None or self.program.operators[m.reader].primitive == SHARD_MAP:
            return ()
        return tuple(n for n, f in zip(self.mesh.names, candidate.axes, strict=True) if f != -1)

    def operator(self, action: Run, env: Env) -> None:
        op = self.program.operators[action.op]
        states = self.choice.states[action.op]
        candidate = self.choice.candidate(action.op)
        assert states.op is not None and candidate is not None and op.eqn is not None
        eqn = op.eqn

        def bind(*operands: Any, **params: Any) -> list[Any]:
            # Shardings of the traced program speak of the whole mesh; here is one device's block.
            params = {k: None if k in ("sharding", "out_sharding") else v for k, v in params.items()}
            if self.vma:  # a local function may have made one of them differ between devices, by its position
                operands = tuple(_alike(operands))
            out = eqn.primitive.bind(*operands, **compat.bind_params(eqn, params))
            return list(out) if eqn.primitive.multiple_results else [out]

        operands = [self.read(v, env) for v in action.reads]
        if action.reads and isinstance(part := env.get(action.reads[0]), Part) and updates(op.primitive):
            operands[0] = part
        if self.vma and op.primitive != SHARD_MAP:
            operands = _alike(operands)
        context = LocalContext(
            states.op,
            states.rule,
            candidate,
            self.mesh,
            bind,
            self.vma and op.repeat > 1,
            op.id in self.settled,
        )
        with compat.eqn_context(eqn, op.prefix), _scope(action.number):
            local = states.entry.local if states.entry is not None else None
            if local is not None:
                results = list(local(context, *operands))
            elif states.rule.opaque and not eqn.effects:
                results = run_as_traced(eqn, operands)
            else:
                results = list(context.bind(*operands))
        for k, (t, x) in enumerate(zip(op.results, results, strict=True)):
            layout = states.results[k].of(self.choice.state[action.op])
            expected = layout.local_shape(self.program.tensors[t].shape, self.mesh)
            if tuple(x.shape) != expected:
                raise ShardError(
                    f"the rule of {op.primitive} gives local blocks of shape {tuple(x.shape)}, not {expected}",
                    where=f"{op.module} {op.source}".strip(),
                    fix="correct the rule or its local function; the operator's layouts are " + str(layout),
                )
            env[t, layout] = x

    def hand_back(
        self, action: Nested, values: Sequence[Any], returns: Sequence[Value | Literal], env: Env
    ) -> None:
        for v, x in zip(returns, values, strict=True):
            if not isinstance(v, Literal):
                env[v] = x

    def inner(self, values: Sequence[Value], arrays: Sequence[Any]) -> Env:
        return {**self.constants, **dict(zip(values, arrays, strict=True))}

    def body(self, action: Nested, k: int, arrays: Sequence[Any]) -> list[Any]:
        return [whole(x) for x in self.results(action, k, arrays)]

    def results(self, action: Nested, k: int, arrays: Sequence[Any]) -> list[Any]:
        """What a body gives; parts of stacks as such."""
        env = self.inner(action.entry[k], arrays)
        self.run(action.bodies[k], env)
        return [self.finish(v, env) if isinstance(v, Literal) else env[v] for v in action.returns[k]]

    def remat_call(self, action: Nested, env: Env) -> None:
        arrays = [whole(env[v]) for v in action.entry[0]]
        params = action.call.eqn.params
        if self.vma:
            f = jax.checkpoint(
                lambda *a: self.body(action, 0, a),
                policy=params.get("policy"),
                prevent_cse=params["prevent_cse"],
            )
            out = f(*arrays)
        else:
            # What lowering a differentiated remat does: the barrier keeps the recomputation from being merged away.
            if params.get("differentiated") and params.get("prevent_cse", True) and arrays:
                arrays = list(lax.optimization_barrier(tuple(arrays)))
            out = self.body(action, 0, arrays)
        self.hand_back(action, out, action.returns[0], env)

    def custom_jvp_call(self, action: Nested, env: Env) -> None:
        arrays = [whole(env[v]) for v in action.entry[0]]
        if not self.vma:
            self.hand_back(action, self.body(action, 0, arrays), action.returns[0], env)
            return
        # The rule belongs to the call, not to its body: it is rebuilt as itself.
        call = action.call
        layouts = dict(action.entry[0])
        tensors = [a for a in call.operands if not isinstance(a, Literal)]
        returns = [
            Layout(((),) * len(v.aval.shape)) if isinstance(v, Literal) else v[1] for v in action.returns[0]
        ]

        def body(*given: Any) -> list[Any]:
            unique = dict(zip(tensors, given, strict=True))
            return self.body(action, 0, [unique[t] for t, _ in action.entry[0]])

        f = rebuild(
            call, self.program, [layouts[t] for t in tensors], returns, self.choice.topology, body, self.again
        )
        env_of = dict(zip((t for t, _ in action.entry[0]), arrays, strict=True))
        out = f(*(_cast(env_of[t], frozenset(layouts[t].axes)) for t in tensors))
        self.hand_back(action, list(out), action.returns[0], env)

    custom_vjp_call = custom_jvp_call

    def again(self, schedule: Schedule, blocks: Sequence[Any]) -> list[Any]:
        """Another schedule on local blocks, its results typed by exactly the axes of their layouts."""
        outs = local_program(schedule, vma=self.vma)(*blocks, *schedule.choice.program.constants)
        layouts = [schedule.choice.needed(i, 0) for i in schedule.choice.program.outputs]
        return [_cast(x, frozenset(lay.axes)) for x, lay in zip(outs, layouts, strict=True)]

    def scan_call(self, action: Nested, env: Env) -> None:
        p, b = action.call.eqn.params, action.call.boundary
        nc, nk = len(b["const"]), len(b["carry"])
        reads = [self.array(v, env, self.program.operators[i].operands[0]) for v, i in
                 zip(action.reads, (*b["const"], *b["carry"], *b["xs"]), strict=True)]  # fmt: skip
        consts, init, xs = reads[:nc], reads[nc : nc + nk], reads[nc + nk :]
        init = [self.addend(x, i) for x, i in zip(init, b["carry"], strict=True)]
        if self.vma:
            init = [self.vary(x, i) for x, i in zip(init, b["carry"], strict=True)]

        def turn(carry: Any, x: Any) -> Any:
            out = self.body(action, 0, [*consts, *carry, *x])
            if self.vma:
                out[:nk] = [self.vary(y, i) for y, i in zip(out[:nk], b["carry"], strict=True)]
            return tuple(out[:nk]), tuple(out[nk:])

        options = dict(length=int(p["length"]), reverse=p["reverse"], unroll=p["unroll"])
        stacks = [] if self.vma else through(action, self.program, self.choice.values)
        if not stacks:
            final, ys = lax.scan(turn, tuple(init), tuple(xs), **options)
        else:
            final, ys = self.with_stacks(action, stacks, consts, init, xs, options)
        self.place(action, (*final, *ys), (*b["carry"], *b["ys"]), env)

    def with_stacks(
        self, action: Nested, stacks: Sequence[Through], consts: list[Any], init: list[Any], xs: list[Any],
        options: dict[str, Any],
    ) -> tuple[Any, Any]:  # fmt: skip
        """A loop round which some stacks go whole; its carry at the end, and all stacked results."""
        mine, out = [t.xs for t in stacks], [t.ys for t in stacks]
        others = [x for k, x in enumerate(xs) if k not in mine]
        nk = len(init)

        def turn(carry: Any, given: Any) -> Any:
            i, *rest = given
            slices, parts = iter(rest), dict(zip(mine, carry[nk:], strict=True))
            every = [Part(parts[k], i) if k in parts else next(slices) for k in range(len(xs))]
            made = self.results(action, 0, [*consts, *carry[:nk], *every])
            left = [y for j, y in enumerate(made[nk:]) if j not in out]
            grown = [made[nk + j].stack for j in out]
            return (*map(whole, made[:nk]), *grown), tuple(map(whole, left))

        length = options["length"]
        carry = (*init, *(xs[k] for k in mine))
        final, rest = lax.scan(turn, carry, (jnp.arange(length), *others), **options)
        left, grown = iter(rest), dict(zip(out, final[nk:], strict=True))
        return final[:nk], [grown[j] if j in grown else next(left) for j in range(len(rest) + len(out))]

    def while_call(self, action: Nested, env: Env) -> None:
        p, b = action.call.eqn.params, action.call.boundary
        nc, n = p["cond_nconsts"], len(b["const"])
        arrays = [self.array(v, env, self.program.operators[i].operands[0]) for v, i in
                  zip(action.reads, (*b["const"], *b["carry"]), strict=True)]  # fmt: skip
        consts, init = arrays[:n], arrays[n:]
        if self.vma:
            init = [self.vary(x, i) for x, i in zip(init, b["carry"], strict=True)]

        def turn(c: Any) -> Any:
            out = self.body(action, 1, [*consts[nc:], *c])
            return tuple(self.vary(y, i) if self.vma else y for y, i in zip(out, b["carry"], strict=True))

        final = lax.while_loop(lambda c: self.body(action, 0, [*consts[:nc], *c])[0], turn, tuple(init))
        self.place(action, final, b["carry"], env)

    def cond_call(self, action: Nested, env: Env) -> None:
        b = action.call.boundary
        index, *arrays = [self.read(v, env) for v in action.reads]
        if index.dtype == bool:
            index = index.astype("int32")

        def branch(k: int) -> Callable[..., Any]:
            def run(*a: Any) -> Any:
                out = self.body(action, k, a)
                return tuple(self.vary(y, i) if self.vma else y for y, i in zip(out, b["join"], strict=True))

            return run

        results = lax.switch(index, [branch(k) for k in range(len(action.bodies))], *arrays)
        self.place(action, results, b["join"], env)

    def place(self, action: Nested, results: Sequence[Any], ops: Sequence[int], env: Env) -> None:
        """Results of a loop or branch go to the last result of their boundary operators."""
        for x, i in zip(results, ops, strict=True):
            t = self.program.operators[i].results[-1]
            env[t, self.choice.made(t)] = x

    def array(self, v: Value | Literal, env: Env, atom: Any) -> Any:
        return jnp.asarray(v.value, v.aval.dtype) if isinstance(v, Literal) else whole(env[v])

    def addend(self, x: Any, boundary: int) -> Any:
        """The initial value of a sum that goes round a loop unfinished: the first device has it, others zero."""
        layout = self.choice.made(self.program.operators[boundary].results[-1])
        given = self.choice.needed(boundary, 0).partial
        axes = tuple(a for a in layout.partial if a not in given)
        if not axes:
            return x
        if self.vma:
            x = _cast(x, frozenset(axes))
        return jnp.where(block_index(axes, self.mesh) == 0, x, jnp.zeros_like(x))

    def vary(self, x: Any, boundary: int) -> Any:
        """Type a value that goes round a loop by exactly the axes of its layout."""
        t = self.program.operators[boundary].results[-1]
        return _cast(x, frozenset(self.choice.made(t).axes))


def _scope(number: int) -> Any:
    """The name by which verification finds collective `number` in the compiled program."""
    return jax.named_scope(f"jshard.{number}") if number >= 0 else contextlib.nullcontext()


def _alike(operands: Sequence[Any]) -> list[Any]:
    """Operands typed as varying over the same axes, as primitives ask under `check_vma`."""
    axes = frozenset().union(*(compat.vma(x) for x in operands if hasattr(x, "dtype")))
    return [_cast(x, axes) for x in operands]


def _empty(aval: Any, layout: Layout, mesh: Any, vma: bool) -> Any:
    """A device's block of an array of size zero, typed as a block that `shard_map` was given."""
    x = compat.empty(layout.local_shape(aval.shape, mesh), aval.dtype)
    return _cast(x, frozenset(layout.axes)) if vma else x


def _cast(x: Any, axes: frozenset[str]) -> Any:
    if not axes:
        return x
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    missing = tuple(sorted(axes - compat.vma(x)))
    return lax.pcast(x, missing, to="varying") if missing else x
