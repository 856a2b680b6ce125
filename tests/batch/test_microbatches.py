"""Programs in microbatches: results, gradients and random bits as without, in float64; what is refused, by name."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jshard
from jshard._batch.batch_class import SHARED, per_example
from jshard._batch.microbatches import in_microbatches
from jshard._core import jaxcompat as compat
from jshard._core.errors import MemoryBudgetError
from jshard._plan.memory_refusal import MemoryRefusal
from jshard._report.format_units import format_bytes


BATCH = 24
KEY = jax.random.key(7)


def normal(i: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.fold_in(KEY, i), shape, jnp.float64)


def weights() -> list[jax.Array]:
    return [normal(0, 6, 16), normal(1, 16, 16), normal(2, 16, 5)]


def data() -> tuple[jax.Array, jax.Array]:
    return normal(3, BATCH, 6), jnp.arange(BATCH) % 5


def hidden(ws: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for w in ws[:-1]:
        x = jax.nn.relu(x @ w)
    return x @ ws[-1]


def cross_entropy(ws: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(hidden(ws, x)), y[:, None], 1)[:, 0]


def mean_loss(ws: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean(cross_entropy(ws, x, y))


def masked_loss(ws: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    mask = y != 2
    return jnp.sum(mask * cross_entropy(ws, x, y)) / jnp.sum(mask)


def indexed_loss(ws: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return -jnp.mean(jax.nn.log_softmax(hidden(ws, x))[jnp.arange(BATCH), y])


def dropout_loss(ws: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    h = jax.nn.gelu(x @ ws[0])
    h = jnp.where(jax.random.bernoulli(jax.random.key(3), 0.5, h.shape), 2 * h, 0)
    return jnp.mean((h @ ws[1]) ** 2) + 0.01 * sum(jnp.sum(w**2) for w in ws)


@jax.custom_vjp
def clipped(x: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.tanh(x) * scale


def _clipped_forward(x: jax.Array, scale: jax.Array) -> Any:
    return clipped(x, scale), (x, scale)


def _clipped_backward(left: Any, g: jax.Array) -> Any:
    x, scale = left
    return jnp.clip(g * scale, -0.01, 0.01), jnp.sum(g * jnp.tanh(x) * 3)  # not the derivative


clipped.defvjp(_clipped_forward, _clipped_backward)


def custom_rule_loss(ws: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((clipped(x @ ws[0], ws[2][0, 0]) @ ws[1]) ** 2)


def auxiliary_loss(ws: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Experts with an auxiliary loss of their loads: products of two sums over examples."""
    gates = jax.nn.softmax(x @ ws[0][:, :4])
    top = jax.nn.one_hot(jnp.argmax(gates, -1), 4)
    experts = jnp.stack([ws[0] * (k + 1) for k in range(4)])
    out = jnp.einsum("bk,bkd->bd", gates * top, jnp.einsum("bf,kfd->bkd", x, experts))
    load = jnp.mean(top, 0) * jnp.mean(gates, 0)
    return jnp.mean((jax.nn.relu(out @ ws[1]) @ ws[2]) ** 2) + 4 * jnp.sum(load)


def decoder(remat: bool, rate: float) -> Callable[..., jax.Array]:
    """A decoder with its layers in a scan, tied embeddings, dropout in every layer and a loss over masked tokens."""

    def loss(p: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        length = tokens.shape[1]
        mask = jnp.arange(length)[:, None] >= jnp.arange(length)

        def layer(h: jax.Array, one: Any) -> tuple[jax.Array, None]:
            w, key = one
            scores = jnp.where(mask, jnp.einsum("btd,bsd->bts", h @ w, h), -1e9)
            out = jax.nn.softmax(scores) @ h
            if rate:
                out = jnp.where(jax.random.bernoulli(key, rate, out.shape), out, 0)
            h = h + out
            return h / jnp.sqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6), None

        keys = jax.random.split(jax.random.key(3), p["layers"].shape[0])
        run = jax.checkpoint(layer) if remat else layer
        h, _ = lax.scan(run, p["embedding"][tokens], (p["layers"], keys))
        targets = jnp.roll(tokens, -1, 1)
        each = jnp.take_along_axis(jax.nn.log_softmax(h @ p["embedding"].T), targets[..., None], -1)[..., 0]
        return -jnp.sum(each * (targets != 3)) / jnp.sum(targets != 3)

    return loss


