"""Seconds of compute that plans predict, against the TPU compiler's estimates, for programs beside the workloads.

`python benchmarks/compilers/compute.py [--only PROGRAM ...]` plans each program for a TPU v5e 2x4, compiles it there and
appends one line of JSON to `benchmarks/compilers/compute.jsonl`; `compute.md` is written anew after each. The training
steps of the workloads are in `exposure.py`. The last programs are ones that nothing was fitted to.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any


ROOT = pathlib.Path(__file__).parents[2]
HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(ROOT))

from benchmarks.compilers.kept_rows import (  # noqa: E402
    arguments,
    compilers_python,
    in_process,
    keep_rows,
    kept_rows,
)


RESULTS, TABLE = HERE / "compute.jsonl", HERE / "compute.md"
MACHINE, AXES = "v5e:2x4", {"x": 2, "y": 4}
Program = tuple[
    Callable[..., Any], tuple[Any, ...], tuple[Any, ...], tuple[int, ...]
]  # step, shapes, cuts, donated


def decode(batch: int, int8: bool = False, width: int = 8192, hidden: int = 28672) -> Program:
    """Two layers of a decode step (Llama 3 70B's by default), with a cache of 8192 tokens."""
    import jax
    import jax.numpy as jnp

    layers, kv, head, length = 2, 8, 128, 8192
    shapes = {
        "q": (layers, width, width), "kv": (layers, width, 2 * kv * head), "o": (layers, width, width),
        "up": (layers, width, 2 * hidden), "down": (layers, hidden, width),
    }  # fmt: skip
    dtype = "int8" if int8 else "bfloat16"
    weights = {k: jax.ShapeDtypeStruct(s, dtype) for k, s in shapes.items()}
    scales = {k: jax.ShapeDtypeStruct((layers, s[-1]), "bfloat16") for k, s in shapes.items()}
    cache = jax.ShapeDtypeStruct((layers, 2, batch, kv, length, head), "bfloat16")

    def step(weights: Any, scales: Any, cache: Any, x: Any, at: Any) -> Any:
        def layer(x: Any, given: Any) -> Any:
            w, s, c = given

            def times(x, k):
                return (x @ w[k].astype(x.dtype)) * s[k] if int8 else x @ w[k]

            q = times(x, "q").reshape(batch, kv, -1, head)
            new = times(x, "kv").reshape(batch, 2, kv, 1, head).transpose(1, 0, 2, 3, 4)
            c = jax.lax.dynamic_update_slice(c, new, (0, 0, 0, at, 0))
            p = jax.nn.softmax(jnp.einsum("bkgh,bklh->bkgl", q, c[0]).astype("float32")).astype(x.dtype)
            x = x + times(jnp.einsum("bkgl,bklh->bkgh", p, c[1]).reshape(batch, width), "o")
            gate, up = jnp.split(times(x, "up"), 2, -1)
            return x + times(jax.nn.silu(gate) * up, "down"), c

        return jax.lax.scan(layer, x, (weights, scales, cache))

    x, at = jax.ShapeDtypeStruct((batch, width), "bfloat16"), jax.ShapeDtypeStruct((), "int32")
    return step, (weights, scales, cache, x, at), (), (2,)


def prefill(tokens: int = 2048, width: int = 4096, hidden: int = 11008, dtype: str = "bfloat16") -> Program:
    """Two layers of a forward pass over eight prompts."""
    import jax
    import jax.numpy as jnp

    from benchmarks.workloads import block, block_shapes

    params = [jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype), block_shapes(width, hidden))] * 2

    def step(params: Any, x: Any) -> Any:
        for p in params:
            x = block(x, p, width // 128)
        return jnp.asarray(x)

    x = jax.ShapeDtypeStruct((8, tokens, width), dtype)
    return step, (params, x), (None, (8, None, None)), ()


def dit(images: int = 64, tokens: int = 256, width: int = 1152, heads: int = 16) -> Program:
    """Training of two blocks of a diffusion transformer, DiT-XL/2: blocks whose norms are modulated by a condition."""
    import jax
    import jax.numpy as jnp

    from benchmarks.workloads import attention, heads as split, sgd, shapes

    one = shapes(mod=(width, 6 * width), qkv=(width, 3 * width), out=(width, width), up=(width, 4 * width))
    params = [one | shapes(down=(4 * width, width))] * 2

    def norm(x: Any, shift: Any, scale: Any) -> Any:
        y = x.astype("float32")
        y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-6)
        return (y * (1 + scale[:, None]) + shift[:, None]).astype(x.dtype)

    def loss(params: Any, x: Any, c: Any) -> Any:
        for p in params:
            m = jnp.split(jax.nn.silu(c) @ p["mod"], 6, -1)
            q, k, v = (split(a, heads) for a in jnp.split(norm(x, m[0], m[1]) @ p["qkv"], 3, -1))
            o = attention(q[:, :, :, None], k, v, causal=False).reshape(x.shape)
            x = x + m[2][:, None] * (o @ p["out"])
            x = x + m[5][:, None] * (jax.nn.gelu(norm(x, m[3], m[4]) @ p["up"]) @ p["down"])
        return jnp.mean(x.astype("float32") ** 2)

    x = jax.ShapeDtypeStruct((images, tokens, width), "bfloat16")
    c = jax.ShapeDtypeStruct((images, width), "bfloat16")
    return sgd(loss), (params, x, c), (None, (8, None, None), (8, None)), (0,)


