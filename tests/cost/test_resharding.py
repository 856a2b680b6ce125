"""Resharding: steps lead to the layouts they state, cost what they state, and run and differentiate as numpy does."""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec as P

from jshard._core import hardware as hardware
from jshard._core.errors import SearchError
from jshard._core.layout import Layout, MeshAxes
from jshard._core.topology import from_mesh, mesh_axes
from jshard._cost import resharding
from jshard._cost.reshard_steps import ReshardStep, apply_step, successor_steps
from jshard._cost.resharding import bytes_table, cheapest_steps, reshard_cost, seconds_table
from jshard._lower.emit_collectives import apply_reshard, permute_pairs


MESHES = {
    "2x4": MeshAxes(("x", "y"), (2, 4)),
    "2x2x2": MeshAxes(("x", "y", "z"), (2, 2, 2)),
    "3x2": MeshAxes(("x", "y"), (3, 2)),
}


def topology(mesh: MeshAxes, chip: str = "cpu"):
    return from_mesh(mesh, hardware.get(chip))


def layouts(mesh: MeshAxes, shape: tuple[int, ...], partial: bool = True) -> list[Layout]:
    """All layouts that divide a shape, by brute force: every order of every axis on every dimension."""
    out = set()
    for perm in itertools.permutations(mesh.names):
        for place in itertools.product(range(len(shape) + 2), repeat=len(perm)):
            at = dict(zip(perm, place, strict=True))
            dims = tuple(tuple(a for a in perm if at[a] == d) for d in range(len(shape)))
            out.add(Layout(dims, tuple(a for a in mesh.names if at[a] == len(shape))))
    out = {a for a in out if a.divides(shape, mesh) and (partial or not a.partial)}
    return sorted(out, key=lambda a: (a.partial, a.dims))


def reachable(a: Layout, b: Layout) -> bool:
    return set(b.partial) <= set(a.partial)


# --- the machine of tests: what every device holds, as labels of elements and the addends in them ---


def placed(layout: Layout, mesh: MeshAxes, shape: tuple[int, ...]) -> dict:
    """For each device: its block of element labels, and of which addends (positions on partial axes)."""
    labels = np.arange(math.prod(shape)).reshape(shape)
    out = {}
    for pos in itertools.product(*map(range, mesh.sizes)):
        at = dict(zip(mesh.names, pos, strict=True))
        block = labels
        for d, axes in enumerate(layout.dims):
            i = 0
            for a in axes:
                i = i * mesh.size(a) + at[a]
            size = shape[d] // mesh.size(*axes)
            block = np.take(block, range(i * size, (i + 1) * size), axis=d)
        out[pos] = (block, frozenset((a, at[a]) for a in layout.partial))
    return out


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("shape", [(48, 24), (6, 4), (8,), ()])
def test_steps_lead_from_one_layout_to_the_other(name, shape):
    mesh = MESHES[name]
    every = layouts(mesh, shape)
    for a in every:
        for b in every:
            if not reachable(a, b):
                assert reshard_cost(a, b, shape, 4, topology(mesh))[0] == math.inf
                continue
            here = a
            for s in cheapest_steps(a, b, shape, topology(mesh)):
                here = apply_step(s, here)
                assert here.divides(shape, mesh), (a, b, s)
            assert here == b


def test_all_layouts_are_in_the_graph():
    mesh, shape = MESHES["2x2x2"], (8, 8)
    graph, _ = resharding._canonical_graph(shape, topology(mesh))
    assert set(graph.layouts) == set(layouts(mesh, shape))


@pytest.mark.parametrize("chip", ["cpu", "v5p", "h100"])
@pytest.mark.parametrize("name", ["2x4", "2x2x2"])
def test_tables_are_costs_and_obey_the_triangle(name, chip):
    mesh, shape = MESHES[name], (64, 64)
    every, where = layouts(mesh, shape), topology(mesh, chip)
    for itemsize, together in itertools.product((0, 1, 4, 1000, 1e6, 1e12), (1, 30)):
        seconds = seconds_table(every, every, shape, itemsize, where, together)
        received = bytes_table(every, every, shape, itemsize, where)
        assert (np.diag(seconds) == 0).all() and (np.diag(received) == 0).all()
        assert (seconds >= 0).all() and (received >= 0).all()
        assert (np.isfinite(seconds) == [[reachable(a, b) for b in every] for a in every]).all()
        best = (seconds[:, :, None] + seconds[None, :, :]).min(axis=1)
        finite = np.isfinite(seconds)
        assert (seconds[finite] <= best[finite] * (1 + 1e-10)).all()
    rng = np.random.default_rng(0)
    for i, j in rng.integers(len(every), size=(200, 2)):
        t, v, parts = reshard_cost(every[i], every[j], shape, 4, where)
        assert t == pytest.approx(
            seconds_table([every[i]], [every[j]], shape, 4, where)[0, 0], rel=1e-9, abs=1e-15
        )
        assert (v == math.inf) == (t == math.inf)
        if math.isfinite(t):
            assert t == pytest.approx(sum(c.seconds for c in parts)) and v == sum(c.bytes for c in parts)


