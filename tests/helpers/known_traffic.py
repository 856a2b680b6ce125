"""Programs whose traffic is known: each collective alone, combined, in loops and branches; a training step.

Expected bytes are written out from shapes, or counted on the jaxpr, where no compiler has been yet. Shared by
the tests on CPU and by those on the TPU and GPU compilers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from jshard._verify import EmittedProgram


def requested_by_kind(program: EmittedProgram) -> dict[str, float]:
    """Bytes per device of a compiled program by kind, without the compilers' own widening and padding."""
    out: dict[str, float] = {}
    for c in program.collectives:
        out[c.kind] = out.get(c.kind, 0.0) + c.requested_total
    return {kind: total for kind, total in out.items() if total}


@dataclasses.dataclass(frozen=True)
class Program:
    """A function for `jax.shard_map`, global shapes, and bytes by kind for elements of one byte."""

    name: str
    fn: Callable[..., Any]
    ins: tuple[P, ...]
    outs: Any
    shapes: tuple[tuple[int, ...], ...]
    expected: dict[str, float]
    tags: tuple[int, ...] = (0,)

    def lower(self, mesh: Mesh, dtype: Any) -> Any:
        """The lowered program on a mesh with axes `x` and `y`."""
        f = jax.jit(
            jax.shard_map(self.fn, mesh=mesh, in_specs=self.ins, out_specs=self.outs, check_vma=False)
        )
        args = [
            jax.ShapeDtypeStruct(s, dtype, sharding=NamedSharding(mesh, p))
            for s, p in zip(self.shapes, self.ins, strict=True)
        ]
        return f.lower(*args)


