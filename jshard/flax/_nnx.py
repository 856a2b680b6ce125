"""`module.shard(...)` for `flax.nnx`: the same module, with its call planned and run sharded.

The module gets an attribute, a `ShardingToken` with the options. The token is a hashable object, so it is part of the
graph definition and not of the state: it survives `nnx.merge`, `nnx.jit` and `nnx.grad`, and checkpoints and optimizers
do not contain it.

`.shard` also replaces `__call__` of the module's class (user classes included), once and for the life of the process,
by a wrapper that runs instances with a token sharded and calls the original for all others; the original is the
attribute `flax_protocol.SHARDABLE_CALL` of the wrapper.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Sequence

import jax
from flax import nnx

from jshard._api.plan import Plan
from jshard._core.argument_checks import check_call
from jshard._core.errors import NestedShardError, ShardError
from jshard._core.jax_types import Function, PyTree
from jshard._spec.flax_protocol import NNX_TOKEN, SHARD_MODULE, SHARDABLE_CALL
from jshard._spec.options import DEFAULT_LEVEL
from jshard.flax._function import is_state
from jshard.flax._module_call import (
    RECORDED_PLANS,
    ModuleCall,
    ShardingToken,
    ShardMethod,
    checked_options,
    outermost_plan,
    record_plans,
    sharded_call,
)
from jshard.flax._module_outputs import mark_output
from jshard.flax._name_scopes import module_scopes


def shard_module(
    module: nnx.Module,
    in_strategy: PyTree = None,
    out_strategy: PyTree = None,
    parameter_plan: PyTree = None,
    device: str | None = None,
    level: int = DEFAULT_LEVEL,
    **options: PyTree,
) -> nnx.Module:
    """Shard the call of an `nnx.Module` and return the module itself.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> import jshard.flax
    >>> dense = nnx.Linear(8, 4, rngs=nnx.Rngs(0)).shard(in_strategy=((1, 1),))
    >>> dense(jnp.ones((2, 8))).shape
    (2, 4)

    Arguments: those of `jshard.shard`. `in_strategy` has one entry per argument of `__call__` (without `self`);
    `parameter_plan` names are paths in the module: `block1.dense2.kernel`, `self.` before them and `*` allowed.
    """
    name = type(module).__name__
    _refuse_nested(module, name)
    options = dict(
        in_strategy=in_strategy, out_strategy=out_strategy, parameter_plan=parameter_plan, device=device, level=level,
        **options,
    )  # fmt: skip
    _wrap_call(type(module))
    setattr(module, NNX_TOKEN, ShardingToken(name, checked_options(name, type(module).__call__, options)))
    return module


def token_of(module: nnx.Module) -> ShardingToken | None:
    """The token of a sharded module, or None."""
    return vars(module).get(NNX_TOKEN)


_MODULE_PATHS: contextvars.ContextVar[dict[int, str]] = contextvars.ContextVar("root")


def plans_of(module: nnx.Module, *args: PyTree, **kwargs: PyTree) -> dict[str, Plan]:
    """The plan of every sharded module of a model, by module path; arguments as for the call, or shapes."""
    check_call(type(module).__call__, (module, *args), kwargs, type(module).__name__)
    call = ModuleCall.of(args, kwargs)
    stateful = [is_state(x) for x in call.arrays]
    graph, state = nnx.split((module, [x for x, s in zip(call.arrays, stateful, strict=True) if s]))

    def run(state: PyTree, arrays: Sequence[PyTree]) -> None:
        copy, objects = nnx.merge(graph, state)
        next_object, next_array = iter(objects), iter(arrays)
        token = _MODULE_PATHS.set({id(m): ".".join(map(str, p)) for p, m in nnx.iter_modules(copy)})
        try:
            args, kwargs = call.with_arrays([next(next_object if s else next_array) for s in stateful])
            copy(*args, **kwargs)
        finally:
            _MODULE_PATHS.reset(token)

    arrays = [x for x, s in zip(call.arrays, stateful, strict=True) if not s]
    return record_plans(lambda: jax.eval_shape(run, state, arrays))


def _path_of(module: nnx.Module) -> str:
    return _MODULE_PATHS.get({}).get(id(module), type(module).__name__)


def plan_of(module: nnx.Module, *args: PyTree, **kwargs: PyTree) -> Plan:
    """The plan of a sharded module for these arguments of its call."""
    return outermost_plan(plans_of(module, *args, **kwargs), type(module).__name__)


def _refuse_nested(module: nnx.Module, name: str) -> None:
    for path, child in nnx.iter_modules(module):
        if path and token_of(child) is not None:
            where = ".".join(map(str, path))
            raise NestedShardError(
                f"{name} has the sharded module {where} ({type(child).__name__}) inside",
                where=f"{name}.{where}",
                fix=f"shard either {name} or {where}; pin {where} through parameter_plan of {name}",
            )


def _wrap_call(cls: type) -> None:
    """Replace `__call__`, in the class of the MRO that defines it, by a wrapper that honours tokens."""
    owner = next((c for c in cls.__mro__ if "__call__" in vars(c)), None)
    if owner is None or owner is object:
        raise ShardError(
            f"{cls.__name__} has no __call__", where=f"{cls.__name__}.shard",
            fix="shard a function of the module instead: jshard.shard(lambda module, x: module.method(x), ...)",
        )  # fmt: skip
    original = vars(owner)["__call__"]
    if hasattr(original, SHARDABLE_CALL):
        return

    @functools.wraps(original)
    def call(self: nnx.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        token = token_of(self)
        if token is None:
            return original(self, *args, **kwargs)
        return _call_sharded(token, self, call, args, kwargs)

    setattr(call, SHARDABLE_CALL, original)
    owner.__call__ = call


def _call_sharded(
    token: ShardingToken,
    module: nnx.Module,
    method: Function,
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> PyTree:
    call = ModuleCall.of(args, kwargs)
    if call.key not in token.functions:
        original = getattr(method, SHARDABLE_CALL, method)
        pure = _pure(token, original, call)
        token.functions[call.key] = sharded_call(token, pure, original, ["state"])
    function = token.functions[call.key]
    dynamic, dynamic_kw = call.dynamic()
    record = RECORDED_PLANS.get()
    if record is not None:
        record[_path_of(module)] = function.plan(module, *dynamic, **dynamic_kw)
    return function(module, *dynamic, **dynamic_kw)


def _pure(token: ShardingToken, original: Function, call: ModuleCall) -> Function:
    """The call as a function of the module, an argument named `state`, and the call's own arguments."""

    def pure(state: PyTree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        _refuse_nested(state, token.name)
        delattr(state, NNX_TOKEN)  # `super().__call__` inside its methods must run unsharded
        args, kwargs = call.with_dynamic((args, kwargs))
        with module_scopes(state, inside=True):
            y = mark_output(original(state, *args, **kwargs), ())
        setattr(state, NNX_TOKEN, token)
        return y

    return pure


def install() -> None:
    """Add the method `.shard` to `nnx.Module`."""
    if "shard" not in vars(nnx.Module):
        nnx.Module.shard = ShardMethod(shard_module)  # type: ignore[attr-defined]
        setattr(nnx.Module, SHARD_MODULE, staticmethod(shard_module))