def test_tables_scale_with_bytes_and_forget_the_order_of_dimensions():
    where = topology(MESHES["2x2x2"], "v5e")
    a, b = Layout((("x", "y"), (), ("z",))), Layout(((), ("x",), ()))
    flip = [Layout(tuple(reversed(k.dims))) for k in (a, b)]
    one, two = (seconds_table([a], [b], (64, 64, 64), n, where)[0, 0] for n in (1e6, 2e6))
    zero = seconds_table([a], [b], (64, 64, 64), 0, where)[0, 0]
    assert two - one == pytest.approx(one - zero)
    assert seconds_table(*[[k] for k in flip], (64, 64, 64), 1e6, where)[0, 0] == pytest.approx(one)


def test_a_cut_that_does_not_divide_is_never_passed_through():
    mesh = MESHES["2x4"]
    where = topology(mesh)
    a, b = Layout((("x",), ())), Layout((("y",), ()))
    assert [s.kind for s in cheapest_steps(a, b, (8, 8), where)][0] == "slice"
    assert [str(s) for s in cheapest_steps(a, b, (4, 1), where)] == ["all_gather[x] 0", "slice[y]->0"]
    assert reshard_cost(a, b, (6, 8), 4, where) == (math.inf, math.inf, ())
    assert seconds_table([a, b], [a, b], (6, 8), 4, where).tolist() == [[0, math.inf], [math.inf, math.inf]]


def test_an_impossible_pair_says_so():
    with pytest.raises(SearchError) as e:
        cheapest_steps(Layout(((),)), Layout(((),), ("x",)), (8,), topology(MESHES["2x4"]))
    assert str(e.value) == (
        "layout (-) of a tensor of shape (8,) cannot become (-)+x\n"
        "  where: redistribution on mesh x=2 x y=4\n"
        "  write instead: cuts that divide the shape, and partial sums only where the source has them"
    )


def test_a_step_that_does_not_fit_is_refused():
    a = Layout((("x", "y"), ()))
    for s in (
        ReshardStep("all_gather", ("x",), 0),
        ReshardStep("slice", ("y",), None, 1),
        ReshardStep("all_reduce", ("z",)),
        ReshardStep("permute", ("x", "y"), target=(("x",), ())),
    ):
        with pytest.raises(ValueError):
            apply_step(s, a)


# 128 x 32 float32 on 8 devices (shared/cases/mindspore.md), bytes of the column "ideal", the cheapest
# placement of each target. V = 16384 bytes.
IDEAL = [
    ((1, 1), (8, 1), 0),
    ((1, 1), (2, 4), 0),
    ((2, 1), (8, 1), 0),
    ((4, 1), (4, 2), 0),
    ((8, 1), (1, 1), 7 * 2048),
    ((8, 1), (2, 1), 3 * 2048),
    ((4, 2), (4, 1), 2048),
    ((8, 1), (1, 8), 7 * 256),
    ((1, 8), (8, 1), 7 * 256),
    ((2, 4), (8, 1), 3 * 512),
    ((2, 4), (4, 2), 2048 / 2 + 2048),
    ((2, 4), (1, 1), 7 * 2048),
    ((2, 2), (4, 2), 0),
    ((4, 2), (1, 2), 3 * 2048),
]


@pytest.mark.parametrize(("source", "target", "ideal"), IDEAL)
def test_ideal_bytes_of_the_peer_table(source, target, ideal):
    mesh, shape = MESHES["2x2x2"], (128, 32)
    every = layouts(mesh, shape, partial=False)
    froms = [a for a in every if a.cuts(mesh) == source]
    tos = [b for b in every if b.cuts(mesh) == target]
    assert bytes_table(froms, tos, shape, 4, topology(mesh)).min() <= ideal


def test_partial_sums_end_in_the_right_collective():
    where = topology(MESHES["2x4"])
    a = Layout(((), ()), ("x", "y"))

    def kinds(b: Layout) -> list[str]:
        return [str(s) for s in cheapest_steps(a, b, (8, 8), where)]

    assert kinds(Layout(((), ()))) == ["all_reduce[x*y]"]
    assert kinds(Layout((("y", "x"), ()))) == ["reduce_scatter[y*x]->0"]
    assert kinds(Layout(((), ("y",)), ("x",))) == ["reduce_scatter[y]->1"]
    assert kinds(Layout((("x",), ()))) == ["reduce_scatter[x]->0", "all_reduce[y]"]


