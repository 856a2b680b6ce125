"""A program in which dimensions of sizes that no cut divides are padded to sizes that divide.

Problem.  A vocabulary of 50,257 is cut by no number of devices, so every tensor that carries it stays whole.

Idea.  The jaxpr is rewritten: a class of dimensions (`padding_classes.py`) has a longer size, arguments are padded with
zeros where they are first read so, results are sliced back, and the operators between them run on the padded arrays. What
a reduction would add of the padding is masked by its neutral element; an index that lies beyond the true size is
clipped or dropped as before. So the new program computes the same values, and has the same arguments and results.
All else, from candidates to collectives, is that of any program whose sizes divide.

>>> import jax, jax.numpy as jnp
>>> closed = jax.make_jaxpr(lambda x, w: jnp.sum(x @ w, 1))(jnp.ones((4, 6)), jnp.ones((6, 7)))
>>> padded = padded_program(closed, {(7, 0): 8})
>>> for eqn in padded.jaxpr.eqns: print(eqn.primitive, *(v.aval.shape for v in eqn.outvars))
pad_tail (6, 8)
dot_general (4, 8)
mask_tail (4, 8)
reduce_sum (4,)

Calls with a derivative rule of their own are written out where they carry padding: the result is a program to run, not
one to differentiate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Aval, ClosedJaxpr, Jaxpr, JaxprAtom, JaxprEqn
from jshard._plan.padded_shifts import Move, moved_dims, run_cropped, run_joined, run_moved, shifted_dims
from jshard._plan.padding_classes import (
    EquationFactor,
    PaddingClasses,
    inner_bodies,
    shape_of,
    stacked_from,
)
from jshard._program.equation_bodies import with_bodies
from jshard._program.inlining import fresh, substituted
from jshard._program.loop_invariants import body_of
from jshard._program.tail_primitives import DIAGONAL, Fill, mask_tail_p, pad_tail_p
from jshard._rules.padding import LINEAR_SOLVE, IndexLimit, keeps_zero, padded_params
from jshard._rules.registry import op_view
from jshard._rules.separate_systems import SeparateSystems


Sizes = Mapping[tuple[int, int], int]
"""The classes that are padded, as (true size, number among the classes of this size) -> the size they get."""

_WRITTEN_OUT = frozenset(("custom_jvp_call", "custom_vjp_call"))
_Dims = frozenset[int]


def padded_program(closed: ClosedJaxpr, sizes: Sizes, classes: PaddingClasses | None = None) -> ClosedJaxpr:
    """The closed jaxpr with some classes padded; `classes` are those of its sizes, if they are known."""
    classes = classes or PaddingClasses(closed, frozenset(n for n, _ in sizes))
    writer = _Writer(classes, sizes)
    opened, _ = compat.open_jaxpr(closed)
    new = writer.body(opened, outermost=True)
    return new if opened is closed else closed.replace(jaxpr=new)  # pyright: ignore[reportReturnType]


@dataclasses.dataclass(eq=False)
class _Value:
    """A variable of the old program: its forms in the new one, by which of its dimensions are padded.

    `origin`: the dimensions that are padded in the form in which it was computed; `tail`: of these, what is known to
    stand in the padding. A form that is made from this one has zeros in its own padding.
    """

    forms: dict[_Dims, JaxprAtom]
    origin: _Dims
    tail: dict[int, Fill]

    def known(self, dim: int) -> Fill | None:
        """What stands in the padding of a dimension; None if that is not known."""
        return self.tail.get(dim) if dim in self.origin else 0


_Env = dict[JaxprAtom, _Value]


class _Writer:
    """Writes the new jaxprs; one for a program, since a body that is called twice is written once."""

    def __init__(self, classes: PaddingClasses, sizes: Sizes):
        self.classes, self.sizes = classes, sizes
        self.bodies: dict[int, Jaxpr] = {}  # by the id of the old one
        self.changes: dict[int, bool] = {}
        self.eqns: list[JaxprEqn] = []
        self.arguments: Sequence[JaxprAtom] = ()  # of the outermost body
        self.results: Sequence[JaxprAtom] = ()
        self.written: dict[Hashable, JaxprAtom] = {}  # masks and limits of the body that is being written
        self.conversions: dict[JaxprAtom, JaxprEqn] = {}  # of padded values, by result

    def padded(self, v: JaxprAtom, dim: int) -> int | None:
        """The new size of a dimension of the old program's variable; None where it keeps its own."""
        if compat.is_literal(v):
            return None
        of = self.classes.class_of(v, dim)
        return None if of is None else self.sizes.get((of.size, of.number))

    def natural(self, v: JaxprAtom) -> _Dims:
        """The dimensions of a variable whose classes are padded: those it has where it enters or leaves a body."""
        if compat.is_literal(v):
            return frozenset()
        return frozenset(d for d in range(len(shape_of(v))) if self.padded(v, d) is not None)

    def new(self, v: JaxprAtom, dims: _Dims) -> JaxprAtom:
        """A new variable for a form."""
        shape = tuple((self.padded(v, d) or n) if d in dims else n for d, n in enumerate(shape_of(v)))
        return compat.VARIABLE(_with_shape(v.aval, shape))

    # -- bodies --------------------------------------------------------------------------------------------------

    def body(self, jaxpr: Jaxpr, outermost: bool = False) -> Jaxpr:
        """The new open jaxpr of a body; the outermost one has arguments and results of their true sizes."""
        if id(jaxpr) in self.bodies:
            return self.bodies[id(jaxpr)]
        outer, self.eqns = self.eqns, []
        outer_written, self.written = self.written, {}
        if outermost:
            self.arguments, self.results = jaxpr.invars, jaxpr.outvars
        env: _Env = {v: _plain(v) for v in jaxpr.constvars}
        invars = []
        for v in jaxpr.invars:
            dims = frozenset() if outermost else self.natural(v)
            atom = self.new(v, dims) if dims else v
            env[v] = _Value({dims: atom}, dims, {})
            invars.append(atom)
        self.equations(jaxpr, env, copied=False)
        last = jaxpr.eqns[-1] if jaxpr.eqns else None
        outvars = []
        for v in jaxpr.outvars:
            dims = frozenset() if outermost else self.natural(v)
            outvars.append(v if compat.is_literal(v) else self.form(v, dims, env, last))
        new = jaxpr.replace(invars=invars, outvars=outvars, eqns=self.eqns)
        self.eqns, self.written = outer, outer_written
        self.bodies[id(jaxpr)] = new
        return new

    def equations(self, jaxpr: Jaxpr, env: _Env, copied: bool) -> None:
        """Write the equations of a jaxpr; `copied`: with variables of their own, for a body that is written out."""
        for eqn in jaxpr.eqns:
            bodies = inner_bodies(eqn)
            if not bodies:
                self.leaf(eqn, env, copied)
            elif eqn.primitive.name in _WRITTEN_OUT and any(self.needs(b.jaxpr) for b in bodies):
                self.written_out(eqn, env)
            else:
                self.call(eqn, env, copied)

    def written_out(self, eqn: JaxprEqn, env: _Env) -> None:
        """The equations of a call's body in its place."""
        called = body_of(eqn)
        assert called is not None
        body, consts = compat.open_jaxpr(called)
        assert not consts and not body.constvars, "calls with derivative rules have no constants"
        inner: _Env = {}
        for v, operand in zip(body.invars, eqn.invars, strict=True):
            inner[v] = _plain(operand) if compat.is_literal(operand) else env[operand]
        self.equations(body, inner, copied=True)
        for v, result in zip(eqn.outvars, body.outvars, strict=True):
            env[v] = _plain(result) if compat.is_literal(result) else inner[result]

    def call(self, eqn: JaxprEqn, env: _Env, copied: bool) -> None:
        """A call, loop or branch around its new bodies."""
        new = with_bodies(eqn, lambda _, jaxpr: self.body(jaxpr) if self.needs(jaxpr) else jaxpr)
        entering = {id(outer) for b in inner_bodies(eqn) for outer, _, _ in b.bound}
        stacked, stacked_results = stacked_from(eqn)

        def dims_of(v: JaxprAtom, is_stacked: bool) -> _Dims:
            if id(v) not in entering:
                return frozenset()
            return self.natural(v) - {0} if is_stacked else self.natural(v)  # the trip count is what it was

        invars = [self.form(v, dims_of(v, i >= stacked), env, eqn) for i, v in enumerate(eqn.invars)]
        dims = [dims_of(v, i >= stacked_results) for i, v in enumerate(eqn.outvars)]
        outvars = [self.new(v, d) if d or copied else v for v, d in zip(eqn.outvars, dims, strict=True)]
        self.eqns.append(new.replace(invars=invars, outvars=outvars))
        for v, d, atom in zip(eqn.outvars, dims, outvars, strict=True):
            env[v] = _Value({d: atom}, d, {})

    def needs(self, jaxpr: Jaxpr) -> bool:
        """Whether any value in a body is padded."""
        if id(jaxpr) not in self.changes:
            self.changes[id(jaxpr)] = any(map(self.natural, (*jaxpr.invars, *jaxpr.outvars))) or any(
                any(map(self.natural, (*e.invars, *e.outvars)))
                or any(self.needs(b.jaxpr) for b in inner_bodies(e))
                for e in jaxpr.eqns
            )
        return self.changes[id(jaxpr)]

    # -- equations without a body --------------------------------------------------------------------------------

    def leaf(self, eqn: JaxprEqn, env: _Env, copied: bool) -> None:
        """One equation, on padded operands along the factors that may be padded."""
        if self.at_boundary(eqn, env):
            return
        active = [(f, n) for f in self.classes.factors(eqn) if (n := self.size_of(eqn, f)) is not None]
        in_dims: list[dict[int, int]] = [{} for _ in eqn.invars]
        out_dims: list[dict[int, int]] = [{} for _ in eqn.outvars]
        for f, n in active:
            for i, d in f.operands:
                in_dims[i][d] = n
            for i, d in f.results:
                out_dims[i][d] = n
        moves, joined = moved_dims(eqn, self.padded), run_joined(eqn, self.padded)
        if joined is not None:
            (d,) = shifted_dims(eqn)
            for dims, v in zip((*in_dims, *out_dims), (*eqn.invars, *eqn.outvars), strict=True):
                if (n := self.padded(v, d)) is not None:
                    dims[d] = n
        for move in moves:
            for side, v in ((in_dims, eqn.invars[0]), (out_dims, eqn.outvars[0])):
                if (n := self.padded(v, move.dim)) is not None:
                    side[0][move.dim] = n
        operands = [
            self.form(v, frozenset(dims), env, eqn) for v, dims in zip(eqn.invars, in_dims, strict=True)
        ]
        if joined is not None:
            (result,) = self.traced(joined, operands, eqn)
            env[eqn.outvars[0]] = _Value({frozenset(out_dims[0]): result}, frozenset(out_dims[0]), {})
            return
        if moves:
            self.moved(eqn, moves, operands, frozenset(out_dims[0]), env)
            return
        if not active:
            outvars = fresh(eqn.outvars) if copied else list(eqn.outvars)
            changed = copied or any(a is not b for a, b in zip(operands, eqn.invars, strict=True))
            self.eqns.append(eqn.replace(invars=operands, outvars=outvars) if changed else eqn)
            for old, atom in zip(eqn.outvars, outvars, strict=True):
                env[old] = _Value({frozenset(): atom}, frozenset(), {})
            return
        tails: dict[tuple[int, int], Fill | None] = {
            (i, d): env[eqn.invars[i]].known(d) if eqn.invars[i] in env else None
            for f, _ in active for i, d in f.operands
        }  # fmt: skip
        for f, n in active:
            operands = self.prepared(eqn, f, n, operands, tails)
        results = [
            compat.VARIABLE(_with_shape(v.aval, tuple(dims.get(d, s) for d, s in enumerate(v.aval.shape))))
            for v, dims in zip(eqn.outvars, out_dims, strict=True)
        ]
        view = op_view(eqn)
        params = padded_params(view, [shape_of(v) for v in operands], [shape_of(v) for v in results])
        if eqn.primitive.name == LINEAR_SOLVE:
            results = self.traced(SeparateSystems(view).solve, operands, eqn)
        elif (cropped := run_cropped(eqn, params, operands)) is not None:
            results = self.traced(cropped, operands, eqn)
        else:
            self.eqns.append(eqn.replace(invars=operands, outvars=results, params=params))
        most = [f.padding.most for f, _ in active if f.padding.most is not None]
        if most:
            results = self.traced(lambda *counts: [jnp.minimum(x, most[0]) for x in counts], results, eqn)
        if eqn.primitive.name == "convert_element_type":
            self.conversions[results[0]] = self.eqns[-1]
        for k, (v, atom) in enumerate(zip(eqn.outvars, results, strict=True)):
            dims = frozenset(out_dims[k])
            zero = [
                d
                for f, _ in active
                for i, d in f.results
                if i == k and keeps_zero(view, _zeros(eqn, f, tails))
            ]
            env[v] = _Value({dims: atom}, dims, dict.fromkeys(zero, 0))

    def moved(
        self, eqn: JaxprEqn, moves: Sequence[Move], operands: Sequence[JaxprAtom], dims: _Dims, env: _Env
    ) -> None:
        """A slice or padding that moves elements along padded dimensions; `dims` of its result are padded."""
        x, *fill = operands
        for move in moves:
            if move.mask is not None and env[eqn.invars[0]].known(move.dim) != move.mask:
                x = self.masked(x, move.dim, shape_of(eqn.invars[0])[move.dim], move.mask, eqn)
        (result,) = self.traced(run_moved(eqn, moves, shape_of(x)), [x, *fill], eqn)
        env[eqn.outvars[0]] = _Value({dims: result}, dims, {})

    def at_boundary(self, eqn: JaxprEqn, env: _Env) -> bool:
        """Whether an equation crops an argument, or grows a result, that has at rest the padding of its class.

        It is left out then; what is in the padding of an argument is not known, that of a result is zero.
        """
        if is_crop(eqn, self.arguments):
            whole, v = eqn.invars[0], eqn.outvars[0]
            dims = _longer(shape_of(whole), shape_of(v))
            if not dims or any(self.padded(v, d) != shape_of(whole)[d] for d in dims):
                return False
            env[v] = _Value({dims: env[whole].forms[frozenset()]}, dims, {})
            return True
        if eqn.primitive.name != "pad" or not any(eqn.outvars[0] is r for r in self.results):
            return False
        v, (part, of) = eqn.outvars[0], eqn.invars
        tails = all(low == 0 and step == 0 and high >= 0 for low, high, step in eqn.params["padding_config"])
        if not tails or part not in env or not compat.is_literal(of) or bool(np.any(of.val)):
            return False
        dims = _longer(shape_of(v), shape_of(part))
        if any(self.padded(part, d) != shape_of(v)[d] for d in dims):
            return False
        atom = self.form(part, dims, env, eqn)
        for d in sorted(dims):
            if env[part].known(d) != 0:
                atom = self.masked(atom, d, shape_of(part)[d], 0, eqn)
        env[v] = _Value({frozenset(): atom}, frozenset(), {})
        return True

    def size_of(self, eqn: JaxprEqn, factor: EquationFactor) -> int | None:
        """The new size of a factor of an equation; None where it keeps its own."""
        places = [(eqn.outvars[i], d) for i, d in factor.results] + [
            (eqn.invars[i], d) for i, d in factor.operands if not compat.is_literal(eqn.invars[i])
        ]
        return self.padded(*places[0]) if places else None

    def prepared(
        self, eqn: JaxprEqn, f: EquationFactor, size: int, operands: list[JaxprAtom],
        tails: dict[tuple[int, int], Fill | None],
    ) -> list[JaxprAtom]:  # fmt: skip
        """The operands with what the padding of a factor must hold, and with indices that do not reach it."""
        operands = list(operands)
        for i, value in f.padding.masks:
            for d in [d for j, d in f.operands if j == i]:
                known = tails[i, d]
                if known is None or known != value:
                    length = shape_of(eqn.invars[i])[d]
                    operands[i] = self.masked(operands[i], d, length, value, eqn)
        limit = f.padding.index
        if limit is not None:
            length = next(shape_of(eqn.invars[i])[d] for i, d in f.operands)
            index = operands[limit.operand]
            fixed = limited(index.aval, limit, length, size)
            # By identity: a literal has no hash, and variables and literals of this body outlive the dictionary.
            key = id(index), limit.column, limit.dropped, length, size
            if fixed is not None and key not in self.written:
                (self.written[key],) = self.traced(fixed, [index], eqn)
            operands[limit.operand] = self.written.get(key, index)
        return operands

    # -- forms ---------------------------------------------------------------------------------------------------

    def form(self, v: JaxprAtom, dims: _Dims, env: _Env, like: JaxprEqn | None) -> JaxprAtom:
        """A variable with exactly these dimensions padded."""
        if compat.is_literal(v):
            return v
        value = env[v]
        if dims in value.forms:
            return value.forms[dims]
        assert like is not None, "a body without equations only passes values on"
        atom = value.forms[value.origin]
        size = {d: self.padded(v, d) or shape_of(atom)[d] for d in range(len(shape_of(v)))}
        if value.origin - dims:
            limits = tuple(
                n if d in value.origin - dims else m
                for d, (n, m) in enumerate(zip(shape_of(v), shape_of(atom), strict=True))
            )
            (atom,) = self.traced(lambda x: [lax.slice(x, (0,) * len(limits), limits)], [atom], like)
        for d in sorted(dims - value.origin):
            atom = self.bound(pad_tail_p, atom, like, dim=d, size=size[d])
        value.forms[dims] = atom
        return atom

    def masked(self, atom: JaxprAtom, dim: int, length: int, value: Fill, like: JaxprEqn) -> JaxprAtom:
        """A padded value with another one in the padding.

        That of a conversion to a wider type is put in before the conversion, where it is the same: XLA for TPUs then
        computes the maximum of a product's rows in the product's kernel, in the narrow type.
        """
        key = atom, dim, length, type(value), value
        if key in self.written:
            return self.written[key]
        conversion = self.conversions.get(atom)
        if conversion is not None and widens(conversion, value):
            narrow = self.masked(conversion.invars[0], dim, length, value, like)
            result = compat.VARIABLE(atom.aval)
            self.eqns.append(conversion.replace(invars=[narrow], outvars=[result]))
        else:
            result = self.bound(mask_tail_p, atom, like, dim=dim, length=length, value=value)
        self.written[key] = result
        return result

    def bound(self, primitive, atom: JaxprAtom, like: JaxprEqn, **params: Fill) -> JaxprAtom:
        """The result of one of the primitives of padding."""
        shape = list(shape_of(atom))
        if "size" in params:
            shape[int(params["dim"])] = int(params["size"])
        result = compat.VARIABLE(_with_shape(atom.aval, tuple(shape)))
        self.eqns.append(compat.new_equation(primitive, [atom], [result], params, (), like))
        return result

    def traced(
        self, fn: Callable[..., Sequence[jax.Array]], operands: Sequence[JaxprAtom], like: JaxprEqn
    ) -> list[JaxprAtom]:
        """The results of a function, as equations."""
        avals = [jax.ShapeDtypeStruct(shape_of(v), v.aval.dtype) for v in operands]
        opened, consts = compat.open_jaxpr(compat.make_jaxpr(fn, *avals))
        assert not consts
        env = dict(zip(opened.invars, operands, strict=True))
        for eqn in opened.eqns:
            results = fresh(eqn.outvars)
            self.eqns.append(
                eqn.replace(
                    invars=substituted(eqn.invars, env), outvars=results, source_info=like.source_info
                )
            )
            env.update(zip(eqn.outvars, results, strict=True))
        return substituted(opened.outvars, env)


