"""Steps over tokens that nobody tuned the plans for: language, speech and recommendation, in plain JAX.

Each function gives a `Case`: a step, the shapes of its arguments, what is pinned (the batch, cut over sixteen devices) and
what is donated. `unseen_steps.py` plans and compiles them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.compilers.peak_programs import Case, gpt, training
from benchmarks.workloads import (
    F32,
    I32,
    Tree,
    adam,
    adam_state,
    array,
    attention,
    block,
    block_shapes,
    cross_entropy,
    heads,
    layer_norm,
    rms_norm,
    sgd,
    shapes,
)


KEY = jax.ShapeDtypeStruct((2,), jnp.uint32)


def label_smoothing(vocabulary: int = 32768, width: int = 1024) -> Case:
    """A head whose targets are a smoothed `one_hot`, multiplied by the logarithms of all probabilities."""

    def loss(p: Tree, x: jax.Array, targets: jax.Array) -> jax.Array:
        logits = (jax.nn.gelu(x @ p["up"]) @ p["head"]).astype(F32)
        soft = 0.9 * jax.nn.one_hot(targets, vocabulary) + 0.1 / vocabulary
        return -jnp.mean(jnp.sum(soft * jax.nn.log_softmax(logits), -1))

    params = shapes(up=(width, width), head=(width, vocabulary))
    return training(sgd(loss), params, array(8192, width), array(8192, dtype=I32))


def top_k_sampling(vocabulary: int = 131072, width: int = 2048) -> Case:
    """The head of a decode step: the best fifty of all tokens, one drawn from those, for 2,048 sequences."""

    def step(p: Tree, x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = (rms_norm(x, p["norm"]) @ p["head"]).astype(F32) / 0.7
        best, at = lax.top_k(logits, 50)
        drawn = jax.random.categorical(key, best)
        return jnp.take_along_axis(at, drawn[:, None], -1)[:, 0], jax.nn.logsumexp(logits, -1)

    params = shapes(norm=(width,), head=(width, vocabulary))
    return Case(step, (params, array(2048, width), KEY), (None, (16, None), None), ())


def experts_by_einsum(experts: int = 16, width: int = 1024) -> Case:
    """GShard's dispatch and combine as einsums with the place of every token in its expert; top 2, Adam."""
    groups, tokens, hidden = 64, 512, 4096
    capacity = 2 * 2 * tokens // experts

    def loss(p: Tree, x: jax.Array) -> jax.Array:
        y = rms_norm(x, p["norm"])
        gates = jax.nn.softmax((y @ p["router"]).astype(F32), -1)
        value, expert = lax.top_k(gates, 2)
        chosen = jax.nn.one_hot(expert, experts)
        place = jnp.cumsum(chosen.reshape(groups, 2 * tokens, experts), 1).reshape(chosen.shape) * chosen - 1
        slot = jax.nn.one_hot(place, capacity)
        combine = jnp.einsum("gsk,gskec->gsec", value, slot).astype(x.dtype)
        sent = jnp.einsum("gsec,gsd->egcd", (combine > 0).astype(x.dtype), y)
        wide = jax.nn.gelu(jnp.einsum("egcd,edf->egcf", sent, p["up"]))
        back = jnp.einsum("egcf,efd->egcd", wide, p["down"])
        x = x + jnp.einsum("gsec,egcd->gsd", combine, back)
        balance = jnp.mean(gates.mean(1) * chosen.sum(2).mean(1)) * experts**2
        return jnp.mean(x.astype(F32) ** 2) + 0.01 * balance

    params = shapes(
        norm=(width,), router=(width, experts), up=(experts, width, hidden), down=(experts, hidden, width)
    )
    return training(adam(loss), adam_state(params), array(groups, tokens, width))


