"""Fused operators: a function as one operator with the sharding rule of its author (`jshard.op(rule=...)`).

`op(fn, rule="b q h d, b k h d, b k h d -> b q h d")` runs `fn` on local shards, so `fn` may be a Pallas kernel or a
library's attention. Its gradient is one operator too: the vector-Jacobian product of `fn` on shards of the operands and
cotangents, in which factors that a gradient does not carry are reductions.

A rule claims that sharding a factor does not change the result. The claim is checked once, on small random arrays: a
factor that fails (the `d` of the rule above, over which the scores are contracted) is blocked, with a note. A function that
small arrays do not suit is traced on halves of its own, and run on random ones where they are not large.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Function
from jshard._core.layout import ArrayType
from jshard._rules.registry import LocalContext, OpView, family
from jshard._rules.rule import Rule
from jshard._rules.rule_text import RuleText, Token, parse_rule, tokenize


@dataclasses.dataclass(frozen=True, eq=False)
class Fused:
    """A function of arrays with its rule, or the gradient of that function if `backward`.

    `work`: FLOPs for each point of the factors; `stated`: by its author, so that what the function traces to is not counted.
    """

    fn: Function
    name: str
    text: str
    reduction: tuple[str, ...]
    blocked: tuple[str, ...]
    sizes: Mapping[str, int]
    work: float
    note: str = ""
    operands: int = 0
    results: tuple[ArrayType, ...] = ()
    backward: bool = False
    stated: bool = False

    def flops(self, avals: Sequence[ArrayType], results: Sequence[ArrayType]) -> float | None:
        """Model FLOPs of a call, as for any product twice as many backward; None where no one stated them."""
        if not self.stated:
            return None
        ins, outs = (avals[: self.operands], self.results) if self.backward else (avals, results)
        return (2 if self.backward else 1) * self.work * math.prod(self.rule_for(ins, outs).sizes)

    def rule_for(self, ins: Sequence[ArrayType], outs: Sequence[ArrayType]) -> Rule:
        """The author's rule for operands and results of these shapes; an error where they do not fit it."""
        return parse_rule(
            self.text, ins, outs, reduction=self.reduction, blocked=self.blocked, sizes=dict(self.sizes),
            work=self.work,
        )  # fmt: skip

    def run(self, *arrays: jax.Array) -> list[jax.Array]:
        """The function, or its gradient, on global arrays or on one device's shards."""
        if not self.backward:
            out = self.fn(*arrays)
            return list(out) if isinstance(out, tuple | list) else [out]
        primals, real_cotangents = arrays[: self.operands], iter(arrays[self.operands :])
        out, pull = jax.vjp(lambda *xs: tuple(dataclasses.replace(self, backward=False).run(*xs)), *primals)
        cotangents = tuple(
            next(real_cotangents) if _is_inexact(o) else np.zeros(o.shape, jax.dtypes.float0) for o in out
        )
        return [g for g, x in zip(pull(cotangents), primals, strict=True) if _is_inexact(x)]

    def batched(
        self, arrays: Sequence[jax.Array], dims: Sequence[int | None]
    ) -> tuple[list[jax.Array], Fused]:
        """The operands and the operator under `vmap`: with a batch factor, first in every result.

        All operands of a gradient have it too: JAX sums those gradients whose operand was not batched.
        """
        e = tokenize(self.text)
        size = next(x.shape[d] for x, d in zip(arrays, dims, strict=True) if d is not None)
        name = next(n for n in (f"mapped{i}" for i in range(len(e.names) + 1)) if n not in e.names)
        if self.backward:
            arrays = [
                jnp.moveaxis(x, d, 0) if d is not None else jnp.broadcast_to(x, (size, *x.shape))
                for x, d in zip(arrays, dims, strict=True)
            ]
            dims = [0] * len(arrays)
        ins = tuple(dims[: self.operands] if self.backward else dims)
        run = dataclasses.replace(self, backward=False).run
        operands = ", ".join(_tensor_text(t, name, d) for t, d in zip(e.operands, ins, strict=True))
        results = ", ".join(_tensor_text(t, name, 0) for t in e.results)
        mapped = jax.vmap(lambda *xs: tuple(run(*xs)), in_axes=ins)
        outs = tuple(jax.ShapeDtypeStruct((size, *o.shape), o.dtype) for o in self.results)
        return list(arrays), dataclasses.replace(
            self, fn=mapped, text=f"{operands} -> {results}", results=outs
        )


