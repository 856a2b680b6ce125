"""Rules as text: their meaning, and the exact error texts of malformed ones."""

from __future__ import annotations

import jax
import pytest
from jax import ShapeDtypeStruct as S

from jshard._core.errors import RuleError
from jshard._rules.lookup import rules_for
from jshard._rules.registry import OpView, Registry, RuleEntry
from jshard._rules.rule import Rule
from jshard._rules.rule_text import parse_rule, register_rule, tokenize


X, W, Y = S((4, 8), "float32"), S((8, 2), "float32"), S((4, 2), "float32")
Q, K = S((2, 8, 4, 16), "float32"), S((2, 32, 4, 16), "float32")


def test_a_matmul() -> None:
    rule = parse_rule("m k, k n -> m n", (X, W), (Y,), reduction=("k",), work=2.0)
    want = Rule((((0,), (1,)), ((1,), (2,))), (((0,), (2,)),), (4, 8, 2), reduction=(1,), work=2.0)
    assert rule == want


def test_a_factor_no_result_carries_is_whole() -> None:
    rule = parse_rule("b q h _, b k h _, b k h _ -> b q h _", (Q, K, K), (Q,))
    assert rule.sizes == (2, 8, 4, 32)
    assert rule.blocked == (3,) and rule.reduction == ()


def test_groups_find_their_one_unknown_size() -> None:
    big, small = S((4, 24), "float32"), S((4, 3, 8), "float32")
    assert parse_rule("b (h d) -> b h d", (big,), (small,)).sizes == (4, 3, 8)
    assert parse_rule("b (h d) -> b d", (big,), (S((4, 8), "int8"),)).sizes == (4, 3, 8)
    assert parse_rule("(a b), (b c) -> c", (S((6,), "int8"), S((8,), "int8")), (S((4,), "int8"),)).sizes == (
        3,
        2,
        4,
    )
    flat = parse_rule("(a b) -> (a b)", (S((24,), "int8"),), (S((24,), "int8"),), sizes={"a": 4})
    assert flat.sizes == (4, 6) and flat.results == (((0, 1),),)


def test_scalars_and_several_results() -> None:
    rule = parse_rule("a b, -> a, b a", (X, S((), "int8")), (S((4,), "int8"), S((8, 4), "int8")))
    assert rule.operands == (((0,), (1,)), ()) and rule.results == (((0,),), ((1,), (0,)))
    assert parse_rule("-> a", (), (S((4,), "int8"),), blocked=("a",)).results == (((0,),),)


# Rule, what is wrong, the column it points at, and a part of the fix.
MALFORMED = [
    ("m k, k n", "the rule has no '->'", 8, 'operands, "->", results'),
    ("m k -> k n -> m n", "the rule has more than one '->'", 11, "operands"),
    ("m k -> m n", "the rule has 1 operand, the function 2", 0, "one group of factors"),
    ("m k, k n -> m, n", "the rule has 2 results, the function 1", 9, "one group"),
    ("m k, k -> m n", "operand 1 has shape (8, 2), the rule gives it 1 dimensions", 5, "one token"),
    ("m k, k n -> m z", "unknown factor 'z': no operand has it", 14, "blocked=('z',)"),
    ("m k, m n -> m n", "factor 'm' has size 4 and size 8", 5, "different names"),
    ("m (a b), (a b) n -> m n", "the sizes of the factors of (a b) are not known: a, b", 2, "sizes={'a': "),
    ("m (k, k n -> m n", "the rule has a '(' without ')'", 2, "close the group"),
    ("m k), k n -> m n", "the rule has a ')' without '('", 3, "open the group"),
    ("m ((k)), k n -> m n", "the rule has a group inside a group", 3, "one level only"),
    ("m (), k n -> m n", "the rule has an empty group", 2, "never cut"),
    ("m 2k, k n -> m n", "'2k' is not a factor", 2, "letters and digits"),
    ("m k; k n -> m n", "'k;' is not a factor", 2, "letters and digits"),
    ("m m, k n -> m n", "factor 'm' stands twice in one tensor", 2, "each factor once"),
]


