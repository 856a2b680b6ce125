"""The fewest rules that give every tensor its entry: globs over layers, braces, `**`.

Tensors that differ in numbers only (of layers, of experts) are a class. A class needs one rule per distinct entry: the
most frequent entry takes `*` for the numbers (of `Dense_0`, `Dense_*`), the others list theirs in braces. Rules of classes
with one entry are then joined: by `**.name` where every tensor of that last name has the entry, by braces where names
differ in one part. What a joint rule gets wrong is corrected by rules of full paths, and the result is checked tensor by
tensor, so it is exact.

>>> leaves = {f"p.layers.{i}.{n}.w": ((("x",), ()) if n in "qk" else ((), ("x",))) for i in range(3) for n in "qkv"}
>>> leaves["p.layers.2.v.w"] = ((), ())
>>> tensors = [TensorName(path, (4, 4), "float32", "p") for path in leaves]
>>> for rule in fewest_rules(tensors, list(leaves.values())):
...     print(rule.key, rule.text)
layers.*.v.w [null, x]
layers.2.v.w [null, null]
layers.*.{q,k}.w [x, null]
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from jshard._config.config_record import ConfigRecord, Entry, Rule
from jshard._config.fitting import Problem, fit
from jshard._config.matching import match, match_outputs
from jshard._config.path_patterns import without_numbers
from jshard._config.tensors import TensorName, is_state, mirrors


Parts = tuple[str, ...]


def fewest_rules(
    tensors: Sequence[TensorName], entries: Sequence[Entry], others: Sequence[TensorName] = ()
) -> tuple[Rule, ...]:
    """Rules of the section `parameters` under which each tensor has its entry, and `others` are left open.

    Tensors of one path below several arguments (moments that are arguments of their own) follow the first of them.
    """
    first: dict[Parts, int] = {}
    for i, t in enumerate(tensors):
        first.setdefault(t.own, i)
    own = {path: entries[i] for path, i in first.items() if path}
    own = _without_mirrors(own, tensors, entries, first)
    rules = _joined(_by_class(own))
    tensors, entries = (*tensors, *others), (*entries, *((None,) * len(t.shape) for t in others))
    for names in (lambda t: t.own, lambda t: t.parts):
        wrong = _wrong(rules, tensors, entries)
        if not wrong:
            return _without_shadowed(rules, tensors)
        # An argument that is a tensor itself has no name below the argument.
        named = {names(tensors[i]): entries[i] for i in wrong if names(tensors[i])}
        rules = _merged(rules, _by_class(named))
    if not _wrong(rules, tensors, entries):
        return _without_shadowed(rules, tensors)
    plain = _by_class(own)
    wrong = _wrong(plain, tensors, entries)
    return _merged(plain, tuple(Rule(tensors[i].path, entries[i]) for i in wrong))


def fewest_result_rules(
    wanted: Mapping[TensorName, Entry], others: Sequence[TensorName] = (),
    settled: Mapping[TensorName, Entry] = MappingProxyType({}),
) -> tuple[Rule, ...]:  # fmt: skip
    """Rules of the section `outputs` under which each result has its entry, and none matches `others`.

    Results that are `settled` have their entry without a rule. One may match them only if it gives them that.
    """
    if not wanted:
        return ()
    names = [*wanted, *settled, *others]
    allowed = (
        [(e,) for e in wanted.values()] + [(e, None) for e in settled.values()] + [(None,)] * len(others)
    )
    for some in (wanted, {**wanted, **settled}):
        rules = tuple(_braced(_by_class({t.parts: e for t, e in some.items()})))
        won, _ = match_outputs([("outputs", r) for r in rules], names)
        got = [won[i][0].rule.entry if won.get(i) else None for i in range(len(names))]
        if all(entry in entries for entry, entries in zip(got, allowed, strict=True)):
            return rules
    return tuple(Rule(t.path, e) for t, e in wanted.items())


def _merged(rules: Sequence[Rule], extra: Sequence[Rule]) -> tuple[Rule, ...]:
    return tuple({r.name: r for r in (*rules, *extra)}.values())


def _without_shadowed(rules: tuple[Rule, ...], tensors: Sequence[TensorName]) -> tuple[Rule, ...]:
    """The rules without those that are nowhere the most specific one, which a file is refused for."""
    never = {id(rule) for _, rule, _ in match(ConfigRecord(parameters=rules), tensors).shadowed}
    return tuple(r for r in rules if id(r) not in never)


def _without_mirrors(
    own: Mapping[Parts, Entry], tensors: Sequence[TensorName], entries: Sequence[Entry], first: Mapping[Parts, int]
) -> dict[Parts, Entry]:  # fmt: skip
    """The paths without those of optimizer state that has the entry of its parameter: it needs no rule."""
    found = mirrors(tensors, [i for p, i in first.items() if p and not is_state(tensors[i])])
    return {
        path: entry
        for path, entry in own.items()
        if not (first[path] in found and entries[found[first[path]]] == entry)
    }


def _by_class(own: Mapping[Parts, Entry]) -> tuple[Rule, ...]:
    """One rule per class and distinct entry."""
    classes: dict[tuple, list[Parts]] = collections.defaultdict(list)
    for path in own:
        classes[without_numbers(path), len(path), _number_places(path)].append(path)
    rules = []
    for paths in classes.values():
        kinds: dict[Entry, list[Parts]] = collections.defaultdict(list)
        for path in paths:
            kinds[own[path]].append(path)
        usual = max(kinds, key=lambda e: len(kinds[e]))
        varying = [k for k in _number_places(paths[0]) if len({p[k] for p in paths}) > 1]
        rules.append(
            Rule(".".join(_any_number(p) if k in varying else p for k, p in enumerate(paths[0])), usual)
        )
        for entry, some in kinds.items():
            if entry != usual:
                rules += _exceptions(some, varying, entry)
    return tuple(rules)


def _any_number(part: str) -> str:
    """A part of a path with `*` for its number: of `3`, `*`; of `Dense_3`, `Dense_*`, which `Conv_3` does not match."""
    return part.rstrip("0123456789") + "*"


def _number_places(path: Parts) -> tuple[int, ...]:
    return tuple(k for k, p in enumerate(path) if without_numbers((p,)) != (p,))


def _exceptions(paths: Sequence[Parts], varying: Sequence[int], entry: Entry) -> list[Rule]:
    """Rules for some paths of a class: those that differ in one number share one rule."""
    if not varying:
        return [Rule(".".join(p), entry) for p in paths]
    last = varying[0]
    groups: dict[Parts, list[str]] = collections.defaultdict(list)
    for path in paths:
        groups[(*path[:last], "\0", *path[last + 1 :])].append(path[last])
    out = []
    for rest, numbers in groups.items():
        joint = numbers[0] if len(numbers) == 1 else "{" + ",".join(numbers) + "}"
        out.append(Rule(".".join(joint if p == "\0" else p for p in rest), entry))
    return out


def _joined(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Rules of one entry joined by `**.name` and by braces."""
    ends: dict[str, set[Entry]] = collections.defaultdict(set)
    count: collections.Counter[str] = collections.Counter()
    for rule in rules:
        last = rule.name.rpartition(".")[2]
        ends[last].add(rule.entry)
        count[last] += 1
    out: list[Rule] = []
    for last, entries in ends.items():
        if len(entries) == 1 and count[last] > 1 and "*" not in last and "{" not in last:
            out.append(Rule(f"**.{last}", next(iter(entries))))
    short = {r.name.removeprefix("**.") for r in out}
    rest = [r for r in rules if r.name.rpartition(".")[2] not in short]
    return (*_braced(rest), *out)