def state_space(width: int = 1024, state: int = 16, tokens: int = 2048) -> Case:
    """A block of Mamba, its recurrence of every channel and state by `lax.associative_scan`."""

    def scan(decay: jax.Array, given: jax.Array) -> jax.Array:
        def combine(a: Tree, b: Tree) -> Tree:
            return a[0] * b[0], b[0] * a[1] + b[1]

        return lax.associative_scan(combine, (decay, given), axis=1)[1]

    def loss(p: Tree, x: jax.Array) -> jax.Array:
        y, gate = jnp.split(rms_norm(x, p["norm"]) @ p["in"], 2, -1)
        step = jax.nn.softplus((y @ p["step"]).astype(F32))
        b, c = jnp.split((y @ p["bc"]).astype(F32), 2, -1)
        decay = jnp.exp(-step[..., None] * jnp.exp(p["rate"].astype(F32)))
        states = scan(decay, (step * y)[..., None] * b[:, :, None])
        y = jnp.einsum("btds,bts->btd", states, c).astype(x.dtype) * jax.nn.silu(gate)
        return jnp.mean((x + y @ p["out"]).astype(F32) ** 2)

    params = shapes(
        norm=(width,), bc=(width, 2 * state), step=(width, width), rate=(width, state), out=(width, width)
    )
    return training(sgd(loss), params | {"in": array(width, 2 * width)}, array(16, tokens, width))


def dropout(width: int = 2048, hidden: int = 8192) -> Case:
    """Two feed-forward layers, each with dropout of its hidden values and of what it adds."""

    def drop(x: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0).astype(x.dtype)

    def loss(p: Tree, x: jax.Array, key: jax.Array) -> jax.Array:
        for q, k in zip(p, jax.random.split(key, 2), strict=True):
            y = drop(jax.nn.relu(layer_norm(x, q["norm"]) @ q["up"]), jax.random.fold_in(k, 0))
            x = x + drop(y @ q["down"], jax.random.fold_in(k, 1))
        return jnp.mean(x.astype(F32) ** 2)

    params = [shapes(norm=(width,), up=(width, hidden), down=(hidden, width)) for _ in range(2)]
    return Case(sgd(loss), (params, array(64, 1024, width), KEY), (None, (16, None, None), None), (0,))


def encoder_decoder(width: int = 1024, vocabulary: int = 32768) -> Case:
    """Two layers of an encoder, two of a decoder with cross attention, tied embeddings; Adam."""

    def across(x: jax.Array, memory: jax.Array, p: Tree) -> jax.Array:
        q, k, v = (
            heads(a @ p[w], 16) for a, w in ((layer_norm(x, p["norm"]), "q"), (memory, "k"), (memory, "v"))
        )
        return x + attention(q[:, :, :, None], k, v, causal=False).reshape(x.shape) @ p["o"]

    def loss(p: Tree, source: jax.Array, target: jax.Array) -> jax.Array:
        memory, x = p["embed"][source], p["embed"][target[:, :-1]]
        for q in p["encoder"]:
            memory = block(memory, q, 16, causal=False)
        for q, c in zip(p["decoder"], p["across"], strict=True):
            x = block(across(x, memory, c), q, 16)
        return cross_entropy(layer_norm(x, p["norm"]) @ p["embed"].T, target[:, 1:])

    blocks = [block_shapes(width, 4 * width)] * 2
    square = {w: (width, width) for w in "qkvo"}
    params = shapes(embed=(vocabulary, width), norm=(width,)) | {"encoder": blocks, "decoder": blocks}
    params["across"] = [shapes(norm=(width,), **square)] * 2
    return training(adam(loss), adam_state(params), array(64, 512, dtype=I32), array(64, 513, dtype=I32))


def adafactor(width: int = 2048) -> Case:
    """A GPT block's step with Adafactor: second moments as a row and a column, updates clipped by their root mean square."""

    def loss(p: Tree, x: jax.Array) -> jax.Array:
        for q in p:
            x = block(x, q, 16)
        return jnp.mean(x.astype(F32) ** 2)

    def update(p: jax.Array, g: jax.Array, moments: Tree) -> tuple[jax.Array, Tree]:
        g = g.astype(F32)
        square = g * g + 1e-30
        rows, columns = (0.99 * m + 0.01 * square.mean(a) for m, a in zip(moments, (-1, 0), strict=True))
        u = g * lax.rsqrt(rows / rows.mean())[:, None] * lax.rsqrt(columns) if g.ndim == 2 else g
        u = u / jnp.maximum(1.0, jnp.sqrt(jnp.mean(u * u)))
        scale = 1e-3 * jnp.maximum(1e-3, jnp.sqrt(jnp.mean(p.astype(F32) ** 2)))
        return (p - scale * u).astype(p.dtype), (rows, columns)

    def step(state: Tree, x: jax.Array) -> tuple[Tree, jax.Array]:
        value, grads = jax.value_and_grad(loss)(state["params"], x)
        leaves, tree = jax.tree.flatten(state["params"])
        both = [update(*a) for a in zip(leaves, jax.tree.leaves(grads), state["moments"], strict=True)]
        return {"params": tree.unflatten([a for a, _ in both]), "moments": [b for _, b in both]}, value

    params = [block_shapes(width, 4 * width) for _ in range(2)]
    moments = [
        tuple(array(*s, dtype=F32) for s in (a.shape[:-1], a.shape[1:])) for a in jax.tree.leaves(params)
    ]
    return training(step, {"params": params, "moments": moments}, array(64, 512, width))


