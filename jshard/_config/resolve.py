"""A configuration against the tensors of one call: their entries, and everything that does not match.

>>> record = ConfigRecord(parameters=(Rule("fc.w", (("x",), ())), Rule("head.w", ((), ()))))
>>> tensors = [TensorName("params.fc.w", (4, 4), "float32", "params")]
>>> found = resolve(record, tensors, sizes={"x": 2})
>>> found.rows[0].entry, [p.kind for p in found.problems]
((('x',), ()), ['unmatched'])
"""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping, Sequence

from jshard._config.config_record import DERIVED, ConfigRecord, Rule, entry_text
from jshard._config.fitting import Problem, fit, problems_of
from jshard._config.matching import (
    Claim,
    Claims,
    is_catch_all,
    match,
    match_outputs,
    regex_search,
    rule_rank,
)
from jshard._config.path_patterns import matches, without_numbers
from jshard._config.resolution import Resolution, Row
from jshard._config.slips import slips
from jshard._config.tensors import TensorName
from jshard._spec.parameter_plan import name_parts, nearest_names


def resolve(
    record: ConfigRecord,
    tensors: Sequence[TensorName],
    values: Sequence[TensorName] | None = None,
    results: Sequence[TensorName] | None = None,
    sizes: Mapping[str, int] | None = None,
    scopes: Sequence[str] = (),
    inside: Mapping[str, Sequence[TensorName]] | None = None,
) -> Resolution:
    """Resolve all rules.

    - `tensors`: the arguments. `values`: named values inside, `results`: of the function; None where it was not traced,
        and rules about them are then left alone.
    - `sizes`: of the mesh axes; None where no mesh is known. `scopes`: paths of named scopes, for advice.
    - `inside`: by section (`products`, `gradients`) the values that its rules are about; None leaves them alone.
    """
    claims = match(record, tensors)
    problems: list[Problem] = []
    rows = [_row(record, t, c, claims, sizes, problems) for t, c in zip(tensors, claims.of_tensor, strict=True)]  # fmt: skip
    unmatched = list(claims.unmatched)
    inner: list[Row] = []
    about_modules = _about_values(record, claims)
    unmatched = [(s, r) for s, r in unmatched if s != "torch"]
    if values is not None:
        won, missing = match_outputs(about_modules, values)
        unmatched += missing
        first = {id(own[0].rule) for own in won.values()}
        beaten = {id(c.rule): (c.section, c.rule, own[0].rule) for own in won.values() for c in own[1:]}
        problems += [_shadowed(*b) for k, b in beaten.items() if k not in first]
        inner = _inner_rows(values, won, sizes, problems, record.option("pad") is True)
    result_rows: list[Row] = []
    if results is not None:
        won, missing = match_outputs([("outputs", r) for r in record.outputs], results)
        unmatched += missing
        result_rows = _inner_rows(results, won, sizes, problems, record.option("pad") is True)
    for section, own in (inside or {}).items():
        won, missing = match_outputs([(section, r) for r in getattr(record, section)], own)
        unmatched += missing
        inner += _inner_rows(own, won, sizes, problems, record.option("pad") is True)
    arguments, inner_names = [t.path for t in tensors], [*(t.path for t in values or ()), *scopes]
    known = {section: [t.path for t in own] for section, own in (inside or {}).items()} | {
        "parameters": arguments,
        "inputs": arguments,
        "torch": [*arguments, *inner_names],
        "regexes": [t.path for t in tensors if t.path != t.argument],
        "activations": inner_names,
        "outputs": [t.path for t in results or ()],
    }
    problems = _unmatched(record, unmatched, known, values or ()) + problems
    problems += [_shadowed(*s) for s in claims.shadowed] + [_tie(*t) for t in claims.ties]
    problems += _double_regexes(record, tensors, claims)
    problems += _without_rule(record, rows, claims) + _unlisted(record, tensors)
    problems += slips(rows, inner)
    problems += _unused_axes(record, [*rows, *inner, *result_rows], sizes)
    problems += [
        Problem("note", record.source, n, record.source, "nothing, if it is meant", error=False)
        for n in record.notes
    ]
    once = tuple(dict.fromkeys(problems))
    return Resolution(tuple(rows), tuple(inner), tuple(result_rows), once)


def _about_values(record: ConfigRecord, claims: Claims) -> list[tuple[str, Rule]]:
    """The rules about values inside: those of `activations`, and those of torchprime's form that no parameter has."""
    torch = [(s, r) for s, r in claims.unmatched if s == "torch"]
    return [("activations", r) for r in record.activations] + torch


