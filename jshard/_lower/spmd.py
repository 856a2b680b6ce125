"""A schedule as one `shard_map` (single program, multiple data).

Every operator runs on local blocks and every reshard is an explicit collective, so XLA's partitioner has nothing left
to decide: what the schedule says is what is compiled.

There are two modes. `vma=False` is for compiled calls: values carry no types for the mesh axes they vary over.
`vma=True` is for programs that JAX may differentiate from outside: values are typed by the axes they vary over
(`check_vma`), which gives the collectives their correct and cheapest transposes, and custom derivative rules are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from jshard._core import jaxcompat as compat
from jshard._core.layout import ArrayType, Layout, MeshAxes
from jshard._lower.custom_derivatives import PlanRule
from jshard._lower.local_interpreter import Env, LocalInterpreter
from jshard._schedule.donated_results import gathered_over_arguments
from jshard._schedule.schedule import Schedule


def spmd(
    schedule: Schedule, mesh: Mesh | AbstractMesh, *, vma: bool = False, plan_rule: PlanRule | None = None,
    donated: Collection[int] = (),
) -> Callable[..., list[jax.Array]]:  # fmt: skip
    """The program as a function of its flat arguments and captured arrays, returning its flat results.

    Arguments:

    - `schedule`: what to run.
    - `mesh`: the JAX mesh (Auto axes), concrete or abstract, whose axes the schedule's layouts name.
    - `vma`: whether the result may be differentiated from outside.
    - `plan_rule`: schedules the derivative rules of custom_jvp and custom_vjp calls; required with `vma`.
    - `donated`: flat indices of the donated arguments, whose buffers results take over.
    """
    assignment = schedule.assignment
    program, axes = assignment.program, assignment.topology.mesh
    in_layouts = [assignment.result_layout(program.operators[i].results[0]) for i in program.inputs]
    out_specs = tuple(assignment.operand_layout(i, 0).spec for i in program.outputs)
    avals = [program.tensors[program.operators[i].results[0]] for i in program.inputs]
    # XLA turns arrays of size zero into constants and refuses a manual computation that is left without an operand
    # ("expected at least one operand ... GlobalToLocalShape"). So these are made inside.
    nonempty = [k for k, a in enumerate(avals) if 0 not in a.shape]
    local = local_program(schedule, vma=vma, plan_rule=plan_rule, donated=donated)

    def body(*blocks: jax.Array) -> tuple[jax.Array, ...]:
        block_of = dict(zip(nonempty, blocks, strict=True))
        return local(
            *(
                block_of[k] if k in block_of else _empty_block(avals[k], layout, axes, vma)
                for k, layout in enumerate(in_layouts)
            )
        )

    mapped: Callable[..., tuple[jax.Array, ...]] = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=tuple(in_layouts[k].spec for k in nonempty),
        out_specs=out_specs,
        check_vma=vma,
    )

    def call(*arrays: jax.Array) -> list[jax.Array]:
        operands = [arrays[k] for k in nonempty]
        context = jax.sharding.get_abstract_mesh()
        if context.empty or AxisType.Explicit not in context.axis_types:
            return list(mapped(*operands))
        if vma:
            run: Any = jax.sharding.auto_axes(mapped, out_sharding=out_specs)
            return list(run(*operands))
        # A compiled call of its own: its arguments have the plan's shardings, and the context does not apply to them.
        with jax.sharding.use_abstract_mesh(mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh):
            return list(mapped(*operands))

    return call


def local_program(
    schedule: Schedule, *, vma: bool = False, plan_rule: PlanRule | None = None, donated: Collection[int] = ()
) -> Callable[..., tuple[jax.Array, ...]]:
    """The program on one device's blocks of its arguments and captured arrays, for use inside `shard_map`.

    The arguments are those of `spmd`.
    """
    assert plan_rule is not None or not vma, (
        "differentiation from outside needs a planner of derivative rules"
    )
    assignment = schedule.assignment
    program = assignment.program
    sources = [program.operators[i].results[0] for i in program.inputs]
    in_values = [(t, assignment.result_layout(t)) for t in sources]
    schedule = schedule.with_calls if vma else schedule

    def run_rule(rule: Schedule, blocks: Sequence[jax.Array]) -> list[jax.Array]:
        """Run the schedule of a derivative rule; its results vary over exactly the axes of their layouts."""
        results = local_program(rule, vma=vma, plan_rule=plan_rule)(
            *blocks, *rule.assignment.program.constants
        )
        layouts = [rule.assignment.operand_layout(i, 0) for i in rule.assignment.program.outputs]
        return [compat.cast_vma(x, layout.axes) for x, layout in zip(results, layouts, strict=True)]

    gathered = gathered_over_arguments(schedule, donated)
    interpreter = LocalInterpreter(schedule, vma, plan_rule, run_rule, gathered)

    def body(*blocks: jax.Array) -> tuple[jax.Array, ...]:
        env: Env = dict(zip(in_values, blocks, strict=True))
        interpreter.run_program(env)
        return tuple(interpreter.as_array(v, env) for v in schedule.outputs)

    return body


def _empty_block(aval: ArrayType, layout: Layout, axes: MeshAxes, vma: bool) -> jax.Array:
    """A device's block of an array of size zero, typed as an operand of `shard_map` is."""
    x = compat.empty(layout.local_shape(aval.shape, axes), aval.dtype)
    return compat.cast_vma(x, layout.axes) if vma else x
