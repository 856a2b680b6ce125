"""Layers that a Python loop has unrolled, written as loops over stacked layers, so that a pipeline can deal them to stages.

Problem.  Most models apply their layers in a Python loop, each with parameters of its own. A pipeline needs one loop, and
the parameters of all layers in one array that is cut over the stages; the user's parameters keep their names and shapes.

Method.  Every sequence of alike layers (`alike_layers.py`) becomes one `scan`: what a layer has of its own is stacked before
it, what is read of it afterwards is stacked by it. The loop of the backward pass goes over the layers in reverse and reads
the stacks of the forward loop as they are: stacks are compared by the values in them. What is read of single layers, such
as the gradient that updates one parameter, is a slice of a stack. Each equation computes what it computed.

>>> import jax, jax.numpy as jnp
>>> from jax.extend.core import jaxpr_as_fun
>>> def loss(ws, x):
...     for w in ws:
...         x = jnp.sin(x @ w)
...     return jnp.sum(x)
>>> ws, x = [jnp.eye(2) / (k + 1) for k in range(4)], jnp.ones((3, 2))
>>> closed = jax.make_jaxpr(jax.grad(loss))(ws, x)
>>> stacked = with_layers_stacked(closed, lambda v: v.aval.shape == x.shape)
>>> [(e.params["length"], e.params["reverse"]) for e in stacked.closed.jaxpr.eqns if e.primitive.name == "scan"]
[(4, False), (4, True)]
>>> wanted = jax.grad(loss)(ws, x)
>>> all(bool(jnp.allclose(a, b)) for a, b in zip(jaxpr_as_fun(stacked.closed)(*ws, x), wanted, strict=True))
True
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jshard._batch.added_carries import ADDITIONS
from jshard._batch.alike_layers import (
    AlikeLayers,
    Carried,
    Inner,
    Own,
    Place,
    Same,
    Slots,
    identity,
    results_of,
)
from jshard._batch.completed_calls import with_calls_completed
from jshard._batch.layer_search import find_layers
from jshard._batch.lifted_literals import with_literals_lifted
from jshard._batch.moved_slices import with_slices_moved
from jshard._batch.piece_operator import run_whole, shape_of
from jshard._core import jaxcompat as compat
from jshard._core.jax_types import ClosedJaxpr, Jaxpr, JaxprAtom, JaxprEqn
from jshard._program.inlining import with_calls_inlined


Key = tuple[Hashable, ...]
"""What a stack holds, layer by layer."""


@dataclasses.dataclass(frozen=True, eq=False)
class Stacked:
    """A program with its alike layers as loops.

    - `closed`: None where nothing was found; `why_not` then says of the longest repetition why it is no loop.
    - `layers`: how many of each loop.
    """

    closed: ClosedJaxpr | None
    layers: tuple[int, ...]
    why_not: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class _Loop:
    """Layers as a loop whose stacks are in the order of the forward pass.

    - `stacks`: own values, those of missing equations replaced by values of which nothing is used.
    - `kept`: results of each layer that are stacked; `entering`: carries that are, as each layer gets them.
    """

    layers: AlikeLayers
    reverse: bool
    stacks: tuple[Slots, ...]
    kept: tuple[Place, ...] = ()
    entering: tuple[int, ...] = ()

    def in_order(self, slots: Slots) -> Slots:
        """Values of the layers as they run, in the order of the forward pass."""
        return slots[::-1] if self.reverse else slots

    def results(self, eqns: Sequence[JaxprEqn], place: Place) -> Slots:
        """A result of each layer, in the order of the forward pass."""
        return self.in_order(results_of(eqns, self.layers.rows, place))

    def ended_sum(self, eqns: Sequence[JaxprEqn], carry: int) -> tuple[Place, int] | None:
        """Of a carry that the first layers add to and the others do not: the place of the addend, and how many add.

        None for other carries. The first layer of a model adds to the gradient of its input otherwise than the rest.
        """
        place, _ = self.layers.carries[carry]
        results = results_of(eqns, self.layers.rows, place)
        count = max(k for k, v in enumerate(results) if v is not None) + 1
        i = self.layers.rows[self.layers.whole][place[0]]
        if count == len(results) or i is None or eqns[i].primitive.name not in ADDITIONS:
            return None
        sources = [self.layers.operands[place[0], n] for n in (0, 1)]
        read = [s for s in self.layers.operands.values() if s in (Carried(carry), Inner(place))]
        if len(read) != 1 or Carried(carry) not in sources:
            return None
        return (place[0], 1 - sources.index(Carried(carry))), count

    def last_value(self, eqns: Sequence[JaxprEqn], carry: int) -> JaxprAtom | None:
        """What a carry is after the loop."""
        ended = self.ended_sum(eqns, carry)
        results = results_of(eqns, self.layers.rows, self.layers.carries[carry][0])
        return results[-1 if ended is None else ended[1] - 1]

    def entered(self, eqns: Sequence[JaxprEqn], carry: int) -> Slots:
        """A carry as each layer gets it, in the order of the forward pass."""
        place, initial = self.layers.carries[carry]
        return self.in_order((initial, *results_of(eqns, self.layers.rows, place)[:-1]))


def with_layers_stacked(closed: ClosedJaxpr, passes_on: Callable[[JaxprAtom], bool]) -> Stacked:
    """The program with sequences of alike layers as loops, if a carry of theirs fulfils `passes_on`.

    `passes_on` is asked of variables of the program with its calls inlined and without dead code.
    """
    opened, consts = compat.open_jaxpr(closed)
    return stack_layers(compat.without_dead_code(with_calls_inlined(opened, lines=True)), consts, passes_on)


def stack_layers(
    jaxpr: Jaxpr, consts: Sequence[jax.Array], passes_on: Callable[[JaxprAtom], bool]
) -> Stacked:
    """The same for an open jaxpr without calls and dead code, with the values of its constants."""
    completed = with_calls_completed(jaxpr)
    jaxpr = completed.replace(eqns=with_literals_lifted(completed.eqns))
    found, errors = find_layers(jaxpr.eqns, passes_on)
    if not _complete(jaxpr.eqns, found):
        moved = with_slices_moved(jaxpr, passes_on)
        again, more = find_layers(moved.eqns, passes_on)
        if _equations(again) > _equations(found):
            jaxpr, found, errors = moved, again, more
    if all(_is_backward(jaxpr.eqns, layers) for layers in found):
        return Stacked(None, (), str(errors[0]) if errors else "")
    loops = _with_kept(jaxpr, _in_order(jaxpr.eqns, found))

    def run(*arguments: jax.Array) -> list[jax.Array]:
        values = _Values(dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True)))
        inside = {i: loop for loop in loops for row in loop.layers.rows for i in row if i is not None}
        for k, eqn in enumerate(jaxpr.eqns):
            if k not in inside:
                with compat.eqn_context(eqn):
                    results = run_whole(eqn, list(map(values.of, eqn.invars)))
                values.known.update(zip(eqn.outvars, results, strict=True))
            elif k == inside[k].layers.begin:
                _run_loop(jaxpr.eqns, inside[k], values)
        return [jnp.asarray(values.of(v)) for v in jaxpr.outvars]

    out = compat.make_jaxpr(run, *map(shape_of, jaxpr.invars))
    return Stacked(out, tuple(len(loop.layers.rows) for loop in loops))


def _complete(eqns: Sequence[JaxprEqn], found: Sequence[AlikeLayers]) -> bool:
    """Whether the layers of a program are all found, as many in the backward pass as in the forward pass."""
    has_backward = any(compat.is_backward("", e) for e in eqns)
    backward = [_is_backward(eqns, layers) for layers in found]
    return len({len(layers.rows) for layers in found}) == 1 and (
        not has_backward or {*backward} == {True, False}
    )


def _is_backward(eqns: Sequence[JaxprEqn], layers: AlikeLayers) -> bool:
    return any(compat.is_backward("", eqns[i]) for i in layers.rows[layers.whole] if i is not None)


def _equations(found: Sequence[AlikeLayers]) -> int:
    return sum(i is not None for layers in found for row in layers.rows for i in row)


class _Values:
    """The values of a program while it is traced again: those known, those in stacks, and the stacks."""

    def __init__(self, known: dict[JaxprAtom, jax.Array]):
        self.known = known
        self.stacks: dict[Key, jax.Array] = {}
        self.in_stack: dict[JaxprAtom, tuple[Key, int]] = {}

    def of(self, v: JaxprAtom) -> jax.Array:
        """The value of an atom."""
        if compat.is_literal(v):
            return v.val  # type: ignore[return-value]
        if v not in self.known:
            key, at = self.in_stack[v]
            self.known[v] = lax.index_in_dim(self.stacks[key], at, 0, keepdims=False)
        return self.known[v]

    def stack(self, slots: Slots) -> jax.Array:
        """The values of a stack's atoms in one array."""
        key = _key(slots)
        if key not in self.stacks:
            atoms = [v for v in slots if v is not None]  # of all layers, where no loop made the stack
            self.stacks[key] = jnp.stack([jnp.asarray(self.of(v), v.aval.dtype) for v in atoms])
        return self.stacks[key]

    def add(self, slots: Slots, stack: jax.Array) -> None:
        """Record a stack that a loop made."""
        key = _key(slots)
        self.stacks.setdefault(key, stack)
        for k, v in enumerate(slots):
            if v is not None and not compat.is_literal(v):
                self.in_stack.setdefault(v, (key, k))


