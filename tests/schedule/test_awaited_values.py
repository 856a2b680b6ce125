"""What a copy that is made again waits for: no operand that would be written to memory for it."""

import jax
import jax.numpy as jnp
import numpy as np

from jshard._program.memory.liveness import liveness
from jshard._program.trace import build
from jshard._schedule.awaited_values import awaited_values


def loss(w, x):
    return -jax.nn.log_softmax(x @ w)[:, 0].mean()


def test_it_waits_for_values_in_memory_from_which_the_operands_are_computed():
    """The derivative of the loss by the logits is fused into the product that reads it: their sums are awaited."""
    traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(jnp.ones((64, 512)), jnp.ones((256, 64)))
    program = build(traced.jaxpr, name="f", input_names=["w", "x"])
    materialized = liveness(program).materialized
    products = [op for op in program.operators if op.primitive == "dot_general"]
    w = program.operators[program.inputs[0]].results[0]
    for reader in products[1:]:
        tensor = next(a for a in reader.operands if isinstance(a, int))
        awaited = awaited_values(program, materialized, reader.id, tensor)
        made_by = [program.operators[program.defs()[t][0]] for t in awaited]
        assert awaited == sorted(set(awaited)) and all(materialized[t] for t in awaited)
        assert all(op.kind == "eqn" and op.id < reader.id for op in made_by)
        assert tensor not in awaited
    by_x = next(op for op in products if tuple(program.tensors[op.results[0]].shape) == (256, 64))
    derivative = next(
        a for a in by_x.operands if isinstance(a, int) and program.tensors[a].shape == (256, 512)
    )
    awaited = awaited_values(program, materialized, by_x.id, w)
    assert not materialized[derivative] and derivative not in awaited and awaited


def test_arguments_are_not_waited_for():
    traced = jax.jit(lambda w, x: x @ w).trace(np.ones((8, 8), "float32"), np.ones((8, 8), "float32"))
    program = build(traced.jaxpr, name="f", input_names=["w", "x"])
    (product,) = (op for op in program.operators if op.primitive == "dot_general")
    w = program.operators[program.inputs[0]].results[0]
    assert awaited_values(program, liveness(program).materialized, product.id, w) == []
