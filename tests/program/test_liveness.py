"""Liveness: which values are in memory until when, on programs of a few operators."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jshard
from jshard._program.memory.liveness import liveness
from jshard._program.trace import build


SQUARE = jax.ShapeDtypeStruct((8, 8), "float32")


def held(fn) -> dict[str, bool]:
    """Whether each result of an equation is held, by the operator that makes it."""
    program = build(jax.jit(fn).trace(SQUARE, SQUARE).jaxpr, name="fn", input_names=["x", "w"])
    life = liveness(program)
    made = (op for op in program.operators if op.kind == "eqn")
    return {f"{op.primitive}.{k}": life.materialized[op.results[0]] for k, op in enumerate(made)}


def test_a_product_is_written_by_the_light_operator_that_follows():
    assert held(lambda x, w: (x @ w + w) @ w) == {
        "dot_general.0": False,
        "add.1": True,
        "dot_general.2": True,
    }


def test_a_product_whose_reader_comes_later_is_itself_in_memory():
    """Of the two products the first waits for the second, so that both are there at once."""

    def sum_of_two(x, w):
        return jnp.sin(x @ w + w @ x)

    assert held(sum_of_two) == {
        "dot_general.0": True, "dot_general.1": False, "add.2": False, "sin.3": True
    }  # fmt: skip


def test_a_product_writes_what_several_light_operators_make_of_it_and_join():
    """As the gradient of a SiLU, ``g * s(h) + g * h * ds(h)``; not where another product reads it too."""

    def joined(x, w):
        g = x @ w
        return (g * w + jnp.sin(g) * 2.0) @ w

    def left(x, w):
        g = x @ w
        return (g * jnp.sin(g)) @ w + g

    def summed(x, w):
        g = x @ w
        return (g * g.sum()) @ w

    assert held(joined) == {
        "dot_general.0": False, "mul.1": False, "sin.2": False, "mul.3": False, "add.4": True, "dot_general.5": True,
    }  # fmt: skip
    assert held(left)["dot_general.0"] and not held(left)["mul.2"]
    assert held(summed)["dot_general.0"] and not held(summed)["mul.2"]


def test_what_is_joined_is_written_over_an_operand_that_ends_there():
    """``h`` is read by nobody after it, though it is read twice and through another operator."""

    def written(fn) -> list[float]:
        program = build(jax.jit(fn).trace(SQUARE, SQUARE).jaxpr, name="fn", input_names=["x", "w"])
        life = liveness(program)
        return [
            life.epilogue_bytes[op.results[0]] for op in program.operators if op.primitive == "dot_general"
        ]

    def ends(x, w):
        h = jnp.sin(x) @ w
        s = jnp.sin(h)
        g = h @ w
        return (g * s + jnp.sin(g) * s) @ w

    def goes_on(x, w):
        h = jnp.sin(x) @ w
        s = jnp.sin(h)
        g = h @ w
        return (g * s + jnp.sin(g) * s) @ w @ h

    assert written(ends) == [0, 0, 0] and written(goes_on)[:2] == [0, 256]


def test_what_a_product_writes_for_its_reader_is_there_beside_its_operands():
    """The sum of a product and a bias takes room while the product reads; over a residual that ends it takes none."""

    def two(x, w):
        h = jnp.sin(x) @ w  # held: what comes next is no light operator
        return (h @ w + 1.0) @ w

    def residual(x, w):
        h = jnp.sin(x) @ w
        return (h @ w + h) @ w

    def written(fn) -> list[float]:
        program = build(jax.jit(fn).trace(SQUARE, SQUARE).jaxpr, name="fn", input_names=["x", "w"])
        life = liveness(program)
        return [
            life.epilogue_bytes[op.results[0]] for op in program.operators if op.primitive == "dot_general"
        ]

    assert written(two) == [0, 256, 0] and written(residual) == [0, 0, 0]


def test_a_cast_that_was_moved_is_held_until_its_last_reader():
    """As made it would be computed again from the product; its copy in another layout cannot be."""

    def step(x, w, v, i):
        z = (x @ w).astype("float32")
        picked = jnp.take_along_axis(z, i, 1)
        return picked, jshard.op(jnp.matmul, ((1, 8), (8, 1)))(jshard.op(jnp.exp, ((1, 8),))(z), v)

    shapes = [
        jax.ShapeDtypeStruct((1024, 256), "bfloat16"),
        jax.ShapeDtypeStruct((256, 1024), "bfloat16"),
        jax.ShapeDtypeStruct((1024, 16), "float32"),
        jax.ShapeDtypeStruct((1024, 1), "int32"),
    ]
    mesh = jshard.topology("v5e:2x4", {"x": 8}, compiles=False)
    plan = jshard.shard(step, ((8, 1), (1, 1), (8, 1), (8, 1)), mesh=mesh).plan(*shapes)
    assert [op.primitive for op in plan.operators][-1] == "dot_general"
    arguments = 1024 * 256 * 2 / 8 + 256 * 1024 * 2 + 1024 * 16 * 4 / 8 + 1024 * 4 / 8
    results = 1024 * 4 / 8 + 1024 * 16 * 4
    assert plan.memory.curve[-1] == arguments + results + 1024 * 1024 * 4 / 8


def materialized(fn, *args) -> list[tuple[str, tuple[int, ...]]]:
    """(primitive, shape) of what operators store."""
    program = build(jax.jit(fn).trace(*args).jaxpr, name="f", input_names=[f"a{k}" for k in range(len(args))])
    stored = liveness(program).materialized
    return [
        (op.primitive, program.tensors[r].shape)
        for op in program.operators
        for r in op.results
        if op.kind == "eqn" and stored[r]
    ]


def test_each_level_of_an_associative_scan_is_in_memory():
    """Made again inside its two slices, a level would be computed twice as often as the one after it."""

    def combine(left, right):
        return left[0] * right[0], left[1] * right[0] + right[1]

    a = jax.ShapeDtypeStruct((64, 8), "float32")
    stored = materialized(lambda a, b: jax.lax.associative_scan(combine, (jnp.exp(a), b))[1], a, a)
    lengths = {shape[0] for _, shape in stored}
    assert {64, 32, 16, 8, 4} <= lengths


def test_what_one_operator_slices_or_takes_no_work_is_not_in_memory():
    x = jax.ShapeDtypeStruct((64, 8), "float32")
    assert materialized(lambda x: jnp.sin(jnp.tanh(x)[::2]), x) == [("sin", (32, 8))]
    turned = materialized(lambda x: jnp.concatenate([x[:, 4:] * 2.0, x[:, :4]], axis=-1), x)
    assert turned == [("concatenate", (64, 8))]
    widened = x.update(dtype="bfloat16")
    halves = materialized(lambda x: (lambda y: y[:, 4:] * y[:, :4])(x.astype("float32")), widened)
    assert halves == [("mul", (64, 4))]


def test_a_pad_between_elements_is_in_memory_with_its_operand_and_one_of_edges_is_not():
    """The gradient of a slice with steps: the TPU compiler fuses such pads with nothing."""

    def between(x, w):
        return jax.lax.pad(jnp.sin(x), 0.0, [(0, 1, 1), (0, 0, 0)]) * 2.0

    def edges(x, w):
        return jax.lax.pad(jnp.sin(x), 0.0, [(0, 8, 0), (0, 0, 0)]) * 2.0

    assert held(between) == {"sin.0": True, "pad.1": True, "mul.2": True}
    assert held(edges) == {"sin.0": False, "pad.1": False, "mul.2": True}


def test_a_top_k_computes_its_operand_in_its_own_kernel_and_a_sort_does_not():
    """Of a retriever's scores in bfloat16 the best are found in float32, of which the TPU compiler holds no array."""
    assert held(lambda x, w: jax.lax.top_k(jnp.sin(x), 2)) == {"sin.0": False, "top_k.1": True}
    assert held(lambda x, w: jax.lax.sort(jnp.sin(x))) == {"sin.0": True, "sort.1": True}
