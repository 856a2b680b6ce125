"""The reference check of padding: an operator in a padded program against the operator as it stands.

`judge(case)` pads each class of dimensions of one operator, and all of them at once. What stands in the padding is made
hostile before the operator reads it: NaN in floats, other values in integers, so that a mask that is missing shows.
`padding_programs.py` has whole programs.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jshard._core import jaxcompat as compat
from jshard._plan.padded_program import padded_program
from jshard._plan.padding_classes import PaddingClasses
from tests.laws.rules_validator import Case


ONE_PROGRAM = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_allow_excess_precision": False,
}
"""Compiler options of a program that runs once on a few numbers, as all paddings of an operator do: compile quickly."""


def hostile(x: jax.Array, one: jax.Array) -> jax.Array:
    """`x`, computed from itself and an array of ones so that zeros in their padding become something else."""
    if x.dtype == bool:
        return x ^ ~one
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x + (1 - one)
    return x * (one / one)


def _one(x: Any) -> Any:
    return jnp.ones(x.shape, x.dtype)


def _can_be_hostile(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool


def function_of(case: Case) -> tuple[Callable[..., Any], list[Any]]:
    """The operator of a case as a function of its operands and as many arrays of ones, and these operands."""
    fixed = [i for i, x in enumerate(case.op.literals) if x is not None]
    free = [i for i in range(len(case.values)) if i not in fixed]
    spoilt = [i for i in free if getattr(case.values[i], "ndim", 0) and _can_be_hostile(case.values[i])]

    def fn(*arrays: Any) -> Any:
        operands: list[Any] = [case.op.literals[i] if i in fixed else None for i in range(len(case.values))]
        for i, x in zip(free, arrays, strict=False):
            operands[i] = x
        for i, one in zip(spoilt, arrays[len(free) :], strict=True):
            operands[i] = hostile(operands[i], one)
        return case.bind(*operands, **case.op.params)

    return fn, [*(case.values[i] for i in free), *(_one(case.values[i]) for i in spoilt)]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How many programs were tried, what was wrong, and how many dimensions could not be padded."""

    tried: int = 0
    wrong: tuple[str, ...] = ()
    refused: int = 0


def judge(case: Case) -> Verdict:
    """Pad each class of an operator, and all together, and compare the results with those of the plain operator."""
    fn, args = function_of(case)
    closed = jax.make_jaxpr(fn)(*args)
    classes, refused = _classes(closed)
    tried, wrong = _compared(case, fn, args, closed, classes)
    return Verdict(tried, wrong, refused)


def judge_gradient(case: Case) -> Verdict:
    """As `judge`, the operator's derivative by its operands and its cotangents as operands too."""
    fn, args = function_of(case)
    by = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]
    out = [k for k, y in enumerate(jax.eval_shape(fn, *args)) if jnp.issubdtype(y.dtype, jnp.floating)]
    if not by or not out:
        return Verdict()

    def of(*some: Any) -> list[Any]:
        given = list(args)
        for i, x in zip(by, some, strict=True):
            given[i] = x
        return [fn(*given)[k] for k in out]

    def gradient(*arrays: Any) -> list[Any]:
        values, back = jax.vjp(of, *arrays[: len(by)])
        cotangents = [c.astype(y.dtype) for y, c in zip(values, arrays[len(by) :], strict=True)]
        return list(back(cotangents))

    values = [args[i] for i in by]
    cotangents = [jnp.cos(jnp.arange(y.size, dtype="float32")).reshape(y.shape) for y in of(*values)]
    try:
        closed = jax.make_jaxpr(gradient)(*values, *cotangents)
    except (NotImplementedError, ValueError, TypeError):  # JAX has no derivative of it
        return Verdict()
    sizes = {n for x in (*values, *cotangents) for n in x.shape if n > 1}
    classes = PaddingClasses(closed, frozenset(sizes))
    tried, wrong = _compared(case, gradient, [*values, *cotangents], closed, classes)
    return Verdict(tried, tuple(f"gradient of {w}" for w in wrong))


def _classes(closed: Any) -> tuple[PaddingClasses, int]:
    """The classes of the dimensions of the last operator, and how many of its dimensions are in none."""
    operator = closed.jaxpr.eqns[-1]
    sides = (("operand", operator.invars), ("result", operator.outvars))
    places = {
        (side, i, d): n
        for side, some in sides
        for i, v in enumerate(some)
        for d, n in enumerate(v.aval.shape)
    }
    classes = PaddingClasses(closed, frozenset(n for n in places.values() if n > 1))
    factors = classes.factors(operator)
    covered = {("operand", *p) for f in factors for p in f.operands} | {
        ("result", *p) for f in factors for p in f.results
    }
    return classes, sum(n > 1 and place not in covered for place, n in places.items())


def _compared(
    case: Case, fn: Callable[..., Any], args: Sequence[Any], closed: Any, classes: PaddingClasses
) -> tuple[int, tuple[str, ...]]:
    """How many ways to pad a function were tried, and what was wrong: all in one program, compiled once."""
    every = {(c.size, c.number): c.size + 3 for c in classes.all()}
    trials = [{key: size} for key, size in every.items()] + ([every] if len(every) > 1 else [])
    padded = [compat.as_function(padded_program(closed, sizes, classes)) for sizes in trials]

    def everything(*arrays: Any) -> Any:
        return fn(*arrays), [f(*arrays) for f in padded]

    want, found = jax.jit(everything, compiler_options=ONE_PROGRAM)(*args)
    wrong = [
        f"{case}: padded {sizes}: {p}"
        for sizes, got in zip(trials, found, strict=True)
        for p in _differences(got, want)
    ]
    return len(trials), tuple(wrong)


def _differences(got: Sequence[Any], want: Sequence[Any]) -> list[str]:
    out = []
    for a, b in zip(got, want, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            out.append(f"{a.dtype}{a.shape} is not {b.dtype}{b.shape}")
            continue
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        if a.dtype.kind not in "fc" and a.dtype != bool and not np.issubdtype(a.dtype, np.integer):
            a, b = a.astype(np.float32), b.astype(np.float32)
        if not np.allclose(a, b, rtol=1e-4, atol=1e-4, equal_nan=a.dtype.kind in "fc"):
            out.append("values differ")
    return out


def refusals(cases: Sequence[Case]) -> Counter[str]:
    """For each primitive how many of its dimensions cannot be padded."""
    count: Counter[str] = Counter()
    for case in cases:
        count[case.op.primitive] += judge(case).refused
    return count
