"""The reference check of sharding rules: every candidate runs on devices and is compared with the unsharded operator.

`cases(fn, *args)` evaluates a function equation by equation and keeps every operator with the values it saw.
`check` runs candidates of a case in `shard_map` (many in one program, to compile once) and names those whose
reassembled results differ: *wrong* rules. Results that a layout calls replicated must agree on all devices.
`missing` cuts operands in two by hand, runs the plain operator on the halves and looks whether the halves'
results concatenate, add up, or agree: a cut that works and that no candidate offers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jshard._core import jaxcompat as compat
from jshard._core.layout import Layout, MeshAxes
from jshard._rules.lookup import rules_for
from jshard._rules.registry import LocalContext, OpView, block_index
from jshard._rules.rule import Candidate, Rule, candidates, operand_layouts, result_layouts


MESHES = {
    2: (("x",), (2,)),
    4: (("x", "y"), (2, 2)),
    8: (("x", "y"), (2, 4)),
    88: (("x", "y", "z"), (2, 2, 2)),
}
_CALLS = {
    "jit": "jaxpr", "closed_call": "call_jaxpr", "eval_jaxpr": "call_jaxpr", "call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "remat2": "jaxpr",
}  # fmt: skip


# Sub-programs of their own, not operators with factors.
_CONTROL = ("while", "scan", "cond", "custom_linear_solve")
# Programs that run once on a few numbers: compile quickly.
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One operator with values: what the judge runs."""

    op: OpView
    eqn: Any
    values: tuple[Any, ...]

    def bind(self, *operands: Any, **params: Any) -> list[Any]:
        out = self.eqn.primitive.bind(*operands, **compat.bind_params(self.eqn, params))
        return list(out) if self.eqn.primitive.multiple_results else [out]

    def __str__(self) -> str:
        shapes = ", ".join(f"{a.dtype}{list(a.shape)}" for a in self.op.ins)
        params = {k: v for k, v in self.op.params.items() if v is not None and "jaxpr" not in k}
        return f"{self.op.primitive}({shapes}) {params}"

    @property
    def key(self) -> str:
        """Cases with one key are the same operator."""
        return str(self) + str([a is None for a in self.op.literals])


def cases(fn: Callable[..., Any], *args: Any) -> list[Case]:
    """Every operator that `fn(*args)` runs, calls walked into, with concrete operands.

    The whole function runs as one program that gives every intermediate value.
    """
    leaves = jax.tree.leaves(args)
    found: list[tuple[OpView, Any]] = []

    def run(*a: Any) -> Any:
        found.clear()
        values: list[Any] = []
        _walk(traced.jaxpr, a, found, values)
        return values

    traced = jax.jit(fn).trace(*args)
    values = jax.jit(run, compiler_options={**_QUICK, "xla_allow_excess_precision": False})(*leaves)
    return [Case(op, eqn, tuple(v)) for (op, eqn), v in zip(found, values, strict=True)]


