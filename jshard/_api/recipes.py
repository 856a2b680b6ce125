"""`recipes`: what layouts that experts know by name cost beside the search; and a recipe as a configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jshard._core.errors import ShardError
from jshard._core.jax_types import Function, PyTree
from jshard._core.named_topology import MeshRequest


if TYPE_CHECKING:
    from jshard._api.plan import Plan
    from jshard._config.config_record import ConfigRecord
    from jshard._config.recipes.recipe_table import RecipeRow, RecipeTable


def recipes(
    fn: Function,
    *args: PyTree,
    mesh: MeshRequest | None = None,
    config: object = None,
    names: Sequence[str] | None = None,
    **kwargs: PyTree,
) -> RecipeTable:
    """Price the recipes that apply to a function: step, bytes and memory of each beside the plan of the search.

    >>> import jax, jshard
    >>> f32 = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
    >>> params = {"up": f32(64, 256), "down": f32(256, 64)}
    >>> table = jshard.recipes(
    ...     lambda p, x: jax.nn.relu(x @ p["up"]) @ p["down"], params, f32(128, 64), names=["megatron", "expert"],
    ...     config={"mesh": {"data": 2, "model": 2}})
    >>> table["megatron"].applies, table["expert"].reason[:20]
    (True, 'there are no experts')

    Arguments:

    - `fn`: a function, with the arguments of its call; or a module of Flax, as for `Config.check`. Arrays may be shapes.
      Of a sharded function its mesh, machine, budget, static and donated arguments hold, its strategies do not.
    - `mesh`, `config`: as for `shard`; what the configuration pins holds in every row. `level` is 2 unless it says another.
    - `names`: the recipes and sums to price; default: all recipes and the usual sums.

    Returns a table (text and HTML). The recipes are `data`, `zero1`, `zero2`, `fsdp`, `megatron`, `sequence`, `ulysses`,
    `ring`, `vocab`, `expert`; a sum is written `fsdp+megatron`, its mesh axes `fsdp(x)+megatron(y)`.
    `shard(fn, config={"recipe": "fsdp+megatron"})` runs one, and `Config.from_recipe` gives its pins as a file.
    """
    from jshard._api.audit import figures, plan_without_warnings
    from jshard._api.config_check import callable_of, settings_of
    from jshard._api.shard import shard
    from jshard._config.recipes.recipe_names import RECIPES, SUMS, parse_recipe
    from jshard._config.recipes.recipe_table import RecipeTable
    from jshard._config.source import read_config
    from jshard._report.totals import optimality_text

    record = read_config(config if config is not None else {})
    record = dataclasses.replace(record.with_default("level", 2), recipe="", strict=False, optional=("**",))
    function, args, kwargs = callable_of(fn, args, dict(kwargs))
    if function is None:
        raise ShardError(
            "recipes needs a call to price, and there are only parameters",
            where="jshard.recipes",
            fix="jshard.recipes(step, *args), or jshard.recipes(module, x)",
        )
    if isinstance(names, str):
        raise ShardError(
            f"names is a str, {names!r}", where="jshard.recipes", fix=f"a list: names=[{names!r}]"
        )
    for name in names or ():
        parse_recipe(name)

    settings, record = settings_of(fn, record, mesh)

    def planned(own: ConfigRecord) -> Plan:
        return plan_without_warnings(shard(function, config=own, **settings), args, kwargs)

    search = planned(record)
    rows: dict[str, RecipeRow] = {}
    for name in names or (*RECIPES, *SUMS):
        failed = [p.name for p in parse_recipe(name) if p.name in rows and not rows[p.name].applies]
        if names is None and failed:
            continue  # its part has the reason
        rows[name] = _row(name, record, planned)
    return RecipeTable(
        search.name,
        str(search.mesh),
        figures(search),
        search.cost.gap,
        optimality_text(search),
        tuple(rows.values()),
    )


def _row(name: str, record: ConfigRecord, planned: Function) -> RecipeRow:
    from jshard._api.audit import figures
    from jshard._config.recipes.recipe_pins import RecipeError
    from jshard._config.recipes.recipe_table import RecipeRow

    try:
        plan = planned(dataclasses.replace(record, recipe=name))
    except RecipeError as error:
        return RecipeRow(name, None, reason=error.reason)
    return RecipeRow(name, figures(plan), plan.cost.gap)


def config_of_recipe(
    recipe: str,
    fn: Function,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    mesh: MeshRequest | Mapping[str, int] | None = None,
) -> ConfigRecord:
    """The rules of a recipe for one call (`Config.from_recipe`)."""
    from jshard._api.config_check import callable_of, settings_of
    from jshard._api.config_pins import call_rules, structure_of
    from jshard._api.shard import shard
    from jshard._api.trace_call import TracedArguments, build_program, trace_on_shapes
    from jshard._config.config_record import MeshSection
    from jshard._config.recipes.named_values import record_of
    from jshard._config.source import read_config

    function, args, kwargs = callable_of(fn, tuple(args), dict(kwargs))
    if function is None:
        raise ShardError(
            "a recipe is resolved on a call, and there are only parameters",
            where="Config.from_recipe",
            fix="Config.from_recipe(recipe, step, *args), or a module with the arguments of its call",
        )
    by_sizes = {"mesh": mesh} if isinstance(mesh, Mapping) else {}
    settings, record = settings_of(
        fn, read_config({"recipe": recipe, **by_sizes}), None if isinstance(mesh, Mapping) else mesh
    )
    sharded = shard(function, config=record, **settings)
    with sharded.as_array_function(args, kwargs) as (own, arrays, arrays_kw):
        request = own.request
        call = TracedArguments.of(request, arrays, arrays_kw)
        traced, explicit_mesh = trace_on_shapes(request, arrays, arrays_kw)
        assert request.config is not None
        rules = call_rules(request, request.config, call, traced)
        program = build_program(request, call, traced, explicit_mesh, (), rules.pin_of_name).program
        pins = rules.recipe(program)
        assert pins is not None
        found = record_of(pins, structure_of(program))
    return dataclasses.replace(found, mesh=MeshSection(tuple((rules.sizes or {}).items())))
