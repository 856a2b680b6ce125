"""Statements about types and reductions: casts, chains of sums, weak types, maxima over sharded dimensions."""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from tests.laws.fuzz_programs import Drawer, Scope


WEAK = (
    "jnp.full({}, 0.5)", "lax.fori_loop(0, 3, lambda i, c: c * 0.5 + i, jnp.full({}, 1.0))", "jnp.full({}, 2)",
    "lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.9), (0, 1.0)) + ({},)[:0]",
    "jax.jit(lambda: 2.0 * jnp.full({}, 0.25))()", "lax.scan(lambda c, _: (c + 1, c * 0.5), 0, length=3) + ({},)[:0]",
)  # fmt: skip
LOW = ("bfloat16", "bfloat16", "float16")


def casts(d: Drawer, s: Scope) -> None:
    """One value in several types, each read on its own; eight-bit floats are moved, not computed with."""
    v = s.pick(lambda v: v.real and len(v.shape) > 0)
    if v is None:
        return
    low = d.choice(LOW)
    k = d.between(0, len(v.shape) - 1)
    s.add([f"low = jnp.tanh({v.name}).astype('{low}')"], d.choice((
        f"(low * low).astype({v.name}.dtype) + jnp.flip(low, {k}).astype({v.name}.dtype)",
        f"jnp.sum(low, axis={k}, keepdims=True).astype({v.name}.dtype) / 4 + low.astype({v.name}.dtype)",
        f"low.astype('float8_e4m3fn').astype({v.name}.dtype) + jnp.roll({v.name}, 1, {k})",
        f"jnp.concatenate([low, low.astype('float32').astype('{low}')], axis={k}).astype({v.name}.dtype)",
        f"jnp.max(low, axis={k}).astype({v.name}.dtype) + jnp.mean({v.name}, axis={k})",
        f"jnp.einsum('...i,...i->...', low, low.astype('float32')).astype({v.name}.dtype) / {v.shape[-1]}",
    )))  # fmt: skip


def chain(d: Drawer, s: Scope) -> None:
    """Reductions that each need the one before."""
    v = s.pick(lambda v: v.real and len(v.shape) > 0)
    if v is None:
        return
    turns = d.between(2, 4)
    axes = [d.choice((None, *range(len(v.shape)))) for _ in range(turns)]
    lines = [f"t = {v.name}"]
    lines += [f"t = t / (1 + jnp.sum(jnp.abs(t), axis={a}, keepdims=True) / 4)" for a in axes]
    s.add(lines, d.choice(("t", "t - jnp.max(t)", "jnp.sum(t * t)")))


def whole_reductions(d: Drawer, s: Scope) -> None:
    """Reductions that are no sums: of booleans, bits and products, and places of extremes."""
    v = s.pick(lambda v: v.real and len(v.shape) > 0)
    if v is None:
        return
    k = d.between(0, len(v.shape) - 1)
    bits = f"jnp.int32(jnp.sign({v.name}) * 5 + 6)"
    s.add([], d.choice((
        f"lax.reduce_xor({bits}, axes=({k},))", f"lax.reduce_and({bits}, axes=({k},))",
        f"lax.reduce_or({bits}, axes=({k},))",
        f"jnp.prod({bits} % 3 + 1, axis={k})", f"jnp.argmin({v.name}, axis={k})", f"jnp.argmax({v.name})",
        f"jnp.min({bits}, axis={k})", f"jnp.any({bits} > 6, axis={k})", f"jnp.all({bits} > 0, axis={k})",
        f"jnp.sum({bits}.astype('uint32'), axis={k})", f"jnp.max(jnp.tanh({v.name}).astype('bfloat16'), axis={k}) > 0",
    )))  # fmt: skip


def weak(d: Drawer, s: Scope) -> None:
    """Values of Python numbers alone, returned, chosen or round a loop: their types are weak, and give way to others."""
    v = s.pick()
    if v is None:
        return
    s.add([], d.choice((
        *(w.format(d.shape(d.between(0, 2))) for w in WEAK),
        f"lax.while_loop(lambda c: c < 3.0, lambda c: c * 2, 1.0) * {v.name}", f"jnp.where({v.name} > 0, 1.0, 2.0)",
        f"lax.fori_loop(0, 3, lambda i, c: c * 2, 1) * {v.name}",
        f"lax.cond(jnp.sum({v.name}) > 0, lambda: 1.0, lambda: 2.0)",
        "lax.fori_loop(0, 3, lambda i, c: c + i, 0)", f"jnp.full({v.shape}, 0.5) * {v.name}",
    )))  # fmt: skip
