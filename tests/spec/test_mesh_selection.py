"""Mesh selection: laws of factorizations, and meshes that a user gives, enters or implies."""

from __future__ import annotations

import itertools
import math
import types

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

from jshard._core.errors import MeshError, StrategyError
from jshard._core.layout import Layout, MeshAxes
from jshard._spec import mesh_factorization
from jshard._spec.entry import Pin, parse_entry, satisfies
from jshard._spec.mesh_selection import ChosenMesh, candidate_meshes, choose_mesh, resolve_pin


ALL = "all devices"


def pin(*cuts: int | str | None) -> Pin:
    counts = tuple(None if c == ALL else c for c in cuts)
    return Pin(counts, None, "here", all_devices_dim=cuts.index(ALL) if ALL in cuts else None)


def chosen(*pins: Pin | None, count: int = 8, mesh=None, device=None) -> ChosenMesh:
    return choose_mesh(mesh, device, pins, [None] * len(pins), devices=jax.devices()[:count])


def mesh_of(sizes, names, kind=AxisType.Auto) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    return Mesh(devices, names, axis_types=(kind,) * len(names))


def layouts(ndim: int, axes: MeshAxes):
    """Every layout of a tensor: each axis cuts one dimension or none, axes of a dimension in any order."""
    for where in itertools.product(range(ndim + 1), repeat=len(axes.names)):
        groups = [[a for a, w in zip(axes.names, where, strict=True) if w == d] for d in range(ndim)]
        for orders in itertools.product(*(itertools.permutations(g) for g in groups)):
            yield Layout(tuple(map(tuple, orders)))


@pytest.mark.parametrize(
    "count, cuts, sizes",
    [
        (8, [(4, 2)], (4, 2)),
        (8, [(2, 1), (1, 4), (4, 1)], (2, 4)),
        (8, [(4, 2), (2, 4)], (2, 2, 2)),
        (8, [], (8,)),
        (8, [(1, 1)], (8,)),
        (8, [(2, 1)], (2, 4)),
        (8, [(8, 1)], (8,)),
        (8, [(2, 2, 2)], (2, 2, 2)),
        (8, [(4, 2), (8, 1)], (4, 2)),
        (8, [(4, None)], (4, 2)),
        (8, [(ALL, 1)], (8,)),
        (1, [(1, 1)], (1,)),
        (6, [(3, 1)], (3, 2)),
        (6, [(3, 2), (2, 3)], (3, 2)),  # 2 x 3 and 3 x 2 cannot both go in mesh order
        (7, [(7,)], (7,)),
        (7, [], (7,)),
        (12, [(4, 3)], (4, 3)),
        (12, [(6, 1), (4, 1)], (3, 2, 2)),
        (16, [(4, 2), (2, 1)], (4, 2, 2)),
    ],
)
def test_inferred_grid(count, cuts, sizes):
    found = chosen(*(pin(*c) for c in cuts), count=count)
    assert found.axes.sizes == sizes and found.axes.names == tuple("xyzuvw"[: len(sizes)])
    assert found.source == "inferred" and found.user_mesh is None
    assert tuple(found.mesh.axis_sizes) == sizes and found.mesh.axis_names == found.axes.names
    assert set(found.mesh.axis_types) == {AxisType.Auto}
    assert set(found.mesh.devices.flat) == set(jax.devices()[:count])


def cuts_over(count: int):
    """Tuples of up to three cuts whose product divides the device count: what no grid may refuse."""
    divisors = st.sampled_from(mesh_factorization.divisors(count))
    return st.tuples(divisors, divisors, divisors).filter(lambda c: count % math.prod(c) == 0)


@settings(max_examples=60)
@given(st.data(), st.sampled_from([1, 2, 3, 4, 6, 7, 8, 12, 16]))
def test_every_pin_has_a_layout_on_the_inferred_mesh(data, count):
    wanted = data.draw(st.lists(cuts_over(count), max_size=3))
    axes = chosen(*(pin(*c) for c in wanted), count=count).axes
    for cuts in wanted:
        assert any(layout.cuts(axes) == cuts for layout in layouts(3, axes))


@settings(max_examples=40)
@given(
    st.data(), st.sampled_from([(8,), (4, 2), (2, 4), (6,), (2, 3), (12,), (3, 4), (1, 8), (2, 1, 4), (16,)])
)
def test_every_pin_has_a_layout_on_a_given_mesh(data, sizes):
    wanted = data.draw(st.lists(cuts_over(math.prod(sizes)), max_size=2))
    names = tuple(f"m{i}" for i in range(len(sizes)))
    given_mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
    found = chosen(*(pin(*c) for c in wanted), mesh=given_mesh)
    for cuts in wanted:
        assert any(layout.cuts(found.axes) == cuts for layout in layouts(3, found.axes))
    # Parts of an axis, in order, are the axis: its size, and its place among the devices.
    assert tuple(itertools.chain(*(found.axis_parts[n] for n in names))) == found.axes.names
    assert tuple(found.axes.size(*found.axis_parts[n]) for n in names) == sizes


