"""Laws of padding: a padded program computes what the program computes, on one device and on several.

A seeded sample; `benchmarks/correctness/padding.py` runs all operators, sizes and numbers of devices.
"""

from __future__ import annotations

import pathlib
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from jshard._core import jaxcompat as compat
from jshard._plan.padded_program import padded_program
from jshard._plan.padding_classes import PaddingClasses
from tests.helpers.rules_examples import EXAMPLES
from tests.laws.padding_judge import ONE_PROGRAM, judge
from tests.laws.padding_programs import PROGRAMS, step_of
from tests.laws.rules_validator import cases


SEED = 20


@pytest.fixture
def _float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("name", ["reductions", "dots", "gathers", "scatters", "convolutions", "windows"])
def test_operators_ignore_what_stands_in_the_padding(name: str) -> None:
    fn, *args = EXAMPLES[name]()
    found = cases(fn, *args)
    verdicts = [judge(case) for case in random.Random(SEED).sample(found, min(3, len(found)))]
    assert sum(v.tried for v in verdicts) > 0
    assert [w for v in verdicts for w in v.wrong] == []


@pytest.mark.parametrize("primitive", ["rounded_sum", "zero_unless", "add_to_round"])
def test_sums_of_pipelines_ignore_what_stands_in_the_padding(primitive: str) -> None:
    fn, *args = EXAMPLES["stages"]()
    verdicts = [judge(case) for case in cases(fn, *args) if case.op.primitive == primitive]
    assert sum(v.tried for v in verdicts) > 1
    assert [w for v in verdicts for w in v.wrong] == []


def test_shifts_of_random_keys_keep_their_length() -> None:
    """`make_jaxpr` takes no keys by their type, so that moving them raised a TypeError."""
    keys = jax.random.split(jax.random.key(SEED), 16)
    found = cases(lambda k: (k[1:12], k[::-1], jnp.concatenate([k[8:], k])), keys)
    verdicts = {case.op.primitive: judge(case) for case in found}
    assert {"slice", "rev", "concatenate"} <= set(verdicts)
    assert [w for v in verdicts.values() for w in v.wrong] == []