def test_axes_of_size_one_cost_nothing():
    mesh = MeshAxes(("x", "one", "y"), (2, 1, 4))
    where = topology(mesh)
    a, b = Layout((("x", "one"), ("y",))), Layout((("x", "y"), ("one",)))
    assert [str(s) for s in cheapest_steps(a, b, (8, 8), where)] == ["all_to_all[y] 1->0"]
    assert reshard_cost(a, Layout((("one", "x"), ("y",))), (8, 8), 4, where) == (0.0, 0.0, ())
    assert seconds_table([a], [b], (8, 8), 4, where)[0, 0] == reshard_cost(a, b, (8, 8), 4, where)[0]


def test_one_device_and_empty_tensors():
    where = topology(MeshAxes((), ()))
    assert seconds_table([Layout(((),))], [Layout(((),))], (8,), 4, where).tolist() == [[0.0]]
    where = topology(MESHES["2x4"])
    lays = [Layout((("x",),)), Layout(((),)), Layout(((),), ("x",))]
    assert bytes_table(lays, lays, (0,), 4, where)[:, :2].tolist() == [[0, 0], [0, 0], [0, 0]]
    assert bytes_table(lays, lays, (0,), 4, where)[0, 2] == math.inf


@pytest.mark.parametrize("name", ["2x4", "2x2x2"])
def test_permutations_bring_the_right_blocks(name):
    mesh, shape = MESHES[name], (8, 8)
    for a in layouts(mesh, shape):
        for s in successor_steps(a, mesh, shape):
            if s.kind != "permute":
                continue
            before, after = placed(a, mesh, shape), placed(apply_step(s, a), mesh, shape)
            pairs = permute_pairs(a, s, mesh)
            sizes = [mesh.size(x) for x in s.axes]
            assert sorted(p for p, _ in pairs) == sorted(q for _, q in pairs) == list(range(math.prod(sizes)))
            send = {q: p for p, q in pairs}
            for pos in after:
                at = dict(zip(mesh.names, pos, strict=True))
                me = int(np.ravel_multi_index([at[x] for x in s.axes], sizes))
                source = at | dict(zip(s.axes, np.unravel_index(send[me], sizes), strict=True))
                block, addends = before[tuple(int(source[x]) for x in mesh.names)]
                assert (block == after[pos][0]).all() and addends == after[pos][1]


# --- running ---


def pairs_of(name: str, shape: tuple[int, ...], count: int | None):
    mesh = MESHES[name]
    every = [(a, b) for a in layouts(mesh, shape) for b in layouts(mesh, shape) if reachable(a, b)]
    if count is not None:
        picked = np.random.default_rng(1).choice(len(every), size=count, replace=False)
        every = [every[i] for i in sorted(picked)]
    return mesh, every


def jax_mesh(mesh: MeshAxes) -> Mesh:
    devices = np.array(jax.devices()[: mesh.total]).reshape(mesh.sizes)
    return Mesh(devices, mesh.names, axis_types=(AxisType.Auto,) * len(mesh.names))


def spec(a: Layout) -> P:
    """Where the addends of a value lie: one leading dimension for partial axes, then its own."""
    return P(a.partial or None, *a.spec)


@functools.cache
def addends(mesh: MeshAxes, a: Layout, shape: tuple[int, ...]) -> np.ndarray:
    """Small integers for each addend, so that sums are exact in every order."""
    size = (mesh.size(*a.partial), *shape)
    return np.random.default_rng(len(str(a))).integers(-8, 9, size=size).astype(np.float64)


def left(mesh: MeshAxes, a: Layout, b: Layout, value: np.ndarray) -> np.ndarray:
    """The addends that remain when partial axes `a.partial` become `b.partial`."""
    value = value.reshape(*(mesh.size(x) for x in a.partial), *value.shape[1:])
    value = value.sum(axis=tuple(i for i, x in enumerate(a.partial) if x not in b.partial))
    return value.reshape(mesh.size(*b.partial), *value.shape[len(b.partial) :])


RUNS = [("2x4", 60, False), ("2x4", 60, True), ("2x2x2", 40, True), ("3x2", 20, True)]