@settings(max_examples=40)
@given(st.data(), st.sampled_from([4, 6, 8, 12]))
def test_no_coarser_grid_would_do(data, count):
    wanted = data.draw(st.lists(cuts_over(count), max_size=3))
    sizes = mesh_factorization.fewest_axes(count, wanted)
    assert sizes is not None and math.prod(sizes) == count
    for shorter in range(1, len(sizes)):
        for other in mesh_factorization.factorizations(count, shorter):
            assert not all(mesh_factorization.expresses(other, c, ordered=True) for c in wanted)


def test_grid_of_thousands_of_devices():
    # All factorizations of 4096 are 2048; a search over sets of axes would not end.
    assert mesh_factorization.fewest_axes(4096, [(16, 8), (8, 16, 2), (512, 1)]) == (16, 8, 16, 2)
    assert mesh_factorization.split((16, 16, 16), [(64, 64), (32, 8, 16)]) == ((8, 2), (8, 2), (16,))


@pytest.mark.parametrize(
    "sizes, cuts, parts",
    [
        ((8,), [(4,)], ((4, 2),)),
        ((8,), [(2, 4)], ((2, 4),)),
        ((4, 2), [(2, 4)], ((4,), (2,))),
        ((4, 2), [(2, 2)], ((2, 2), (2,))),
        ((2, 4), [(8,)], ((2,), (4,))),
        ((3, 4), [(6,)], ((3,), (2, 2))),
    ],
)
def test_split_of_a_given_mesh(sizes, cuts, parts):
    assert mesh_factorization.split(sizes, cuts) == parts


def test_split_axis_keeps_device_order_and_its_meaning():
    user = mesh_of((8,), ("data",))
    found = chosen(pin(4, 2), parse_entry(P("data"), (16, 3), "spec"), mesh=user)
    assert str(found) == "data_0=4 x data_1=2 (given)" and found.user_mesh is user
    assert list(found.mesh.devices.flat) == list(user.devices.flat)
    assert found.pins[1] == Pin((8, 1), (("data_0", "data_1"), ()), "spec")
    x = jax.device_put(np.arange(48.0).reshape(16, 3), NamedSharding(user, P("data")))
    assert x.sharding.is_equivalent_to(NamedSharding(found.mesh, P(("data_0", "data_1"))), 2)


def test_names_of_parts_avoid_names_in_use():
    user = AbstractMesh((4, 2), ("a", "a_0"), axis_types=(AxisType.Auto,) * 2)
    found = chosen(pin(2, 2, 2), mesh=user)
    assert found.axes == MeshAxes(("a__0", "a__1", "a_0"), (2, 2, 2))


def test_given_mesh_is_used_as_it_is():
    user = mesh_of((4, 2), ("data", "model"))
    found = chosen(pin(2, 4), mesh=user)
    assert found.mesh is user and found.source == "given" and str(found.axes) == "data=4 x model=2"


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_explicit_axes_become_auto(kind):
    concrete = mesh_of((4, 2), ("data", "model"), kind)
    for user in (
        concrete,
        concrete.abstract_mesh,
        types.SimpleNamespace(jax_mesh=concrete),
        types.SimpleNamespace(mesh=concrete),
    ):
        found = chosen(mesh=user).mesh
        assert set(found.axis_types) == {AxisType.Auto}
        assert (found.axis_names, tuple(found.axis_sizes)) == (("data", "model"), (4, 2))
        if isinstance(found, Mesh):
            assert (found.devices == concrete.devices).all()


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_mesh_in_context(kind):
    user = mesh_of((2, 4), ("rows", "columns"), kind)
    with jax.set_mesh(user):
        found = choose_mesh(None, None, [pin(2, 4)], [(4, 4)])
        given_one = chosen(mesh=mesh_of((8,), ("own",)))
    assert found.source == "context" and found.user_mesh == user and str(found.axes) == "rows=2 x columns=4"
    assert isinstance(found.mesh, Mesh)
    assert given_one.axes.names == ("own",)
    with jax.sharding.use_abstract_mesh(user.abstract_mesh):
        assert choose_mesh(None, None, [], []).axes.names == ("rows", "columns")
    assert choose_mesh(None, None, [], []).source == "inferred"


def test_mesh_in_context_inside_jit():
    seen = []

    @jax.jit
    def f(x):
        seen.append(choose_mesh(None, None, [], []))
        return x

    with jax.set_mesh(mesh_of((2, 4), ("rows", "columns"))):
        f(1.0)
    assert str(seen[0]) == "rows=2 x columns=4 (context)" and isinstance(seen[0].mesh, AbstractMesh)


