"""`module.shard(...)` for `flax.linen`: a module of the same name and fields, with its call planned and run sharded.

Linen clones modules (in `init`, `apply`, `bind` and every transformation), and a clone keeps only class and fields. So
the `ShardingToken` with the options is an attribute of a subclass made for these options; it has the name of the
original class, because parameter names derive from it. Its `__call__` lifts the module's scope into a pure function
(variables and random keys in, changed variables out), as `nn.remat` does, and passes that to `jshard.shard`.
Initialisation is unchanged.

>>> import jax, jax.numpy as jnp
>>> from flax import linen as nn
>>> import jshard.flax
>>> dense = nn.Dense(4).shard(in_strategy=((1, 1),))
>>> variables = dense.init(jax.random.key(0), jnp.ones((2, 8)))
>>> dense.apply(variables, jnp.ones((2, 8))).shape
(2, 4)
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Hashable, Iterator, Mapping

import jax
from flax import linen as nn
from flax.core import lift
from flax.linen import transforms

from jshard._api.plan import Plan
from jshard._core.errors import NestedShardError, ShardError
from jshard._core.jax_types import Function, PyTree
from jshard._spec.flax_protocol import LINEN_SUBCLASSES, LINEN_TOKEN, SHARD_MODULE
from jshard._spec.options import DEFAULT_LEVEL
from jshard.flax._module_call import (
    RECORDED_PLANS,
    ModuleCall,
    ShardingToken,
    ShardMethod,
    checked_options,
    hashable_key,
    outermost_plan,
    record_plans,
    sharded_call,
)


def shard_module(
    module: nn.Module,
    in_strategy: PyTree = None,
    out_strategy: PyTree = None,
    parameter_plan: PyTree = None,
    device: str | None = None,
    level: int = DEFAULT_LEVEL,
    **options: PyTree,
) -> nn.Module:
    """Shard the call of a `linen.Module`: a module that behaves as the original and runs sharded.

    >>> from flax import linen as nn
    >>> import jshard.flax
    >>> dense = nn.Dense(4).shard(in_strategy=((1, 1),))
    >>> type(dense).__name__, isinstance(dense, nn.Dense), dense.features
    ('Dense', True, 4)

    Arguments: those of `jshard.shard`. `in_strategy` has one entry per argument of `__call__` (without `self`);
    `parameter_plan` names are paths in the module: `block1.dense2.kernel`, `self.` before them and `*` allowed.
    Inside a parent's `setup` or `@nn.compact` the module itself is changed and returned; elsewhere it is a new one.
    """
    options = dict(
        in_strategy=in_strategy, out_strategy=out_strategy, parameter_plan=parameter_plan, device=device, level=level,
        **options,
    )  # fmt: skip
    cls = _unsharded_class(type(module))
    name = cls.__name__
    if not any("__call__" in vars(c) for c in cls.__mro__):
        raise ShardError(
            f"{name} has no __call__", where=f"{name}.shard",
            fix="shard a function of the module instead: jshard.shard(lambda v, x: module.apply(v, x), ...)",
        )  # fmt: skip
    own = _sharded_subclass(cls, checked_options(name, cls.__call__, options))
    if isinstance(module.parent, nn.Module):  # already named by its parent; a copy would be another child
        object.__setattr__(module, "__class__", own)
        return module
    fields = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.init}
    return own(**fields)


def with_fusion(module: nn.Module, fusion: PyTree) -> nn.Module:
    """A sharded module in whose call functions are replaced by fused ones; parameters and their names stay."""
    token = token_of(module)
    assert token is not None
    own = _sharded_subclass(_unsharded_class(type(module)), token.options, fusion)
    return own(**{f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.init})


def token_of(module: nn.Module) -> ShardingToken | None:
    """The token of a sharded module, or None."""
    return vars(type(module)).get(LINEN_TOKEN)


def plans_of(module: nn.Module, variables: PyTree, *args: PyTree, **kwargs: PyTree) -> dict[str, Plan]:
    """The plan of every sharded module of a model, by module path; arguments as for `module.apply`, or shapes."""
    if not isinstance(variables, Mapping):
        name = type(module).__name__
        raise ShardError(
            f"{name} has no variables yet, and was given a {type(variables).__name__} in their place",
            where=f"plan of {name}",
            fix=f"jshard.flax.plan_of(module, variables, ...) with variables, or their shapes, from {name}.init",
        )
    statics = ModuleCall.of(args, kwargs)

    def run(variables: PyTree, dynamic: PyTree) -> PyTree:
        args, kwargs = statics.with_dynamic(dynamic)
        return module.apply(variables, *args, **kwargs)

    return record_plans(lambda: jax.eval_shape(run, variables, statics.dynamic()))


def plan_of(module: nn.Module, variables: PyTree, *args: PyTree, **kwargs: PyTree) -> Plan:
    """The plan of a sharded module for these arguments of `module.apply`."""
    return outermost_plan(plans_of(module, variables, *args, **kwargs), type(module).__name__)


def _unsharded_class(cls: type) -> type:
    return cls.__bases__[0] if LINEN_TOKEN in vars(cls) else cls


def _sharded_subclass(cls: type, options: dict[str, PyTree], fusion: PyTree = None) -> type:
    """The subclass for these options, cached, so that modules made anew in every call share plans."""
    token = ShardingToken(cls.__name__, options, fusion)
    known = vars(cls).get(LINEN_SUBCLASSES)
    if known is None:
        known = {}
        setattr(cls, LINEN_SUBCLASSES, known)
    if token not in known:
        original = cls.__call__

        # `wraps` copies linen's marks on the method (compact, state managed).
        @functools.wraps(original)
        def call(self: nn.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
            if self.scope is None or self.is_initializing():
                return original(self, *args, **kwargs)
            return _call_sharded(token, original, self, args, kwargs)

        call.method_handler_wrapped = True  # type: ignore[attr-defined]
        body = {
            "__call__": call, LINEN_TOKEN: token, "__module__": cls.__module__, "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__, "__reduce__": _reduce, "__eq__": _equal, "__hash__": cls.__hash__,
        }  # fmt: skip
        known[token] = type(cls)(cls.__name__, (cls,), body)
    return known[token]


def _reduce(module: nn.Module) -> tuple:
    fields = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.init}
    fields["parent"] = None
    token = vars(type(module))[LINEN_TOKEN]
    return _unpickle, (_unsharded_class(type(module)), token.options, fields, token.fusion)


def _unpickle(
    cls: type, options: dict[str, PyTree], fields: dict[str, object], fusion: PyTree = None
) -> nn.Module:
    return _sharded_subclass(cls, options, fusion)(**fields)


def _equal(self: nn.Module, other: object) -> bool:
    return _unsharded_class(type(self)).__eq__(self, other)  # type: ignore[operator]


@dataclasses.dataclass
class _RunningCall:
    """The objects of a running call that a trace of its pure function uses; they must not outlive the call."""

    name: str
    make_scopes: Function
    repack: Function
    body: Function


_RUNNING: contextvars.ContextVar[_RunningCall] = contextvars.ContextVar("run")


def _call_sharded(
    token: ShardingToken,
    original: Function,
    module: nn.Module,
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> PyTree:
    """One call of a sharded module that is bound to a scope."""
    assert module.scope is not None
    path, outer = ".".join(module.scope.path), _RUNNING.get(None)
    if outer is not None:
        raise NestedShardError(
            f"{outer.name} has the sharded module {path} ({token.name}) inside",
            where=f"{token.name}.shard",
            fix=f"shard either {outer.name} or {path}; pin {path} through parameter_plan of {outer.name}",
        )

    def transform(body: Function) -> Function:
        def inner(
            make_scopes: Function,
            repack: Function,
            groups: PyTree,
            rngs: PyTree,
            *args: PyTree,
            **kwargs: PyTree,
        ) -> PyTree:
            scopes = jax.tree.leaves(make_scopes(groups, rngs))
            call = ModuleCall.of(args, kwargs)
            counters = [s.rng_counters for s in scopes]
            before = _rng_counts(counters)
            key = (
                _fingerprint(module), call.key, before, tuple(hashable_key(s.mutable) for s in scopes),
                tuple(s.path for s in scopes), tuple(hashable_key(s.flags) for s in scopes),
            )  # fmt: skip
            own, *shared = _own_first(groups)
            keys, *shared_keys = _own_first(rngs)
            first = [own, keys, *([tuple(shared), tuple(shared_keys)] if shared else [])]
            names = ["variables", "rngs", "shared", "shared_rngs"][: len(first)]
            if key not in token.functions:
                after: dict[Hashable, PyTree] = {}
                pure = _pure(call, before, len(first), after)
                pure = pure if token.fusion is None else token.fusion.around(pure)
                token.functions[key] = sharded_call(token, pure, original, names, returns_pair=True), after
            function, after = token.functions[key]
            dynamic, dynamic_kw = call.dynamic()
            with _running(_RunningCall(token.name, make_scopes, repack, body)):
                record = RECORDED_PLANS.get()
                if record is not None:
                    record[path] = function.plan(*first, *dynamic, **dynamic_kw)
                y, out = function(*first, *dynamic, **dynamic_kw)
            _set_rng_counts(counters, after.setdefault(call.shapes, _rng_counts(counters)))
            return y, out

        return lift.pack(inner, (True,), (True,), (True,), name=None, enable_kwargs=True)

    return transforms.decorator_lift_transform(transform, original)(module, *args, **kwargs)


def _pure(call: ModuleCall, before: PyTree, count: int, after: dict[Hashable, PyTree]) -> Function:
    """A function of the scope's variables, its random keys and the call's arguments.

    `before`: counts of drawn random keys at its start; `count`: how many arguments precede those of the call; `after`:
    output, shapes of the arguments -> counts of drawn keys at its end. Returns (result, changed variables).
    """

    def pure(*args: PyTree, **kwargs: PyTree) -> PyTree:
        running = _RUNNING.get()
        first, dynamic = args[:count], (args[count:], kwargs)
        groups, rngs = (_own_last(first[0], *first[2:3]),), (_own_last(first[1], *first[3:4]),)
        inner = running.make_scopes(groups, rngs)
        counters = [s.rng_counters for s in jax.tree.leaves(inner)]
        _set_rng_counts(counters, before)
        args, kwargs = call.with_dynamic(dynamic)
        y = running.body(inner, *args, **kwargs)
        after[ModuleCall.of(*dynamic).shapes] = _rng_counts(counters)
        return y, running.repack(inner)

    return pure


@contextlib.contextmanager
def _running(run: _RunningCall) -> Iterator[None]:
    token = _RUNNING.set(run)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def _own_first(groups: PyTree) -> list[PyTree]:
    """The module's own part, then those of modules that it shares; linen has its own last."""
    return [groups[0][-1], *groups[0][:-1]]