def _walk(closed: Any, args: Sequence[Any], found: list[Any], values: list[Any]) -> list[Any]:
    jaxpr, consts = compat.open_jaxpr(closed)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(v: Any) -> Any:
        return v.val if compat.is_literal(v) else env[v]

    for e in jaxpr.eqns:
        operands = [read(v) for v in e.invars]
        name = e.primitive.name
        if name in _CALLS:
            results = _walk(e.params[_CALLS[name]], operands, found, values)
        else:
            results = e.primitive.bind(*operands, **compat.bind_params(e, e.params))
            results = list(results) if e.primitive.multiple_results else [results]
            if name not in _CONTROL:
                literals = tuple(v.val if compat.is_literal(v) else None for v in e.invars)
                avals = (tuple(v.aval for v in e.invars), tuple(v.aval for v in e.outvars))
                found.append((OpView(name, e.params, *avals, literals), e))
                values.append(operands)
        env.update(zip(e.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def sample(options: list[Candidate], limit: int, seed: int = 0) -> list[Candidate]:
    """At most `limit` candidates: those that cut by the most axes weigh more, since they find more."""
    if len(options) <= limit:
        return options
    rng = random.Random(seed)
    return sorted(options, key=lambda c: rng.random() ** (1 / (1 + sum(f != -1 for f in c.axis_codes))))[
        -limit:
    ]


def check(
    some: Sequence[Case], devices: int = 4, *, limit: int = 12, vma: bool = False, seed: int = 0
) -> tuple[int, list[str]]:
    """Runs up to `limit` candidates of each case on a mesh, all in one program.

    Gives the number of candidates tried and a line for each wrong one.
    """
    names, sizes = MESHES[devices]
    axes = MeshAxes(names, sizes)
    n = int(np.prod(sizes))
    mesh = Mesh(np.array(jax.devices()[:n]).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(sizes))
    trials: list[tuple[Case, Rule, Any, Candidate]] = []
    wrong = []
    for case in some:
        rule, entry = rules_for(case.op)
        if rule.opaque and entry is None:
            wrong.append(f"{case}: {rule.note}")
        options = [c for c in candidates(rule, axes) if any(f != -1 for f in c.axis_codes)]
        trials += [(case, rule, entry, c) for c in sample(options, limit, seed)]
    for trial, got in zip(trials, _results(trials, axes, mesh, vma), strict=True):
        case, rule, _, c = trial
        outs = result_layouts(rule, c, axes)
        problem = got if isinstance(got, str) else _compare(*got, outs, axes)
        if problem:
            lays = ", ".join(map(str, operand_layouts(rule, c, axes)))
            text = ", ".join(map(str, outs))
            wrong.append(f"{case}\n   {rule}  {c}  {lays} -> {text}\n   {problem}")
    return len(trials), wrong


def _results(trials: Sequence[Any], axes: MeshAxes, mesh: Mesh, vma: bool) -> list[Any]:
    """For each trial the plain results and every device's blocks, or the text of an error."""
    if not trials:
        return []
    runs = [_run(t[0], LocalContext(t[0].op, t[1], t[3], axes, t[0].bind), t[2], vma) for t in trials]
    distinct = list({id(t[0]): t[0] for t in trials}.values())
    given = [[v for v, lit in zip(c.values, _literals(c), strict=True) if lit is None] for c in distinct]
    place = {id(c): k for k, c in enumerate(distinct)}

    def everything(*arrays: Any) -> Any:
        return [run(*arrays[place[id(t[0])]]) for t, run in zip(trials, runs, strict=True)]

    def plain(*arrays: Any) -> Any:
        return [c.bind(*_operands(c, a), **c.op.params) for c, a in zip(distinct, arrays, strict=True)]

    try:
        blocks = jax.jit(
            jax.shard_map(
                everything,
                mesh=mesh,
                in_specs=PartitionSpec(),
                out_specs=PartitionSpec(axes.names),
                check_vma=vma,
            ),
            in_shardings=NamedSharding(mesh, PartitionSpec()),
            compiler_options=_QUICK,
        )(*given)
        expected = jax.jit(plain, compiler_options=_QUICK)(*given)
    except Exception as e:
        if len(trials) == 1:
            return [f"{type(e).__name__}: {str(e)[:600]}"]
        half = len(trials) // 2
        return _results(trials[:half], axes, mesh, vma) + _results(trials[half:], axes, mesh, vma)
    return [(expected[place[id(t[0])]], b) for t, b in zip(trials, blocks, strict=True)]


def _operands(case: Case, arrays: Sequence[Any]) -> list[Any]:
    """All operands, literals in their places."""
    rest = iter(arrays)
    return [next(rest) if lit is None else lit for lit in _literals(case)]


def _literals(case: Case) -> tuple[Any, ...]:
    return case.op.literals or (None,) * len(case.op.ins)


def _run(case: Case, ctx: LocalContext, entry: Any, vma: bool) -> Callable[..., Any]:
    """One candidate inside `shard_map`: whole operands in, this device's blocks of the results out."""
    local = entry.local_impl if entry else None
    rule, c, axes = ctx.rule, ctx.candidate, ctx.mesh
    ins, outs = operand_layouts(rule, c, axes), result_layouts(rule, c, axes)

    def body(*arrays: Any) -> Any:
        operands = [
            x if lit is not None else _addend(_block(x, lay, axes), lay.partial, axes)
            for x, lit, lay in zip(_operands(case, arrays), _literals(case), ins, strict=True)
        ]
        if vma:
            union = frozenset().union(*(compat.vma(x) for x in operands if hasattr(x, "dtype")))
            operands = [compat.cast_vma(x, union) for x in operands]
        results = list(local(ctx, *operands)) if local is not None else ctx.bind(*operands)
        done = []
        for k, (y, lay) in enumerate(zip(results, outs, strict=True)):
            want = lay.local_shape(case.op.outs[k].shape, axes)
            assert tuple(y.shape) == want, f"local result {k} has shape {tuple(y.shape)}, not {want}"
            if vma:
                extra = compat.vma(y) - frozenset(lay.axes)
                assert not extra, f"local result {k} varies over {set(extra)}, its layout is {lay}"
                y = compat.cast_vma(y, frozenset(lay.partial))
            y = lax.psum(y, lay.partial) if lay.partial else y
            y = jnp.expand_dims(y, 0)
            done.append(compat.cast_vma(y, frozenset(axes.names)) if vma else y)
        return done

    return body


def _block(x: Any, layout: Layout, axes: MeshAxes) -> Any:
    shape = layout.local_shape(x.shape, axes)
    for d, names in enumerate(layout.dims):
        if names:
            x = lax.dynamic_slice_in_dim(x, block_index(names, axes) * shape[d], shape[d], d)
    return x


def _addend(x: Any, partial: Sequence[str], axes: MeshAxes) -> Any:
    """Different addends on each device along the partial axes, with sum exactly `x`: 2x, -x, 4x, -4x, ..."""
    for a in partial:
        assert axes.size(a) % 2 == 0
        weights = np.array([2, -1] + [4, -4] * (axes.size(a) // 2 - 1))
        addend = x * jnp.asarray(weights, x.dtype)[lax.axis_index(a)]
        if jnp.issubdtype(x.dtype, jnp.inexact):
            first = jnp.where(lax.axis_index(a) == 0, x, jnp.zeros_like(x))
            # Masks hold numbers near the largest: four of them would be infinite.
            addend = jnp.where(jnp.abs(x) < 1e30, addend, first)
        x = addend
    return x


def _compare(plain: Sequence[Any], got: Sequence[Any], layouts: Sequence[Layout], axes: MeshAxes) -> str:
    """Every device's block against its place in the plain result."""
    for k, (want, have, lay) in enumerate(zip(plain, got, layouts, strict=True)):
        whole, stack = _numbers(want), _numbers(have)
        exact = not np.issubdtype(whole.dtype, np.inexact)
        if not exact:
            scale = max(1.0, float(np.max(np.abs(whole[np.isfinite(whole)]), initial=0.0)))
            tolerance = min(scale, 1e6) * 64 * float(np.finfo(whole.dtype).eps)
        for device, place in enumerate(np.ndindex(*axes.sizes)):
            at = dict(zip(axes.names, place, strict=True))
            w, y = whole, stack[device]
            for d, names in enumerate(lay.dims):
                index = 0
                for a in names:
                    index = index * axes.size(a) + at[a]
                n = w.shape[d] // axes.size(*names)
                w = w.take(range(index * n, (index + 1) * n), d) if names else w
            if y.shape != w.shape or y.dtype != w.dtype:
                return f"result {k} is {y.dtype}{y.shape}, not {w.dtype}{w.shape}"
            with np.errstate(over="ignore"):  # masks hold numbers near the largest
                close = np.allclose(w, y, tolerance, tolerance, equal_nan=True) if not exact else False
            same = np.array_equal(w, y) if exact else close
            if not same:
                return f"result {k} on device {device} differs:\n{w}\n{y}"
    return ""


def _numbers(x: Any) -> np.ndarray:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    return x.astype(np.float32) if x.dtype.kind == "V" or x.dtype == jnp.bfloat16 else x


def missing(case: Case) -> tuple[int, list[str]]:
    """Cuts in two that work without communication and that no candidate offers.

    A cut counts when it also works after the operands' elements are shuffled twice: not by luck of the values.
    """
    rule, _ = rules_for(case.op)
    axes = MeshAxes(("x",), (2,))
    offered = set()
    for c in candidates(rule, axes):
        ins, outs = operand_layouts(rule, c, axes), result_layouts(rule, c, axes)
        if not any(lay.partial for lay in ins):
            offered.add((_cut(ins), _cut(outs)))
    options = [[None] + [d for d, s in enumerate(a.shape) if s % 2 == 0 and s > 0] for a in case.op.ins]
    found = []
    if any(math.prod(a.shape) == 0 for a in case.op.ins):
        return 0, []  # every way of cutting nothing gives nothing
    cuts = [cut for cut in itertools.product(*options) if any(d is not None for d in cut)]
    for cut in cuts:
        ways = {way for way in _ways(case, cut) if (cut, way) not in offered}
        for seed in (1, 2):
            ways = ways and ways & _ways(_shuffled(case, seed), cut)
        for way in sorted(ways, key=str):
            found.append(f"{case}: operands cut at {cut} give results {way}; the rule is {rule}")
    return len(cuts), found


def _shuffled(case: Case, seed: int) -> Case:
    def shuffle(x: Any) -> Any:
        if jnp.ndim(x) == 0 or jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        order = np.random.RandomState(seed).permutation(x.size)
        return jnp.ravel(x)[order].reshape(x.shape)

    return dataclasses.replace(case, values=tuple(map(shuffle, case.values)))


def _ways(case: Case, cut: Sequence[int | None]) -> set[tuple[Any, ...]]:
    """The ways in which results of the plain operator on halves make up the whole results."""
    halves = []
    try:
        plain = case.bind(*case.values, **case.op.params)
        for h in (0, 1):
            blocks = [
                x
                if d is None
                else lax.slice_in_dim(x, h * x.shape[d] // 2, (h + 1) * x.shape[d] // 2, axis=d)
                for x, d in zip(case.values, cut, strict=True)
            ]
            halves.append(case.bind(*blocks, **case.op.params))
    except Exception:
        return set()  # the parameters do not fit halves
    if any(len(h) != len(plain) for h in halves):
        return set()
    each = [_how(w, a, b) for w, a, b in zip(plain, *halves, strict=True)]
    # All results whole: the cut operand does not matter, which is no gain over not cutting it.
    return {way for way in itertools.product(*each) if any(w is not None for w in way)}


def _cut(layouts: Sequence[Layout]) -> tuple[Any, ...]:
    return tuple(
        "sum" if lay.partial else next((d for d, axes in enumerate(lay.dims) if axes), None)
        for lay in layouts
    )


def _how(want: Any, a: Any, b: Any) -> list[Any]:
    """The ways two halves make up the whole: a dimension, "sum", or None when both are the whole."""
    w, p, q = _numbers(want), _numbers(a), _numbers(b)
    same = dict(rtol=1e-4, atol=1e-5, equal_nan=True) if np.issubdtype(w.dtype, np.inexact) else {}
    close = (lambda x, y: np.allclose(x, y, **same)) if same else np.array_equal
    ways: list[Any] = []
    if p.shape == w.shape == q.shape and close(p, w) and close(q, w):
        ways.append(None)
    elif p.shape == w.shape == q.shape and w.dtype != bool and close(p + q, w):
        ways.append("sum")
    for d in range(w.ndim):
        if p.ndim == w.ndim and p.shape == q.shape and p.shape[d] * 2 == w.shape[d]:
            joined = np.concatenate([p, q], d)
            if joined.shape == w.shape and close(joined, w):
                ways.append(d)
    return ways