def is_crop(eqn: JaxprEqn, arguments: Sequence[JaxprAtom]) -> bool:
    """Whether an equation takes the beginning of an argument along some dimensions."""
    if eqn.primitive.name != "slice" or not any(eqn.invars[0] is v for v in arguments):
        return False
    return not any(eqn.params["start_indices"]) and set(eqn.params["strides"] or (1,)) == {1}


def widens(conversion: JaxprEqn, value: Fill) -> bool:
    """Whether a conversion is to a float of more bytes, and gives a value when it is given that value.

    >>> eqn = jax.make_jaxpr(lambda x: x.astype("float32"))(jnp.ones(3, "bfloat16")).jaxpr.eqns[0]
    >>> widens(eqn, -np.inf), widens(eqn, 0.1)
    (True, False)
    """
    narrow, wide = (v.aval.dtype for v in (conversion.invars[0], conversion.outvars[0]))
    floats = all(jnp.issubdtype(t, jnp.floating) for t in (narrow, wide))
    if not floats or value == DIAGONAL or compat.itemsize(narrow) >= compat.itemsize(wide):
        return False
    return bool(np.asarray(value, narrow).astype(wide) == np.asarray(value, wide))


def _longer(shape: Sequence[int], other: Sequence[int]) -> _Dims:
    """The dimensions in which the first shape is longer."""
    return frozenset(d for d, (n, m) in enumerate(zip(shape, other, strict=True)) if n > m)


