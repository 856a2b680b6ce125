"""The checked arguments of `shard`, and the arguments of a call by kind: static, traced, donated.

>>> import jax, jshard
>>> f = jshard.shard(lambda x, n: x * n, static_argnums=1)
>>> named_traced_arguments(f.request, (jax.ShapeDtypeStruct((3,), "float32"), 2), {})
((ShapeDtypeStruct(shape=(3,), dtype=float32),), {}, ('x',))
>>> static_values(f.request, (1.0, 2), {})
((1, 2),)
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence

import jax

from jshard._api.call_state import View
from jshard._api.plan import Plan
from jshard._config.config_record import ConfigRecord
from jshard._core.jax_types import Function, PyTree
from jshard._core.named_topology import MeshRequest
from jshard._spec.options import CallOptions, PlanOptions
from jshard._spec.tree_paths import Leaf, argument_names


@dataclasses.dataclass(frozen=True, eq=False)
class ShardRequest:
    """The checked arguments of one `shard(...)`, valid for every call of the function.

    `config`: the rules of a configuration, for what the other arguments leave open.
    `view`: how the user sees the arguments and results of `fn`, where those differ (state of `flax.nnx`).
    """

    fn: Function
    name: str
    in_strategy: PyTree
    out_strategy: PyTree
    parameter_plan: PyTree
    options: PlanOptions
    call: CallOptions
    mesh: MeshRequest | None
    plan: Plan | None
    view: View = View()
    config: ConfigRecord | None = None

    @functools.cached_property
    def statics(self) -> tuple[set[int], set[str]]:
        """Positions and names of the static arguments; cached, since every call needs them."""
        return static_positions(self.fn, self.call)

    @property
    def tries_meshes(self) -> bool:
        """Whether the mesh is chosen by planning on several: `mesh="auto"`, `"auto:4"`, `"auto:v5e:4x4"`."""
        return isinstance(self.mesh, str) and self.mesh.partition(":")[0] == "auto"

    def without_plan(self, mesh: MeshRequest) -> ShardRequest:
        """The request without `plan=`; `mesh`: that of the plan, where the plan alone says it."""
        if self.plan is None:
            return self
        return dataclasses.replace(self, plan=None, mesh=mesh if self.mesh is None else self.mesh)


@dataclasses.dataclass(frozen=True, eq=False)
class DeferredParameterPlan:
    """A `parameter_plan` that is computed from the leaves of each call."""

    resolve: Callable[[Sequence[Leaf]], PyTree]


def static_positions(fn: Function, call: CallOptions) -> tuple[set[int], set[str]]:
    """Positions and names of the static arguments, each completed from the other by the signature of `fn`."""
    numbers, names = set(call.static_argnums), set(call.static_argnames)
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return numbers, names
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    numbers = {n % len(positional) if n < 0 and positional else n for n in numbers}
    numbers |= {i for i, n in enumerate(positional) if n in names}
    names |= {positional[i] for i in numbers if i < len(positional)}
    return numbers, names


def traced_arguments(
    request: ShardRequest, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """Positional and keyword arguments without the static ones."""
    numbers, names = request.statics
    if not numbers and not names:
        return tuple(args), dict(kwargs)
    traced = tuple(a for i, a in enumerate(args) if i not in numbers)
    return traced, {k: v for k, v in kwargs.items() if k not in names}


def named_traced_arguments(
    request: ShardRequest, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> tuple[tuple[PyTree, ...], dict[str, PyTree], tuple[str, ...]]:
    """`traced_arguments`, and the names of the positional parameters that are not static."""
    numbers = request.statics[0]
    names = tuple(n for i, n in enumerate(argument_names(request.fn, len(args))) if i not in numbers)
    return *traced_arguments(request, args, kwargs), names


def static_values(
    request: ShardRequest, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> tuple[tuple[int | str, object], ...]:
    """The static arguments of a call as (position or name, value)."""
    numbers, names = request.statics
    positional = tuple((i, a) for i, a in enumerate(args) if i in numbers)
    return positional + tuple((n, kwargs[n]) for n in sorted(kwargs) if n in names)


def donated_leaves(
    request: ShardRequest, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], names: tuple[str, ...]
) -> tuple[int, ...]:
    """Indices of the donated leaves among those of the traced arguments `(args, kwargs)`, named `names`."""
    numbers, _ = request.statics
    positions = sorted(set(range(len(args) + len(numbers))) - numbers)
    out: list[int] = []
    first = 0
    for i, (name, value) in enumerate([*zip(names, args, strict=False), *sorted(kwargs.items())]):
        n = len(jax.tree.leaves(value))
        by_position = i < len(args) and positions[i] in request.call.donate_argnums
        if by_position or name in request.call.donate_argnames:
            out += range(first, first + n)
        first += n
    return tuple(out)
