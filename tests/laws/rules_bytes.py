"""Planned against emitted bytes of one operator in random layouts.

`trial` draws layouts for the arguments and results of one operator and a candidate of its rule, writes the schedule
of that choice, compiles it, and compares every emitted collective with the predicted one: kinds, bytes and numbers
must be equal, to the byte. The values are compared with the plain operator as well. So a rule whose local function
sends something else than it states, a step of a redistribution that the compiler writes otherwise, and a type that
verification reads wrongly are all found, for every element type.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding

from jshard._core import jaxcompat as compat
from jshard._core.errors import ShardError
from jshard._core.topology import Topology, from_mesh
from jshard._lower.spmd import spmd
from jshard._network.candidates import CandidateCache
from jshard._plan.schedule_cost import collective_rows
from jshard._program.graph import Literal, Program
from jshard._program.trace import build
from jshard._rules.sent_collectives import internal_collectives
from jshard._schedule.schedule import Assignment, schedule
from jshard._verify import Predicted, Verification, compare, read_program
from tests.laws.rules_validator import _QUICK, MESHES, Case


DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2",
    "bfloat16", "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
_SCATTERS = {
    "scatter": lax.scatter, "scatter-add": lax.scatter_add, "scatter-sub": lax.scatter_sub,
    "scatter-mul": lax.scatter_mul, "scatter-max": lax.scatter_max, "scatter-min": lax.scatter_min,
}  # fmt: skip
# Effects would run; keys have a type of their own; the functions inside are traced for the type they have.
_AS_THEY_ARE = (
    "callback",
    "debug",
    "random_",
    "threefry",
    "reduce_window",
    "select_and",
    "shard_map",
    "while",
    "cond",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Single:
    """A program of one operator, with values for its arguments."""

    name: str
    closed: Any
    values: tuple[Any, ...]


def in_dtype(case: Case, dtype: str) -> Single | None:
    """The operator on values of another type; None where it does not take that type."""
    op = case.op
    given = [
        v for v, lit in zip(case.values, op.literals or (None,) * len(op.ins), strict=True) if lit is None
    ]
    shared = [a for a in op.ins if op.outs and a.dtype == op.outs[0].dtype]
    old = (shared or list(op.ins) or list(op.outs))[0].dtype if op.ins or op.outs else None
    # Compilers gather nothing of what is one number everywhere.
    if old is None or not compat_dtype(old) or not given and op.primitive == "broadcast_in_dim":
        return None
    if op.primitive.startswith(_AS_THEY_ARE) and dtype != str(old):
        return None
    if any(v.size == 0 for v in given):
        return None  # what comes of nothing is constant: compilers fold it
    if dtype == "bool" and op.primitive in ("lt", "le", "gt", "ge") and len(given) < len(op.ins):
        return None  # nothing is below false: compilers drop the operand
    changed = [
        _cast(v, dtype) if v.dtype == old and _moves(op.primitive, k) else v for k, v in enumerate(given)
    ]
    params = {k: v for k, v in op.params.items()}
    for k in ("preferred_element_type", "out_sharding", "sharding"):
        if k in params and dtype != str(old):
            params[k] = None
    if op.primitive == "gather" and dtype != str(old):
        params["fill_value"] = None if params["fill_value"] is None else 0
    if op.primitive == "iota":
        params["dtype"] = np.dtype(dtype)

    def run(*xs: Any) -> Any:
        rest = iter(xs)
        literals = op.literals or (None,) * len(op.ins)
        operands = [next(rest) if lit is None else _literal(lit, old, dtype) for lit in literals]
        if op.primitive in _SCATTERS and dtype != str(old):
            keep = ("indices_are_sorted", "unique_indices", "mode")
            return _SCATTERS[op.primitive](
                *operands, params["dimension_numbers"], **{k: params[k] for k in keep}
            )
        return case.bind(*operands, **params)

    try:
        closed = jax.make_jaxpr(run)(*changed)
        jax.jit(run, compiler_options=_QUICK).lower(*changed).compile()
    except Exception:  # JAX says in many ways that an operator does not take a type
        return None
    name = f"{op.primitive} {dtype} " + " ".join(str(list(np.shape(v))) for v in changed)
    return Single(name, closed, tuple(changed))


def compat_dtype(dtype: Any) -> bool:
    """Whether elements of a type are plain numbers."""
    return not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def _moves(primitive: str, operand: int) -> bool:
    """Whether an operand is data and no index, start or size."""
    first = {"gather": 1, "dynamic_slice": 1, "dynamic_update_slice": 2, "ragged_dot_general": 2}.get(
        primitive
    )
    if primitive in _SCATTERS:
        return operand != 1
    return first is None or operand < first


def _cast(v: Any, dtype: str) -> Any:
    x = np.asarray(v)
    x = x.real if np.iscomplexobj(x) and not dtype.startswith("complex") else x
    if dtype == "bool":
        return x > np.median(x) if x.size else x.astype(bool)
    if dtype.startswith("u"):
        x = np.abs(x)
    if np.issubdtype(x.dtype, np.floating):
        x = np.where(np.isfinite(x), x, 1.0)
        x = np.clip(x * (1 if dtype.startswith(("float", "bfloat", "complex")) else 4), -64, 64)
    return x.astype(jnp.dtype(dtype))


def _literal(value: Any, old: Any, dtype: str) -> Any:
    # Three: nothing that is below zero, times one or plus zero, which compilers drop with the operand.
    kept = dtype == str(old) or getattr(value, "dtype", old) != old
    return value if kept else _cast(np.full(np.shape(value), 3), dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """What a trial found: `text` is empty where planned and emitted are equal and the values are right."""

    text: str = ""
    rows: int = 0
    kinds: tuple[str, ...] = ()


def trial(single: Single, devices: int, rng: random.Random, chip: Any = None, mesh: Any = None) -> Outcome:
    """One random choice of layouts on a mesh of so many devices; `mesh` of a compiler where nothing can run."""
    names, sizes = MESHES[devices]
    runs = mesh is None
    if mesh is None:
        some = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
        mesh = Mesh(some, names, axis_types=(AxisType.Auto,) * len(sizes))
    topology = from_mesh(mesh, chip) if chip is not None else from_mesh(mesh)
    program = build(single.closed, name="f", input_names=[f"x{k}" for k in range(len(single.values))])
    choice = draw(program, topology, rng)
    try:
        made = schedule(choice)
    except ShardError:
        return Outcome()  # a partial sum cannot be made from a block
    planned = [
        Predicted(r.kind, r.axes, r.bytes, r.operator, r.count, r.id) for r, _ in collective_rows(made, {})
    ]
    ins = [choice.result_layout(program.operators[i].results[0]) for i in program.inputs]
    places = [NamedSharding(mesh, lay.spec) for lay in ins]
    every = [*single.values, *program.constants]
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=p) for v, p in zip(every, places, strict=True)]
    compiled = jax.jit(spmd(made, mesh)).lower(*shapes).compile(compiler_options=_QUICK if runs else None)
    v = compare(planned, read_program(compiled))
    text = differs(v)
    if not text and runs and single.values:
        given = [jax.device_put(x, p) for x, p in zip(every, places, strict=True)]
        plain = jax.jit(compat.as_function(single.closed), compiler_options=_QUICK)
        text = _unlike(plain(*single.values), compiled(*given))
    where = "; ".join(f"{choice.result_layout(t)}" for t in range(len(program.tensors)))
    return Outcome(
        text and f"{single.name} on {topology.mesh}: {where}\n{text}",
        len(planned),
        tuple(p.kind for p in planned),
    )


def draw(program: Program, topology: Topology, rng: random.Random) -> Assignment:
    """A random state for every operator of a program in which no tensor has several readers.

    Half of the draws are among the states that leave sums or send something themselves, where there are any.
    """
    interner = CandidateCache(program, topology.mesh)
    states = tuple(interner.candidates_of(op) for op in program.operators)
    state = []
    for s in states:
        every = range(len(s))
        busy = [
            k
            for k in every
            if any(c.layout(k).partial for c in (*s.operands, *s.results))
            or s.op is not None
            and internal_collectives(s.rule, s.candidates[k], topology.mesh, s.op.outs, s.op.ins)
        ]
        state.append(rng.choice(busy if busy and rng.random() < 0.5 else every))
    return Assignment(program, topology, states, tuple(state), {})


def differs(v: Verification) -> str:
    """The table where anything differs, be it a byte."""
    exact = all(abs(p - e) <= 1e-6 * max(p, e) for p, e in (r.bytes for r in v.rows))
    kinds = all({p.kind for p in r.predicted} == {e.kind for e in r.emitted} for r in v.rows)
    return "" if exact and kinds and not v.extra and not v.missing and v.program.complete else str(v)


def _unlike(want: Sequence[Any], got: Sequence[Any]) -> str:
    for k, (w, g) in enumerate(zip(want, got, strict=True)):
        a, b = np.asarray(w), np.asarray(g)
        if a.dtype.kind == "V" or a.dtype.itemsize <= 2 and jnp.issubdtype(a.dtype, jnp.floating):
            eps = float(jnp.finfo(a.dtype).eps)
            a, b = a.astype(np.float32), b.astype(np.float32)
        else:
            eps = float(jnp.finfo(a.dtype).eps) if jnp.issubdtype(a.dtype, jnp.inexact) else 0.0
        scale = max(1.0, float(np.max(np.abs(a[np.isfinite(a)]), initial=0.0)))
        if a.shape != b.shape or not np.allclose(a, b, rtol=64 * eps, atol=64 * eps * scale, equal_nan=True):
            return f"result {k} differs:\n{a}\n{b}"
    return ""


def singles(cases: Sequence[Case], dtypes: Sequence[str] = DTYPES) -> Iterator[Single]:
    """Every operator on every type that it takes."""
    for case in cases:
        for dtype in dtypes:
            made = in_dtype(case, dtype)
            if made is not None:
                yield made


__all__ = ["DTYPES", "Literal", "Outcome", "Single", "draw", "in_dtype", "singles", "trial"]
