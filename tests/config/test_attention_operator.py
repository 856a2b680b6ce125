"""Recipes on models whose attention is one operator: layouts as with written-out attention; the ring in both passes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from jshard._config.recipes.recipe_pins import RecipeError, recipe_pins
from tests.config.test_recipe_pins import of_program


MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
SIZES = {"data": 2, "model": 4}
SIZE, WORDS = 4, 20


def loss(p, tokens, *, attend):
    """A layer of a decoder: attention with fewer heads of keys, rotated by position; a gated MLP; tied scores."""
    x = p["embed"][tokens]
    b, t, _ = x.shape
    q, k, v = ((x @ p[n]).reshape(b, t, -1, SIZE) for n in ("wq", "wk", "wv"))
    angle = jnp.arange(t)[:, None, None] * jnp.ones(SIZE, x.dtype)
    q, k = (a * jnp.cos(angle) for a in (q, k))
    x = x + attend(q, k, v).reshape(b, t, -1) @ p["wo"]
    x = x + (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]
    scores = jax.nn.log_softmax(x @ p["embed"].T)
    return -jnp.take_along_axis(scores, tokens[..., None], -1).mean()


def written_out(q, k, v):
    k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * SIZE**-0.5
    allowed = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(allowed, scores, -1e30)), v)


OPERATOR = functools.partial(loss, attend=functools.partial(jshard.ops.attention, causal=True))
WRITTEN_OUT = functools.partial(loss, attend=written_out)


def problem(heads=8, kv_heads=4, rows=4, tokens=16, seed=11):
    rng, d = np.random.default_rng(seed), heads * SIZE
    shapes = {
        "embed": (WORDS, d), "wq": (d, d), "wk": (d, kv_heads * SIZE), "wv": (d, kv_heads * SIZE),
        "wo": (d, d), "gate": (d, 48), "up": (d, 48), "down": (48, d),
    }  # fmt: skip
    p = {n: jnp.asarray(rng.normal(size=s) * 0.3, "float32") for n, s in shapes.items()}
    return p, jnp.asarray(rng.integers(0, WORDS, (rows, tokens)), "int32")


@pytest.mark.parametrize("kv_heads", [8, 4])
def test_weights_lie_as_those_of_the_written_out_attention(kv_heads):
    args = problem(kv_heads=kv_heads)
    one, other = (of_program(jax.value_and_grad(f), *args) for f in (OPERATOR, WRITTEN_OUT))
    assert one.sizes(one.heads) == other.sizes(other.heads) != {}
    for recipe in ("data", "fsdp", "megatron", "megatron+sequence", "fsdp+megatron", "ulysses", "vocab"):
        a, b = (recipe_pins(recipe, s, SIZES).arguments for s in (one, other))
        assert {one.name(n): e for n, e in a.items()} == {other.name(n): e for n, e in b.items()}, recipe
        inside = [
            v.entry for v in recipe_pins(recipe, one, SIZES).products if v.side == "result" and "@" in v.name
        ]
        model = {"ulysses": 2, "megatron": 2, "fsdp+megatron": 2, "megatron+sequence": 2}.get(recipe)
        expected = [("model",) if d == model else () for d in range(1, 4)]
        assert [list(e[1:]) for e in inside] == [expected]


def test_key_heads_fewer_than_the_axis_stay_whole():
    """Each device takes the key head of its query heads, so these are cut all the same."""
    s = of_program(OPERATOR, *problem(kv_heads=2))
    pins = recipe_pins("megatron", s, SIZES)
    said = {s.name(n): e for n, e in pins.arguments.items()}
    assert said["p.wq"] == ((), ("model",)) and said["p.wk"] == said["p.wv"] == ((), ())


RUN = {"megatron(data)+ring(model)": {"kv_heads": 2, "rows": 3}, "fsdp+ulysses": {"kv_heads": 4}}


@pytest.mark.parametrize("recipe", RUN)
def test_what_runs_equals_the_plain_run(recipe):
    args = problem(**RUN[recipe])
    step = jax.value_and_grad(OPERATOR)
    f = jshard.shard(step, config=recipe, mesh=MESH)
    verified = f.plan(*args, verify=True).verification
    assert verified is not None and verified.ok, str(verified)
    plan = f.plan(*args)
    plain = jax.value_and_grad(WRITTEN_OUT)(*args)
    for a, b in zip(jax.tree.leaves(f(*args)), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    cut = {
        o.primitive: [str(x) for x in o.operands[:2]] for o in plan.operators if "attention" in o.primitive
    }
    assert len(cut) == 2
    positions = [x.strip("()").split(", ")[1] for operands in cut.values() for x in operands]
    rings = [c for c in plan.collectives if c.kind == "permute" and "attention" in c.operator]
    if "ring" in recipe:
        assert set(positions) == {"model"} and rings
    elif "ulysses" in recipe:
        assert set(positions) == {"-"} and "all_to_all" in {c.kind for c in plan.collectives}


@pytest.mark.parametrize(
    "recipe, sizes", [("ring(data)", (2, 4)), ("ring(model)", (2, 4)), ("ring(model)", (2, 2))]
)
def test_permutes_of_a_checkpointed_ring_are_not_merged(recipe, sizes):
    """The backward ring follows the recomputed forward ring of the same keys: compilers must not take its permutes."""

    def layers(p, x):
        def layer(x, w):
            q, k, v = (x @ w[n] for n in range(3))
            heads = ((a.reshape(*x.shape[:2], 2, 8)) for a in (q, k, v))
            return x + jshard.ops.attention(*heads, causal=True).reshape(x.shape) @ w[3], None

        return (jax.lax.scan(jax.checkpoint(layer), x, p)[0] ** 2).sum()

    rng = np.random.default_rng(0)
    p, x = (jnp.asarray(rng.normal(size=s) * 0.3, "float32") for s in ((2, 4, 16, 16), (2, 32, 16)))
    f = jshard.shard(
        jax.value_and_grad(layers),
        config={"recipe": recipe, "mesh": dict(zip(("data", "model"), sizes, strict=True))},
    )
    verified = f.plan(p, x, verify=True).verification
    assert verified is not None and verified.ok, str(verified)
    assert any(c.kind == "permute" for c in f.plan(p, x).collectives)
    for a, b in zip(jax.tree.leaves(f(p, x)), jax.tree.leaves(jax.value_and_grad(layers)(p, x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_no_recipe_costs_less_than_the_search():
    args = jax.eval_shape(lambda: problem(heads=16, kv_heads=16, rows=8, tokens=512))
    names = ["ring", "fsdp+ring", "ulysses", "megatron", "sequence"]
    mesh = jshard.topology("v5e:2x4", SIZES, compiles=False)
    table = jshard.recipes(jax.value_and_grad(OPERATOR), *args, mesh=mesh, names=names)
    steps = [row.figures.step for row in table.applying if row.figures is not None]
    assert len(steps) == len(names) and min(steps) >= table.search.step * (1 - 1e-9)


def test_the_file_of_a_ring_says_the_same(tmp_path):
    args = problem()
    config = jshard.Config.from_recipe("fsdp+ring", OPERATOR, *args, mesh=MESH)
    config.save(tmp_path / "ring.yaml")
    assert "keys" in (tmp_path / "ring.yaml").read_text()
    read = jshard.Config.load(tmp_path / "ring.yaml")
    a = jshard.shard(OPERATOR, config=read, mesh=MESH).plan(*args)
    b = jshard.shard(OPERATOR, config="fsdp+ring", mesh=MESH).plan(*args)
    assert a.cost.objective == b.cost.objective
    assert [c.kind for c in a.collectives] == [c.kind for c in b.collectives]


def test_a_checkpointed_layer_in_a_scan_passes_keys_round_in_both_passes():
    def layers(p, x):
        @jax.checkpoint
        def layer(x, w):
            b, t, _ = x.shape
            q, k, v = ((x @ w[n]).reshape(b, t, -1, SIZE) for n in "qkv")
            return x + jshard.ops.attention(q, k, v, causal=True).reshape(b, t, -1) @ w["o"], None

        return (jax.lax.scan(layer, x, p)[0] ** 2).mean()

    p = {n: jax.ShapeDtypeStruct((3, 16, 16), "float32") for n in "qkvo"}
    s = of_program(jax.grad(layers), p, jax.ShapeDtypeStruct((4, 16, 16), "float32"))
    said = [v for v in recipe_pins("ring", s, SIZES).products if v.side == "operand"]
    kinds = [s.program.operators[v.place[0]].primitive for v in said]
    assert sorted(set(kinds)) == ["jshard_attention", "jshard_attention_backward"]
    assert all(v.entry[-3] == ("model",) for v in said)
    assert {v.name for v in said} == {"p.q @ p.k @ p.v:queries", "p.q @ p.k @ p.v:keys"}


def cross(p, x, memory):
    q, k = ((a @ p[n]).reshape(*a.shape[:2], 4, SIZE) for n, a in (("q", x), ("k", memory)))
    return jshard.ops.attention(q, k, k).reshape(*x.shape[:2], -1) @ p["o"]


REFUSED = {
    "length": ("ring", OPERATOR, problem(tokens=6), "the sequence has 6 positions, which 4 does not divide"),
    "heads": ("ulysses", OPERATOR, problem(heads=6, kv_heads=6), "6 heads are not divided by 4"),
    "axis": ("megatron+ring", OPERATOR, problem(), "megatron cuts attention over model, on which positions would be cut"),
    "cross": (
        "ring", cross, ({n: jnp.ones((16, 16)) for n in "qko"}, jnp.ones((4, 16, 16)), jnp.ones((4, 12, 16))),
        r"no attention has the sequence of the activations as its queries and as its keys: of 1 attention operator "
        r"\(queries x keys\) 16 x 12",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_apply_says_where_it_failed(case):
    recipe, fn, args, text = REFUSED[case]
    with pytest.raises(RecipeError, match=text) as error:
        recipe_pins(recipe, of_program(fn, *args), SIZES)
    assert error.value.fix


def test_the_advice_is_right():
    """An axis of its own; `sequence` in place of `ring` for the attention to other positions."""
    s = of_program(OPERATOR, *problem())
    assert any(v.side == "operand" for v in recipe_pins("megatron(data)+ring(model)", s, SIZES).products)
    _, fn, args, _ = REFUSED["cross"]
    assert recipe_pins("sequence", of_program(fn, *args), SIZES).products
    with pytest.raises(jshard.ShardError, match="ulysses cuts attention by heads, ring by positions"):
        recipe_pins("ulysses+ring", s, SIZES)


def test_a_key_of_random_bits_is_no_weight():
    p, tokens = problem()

    def step(p, tokens, key):
        kept = jax.random.bernoulli(key, 0.9, p["wo"].shape)
        return jax.grad(OPERATOR)(p | {"wo": jnp.where(kept, p["wo"], 0)}, tokens)

    s = of_program(step, p, tokens, jax.random.key(0))
    said = {s.name(n): e for n, e in recipe_pins("fsdp+megatron", s, SIZES).arguments.items()}
    assert "key" not in said and said["p.wo"] == (("model",), ("data",))
