"""`python -m benchmarks.correctness.unseen_pipelines --seed 2211 --cases 60`: drawn models in pipelines or microbatches.

`pipeline_laws.py` runs five models that pipelines were developed on. Here a seed draws the model: loop (`scan`, layers
unrolled in Python, Flax linen's and nnx's scan), depth, odd widths, attention (none, full, grouped, one head of keys), norms
before, after or none, biases, gated or plain MLP, experts with an auxiliary loss, dropout, `jax.checkpoint` (none, plain, by
a policy, by names), embeddings tied or not. So is where it runs: stages x data or model, GPipe or circular, uneven, or
microbatches with the derivative inside or outside. In float64 on eight CPU devices, a step with momentum (gradients, where
they are taken outside) is the plain one to 1e-12, dropout's bits among that; permutes are 2 (R M + S - 1), emitted bytes the
planned ones. A refusal is a row with its text. Rows are kept in `unseen_pipelines.jsonl`, from which `--page` writes
`unseen_pipelines.md`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax import lax


os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_x64", True)

import jshard  # noqa: E402
from benchmarks.correctness.pipeline_laws import LIMIT, mesh_of  # noqa: E402
from tests.batch.test_microbatches import largest_error  # noqa: E402
from tests.helpers.pipeline_models import momentum_step  # noqa: E402


ROWS = Path(__file__).with_suffix(".jsonl")
PAGE = Path(__file__).with_suffix(".md")
BATCH, LENGTH, WORDS = 32, 3, 13


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A model and where it runs."""

    loop: str
    layers: int
    width: int
    hidden: int
    heads: tuple[int, int]  # of queries, of keys and values; 0 for no attention
    norm: str
    bias: bool
    gated: bool
    experts: int
    rate: float
    remat: str
    tied: bool
    stages: int  # 0 for microbatches
    other: tuple[str, int]
    pieces: int
    rounds: int
    uneven: bool
    outside: bool

    @property
    def title(self) -> str:
        """The case in words."""
        attention = f"heads {self.heads[0]}/{self.heads[1]}" if self.heads[0] else "no attention"
        parts = [
            self.loop,
            f"{self.layers} layers of {self.width}/{self.hidden}",
            attention,
            f"{self.norm} norm",
        ]
        parts += (
            ["bias"] * self.bias + ["gated"] * self.gated + [f"{self.experts} experts"] * bool(self.experts)
        )
        parts += [f"dropout {1 - self.rate:.1f}"] * (self.rate < 1) + [f"remat {self.remat}"] * (
            self.remat != "none"
        )
        parts += ["tied"] * self.tied
        where = f"{self.other[0]} {self.other[1]}"
        if self.stages:
            parts.append(f"stage {self.stages} x {where}, M {self.pieces}, R {self.rounds}")
        else:
            parts.append(
                f"{where}, microbatches {self.pieces}, grad {'outside' if self.outside else 'inside'}"
            )
        return ", ".join(parts)