def blockwise(tokens: int = 131072, heads: int = 8, size: int = 128, block: int = 2048) -> Program:
    """Causal attention over 128k tokens, a block of keys at a time with running maxima and sums."""
    import jax
    import jax.numpy as jnp

    n = tokens // block

    def step(q: Any, k: Any, v: Any) -> Any:
        def over_keys(state: Any, given: Any) -> Any:
            (top, total, out), (k, v) = state, given
            scores = jnp.einsum("hnqd,hkd->hnqk", q, k).astype("float32") * size**-0.5
            new = jnp.maximum(top, scores.max(-1))
            p, old = jnp.exp(scores - new[..., None]), jnp.exp(top - new)
            out = out * old[..., None] + jnp.einsum("hnqk,hkd->hnqd", p.astype(q.dtype), v)
            return (new, total * old + p.sum(-1), out), None

        start = (jnp.full((heads, n, block), -jnp.inf), jnp.zeros((heads, n, block)), jnp.zeros(q.shape))
        (_, total, out), _ = jax.lax.scan(over_keys, start, (k, v))
        return (out / total[..., None]).astype(q.dtype)

    q = jax.ShapeDtypeStruct((heads, n, block, size), "bfloat16")
    k = jax.ShapeDtypeStruct((n, heads, block, size), "bfloat16")
    return step, (q, k, k), ((None, 8, None, None), None, None), ()


def scanned_gpt(layers: int, width: int, tokens: int, rows: int, heads: int) -> Program:
    """Training of GPT blocks in a scan."""
    import jax
    import jax.numpy as jnp

    from benchmarks.workloads import array, block, block_shapes, sgd

    def loss(params: Any, x: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, p: (block(x, p, heads), None), x, params)
        return jnp.mean(x.astype("float32") ** 2)

    params = block_shapes(width, 4 * width, layers)
    return sgd(loss), (params, array(rows, tokens, width)), (None, (8, None, None)), (0,)