@pytest.mark.parametrize(("name", "count", "vma"), RUNS)
def test_running_the_steps_gives_the_tensor_and_its_gradient(name, count, vma):
    shape = (24, 24)
    mesh, pairs = pairs_of(name, shape, count)
    where = topology(mesh)
    sources = list(dict.fromkeys(a for a, _ in pairs))
    plans = [cheapest_steps(a, b, shape, where) for a, b in pairs]

    def local(*blocks):
        held = dict(zip(sources, blocks, strict=True))
        out = []
        for (a, b), plan in zip(pairs, plans, strict=True):
            y = apply_reshard(held[a][0], a, b, plan, mesh, vma=vma)
            out.append(y[None])
        return tuple(out)

    run = jax.shard_map(
        local,
        mesh=jax_mesh(mesh),
        in_specs=tuple(spec(a) for a in sources),
        out_specs=tuple(spec(b) for _, b in pairs),
        check_vma=vma,
    )
    weights = np.random.default_rng(2).integers(-4, 5, size=(len(pairs), *shape)).astype(np.float64)

    def loss(values):
        out = run(*values)
        return sum((y * w).sum() for y, w in zip(out, weights, strict=True)), out

    with jax.enable_x64(True):
        values = [addends(mesh, a, shape) for a in sources]
        if not vma:  # without types of varying axes only forward values are promised
            out = jax.jit(run)(*values)
        else:
            grads, out = jax.jit(jax.grad(loss, has_aux=True))(values)
            for a, g in zip(sources, grads, strict=True):
                want = sum(w for (s, _), w in zip(pairs, weights, strict=True) if s == a)
                np.testing.assert_array_equal(g, np.broadcast_to(want, g.shape), err_msg=str(a))
    held = dict(zip(sources, values, strict=True))
    for (a, b), y in zip(pairs, out, strict=True):
        np.testing.assert_array_equal(y, left(mesh, a, b, held[a]), err_msg=f"{a} -> {b}")


def test_where_the_consumer_varies_the_gradient_sums_its_parts():
    """Each device multiplies what it gathered by its own numbers; the gradient must collect all of them."""
    mesh, shape = MESHES["2x4"], (8, 8)
    where = topology(mesh)
    pairs = [(a, b, v) for a, b in pairs_of("2x4", shape, None)[1] for v in (("x",), ("x", "y"))]
    # Axes on which the consumer varies because the operand does are not meant here.
    pairs = [(a, b, v) for a, b, v in pairs if not b.partial and not set(b.axes) & set(v)]
    assert len(pairs) > 40
    own = np.random.default_rng(3).integers(-4, 5, size=(2, 4, *shape)).astype(np.float64)
    sources = list(dict.fromkeys(a for a, _, _ in pairs))

    def local(u, *blocks):
        held = dict(zip(sources, blocks, strict=True))
        total = 0.0
        for a, b, v in pairs:
            y = apply_reshard(
                held[a][0],
                a,
                b,
                cheapest_steps(a, b, shape, where),
                mesh,
                vma=True,
                consumer_axes=frozenset(v),
            )
            # the consumer's numbers differ over `v`, and its block of them over the axes of b
            mine = u[0, 0] if v == ("x", "y") else jax.lax.psum(u[0, 0], "y")
            for d, axes in enumerate(b.dims):
                size = shape[d] // mesh.size(*axes)
                start = jax.lax.axis_index(axes) * size if axes else 0
                mine = jax.lax.dynamic_slice_in_dim(mine, start, size, d)
            part = (y * mine).sum()
            total = total + jax.lax.psum(part, tuple({*b.axes, *v}))
        return total

    run = jax.shard_map(
        local,
        mesh=jax_mesh(mesh),
        in_specs=(P("x", "y"), *(spec(a) for a in sources)),
        out_specs=P(),
        check_vma=True,
    )
    with jax.enable_x64(True):
        values = [addends(mesh, a, shape) for a in sources]
        grads = jax.jit(jax.grad(lambda vs: run(own, *vs)))(values)
    for a, g in zip(sources, grads, strict=True):
        want = own.sum((0, 1)) * sum(s == a for s, _, _ in pairs)
        np.testing.assert_array_equal(g, np.broadcast_to(want, g.shape), err_msg=str(a))