def _own_last(own: PyTree, shared: PyTree = ()) -> tuple:
    return (*shared, own)


def _rng_counts(counters: PyTree) -> PyTree:
    """How many random keys each scope has drawn, hashable: with equal counts, a call draws the same keys."""
    if isinstance(counters, Mapping):
        return tuple((k, _rng_counts(v)) for k, v in counters.items())
    return tuple(map(_rng_counts, counters)) if isinstance(counters, list) else counters


def _set_rng_counts(counters: list[dict[Hashable, PyTree]], wanted: PyTree) -> None:
    """Set counters, in place, to a value of `_rng_counts`."""
    for own, items in zip(counters, wanted, strict=True):
        _set_rng_counts_of(own, items)


def _set_rng_counts_of(own: dict[Hashable, PyTree], items: PyTree) -> None:
    for key in [k for k in own if k not in dict(items)]:
        del own[key]
    for key, value in items:
        if isinstance(value, tuple):
            _set_rng_counts_of(own.setdefault(key, {}), value)
        else:
            own[key] = value


def _fingerprint(value: object) -> Hashable:
    """A key of all that a module's program depends on: class and fields, recursively."""
    if isinstance(value, nn.Module):
        fields = [f.name for f in dataclasses.fields(value) if f.name != "parent" and f.init]
        return type(value), tuple((n, _fingerprint(getattr(value, n))) for n in fields)
    if isinstance(value, Mapping):
        return tuple((k, _fingerprint(v)) for k, v in value.items())
    if isinstance(value, tuple | list):
        return tuple(map(_fingerprint, value))
    return hashable_key(value)


def install() -> None:
    """Add the method `.shard` to `linen.Module`."""
    if "shard" not in vars(nn.Module):
        nn.Module.shard = ShardMethod(shard_module)  # type: ignore[attr-defined]
        setattr(nn.Module, SHARD_MODULE, staticmethod(shard_module))
