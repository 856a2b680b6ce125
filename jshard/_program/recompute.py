"""A program in which values of the early part are computed again in the late part instead of being kept.

Problem.  `residuals.py` finds the sites, a search chooses which values each site keeps. What the late part needs beyond
them is to be computed again from them, just before it is read, in a form that no compiler undoes.

Idea.  The equations that make such values are written a second time.

- In a body the late part becomes a row of segments, one `remat2` each: the form that `jax.checkpoint` itself leaves
  behind, so that collectives, memory and barriers are those of such a call. A segment begins where a value has to be
  made again by more than elementwise work, a layer's backward pass in a network; all that enters it passes an
  `optimization_barrier`, so common subexpressions with the early part are not found, and nothing in it starts before
  what it reads of the segment before.
- In a pair of scans the stacked result goes, and the equations move into the second scan's body; the values that they
  start from are stacked in its place. No barrier is needed, since compilers do not merge equations of two loops.

Equations that are written again have `recompute(` in their name stack (`is_recomputed`), and count as backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import ClosedJaxpr, Jaxpr, JaxprAtom, JaxprEqn
from jshard._program.inlining import fresh, substituted
from jshard._program.residuals import Region, Site, variables
from jshard._program.traced_scan import traced_scan


Kept = Mapping[int, frozenset[JaxprAtom]]
"""For some sites, by their number in `Region.all_sites`, the variables that they keep; the others stay as they are."""

Weight = Callable[[JaxprEqn], int]
"""Of an equation: 0 for elementwise work, 1 for reductions, 2 for what takes longer."""

_MARK = "recompute"
_LARGEST_GAP = 4  # a segment is extended to the next one if that begins within this many times its own length


def is_recomputed(prefix: str, eqn: JaxprEqn | None) -> bool:
    """Whether an equation was written a second time by `recomputing`."""
    return f"{_MARK}(" in compat.name_stack(prefix, eqn)


def recomputing(closed: ClosedJaxpr, region: Region, kept: Kept, weight: Weight) -> ClosedJaxpr:
    """The closed jaxpr of a region, with sites that keep only what is chosen."""
    return closed.replace(jaxpr=_rewritten(region, dict(kept), iter(range(len(region.all_sites))), weight))


def _rewritten(region: Region, kept: Kept, numbers: Iterable[int], weight: Weight) -> Jaxpr:
    numbers = iter(numbers)
    own = {next(numbers): site for site in region.sites}
    replaced: dict[int, list[JaxprEqn]] = {}
    for k in sorted(region.inner):
        replaced[k] = [_with_body(region.jaxpr.eqns[k], region.inner[k], kept, numbers, weight)]
    stacks: set[JaxprAtom] = set()  # new stacked results
    body_choice: tuple[Site, frozenset[JaxprAtom]] | None = None
    for number, site in own.items():
        if number not in kept:
            continue
        if site.kind == "body":
            body_choice = site, kept[number]
        else:
            i, j = site.pair
            replaced[i], replaced[j] = _moved_between_scans(region, site, kept[number])
            stacks.update(
                v for eqn in replaced[i] for v in eqn.outvars if v not in region.jaxpr.eqns[i].outvars
            )
    eqns, is_late = [], []
    for k, eqn in enumerate(region.jaxpr.eqns):
        new = replaced.get(k, [eqn])
        eqns += new
        is_late += [region.late[k]] * len(new)
    jaxpr = region.jaxpr.replace(eqns=eqns)
    if body_choice is None:
        return jaxpr
    site, values = body_choice
    return _with_segments(jaxpr, is_late, {*values, *site.free, *stacks}, weight)


def _with_body(eqn: JaxprEqn, inner: Region, kept: Kept, numbers: Iterable[int], weight: Weight) -> JaxprEqn:
    name = next(k for k in ("jaxpr", "body_jaxpr") if k in eqn.params)
    body = eqn.params[name].replace(jaxpr=_rewritten(inner, kept, numbers, weight))
    return eqn.replace(params={**eqn.params, name: body})


# -- writing equations again ---------------------------------------------------------------------------------------


class _Copies:
    """Second copies of equations, written on demand; `available` are the variables that need none."""

    def __init__(self, eqns: Sequence[JaxprEqn], available: Iterable[JaxprAtom]):
        self.maker = {v: eqn for eqn in eqns for v in eqn.outvars}
        self.available = set(available)
        self.copy_of: dict[JaxprAtom, JaxprAtom] = {}

    def missing(self, needed: Iterable[JaxprAtom]) -> list[JaxprEqn]:
        """The equations to run again for some variables, in an order in which they can run."""
        order: dict[int, JaxprEqn] = {}
        stack = [(v, False) for v in reversed(list(needed))]
        while stack:
            v, is_ready = stack.pop()
            if v in self.available or v in self.copy_of or v not in self.maker or id(self.maker[v]) in order:
                continue
            eqn = self.maker[v]
            if is_ready:
                order[id(eqn)] = eqn
            else:
                stack.append((v, True))
                stack += [(u, False) for u in reversed(variables(eqn.invars))]
        return list(order.values())

    def write(self, eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
        """The copies of some equations."""
        out = []
        for eqn in eqns:
            results = fresh(eqn.outvars)
            info = eqn.source_info
            stack = type(info.name_stack)().transform(_MARK).transform("transpose")
            info = info.replace(name_stack=stack + info.name_stack)
            out.append(
                eqn.replace(invars=substituted(eqn.invars, self.copy_of), outvars=results, source_info=info)
            )
            for v, copy in zip(eqn.outvars, results, strict=True):
                if v not in self.available:
                    self.copy_of[v] = copy
        return out


# -- one body --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Segment:
    begin: int  # in the late part
    end: int


def _with_segments(jaxpr: Jaxpr, late: Sequence[bool], available: set[JaxprAtom], weight: Weight) -> Jaxpr:
    """The body with its early part first, then its late part in segments; `available` need not be made again."""
    early = [eqn for eqn, is_late in zip(jaxpr.eqns, late, strict=True) if not is_late]
    late_eqns = [eqn for eqn, is_late in zip(jaxpr.eqns, late, strict=True) if is_late]
    segments = _segments(early, late_eqns, available, weight)
    if not segments:
        return jaxpr
    # Outside segments compilers make elementwise values of kept ones again by themselves.
    inside = {k for segment in segments for k in range(segment.begin, segment.end)}
    copies = _Copies(early, available)
    rows = []  # for each late equation the copies before it, and itself
    for k, eqn in enumerate(late_eqns):
        again = copies.write(copies.missing(variables(eqn.invars))) if k in inside else []
        rows.append([*again, eqn.replace(invars=substituted(eqn.invars, copies.copy_of))])
    return jaxpr.replace(eqns=[*early, *_as_calls(rows, segments, variables(jaxpr.outvars))])


def _segments(
    early: Sequence[JaxprEqn], late: Sequence[JaxprEqn], available: set[JaxprAtom], weight: Weight
) -> list[_Segment]:
    """The segments of the late part; none if only elementwise work would be done again."""
    cheap = set(available)  # made from these by elementwise work alone
    for eqn in early:
        if not weight(eqn) and all(v in cheap for v in variables(eqn.invars)):
            cheap.update(eqn.outvars)
    made_early = {v for eqn in early for v in eqn.outvars}
    entering = {v for eqn in early for v in variables(eqn.invars)} - made_early
    copies = _Copies(early, cheap | entering)
    segments: list[_Segment] = []
    last_read = 0
    for k, eqn in enumerate(late):
        again = copies.missing(variables(eqn.invars))
        if again and (not segments or any(weight(e) > 1 for e in again)):
            segments.append(_Segment(k, k + 1))
        copies.copy_of.update((v, v) for e in again for v in e.outvars)
        read = variables(eqn.invars)
        if segments and any(v in copies.copy_of for v in read):
            segments[-1].end = last_read = k + 1
        elif segments and compat.is_backward("", eqn) and any(v in made_early for v in read):
            last_read = k + 1
    following_ones = [*segments[1:], None] if segments else []
    for segment, following in zip(segments, following_ones, strict=True):
        begin = following.begin if following is not None else last_read
        if begin - segment.end <= _LARGEST_GAP * (segment.end - segment.begin):
            segment.end = begin
    return segments


def _as_calls(
    rows: Sequence[Sequence[JaxprEqn]], segments: Sequence[_Segment], results: Sequence[JaxprAtom]
) -> list[JaxprEqn]:
    """The late part with each segment as a call; equations with effects stay outside, and end a segment."""
    parts: list[tuple[bool, list[JaxprEqn]]] = []
    at = 0
    for segment in segments:
        parts.append((False, [e for row in rows[at : segment.begin] for e in row]))
        for eqn in (e for row in rows[segment.begin : segment.end] for e in row):
            inside = not eqn.effects
            if (
                not parts
                or parts[-1][0] != inside
                or not parts[-1][1]
                or (inside and eqn is rows[segment.begin][0])
            ):
                parts.append((inside, []))
            parts[-1][1].append(eqn)
        at = segment.end
    parts.append((False, [e for row in rows[at:] for e in row]))
    read_after: set[JaxprAtom] = set(results)
    template = jax.make_jaxpr(jax.checkpoint(lambda x: x * 1.0))(0.0).eqns[0]
    out: list[list[JaxprEqn]] = []
    for is_call, eqns in reversed(parts):
        if not eqns:
            continue
        out.append([_call(template, eqns, read_after)] if is_call else eqns)
        read_after.update(v for e in eqns for v in variables(e.invars))
    return [eqn for part in reversed(out) for eqn in part]


def _call(template: JaxprEqn, eqns: Sequence[JaxprEqn], read_after: set[JaxprAtom]) -> JaxprEqn:
    """One `remat2` of some equations, of the kind that `jax.checkpoint` leaves in a backward pass.

    `template` is any equation of `jax.checkpoint`.
    """
    made = dict.fromkeys(v for e in eqns for v in e.outvars)
    operands = list(dict.fromkeys(v for e in eqns for v in variables(e.invars) if v not in made))
    results = [v for v in made if v in read_after]
    inner_results = fresh(results)
    inner = {**dict(zip(results, inner_results, strict=True))}
    inner_operands = fresh(operands)
    inner.update(zip(operands, inner_operands, strict=True))
    body = [
        e.replace(invars=substituted(e.invars, inner), outvars=[inner.get(v, v) for v in e.outvars])
        for e in eqns
    ]
    opened, _ = compat.open_jaxpr(template.params["jaxpr"])
    opened = opened.replace(
        invars=inner_operands, constvars=[], outvars=inner_results, eqns=body, effects=set()
    )
    info = eqns[0].source_info
    return template.replace(
        invars=operands,
        outvars=results,
        params={**template.params, "jaxpr": opened, "prevent_cse": True, "differentiated": True},
        effects=set(),
        source_info=info.replace(name_stack=type(info.name_stack)()),
    )


# -- a pair of scans -------------------------------------------------------------------------------------------------


def _moved_between_scans(
    region: Region, site: Site, kept: frozenset[JaxprAtom]
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """The two scans, with only `kept` stacked by the first and the rest computed again by the second."""
    i, j = site.pair
    first, second = region.jaxpr.eqns[i], region.jaxpr.eqns[j]
    body = site.body
    assert body is not None, "a site of a pair of scans has the first one's body"
    (c1, n1), (c2, n2) = compat.scan_split(first.params), compat.scan_split(second.params)
    second_body, _ = compat.open_jaxpr(second.params["jaxpr"])
    operand = dict(zip(body.invars, first.invars, strict=True))
    consts, slices = body.invars[:c1], body.invars[c1 + n1 :]
    copies = _Copies(site.eqns, kept)
    again = copies.missing(site.needed)
    moved = copies.write(again)
    read = [v for e in again for v in variables(e.invars)]
    entering = [v for v in dict.fromkeys((*site.needed, *read)) if v not in copies.copy_of]
    # What enters the second body: constants and slices of the first scan as they are, all else stacked.
    from_consts = [v for v in entering if v in consts]
    from_slices = [v for v in entering if v in slices and v not in kept]
    stacked = [v for v in entering if v not in from_consts and v not in from_slices]

    linked_ys, linked_xs = {ys for ys, _ in site.links}, {xs for _, xs in site.links}
    other_ys = [k for k in range(len(first.outvars) - n1) if k not in linked_ys]
    first_out = [*body.outvars[:n1], *(body.outvars[n1 + k] for k in other_ys), *stacked]
    first_eqns, first_results = traced_scan(first, body.replace(outvars=first_out), c1, n1, first.invars)
    known = [*first.outvars[:n1], *(first.outvars[n1 + k] for k in other_ys)]
    renamed = dict(zip(first_results, known, strict=False))
    stacks = first_results[len(known) :]
    first_eqns = [e.replace(outvars=[renamed.get(v, v) for v in e.outvars]) for e in first_eqns]

    other_xs = [k for k in range(len(second.invars) - c2 - n2) if k not in linked_xs]
    inner = second_body.invars
    extra = fresh([*from_consts, *stacked, *from_slices])
    entered = dict(zip([*from_consts, *stacked, *from_slices], extra, strict=True))
    own_consts, from_first = extra[: len(from_consts)], extra[len(from_consts) :]
    moved = [e.replace(invars=substituted(e.invars, entered)) for e in moved]
    value_of = {v: copies.copy_of[v] if v in copies.copy_of else entered[v] for v in site.needed}
    replaces = {inner[c2 + n2 + xs]: value_of[v] for v, (_, xs) in zip(site.needed, site.links, strict=True)}
    eqns = [e.replace(invars=substituted(e.invars, replaces)) for e in second_body.eqns]
    new_body = second_body.replace(
        invars=[*inner[:c2], *own_consts, *inner[c2 : c2 + n2], *(inner[c2 + n2 + k] for k in other_xs), *from_first],
        outvars=substituted(second_body.outvars, replaces),
        eqns=[*moved, *eqns],
    )  # fmt: skip
    operands = [
        *second.invars[:c2], *(operand[v] for v in from_consts), *second.invars[c2 : c2 + n2],
        *(second.invars[c2 + n2 + k] for k in other_xs), *stacks, *(operand[v] for v in from_slices),
    ]  # fmt: skip
    second_eqns, second_results = traced_scan(second, new_body, c2 + len(from_consts), n2, operands)
    renamed = dict(zip(second_results, second.outvars, strict=True))
    second_eqns = [e.replace(outvars=[renamed.get(v, v) for v in e.outvars]) for e in second_eqns]
    return first_eqns, second_eqns