def _points_at(e: RuleError, text: str, what: str, column: int, fix: str) -> None:
    assert e.what == what
    lines = str(e).split("\n")
    assert lines[1] == "  where: " + text
    assert lines[2] == " " * (len("  where: ") + column) + "^"
    assert fix in e.fix and lines[3].startswith("  write instead: ")


@pytest.mark.parametrize(("text", "what", "column", "fix"), MALFORMED)
def test_malformed_rules_point_at_the_token(text: str, what: str, column: int, fix: str) -> None:
    with pytest.raises(RuleError) as e:
        parse_rule(text, (X, W), (Y,))
    _points_at(e.value, text, what, column, fix)


def test_a_group_of_another_size() -> None:
    text = "m (a b), (a b) n -> m n"
    with pytest.raises(RuleError) as e:
        parse_rule(text, (X, W), (Y,), sizes={"a": 2, "b": 3})
    _points_at(e.value, text, "the factors of (a b) multiply to 2 * 3, not 8", 2, "sizes that multiply to it")


def test_a_reduction_in_a_result() -> None:
    text = "m k, k n -> m n"
    with pytest.raises(RuleError) as e:
        parse_rule(text, (X, W), (Y,), reduction=("n",))
    _points_at(e.value, text, "factor 'n' is a reduction and stands in a result", 14, "operands only")


@pytest.mark.parametrize(
    ("keywords", "what", "fix"),
    [
        ({"reduction": ("z",)}, "reduction names the unknown factor 'z'", "one of m, k, n"),
        ({"blocked": ("z",)}, "blocked names the unknown factor 'z'", "one of m, k, n"),
        ({"sizes": {"z": 2}}, "sizes names the unknown factor 'z'", "one of m, k, n"),
        ({"reducer": "mean"}, "unknown reducer 'mean'", "one of sum, max, min, prod, and, or"),
    ],
)
def test_unknown_names_in_keywords(keywords: dict, what: str, fix: str) -> None:
    with pytest.raises(RuleError) as e:
        parse_rule("m k, k n -> m n", (X, W), (Y,), **keywords)
    assert (e.value.what, e.value.where, e.value.fix) == (what, "m k, k n -> m n", fix)


def test_a_rule_is_text_or_a_function() -> None:
    with pytest.raises(RuleError, match="a rule is a string or a function, not int"):
        tokenize(3)  # type: ignore[arg-type]
    with pytest.raises(RuleError, match="a rule is a string or a function, not int"):
        register_rule("jshard_test_int", 3)  # type: ignore[arg-type]
    with pytest.raises(RuleError, match="3 is not a primitive"):
        register_rule(3, "a -> a")


def test_register_text_function_and_object() -> None:
    register_rule("jshard_test_text", "m k, k n -> m n", reduction=("k",), work=2.0)
    rule, entry = rules_for(OpView("jshard_test_text", {}, (X, W), (Y,)))
    assert str(rule) == "a b, b c -> a c  (reduce b)" and entry is not None and entry.family == "user"

    class Primitive:
        name = "jshard_test_object"

    register_rule(Primitive(), "(a b) -> a b", sizes=lambda params: {"a": params["rows"]})
    rule, _ = rules_for(OpView("jshard_test_object", {"rows": 3}, (S((12,), int),), (S((3, 4), int),)))
    assert rule.sizes == (3, 4)

    made = Rule(((),), ((),), ())
    register_rule("jshard_test_function", lambda op: made)
    assert rules_for(OpView("jshard_test_function", {}, (S((), int),), (S((), int),)))[0] is made


def test_malformed_text_fails_at_registration_and_leaves_no_rule() -> None:
    with pytest.raises(RuleError, match="'->'"):
        register_rule("jshard_test_bad", "a b")
    assert (
        rules_for(OpView("jshard_test_bad", {}, (), ()))[0].note == "no rule for primitive 'jshard_test_bad'"
    )


