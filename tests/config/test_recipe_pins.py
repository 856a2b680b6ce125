"""Recipes against hand annotations, as pins, as a file; none is cheaper than the search; what runs equals the plain run."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import jshard
from benchmarks import workloads
from jshard._config.recipes.recipe_names import RECIPES, SUMS, parse_recipe
from jshard._config.recipes.recipe_pins import RecipeError, recipe_pins
from jshard._config.recipes.structure import Structure
from tests.helpers.hand_recipes import PAIRS, RECIPE_OF, SIZES, by_hand, structure


of_workload = functools.cache(structure)


def machine(**axes: int):
    return jshard.topology("v5e:2x4", axes or SIZES, compiles=False)


@pytest.mark.parametrize("workload, hand", [p for p in PAIRS], ids=lambda x: x)
def test_a_recipe_says_what_the_hand_annotation_says(workload, hand):
    s = of_workload(workload)
    marked, pins = by_hand(workload, hand), recipe_pins(RECIPE_OF[hand], s, SIZES)
    own = {s.name(n): e for n, e in pins.arguments.items()}
    said = {k: spec for k, spec in marked.state.items() if spec}  # of all but scalars
    assert len(said) > 1
    assert {k: own.get(k) for k in said} == said
    outputs: dict[tuple[int, ...], set] = {}
    for v in pins.products:
        outputs.setdefault(v.shape, set()).add(v.entry)
    compared = [(dims, outputs[shape]) for (_, shape), dims in marked.activations.items() if shape in outputs]
    assert all(dims in entries for dims, entries in compared)


EVERY = (*RECIPES, *SUMS)


SOME = {
    "lm-head": (5, None),
    "moe": (6, None),
    "gpt-scan": (3, ("zero2", "megatron+sequence", "fsdp+ulysses", "expert")),
}


@pytest.mark.parametrize("workload", SOME)
def test_no_recipe_costs_less_than_the_search(workload):
    w = workloads.get(workload, small=True, devices=8)
    apply, names = SOME[workload]
    table = jshard.recipes(w.step, *w.args, mesh=machine(), names=names)
    assert len(table.applying) >= apply
    steps = [row.figures.step for row in table.applying if row.figures is not None]
    assert min(steps) >= table.search.step * (1 - 1e-9) and steps == sorted(steps)
    for row in table:
        assert row.applies or row.reason
    text, html = str(table), table._repr_html_()
    for row in table:
        assert row.recipe in text and f">{row.recipe}<" in html


FILES = {"zero1": "lora", "zero2": "lora", "ulysses": "vit"}


@pytest.mark.parametrize("recipe", [*FILES, "fsdp+megatron+sequence"])
def test_the_file_of_a_recipe_says_the_same(recipe, tmp_path):
    w = workloads.get("gpt-scan" if "+" in recipe else FILES[recipe], small=True, devices=8)
    config = jshard.Config.from_recipe(recipe, w.step, *w.args, mesh=machine())
    config.save(tmp_path / "recipe.yaml")
    read = jshard.Config.load(tmp_path / "recipe.yaml")
    assert read == config and not read.recipe
    a = jshard.shard(w.step, config=read.override("level=2"), mesh=machine()).plan(*w.args)
    b = jshard.shard(w.step, config={"recipe": recipe, "level": 2}, mesh=machine()).plan(*w.args)
    assert a.cost.objective == b.cost.objective
    assert [str(r.layout) for r in a.inputs] == [str(r.layout) for r in b.inputs]


def test_the_mesh_of_a_file_may_be_given_by_the_sizes_of_its_axes():
    p, sizes = {k: jnp.ones(s) for k, s in PARAMS.items()}, {"x": 2, "y": 4}
    config = jshard.Config.from_recipe("fsdp+megatron", mlp, p, jnp.ones((16, 6)), mesh=sizes)
    assert config == jshard.Config.from_recipe("fsdp+megatron", mlp, p, jnp.ones((16, 6)), mesh=machine())
    of_a_sharded_function = jshard.shard(mlp, config={"mesh": {"z": 8}})
    assert config == jshard.Config.from_recipe(
        "fsdp+megatron", of_a_sharded_function, p, jnp.ones((16, 6)), mesh=sizes
    )


def test_the_file_of_numbered_modules_of_several_kinds_is_read_again():
    """As linen names them: rules of `Dense_*` say nothing of `Conv_0`, and none is shadowed by the others."""

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.LayerNorm()(linen.Conv(16, (2, 2), (2, 2))(x))
            x = linen.DenseGeneral(16, axis=(-2, -1))(linen.DenseGeneral((4, 4))(x))
            return linen.Dense(8)(linen.relu(linen.Dense(32)(linen.LayerNorm()(x))))

    x = jnp.ones((4, 8, 8, 3))
    p = Net().init(jax.random.key(0), x)["params"]
    state = {"params": p, "m": p, "v": p}

    def step(state, x):
        g = jax.grad(lambda p: (Net().apply({"params": p}, x) ** 2).mean())(state["params"])
        m, v = (jax.tree.map(lambda s, d, n=n: s + d**n, state[k], g) for k, n in (("m", 1), ("v", 2)))
        return {
            "params": jax.tree.map(lambda a, b, c: a - b / (1 + c * c), state["params"], m, v),
            "m": m,
            "v": v,
        }

    for recipe in ("sequence", "fsdp", "zero1"):
        config = jshard.Config.from_recipe(recipe, step, state, x, mesh={"x": 2, "y": 4})
        report = config.check(step, state, x)
        assert report.ok, report
        assert any(r.key.startswith("Dense_*") for r in config.parameters)


def test_each_use_of_a_weight_has_its_own_line_in_a_file(tmp_path):
    """An encoder and a decoder look up one table, and the recipe cuts the tokens of the encoder only."""

    def loss(p, source, target):
        x, y = p["embed"][source], p["embed"][target]
        x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
        scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", y, x))
        y = y + jnp.einsum("bts,bsd->btd", scores, x)
        return (jax.nn.log_softmax(y @ p["embed"].T) ** 2).mean()

    rng = np.random.default_rng(4)
    p = {
        n: jnp.asarray(rng.normal(size=s), "float32")
        for n, s in {"embed": (64, 16), "up": (16, 32), "down": (32, 16)}.items()
    }
    source, target = (jnp.asarray(rng.integers(0, 64, (4, n)), "int32") for n in (16, 8))
    f, sizes = jax.value_and_grad(loss), {"x": 2, "y": 4}
    config = jshard.Config.from_recipe("megatron+sequence", f, p, source, target, mesh=sizes)
    assert {r.key: r.text for r in config.products if r.key.startswith("embed:lookup[")} == {
        "embed:lookup[0]": "[x, y, null]",
        "embed:lookup[1]": "[x, null, null]",
    }
    config.save(tmp_path / "recipe.json")
    read = jshard.Config.load(tmp_path / "recipe.json")
    assert read == config and config.check(f, p, source, target).ok
    a, b = (
        jshard.shard(f, config=c).plan(p, source, target)
        for c in (read, {"recipe": "megatron+sequence", "mesh": sizes})
    )
    assert a.cost.objective == b.cost.objective
    both = {"mesh": sizes, "products": {"embed:lookup": ["x", None, None]}}  # without a number: each of them
    assert jshard.Config.of(both).check(f, p, source, target).ok
    with pytest.raises(jshard.ShardError, match=r"'embed:lookup\[2\]' of products matches nothing"):
        jshard.shard(f, config=both | {"products": {"embed:lookup[2]": ["x", None, None]}}).plan(
            p, source, target
        )


def test_the_rules_of_a_file_say_nothing_of_what_the_recipe_leaves_open():
    """Of a scalar that is named as vectors are, and of an argument that the model does not read."""

    def loss(p, x):
        h = jax.nn.gelu(x @ p["a"]["w"] + p["a"]["scale"]) @ p["b"]["w"] + p["b"]["scale"]
        return ((h * jnp.exp(p["c"]["scale"])) ** 2).mean()

    shapes = {"a": {"w": (8, 16), "scale": (16,)}, "b": {"w": (16, 8), "scale": (8,)}, "c": {"scale": ()}}
    p = jax.tree.map(jnp.ones, shapes | {"d": {"w": (8, 8)}}, is_leaf=lambda x: isinstance(x, tuple))
    f, sizes = jax.value_and_grad(loss), {"x": 2, "y": 4}
    for recipe in ("data", "fsdp", "megatron"):
        config = jshard.Config.from_recipe(recipe, f, p, jnp.ones((8, 8)), mesh=sizes)
        a, b = (
            jshard.shard(f, config=c).plan(p, jnp.ones((8, 8)))
            for c in (config, {"recipe": recipe, "mesh": sizes})
        )
        assert [str(r.layout) for r in a.inputs] == [str(r.layout) for r in b.inputs]
    assert (
        "d.w: ['?', '?']" in jshard.Config.from_recipe("data", f, p, jnp.ones((8, 8)), mesh=sizes).to_yaml()
    )


def test_an_own_rule_overrides_the_recipe():
    w = workloads.get("mlp-512", small=True, devices=8)
    config = {
        "recipe": "megatron",
        "parameters": {"w1": [None, None]},
        "products": {"w1": [["x", "y"], None]},
    }
    plan = jshard.shard(w.step, config=config, mesh=machine()).plan(*w.args)
    assert [str(r.layout) for r in plan.inputs] == ["(-, -)", "(y, -)", "(x, -)"]


@pytest.mark.parametrize("recipe", ["vocab", "fsdp+vocab", "megatron"])
def test_the_scores_of_a_cut_vocabulary_are_not_gathered(recipe):
    """The loss and its gradient are computed from each device's part of the scores: only values per row go round."""
    rows, tokens, d, vocabulary = 32, 64, 16, 4096
    f32 = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
    p = {"embed": f32((vocabulary, d)), "head": f32((d, vocabulary))}

    def loss(p, tokens, targets):
        return workloads.cross_entropy(p["embed"][tokens] @ p["head"], targets)

    batch = [jax.ShapeDtypeStruct((rows, tokens), "int32")] * 2
    config = {"recipe": recipe, "level": 2}
    plan = jshard.shard(jax.value_and_grad(loss), config=config, mesh=machine()).plan(p, *batch)
    assert [r.layout.dims[d][0] for d, r in enumerate(plan.inputs[:2])] == ["y", "y"]
    scores = rows * tokens * vocabulary * 4
    weights = 2 * vocabulary * d * 4
    assert sum(plan.bytes_by_kind.values()) < 0.01 * scores + 4 * weights < 0.1 * scores


