"""Callbacks of every kind run once, on whole arrays, and the ordered ones in order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import jshard


X = jnp.arange(16.0)


def heard(f, *args):
    """What the callbacks of `f(tell, ...)` were told, and the result."""
    told = []

    def tell(x):
        told.append(np.array(x))
        return np.float32(np.sum(x))

    out = jshard.shard(lambda x: f(tell, x), ((8,),))(*args)
    jax.effects_barrier()
    return told, out


SCALAR = jax.ShapeDtypeStruct((), "float32")
KINDS = {
    "debug.callback": lambda tell, x: (jax.debug.callback(tell, x), x)[1],
    "debug.callback, ordered": lambda tell, x: (jax.debug.callback(tell, x, ordered=True), x)[1],
    "io_callback": lambda tell, x: x + 0 * io_callback(tell, SCALAR, x),
    "io_callback, ordered": lambda tell, x: x + 0 * io_callback(tell, SCALAR, x, ordered=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_callback_sees_the_whole_array_once(kind):
    told, out = heard(KINDS[kind], X)
    assert len(told) == 1
    np.testing.assert_array_equal(told[0], X)
    np.testing.assert_array_equal(out, X)


def test_ordered_callbacks_come_in_order():
    def f(tell, x):
        for i in range(6):
            jax.debug.callback(tell, x * i, ordered=True)
        return jax.lax.scan(
            lambda c, _: ((jax.debug.callback(tell, c, ordered=True), c + 1)[1], None), x, None, 3
        )[0]

    told, out = heard(f, X)
    np.testing.assert_array_equal([t[1] for t in told], [0, 1, 2, 3, 4, 5, 1, 2, 3])
    np.testing.assert_array_equal(out, X + 3)


@pytest.mark.parametrize("ordered", [False, True])
def test_print(ordered, capsys):
    def f(x):
        jax.debug.print("sum {}, first {y}", x.sum(), y=x[0], ordered=ordered)
        return x * 2

    np.testing.assert_array_equal(jshard.shard(f, ((8,),))(X), X * 2)
    jax.effects_barrier()
    assert capsys.readouterr().out == "sum 120.0, first 0.0\n"


def test_a_pure_callback_gives_its_result_to_all_devices():
    told, out = heard(lambda tell, x: x + jax.pure_callback(tell, SCALAR, x), X)
    np.testing.assert_array_equal(out, X + 120)


def test_gradients_pass_by_an_ordered_callback():
    told = []
    f = jshard.shard(lambda x: (jax.debug.callback(told.append, x, ordered=True), (x * x).sum())[1], ((8,),))
    np.testing.assert_array_equal(jax.grad(f)(X), 2 * X)
    jax.effects_barrier()
    assert len(told) == 1


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.jit])
def test_callbacks_in_a_loop_survive_gradients_from_outside(ordered, wrap):
    def f(tell, x):
        @wrap
        def turn(c, _):
            jax.debug.callback(tell, c, ordered=ordered)
            return jnp.sin(c) + 1, None

        return jnp.sum(jax.lax.scan(turn, x, None, 3)[0])

    told, turns = [], [X, jnp.sin(X) + 1, jnp.sin(jnp.sin(X) + 1) + 1]
    g = jshard.shard(lambda x: f(told.append, x), ((8,),))
    np.testing.assert_allclose(jax.grad(g)(X), jax.grad(lambda x: f(lambda _: None, x))(X), rtol=1e-5)
    jax.effects_barrier()
    for turn in turns:
        assert any(np.allclose(t, turn, rtol=1e-5) for t in told)
    assert wrap is jax.checkpoint or len(told) == 3  # a checkpoint runs its turns twice