@pytest.mark.parametrize("vma", [False, True])
def test_each_step_is_one_collective_of_its_kind(vma):
    """What is handed to the compiler holds the predicted collectives and no others (nothing is compiled)."""
    shape, names = (24, 24), {"permute": "collective_permute"}
    mesh, pairs = pairs_of("2x2x2", shape, 120)
    where = topology(mesh)
    plans = [cheapest_steps(a, b, shape, where) for a, b in pairs]

    def local(*blocks):
        each = zip(blocks, pairs, plans, strict=True)
        return tuple(apply_reshard(x[0], a, b, plan, mesh, vma=vma)[None] for x, (a, b), plan in each)

    run = jax.shard_map(
        local,
        mesh=jax_mesh(mesh),
        in_specs=tuple(spec(a) for a, _ in pairs),
        out_specs=tuple(spec(b) for _, b in pairs),
        check_vma=vma,
    )
    text = jax.jit(run).lower(*(addends(mesh, a, shape) for a, _ in pairs)).as_text()
    for kind in ("all_gather", "all_to_all", "all_reduce", "reduce_scatter", "permute"):
        want = sum(s.kind == kind for plan in plans for s in plan)
        assert want and text.count(f'"stablehlo.{names.get(kind, kind)}"') == want, kind


def test_every_dtype_moves():
    mesh, shape = MESHES["2x4"], (8, 8)
    whole, rows, cols = Layout(((), ())), Layout((("x", "y"), ())), Layout(((), ("y", "x")))
    pairs = [(whole, rows), (rows, whole), (rows, cols), (rows, Layout((("y", "x"), ())))]
    values = [
        jax.random.split(jax.random.key(0), shape),
        np.arange(64).reshape(shape) % 3 == 0,
        np.arange(64, dtype=np.int8).reshape(shape),
        jax.numpy.arange(64.0).reshape(shape).astype("float8_e4m3fn"),
    ]

    def local(*blocks):
        each = zip(blocks, both, strict=True)
        return tuple(
            apply_reshard(x, a, b, cheapest_steps(a, b, shape, topology(mesh)), mesh, vma=True)
            for x, ((a, b), _) in each
        )

    both = list(itertools.product(pairs, values))
    run = jax.shard_map(
        local,
        mesh=jax_mesh(mesh),
        in_specs=tuple(a.spec for (a, _), _ in both),
        out_specs=tuple(b.spec for (_, b), _ in both),
    )
    for y, (_, x) in zip(jax.jit(run)(*(x for _, x in both)), both, strict=True):
        assert y.dtype == x.dtype and bool((y == x).all())


def test_axes_of_size_one_are_typed_right():
    mesh, shape = MeshAxes(("x", "one", "y"), (2, 1, 4)), (8, 8)
    where = topology(mesh)
    cuts = [(("x", "one"), ("y",)), ((), ("y",)), (("y",), ("one", "x")), ((), ())]
    lays = [Layout(c) for c in cuts]
    pairs = list(itertools.product(lays, lays))

    def local(*blocks):
        each = zip(blocks, pairs, strict=True)
        return tuple(
            apply_reshard(x, a, b, cheapest_steps(a, b, shape, where), mesh, vma=True) for x, (a, b) in each
        )

    run = jax.shard_map(
        local,
        mesh=jax_mesh(mesh),
        in_specs=tuple(a.spec for a, _ in pairs),
        out_specs=tuple(b.spec for _, b in pairs),
    )
    x = np.arange(64.0, dtype=np.float32).reshape(shape)
    for y in jax.jit(run)(*(x for _ in pairs)):
        np.testing.assert_array_equal(y, x)


def test_steps_to_somewhere_else_are_refused():
    mesh = MESHES["2x4"]
    a, b = Layout((("x",),)), Layout(((),))
    with pytest.raises(ValueError, match=r"steps lead from \(x\) to \(x\), not to \(-\)"):
        apply_reshard(np.zeros(4), a, b, (), mesh, vma=False)


@pytest.mark.parametrize("vma", [False, True])
def test_an_all_to_all_of_a_dimension_of_length_one(vma):
    """After transpositions that move that dimension alone: see `docs/jax_bugs.md`."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    there, back = (Layout(tuple(("x",) if d == k else () for d in range(3))) for k in (1, 0))
    x = np.arange(128.0, dtype=np.float32).reshape(4, 4, 8)

    def move(x, source, target):
        path = cheapest_steps(source, target, (4, 4, 8), topology(mesh_axes(mesh)))
        return apply_reshard(x, source, target, path, mesh_axes(mesh), vma=vma)

    def f(x):
        y = jnp.transpose(jnp.sin(jnp.transpose(x, (0, 2, 1))), (2, 0, 1))
        return move(y, there, back)

    def product(x):
        return jax.grad(lambda x: jnp.sum(jnp.einsum("abc,bac->ac", x, move(x, back, there))))(x)

    for run, plain in ((f, np.sin(x).transpose(1, 0, 2)), (product, 2 * x.transpose(1, 0, 2))):
        mapped = jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=vma)
        np.testing.assert_allclose(jax.jit(mapped)(x), plain, rtol=1e-6)
