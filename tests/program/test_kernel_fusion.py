"""Kernels: what a compiler computes together is read once and written once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct as S

from jshard._program.graph import Program
from jshard._program.memory.kernel_fusion import kernels
from jshard._program.memory.kernel_parts import Kernels
from jshard._program.trace import build


def traced(f, *args) -> Program:
    return build(jax.jit(f).trace(*args).jaxpr, name="f", input_names=[str(k) for k in range(len(args))])


def moved(f, *args, into_products: bool = True) -> dict[str, float]:
    """Bytes that each kernel moves, in program order; a number tells equal primitives apart."""
    program = traced(f, *args)
    found = kernels(program, into_products=into_products)
    return {
        f"{op.primitive}.{op.id}": nbytes(found, op.id) for op in program.operators if nbytes(found, op.id)
    }


def nbytes(found: Kernels, op: int) -> float:
    return sum(p.nbytes for p in found.parts[op] + found.fused_parts(op))


N = 512
X = S((N, N), "float32")
ARRAY = N * N * 4


def test_a_masked_softmax_of_a_product_passes_three_times_over_its_array():
    """Written by the product (with its maxima), read to sum exponentials, read by the next product: not 8.5 times."""

    def f(q, k, v):
        scores = jnp.where(jnp.tril(jnp.ones((N, N), bool)), q @ k.T * 0.1, -1e9)
        return jax.nn.softmax(scores, -1) @ v

    total = sum(moved(f, X, X, X).values())
    # Beside the three passes q, k, v and the result, and vectors of rows.
    assert 7 * ARRAY <= total <= 7.3 * ARRAY + N * N


def test_an_elementwise_chain_is_read_once_and_written_once():
    found = moved(lambda x, y: jnp.tanh(x * y + x) * 2 - y, X, X)
    assert list(found.values()) == [3 * ARRAY]


def test_a_chain_with_two_readers_is_computed_in_both():
    """A reduction and a product each read what the chain is computed from; the chain itself is nowhere in memory."""
    found = moved(lambda x, w: (jnp.sum(x * 2, 0), (x * 2) @ w), X, X)
    assert sorted(found.values()) == [ARRAY + 4 * N, 3 * ARRAY]


@pytest.mark.parametrize("dtype, itemsize", [("int8", 1), ("bfloat16", 2)])
def test_a_weight_is_read_in_its_own_type(dtype, itemsize):
    """Conversion and scaling of weights are no pass of their own: eight rows, the weight once."""

    def f(x, w, s):
        return x @ (w.astype("float32") * s)

    x, w, s = S((8, N), "float32"), S((N, N), dtype), S((N,), "float32")
    (total,) = moved(f, x, w, s).values()
    assert total == N * N * itemsize + 2 * 8 * N * 4 + 4 * N


def test_products_of_a_library_read_arrays_from_memory():
    """On GPUs the scaled weight is written and read; a conversion alone is not."""
    x, w = S((8, N), "float32"), S((N, N), "bfloat16")

    def f(x, w):
        return x @ (w.astype("float32") * 3)

    assert sum(moved(f, x, w, into_products=False).values()) == 2 * N * N + 2 * ARRAY + 2 * 8 * N * 4

    def g(x, w):
        return x @ w.astype("float32")

    assert sum(moved(g, x, w, into_products=False).values()) == 2 * N * N + 2 * 8 * N * 4


def test_an_update_of_adam_is_one_kernel():
    """Parameter, gradient and moments are read once, three results written: seven arrays, one launch."""

    def f(p, g, m, v):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return p - m * jax.lax.rsqrt(v + 1e-8), m, v

    program = traced(f, X, X, X, X)
    found = kernels(program)
    assert sum(nbytes(found, op.id) for op in program.operators) == 7 * ARRAY
    assert sum(found.launched) == 1


def test_a_second_sum_that_needs_the_first_is_another_kernel():
    def f(x):
        return jnp.sum((x - jnp.mean(x, -1, keepdims=True)) ** 2, -1)

    program = traced(f, X)
    found = kernels(program)
    sums = [op.id for op in program.operators if op.primitive == "reduce_sum"]
    assert len(sums) == 2 and all(found.launched[i] for i in sums)
    assert all(nbytes(found, i) >= ARRAY for i in sums)


def test_a_gather_and_a_slice_read_what_they_return():
    table, at = S((10 * N, N), "float32"), S((N,), "int32")
    found = moved(lambda t, i: t.at[i].get(mode="promise_in_bounds"), table, at)
    assert max(found.values()) == 2 * ARRAY + 4 * N
    (total,) = moved(lambda t: t[:N] * 2.0, table).values()
    assert total == 2 * ARRAY


def test_a_long_chain_that_every_step_reads_is_cut():
    """Each value of a recurrence has a product that reads it: kernels stay of bounded size, and so does the analysis."""

    def f(x, w):
        total = jnp.zeros((N, N))
        for k in range(600):
            x = x * (1.0 + k)
            total = total + x @ w
        return total

    program = traced(f, X, X)
    found = kernels(program)
    assert np.all([nbytes(found, op.id) < 10 * ARRAY for op in program.operators])


@pytest.mark.parametrize("axis, reduced", [(1, True), (0, False)])
def test_sums_along_the_last_dimension_cost_more_than_others_in_a_product(axis, reduced):
    """Along the last dimension the elements of one register are combined, along others whole registers."""
    program = traced(lambda x, w: jnp.sum(x @ w, axis), X, X)
    ((epilogue,),) = kernels(program).epilogues.values()
    work = epilogue.fused.work
    assert (work.reduced, work.simple) == ((N * N, 0) if reduced else (0, N * N))


def test_a_literal_that_is_written_in_place_is_no_array():
    found = moved(lambda x: (x @ x).at[3, 2].add(1.0), X)
    assert sum(found.values()) == pytest.approx(2 * ARRAY, rel=1e-3)
