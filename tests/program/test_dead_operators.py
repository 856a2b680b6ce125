"""Operators that nobody reads once equal values are one leave the graph; what has an effect, a pin or a call stays."""

from __future__ import annotations

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jshard._program.dead_operators import without_dead_operators
from jshard._program.graph import Program
from jshard._program.operators import Literal, calls_of, operators_of
from jshard._program.trace import build
from tests.laws.padding_programs import PROGRAMS, step_of


X = jnp.arange(32.0).reshape(8, 4)


def traced(f, *args) -> Program:
    return build(jax.jit(f).trace(*args).jaxpr, name="f", input_names=[])


def primitives(p: Program) -> Counter[str]:
    return Counter(op.primitive for op in p.operators if op.kind == "eqn")


def unread(p: Program) -> list[str]:
    """The primitives of equations whose results no operator reads."""
    uses = p.uses()
    return [op.primitive for op in p.operators if op.kind == "eqn" and not any(uses[t] for t in op.results)]


def test_a_transpose_that_is_transposed_again_is_not_there_and_the_others_keep_their_names():
    p = traced(lambda x: jnp.sin(x.T.T).T, X)
    assert primitives(p) == {"sin": 1, "transpose": 1}
    assert [t.name for t in p.tensors] == ["argument 0", "sin.2", "transpose.3"]
    assert [op.name for op in p.operators] == ["argument 0", "sin.2", "transpose.3", "result"]


def test_what_only_dead_operators_read_is_dead_also_in_loops_and_branches():
    def again(
        y,
    ):  # a transpose of a transpose of two moved dimensions, read by a transpose that is not needed
        return jnp.sin(y.reshape(1, 8, 4).transpose(2, 0, 1).transpose(2, 1, 0).reshape(8, 4))

    def loop(x):
        return lax.scan(lambda c, _: (again(c), again(c).sum()), x, None, length=3)

    def branch(x):
        return lax.cond(x[0, 0] > 0, again, jnp.cos, x)

    assert primitives(traced(again, X)) == {"sin": 1}
    for f in (loop, branch, lambda x: lax.fori_loop(0, 3, lambda _, c: again(c), x), jax.checkpoint(again)):
        found = primitives(traced(f, X))
        assert found["sin"] == 1 and not found["transpose"] and not found["reshape"]


def test_copies_of_constants_go_where_what_is_made_of_them_is_made_once():
    def f(x):
        positions = lambda: jnp.cumsum(jnp.arange(8.0))  # noqa: E731
        return x.T * positions() + jnp.cos(x.T * positions())

    p = traced(f, X)
    assert primitives(p)["cumsum"] == 1 and primitives(p)["iota"] == 1 and unread(p) == []


def test_effects_pins_and_what_a_call_is_given_stay():
    def printed(x):
        jax.debug.print("{}", x.T[0, 0])
        return x.T.T * 2

    found = traced(printed, X)
    assert len([op for op in found.operators if op.kind == "eqn" and op.equation.effects]) == 1
    given = traced(lambda x: jax.checkpoint(lambda y: y.T * 2)(x.T), X)
    assert [c.operands for c in calls_of(given.body)] == [given.operators[1].results]

    p = traced(lambda x: (jnp.cos(x), x * 2), X)
    once = dataclasses.replace(
        p,
        operators=(
            *p.operators[:3],
            dataclasses.replace(p.operators[3], operands=p.operators[2].results),
            p.operators[4],
        ),
        body=dataclasses.replace(p.body, outputs=p.operators[2].results * 2),
    )  # the product twice, and the cosine, which nobody reads
    assert primitives(without_dead_operators(once)) == {"mul": 1}
    pin = (1, "result", 0, jax.P("x"))
    assert without_dead_operators(dataclasses.replace(once, pins=(pin,))).operators[1].primitive == "cos"
    moved = without_dead_operators(dataclasses.replace(once, pins=((2, *pin[1:]),)))
    assert [moved.operators[op].primitive for op, *_ in moved.pins] == ["mul"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_dead_is_left_and_the_graph_is_numbered_without_gaps(name: str):
    fn, *args = PROGRAMS[name](13)
    p = traced(step_of(fn, args), *args)
    assert without_dead_operators(p) is p
    assert [op.id for op in p.operators] == list(range(len(p.operators)))
    assert [t.id for t in p.tensors] == list(range(len(p.tensors)))
    assert min(op for op, _ in p.defs()) >= 0
    in_body = [*p.inputs, *operators_of(p.body), *p.outputs]
    assert sorted(in_body) == list(range(len(p.operators)))
    assert all(isinstance(a, Literal) or a < len(p.tensors) for op in p.operators for a in op.operands)
