"""Statements of random programs: a small function for each kind, with its weight.

Each takes the drawer (choices, names, cuts) and the block it writes into. Expressions keep numbers near one, so
that what two orders of summation differ by stays far below any tolerance.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.laws.fuzz_types import LOW, casts, chain, weak, whole_reductions


if TYPE_CHECKING:
    from tests.laws.fuzz_programs import Drawer, Scope, Value


PRELUDE = '''
def fit(x, shape, dtype):
    """Any value as one of the wanted shape: its mean, spread."""
    real = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else "float32"
    return jnp.broadcast_to(jnp.mean(x.astype(real)), shape).astype(dtype)


def custom(forward, backward):
    """A function with a reverse rule of its own, deliberately not the true one."""
    f = jax.custom_vjp(forward)
    f.defvjp(lambda *a: (forward(*a), a), backward)
    return f


def tangent(f, factor):
    """A function with a forward rule of its own, deliberately not the true one."""
    g = jax.custom_jvp(f)
    g.defjvp(lambda p, t: (g(*p), factor * t[0] * jnp.cos(p[0])))
    return g
'''

UNARY = (
    "jnp.tanh({})", "jnp.sin({})", "jax.nn.sigmoid({})", "jax.nn.relu({})", "jax.nn.gelu({})", "-{}", "jnp.abs({})",
    "jnp.exp(-jnp.abs({}))", "jnp.log1p(jnp.abs({}))", "jnp.sqrt(1 + {0} * {0})", "jnp.square(jnp.tanh({}))",
    "jax.nn.softplus({})", "jax.lax.erf({})", "jnp.where({0} > 0.1, {0}, 0.3)", "jnp.clip({}, -1.0, 1.0)", "2 * {}",
    "jax.nn.silu({})", "lax.stop_gradient({})", "jnp.nan_to_num({})", "lax.rsqrt(1 + jnp.square({}))", "{} ** 2 / 4",
    "lax.optimization_barrier({})", "jnp.expm1(jnp.tanh({}))", "jnp.arctan({})", "lax.reduce_precision({}, 11, 52)",
)  # fmt: skip
BINARY = (
    "{} + {}", "{} - {}", "jnp.sin({} * {})", "{} * jnp.tanh({})", "jnp.maximum({}, {})", "jnp.minimum({}, {})",
    "jnp.where({0} > {1}, {0}, {1})", "{} / (1 + jnp.abs({}))", "jnp.arctan2({}, {})", "jnp.hypot({}, 1 + {})",
    "jnp.logaddexp({}, {})",
)  # fmt: skip
REDUCE = (
    "jnp.sum({}, axis={}) / 4", "jnp.mean({}, axis={})", "jnp.max({}, axis={})", "jnp.min({}, axis={})",
    "jnp.prod(jnp.tanh({}), axis={})", "jax.nn.logsumexp({}, axis={})", "jnp.std({}, axis={})", "jnp.any({} > 0, axis={})",
    "jnp.sum({}, axis={}, keepdims=True) / 4", "jnp.max({}, axis={}, keepdims=True)", "jnp.all({} > -1, axis={})",
)  # fmt: skip
ALONG = (
    "jax.nn.softmax({}, axis={})", "jnp.cumsum({}, axis={}) / 4", "lax.cummax({}, axis={})", "jnp.sort({}, axis={})",
    "jnp.flip({}, axis={})", "jnp.roll({}, 1, axis={})", "lax.cumlogsumexp({}, axis={})", "jax.nn.log_softmax({}, axis={})",
    "jnp.repeat({}, 2, axis={})", "jnp.expand_dims({}, axis={})", "jnp.argmax({}, axis={})", "jnp.argsort({}, axis={})",
    "jax.nn.standardize({}, axis={}, epsilon=0.1)", "jnp.diff({}, axis={})", "jnp.squeeze({}, axis={})",
    "lax.cumprod(jnp.tanh({}), axis={}, reverse=True)", "jnp.unstack({}, axis={})[0]", "jnp.median({}, axis={})",
    "lax.associative_scan(jnp.maximum, {}, axis={})",
)  # fmt: skip


def unary(d: Drawer, s: Scope) -> None:
    """An elementwise function of one value."""
    if v := s.pick():
        s.add([], d.choice(UNARY).format(v.name))


def binary(d: Drawer, s: Scope) -> None:
    """An elementwise function of two values whose shapes broadcast."""
    a = s.pick()
    b = s.pick(lambda v: v.real and a is not None and broadcasts(a.shape, v.shape))
    if a and b:
        s.add([], d.choice(BINARY).format(a.name, b.name))


def broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether two shapes go together as numpy does it."""
    return all(m == n or 1 in (m, n) for m, n in zip(a[::-1], b[::-1], strict=False))