def _braced(rules: Sequence[Rule]) -> list[Rule]:
    """Rules whose names differ in one part joined in braces, as often as possible; their own order otherwise."""
    left = list(rules)
    while True:
        groups: dict[tuple, list[Rule]] = collections.defaultdict(list)
        for rule in left:
            parts = _split(rule.name)
            for k, part in enumerate(parts):
                if not any(c in part for c in "*{?"):
                    groups[rule.entry, k, (*parts[:k], "\0", *parts[k + 1 :])].append(rule)
        several = [(len(g), key) for key, g in groups.items() if len(g) > 1]
        if not several:
            return left
        most = max(several, key=lambda s: s[0])[1]
        same, (entry, k, rest) = groups[most], most
        choices = "{" + ",".join(dict.fromkeys(_split(r.name)[k] for r in same)) + "}"
        joint = Rule(".".join(choices if p == "\0" else p for p in rest), entry)
        left = [r for r in left if r not in same] + [joint]


def _split(name: str) -> list[str]:
    """The parts of a name; dots in braces do not divide."""
    out, depth = [""], 0
    for c in name:
        depth += (c == "{") - (c == "}")
        if c == "." and depth == 0:
            out.append("")
        else:
            out[-1] += c
    return out


def _wrong(rules: Sequence[Rule], tensors: Sequence[TensorName], entries: Sequence[Entry]) -> list[int]:
    """The tensors that the rules do not give their entry."""
    claims = match(ConfigRecord(parameters=tuple(rules)), tensors)
    tied = {t.path for t, _ in claims.ties}
    out = []
    for i, (t, claim, entry) in enumerate(zip(tensors, claims.of_tensor, entries, strict=True)):
        got = (None,) * len(t.shape) if claim is None else fit(claim, t)
        if isinstance(got, Problem) or got != entry or t.path in tied:
            out.append(i)
    return out
