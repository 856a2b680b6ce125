"""Common to nnx and linen: the token with a module's options, and calls split into traced and static parts.

Modules are called with arrays, flags (`train=True`), configurations. Arrays and numbers are traced, as in `jax.jit`;
everything else is static: a planned function is made for each value.

>>> call = ModuleCall.of((1.0, None), {"train": True})
>>> call.statics, call.with_dynamic(call.dynamic()) == ((1.0, None), {"train": True})
(((1, True),), True)
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax

from jshard._api.plan import Plan
from jshard._api.shard import Sharded, shard
from jshard._api.shard_request import DeferredParameterPlan
from jshard._core.argument_checks import check_call
from jshard._core.errors import ShardError, StrategyError
from jshard._core.jax_types import Function, PyTree, PyTreeDef
from jshard._core.messages import suggest
from jshard._spec.entry import format_entry, is_strategy, looks_like_strategy
from jshard._spec.options import KEYWORD_ADVICE
from jshard._spec.parameter_plan import LeafIndex, flatten_plan, name_parts
from jshard._spec.tree_paths import Leaf
from jshard.flax._function import is_state


class ShardingToken:
    """The options of a sharded module, and its planned functions by static part of the call; equal if the options are.

    `fusion`: what is replaced by fused functions while it is traced, with a method `around`; or None.
    """

    def __init__(self, name: str, options: dict[str, PyTree], fusion: PyTree = None):
        self.name, self.options, self.fusion = name, options, fusion
        self.functions: dict[Hashable, Any] = {}
        self._key = (name, hashable_key(options), fusion)

    def __repr__(self) -> str:
        return f"<sharded {self.name}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardingToken) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __deepcopy__(self, memo: dict[int, object]) -> ShardingToken:
        return self  # a cloned module shares the plans

    def __reduce__(self) -> tuple:
        return ShardingToken, (self.name, self.options, self.fusion)  # without plans and compiled programs


@dataclasses.dataclass(frozen=True, eq=False)
class ModuleCall:
    """The arguments of a call: `arrays`, the traced leaves, and `statics`, (position among the leaves, value)."""

    tree: PyTreeDef
    arrays: tuple[jax.Array, ...]
    statics: tuple[tuple[int, object], ...]

    @staticmethod
    def of(args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> ModuleCall:
        """Split the arguments of a call."""
        leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)), is_leaf=is_state)
        statics = tuple((i, x) for i, x in enumerate(leaves) if not is_traced(x))
        return ModuleCall(tree, tuple(x for x in leaves if is_traced(x)), statics)

    @property
    def key(self) -> Hashable:
        """Equal for calls that run the same function of arrays."""
        return self.tree, tuple((i, type(x), hashable_key(x)) for i, x in self.statics)

    @property
    def shapes(self) -> PyTree:
        """Shapes and dtypes of the arrays, equal inside and outside of a trace."""
        arrays = jax.tree.leaves(self.arrays)
        return tuple((getattr(x, "shape", ()), str(getattr(x, "dtype", type(x)))) for x in arrays)

    def dynamic(self) -> tuple[tuple, dict[str, PyTree]]:
        """The arguments with None in place of static leaves."""
        return self._fill(self.arrays, dict.fromkeys(i for i, _ in self.statics))

    def with_dynamic(self, dynamic: tuple[tuple, dict[str, PyTree]]) -> tuple[tuple, dict[str, PyTree]]:
        """The arguments with the arrays of `dynamic`, a value of `dynamic()`."""
        return self.with_arrays(jax.tree.leaves(dynamic, is_leaf=is_state))

    def with_arrays(self, arrays: Sequence[PyTree]) -> tuple[tuple, dict[str, PyTree]]:
        """The arguments with these arrays."""
        return self._fill(arrays, dict(self.statics))

    def _fill(
        self, arrays: Sequence[PyTree], others: Mapping[int, object]
    ) -> tuple[tuple, dict[str, PyTree]]:
        next_array = iter(arrays)
        leaves = [others[i] if i in others else next(next_array) for i in range(self.tree.num_leaves)]
        return jax.tree.unflatten(self.tree, leaves)


def is_traced(x: object) -> bool:
    """Whether an argument is traced: an array, a number or state of nnx; a bool is static."""
    if isinstance(x, bool):
        return False
    return (
        is_state(x)
        or isinstance(x, int | float | complex | jax.ShapeDtypeStruct)
        or (hasattr(x, "dtype") and hasattr(x, "shape"))
    )


class ById:
    """A hashable key of an object that is not hashable: equal for the same object only."""

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def hashable_key(value: object) -> Hashable:
    """A hashable key, equal for equal values; functions are equal if their code and closures are.

    >>> make = lambda scale: lambda x: scale * x
    >>> key = hashable_key
    >>> key(make(2)) == key(make(2)), key(make(2)) == key(make(3)), key({"a": [1]}) == key({"a": [1]})
    (True, False, True)
    """
    if isinstance(value, Mapping):
        return (type(value).__name__, *((k, hashable_key(v)) for k, v in value.items()))
    if isinstance(value, tuple | list):
        return (type(value).__name__, *map(hashable_key, value))
    if isinstance(value, functools.partial):
        return "partial", hashable_key(value.func), hashable_key(value.args), hashable_key(value.keywords)
    if isinstance(value, types.FunctionType):
        try:
            cells = tuple(hashable_key(c.cell_contents) for c in value.__closure__ or ())
        except (ValueError, RecursionError):  # an empty cell, or a function that captures itself
            return value
        return value.__module__, value.__qualname__, value.__code__, hashable_key(value.__defaults__), cells
    try:
        hash(value)
    except TypeError:
        return ById(value)
    return value


def checked_options(
    name: str, original: Function, options: dict[str, PyTree], method: str = "__call__"
) -> dict[str, PyTree]:
    """The options of `.shard` that differ from the defaults, checked as far as possible without a call."""
    check_call(shard, (None,), options, f"{name}.shard", advice=KEYWORD_ADVICE)
    shard(
        lambda: None, **{k: v for k, v in options.items() if not k.endswith(("strategy", "parameter_plan"))}
    )
    for taken in ("static_argnums", "donate_argnums"):
        if options.get(taken) is not None:
            raise ShardError(
                f"{taken} counts the arguments of a function, and {name} is a module",
                where=f"{name}.shard",
                fix=f"{taken.replace('nums', 'names')}, or shard a function over the module",
            )
    in_strategy = _entries_by_name(options["in_strategy"], own_parameters(original), name)
    if isinstance(in_strategy, Mapping) and in_strategy is options["in_strategy"]:
        known = [p.name for p in own_parameters(original)]
        for key in in_strategy:
            if key not in known:
                close = suggest(key, known)
                raise StrategyError(
                    f"{name}.{method} has no argument {key!r}", where=f"in_strategy[{key!r}]",
                    fix=f"one of {', '.join(known)}" + (f"; nearest: {close}" if close else ""),
                )  # fmt: skip
    defaults = inspect.signature(shard).parameters
    base = dict.fromkeys(("in_strategy", "out_strategy", "parameter_plan"))
    return base | {k: v for k, v in options.items() if v is not defaults[k].default}


def own_parameters(original: Function) -> list[inspect.Parameter]:
    """Parameters of a method without `self`."""
    return list(inspect.signature(original).parameters.values())[1:]


def sharded_call(
    token: ShardingToken,
    pure: Function,
    original: Function,
    leading: Sequence[str],
    *,
    returns_pair: bool = False,
) -> Sharded:
    """`pure` as a sharded function.

    - `leading`: names of its first arguments, which precede those of `original`; the first holds the parameters.
    - `returns_pair`: whether it returns (result, changed state); `out_strategy` is for the result.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    own = [
        p.replace(kind=kind) if p.kind is p.POSITIONAL_ONLY else p
        for p in own_parameters(original)
        if p.name not in leading
    ]
    pure.__signature__ = inspect.Signature([*(inspect.Parameter(n, kind) for n in leading), *own])  # type: ignore[attr-defined]
    pure.__name__ = pure.__qualname__ = token.name
    options = dict(token.options)
    options["in_strategy"] = _entries_by_name(options["in_strategy"], own, token.name)
    plan = options["parameter_plan"]
    options["parameter_plan"] = DeferredParameterPlan(
        lambda leaves: relative_names(plan, [leaf for leaf in leaves if leaf.argument == leading[0]])
    )
    if returns_pair and options["out_strategy"] is not None and not isinstance(options["out_strategy"], str):
        options["out_strategy"] = (_single(options["out_strategy"]), None)
    return shard(pure, **options)


