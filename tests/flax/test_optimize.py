"""Policies: found by class, applied, planned; padded vocabularies equal the plain model, checkpoints bit for bit."""

from __future__ import annotations

import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jshard.flax
from jshard._api import policy as policies
from jshard._api.policy import find_policy, qualified_name
from jshard._core import jaxcompat as compat
from jshard._core.errors import ShardError
from tests.helpers.import_graph import ROOT


pytestmark = pytest.mark.one_pair


TYPES = (jax.sharding.AxisType.Auto,) * 2
MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=TYPES)
WORDS, HEADS, SIZE, DEPTH = 50, 4, 8, 1


class Block(nnx.Module):
    def __init__(self, rngs):
        width = HEADS * SIZE
        self.q, self.k, self.v, self.o = (nnx.Linear(width, width, rngs=rngs) for _ in range(4))
        self.up, self.down = nnx.Linear(width, 64, rngs=rngs), nnx.Linear(64, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def attend(self, q, k, v):
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * SIZE**-0.5)
        return jnp.einsum("bhqk,bkhd->bqhd", scores, v)

    def __call__(self, x):
        y = self.norm(x)
        q, k, v = (f(y).reshape(*y.shape[:2], HEADS, SIZE) for f in (self.q, self.k, self.v))
        x = x + self.o(self.attend(q, k, v).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(x)))


class Tiny(nnx.Module):
    words = WORDS

    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, HEADS * SIZE, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(DEPTH)])
        self.head = nnx.Linear(HEADS * SIZE, WORDS, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Tied(nnx.Module):
    """The table is the head, one tensor."""

    words = WORDS

    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, HEADS * SIZE, rngs=rngs)
        self.block = Block(rngs)

    def __call__(self, tokens):
        return self.embed.attend(self.block(self.embed(tokens)))


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, WORDS, (8, 6)), "int32")


@pytest.fixture
def registry():
    before = dict(policies._REGISTRY)
    yield
    policies._REGISTRY.clear()
    policies._REGISTRY.update(before)


def page_code() -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "recipes.md").read_text(), re.S)
    return next(b for b in blocks if "class TinyPolicy" in b)


def same(a, b) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_the_policy_of_the_docs(registry, capsys):
    """25 lines: padding, a replaced attention, a recipe, and checkpoints of the plain model, bit for bit."""
    code = page_code().replace("__main__.Tiny", qualified_name(Tiny))
    begin, registration = code.index("class TinyPolicy"), code.index("jshard.Policy.register")
    assert sum(1 for line in code[begin:registration].splitlines() if line.strip()) <= 25
    names = {"jshard": jshard, "jax": jax, "jnp": jnp, "nnx": nnx}
    exec(compile(code[begin : code.index("\n", registration)], "recipes.md", "exec"), names)
    done, plain = jshard.flax.optimize(Tiny(nnx.Rngs(0)), TOKENS, mesh=MESH), Tiny(nnx.Rngs(0))
    print(done)
    scores, read = done.model(TOKENS), Tiny(nnx.Rngs(1))
    nnx.update(read, jax.device_get(done.state()))
    first = f"Tiny: TinyPolicy, registered for {qualified_name(Tiny)}; layout: fsdp+megatron\n"
    assert capsys.readouterr().out.startswith(first)
    assert scores.shape == (*TOKENS.shape, 56)
    np.testing.assert_allclose(scores[..., :WORDS], plain(TOKENS), atol=2e-6)
    assert float(jax.nn.softmax(scores)[..., WORDS:].max()) == 0.0
    layouts = {r.path: str(r.layout) for r in done.plan.inputs}
    assert (
        layouts["state.embed.embedding"] == "(model, data)"
        and layouts["state.head.kernel"] == "(data, model)"
    )
    assert layouts["state.blocks.0.o.kernel"] == "(model, data)"
    assert done.model.head.kernel[...].sharding.shard_shape((32, 56)) == (16, 14)
    same(done.state(), nnx.state(plain))  # saved as the plain model has it
    same(nnx.state(read), nnx.state(plain))
    np.testing.assert_array_equal(read(TOKENS), plain(TOKENS))