def decoder_arguments() -> tuple[dict[str, jax.Array], jax.Array]:
    tokens = jax.random.randint(KEY, (BATCH, 5), 0, 11)
    return {"layers": normal(4, 3, 8, 8), "embedding": normal(5, 11, 8)}, tokens


def largest_error(found: Any, wanted: Any) -> float:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(float(np.max(np.abs(a - b)) / max(1e-300, float(np.max(np.abs(b))))) for a, b in pairs)


def looped(f: Callable, args: Any, batch: Sequence[bool], count: int) -> tuple[Any, Any]:
    """The program in pieces, and its results."""
    closed = jax.make_jaxpr(f)(*args)
    classes = [per_example(0) if b else SHARED for b in batch]
    new = in_microbatches(closed, classes, BATCH, count)
    return new, jax.jit(compat.as_function(new))(*jax.tree.leaves(args))


@pytest.mark.parametrize(
    "loss", [mean_loss, masked_loss, indexed_loss, dropout_loss, custom_rule_loss, auxiliary_loss]
)
def test_values_and_gradients_are_those_of_the_whole_batch(loss: Callable) -> None:
    f, args = jax.value_and_grad(loss), (weights(), *data())
    wanted = jax.jit(f)(*args)
    _, found = looped(f, args, [False, False, False, True, True], 6)
    assert largest_error(found, wanted) < 1e-12


@pytest.mark.parametrize(("remat", "rate"), [(False, 0.0), (True, 0.8)])
def test_layers_in_a_scan(remat: bool, rate: float) -> None:
    f, args = jax.value_and_grad(decoder(remat, rate)), decoder_arguments()
    wanted = jax.jit(f)(*args)
    _, found = looped(f, args, [False, False, True], 3)
    assert largest_error(found, wanted) < 1e-12


def test_random_bits_and_positions_are_those_of_the_whole_batch() -> None:
    def f(x: jax.Array, key: jax.Array) -> tuple[jax.Array, ...]:
        merged = x.reshape(BATCH * 3, 2)
        bits = jax.random.bits(key, merged.shape)
        place = lax.broadcasted_iota(jnp.int32, merged.shape, 0)
        wide = jax.random.bits(key, (2, BATCH, 2), jnp.uint64)[1]
        keys = jax.random.split(key, BATCH)
        each = jax.vmap(lambda k, v: jax.random.normal(k, (2,)) + v.sum())(keys, x)
        return merged * bits, merged + place, x[:, 0] * wide, each, jnp.sum(merged * place)

    x = normal(8, BATCH, 3, 2)
    wanted = jax.jit(f)(x, KEY)
    for count in (4, 12):
        _, found = looped(f, (x, KEY), [True, False], count)
        assert largest_error(found, wanted) < 1e-12


def test_loops_and_branches() -> None:
    def f(x: jax.Array, w: jax.Array, n: jax.Array) -> tuple[jax.Array, ...]:
        h = lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w) + i, x)
        h = lax.cond(n > 1, lambda h: h * 2, lambda h: jnp.zeros_like(h), h)
        total, _ = lax.scan(lambda s, a: (s + jnp.sum(h * a, 0), None), jnp.ones(4), jnp.arange(3.0))
        steps = lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] + h), (0, jnp.zeros_like(h)))[1]
        return h, total, jnp.sum(steps)

    args = (normal(1, BATCH, 4), normal(2, 4, 4), jnp.asarray(2))
    wanted = jax.jit(f)(*args)
    _, found = looped(f, args, [True, False, False], 8)
    assert largest_error(found, wanted) < 1e-12


def test_sums_of_narrow_floats_are_kept_in_float32() -> None:
    def f(w: jax.Array, x: jax.Array) -> jax.Array:
        return x.T @ (x @ w)

    args = normal(0, 6, 4).astype(jnp.bfloat16), normal(1, BATCH, 6).astype(jnp.bfloat16)
    new, found = looped(f, args, [False, True], 8)
    scan = next(e for e in compat.open_jaxpr(new)[0].eqns if e.primitive.name == "scan")
    assert [v.aval.dtype for v in scan.outvars] == [jnp.float32] and found[0].dtype == jnp.bfloat16
    np.testing.assert_allclose(found[0].astype(float), f(*args).astype(float), rtol=0.01, atol=0.05)