def _run_loop(eqns: Sequence[JaxprEqn], loop: _Loop, values: _Values) -> None:
    """Run layers as a scan."""
    layers = loop.layers
    template = [(at, eqns[i]) for at, i in enumerate(layers.rows[layers.whole]) if i is not None]
    types = [eqns[layers.rows[layers.whole][at]].outvars[o].aval for (at, o), _ in layers.carries]  # type: ignore[index]
    shared = {
        place: jnp.asarray(values.of(s.atom), s.atom.aval.dtype)
        if not compat.is_literal(s.atom)
        else s.atom.val  # type: ignore[attr-defined]
        for place, s in layers.operands.items()
        if isinstance(s, Same)
    }

    ended = {n: found for n in range(len(layers.carries)) if (found := loop.ended_sum(eqns, n))}

    def layer(
        carry: tuple[jax.Array, ...], xs: tuple[tuple[jax.Array, ...], jax.Array | None]
    ) -> tuple[tuple[jax.Array, ...], list[jax.Array]]:
        own, number = xs
        made: dict[Place, jax.Array] = {}

        def operand(at: int, n: int) -> jax.Array:
            source = layers.operands[at, n]
            if isinstance(source, Inner):
                return made[source.place]
            if isinstance(source, Carried):
                return carry[source.carry]
            return own[source.stack] if isinstance(source, Own) else shared[at, n]  # type: ignore[return-value]

        for at, eqn in template:
            with compat.eqn_context(eqn):
                results = run_whole(eqn, [operand(at, n) for n in range(len(eqn.invars))])
            made.update(((at, o), x) for o, x in enumerate(results))
        after = [
            jnp.asarray(made[place], t.dtype) for (place, _), t in zip(layers.carries, types, strict=True)
        ]
        for n, (addend, count) in ended.items():
            adds = jnp.broadcast_to(number < count, after[n].shape)  # type: ignore[operator]
            after[n] = carry[n] + lax.select(adds, operand(*addend), jnp.zeros_like(after[n]))
        return tuple(after), [*(made[p] for p in loop.kept), *(carry[n] for n in loop.entering)]

    initial = tuple(
        jnp.zeros(t.shape, t.dtype) if v is None else jnp.asarray(values.of(v), t.dtype)
        for (_, v), t in zip(layers.carries, types, strict=True)
    )
    stacks = tuple(map(values.stack, loop.stacks))
    numbers = jnp.arange(len(layers.rows), dtype=jnp.int32)
    xs = stacks, (numbers[::-1] if loop.reverse else numbers) if ended else None
    last, stacked = lax.scan(layer, initial, xs, length=len(layers.rows), reverse=loop.reverse)
    for n, x in enumerate(last):
        v = loop.last_value(eqns, n)
        if v is not None:
            values.known[v] = x
    for slots, x in zip(_kept_slots(eqns, loop), stacked, strict=True):
        values.add(slots, x)


