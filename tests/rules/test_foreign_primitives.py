"""Rules of primitives that no program of the tests traces to, asked directly: what they cut, and what they reduce."""

import jax
import jax.numpy as jnp
import pytest

from jshard._rules.lookup import rules_for
from jshard._rules.registry import OpView
from jshard._rules.rule import Rule


def a(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def rule_of(primitive: str, ins: list, outs: list, **params) -> Rule:
    return rules_for(OpView(primitive, params, tuple(ins), tuple(outs), (None,) * len(ins)))[0]


@pytest.mark.parametrize(
    "primitive, reducer", [("unvmap_any", "or"), ("unvmap_all", "and"), ("unvmap_max", "max")]
)
def test_unvmap_reduces_every_dimension(primitive: str, reducer: str) -> None:
    """equinox's reductions over all that vmap added: each dimension may be cut, and the results are combined."""
    rule = rule_of(primitive, [a(8, 4, dtype="bool")], [a(dtype="bool")])
    assert rule.operands == (((0,), (1,)),) and rule.results == ((),)
    assert rule.reduction == (0, 1) and rule.reducer == reducer


def test_scales_of_a_scaled_product_are_cut_with_the_rows_they_belong_to() -> None:
    """Blocks of the contracted dimension share a scale, so neither is cut; rows, columns and batch are."""
    x, w, out = a(4, 8, 32), a(4, 16, 32), a(4, 8, 16)
    rule = rule_of(
        "scaled_dot", [x, w, a(4, 8, 1), a(4, 16, 1)], [out], dimension_numbers=(((2,), (2,)), ((0,), (0,)))
    )
    batch, rows, columns = (rule.results[0][d][0] for d in range(3))
    assert [rule.sizes[f] for f in (batch, rows, columns)] == [4, 8, 16]
    assert rule.operands[0][:2] == ((batch,), (rows,)) and rule.operands[1][:2] == ((batch,), (columns,))
    assert rule.operands[2] == ((batch,), (rows,), ()) and rule.operands[3] == ((batch,), (columns,), ())
    contracted = rule.operands[0][2][0]
    assert contracted in rule.blocked and rule.operands[1][2] == (contracted,) and not rule.reduction


def test_a_bitcast_to_a_narrower_type_keeps_its_new_dimension_whole() -> None:
    rule = rule_of("bitcast_convert_type", [a(8, 4)], [a(8, 4, 4, dtype="uint8")], new_dtype=jnp.uint8)
    assert rule.operands == (((0,), (1,)),) and rule.results == (((0,), (1,), ()),)


def test_the_index_of_a_platform_is_the_same_everywhere() -> None:
    rule = rule_of("platform_index", [], [a(dtype="int32")], platforms=(("cpu",), None))
    assert rule.results == ((),) and rule.work == 0.0
