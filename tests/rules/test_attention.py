"""Attention cut over devices: values and gradients, bytes, costs, and what the search chooses."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from jshard._core import jaxcompat as compat
from jshard._core.layout import MeshAxes
from jshard._core.topology import from_mesh, mesh_axes
from jshard._lower.spmd import spmd
from jshard._network.candidates import CandidateCache
from jshard._plan.schedule_cost import collective_rows
from jshard._program.trace import build
from jshard._rules.lookup import rules_for
from jshard._rules.registry import OpView
from jshard._rules.rule import candidates, joint_code, operand_layouts
from jshard._schedule.schedule import Assignment, schedule
from jshard._verify import Predicted, compare, read_program
from tests.helpers.attention_cases import operands, plain_attention
from tests.laws import rules_bytes, rules_validator as validator
from tests.laws.law_costs import both_costs, close, random_assignments, searched


P = jax.P


def mesh_of(*shape: int) -> jax.sharding.Mesh:
    names = ("x", "y", "z")[: len(shape)]
    types = (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, names, axis_types=types, devices=jax.devices()[: math.prod(shape)])


@functools.cache
def both_passes(kind: str, **how: Any) -> list[validator.Case]:
    """The forward and the backward operator of one attention, with values."""
    arrays, static, extra = operands(kind, **how)
    bias = {k: v for k, v in extra.items() if k == "bias"}
    rest = {k: v for k, v in extra.items() if k != "bias"}

    def loss(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return (jshard.ops.attention(q, k, v, **static, **rest, **bias) ** 2).sum()

    found = validator.cases(jax.value_and_grad(loss, (0, 1, 2, 3)), *arrays, bias)
    return [c for c in found if c.op.primitive.startswith("jshard_attention")]


# Every candidate of every kind: `python benchmarks/correctness/attention.py`.
@pytest.mark.parametrize(
    ("kind", "devices", "kv_heads", "vma"),
    [("causal_padding", 4, 4, True), ("all", 8, 1, False)],
)
def test_candidates_equal_the_unsharded_operator(kind: str, devices: int, kv_heads: int, vma: bool) -> None:
    with jax.enable_x64(True):
        tried, wrong = validator.check(
            both_passes(kind, kv_heads=kv_heads), devices, limit=3, vma=vma, seed=devices
        )
    assert tried == 6 and not wrong, "\n".join(wrong)


def pinned(static: Any, extra: Any, *specs: Any) -> Any:
    """Attention and its gradients with operands pinned, so that both passes have one cut."""

    def run(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v: jshard.ops.attention(q, k, v, **static, **extra), q, k, v)
        return out, *pull(cotangent)

    return jshard.op(run, in_strategy=(*specs, specs[0]))


def plain(static: Any, extra: Any, q: Any, k: Any, v: Any, cotangent: Any) -> Any:
    """The definition and its gradients, as one program."""

    def run(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v: plain_attention(q, k, v, **static, **extra), q, k, v)
        return out, *pull(cotangent)

    return jax.jit(run)(q, k, v, cotangent)


SEQUENCE, HEADS = P(None, "y"), P(None, None, "y")


@pytest.mark.parametrize(
    ("kind", "shape", "specs", "kinds"),
    [
        ("causal", (2, 4), (SEQUENCE,) * 3, {"permute"}),
        ("window", (2, 8), (P(None, ("x", "y")),) * 3, {"permute"}),
        ("all", (2, 4), (P(), SEQUENCE, SEQUENCE), {"all_reduce", "reduce_scatter"}),
        ("bias", (2, 4), (HEADS, P(), P()), set()),
    ],
)
def test_values_gradients_and_bytes(kind: str, shape: Any, specs: Any, kinds: set[str]) -> None:
    """Grouped, causal, windowed, with masks, segments and bias, on 8 and 16 devices, in float64."""
    with jax.enable_x64(True):
        arrays, static, extra = operands(kind, (2, 16, 4, 8) if kind != "causal" else (2, 48, 4, 8))
        cotangent = np.cos(np.arange(arrays[0].size, dtype=np.float64)).reshape(arrays[0].shape)
        sharded = jshard.shard(pinned(static, extra, *specs), mesh=mesh_of(*shape))
        plan = sharded.plan(*arrays, cotangent)
        compiled = sharded.lower(*arrays, cotangent).compile()
        got, verified = compiled(*arrays, cotangent), plan.verify(compiled)
        want = plain(static, extra, *arrays, cotangent)
    assert verified.ok, str(verified)
    used = {c.kind for c in plan.collectives if c.bytes}
    assert used <= kinds | {"all_gather", "reduce_scatter", "all_reduce"} and (kinds <= used or used & kinds)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types_go_round_the_ring(dtype: str) -> None:
    arrays, static, extra = operands("causal", dtype=jnp.dtype(dtype))
    sharded = jshard.shard(pinned(static, extra, *(SEQUENCE,) * 3), mesh=mesh_of(1, 4))
    compiled = sharded.lower(*arrays, arrays[0]).compile()
    assert sharded.plan(*arrays, arrays[0]).verify(compiled).ok
    got, want = compiled(*arrays, arrays[0]), plain(static, extra, *arrays, arrays[0])
    for g, w in zip(got, want, strict=True):
        scale, eps = float(jnp.abs(w).max()), float(jnp.finfo(dtype).eps)
        assert g.dtype == w.dtype == jnp.dtype(dtype)
        np.testing.assert_allclose(
            np.asarray(g, np.float32), np.asarray(w, np.float32), atol=16 * eps * max(1.0, scale)
        )


@functools.cache
def whole(case: validator.Case) -> list[np.ndarray]:
    """The results of the operator on one device."""
    return [np.asarray(x) for x in case.bind(*case.values, **case.op.params)]


def run_cut(case: validator.Case, shape: tuple[int, ...], cuts: tuple[str, ...]) -> list[Any]:
    """One operator cut as named along each mesh axis: its planned collectives, after the checks of values and bytes."""
    mesh = mesh_of(*shape)
    closed = compat.make_jaxpr(lambda *xs: case.bind(*xs, **case.op.params), *case.values)
    program = build(closed, name="f", input_names=[f"x{k}" for k in range(len(case.values))])
    topology, cache = from_mesh(mesh), CandidateCache(program, mesh_axes(mesh))
    (op,) = [o for o in program.operators if o.kind == "eqn"]
    states = tuple(cache.candidates_of(o) for o in program.operators)
    rule = states[op.id].rule
    codes = tuple(
        -1
        if name == "whole"
        else "btsn".index(name)
        if name in "btn"
        else len(rule.sizes) + names_of(rule).index(name)
        for name in cuts
    )
    chosen = states[op.id].index_of(codes)
    layouts = {a: c.layout(chosen) for a, c in zip(op.operands, states[op.id].operands, strict=True)}
    layouts |= {
        r: c.layout(chosen).without_partial() for r, c in zip(op.results, states[op.id].results, strict=True)
    }
    state = []
    for o, s in zip(program.operators, states, strict=True):
        ends = s.results if o.kind == "input" else s.operands
        tensor = (o.results if o.kind == "input" else o.operands)[0] if o.kind != "eqn" else None
        state.append(
            chosen if tensor is None else [ends[0].layout(k) for k in range(len(s))].index(layouts[tensor])
        )
    made = schedule(Assignment(program, topology, states, tuple(state), {}))
    rows = [r for r, _ in collective_rows(made, {})]
    given = [
        jax.device_put(x, jax.NamedSharding(mesh, layouts[program.operators[i].results[0]].spec))
        for x, i in zip(case.values, program.inputs, strict=True)
    ]
    compiled = jax.jit(spmd(made, mesh)).lower(*given).compile()
    planned = [Predicted(r.kind, r.axes, r.bytes, r.operator, r.count, r.id) for r in rows]
    text = rules_bytes.differs(compare(planned, read_program(compiled)))
    assert not text, text
    for got, want in zip(compiled(*given), whole(case), strict=True):
        scale = np.abs(want, where=np.isfinite(want), out=np.ones(want.shape)).max()
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-12 * scale)
    return rows


def names_of(rule: Any) -> list[str]:
    return [cut.name for cut in rule.joint]


@pytest.mark.parametrize(
    ("kind", "shape", "cuts"),
    [
        ("all", (4, 2), ("ring", "n")),
        ("segments", (2, 2), ("zigzag", "zigzag")),
        ("window_both", (16,), ("ring",)),
        ("bias_keys", (2, 4), ("keys", "ring")),
        ("causal", (2, 4), ("heads", "zigzag")),
        ("all", (4, 2), ("t", "keys")),
    ],
)
def test_both_passes_of_every_cut_send_what_is_planned(kind: str, shape: Any, cuts: Any) -> None:
    with jax.enable_x64(True):
        for case in both_passes(kind):
            run_cut(case, shape, cuts)


def test_bytes_of_ring_and_zigzag_are_those_of_the_formula() -> None:
    """Keys and values of a device n - 1 times, backward with their gradients; zigzag: half of each tensor twice."""
    n, itemsize = 4, 8
    with jax.enable_x64(True):
        forward, backward = both_passes("causal")
        sent = {
            (case is forward, cut): sum(r.bytes * r.count for r in run_cut(case, (n,), (cut,)))
            for case in (forward, backward)
            for cut in ("ring", "zigzag")
        }
    q, kv, lse = (math.prod(s) // n * itemsize for s in ((2, 16, 4, 8), (2, 16, 2, 8), (2, 4, 16)))
    assert sent[True, "ring"] == (n - 1) * 2 * kv
    assert sent[False, "ring"] == (n - 1) * 4 * kv
    assert sent[True, "zigzag"] == (n - 1) * 2 * kv + (q + 2 * kv) + (q + 2 * lse)
    assert sent[False, "zigzag"] == (n - 1) * 4 * kv + (3 * q + 2 * kv + 2 * lse) + (q + 2 * kv)


def test_it_is_differentiated_from_outside() -> None:
    with jax.enable_x64(True):
        arrays, static, extra = operands("causal_padding")

        def attend(q: Any, k: Any, v: Any) -> Any:
            return jshard.ops.attention(q, k, v, **static, **extra)

        sharded = jshard.shard(jshard.op(attend, in_strategy=(SEQUENCE,) * 3), mesh=mesh_of(2, 4))
        got = jax.grad(lambda *a: (sharded(*a) ** 2).sum(), (0, 1, 2))(*arrays)
        want = jax.grad(lambda *a: (plain_attention(*a, **static, **extra) ** 2).sum(), (0, 1, 2))(*arrays)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-12)


def layer(batch: int, length: int, heads: int, kv_heads: int, size: int) -> tuple[Any, Any]:
    """A training step of projections and causal attention, and the types of its arguments."""
    width = heads * size

    def loss(weights: Any, x: Any) -> Any:
        wq, wk, wv, wo = weights
        q = (x @ wq).reshape(batch, length, heads, size)
        k, v = ((x @ w).reshape(batch, length, kv_heads, size) for w in (wk, wv))
        y = jshard.ops.attention(q, k, v, causal=True).reshape(batch, length, width) @ wo + x
        return (y.astype("float32") ** 2).mean()

    w, narrow = (jax.ShapeDtypeStruct((width, n * size), "bfloat16") for n in (heads, kv_heads))
    return jax.value_and_grad(loss), (
        (w, narrow, narrow, w),
        jax.ShapeDtypeStruct((batch, length, width), "bfloat16"),
    )


def cut_factors(plan: Any) -> list[tuple[str, ...]]:
    """Per attention operator, the dimensions of q, k that the mesh axis cuts: "T", "S", "N", ..."""
    out = []
    for o in plan.operators:
        if o.primitive.startswith("jshard_attention"):
            q, k = o.operands[:2]
            out.append(
                tuple(
                    n for n, d in (*zip("BTN", q.dims, strict=False), *zip("bSK", k.dims, strict=False)) if d
                )
            )
    return out


@pytest.mark.parametrize(
    ("length", "heads", "want"), [(131_072, 8, ("T", "S")), (8_192, 64, ("N", "K")), (131_072, 5, ("T", "S"))]
)
def test_long_sequences_take_the_ring_and_many_heads_the_heads(length: int, heads: int, want: Any) -> None:
    """Sixteen v5e; the sequence of the activations is cut, the rest is the search's."""
    fn, args = layer(1, length, heads, heads, 128)
    mesh = jshard.topology("v5e:4x4", {"x": 16}, compiles=False)
    plan = jshard.shard(fn, in_strategy=(None, P(None, "x")), mesh=mesh, level=2).plan(*args)
    assert cut_factors(plan) == [want, want]
    assert plan.cost.optimal
    moved = {c.kind for c in plan.collectives if c.operator.startswith("jshard_attention")}
    assert ("permute" in moved) == (want == ("T", "S"))


