"""Types for annotations: JAX's jaxprs by the attributes that this package uses, and what trees and parameters are.

JAX's own classes are not public, differ between its versions, and declare the type of a variable without the shape and
dtype that types of arrays have. Protocols compare structure only, so the jaxprs of every version satisfy them.

>>> import jax
>>> def primitives(jaxpr: Jaxpr) -> list[str]:
...     return [eqn.primitive.name for eqn in jaxpr.eqns]
>>> primitives(jax.make_jaxpr(lambda x: x * x + 1)(2.0).jaxpr)
['mul', 'add']
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike

from jshard._core.layout import ArrayType


JaxMesh = Mesh | AbstractMesh
"""A mesh with or without devices."""

PyTree = Any
"""A tree of containers with leaves of any kind, as in JAX: arguments and results of the user's functions."""

Function = Callable[..., PyTree]
"""A function between trees whose signature is the user's."""

ArrayFunction = Callable[..., Sequence[jax.Array]]
"""A function of arrays, by position, to a sequence of arrays."""

Params = Mapping[str, Any]
"""The parameters of a primitive: each has its own type, which its name tells."""

Index = jax.Array | int
"""A position along a dimension: traced, or 0 and the like where it is known."""


class Device(Protocol):
    """A device, `jax.Device`: its class is made at run time."""

    @property
    def id(self) -> int: ...
    @property
    def platform(self) -> str: ...
    @property
    def device_kind(self) -> str: ...
    @property
    def process_index(self) -> int: ...


class PyTreeDef(Protocol):
    """The structure of a tree, `jax.tree_util.PyTreeDef`."""

    @property
    def num_leaves(self) -> int: ...

    def children(self) -> Sequence[PyTreeDef]:
        """The structures of the root's children."""
        ...

    def node_data(self) -> tuple[type, object] | None:
        """The root's type and its data beside the children; None for a leaf."""
        ...

    def unflatten(self, leaves: Iterable[Any], /) -> PyTree:
        """The tree of this structure with these leaves."""
        ...


class NameStack(Protocol):
    """The names of the scopes and transformations around an equation."""

    def __init__(self) -> None: ...

    def __add__(self, other: NameStack, /) -> NameStack:
        """The names of an outer and of an inner stack."""
        ...

    def transform(self, name: str, /) -> NameStack:
        """The stack inside a transformation."""
        ...


class SourceInfo(Protocol):
    """Where an equation was written."""

    @property
    def name_stack(self) -> NameStack: ...
    @property
    def traceback(self) -> object: ...

    def replace(self, *, name_stack: NameStack) -> SourceInfo:
        """The same source line with another name stack."""
        ...


class Primitive(Protocol):
    """A primitive of JAX."""

    name: str
    multiple_results: bool

    def bind(self, *operands: Any, **params: Any) -> Any:
        """Its result on these operands, or the list of its results."""
        ...

    def get_bind_params(self, params: Any, /) -> Any:
        """The parameters of an equation as arguments of `bind`."""
        ...


class Aval(ArrayType, Protocol):
    """The type of an array in a jaxpr."""

    @property
    def size(self) -> int: ...

    def update(self, *, shape: tuple[int, ...]) -> Aval:
        """The type of an array of another shape."""
        ...

    def str_short(self, short_dtypes: bool = False) -> str:
        """Dtype and shape in short: `f32[8,4]`."""
        ...


class JaxprAtom(Protocol):
    """A variable or a literal of a jaxpr."""

    @property
    def aval(self) -> Aval: ...


class JaxprLiteral(JaxprAtom, Protocol):
    """A literal of a jaxpr."""

    @property
    def val(self) -> ArrayLike: ...


class JaxprEqn(Protocol):
    """An equation of a jaxpr."""

    @property
    def primitive(self) -> Primitive: ...
    @property
    def params(self) -> Params: ...
    @property
    def invars(self) -> Sequence[JaxprAtom]: ...
    @property
    def outvars(self) -> Sequence[JaxprAtom]: ...
    @property
    def effects(self) -> Collection[object]: ...
    @property
    def source_info(self) -> SourceInfo: ...
    @property
    def ctx(self) -> object: ...

    def replace(self, **changes: object) -> JaxprEqn:
        """The equation with other fields."""
        ...


class Jaxpr(Protocol):
    """An open jaxpr."""

    @property
    def constvars(self) -> Sequence[JaxprAtom]: ...
    @property
    def invars(self) -> Sequence[JaxprAtom]: ...
    @property
    def outvars(self) -> Sequence[JaxprAtom]: ...
    @property
    def eqns(self) -> Sequence[JaxprEqn]: ...
    @property
    def effects(self) -> Collection[object]: ...

    def replace(self, **changes: object) -> Jaxpr:
        """The jaxpr with other fields."""
        ...


class ClosedJaxpr(Protocol):
    """A jaxpr with the values of its constants; from JAX 0.11 one class with `Jaxpr`."""

    @property
    def jaxpr(self) -> Jaxpr: ...
    @property
    def consts(self) -> Sequence[jax.Array]: ...
    @property
    def effects(self) -> Collection[object]: ...

    def replace(self, *, jaxpr: Jaxpr) -> ClosedJaxpr:
        """The closed jaxpr of another body with the same constants."""
        ...