def test_a_rule_registered_twice() -> None:
    register_rule("jshard_test_twice", "a -> a")
    with pytest.raises(RuleError) as e:
        register_rule("jshard_test_twice", "a -> a")
    assert str(e.value) == (
        "primitive 'jshard_test_twice' already has a rule (family 'user')\n"
        "  where: register_rule\n"
        "  write instead: register a rule once for each primitive"
    )
    with pytest.raises(RuleError, match="primitive 'add' already has a rule \\(family 'elementwise'\\)"):
        register_rule("add", "a, a -> a")


def test_one_taken_name_registers_none() -> None:
    registry = Registry()
    entry = RuleEntry("f", lambda op: Rule((), (), ()))
    registry.add("a", entry)
    with pytest.raises(RuleError):
        registry.add(["b", "a"], entry)
    assert registry.names() == ("a",)


def test_a_rule_that_raises_replicates_and_says_so() -> None:
    def broken(op: OpView) -> Rule:
        raise KeyError("axis")

    register_rule("jshard_test_raises", broken)
    rule, entry = rules_for(OpView("jshard_test_raises", {}, (X,), (X,)))
    assert rule.opaque and entry is None
    assert rule.note == "the rule of 'jshard_test_raises' failed: KeyError: 'axis'"


@pytest.mark.parametrize(
    ("rule", "note"),
    [
        (Rule((), (((0,), (1,)),), (4, 8)), "the rule has 0 operands, the operator 1"),
        (Rule((((0,),),), (((0,), (1,)),), (4, 8)), "operand 0 has 2 dimensions, the rule 1"),
        (
            Rule((((0,), (1,)),), (((0,), (1,)),), (4, 4)),
            "operand 0, dimension 1: factors multiply to 4, not 8",
        ),
        (Rule((((0,), (0,)),), (((0,), ()),), (4,)), "operand 0 carries a factor twice"),
        (
            Rule((((0,), (1,)),), (((0,), (1,)),), (4, 8), linear=((1,),)),
            "a linear set names operand 1 of 1",
        ),
        (Rule((((0,), (7,)),), (((0,), (1,)),), (4, 8)), "a tensor names factor 7 of 2"),
        (Rule((((0,), (-1,)),), (((0,), (1,)),), (4, 8)), "a tensor names factor -1 of 2"),
        (Rule((((0,), (1,)),), (((0,), (1,)),), (4, 8), reduction=(9,)), "reduction names factor 9 of 2"),
        (Rule((((0,), (1,)),), (((0,), (1,)),), (4, 8), blocked=(9,)), "blocked names factor 9 of 2"),
        (
            Rule((((0,), (1,)),), (((0,), ()),), (4, 8), reduction=(1,), blocked=(1,)),
            "factor 1 is both a reduction and blocked",
        ),
        (Rule((((0,), (1,)),), (((0,), (1,)),), (4, 8), reducer="avg"), "unknown reducer 'avg'"),
    ],
)
def test_a_rule_that_does_not_fit_replicates_and_says_so(rule: Rule, note: str) -> None:
    name = "jshard_test_misfit_" + str(abs(hash(note)))
    register_rule(name, lambda op: rule)
    got, _ = rules_for(OpView(name, {}, (X,), (X,)))
    assert got.opaque and note in got.note


def test_a_registered_rule_for_a_real_primitive_runs() -> None:
    from jax.extend.core import Primitive

    from tests.laws import rules_validator as validator

    p = Primitive("jshard_test_scaled")
    p.def_impl(lambda x, s: x * s)
    p.def_abstract_eval(lambda x, s: x)
    from jax.interpreters import mlir

    mlir.register_lowering(p, mlir.lower_fun(lambda x, s: x * s, multiple_results=False))
    register_rule(p, "m n, n -> m n")
    x, s = jax.numpy.arange(32.0).reshape(8, 4), jax.numpy.arange(4.0)
    tried, wrong = validator.check(validator.cases(lambda x, s: p.bind(x, s), x, s), 4)
    assert tried == 8 and wrong == []
