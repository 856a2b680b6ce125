"""Random JAX programs with random pins and meshes, as Python source that can be pasted and run again.

`program(rng)` draws a program equation by equation: every statement is traced on shapes before it is kept, so a
statement that JAX refuses is simply not written. Blocks nest: the bodies of `scan`, `while_loop`, `cond`,
`checkpoint`, `custom_vjp`, `vmap` and `jit` are drawn like the program itself and may read values defined outside.
The same function serves hypothesis (`programs`, whose draws it can shrink) and a plain `random.Random(seed)`.
"""

from __future__ import annotations

import dataclasses
import math
import random
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import jshard
from tests.laws.fuzz_shifts import shifted
from tests.laws.fuzz_statements import BLOCKS, PLAIN, PRELUDE


MESHES = ((8,), (8,), (4, 2), (2, 4), (2, 2, 2), (2, 2), (4,), (2,), (6,), (3, 2), (1, 8))
SIZES = (1, 2, 3, 4, 4, 4, 6, 8, 8, 8, 12, 16)
ODD_SIZES = (1, 3, 5, 7, 7, 9, 11, 13, 13, 15, 8)
SHIFTED_SIZES = (1, 3, 8, 9, 13, 15, 16, 16, 24, 32)
"""Sizes of the programs in which one statement in three is a shift."""
MOST_ELEMENTS = 1536
DTYPES = ("float32", "float64", "int32", "int64", "uint32", "bool")