def _kept_slots(eqns: Sequence[JaxprEqn], loop: _Loop) -> list[Slots]:
    """What the loop stacks, by its values."""
    return [*(loop.results(eqns, p) for p in loop.kept), *(loop.entered(eqns, n) for n in loop.entering)]


# -- which stacks there are ----------------------------------------------------------------------------------------------


def _key(slots: Sequence[JaxprAtom | None]) -> Key:
    return tuple(None if v is None else identity(v) for v in slots)


def _in_order(eqns: Sequence[JaxprEqn], found: Sequence[AlikeLayers]) -> list[_Loop]:
    """The loops, those in reverse whose stacks are those of loops before them in reverse."""
    known: dict[Hashable, list[Slots]] = {}  # by the values in them
    loops: list[_Loop] = []
    for layers in found:
        ahead, back = ([_matching(slots[::step], known) for slots in layers.stacks] for step in (1, -1))
        reverse = sum(s is not None for s in back) > sum(s is not None for s in ahead)
        stacks = [
            _filled(slots[::-1] if reverse else slots, match)
            for slots, match in zip(layers.stacks, back if reverse else ahead, strict=True)
        ]
        loop = _Loop(layers, reverse, tuple(stacks))
        loops.append(loop)
        for slots in (*stacks, *(s for _, s in _produced(eqns, loop))):
            for v in slots:
                if v is not None:
                    known.setdefault(identity(v), []).append(slots)
    return loops