def test_losses_and_gradients_of_a_padded_tied_model():
    """One tensor, one layout; added words get no gradient."""

    class Policy(jshard.Policy):
        def prepare(self, model):
            self.padding = jshard.flax.pad_vocabulary(model, WORDS, 8)
            jshard.flax.replace_method(
                model.embed, "attend", lambda call, query: self.padding.mask(call(query))
            )
            return model

        def layout(self, model, mesh):
            return "megatron"

        def restore(self, state):
            return self.padding.crop(state)

    def loss(model, tokens):
        scores = jax.nn.log_softmax(model(tokens[:, :-1]))
        return -jnp.take_along_axis(scores, tokens[:, 1:, None], -1).mean()

    plain = Tied(nnx.Rngs(3))
    done = jshard.flax.optimize(Tied(nnx.Rngs(3)), TOKENS[:, :-1], policy=Policy, mesh=MESH)
    a, da = nnx.value_and_grad(loss)(plain, TOKENS)
    b, db = nnx.value_and_grad(loss)(done.model, TOKENS)
    np.testing.assert_allclose(a, b, rtol=1e-6)
    for x, y in zip(jax.tree.leaves(da), jax.tree.leaves(done.policy.restore(db)), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6)
    assert float(jnp.abs(db["embed"]["embedding"][...][WORDS:]).max()) == 0.0


def test_a_model_is_created_in_its_shardings():
    made, paddings = [], []

    def build():
        model = Tiny(nnx.Rngs(5))
        made.append(compat.is_tracer(model.head.kernel[...]))
        return model

    class Policy(jshard.Policy):
        def prepare(self, model):
            paddings.append(jshard.flax.pad_vocabulary(model, WORDS, 4))
            return model

        def layout(self, model, mesh):
            return {"recipe": "fsdp+megatron", "level": 2}

    done = jshard.flax.optimize(build, TOKENS, policy=Policy(), mesh=MESH)
    assert made and all(made)  # only ever traced
    kernel = done.model.blocks[0].up.kernel[...]
    assert kernel.sharding.shard_shape(kernel.shape) == (16, 16)
    cropped = paddings[0].crop(nnx.state(done.model))
    for a, b in zip(jax.tree.leaves(cropped), jax.tree.leaves(nnx.state(Tiny(nnx.Rngs(5)))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)  # traced random numbers differ in the last bit
    np.testing.assert_allclose(done.model(TOKENS)[..., :WORDS], Tiny(nnx.Rngs(5))(TOKENS), atol=2e-6)


def test_without_a_policy_the_search_decides():
    done = jshard.flax.optimize(Tiny(nnx.Rngs(0)), TOKENS, mesh=MESH)
    assert str(done).startswith("Tiny: no policy: the search decides; layout: derived by the search\n")
    np.testing.assert_allclose(done.model(TOKENS), Tiny(nnx.Rngs(0))(TOKENS), atol=2e-6)


def test_a_linen_module():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(8, name="down")(linen.relu(linen.Dense(64, name="up")(x)))

    class Policy(jshard.Policy):
        def layout(self, model, mesh):
            return "megatron"

    x = jnp.ones((4, 8))
    done = jshard.flax.optimize(Net(), x, policy=Policy, mesh=MESH, rngs=jax.random.key(0))
    kernel = done.variables["params"]["up"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (8, 16)
    wanted = np.asarray(Net().apply(Net().init(jax.random.key(0), x), x))
    np.testing.assert_allclose(done.model.apply(done.state(), x), wanted, atol=1e-6)


class Words(linen.Module):
    words: int = WORDS

    def attend(self, q, k):
        return jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k)) @ k

    @linen.compact
    def __call__(self, tokens):
        table = linen.Embed(self.words, 32, name="embed")
        x = linen.RMSNorm(name="norm")(table(tokens))
        x = x + self.attend(linen.Dense(32, name="q")(x), linen.Dense(32, name="k")(x))
        return table.attend(x)


def attend_by_operator(original, q, k):
    return jshard.ops.attention(q[:, :, None], k[:, :, None], k[:, :, None], scale=1.0)[:, :, 0]


class WordsPolicy(jshard.Policy):
    """A linen module has its padded size as a field, and no parameters that could be padded beforehand."""

    def __init__(self):
        self.padding = jshard.flax.Padding(WORDS, 56, {"params.embed.embedding": 0})
        mask = lambda original, tokens: self.padding.mask(original(tokens))  # noqa: E731
        name = qualified_name(Words)
        self.fused = {
            "attention": {f"{name}.attend": attend_by_operator},
            "scores": {f"{name}.__call__": mask},
        }

    def prepare(self, model):
        return model.clone(words=56)

    def layout(self, model, mesh):
        return "fsdp+megatron"

    def restore(self, state):
        return self.padding.crop(state)


