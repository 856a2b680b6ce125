"""Custom derivative rules inside a planned program, kept when the program is differentiated from outside.

A `custom_jvp` or `custom_vjp` is planned through its body, so its own rule would be lost if the body were simply
run. Here it is rebuilt as itself: the body runs on local blocks, and its rule, when JAX asks for it, is traced
on the global shapes, planned with the layouts its values already have, and run on local blocks too.

>>> import jax, jax.numpy as jnp, jshard
>>> @jax.custom_jvp
... def f(x):
...     return x * x
>>> f.defjvps(lambda t, out, x: 100 * t)
>>> float(jax.grad(jshard.shard(lambda x: f(x) + x))(3.0))
101.0
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jshard import _jaxcompat as compat
from jshard._core.layout import Layout
from jshard._core.topology import Topology
from jshard._plan.planner import make_plan
from jshard._plan.request import PlanRequest
from jshard._program.graph import Call, Literal, Program
from jshard._program.trace import build
from jshard._schedule.schedule import Schedule
from jshard._spec.entry import Pin


RunSchedule = Callable[[Schedule, Sequence[Any]], list[Any]]  # a schedule on local blocks


def rebuild_with_rule(
    call: Call, program: Program, layouts: Sequence[Layout], returns: Sequence[Layout], topology: Topology,
    body: Callable[..., list[Any]], run: RunSchedule,
) -> Callable[..., Any]:  # fmt: skip
    """The call as a function of its local tensor operands, with its derivative rule.

    `layouts` are those of the tensor operands, `returns` those of the results; `body` runs the planned body.
    """
    eqn = call.eqn
    literals = {i: a for i, a in enumerate(call.operands) if isinstance(a, Literal)}
    avals = [_struct(program.tensors[a]) for a in call.operands if not isinstance(a, Literal)]

    def plain(*tensors: Any) -> list[Any]:
        """The equation itself on global values."""
        given = iter(tensors)
        operands = [literals[i].value if i in literals else next(given) for i in range(len(call.operands))]
        out = eqn.primitive.bind(*operands, **compat.bind_params(eqn, eqn.params))
        return list(out) if eqn.primitive.multiple_results else [out]

    # What the function closed over comes first, and has no derivative: its rule is about its arguments alone.
    closed = eqn.params.get("num_consts", 0)
    own = [i >= closed for i in range(len(call.operands)) if i not in literals]
    moving = [o and _differentiable(a) for a, o in zip(avals, own, strict=True)]
    inner = _jvp if call.kind == "custom_jvp" else _vjp
    symbolic = bool(eqn.params.get("symbolic_zeros"))
    return inner(
        plain,
        avals,
        moving,
        list(layouts),
        list(returns),
        topology,
        body,
        run,
        symbolic,
        program.explicit_mesh,
    )


def _jvp(
    plain: Callable,
    avals: list,
    moving: list[bool],
    layouts: list[Layout],
    returns: list[Layout],
    topology: Topology,
    body: Any,
    run: RunSchedule,
    symbolic: bool,
    context: Any,
) -> Callable[..., Any]:
    f = jax.custom_jvp(lambda *blocks: tuple(body(*blocks)))

    def rule(primals: Any, tangents: Any) -> Any:
        # A rule that asks for symbolic zeros is told which operands stand still, as the user's own is.
        moves = [m and not isinstance(t, SymbolicZero) for m, t in zip(moving, tangents, strict=True)]

        def pushed(*values: Any) -> Any:
            primals, given = values[: len(avals)], values[len(avals) :]
            of_moving = _function_of_differentiated(plain, primals, moves)
            out, out_t = jax.jvp(of_moving, tuple(v for v, m in zip(primals, moves, strict=True) if m), given)
            return [*out, *out_t]

        wanted = [a for a, m in zip(avals, moves, strict=True) if m]
        ins = [*layouts, *(lay for lay, m in zip(layouts, moves, strict=True) if m)]
        schedule = _plan_rule(pushed, [*avals, *wanted], ins, [*returns, *returns], topology, context)
        out = run(schedule, [*primals, *(t for t, m in zip(tangents, moves, strict=True) if m)])
        return tuple(out[: len(returns)]), tuple(out[len(returns) :])

    f.defjvp(rule, symbolic_zeros=symbolic)
    return f


def _vjp(
    plain: Callable,
    avals: list,
    moving: list[bool],
    layouts: list[Layout],
    returns: list[Layout],
    topology: Topology,
    body: Any,
    run: RunSchedule,
    symbolic: bool,
    context: Any,
) -> Callable[..., Any]:
    f = jax.custom_vjp(lambda *blocks: tuple(body(*blocks)))
    # What the forward pass finds, for the backward one: which operands move, the residuals, their structure.
    found: dict[str, Any] = {}

    def f_forward(*given: Any) -> Any:
        moves, blocks = moving, given
        if symbolic:
            moves = [m and bool(g.perturbed) for m, g in zip(moving, given, strict=True)]
            blocks = tuple(g.value for g in given)

        def forward(*values: Any) -> Any:
            of_moving = _function_of_differentiated(plain, values, moves)
            out, pull = jax.vjp(of_moving, *(v for v, m in zip(values, moves, strict=True) if m))
            leaves, found["tree"] = jax.tree.flatten(pull)
            return [*out, *leaves]

        schedule = _plan_rule(forward, avals, layouts, returns, topology, context)
        choice = schedule.assignment
        ends = choice.program.outputs[len(returns) :]
        found["kept"] = [(_output_struct(choice.program, i), choice.operand_layout(i, 0)) for i in ends]
        found["moves"] = moves
        out = run(schedule, blocks)
        return tuple(out[: len(returns)]), tuple(out[len(returns) :])

    def f_backward(residuals: Any, cotangents: Any) -> Any:
        tree, kept, moves = found["tree"], found["kept"], found["moves"]
        with compat.context_of_trace(context):
            outs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jax.eval_shape(plain, *avals)]
        live = [_differentiable(o) for o in outs]

        def backward(*values: Any) -> Any:
            pull = jax.tree.unflatten(tree, values[: len(kept)])
            given = iter(values[len(kept) :])
            cts = [next(given) if m else _float0_zeros(o) for o, m in zip(outs, live, strict=True)]
            return list(pull(cts))

        ins = [lay for _, lay in kept] + [lay for lay, m in zip(returns, live, strict=True) if m]
        shapes = [a for a, _ in kept] + [o for o, m in zip(outs, live, strict=True) if m]
        wanted = [lay for lay, m in zip(layouts, moves, strict=True) if m]
        schedule = _plan_rule(backward, shapes, ins, wanted, topology, context)
        cts = [_instantiate_zero(c) for c, m in zip(cotangents, live, strict=True) if m]
        given = iter(run(schedule, [*residuals, *cts]))
        return tuple(next(given) if m else None for m in moves)

    f.defvjp(f_forward, f_backward, symbolic_zeros=symbolic)
    return f


def _function_of_differentiated(
    plain: Callable, values: Sequence[Any], moves: Sequence[bool]
) -> Callable[..., Any]:
    """The function of the operands that move; the others are as they are, and have no tangents."""

    def of_moving(*some: Any) -> Any:
        given = iter(some)
        return plain(*(next(given) if m else v for v, m in zip(values, moves, strict=True)))

    return of_moving


def _plan_rule(
    fn: Callable,
    avals: Sequence[Any],
    ins: Sequence[Layout],
    outs: Sequence[Layout],
    topology: Topology,
    context: Any,
) -> Schedule:
    """The schedule of a rule whose arguments and first results already have layouts."""
    with compat.context_of_trace(context):
        closed = jax.make_jaxpr(fn)(*avals)
    program = build(closed, name="derivative rule", input_names=[f"value {i}" for i in range(len(avals))])
    program = dataclasses.replace(program, explicit_mesh=context)
    pins = [(program.inputs[i], "result", 0, _pin(lay, topology)) for i, lay in enumerate(ins)]
    pins += [(program.outputs[i], "operand", 0, _pin(lay, topology)) for i, lay in enumerate(outs)]
    return make_plan(program, topology, PlanRequest(tuple(pins)))[1]


def _pin(layout: Layout, topology: Topology) -> Pin:
    return Pin(layout.cuts(topology.mesh), layout.dims, "derivative rule")


def _output_struct(program: Program, output: int) -> Any:
    a = program.operators[output].operands[0]
    return _struct(a.aval if isinstance(a, Literal) else program.tensors[a])


def _struct(t: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=bool(getattr(t, "weak_type", False)))


def _instantiate_zero(x: Any) -> Any:
    """A cotangent as an array, typed as varying as it should, where it may be a symbolic zero."""
    if not isinstance(x, SymbolicZero):
        return x
    aval: Any = x.aval
    zeros, axes = jax.numpy.zeros(aval.shape, aval.dtype), tuple(sorted(compat.vma_of_type(aval)))
    return jax.lax.pcast(zeros, axes, to="varying") if axes else zeros


def _differentiable(aval: Any) -> bool:
    return jax.numpy.issubdtype(aval.dtype, np.inexact)


def _float0_zeros(aval: Any) -> Any:
    return np.zeros(aval.shape, jax.dtypes.float0)
