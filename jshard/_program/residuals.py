"""Where a program may compute values again: sites with an early part, a late part, and the values that pass between.

Problem.  A training step computes values in its forward pass and reads them in its backward pass; in between they fill
the memory. The same is written in two ways: as equations of one body, the late ones of which read results of the early
ones, or as a pair of scans, the second of which slices the stacked results of the first.

Idea.  A *site* is one such place: the equations of its early part, the values that the late part needs, and those that
are there anyway (arguments, results, the weights that a scan slices). Late is what JAX names a transposition, and all
that reads something late; in a program without derivatives, what follows its peak. Bodies of loops that have both parts,
such as a loop over microbatches, have sites of their own. Equations with effects, callbacks and generators with a hidden
state are never run again; random bits of a key are, and are the same.

>>> import jax, jax.numpy as jnp
>>> f = jax.grad(lambda w, x: (jnp.tanh(jnp.tanh(x @ w) @ w) ** 2).sum())
>>> region = find_sites(jax.make_jaxpr(f)(jnp.ones((4, 4)), jnp.ones((8, 4))).jaxpr)
>>> [(site.kind, len(site.needed) > 2) for site in region.all_sites]
[('body', True)]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import ClosedJaxpr, Jaxpr, JaxprAtom, JaxprEqn
from jshard._program.equation_bodies import bodies_of
from jshard._program.inlining import with_calls_inlined
from jshard._program.traced_scan import is_plain_scan
from jshard._program.trip_counts import trip_count_of


_NEVER_AGAIN = (
    "callback", "debug_print", "infeed", "outfeed", "rng_uniform", "ffi", "custom_call", "jshard_boundary",
)  # fmt: skip
_BODY_PARAMS = {"scan": "jaxpr", "while": "body_jaxpr", "jit": "jaxpr", "pjit": "jaxpr"}


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """One place where values pass from an early part to a late one.

    - `kind`: "body" for equations of one body, "scan" for a pair of scans.
    - `eqns`: the equations of the early part, of the first scan's body.
    - `needed`: variables that the late part reads, made in the early part.
    - `free`: variables that are in memory then anyway.
    - `copies`: how many of each value are kept, the length of the scan; `runs`: how often the late part runs.
    - `pair`: positions of the two scans in the region; `links`: for each needed value the (stacked result of the first,
        stacked operand of the second), numbered among those; `body`: of the first scan, with its calls written out.
    """

    kind: Literal["body", "scan"]
    eqns: tuple[JaxprEqn, ...]
    needed: tuple[JaxprAtom, ...]
    free: frozenset[JaxprAtom]
    copies: int = 1
    runs: float = 1.0
    pair: tuple[int, int] = (-1, -1)
    links: tuple[tuple[int, int], ...] = ()
    body: Jaxpr | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """A body with its calls written out, whether each equation is late, its sites, and the bodies with sites inside it."""

    jaxpr: Jaxpr
    late: tuple[bool, ...]
    sites: tuple[Site, ...]
    inner: Mapping[int, Region]

    @property
    def all_sites(self) -> list[Site]:
        """The sites of this body and of those inside it, in a fixed order."""
        return [*self.sites, *(s for k in sorted(self.inner) for s in self.inner[k].all_sites)]


def find_sites(jaxpr: Jaxpr | ClosedJaxpr, *, prefix: str = "", runs: float = 1.0) -> Region:
    """The region of a jaxpr, open or closed.

    `prefix` is the name stack of the enclosing loops, `runs` how often the body runs.
    """
    opened, _ = compat.open_jaxpr(jaxpr)
    flat = with_calls_inlined(compat.without_dead_code(opened))
    late = _late_equations(flat, prefix)
    uses = _uses(flat)
    pairs = list(_scan_pairs(flat, late, uses))
    linked = {flat.eqns[i].outvars[_num_carry(flat.eqns[i]) + ys] for i, _, links in pairs for ys, _ in links}
    body = _body_site(flat, late, linked, runs)
    sites = [body] if body.needed else []
    sites += [_scan_site(flat, body.free, pair, late, uses, runs) for pair in pairs]
    inner: dict[int, Region] = {}
    paired = {k for i, j, _ in pairs for k in (i, j)}
    for k, eqn in enumerate(flat.eqns):
        if eqn.primitive.name in _BODY_PARAMS and k not in paired:
            times = repetitions(eqn)
            region = find_sites(
                eqn.params[_BODY_PARAMS[eqn.primitive.name]],
                prefix=compat.name_stack(prefix, eqn),
                runs=runs * (times or 1),
            )
            if region.all_sites:
                inner[k] = region
    return Region(flat, tuple(late), tuple(sites), inner)


def repetitions(eqn: JaxprEqn) -> int | None:
    """How often the body of a loop runs; 1 for all else, None where that is not known."""
    if eqn.primitive.name == "scan":
        return max(1, int(eqn.params["length"]))
    if eqn.primitive.name == "while":
        values = [v.val if compat.is_literal(v) else None for v in eqn.invars]
        return trip_count_of(eqn, [int(v) if isinstance(v, int | np.integer) else None for v in values])
    return 1


def may_run_again(eqn: JaxprEqn) -> bool:
    """Whether an equation may be run a second time: it has no effects, calls nothing back, and ends."""
    name = eqn.primitive.name
    if eqn.effects or any(part in name for part in _NEVER_AGAIN) or repetitions(eqn) is None:
        return False
    return all(may_run_again(e) for body in bodies_of(eqn) for e in body.eqns)


def variables(atoms: Sequence[JaxprAtom]) -> list[JaxprAtom]:
    """The atoms of an equation without its literals."""
    return [v for v in atoms if not compat.is_literal(v)]


def nbytes(v: JaxprAtom) -> int:
    """Bytes of a variable's values."""
    return math.prod(v.aval.shape) * compat.itemsize(v.aval.dtype) if hasattr(v.aval, "shape") else 0