def test_attention_between_activations_in_sequence_order_goes_by_heads_with_all_to_alls() -> None:
    """Ulysses: nothing but the attention is left to the search."""

    def fn(q: Any, k: Any, v: Any) -> Any:
        return jshard.ops.attention(q, k, v, causal=True)

    x = jax.ShapeDtypeStruct((1, 8192, 64, 128), "bfloat16")
    mesh = jshard.topology("v5e:4x4", {"x": 16}, compiles=False)
    spec = P(None, "x")
    plan = jshard.shard(fn, in_strategy=(spec,) * 3, out_strategy=(spec,), mesh=mesh, level=2).plan(x, x, x)
    assert cut_factors(plan) == [("N", "K")]
    assert [c.kind for c in plan.collectives] == ["all_to_all"] * 4
    assert all(c.bytes == 8192 * 64 * 128 * 2 / 16 * 15 / 16 for c in plan.collectives)


def test_decoding_over_cut_keys_combines_by_the_logsumexp() -> None:
    """One query, a long cache cut along its length: no key moves."""
    q = jax.ShapeDtypeStruct((8, 1, 8, 128), "bfloat16")
    cache = jax.ShapeDtypeStruct((8, 131_072, 8, 128), "bfloat16")
    length = jax.ShapeDtypeStruct((8, 131_072), "bool")
    mesh = jshard.topology("v5e:4x4", {"x": 16}, compiles=False)

    def decode(q: Any, k: Any, v: Any, held: Any) -> Any:
        return jshard.ops.attention(q, k, v, mask=held[:, None, None, :])

    plan = jshard.shard(
        decode, in_strategy=(None, P(None, "x"), P(None, "x"), None), mesh=mesh, level=2
    ).plan(q, cache, cache, length)
    assert cut_factors(plan) == [("S",)]
    assert {c.kind for c in plan.collectives} <= {"all_reduce", "reduce_scatter", "all_gather"}
    assert sum(c.bytes for c in plan.collectives) < 1e5


