"""Functions over nnx modules: what they change in their arguments is kept, as `nnx.jit` keeps it.

A train step takes a model and an optimizer and changes both. JAX sees modules as pytrees and would drop the
changes; so modules among the arguments are split into their state, the function of states is planned, and what it
hands back is written into the modules. Names are those of the arguments: `model.fc1.kernel`,
`optimizer.opt_state.0.mu.fc1.kernel`.

>>> import jax.numpy as jnp, optax
>>> from flax import nnx
>>> import jshard, jshard.flax
>>> @jshard.shard(in_strategy={"x": (1, 1)})
... def step(model, x):
...     model.bias[...] += x.sum(0)
...     return model(x)
>>> model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
>>> y = step(model, jnp.ones((3, 2)))
>>> model.bias[...].tolist()
[3.0, 3.0]
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from jshard._flax_names import named
from jshard._prepare import Request
from jshard._shard import Sharded
from jshard._wish.paths import argument_names


OVER = "__jshard_over__"


class OverModules:
    """A sharded function some of whose arguments are nnx modules or optimizers."""

    def __init__(self, request: Request):
        self.request = request
        self.functions: dict[Any, Sharded] = {}

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the function and write what it changed into the modules."""
        function, args, kwargs, held = self.taken_apart(args, kwargs)
        y, sown, *states = function(*args, **kwargs)
        for module, state in zip(held.values(), states, strict=True):
            if state is not None:
                nnx.update(module, state)
        for name, values in sown.items():
            write(held[name], values)
        return y

    def taken_apart(self, args: Any, kwargs: Any) -> tuple[Sharded, tuple, dict[str, Any], dict[str, Any]]:
        """The planned function of states, what to call it with, and the modules by argument name."""
        names = argument_names(self.request.fn, len(args))
        every = {**dict(zip(names, args, strict=False)), **kwargs}
        held = {n: v for n, v in every.items() if holds_state(v)}
        graph, whole = nnx.split(held)
        state = {n: whole[n] if n in whole else nnx.State({}) for n in held}
        key = graph, tuple(names[: len(args)]), tuple(kwargs)
        if key not in self.functions:
            self.functions[key] = self._planned(graph, names[: len(args)], tuple(held))
        args = tuple(state.get(n, a) for n, a in zip(names, args, strict=False))
        return self.functions[key], args, {n: state.get(n, v) for n, v in kwargs.items()}, held

    def _planned(self, graph: Any, names: Sequence[str], held: Sequence[str]) -> Sharded:
        fn = self.request.fn

        def pure(*args: Any, **kwargs: Any) -> Any:
            every = {**dict(zip(names, args, strict=False)), **kwargs}
            given = {n: every[n] for n in held}
            before = {n: {p: value_of(v) for p, v in flat(s)} for n, s in given.items()}
            modules = nnx.merge(graph, nnx.State({n: s for n, s in given.items() if jax.tree.leaves(s)}))
            with contextlib.ExitStack() as stack:
                for module in modules.values():
                    stack.enter_context(named(module))
                y = fn(
                    *(modules.get(n, a) for n, a in zip(names, args, strict=False)),
                    **{n: modules.get(n, v) for n, v in kwargs.items()},
                )
            _, after = nnx.split(modules)
            states, sown = dict.fromkeys(held), {}
            for n in held:
                old, new = before[n], dict(flat(after[n])) if n in after else {}
                if any(p in new and value_of(new[p]) is not old[p] for p in old):
                    states[n] = nnx.from_flat_state({p: v for p, v in new.items() if p in old})
                extra = {".".join(map(str, p)): value_of(new[p]) for p in new if p not in old}
                if extra:
                    sown[n] = extra
            # A part of the result for each module, of the same structure: known as that argument handed back.
            return y, sown, *states.values()

        pure.__name__ = pure.__qualname__ = self.request.name
        pure.__signature__ = inspect.signature(fn)  # type: ignore[attr-defined]
        out = self.request.out_strategy
        if out is not None and not isinstance(out, str):
            out = (out, *(None,) * (1 + len(held)))
        return Sharded(dataclasses.replace(self.request, fn=pure, out_strategy=out))


def holds_state(x: Any) -> bool:
    """Whether an argument is a module or optimizer, whose changes are to be kept."""
    return hasattr(type(x), OVER)


def flat(state: Any) -> list[tuple[tuple, Any]]:
    """Variables of a state with their paths."""
    found: Any = nnx.to_flat_state(state)
    return list(found.items() if hasattr(found, "items") else found)


def value_of(variable: Any) -> Any:
    """What a variable holds, without the array-like around it."""
    if variable is None:
        return None
    return variable.get_value() if hasattr(variable, "get_value") else getattr(variable, "value", variable)


def write(module: Any, changed: Mapping[str, Any]) -> None:
    """Put changed values into a module's own variables; those that were sown are new variables."""
    paths = {".".join(map(str, p)): p for p, _ in flat(nnx.state(module))}
    for key, value in changed.items():
        parts = paths.get(key, tuple(key.split(".")))
        holder = module
        for part in parts[:-1]:
            holder = _part(holder, part)
        current = _part(holder, parts[-1], None)
        if isinstance(current, nnx.Variable):
            current.set_value(value)
        else:
            setattr(holder, str(parts[-1]), nnx.Intermediate(value))


def _part(holder: Any, part: Any, *default: Any) -> Any:
    if isinstance(holder, Mapping):
        return holder[part] if not default else holder.get(part, *default)
    if isinstance(holder, nnx.List | list | tuple):
        return holder[int(part)]
    return getattr(holder, str(part), *default)


def install() -> None:
    """Let `jshard.shard` know nnx modules and optimizers among the arguments of a call."""
    for cls in (nnx.Module, nnx.Optimizer):
        setattr(cls, OVER, OverModules)