def unmatched_by_values(
    record: ConfigRecord, tensors: Sequence[TensorName], values: Sequence[TensorName]
) -> list[tuple[str, Rule]]:
    """The rules about values inside that match none of these, as (section, rule)."""
    about = _about_values(record, match(record, tensors))
    return match_outputs(about, values)[1] if about else []


def _row(
    record: ConfigRecord,
    tensor: TensorName,
    claim: Claim | None,
    claims: Claims,
    sizes: Mapping[str, int] | None,
    problems: list[Problem],
) -> Row:
    if claim is None:
        if record.unlisted == "replicated" and tensor.argument in claims.listed and tensor.shape:
            return Row(tensor, ((),) * len(tensor.shape), "replicated")
        return Row(tensor, None, "derived")
    entry = fit(claim, tensor)
    if isinstance(entry, Problem):
        if claim.of:  # state of another rank than its parameter
            return Row(tensor, None, "derived")
        problems.append(entry)
        return Row(tensor, None, "rule", claim.section, claim.rule)
    status = "mirrors" if claim.of else "derived" if entry == DERIVED else "rule"
    row = Row(tensor, entry, status, claim.section, claim.rule, claim.of)
    if not claim.of:
        problems += problems_of(
            entry, tensor, sizes, claim.rule.where, claim.rule.key, record.option("pad") is True, row.where
        )
    return row


def _inner_rows(
    values: Sequence[TensorName],
    won: Mapping[int, Sequence[Claim]],
    sizes: Mapping[str, int] | None,
    problems: list[Problem],
    pads: object,
) -> list[Row]:
    rows = []
    for i, value in enumerate(values):
        if i not in won:
            continue
        claim = won[i][0]
        section, rule = claim.section, claim.rule
        if rule.element is None and value.elements > 1 and value.kind != "product":
            problems.append(
                Problem(
                    "element",
                    rule.key,
                    f"the output of {value.path or 'the model'} has {value.elements} elements",
                    rule.where,
                    f"{rule.key}[{value.element}] for one of them",
                    refuses=True,
                )
            )
            continue
        for other in won[i][1:2]:
            same = (section, rule_rank(rule, claim.name)) == (
                other.section,
                rule_rank(other.rule, other.name),
            )
            if same and rule.entry != other.rule.entry:
                problems.append(_tie(value, (claim, other)))
        entry = fit(claim, value)
        if isinstance(entry, Problem):
            problems.append(entry)
            continue
        rows.append(Row(value, entry, "rule", section, rule))
        problems += problems_of(entry, value, sizes, rule.where, rule.key, pads, rows[-1].where)
    return rows


def _unmatched(
    record: ConfigRecord,
    unmatched: Sequence[tuple[str, Rule]],
    known: Mapping[str, Sequence[str]],
    values: Sequence[TensorName],
) -> list[Problem]:
    """The rules that match nothing, with the nearest names of their section; `known`: the names of each section."""
    out = []
    for section, rule in unmatched:
        if any(rule.name == o or matches(o, name_parts(rule.name)) for o in record.optional):
            continue
        if section == "regexes" and is_catch_all(rule):
            continue
        elements = [v for v in values if rule.element is not None and _ends_in(rule.name, v)]
        paths = sorted(set(filter(None, known.get(section, ()))))
        wanted = re.sub(r"\{[^}]*\}", "", rule.name)
        others = [o for o, names in known.items() if rule.name in names and o not in ("torch", section)]
        near = nearest_names(wanted, paths) if paths else f"the function has no names for {section}"
        near = f"{rule.name!r} is a name for {' and '.join(others)}" if others else near
        fix = f"{near}; or list it under optional"
        if elements:
            count = max(v.elements for v in elements)
            fix = f"[0] to [{count - 1}]" if count else f"{rule.name} without [{rule.element}]"
        elif name_parts(rule.name)[-1:] == ("weight",) and section != "torch":
            fix += "; names of torch, with [out, in] weights, go under torch:"
        what = f"{rule.key!r} of {section} matches nothing"
        out.append(Problem("unmatched", rule.key, what, rule.where, fix))
    return out


def _ends_in(name: str, value: TensorName) -> bool:
    return any(matches(name, value.parts[k:]) for k in range(len(value.parts)))