def _plain(v: JaxprAtom) -> _Value:
    return _Value({frozenset(): v}, frozenset(), {})


def _with_shape(aval: Aval, shape: tuple[int, ...]) -> Aval:
    return aval if tuple(aval.shape) == shape else aval.update(shape=shape)


def _zeros(eqn: JaxprEqn, f: EquationFactor, tails: Mapping[tuple[int, int], Fill | None]) -> list[bool]:
    """For each operand whether its padding along a factor is zero; False for scalars."""
    of = dict(f.operands)
    return [i in of and tails.get((i, of[i])) == 0 for i in range(len(eqn.invars))]


def limited(
    indices: Aval, limit: IndexLimit, length: int, size: int
) -> Callable[[jax.Array], list[jax.Array]] | None:
    """A function that keeps indices below the true length of a dimension; None where their dtype does."""
    last = int(jnp.iinfo(indices.dtype).max)
    if last < length:
        return None
    signed = jnp.issubdtype(indices.dtype, jnp.signedinteger)
    beyond = -1 if signed else min(last, size)

    def fixed(x: jax.Array) -> list[jax.Array]:
        if limit.dropped:
            y = jnp.where(x >= length, jnp.asarray(beyond, x.dtype), x)
        else:
            y = jnp.minimum(x, jnp.asarray(length - 1, x.dtype))
        if limit.column is None or x.shape[-1] == 1:
            return [y]
        column = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
        return [jnp.where(column == limit.column, y, x)]

    return fixed
