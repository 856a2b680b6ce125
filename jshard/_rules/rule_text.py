"""Parser of rule texts such as `"b q h d, b k h d, b k h d -> b q h d"`, and the public `register_rule`.

Operands before `->`, results after it, separated by commas; one token per dimension, separated by spaces: a name is a
factor, `(a b)` a dimension of several factors, major first, with lengths from `sizes`, and `1` or `_` a dimension that
is never sharded. A factor that no result carries is blocked, such as attention's `k` below, over which a softmax
normalises, unless it is named as a `reduction`: then sharding it leaves partial sums.

>>> from jax import ShapeDtypeStruct as S
>>> q, k = S((2, 8, 4, 16), "float32"), S((2, 32, 4, 16), "float32")
>>> r = parse_rule("b q h _, b k h _, b k h _ -> b q h _", (q, k, k), (q,))
>>> r.sizes, r.blocked, str(parse_rule("m k, k n -> m n", (S((4, 8), int), S((8, 2), int)), (S((4, 2), int),),
...                               reduction=("k",)))
((2, 8, 4, 32), (3,), 'a b, b c -> a c  (reduce b)')

An error in the text points at the token:

>>> parse_rule("b q, b k -> b (q", (q, k), (q,))
Traceback (most recent call last):
...
jshard._core.errors.RuleError: the rule has a '(' without ')'
  where: b q, b k -> b (q
                       ^
  write instead: close the group, as in "(a b) c -> a b c"
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence

from jshard._core.argument_checks import checked
from jshard._core.errors import RuleError
from jshard._core.jax_types import Params, Primitive
from jshard._core.layout import ArrayType
from jshard._rules.factors import validate
from jshard._rules.registry import REGISTRY, LocalFunction, OpView, RuleEntry
from jshard._rules.rule import Rule


_LEGAL = 'operands, "->", results: "b m k, b k n -> b m n"'
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*\Z")
_REDUCERS = ("sum", "max", "min", "prod", "and", "or")


@dataclasses.dataclass(frozen=True)
class Token:
    """One dimension of the text: its factors' names (empty: never sharded) and its position."""

    names: tuple[str, ...]
    start: int
    compound: bool