def test_what_a_recipe_plans_runs_and_equals_the_plain_run():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    w = workloads.get("lm-head", small=True, devices=8)
    rng = np.random.default_rng(3)
    state = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) * 0.1, "float32"), w.state)
    batch = [jnp.asarray(rng.integers(0, 1024, b.shape), b.dtype) for b in w.batch]
    wanted = w.step(state, *batch)
    for recipe in ("fsdp+vocab", "megatron+sequence"):
        f = jshard.shard(w.step, config=recipe, mesh=mesh)
        got = f(state, *batch)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert f.plan(state, *batch, verify=True).verification.ok


# -- other forms of models ------------------------------------------------------------------------------------


def mlp(p, x):
    return ((jax.nn.gelu(x @ p["up"] + p["b"]) @ p["down"]) ** 2).mean()


PARAMS = {"up": (6, 16), "b": (16,), "down": (16, 6)}


def entries(recipe, fn, *args, **sizes):
    config = jshard.Config.from_recipe(recipe, fn, *args, mesh=machine(**sizes))
    return {r.key: r.text for r in (*config.parameters, *config.inputs)}


def test_vmapped_models_with_transposed_weights():
    """As equinox writes it: weights are [out, in], the batch is added by vmap."""
    p = {"up": jnp.ones((16, 6)), "down": jnp.ones((6, 16))}

    def call(p, x):
        return jax.vmap(lambda v: p["down"] @ jax.nn.relu(p["up"] @ v))(x)

    said = entries("megatron", call, p, jnp.ones((8, 6)))
    assert said == {"up": "[y, null]", "down": "[null, y]", "x": "[x, '?']"}