def padded_everywhere(fn, args, multiple: int, size: int):
    closed = jax.make_jaxpr(fn)(*args)
    classes = PaddingClasses(closed, frozenset([size]))
    sizes = {(c.size, c.number): -(-c.size // multiple) * multiple for c in classes.all()}
    assert sizes
    return compat.as_function(padded_program(closed, sizes, classes))


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients_of_a_padded_program(name: str, _float64: None) -> None:
    n = random.Random(f"{SEED} {name}").choice([7, 13])
    fn, *args = PROGRAMS[name](n)
    step = step_of(fn, args)
    both = step, padded_everywhere(step, args, 8, n)
    want, got = (jax.tree.leaves(jax.jit(f, compiler_options=ONE_PROGRAM)(*args)) for f in both)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("narrow", "wide", "masked"),
    [
        ("bfloat16", "float32", "bfloat16"),
        ("float8_e4m3fn", "float32", "float32"),  # it has no infinity
        ("float32", "bfloat16", "bfloat16"),
        ("int8", "float32", "float32"),
    ],
)
def test_a_maximum_is_masked_before_a_conversion_where_that_is_the_same(
    narrow: str, wide: str, masked: str
) -> None:
    def f(x):
        y = x.astype(wide)
        return jnp.max(y, 1), jnp.sum(y, 1), jnp.prod(y / 8, 1)

    x = -jnp.asarray(np.random.default_rng(SEED).integers(1, 9, (4, 7)), narrow)
    closed = jax.make_jaxpr(f)(x)
    padded = padded_program(closed, {(7, 0): 8})
    values = [e.params["value"] for e in padded.jaxpr.eqns if e.primitive.name == "mask_tail"]
    dtypes = [e.invars[0].aval.dtype for e in padded.jaxpr.eqns if e.primitive.name == "mask_tail"]
    assert str(dtypes[values.index(-np.inf)]) == masked
    for a, b in zip(compat.as_function(padded)(x), f(x), strict=True):
        np.testing.assert_array_equal(np.asarray(a, "float32"), np.asarray(b, "float32"))


def training_step(w, e, ids):
    def loss(w, e):
        return -jnp.mean(jax.nn.log_softmax(jnp.tanh(e[ids] @ w) @ e.T)[:, 0])

    value, (gw, ge) = jax.value_and_grad(loss, (0, 1))(w, e)
    return value, w - 0.1 * gw, e - 0.1 * ge


def eight_devices():
    return jax.make_mesh((8,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:8])


def test_a_padded_training_step_emits_what_is_planned() -> None:
    rng = np.random.default_rng(SEED)
    w, e = rng.normal(size=(8, 8)).astype("float32"), rng.normal(size=(515, 8)).astype("float32")
    args = (w, e, rng.integers(0, 515, 64))
    step = jshard.shard(padded_everywhere(training_step, args, 8, 515), mesh=eight_devices(), level=1)
    verification = step.plan(*args, verify=True).verification
    assert verification is not None and verification.ok
    for a, b in zip(step(*args), training_step(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_plan_with_padding_is_saved_and_read(tmp_path: pathlib.Path) -> None:
    def f(w, x):
        return jnp.sum(jnp.tanh(x @ w)), w * 2

    rng = np.random.default_rng(SEED)
    w, x = rng.normal(size=(8, 515)).astype("float32"), rng.normal(size=(64, 8)).astype("float32")
    step = jshard.shard(f, mesh=eight_devices(), level=1, config={"pad": True}, in_strategy=(None, (1, 1)))
    plan = step.plan(w, x)
    assert [(n, padded) for n, _, padded in plan.padding] == [(515, 520)]
    assert "padded: 515 to 520 (0.97% padding)" in plan.steps
    assert [row.shape for row in plan.outputs] == [(), (8, 515)]
    plan.save(tmp_path / "plan.json")
    again = jshard.shard(f, plan=jshard.Plan.load(tmp_path / "plan.json"), mesh=plan.jax_mesh)
    for run in (step, again):
        for a, b in zip(run(w, x), f(w, x), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)


def test_a_padded_function_keeps_its_derivative_rules() -> None:
    @jax.custom_jvp
    def twice(x):
        return x * 1.0

    twice.defjvp(lambda p, t: (twice(*p), 2.0 * t[0]))

    def f(w, x):
        return jnp.sum(twice(x @ w))

    w, x = jnp.ones((8, 515)), jnp.ones((64, 8))
    sharded = jshard.shard(f, mesh=eight_devices(), level=1, config={"pad": True}, in_strategy=(None, (1, 1)))
    assert sharded.plan(w, x).padding
    np.testing.assert_allclose(jax.grad(sharded)(w, x), jax.grad(f)(w, x))


def test_a_derivative_rule_around_operators_that_are_not_padded(_float64: None) -> None:
    @jax.custom_vjp
    def f(x):
        return jnp.tanh(x) * jnp.sum(jnp.sort(x, 0)[0] * 2.0)

    f.defvjp(lambda x: (f(x), x), lambda x, g: (g * jnp.cos(x),))
    x = np.random.default_rng(SEED).normal(size=(13, 3))
    np.testing.assert_allclose(padded_everywhere(f, (x,), 8, 13)(x)[0], f(x), rtol=1e-12)


@pytest.mark.parametrize("layers, width", [(7, 7), (7, 8), (8, 7)])
def test_a_scan_over_stacked_layers_keeps_its_length(layers: int, width: int, _float64: None) -> None:
    def step(w, x):
        def loss(w):
            y, states = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), h), x, w)
            return jnp.sum(y**2) + jnp.sum(jnp.cos(states) * 2)

        value, g = jax.value_and_grad(loss)(w)
        return value, w - 0.1 * g, jnp.sum(w, 0)

    rng = np.random.default_rng(SEED)
    args = rng.normal(size=(layers, width, width)), rng.normal(size=(4, width))
    for got, want in zip(padded_everywhere(step, args, 8, 7)(*args), step(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


def test_an_update_at_a_literal_index(_float64: None) -> None:
    def f(x, y):
        x = jax.lax.dynamic_update_slice(x, y[:1], (11, 0))
        return jax.lax.dynamic_update_slice(x, y[:1] + 1, (12, 0))

    x, y = (np.random.default_rng(k).normal(size=(n, 3)) for k, n in ((0, 13), (1, 2)))
    np.testing.assert_allclose(padded_everywhere(f, (x, y), 8, 13)(x, y)[0], f(x, y))


def head(w, x, labels):
    logp = jax.nn.log_softmax((x @ w).astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logp, labels[:, None], 1))


def planned(words: int, **options):
    shapes = [((512, words), jnp.bfloat16), ((64, 512), jnp.bfloat16), ((64,), jnp.int32)]
    mesh = jshard.topology("v5e:4x4", {"x": 4, "y": 4}, compiles=False)
    args = [jax.ShapeDtypeStruct(*s) for s in shapes]
    return jshard.shard(head, mesh=mesh, level=2, **options).plan(*args)


def test_a_vocabulary_that_does_not_divide_is_padded() -> None:
    whole, padded = planned(50257, config={"pad": False}), planned(50257)
    assert whole.padding == () and padded.padding == ((50257, 0, 50272),)
    assert padded.cost.objective < 0.8 * whole.cost.objective
    assert planned(50304).padding == ()


def test_the_option_is_checked() -> None:
    fix = (
        'config={"pad": False} to pad nothing, True to pad small tensors too, paths to pad arguments at rest'
    )
    with pytest.raises(jshard.ShardError, match="pad is a str, 'yes'") as caught:
        jshard.shard(head, config={"pad": "yes"})
    assert caught.value.fix == fix
