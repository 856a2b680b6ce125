"""What is held in memory: rules of `_cost/residency.py` on programs of a few operators."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jshard._cost.residency import residency
from jshard._program.trace import build


SQUARE = jax.ShapeDtypeStruct((8, 8), "float32")


def held(fn) -> dict[str, bool]:
    """Whether each result of an equation is held, by the operator that makes it."""
    program = build(jax.jit(fn).trace(SQUARE, SQUARE).jaxpr, name="fn", input_names=["x", "w"])
    life = residency(program)
    made = (op for op in program.operators if op.kind == "eqn")
    return {f"{op.primitive}.{k}": life.held[op.results[0]] for k, op in enumerate(made)}


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
        life = residency(program)
        return [life.written[op.results[0]] for op in program.operators if op.primitive == "dot_general"]

    assert written(two) == [0, 256, 0] and written(residual) == [0, 0, 0]