def relative_names(plan: PyTree, leaves: Sequence[Leaf]) -> PyTree:
    """A parameter plan with names relative to the module.

    MindSpore names parameters from the outermost cell: `self.block1.dense2.kernel` in a plan for block1. A name that
    matches no parameter is shortened from the front until it matches; if it never does, it is kept, and reported later.

    >>> relative_names({"self.block1.dense2.kernel": (8, 1)}, [Leaf("state.dense2.kernel", (8, 8), None, "state")])
    {'dense2.kernel': (8, 1)}
    """
    if not isinstance(plan, Mapping):
        return plan
    index, out = LeafIndex.of(leaves), {}
    for name, entry in flatten_plan(plan, "parameter_plan").items():
        parts = name_parts(name)
        shorter = (".".join(parts[i:]) for i in range(len(parts) - 1))
        own = name if index.find(name) else next((s for s in shorter if index.find(s)), name)
        out[own if own not in out else name] = entry
    return out


def _entries_by_name(in_strategy: PyTree, own: Sequence[inspect.Parameter], name: str) -> PyTree:
    """`in_strategy` as a dict by argument name, since the leading arguments of the pure function have no entries."""
    if in_strategy is None or isinstance(in_strategy, Mapping):
        return in_strategy
    count = len(in_strategy) if isinstance(in_strategy, tuple | list) else 0
    names = [p.name for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]
    one = is_strategy(in_strategy) and in_strategy or looks_like_strategy(in_strategy) or not count
    if one and in_strategy != ():
        raise StrategyError(
            f"in_strategy of {name} is {format_entry(in_strategy)}, not one entry per argument",
            where=f"{name}.shard",
            fix=f"in_strategy=({format_entry(in_strategy)},) for {', '.join(names) or 'its arguments'}",
        )
    several = any(p.kind is p.VAR_POSITIONAL for p in own)
    if count > len(names) and not several:
        raise StrategyError(
            f"in_strategy of {name} has {count} entries, and the call takes {len(names)}: {', '.join(names)}",
            where=f"{name}.shard",
            fix="one entry per argument of the call, without self",
        )
    names += [f"{p.name}.{i}" for p in own if p.kind is p.VAR_POSITIONAL for i in range(count)]
    return dict(zip(names, in_strategy, strict=False))


