"""Statements of random programs that move elements along a dimension: rolls, shifts, windows, prefixes, few positions."""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from tests.laws.fuzz_programs import Drawer, Scope


_PART = "lax.slice_in_dim({0}, {1}, {2}, axis={3})"
_RECURRENCE = "lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])"


def shifted(d: Drawer, s: Scope) -> None:
    """A shift along one dimension, in one of the ways in which people write it."""
    v = s.pick(lambda v: v.real and any(n > 1 for n in v.shape))
    if v is None:
        return
    dim = d.choice([i for i, n in enumerate(v.shape) if n > 1])
    x, n, rank = v.name, v.shape[dim], len(v.shape)
    k = min(n - 1, d.choice((1, 1, 1, 2, 3, n // 2, n - 1)))

    def part(start: int, stop: int) -> str:
        return _PART.format(x, start, stop, dim)

    def padded(what: str, low: int, high: int) -> str:
        config = [(low, high) if i == dim else (0, 0) for i in range(rank)]
        return f"jnp.pad({what}, {config})"

    window = " + ".join(f"{j + 1} * lax.slice_in_dim(t, {j}, {j + n}, axis={dim})" for j in range(k + 1))
    s.add(
        [],
        d.choice((
            f"jnp.roll({x}, {d.choice((k, -k))}, axis={dim})",
            padded(part(0, n - k), k, 0),
            padded(part(k, n), 0, k),
            padded(part(k // 2, n - k + k // 2), k, 0),
            padded(part(0, k), d.choice((0, n - k)), 0),
            f"jnp.concatenate([{part(0, k)} * 0.5, {part(0, n - k)}], {dim})",
            f"jnp.concatenate([{part(k, n)}, {part(0, k)}], {dim})",
            f"jnp.concatenate([{part(k, n)} * 0.5, jnp.zeros_like({part(0, k)})], {dim})",
            f"(lambda t: {window})({padded(x, k, 0)}) / {2 * k}",
            f"{part(0, n - k)} * jnp.sin({part(k, n)})",
            f"{part(n - 1, n)} + {x}",
            f"{part(k // 2, k)} * 0.5" if k > 1 else part(0, 1),
            f"lax.slice_in_dim({x}, {k % 2}, {n}, stride=2, axis={dim})",
            f"lax.slice_in_dim({x}, {min(2, n - 1)}, {n}, stride=2, axis={dim})",
            f"lax.rev({x}, ({dim},))",
            f"lax.associative_scan(jnp.add, {x}, axis={dim}, reverse={d.chance(0.3)}) / {n}",
            f"lax.associative_scan({_RECURRENCE}, (jnp.tanh({x}), {x}), axis={dim}, reverse={d.chance(0.3)})[1]",
            f"jnp.cumsum({x}, axis={dim}) / {n}",
        )),
    )  # fmt: skip
