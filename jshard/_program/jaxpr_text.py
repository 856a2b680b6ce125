"""A jaxpr as lines that are equal in every process that traced the same function.

`str(jaxpr)` has addresses of Python objects and sets in the order of a hash seed. Here variables are numbered, sets are
sorted, functions are names, bodies of loops and calls are indented, and the parameters of a primitive that are neither
numbers nor text are written by their type. So equal programs have equal lines, and the first line that differs tells
where two processes part.

>>> import jax
>>> print(*jaxpr_lines(jax.make_jaxpr(lambda x: jax.lax.reduce_sum(x, (0,)) ** 2)(jax.numpy.ones((2, 3)))), sep="\\n")
0: float32[2,3]
1: float32[3] = reduce_sum(0) axes=(0,) out_sharding=None
2: float32[3] = integer_pow(1) y=2
results 2
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jshard._core import jaxcompat as compat
from jshard._core.jax_types import ClosedJaxpr, Jaxpr, JaxprAtom
from jshard._core.layout import ArrayType


def jaxpr_lines(jaxpr: Jaxpr | ClosedJaxpr, indent: str = "") -> Iterator[str]:
    """The lines of a jaxpr: its arguments, its equations with their bodies below them, its results."""
    body, _ = compat.open_jaxpr(jaxpr)
    numbers: dict[JaxprAtom, int] = {}

    def defined(atoms: Sequence[JaxprAtom]) -> str:
        for a in atoms:
            numbers[a] = len(numbers)
        return ", ".join(f"{numbers[a]}: {_type_text(a.aval)}" for a in atoms)

    def used(atoms: Sequence[JaxprAtom]) -> str:
        return ", ".join(_value_text(a.val) if compat.is_literal(a) else str(numbers[a]) for a in atoms)

    yield indent + defined([*body.constvars, *body.invars])
    for eqn in body.eqns:
        operands, plain = used(eqn.invars), {k: v for k, v in eqn.params.items() if not any(_bodies(v))}
        params = "".join(f" {k}={_value_text(v)}" for k, v in sorted(plain.items()))
        yield f"{indent}{defined(eqn.outvars)} = {eqn.primitive.name}({operands}){params}"
        for name, value in sorted(eqn.params.items()):
            for inner in _bodies(value):
                yield f"{indent}  {name}:"
                yield from jaxpr_lines(inner, indent + "    ")
    yield f"{indent}results {used(body.outvars)}"


def _bodies(value: object) -> Iterator[Jaxpr | ClosedJaxpr]:
    for part in value if isinstance(value, tuple | list) else (value,):
        if compat.is_jaxpr(part):
            yield part


def _type_text(aval: ArrayType) -> str:
    return f"{getattr(aval, 'dtype', aval)}[{','.join(map(str, getattr(aval, 'shape', ())))}]"


def _value_text(value: object) -> str:
    """A parameter or literal, the same in every process."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.dtype | enum.Enum):
        return str(value)
    if isinstance(value, np.generic | np.ndarray) or hasattr(value, "__array__"):
        return array_text(value)
    if isinstance(value, NamedSharding):
        return f"{_value_text(value.spec)} on {dict(value.mesh.shape)}"
    if isinstance(value, PartitionSpec | tuple | list):
        return "(" + ", ".join(map(_value_text, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(_value_text, value))) + "}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{_value_text(k)}: {_value_text(v)}" for k, v in value.items())) + "}"
    return str(getattr(value, "__name__", type(value).__name__))


def array_text(value: object) -> str:
    """A number by its value, another array by its type and a hash of its elements."""
    array = np.asarray(value)
    if array.ndim == 0:
        return str(array[()])
    digest = hashlib.blake2b(np.ascontiguousarray(array).view(np.uint8).data, digest_size=8).hexdigest()
    return f"{_type_text(array)} {digest}"