@pytest.mark.parametrize("machine", ["v5e:2x4", "h100:1x8", "cpu:8"])
def test_network_cost_is_schedule_cost(machine: str) -> None:
    fn, args = layer(2, 1024, 8, 2, 64)
    mesh = jshard.topology(machine, {"x": 2, "y": 4}, compiles=False)
    with searched() as found:
        plan = jshard.shard(fn, mesh=mesh, level=2).plan(*args)
        built, assignment = found.problems[0]
        rng = np.random.default_rng(0)
        for other in [assignment, *random_assignments(built, assignment, rng, 12)]:
            by_network, by_schedule = both_costs(built, other)
            assert close(by_network, by_schedule)
            assert by_schedule >= plan.cost.bound * (1 - 1e-9)


def test_what_a_cut_does_not_divide_is_no_candidate() -> None:
    """12 keys over 8 devices, 3 key heads over 2: neither ring, nor heads with their key heads."""
    q, k = jax.ShapeDtypeStruct((2, 16, 6, 8), "float32"), jax.ShapeDtypeStruct((2, 12, 3, 8), "float32")
    closed = jax.make_jaxpr(lambda q, k: jshard.ops.attention(q, k, k))(q, k)
    (eqn,) = [e for e in _equations(closed.jaxpr) if e.primitive.name == "jshard_attention"]
    op = OpView(
        eqn.primitive.name, eqn.params, *(tuple(v.aval for v in vs) for vs in (eqn.invars, eqn.outvars))
    )
    rule, _ = rules_for(op)
    names = [c.name for c in rule.joint]
    for axes in (MeshAxes(("x",), (8,)), MeshAxes(("x",), (2,)), MeshAxes(("x", "y"), (2, 2))):
        for c in candidates(rule, axes):
            for a, lay in zip(op.ins, operand_layouts(rule, c, axes), strict=True):
                assert lay.divides(a.shape, axes)
            used = {names[x - len(rule.sizes)] for x in c.axis_codes if x >= len(rule.sizes)}
            assert not (axes.sizes == (8,) and used) and "heads" not in used
    ring = joint_code(rule, names.index("ring"))
    assert any(ring in c.axis_codes for c in candidates(rule, MeshAxes(("x",), (2,))))


def _equations(jaxpr: Any) -> Any:
    for e in jaxpr.eqns:
        yield e
        inner = e.params.get("call_jaxpr") or e.params.get("jaxpr")
        if inner is not None:
            yield from _equations(getattr(inner, "jaxpr", inner))
