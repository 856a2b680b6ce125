"""What the traced program says about the tensors that rules are about.

Of an argument: the dimension over which a loop runs, where layers are stacked, and the dimensions over which the first
product that reads it sums. Inside: the outputs of modules, the values of `checkpoint_name`, and those that leave a
named scope, where these are marked (`_program/scope_outputs.py`).

>>> import jax, jax.numpy as jnp
>>> from jshard._program.trace import build
>>> f = lambda ws, x: jax.lax.scan(lambda x, w: (x @ w.T, None), x, ws)[0]
>>> closed = jax.jit(f).trace(jnp.ones((3, 4, 4)), jnp.ones((2, 4))).jaxpr
>>> facts = facts_of_arguments(build(closed, name="f", input_names=["ws", "x"]))
>>> facts[0]["layer_axis"], facts[0]["contracted"], facts[1]["contracted"]
(0, (2,), (1,))
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping

from jshard._config.tensors import ProgramFacts, TensorName
from jshard._core import jaxcompat as compat
from jshard._core.jax_types import ClosedJaxpr, Jaxpr, JaxprEqn
from jshard._program.equation_bodies import bodies_of
from jshard._program.graph import Program
from jshard._program.pin_primitives import MODULE_OUTPUT
from jshard._spec.entry import Pin


_PASSED_ON = frozenset(
    (
        "convert_element_type",
        "rounded_sum",
        "copy",
        "name",
        "reduce_precision",
        "optimization_barrier",
        MODULE_OUTPUT,
    )
)
_ENTERED = frozenset(("scan_const", "scan_carry", "while_const", "while_carry"))


def facts_of_arguments(program: Program) -> dict[int, ProgramFacts]:
    """By number of the argument: `layer_axis` and `contracted`, where the program says so."""
    out: dict[int, ProgramFacts] = {}
    for i, op in enumerate(program.inputs):
        facts = _facts(program, program.operators[op].results[0])
        if facts:
            out[i] = facts
    return out


def _facts(program: Program, tensor: int) -> ProgramFacts:
    """Follow a tensor through what only converts, transposes or hands it on, up to the first product."""
    uses, operators = program.uses(), program.operators
    facts = ProgramFacts()
    queue = collections.deque([(tensor, tuple(range(program.tensors[tensor].ndim)))])
    seen = {tensor}
    while queue:
        t, dims = queue.popleft()  # `dims`: for each dimension of the value, that of the argument
        for number, k in uses[t]:
            op = operators[number]
            if op.eqn is not None and compat.is_backward(op.prefix, op.eqn):
                continue
            following, own = op.results, dims
            if op.primitive == "scan_xs":
                facts.setdefault("layer_axis", dims[0])
                own = dims[1:]
            elif op.primitive == "transpose":
                own = tuple(dims[d] for d in op.equation.params["permutation"])
            elif op.primitive == "dot_general":
                contracting = op.equation.params["dimension_numbers"][0][k]
                facts.setdefault("contracted", tuple(sorted(dims[d] for d in contracting)))
                other = op.operands[1 - k]
                facts.setdefault("product_with", other if isinstance(other, int) else None)
                continue
            elif op.primitive in _ENTERED:
                following = op.results[:1]
            elif op.primitive not in _PASSED_ON:
                continue
            for result in following:
                if result not in seen and program.tensors[result].ndim == len(own):
                    seen.add(result)
                    queue.append((result, own))
    return facts


def named_values(jaxpr: Jaxpr | ClosedJaxpr) -> list[TensorName]:
    """Every output of a module, `checkpoint_name` and marked scope of the forward pass, each name once."""
    found: dict[tuple[str, str, int], TensorName] = {}
    for eqn, prefix in _equations(jaxpr, ""):
        if compat.is_backward(prefix, eqn):
            continue
        if eqn.primitive.name == MODULE_OUTPUT:
            name = eqn.params["pin"]
            shape = list(eqn.outvars[0].aval.shape)
            for dim in reversed(name.added):
                del shape[dim]
            value = TensorName(
                name.path, tuple(shape), eqn.outvars[0].aval.dtype, kind=name.kind, element=name.element,
                elements=name.elements,
            )  # fmt: skip
        elif eqn.primitive.name == "name":
            aval = eqn.outvars[0].aval
            value = TensorName(str(eqn.params["name"]), tuple(aval.shape), aval.dtype, kind="name")
        else:
            continue
        found.setdefault((value.kind, value.path, value.element), value)
    return list(found.values())


def _equations(jaxpr: Jaxpr | ClosedJaxpr, prefix: str) -> Iterator[tuple[JaxprEqn, str]]:
    """All equations with the name stacks of the calls around them."""
    for eqn in compat.open_jaxpr(jaxpr)[0].eqns:
        yield eqn, prefix
        for body in bodies_of(eqn):
            yield from _equations(body, compat.name_stack(prefix, eqn))


def pin_of_name(pins: Mapping[tuple[str, str, int], Pin]) -> Callable[[JaxprEqn], Pin | None]:
    """The function from the equation of a named value to its pin; `pins` by (kind, path, element)."""

    def find(eqn: JaxprEqn) -> Pin | None:
        if eqn.primitive.name == "name":
            return pins.get(("name", str(eqn.params["name"]), 0))
        name = eqn.params["pin"]
        pin = pins.get((name.kind, name.path, name.element))
        if pin is None:
            return None
        for dim in name.added:
            pin = pin.batched(dim)
        return pin

    return find