def test_a_linen_module_with_a_padded_vocabulary_and_fused_functions():
    """Losses and gradients equal the plain module's; its checkpoints are read and written bit for bit."""
    fused = ("attention", "norm", "scores")
    done = jshard.flax.optimize(
        Words(), TOKENS, policy=WordsPolicy, mesh=MESH, rngs=jax.random.key(0), fused=fused
    )
    assert done.variables["params"]["embed"]["embedding"].shape == (56, 32)
    plain = Words().init(jax.random.key(7), TOKENS)  # a checkpoint of the plain module
    padded = done.policy.padding.pad(plain)
    same(done.policy.restore(padded), plain)

    def loss(apply, variables):
        scores = jax.nn.log_softmax(apply(variables, TOKENS))
        return -jnp.take_along_axis(scores, TOKENS[..., None], -1).mean()

    a, da = jax.value_and_grad(lambda v: loss(Words().apply, v))(plain)
    b, db = jax.value_and_grad(lambda v: loss(done.model.apply, v))(padded)
    np.testing.assert_allclose(a, b, rtol=1e-6)
    for x, y in zip(jax.tree.leaves(da), jax.tree.leaves(done.policy.restore(db)), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)
    with pytest.raises(
        ShardError, match="Words is a linen module, which holds no parameters to pad"
    ) as error:
        jshard.flax.pad_vocabulary(Words(), WORDS, 8)
    assert "Padding(50, 56, {" in error.value.fix


# -- the registry --------------------------------------------------------------------------------------------


class First(jshard.Policy):
    pass


class Second(jshard.Policy):
    pass


class Derived(Tiny):
    pass


def test_the_nearest_class_wins(registry):
    jshard.Policy.register(qualified_name(Tiny), First)
    assert type(find_policy(Derived(nnx.Rngs(0))).policy) is First
    jshard.Policy.register(qualified_name(Derived), f"{__name__}:Second")
    assert type(find_policy(Derived(nnx.Rngs(0))).policy) is Second
    assert type(find_policy(Tiny(nnx.Rngs(0))).policy) is First
    assert "no policy" in find_policy(Tied(nnx.Rngs(0))).how


def test_two_policies_that_match_equally_are_refused(registry):
    def predicate(model):
        return isinstance(model, Tiny)

    jshard.Policy.register(qualified_name(Tiny), First)
    jshard.Policy.register(predicate, Second)
    with pytest.raises(ShardError, match=r"2 policies match .*Tiny equally: First .* and Second") as error:
        jshard.flax.optimize(Tiny(nnx.Rngs(0)), TOKENS, mesh=MESH)
    assert error.value.fix == "policy=First, or another key"
    assert find_policy(Tiny(nnx.Rngs(0)), First).how == "First, as given"
    jshard.Policy.forget(qualified_name(Tiny))
    jshard.Policy.forget(predicate)
    jshard.Policy.register(qualified_name(Tiny), f"{__name__}:First")
    jshard.Policy.register(predicate, Second)
    with pytest.raises(ShardError, match="2 policies match") as error:
        find_policy(Tiny(nnx.Rngs(0)))
    place = error.value.fix.removeprefix("policy='").split("'")[0]
    assert type(find_policy(Tiny(nnx.Rngs(0)), place).policy) is First


def test_a_key_that_names_no_class_of_the_models_module_is_refused(registry):
    key = f"{__name__}.Tinny"
    jshard.Policy.register(key, First)
    with pytest.raises(ShardError, match="the key .*Tinny' of First matches nothing") as error:
        jshard.flax.optimize(Tiny(nnx.Rngs(0)), TOKENS, mesh=MESH)
    assert error.value.fix == f"Policy.forget({key!r}) and {qualified_name(Tiny)!r} as the key"
    jshard.Policy.forget(key)
    jshard.Policy.register(qualified_name(Tiny), First)
    assert type(find_policy(Tiny(nnx.Rngs(0))).policy) is First
    jshard.Policy.register(
        "some.other.library.Tinny", Second
    )  # of a library that is not loaded: says nothing here
    assert "no policy" in find_policy(Tied(nnx.Rngs(0))).how