def recommender(tables: int = 26, rows: int = 262_144, width: int = 64) -> Case:
    """DLRM: a table per category, products of all pairs of features, and networks before and after; SGD."""

    def network(x: jax.Array, layers: Tree) -> jax.Array:
        for w in layers[:-1]:
            x = jax.nn.relu(x @ w)
        return x @ layers[-1]

    def loss(p: Tree, dense: jax.Array, index: jax.Array, click: jax.Array) -> jax.Array:
        x = network(dense, p["bottom"])
        looked_up = jnp.stack([t[index[:, i]] for i, t in enumerate(p["tables"])], 1)
        all_of = jnp.concatenate([x[:, None], looked_up], 1)
        pairs = jnp.einsum("bid,bjd->bij", all_of, all_of)
        i, j = jnp.triu_indices(tables + 1, 1)
        logit = network(jnp.concatenate([x, pairs[:, i, j]], -1), p["top"])[:, 0].astype(F32)
        return jnp.mean(jax.nn.softplus(logit) - click * logit)

    after = width + tables * (tables + 1) // 2
    params = {
        "tables": [array(rows, width) for _ in range(tables)],
        "bottom": [array(16, 512), array(512, 256), array(256, width)],
        "top": [array(after, 1024), array(1024, 512), array(512, 1)],
    }
    n = 65_536
    return training(sgd(loss), params, array(n, 16), array(n, tables, dtype=I32), array(n, dtype=F32))


def chunked_loss(vocabulary: int = 131_072, width: int = 2048, chunks: int = 8) -> Case:
    """A head whose cross entropy is taken over an eighth of the tokens at a time, recomputed in the backward pass."""

    def loss(p: Tree, x: jax.Array, targets: jax.Array) -> jax.Array:
        x = jnp.moveaxis(rms_norm(x, p["norm"]).reshape(x.shape[0], chunks, -1, width), 1, 0)
        targets = jnp.moveaxis(targets.reshape(targets.shape[0], chunks, -1), 1, 0)

        @jax.checkpoint
        def one(total: jax.Array, given: Tree) -> tuple[jax.Array, None]:
            return total + cross_entropy(given[0] @ p["head"], given[1]), None

        return lax.scan(one, jnp.zeros(()), (x, targets))[0] / chunks

    params = shapes(norm=(width,), head=(width, vocabulary))
    return training(sgd(loss), params, array(32, 2048, width), array(32, 2048, dtype=I32))


