"""A traced program as lines that processes can compare."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jshard._program.jaxpr_text import _value_text, array_text, jaxpr_lines
from tests.helpers.readme import ROOT, fresh_environment


def lines(f, *args) -> list[str]:
    return list(jaxpr_lines(jax.make_jaxpr(f)(*args)))


def looped(x, scale=2.0):
    def body(c, row):
        return c * scale + row, lax.cond(row[0] > 0, jnp.sin, jnp.cos, c)

    return lax.scan(body, x[0], x)


X = jnp.ones((3, 4), jnp.float32)


def test_bodies_of_loops_and_branches_stand_below_their_equation():
    text = lines(looped, X)
    scan = next(i for i, line in enumerate(text) if "= scan(" in line)
    inner = [line for line in text[scan + 1 :] if line.startswith("  ")]
    assert text[scan + 1] == "  jaxpr:"
    for operator in ("sin", "cos", "cond"):
        assert any(f"= {operator}(" in line for line in inner)
    assert "length=3" in text[scan] and text[-1].startswith("results ")


def test_two_traces_are_equal_and_another_function_differs_where_it_does():
    assert lines(looped, X) == lines(looped, X)
    other = lines(lambda x: looped(x, 3.0), X)
    different = [(a, b) for a, b in zip(lines(looped, X), other, strict=True) if a != b]
    assert len(different) == 1 and "2.0" in different[0][0] and "3.0" in different[0][1]


def test_constants_are_told_apart_by_their_elements():
    one, two = (np.arange(6, dtype=np.float32) + k for k in (0, 1))
    assert array_text(one) == array_text(one.copy()) != array_text(two)
    assert array_text(one).startswith("float32[6] ") and array_text(np.int32(7)) == "7"


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "None"),
        ((1,), "(1,)"),
        ([1, (2, "a")], "(1, (2, a))"),
        ({"b": 1, "a": {3, 2}}, "{a: {2, 3}, b: 1}"),
        (frozenset({"y", "x"}), "{x, y}"),
        (np.float32(1.5), "1.5"),
        (jnp.sin, "sin"),
        (object(), "object"),
    ],
)
def test_parameters_have_one_text(value, text):
    assert _value_text(value) == text


def test_a_sharding_is_written_with_its_mesh():
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    assert _value_text(NamedSharding(mesh, PartitionSpec("a", None))) == "(a, None) on {'a': 2, 'b': 2}"


def test_the_hash_seed_does_not_show():
    program = (
        "import jax, jax.numpy as jnp\n"
        "from jshard._program.jaxpr_text import jaxpr_lines, _value_text\n"
        "print(*jaxpr_lines(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ x))))(jnp.ones((4, 4)))), sep='\\n')\n"
        "print(_value_text(set('jshard')), _value_text(object()))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program], env=fresh_environment() | {"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"},
            capture_output=True, text=True, check=True, cwd=ROOT,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(printed) == 1 and "dot_general" in printed.pop()