def _late_equations(jaxpr: Jaxpr, prefix: str) -> list[bool]:
    """For each equation whether it belongs to the late part."""
    transposed = [compat.is_backward(prefix, eqn) for eqn in jaxpr.eqns]
    if not any(transposed):
        transposed = _after_peak(jaxpr)
    late_values: set[JaxprAtom] = set()
    out = []
    for eqn, is_late in zip(jaxpr.eqns, transposed, strict=True):
        is_late = is_late or any(v in late_values for v in variables(eqn.invars))
        if is_late:
            late_values.update(eqn.outvars)
        out.append(is_late)
    return out


def _after_peak(jaxpr: Jaxpr) -> list[bool]:
    """For each equation whether it comes after the one while which most bytes are live."""
    last = {v: k for k, eqn in enumerate(jaxpr.eqns) for v in variables(eqn.invars)}
    last.update(dict.fromkeys(variables(jaxpr.outvars), len(jaxpr.eqns)))
    change = np.zeros(len(jaxpr.eqns) + 2)
    for k, eqn in enumerate(jaxpr.eqns):
        for v in eqn.outvars:
            change[k] += nbytes(v)
            change[last.get(v, k) + 1] -= nbytes(v)
    peak = int(np.argmax(np.cumsum(change))) if len(jaxpr.eqns) else 0
    return [k > peak for k in range(len(jaxpr.eqns))]


def _uses(jaxpr: Jaxpr) -> dict[JaxprAtom, list[int]]:
    """For each variable the equations that read it, once a read; -1 for a result."""
    out: dict[JaxprAtom, list[int]] = {}
    for k, eqn in enumerate(jaxpr.eqns):
        for v in variables(eqn.invars):
            out.setdefault(v, []).append(k)
    for v in variables(jaxpr.outvars):
        out.setdefault(v, []).append(-1)
    return out


def _num_carry(scan: JaxprEqn) -> int:
    return compat.scan_split(scan.params)[1]


_Pair = tuple[int, int, tuple[tuple[int, int], ...]]


def _scan_pairs(
    jaxpr: Jaxpr, late: Sequence[bool], uses: Mapping[JaxprAtom, Sequence[int]]
) -> Iterator[_Pair]:
    """(first, second, links) of scans of which the late second alone slices stacked results of the early first."""
    for i, first in enumerate(jaxpr.eqns):
        if late[i] or not is_plain_scan(first):
            continue
        seconds: dict[int, list[tuple[int, int]]] = {}
        for ys, v in enumerate(first.outvars[_num_carry(first) :]):
            readers = uses.get(v, ())
            if len(readers) != 1 or readers[0] < 0 or not late[readers[0]]:
                continue
            second = jaxpr.eqns[readers[0]]
            if not is_plain_scan(second) or second.params["length"] != first.params["length"]:
                continue
            xs = second.invars.index(v) - sum(compat.scan_split(second.params))
            if xs >= 0:
                seconds.setdefault(readers[0], []).append((ys, xs))
        if seconds:  # a scan has one transposition; with several, the one with most links
            j = max(seconds, key=lambda k: len(seconds[k]))
            yield i, j, tuple(seconds[j])


def _body_site(jaxpr: Jaxpr, late: Sequence[bool], linked: set[JaxprAtom], runs: float) -> Site:
    made = {v for eqn, is_late in zip(jaxpr.eqns, late, strict=True) if not is_late for v in eqn.outvars}
    early = tuple(eqn for eqn, is_late in zip(jaxpr.eqns, late, strict=True) if not is_late)
    read = [
        v for eqn, is_late in zip(jaxpr.eqns, late, strict=True) if is_late for v in variables(eqn.invars)
    ]
    free = {*jaxpr.invars, *jaxpr.constvars, *(v for v in variables(jaxpr.outvars) if v in made), *linked}
    needed = dict.fromkeys(v for v in read if v in made and v not in free)
    return Site("body", early, tuple(needed), frozenset(free), runs=runs)


def _scan_site(
    jaxpr: Jaxpr, free_outside: frozenset[JaxprAtom], pair: _Pair, late: Sequence[bool], 
    uses: Mapping[JaxprAtom, Sequence[int]], runs: float,
) -> Site:  # fmt: skip
    i, j, links = pair
    first = jaxpr.eqns[i]
    body = with_calls_inlined(compat.open_jaxpr(first.params["jaxpr"])[0])
    num_consts, num_carry = compat.scan_split(first.params)
    length, first_xs = int(first.params["length"]), num_consts + num_carry

    def in_memory(v: JaxprAtom) -> bool:
        return compat.is_literal(v) or v in free_outside or any(k < 0 or late[k] for k in uses.get(v, ()))

    slices = zip(body.invars[first_xs:], first.invars[first_xs:], strict=True)
    free = {*body.invars[:num_consts], *(v for v, a in slices if in_memory(a))}
    kept_anyway = set(range(len(first.outvars) - num_carry)) - {ys for ys, _ in links}
    free |= {v for ys in kept_anyway for v in variables([body.outvars[num_carry + ys]])
             if in_memory(first.outvars[num_carry + ys])}  # fmt: skip
    pairs = [(body.outvars[num_carry + ys], (ys, xs)) for ys, xs in links]
    pairs = [(v, link) for v, link in pairs if not compat.is_literal(v)]
    return Site(
        "scan", tuple(body.eqns), tuple(v for v, _ in pairs), frozenset(free), copies=length, runs=runs * length,
        pair=(i, j), links=tuple(link for _, link in pairs),
        body=body,
    )  # fmt: skip
