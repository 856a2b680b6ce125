"""`audit`: what a configuration's layout costs beside the plan of the search."""

from __future__ import annotations

import collections
import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jshard._core.errors import ShardError


if TYPE_CHECKING:
    from jshard._api.plan import Plan
    from jshard._api.shard import Sharded
    from jshard._config.audit_report import AuditReport, Figures, WholeTensor
    from jshard._config.config_record import ConfigRecord, ConfigSource
    from jshard._core.jax_types import Function, PyTree
    from jshard._plan.record import TensorRow


def audit(
    fn: Function, config: ConfigSource, *args: PyTree, each_rule: bool = False, **kwargs: PyTree
) -> AuditReport:
    """Price a configuration: its plan beside the one that the search finds with the same inputs, mesh and options.

    >>> import jax, jshard
    >>> f32 = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
    >>> config = {"mesh": {"x": 4}, "inputs": {"x": ["x", None]}, "parameters": {"w": ["x", None]}}
    >>> report = jshard.audit(lambda p, x: x @ p["w"], config, {"w": f32(64, 64)}, f32(64, 64))
    >>> report.slower > 1, report.file.communication > report.search.communication
    (True, True)

    Arguments:

    - `fn`: a function, with the arguments of its call; or a module of Flax, as for `Config.check`. Arrays may be shapes.
      The mesh, machine, budget, static and donated arguments of a sharded function hold where the configuration is silent.
    - `config`: as for `shard`. What it leaves open the search decides in both plans; `level` is 2 unless it says another.
    - `each_rule`: also plan without each rule in turn, to say what freeing it saves; one search per rule.

    Returns the figures of both plans, what the file leaves whole on every device with its bytes, and cuts that look like
    slips; as text (`print`) and HTML. Raises `ShardError` where the file cannot be planned.
    """
    from jshard._api.config_check import callable_of, check, settings_of
    from jshard._api.shard import Sharded, shard
    from jshard._config.audit_report import AuditReport, RuleCost
    from jshard._config.config_record import DERIVED
    from jshard._config.source import read_config
    from jshard._report.totals import optimality_text

    record = read_config(config).with_default("level", 2)
    lenient = dataclasses.replace(record, strict=False)
    function, args, kwargs = callable_of(fn, args, dict(kwargs))
    if function is None:
        raise ShardError(
            "audit needs a call to price, and there are only parameters",
            where="jshard.audit",
            fix="audit(step, config, *args), or audit(module, config, x)",
        )

    settings, lenient = settings_of(fn, lenient)

    def planned(own: ConfigRecord) -> Plan:
        return plan_without_warnings(shard(function, config=own, **settings), args, kwargs)

    report = check(lenient, fn if isinstance(fn, Sharded) else function, args, kwargs)
    # The report says what fails to match.
    quiet = dataclasses.replace(lenient, optional=("**", *lenient.optional))
    file, search = planned(quiet), planned(_only_inputs(quiet))
    costs = []
    for section in ("parameters", "torch", "activations", "regexes") if each_rule else ():
        for rule in getattr(quiet, section):
            freed = tuple(
                dataclasses.replace(r, entry=DERIVED) if r is rule else r for r in getattr(quiet, section)
            )
            other = planned(dataclasses.replace(quiet, **{section: freed}))
            saved = file.step_seconds - other.step_seconds, file.cost.peak_bytes - other.cost.peak_bytes
            costs.append(RuleCost(rule.key, rule.where, *saved))
    return AuditReport(
        record.source,
        file.name,
        str(file.mesh),
        figures(file),
        figures(search),
        _whole(file, search),
        tuple(sorted(report.problems, key=lambda p: not p.error)),
        tuple(sorted(costs, key=lambda c: -c.seconds)),
        optimality_text(search),
    )


def plan_without_warnings(f: Sharded, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> Plan:
    """A plan whose warnings a report repeats."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return f.plan(*args, **kwargs)


def _only_inputs(record: ConfigRecord) -> ConfigRecord:
    """The configuration without what it says about parameters, outputs and values inside."""
    return dataclasses.replace(
        record, parameters=(), torch=(), activations=(), regexes=(), outputs=(), unlisted="derived"
    )


def figures(plan: Plan) -> Figures:
    """A plan in the figures of a report."""
    from jshard._config.audit_report import Figures
    from jshard._report.totals import received_bytes

    return Figures(
        plan.step_seconds,
        plan.cost.compute,
        plan.cost.communication,
        plan.cost.peak_bytes,
        received_bytes(plan),
        plan.mfu if plan.model_flops.flops else None,
    )


def _whole(file: Plan, search: Plan) -> tuple[WholeTensor, ...]:
    """Arguments that the file's plan cuts nowhere, by class, the largest first."""
    from jshard._config.audit_report import WholeTensor
    from jshard._config.config_record import entry_text
    from jshard._config.export import entry_of
    from jshard._config.path_patterns import without_numbers
    from jshard._spec.parameter_plan import name_parts

    searched: Mapping[str, TensorRow] = {r.path: r for r in search.inputs}
    classes: dict[tuple, list[TensorRow]] = collections.defaultdict(list)
    for row in file.inputs:
        if row.shape and not any(row.layout.dims):
            classes[without_numbers(name_parts(row.path))].append(row)
    out = []
    for rows in classes.values():
        first = rows[0]
        total = sum(_nbytes(r) for r in rows)
        entry = entry_text(entry_of(searched[first.path].layout))
        out.append(WholeTensor(first.path, first.shape, len(rows), total, entry))
    return tuple(sorted(out, key=lambda w: -w.bytes))


def _nbytes(row: TensorRow) -> int:
    from jshard._config.export import tensor_of

    return tensor_of(row).nbytes
