"""`Policy`: what a family of models needs beside a layout; and the registry in which a model's policy is found.

A layout that is a recipe or nothing works on any model. A policy adds what changes the model itself: a vocabulary padded
so that devices divide it, a method replaced by a fused one, and the way back for checkpoints.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, TypeVar

from jshard._core.errors import ShardError
from jshard._core.jax_types import Function, PyTree
from jshard._core.messages import describe_value, suggest


class Policy:
    """What a family of models needs: override what differs from doing nothing.

    >>> import jshard
    >>> class TwoDimensional(jshard.Policy):
    ...     models = ("mylibrary.models.Transformer",)
    ...     def layout(self, model, mesh):
    ...         return "fsdp+megatron"
    >>> jshard.Policy.register("mylibrary.models.Transformer", TwoDimensional) is TwoDimensional
    True
    >>> jshard.Policy.forget("mylibrary.models.Transformer")

    `jshard.flax.optimize(model, *args)` finds the policy of a model by its class or the nearest class that it derives
    from; `optimize(model, *args, policy=TwoDimensional())` names one.
    """

    models: ClassVar[tuple[str, ...]] = ()
    """Qualified names of the classes that this policy is for; empty: any."""

    fused: ClassVar[Mapping[str, Mapping[str, Function]]] = {}
    """What `optimize(fused=...)` replaces by name, `{"attention": {"module.Class.method": lambda original, *args: ...}}`."""

    def matches(self, model: PyTree) -> bool:
        """Whether the policy is for a model: by default, whether its class or one that it derives from is in `models`."""
        return not self.models or any(_distance(key, type(model).__mro__) is not None for key in self.models)

    def prepare(self, model: PyTree) -> PyTree:
        """The model as it is to be planned: a vocabulary padded, methods replaced. By default as it is."""
        return model

    def layout(self, model: PyTree, mesh: PyTree) -> PyTree:
        """The layout: a recipe, a dict or `Config` as for `shard(config=)`; None, the default, leaves it to the search."""
        return None

    def restore(self, state: PyTree) -> PyTree:
        """State of the prepared model as state of the plain one, for checkpoints. By default as it is."""
        return state

    @staticmethod
    def register(key: str | Callable[[PyTree], bool], policy: type[Policy] | str) -> type[Policy] | str:
        """Find `policy` for models of the class of this qualified name (and of classes that derive from it).

        - `key`: a qualified name such as `mylibrary.models.Transformer`, also one by which a package exports the class, or a
            function of a model that says whether.
        - `policy`: a class, or its place `mylibrary.policies:Transformer`, imported when a model has it.

        Raises `ShardError` for a key that is taken or of another kind.
        """
        if not isinstance(key, str) and not callable(key) or isinstance(key, type):
            raise ShardError(
                f"the key of a policy is {describe_value(key)}",
                where="Policy.register",
                fix="the qualified name of a class, 'mylibrary.models.Transformer', or a function of a model",
            )
        if not (isinstance(policy, type) and issubclass(policy, Policy)) and not isinstance(policy, str):
            raise ShardError(
                f"a policy is {describe_value(policy)}",
                where="Policy.register",
                fix="a class that derives from jshard.Policy, or its place 'mylibrary.policies:Transformer'",
            )
        if key in _REGISTRY and _REGISTRY[key] is not policy:
            raise ShardError(
                f"{_name(key)} has a policy already, {_name(_REGISTRY[key])}",
                where="Policy.register",
                fix=f"Policy.forget({key!r}) before",
            )
        _REGISTRY[key] = policy
        return policy

    @staticmethod
    def forget(key: str | Callable[[PyTree], bool]) -> None:
        """Take a key out of the registry."""
        _REGISTRY.pop(key, None)


_REGISTRY: dict[str | Callable[[PyTree], bool], type[Policy] | str] = {}

P = TypeVar("P", bound=Policy)


@dataclasses.dataclass(frozen=True)
class FoundPolicy:
    """A policy with how it was found, for reports."""

    policy: Policy
    how: str


def qualified_name(cls: type) -> str:
    """Module and name of a class, as the registry has it.

    >>> qualified_name(Policy)
    'jshard._api.policy.Policy'
    """
    return f"{cls.__module__}.{cls.__qualname__}"


def _name(x: object) -> str:
    return x if isinstance(x, str) else getattr(x, "__qualname__", repr(x))


def find_policy(model: PyTree, policy: Policy | type[Policy] | str | None = None) -> FoundPolicy:
    """The policy for a model: the one given, else that of the nearest class in the registry, else one that does nothing.

    Raises `ShardError` where a given policy is not for this model, and where two are equally near.
    """
    own = qualified_name(type(model))
    if policy is not None:
        made = _made(policy)
        if not made.matches(model):
            names = ", ".join(made.models) or "other models"
            raise ShardError(
                f"{type(made).__name__} matches nothing here: it is for {names}, the model is a {own}",
                where="policy",
                fix=f"models = ({own!r},) in {type(made).__name__}, or policy=None",
            )
        return FoundPolicy(made, f"{type(made).__name__}, as given")
    found: list[tuple[int, str | Callable[[PyTree], bool]]] = []
    for key in _REGISTRY:
        if isinstance(key, str):
            distance = _distance(key, type(model).__mro__)
            found += [] if distance is None else [(distance, key)]
        elif key(model):
            found.append((0, key))
    nearest = [key for distance, key in found if distance == min(d for d, _ in found)]
    if len(nearest) > 1:
        both = " and ".join(f"{_name(_REGISTRY[k])} ({_name(k)})" for k in nearest)
        raise ShardError(
            f"{len(nearest)} policies match {own} equally: {both}",
            where="jshard.flax.optimize",
            fix=f"policy={_shown(_REGISTRY[nearest[0]])}, or another key",
        )
    if not nearest:
        _refuse_keys_without_class(type(model))
        return FoundPolicy(Policy(), "no policy: the search decides")
    made = _made(_REGISTRY[nearest[0]])
    return FoundPolicy(made, f"{type(made).__name__}, registered for {_name(nearest[0])}")


def _shown(policy: type[Policy] | str) -> str:
    return repr(policy) if isinstance(policy, str) else policy.__qualname__


def _distance(key: str, classes: Sequence[type]) -> int | None:
    """How far up the class of a key is among those that a model's class derives from; None if it is none of them.

    The key is the qualified name of the class, or another by which a module that is loaded has it.
    """
    names = [qualified_name(c) for c in classes]
    if key in names:
        return names.index(key)
    _, exported = _loaded(key)
    return next((i for i, c in enumerate(classes) if c is exported), None)


def _loaded(key: str) -> tuple[str, object]:
    """The loaded module that a dotted name begins with ('' if none), and what the rest is there; nothing is imported."""
    parts = key.split(".")
    for n in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:n])
        if module in sys.modules:
            found: object = sys.modules[module]
            for part in parts[n:]:
                found = getattr(found, part, None)
            return module, found
    return "", None


def _refuse_keys_without_class(cls: type) -> None:
    """A key that names no class of a module in which the model's class, or one that it derives from, is defined."""
    own = {c.__module__ for c in cls.__mro__}
    for key in _REGISTRY:
        if not isinstance(key, str) or "<locals>" in key:
            continue
        module, found = _loaded(key)
        if found is None and module in own:
            names = [qualified_name(c) for c in cls.__mro__ if c.__module__ == module]
            raise ShardError(
                f"the key {key!r} of {_name(_REGISTRY[key])} matches nothing: {module} has no such class",
                where="jshard.flax.optimize",
                fix=f"Policy.forget({key!r}) and {suggest(key, names)} as the key",
            )


def _made(policy: Policy | type[Policy] | str) -> Policy:
    if isinstance(policy, str):
        module, _, name = policy.partition(":")
        try:
            policy = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ShardError(
                f"the policy {policy!r} cannot be imported: {error}",
                where="policy",
                fix="'module:Class', of a class that derives from jshard.Policy",
            ) from None
    if isinstance(policy, type) and issubclass(policy, Policy):
        policy = policy()
    if not isinstance(policy, Policy):
        raise ShardError(
            f"policy is {describe_value(policy)}",
            where="policy",
            fix="a class that derives from jshard.Policy",
        )
    return policy
