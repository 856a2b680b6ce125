"""Every sharding rule against its operator on four devices, and laws of all rules.

The check is `rules_validator`; `benchmarks/correctness/rules.py` runs it in full, on 2, 4 and 8 devices and for missing
cuts.
Here each primitive is tried on a few operators with a few candidates.
"""

from __future__ import annotations

import functools
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct as S

from jshard._core.layout import MeshAxes
from jshard._rules.lookup import rules_for
from jshard._rules.primitives.opaque_operators import OPAQUE
from jshard._rules.primitives.random import counts
from jshard._rules.primitives.reshape import common_factors
from jshard._rules.registry import REGISTRY, OpView
from jshard._rules.rule import candidates, operand_layouts, result_layouts
from tests.helpers import rules_examples as examples
from tests.laws import rules_validator as validator


# Primitives whose local function does more than run the primitive are tried on more operators.
_PLAIN, _LOCAL = 1, 3


@functools.cache
def _cases(name: str) -> tuple[validator.Case, ...]:
    fn, *args = examples.EXAMPLES[name]()
    return tuple({c.key: c for c in validator.cases(fn, *args)}.values())


def _selection(name: str) -> list[validator.Case]:
    """A few operators of each primitive in one example, spread over the list."""
    by_primitive: dict[str, list[validator.Case]] = defaultdict(list)
    for c in _cases(name):
        by_primitive[c.op.primitive].append(c)
    out = []
    alike = 0
    for primitive, some in by_primitive.items():
        entry = REGISTRY.get(primitive)
        # One function gives the rule of all pointwise operators: where no partial sum passes, a few will do.
        if entry is not None and entry.family == "elementwise" and not rules_for(some[0].op)[0].linear:
            alike += 1
            if alike > 4:
                continue
        n = _LOCAL if entry is not None and entry.local_impl is not None else _PLAIN
        out += some[:: max(1, len(some) // n)][:n]
    return out


@pytest.mark.parametrize("name", examples.EXAMPLES)
def test_candidates_equal_the_plain_operator(name: str) -> None:
    tried, wrong = validator.check(_selection(name), 4, limit=2, seed=len(name))
    assert not wrong, "\n".join(wrong)
    assert tried or name == "randoms_rbg"


@pytest.mark.parametrize("name", ["gathers", "scatters", "randoms", "reductions", "arg_reductions", "iotas"])
def test_blocks_are_typed_by_their_layout(name: str) -> None:
    local = [c for c in _selection(name) if getattr(REGISTRY.get(c.op.primitive), "local_impl", None)]
    tried, wrong = validator.check(local, 4, limit=2, vma=True)
    assert not wrong, "\n".join(wrong)
    assert tried


def test_the_judge_finds_a_wrong_rule() -> None:
    """A judge that never condemns proves nothing: sort with its dimension set free must fail."""
    from jshard._rules.rule_text import register_rule

    case = validator.cases(lambda x: jnp.sort(x, 0), examples.floats(8))[0]
    register_rule("jshard_test_sort", "a -> a")
    op = OpView("jshard_test_sort", case.op.params, case.op.ins, case.op.outs)
    lying = validator.Case(op, case.eqn, case.values)
    tried, wrong = validator.check([lying], 2)
    assert tried == 1 and len(wrong) == 1 and "differs" in wrong[0]


def test_the_judge_finds_a_missing_rule() -> None:
    from jshard._rules.rule_text import register_rule

    case = validator.cases(jnp.sin, examples.floats(8, 4))[0]
    register_rule("jshard_test_shy", "a _ -> a _")
    op = OpView("jshard_test_shy", case.op.params, case.op.ins, case.op.outs)
    shy = validator.Case(op, case.eqn, case.values)
    _, found = validator.missing(shy)
    assert len(found) == 1 and "operands cut at (1,) give results (1,)" in found[0]
    assert validator.missing(case)[1] == []


def test_gradients_pass_through_finished_reductions() -> None:
    """max over a cut dimension differentiates as in the plain program, ties included."""
    x = examples.floats(8, 8).at[3].set(examples.floats(8, 8)[2])
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    case = validator.cases(lambda x: x.max(0), x)[0]
    rule, entry = rules_for(case.op)
    assert entry is not None and entry.local_impl is not None
    from jshard._rules.registry import LocalContext
    from jshard._rules.rule import Candidate

    axes = MeshAxes(("x",), (4,))
    ctx = LocalContext(case.op, rule, Candidate((0,)), axes, case.bind)
    P = jax.P
    f = jax.shard_map(
        lambda b: entry.local_impl(ctx, b)[0], mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=True
    )
    t = examples.floats(8, seed=5)
    want = jax.grad(lambda x: (x.max(0) * t).sum())(x)
    got = jax.jit(jax.grad(lambda x: (f(x) * t).sum()))(x)
    np.testing.assert_allclose(got, want, rtol=1e-6)


ZOO = [
    ("reshape", {"new_sizes": (0, 4), "dimensions": None}, ((4, 0),), ((0, 4),)),
    ("reshape", {"new_sizes": (), "dimensions": None}, ((1, 1),), ((),)),
    ("add", {}, ((), ()), ((),)),
    ("add", {}, ((0, 3), (0, 3)), ((0, 3),)),
    ("broadcast_in_dim", {"shape": (1, 4), "broadcast_dimensions": ()}, ((),), ((1, 4),)),
    ("reduce_sum", {"axes": ()}, ((),), ((),)),
    ("reduce_sum", {"axes": (0,)}, ((0, 4),), ((4,),)),
    ("dot_general", {"dimension_numbers": (((0,), (0,)), ((), ()))}, ((0,), (0,)), ((),)),
    ("concatenate", {"dimension": 0}, ((0, 2), (4, 2)), ((4, 2),)),
    ("cumsum", {"axis": 0, "reverse": False}, ((1,),), ((1,),)),
    ("slice", {"start_indices": (0,), "limit_indices": (0,), "strides": None}, ((4,),), ((0,),)),
    ("squeeze", {"dimensions": (-1, 0)}, ((1, 4, 1),), ((4,),)),
    ("tile", {"reps": (0, 2)}, ((4, 2),), ((0, 4),)),
]


@pytest.mark.parametrize(("primitive", "params", "ins", "outs"), ZOO)
def test_zero_size_scalars_and_size_one(primitive: str, params: dict, ins: tuple, outs: tuple) -> None:
    op = OpView(primitive, params, tuple(S(s, "float32") for s in ins), tuple(S(s, "float32") for s in outs))
    rule, entry = rules_for(op)
    assert entry is not None, rule.note
    mesh = MeshAxes(("x", "y"), (2, 2))
    for c in candidates(rule, mesh):
        for layouts, shapes in ((operand_layouts(rule, c, mesh), ins), (result_layouts(rule, c, mesh), outs)):
            assert all(lay.divides(s, mesh) for lay, s in zip(layouts, shapes, strict=True))


RESHAPES = {
    ((32, 64), (32, 64)): "a b -> a b",
    ((32, 64), (2048,)): "a b -> (a b)",
    ((2048,), (32, 64)): "(a b) -> a b",
    ((8, 2), (4, 4)): "(a b) c -> a (b c)",
    ((1, 8), (8, 1, 1)): "() a -> a () ()",
    ((), (1,)): " -> ()",
    ((2, 3, 4), (2, 12)): "a b c -> a (b c)",
    ((5, 7), (7, 5)): "a b -> c d",
}


@pytest.mark.parametrize("shapes", RESHAPES)
def test_reshapes(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    assert str(common_factors(*shapes)) == RESHAPES[shapes]


def test_positions_beyond_32_bits() -> None:
    """Random bits of arrays of more than 2**32 elements: both words of each position."""
    whole = (7, 2**20, 3, 2**13)
    strides = (2**33 * 3, 3 * 2**13, 2**13, 1)
    offsets = (5, 2**20 - 4, 1, 2**13 - 2)
    high, low = counts((2, 3, 2, 2), offsets, strides, wide=True)
    for i in np.ndindex(2, 3, 2, 2):
        at = sum((o + k) * s for o, k, s in zip(offsets, i, strides, strict=True))
        assert at < np.prod(whole, dtype=object)
        assert (int(high[i]), int(low[i])) == (at >> 32, at & 0xFFFFFFFF)


# jax_facts.md, section 7: primitives of third-party models, without control flow and without pins of jshard.
FACTS = """
add broadcast_in_dim convert_element_type div dot_general integer_pow lt mul pow reduce_sum select_n sqrt sub
transpose add_any reshape max neg eq gt stop_gradient exp reduce_max slice copy iota rsqrt square and gather
scatter-add concatenate ne ge split pad squeeze random_seed conv_general_dilated tanh random_unwrap logistic erfc
rev cumsum or random_wrap scatter bitcast_convert_type min random_bits random_split reduce_window_max rem
select_and_scatter_add shift_right_logical abs argmax cos random_fold_in le log sign sin stack ceil dynamic_slice
dynamic_update_slice empty2 is_finite log1p maybe_set nextafter nonbatchable not pure_callback reduce_or
reduce_window_sum select_if_vmap sort tile unstack unvmap_any unvmap_max vprim xor one_minus_square polynomial
reshard
""".split()


def test_every_listed_primitive_has_a_rule_or_a_reason() -> None:
    missing = [p for p in FACTS if REGISTRY.get(p) is None]
    assert missing == []
    assert all(OPAQUE.values())


def test_opaque_operators_say_why() -> None:
    rule, entry = rules_for(OpView("pure_callback", {}, (S((4,), "int8"),), (S((4,), "int8"),)))
    assert rule.opaque and entry is not None and rule.note == "a Python callback sees whole arrays"
    rule, entry = rules_for(OpView("never_seen", {}, (S((4,), "int8"),), (S((4,), "int8"),)))
    assert rule.opaque and entry is None and rule.note == "no rule for primitive 'never_seen'"
