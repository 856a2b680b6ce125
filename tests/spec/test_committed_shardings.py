"""Committed arguments keep their shardings where nothing is pinned; moves that remain are counted and listed."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jshard
from jshard._plan.rows import EntryRow
from jshard._spec.committed_shardings import equivalent_axes, max_received_bytes


DEVICES = np.array(jax.devices()[:8])
AUTO, EXPLICIT = (
    Mesh(DEVICES.reshape(4, 2), ("d", "m"), axis_types=(kind,) * 2)
    for kind in (AxisType.Auto, AxisType.Explicit)
)
A, B = (jnp.asarray(np.random.default_rng(s).normal(size=(16, 16)), jnp.float32) for s in (0, 1))


def fn(x, w):
    return jnp.tanh(x @ w)


def put(x, mesh, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def layouts(plan):
    return [r.layout.dims for r in plan.inputs]


def said(plan):
    """What the plan says of arguments: layouts, pins, moves before a call."""
    return layouts(plan), [r.pinned for r in plan.inputs], plan.entry


PLACES = {
    "auto": (AUTO, contextlib.nullcontext),
    "auto in context": (AUTO, lambda: jax.set_mesh(AUTO)),
    "explicit": (EXPLICIT, contextlib.nullcontext),
    "explicit in context": (EXPLICIT, lambda: jax.set_mesh(EXPLICIT)),
}


@pytest.mark.parametrize("place", PLACES)
def test_what_is_cut_stays_where_it_lies(place):
    mesh, context = PLACES[place]
    with context():
        f = jshard.shard(fn)
        x, w = put(A, mesh, "d"), put(B, mesh, None, "m")
        plan = f.plan(x, w)
        assert said(plan) == ([(("d",), ()), ((), ("m",))], [True, True], ())
        assert "as they lie: x, w" in plan.steps
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in (x, w)]
        assert f.plan(*shapes) is plan
        for _ in range(2):
            np.testing.assert_allclose(f(x, w) + 0, fn(A, B), atol=1e-5)
        assert len(f._executables) == 1
        # Types say where arguments of a trace lie; on a mesh with Auto axes nothing does.
        g = f if mesh is EXPLICIT else jshard.shard(fn, mesh=mesh)
        np.testing.assert_allclose(jax.jit(g)(x, w), fn(A, B), atol=1e-5)
        assert len(g._executables) == 1


def test_one_device_the_host_and_every_device_are_no_wish():
    f, free = jshard.shard(fn, mesh=AUTO), jshard.shard(fn, mesh=AUTO).plan(np.asarray(A), np.asarray(B))
    everywhere, one = put(A, AUTO), jax.device_put(B, jax.devices()[3])
    plan = f.plan(everywhere, one)
    assert plan == free and not any(r.pinned for r in plan.inputs)
    moved = {e.path: e for e in plan.entry}
    received = 16 * 16 * 4.0 / plan.inputs[1].layout.pieces(plan.mesh)
    assert moved["w"] == EntryRow("w", "cpu:3", str(plan.inputs[1].layout), received)
    with jax.set_mesh(AUTO):  # here every new array is whole on every device
        assert not any(r.pinned for r in jshard.shard(fn).plan(A + 0, jnp.ones((16, 16))).inputs)
    whole = jshard.shard(fn, ((8, 1), None), mesh=AUTO).plan(everywhere, B)
    assert [(e.path, e.bytes) for e in whole.entry] == [("x", 0.0)]


def test_state_comes_back_where_it_is_planned_and_nothing_is_planned_again(caplog):
    traces = []

    def step(params, x):
        traces.append(1)
        grads = jax.grad(lambda p: (fn(x, p["w"]) @ p["v"]).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), x.sum()

    f = jshard.shard(step, mesh=AUTO, level=2)
    params = {"w": A, "v": B}
    with jax.log_compiles(True), caplog.at_level(logging.WARNING):
        for k in range(4):
            params, _ = f(params, put(A + k, AUTO, "d"))
            assert len(f._executables) == 1
        # A batch from the host is another wish than one that lies cut, as it is another program for `jit`.
        for _ in range(2):
            params, _ = f(params, np.asarray(A))
    assert len(f._executables) == 2 and len(traces) == 1
    compiled = [r for r in caplog.records if r.message.startswith("Finished XLA compilation of jit(step)")]
    assert len(compiled) == 2
    told = [r.message for r in caplog.records if "planned anew" in r.message]
    assert len(told) == 1 and "argument [0][1] lies P('d') on d=4 x m=2 -> anywhere" in told[0]


def test_calls_that_lie_alike_run_no_python(monkeypatch):
    from jshard._api import shard

    f = jshard.shard(fn)
    x, w = put(A, AUTO, "d"), put(B, AUTO, None, "m")
    f(x, w)
    seen = []
    real = shard.Sharded._executable_for_arrays
    monkeypatch.setattr(
        shard.Sharded, "_executable_for_arrays", lambda self, *a: seen.append(a) or real(self, *a)
    )
    for _ in range(5):
        f(x, w)
    assert not seen


def test_the_plan_depends_on_the_call_and_not_on_those_before():
    first, second = jshard.shard(fn, mesh=AUTO), jshard.shard(fn, mesh=AUTO)
    x, w = put(A, AUTO, ("d", "m")), put(B, AUTO, ("d", "m"))  # no plan has a free argument so
    calls = [(x, w), (A, B), (x, B), (A, w)]
    plans = [first.plan(*c) for c in calls]
    again = [second.plan(*c) for c in calls[::-1]][::-1]
    assert plans == again
    pinned = [tuple(r.pinned for r in p.inputs) for p in plans]
    assert pinned == [(True, True), (False, False), (True, False), (False, True)]


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (Mesh(DEVICES, ("q",)), [(("q_0",), ()), ((), ("q_1",))]),
        (Mesh(DEVICES.reshape(2, 4), ("a", "b")), [(("a", "b_0"), ()), ((), ("b_1",))]),
        (Mesh(DEVICES.reshape(4, 2).T, ("p", "q")), [(("q",), ()), ((), ("p",))]),
        (Mesh(DEVICES.reshape(2, 2, 2), ("a", "b", "c")), [(("a", "b"), ()), ((), ("c",))]),
    ],
    ids=["one axis", "other sizes", "transposed", "finer"],
)
def test_axes_of_another_mesh_over_the_same_devices(given, want):
    f = jshard.shard(fn, mesh=given)
    x, w = put(A, AUTO, "d"), put(B, AUTO, None, "m")
    plan = f.plan(x, w)
    assert said(plan) == (want, [True, True], ())
    np.testing.assert_allclose(f(x, w), fn(A, B), atol=1e-5)


def test_what_the_mesh_cannot_express_is_moved_counted_and_printed():
    f = jshard.shard(fn, mesh=Mesh(DEVICES[::-1], ("q",)), level=1)
    x = put(A, AUTO, None, "d")
    plan = f.plan(x, B)
    (row,) = plan.entry
    assert (row.path, row.lies) == ("x", "P(None, 'd') on d=4 x m=2")
    blocks = {d: i for d, i in plan.in_shardings[0][0].devices_indices_map(A.shape).items()}
    have = x.sharding.devices_indices_map(A.shape)

    def missing(device):
        place = np.zeros(A.shape, bool)
        place[blocks[device]] = True
        place[have[device]] = False
        return 4 * place.sum()

    assert row.bytes == max(map(missing, DEVICES)) > 0
    assert "moved before each such call" in str(plan) and "P(None, 'd') on d=4 x m=2" in str(plan)
    assert "moved before each such call" in plan.to_markdown() + plan._repr_html_()
    np.testing.assert_allclose(f(x, B), fn(A, B), atol=1e-5)
    assert not f.plan(jax.device_put(A, plan.in_shardings[0][0]), B).entry


def test_a_pin_goes_before_where_an_argument_lies():
    f = jshard.shard(fn, (P("m", "d"), None), mesh=AUTO)
    plan = f.plan(put(A, AUTO, "d"), put(B, AUTO, None, "m"))
    assert layouts(plan) == [(("m",), ("d",)), ((), ("m",))]
    assert plan.entry == (EntryRow("x", "P('d') on d=4 x m=2", "(m, d)", 4.0 * 8 * 4),)
    partly = jshard.shard(fn, ((None, None), None), mesh=AUTO).plan(put(A, AUTO, "d"), B)
    assert layouts(partly)[0] == (("d",), ())


def test_a_default_gives_way_where_no_plan_keeps_it():
    def step(state):
        return {k: v * 2 for k, v in state.items()}

    lies = {k: put(A, AUTO, "d") for k in "abcd"}
    kept = jshard.shard(step, mesh=AUTO, level=1).plan(lies)
    least = jshard.shard(step, mesh=AUTO, level=1).plan({k: A for k in "abcd"})
    assert least.cost.peak_bytes < kept.cost.peak_bytes and not kept.entry
    budget = int(least.cost.peak_bytes + kept.cost.peak_bytes) // 2
    f = jshard.shard(step, mesh=AUTO, memory_budget=budget)
    plan = f.plan(lies)
    assert plan.cost.peak_bytes <= budget and {e.path for e in plan.entry} == {f"state.{k}" for k in "abcd"}
    told = [s for s in plan.steps if "lie" in s]
    assert told[0].startswith(
        f"not as they lie: state.a, state.b, state.c, state.d, since no plan fits {budget:,}"
    )
    np.testing.assert_allclose(f(lies)["a"], 2 * A)
    assert len(f._executables) == 1 and f.plan(lies) == plan


def test_the_mesh_is_that_of_the_arguments():
    few = Mesh(DEVICES[:4].reshape(2, 2), ("a", "b"))
    f = jshard.shard(fn, ((4, None), None))
    x = put(A, few, "a")
    plan = f.plan(x, B)
    assert str(plan.mesh) == "a=2 x b=2" and plan.jax_mesh == few
    assert f(x, B).sharding.device_set == set(few.devices.flat)
    assert f.plan(put(A, few), B).mesh == plan.mesh  # whole on every device of it
    more = jshard.shard(fn, ((8, 1), None)).plan(x, B)  # needs more devices than it is on
    assert more.mesh.total == jax.device_count() and more.entry[0].path == "x"
    everywhere = f.plan(A, B)
    assert everywhere.mesh.total == jax.device_count()
    # Over different devices there is no mesh of theirs.
    both = jshard.shard(fn).plan(x, put(B, AUTO, "d"))
    assert both.mesh.total == jax.device_count() and {e.path for e in both.entry} == {"x", "w"}
    given = jshard.shard(fn, mesh=AUTO).plan(x, B)
    assert given.mesh.total == 8 and given.entry[0].path == "x"


def test_shapes_that_carry_a_sharding_on_a_description():
    machine = jshard.topology("v5e:2x4", {"data": 2, "model": 4}, compiles=False)
    shape = lambda *spec: jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(machine.jax_mesh, P(*spec)))  # noqa: E731  # fmt: skip
    f = jshard.shard(fn, mesh=machine)
    plan = f.plan(shape("data"), shape(None, "model"))
    assert said(plan) == ([(("data",), ()), ((), ("model",))], [True, True], ())
    assert jshard.shard(fn).plan(shape("data"), shape(None, "model")).mesh == plan.mesh
    pinned = jshard.shard(fn, (P("model"), None), mesh=machine).plan(shape("data"), shape())
    assert [(e.path, e.lies) for e in pinned.entry][:1] == [("x", "P('data') on data=2 x model=4")]


def test_arguments_of_a_trace_lie_as_their_types_say():
    x, w = put(A, EXPLICIT, "d"), put(B, EXPLICIT, None, "m")
    with jax.set_mesh(EXPLICIT):
        f = jshard.shard(fn)
        y = jax.jit(lambda a, b: f(a * 2, b))(x, w)
        np.testing.assert_allclose(y, fn(2 * A, B), atol=1e-5)
        (program,) = f._executables.values()
        assert layouts(program.prepared.plan) == [(("d",), ()), ((), ("m",))]
        grad = jax.grad(lambda a: f(a, w).sum())(x)
        np.testing.assert_allclose(grad, jax.grad(lambda a: fn(a, B).sum())(A), atol=1e-4)


def test_a_training_loop_on_arrays_that_were_placed():
    """Weights and batch as a user of `jit` places them: no move, no second plan, the losses of `jit`."""
    tx = optax.adam(1e-2)

    def step(params, state, x):
        loss, grads = jax.value_and_grad(lambda p: (jnp.tanh(x @ p["w"]) @ p["v"]).var())(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = {"w": put(A, AUTO, None, "m"), "v": put(B, AUTO, "m", None)}
    state = jax.jit(tx.init)(params)
    want = jax.jit(step)
    f = jshard.shard(step, donate_argnums=(0, 1))
    plan = f.plan(params, state, put(A, AUTO, "d"))
    assert {r.path: r.layout.dims for r in plan.inputs if r.path in ("params.w", "x")} == {
        "params.w": ((), ("m",)), "x": (("d",), ()),
    }  # fmt: skip
    p, s = params, state
    params, state = jax.tree.map(lambda a: a + 0, (params, state))
    for k in range(3):
        x = put(A + k, AUTO, "d")
        p, s, loss = want(p, s, x)
        params, state, got = f(params, state, x)
        np.testing.assert_allclose(got, loss, rtol=1e-5)
    assert len(f._executables) <= 2
    assert params["w"].sharding.is_equivalent_to(p["w"].sharding, 2)


OUT_SHARDINGS = {
    "einsum": lambda x, w: jnp.einsum("ij,jk->ik", x, w, out_sharding=P("d", "m")),
    "dot": lambda x, w: jnp.dot(x, w, out_sharding=P(None, "d")) + 1,
    "dot, whole": lambda x, w: jnp.dot(x, w, out_sharding=P(None, None)),
    "dot_general": lambda x, w: jax.lax.dot_general(x, w, (((1,), (0,)), ((), ())), out_sharding=P("m", None)),
    "reshape": lambda x, w: jnp.reshape(x @ w, (2, 8, 16), out_sharding=P("m", "d", None)),
    "gather": lambda x, w: (x @ w).at[jnp.arange(0, 16, 2)].get(out_sharding=P("d", None)),
    "scatter": lambda x, w: (x @ w).at[jnp.arange(4)].set(1.0, out_sharding=P("m", "d")),
    "broadcast": lambda x, w: jnp.broadcast_to(x @ w, (4, 16, 16), out_sharding=P("d", None, "m")),
    "zeros": lambda x, w: jnp.zeros((16, 16), out_sharding=P("d", "m")) + x @ w,
    "reshard": lambda x, w: jax.reshard(x @ w, P("m", "d")),
    "several": lambda x, w: jnp.dot(jnp.dot(x, w, out_sharding=P("d", "m")), w, out_sharding=P("m", "d")),
    "in a scan": lambda x, w: jax.lax.scan(
        lambda c, _: (jnp.dot(c, w, out_sharding=P("d", None)), None), jax.reshard(x, P("d", None)), None, length=2
    )[0],
    "device_put": lambda x, w: jax.device_put(x @ w, NamedSharding(EXPLICIT, P("d", "m"))),
}  # fmt: skip
ASKED = {
    "einsum": [(("d",), ("m",))], "dot": [((), ("d",))], "dot, whole": [((), ())], "dot_general": [(("m",), ())],
    "reshape": [(("m",), ("d",), ())], "gather": [(("d",), ())], "scatter": [(("m",), ("d",))],
    "broadcast": [(("d",), (), ("m",))], "zeros": [(("d",), ("m",))], "reshard": [(("m",), ("d",))],
    "several": [(("d",), ("m",)), (("m",), ("d",))], "in a scan": [(("d",), ()), (("d",), ())],
    "device_put": [(("d",), ("m",))],
}  # fmt: skip


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("name", OUT_SHARDINGS)
def test_out_sharding_inside_is_a_pin(name, typed):
    f = OUT_SHARDINGS[name]
    with jax.set_mesh(EXPLICIT):
        x, w = (put(A, EXPLICIT, "d"), put(B, EXPLICIT, None, "m")) if typed else (A, B)
        want, slope = f(A, B), None
        if typed and name in ("einsum", "dot", "reshard", "several", "in a scan"):
            slope = jax.grad(lambda a: f(a, B).sum())(A)
        sharded = jshard.shard(f)
        plan = sharded.plan(x, w)
        made = [r.results[0].dims for r in plan.operators if r.primitive in ("out_sharding", "reshard")]
        for asked in ASKED[name]:
            assert asked in made, (asked, made)
        for _ in range(2):
            np.testing.assert_allclose(sharded(x, w), want, atol=1e-4)
        if slope is not None:
            np.testing.assert_allclose(jax.grad(lambda a: sharded(a, w).sum())(x), slope, atol=1e-3)


def test_what_jax_does_with_types_is_no_pin():
    """`auto_axes` takes types away, and a transposition goes back to the type of what was given."""

    def f(x, w):
        y = jax.sharding.auto_axes(lambda a, b: a @ b, out_sharding=P("d", "m"))(x, w)
        return (jax.reshard(y, P("m", None)) ** 2).sum()

    with jax.set_mesh(EXPLICIT):
        plan = jshard.shard(jax.grad(f)).plan(A, B)
    pins = [(op, pin) for op, _, _, pin in plan.search_again.request.pins]
    assert sorted(str(p) for _, p in pins) == ["P('d', 'm')", "P('m', None)"]


def test_captured_arrays_of_an_explicit_mesh():
    w = put(B, EXPLICIT, None, "m")
    for context in (contextlib.nullcontext, lambda: jax.set_mesh(EXPLICIT)):
        for mesh in (None, EXPLICIT):
            with context():
                f = jshard.shard(lambda x: fn(x, w), mesh=mesh)
                np.testing.assert_allclose(f(A) + 0, fn(A, B), atol=1e-5)


def test_functions_that_only_types_make_right():
    def f(x, w):
        y = jnp.where(x > 0, jnp.dot(x, w, out_sharding=P("d", None)), x)
        return jax.lax.with_sharding_constraint(y, P("d", None))

    with jax.set_mesh(EXPLICIT):
        x = put(A, EXPLICIT, "d", None)
        g = jshard.shard(f)
        np.testing.assert_allclose(g(x, B), f(x, B), atol=1e-5)
        slope = jax.grad(lambda a: (f(a, B) ** 2).sum())(x)
        np.testing.assert_allclose(jax.grad(lambda a: (g(a, B) ** 2).sum())(x), slope, atol=1e-4)
        np.testing.assert_allclose(
            jshard.shard(jax.grad(lambda a: (f(a, B) ** 2).sum()))(x), slope, atol=1e-4
        )


def every_spec(names, ndim):
    """Every way to cut `ndim` dimensions by ordered groups of axes."""
    for count in range(len(names) + 1):
        for chosen in itertools.permutations(names, count):
            for ends in itertools.combinations_with_replacement(range(count + 1), ndim - 1):
                edges = (0, *ends, count)
                yield tuple(chosen[a:b] for a, b in itertools.pairwise(edges))


def grids(rng):
    sizes = rng.choice([(8,), (4, 2), (2, 4), (2, 2, 2)])
    devices = list(DEVICES)
    if rng.random() < 0.3:
        rng.shuffle(devices)
    grid = np.array(devices).reshape(sizes)
    return Mesh(grid.T if rng.random() < 0.3 else grid, tuple("abc"[: grid.ndim]))


@pytest.mark.parametrize("seed", range(40))
def test_axes_are_found_exactly_where_there_are_some(seed):
    rng = random.Random(seed)
    there, here, shape = grids(rng), grids(rng), (16, 24)
    spec = rng.choice([s for s in every_spec(there.axis_names, 2) if any(s)])
    lying = NamedSharding(there, P(*(d or None for d in spec)))
    blocks = lying.devices_indices_map(shape)
    same = [
        s
        for s in every_spec(here.axis_names, 2)
        if NamedSharding(here, P(*(d or None for d in s))).devices_indices_map(shape) == blocks
    ]
    found = equivalent_axes(lying, shape, here)
    assert found in same if same else found is None
    target = NamedSharding(here, P(*(d or None for d in rng.choice(list(every_spec(here.axis_names, 2))))))
    most = 0
    for device, block in target.devices_indices_map(shape).items():
        new = np.zeros(shape, bool)
        new[block] = True
        new[blocks[device]] = False
        most = max(most, int(new.sum()))
    assert max_received_bytes(lying, target, shape, 4) == 4 * most
