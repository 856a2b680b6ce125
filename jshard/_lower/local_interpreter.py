"""The actions of a schedule, run on one device's blocks inside `shard_map`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jshard._core import jaxcompat as compat
from jshard._core.errors import ShardError
from jshard._core.jax_types import PyTree
from jshard._core.layout import Layout
from jshard._cost.reshard_steps import apply_step
from jshard._lower.as_traced import run_as_traced
from jshard._lower.custom_derivatives import PlanRule, RunRule, rebuild_with_rule
from jshard._lower.emit_collectives import apply_reshard
from jshard._lower.made_and_read import is_made_by_loop, pads_for_products
from jshard._lower.read_axes import CASTS_OWN_OPERANDS, varying_as_read
from jshard._lower.segment_barriers import SegmentBarriers
from jshard._lower.sunk_slices import SunkSlices
from jshard._lower.unmerged_copies import UnmergedCopies
from jshard._program.graph import Literal
from jshard._program.memory.in_place import is_update
from jshard._program.memory.liveness import liveness
from jshard._program.memory.memory_layout import memory_layout
from jshard._rules.registry import Edges, LocalContext, StackSlice, block_index, materialized, plan_scope
from jshard._rules.rule import NONE, Candidate
from jshard._schedule.loop_stacks import CarriedStack, carried_stacks
from jshard._schedule.schedule import Action, Reshard, RunCall, RunOperator, Schedule, Value


T = TypeVar("T")

Local = jax.Array | StackSlice
Env = dict[Value, Local]
"""Local values by tensor and layout: arrays, or slices of the stacks that a loop carries whole."""

_LARGE_RESULT = 8 * 2**20  # bytes; smaller collectives may be combined
_PARTS = ("slice", "dynamic_slice")  # primitives that return a part of their first operand


class LocalInterpreter:
    """Executes the actions of a schedule on an environment of local values.

    Arguments:

    - `schedule`: what to run; with the calls that have derivative rules kept when `vma`.
    - `vma`: whether values are typed by the mesh axes they vary over, for differentiation from outside.
    - `plan_rule`, `run_rule`: schedule a derivative rule and run its schedule; used with `vma` only.
    - `gathered`: results that collectives make for the buffers of donated arguments (`donated_results.py`).
    """

    def __init__(
        self, schedule: Schedule, vma: bool, plan_rule: PlanRule | None, run_rule: RunRule,
        gathered: Collection[Value] = (),
    ):  # fmt: skip
        self.gathered = gathered
        self.last_written: jax.Array | None = None
        self.schedule, self.vma = schedule, vma
        self.plan_rule, self.run_rule = plan_rule, run_rule
        self.assignment, self.program = schedule.assignment, schedule.assignment.program
        self.mesh = schedule.assignment.topology.mesh
        self.row_major_updates = memory_layout(self.program, self.assignment.topology.chip).row_major_updates
        self.copies = UnmergedCopies(self.assignment)
        self.constants: Env = {}  # captured arrays, which every body may read
        self.barriers = SegmentBarriers(self.assignment)
        self.slices = SunkSlices(self.assignment, liveness(self.program), self._bind_local)
        self.exchanged: Counter[Value] = Counter()  # how many operators have exchanged edges of a value
        self.exchanged_before: dict[int, int] = {}  # by operand of the operator that runs, those before it
        # By (operator, operand) the edges that arrived, of operands whose edges others use.
        self.edges: dict[tuple[int, int], Edges] = {}
        self.keeps_edges = {(kept.op, kept.operand) for kept in self.assignment.kept_edges}
        # Trips so far, in a loop some of whose actions must not be hoisted.
        self.trip_counter: jax.Array | None = None

    def run_program(self, env: Env) -> None:
        """Run the whole program; `env` has the blocks of its arguments and captured arrays."""
        self.last_written, self.exchanged, self.edges = None, Counter(), {}
        self.copies = UnmergedCopies(self.assignment)
        self.constants = {value: x for value, x in env.items() if self._is_constant(value[0])}
        for action in self.schedule.actions:
            self._run_action(action, env)
            if isinstance(action, Reshard) and self._is_constant(action.tensor):
                self.constants[action.tensor, action.target] = env[action.tensor, action.target]

    def as_array(self, value: Value | Literal, env: Env) -> jax.Array:
        """A value as an array, literals included."""
        if isinstance(value, Literal):
            return jnp.asarray(value.value, value.aval.dtype)
        return materialized(env[value])

    def _is_constant(self, tensor: int) -> bool:
        producer, _ = self.assignment.producers[tensor]
        return self.program.operators[producer].kind == "const"

    def _run_action(self, action: Action, env: Env) -> None:
        if isinstance(action, Reshard):
            self._reshard(action, env)
        elif isinstance(action, RunOperator):
            self._operator(action, env)
        else:
            calls = {
                "remat": self._remat, "custom_jvp": self._custom_derivative, "custom_vjp": self._custom_derivative,
                "scan": self._scan, "while": self._while, "cond": self._cond,
            }  # fmt: skip
            calls[action.call.kind](action, env)

    def _reshard(self, action: Reshard, env: Env) -> None:
        block = None if self.vma else self.slices.block(action, env)
        self.slices.record(action)
        if block is not None:
            env[action.tensor, action.target] = block
            return
        x, layout = materialized(env[action.tensor, action.source]), action.source
        x = self.copies.behind_barrier(action, x, env)
        if action.loop_invariant:
            (x,) = self._tie_to_trip([x])
        over_argument = (action.tensor, action.target) in self.gathered
        if over_argument:
            pieces = action.target.pieces(self.mesh)
            x = self._after_last_written(x, self.program.tensors[action.tensor].nbytes / pieces)
        reader_axes, is_sum = self._reader_axes(action), bool(layout.partial)
        for step, number in zip(action.steps, action.collective_ids, strict=True):
            after = apply_step(step, layout)
            with plan_scope(number):
                x = apply_reshard(
                    x, layout, after, (step,), self.mesh, vma=self.vma, consumer_axes=reader_axes,
                    topology=self.assignment.topology, after_loop=is_sum and is_made_by_loop(self.program, action.tensor),
                )  # fmt: skip
            layout = after
        env[action.tensor, action.target] = self._written(x) if over_argument else x

    def _after_last_written(self, x: jax.Array, target_bytes: float) -> jax.Array:
        """What a large result is gathered from, once the last such result is where it belongs."""
        if self.last_written is not None and target_bytes >= _LARGE_RESULT:
            x, _ = lax.optimization_barrier((x, self.last_written))
        return x

    def _written(self, x: jax.Array) -> jax.Array:
        """An array as the result of an elementwise operator, which may write it over a donated argument."""
        if not jnp.issubdtype(x.dtype, np.generic):  # keys
            return x
        x = jnp.where(lax.optimization_barrier(jnp.bool_(True)), x, jnp.zeros((), x.dtype))
        self.last_written = x if x.nbytes >= _LARGE_RESULT else self.last_written
        return x

    def _reader_axes(self, action: Reshard) -> frozenset[str]:
        """Axes over which the reader's blocks differ in any case, so that gathers for it need no invariant result."""
        if not self.vma or action.reader < 0:
            return frozenset()
        candidate = self.assignment.candidate(action.reader)
        if candidate is None or self.program.operators[action.reader].primitive in CASTS_OWN_OPERANDS:
            return frozenset()
        codes = zip(self.mesh.names, candidate.axis_codes, strict=True)
        return frozenset(name for name, code in codes if code != NONE)

    def _operator(self, action: RunOperator, env: Env) -> None:
        op = self.program.operators[action.op]
        states = self.assignment.states[action.op]
        operands: list[ArrayLike | Local] = [
            v.value if isinstance(v, Literal) else materialized(env[v]) for v in action.reads
        ]
        if action.loop_invariant:
            operands = self._tie_to_trip(operands)
        elif (is_update(op.primitive) or op.primitive in _PARTS) and not isinstance(action.reads[0], Literal):
            # A slice of a stack is updated, or read in parts, inside the stack.
            operands[0] = env[action.reads[0]]
        operands = self._exchanged_anew(action, operands)
        if self.vma and op.primitive not in CASTS_OWN_OPERANDS:
            operands = [*compat.to_common_vma([materialized(x) for x in operands])]
        self.slices.record(action)
        results = self._bind_local(action, operands, self.assignment.candidate(action.op))
        for k, (tensor, x) in enumerate(zip(op.results, results, strict=True)):
            layout = states.results[k].layout(self.assignment.state[action.op])
            expected = layout.local_shape(self.program.tensors[tensor].shape, self.mesh)
            if tuple(x.shape) != expected:
                raise ShardError(
                    f"the rule of {op.primitive} gives local blocks of shape {tuple(x.shape)}, not {expected}",
                    where=f"{op.module} {op.source}".strip(),
                    fix="correct the rule or its local function; the operator's layouts are " + str(layout),
                )
            env[tensor, layout] = x

    def _exchanged_anew(
        self, action: RunOperator, operands: list[ArrayLike | Local]
    ) -> list[ArrayLike | Local]:
        """Operands whose edges the operator exchanges, behind a barrier if another exchanged those of the same value.

        Compilers would merge the permutes, which the plan counts for each operator.
        """
        rule = self.assignment.states[action.op].rule
        self.exchanged_before = {}
        if self.vma or not action.collective_ids:
            return operands
        for k in sorted(
            {one.operand for one in rule.internal if one.reads is not None and one.operand is not None}
        ):
            value = action.reads[k]
            if isinstance(value, Literal):
                continue
            if value in self.exchanged:
                x, *_ = lax.optimization_barrier(tuple(map(materialized, (operands[k], *operands))))
                operands[k] = x
            self.exchanged_before[k] = self.exchanged[value]
            self.exchanged[value] += 1
        return operands

    def _bind_local(
        self, action: RunOperator, operands: Sequence[ArrayLike | Local], candidate: Candidate | None
    ) -> Sequence[Local]:
        """The results of an operator: by its local function, as traced if it has no rule, else by its primitive."""
        op = self.program.operators[action.op]
        states = self.assignment.states[action.op]
        assert states.op is not None and candidate is not None and op.eqn is not None
        eqn, rule = op.eqn, states.rule

        def bind(*operands: ArrayLike, **params: Any) -> list[jax.Array]:
            # Shardings of the traced program are those of whole arrays; the operands are one device's blocks.
            params = {k: None if k in ("sharding", "out_sharding") else v for k, v in params.items()}
            if self.vma:  # a local function may have made one of them differ between devices, by its position
                operands = tuple(compat.to_common_vma(operands))
            out = eqn.primitive.bind(*operands, **compat.bind_params(eqn, params))
            return list(out) if eqn.primitive.multiple_results else [out]

        edges = {} if self.vma else self._edges(action.op)
        context = LocalContext(
            states.op,
            rule,
            candidate,
            self.mesh,
            bind,
            differentiable_loop=self.vma and op.repeat > 1,
            collective_ids=action.collective_ids,
            row_major=op.id in self.row_major_updates,
            chip=self.assignment.topology.chip.name,
            for_products=pads_for_products(self.assignment, op),
            edges=edges,
            exchanged_before=self.exchanged_before,
        )
        # The collectives inside a user's function cannot be named one by one: all carry the first number.
        number = action.collective_ids[0] if action.collective_ids and not rule.internal else -1
        local_impl = states.entry.local_impl if states.entry is not None else None
        with compat.eqn_context(eqn, op.prefix), plan_scope(number):
            if local_impl is not None:
                return local_impl(context, *operands)
            if rule.opaque and not eqn.effects:
                return run_as_traced(eqn, list(map(materialized, operands)))
            return context.bind(*map(materialized, operands))

    def _edges(self, op: int) -> dict[int, Edges]:
        """By operand the edges that another operator has exchanged for this one, or none yet, for it to keep."""
        for k in range(len(self.program.operators[op].operands)):
            if (op, k) in self.keeps_edges:
                self.edges[op, k] = {}  # a body may be traced twice
        kept = {k: edges for (i, k), edges in self.edges.items() if i == op}
        received = self.assignment.received_edges.get(op, {})
        return kept | {k: self.edges[pair.first, pair.first_operand] for k, pair in received.items()}

    # Calls that only alias: their operands are the values that enter the body, their results those that leave it.

    def _remat(self, action: RunCall, env: Env) -> None:
        params = action.call.eqn.params
        if self.vma:
            f = jax.checkpoint(
                lambda *a: self._body_arrays(action, 0, a),
                policy=params.get("policy"),
                prevent_cse=params["prevent_cse"],
            )
            results = f(*(materialized(env[v]) for v in action.entry[0]))
        else:
            # As JAX lowers a differentiated remat: the barrier prevents common subexpressions with the forward pass.
            results = self._body_arrays(action, 0, self.barriers.enter(action, env))
        self._bind_results(action, results, env)

    def _custom_derivative(self, action: RunCall, env: Env) -> None:
        """A custom_jvp or custom_vjp call: its body, or, if it may be differentiated, a call with the same rule."""
        arrays = [materialized(env[v]) for v in action.entry[0]]
        if not self.vma:
            self._bind_results(action, self._body_arrays(action, 0, arrays), env)
            return
        assert self.plan_rule is not None
        layout_of, array_of = dict(action.entry[0]), dict(zip(action.entry[0], arrays, strict=True))
        tensors = [a for a in action.call.operands if not isinstance(a, Literal)]
        result_layouts = [
            Layout.replicated(len(v.aval.shape)) if isinstance(v, Literal) else v[1]
            for v in action.returns[0]
        ]

        def body(*blocks: jax.Array) -> list[jax.Array]:
            block_of = dict(zip(tensors, blocks, strict=True))
            return self._body_arrays(action, 0, [block_of[t] for t, _ in action.entry[0]])

        call = rebuild_with_rule(
            action.call,
            self.assignment,
            [layout_of[t] for t in tensors],
            result_layouts,
            body,
            self.plan_rule,
            self.run_rule,
        )
        results = call(*(compat.cast_vma(array_of[t, layout_of[t]], layout_of[t].axes) for t in tensors))
        self._bind_results(action, list(results), env)

    def _bind_results(self, action: RunCall, arrays: Sequence[jax.Array], env: Env) -> None:
        for value, x in zip(action.returns[0], arrays, strict=True):
            if not isinstance(value, Literal):
                env[value] = x

    # Loops and branches: values pass boundary operators on their way in and out.

    def _scan(self, action: RunCall, env: Env) -> None:
        params, boundary = action.call.eqn.params, action.call.boundary
        num_consts, num_carry = len(boundary["const"]), len(boundary["carry"])
        operands = self._operand_arrays(action, env)
        operands = varying_as_read(action, operands, self.assignment) if self.vma else operands
        consts, xs = operands[:num_consts], operands[num_consts + num_carry :]
        init = [self._initial_carry(operands[num_consts + k], i) for k, i in enumerate(boundary["carry"])]
        # In compiled calls, stacks that are only updated slice by slice are carried whole and updated in place.
        stacks = [] if self.vma else carried_stacks(action, self.program, self.assignment.values)
        sliced = {k: x for k, x in enumerate(xs) if k not in {s.xs for s in stacks}}
        initial_counter = self._initial_trip_counter(action)

        def step(carry: PyTree, x: PyTree) -> PyTree:
            (values, arrays, counter), (index, slices) = carry, x
            parts = dict(zip(sliced, slices, strict=True))
            parts |= {s.xs: StackSlice(array, index) for s, array in zip(stacks, arrays, strict=True)}
            entering = [*consts, *values, *(parts[k] for k in range(len(xs)))]
            results, counter = self._run_trip(action, 0, entering, counter)
            values = self._carried(list(map(materialized, results[:num_carry])), boundary["carry"])
            arrays, stacked = _split_stacks(results[num_carry:], stacks)
            return (tuple(values), arrays, counter), tuple(map(materialized, stacked))

        (final, arrays, counter), stacked = lax.scan(
            step,
            (tuple(init), tuple(xs[s.xs] for s in stacks), initial_counter),
            (jnp.arange(int(params["length"])) if stacks else None, tuple(sliced.values())),
            length=int(params["length"]),
            reverse=params["reverse"],
            # Equal collectives of trips unrolled side by side would be merged.
            unroll=params["unroll"] if initial_counter is None else 1,
        )
        self._leave_loop(counter)
        rest, whole = iter(stacked), {s.ys: array for s, array in zip(stacks, arrays, strict=True)}
        ys = [whole[j] if j in whole else next(rest) for j in range(len(boundary["ys"]))]
        self._bind_boundary_results((*final, *ys), (*boundary["carry"], *boundary["ys"]), env)

    def _while(self, action: RunCall, env: Env) -> None:
        boundary = action.call.boundary
        num_test, num_consts = len(boundary["test"]), len(boundary["const"])
        operands = self._operand_arrays(action, env)
        test_consts, consts = operands[:num_test], operands[num_test : num_test + num_consts]
        init = self._carried(operands[num_test + num_consts :], boundary["carry"])

        def body(state: tuple[Sequence[jax.Array], jax.Array | None]) -> PyTree:
            carry, counter = state
            results, counter = self._run_trip(action, 1, [*consts, *carry], counter)
            return tuple(self._carried(list(map(materialized, results)), boundary["carry"])), counter

        def test(state: tuple[Sequence[jax.Array], jax.Array | None]) -> jax.Array:
            carry, counter = state
            (result,), _ = self._run_trip(action, 0, [*test_consts, *carry], counter)
            return materialized(result)

        final, counter = lax.while_loop(test, body, (tuple(init), self._initial_trip_counter(action)))
        self._leave_loop(counter)
        self._bind_boundary_results(final, boundary["carry"], env)

    def _cond(self, action: RunCall, env: Env) -> None:
        joins = action.call.boundary["join"]
        index, *operands = self._operand_arrays(action, env)
        if index.dtype == bool:
            index = index.astype("int32")

        def branch(k: int) -> Callable[..., tuple[jax.Array, ...]]:
            def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
                outer = self.trip_counter  # a branch may tie values to the counter, and hands no new one on
                results = self._body_arrays(action, k, arrays)
                self.trip_counter = outer
                return tuple(self._carried(results, joins))

            return run

        results = lax.switch(index, [branch(k) for k in range(len(action.bodies))], *operands)
        self._bind_boundary_results(results, joins, env)

    def _operand_arrays(self, action: RunCall, env: Env) -> list[jax.Array]:
        """The operands of a loop or branch."""
        operands = [self.as_array(v, env) for v in action.reads]
        return self._tie_to_trip(operands) if action.loop_invariant else operands

    def _body_values(self, action: RunCall, k: int, arrays: Sequence[Local]) -> list[Local]:
        """The results of body `k`: arrays, or slices of the stacks that a loop carries."""
        env = {**self.constants, **dict(zip(action.entry[k], arrays, strict=True))}
        for inner in action.bodies[k]:
            self._run_action(inner, env)
        return [self.as_array(v, env) if isinstance(v, Literal) else env[v] for v in action.returns[k]]

    def _body_arrays(self, action: RunCall, k: int, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The results of body `k` as arrays."""
        return [materialized(x) for x in self._body_values(action, k, arrays)]

    def _bind_boundary_results(self, arrays: Sequence[jax.Array], boundary: Sequence[int], env: Env) -> None:
        """Results of a loop or branch are the last results of their boundary operators."""
        for x, i in zip(arrays, boundary, strict=True):
            tensor = self.program.operators[i].results[-1]
            env[tensor, self.assignment.result_layout(tensor)] = x

    def _initial_carry(self, x: jax.Array, boundary: int) -> jax.Array:
        """The initial value of a carry; of a partial sum only the first device along its axes has it, others zero."""
        layout = self.assignment.result_layout(self.program.operators[boundary].results[-1])
        before = self.assignment.operand_layout(boundary, 0).partial
        axes = tuple(a for a in layout.partial if a not in before)
        if axes:
            x = compat.cast_vma(x, axes) if self.vma else x
            x = jnp.where(block_index(axes, self.mesh) == 0, x, jnp.zeros_like(x))
        return self._carried([x], [boundary])[0]

    def _carried(self, arrays: list[jax.Array], boundary: Sequence[int]) -> list[jax.Array]:
        """Values that a loop carries or branches join, varying over exactly the axes of their layouts."""
        if not self.vma:
            return arrays
        tensors = [self.program.operators[i].results[-1] for i in boundary]
        layouts = map(self.assignment.result_layout, tensors)
        return [compat.cast_vma(x, layout.axes) for x, layout in zip(arrays, layouts, strict=True)]

    # Compilers hoist loop-invariant work out of loops, which a plan within a memory budget may not allow: the values it
    # depends on are tied to a counter of trips, by a barrier through which both pass.

    def _tie_to_trip(self, values: Sequence[T]) -> list[T]:
        """Values that do not change from trip to trip, made to look as though they did."""
        if self.trip_counter is None:
            return list(values)
        *tied, self.trip_counter = lax.optimization_barrier((*values, self.trip_counter))
        return tied

    def _initial_trip_counter(self, action: RunCall) -> jax.Array | None:
        """The counter of a loop with actions that must stay in it, else None (an empty pytree in the loop's carry).

        It continues that of the surrounding loop, which the actions must not leave either.
        """
        if self.vma or not any(_must_stay_in_loop(a) for body in action.bodies for a in body):
            return None
        return jnp.zeros((), "int32") if self.trip_counter is None else self.trip_counter

    def _run_trip(
        self, action: RunCall, k: int, arrays: Sequence[Local], counter: jax.Array | None
    ) -> tuple[list[Local], jax.Array | None]:
        """The results of body `k` for one trip of a loop, and the counter after it."""
        outer, self.trip_counter = self.trip_counter, counter
        results = self._body_values(action, k, arrays)
        counter, self.trip_counter = self.trip_counter, outer
        return results, None if counter is None else counter + 1

    def _leave_loop(self, counter: jax.Array | None) -> None:
        """After a loop, the surrounding one goes on with its counter."""
        if self.trip_counter is not None and counter is not None:
            self.trip_counter = counter


def _split_stacks(
    ys: Sequence[Local], stacks: Sequence[CarriedStack]
) -> tuple[tuple[jax.Array, ...], list[Local]]:
    """The arrays of the stacks that a loop carries, in the order of `stacks`, and its other `ys`."""
    carried = [s.ys for s in stacks]
    return tuple(_stack_of(ys[j]) for j in carried), [y for j, y in enumerate(ys) if j not in carried]


def _stack_of(x: Local) -> jax.Array:
    assert isinstance(x, StackSlice), "the stack that a loop carries is read and updated in slices only"
    return x.stack


def _must_stay_in_loop(action: Action) -> bool:
    """Whether an action, or one inside it, must not be hoisted out of the surrounding loop."""
    if action.loop_invariant:
        return True
    return isinstance(action, RunCall) and any(_must_stay_in_loop(a) for body in action.bodies for a in body)
