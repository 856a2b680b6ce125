"""Every primitive of real models has a rule, or is in the list of opaque ones with its reason."""

import jax
import pytest

from jshard._program.trace import CALL_PRIMITIVES
from jshard._rules import lookup
from jshard._rules.primitives.opaque_operators import OPAQUE
from jshard._rules.registry import REGISTRY
from tests.helpers import rules_examples
from tests.helpers.rules_table import EXAMPLES, NO_EXAMPLE


assert lookup.FAMILIES and rules_examples.EXAMPLES is EXAMPLES

# What 43 models of other people's trace to, forward, backward and optimizer, on JAX 0.10.2 and 0.12.0.1.
LISTED = """
abs add add_any and argmax bitcast_convert_type broadcast_in_dim ceil closed_call concatenate cond
conv_general_dilated convert_element_type copy cos cumsum custom_jvp_call custom_vjp_call div
dot_general dynamic_slice dynamic_update_slice empty2 eq erfc exp gather ge gt integer_pow iota
is_finite jit le log log1p logistic lt max maybe_set min mul ne neg nextafter nonbatchable not
one_minus_square or pad polynomial pow pure_callback random_bits random_fold_in random_seed
random_split random_unwrap random_wrap reduce_max reduce_or reduce_sum reduce_window_max
reduce_window_sum rem remat2 reshape rev rsqrt scan scatter scatter-add select_and_scatter_add
select_if_vmap select_n shift_right_logical sign sin slice sort split sqrt square squeeze stack
stop_gradient sub tanh tile transpose unstack unvmap_any unvmap_max vprim while xor
""".split()


@pytest.mark.parametrize("name", LISTED)
def test_a_listed_primitive_is_known(name):
    assert name in CALL_PRIMITIVES or REGISTRY.get(name) is not None


def test_the_opaque_ones_have_reasons():
    families = {name: REGISTRY.get(name) for name in OPAQUE}
    assert all(entry is not None and entry.family == "other" for entry in families.values())
    assert all(len(reason.split()) > 2 for reason in OPAQUE.values())


def primitives(jaxpr) -> set[str]:
    """Names of all equations, inner programs included."""
    found = set()
    for e in jaxpr.eqns:
        found.add(e.primitive.name)
        inner = jax.tree.leaves(
            list(e.params.values()), is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
        )
        for p in inner:
            if hasattr(p, "eqns") or hasattr(p, "jaxpr"):
                found |= primitives(getattr(p, "jaxpr", p))
    return found


def test_every_rule_has_an_example_or_a_reason_for_none():
    seen = set()
    for make in EXAMPLES.values():
        fn, *args = make()
        seen |= primitives(jax.jit(fn).trace(*args).jaxpr)
    # Other tests, run before in the same process, register rules as users do; jshard answers for its own.
    own = {n for n in REGISTRY.names() if (entry := REGISTRY.get(n)) is not None and entry.family != "user"}
    without = {n for n in own if n not in seen and n not in OPAQUE}
    assert not without - set(NO_EXAMPLE)
    assert set(NO_EXAMPLE) <= own