@pytest.mark.filterwarnings("ignore:.*with mesh:DeprecationWarning")
def test_mesh_entered_the_old_way():
    with mesh_of((2, 4), ("rows", "columns")):
        assert str(choose_mesh(None, None, [], [])) == "rows=2 x columns=4 (context)"


def test_device_picks_the_devices():
    found = choose_mesh(None, "cpu", [], [])
    assert set(found.mesh.devices.flat) == set(jax.devices("cpu"))
    assert choose_mesh("auto", "cpu", [pin(4)], [(8,)]).axes.sizes[0] == 4


def test_candidates_are_all_grids_that_carry_the_pins():
    found = candidate_meshes(None, [pin(2, 1)], [(4, 4)], devices=jax.devices()[:8])
    assert [m.axes.sizes for m in found] == [(2, 4), (2, 2, 2)]
    assert [m.axes.sizes for m in candidate_meshes(None, [], [], devices=jax.devices()[:12])] == [
        (12,), (6, 2), (4, 3), (3, 2, 2)]  # fmt: skip
    with pytest.raises(StrategyError):
        candidate_meshes(None, [pin(3)], [(9,)], devices=jax.devices()[:8])


def test_mesh_of_a_named_sharding():
    of = mesh_of((4, 2), ("data", "model"))
    found = choose_mesh(None, None, [parse_entry(NamedSharding(of, P("model")), (8, 8), "here")], [(8, 8)])
    assert found.source == "named sharding" and found.mesh is of
    assert found.pins[0] == Pin((2, 1), (("model",), ()), "here")


def test_named_sharding_of_another_mesh_is_translated():
    user, other = mesh_of((8,), ("all",)), mesh_of((4, 2), ("a", "b"))
    entry = NamedSharding(other, P("b", "a"))
    found = choose_mesh(user, None, [parse_entry(entry, (8, 8), "here")], [(8, 8)])
    assert str(found.axes) == "all_0=4 x all_1=2"
    assert found.pins[0] == Pin((2, 4), (("all_1",), ("all_0",)), "here")
    # The translated spec puts the same blocks on the same devices.
    mine = NamedSharding(found.mesh, Layout((("all_1",), ("all_0",))).spec)
    assert mine.is_equivalent_to(entry, 2)


def test_named_sharding_of_the_same_axes_is_taken_over():
    user = mesh_of((4, 2), ("data", "model"))
    other = Mesh(user.devices[::-1], ("data", "model"))
    found = choose_mesh(user, None, [parse_entry(NamedSharding(other, P("data")), (8, 8), "here")], [(8, 8)])
    assert found.mesh is user and found.pins[0] == Pin((4, 1), (("data",), ()), "here")


def test_resolving_a_pin_found_later():
    found = chosen(pin(4), mesh=mesh_of((8,), ("data",)))
    late = resolve_pin(parse_entry(P(None, "data"), (3, 16), "op"), found, (3, 16))
    assert late == Pin((1, 8), ((), ("data_0", "data_1")), "op")
    assert resolve_pin(pin(ALL, 1), found, (16, 2)) == Pin((8, 1), None, "here")
    assert resolve_pin(None, found, (3,)) is None
    with pytest.raises(StrategyError, match="a cut of 8, by mesh axis 'data', does not divide dimension 0"):
        resolve_pin(parse_entry(P("data"), (12,), "op"), found, (12,))


def test_allows_is_the_definition():
    axes = MeshAxes(("x", "y", "one"), (2, 4, 1))
    every = list(layouts(2, axes))
    for wanted in itertools.product((None, 1, 2, 4, 8), repeat=2):
        for layout in every:
            have = layout.cuts(axes)
            assert satisfies(pin(*wanted), layout, axes) == all(
                w in (None, h) for w, h in zip(wanted, have, strict=True))  # fmt: skip
    spec = Pin((None, None), (("y", "x"), None), "spec")
    assert {str(x) for x in every if satisfies(spec, x, axes) and "one" not in x.axes} == {"(y*x, -)"}
    assert satisfies(spec, Layout((("y", "one", "x"), ())), axes)  # an axis of one device cuts nothing
    assert not satisfies(spec, Layout((("x", "y"), ())), axes)
    assert not satisfies(pin(None, None), Layout(((), ()), ("x",)), axes)
    assert satisfies(pin(ALL, 1), Layout((("x", "y"), ())), axes)
    assert not satisfies(pin(ALL, 1), Layout((("y",), ())), axes)
    assert satisfies(None, Layout(((), ()), ("x",)), axes)
    assert not satisfies(pin(2), Layout(((), ())), axes)


def test_device_that_is_not_there_is_told_as_such():
    with pytest.raises(MeshError, match="no gpu device here"):
        choose_mesh(None, "gpu", [], [])
