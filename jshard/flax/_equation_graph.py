"""A jaxpr as a graph whose values know what made them, computed again with some values made otherwise.

Problem.  To replace what several equations compute together, a pattern has to be followed from a value to what made it,
through calls such as `jit` of `jnp.where`; and the rest must be computed as it was traced.

Idea.  Each value is an object with its equation; calls are entered, so that their bodies are part of the graph. Values
are then computed in the order of the trace, without those that nobody needs; a replaced one is computed by its function.

>>> import jax
>>> graph = Graph.of(jax.make_jaxpr(lambda x: (x * 2 + 1, x - 1))(3.0))
>>> [v.made_by.eqn.primitive.name for v in graph.outputs]
['add', 'sub']
>>> graph.compute([5.0], {graph.outputs[0]: ((graph.inputs[0],), lambda x: x)})
[5.0, Array(4., dtype=float32, weak_type=True)]
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import ClosedJaxpr, Jaxpr, JaxprEqn, PyTree


_ENTERED = frozenset({"jit", "pjit", "closed_call"})


@dataclasses.dataclass(eq=False)
class Value:
    """A value of the graph: `made_by` is None for inputs and constants; `known` of a constant or literal."""

    aval: Any
    made_by: Made | None = None
    known: PyTree = None


@dataclasses.dataclass(eq=False)
class Made:
    """An equation on values; `calls`: the equations of the calls that it stands in, the outermost first."""

    eqn: JaxprEqn
    inputs: tuple[Value, ...]
    calls: tuple[JaxprEqn, ...]
    outputs: tuple[Value, ...] = ()


Replacement = tuple[tuple[Value, ...], Callable[..., PyTree]]
"""The values that a replaced value is computed from, and the function that does it."""


@dataclasses.dataclass(eq=False)
class Graph:
    """Inputs, equations in their order, and outputs.

    `uses`: by how many operands and outputs a value is used, without operands of equations that nobody needs.
    """

    inputs: list[Value]
    made: list[Made]
    outputs: list[Value]
    uses: Counter[Value]

    @staticmethod
    def of(jaxpr: Jaxpr | ClosedJaxpr) -> Graph:
        """The graph of a jaxpr."""
        opened, consts = compat.open_jaxpr(jaxpr)
        inputs = [Value(v.aval) for v in opened.invars]
        graph = Graph(inputs, [], [], Counter())
        graph.outputs = graph._enter(opened, consts, inputs, ())
        needed = graph._needed({})
        graph.uses.update(v for m in graph.made if needed[m] for v in m.inputs)
        graph.uses.update(graph.outputs)
        return graph

    def _enter(
        self, jaxpr: Jaxpr, consts: Sequence[PyTree], inputs: Sequence[Value], calls: tuple[JaxprEqn, ...]
    ) -> list[Value]:
        """The outputs of a body on some values."""
        env: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        env |= {v: Value(v.aval, known=c) for v, c in zip(jaxpr.constvars, consts, strict=True)}

        def read(v: Any) -> Value:
            return Value(v.aval, known=v.val) if compat.is_literal(v) else env[v]

        for eqn in jaxpr.eqns:
            operands = tuple(map(read, eqn.invars))
            if eqn.primitive.name in _ENTERED:
                body, inner = compat.open_jaxpr(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")))
                outputs = self._enter(body, inner, operands, (*calls, eqn))
            else:
                made = Made(eqn, operands, calls)
                made.outputs = tuple(Value(v.aval, made) for v in eqn.outvars)
                self.made.append(made)
                outputs = made.outputs
            env |= dict(zip(eqn.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def compute(
        self,
        arguments: Sequence[PyTree],
        replaced: Mapping[Value, Replacement] = {},
        bind: Callable[[JaxprEqn, Sequence[PyTree]], Sequence[PyTree]] | None = None,
    ) -> list[PyTree]:
        """The outputs for some arguments; `bind` computes an equation, by default as it was traced."""
        bind, needed = bind or bound, self._needed(replaced)
        values: dict[Value, PyTree] = dict(zip(self.inputs, arguments, strict=True))

        def read(v: Value) -> PyTree:
            return values[v] if v in values else v.known

        for made in self.made:
            if not needed[made]:
                continue
            with contextlib.ExitStack() as stack:
                for eqn in (*made.calls, made.eqn):
                    stack.enter_context(compat.eqn_context(eqn))
                if any(v in replaced for v in made.outputs):
                    ((output, (operands, run)),) = ((v, replaced[v]) for v in made.outputs)
                    values[output] = run(*map(read, operands))
                else:
                    values |= zip(made.outputs, bind(made.eqn, [read(v) for v in made.inputs]), strict=True)
        return [read(v) for v in self.outputs]

    def _needed(self, replaced: Mapping[Value, Replacement]) -> dict[Made, bool]:
        """Which equations the outputs and the effects need."""
        needed = {v.made_by for v in self.outputs}
        for made in reversed(self.made):
            if made in needed or made.eqn.effects:
                needed.add(made)
                new = [replaced[v][0] for v in made.outputs if v in replaced]
                needed |= {v.made_by for operands in (new or [made.inputs]) for v in operands}
        return {made: made in needed for made in self.made}


def bound(eqn: JaxprEqn, operands: Sequence[PyTree]) -> Sequence[PyTree]:
    """The results of an equation on some operands."""
    out = eqn.primitive.bind(*operands, **compat.bind_params(eqn, eqn.params))
    return out if eqn.primitive.multiple_results else (out,)


def constant(value: Value) -> float | None:
    """The number that a value is, whatever the arguments; None if it is none or depends on them."""
    if value.made_by is None:
        known = value.known
        if known is None or compat.is_tracer(known) or np.ndim(known) != 0:
            return None
        return float(np.asarray(known))
    made = value.made_by
    if made.eqn.primitive.name in ("broadcast_in_dim", "convert_element_type", "stop_gradient", "copy"):
        return constant(made.inputs[0])
    if value.aval.shape or made.eqn.effects or len(made.outputs) != 1:
        return None
    operands = [constant(v) for v in made.inputs]
    if not operands or None in operands:
        return None
    with jax.ensure_compile_time_eval():
        arrays = [jax.numpy.asarray(x, v.aval.dtype) for x, v in zip(operands, made.inputs, strict=True)]
        return float(bound(made.eqn, arrays)[0])
