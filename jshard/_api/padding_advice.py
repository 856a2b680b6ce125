"""The advice to pad a dimension, given only where the call can pad it; else the reason stands in its place.

The call is traced again with `pad`, and its pins are looked at; nothing is searched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jshard._api.prepare import TracedCall, check_padding, padding_refusals, trace_call
from jshard._api.shard_request import ShardRequest
from jshard._config.fitting import Problem
from jshard._config.match_report import MatchReport
from jshard._core.errors import ShardError, StrategyError
from jshard._core.jax_types import PyTree


def with_checked_padding(
    error: StrategyError, request: ShardRequest, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> ShardError:
    """The error, without its advice to pad where the call would be refused with it too, and then with the reason."""
    if not error.padded:
        return error
    try:
        check_padding(_traced_with_pad(request, args, kwargs))
    except ShardError as refusal:
        fix = f"{error.unpadded}; no padding: {_reason(refusal, error.where)}"
        return StrategyError(error.what, where=error.where, fix=fix)
    return error


def with_checked_advice(
    report: MatchReport, request: ShardRequest, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> MatchReport:
    """The report, without the advice to pad a dimension where the call cannot pad that one, and then with the reason.

    Where other problems refuse the call, the advice says that it is not checked.
    """
    if not any(p.padded for p in report.problems):
        return report
    try:
        refusals = padding_refusals(_traced_with_pad(request, args, kwargs))
    except ShardError:
        return with_conditional_advice(report)
    checked = [_checked(p, refusals) if p.padded else p for p in report.problems]
    return dataclasses.replace(report, problems=tuple(checked))


def with_conditional_advice(report: MatchReport) -> MatchReport:
    """The report with the advice to pad as it holds for some function that is not known here."""
    problems = [
        dataclasses.replace(p, padded=", or pad: true, if it can be padded") if p.padded else p
        for p in report.problems
    ]
    return dataclasses.replace(report, problems=tuple(problems))


def _checked(problem: Problem, refusals: Mapping[tuple[str, int], StrategyError]) -> Problem:
    refusal = refusals.get(problem.cut)
    if refusal is None:
        return problem
    fix = f"{problem.fix}; no padding: {_reason(refusal, problem.cut[0])}"
    return dataclasses.replace(problem, fix=fix, padded="")


def _reason(refusal: ShardError, where: str) -> str:
    return refusal.what if refusal.where == where else f"{refusal.where}: {refusal.what}"


def _traced_with_pad(
    request: ShardRequest, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> TracedCall:
    config = request.config
    if config is not None:
        config = dataclasses.replace(config, options=tuple({**dict(config.options), "pad": True}.items()))
    options = dataclasses.replace(request.options, pad=True)
    return trace_call(dataclasses.replace(request, options=options, config=config), args, kwargs)