def test_value_and_grad_and_any_argument_order():
    p = {k: jnp.ones(s) for k, s in PARAMS.items()}
    said = entries("fsdp", lambda x, p: jax.value_and_grad(mlp)(p, x), jnp.ones((16, 6)), p)
    assert said == {"x": "[[x, y], '?']", "up": "[null, [x, y]]", "b": "[[x, y]]", "down": "[[x, y], null]"}


def test_a_chain_is_cut_at_every_other_product():
    p = [jnp.ones((8, 8)) for _ in range(4)]

    def call(p, x):
        for w in p:
            x = jax.nn.relu(x @ w)
        return x

    config = jshard.Config.from_recipe("megatron", call, p, jnp.ones((16, 8)), mesh=machine())
    assert {r.key: r.text for r in config.parameters} == {"*": "[null, y]", "{1,3}": "[y, null]"}


ATTENTION = {"q": (16, 24), "k": (16, 8), "v": (16, 8), "o": (24, 16)}


def attention(p, x, heads=6, kv=2):
    """Attention with fewer heads of keys and values, which are repeated."""
    b, t, _ = x.shape
    q, k, v = ((x @ p[n]).reshape(b, t, h, 4) for n, h in (("q", heads), ("k", kv), ("v", kv)))
    k, v = (jnp.repeat(a, heads // kv, axis=2) for a in (k, v))
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(b, t, heads * 4) @ p["o"]


def test_heads_of_keys_and_values_fewer_than_the_axis_are_replicated():
    p = {n: jnp.asarray(np.random.default_rng(0).normal(size=s), "float32") for n, s in ATTENTION.items()}
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 6, 16)), "float32")
    mesh = jax.make_mesh((2, 3), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    f = jshard.shard(attention, config="megatron", mesh=mesh)
    plan = f.plan(p, x)
    assert {r.path: str(r.layout) for r in plan.inputs} == {
        "p.q": "(-, model)", "p.k": "(-, -)", "p.v": "(-, -)", "p.o": "(model, -)", "x": "(data, -, -)",
    }  # fmt: skip
    np.testing.assert_allclose(f(p, x), attention(p, x), rtol=2e-5, atol=2e-5)


def test_heads_that_do_not_divide_are_left_whole_and_said():
    program = of_program(attention, {n: jnp.ones(s) for n, s in ATTENTION.items()}, jnp.ones((4, 8, 16)))
    with pytest.raises(
        RecipeError, match=r"no dimension between two products is divided by 4: 2 of p.k, p.o"
    ):
        recipe_pins("megatron", program, SIZES)
    with pytest.raises(RecipeError, match=r"2 heads are not divided by 4"):
        recipe_pins("ulysses", program, SIZES)


def of_program(fn, *args) -> Structure:
    from jshard._program.trace import build
    from jshard._spec.tree_paths import argument_names, input_leaves

    leaves = input_leaves(args, {}, argument_names(fn, len(args)))
    return Structure(
        build(jax.jit(fn).trace(*args).jaxpr, name="f", input_names=[leaf.path for leaf in leaves])
    )


# -- what does not apply --------------------------------------------------------------------------------------


REFUSED = {
    "expert": "there are no experts: no product whose weight and activation share a dimension",
    "sequence": "the activations have no dimension beside batch and features",
    "ulysses": "the activations have no dimension beside batch and features",
    "vocab": "no table is indexed by data, and no softmax goes over the output",
    "zero1": "there is no state of an optimizer",
    "ring": "keys and values are passed round by an attention operator",
}


@pytest.mark.parametrize("recipe", REFUSED)
def test_a_recipe_that_does_not_apply_says_what_was_looked_for(recipe):
    p = {k: jnp.ones(s) for k, s in PARAMS.items()}
    with pytest.raises(jshard.ShardError, match=REFUSED[recipe]) as error:
        jshard.shard(mlp, config={"recipe": recipe}, mesh=machine()).plan(p, jnp.ones((16, 6)))
    assert error.value.fix


def test_fully_sharded_without_weights_says_so():
    """Weights looked up in a table beside one of two adapters: what data is multiplied with is made of both."""
    table, places = jnp.ones(16), jnp.ones((16, 16), jnp.uint8)

    def loss(p, x):
        adapters = [lambda q: q["a"][0] @ q["b"][0], lambda q: q["a"][1] @ q["b"][1]]
        for _ in range(2):
            x = jnp.tanh(x @ (table[places] * p["scale"] + jax.lax.switch(p["which"], adapters, p)))
        return (x**2).mean()

    p = {"a": jnp.ones((2, 16, 4)), "b": jnp.ones((2, 4, 16)), "scale": jnp.ones((16, 16)), "which": 1}
    with pytest.raises(jshard.ShardError, match="no weight is known") as error:
        jshard.shard(loss, config={"recipe": "fsdp"}, mesh=machine()).plan(p, jnp.ones((13, 16)))
    assert error.value.fix.startswith("data, or cuts of single arguments: config={'parameters': ...}")
    cut = {"mesh": {"x": 8}, "parameters": {"a": [None, "x", None]}}
    plan = jshard.shard(loss, config=cut).plan(p, jnp.ones((13, 16)))
    assert plan.inputs[0].layout.spec == jax.sharding.PartitionSpec(None, "x")


@pytest.mark.parametrize(
    "recipe, text",
    [
        ("megatorn", "there is no recipe 'megatorn'"),
        ("fsdp+zero1", "fsdp and zero1 say two things"),
        ("fsdp+fsdp", "names a part twice"),
        ("fsdp(q)", "the mesh has no axis 'q'"),
        ("data", "the batch, dimension 0 of x, has size 3, which 2 does not divide"),
    ],
)
def test_wrong_recipes(recipe, text):
    p = {k: jnp.ones(s) for k, s in PARAMS.items()}
    with pytest.raises(jshard.ShardError, match=text):
        jshard.shard(mlp, config=recipe, mesh=machine()).plan(p, jnp.ones((3, 6)))


def test_a_batch_that_does_not_divide_and_what_to_write_instead():
    keys = jax.random.split(jax.random.key(0), 4)
    p = {k: jax.random.normal(key, s) for (k, s), key in zip(PARAMS.items(), keys, strict=False)}
    x, mesh = jnp.ones((3, 6)), {"data": 2, "model": 4}
    with pytest.raises(RecipeError) as error:
        jshard.shard(mlp, config={"recipe": "fsdp(data)+megatron(model)", "mesh": mesh, "pad": True}).plan(
            p, x
        )
    assert str(error.value) == (
        "the recipe 'fsdp' does not apply: the batch, dimension 0 of x, has size 3, which 2 does not divide (recipes do not "
        "pad it)\n  where: recipe 'fsdp(data)+megatron(model)' for mlp, fsdp over data=2\n  write instead: a batch of 4, or "
        "'megatron' alone, or in place of the recipe a cut of that argument with config={\"pad\": True}"
    )
    plain = mlp(p, x)
    for config, strategy in (("megatron", None), ({"pad": True}, {"x": (2, 1)})):
        config = {"mesh": mesh} | ({"recipe": config} if isinstance(config, str) else config)
        np.testing.assert_allclose(
            jshard.shard(mlp, config=config, in_strategy=strategy)(p, x), plain, rtol=1e-5
        )
    jshard.shard(mlp, config={"recipe": "fsdp(data)+megatron(model)", "mesh": mesh})(p, jnp.ones((4, 6)))


@pytest.mark.parametrize("recipe", ["megatron", "vocab"])
def test_a_recipe_that_a_padded_batch_does_not_have_is_planned_without_that_padding(recipe):
    k = jax.random.key(0)
    p = {
        "table": jax.random.normal(k, (512, 32)),
        "up": jax.random.normal(k, (32, 64)) / 6,
        "down": jax.random.normal(k, (64, 32)) / 8,
    }
    tokens = jax.random.randint(k, (13, 17), 0, 512)

    def loss(p, tokens):
        h = p["table"][tokens]
        h = h + jax.nn.gelu(h @ p["up"]) @ p["down"]
        logits = jax.nn.log_softmax(h @ p["table"].T)
        return -jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1).mean()

    config = {"mesh": {"data": 2, "model": 4}, "recipe": recipe, "pad": True}
    f = jshard.shard(jax.value_and_grad(loss), config=config, level=2)
    for got, plain in zip(
        jax.tree.leaves(f(p, tokens)), jax.tree.leaves(jax.value_and_grad(loss)(p, tokens)), strict=True
    ):
        np.testing.assert_allclose(got, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "recipe, mesh, text",
    [
        ("fsdp+megatron", {"a": 8}, "fsdp.megatron needs a mesh of two axes, this one has a"),
        ("fsdp+megatron(a,b)", {"a": 3, "b": 2}, "leaves no axis of the mesh for the batch: a, b all cut"),
    ],
)
def test_a_sum_that_needs_another_axis_and_what_to_write_instead(recipe, mesh, text):
    p, x = {k: jnp.ones(s) for k, s in PARAMS.items()}, jnp.ones((24, 6))
    with pytest.raises(jshard.ShardError, match=text) as error:
        jshard.shard(mlp, config={"recipe": recipe, "mesh": mesh}).plan(p, x)
    fix = error.value.fix
    config = {"recipe": recipe, "mesh": mesh}
    if fix.startswith("config="):
        config |= json.loads(fix.removeprefix("config=").split(" in place")[0])
    else:
        config |= {"recipe": fix.split("as in ")[1]}
    np.testing.assert_allclose(jshard.shard(mlp, config=config)(p, x), mlp(p, x), rtol=1e-5)


def test_a_sum_of_two_axes_on_a_prime_number_of_devices():
    with pytest.raises(jshard.ShardError, match="needs a mesh of two axes") as error:
        jshard.shard(mlp, config={"recipe": "fsdp+megatron", "mesh": {"a": 7}}).plan(
            {k: jnp.ones(s) for k, s in PARAMS.items()}, jnp.ones((14, 6))
        )
    assert "for which 7 is no product; or one of the parts" in str(error.value)


def test_a_recipe_needs_a_mesh():
    p = {k: jnp.ones(s) for k, s in PARAMS.items()}
    with pytest.raises(jshard.ShardError, match="a recipe cuts over the axes of a mesh, and there is none"):
        jshard.shard(mlp, config="fsdp").plan(p, jnp.ones((16, 6)))


def test_a_function_without_a_model():
    with pytest.raises(RecipeError, match="no product of a weight"):
        jshard.shard(lambda x: x + 1, config="data", mesh=machine()).plan(jnp.ones((8, 8)))


def test_every_name_parses():
    for name in EVERY:
        assert [p.name for p in parse_recipe(name)] == name.split("+")