def _produced(eqns: Sequence[JaxprEqn], loop: _Loop) -> list[tuple[Place | int, Slots]]:
    """What a loop can stack: results by place, and carries as layers get them by number."""
    layers = loop.layers
    row = layers.rows[layers.whole]
    places = [(at, o) for at, i in enumerate(row) for o in range(len(eqns[i].outvars))]  # type: ignore[index]
    results: list[tuple[Place | int, Slots]] = [(p, loop.results(eqns, p)) for p in places]
    return [*results, *((n, loop.entered(eqns, n)) for n in range(len(layers.carries)))]


def _matching(slots: Slots, known: Mapping[Hashable, Sequence[Slots]]) -> Slots | None:
    """The known stack with the same values, as far as both have one."""
    key = _key(slots)
    first = next(k for k in key if k is not None)
    for other in known.get(first, ()):
        pairs = zip(key, _key(other), strict=False)
        if len(other) == len(key) and all(a is None or a == b for a, b in pairs):
            return other
    return None


def _filled(slots: Slots, match: Slots | None) -> Slots:
    """The matching stack, or one in which a layer whose equation is missing has the value of the nearest that has it."""
    present = [k for k, v in enumerate(slots) if v is not None]
    near = [min(present, key=lambda n, k=k: abs(n - k)) for k in range(len(slots))]
    return match or tuple(slots[n] for n in near)


def _with_kept(jaxpr: Jaxpr, loops: Sequence[_Loop]) -> list[_Loop]:
    """The loops with what they stack: what others read as a stack, and of what single layers are read."""
    eqns = jaxpr.eqns
    produced: dict[Key, tuple[int, Place | int]] = {}
    made: dict[JaxprAtom, tuple[int, Place | int]] = {}
    for number, loop in enumerate(loops):
        for what, slots in _produced(eqns, loop):
            produced.setdefault(_key(slots), (number, what))
            if not isinstance(what, int):
                made.update((v, (number, what)) for v in slots if v is not None)
        for n in range(len(loop.layers.carries)):
            made.pop(loop.last_value(eqns, n), None)  # type: ignore[arg-type]
    inside = {i for loop in loops for row in loop.layers.rows for i in row}
    read = [v for k, e in enumerate(eqns) if k not in inside for v in e.invars] + list(jaxpr.outvars)
    kept: set[tuple[int, Place | int]] = set()
    for loop in loops:
        read += [v for _, v in loop.layers.carries if v is not None]
        read += [s.atom for s in loop.layers.operands.values() if isinstance(s, Same)]
        for slots in loop.stacks:
            found = produced.get(_key(slots))
            if found is None:
                read += [v for v in slots if v is not None]
            else:
                kept.add(found)
    kept.update(made[v] for v in read if not compat.is_literal(v) and v in made)
    out = []
    for number, loop in enumerate(loops):
        own = sorted((w for n, w in kept if n == number and not isinstance(w, int)))
        entering = sorted(w for n, w in kept if n == number and isinstance(w, int))
        out.append(dataclasses.replace(loop, kept=tuple(own), entering=tuple(entering)))
    return out
