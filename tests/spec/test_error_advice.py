"""Strategies that an error text advises are legal on the devices at hand: they are tried, and work."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

import jshard
from jshard._core.errors import ShardError, StrategyError
from jshard._spec.entry import JointConstraint, Pin, parse_entry
from jshard._spec.mesh_selection import choose_mesh
from tests.helpers.bad_inputs import ROWS, S, on, read


def mesh_of(*sizes: int) -> jax.sharding.Mesh:
    names = tuple("abcd"[: len(sizes)])
    n = math.prod(sizes)
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=jax.devices()[:n])


def product(a, b):
    return jnp.dot(a, b)


A = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), "float32")
B = jnp.asarray(np.random.default_rng(1).normal(size=(16, 24)), "float32")


@pytest.mark.parametrize("sizes", [None, (8,), (2, 4), (4, 2), (2, 2, 2)])
def test_two_pins_that_need_axes_of_their_own(sizes):
    """(2, 1) and (1, 2) cut the rows by 2 and the columns by 2: the grid gets two axes of 2."""
    mesh = mesh_of(*sizes) if sizes else None
    pinned = jshard.op(product, ((2, 1), (1, 2)))
    f = jshard.shard(lambda a, b: jnp.tanh(pinned(a, b)), mesh=mesh, device=None if mesh else "cpu")
    np.testing.assert_allclose(f(A, B), jnp.tanh(A @ B), rtol=1e-4)
    plan = f.plan(A, B)
    (row,) = [r for r in plan.operators if r.primitive == "dot_general"]
    assert row.strategy == ((2, 1), (1, 2))


def test_on_eight_devices_without_a_mesh():
    """The inferred grid of 8 is 2 x 2 x 2, as with `mesh="auto"`; the pins alone would leave it at 2 x 4."""
    plan = jshard.shard(jshard.op(product, ((2, 1), (1, 2))), mesh="auto:8").plan(A, B)
    assert plan.operators[0].strategy == ((2, 1), (1, 2)) and plan.mesh.sizes == (2, 2, 2)
    pins, shapes = [Pin((2, 1), None, "a"), Pin((1, 2), None, "b")], [A.shape, B.shape]
    for joint, sizes in (((), (2, 4)), ((JointConstraint((2, 2)),), (2, 2, 2))):
        found = choose_mesh(None, None, pins, shapes, devices=jax.devices()[:8], joint=joint)
        assert found.axes.sizes == sizes


EINSUMS = ("ij,jk->ik", "bij,bjk->bik", "ij,kj->ik", "abc,cd->abd", "ij,ij->ij", "bhqd,bkhd->bhqk")


def test_any_cuts_of_loop_indices_can_be_pinned():
    """Whatever cuts of an operator's indices have a product that divides the devices, as pins of its operands."""
    rng = random.Random(3)
    split = 0
    for _ in range(14):
        spec = rng.choice(EINSUMS)
        ins, _, out = spec.partition("->")
        first, second = ins.split(",")
        letters = sorted(set(first + second))
        sizes = rng.choice([(8,), (2, 4), (4, 2), (2, 2, 2), (12,), (3, 4), (6, 2)])
        left, cut = math.prod(sizes), {}
        for letter in rng.sample(letters, len(letters)):
            cut[letter] = rng.choice([d for d in range(1, left + 1) if left % d == 0])
            left //= cut[letter]
        size = {letter: cut[letter] * rng.choice((1, 2, 3)) for letter in letters}
        x, y = (
            jnp.asarray(np.random.default_rng(k).normal(size=[size[letter] for letter in word]), "float32")
            for k, word in enumerate((first, second))
        )
        strategy = tuple(
            tuple(None if rng.random() < 0.2 else cut[letter] for letter in word) for word in (first, second)
        )

        def f(x, y, spec=spec, strategy=strategy):
            return jnp.sin(jshard.op(lambda a, b: jnp.einsum(spec, a, b), strategy)(x, y))

        try:
            sharded = jshard.shard(f, mesh=mesh_of(*sizes))
            got = sharded(x, y)
        except ShardError as e:
            # A product may put an operand's dimensions another way round before it multiplies; nothing else refuses.
            raise AssertionError(f"{spec} {strategy} on {sizes}: {e}") from e
        np.testing.assert_allclose(got, jnp.sin(jnp.einsum(spec, x, y)), rtol=1e-3, atol=1e-3)
        split += len(sharded.plan(x, y).mesh.sizes) > len(sizes)
        del out
    assert split >= 2


def test_a_spec_beside_a_count():
    """Rows on axis a; the columns' cut of 2 then needs a part of the other axis, of 4."""
    pinned = jshard.op(product, (P("a", None), (None, 2)))
    f = jshard.shard(lambda a, b: pinned(a, b), mesh=mesh_of(2, 4))
    np.testing.assert_allclose(f(A, B), A @ B, rtol=1e-4, atol=1e-4)
    plan = f.plan(A, B)
    assert plan.operators[0].strategy[0][0] == 2 and plan.operators[0].strategy[1][1] == 2
    assert plan.mesh.sizes == (2, 2, 2)


