"""The check of random programs: sharded equals unsharded in values, types, gradients and requested shardings.

`judge(program)` gives a `Verdict`. A difference counts only if the unsharded program is a stable function of its
inputs: where a change of 1e-6 (1e-14 in float64) in the inputs moves its results as far, the verdict is `"unstable"`.
Pins that contradict each other are refused with a `ShardError`; that is correct too.
"""

from __future__ import annotations

import dataclasses
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jshard
from jshard._core.errors import SearchError, StrategyError
from tests.laws.fuzz_programs import Fuzzed, axis_names


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`kind` is "equal", "unstable", "refused", "invalid" (plain JAX raises too), "different",
    "warning" or "error"; `text` says more."""

    kind: str
    text: str = ""

    @property
    def failed(self) -> bool:
        """Whether somebody must look at it."""
        return self.kind in ("different", "warning", "error")


def mesh_of(sizes: Sequence[int]) -> Any:
    """The first devices as a grid."""
    n = int(np.prod(sizes))
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes), axis_names(sizes), axis_types=kinds, devices=jax.devices()[:n])


def judge(p: Fuzzed, config: Mapping[str, Any] | None = None) -> Verdict:
    """Run a program plain and sharded, and compare; `config`: options of `shard` that only a configuration holds."""
    with jax.enable_x64(p.x64), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            verdict = _judge(p, config)
        except Exception:
            return Verdict("error", traceback.format_exc(limit=-12))
    told = [str(w.message) for w in heard]
    return Verdict("warning", "\n".join(told)) if told and not verdict.failed else verdict


def _loss(fn: Any, moving: Sequence[int]) -> Any:
    """A scalar that depends on every real result, as a function of the real arguments; the results beside it."""

    def loss(real: Sequence[Any], rest: Sequence[Any]) -> Any:
        given = iter(real), iter(rest)
        out = fn(*(next(given[0 if i in moving else 1]) for i in range(len(real) + len(rest))))
        total = jnp.zeros(())
        for y in out:
            if jnp.issubdtype(y.dtype, jnp.floating):
                weights = jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
                total = total + jnp.sum(y * weights)
        return total, out

    return jax.value_and_grad(loss, has_aux=True)


def _judge(p: Fuzzed, config: Mapping[str, Any] | None) -> Verdict:
    mesh = mesh_of(p.mesh)
    args = p.arguments()
    moving = [i for i, v in enumerate(p.inputs) if v.real]

    def split(a: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        return [x for i, x in enumerate(a) if i in moving], [x for i, x in enumerate(a) if i not in moving]

    plain = jax.jit(_loss(p.function(plain=True), moving))
    try:
        (_, want_out), want_grads = plain(*split(args))
    except (TypeError, ValueError, NotImplementedError) as e:
        return Verdict("invalid", str(e))
    program = p.function(plain=False, mesh=mesh)
    options: Any = dict(parameter_plan=p.parameter_plan or None, mesh=mesh, level=p.level, search=p.search)
    options |= {"config": config} if config else {}
    sharded = jshard.shard(program, p.in_strategy, p.out_strategy, **options)
    try:
        if p.mode == "direct":
            got_out, plan = sharded(*args), sharded.plan(*args)
            want_grads, got_grads = (), ()
        elif p.mode == "outside":
            (_, got_out), got_grads = jax.jit(_loss(sharded, moving))(*split(args))
            plan = sharded.plan(*args)
        else:
            ins = [[p.parameter_plan.get(v.name, s) for v, s in zip(p.inputs, p.in_strategy, strict=True) if v.real is r]
                   for r in (True, False)]  # fmt: skip
            options["parameter_plan"] = None
            outs = ((None, p.out_strategy), [None] * len(moving)) if p.out_strategy else None
            step = jshard.shard(_loss(program, moving), tuple(ins), outs, **options)
            (_, got_out), got_grads = step(*split(args))
            plan = step.plan(*split(args))
    except (SearchError, StrategyError) as e:
        return Verdict("refused", str(e))
    problem = _shardings(p, mesh, plan, got_out)
    if problem:
        return Verdict("different", problem)
    close = _tolerance(p)
    parts = (("result", want_out, got_out), ("gradient", want_grads, got_grads))
    for what, wanted, had in parts:
        for k, (w, g) in enumerate(zip(wanted, had, strict=True)):
            text = _unlike(np.asarray(w), np.asarray(g), close)
            if jax.typeof(w).weak_type != jax.typeof(g).weak_type:
                kinds = [
                    ("a weak" if jax.typeof(x).weak_type else "a strong") + f" {x.dtype}" for x in (g, w)
                ]
                return Verdict("different", f"{what} {k}: {kinds[0]} instead of {kinds[1]}")
            if text:
                if _unstable(plain, split, args, close):
                    return Verdict("unstable", f"{what} {k}: {text}")
                return Verdict("different", f"{what} {k}: {text}\nmesh {p.mesh}\n{plan}")
    return Verdict("equal")


# Relative differences that orders of summation make, by the narrowest type that a program computes in.
_NARROW = {"float8": 0.3, "bfloat16": 0.05, "float16": 0.01}


def _tolerance(p: Fuzzed) -> float:
    """How far results may be apart, relative to the largest."""
    narrow = [close for name, close in _NARROW.items() if name in p.source]
    return max(narrow) if narrow else 1e-9 if p.x64 and "float32" not in p.source else 3e-4


def _unlike(want: np.ndarray, got: np.ndarray, close: float) -> str:
    """What differs, or an empty text."""
    if (want.shape, want.dtype) != (got.shape, got.dtype):
        return f"{got.dtype}{got.shape} instead of {want.dtype}{want.shape}"
    if not np.issubdtype(want.dtype, np.inexact):
        return (
            "" if np.array_equal(want, got) else f"{int((want != got).sum())} of {want.size} integers differ"
        )
    close = max(close, 3e-4) if want.dtype != np.float64 else close
    scale = max(1.0, float(np.max(np.abs(want[np.isfinite(want)]), initial=0.0)))
    if np.allclose(want, got, rtol=close, atol=close * scale, equal_nan=True):
        return ""
    off = np.abs(want - got)
    largest = float(np.max(off[np.isfinite(off)], initial=0.0))
    return f"largest difference {largest:.3g} of {scale:.3g}, in {int((~(off <= close * scale)).sum())} of {want.size}"


def _unstable(plain: Any, split: Any, args: Sequence[Any], close: float) -> bool:
    """Whether the plain program moves as much by a change of its inputs far below the tolerance."""
    rng = np.random.default_rng(3)
    (_, out), grads = plain(*split(args))
    for _ in range(3):
        small = 1e-13 if close == 1e-9 else 1e-6 if close == 3e-4 else close / 10
        near = [
            a * (1 + small * rng.normal(size=a.shape)).astype(a.dtype) if a.dtype.kind == "f" else a
            for a in args
        ]
        (_, out2), grads2 = plain(*split(near))
        for w, g in zip([*out, *grads], [*out2, *grads2], strict=True):
            if not np.all(np.isfinite(np.asarray(w, "float64"))) or _unlike(
                np.asarray(w), np.asarray(g), close
            ):
                return True
    return False


def _shardings(p: Fuzzed, mesh: Any, plan: Any, outs: Sequence[Any]) -> str:
    """Whether inputs and results lie as the wishes say."""
    rows = [r.layout for r in plan.inputs[: len(p.inputs)]]
    order = [v for v in p.inputs if v.real] + [v for v in p.inputs if not v.real]
    for v, layout in zip(order if p.mode == "inside" else p.inputs, rows, strict=True):
        at = p.inputs.index(v)
        wish = p.parameter_plan.get(v.name, p.in_strategy[at])
        problem = _kept(wish, v.shape, NamedSharding(mesh, layout.spec))
        if problem:
            return f"argument {v.name}: {problem}"
    if p.mode == "outside":
        return ""  # there the compiler places the results of the program around
    for v, wish, y in zip(p.outputs, p.out_strategy or (None,) * len(outs), outs, strict=True):
        problem = _kept(wish, v.shape, y.sharding)
        if problem:
            return f"result {v.name}: {problem}"
    return ""


def _kept(wish: Any, shape: tuple[int, ...], have: Any) -> str:
    if wish is None:
        return ""
    pieces = [s // n for s, n in zip(shape, have.shard_shape(shape), strict=True)]
    if isinstance(wish, P):
        dims = (*wish, *(None,) * (len(shape) - len(wish)))
        spec = (*have.spec, *(None,) * (len(shape) - len(have.spec)))
        good = all(
            w is P.UNCONSTRAINED or _names(w, have.mesh) == _names(s, have.mesh)
            for w, s in zip(dims, spec, strict=True)
        )
    else:
        good = all(w is None or w == n for w, n in zip(wish, pieces, strict=True))
    return "" if good else f"wished {wish}, has {have.spec}"


def _names(entry: Any, mesh: Any) -> tuple[str, ...]:
    """Axes that cut a dimension; those of size one cut nothing."""
    names = entry if isinstance(entry, tuple) else (entry,) if entry else ()
    return tuple(n for n in names if mesh.shape[n] > 1)