@dataclasses.dataclass(frozen=True)
class Value:
    """A variable of the program."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def real(self) -> bool:
        """Whether it has a gradient."""
        return self.dtype.startswith("float")


@dataclasses.dataclass(frozen=True)
class Fuzzed:
    """A program, its arguments and its wishes: everything that a failure must print."""

    source: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    mesh: tuple[int, ...]
    in_strategy: tuple[Any, ...]
    out_strategy: tuple[Any, ...] | None
    parameter_plan: dict[str, Any]
    level: int
    search: str
    x64: bool
    mode: str

    def __str__(self) -> str:
        wishes = [
            f"mesh={self.mesh}, level={self.level}, search={self.search!r}, x64={self.x64}, mode={self.mode!r}"
        ]
        wishes += [f"{k}={getattr(self, k)}" for k in ("in_strategy", "out_strategy", "parameter_plan")]
        arguments = [f"{v.name}: {v.dtype}{list(v.shape)}" for v in self.inputs]
        return "\n".join([self.source, *(f"# {line}" for line in (", ".join(arguments), *wishes))])

    def function(self, plain: bool, mesh: Any = None) -> Callable[..., Any]:
        """The program; in its `plain` form constraints that name mesh axes do nothing."""
        space = namespace(plain, mesh)
        exec(compile(self.source, "<fuzzed program>", "exec"), space)
        return space["program"]

    def arguments(self) -> list[np.ndarray]:
        """Values of the inputs, the same every time."""
        rng = np.random.default_rng(7)
        return [array(v, rng) for v in self.inputs]


def array(v: Value, rng: np.random.Generator) -> np.ndarray:
    """Random normal numbers, or small integers."""
    if v.real:
        return np.asarray(rng.normal(size=v.shape), v.dtype)
    return np.asarray(rng.integers(0, 4, v.shape), v.dtype)


def axis_names(sizes: Sequence[int]) -> tuple[str, ...]:
    """x, y, z as far as needed."""
    return tuple("xyz"[: len(sizes)])


def namespace(plain: bool, mesh: Any = None) -> dict[str, Any]:
    """What the source of a program may name."""

    def constrain(x: Any, spec: Any) -> Any:
        if len(spec) > x.ndim:  # JAX refuses it; the plain program, which has no mesh, would not
            raise ValueError(f"{spec} constrains a value of {x.ndim} dimensions")
        return x if plain else lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, spec))

    space: dict[str, Any] = dict(jax=jax, jnp=jnp, lax=lax, np=np, jshard=jshard, P=P, U=P.UNCONSTRAINED)
    space["constrain"] = constrain
    exec(PRELUDE, space)
    return space


class Scope:
    """The block being written: its lines, what it made, and the block around it."""

    def __init__(self, draw: Drawer, values: Sequence[Value], parent: Scope | None):
        self.draw, self.parent = draw, parent
        self.own: list[Value] = list(values)
        self.lines: list[str] = []
        self.unused: set[str] = {v.name for v in values}

    @property
    def depth(self) -> int:
        """How many blocks lie around this one."""
        return 0 if self.parent is None else 1 + self.parent.depth

    def visible(self) -> list[Value]:
        """Values that may be read here."""
        return (self.parent.visible() if self.parent is not None else []) + self.own

    def pick(self, test: Callable[[Value], bool] = lambda v: v.real) -> Value | None:
        """A value that passes the test: rather one nobody has read yet, rather a recent one."""
        options = [v for v in self.visible() if test(v)]
        if not options:
            return None
        fresh = [v for v in options if v.name in self.unused]
        few = fresh or options[-4:] if self.draw.chance(0.6) else options
        return self.draw.choice(few)

    def add(self, lines: Sequence[str], expression: str) -> list[Value]:
        """Write `names = expression` after `lines`; nothing when JAX refuses it or it grows too large."""
        found = self.draw.shapes(self, lines, expression)
        if found is None:
            return []
        out, count = found
        made = [Value(self.draw.name("v"), tuple(o.shape), str(o.dtype)) for o in out]
        if not made or any(
            math.prod(v.shape) > MOST_ELEMENTS or 0 in v.shape or len(v.shape) > 4 for v in made
        ):
            return []
        if any(v.dtype not in DTYPES for v in made):
            return []
        self.draw.left -= count
        names = ", ".join(v.name for v in made)
        self.lines += [*lines, f"{names} = {expression}" if len(made) == 1 else f"({names}) = {expression}"]
        text = "\n".join([*lines, expression])
        scope: Scope | None = self
        while scope is not None:
            scope.unused -= set(re.findall(r"\w+", text))
            scope = scope.parent
        self.own += made
        self.unused |= {v.name for v in made}
        return made


class Drawer:
    """The source of choices for one program; every method takes its randomness from `rng`."""

    def __init__(
        self, rng: random.Random, mesh: tuple[int, ...], dtype: str, budget: int, sizes: Sequence[int]
    ):
        self.rng, self.mesh, self.dtype, self.left, self.sizes = rng, mesh, dtype, budget, sizes
        self.count = 0
        self.space = namespace(True)

    def name(self, letter: str) -> str:
        """A name that the program does not use yet."""
        self.count += 1
        return f"{letter}{self.count}"

    def chance(self, p: float) -> bool:
        """True with probability `p`."""
        return self.rng.random() < p

    def choice(self, options: Sequence[Any]) -> Any:
        """One of several."""
        return options[self.rng.randrange(len(options))]

    def between(self, low: int, high: int) -> int:
        """An integer, both ends included."""
        return self.rng.randint(low, high)

    def shape(self, rank: int) -> tuple[int, ...]:
        """A random shape."""
        return tuple(self.choice(self.sizes) for _ in range(rank))

    def shapes(self, scope: Scope, lines: Sequence[str], expression: str) -> tuple[list[Any], int] | None:
        """Shapes of an expression and its number of equations; None when JAX refuses it."""
        known = {v.name: v for v in scope.visible()}
        text = "\n".join([*lines, expression])
        used = [known[n] for n in dict.fromkeys(re.findall(r"\w+", text)) if n in known]
        body = textwrap.indent("\n".join([*lines, f"return {expression}"]), "    ")
        source = f"def probe({', '.join(v.name for v in used)}):\n{body}"
        space = dict(self.space)
        try:
            exec(source, space)
            with jax.enable_x64(self.dtype == "float64"):
                avals = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in used]
                jaxpr, out = jax.make_jaxpr(space["probe"], return_shape=True)(*avals)
        except (TypeError, ValueError, IndexError, NotImplementedError, ZeroDivisionError):
            return None
        return jax.tree.leaves(out), count_equations(jaxpr)

    def cut(self, shape: Sequence[int], free: float = 0.25) -> tuple[tuple[str, ...] | None, ...]:
        """Mesh axes for each dimension such that every cut divides; None leaves a dimension open."""
        sizes = list(shape)
        dims: list[list[str] | None] = [[] for _ in shape]
        names = dict(zip(axis_names(self.mesh), self.mesh, strict=True))
        for n, size in names.items():
            able = [d for d, s in enumerate(sizes) if s % size == 0 and s > 0]
            if able and self.chance(0.6):
                d = self.choice(able)
                sizes[d] //= size
                dims[d].append(n)  # type: ignore[union-attr]
        return tuple(None if self.chance(free) else tuple(d or ()) for d in dims)

    def entry(self, shape: Sequence[int], spec: bool | None = None) -> Any:
        """A random wish for a tensor: pieces or mesh axes."""
        cut = self.cut(shape)
        names = dict(zip(axis_names(self.mesh), self.mesh, strict=True))
        if spec if spec is not None else self.chance(0.3):
            dims = (P.UNCONSTRAINED if d is None else d if len(d) > 1 else d[0] if d else None for d in cut)
            return P(*dims)
        entry = tuple(None if d is None else math.prod(names[a] for a in d) for d in cut)
        return entry if entry == () or any(e is not None for e in entry) else None

    def block(self, parent: Scope, shapes: Sequence[Value], statements: int) -> Scope:
        """A new block inside `parent` whose parameters are like `shapes`, filled with some statements."""
        scope = Scope(self, [Value(self.name("a"), v.shape, v.dtype) for v in shapes], parent)
        self.fill(scope, statements)
        return scope

    def fill(self, scope: Scope, statements: int) -> None:
        """Write up to that many statements."""
        for _ in range(statements):
            if self.left <= 0:
                return
            if self.sizes is SHIFTED_SIZES and self.chance(0.35):
                shifted(self, scope)
                continue
            nested = scope.depth < 3 and self.chance(0.3 if scope.depth == 0 else 0.15)
            weights, makers = zip(*(BLOCKS if nested else PLAIN), strict=True)
            (maker,) = self.rng.choices(makers, weights)
            maker(self, scope)

    def fitted(self, scope: Scope, like: Value) -> str:
        """Something made in a block with the shape and dtype of `like`."""
        made = [v for v in scope.own if not v.name.startswith("a")]
        same = [v for v in made if (v.shape, v.dtype) == (like.shape, like.dtype)]
        if same:
            return self.choice(same[-2:]).name
        last = made[-1] if made else scope.visible()[-1]
        spread = f"fit({last.name}, {like.shape}, {like.dtype!r})"
        before = [v for v in scope.own if (v.shape, v.dtype) == (like.shape, like.dtype)]
        return f"{before[0].name} / 2 + {spread}" if before and like.real else spread


def count_equations(jaxpr: Any) -> int:
    """Equations that compute something, inner programs included."""
    total = 0
    for eqn in jaxpr.eqns:
        inner = [
            p
            for p in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns"))
            if hasattr(p, "eqns")
        ]
        total += sum(count_equations(getattr(p, "jaxpr", p)) for p in inner) if inner else 1
    return total


def program(rng: random.Random, *, low: int = 5, high: int = 40, sizes: Sequence[int] = SIZES) -> Fuzzed:
    """A program of about `low` to `high` operators."""
    mesh = MESHES[rng.randrange(len(MESHES))]
    x64 = rng.random() < 0.3
    draw = Drawer(rng, mesh, "float64" if x64 else "float32", rng.randint(low + 3, high), sizes)
    inputs = [
        Value(f"x{i}", draw.shape(draw.between(0 if i else 1, 3)), draw.dtype)
        for i in range(draw.between(1, 3))
    ]
    inputs += [Value(f"w{i}", draw.shape(draw.between(1, 2)), draw.dtype) for i in range(draw.between(0, 2))]
    if draw.chance(0.4):
        inputs.append(Value("i0", draw.shape(draw.between(0, 2)), "int32"))
    scope = Scope(draw, inputs, None)
    for _ in range(60):
        if draw.left <= 0:
            break
        draw.fill(scope, 1)
    made = scope.own[len(inputs) :] or inputs[:1]
    fresh = [v for v in made if v.name in scope.unused]
    outputs = list(dict.fromkeys([made[-1], *fresh[-4:]]))
    body = textwrap.indent(
        "\n".join([*scope.lines, f"return ({', '.join(v.name for v in outputs)},)"]), "    "
    )
    source = f"def program({', '.join(v.name for v in inputs)}):\n{body}\n"
    plan = {v.name: draw.entry(v.shape) for v in inputs if v.name[0] == "w" and draw.chance(0.5)}
    ins = tuple(draw.entry(v.shape) if v.name[0] != "w" and draw.chance(0.5) else None for v in inputs)
    outs = tuple(draw.entry(v.shape) if draw.chance(0.5) else None for v in outputs)
    return Fuzzed(
        source, tuple(inputs), tuple(outputs), mesh, ins, outs if draw.chance(0.4) else None,
        {k: v for k, v in plan.items() if v is not None}, draw.choice((0, 0, 1, 2)),
        "propagation" if draw.chance(0.1) else "optimal", x64, draw.choice(("inside", "inside", "outside", "direct")),
    )  # fmt: skip


def numbered_program(seed: int, n: int, high: int = 40, sizes: Sequence[int] = SIZES) -> Fuzzed:
    """Program `n` of a seed: that of every sweep, so that a number in a report is enough to find it again."""
    return program(random.Random(seed * 1_000_003 + n), high=high, sizes=sizes)


@st.composite
def programs(draw: Any, low: int = 5, high: int = 40) -> Fuzzed:
    """The hypothesis strategy: the same generator, with hypothesis as its source of choices."""
    return program(draw(st.randoms(use_true_random=False)), low=low, high=high)