_MOST_CHECKED = 2**18  # elements of arguments of its own sizes, on which a function is run to check its rule

fused_p = compat.call_primitive("jshard_fused", lambda fused, *arrays: fused.run(*arrays))
rule = family("fused")


def _fused_local(ctx: LocalContext, *shards: jax.Array) -> Sequence[jax.Array]:
    """The function on one device's shards."""
    return ctx.op.params["fused"].run(*shards)


@rule("jshard_fused", local=_fused_local)
def fused_rule(op: OpView) -> Rule:
    """The author's rule; for a gradient, from operands and cotangents to gradients with the operands' factors."""
    f: Fused = op.params["fused"]
    ins = op.ins[: f.operands] if f.backward else op.ins
    outs = f.results if f.backward else op.outs
    r = dataclasses.replace(f.rule_for(ins, outs), note=f.note)
    if not f.backward:
        return r
    cotangents = tuple(d for d, o in zip(r.results, outs, strict=True) if _is_inexact(o))
    gradients = tuple(d for d, a in zip(r.operands, ins, strict=True) if _is_inexact(a))
    # Every factor is a reduction of those gradients that do not carry it.
    shardable = tuple(k for k in range(len(r.sizes)) if k not in r.blocked)
    return dataclasses.replace(
        r, operands=(*r.operands, *cotangents), results=gradients, reduction=shardable, work=3 * r.work
    )


