"""Common subexpressions are merged, loop invariants leave their loops, and known trip counts are found."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import jshard
from jshard._program.graph import Program
from jshard._program.trace import build
from tests.helpers.loop_programs import nest


def traced(f, *args) -> Program:
    return build(jax.jit(f).trace(*args).jaxpr, name="f", input_names=[])


def primitives(p: Program) -> Counter[str]:
    return Counter(op.primitive for op in p.operators if op.kind == "eqn")


X = jnp.ones((8, 4))
LINE = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])


# -- written once ---------------------------------------------------------------------------------------------


def test_a_mean_that_a_variance_takes_again_is_taken_once():
    assert primitives(traced(lambda x: (x.mean(), x.var()), X))["reduce_sum"] == 2  # of x, and of squares
    assert (
        primitives(traced(lambda x: x.astype("bfloat16") + x.astype("bfloat16"), X))["convert_element_type"]
        == 1
    )


def test_what_differs_in_anything_is_written_twice():
    def f(x, y):
        return x.sum(0), x.sum(1), y.sum(0), jnp.sin(x), jnp.sin(y), x * 2.0, x * 3.0

    assert primitives(traced(f, X, X)) == {"reduce_sum": 3, "sin": 2, "mul": 2}


def test_constants_are_written_where_they_are_read_and_what_is_made_of_them_once():
    def f(x):
        mask = lambda: jnp.tril(jnp.ones((4, 4), bool))  # noqa: E731
        weights = lambda: jnp.cos(jnp.arange(8.0)).reshape(4, 2)  # noqa: E731
        return jnp.where(mask(), x[:4], 0), jnp.where(mask(), x[4:], 1), x @ weights(), (2 * x) @ weights()

    found = primitives(traced(f, X))
    assert found["iota"] == 5 and found["reshape"] == 1


def test_what_is_made_of_merged_constants_is_merged():
    """As in models whose layers make one mask again each, from a cumulative sum of constant positions."""

    def f(x):
        positions = lambda: jnp.cumsum(jnp.ones(8))[:, None]  # noqa: E731
        mask = lambda: jnp.where(positions() > jnp.arange(4.0), 0.0, -1.0) * positions()  # noqa: E731
        return jnp.sin(x + mask()) + mask()

    found = primitives(traced(f, X))
    assert (found["cumsum"], found["gt"], found["select_n"], found["mul"]) == (1, 1, 1, 1)
    assert found["iota"] == 1


def test_what_is_kept_apart_on_purpose_stays_apart():
    def f(x):
        a, b = lax.optimization_barrier(x), lax.optimization_barrier(x)
        c, d = (jax.pure_callback(np.sin, x, x) for _ in range(2))
        return a + b, c + d

    assert primitives(traced(f, X)) == {"optimization_barrier": 2, "pure_callback": 2, "add": 2}


def test_a_rematerialised_body_does_not_share_with_what_is_around_it():
    def f(x):
        return jnp.sum(jnp.sin(x)) + jax.checkpoint(lambda x: jnp.sin(x).sum())(x)

    assert primitives(traced(jax.grad(f), X))["cos"] == 2


def test_pins_of_equal_operators():
    """Pinned alike they are one; pinned otherwise they are two."""
    same = lambda x: jshard.op(jnp.sin, ((2, 1),))(x) + jshard.op(jnp.sin, ((2, 1),))(x)  # noqa: E731
    other = lambda x: jshard.op(jnp.sin, ((2, 1),))(x) + jshard.op(jnp.sin, ((1, 2),))(x)  # noqa: E731
    assert primitives(traced(same, X))["sin"] == 1 and primitives(traced(other, X))["sin"] == 2


def test_equal_loops_are_one():
    def f(x):
        loop = lambda: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)[0]  # noqa: E731
        return loop() + loop()

    assert primitives(traced(f, X)) == {"sin": 1, "add": 1}


@pytest.mark.parametrize(
    "other", [lambda x: (x, 0 * x, 0 * x), lambda x: (x, jnp.zeros_like(x), jnp.zeros_like(x))]
)
def test_equal_values_that_branches_return_and_loops_stack_are_one(other):
    """A layer under `lax.cond` hands two equal values to its backward pass; XLA keeps, stacks and moves one."""

    def f(w, x):
        def layer(h, w):
            h, a, b = lax.cond(h[0, 0] > 0, lambda h: (h @ w, jnp.sin(h), jnp.sin(h)), other, h)
            return h, (a, b)

        return lax.scan(lambda h, ab: (h + ab[0] * ab[1], None), *lax.scan(layer, x, w))[0]

    args = jnp.ones((3, 4, 4)) / 3, X
    p = traced(f, *args)
    read = {a for op in p.operators for a in op.operands if isinstance(a, int)}
    for kind, used in (("cond_join", 2), ("scan_ys", 1), ("scan_xs", 2)):  # of h, a, b; of a, b; of w, a, b
        found = [op for op in p.operators if op.kind == kind]
        assert sum(op.results[0] in read for op in found) == used < len(found), kind
    np.testing.assert_allclose(jshard.shard(f, mesh=LINE)(*args), f(*args), rtol=1e-6)


def test_values_and_gradients_are_those_of_the_plain_program():
    def f(w, x):
        h = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1)
        return (
            h @ w.astype("bfloat16").astype("float32") + (h * 2) @ w.astype("bfloat16").astype("float32")
        ).sum()

    rng = np.random.default_rng(1)
    w, x = (rng.normal(size=s).astype("float32") for s in ((8, 8), (16, 8)))
    sharded = jshard.shard(f, (None, (8, 1)))
    for got, want in zip(jax.grad(sharded, (0, 1))(w, x), jax.grad(f, (0, 1))(w, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-2, atol=1e-3)


# -- what never changes in a loop -----------------------------------------------------------------------------


def loops(p: Program) -> dict[str, float]:
    return {op.primitive: op.repeat for op in p.operators if op.kind == "eqn"}


def test_what_a_loop_computes_of_its_constants_is_computed_before_it():
    def f(x, w):
        return lax.scan(lambda c, _: (jnp.sin(c) * (w / w.sum()), None), x, None, length=5)[0]

    assert loops(traced(f, X, X)) == {"reduce_sum": 1.0, "div": 1.0, "sin": 5.0, "mul": 5.0}


def test_it_leaves_nested_loops_calls_and_tests_too():
    def f(x, w):
        def turn(c, _):
            inner = lambda d, _: (d + jax.jit(lambda w, d: jnp.cos(w).sum() + d)(w, d), None)  # noqa: E731
            return lax.scan(inner, c, None, length=3)[0], None

        a = lax.scan(turn, x, None, length=5)[0]
        return lax.while_loop(lambda c: c.sum() < jnp.abs(w).max(), lambda c: c + jnp.tanh(w), a)

    found = loops(traced(f, X, X))
    assert {k: found[k] for k in ("cos", "abs", "tanh", "reduce_max", "lt")} == {
        "cos": 1.0, "abs": 1.0, "tanh": 1.0, "reduce_max": 1.0, "lt": 1.0,
    }  # fmt: skip
    assert found["add"] == 1.0 and 15.0 in {op.repeat for op in traced(f, X, X).operators}


def test_what_makes_more_than_it_reads_what_is_pinned_and_what_prints_stay_in_the_loop():
    def f(x, w):
        def turn(c, _):
            wide = w.astype("bfloat16").astype("float32")  # the wider cast would be held all through the loop
            pinned = jshard.op(lambda v: v, None, (1, 1))(w)
            jax.debug.print("{}", w.sum())
            return jnp.sin(c) * wide * pinned, None

        return lax.scan(turn, x, None, length=5)[0]

    p = traced(f, X, X)
    casts = sorted(op.repeat for op in p.operators if op.primitive == "convert_element_type")
    assert casts == [1.0, 5.0]
    assert {op.primitive: op.repeat for op in p.operators}["jshard_pin_result"] == 5.0
    assert {op.primitive: op.repeat for op in p.operators}[
        "debug_callback" if "debug_callback" in loops(p) else "debug_print"
    ] == 5.0


@pytest.mark.parametrize("reverse", [False, True])
def test_loops_give_the_values_and_gradients_of_the_plain_program(reverse):
    def f(w, x):
        def turn(c, v):
            scale = w / jnp.abs(w).sum()
            inner = lambda d, _: (jnp.tanh(d @ scale) + v, None)  # noqa: E731
            return lax.scan(inner, c, None, length=2)[0], (scale * 2).sum()

        out, sums = lax.scan(turn, x, jnp.arange(3.0), reverse=reverse)
        return (out**2).sum() + sums.sum()

    rng = np.random.default_rng(2)
    w, x = (rng.normal(size=s).astype("float32") for s in ((8, 8), (16, 8)))
    sharded = jshard.shard(f, (None, (8, 1)), level=2)
    np.testing.assert_allclose(sharded(w, x), f(w, x), rtol=1e-5)
    for got, want in zip(jax.grad(sharded, (0, 1))(w, x), jax.grad(f, (0, 1))(w, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    inside = jshard.shard(jax.grad(f), (None, (8, 1)), level=2)
    np.testing.assert_allclose(inside(w, x), jax.grad(f)(w, x), rtol=1e-4, atol=1e-5)


def test_a_loop_whose_every_value_is_constant():
    """A scan without carry or slices, of what never changes: its moves stay in it only where nothing else is left."""
    f = lambda w: lax.scan(lambda c, _: (c, w * 2), None, None, length=4)[1]  # noqa: E731
    w = np.arange(64, dtype="float32").reshape(8, 8)
    sharded = jshard.shard(f, ((8, 1),), (1, 1, 1))
    np.testing.assert_array_equal(sharded(w), f(w))
    v = sharded.plan(w, verify=True).verification
    assert v is not None and v.ok, str(v)


@pytest.mark.parametrize("other", [jax.nn.relu, lambda a: lax.fori_loop(0, 2, lambda i, c: a * 3 + c, a)])
def test_what_leaves_a_loop_of_one_branch_stays_out_of_the_others(other):
    def f(x, y):
        def loop(a):  # x * 0.5 leaves it
            return lax.scan(lambda c, r: (x * 0.5 + c, r), a, y)[0]

        return lax.cond(y[0] > 0, lambda a: other(x), loop, x)

    x = jnp.arange(8.0)
    for y in (jnp.ones(8), -jnp.ones(8)):
        np.testing.assert_allclose(jshard.shard(f, mesh=LINE, level=2)(x, y), f(x, y))


# -- turns that a program says --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "test", "step", "turns"),
    [
        (0, lambda i: i < 5, 1, 5), (0, lambda i: i <= 5, 2, 3), (9, lambda i: i > 0, -2, 5), (9, lambda i: i >= 0, -3, 4),
        (0, lambda i: i != 6, 2, 3), (3, lambda i: 7 > i, 1, 4), (5, lambda i: i < 5, 1, 0), (0, lambda i: i < 5, -1, None),
        (0, lambda i: i != 5, 2, None), (0, lambda i: i * 2 < 5, 1, None),
    ],
)  # fmt: skip
def test_turns_of_a_while_whose_counter_says_them(start, test, step, turns):
    f = lambda x: lax.while_loop(lambda c: test(c[0]), lambda c: (c[0] + step, jnp.sin(c[1])), (start, x))  # noqa: E731
    (call,) = [s for s in traced(f, X).body.steps if not isinstance(s, int)]
    assert call.trip_count == turns
    assert loops(traced(f, X))["sin"] == max(1.0, float(turns or 1))


def test_a_limit_that_is_an_argument_is_not_known():
    f = lambda n, x: lax.fori_loop(0, n, lambda _, c: jnp.sin(c), x)  # noqa: E731
    (call,) = [s for s in traced(f, 5, X).body.steps if not isinstance(s, int)]
    assert call.trip_count is None


@pytest.mark.parametrize("seed", range(9000, 9008))
def test_nests_of_loops_keep_their_values(seed):
    """Found by fuzzing: what left a loop that was itself moved out was known by a place in another body."""
    f, x, y = nest(seed), jnp.linspace(-1, 1, 4), jnp.linspace(0.2, 0.8, 4)
    sharded = jshard.shard(f, (P("x"), None), mesh=LINE)
    for a, b in zip(jax.jit(f)(x, y), sharded(x, y), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_loop_that_leaves_two_loops_is_not_taken_for_another_equation():
    def program(x, y):
        v = jnp.cos(y)

        def outer(state, row):
            def rows(r):
                inner = lambda i, c: c / 2 + jnp.broadcast_to(jnp.einsum("a,a->", v, y), (4, 3))  # noqa: E731
                return lax.fori_loop(0, 3, inner, x)

            made = lax.map(rows, state)
            return state / 2 + jnp.sum(made) * row, made

        return lax.scan(outer, x, y)

    x, y = jnp.arange(12.0).reshape(4, 3) / 12, jnp.linspace(0, 1, 8)
    f = jshard.shard(program, mesh=LINE)
    for a, b in zip(program(x, y), f(x, y), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@jax.custom_vjp
def clipped(x):
    return x * 1.0


clipped.defvjp(lambda x: (x * 1.0, None), lambda _, g: (jnp.clip(g, -1.0, 1.0),))


def halves(x, start):
    return lax.scan(lambda d, _: (d * 0.5 + clipped(x) * 3, None), start, None, length=2)[0]


@pytest.mark.parametrize(
    "name, f",
    [
        ("twice", lambda x: (clipped(x) * 3 + clipped(x) * 5).sum()),
        (
            "in every turn",
            lambda x: lax.scan(lambda c, _: (c + clipped(x) * 3, None), x, None, length=4)[0].sum(),
        ),
        (
            "in a loop in a loop",
            lambda x: lax.scan(lambda c, _: (c + halves(x, x), None), x, None, length=4)[0].sum(),
        ),
        ("in equal loops", lambda x: (halves(x, x) + halves(x, x) * 2).sum()),
    ],
)
def test_reverse_rules_are_applied_to_each_call(name, f):
    """A rule that clips gradients is not linear: it clips what each call and each turn hands back."""
    x = jnp.linspace(-1, 1, 8)
    want = jax.grad(f)(x)
    np.testing.assert_allclose(jax.grad(jshard.shard(f, mesh=LINE))(x), want, rtol=1e-6)
    np.testing.assert_allclose(jshard.shard(jax.grad(f), mesh=LINE)(x), want, rtol=1e-6)


def test_a_branch_in_a_loop_keeps_its_count_to_itself():
    """What a branch ties to the count of turns, so that it stays there, is nothing to what comes after the branch."""

    def gathered(x, w):
        return jnp.tanh(x @ jshard.op(lambda v: v * 1.5, None, (1, 1))(jshard.op(jnp.sin, ((4, 1),))(w)))

    def program(x, w):
        def turn(c, i):
            c = lax.cond(
                i > 1,
                lambda c: gathered(c, w),
                lambda c: lax.fori_loop(0, 2, lambda _, d: gathered(d, w), c),
                c,
            )
            return gathered(c, w), c.sum()

        return lax.scan(turn, x, jnp.arange(4))

    f = jshard.shard(program, (None, (4, 1)), mesh=LINE)
    with jax.enable_x64(True):
        x, w = jnp.ones((8, 8)) / 8, jnp.linspace(-1, 1, 64).reshape(8, 8)
        for a, b in zip(jax.jit(program)(x, w), f(x, w), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)  # sums of what cancels
        text = f.lower(x, w).as_text()
    assert "while" in text


def test_equal_constraints_of_a_value_are_one_and_others_are_not():
    """A function that is called for its value and for its gradient: XLA merges the two, and the gathers in both."""
    rows, columns = (jax.NamedSharding(LINE, P(*s)) for s in (("x", None), (None, "x")))

    def total(x, spec=rows):
        return lax.with_sharding_constraint(jnp.cumsum(lax.with_sharding_constraint(x, spec), 0), spec)

    def both(x):
        return total(x), jax.grad(lambda x: jnp.sin(total(x)).sum())(x)

    found = primitives(traced(both, X))
    assert found["cumsum"] == 2  # of the value, and of the cotangent
    assert found["sharding_constraint"] == 4
    found = primitives(traced(lambda x: (total(x), total(x, columns)), X))
    assert found["cumsum"] == 2
    assert found["sharding_constraint"] == 4
    plan = jshard.shard(both, ((4, 1),), mesh=LINE).plan(X, verify=True)
    assert plan.verification.ok
