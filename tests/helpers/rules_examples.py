"""Small programs whose operators cover every primitive with a rule.

`EXAMPLES` maps a name to a function without arguments that gives `(fn, *args)`. Sizes divide by 8 in some
dimensions, values are random and distinct, and several inputs are unpleasant on purpose: indices out of
range, NaN, ties, sizes of one and zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
from jax import lax

from tests.helpers import rules_indexing, rules_shifts  # noqa: F401  they register their examples
from tests.helpers.rules_table import EXAMPLES, example, floats, ints


@example
def unary() -> tuple[Any, ...]:
    def fn(x: Any) -> Any:
        u = jax.nn.sigmoid(x)
        a = [
            f(x)
            for f in (jnp.abs, jnp.sin, jnp.cos, jnp.tan, jnp.tanh, jnp.exp, jnp.floor, jnp.ceil, jnp.sign)
        ]
        b = [
            f(u)
            for f in (jnp.log, jnp.log1p, jnp.expm1, lax.sqrt, lax.rsqrt, lax.cbrt, jnp.exp2, lax.erf_inv)
        ]
        c = [
            f(u)
            for f in (lax.asin, lax.acos, lax.atan, lax.sinh, lax.cosh, lax.asinh, lax.atanh, lax.digamma)
        ]
        d = [f(u + 1) for f in (lax.acosh, lax.lgamma, lax.erf, lax.erfc, lax.bessel_i0e, lax.bessel_i1e)]
        e = [lax.integer_pow(x, 3), lax.round(x), lax.is_finite(x), lax.reduce_precision(x, 5, 10), -x]
        return a, b, c, d, e, jnp.square(x), jnp.copy(x), lax.stop_gradient(x), lax.logistic(x), 1 / x

    return fn, floats(8, 4)


@example
def binary() -> tuple[Any, ...]:
    def fn(x: Any, y: Any, s: Any) -> Any:
        p = jnp.abs(y) + 0.5
        a = [x + y, x - y, x * y, x / p, jnp.maximum(x, y), jnp.minimum(x, y), p**x, lax.rem(x, p)]
        b = [lax.atan2(x, y), lax.nextafter(x, y), x == y, x != y, x < y, x <= y, x > y, x >= y]
        c = [lax.igamma(p, p), lax.igammac(p, p), lax.betainc(p, p, jax.nn.sigmoid(x)), lax.zeta(p + 1, p)]
        d = [lax.add(x, s), lax.mul(s, x), lax.sub(x, s), 2.0 * x, x + 1.0, x - 0.0, lax.clamp(-0.5, x, 0.5)]
        e = [lax.clamp(y, x, p), lax.random_gamma_grad(p, p), lax.polygamma(jnp.ones_like(p), p)]
        return a, b, c, d, e, jnp.where(x > 0, x, y), lax.select_n(s > 0, x, y), jnp.where(y > 0, x, 0.0)

    return fn, floats(8, 4), floats(8, 4, seed=1), floats()


@example
def integer() -> tuple[Any, ...]:
    def fn(x: Any, y: Any) -> Any:
        u = x.astype(jnp.uint32)
        k = jnp.abs(y) % 8
        a = [x & y, x | y, x ^ y, ~x, lax.shift_left(x, k), lax.shift_right_logical(x, k), lax.clz(x)]
        b = [
            lax.shift_right_arithmetic(x, k),
            lax.population_count(x),
            x // (k + 1),
            x % (k + 1),
            x + y,
            x * y,
        ]
        return a, b, u, x.astype(bool), x.astype(jnp.float32), lax.select_n(k % 3, x, y, x + y)

    return fn, ints(8, 4), ints(8, 4, seed=1)


@example
def complexes() -> tuple[Any, ...]:
    def fn(x: Any, y: Any) -> Any:
        z = lax.complex(x, y)
        return (
            z,
            jnp.real(z),
            jnp.imag(z),
            jnp.conj(z),
            z * z,
            z + 1j,
            jnp.abs(z),
            z.sum(0),
            z @ z.T,
            z.prod(0),
        )

    return fn, floats(8, 4), floats(8, 4, seed=1)


@example
def casts() -> tuple[Any, ...]:
    def fn(x: Any) -> Any:
        h = x.astype(jnp.bfloat16)
        return (
            h,
            h.astype(jnp.float32),
            x.astype(jnp.int32),
            x.astype(jnp.float32),
            x.astype(jnp.float8_e4m3fn),
        )

    return fn, floats(8, 4)


@example
def adam_and_gelu() -> tuple[Any, ...]:
    def fn(w: Any, x: Any) -> Any:
        loss = lambda w: (jax.nn.gelu(x @ w) + jax.nn.gelu(x @ w, approximate=False)).sum()  # noqa: E731
        g = jax.grad(loss)(w)
        return jnp.tanh(w), jax.grad(lambda w: jnp.tanh(w).sum())(w), g, jnp.polyval(jnp.arange(4.0), w)

    return fn, floats(4, 8), floats(16, 4)


@example
def broadcasts() -> tuple[Any, ...]:
    def fn(x: Any, s: Any, one: Any) -> Any:
        a = [lax.broadcast_in_dim(x, (2, 8, 4), (1, 2)), lax.broadcast_in_dim(s, (4, 8), ())]
        b = [lax.broadcast_in_dim(one, (8, 4, 2), (0, 2)), jnp.zeros((4, 8)) + x.T, x[:, None, :], x[None]]
        return a, b, jnp.broadcast_to(one, (8, 2)), lax.expand_dims(x, (0, 3)), jnp.zeros((0, 4)) + x[:1]

    return fn, floats(8, 4), floats(), floats(8, 1)


@example
def moves() -> tuple[Any, ...]:
    def fn(x: Any, y: Any) -> Any:
        a = [
            x.transpose(2, 0, 1),
            jnp.squeeze(y, 1),
            jnp.flip(x, 1),
            lax.rev(x, (0, 2)),
            jnp.tile(x, (1, 4, 2)),
        ]
        b = [
            jnp.concatenate([x, x * 2], 1),
            jnp.stack([x, x * 2], 1),
            *jnp.split(x, 2, 2),
            *jnp.unstack(x, axis=2),
        ]
        c = [
            lax.pad(x, 0.0, ((0, 0, 0), (1, 2, 0), (0, 0, 0))),
            lax.pad(x, 1.5, ((0, 0, 0), (0, 0, 1), (-1, 0, 0))),
        ]
        return a, b, c, jnp.repeat(x, 2, 1), jnp.roll(x, 1, 2), lax.optimization_barrier((x, y))

    return fn, floats(8, 4, 4), floats(8, 1, 4)


@example
def reshapes() -> tuple[Any, ...]:
    def fn(x: Any, y: Any, z: Any, w: Any) -> Any:
        a = [x.reshape(4, 2, 16), x.reshape(128), x.reshape(16, 8), x.reshape(8, 4, 2, 2), x.reshape(2, 64)]
        b = [y.reshape(4, 6, 4), y.reshape(6, 4, 4), y.reshape(24, 4), y.reshape(3, 8, 4), y.reshape(96)]
        c = [z.reshape(8, 4), z.reshape(1, 8, 1, 4), w.reshape(4, 0), lax.reshape(x, (16, 8), (1, 0))]
        return a, b, c, x[0, 0].reshape(1, 1), z.reshape(2, 1, 16), lax.reshape(y, (4, 4, 6), (2, 1, 0))

    return fn, floats(8, 16), floats(6, 4, 4), floats(8, 1, 4), floats(0, 4)


@example
def iotas() -> tuple[Any, ...]:
    def fn(x: Any) -> Any:
        a = [lax.broadcasted_iota(t, (8, 16), d) for t in (jnp.int32, jnp.uint8, jnp.float32) for d in (0, 1)]
        return a, jnp.arange(16), jnp.eye(8), jnp.tril(x), lax.full((8, 4), 0.0), lax.full((8, 4), 2)

    return fn, floats(8, 8)


@example
def slices() -> tuple[Any, ...]:
    def fn(x: Any, i: Any, u: Any) -> Any:
        a = [x[2:6], x[:, ::2], x[:, 1::2], x[1::4, :, :], x[:, :, 1:4:3], x[:, 3:5, :2], x[:, -4:]]
        b = [lax.dynamic_slice(x, (i, 0, 0), (2, 4, 8)), lax.dynamic_slice(x, (0, i, 5), (8, 4, 2))]
        c = [lax.dynamic_update_slice(x, u, (0, i, 0)), lax.dynamic_update_slice(x, u, (0, -9, 0))]
        d = [
            lax.dynamic_update_slice(x, u, tuple(jnp.array([0, 200, 0], jnp.uint8))),
            lax.dynamic_update_slice(x, x[:2], (i, 0, 0)),
        ]
        e = [lax.dynamic_update_slice(x, u[:1, :, :1], (i, i, i)), lax.dynamic_index_in_dim(x, i, 1)]
        return a, b, c, d, e, lax.dynamic_update_slice(x, x[:, :, :1], (i - 20, i, i + 4))

    return fn, floats(8, 4, 8), jnp.int32(3), floats(8, 1, 8)


@example
def dots() -> tuple[Any, ...]:
    def fn(x: Any, w: Any, q: Any, k: Any, v: Any) -> Any:
        a = [x @ w, w.T @ x.T, jnp.einsum("bqhd,bkhd->bhqk", q, k), jnp.vdot(v, v), jnp.outer(v, v), w @ w.T]
        b = [lax.dot(x.astype(jnp.int8), w.astype(jnp.int8), preferred_element_type=jnp.int32)]
        c = [lax.dot_general(q, k, (((1, 3), (1, 3)), ((2,), (2,)))), jnp.zeros((4, 0)) @ jnp.zeros((0, 8))]
        return (
            a,
            b,
            c,
            lax.dot(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), preferred_element_type=jnp.float32),
        )

    return fn, floats(8, 16), floats(16, 4), floats(2, 8, 4, 8), floats(2, 8, 4, 8, seed=1), floats(8)


@example
def reductions() -> tuple[Any, ...]:
    def fn(x: Any, i: Any, nan: Any) -> Any:
        a = [x.sum(1), x.sum(), x.max(0), x.min((0, 2)), x.prod(1), i.sum(0), i.max(1), i.min(), i.prod(0)]
        b = [(i > 0).all(0), (i > 40).any(1), (i > 0).all(), lax.reduce_or(i, (1,)), lax.reduce_and(i, (0,))]
        c = [
            lax.reduce_xor(i, (0,)),
            lax.reduce_xor(i > 0, (1,)),
            (i > 3).sum(0),
            x.mean(2),
            nan.max(1),
            nan.sum(0),
        ]
        d = [lax.reduce((x, x), (0.0, 1.0), lambda p, q: (p[0] + q[0] * q[1], p[1] * q[1]), (1,))]
        return a, b, c, d, lax.reduce_max((i > 0), (1,)), jnp.zeros((0, 8)).sum(0)

    return fn, floats(8, 4, 8), ints(8, 16), floats(8, 8).at[2, 5].set(jnp.nan).at[3, 1].set(jnp.inf)


@example
def arg_reductions() -> tuple[Any, ...]:
    def fn(x: Any, i: Any, nan: Any) -> Any:
        a = [jnp.argmax(x, 1), jnp.argmin(x, 0), jnp.argmax(i, 1), jnp.argmin(i, 0), jnp.argmax(nan, 1)]
        b = [
            jnp.argmin(nan, 1),
            jnp.argmax(nan, 0),
            jnp.argmin(nan, 0),
            jnp.argmax(i > 1, 1),
            jnp.argmin(i > 1, 1),
        ]
        return a, b, jnp.argmax(jnp.full((8, 8), -jnp.inf), 1), jnp.argmax(i.astype(jnp.uint8), 1)

    nan = floats(8, 8).at[2, 5].set(jnp.nan).at[2, 1].set(jnp.inf).at[4].set(-jnp.inf).at[6, 6].set(-jnp.inf)
    return fn, floats(8, 16), ints(8, 8, low=0, high=3), nan


@example
def cumulatives() -> tuple[Any, ...]:
    def fn(x: Any) -> Any:
        a = [
            lax.cumsum(x, 0),
            lax.cumsum(x, 1, reverse=True),
            lax.cumprod(x, 1),
            lax.cummax(x, 0),
            lax.cummin(x, 1),
        ]
        return a, lax.cumlogsumexp(x, 0), jnp.cumsum(x.astype(jnp.int32), 1)

    return fn, floats(8, 4)


@example
def sorts() -> tuple[Any, ...]:
    def fn(x: Any, i: Any) -> Any:
        a = [
            jnp.sort(x, 0),
            jnp.argsort(x, 1),
            lax.sort((x, i), dimension=1),
            lax.sort((i, x, x), num_keys=2),
        ]
        return a, lax.top_k(x, 4), lax.top_k(i, 2), lax.approx_max_k(x, 2), lax.approx_min_k(x, 2)

    return fn, floats(8, 16), ints(8, 16, low=0, high=5)


@example
def convolutions() -> tuple[Any, ...]:
    def fn(x: Any, w: Any, g: Any, p: Any) -> Any:
        def conv(x: Any, w: Any, stride: Any = 1, pad: Any = "SAME", **kw: Any) -> Any:
            return lax.conv_general_dilated(
                x, w, (stride, stride), pad, dimension_numbers=("NHWC", "HWIO", "NHWC"), **kw
            )

        def loss(x: Any, w: Any, **kw: Any) -> Any:
            return (conv(x, w, **kw) ** 2).sum()

        a = [conv(x, w), conv(x, w, 2), conv(x, w[:1, :1], 1, "VALID"), conv(x, w, rhs_dilation=(2, 2))]
        b = [
            conv(x, g, feature_group_count=4),
            conv(x, g[..., :4], feature_group_count=4),
            conv(x, p, 4, "VALID"),
        ]
        c = [
            jax.grad(loss, (0, 1))(x, w),
            jax.grad(lambda x, g: loss(x, g, feature_group_count=4), (0, 1))(x, g),
        ]
        d = [jax.grad(lambda x, p: loss(x, p, stride=4, pad="VALID"), (0, 1))(x, p)]
        e = [
            lax.conv_transpose(
                x[:, :2, :2], w[:2, :2], (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        ]
        grouped = lax.conv_general_dilated(
            x, w[..., :8], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), batch_group_count=2
        )
        return a, b, c, d, e, grouped, conv(x, g[:, :, :1, :], feature_group_count=4)

    return fn, floats(4, 8, 8, 4), floats(3, 3, 4, 8), floats(3, 3, 1, 8), floats(4, 4, 4, 8)


@example
def convolutions_1d() -> tuple[Any, ...]:
    def fn(x: Any, w: Any, g: Any) -> Any:
        one = lambda x, w, **k: lax.conv_general_dilated(x, w, (1,), "SAME", **k)  # noqa: E731
        a = jax.grad(lambda x, w: (one(x, w, feature_group_count=2) ** 2).sum(), (0, 1))(x, g)
        return (
            one(x, w),
            a,
            jnp.convolve(x[0, 0], w[0, 0]),
            one(x, w[:, :2], batch_group_count=1, feature_group_count=2),
        )

    return fn, floats(8, 4, 8), floats(8, 4, 3), floats(8, 2, 3)


@example
def windows() -> tuple[Any, ...]:
    def fn(x: Any) -> Any:
        pool = lambda x, init, f, k, s, pad="VALID": lax.reduce_window(x, init, f, k, s, pad)  # noqa: E731
        side = lambda x: pool(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1))  # noqa: E731
        over = lambda x: pool(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")  # noqa: E731
        a = [side(x), over(x), pool(x, jnp.inf, lax.min, (1, 2, 1, 1), (1, 2, 1, 1))]
        b = [
            pool(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1)),
            pool(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1)),
        ]
        c = [jax.grad(lambda x: (side(x) ** 2).sum())(x), jax.grad(lambda x: (over(x) ** 2).sum())(x)]
        d = [jax.jvp(side, (x,), (jnp.cos(x),)), jax.jvp(over, (x,), (jnp.cos(x),))]
        return a, b, c, d, pool(x, 1.0, lambda p, q: p * q + q, (1, 2, 1, 1), (1, 2, 1, 1))

    return fn, floats(4, 8, 8, 2)


@example
def linear_algebra() -> tuple[Any, ...]:
    def fn(a: Any, b: Any) -> Any:
        s = a @ a.swapaxes(-1, -2) + 4 * jnp.eye(4)
        la = lax.linalg
        first = [jnp.linalg.cholesky(s), jnp.linalg.eigh(s), jnp.linalg.svd(a), jnp.linalg.qr(a), la.lu(a)]
        low = jnp.linalg.cholesky(s)
        second = [
            la.triangular_solve(low, b, left_side=True, lower=True),
            la.householder_product(a, a[..., 0]),
        ]
        third = [
            la.triangular_solve(low, b.swapaxes(-1, -2), lower=True),
            la.schur(a),
            la.hessenberg(a),
            la.tridiagonal(s),
        ]
        d = jnp.abs(a[..., 0]) + 4
        fourth = [
            la.tridiagonal_solve(d * 0.1, d, d * 0.2, b),
            la.symmetric_product(a, s),
            jnp.linalg.eigvals(a),
        ]
        return (
            first,
            second,
            third,
            fourth,
            jnp.linalg.svd(a, compute_uv=False),
            la.lu_pivots_to_permutation(la.lu(a)[1], 4),
        )

    return fn, floats(8, 4, 4), floats(8, 4, 2)


@example
def fourier() -> tuple[Any, ...]:
    def fn(x: Any) -> Any:
        return jnp.fft.fft(x), jnp.fft.rfft(x), jnp.fft.irfft(x), jnp.fft.fft2(x), jnp.fft.ifft(x, axis=0)

    return fn, floats(8, 4, 8)


@example
def ragged() -> tuple[Any, ...]:
    def fn(x: Any, w: Any, sizes: Any) -> Any:
        f = lambda x, w: (lax.ragged_dot(x, w, sizes) ** 2).sum()  # noqa: E731
        return lax.ragged_dot(x, w, sizes), jax.grad(f, (0, 1))(x, w), lax.ragged_dot(x, w, sizes - 1)

    return fn, floats(16, 4), floats(4, 4, 8), jnp.array([5, 1, 3, 7])


@example
def bits() -> tuple[Any, ...]:
    def fn(x: Any, b: Any) -> Any:
        cast = lax.bitcast_convert_type
        return cast(x, jnp.int32), cast(x, jnp.uint8), cast(b, jnp.int32), jnp.signbit(x), jnp.frexp(x)

    return fn, floats(8, 4), ints(8, 2, 4, low=0, dtype=np.uint8)


@example
def images() -> tuple[Any, ...]:
    def fn(x: Any) -> Any:
        return jax.image.resize(x, (4, 16, 8), "linear"), jax.image.resize(x, (4, 4, 8), "nearest")

    return fn, floats(4, 8, 8)


@example
def attention_step() -> tuple[Any, ...]:
    def fn(table: Any, wq: Any, t: Any) -> Any:
        def loss(table: Any, wq: Any) -> Any:
            x = table[t]
            q = (x @ wq).reshape(2, 8, 2, 4)
            y = jax.nn.dot_product_attention(q, q, q, is_causal=True).reshape(2, 8, 8)
            logp = jax.nn.log_softmax(y @ table.T)
            return -jnp.take_along_axis(logp, t[..., None], -1).mean()

        return jax.value_and_grad(loss, (0, 1))(table, wq)

    return fn, floats(16, 8), floats(8, 8), ints(2, 8, low=0, high=16)


@example
def odd_ones() -> tuple[Any, ...]:
    def fn(x: Any, a: Any, k: Any) -> Any:
        from jax.ad_checkpoint import checkpoint_name

        from jshard._core.jaxcompat import threefry_2x32

        s = a @ a.T + 4 * jnp.eye(4)
        b = [
            lax.linalg.cholesky_update(jnp.linalg.cholesky(s).T, a[0]),
            jax.device_put(x),
            jnp.log2(jnp.abs(x) + 1),
        ]
        c = [checkpoint_name(x, "name"), threefry_2x32(k, k + 1, 2 * k, k), lax.optimization_barrier(x)]
        return b, c, jax.jvp(jnp.tanh, (x,), (x,))[1], jnp.zeros_like(x), jnp.einsum("ij,jk->ik", x, a)

    return fn, floats(8, 4), floats(4, 4), ints(8, 4, low=0, dtype=np.uint32)


@example
def statistics() -> tuple[Any, ...]:
    def fn(x: Any) -> Any:
        a = [
            jnp.var(x, 0),
            jnp.median(x, 0),
            jnp.linalg.norm(x, axis=1),
            jsp.special.logsumexp(x, 1),
            jnp.nanmax(x, 0),
        ]
        return (
            a,
            jsp.special.logit(jax.nn.sigmoid(x)),
            jnp.diff(x, axis=1),
            jnp.histogram(x, 4)[0],
            jnp.unwrap(x),
        )

    return fn, floats(8, 8)


def all_cases() -> Iterator[Any]:
    """Every distinct operator of all examples, as `rules_validator.Case`."""
    from tests.laws import rules_validator

    seen: set[str] = set()
    for make in EXAMPLES.values():
        fn, *args = make()
        for case in rules_validator.cases(fn, *args):
            if case.key not in seen:
                seen.add(case.key)
                yield case


@example
def attention() -> tuple[Any, ...]:
    import jshard

    def fn(q: Any, k: Any, bias: Any) -> Any:
        def loss(q: Any, k: Any, bias: Any) -> Any:
            return (jshard.ops.attention(q, k, k, causal=True, bias=bias) ** 2).sum()

        return jax.value_and_grad(loss, (0, 1, 2))(q, k, bias)

    return fn, floats(2, 8, 4, 4), floats(2, 8, 2, 4, seed=1), floats(1, 4, 8, 8, seed=2)