def test_a_class_has_its_policy_by_the_name_by_which_a_package_exports_it(registry, monkeypatch):
    package = types.ModuleType("a_package")
    package.Model = Tiny
    monkeypatch.setitem(sys.modules, "a_package", package)
    jshard.Policy.register("a_package.Model", First)
    assert type(find_policy(Derived(nnx.Rngs(0))).policy) is First

    class Named(jshard.Policy):
        models = ("a_package.Model",)

    assert find_policy(Derived(nnx.Rngs(0)), Named).how == "Named, as given"
    with pytest.raises(ShardError, match="Named matches nothing here: it is for a_package.Model"):
        find_policy(Tied(nnx.Rngs(0)), Named)


def test_a_policy_for_other_models_is_refused():
    class Other(jshard.Policy):
        models = ("somewhere.Else",)

    with pytest.raises(
        ShardError, match="Other matches nothing here: it is for somewhere.Else, the model is a"
    ):
        jshard.flax.optimize(Tiny(nnx.Rngs(0)), TOKENS, policy=Other)


@pytest.mark.parametrize(
    "key, policy, text",
    [
        (Tiny, First, "the key of a policy is"),
        ("a.B", 3, "a policy is"),
    ],
)
def test_wrong_registrations(registry, key, policy, text):
    with pytest.raises(ShardError, match=text):
        jshard.Policy.register(key, policy)


def test_a_key_is_registered_once(registry):
    jshard.Policy.register("a.B", First)
    with pytest.raises(ShardError, match="a.B has a policy already, First"):
        jshard.Policy.register("a.B", Second)
    jshard.Policy.forget("a.B")
    jshard.Policy.register("a.B", Second)


def test_a_place_that_cannot_be_imported(registry):
    jshard.Policy.register(qualified_name(Tiny), "nowhere.at.all:Policy")
    with pytest.raises(ShardError, match="'nowhere.at.all:Policy' cannot be imported"):
        find_policy(Tiny(nnx.Rngs(0)))


# -- changes of models ---------------------------------------------------------------------------------------


def test_a_replacement_of_another_signature_is_refused():
    with pytest.raises(
        ShardError, match=r"the replacement of Block.attend takes \(q, k\), the method \(q, k, v\)"
    ):
        jshard.flax.replace_method(Block(nnx.Rngs(0)), "attend", lambda original, q, k: q)
    with pytest.raises(ShardError, match="Block has no method 'atend'") as error:
        jshard.flax.replace_method(Block(nnx.Rngs(0)), "atend", lambda original, q, k, v: q)
    assert "attend" in error.value.fix


def test_tied_weights_that_padding_forgets_are_refused_by_name():
    with pytest.raises(ShardError, match="head.bias, head.kernel has the vocabulary's 50 too"):
        jshard.flax.pad_vocabulary(Tiny(nnx.Rngs(0)), WORDS, 8, paths=["embed.embedding"])
    with pytest.raises(ShardError, match="multiple=0") as error:
        jshard.flax.pad_vocabulary(Tiny(nnx.Rngs(0)), WORDS, 0)
    assert error.value.fix == "a number of devices: multiple=8"
    with pytest.raises(ShardError, match="'embed.kernel' is no parameter with one dimension of 50"):
        jshard.flax.pad_vocabulary(Tiny(nnx.Rngs(0)), WORDS, 8, paths=["embed.kernel"])
    with pytest.raises(ShardError, match="no parameter has a dimension of 51"):
        jshard.flax.pad_vocabulary(Tiny(nnx.Rngs(0)), WORDS + 1, 8)


def test_wrong_models():
    with pytest.raises(ShardError, match="optimize takes a module or a function that makes one, not"):
        jshard.flax.optimize(3, TOKENS)
    with pytest.raises(ShardError, match="the function makes .* no nnx module"):
        jshard.flax.optimize(lambda: jnp.ones(3), TOKENS)
    with pytest.raises(ShardError, match="which holds no parameters"):
        jshard.flax.optimize(linen.Dense(3), TOKENS)

    class Forgets(jshard.Policy):
        def prepare(self, model):
            pass

    with pytest.raises(ShardError, match="Forgets.prepare returned None"):
        jshard.flax.optimize(Tiny(nnx.Rngs(0)), TOKENS, policy=Forgets)