def lstm(width: int = 1024, tokens: int = 128, vocabulary: int = 32_768) -> Case:
    """Two layers of an LSTM over 128 tokens, and a softmax over words; Adam."""

    def layer(x: jax.Array, p: Tree) -> jax.Array:
        def cell(state: Tree, given: jax.Array) -> tuple[Tree, jax.Array]:
            h, c = state
            i, f, g, o = jnp.split((given + h @ p["h"]).astype(F32), 4, -1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = (jax.nn.sigmoid(o) * jnp.tanh(c)).astype(x.dtype)
            return (h, c), h

        start = jnp.zeros(x[0].shape, x.dtype), jnp.zeros(x[0].shape, F32)
        return lax.scan(cell, start, x @ p["x"])[1]

    def loss(p: Tree, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = p["embed"][tokens.T]
        for q in p["layers"]:
            x = x + layer(x, q)
        return cross_entropy(x @ p["head"], targets.T)

    params: Tree = shapes(embed=(vocabulary, width), head=(width, vocabulary))
    params["layers"] = [shapes(x=(width, 4 * width), h=(width, 4 * width)) for _ in range(2)]
    text = array(512, tokens, dtype=I32)
    return training(adam(loss), adam_state(params), text, text)


def retrieval(documents: int = 4_194_304, width: int = 256) -> Case:
    """Inference of a retriever: 1,024 queries against four million documents, the best hundred of each."""

    def step(p: Tree, table: jax.Array, queries: jax.Array) -> tuple[jax.Array, jax.Array]:
        q = jax.nn.gelu(queries @ p["up"]) @ p["down"]
        q = q * lax.rsqrt(jnp.sum(q.astype(F32) ** 2, -1, keepdims=True) + 1e-6).astype(q.dtype)
        return lax.top_k((q @ table.T).astype(F32), 100)

    params = shapes(up=(width, 4 * width), down=(4 * width, width))
    return Case(step, (params, array(documents, width), array(1024, width)), (None, (16, None), None), ())


def relative_bias(width: int = 1024, tokens: int = 1024, buckets: int = 32) -> Case:
    """Two layers of T5's encoder: a learnt bias by distance is added to the scores, and gated GELU; Adam."""
    n_heads = 16

    def bucket(distance: jax.Array) -> jax.Array:
        half, near = buckets // 2, buckets // 4
        far = near + (jnp.log(jnp.maximum(jnp.abs(distance), 1) / near) / jnp.log(128 / near) * near).astype(
            I32
        )
        there = jnp.where(jnp.abs(distance) < near, jnp.abs(distance), jnp.minimum(far, half - 1))
        return there + jnp.where(distance > 0, half, 0)

    def loss(p: Tree, x: jax.Array) -> jax.Array:
        place = jnp.arange(tokens)
        bias = p["bias"][bucket(place[None] - place[:, None])].transpose(2, 0, 1)
        for q in p["layers"]:
            y = rms_norm(x, q["norm1"])
            a, b, c = (heads(y @ q[w], n_heads) for w in ("q", "k", "v"))
            scores = jnp.einsum("bqhd,bkhd->bhqk", a, b).astype(F32) + bias
            o = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1).astype(x.dtype), c)
            x = x + o.reshape(x.shape) @ q["o"]
            y = rms_norm(x, q["norm2"])
            x = x + (jax.nn.gelu(y @ q["gate"]) * (y @ q["up"])) @ q["down"]
        return jnp.mean(x.astype(F32) ** 2)

    square = {w: (width, width) for w in "qkvo"}
    wide = {"gate": (width, 2816), "up": (width, 2816), "down": (2816, width)}
    layer = shapes(norm1=(width,), norm2=(width,), **square, **wide)
    params = {"bias": array(buckets, n_heads, dtype=F32), "layers": [layer] * 2}
    return training(adam(loss), adam_state(params), array(32, tokens, width))


def low_rank(width: int = 4096, hidden: int = 14_336, rank: int = 32) -> Case:
    """Additions of rank 32 to the four projections of attention in two frozen Llama layers; Adam on the additions."""
    sizes = {"q": width, "k": 1024, "v": 1024, "o": width}

    def times(x: jax.Array, frozen: Tree, p: Tree, w: str) -> jax.Array:
        return x @ frozen[w] + (x @ p[w]["a"]) @ p[w]["b"]

    def loss(params: Tree, frozen: Tree, x: jax.Array) -> jax.Array:
        for p, w in zip(params, frozen, strict=True):
            y = rms_norm(x, w["norm1"])
            q, k, v = (heads(times(y, w, p, n), sizes[n] // 128) for n in "qkv")
            o = attention(q.reshape(*y.shape[:2], 8, -1, 128), k, v)
            x = x + times(o.reshape(x.shape), w, p, "o")
            y = rms_norm(x, w["norm2"])
            x = x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]
        return jnp.mean(x.astype(F32) ** 2)

    params = [{n: shapes(a=(width, rank), b=(rank, m)) for n, m in sizes.items()} for _ in range(2)]
    wide = shapes(
        gate=(width, hidden), up=(width, hidden), down=(hidden, width), norm1=(width,), norm2=(width,)
    )
    frozen = [wide | shapes(**{n: (width, m) for n, m in sizes.items()}) for _ in range(2)]
    return training(adam(loss), adam_state(params, frozen=frozen), array(16, 1024, width))


SEQUENCES: dict[str, Callable[[], Case]] = {
    "label smoothing": label_smoothing,
    "top-k sampling": top_k_sampling,
    "experts by einsum": experts_by_einsum,
    "state space": state_space,
    "dropout": dropout,
    "encoder-decoder": encoder_decoder,
    "adafactor": adafactor,
    "recommender": recommender,
    "chunked loss": chunked_loss,
    "LSTM": lstm,
    "retrieval": retrieval,
    "relative bias": relative_bias,
    "low rank": low_rank,
    "GPT": functools.partial(gpt, remat=False, layers=1),
}
