"""Running a schedule on one device's blocks, inside `shard_map`.

The whole program is one `shard_map`: every operator runs on local blocks, every redistribution is an explicit
collective, and XLA's partitioner has nothing left to decide. So what the schedule says is what is compiled.

Two ways of running. `vma=False` is for compiled calls: no bookkeeping of which axes a value varies over.
`vma=True` is for programs that JAX may differentiate from outside: values are typed by the axes they vary
over (`check_vma`), which makes the transposes of the collectives the right and cheap ones, and custom
derivative rules are kept as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType

from jshard import _jaxcompat as compat
from jshard._core.errors import ShardError
from jshard._core.layout import Layout
from jshard._cost.reshard_steps import apply_step
from jshard._lower.as_traced import run_as_traced
from jshard._lower.custom_derivatives import rebuild_with_rule
from jshard._lower.emit_collectives import apply_reshard
from jshard._memory.in_place import is_update
from jshard._memory.memory_layout import memory_layout
from jshard._program.graph import Literal
from jshard._program.user_shard_map import SHARD_MAP
from jshard._rules.primitives.slicing import StackSlice, materialized
from jshard._rules.registry import LocalContext, block_index, plan_scope
from jshard._schedule.loop_stacks import carried_stacks
from jshard._schedule.schedule import Action, Reshard, RunCall, RunOperator, Schedule, Value


Env = dict[Value, Any]
# The user's own map takes values typed as its specs say, a solver what its functions were traced with.
_CASTS_OWN_OPERANDS = (SHARD_MAP, "custom_linear_solve")


def spmd(schedule: Schedule, mesh: Any, *, vma: bool = False) -> Callable[..., list[Any]]:
    """The program as a function of its flat arguments and captured arrays, giving its flat results.

    `mesh` is the JAX mesh (Auto axes) whose axes the schedule's layouts name.
    """
    choice = schedule.assignment
    program, topology = choice.program, choice.topology
    in_layouts = [choice.result_layout(program.operators[i].results[0]) for i in program.inputs]
    out_layouts = [choice.operand_layout(i, 0) for i in program.outputs]
    avals = [program.tensors[program.operators[i].results[0]] for i in program.inputs]
    # XLA turns what holds nothing into constants, and refuses a manual computation that is left without an operand
    # ("expected at least one operand ... GlobalToLocalShape"). So arrays of size zero are made inside.
    given = [k for k, a in enumerate(avals) if 0 not in a.shape]
    local = local_program(schedule, vma=vma)

    def body(*blocks: Any) -> tuple[Any, ...]:
        present = dict(zip(given, blocks, strict=True))
        every = [present[k] if k in present else _empty_block(avals[k], lay, topology.mesh, vma)
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
    choice = schedule.assignment
    program = choice.program
    sources = [program.operators[i].results[0] for i in program.inputs]
    in_layouts = [choice.result_layout(t) for t in sources]
    schedule = schedule.with_calls if vma else schedule
    runner = _LocalInterpreter(schedule, vma)

    def body(*blocks: Any) -> tuple[Any, ...]:
        env: Env = {(t, lay): x for t, lay, x in zip(sources, in_layouts, blocks, strict=True)}
        runner.constants = {
            k: v for k, v in env.items() if program.operators[choice.producers[k[0]][0]].kind == "const"
        }
        runner.run(schedule.actions, env, top=True)
        return tuple(runner.as_array(v, env) for v in schedule.outputs)

    return body


class _LocalInterpreter:
    """Executes actions on an environment of local values."""

    def __init__(self, schedule: Schedule, vma: bool):
        self.choice, self.program, self.vma = schedule.assignment, schedule.assignment.program, vma
        self.mesh = schedule.assignment.topology.mesh
        self.constants: Env = {}
        self.row_major = memory_layout(self.program, self.choice.topology.chip).row_major_updates
        self.trip_counter: Any = None  # in a loop that counts its turns: how many there were

    def run(self, actions: Sequence[Action], env: Env, top: bool = False) -> None:
        for action in actions:
            if isinstance(action, Reshard):
                self.run_reshard(action, env)
                tensor = self.program.operators[self.choice.producers[action.tensor][0]]
                if top and tensor.kind == "const":
                    self.constants[action.tensor, action.target] = env[action.tensor, action.target]
            elif isinstance(action, RunOperator):
                self.run_operator(action, env)
            else:
                getattr(self, action.call.kind + "_call")(action, env)

    def read(self, v: Value | Literal, env: Env) -> Any:
        return v.value if isinstance(v, Literal) else materialized(env[v])

    def as_array(self, v: Value | Literal, env: Env) -> Any:
        """A result as `shard_map` wants it: an array, literals included."""
        if isinstance(v, Literal):
            return jnp.asarray(v.value, v.aval.dtype)
        return materialized(env[v])

    def run_reshard(self, m: Reshard, env: Env) -> None:
        varying = frozenset(self._reader_axes(m))
        x, layout = materialized(env[m.tensor, m.source]), m.source
        if m.regathered:
            # Or the compiler makes one of two equal collectives, or begins the second long before it is read.
            others = [
                self.choice.values[t] for t in self.program.operators[m.reader].operands if type(t) is int
            ]
            others = [materialized(env[v]) for v in others if v in env and v[0] != m.tensor]
            x, *_ = lax.optimization_barrier((x, *others))
        if m.loop_invariant:
            (x,) = self.tie_to_trip([x])
        for step, number in zip(m.steps, m.collective_ids, strict=True):
            after = apply_step(step, layout)
            with plan_scope(number):
                x = apply_reshard(x, layout, after, (step,), self.mesh, vma=self.vma, consumer_axes=varying)
            layout = after
        env[m.tensor, m.target] = x

    def tie_to_trip(self, values: Sequence[Any]) -> list[Any]:
        """Values that do not change from turn to turn, as though they did: compilers would move what reads them out of
        the loop. The count of turns goes through the same barrier, and from there into the next turn."""
        if self.trip_counter is None:
            return list(values)
        *values, self.trip_counter = lax.optimization_barrier((*values, self.trip_counter))
        return list(values)

    def run_trip(
        self, action: RunCall, k: int, arrays: Sequence[Any], count: Sequence[Any]
    ) -> tuple[list[Any], Any]:
        """What the body of a loop gives, and the count of turns after it, where the body needs one."""
        outer, self.trip_counter = self.trip_counter, next(iter(count), None)
        out = self.results(action, k, arrays)
        after, self.trip_counter = self.trip_counter, outer
        return out, [] if after is None else [after + 1]

    def initial_trip_counter(self, action: RunCall) -> list[Any]:
        """The count of turns as a loop begins, where something in its body must not leave it.

        It goes on from that of the loop around it: what is inside must not leave that one either.
        """
        needed = not self.vma and any(
            _must_stay_in_loop(a) for body_arrays in action.bodies for a in body_arrays
        )
        return [jnp.zeros((), "int32") if self.trip_counter is None else self.trip_counter] if needed else []

    def resume_outer_counter(self, count: Sequence[Any]) -> None:
        """After a loop: the one around it goes on counting."""
        if self.trip_counter is not None and count:
            (self.trip_counter,) = count

    def _reader_axes(self, m: Reshard) -> tuple[str, ...]:
        """Axes over which the reader works on different blocks anyway: gathers for it need no common result."""
        if not self.vma or m.reader < 0:
            return ()
        candidate = self.choice.candidate(m.reader)
        if candidate is None or self.program.operators[m.reader].primitive in _CASTS_OWN_OPERANDS:
            return ()
        return tuple(n for n, f in zip(self.mesh.names, candidate.axis_codes, strict=True) if f != -1)

    def run_operator(self, action: RunOperator, env: Env) -> None:
        op = self.program.operators[action.op]
        states = self.choice.states[action.op]
        candidate = self.choice.candidate(action.op)
        assert states.op is not None and candidate is not None and op.eqn is not None
        eqn = op.eqn

        def bind(*operands: Any, **params: Any) -> list[Any]:
            # Shardings of the traced program speak of the whole mesh; here is one device's block.
            params = {k: None if k in ("sharding", "out_sharding") else v for k, v in params.items()}
            if self.vma:  # a local function may have made one of them differ between devices, by its position
                operands = tuple(_to_common_vma(operands))
            out = eqn.primitive.bind(*operands, **compat.bind_params(eqn, params))
            return list(out) if eqn.primitive.multiple_results else [out]

        operands = [self.read(v, env) for v in action.reads]
        if action.loop_invariant:
            operands = self.tie_to_trip(operands)
        elif is_update(op.primitive) and not isinstance(action.reads[0], Literal):
            operands[0] = env[action.reads[0]]  # if it is a part of a stack, that is updated
        if self.vma and op.primitive not in _CASTS_OWN_OPERANDS:
            operands = _to_common_vma(operands)
        context = LocalContext(
            states.op, states.rule, candidate, self.mesh, bind, self.vma and op.repeat > 1, action.collective_ids,
            op.id in self.row_major,
        )  # fmt: skip
        # A function of the user's writes its collectives as it likes: they are known by the first number.
        first = action.collective_ids[0] if action.collective_ids and not states.rule.internal else -1
        with compat.eqn_context(eqn, op.prefix), plan_scope(first):
            local = states.entry.local_impl if states.entry is not None else None
            if local is not None:
                body_results = list(local(context, *operands))
            elif states.rule.opaque and not eqn.effects:
                body_results = run_as_traced(eqn, operands)
            else:
                body_results = list(context.bind(*operands))
        for k, (t, x) in enumerate(zip(op.results, body_results, strict=True)):
            layout = states.results[k].layout(self.choice.state[action.op])
            expected = layout.local_shape(self.program.tensors[t].shape, self.mesh)
            if tuple(x.shape) != expected:
                raise ShardError(
                    f"the rule of {op.primitive} gives local blocks of shape {tuple(x.shape)}, not {expected}",
                    where=f"{op.module} {op.source}".strip(),
                    fix="correct the rule or its local function; the operator's layouts are " + str(layout),
                )
            env[t, layout] = x

    def bind_results(
        self, action: RunCall, values: Sequence[Any], returns: Sequence[Value | Literal], env: Env
    ) -> None:
        for v, x in zip(returns, values, strict=True):
            if not isinstance(v, Literal):
                env[v] = x

    def body_env(self, values: Sequence[Value], arrays: Sequence[Any]) -> Env:
        return {**self.constants, **dict(zip(values, arrays, strict=True))}

    def body(self, action: RunCall, k: int, arrays: Sequence[Any]) -> list[Any]:
        return [materialized(x) for x in self.results(action, k, arrays)]

    def results(self, action: RunCall, k: int, arrays: Sequence[Any]) -> list[Any]:
        """What a body gives; parts of stacks as such."""
        env = self.body_env(action.entry[k], arrays)
        self.run(action.bodies[k], env)
        return [self.as_array(v, env) if isinstance(v, Literal) else env[v] for v in action.returns[k]]

    def remat_call(self, action: RunCall, env: Env) -> None:
        arrays = [materialized(env[v]) for v in action.entry[0]]
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
            arrays = list(lax.optimization_barrier(tuple(arrays)))
            out = self.body(action, 0, arrays)
        self.bind_results(action, out, action.returns[0], env)

    def custom_jvp_call(self, action: RunCall, env: Env) -> None:
        arrays = [materialized(env[v]) for v in action.entry[0]]
        if not self.vma:  # nobody differentiates a compiled call: its rule is not needed
            self.bind_results(action, self.body(action, 0, arrays), action.returns[0], env)
            return
        # The rule belongs to the call, not to its body: it is rebuilt as itself.
        call = action.call
        layouts = dict(action.entry[0])
        tensors = [a for a in call.operands if not isinstance(a, Literal)]
        returns = [
            Layout(((),) * len(v.aval.shape)) if isinstance(v, Literal) else v[1] for v in action.returns[0]
        ]

        def body(*operand_arrays: Any) -> list[Any]:
            unique = dict(zip(tensors, operand_arrays, strict=True))
            return self.body(action, 0, [unique[t] for t, _ in action.entry[0]])

        f = rebuild_with_rule(
            call,
            self.program,
            [layouts[t] for t in tensors],
            returns,
            self.choice.topology,
            body,
            self.run_rule_schedule,
        )
        env_of = dict(zip((t for t, _ in action.entry[0]), arrays, strict=True))
        out = f(*(_cast_vma(env_of[t], frozenset(layouts[t].axes)) for t in tensors))
        self.bind_results(action, list(out), action.returns[0], env)

    custom_vjp_call = custom_jvp_call

    def run_rule_schedule(self, schedule: Schedule, blocks: Sequence[Any]) -> list[Any]:
        """Another schedule on local blocks, its results typed by exactly the axes of their layouts."""
        outs = local_program(schedule, vma=self.vma)(*blocks, *schedule.assignment.program.constants)
        layouts = [schedule.assignment.operand_layout(i, 0) for i in schedule.assignment.program.outputs]
        return [_cast_vma(x, frozenset(lay.axes)) for x, lay in zip(outs, layouts, strict=True)]

    def scan_call(self, action: RunCall, env: Env) -> None:
        p, b = action.call.eqn.params, action.call.boundary
        nc, nk = len(b["const"]), len(b["carry"])
        reads = self.given(action, env)
        consts, init, xs = reads[:nc], reads[nc : nc + nk], reads[nc + nk :]
        init = [self.initial_partial_carry(x, i) for x, i in zip(init, b["carry"], strict=True)]
        if self.vma:
            init = [self.cast_carry_vma(x, i) for x, i in zip(init, b["carry"], strict=True)]

        stacks = [] if self.vma else carried_stacks(action, self.program, self.choice.values)
        around, grown = [t.xs for t in stacks], [t.ys for t in stacks]
        sliced = tuple(x for k, x in enumerate(xs) if k not in around)

        def turn(carry: Any, x: Any) -> Any:
            (held, stacked, count), (i, slices) = carry, x
            parts = {k: StackSlice(stack, i) for k, stack in zip(around, stacked, strict=True)}
            left = iter(slices)
            every = [parts[k] if k in parts else next(left) for k in range(len(xs))]
            out, count = self.run_trip(action, 0, [*consts, *held, *every], count)
            held, ys = [materialized(y) for y in out[:nk]], out[nk:]
            if self.vma:
                held = [self.cast_carry_vma(y, i) for y, i in zip(held, b["carry"], strict=True)]
            stacked = tuple(ys[j].stack for j in grown)
            return (tuple(held), stacked, count), tuple(
                materialized(y) for j, y in enumerate(ys) if j not in grown
            )

        count = self.initial_trip_counter(action)
        # Side by side, turns that move the same would be merged again.
        unroll = 1 if count else p["unroll"]
        length = int(p["length"])
        (final, stacked, count), rest = lax.scan(
            turn,
            (tuple(init), tuple(xs[k] for k in around), count),
            (jnp.arange(length) if stacks else None, sliced),
            length=length,
            reverse=p["reverse"],
            unroll=unroll,
        )
        self.resume_outer_counter(count)
        left, made = iter(rest), dict(zip(grown, stacked, strict=True))
        ys = [made[j] if j in made else next(left) for j in range(len(b["ys"]))]
        self.bind_boundary_results(action, (*final, *ys), (*b["carry"], *b["ys"]), env)

    def while_call(self, action: RunCall, env: Env) -> None:
        b = action.call.boundary
        nc = len(b["test"])
        n = nc + len(b["const"])
        arrays = self.given(action, env)
        consts, init = arrays[:n], arrays[n:]
        if self.vma:
            init = [self.cast_carry_vma(x, i) for x, i in zip(init, b["carry"], strict=True)]

        def turn(c: Any) -> Any:
            held, count = c
            out, count = self.run_trip(action, 1, [*consts[nc:], *held], count)
            out = [materialized(y) for y in out]
            if self.vma:
                out = [self.cast_carry_vma(y, i) for y, i in zip(out, b["carry"], strict=True)]
            return tuple(out), count

        def test(c: Any) -> Any:
            return self.run_trip(action, 0, [*consts[:nc], *c[0]], c[1])[0][0]

        final, count = lax.while_loop(test, turn, (tuple(init), self.initial_trip_counter(action)))
        self.resume_outer_counter(count)
        self.bind_boundary_results(action, final, b["carry"], env)

    def cond_call(self, action: RunCall, env: Env) -> None:
        b = action.call.boundary
        index, *arrays = self.given(action, env)
        if index.dtype == bool:
            index = index.astype("int32")

        def branch(k: int) -> Callable[..., Any]:
            def run(*a: Any) -> Any:
                outer = self.trip_counter  # a branch may tie what is in it to the count, and hands none on
                out = self.body(action, k, a)
                self.trip_counter = outer
                return tuple(
                    self.cast_carry_vma(y, i) if self.vma else y for y, i in zip(out, b["join"], strict=True)
                )

            return run

        results = lax.switch(index, [branch(k) for k in range(len(action.bodies))], *arrays)
        self.bind_boundary_results(action, results, b["join"], env)

    def bind_boundary_results(
        self, action: RunCall, results: Sequence[Any], ops: Sequence[int], env: Env
    ) -> None:
        """Results of a loop or branch go to the last result of their boundary operators."""
        for x, i in zip(results, ops, strict=True):
            t = self.program.operators[i].results[-1]
            env[t, self.choice.result_layout(t)] = x

    def given(self, action: RunCall, env: Env) -> list[Any]:
        """What a loop or branch reads, as arrays."""
        return (self.tie_to_trip if action.loop_invariant else list)(
            [self.as_array(v, env) for v in action.reads]
        )

    def initial_partial_carry(self, x: Any, boundary: int) -> Any:
        """The initial value of a sum that goes round a loop unfinished: the first device has it, others zero."""
        layout = self.choice.result_layout(self.program.operators[boundary].results[-1])
        given = self.choice.operand_layout(boundary, 0).partial
        axes = tuple(a for a in layout.partial if a not in given)
        if not axes:
            return x
        if self.vma:
            x = _cast_vma(x, frozenset(axes))
        return jnp.where(block_index(axes, self.mesh) == 0, x, jnp.zeros_like(x))

    def cast_carry_vma(self, x: Any, boundary: int) -> Any:
        """Type a value that goes round a loop by exactly the axes of its layout."""
        t = self.program.operators[boundary].results[-1]
        return _cast_vma(x, frozenset(self.choice.result_layout(t).axes))


def _must_stay_in_loop(action: Action) -> bool:
    """Whether something in an action is not to leave the loop around it."""
    inside = isinstance(action, RunCall) and any(
        _must_stay_in_loop(a) for body in action.bodies for a in body
    )
    return inside or action.loop_invariant


def _to_common_vma(operands: Sequence[Any]) -> list[Any]:
    """Operands typed as varying over the same axes, as primitives ask under `check_vma`."""
    axes = frozenset().union(*(compat.vma(x) for x in operands if hasattr(x, "dtype")))
    return [_cast_vma(x, axes) for x in operands]


def _empty_block(aval: Any, layout: Layout, mesh: Any, vma: bool) -> Any:
    """A device's block of an array of size zero, typed as a block that `shard_map` was given."""
    x = compat.empty(layout.local_shape(aval.shape, mesh), aval.dtype)
    return _cast_vma(x, frozenset(layout.axes)) if vma else x


def _cast_vma(x: Any, axes: frozenset[str]) -> Any:
    if not axes:
        return x
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    missing = tuple(sorted(axes - compat.vma(x)))
    return lax.pcast(x, missing, to="varying") if missing else x
