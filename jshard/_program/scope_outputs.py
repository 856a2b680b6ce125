"""The values that leave a named scope, and a jaxpr in which they are named, so that rules can pin them.

`jax.named_scope` leaves its name in the name stack of equations only. A value leaves a scope if an equation of the scope
defines it and something of the forward pass outside of the scope reads it, or the program returns it: what only the
backward pass reads (residuals, also those that a scan stacks) stays inside, and so does what depends on no argument.

Where a module of Flax marks its output, the name stack there is that of the module; a scope inside is then named by the
module's path, so that it is `layers.0.attn.core` or, for stacked layers, `layers.attn.core`, like the module's own output.

A scope that is entered again at once, with nothing in between, cannot be told from one that goes on.

>>> import jax, jax.numpy as jnp
>>> def f(x):
...     with jax.named_scope("block"):
...         y = jnp.tanh(x)
...         z = y * 2
...     return y + z
>>> closed = jax.make_jaxpr(f)(jnp.ones(3))
>>> [(s.path, s.element, s.elements) for s in scope_outputs(closed)]
[('block', 0, 2), ('block', 1, 2)]
>>> [e.primitive.name for e in with_scopes_marked(closed, {"block"}).eqns]
['tanh', 'jshard_module_output', 'mul', 'jshard_module_output', 'add']
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import Aval, ClosedJaxpr, Jaxpr, JaxprAtom, JaxprEqn
from jshard._program.equation_bodies import Place, numbered_bodies, with_bodies
from jshard._program.inlining import fresh, substituted
from jshard._program.pin_primitives import MODULE_OUTPUT, ModuleOutput, module_output_p


Scope = tuple[str, ...]
Route = tuple[tuple[int, str, int], ...]
"""Where a body is: number of the equation, its parameter, and the position in that, from the outermost body on."""


@dataclasses.dataclass(frozen=True, eq=False)
class ScopeOutput:
    """A value that leaves the scope `path`: number `element` of its `elements`, in the order in which they are defined.

    `elements` is 0 for the only one, as for modules. `route`, `variable`: where it is defined.
    """

    path: str
    element: int
    elements: int
    aval: Aval
    route: Route
    variable: JaxprAtom


Marks = Mapping[tuple[Route, JaxprAtom], ScopeOutput]
"""Outputs of scopes by where they are defined."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Body:
    """A body of the program: its `prefix` is the name stack of the equations around it; `outer` the body of `eqn`."""

    jaxpr: Jaxpr
    route: Route
    prefix: str
    outer: _Body | None = None
    eqn: JaxprEqn | None = None
    readers: dict[JaxprAtom, list[JaxprEqn]] = dataclasses.field(default_factory=dict)

    def scope(self, eqn: JaxprEqn) -> Scope:
        """The scopes around an equation, outermost first."""
        within, own = self.own, _parts(eqn)
        call = () if self.eqn is None or self.eqn.primitive.name not in _ABSOLUTE else _parts(self.eqn)
        return (*within, *(own[len(call) :] if own[: len(call)] == call else own))

    @functools.cached_property
    def own(self) -> Scope:
        """The scopes around the body."""
        return () if self.outer is None or self.eqn is None else self.outer.scope(self.eqn)


_ABSOLUTE = frozenset(("custom_jvp_call", "custom_vjp_call"))
"""Calls in whose bodies JAX 0.12 repeats the name stack of the call; in those of loops and of `jit` it does not."""


def _parts(eqn: JaxprEqn) -> Scope:
    return tuple(filter(None, compat.module_path("", eqn).split("/")))


def scope_outputs(closed: Jaxpr | ClosedJaxpr) -> list[ScopeOutput]:
    """The values that leave named scopes of the forward pass, in order; modules of Flax aside."""
    bodies = list(_bodies(compat.open_jaxpr(closed)[0], (), "", None, None))
    modules = _modules(bodies)
    varying = _varying(bodies)
    out: list[ScopeOutput] = []
    for body in bodies:
        out += _outputs_in(body, modules, varying)
    return out


def with_scopes_marked(closed: ClosedJaxpr, paths: Collection[str]) -> ClosedJaxpr:
    """The jaxpr in which the outputs of these scopes pass through `module_output_p` with their names."""
    marks = {(s.route, s.variable): s for s in scope_outputs(closed) if s.path in paths}
    return closed.replace(jaxpr=_marked(compat.open_jaxpr(closed)[0], (), marks)) if marks else closed