def test_pins_that_no_grid_has_together():
    def planned(*strategy, mesh=None):
        return jshard.shard(jshard.op(product, strategy), mesh=mesh or mesh_of(8)).plan(A, B)

    with pytest.raises(StrategyError) as caught:
        planned((4, 1), (1, 4))
    assert caught.value.what == (
        "the pins of dot_general.2, operand 0 (4, 1) and operand 1 (1, 4), cut what it loops over into 16 pieces "
        "together, which do not divide 8 devices"
    )
    assert caught.value.fix == (
        "cuts that make 1, 2, 4 or 8 pieces together, or None for all but one of them"
    )
    for pieces in (1, 2, 4, 8):
        for rows in (d for d in (1, 2, 4, 8) if pieces % d == 0):
            planned((rows, 1), (1, pieces // rows))
    planned((4, 1), None)
    planned(None, (1, 4))
    with pytest.raises(StrategyError) as caught:
        planned(P("a", None), (1, 4), mesh=mesh_of(4, 2))
    assert caught.value.what.endswith(
        "4 pieces together, which do not divide the 2 of 8 devices that its specs leave"
    )
    planned(P("a", None), (1, 2), mesh=mesh_of(4, 2))
    planned(P("a", None), None, mesh=mesh_of(4, 2))


def offered(fix: str) -> list[int]:
    """The numbers of pieces that a text offers."""
    found = re.match(r"([\d, or]+) pieces? there", fix)
    assert found, fix
    return [int(n) for n in re.findall(r"\d+", found[1])]


def test_every_cut_that_is_offered_is_taken():
    """Random cuts of random shapes on random counts of devices; what is refused is mended as the text says."""
    rng = random.Random(11)
    refused = [0, 0, 0]
    for _ in range(600):
        count = rng.choice((1, 2, 4, 6, 7, 8, 12, 16))
        shape = tuple(rng.choice((1, 3, 4, 6, 7, 8, 10, 12, 16, 30)) for _ in range(rng.randint(1, 3)))
        cuts = tuple(rng.choice((1, 1, 2, 3, 4, 5, 8, 12, None)) for _ in shape)

        def taken(cuts, shape=shape, count=count):
            pin = parse_entry(cuts, shape, "x", devices=count)
            choose_mesh(None, None, [pin], [shape], devices=jax.devices()[:count])

        try:
            taken(cuts)
            continue
        except StrategyError as error:
            e = error
        for _ in range(4):  # one dimension after the other
            if "over the device count" in e.what or "which do not divide" in e.what:
                example = re.search(r"such as (\([^)]*\))", e.fix)
                assert example is not None
                refused[2] += 1
                taken(eval(example[1]))
                break
            dim = int(re.search(r"dimension (\d+)", e.what)[1])  # pyright: ignore[reportOptionalSubscript]
            refused["does not divide" not in e.what] += 1
            numbers, after = offered(e.fix), None
            for n in [*numbers, None]:
                mended = tuple(n if d == dim else c for d, c in enumerate(cuts))
                try:
                    taken(mended)
                except StrategyError as other:
                    assert f"dimension {dim}" not in other.what, (shape, cuts, count, n, str(other))
                    after = mended, other
            if after is None:
                break
            cuts, e = after
    assert min(refused) >= 20


def test_axes_that_are_offered_are_taken():
    rng = random.Random(5)
    refused = 0
    for _ in range(300):
        sizes = rng.choice([(2, 4), (4, 2), (3, 2, 2), (8,), (2, 6)])
        mesh = AbstractMesh(sizes, tuple("abc"[: len(sizes)]), axis_types=(AxisType.Auto,) * len(sizes))
        shape = tuple(rng.choice((3, 4, 6, 8, 10)) for _ in range(2))
        axes = rng.sample("abc"[: len(sizes)], len(sizes))
        spec = [axes[0], tuple(axes[1:]) or None]
        try:
            choose_mesh(mesh, None, [parse_entry(P(*spec), shape, "x")], [shape])
        except StrategyError as e:
            dim = int(re.search(r"dimension (\d+)", e.what)[1])  # pyright: ignore[reportOptionalSubscript]
            text, _, last = e.fix.partition(", or P.UNCONSTRAINED")
            last, _, pad = last.partition(", or config=")
            assert last == " to leave it to the search"
            cut = math.prod(mesh.shape[a] for a in ([axes[0]], axes[1:])[dim])
            assert pad == (
                "" if cut > shape[dim] else f'{{"pad": True}} to pad it to {-(-shape[dim] // cut) * cut}'
            )
            if pad:
                pin = parse_entry(P(*spec), shape, "x")
                assert pin is not None
                try:
                    choose_mesh(mesh, None, [dataclasses.replace(pin, pads=True)], [shape])
                except StrategyError as other:
                    assert f"dimension {dim}" not in other.what
            names = [eval(n) for n in re.findall(r"\([^)]*\)|'[a-z]'|None", text.removesuffix(" there"))]
            assert None in names
            for instead in [*names, P.UNCONSTRAINED]:
                mended = P(*(instead if d == dim else s for d, s in enumerate(spec)))
                try:
                    choose_mesh(mesh, None, [parse_entry(mended, shape, "x")], [shape])
                except StrategyError as other:
                    assert f"dimension {dim}" not in other.what, (sizes, shape, spec, instead)
            refused += 1
    assert refused >= 50


def test_what_if_offers_what_the_plans_mesh_has():
    plan = jshard.shard(lambda x: x * 2, mesh=mesh_of(4, 2)).plan(S(12, 10))
    for asked, what in (
        ((1, 4), "a cut of 4 does not divide dimension 1, of size 10"),
        ((3, 1), "no axes of the plan's mesh a=4 x b=2 make (3, 1) pieces"),
        ((6, None), "no axes of the plan's mesh a=4 x b=2 make (6, None) pieces"),
    ):
        with pytest.raises(ShardError) as caught:
            plan.what_if(x=asked)
        assert caught.value.what == what
        for cuts in re.findall(r"\(\d+, \d+\)", caught.value.fix):
            other, _ = plan.what_if(x=eval(cuts))
            assert other.inputs[0].layout.cuts(other.mesh) == eval(cuts)
    with pytest.raises(StrategyError) as caught:
        plan.what_if(x=P(None, "a"))
    assert caught.value.fix == "'b' or None there, or P.UNCONSTRAINED to leave it to the search"
    plan.what_if(x=P(None, "b"))


# What the texts of the table say to write instead: (row, the arguments of `shard` as mended).
MENDED = {
    "entries missing": {"in_strategy": ((4, 2), None, None)},
    "entries too many": {"in_strategy": ((4, 2), None, None)},
    "entries none for an argument": {"in_strategy": (None,)},
    "one strategy for all": {"in_strategy": ((4, 2), None, None)},
    "a list of cuts": {"in_strategy": ((4, 2),)},
    "rank too small": {"in_strategy": ((4, 1), None, None)},
    "rank too large": {"in_strategy": (None, None, (2,))},
    "cuts for a scalar": {"in_strategy": ((),)},
    "scalar's strategy for a matrix": {"in_strategy": ((1, 1), None, None)},
    "brackets too many": {"in_strategy": ((4, 2), None, None)},
    "zero cut": {"in_strategy": ((1, 2), None, None)},
    "over the device count": {"in_strategy": ((8, 2), None, None)},
    "over the device count in one dimension": {"in_strategy": ((16, 1), None, None)},
    "over one device": lambda: {"in_strategy": ((1, 1), None, None), "mesh": mesh_of(1)},
    "pieces do not divide the devices": lambda: {"in_strategy": ((2, 1), None, None), "mesh": mesh_of(6)},
    "no grid of six": lambda: {"in_strategy": ((2, 1), None, None), "mesh": mesh_of(6)},
    "no grid has the cut": {"in_strategy": ((1, 1),)},
    "list entry": {"in_strategy": (None, None, (2,))},
    "list of cuts that no grid has": {"in_strategy": ((8, 2),)},
    "bare int entry": {"in_strategy": {"x": (4, 1)}},
    "bare int that no grid has": {"in_strategy": {"x": (1, 1)}},
    "bare int entry of a scalar": {"in_strategy": {"x": ()}},
    "rank too small, with a cut that no grid has": {"in_strategy": ((1, 1),)},
    "cut that leaves no room for the divisors beside it": lambda: {
        "in_strategy": ((2, 4),),
        "mesh": mesh_of(8),
    },
    "spec too long": lambda: {"in_strategy": (None, None, P("a")), "mesh": mesh_of(4, 2)},
    "spec that does not divide": lambda: {"in_strategy": (P("b"),), "mesh": mesh_of(4, 2)},
    "spec of two axes that does not divide": lambda: {"in_strategy": (P(None, "a"),), "mesh": mesh_of(4, 2)},
    "sharding of other devices": lambda: {
        "in_strategy": (on(mesh_of(4, 2), "a"), None, None),
        "mesh": mesh_of(4, 2),
    },
    "data parallel over an odd batch": {"out_strategy": "full_batch"},
    "result's rank": {"out_strategy": (4, 2)},
    "result's wrong type": {"out_strategy": (4, 1)},
    "results' entries missing": {"out_strategy": ((4, 2), None)},
}


@pytest.mark.parametrize("name", MENDED)
def test_the_table_as_its_texts_mend_it(name):
    (row,) = [r for r in ROWS if r.name == name]
    with pytest.raises(ShardError):
        read(row.call, **row.arguments)
    mended = MENDED[name]
    given = mended() if callable(mended) else mended
    shown = [str(v) for k, v in given.items() if k != "mesh" and isinstance(v, tuple)]
    numbers = set(itertools.chain(*(re.findall(r"\d+", v) for v in shown)))
    said = row.fix + row.what + str(row.arguments)
    assert all(n in said for n in numbers), "this is not what the text says"
    read(row.call, **given)
