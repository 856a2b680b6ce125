"""Arguments that are padded at rest: `config={"pad": [...]}`, `jshard.PaddedArray`."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from jshard import PaddedArray, ShardError


pytestmark = pytest.mark.one_pair


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def eight_devices():
    return jax.make_mesh((8,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:8])


def loss(p: Any, ids: Any, y: Any) -> Any:
    logp = jax.nn.log_softmax(jnp.tanh(p["e"][ids]) @ p["w"])
    return -jnp.take_along_axis(logp, y[:, None], 1).mean()


def train(p: Any, m: Any, ids: Any, y: Any) -> Any:
    value, g = jax.value_and_grad(loss)(p, ids, y)
    m = jax.tree.map(lambda a, b: 0.9 * a + b, m, g)
    return value, jax.tree.map(lambda a, b: a - 0.1 * b / (1e-3 + jnp.abs(b)), p, m), m


def arguments(words: int = 50) -> tuple[Any, ...]:
    rng = np.random.default_rng(words)
    p = {"e": rng.normal(size=(words, 6)), "w": rng.normal(size=(6, words))}
    ids, y = rng.integers(0, words, (2, 32))
    return p, jax.tree.map(np.zeros_like, p), ids, y


PINS = ({"e": (8, 1), "w": (1, 8)}, None, None, None)


def sharded(**options: Any) -> jshard.Sharded:
    config = {"pad": ["p.**", "m.**"], **options.pop("config", {})}
    return jshard.shard(train, mesh=eight_devices(), config=config, in_strategy=PINS, **options)


@pytest.mark.parametrize("options", [{"donate_argnums": (0, 1)}, {"microbatches": 4}], ids=str)
def test_steps_pass_padded_arrays_on(options: dict[str, Any]) -> None:
    p, m, ids, y = arguments()
    step = sharded(**options)
    plan = step.plan(p, m, ids, y, verify=True)
    assert plan.verification is not None and plan.verification.ok
    assert {(n, padded) for n, _, padded in plan.padding} == {(50, 56)}
    assert {r.path: r.shape for r in plan.inputs}["p.w"] == (6, 56)
    state, plain, plain_step = (p, m), (p, m), jax.jit(train)
    for _ in range(3):
        value, *state = step(*state, ids, y)
        want, *plain = plain_step(*plain, ids, y)
        np.testing.assert_allclose(value, want, rtol=1e-12)
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, PaddedArray))
    assert all(isinstance(x, PaddedArray) for x in leaves)
    for x, want in zip(jax.tree.leaves(PaddedArray.true_sizes(state)), jax.tree.leaves(plain), strict=True):
        assert x.shape == want.shape
        np.testing.assert_allclose(x, want, rtol=1e-10, atol=1e-12)
    assert not np.any(np.asarray(leaves[0].padded)[50:])


def test_what_stands_in_the_padding_does_not_matter() -> None:
    p, m, ids, y = arguments()
    step = sharded()
    spoilt = jax.tree.map(lambda x: PaddedArray.of(x, [56 if n == 50 else n for n in x.shape]), p)
    spoilt = jax.tree.map(lambda x: np.where(x == 0, np.nan, x), spoilt)
    value, new, _ = step(spoilt, m, ids, y)
    want, plain, _ = train(p, m, ids, y)
    np.testing.assert_allclose(value, want, rtol=1e-12)
    for name in p:
        np.testing.assert_allclose(PaddedArray.true_sizes(new)[name], plain[name], rtol=1e-10)


def test_functions_without_the_option_read_the_true_size() -> None:
    p, _, ids, y = arguments()
    placed, *_ = sharded().place(*arguments())
    assert placed["w"].padded.sharding.spec == jax.sharding.PartitionSpec(None, "x")
    evaluate = jshard.shard(loss, mesh=eight_devices())
    np.testing.assert_allclose(evaluate(placed, ids, y), loss(p, ids, y), rtol=1e-12)
    got = jax.grad(evaluate)(placed, ids, y)
    for name, want in jax.grad(loss)(p, ids, y).items():
        np.testing.assert_allclose(PaddedArray.true_sizes(got)[name], want, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(jnp.sum(placed["w"]), np.sum(p["w"]), rtol=1e-12)


def test_a_plan_with_padding_at_rest_is_saved_and_read(tmp_path: pathlib.Path) -> None:
    args = arguments()
    sharded().plan(*args).save(tmp_path / "plan.json")
    again = jshard.shard(train, plan=jshard.Plan.load(tmp_path / "plan.json"), mesh=eight_devices())
    state = [
        jax.tree.map(lambda x: PaddedArray.of(x, [56 if n == 50 else n for n in x.shape]), a)
        for a in args[:2]
    ]
    np.testing.assert_allclose(again(*state, *args[2:])[0], train(*args)[0], rtol=1e-12)


def head(p: Any, x: Any, y: Any) -> Any:
    def of(p: Any, x: Any) -> Any:
        logp = jax.nn.log_softmax((x @ p["w"]).astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(logp, y[:, None], 1))

    value, (g, gx) = jax.value_and_grad(of, (0, 1))(p, x)
    return value, jax.tree.map(lambda a, b: a - 0.1 * b.astype(a.dtype), p, g), gx


def decode(p: Any, x: Any) -> Any:
    return jnp.argmax(x @ p["w"], -1)


@pytest.mark.parametrize("fn, rows", [(head, 8192), (decode, 64)])
def test_a_vocabulary_at_rest_costs_what_one_that_divides_does(fn: Any, rows: int) -> None:
    mesh = jshard.topology("v5e:4x4", {"x": 4, "y": 4}, compiles=False)

    def seconds(words: int, **options: Any) -> float:
        kinds = (((768, words), "bfloat16"), ((rows, 768), "bfloat16"), ((rows,), "int32"))
        w, x, y = (jax.ShapeDtypeStruct(*k) for k in kinds)
        args = ({"w": w}, x, y) if fn is head else ({"w": w}, x)
        return jshard.shard(fn, mesh=mesh, level=2, **options).plan(*args).step_seconds

    assert seconds(50257, config={"pad": ["p.**"]}) < 1.05 * seconds(50304)


def refusal(fn: Any, *args: Any, **options: Any) -> ShardError:
    with pytest.raises(ShardError) as caught:
        jshard.shard(fn, **options).plan(*args)
    return caught.value


def test_paths_that_no_argument_has() -> None:
    error = refusal(train, *arguments(), mesh=eight_devices(), config={"pad": ["q.*"]})
    assert error.what == "pad names 'q.*', and no argument of train has such a path"
    assert error.fix == "a pattern of these paths: p.e, p.w, m.e, m.w, ids, y"


def test_without_a_mesh_nothing_says_how_much_padding() -> None:
    error = refusal(train, *arguments(), config={"pad": ["p.*"]})
    assert error.what == "arrays are padded at rest for the cuts of a mesh, and none is given"
    with jax.set_mesh(eight_devices()):
        assert jshard.shard(train, config={"pad": ["p.*"]}).plan(*arguments()).padding


def test_state_of_modules_is_refused() -> None:
    nnx = pytest.importorskip("flax.nnx")

    def f(model: Any, x: Any) -> Any:
        return model(x)

    error = refusal(
        f, nnx.Linear(6, 50, rngs=nnx.Rngs(0)), np.ones((2, 6)), mesh=eight_devices(), config={"pad": ["**"]}
    )
    assert error.what == "pad names paths of arrays, and an argument is an nnx module"
