"""Which rule each tensor gets, and which rules get none.

The most specific name wins; two equally specific names that say different things are a tie. A tensor of optimizer
state without a rule of its own takes that of its parameter. Regular expressions come after all names, in their order.

>>> rules = (Rule("layers.*.w", (("x",), ())), Rule("layers.0.w", ((), ("x",))), Rule("head.w", ((), ())))
>>> tensors = [TensorName(f"params.layers.{i}.w", (4, 4), "float32", "params") for i in range(2)]
>>> claims = match(ConfigRecord(parameters=rules), tensors)
>>> [c.rule.name for c in claims.of_tensor], [r.name for _, r in claims.unmatched]
(['layers.0.w', 'layers.*.w'], ['head.w'])
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from jshard._config.config_record import ConfigRecord, Rule
from jshard._config.path_patterns import PathIndex, expand, is_glob, specificity
from jshard._config.tensors import TensorName, is_state, mirrors
from jshard._spec.parameter_plan import name_parts


@dataclasses.dataclass(frozen=True)
class Claim:
    """A rule that matches a tensor.

    - `stacked`: the layers are one tensor, with a dimension more than the entry. `transposed`: torch's `weight` is
        Flax's `kernel`. `of`: the parameter that the tensor mirrors, or empty.
    """

    section: str
    rule: Rule
    name: str
    stacked: bool = False
    transposed: bool = False
    of: str = ""


@dataclasses.dataclass(frozen=True)
class Claims:
    """The outcome: the winning claim of each tensor, and the rules that won nothing.

    - `unmatched`: match no tensor. `shadowed`: (section, rule, a rule that is more specific everywhere).
    - `ties`: (a tensor, its equally specific claims).
    - `listed`: arguments of which some tensor has a rule by name: those that hold parameters.
    """

    of_tensor: tuple[Claim | None, ...]
    unmatched: tuple[tuple[str, Rule], ...] = ()
    shadowed: tuple[tuple[str, Rule, Rule], ...] = ()
    ties: tuple[tuple[TensorName, tuple[Claim, ...]], ...] = ()
    listed: frozenset[str] = frozenset()


def match(record: ConfigRecord, tensors: Sequence[TensorName]) -> Claims:
    """The claims of all rules on the arguments of a call."""
    index = PathIndex([t.parts for t in tensors], [t.aliases for t in tensors])
    claims: list[list[Claim]] = [[] for _ in tensors]
    unmatched: list[tuple[str, Rule]] = []
    inputs = _input_claims(record.inputs, tensors, claims)
    unmatched += [("inputs", r) for r in record.inputs if r not in inputs]
    taken = {i for i, c in enumerate(claims) if c}
    for section, rules in (("parameters", record.parameters), ("torch", record.torch)):
        for rule in rules:
            found = _find(index, section, rule, tensors)
            found = {i: c for i, c in found.items() if i not in taken}
            for i, claim in found.items():
                claims[i].append(claim)
            if not found:
                unmatched.append((section, rule))
    ties: list[tuple[TensorName, tuple[Claim, ...]]] = []
    winners = [_winner(t, c, ties) for t, c in zip(tensors, claims, strict=True)]
    named = [i for i, c in enumerate(winners) if c is not None and c.section != "inputs"]
    unmatched += _regex_claims(record, tensors, winners, claims)
    with_rule = [i for i, c in enumerate(winners) if c is not None and c.section != "inputs"]
    _follow_parameters(tensors, winners, claims, with_rule)
    listed = frozenset(tensors[i].argument for i in {*named, *with_rule} if tensors[i].inner)
    return Claims(tuple(winners), tuple(unmatched), _shadowed(claims, winners), tuple(ties), listed)


def _follow_parameters(
    tensors: Sequence[TensorName],
    winners: list[Claim | None],
    claims: Sequence[Sequence[Claim]],
    with_rule: Sequence[int],
) -> None:
    """Give optimizer state the claim of its parameter, unless a rule is about the state and not about the parameter.

    So `**.kernel` for all does not win over `attn.kernel` for the moments of that; and state of another shape (factored
    moments) is not cut by a rule for its parameter.
    """
    parameters = [i for i in with_rule if not is_state(tensors[i])]
    state = mirrors(tensors, parameters, any_shape=True)
    # Parameters may have names that optimizers use too, such as `v`.
    others = [i for i in with_rule if is_state(tensors[i]) and i not in state]
    for i, parameter in (mirrors(tensors, others, any_shape=True) | state).items():
        own, claim = winners[i], winners[parameter]
        if own is not None and not any(c.rule is own.rule for c in claims[parameter]):
            continue
        same = tensors[i].shape == tensors[parameter].shape
        winners[i] = (
            dataclasses.replace(claim, of=tensors[parameter].path) if same and claim is not None else None
        )


def _winner(t: TensorName, claims: Sequence[Claim], ties: list) -> Claim | None:
    if not claims:
        return None

    def rank(c: Claim) -> tuple:
        return c.section != "torch", not c.stacked, rule_rank(c.rule, c.name)

    best = max(map(rank, claims))
    equal = tuple(c for c in claims if rank(c) == best)
    if len({(c.rule.entry, c.transposed) for c in equal}) > 1:
        ties.append((t, equal))
    return equal[0]


def rule_rank(rule: Rule, name: str) -> tuple:
    """Sort key, largest for the most specific; `name` is that of the rule's names which matched.

    >>> q, qkv = Rule("attn.q", ()), Rule("attn.{q,k,v}", ())
    >>> rule_rank(q, "attn.q") > rule_rank(qkv, "attn.q")
    True
    """
    return specificity(name), "{" not in rule.name


def _shadowed(
    claims: Sequence[Sequence[Claim]], winners: Sequence[Claim | None]
) -> tuple[tuple[str, Rule, Rule], ...]:
    """Rules that match, and never win."""
    won = {id(w.rule) for w in winners if w is not None}
    out: dict[int, tuple[str, Rule, Rule]] = {}
    for own, winner in zip(claims, winners, strict=True):
        for c in own:
            everything = c.section == "regexes" and is_catch_all(c.rule)
            if winner is not None and id(c.rule) not in won and not everything:
                out.setdefault(id(c.rule), (c.section, c.rule, winner.rule))
    return tuple(out.values())


def _input_claims(
    rules: Sequence[Rule], tensors: Sequence[TensorName], claims: list[list[Claim]]
) -> list[Rule]:
    """Claims of `inputs`, whose names match an array or everything below a part of a path; the rules that match."""
    used = []
    for rule in rules:
        prefixes: dict[tuple[str, ...], list[int]] = {}
        for i, t in enumerate(tensors):
            for path in (t.parts, t.inner):
                for end in range(1, len(path) + 1):
                    prefixes.setdefault(path[:end], []).append(i)
        paths = list(prefixes)
        index = PathIndex(paths)
        found = {i for n in expand(rule.name) for k in index.find_whole(n) for i in prefixes[paths[k]]}
        for i in sorted(found):
            claims[i].append(Claim("inputs", rule, rule.name))
        used += [rule] if found else []
    return used


def _find(index: PathIndex, section: str, rule: Rule, tensors: Sequence[TensorName]) -> dict[int, Claim]:
    """The tensors that a rule matches, by number."""
    out: dict[int, Claim] = {}
    for name in expand(rule.name):
        for written, transposed in spellings(name) if section == "torch" else [(name, False)]:
            numbers = section == "torch"
            if numbers and any("*" in p and p != "*" for p in name_parts(written)):
                continue  # no glob in torchprime
            found = _with_stacked(index, written, rule, tensors, numbers)
            for i, stacked in found.items():
                out.setdefault(i, Claim(section, rule, name, stacked, transposed))
            if found:
                break
    return out


def _with_stacked(
    index: PathIndex, name: str, rule: Rule, tensors: Sequence[TensorName], numbers: bool
) -> dict[int, bool]:
    """Numbers of the tensors that a name matches, and whether their layers are stacked.

    `numbers`: whether `*` stands for a number only, as in torchprime.
    """
    written = index.find_layers(name) if numbers else index.find(name)
    found = dict.fromkeys(written or index.find_numbered(name), False)
    stacked = index.find_stacked(name)
    for i in stacked:
        if i not in found and (isinstance(rule.entry, str) or len(tensors[i].shape) > len(rule.entry)):
            found[i] = True
    if "**" in name:
        for i in found:
            entry, t = rule.entry, tensors[i]
            if t.layer_axis is not None and not isinstance(entry, str) and len(entry) == len(t.shape) - 1:
                found[i] = True
    return found


def spellings(name: str) -> list[tuple[str, bool]]:
    """The names that a name of torch may have in Flax, and whether the tensor is transposed there.

    >>> spellings("model.lm_head.weight")[:3]
    [('model.lm_head.weight', False), ('model.lm_head.kernel', True), ('model.lm_head.embedding', False)]
    >>> spellings("model.layers.*.mlp")
    [('model.layers.*.mlp', False), ('layers.*.mlp', False)]
    """
    parts = name_parts(name)
    if not parts:
        return [(name, False)]
    out: list[tuple[str, bool]] = []
    for start in range(max(1, len(parts) - 1)):
        rest = parts[start:]
        if start and is_glob(rest[0]):
            break
        out.append((".".join(rest), False))
        if rest[-1] == "weight":
            for own, transposed in (("kernel", True), ("embedding", False), ("scale", False)):
                out.append((".".join((*rest[:-1], own)), transposed))
        elif rest[-1].endswith("weight") and len(rest) > 1:
            out.append((".".join((*rest[:-1], rest[-1].removesuffix("weight").rstrip("_"))), False))
    return out


def _regex_claims(
    record: ConfigRecord,
    tensors: Sequence[TensorName],
    winners: list[Claim | None],
    claims: list[list[Claim]],
) -> list[tuple[str, Rule]]:
    """Claims of regular expressions on tensors without another; the expressions that match nothing.

    They are searched for in paths below an argument. A path with the argument's name, the only one of an array that is an
    argument, is matched from end to end, as `Plan.to_rules` writes expressions for it. An expression that matches every path
    is for the arguments of which others match something below: elsewhere there are no parameters.
    """
    compiled = [(r, regex_search(r, record.regex_match)) for r in record.regexes]
    used: set[int] = set()
    wanted = [i for i, t in enumerate(tensors) if winners[i] is None]
    parameters = {
        tensors[i].argument
        for i in wanted
        for r, found in compiled
        if tensors[i].inner and not is_catch_all(r) and found("/".join(tensors[i].inner))
    }
    for i in wanted:
        path, whole = "/".join(tensors[i].inner), "/".join(tensors[i].parts)
        hits = [
            (k, r)
            for k, (r, found) in enumerate(compiled)
            if (path and found(path)) or (not is_catch_all(r) and re.fullmatch(r.name, whole))
        ]
        hits = [(k, r) for k, r in hits if not is_catch_all(r) or tensors[i].argument in parameters]
        used |= {k for k, _ in hits}
        own = [Claim("regexes", r, r.name) for _, r in hits]
        claims[i] += own
        exact = [c for c in own if c.name == path] if record.regex_match != "first" else []
        if own:
            winners[i] = (exact or own)[0]
    return [("regexes", r) for k, (r, _) in enumerate(compiled) if k not in used]


def regex_search(rule: Rule, how: str) -> Callable[[str], object]:
    """The function from a path to whether the regular expression of a rule matches it, under a `regex_match`.

    >>> rule = Rule("w.*kernel", ())
    >>> [bool(regex_search(rule, how)("a/w/kernel")) for how in ("first", "only", "full")]
    [True, True, False]
    """
    compiled = re.compile(rule.name)
    return compiled.fullmatch if how == "full" else compiled.search


def is_catch_all(rule: Rule) -> bool:
    """Whether a regular expression matches every path.

    >>> is_catch_all(Rule(".*", ())), is_catch_all(Rule("kernel", ()))
    (True, False)
    """
    return all(re.search(rule.name, text) for text in ("", "\0", "a/b"))


def match_outputs(
    rules: Iterable[tuple[str, Rule]], values: Sequence[TensorName]
) -> tuple[Mapping[int, list[Claim]], list[tuple[str, Rule]]]:
    """Claims on outputs of modules and named values, best first, by number of the value; and rules that match none.

    Where a rule names an element of an output with `[i]`, rules without it do not apply. The most specific rule wins.
    `layers.*` is each of several layers, or their stack; only where there is neither is it everything in `layers`.
    """
    index = PathIndex([v.parts for v in values])
    won: dict[int, list[Claim]] = {}
    matched: set[int] = set()
    every = list(rules)
    for section, rule in every:
        found: set[int] = set()
        for name in expand(rule.name):
            own: set[int] = set()
            for written, _ in spellings(name) if section == "torch" else [(name, False)]:
                if not name_parts(written):
                    own = {i for i, v in enumerate(values) if not v.parts}
                else:
                    own = set(
                        index.find_layers(written)
                        or index.find_numbered(written)
                        or index.find_stacked(written)
                        or (index.find(written) if section != "torch" else ())
                    )
                if own:
                    break
            if rule.element is not None:
                own = {i for i in own if values[i].elements > rule.element == values[i].element}
            for i in own - found:
                won.setdefault(i, []).append(Claim(section, rule, name))
            found |= own
    by_element = {values[i].path for i, cs in won.items() if any(c.rule.element is not None for c in cs)}
    for i, claims in list(won.items()):
        if values[i].path in by_element:
            claims[:] = [c for c in claims if c.rule.element is not None]
        claims.sort(key=lambda c: (c.section != "torch", rule_rank(c.rule, c.name)), reverse=True)
        if not claims:
            del won[i]
        matched |= {id(c.rule) for c in claims}
    return won, [(s, r) for s, r in every if id(r) not in matched]
