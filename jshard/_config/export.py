"""A plan as a configuration: its mesh, and the fewest rules under which every argument and result has its layout.

Arguments that are arrays are `inputs`, arrays inside arguments `parameters`; scalars need no rule, nor does optimizer
state that lies like its parameter, nor a result that replaces an argument and lies like it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

from jshard._config.config_record import ConfigRecord, Entry, MeshSection, Rule
from jshard._config.fewest_rules import fewest_result_rules, fewest_rules
from jshard._config.tensors import TensorName
from jshard._core.jax_types import PyTreeDef
from jshard._core.layout import Layout, MeshAxes
from jshard._plan.record import PlanRecord
from jshard._plan.rows import TensorRow


StateTies = Callable[[Collection[int]], Mapping[int, int]]
"""Given the numbers of pinned results, {result: argument}: the other results that share the layout of an argument."""


def config_of_plan(
    plan: PlanRecord, mesh: MeshAxes, ties: StateTies, machine: str = "", default_budget: float | None = None,
    in_tree: PyTreeDef | None = None,
) -> ConfigRecord:  # fmt: skip
    """The configuration of a plan on a mesh with these axes.

    `ties`: which results share the layout of an argument without a rule.
    `machine`: its name, for a mesh that is not attached. `default_budget`: the memory budget that `shard` would take.
    `in_tree`: the structure of the arguments, (by position, by name), where it is known.
    """
    tensors = tensors_of(plan.inputs, in_tree)
    entries = [entry_of(r.layout) for r in plan.inputs]
    arrays = [i for i, t in enumerate(tensors) if t.shape and not t.inner]
    inside = [i for i, t in enumerate(tensors) if t.shape and t.inner]
    scalars = [t for t in tensors if not t.shape]  # a rule that matched one would be refused
    parameters = fewest_rules([tensors[i] for i in inside], [entries[i] for i in inside], scalars)
    options: dict[str, object] = {"level": plan.level}
    if plan.search != "optimal":
        options["search"] = plan.search
    if plan.memory_budget is not None and plan.memory_budget != default_budget:
        options["memory_budget"] = int(plan.memory_budget)
    axes = tuple(zip(mesh.names, mesh.sizes, strict=True))
    return ConfigRecord(
        parameters=parameters,
        inputs=tuple(Rule(tensors[i].path, entries[i]) for i in arrays),
        outputs=_outputs(plan, ties),
        mesh=MeshSection(axes, machine=machine) if axes else None,
        options=tuple(sorted(options.items())),
        source=f"plan of {plan.name}",
    )


def tensors_of(rows: Sequence[TensorRow], in_tree: PyTreeDef | None) -> list[TensorName]:
    """The arguments of a plan as names for rules; one that is an array has no name inside, also in `*xs`."""
    whole: list[bool] = []
    for side in in_tree.children() if in_tree is not None else ():  # positional, by name
        for argument in side.children():
            whole += [argument.node_data() is None and argument.num_leaves == 1] * argument.num_leaves
    whole = whole if len(whole) == len(rows) else [False] * len(rows)
    tensors = zip(map(tensor_of, rows), whole, strict=True)
    return [dataclasses.replace(t, argument=t.path) if array else t for t, array in tensors]


def tensor_of(row: TensorRow) -> TensorName:
    """The row of an argument as a name for rules; the argument's name is the first part of its path."""
    return TensorName.of_argument(row.path, row.shape, row.dtype)


def entry_of(layout: Layout) -> Entry:
    """A layout as an entry: every dimension is said.

    >>> entry_of(Layout((("data", "fsdp"), ())))
    (('data', 'fsdp'), ())
    """
    return layout.dims


def _outputs(plan: PlanRecord, ties: StateTies) -> tuple[Rule, ...]:
    """Rules for the results that `shard` does not give the layout of an argument, or of one that lies otherwise."""
    rows = plan.outputs
    finished = [i for i, row in enumerate(rows) if row.shape and not row.layout.partial]
    ruled, more = set[int](), set(finished)
    while more:  # a rule is a pin, after which other results may be the new values of arguments
        tied = ties(ruled)
        more = {
            i
            for i in finished
            if i not in ruled and (i not in tied or plan.inputs[tied[i]].layout != rows[i].layout)
        }
        ruled |= more
    names = [TensorName(r.path, r.shape, r.dtype, kind="result") for r in rows]
    wanted = {names[i]: entry_of(rows[i].layout) for i in finished if i in ruled}
    settled = {names[i]: entry_of(rows[i].layout) for i in finished if i not in ruled}
    return fewest_result_rules(wanted, [n for n in names if not n.shape], settled)
