"""`Config.check` on functions, modules and pytrees of parameters."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jshard._api.config_pins import match_report
from jshard._api.padding_advice import with_checked_advice, with_conditional_advice
from jshard._api.shard import Sharded, shard
from jshard._api.shard_request import ShardRequest
from jshard._config.config_record import ConfigRecord
from jshard._config.match_report import MatchReport
from jshard._core.errors import ShardError
from jshard._core.jax_types import Function, PyTree
from jshard._core.messages import type_with_article
from jshard._core.named_topology import MeshRequest
from jshard._spec.options import CONFIG_ONLY_ADVICE, CallOptions, PlanOptions


_OF_A_ROW = {
    "level",
    "search",
    "search_in_budget",
    "gap",
}  # what compared plans have alike, whatever the function says


def check(
    record: ConfigRecord,
    model: PyTree,
    args: Sequence[PyTree] = (),
    kwargs: Mapping[str, PyTree] | None = None,
) -> MatchReport:
    """The report of a configuration on a function, a module or a pytree, with the arguments of a call."""
    function, args, kwargs = callable_of(model, tuple(args), dict(kwargs or {}))
    parameters_alone = function is None
    if function is None:
        record = dataclasses.replace(record, activations=(), outputs=(), inputs=())
        function, args = (lambda model: 0), (model,)
    own, record = settings_of(model, record)
    sharded = shard(function, config=record, **own)
    with sharded.as_array_function(args, kwargs) as (of_arrays, arrays, arrays_kw):
        request: ShardRequest = dataclasses.replace(of_arrays.request, config=record)
        report = match_report(request, arrays, arrays_kw)
        if parameters_alone:
            return with_conditional_advice(report)
        return with_checked_advice(report, request, arrays, arrays_kw)


def settings_of(
    model: PyTree, record: ConfigRecord, mesh: MeshRequest | None = None
) -> tuple[dict[str, Any], ConfigRecord]:
    """What a sharded function says and a configuration leaves open: arguments of `shard`, and the completed configuration.

    That is its mesh (without `mesh`), machine, budget, static and donated arguments; not its strategies, level and
    search.

    >>> import jshard
    >>> f = jshard.shard(lambda x, n: x * n, hardware="v5p", static_argnums=1)
    >>> sorted(settings_of(f, ConfigRecord())[0])
    ['hardware', 'mesh', 'static_argnums']
    """
    if not isinstance(model, Sharded):
        return {"mesh": mesh}, record
    request, named = model.request, dict(record.options)
    out: dict[str, Any] = {"mesh": request.mesh if mesh is None and record.mesh is None else mesh}
    for group, default in ((request.options, PlanOptions()), (request.call, CallOptions())):
        for field in dataclasses.fields(group):
            value = getattr(group, field.name)
            if field.name in named or field.name in _OF_A_ROW or value == getattr(default, field.name):
                continue
            if field.name in CONFIG_ONLY_ADVICE:
                record = record.with_default(field.name, value)
            else:
                out[field.name] = value
    return out, record


def _with_signature(function: Any, first: str, module: object) -> Function:
    """A function of `first` and the arguments of a module's call, under their names."""
    own = list(inspect.signature(type(module).__call__).parameters.values())[1:]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature([inspect.Parameter(first, kind), *own])
    function.__name__ = type(module).__name__
    return function


def callable_of(
    model: PyTree, args: tuple, kwargs: dict[str, PyTree]
) -> tuple[Function | None, tuple, dict[str, PyTree]]:
    """A plain function and its arguments for what `Config.check` takes; None for parameters alone."""
    module = next((c for c in type(model).__mro__ if c.__name__ == "Module"), object).__module__
    if module.startswith("flax.linen."):
        if not args:
            raise ShardError(
                f"{type(model).__name__} is a linen module, which holds no parameters",
                where="Config.check",
                fix="its variables, or their shapes, and the arguments of its call: check(module, variables, x)",
            )

        def apply(variables: PyTree, *args: PyTree, **kwargs: PyTree) -> PyTree:
            return model.apply(variables, *args, **kwargs)

        return _with_signature(apply, "variables", model), args, kwargs
    if module.startswith("flax.nnx."):
        if not args and not kwargs:
            return None, (), {}

        def call(model: Function, *args: PyTree, **kwargs: PyTree) -> PyTree:
            return model(*args, **kwargs)

        return _with_signature(call, "model", model), (model, *args), kwargs
    if isinstance(model, Sharded):
        return model.request.fn, args, kwargs
    if callable(model):
        return model, args, kwargs
    if args or kwargs or not jax.tree.leaves(model):
        raise ShardError(
            f"check takes a function, a module or a pytree of arrays, not {type_with_article(model)}",
            where="Config.check",
            fix="config.check(step, *args), config.check(module, x) or config.check(params)",
        )
    return None, (), {}