def scanned_llama(layers: int, width: int, hidden: int, tokens: int, rows: int, remat: bool) -> Program:
    """Training of Llama blocks in a scan, all values kept or recomputed in the backward pass."""
    import jax
    import jax.numpy as jnp

    from benchmarks.workloads import array, attention, heads, rms_norm, rotate, sgd, shapes

    kv, size = 8, 128

    def layer(x: Any, p: Any) -> Any:
        y = rms_norm(x, p["n1"])
        q, k, v = (heads(y @ p[w], n) for w, n in (("wq", width // size), ("wk", kv), ("wv", kv)))
        o = attention(rotate(q).reshape(*y.shape[:2], kv, -1, size), rotate(k), v)
        x = x + o.reshape(x.shape) @ p["wo"]
        y = rms_norm(x, p["n2"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None

    def loss(params: Any, x: Any) -> Any:
        x, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, params)
        return jnp.mean(x.astype("float32") ** 2)

    n, d, ff, m = layers, width, hidden, kv * size
    params = shapes(
        n1=(n, d), n2=(n, d), wq=(n, d, d), wk=(n, d, m), wv=(n, d, m), wo=(n, d, d), gate=(n, d, ff), up=(n, d, ff),
        down=(n, ff, d),
    )  # fmt: skip
    return sgd(loss), (params, array(rows, tokens, width)), (None, (8, None, None)), (0,)


def scanned_experts(layers: int, width: int, hidden: int, experts: int, tokens: int, rows: int) -> Program:
    """Training of layers of experts in a scan; all experts see all tokens, weighted by the router."""
    import jax
    import jax.numpy as jnp

    from benchmarks.workloads import array, rms_norm, sgd, shapes

    def layer(x: Any, p: Any) -> Any:
        y = rms_norm(x, p["norm"])
        gates = jax.nn.softmax((y @ p["router"]).astype("float32"), -1)
        chosen = jnp.where(gates >= gates.max(-1, keepdims=True), gates, 0.0).astype(x.dtype)
        h = jax.nn.gelu(jnp.einsum("btd,edf->btef", y, p["up"]))
        return x + jnp.einsum("btef,efd,bte->btd", h, p["down"], chosen), None

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(layer, x, params)[0].astype("float32") ** 2)

    n, d, ff, e = layers, width, hidden, experts
    params = shapes(norm=(n, d), router=(n, d, e), up=(n, e, d, ff), down=(n, e, ff, d))
    return sgd(loss), (params, array(rows, tokens, width)), (None, (8, None, None)), (0,)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "decode, bfloat16": lambda: decode(64),
    "decode, int8": lambda: decode(64, int8=True),
    "prefill": prefill,
    "DiT": dit,
    "blockwise attention, 128k": blockwise,
    "decode of one row": lambda: decode(1, width=5120, hidden=13824),
    "prefill, float32, odd sizes": lambda: prefill(1000, 1664, 4500, "float32"),
    "DiT, odd sizes": lambda: dit(40, 300, 800, 10),
    "GPT, 8 scanned layers": lambda: scanned_gpt(8, 768, 512, 64, 12),
    "GPT, 3 scanned layers, odd sizes": lambda: scanned_gpt(3, 640, 384, 48, 5),
    "Llama, 6 scanned layers": lambda: scanned_llama(6, 2048, 5632, 1024, 16, False),
    "Llama, 6 scanned layers, recomputed": lambda: scanned_llama(6, 2048, 5632, 1024, 16, True),
    "experts, 3 scanned layers": lambda: scanned_experts(3, 1024, 2048, 8, 512, 16),
}


UNSEEN = 8


def run_one(name: str) -> dict[str, Any]:
    """Plan, compile and read one program."""
    import jax

    import jshard

    step, args, cuts, donated = PROGRAMS[name]()
    mesh = jshard.topology(MACHINE, AXES, compiles=True)
    f = jshard.shard(step, in_strategy=cuts or None, level=2, mesh=mesh, donate_argnums=donated)
    plan = f.plan(*args)
    t = plan.verify(f.lower(*args).compile()).timeline
    if t is None:
        return {"failed": "no timeline"}
    return {"jax": jax.__version__, "plan_compute": plan.cost.compute, "compute": t.compute}


def write_table(results: dict[str, dict[str, Any]]) -> str:
    """The Markdown table of all results."""
    lines = [
        "# Compute of programs beside the workloads",
        "",
        f"Written by `make bench-compute`: seconds of compute on a device of {MACHINE}, planned, and the TPU compiler's",
        "`estimated_cycles` over the clock, with no device. The workloads are in [exposure.md](exposure.md).",
        f"Nothing was fitted to the last {UNSEEN}. Plans and compiled programs of 25 November 2026.",
        "",
        "| program | plan | compiled | ratio |",
        "|---|---|---|---|",
    ]
    for name in PROGRAMS:
        r = results.get(name, {"failed": "not run"})
        if "failed" in r:
            lines.append(f"| {name} | {r['failed']} | | |")
            continue
        p, c = r["plan_compute"], r["compute"]
        lines.append(f"| {name} | {1e3 * p:.3g} ms | {1e3 * c:.3g} ms | {p / c:.2f} |")
    return "\n".join(lines) + "\n"


def stored() -> dict[str, dict[str, Any]]:
    """The last result of each program."""
    return kept_rows(RESULTS, "program")


def main() -> int:
    """All programs, a process each."""
    parser = arguments(__doc__, PROGRAMS, (MACHINE,), nargs=1, metavar="PROGRAM")
    a = parser.parse_args()
    if a.one:
        print(json.dumps(run_one(*a.one)))
        return 0
    python = compilers_python()
    for name in a.only:
        if name in stored() and not a.again:
            continue
        r = in_process(python, __file__, ["--one", name], a.seconds)
        results = {**stored(), name: {"program": name, **r}}
        keep_rows(RESULTS, results.values())
        TABLE.write_text(write_table(results))
        print(name, r, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