def batch_normed(ws: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    for w in ws[:-1]:
        x = x @ w
        mean = x.mean(0)  # of the batch
        x = jax.nn.relu((x - mean) / jnp.sqrt(((x - mean) ** 2).mean(0) + 1e-5))
    return jnp.mean((x @ ws[-1]) ** 2)


def sorted_batch(ws: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean(jnp.sort(x @ ws[0], 0) @ ws[1])


@pytest.mark.parametrize(
    ("loss", "named"), [(batch_normed, "reduce_sum f64[16] "), (sorted_batch, "sort f64[24,16] ")]
)
def test_what_couples_the_examples_is_named_with_its_line(loss: Callable, named: str) -> None:
    f = jshard.shard(jax.value_and_grad(loss), microbatches=4)
    with pytest.raises(jshard.ShardError, match="the step cannot run in microbatches") as error:
        f.plan(weights(), *data())
    assert named in error.value.where and "test_microbatches.py:" in error.value.where
    jshard.shard(jax.value_and_grad(loss)).plan(weights(), *data())  # the advice


def test_what_a_loop_carries_beside_examples_is_shared() -> None:
    """A scan carries values per example and a penalty of the weights, which is a result by itself."""

    def loss(ws: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        def layer(carry: Any, w: jax.Array) -> tuple[Any, None]:
            h, penalty = carry
            return (jnp.tanh(h @ w), penalty + jnp.sum(w**2)), None

        (h, penalty), _ = lax.scan(layer, (x @ ws[0], jnp.zeros(())), jnp.stack([ws[1]] * 3))
        return jnp.mean((h @ ws[2]) ** 2) + penalty, penalty

    args = (weights(), *data())
    f = jshard.shard(loss, microbatches=4)
    assert largest_error(f(*args), jax.jit(loss)(*args)) < 1e-12


def test_batch_statistics_that_cost_little_are_those_of_the_whole_batch() -> None:
    """Normalised inputs: the statistics in a loop of their own, before the loop of all else; `plan.batch` names them."""

    def loss(ws: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        mean = x.mean(0)
        x = (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(0) + 1e-5)
        for w in ws[:-1]:
            x = jnp.tanh(x @ w)
        return jnp.mean((x @ ws[-1]) ** 2)

    f = jshard.shard(jax.value_and_grad(loss), microbatches=4)
    args = (weights(), *data())
    assert largest_error(f(*args), jax.jit(jax.value_and_grad(loss))(*args)) < 1e-12
    batch = f.plan(*args).batch
    assert batch.loops > 1 and all("test_microbatches.py:" in text for text in batch.finished)
    line = "of the whole batch before values per example read it: reduce_sum f64["
    assert str(batch).count(line) == len(batch.finished) == 2
    assert jshard.shard(jax.value_and_grad(mean_loss), microbatches=4).plan(*args).batch.finished == ()


def test_labels_picked_by_the_position_of_the_example() -> None:
    """`logits[arange(n), labels]` is per example, with its gradient: one loop, as with `take_along_axis`."""

    def of_examples(ws: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax(hidden(ws, x))
        return -jnp.mean(logits[jnp.arange(BATCH), y])

    def of_tokens(ws: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax(jnp.stack([hidden(ws, x), hidden(ws, 2 * x)], 1))
        return -jnp.mean(logits[jnp.arange(BATCH)[:, None], jnp.arange(2), y[:, None]])

    def updated(ws: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = hidden(ws, x)
        return jnp.mean(logits.at[jnp.arange(-BATCH, 0), y].add(1.0) ** 2) + jnp.mean(
            logits.at[jnp.arange(BATCH), y].set(0.0) ** 2
        )

    args = (weights(), *data())
    for loss in (of_examples, of_tokens, updated):
        f = jax.value_and_grad(loss)
        sharded = jshard.shard(f, microbatches=4)
        assert largest_error(sharded(*args), jax.jit(f)(*args)) < 1e-12, loss
        assert loss is updated or sharded.plan(*args).batch.loops == 1


def checkpointed_layers(checkpoint: Callable, inner_loop: bool) -> Callable:
    """Two checkpointed layers outside of loops, each with a loss of a sum over the batch."""

    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        def once(carry: Any, _: None) -> tuple[Any, None]:
            h = jnp.tanh(carry[0] @ w)
            mean = jax.ad_checkpoint.checkpoint_name(jnp.mean(h, 0), "sums")
            return (h, carry[1] + jnp.sum(mean**2)), None

        start = h, jnp.zeros(())
        return lax.scan(once, start, None, length=2)[0] if inner_loop else once(start, None)[0]

    def loss(ws: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        h, first = checkpoint(layer)(x, ws[0])
        h, second = checkpoint(layer)(h, ws[1])
        return jnp.mean((h @ ws[2]) ** 2) + first + second

    return loss


NAMED = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("sums"))


@pytest.mark.parametrize("checkpoint", [jax.checkpoint, NAMED])
@pytest.mark.parametrize("inner_loop", [False, True])
def test_unrolled_layers_whose_sums_the_backward_pass_computes_again(
    checkpoint: Callable, inner_loop: bool
) -> None:
    """The call reads the sums of the forward pass; those of a loop inside it have to be saved by name."""
    f = jax.value_and_grad(checkpointed_layers(checkpoint, inner_loop))
    args = [normal(k, 6, 6) / 3 for k in range(3)], *data()
    sharded = jshard.shard(f, microbatches=4)
    if inner_loop and checkpoint is jax.checkpoint:
        with pytest.raises(jshard.ShardError, match="the step cannot run in microbatches") as error:
            sharded.plan(*args)
        assert str(error.value).endswith('policy=jax.checkpoint_policies.save_only_these_names("sums"))')
    else:
        assert largest_error(sharded(*args), jax.jit(f)(*args)) < 1e-12


@pytest.mark.parametrize("checkpoint", [jax.checkpoint, NAMED])
def test_a_checkpointed_layer_that_returns_a_product_of_sums(checkpoint: Callable) -> None:
    """Of a loss that is differentiated from outside: the call is divided, and what is per example stays checkpointed."""
    loss = checkpointed_layers(checkpoint, inner_loop=False)
    args = [normal(k, 6, 6) / 3 for k in range(3)], *data()
    f = jax.value_and_grad(jshard.shard(loss, microbatches=4))
    assert largest_error(f(*args), jax.jit(jax.value_and_grad(loss))(*args)) < 1e-12


def test_batch_statistics_of_checkpointed_layers_are_not_told_to_be_saved() -> None:
    """Saved, they would still be read by the next layer."""

    @jax.checkpoint
    def layer(h: jax.Array, w: jax.Array) -> jax.Array:
        h = h @ w
        return jnp.tanh((h - jnp.mean(h, 0)) * lax.rsqrt(jnp.var(h, 0) + 1e-5))

    def loss(ws: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean(layer(layer(x, ws[0]), ws[1]) ** 2)

    with pytest.raises(jshard.ShardError, match="the step cannot run in microbatches") as error:
        jshard.shard(jax.value_and_grad(loss), microbatches=4).plan(weights(), *data())
    assert "checkpoint" not in str(error.value).partition("write instead")[2]


def step(loss: Callable) -> Callable:
    def run(ws: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
        value, gradient = jax.value_and_grad(loss)(ws, x, y)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradient)

    return run


@pytest.mark.parametrize("shape", [(8, 1), (2, 4)])
def test_a_sharded_step_reduces_each_gradient_once(shape: tuple[int, int]) -> None:
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    strategy = (([P(), P(), P()]), P("data"), P("data"))
    x, y = jnp.concatenate([data()[0]] * 2)[:32], jnp.arange(32) % 5
    wanted = jax.jit(step(masked_loss))(weights(), x, y)
    for count in (2, 4):
        f = jshard.shard(step(masked_loss), strategy, mesh=mesh, microbatches=count, level=2)
        assert largest_error(f(weights(), x, y), wanted) < 1e-12
        plan = f.plan(weights(), x, y, verify=True)
        assert plan.microbatches == count and plan.verification.ok
        gradients = [c for c in plan.collectives if "data" in c.axes and "x" in c.local]
        assert len(gradients) >= 3 and all(c.count == 1 for c in gradients)
        assert f"in {count} microbatches of {32 // count} examples, in 2 loops" in str(plan.batch)
        again = jshard.shard(step(masked_loss), plan=jshard.Plan.from_json(plan.to_json()), mesh=mesh)
        assert largest_error(again(weights(), x, y), wanted) < 1e-12


def test_sums_of_narrow_floats_are_rounded_before_they_move() -> None:
    """Each device rounds its sum once, as its part of a product of the whole batch; half the bytes of float32 move."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    w, x = normal(1, 32, 64).astype(jnp.bfloat16), normal(2, 4096, 32).astype(jnp.bfloat16)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ w).astype(jnp.float32) ** 2)

    f = jshard.shard(jax.grad(loss), (P(), P("data")), mesh=mesh, microbatches=4, level=2)
    plan = f.plan(w, x, verify=True)
    assert plan.verification.ok
    (reduced,) = [c for c in plan.collectives if "reduce" in c.kind]
    assert (reduced.dtype, reduced.count) == ("bfloat16", 1)
    wanted = jax.grad(loss)(w.astype(jnp.float64), x.astype(jnp.float64))
    error = jnp.abs(f(w, x).astype(jnp.float64) - wanted).max() / jnp.abs(wanted).max()
    assert error < 2**-5


@pytest.mark.parametrize("loss", [masked_loss, custom_rule_loss])
def test_differentiated_from_outside(loss: Callable) -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    args = weights(), *data()
    wanted = jax.jit(jax.value_and_grad(loss))(*args)
    f = jshard.shard(loss, (None, P("data"), P("data")), mesh=mesh, microbatches=3)
    assert largest_error(jax.jit(jax.value_and_grad(f))(*args), wanted) < 1e-12


def test_the_fewest_that_fit() -> None:
    x, y = normal(3, 1024, 64), jnp.arange(1024) % 5
    ws = [normal(0, 64, 64), normal(1, 64, 64), normal(2, 64, 5)]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def plan_of(**options: Any) -> jshard.Plan:
        return jshard.shard(step(mean_loss), level=2, mesh=mesh, **options).plan(ws, x, y)

    whole = plan_of(microbatches="auto")
    budget = int(0.75 * whole.cost.peak_bytes)
    plan = plan_of(microbatches="auto", memory_budget=budget)
    assert (
        whole.microbatches == 1 < plan.microbatches and plan.cost.peak_bytes <= budget < whole.cost.peak_bytes
    )
    assert any("the budget" in s and "exceed" in s for s in plan.steps)
    said = [s for s in plan.steps if s.startswith("microbatches: ")]
    before = plan.microbatches // 2
    (refused,) = [s for s in said if s.startswith(f"microbatches: {before} piece")]
    with pytest.raises(MemoryBudgetError) as error:
        plan_of(microbatches=before, memory_budget=budget)
    refusal = error.value.refusal
    assert isinstance(refusal, MemoryRefusal)
    over = format_bytes(refusal.peak - budget)
    assert f"refused, the least peak found is {over} above {format_bytes(budget)}" in refused


def test_a_budget_that_no_number_fits() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jshard.shard(step(mean_loss), mesh=mesh, microbatches="auto", memory_budget=1000)
    x, y = data()
    with pytest.raises(jshard.ShardError, match="microbatches=1, 2, 4 exceed the budget too"):
        f.plan(weights(), x[:4], y[:4])


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A wrong request, and what the error says."""

    options: dict[str, Any]
    what: str
    fix: str


@pytest.mark.parametrize(
    "wrong",
    [
        Wrong(
            {"microbatches": 5},
            "5 does not divide the batch of 24, dimension 0 of x, y",
            "1, 2, 3, 4, 6, 8, 12, 24",
        ),
        Wrong({"microbatches": 0}, "microbatches is 0, which leaves no batch", "microbatches=8"),
        Wrong({"microbatches": 2.0}, "microbatches is a float, 2.0", "microbatches=8"),
        Wrong({"microbatches": "all"}, "microbatches is a str, 'all'", '"auto"'),
        Wrong({"config": {"microbatches": True}}, "microbatches is a bool, True", '"auto"'),
    ],
)
def test_wrong_requests(wrong: Wrong) -> None:
    with pytest.raises(jshard.ShardError) as error:
        jshard.shard(mean_loss, **wrong.options).plan(weights(), *data())
    assert wrong.what in str(error.value) and wrong.fix in error.value.fix


def test_a_function_without_a_batch_is_refused() -> None:
    with pytest.raises(jshard.ShardError, match="no argument has a batch"):
        jshard.shard(lambda: jnp.ones(3), microbatches=2).plan()
    assert str(jshard.shard(lambda: jnp.ones(3)).plan().batch).endswith("no argument has one")


def test_the_classes_of_a_plan() -> None:
    plan = jshard.shard(step(masked_loss), config={"microbatches": 4}).plan(weights(), *data())
    report = plan.batch
    assert [str(r.batch_class) for r in report.arguments] == ["shared"] * 3 + [
        "per example (dimension 0)"
    ] * 2
    assert {r.batch_class.kind for r in report.values} == {"shared", "per example", "sum"}
    assert report.loops == 2 and plan.microbatches == 4
    coupled = jshard.shard(sorted_batch).plan(weights(), *data()).batch.coupled
    assert len(coupled) == 1 and "sorting compares elements along the whole dimension" in coupled[0]
    assert ":" in coupled[0] and "test_microbatches.py" in coupled[0]