def _bodies(
    jaxpr: Jaxpr, route: Route, prefix: str, outer: _Body | None, eqn: JaxprEqn | None
) -> Iterator[_Body]:
    body = _Body(jaxpr, route, prefix, outer, eqn)
    for own in jaxpr.eqns:
        for v in own.invars:
            if not compat.is_literal(v):
                body.readers.setdefault(v, []).append(own)
    yield body
    for k, own in enumerate(jaxpr.eqns):
        stack = compat.name_stack(prefix, own)
        for place, inner in numbered_bodies(own):
            yield from _bodies(inner, (*route, (k, *place)), stack, body, own)


def _modules(bodies: list[_Body]) -> dict[Scope, str]:
    """Scopes of modules -> their paths, where a module marked its output."""
    out: dict[Scope, str] = {}
    for body in bodies:
        for eqn in body.jaxpr.eqns:
            if eqn.primitive.name == MODULE_OUTPUT:
                out.setdefault(body.scope(eqn), eqn.params["pin"].path)
    return out


def _varying(bodies: list[_Body]) -> set[JaxprAtom]:
    """The variables that depend on an argument of the program, or that a body is given."""
    out: set[JaxprAtom] = set()
    for body in bodies:
        out.update(body.jaxpr.invars)
        for eqn in body.jaxpr.eqns:
            if any(not compat.is_literal(v) and v in out for v in eqn.invars):
                out.update(eqn.outvars)
    return out


def _outputs_in(body: _Body, modules: dict[Scope, str], varying: set[JaxprAtom]) -> list[ScopeOutput]:
    """What leaves the scopes that begin in a body, entry by entry."""
    depth = len(body.own)
    left: dict[Scope, list[list[JaxprAtom]]] = collections.defaultdict(list)  # the entries of each scope
    current: Scope = ()
    for eqn in body.jaxpr.eqns:
        if compat.is_backward(body.prefix, eqn) or not any(v in varying for v in eqn.outvars):
            continue
        scope = body.scope(eqn)
        for k in range(depth + 1, len(scope) + 1):
            if current[:k] != scope[:k]:
                left[scope[:k]].append([])
            left[scope[:k]][-1] += [v for v in eqn.outvars if _leaves(body, v, scope[:k])]
        current = scope
    out = []
    for scope, entries in left.items():
        if scope in modules:
            continue
        path = _path(scope, modules)
        for variables in entries:
            count = len(variables) if len(variables) > 1 else 0
            out += [ScopeOutput(path, i, count, v.aval, body.route, v) for i, v in enumerate(variables)]
    return out


def _path(scope: Scope, modules: dict[Scope, str]) -> str:
    """The path of a scope: after that of the innermost module around it."""
    for k in range(len(scope), -1, -1):
        if scope[:k] in modules:
            return ".".join(filter(None, (modules[scope[:k]], *scope[k:])))
    return ".".join(scope)


def _leaves(body: _Body, variable: JaxprAtom, scope: Scope) -> bool:
    """Whether the forward pass reads a variable outside of a scope, or the program returns it."""
    for eqn in body.readers.get(variable, ()):
        if not compat.is_backward(body.prefix, eqn) and body.scope(eqn)[: len(scope)] != scope:
            return True
    results = [i for i, v in enumerate(body.jaxpr.outvars) if v is variable]
    if not results or body.outer is None or body.eqn is None:
        return bool(results)
    name = body.eqn.primitive.name
    if name == "while" or len(body.jaxpr.outvars) != len(body.eqn.outvars):
        return True
    if name == "scan" and results[0] < compat.scan_split(body.eqn.params)[1]:
        return True
    return any(_leaves(body.outer, body.eqn.outvars[i], scope) for i in results)


def _marked(jaxpr: Jaxpr, route: Route, marks: Marks) -> Jaxpr:
    """A jaxpr with the marks that lie in it or in its bodies."""
    eqns: list[JaxprEqn] = []
    env: dict[JaxprAtom, JaxprAtom] = {}
    for k, eqn in enumerate(jaxpr.eqns):

        def marked_body(place: Place, body: Jaxpr, k: int = k) -> Jaxpr:
            own = (*route, (k, *place))
            return _marked(body, own, marks) if any(r[: len(own)] == own for r, _ in marks) else body

        eqn = with_bodies(eqn, marked_body)
        eqn = eqn.replace(invars=substituted(eqn.invars, env))
        eqns.append(eqn)
        for v in eqn.outvars:
            if (found := marks.get((route, v))) is not None:
                [env[v]] = fresh([v])
                name = ModuleOutput(found.path, found.element, found.elements, kind="scope")
                eqns.append(
                    compat.new_equation(module_output_p, [v], [env[v]], {"pin": name}, frozenset(), eqn)
                )
    return jaxpr.replace(eqns=eqns, outvars=substituted(jaxpr.outvars, env))
