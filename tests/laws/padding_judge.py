"""The reference check of padding: an operator in a padded program against the operator as it stands.

`judge(case)` pads each class of dimensions of one operator, and all of them at once. What stands in the padding is made
hostile before the operator reads it: NaN in floats, other values in integers, so that a mask that is missing shows.
`PROGRAMS` are small functions of a size n, for whole programs on devices.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jshard._core import jaxcompat as compat
from jshard._plan.padded_program import padded_program
from jshard._plan.padding_classes import PaddingClasses
from tests.laws.rules_validator import Case


_ONE_PROGRAM = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_allow_excess_precision": False,
}
"""All paddings of an operator run in one program, once on a few numbers: compile quickly."""


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

    want, found = jax.jit(everything, compiler_options=_ONE_PROGRAM)(*args)
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


# -- whole programs of a size ----------------------------------------------------------------------------------------

_RANDOM = np.random.default_rng


def _x(*shape: int, seed: int = 0) -> np.ndarray:
    return _RANDOM(seed + sum(shape)).normal(size=shape)


def _ids(high: int, *shape: int, seed: int = 0) -> np.ndarray:
    return _RANDOM(high + seed).integers(-1, high + 2, shape).astype(np.int32)


def head(n: int) -> tuple[Any, ...]:
    """A softmax over n classes."""

    def f(w: Any, x: Any) -> Any:
        logp = jax.nn.log_softmax(x @ w)
        return -jnp.take_along_axis(logp, jnp.arange(16)[:, None] % n, 1).mean() + jnp.max(x @ w)

    return f, _x(8, n), _x(16, 8)


def embedding(n: int) -> tuple[Any, ...]:
    """A table of n rows, with ids out of range."""

    def f(t: Any, ids: Any) -> Any:
        return jnp.sum(jnp.sin(t[ids])) + jnp.sum(t.at[ids].get(mode="fill", fill_value=2.0))

    return f, _x(n, 8), _ids(n, 16)


def attention(n: int) -> tuple[Any, ...]:
    """Causal attention over n positions."""

    def f(x: Any, w: Any) -> Any:
        q, k = x @ w, x
        s = jnp.where(jnp.tril(jnp.ones((n, n), bool)), jnp.einsum("btd,bsd->bts", q, k), -jnp.inf)
        y = jax.nn.softmax(s, -1) @ x
        return jnp.sum(jnp.tanh(y) ** 2) + jnp.sum(jnp.mean(y, 1) ** 2)

    return f, _x(4, n, 8), _x(8, 8)


def normalised(n: int) -> tuple[Any, ...]:
    """Layer norm over n features between two products."""

    def f(w: Any, v: Any, x: Any) -> Any:
        h = x @ w
        h = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-6)
        return jnp.sum(jax.nn.gelu(h) @ v) + jnp.prod(jnp.tanh(h), -1).sum() + jnp.min(h) + jnp.linalg.norm(h)

    return f, _x(8, n), _x(n, 8), _x(16, 8)


def messages(n: int) -> tuple[Any, ...]:
    """Message passing over n edges: gather, segment sum, maximum, and a softmax by segment."""

    def f(h: Any, e: Any, src: Any, dst: Any) -> Any:
        m = h[src] * e[:, None]
        top = jax.ops.segment_max(e, dst, 16)
        p = jnp.exp(e - top[dst])
        p = p / jax.ops.segment_sum(p, dst, 16)[dst]
        return jnp.sum(jax.ops.segment_sum(m * p[:, None], dst, 16) ** 2)

    return f, _x(16, 8), _x(n), _ids(16, n) % 16, _ids(16, n, seed=1) % 16


def nodes(n: int) -> tuple[Any, ...]:
    """Message passing between n nodes."""

    def f(h: Any, w: Any, src: Any, dst: Any) -> Any:
        y = jnp.zeros_like(h).at[dst].add((h @ w)[jnp.clip(src, 0, n - 1)], mode="drop")
        return jnp.sum(jax.nn.relu(y) ** 2)

    return f, _x(n, 8), _x(8, 8), _ids(n, 32), _ids(n, 32, seed=1)


def recurrent(n: int) -> tuple[Any, ...]:
    """A scan whose carry has n features, with a branch and an inner checkpoint."""

    def f(w: Any, x: Any) -> Any:
        def step(h: Any, u: Any) -> Any:
            h = jax.checkpoint(lambda h: jnp.tanh(h @ w + u))(h)
            return h, jnp.sum(h**2, -1)

        h, ys = lax.scan(step, jnp.zeros((4, n)), x)
        return jnp.sum(ys) + lax.cond(ys[0, 0] > 0, lambda h: jnp.sum(h), lambda h: jnp.max(h), h)

    return f, _x(n, n) / n, _x(3, 4, n)


def adam(n: int) -> tuple[Any, ...]:
    """An update of n x 8 parameters with the norm of the gradient clipped."""

    def f(w: Any, m: Any, x: Any) -> Any:
        g = jax.grad(lambda w: jnp.mean((x @ w.T) ** 2))(w)
        g = g / jnp.maximum(1.0, jnp.sqrt(jnp.sum(g * g)))
        m = 0.9 * m + 0.1 * g
        return jnp.sum((w - 0.1 * m / (jnp.sqrt(m * m) + 1e-3)) ** 2)

    return f, _x(n, 8), _x(n, 8, seed=1), _x(16, 8)


def statistics(n: int) -> tuple[Any, ...]:
    """Batch statistics over n examples, an argmax, a cumulative sum, and a sort, which restores the true size."""

    def f(x: Any, w: Any) -> Any:
        h = x @ w
        h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)
        c = jnp.cumsum(h, 0)
        best = jnp.argmax(h, 0)
        ones = jnp.sum(jnp.ones(n) * x[0, 0]) + jnp.sum((x + 1.0) @ w) + jnp.sum(jnp.maximum(x, 2.0))
        picked = jnp.sum(jnp.take_along_axis(h, best[None], 0)) + jnp.sum(h[:-1] * h[1:])
        return ones + picked + jnp.sum(jnp.sort(h, 0) * c)

    return f, _x(n, 8), _x(8, 8)


def both_ends(n: int) -> tuple[Any, ...]:
    """Prefixes from both ends, and each element beside its mirror image."""

    def f(x: Any, w: Any) -> Any:
        h = jnp.tanh(x @ w)
        backward = jnp.flip(jnp.cumsum(jnp.flip(h, 0), 0), 0)
        return (jnp.cumsum(h, 0) * backward * jnp.flip(x, (0, 1))).sum() + jnp.flip(h, 0)[0].sum()

    return f, _x(n, 6), _x(6, 6)


def images(n: int) -> tuple[Any, ...]:
    """Convolutions, pooling and their gradients over images of n x 10 points."""

    def f(x: Any, v: Any, w: Any, u: Any) -> Any:
        def conv(x: Any, w: Any, stride: int, padding: Any) -> Any:
            return lax.conv_general_dilated(
                x, w, (stride, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
            )

        h = jnp.tanh(conv(x, v, 1, "SAME"))
        h = h + jnp.max(h, (1, 2), keepdims=True)
        top = lax.reduce_window(h, -jnp.inf, lax.max, (1, 3, 2, 1), (1, 2, 2, 1), "VALID")
        mean = lax.reduce_window(h, 0.0, lax.add, (1, 2, 2, 1), (1, 1, 1, 1), "SAME")
        up = lax.conv_transpose(conv(mean, w, 2, ((2, 1), (0, 0))), u, (2, 1), "SAME")
        return jnp.sum(top**2) + jnp.sum(up**3) + jnp.sum(conv(h, w, 3, "VALID"))

    return f, _x(2, n, 10, 3), _x(3, 3, 3, 4), _x(4, 1, 4, 2), _x(3, 2, 2, 3)


PROGRAMS: Mapping[str, Callable[[int], tuple[Any, ...]]] = {
    f.__name__: f
    for f in (
        head,
        embedding,
        attention,
        normalised,
        messages,
        nodes,
        recurrent,
        adam,
        statistics,
        both_ends,
        images,
    )
}


def step_of(fn: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any]:
    """The value and the gradients by all arguments that are no indices."""
    return jax.value_and_grad(fn, tuple(i for i, x in enumerate(args) if x.dtype.kind == "f"))


def refusals(cases: Sequence[Case]) -> Counter[str]:
    """For each primitive how many of its dimensions cannot be padded."""
    count: Counter[str] = Counter()
    for case in cases:
        count[case.op.primitive] += judge(case).refused
    return count