@dataclasses.dataclass(frozen=True)
class RuleText:
    """A parsed rule text: a list of tokens for each operand and result."""

    text: str
    operands: tuple[tuple[Token, ...], ...]
    results: tuple[tuple[Token, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All factors in order of appearance."""
        tokens = [t for tensor in self.operands + self.results for t in tensor]
        return tuple(dict.fromkeys(n for t in tokens for n in t.names))


def _text_error(what: str, text: str, at: int, fix: str) -> RuleError:
    # `ShardError` prints "  where: ", nine columns, before the text.
    return RuleError(what, where=f"{text}\n{' ' * (9 + at)}^", fix=fix)


def tokenize(text: str) -> RuleText:
    """Parse the syntax of a rule text, without sizes.

    >>> tokenize("(a b) c -> a b c").names
    ('a', 'b', 'c')

    Raises: `RuleError` that points at the first wrong token.
    """
    if not isinstance(text, str):
        raise RuleError(f"a rule is a string or a function, not {type(text).__name__}", fix=_LEGAL)
    arrows = [m.start() for m in re.finditer("->", text)]
    if len(arrows) != 1:
        what = "the rule has no '->'" if not arrows else "the rule has more than one '->'"
        raise _text_error(what, text, arrows[1] if arrows else len(text), _LEGAL)
    left, right = text[: arrows[0]], text[arrows[0] + 2 :]
    return RuleText(text, _parse_side(text, left, 0), _parse_side(text, right, arrows[0] + 2))


def _parse_side(text: str, side: str, offset: int) -> tuple[tuple[Token, ...], ...]:
    if not side.strip():
        return ()
    tensors, start = [], offset
    for part in side.split(","):
        tensors.append(_parse_tensor(text, part, start))
        start += len(part) + 1
    return tuple(tensors)


def _parse_tensor(text: str, part: str, offset: int) -> tuple[Token, ...]:
    tokens: list[Token] = []
    group: list[str] | None = None
    opened = 0
    for m in re.finditer(r"\(|\)|[^\s()]+", part):
        word, at = m.group(), offset + m.start()
        if word == "(":
            if group is not None:
                raise _text_error(
                    "the rule has a group inside a group", text, at, 'one level only: "(a b c)"'
                )
            group, opened = [], at
        elif word == ")":
            if group is None:
                raise _text_error(
                    "the rule has a ')' without '('", text, at, 'open the group, as in "(a b) c -> a b c"'
                )
            if not group:
                raise _text_error("the rule has an empty group", text, opened, 'a dimension never cut is "1"')
            tokens.append(Token(tuple(group), opened, True))
            group = None
        elif word in ("1", "_"):
            if group is None:
                tokens.append(Token((), at, False))
        elif not _NAME.match(word):
            raise _text_error(
                f"{word!r} is not a factor",
                text,
                at,
                "letters and digits, a letter first; spaces between factors",
            )
        elif group is not None:
            group.append(word)
        else:
            tokens.append(Token((word,), at, False))
    if group is not None:
        raise _text_error(
            "the rule has a '(' without ')'", text, opened, 'close the group, as in "(a b) c -> a b c"'
        )
    seen: set[str] = set()
    for t in tokens:
        for n in t.names:
            if n in seen:
                raise _text_error(
                    f"factor {n!r} stands twice in one tensor", text, t.start, "each factor once in a tensor"
                )
            seen.add(n)
    return tuple(tokens)


def parse_rule(
    text: str,
    operands: Sequence[ArrayType],
    results: Sequence[ArrayType],
    *,
    reduction: Sequence[str] = (),
    blocked: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    reducer: str = "sum",
    work: float = 1.0,
) -> Rule:
    """The rule of a text for tensors of given shapes.

    Arguments:

    - `text`: as in the module's docstring.
    - `operands`, `results`: anything with a `shape`, in the order of the text.
    - `reduction`: factors that no result carries and whose partial results add up (or combine by `reducer`,
        one of sum, max, min, prod, and, or: all but "sum" the function itself must finish on its blocks).
    - `blocked`: factors that are never sharded although a result carries them.
    - `sizes`: lengths of factors inside groups; one unknown factor per group is derived.
    - `work`: arithmetic operations per point of the iteration space.

    Raises: `RuleError` for a wrong number of operands or dimensions, unknown factors, contradictory sizes, and groups
    without sizes.
    """
    e = tokenize(text)
    if reducer not in _REDUCERS:
        raise RuleError(f"unknown reducer {reducer!r}", where=text, fix="one of " + ", ".join(_REDUCERS))
    _check_ranks(e, "operand", e.operands, operands, 0)
    _check_ranks(e, "result", e.results, results, text.index("->"))
    for what, names in (("reduction", reduction), ("blocked", blocked), ("sizes", sizes or {})):
        for n in names:
            if n not in e.names:
                raise RuleError(
                    f"{what} names the unknown factor {n!r}", where=text, fix="one of " + ", ".join(e.names)
                )
    tensors = list(zip(e.operands + e.results, [*operands, *results], strict=True))
    dimensions = [(t, int(s)) for tokens, a in tensors for t, s in zip(tokens, a.shape, strict=True)]
    lengths = _lengths(text, dimensions, {n: int(s) for n, s in (sizes or {}).items()})
    return _rule(e, lengths, tuple(reduction), tuple(blocked), reducer, work)


def _lengths(text: str, dimensions: Sequence[tuple[Token, int]], sizes: Mapping[str, int]) -> dict[str, int]:
    """The length of every factor, from the dimensions that carry it and the given `sizes`."""
    lengths = dict(sizes)
    groups = [(t, size) for t, size in dimensions if t.compound]
    for t, size in dimensions:
        for n in () if t.compound else t.names:
            if lengths.setdefault(n, size) != size:
                raise _text_error(
                    f"factor {n!r} has size {lengths[n]} and size {size}", text, t.start,
                    "different names for dimensions of different sizes",
                )  # fmt: skip
    # A group determines its one unknown factor, which may in turn be the missing one of another group.
    for _ in groups:
        for t, size in groups:
            unknown = [n for n in t.names if n not in lengths]
            known = math.prod(lengths[n] for n in t.names if n in lengths)
            if len(unknown) == 1 and known and size % known == 0:
                lengths[unknown[0]] = size // known
    for t, size in groups:
        unknown = [n for n in t.names if n not in lengths]
        group = "(" + " ".join(t.names) + ")"
        if unknown:
            raise _text_error(
                f"the sizes of the factors of {group} are not known: {', '.join(unknown)}", text, t.start,
                f"sizes={{{unknown[0]!r}: ...}}, so that {group} multiplies to {size}",
            )  # fmt: skip
        if math.prod(lengths[n] for n in t.names) != size:
            product = " * ".join(str(lengths[n]) for n in t.names)
            raise _text_error(
                f"the factors of {group} multiply to {product}, not {size}",
                text,
                t.start,
                "sizes that multiply to it",
            )
    return lengths


def _check_ranks(
    e: RuleText, side: str, tensors: Sequence[Sequence[Token]], avals: Sequence[ArrayType], at: int
) -> None:
    if len(tensors) != len(avals):
        what = f"the rule has {len(tensors)} {side}{'s' * (len(tensors) != 1)}, the function {len(avals)}"
        raise _text_error(what, e.text, at, f"one group of factors for each {side}, separated by commas")
    for i, (tokens, a) in enumerate(zip(tensors, avals, strict=True)):
        if len(tokens) != len(a.shape):
            start = tokens[0].start if tokens else at
            what = f"{side} {i} has shape {tuple(a.shape)}, the rule gives it {len(tokens)} dimensions"
            raise _text_error(
                what, e.text, start, "one token for each dimension; 1 for one that is never cut"
            )


def _rule(
    e: RuleText,
    lengths: Mapping[str, int],
    reduction: Sequence[str],
    blocked: Sequence[str],
    reducer: str,
    work: float,
) -> Rule:
    """The rule of a parsed text with known factor lengths."""
    index = {n: k for k, n in enumerate(e.names)}
    for n in reduction:
        in_results = [t for tensor in e.results for t in tensor if n in t.names]
        if in_results:
            raise _text_error(
                f"factor {n!r} is a reduction and stands in a result", e.text, in_results[0].start,
                "reduction factors stand in operands only",
            )  # fmt: skip
    carried = {n for tensor in e.results for t in tensor for n in t.names}
    read = {n for tensor in e.operands for t in tensor for n in t.names}
    unsharded = [n for n in e.names if n in blocked or (n not in carried and n not in reduction)]
    for tensor in e.results:
        for t in tensor:
            for n in t.names:
                if n not in read and n not in blocked:
                    raise _text_error(
                        f"unknown factor {n!r}: no operand has it", e.text, t.start,
                        f"a factor of an operand, or blocked=({n!r},) for a dimension the function makes",
                    )  # fmt: skip

    def dims(tensor: Sequence[Token]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(index[n] for n in t.names) for t in tensor)

    return Rule(
        tuple(map(dims, e.operands)), tuple(map(dims, e.results)), tuple(lengths[n] for n in e.names),
        reduction=tuple(index[n] for n in reduction), blocked=tuple(index[n] for n in unsharded),
        reducer=reducer, work=work,
    )  # fmt: skip


@checked
def register_rule(
    primitive: str | Primitive,
    rule: str | Callable[[OpView], Rule],
    *,
    reduction: Sequence[str] = (),
    blocked: Sequence[str] = (),
    sizes: Mapping[str, int] | Callable[[Params], Mapping[str, int]] | None = None,
    reducer: str = "sum",
    work: float = 1.0,
    local: LocalFunction | None = None,
) -> None:
    """Register the sharding rule of a primitive of your own or of another library.

    >>> register_rule("my_scaled_add", "m n, m n, n -> m n")
    >>> register_rule("my_scaled_add", "m n, m n, n -> m n")
    Traceback (most recent call last):
    ...
    jshard._core.errors.RuleError: primitive 'my_scaled_add' already has a rule (family 'user')
      where: register_rule
      write instead: register a rule once for each primitive

    Arguments:

    - `primitive`: its name, or the primitive object.
    - `rule`: the text, or a function from the operator (`params`, `ins`, `outs`) to a `Rule`.
    - `reduction`, `blocked`, `sizes`, `reducer`, `work`: as for `parse`; `sizes` may be a function of the
        operator's parameters.
    - `local`: `(context, *shards) -> results` on one device's shards; by default the primitive itself with the same
        parameters, which is correct unless they contain shapes or positions.

    Raises: `RuleError` for an error in the text, a name that already has a rule, something that is no primitive.
    """
    name = primitive if isinstance(primitive, str) else getattr(primitive, "name", None)
    if not isinstance(name, str) or not name:
        raise RuleError(
            f"{primitive!r} is not a primitive",
            where="register_rule",
            fix="its name, or the primitive object",
        )
    if not isinstance(rule, str):
        if not callable(rule):
            raise RuleError(
                f"a rule is a string or a function, not {type(rule).__name__}",
                where="register_rule",
                fix=_LEGAL,
            )
        REGISTRY.add(name, RuleEntry("user", rule, local))
        return
    text = rule
    tokenize(text)  # raises errors in the text now, not at the first plan

    def from_text(op: OpView) -> Rule:
        lengths = sizes(op.params) if callable(sizes) else sizes
        r = parse_rule(
            text,
            op.ins,
            op.outs,
            reduction=reduction,
            blocked=blocked,
            sizes=lengths,
            reducer=reducer,
            work=work,
        )
        validate(r, op)
        return r

    REGISTRY.add(name, RuleEntry("user", from_text, local))