def fused(
    fn: Function, name: str, text: str, *, reduction: Sequence[str] = (), sizes: Mapping[str, int] | None = None,
    work: float | None = None,
) -> Callable[..., jax.Array | tuple[jax.Array, ...]]:  # fmt: skip
    """`fn` as one operator with a rule: a function of arrays, differentiable in reverse mode."""
    e = tokenize(text)
    not_in_results = [
        n for n in e.names if not any(n in t.names for r in e.results for t in r) and n not in reduction
    ]
    base = Fused(
        fn, name, text, tuple(reduction), tuple(not_in_results), dict(sizes or {}),
        2.0 if work is None else float(work), stated=work is not None,
    )  # fmt: skip
    checked: list[Fused] = []  # at most one: the operator, checked at its first call

    def checked_operator(arrays: Sequence[jax.Array]) -> Fused:
        if not checked:
            check_rule_text(base, arrays)
            checked.append(_check_rule_numerically(base, e, arrays))
        return checked[0]

    @jax.custom_vjp
    def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(fused_p.bind(*arrays, fused=checked_operator(arrays)))

    def forward(*arrays: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        return call(*arrays), arrays

    def backward(
        arrays: tuple[jax.Array, ...], cotangents: tuple[jax.Array, ...]
    ) -> tuple[jax.Array | None, ...]:
        f = checked_operator(arrays)
        outs = tuple(jax.ShapeDtypeStruct(o.shape, o.dtype) for o in jax.eval_shape(f.run, *arrays))
        b = dataclasses.replace(f, backward=True, operands=len(arrays), results=outs)
        inexact = [c for c, o in zip(cotangents, outs, strict=True) if _is_inexact(o)]
        grads = iter(fused_p.bind(*arrays, *inexact, fused=b))
        return tuple(next(grads) if _is_inexact(x) else None for x in arrays)

    call.defvjp(forward, backward)

    def run(*arrays: ArrayLike) -> jax.Array | tuple[jax.Array, ...]:
        arrays = tuple(jnp.asarray(a) for a in arrays)
        out = call(*arrays)
        return out[0] if len(e.results) == 1 else out

    return run


def check_rule_text(f: Fused, arrays: Sequence[jax.Array]) -> None:
    """Raise errors of the rule at the call, so that the traceback shows the user's line."""
    f.rule_for(arrays, jax.eval_shape(f.run, *arrays))


def _check_rule_numerically(f: Fused, e: RuleText, arrays: Sequence[jax.Array]) -> Fused:
    """The operator with every factor blocked whose sharding changes the result on small random arrays."""
    length = dict.fromkeys(e.names, 4)
    rng = np.random.default_rng(0)
    failing: list[str] = []
    try:
        with jax.ensure_compile_time_eval():
            small = [
                _random(rng, _shape(tokens, length), a.dtype)
                for tokens, a in zip(e.operands, arrays, strict=True)
            ]
            expected = f.run(*small)
            wrong = [n for n in e.names if n not in f.blocked and not _is_shardable(f, e, n, small, expected)]
    except Exception:  # the function has sizes of its own, or needs larger ones (a kernel's blocks)
        failing, wrong = _wrong_on_own_sizes(f, e, arrays, rng)
    if not failing and not wrong:
        return f
    said = [f"it does not run on blocks of {', '.join(failing)}"] * bool(failing)
    said += [f"cutting {', '.join(wrong)} changes the numbers"] * bool(wrong)
    whole = {*failing, *wrong}
    return dataclasses.replace(
        f, blocked=(*f.blocked, *failing, *wrong), note=f"{f.name}: {' and '.join(said)}, so kept whole",
        reduction=tuple(n for n in f.reduction if n not in whole),
    )  # fmt: skip


def _wrong_on_own_sizes(
    f: Fused, e: RuleText, arrays: Sequence[jax.Array], rng: np.random.Generator
) -> tuple[list[str], list[str]]:
    """Factors whose halves the function does not take, and those that change its result, where arrays are not large.

    Of odd sizes nothing is known.
    """
    outs = jax.eval_shape(f.run, *arrays)
    # Factors of dimensions that are never cut follow, without names.
    length = dict(zip(e.names, f.rule_for(arrays, outs).sizes, strict=False))
    names = [n for n in e.names if n not in f.blocked and length[n] % 2 == 0]
    failing = [n for n in names if not _takes_halves(f, e, n, arrays, outs)]
    left = [n for n in names if n not in failing]
    if sum(a.size for a in arrays) > _MOST_CHECKED:
        return failing, []
    try:
        with jax.ensure_compile_time_eval():
            full = [_random(rng, a.shape, a.dtype) for a in arrays]
            expected = f.run(*full)
            return failing, [n for n in left if not _is_shardable(f, e, n, full, expected)]
    except Exception:  # a kernel of another platform
        return failing, []


def _takes_halves(
    f: Fused, e: RuleText, name: str, arrays: Sequence[ArrayType], outs: Sequence[ArrayType]
) -> bool:
    """Whether the function of halves along a factor has the shapes of halves of its results."""
    cut = [
        jax.ShapeDtypeStruct(_halved(a.shape, tokens, name), a.dtype)
        for tokens, a in zip(e.operands, arrays, strict=True)
    ]
    wanted = [_halved(o.shape, tokens, name) for tokens, o in zip(e.results, outs, strict=True)]
    try:
        return [o.shape for o in jax.eval_shape(f.run, *cut)] == wanted
    except Exception:  # whatever the user's function raises on a block
        return False


def _is_shardable(
    f: Fused, e: RuleText, name: str, arrays: Sequence[jax.Array], expected: Sequence[jax.Array]
) -> bool:
    """Whether the function on halves along a factor gives halves of the result, or addends of it."""
    halves = []
    for part in (0, 1):
        cut = [_half(a, tokens, name, part) for a, tokens in zip(arrays, e.operands, strict=True)]
        halves.append(f.run(*cut))
    for w, tokens, a, b in zip(expected, e.results, *halves, strict=True):
        dims = [i for i, t in enumerate(tokens) if name in t.names]
        if dims and len(tokens[dims[0]].names) > 1:
            continue  # halves of a factor inside a group are not contiguous: not checked
        joined = jnp.concatenate([a, b], axis=dims[0]) if dims else a + b
        if joined.shape != w.shape or not np.allclose(joined, w, rtol=1e-2, atol=1e-3):
            return False
    return True


def _halved(shape: Sequence[int], tokens: Sequence[Token], name: str) -> tuple[int, ...]:
    return tuple(n // 2 if name in t.names else n for n, t in zip(shape, tokens, strict=True))


def _half(a: jax.Array, tokens: Sequence[Token], name: str, part: int) -> jax.Array:
    for i, t in enumerate(tokens):
        if t.names == (name,):
            a = jnp.split(a, 2, axis=i)[part]
    return a


def _tensor_text(tokens: Sequence[Token], name: str, at: int | None) -> str:
    """A tensor of a rule text, with one more factor `name` at dimension `at`."""
    words = [f"({' '.join(t.names)})" if t.compound else " ".join(t.names) or "_" for t in tokens]
    return " ".join(words if at is None else [*words[:at], name, *words[at:]])


def _shape(tokens: Sequence[Token], length: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(int(np.prod([length[n] for n in t.names])) for t in tokens)


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(rng.normal(size=shape), dtype)
    return jnp.asarray(rng.integers(0, 2, shape), dtype)


def _is_inexact(a: ArrayType) -> bool:
    return bool(jnp.issubdtype(a.dtype, np.inexact))
