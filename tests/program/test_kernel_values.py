"""Which values kernels read from memory: stacks of loops, values that several products would compute."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct as S

from jshard._program.graph import Program
from jshard._program.memory.kernel_fusion import kernels
from jshard._program.memory.kernel_values import stacked_values, stored_for_products
from jshard._program.memory.liveness import liveness
from jshard._program.trace import build


N = 256
BF16 = N * N * 2
X = S((N, N), "bfloat16")


def traced(f, *args) -> Program:
    return build(jax.jit(f).trace(*args).jaxpr, name="f", input_names=[str(k) for k in range(len(args))])


def moved(program: Program, op: int) -> float:
    found = kernels(program)
    return sum(p.nbytes for p in found.parts[op] + found.fused_parts(op))


def the(program: Program, primitive: str) -> int:
    (op,) = [op.id for op in program.operators if op.primitive == primitive]
    return op


def test_a_value_that_a_scan_stacks_is_computed_again_by_its_sum():
    """In a loop the exponentials are written into the stack by a kernel of their own; the sum reads their operand."""

    def turn(c, x):
        e = jnp.exp(x.astype("float32"))
        return c + jnp.sum(e, -1), e

    program = traced(lambda c, xs: jax.lax.scan(turn, c, xs), S((N,), "float32"), S((4, N, N), "bfloat16"))
    exp, total = the(program, "exp"), the(program, "reduce_sum")
    assert stacked_values(program, liveness(program)) == {program.operators[exp].results[0]}
    assert moved(program, exp) == 3 * BF16  # read in bfloat16, written in float32
    assert moved(program, total) == BF16 + 4 * N
    assert kernels(program).launched[exp] and kernels(program).launched[total]


def test_without_a_loop_both_are_one_kernel():
    def f(x):
        e = jnp.exp(x.astype("float32"))
        return jnp.sum(e, -1), e

    found = kernels(traced(f, X))
    assert sum(found.launched) == 1


def test_what_a_scan_stacks_is_read_by_a_reader_that_cannot_compute_it():
    def turn(c, x):
        e = jnp.exp(x)
        return c + jnp.sort(e, -1), e

    program = traced(lambda c, xs: jax.lax.scan(turn, c, xs), S((N, N), "float32"), S((4, N, N), "float32"))
    assert not stacked_values(program, liveness(program))


def test_stacks_that_are_computed_from_one_array_are_written_by_one_kernel():
    """Three residuals of a layer norm: one read, three writes."""

    def turn(c, x):
        return c, (x - 1, 2 * (x - 1), (x - 1) * c)

    program = traced(lambda c, xs: jax.lax.scan(turn, c, xs), S((N, 1), "float32"), S((4, N, N), "float32"))
    found = kernels(program)
    assert sum(found.launched) == 1
    array = N * N * 4
    assert sum(moved(program, op.id) for op in program.operators) == pytest.approx(4 * array, rel=0.01)


@pytest.mark.parametrize("arrays, is_stored", [(1, False), (2, False), (3, True)])
def test_two_products_compute_their_operand_if_they_read_less_than_three_arrays_for_it(arrays, is_stored):
    """Computed twice: 2 n arrays are read. Written once: n are read, one written, and read twice."""

    def f(w, *x):
        y = jnp.tanh(sum(x))
        return y @ w, y.T @ w

    program = traced(f, X, *[X] * arrays)
    stored = liveness(program).materialized
    found = stored_for_products(program, stored)
    (tanh,) = program.operators[the(program, "tanh")].results
    assert found == ({tanh} if is_stored else frozenset())
    products = [op.id for op in program.operators if op.primitive == "dot_general"]
    read = 1 if is_stored else arrays
    assert [moved(program, op) for op in products] == [(read + 2) * BF16] * 2
    assert moved(program, the(program, "tanh")) == ((arrays + 1) * BF16 if is_stored else 0)


def test_of_casts_and_views_the_smallest_is_written():
    """The gradient of a softmax is computed in float32; what two products read of it is bfloat16."""

    def f(w, a, b):
        y = (a * b).astype("bfloat16")
        return y @ w, y.T @ w

    program = traced(f, X, S((N, N), "float32"), S((N, N), "float32"))
    (cast,) = program.operators[the(program, "convert_element_type")].results
    assert stored_for_products(program, liveness(program).materialized) == {cast}


def test_the_epilogue_of_a_product_is_not_computed_in_others():
    """What follows a product needs that product: no kernel computes it again."""

    def f(w, a, b, c, d):
        y = jnp.tanh((a @ w) * b + c * d)
        return y @ w, y.T @ w

    program = traced(f, *[X] * 5)
    assert not stored_for_products(program, liveness(program).materialized)


def test_products_of_a_deep_backward_pass_read_no_terms_of_other_layers():
    """The gradient of a residual stream is a sum over layers; each layer's products read what the layer before wrote."""
    layers = 24

    def loss(weights, x):
        for w, v in weights:
            centred = x - x.mean(-1, keepdims=True)
            y = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
            x = x + jnp.tanh(y @ w) @ v
        return x.sum()

    square = S((N, N), "float32")
    program = traced(lambda weights, x: jax.grad(loss)(weights, x), [(square, square)] * layers, square)
    products = [op.id for op in program.operators if op.primitive == "dot_general"]
    array = N * N * 4
    arrays = [moved(program, op) // array for op in products]
    assert max(arrays) == 5.0
    backward = arrays[2 * layers + 7 : -1]
    assert backward == [2.0, 4.0] * (len(backward) // 2)  # the same in every layer


def unrolled_lstm(weights, x):
    h = c = jnp.zeros(x.shape[1:])
    for t in range(len(x)):
        i, f, g, o = jnp.split(jnp.concatenate([x[t], h], -1) @ weights, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return h.sum()


def test_kernels_of_an_unrolled_recurrence_do_not_compute_all_later_steps_again():
    """The state's gradient is a chain of elementwise operators that each step's kernel reads; it is written on the way."""

    def bytes_a_step(steps):
        arguments = S((2 * N, 4 * N), "float32"), S((steps, N, N), "float32")
        program = traced(lambda w, x: jax.grad(unrolled_lstm)(w, x), *arguments)
        return sum(moved(program, op.id) for op in program.operators) / steps

    assert bytes_a_step(40) < 1.5 * bytes_a_step(5)


def test_an_array_that_several_epilogues_of_a_product_read_is_read_once():
    def f(a, w, b):
        y = a @ w
        return jnp.tanh(y) + b, jnp.exp(y) * b

    program = traced(f, X, X, X)
    product = the(program, "dot_general")
    assert moved(program, product) == 6 * BF16  # three operands, the product and two results


def test_a_sum_that_one_kernel_reads_has_any_number_of_terms():
    program = traced(lambda *x: jnp.tanh(sum(x)), *[S((N, N), "float32")] * 40)
    assert sum(kernels(program).launched) == 1


def test_a_sum_that_two_kernels_read_is_written_once_and_its_addends_are_not():
    def f(w, *x):
        y = sum(x)
        return y @ w, jnp.tanh(y).sum(0)

    program = traced(f, *[S((N, N), "float32")] * 40)
    array = N * N * 4
    assert moved(program, the(program, "dot_general")) == 3 * array
    assert moved(program, the(program, "reduce_sum")) == 4 * N  # in the kernel that writes the sum
    assert sum(moved(program, op.id) for op in program.operators) == (39 + 1 + 3) * array + 4 * N
