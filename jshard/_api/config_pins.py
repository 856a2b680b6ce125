"""The pins of a configuration for one call, for whatever other arguments of `shard` leave open; and its check."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax

from jshard._api.call_pins import with_partitioning_metadata
from jshard._api.machine import requested_mesh
from jshard._api.shard_request import ShardRequest
from jshard._api.trace_call import TracedArguments, build_program, trace_on_shapes
from jshard._config.config_record import ConfigRecord, Entry, Rule
from jshard._config.fitting import is_word, pin_of
from jshard._config.match_report import MatchReport, enforce
from jshard._config.matching import match_outputs
from jshard._config.program_facts import facts_of_arguments, named_values as values_with_names, pin_of_name
from jshard._config.recipes.named_values import named_values
from jshard._config.recipes.recipe_pins import RecipePins, recipe_pins
from jshard._config.recipes.structure import Structure
from jshard._config.resolution import Resolution, Row
from jshard._config.resolve import resolve, unmatched_by_values
from jshard._config.tensors import TensorName, arguments
from jshard._core import jaxcompat as compat
from jshard._core.jax_types import ClosedJaxpr, JaxprEqn, PyTree
from jshard._program.graph import Program
from jshard._program.scope_outputs import scope_outputs, with_scopes_marked
from jshard._spec.entry import Pin
from jshard._spec.strategies import pins_for_outputs
from jshard._spec.tree_paths import Leaf, path_name


@dataclasses.dataclass(frozen=True, eq=False)
class CallRules:
    """The rules of a configuration on a traced call.

    `jaxpr`: that of the call, in which the outputs of the scopes that rules name are marked. `values`: named values
    inside. `results`: the results as the user sees them. `sizes`: of the mesh axes, None where the mesh is still to be
    chosen. `scopes`: paths of named scopes, where a rule names what is none of the values.
    """

    record: ConfigRecord
    jaxpr: ClosedJaxpr
    leaves: tuple[Leaf, ...]
    values: tuple[TensorName, ...]
    results: tuple[TensorName, ...]
    sizes: Mapping[str, int] | None
    scopes: tuple[str, ...]
    without_facts: Resolution

    @functools.cached_property
    def pin_of_name(self) -> Callable[[JaxprEqn], Pin | None]:
        """The function from the equation of a named value to its pin, whose axes are in the order of the mesh.

        The layouts of values inside a program have them in that order.
        """
        pins = {}
        for row in self.without_facts.inner:
            pin = _pin(
                row if row.entry is None else dataclasses.replace(row, entry=self._in_mesh_order(row.entry))
            )
            if pin is not None:
                pins[row.tensor.kind, row.tensor.path, row.tensor.element] = pin
        return pin_of_name(pins)

    def _in_mesh_order(self, entry: Entry) -> Entry:
        if self.sizes is None or isinstance(entry, str):
            return entry
        names = list(self.sizes)
        return tuple(tuple(sorted(d, key=names.index)) if isinstance(d, tuple) else d for d in entry)

    def resolution(self, program: Program) -> Resolution:
        """The entries and problems, with what the program says about its arguments."""
        tensors = arguments(self.leaves, facts_of_arguments(program))
        record = self.record
        if not (record.recipe or record.products or record.gradients):
            return resolve(record, tensors, self.values, self.results, self.sizes, self.scopes)
        inside = named_values(structure_of(program)).names
        found = resolve(record, tensors, self.values, self.results, self.sizes, self.scopes, inside)
        pins = self.recipe(program)
        if pins is None:
            return found
        numbers = [i for i, leaf in enumerate(self.leaves) if leaf.dtype is not None]
        rows = []
        for i, row in zip(numbers, found.rows, strict=True):
            entry = pins.arguments.get(i) if row.rule is None and row.entry is None else None
            if entry is not None:
                said = Rule(record.recipe, entry, f"recipe {record.recipe}")
                row = Row(row.tensor, entry, "recipe", "argument", said)
            rows.append(row)
        return dataclasses.replace(found, rows=tuple(rows))

    def recipe(self, program: Program) -> RecipePins | None:
        """What the recipe says about the program, found once; None without one.

        Raises `RecipeError` where it does not apply.
        """
        if not self.record.recipe:
            return None
        key = "recipe", self.record.recipe
        if key not in program.memo:
            program.memo[key] = recipe_pins(self.record.recipe, structure_of(program), self.sizes)
        return program.memo[key]

    def inner_pins(self, program: Program, found: Resolution) -> tuple[tuple[int, str, int, Pin], ...]:
        """Pins on outputs of products and on gradients: of the rules found, and of the recipe where there are none."""
        record = self.record
        if not (record.recipe or record.products or record.gradients):
            return ()
        values, pins = named_values(structure_of(program)), dict[tuple[int, str, int], Pin | None]()
        for row in found.inner:
            for place in values.places.get((row.section, row.tensor.path, row.tensor.element), ()):
                if place not in pins:
                    pins[place] = _pin(row)
        said = self.recipe(program)
        for value in (*said.products, *said.gradients) if said is not None else ():
            op, number = value.place
            if (op, value.side, number) not in pins:
                tensor = TensorName(value.name, value.shape, "float32")
                pin = pin_of(value.entry, tensor, f"recipe {record.recipe} ({value.name})")
                pins[op, value.side, number] = pin
        return tuple((*place, pin) for place, pin in pins.items() if pin is not None)

    def complete(
        self,
        request: ShardRequest,
        call: TracedArguments,
        found: Resolution,
        in_pins: Sequence[Pin | None],
        out_pins: Sequence[Pin | None],
    ) -> tuple[tuple[Pin | None, ...], tuple[Pin | None, ...]]:
        """The pins of arguments and results, completed by a `resolution`; raises `StrategyError` for what does not match."""
        enforce(self.record, found.problems, request.name)
        rows = iter(found.rows)
        of_leaves = [next(rows) if leaf.dtype is not None else None for leaf in self.leaves]
        inputs = [
            pin if pin is not None or row is None else _pin(row)
            for pin, row in zip(in_pins, of_leaves, strict=True)
        ]
        outputs = list(out_pins)
        by_path = {row.tensor.path: row for row in found.results}
        for i, result in enumerate(self.results):
            if outputs[i] is None and result.path in by_path:
                outputs[i] = _result_pin(by_path[result.path])
        return with_partitioning_metadata(request, call, inputs), tuple(outputs)


def structure_of(program: Program) -> Structure:
    """The structure of a program, found once."""
    if "structure" not in program.memo:
        program.memo["structure"] = Structure(program)
    return program.memo["structure"]


def call_rules(
    request: ShardRequest, record: ConfigRecord, call: TracedArguments, jax_traced: jax.stages.Traced
) -> CallRules:
    """The rules of a configuration on a traced call."""
    jaxpr, scopes = _with_named_scopes(record, arguments(call.leaves), jax_traced.jaxpr)
    values = tuple(values_with_names(jaxpr))
    results = _results(request.view.results(jax_traced.out_info)[0])
    sizes = mesh_sizes(request, call)
    found = resolve(record, arguments(call.leaves), values, results, sizes, scopes)
    return CallRules(record, jaxpr, call.leaves, values, results, sizes, scopes, found)


def _with_named_scopes(
    record: ConfigRecord, tensors: Sequence[TensorName], jaxpr: ClosedJaxpr
) -> tuple[ClosedJaxpr, tuple[str, ...]]:
    """The jaxpr with marks on the scopes that rules name which no module and no `checkpoint_name` has.

    And the paths of all scopes, where there are such rules.
    """
    left = unmatched_by_values(record, tensors, values_with_names(jaxpr))
    if not left:
        return jaxpr, ()
    scopes = [
        TensorName(s.path, tuple(s.aval.shape), s.aval.dtype, "", "scope", s.element, s.elements)
        for s in scope_outputs(jaxpr)
    ]
    whole = [(section, dataclasses.replace(rule, element=None)) for section, rule in left]
    found, _ = match_outputs(whole, scopes)
    paths = tuple(dict.fromkeys(s.path for s in scopes))
    return with_scopes_marked(jaxpr, {scopes[i].path for i in found}), paths


def mesh_sizes(request: ShardRequest, call: TracedArguments) -> dict[str, int] | None:
    """Sizes of the axes of the mesh in use; None where it is still to be chosen."""
    mesh = requested_mesh(request, call.placement.mesh)
    mesh = mesh if mesh is not None else compat.context_mesh()
    mesh = mesh if mesh is not None else call.placement.mesh
    for name in ("jax_mesh", "mesh"):
        mesh = mesh if hasattr(mesh, "shape") else getattr(mesh, name, mesh)
    shape = getattr(mesh, "shape", None)
    return None if shape is None else {str(n): int(s) for n, s in shape.items()}


def match_report(request: ShardRequest, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> MatchReport:
    """What the configuration of a request and a call have to say to each other; nothing is planned."""
    call = TracedArguments.of(request, args, kwargs)
    traced, explicit_mesh = trace_on_shapes(request, args, kwargs)
    assert request.config is not None
    rules = call_rules(request, request.config, call, traced)
    program = build_program(request, call, traced, explicit_mesh, (), rules.pin_of_name, rules.jaxpr).program
    return MatchReport.of(rules.record, rules.resolution(program), rules.sizes)


def _results(result: PyTree) -> tuple[TensorName, ...]:
    leaves = jax.tree_util.tree_flatten_with_path(result)[0]
    return tuple(
        TensorName(path_name(path) or "result", tuple(x.shape), x.dtype, kind="result") for path, x in leaves
    )


def _pin(row: Row) -> Pin | None:
    return None if row.entry is None else pin_of(row.entry, row.tensor, row.where)


def _result_pin(row: Row) -> Pin | None:
    if row.entry is not None and is_word(row.entry):
        shape = jax.ShapeDtypeStruct(row.tensor.shape, row.tensor.dtype)
        return pins_for_outputs(shape, row.entry, what=row.where)[0]
    return _pin(row)
