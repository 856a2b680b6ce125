"""Flax support: importing this adds the method `.shard(...)` to `nnx.Module` and `linen.Module`.

The counterpart of MindSpore's `self.block1.shard(in_strategy=((1, 8),), parameter_plan={...})`:

>>> import jax, jax.numpy as jnp
>>> from flax import linen, nnx
>>> import jshard.flax
>>> layer = nnx.Linear(8, 4, rngs=nnx.Rngs(0)).shard(in_strategy=((1, 1),))
>>> layer(jnp.ones((2, 8))).shape
(2, 4)
>>> layer = linen.Dense(4).shard(in_strategy=((1, 1),))
>>> layer.apply(layer.init(jax.random.key(0), jnp.ones((2, 8))), jnp.ones((2, 8))).shape
(2, 4)

The functional form is `jshard.shard(module, ...)`; `plan_of` gives the plan of a sharded module. `init` creates
parameters and optimizer state in the shardings of a plan, `place` moves existing ones. `optimize` does all of it with the
`jshard.Policy` of a model, for which `pad_vocabulary` and `replace_method` change the model.
"""

from __future__ import annotations

from types import ModuleType

from jshard._core.jax_types import PyTree


try:
    from flax import linen, nnx
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ImportError(
        "jshard.flax needs flax, which is not installed: pip install 'jshard[flax]'", name="flax"
    ) from None

from jshard._api.plan import Plan
from jshard._api.shard import Sharded
from jshard._core.argument_checks import checked
from jshard._core.errors import ShardError
from jshard._core.messages import type_with_article
from jshard._spec.tree_paths import path_name as path_name
from jshard.flax import _linen, _metadata as _pins, _nnx
from jshard.flax._fused import fuse as fuse
from jshard.flax._fused_functions import fuse_function as fuse_function
from jshard.flax._module_call import OnClassError
from jshard.flax._optimize import Optimized as Optimized, optimize as optimize
from jshard.flax._placement import init as init, place as place, shardings_for as shardings_for
from jshard.flax._replacements import (
    BlockOrder as BlockOrder,
    Padding as Padding,
    pad_vocabulary as pad_vocabulary,
    replace_method as replace_method,
)


_nnx.install()
_linen.install()
_pins.install()


@checked
def shard_module(module: nnx.Module | linen.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
    """`module.shard(...)` as a function, also for a class with an attribute of that name.

    >>> from flax import nnx
    >>> dense = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    >>> shard_module(dense, in_strategy=((1, 1),)) is dense
    True
    """
    return _flax_api(module, "shard").shard_module(module, *args, **kwargs)


@checked
def plan_of(module: nnx.Module | linen.Module, *args: PyTree, **kwargs: PyTree) -> Plan:
    """The plan of a sharded module for the arguments of its call (for a linen module, of `apply`).

    >>> import jax
    >>> from flax import nnx
    >>> dense = nnx.Linear(8, 4, rngs=nnx.Rngs(0)).shard(in_strategy=((1, 1),))
    >>> plan_of(dense, jax.ShapeDtypeStruct((2, 8), "float32")).inputs[-1].path
    'inputs'

    Raises `ShardError` if no module in it is sharded, or several are, none inside the other.
    """
    return _flax_api(module, "jshard.flax.plan_of").plan_of(module, *args, **kwargs)


@checked
def plans_of(module: nnx.Module | linen.Module, *args: PyTree, **kwargs: PyTree) -> dict[str, Plan]:
    """The plan of every sharded module of a model, by module path; arguments as for `plan_of`."""
    return _flax_api(module, "jshard.flax.plans_of").plans_of(module, *args, **kwargs)


def _flax_api(module: object, where: str) -> ModuleType:
    """`jshard.flax._nnx` or `jshard.flax._linen`, by the kind of module; `where`: for the error."""
    if isinstance(module, type) and issubclass(module, nnx.Module | linen.Module):
        name = module.__name__
        raise OnClassError(
            f"shard was called on the class {name}",
            where=f"{name}.shard",
            fix=f"make a module first: {name}(...).shard(...)",
        )
    if isinstance(module, nnx.Module):
        return _nnx
    if isinstance(module, linen.Module):
        return _linen
    fix = "a flax.nnx.Module or flax.linen.Module"
    if isinstance(module, Sharded):
        fix = f"{module.__name__}.plan(...), for a function of jshard.shard; here {fix}"
    raise ShardError(f"{type_with_article(module)} is no Flax module", where=where, fix=fix)