def _single(entry: PyTree) -> PyTree:
    wrapped = isinstance(entry, tuple) and len(entry) == 1 and not isinstance(entry[0], int)
    return entry[0] if wrapped else entry


RECORDED_PLANS: contextvars.ContextVar[dict[str, Plan] | None] = contextvars.ContextVar(
    "record", default=None
)
"""Inside `record_plans`, the plans so far by module path; else None."""


def record_plans(run: Callable[[], object]) -> dict[str, Plan]:
    """The plans of all sharded modules that `run` calls, by module path."""
    plans: dict[str, Plan] = {}
    token = RECORDED_PLANS.set(plans)
    try:
        run()
    finally:
        RECORDED_PLANS.reset(token)
    return plans


def outermost_plan(plans: Mapping[str, Plan], name: str) -> Plan:
    """The plan of the outermost sharded module; `ShardError` if there is none, or several side by side."""
    if not plans:
        raise ShardError(
            f"this {name} is not sharded",
            where="jshard.flax.plan_of",
            fix="module.shard(...) first",
        )
    if len(plans) > 1 and "" not in plans:
        raise ShardError(
            f"{len(plans)} modules of this {name} are sharded: {', '.join(plans)}",
            where="jshard.flax.plan_of",
            fix="jshard.flax.plans_of(...), a dict from module path to plan",
        )
    return plans[""] if "" in plans else next(iter(plans.values()))


class OnClassError(ShardError, AttributeError):
    """`.shard` was called on a class; also an AttributeError, so that a field named `shard` gets no default."""


class ShardMethod:
    """Descriptor of the method `.shard`: on instances only; an attribute or field of that name takes precedence."""

    def __init__(self, function: Function):
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, module: object, cls: type | None = None) -> Function:
        if module is None:
            name = cls.__name__ if cls is not None else "Module"
            raise OnClassError(
                f"shard was called on the class {name}",
                where=f"{name}.shard",
                fix=f"make a module first: {name}(...).shard(...)",
            )
        return functools.partial(self.function, module)
