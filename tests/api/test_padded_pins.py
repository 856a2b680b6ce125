"""Pins whose cuts do not divide: legal with `pad`, an error that names it without."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jshard
from jshard._core.errors import StrategyError


pytestmark = pytest.mark.one_pair


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def mesh_of(*sizes: int):
    names = tuple("xyz"[: len(sizes)])
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, names, (jax.sharding.AxisType.Auto,) * len(sizes), devices=devices)


def head(w: Any, x: Any) -> Any:
    return jax.nn.log_softmax(x @ w), w * 2


def arguments() -> tuple[Any, Any]:
    rng = np.random.default_rng(13)
    return rng.normal(size=(6, 13)), rng.normal(size=(4, 6))


product = jshard.op(jnp.dot, in_strategy=(None, (1, 8)), out_strategy=(1, 8))

PINS: dict[str, dict[str, Any]] = {
    "strategy": {"in_strategy": ((1, 8), None)},
    "spec": {"in_strategy": (P(None, "x"), None)},
    "parameter plan": {"parameter_plan": {"w": (1, 8)}},
    "results": {"out_strategy": ((1, 8), P(None, "x"))},
    "argument and result": {"in_strategy": ((1, 8), None), "out_strategy": (P(None, "x"), None)},
    "configuration": {"config": {"pad": True, "parameters": {"w": [None, "x"]}}},
}


def results_and_gradients(fn: Any) -> list[np.ndarray]:
    """Of a function like `head`, by one program."""

    def loss(w: Any, x: Any) -> Any:
        results = fn(w, x)
        return sum(jnp.sum(jnp.sin(y)) for y in results), results

    gradients, results = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(*arguments())
    return [np.asarray(y) for y in (*results, *gradients)]


@functools.cache
def plain_results_and_gradients() -> list[np.ndarray]:
    return results_and_gradients(head)


@pytest.mark.parametrize("kind", PINS)
def test_a_pinned_cut_that_does_not_divide_pads(kind: str) -> None:
    args, options = arguments(), {"config": {"pad": True}, **PINS[kind]}
    step = jshard.shard(head, mesh=mesh_of(8), **options)
    plan = step.plan(*args, verify=True)
    assert plan.padding == ((13, 0, 16),)
    assert plan.verification is not None and plan.verification.ok
    for got, want in zip(results_and_gradients(step), plain_results_and_gradients(), strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-12)


def test_pins_of_operators_and_scopes_pad() -> None:
    def f(w: Any, x: Any) -> Any:
        with jax.named_scope("block"):
            y = jnp.tanh(jax.jit(product)(x, w))
        return jnp.sum(y, 1)

    args = arguments()
    for config in ({"pad": True}, {"pad": True, "activations": {"block": [None, "x"]}}):
        step = jshard.shard(f, mesh=mesh_of(8), config=config)
        assert step.plan(*args).padding == ((13, 0, 16),)
        np.testing.assert_allclose(step(*args), f(*args), rtol=1e-12)


def test_pins_of_several_cuts_pad_to_a_size_that_all_divide() -> None:
    args = arguments()
    strategies = {"in_strategy": (P(None, "y"), None), "out_strategy": (P(None, "x"), None)}
    step = jshard.shard(head, mesh=mesh_of(4, 3), config={"pad": True}, **strategies)
    assert step.plan(*args).padding == ((13, 0, 24),)
    np.testing.assert_allclose(step(*args)[0], head(*args)[0], rtol=1e-12)


def test_the_plan_holds_the_pin_for_the_padded_value() -> None:
    step = jshard.shard(head, mesh=mesh_of(8), config={"pad": True}, in_strategy=((1, 8), None))
    row = next(r for r in step.plan(*arguments()).operators if r.primitive == "pad_tail")
    assert [str(layout) for layout in row.results] == ["(-, x)"]


def test_a_plan_with_padded_pins_is_saved_and_read(tmp_path: pathlib.Path) -> None:
    args = arguments()
    step = jshard.shard(head, mesh=mesh_of(8), config={"pad": True}, in_strategy=((1, 8), None))
    step.plan(*args).save(tmp_path / "plan.json")
    again = jshard.shard(head, plan=jshard.Plan.load(tmp_path / "plan.json"), mesh=mesh_of(8))
    np.testing.assert_allclose(again(*args)[0], head(*args)[0], rtol=1e-12)


def test_a_changed_plan_with_padding_runs() -> None:
    args = arguments()
    step = jshard.shard(head, mesh=mesh_of(2, 4), config={"pad": True}, in_strategy=((1, 8), None))
    changed, _ = step.plan(*args).what_if(x=(2, 1))
    assert changed.padding == ((13, 0, 16),)
    again = jshard.shard(head, plan=changed, mesh=mesh_of(2, 4))
    np.testing.assert_allclose(again(*args)[0], head(*args)[0], rtol=1e-12)


def refusal(fn: Any, *args: Any, **options: Any) -> StrategyError:
    with pytest.raises(StrategyError) as caught:
        jshard.shard(fn, mesh=mesh_of(8), **options).plan(*args)
    return caught.value


def test_without_pad_the_error_names_it() -> None:
    args = arguments()
    error = refusal(head, *args, in_strategy=((1, 8), None))
    assert error.what == "a cut of 8 does not divide dimension 1, of size 13"
    assert error.fix.endswith(', or config={"pad": True} to pad it to 16')
    error = refusal(head, *args, out_strategy=(None, P(None, "x")))
    assert error.fix.endswith(', or config={"pad": True} to pad it to 16')
    error = refusal(head, *args, config={"parameters": {"w": [None, "x"]}})
    assert error.fix == 'null, "?" or other axes there, or pad: true to pad it'


def test_a_cut_larger_than_the_size() -> None:
    error = refusal(jnp.tanh, np.ones(7), in_strategy=((8,),), config={"pad": True})
    assert error.what == "a cut of 8 is larger than dimension 0, of size 7: some pieces would be padding only"
    assert error.fix == "1, 2 or 4 pieces there, or None to leave the dimension to the search"
    assert (
        jshard.shard(jnp.tanh, mesh=mesh_of(8), in_strategy=((4,),), config={"pad": True})
        .plan(np.ones(7))
        .padding
    )
    assert "pad" not in refusal(jnp.tanh, np.ones(7), in_strategy=((8,),)).fix


def test_an_operator_without_a_padded_form_is_named() -> None:
    error = refusal(lambda x: jnp.fft.rfft(x) * 2, np.ones(13), in_strategy=((8,),), config={"pad": True})
    assert error.what.startswith("a cut of 8 would pad dimension 0, of size 13, and fft")
    assert error.what.endswith("has no padded form: every frequency depends on every sample")
    assert error.fix == "1 piece there, or an array of 16 that the function itself masks"
    error = refusal(lambda x: jnp.cumsum(x)[:0], np.ones(13), in_strategy=((8,),), config={"pad": True})
    assert error.what == "a cut of 8 would pad dimension 0, of size 13, with which nothing is computed"
    error = refusal(lambda x: x, np.ones(13), in_strategy=((8,),), config={"pad": True})
    assert error.what == "a cut of 8 would pad dimension 0, of size 13, with which nothing is computed"

    def loop(stack: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, w: (x @ jnp.tanh(w), None), x, stack)[0]

    args = np.ones((5, 4, 4)), np.ones((8, 4))
    error = refusal(loop, *args, in_strategy=((2, 1, 1), None), config={"pad": True})
    assert error.what.startswith("a cut of 2 would pad dimension 0, of size 5, and scan (")


def test_transforms_of_several_arrays_pad_their_number() -> None:
    def f(x: Any) -> Any:
        return jnp.sort(jnp.fft.irfft(jnp.fft.rfft(x) * jnp.arange(1, 5), n=6), 0)

    x = np.random.default_rng(3).normal(size=(13, 6))
    step = jshard.shard(f, mesh=mesh_of(8), in_strategy=((8, 1),), config={"pad": True})
    plan = step.plan(x, verify=True)
    assert plan.padding == ((13, 0, 16),)
    assert plan.verification is not None and plan.verification.ok
    np.testing.assert_allclose(step(x), f(x), rtol=1e-12)
    got, want = (jax.grad(lambda x, g=g: jnp.sum(jnp.sin(g(x))))(x) for g in (step, f))
    np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("pieces", [4, 8])  # blocks of 4 are merged; those of 2 are gathered
def test_the_best_of_a_padded_dimension(pieces: int) -> None:
    def best(x: Any) -> Any:
        return jax.lax.top_k(x, 3)

    x = np.asarray([1, -np.inf, np.nan, -np.inf, 5, -np.nan, 2, 5, -np.nan, -np.inf, 1, 5, -np.inf])
    for array in (x, x[::-1], -x):
        step = jshard.shard(best, mesh=mesh_of(pieces), in_strategy=((pieces,),), config={"pad": True})
        plan = step.plan(array, verify=True)
        assert plan.padding == ((13, 0, 16),)
        assert plan.verification is not None and plan.verification.ok
        for got, want in zip(step(array), best(array), strict=True):
            np.testing.assert_array_equal(got, want)


def test_padding_is_advised_only_where_it_is_possible() -> None:
    x = np.ones(13)
    error = refusal(lambda x: jax.lax.top_k(x, 3), x, in_strategy=((8,),))
    assert error.fix.endswith(', or config={"pad": True} to pad it to 16')
    for options in (
        {"in_strategy": ((8,),)},
        {"in_strategy": (P("x"),)},
        {"config": {"parameters": {"x": ["x"]}}},
    ):
        error = refusal(lambda x: jnp.fft.rfft(x), x, **options)
        assert "pad it" not in error.fix
        assert "; no padding: " in error.fix
        assert error.fix.endswith("has no padded form: every frequency depends on every sample")


def of_padding(w: Any, v: Any, u: Any) -> Any:
    return jnp.tanh(w) + 1, jnp.sin(v), jax.lax.reduce(u, 0.0, lambda a, b: a * b + 1, (0,))


def test_a_check_advises_padding_only_where_it_is_possible() -> None:
    args = np.ones((13, 4)), np.ones(7), np.ones(21)
    rules = {"w": ["x", None], "u": ["x"]}
    config = jshard.Config.of({"parameters": rules})
    fixes = {p.name: p.advice for p in config.check(jshard.shard(of_padding, mesh=mesh_of(8)), *args).errors}
    either = 'null, "?" or other axes there'
    assert fixes["w"] == f"{either}, or pad: true to pad it"
    assert fixes["u"].startswith(
        f"{either}; no padding: a cut of 8 would pad dimension 0, of size 21, and reduce ("
    )
    assert fixes["u"].endswith(
        ") has no padded form: the reduction's function is the user's: its dimensions stay whole"
    )
    followed = {"pad": True, "parameters": {"w": ["x", None]}}
    assert jshard.shard(of_padding, mesh=mesh_of(8), config=followed).plan(*args).padding == ((13, 0, 16),)


def test_advice_to_pad_that_is_not_checked_says_so() -> None:
    args = np.ones((13, 4)), np.ones(8), np.ones(21)
    rules = {"parameters": {"w": ["x", None], "u": ["x"]}}
    unchecked = 'null, "?" or other axes there, or pad: true, if it can be padded'
    assert refusal(of_padding, *args, config=rules).what.count(f"write instead: {unchecked}") == 2
    alone = jshard.Config.of({"mesh": {"x": 8}, "parameters": {"w": ["x", None]}})
    assert [p.advice for p in alone.check({"w": args[0]}).errors] == [unchecked]
    refused = jshard.Config.of({"parameters": {"w": ["x", None], "v": [None, "x"]}})
    found = refused.check(jshard.shard(of_padding, mesh=mesh_of(8)), *args)
    assert [p.advice for p in found.errors if p.kind == "divides"] == [unchecked]


@pytest.mark.parametrize("by", [1, -3, 6])
def test_a_padded_roll_sends_the_rows_that_go_over_the_end(by: int) -> None:
    def f(x: Any) -> Any:
        return jnp.sum(jnp.roll(x, by, 0) * jnp.sin(x), 0)

    x = np.random.default_rng(3).normal(size=(13, 4))
    step = jshard.shard(f, mesh=mesh_of(2), in_strategy=((2, 1),), config={"pad": True}, level=2)
    plan = step.plan(x, verify=True)
    assert plan.padding == ((13, 0, 14),)
    assert plan.verification is not None and plan.verification.ok
    np.testing.assert_allclose(step(x), f(x), rtol=1e-12, atol=1e-12)
    large = jax.ShapeDtypeStruct((1021, 2048), "float32")
    edges = sum(c.bytes * c.count for c in step.plan(large).collectives)
    assert edges < large.size * 4 / 20


def test_an_operator_that_needs_the_whole_says_why() -> None:
    def best(x: Any) -> Any:
        return jax.lax.approx_max_k(x, 5)

    x = np.random.default_rng(0).normal(size=7)
    error = refusal(best, x, in_strategy=((4,),), config={"pad": True})
    assert error.what.endswith("has no padded form: top_k compares elements along the whole dimension")
    assert error.fix == "1 piece there, or an array of 8 that the function itself masks"
    masked = np.pad(x, (0, 1), constant_values=-np.inf)
    for array, pieces in ((x, 1), (masked, 4)):
        step = jshard.shard(best, mesh=mesh_of(8), in_strategy=((pieces,),), config={"pad": True})
        np.testing.assert_array_equal(step(array)[1], best(x)[1])


def test_pieces_that_no_grid_has_are_those_that_padding_allows() -> None:
    x = np.arange(45.0)
    error = refusal(jnp.tanh, x, in_strategy=((5,),), config={"pad": True})
    assert error.what == "a cut of 5 in dimension 0: no grid of 8 devices has it"
    assert error.fix == "1, 2, 4 or 8 pieces there"
    for pieces in (1, 2, 4, 8):
        step = jshard.shard(jnp.tanh, mesh=mesh_of(8), in_strategy=((pieces,),), config={"pad": True})
        np.testing.assert_allclose(step(x), np.tanh(x), rtol=1e-12)
    assert refusal(jnp.tanh, x, in_strategy=((5,),)).fix == "1 piece there"


SPECS = [
    ((8, 1), P(None, "x"), "P('x', None)"),
    ((8, 1), P(), "P('x', None)"),
    ((1, 8), P("x"), "P(None, 'x')"),
]


@pytest.mark.parametrize("cuts, own, would_do", SPECS, ids=str)
def test_a_shard_map_sees_no_padding(cuts: tuple[int, int], own: P, would_do: str) -> None:
    shape = tuple(13 if c > 1 else 16 for c in cuts)
    x, dim = np.random.default_rng(0).normal(size=shape), cuts.index(8)

    def mapped(spec: P) -> Any:
        return lambda x: jax.shard_map(jnp.tanh, mesh=mesh_of(8), in_specs=spec, out_specs=spec)(x)

    error = refusal(mapped(own), x, in_strategy=(cuts,), config={"pad": True})
    assert "shard_map (" in error.what
    assert error.what.endswith("has no padded form: its body would see the padding")
    assert error.fix == (
        f"1 piece there, as in_specs={str(own).replace('PartitionSpec', 'P').replace(',)', ')')} says, or an array of 16 "
        f"and in_specs={would_do}, whose padding the body masks"
    )
    error = refusal(mapped(own), x, out_strategy=(cuts,), config={"pad": True})
    assert f"out_specs={would_do}" in error.fix
    whole = tuple(1 if d == dim else None for d in range(2))
    padded = np.pad(x, [(0, 16 - n) for n in shape])
    for array, strategy, spec in ((x, whole, own), (padded, cuts, eval(would_do))):
        step = jshard.shard(mapped(spec), mesh=mesh_of(8), in_strategy=(strategy,), config={"pad": True})
        np.testing.assert_allclose(step(array)[tuple(map(slice, shape))], np.tanh(x), rtol=1e-12)


def test_a_search_that_does_not_pad_refuses_the_pin() -> None:
    error = refusal(
        head, *arguments(), in_strategy=((1, 8), None), search="propagation", config={"pad": True}
    )
    assert "this call is not padded" in error.what


def test_a_padded_plan_on_another_mesh_than_the_plan_as_traced_is_differentiated() -> None:
    def f(x: Any, g: Any, w: Any) -> Any:
        value, which = jax.lax.top_k(jax.nn.softmax(x @ g), 2)
        each = jnp.take_along_axis(jnp.einsum("td,edf->tef", x, w), which[..., None], 1)
        return jnp.mean(jnp.einsum("te,ted->td", value, each) ** 2)

    rng = np.random.default_rng(5)
    args = rng.normal(size=(19, 5)), rng.normal(size=(5, 11)), rng.normal(size=(11, 5, 5))
    step = jshard.shard(f, mesh="auto:8", level=1, config={"pad": True})
    traced = jshard.shard(f, mesh="auto:8", level=1, config={"pad": False})
    assert step.plan(*args).padding and step.plan(*args).mesh != traced.plan(*args).mesh
    for got, want in zip(jax.grad(step, (0, 1, 2))(*args), jax.grad(f, (0, 1, 2))(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-14)