def mesh_of(devices: Any, x: int = 2, y: int = 4) -> Mesh:
    """The first x * y devices as a mesh with Auto axes."""
    grid = np.asarray(devices, dtype=object).reshape(-1)[: x * y].reshape(x, y)
    return Mesh(grid, ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def tagged(k: int, f: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside the scope that the lowering gives collective number k."""

    def g(*args: Any) -> Any:
        with jax.named_scope(f"jshard.{k}"):
            return f(*args)

    return g


def gather(a: Any, axes: Any, dim: int = 0) -> Any:
    return lax.all_gather(a, axes, axis=dim, tiled=True)


def scatter(a: Any, axes: Any, dim: int = 0) -> Any:
    return lax.psum_scatter(a, axes, scatter_dimension=dim, tiled=True)


def programs(rows: int = 64, cols: int = 128) -> list[Program]:
    """All programs, for a mesh of 2 x 4, on arrays of `rows` x `cols` (multiples of 32)."""
    r, c, n = rows, cols, rows * cols
    ring = [(i, (i + 1) % 4) for i in range(4)]

    def loop(a: Any, w: Any) -> Any:
        def body(h: Any, wi: Any) -> Any:
            full = tagged(0, lambda v: gather(v, "y"))(wi)
            # TPU would narrow float32 operands to bfloat16, and then gather them so.
            part = tagged(1, lambda v: scatter(v, "x"))(jnp.matmul(h, full, precision="highest"))
            return jnp.tanh(tagged(2, lambda v: gather(v, "x"))(part)), None

        return lax.scan(body, a, w)[0]

    def count_down(a: Any) -> Any:
        def body(s: Any) -> Any:
            return s[0] + 1, tagged(0, lambda v: lax.psum(v, "y"))(s[1]) * 0.5

        return lax.while_loop(lambda s: s[0] < 3, body, (jnp.int32(0), a))[1]

    def nested(a: Any) -> Any:
        def inner(i: Any, v: Any) -> Any:
            return tagged(0, lambda u: lax.ppermute(u, "y", ring))(v) + 1

        return lax.scan(lambda v, _: (lax.fori_loop(0, 3, inner, v), None), a, None, length=5)[0]

    def branch(a: Any) -> Any:
        return lax.cond(a[0, 0] > 0, tagged(0, lambda v: lax.psum(v, "y")), lambda v: v * 2, a)

    def three(a: Any, b: Any, w: Any) -> Any:
        return (
            tagged(0, lambda v: lax.psum(v, "y"))(a),
            tagged(1, lambda v: lax.psum(v, "y"))(b),
            tagged(2, lambda v: gather(v, "x"))(w),
        )

    def one(name: str, fn: Any, i: P, o: P, **expected: float) -> Program:
        return Program(name, tagged(0, fn), (i,), o, ((r, c),), expected)

    xy = P("x", "y")
    return [
        one("gather_x", lambda a: gather(a, "x"), xy, P(None, "y"), all_gather=n / 8),
        one("gather_y", lambda a: gather(a, "y", 1), xy, P("x"), all_gather=3 * n / 8),
        one("gather_xy", lambda a: gather(a, ("x", "y")), P(("x", "y")), P(), all_gather=7 * n / 8),
        one("psum_y", lambda a: lax.psum(a, "y"), xy, P("x"), all_reduce=2 * n / 8 * 3 / 4),
        one("psum_xy", lambda a: lax.psum(a, ("x", "y")), xy, P(), all_reduce=2 * n / 8 * 7 / 8),
        one("scatter_y", lambda a: scatter(a, "y"), P(None, "x"), P("y", "x"), reduce_scatter=n / 2 * 3 / 4),
        one("scatter_xy", lambda a: scatter(a, ("x", "y")), P(), P(("x", "y")), reduce_scatter=n * 7 / 8),
        one(
            "all_to_all",
            lambda a: lax.all_to_all(a, "y", 1, 0, tiled=True),
            P("y", "x"),
            P(None, ("x", "y")),
            all_to_all=n / 8 * 3 / 4,
        ),
        one("permute", lambda a: lax.ppermute(a, "y", ring), P("y", "x"), P("y", "x"), permute=n / 8),
        Program(
            "scan",
            loop,
            (P(), P(None, "y")),
            P(),
            ((r, c), (5, c, c)),
            {"all_gather": 5 * (3 * c * c / 4 + n / 2), "reduce_scatter": 5 * n / 2},
            (0, 1, 2),
        ),
        Program("while", count_down, (xy,), xy, ((r, c),), {"all_reduce": 3 * 2 * n / 8 * 3 / 4}),
        Program("nested", nested, (xy,), xy, ((r, c),), {"permute": 15 * n / 8}),
        Program("branch", branch, (xy,), xy, ((r, c),), {"all_reduce": 2 * n / 8 * 3 / 4}),
        Program(
            "three",
            three,
            (xy, xy, xy),
            (P("x"), P("x"), P(None, "y")),
            ((r, c), (r // 2, c), (r, c)),
            {"all_reduce": 2 * (n + n / 2) / 8 * 3 / 4, "all_gather": n / 8},
            (0, 1, 2),
        ),
    ]


def training_step(mesh: Mesh, layers: int, batch: int, d: int, ff: int, dtype: Any) -> tuple[Any, tuple]:
    """A step of scanned layers, weights cut over x and y, activations over both; and its arguments."""

    def layer(h: Any, w: Any) -> Any:
        up, down = tagged(0, lambda v: gather(v, "x"))(w[0]), tagged(1, lambda v: gather(v, "x", 1))(w[1])
        full = tagged(2, lambda v: gather(v, "y"))(h)
        return h + tagged(3, lambda v: scatter(v, "y"))(jax.nn.gelu(full @ up) @ down), None

    def loss(ws: Any, x: Any) -> Any:
        return jnp.sum(lax.scan(layer, x, ws)[0].astype(jnp.float32) ** 2)

    def step(ws: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(ws, x)
        value = tagged(4, lambda v: lax.psum(v, ("x", "y")))(value)
        return value, jax.tree.map(lambda w, g: w - (0.01 * g).astype(w.dtype), ws, grads)

    specs = (P(None, "x", "y"), P(None, "y", "x"))
    rows = P(("x", "y"))
    f = jax.shard_map(step, mesh=mesh, in_specs=(specs, rows), out_specs=(P(), specs), check_vma=False)

    def arg(shape: tuple[int, ...], spec: P) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    weights = (arg((layers, d, ff), specs[0]), arg((layers, ff, d), specs[1]))
    return jax.jit(f, donate_argnums=0), (weights, arg((batch, d), rows))


def jaxpr_traffic(jaxpr: Any, mesh: Mesh, times: int = 1) -> dict[str, float]:
    """Bytes by kind that a jaxpr asks for, with the same formulas: an account without any compiler."""
    total: dict[str, float] = {}
    for e in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        axes = e.params.get("axes", e.params.get("axis_name"))
        axes = axes if isinstance(axes, tuple | list) else (axes,)
        size = math.prod(mesh.shape.get(a, 1) for a in axes)
        held = sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in e.invars if hasattr(v, "aval"))
        name = e.primitive.name
        part = held * (size - 1) / size
        if name.startswith("psum"):
            found = {"all_reduce": 2 * part}
        elif name.startswith("all_gather"):
            found = {"all_gather": part * size}
        elif name in ("reduce_scatter", "all_to_all"):
            found = {name: part}
        elif name == "ppermute":
            found = {"permute": held}
        else:
            found = {}
            inside = times * e.params["length"] if name == "scan" else times
            for value in e.params.values():
                for sub in value if isinstance(value, tuple | list) else (value,):
                    if hasattr(getattr(sub, "jaxpr", sub), "eqns"):
                        for kind, b in jaxpr_traffic(sub, mesh, inside).items():
                            total[kind] = total.get(kind, 0) + b
        for kind, b in found.items():
            if b:
                total[kind] = total.get(kind, 0) + b * times
    return total