def draw(rng: random.Random) -> Drawn:
    """A case; layers are as many as the stages and rounds want."""
    flax = rng.random() < 0.25
    loop = rng.choice(("linen scan", "nnx scan")) if flax else rng.choice(("scan", "scan", "unrolled"))
    stages = rng.choice((0, 2, 2, 4, 4, 8))
    rounds = rng.choice((1, 1, 2, 3)) if stages else 1
    uneven = bool(stages) and rng.random() < 0.3
    each = stages * rounds or rng.choice((3, 5))
    layers = each * (1 if each > 8 else rng.choice((1, 2))) + (rng.randrange(1, 4) if uneven else 0)
    pieces = rng.choice([m for m in (2, 4, 8, 16) if rounds == 1 or m >= stages] if stages else (2, 4, 8))
    remat = rng.choice(("none", "plain", "policy", "names"))
    heads = rng.choice(((0, 0), (2, 2), (4, 2), (3, 1)))
    # Flax modules have neither experts nor attention, and nnx's no dropout.
    return Drawn(
        loop, layers, rng.choice((6, 7, 9, 12)), rng.choice((5, 8, 11)), (0, 0) if flax else heads,
        rng.choice(("pre", "post", "no")), rng.random() < 0.5, rng.random() < 0.5,
        0 if flax else rng.choice((0, 0, 3)), max(rng.choice((1.0, 0.8)), float(loop == "nnx scan")),
        "plain" if flax and remat != "none" else remat,
        not flax and rng.random() < 0.5, stages, rng.choice((("data", 8 // (stages or 1)), ("model", 8 // (stages or 1)))),
        pieces, rounds, uneven, not stages and rng.random() < 0.5,
    )  # fmt: skip


def normalized(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Mean 0 and variance 1 over the last dimension."""
    x = x - jnp.mean(x, -1, keepdims=True)
    return gain * x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def attention(d: Drawn, p: Any, x: jax.Array) -> jax.Array:
    """Causal attention, each head of keys for as many of queries."""
    (heads, groups), size = d.heads, 4
    q, k, v = (
        (x @ p[n]).reshape(*x.shape[:2], h, size) for n, h in (("q", heads), ("k", groups), ("v", groups))
    )
    q = q.reshape(*x.shape[:2], groups, heads // groups, size)
    scores = jnp.einsum("btgnd,bsgd->bgnts", q, k) / 2
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e30)
    out = jnp.einsum("bgnts,bsgd->btgnd", jax.nn.softmax(scores), v)
    return out.reshape(*x.shape[:2], heads * size) @ p["o"]


def feed_forward(d: Drawn, p: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """An MLP or experts; and their auxiliary loss."""
    bias = p["bias"] if d.bias else 0
    if not d.experts:
        hidden = x @ p["up"] + bias
        hidden = jax.nn.silu(hidden) * (x @ p["gate"]) if d.gated else jax.nn.gelu(hidden)
        return hidden @ p["down"], jnp.zeros(())
    gates = jax.nn.softmax(x @ p["router"])
    top = jax.nn.one_hot(jnp.argmax(gates, -1), d.experts)
    hidden = jnp.tanh(jnp.einsum("btw,ewh->bteh", x, p["up"]) + bias)
    out = jnp.einsum("bteh,ehw,bte->btw", hidden, p["down"], gates * top)
    load = jax.ad_checkpoint.checkpoint_name(jnp.mean(top, (0, 1)), "sums")
    return out, d.experts * jnp.sum(load * jnp.mean(gates, (0, 1)))


def layer(d: Drawn, p: Any, h: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One layer: residual attention and feed-forward."""
    keys, balance = jax.random.split(key), jnp.zeros(())
    for k, part in enumerate(("attention", "feed_forward")):
        if part == "attention" and not d.heads[0]:
            continue
        x = normalized(h, p["gain"]) if d.norm == "pre" else h
        x, loss = (attention(d, p, x), balance) if part == "attention" else feed_forward(d, p, x)
        x = jax.ad_checkpoint.checkpoint_name(x, "sums")
        if d.rate < 1:
            x = jnp.where(jax.random.bernoulli(keys[k], d.rate, x.shape), x / d.rate, 0)
        h = normalized(h + x, p["gain"]) if d.norm == "post" else h + x
        balance += loss if part == "feed_forward" else 0
    return h, balance


def checkpointed(d: Drawn, f: Callable) -> Callable:
    """A layer under the case's `jax.checkpoint`."""
    policies = {
        "plain": None,
        "policy": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        "names": jax.checkpoint_policies.save_only_these_names("sums"),
    }
    return f if d.remat == "none" else jax.checkpoint(f, policy=policies[d.remat])


def parameters(d: Drawn) -> tuple[Any, Callable[[Any, Any, jax.Array], tuple[jax.Array, Any]]]:
    """The layers' parameters, stacked; and the layers as a function of them, the activations and a key."""
    w, f, e = d.width, d.hidden, (d.experts,) if d.experts else ()
    shapes = {"up": (*e, w, f), "down": (*e, f, w), "gain": (w,)}
    shapes |= {"gate": (w, f)} if d.gated and not e else {}
    shapes |= {"router": (w, d.experts)} if e else {}
    shapes |= {"bias": (*e, f)} if d.bias else {}
    if d.heads[0]:
        shapes |= {"q": (w, 4 * d.heads[0]), "o": (4 * d.heads[0], w)} | dict.fromkeys(
            ("k", "v"), (w, 4 * d.heads[1])
        )
    stacked = {
        n: jax.random.normal(jax.random.key(i), (d.layers, *s)) / 3 for i, (n, s) in enumerate(shapes.items())
    }
    run = checkpointed(d, functools.partial(layer, d))

    def unrolled(ps: Any, h: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        balance = jnp.zeros(())
        for k, p in enumerate(ps):
            h, more = run(p, h, jax.random.fold_in(key, k))
            balance += more
        return h, balance

    def scanned(ps: Any, h: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(carry: Any, p: Any) -> tuple[Any, None]:
            h, balance, key = carry
            key, own = jax.random.split(key)
            h, more = run(p, h, own)
            return (h, balance + more, key), None

        return lax.scan(body, (h, jnp.zeros(()), key), ps)[0][:2]

    if d.loop == "unrolled":
        return [jax.tree.map(lambda x, k=k: x[k], stacked) for k in range(d.layers)], unrolled
    return stacked, scanned


class LinenLayer(linen.Module):
    """A residual MLP with dropout."""

    drawn: Drawn

    @linen.compact
    def __call__(self, h: jax.Array, _: None) -> tuple[jax.Array, None]:
        d, dense = (
            self.drawn,
            functools.partial(linen.Dense, use_bias=self.drawn.bias, param_dtype=jnp.float64),
        )
        x = linen.LayerNorm(param_dtype=jnp.float64)(h) if d.norm == "pre" else h
        x = dense(d.width)(linen.gelu(dense(d.hidden)(x)))
        x = linen.Dropout(1 - d.rate, deterministic=d.rate == 1)(x)
        return linen.LayerNorm(param_dtype=jnp.float64)(h + x) if d.norm == "post" else h + x, None


def linen_layers(d: Drawn) -> tuple[Any, Callable]:
    """The layers as `linen.scan`."""
    one = linen.remat(LinenLayer, prevent_cse=False) if d.remat != "none" else LinenLayer
    axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True, "dropout": True}}
    module = linen.scan(one, length=d.layers, **axes)(d)
    h = jnp.zeros((BATCH, LENGTH, d.width))
    w = module.init(jax.random.key(1), h, None)
    return w, lambda w, h, key: (module.apply(w, h, None, rngs={"dropout": key})[0], jnp.zeros(()))


class NnxLayer(nnx.Module):
    """A residual MLP."""

    def __init__(self, d: Drawn, rngs: nnx.Rngs):
        dense = functools.partial(nnx.Linear, use_bias=d.bias, param_dtype=jnp.float64, rngs=rngs)
        self.up, self.down = dense(d.width, d.hidden), dense(d.hidden, d.width)
        self.norm = nnx.LayerNorm(d.width, param_dtype=jnp.float64, rngs=rngs)
        self.kind = d.norm

    def __call__(self, h: jax.Array) -> jax.Array:
        x = self.down(nnx.gelu(self.up(self.norm(h) if self.kind == "pre" else h)))
        return self.norm(h + x) if self.kind == "post" else h + x


def nnx_layers(d: Drawn) -> tuple[Any, Callable]:
    """The layers as `nnx.scan`; no dropout."""
    layers = nnx.vmap(lambda rngs: NnxLayer(d, rngs))(nnx.Rngs(0).split(d.layers))
    graph, w = nnx.split(layers)

    def run(w: Any, h: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        call = (lambda h, one: one(h)) if d.remat == "none" else nnx.remat(lambda h, one: one(h))
        return nnx.scan(call, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(h, nnx.merge(graph, w)), jnp.zeros(
            ()
        )

    return w, run


def model(d: Drawn) -> tuple[Callable[[Any, jax.Array], jax.Array], Any, jax.Array]:
    """A loss of parameters and tokens, and both."""
    makers = {"linen scan": linen_layers, "nnx scan": nnx_layers}
    layers, run = makers.get(d.loop, parameters)(d)
    w = {"embedding": jax.random.normal(jax.random.key(8), (WORDS, d.width)), "layers": layers}
    w |= {} if d.tied else {"head": jax.random.normal(jax.random.key(9), (d.width, WORDS)) / 3}

    def loss(w: Any, tokens: jax.Array) -> jax.Array:
        h, balance = run(w["layers"], w["embedding"][tokens], jax.random.key(5))
        logits = jax.nn.log_softmax(h @ (w["embedding"].T if d.tied else w["head"]))
        picked = jnp.take_along_axis(logits, jnp.roll(tokens, -1, 1)[..., None], -1)
        return 0.01 * balance - jnp.mean(picked)

    return loss, w, jax.random.randint(jax.random.key(7), (BATCH, LENGTH), 0, WORDS)


def check(d: Drawn) -> dict[str, Any]:
    """The laws of a case."""
    loss, w, x = model(d)
    if not jnp.isfinite(jax.jit(loss)(w, x)):
        return {"skipped": "not run: the plain loss overflows"}
    mesh = mesh_of(**({"stage": d.stages} if d.stages else {}), **dict([d.other]))
    if not d.stages:
        options: dict[str, Any] = {"mesh": mesh, "level": 2, "microbatches": d.pieces}
        plain = jax.value_and_grad(loss)
        f = jax.value_and_grad(jshard.shard(loss, **options)) if d.outside else jshard.shard(plain, **options)
        return compared(f, plain, w, x)
    step, state = momentum_step(loss), jax.tree.map(jnp.zeros_like, w)
    config = {"pipeline": {"axis": "stage", "microbatches": d.pieces, "rounds": d.rounds, "uneven": d.uneven}}
    f = jshard.shard(step, mesh=mesh, level=2, config=config)
    found = compared(f, step, w, state, x)
    plan = f.plan(w, state, x, verify=True)
    assert plan.verification is not None and plan.verification.ok, plan.verification
    permutes = sum(c.count for c in plan.collectives if c.operator.startswith("stage_shift"))
    expected = 2 * (d.rounds * d.pieces + d.stages - 1)
    assert permutes == expected, f"{permutes:.0f} permutes where two loops over ticks have {expected}"
    return {**found, "permutes": permutes}


def compared(f: Callable, plain: Callable, *args: Any) -> dict[str, Any]:
    """The largest relative error, if it is within the limit, or if plain JAX does not say which result is right.

    Deep layers without norms are chaotic: there an ulp in the weights moves the plain result by more than the limit. The
    error must then be at most ten times what such ulps move.
    """
    run = jax.jit(plain)
    wanted = run(*args)
    error = largest_error(f(*args), wanted)
    if error < LIMIT:
        return {"error": error}
    own = largest_error(plain(*args), wanted)
    if own >= LIMIT:
        return {"skipped": f"not judged: plain JAX differs by {own:.1e} from itself under `jit`"}
    moved = max(largest_error(run(an_ulp_away(args[0], seed), *args[1:]), wanted) for seed in range(4))
    assert moved >= LIMIT and error <= 10 * moved, error
    return {"skipped": f"not judged: {error:.1e}, where an ulp in the weights moves plain JAX by {moved:.1e}"}


def an_ulp_away(w: Any, seed: int) -> Any:
    """The weights, each by one unit in the last place more, less or the same, as a seed draws it."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x * (1 + rng.integers(-1, 2, x.shape) * 2.0**-52), w)


def page(rows: list[dict[str, Any]]) -> str:
    """The rows as a page."""
    errors = [r["error"] for r in rows if "error" in r]
    refused, failed = ([r for r in rows if k in r] for k in ("refused", "failed"))
    lines = [
        "# Pipelines and microbatches of models drawn by a seed", "",
        f"`python -m benchmarks.correctness.unseen_pipelines`: {len(rows)} cases, {len(errors)} equal to plain JAX (largest "
        f"relative error {max(errors, default=0):.1e}, limit {LIMIT:.0e}), {len(refused)} refused with a reason, "
        f"{len(failed)} failed. Float64, 8 CPU devices, JAX {' and '.join(sorted({r['jax'] for r in rows}))}.", "",
        "| seed, case | model and where it runs | relative error, or why not | permutes |", "|---|---|---|---|",
    ]  # fmt: skip
    for r in rows:
        result = (
            f"{r['error']:.1e}"
            if "error" in r
            else r.get("refused") or r.get("skipped") or f"**failed**: {r['failed']}"
        )
        lines.append(f"| {r['seed']}, {r['number']} | {r['case']} | {result} | {r.get('permutes', '')} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Run the cases of a seed that are not kept."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=2211)
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args()
    kept = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    if args.page:
        PAGE.write_text(page(kept))
        return
    for number in range(args.cases):
        if any((r["seed"], r["number"]) == (args.seed, number) for r in kept):
            continue
        case = draw(random.Random(f"{args.seed}.{number}"))
        try:
            row = check(case)
        except jshard.ShardError as error:
            row = {"refused": str(error).splitlines()[0]}
        except Exception as error:  # a row says which case failed, and the others run
            row = {"failed": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
        row = {"seed": args.seed, "number": number, "jax": jax.__version__, "case": case.title, **row}
        with ROWS.open("a") as f:
            f.write(json.dumps(row) + "\n")
        print(row, flush=True)


if __name__ == "__main__":
    main()