def reduce(d: Drawer, s: Scope) -> None:
    """A reduction over one, several or all dimensions."""
    if v := s.pick(lambda v: v.real and len(v.shape) > 0):
        axes: Any = d.between(0, len(v.shape) - 1)
        if len(v.shape) > 1 and d.chance(0.3):
            axes = (axes, (axes + 1) % len(v.shape))
        s.add([], d.choice(REDUCE).format(v.name, None if d.chance(0.15) else axes))


def along(d: Drawer, s: Scope) -> None:
    """Something that works along one dimension."""
    if v := s.pick(lambda v: v.real and len(v.shape) > 0):
        s.add([], d.choice(ALONG).format(v.name, d.between(0, len(v.shape) - 1)))


def reshape(d: Drawer, s: Scope) -> None:
    """Merge or split dimensions, or transpose them."""
    v = s.pick(lambda v: len(v.shape) > 0 and v.dtype != "bool")
    if v is None:
        return
    dims = list(v.shape)
    kind = d.choice(("merge", "split", "transpose", "flat"))
    if kind == "merge" and len(dims) > 1:
        k = d.between(0, len(dims) - 2)
        dims[k : k + 2] = [dims[k] * dims[k + 1]]
    elif kind == "split":
        k = d.between(0, len(dims) - 1)
        parts = [p for p in (2, 3, 4) if dims[k] % p == 0]
        if parts:
            p = d.choice(parts)
            dims[k : k + 1] = [p, dims[k] // p] if d.chance(0.5) else [dims[k] // p, p]
    elif kind == "transpose":
        order = sorted(range(len(dims)), key=lambda _: d.rng.random())
        s.add([], f"jnp.transpose({v.name}, {tuple(order)})")
        return
    elif kind == "flat":
        dims = [math.prod(dims)]
    s.add([], f"jnp.reshape({v.name}, {tuple(dims)})")


def contract(d: Drawer, s: Scope) -> None:
    """An einsum whose factors are found by equal sizes, or a product with a new constant matrix."""
    a = s.pick(lambda v: v.real and len(v.shape) > 0)
    if a is None:
        return
    b = s.pick(lambda v: v.dtype == a.dtype and bool(set(v.shape) & set(a.shape))) if d.chance(0.6) else None
    if b is None:
        n = d.choice((4, 8, 16))
        s.add(
            [],
            f"{a.name} @ (jnp.cos(jnp.arange({a.shape[-1] * n}.0)).reshape({a.shape[-1]}, {n}) / {a.shape[-1]})",
        )
        return
    left = "abcd"[: len(a.shape)]
    size = dict(zip(left, a.shape, strict=True))
    right, free = "", iter("efgh")
    for n in b.shape:
        same = [c for c in left if size[c] == n and c not in right]
        right += d.choice(same) if same and d.chance(0.8) else next(free)
    shared = [c for c in left if c in right]
    summed = [c for c in shared if d.chance(0.6)]
    out = "".join(c for c in dict.fromkeys(left + right) if c not in summed)
    k = math.prod(size[c] for c in summed)
    s.add([], f'jnp.einsum("{left},{right}->{out}", {a.name}, {b.name}) / {math.sqrt(k):.3f}')


def join(d: Drawer, s: Scope) -> None:
    """Concatenate, stack, pad or tile."""
    a = s.pick(lambda v: v.real and len(v.shape) > 0)
    if a is None:
        return
    b = s.pick(lambda v: (v.shape, v.dtype) == (a.shape, a.dtype)) or a
    k = d.between(0, len(a.shape) - 1)
    widths = tuple((d.between(0, 2), d.between(0, 2)) if i == k else (0, 0) for i in range(len(a.shape)))
    s.add([], d.choice((
        f"jnp.concatenate([{a.name}, {b.name}], axis={k})", f"jnp.stack([{a.name}, {b.name}], axis={k})",
        f"jnp.pad({a.name}, {widths})", f"jnp.tile({a.name}, {tuple(2 if i == k else 1 for i in range(len(a.shape)))})",
        f"jnp.broadcast_to({a.name}, {(d.choice((2, 4)), *a.shape)})", f"jnp.pad({a.name}, {widths}, mode='edge')",
    )))  # fmt: skip


def index(d: Drawer, s: Scope) -> None:
    """Slices, updates, gathers and scatters, at fixed and at computed places."""
    a = s.pick(lambda v: v.real and len(v.shape) > 0)
    if a is None:
        return
    n = a.shape[0]
    i = s.pick(lambda v: v.dtype == "int32" and len(v.shape) <= 1)
    at = f"({i.name} % {n})" if i else f"jnp.arange({max(1, n // 2)}) * 2 % {n}"
    scalar = f"({i.name} % {n})" if i and i.shape == () else str(n // 2)
    k = d.between(0, len(a.shape) - 1)
    m = max(1, a.shape[k] // 2)
    s.add([], d.choice((
        f"{a.name}[{at}]", f"{a.name}[::2]", f"{a.name}[..., 1:]", f"{a.name}.at[{at}].add(0.5)",
        f"{a.name}.at[{scalar}].set(jnp.sin({a.name}[0]))", f"jnp.take({a.name}, {at}, axis=0)",
        f"lax.dynamic_slice_in_dim({a.name}, {scalar} % {a.shape[k]}, {m}, axis={k})",
        f"lax.dynamic_update_slice_in_dim({a.name}, lax.slice_in_dim({a.name}, 0, {m}, axis={k}) * 2, {scalar}, axis={k})",
        f"jnp.take_along_axis({a.name}, jnp.argsort({a.name}, axis={k}), axis={k})",
        f"jnp.split({a.name}, [{m}], axis={k})", f"lax.top_k({a.name}, {max(1, a.shape[-1] // 2)})[0]",
        f"jax.nn.one_hot({at}, {n}, dtype={a.name}.dtype) @ {a.name}", f"jnp.triu(jnp.atleast_2d({a.name}))",
        f"jax.ops.segment_sum({a.name}, jnp.arange({n}) % 4, num_segments=4)", f"{a.name}.at[{at}].max(0.25)",
        f"jnp.where(lax.broadcasted_iota('int32', {a.name}.shape, {k}) % 2 == 0, {a.name}, 0)",
    )))  # fmt: skip


def windows(d: Drawer, s: Scope) -> None:
    """A convolution over the last dimension, or a pooling window."""
    a = s.pick(lambda v: v.real and len(v.shape) == 3)
    if a is None:
        return
    n, c, _ = a.shape
    o = d.choice((2, 4, 8))
    kernel = f"jnp.cos(jnp.arange({o * c * 3}.0)).reshape({o}, {c}, 3).astype({a.name}.dtype) / {c}"
    s.add([], d.choice((
        f"lax.conv_general_dilated({a.name}, {kernel}, (1,), 'SAME')",
        f"lax.conv_general_dilated({a.name}, {kernel}, (2,), 'VALID')",
        f"lax.reduce_window({a.name}, -np.inf, lax.max, (1, 1, 2), (1, 1, 2), 'VALID')",
        f"lax.reduce_window({a.name}, 0.0, lax.add, (1, 1, 3), (1, 1, 1), 'SAME')",
    )))  # fmt: skip


def linear_algebra(d: Drawer, s: Scope) -> None:
    """Factorizations and solves of well conditioned matrices; FFT."""
    a = s.pick(lambda v: v.real and len(v.shape) >= 2 and max(v.shape) <= 8)
    if a is None:
        return
    n = a.shape[-2]
    good = (
        f"(jnp.tanh({a.name}) @ jnp.tanh({a.name}).mT / {a.shape[-1]} + jnp.eye({n}, dtype={a.name}.dtype))"
    )
    s.add([], d.choice((
        f"jnp.linalg.cholesky({good})", f"jnp.linalg.solve({good}, {a.name})", f"jnp.linalg.inv({good})",
        f"jnp.abs(jnp.fft.rfft({a.name}, axis=-1)) / 4", f"jnp.linalg.slogdet({good})[1]",
        f"jax.scipy.linalg.solve_triangular({good}, {a.name}, lower=True)",
    )))  # fmt: skip


def numbers(d: Drawer, s: Scope) -> None:
    """Integers, predicates, casts, constants and random numbers."""
    v = s.pick()
    i = s.pick(lambda v: v.dtype == "int32")
    shape = v.shape if v else (4,)
    s.add([], d.choice((
        f"jax.random.normal(jax.random.key({d.between(0, 9)}), {shape})", f"jnp.arange({d.choice((4, 8, 16))}) * 3 % 5",
        f"jax.random.bernoulli(jax.random.key({d.between(0, 9)}), 0.5, {shape})", f"jnp.ones({shape})",
        f"({v.name} > 0).astype('int32')" if v else "jnp.eye(4)", f"{i.name} * 2 + 1" if i else "jnp.linspace(0, 1, 8)",
        f"{i.name}.astype('float32') / 3" if i else "jnp.zeros((8,))", f"jnp.float32({v.name})" if v else "jnp.ones(())",
        f"jnp.sum({i.name}, axis=0)" if i else "jnp.ones((2, 4))", f"jnp.bitwise_and({i.name}, 3)" if i else "jnp.ones(4)",
    )))  # fmt: skip


def pinned(d: Drawer, s: Scope) -> None:
    """An operator pinned by `jshard.op`, a constraint, or a fused operator with a rule."""
    a = s.pick(lambda v: v.real and len(v.shape) > 0)
    if a is None:
        return
    kind = d.choice(("in", "out", "constrain", "rule", "matmul"))
    n = len(a.shape)
    if kind == "in":
        s.add(
            [],
            f"jshard.op({d.choice(('jnp.tanh', 'jnp.sin', 'jnp.cos'))}, in_strategy=({code(d.entry(a.shape))},))({a.name})",
        )
    elif kind == "out":
        s.add([], f"jshard.op(lambda t: t * 0.5, out_strategy=({code(d.entry(a.shape))},))({a.name})")
    elif kind == "constrain":
        s.add([], f"constrain({a.name}, {code(d.entry(a.shape, spec=True))})")
    elif kind == "rule":
        letters = " ".join("abcd"[:n])
        s.add([], f'jshard.op(lambda t: jnp.sin(t) + t, rule="{letters} -> {letters}")({a.name})')
    else:
        b = s.pick(lambda v: v.dtype == a.dtype and len(v.shape) == 2 and v.shape[0] == a.shape[-1])
        if b is None:
            return
        entry = code(d.entry(b.shape))
        rule = ', rule="m k, k n -> m n", reduction=("k",)' if n == 2 and d.chance(0.5) else ""
        s.add(
            [], f"jshard.op(jnp.matmul, in_strategy=(None, {entry}){rule})({a.name}, {b.name}) / {b.shape[0]}"
        )


def code(entry: Any) -> str:
    """An entry as the programs write it."""
    if type(entry) is not tuple and entry is not None:
        dims = ("U" if e is entry.UNCONSTRAINED else repr(e) for e in entry)
        return f"P({', '.join(dims)})"
    return repr(entry)


# --- blocks


def block(d: Drawer, s: Scope, like: list[Value], most: int = 5) -> Scope:
    """A nested block of a few statements with parameters like these."""
    return d.block(s, like, d.between(1, most))


def define(b: Scope, name: str, results: list[str]) -> list[str]:
    """The block as a function definition."""
    parameters = [v.name for v in b.own if v.name.startswith("a")]
    body = [*b.lines, f"return {', '.join(results)}" + ("," if len(results) > 1 else "")]
    return [f"def {name}({', '.join(parameters)}):", textwrap.indent("\n".join(body), "    ")]


def scan(d: Drawer, s: Scope) -> None:
    """`scan` or `fori_loop` over a carry, with or without stacked inputs and outputs."""
    c = s.pick()
    xs = s.pick(lambda v: v.real and len(v.shape) > 0) if d.chance(0.6) else None
    if c is None:
        return
    row = [Value_(xs, xs.shape[1:])] if xs else []
    second = [v for v in [s.pick()] if v and d.chance(0.4)]
    carry = [c, *second]
    b = block(d, s, [*carry, *row])
    f = d.name("f")
    out = [d.fitted(b, v) for v in carry]
    ys = b.own[-1].name
    parameters = [v.name for v in b.own[: len(carry) + len(row)]]
    state = ", ".join(parameters[: len(carry)]) + ","
    header = [
        f"def {f}(state, row):",
        f"    ({state}) = state",
        *([f"    {parameters[-1]} = row"] if row else []),
    ]
    body = [*b.lines, f"return ({', '.join(out)},), {ys}"]
    lines = [*header, textwrap.indent("\n".join(body), "    ")]
    init = f"({', '.join(v.name for v in carry)},)"
    over = f"{xs.name}" if xs else f"None, length={d.between(1, 4)}"
    how = d.choice(("", "", ", reverse=True", ", unroll=2"))
    s.add(lines, f"jax.tree.leaves(lax.scan({f}, {init}, {over}{how}))")


def layers(d: Drawer, s: Scope) -> None:
    """A scan over layers whose weights are cast inside, and loops in loops, with a carry that several operators read."""
    v = s.pick(lambda v: v.real and len(v.shape) > 0)
    if v is None:
        return
    n, count = v.shape[-1], d.between(2, 4)
    w = s.pick(lambda w: w.dtype == v.dtype and w.shape == (n, n))
    one = w.name if w else f"jnp.cos(jnp.arange({n * n}.0)).reshape({n}, {n}) / {n}"
    low = d.choice((*LOW, v.dtype))
    f = d.name("f")
    body = d.choice((
        f"h = jnp.tanh(h + h @ w.astype(h.dtype) / {n})", f"h = h - h @ w.astype('{low}').astype(h.dtype) / {2 * n}",
        f"h = lax.fori_loop(0, 2, lambda i, c: c * 0.5 + c @ w.astype(c.dtype) / {n}, h)",
        f"h = lax.scan(lambda c, _: (c * 0.5 + jnp.sin(c @ w.astype(c.dtype)) / {n}, None), h, None, length=2)[0]",
    ))  # fmt: skip
    kept = d.choice(
        ("None", "jnp.sum(h, axis=0)", "(h[0], jnp.max(h))", "h.T", "jnp.flip(h, 0).astype('float32')")
    )
    lines = [f"def {f}(h, w):", f"    {body}", f"    return h, {kept}", f"ws = jnp.stack([{one}] * {count})"]
    if d.chance(0.3):
        lines.append(f"{f} = jax.checkpoint({f})")
    start = f"{v.name}.astype('{low}')" if d.chance(0.5) else v.name
    which = "[0]" if kept == "None" else "[:3]"
    s.add(
        lines,
        f"[t.astype({v.name}.dtype) for t in jax.tree.leaves(lax.scan({f}, {start}, ws))]{which}",
    )


def Value_(v: Value, shape: tuple[int, ...]) -> Value:
    """The same dtype in another shape."""
    return type(v)(v.name, shape, v.dtype)


def loop(d: Drawer, s: Scope) -> None:
    """A `while_loop` with a counter beside the carry, not differentiated; or a `fori_loop`."""
    c = s.pick()
    if c is None:
        return
    b = block(d, s, [c])
    f, result = d.name("f"), d.fitted(b, c)
    if d.chance(0.5):
        lines = define(b, f, [result])
        s.add(lines, f"lax.fori_loop(0, {d.between(1, 3)}, lambda i, c: {f}(c), {c.name})")
        return
    lines = define(b, f, [result])
    test = d.choice(("c[0] < 3", "(c[0] < 4) & (jnp.sum(jnp.abs(c[1])) < 1e4)"))
    start = f"(0, lax.stop_gradient({c.name}))"
    outer = (
        f"lax.while_loop(lambda c: {test}, lambda c: (c[0] + 1, lax.stop_gradient({f}(c[1]))), {start})[1]"
    )
    s.add(lines, outer)


def branch(d: Drawer, s: Scope) -> None:
    """`cond` or `switch`, on a computed scalar."""
    v, p = s.pick(), s.pick()
    if v is None or p is None:
        return
    count = d.choice((2, 2, 3))
    lines, names = [], []
    for _ in range(count):
        b = block(d, s, [v], 4)
        names.append(d.name("f"))
        lines += define(b, names[-1], [d.fitted(b, v)])
    test = (
        f"jnp.sum({p.name}) > {d.choice((-1e9, 0.0, 1e9))}"
        if count == 2
        else f"jnp.int32(jnp.sum({p.name}) > 0) + 1"
    )
    call = "cond" if count == 2 else "switch"
    choices = ", ".join(names) if count == 2 else f"[{', '.join(names)}]"
    s.add(lines, f"lax.{call}({test}, {choices}, {v.name})")


def wrapped(d: Drawer, s: Scope) -> None:
    """A block under `checkpoint`, `jit`, a custom rule, a named scope, or under `grad` or `vjp`."""
    v = s.pick()
    if v is None:
        return
    b = block(d, s, [v])
    f, own = d.name("f"), b.own[-1]
    result = d.fitted(b, v) if d.chance(0.5) else own.name
    call = d.choice((
        f"jax.checkpoint({f})({v.name})", f"jax.jit({f})({v.name})", f"{f}({f}({v.name}))",
        f"jax.checkpoint({f}, policy=jax.checkpoint_policies.dots_saveable)({v.name})",
        f"jax.checkpoint({f}, policy=jax.checkpoint_policies.nothing_saveable)({v.name})",
        f"jax.grad(lambda t: jnp.sum(jnp.sin({f}(t))))({v.name})",
        f"jax.jvp({f}, ({v.name},), (jnp.ones_like({v.name}),))[1]",
    ))  # fmt: skip
    s.add(define(b, f, [result]), call)


def custom_rule(d: Drawer, s: Scope) -> None:
    """A function with a derivative rule of its own, which is not the true one."""
    v = s.pick()
    if v is None:
        return
    if d.chance(0.4):
        s.add([], f"tangent(jnp.sin, {d.between(2, 5)})({v.name})")
        return
    b = d.block(None, [v], d.between(1, 3))  # closes over nothing: a custom_vjp may not
    f, result = d.name("f"), d.fitted(b, v)
    s.add(
        define(b, f, [result]),
        f"custom({f}, lambda r, g: (g * {d.between(2, 5)} + jnp.sin(r[0]),))({v.name})",
    )


def mapped(d: Drawer, s: Scope) -> None:
    """A block under `vmap` or `lax.map`, along the first dimension of a value."""
    v = s.pick(lambda v: v.real and len(v.shape) > 0)
    if v is None:
        return
    axis = d.between(0, len(v.shape) - 1) if d.chance(0.3) else 0
    b = block(d, s, [Value_(v, v.shape[:axis] + v.shape[axis + 1 :])])
    f = d.name("f")
    call = f"jax.vmap({f}, in_axes={axis})({v.name})" if axis or d.chance(0.7) else f"lax.map({f}, {v.name})"
    s.add(define(b, f, [b.own[-1].name]), call)


Maker = Callable[["Drawer", "Scope"], None]
PLAIN: tuple[tuple[float, Maker], ...] = (
    (3, unary), (5, binary), (3, reduce), (3, along), (4, reshape), (5, contract), (2, join), (3, index), (1, windows),
    (0.7, linear_algebra), (1.5, numbers), (2, pinned), (1, casts), (1, chain), (1, whole_reductions), (0.7, weak),
)  # fmt: skip
BLOCKS: tuple[tuple[float, Maker], ...] = (
    (4, scan), (2, layers), (2, loop), (2.5, branch), (3, wrapped), (2, custom_rule), (2.5, mapped),
)  # fmt: skip