def _shadowed(section: str, rule: Rule, by: Rule) -> Problem:
    return Problem(
        "shadowed",
        rule.key,
        f"{rule.key!r} of {section} never applies: {by.key!r} is more specific wherever it matches",
        rule.where,
        f"one of the two, or a name that {by.key!r} does not match",
    )


def _tie(tensor: TensorName, claims: Sequence[Claim]) -> Problem:
    names = " and ".join(f"{c.rule.key!r} ({entry_text(c.rule.entry)})" for c in claims)
    return Problem(
        "tie",
        tensor.path,
        f"{names} are equally specific for {tensor.path}",
        " and ".join(c.rule.where for c in claims),
        f"the full name {'.'.join(tensor.own)!r} for it, or one of the two",
        refuses=True,
    )


def _double_regexes(record: ConfigRecord, tensors: Sequence[TensorName], claims: Claims) -> list[Problem]:
    """Paths that two regular expressions match, where only one may (Keras' LayoutMap)."""
    if record.regex_match == "first":
        return []
    compiled = [(r, regex_search(r, record.regex_match)) for r in record.regexes]
    out = []
    for tensor, claim in zip(tensors, claims.of_tensor, strict=True):
        path = "/".join(tensor.inner)
        hits = [r for r, found in compiled if found(path)]
        exact = path in [r.name for r in hits]
        if claim is not None and claim.section == "regexes" and len(hits) > 1 and not exact:
            out.append(_tie(tensor, [Claim("regexes", r, r.name) for r in hits[:2]]))
    return out


def _unlisted(record: ConfigRecord, tensors: Sequence[TensorName]) -> list[Problem]:
    """The setting `unlisted: replicated` without a rule that says which arguments hold parameters."""
    rules = record.parameters or record.regexes or record.torch or record.recipe
    if record.unlisted != "replicated" or rules:
        return []
    what = "'unlisted: replicated' replicates nothing: it is about arguments in which a tensor has a rule"
    inner = [t.path for t in tensors if t.inner and t.shape]
    fix = (
        f"a rule for a tensor of each, as parameters: {{{inner[0]!r}: '?'}}" if inner else "unlisted: derived"
    )
    return [Problem("unlisted", "unlisted", what, record.source, fix)]


def _without_rule(record: ConfigRecord, rows: Sequence[Row], claims: Claims) -> list[Problem]:
    """Parameters without a rule: layers of which others have one, and classes of tensors, with their bytes."""
    out: list[Problem] = []
    kinds = {without_numbers(r.tensor.own) for r in rows if r.status == "rule" and r.section != "inputs"}
    left: dict[tuple, list[Row]] = collections.defaultdict(list)
    for row in rows:
        t = row.tensor
        caught = row.section == "regexes" and row.rule is not None and is_catch_all(row.rule)
        open_ = row.rule is None or caught
        if not open_ or t.argument not in claims.listed or len(t.shape) < 1 or not t.inner:
            continue
        kind = without_numbers(t.own)
        if kind in kinds and row.rule is None:
            out.append(
                Problem(
                    "missing layer",
                    t.path,
                    f"{t.path} has no rule, other layers have one ({t.nbytes:,} bytes)",
                    record.source,
                    f'a rule for {".".join(t.own)!r}, or "?" to leave it to the search',
                )
            )
        else:
            left[kind, row.status, caught].append(row)
    for (_, status, caught), same in left.items():
        total = sum(r.tensor.nbytes for r in same)
        more = f" and {len(same) - 1} alike" if len(same) > 1 else ""
        how = "is left to a rule that matches everything" if caught else f"has no rule and is {status}"
        rule = same[0].rule
        out.append(
            Problem(
                "catch-all" if caught else "without rule",
                same[0].tensor.path,
                f"{same[0].tensor.path}{more} {how}: {total:,} bytes",
                rule.where if rule is not None else record.source,
                f"a rule for {'.'.join(same[0].tensor.own)!r}",
                error=False,
            )
        )
    return out


def _unused_axes(record: ConfigRecord, rows: Sequence[Row], sizes: Mapping[str, int] | None) -> list[Problem]:
    """Axes of the mesh that no rule uses."""
    if not sizes or not rows or not record.rules:
        return []
    used = set(record.axes_in_rules())
    return [
        Problem(
            "unused axis",
            axis,
            f"no rule cuts anything over the mesh axis {axis!r}, of size {size}",
            record.mesh.where if record.mesh is not None else record.source,
            f"a rule with {axis}, or a mesh without it",
            error=False,
        )
        for axis, size in sizes.items()
        if size > 1 and axis not in used
    ]
