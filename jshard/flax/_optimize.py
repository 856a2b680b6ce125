"""`optimize`: a model with its policy found, prepared, planned, and placed or created in the planned shardings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
from flax import linen, nnx

from jshard._api.config import merged_config
from jshard._api.plan import Plan
from jshard._api.policy import FoundPolicy, Policy, find_policy
from jshard._core.errors import ShardError
from jshard._core.jax_types import PyTree
from jshard._core.messages import type_with_article
from jshard.flax import _linen, _nnx
from jshard.flax._fused import fuse
from jshard.flax._fused_functions import Fusion
from jshard.flax._placement import init, place, shardings_for


@dataclasses.dataclass(frozen=True, eq=False)
class Optimized:
    """A sharded model with its plan: `print` says which policy there is, and the plan's one line.

    `model`: the module, whose call runs sharded. `variables`: of a linen module, in their shardings; else None.
    """

    model: PyTree
    plan: Plan
    found: FoundPolicy
    layout: str
    variables: PyTree = None

    @property
    def policy(self) -> Policy:
        """The policy; one that does nothing where none was found."""
        return self.found.policy

    def state(self) -> PyTree:
        """The parameters as the plain model has them, for its checkpoints: those of nnx as an `nnx.State`."""
        return self.policy.restore(nnx.state(self.model) if self.variables is None else self.variables)

    def __str__(self) -> str:
        return f"{type(self.model).__name__}: {self.found.how}; layout: {self.layout}\n{self.plan!r}"


def optimize(
    model: PyTree | Callable[[], PyTree],
    *args: PyTree,
    policy: Policy | type[Policy] | str | None = None,
    mesh: PyTree = None,
    config: PyTree = None,
    rngs: PyTree = None,
    fused: Sequence[str] = (),
    **kwargs: PyTree,
) -> Optimized:
    """Shard a model: its policy found, the model prepared, planned, and placed or created in its shardings.

    >>> import jax
    >>> from flax import nnx
    >>> import jshard.flax
    >>> x = jax.ShapeDtypeStruct((8, 16), "float32")
    >>> done = jshard.flax.optimize(lambda: nnx.Linear(16, 4, rngs=nnx.Rngs(0)), x)
    >>> print(str(done).splitlines()[0])
    Linear: no policy: the search decides; layout: derived by the search
    >>> done.model(jax.numpy.ones((8, 16))).shape
    (8, 4)

    Arguments:

    - `model`: an nnx module, placed; a function that makes one, which is traced, so that no device and no host ever
        holds all of it; or a linen module with `rngs`, as for its `init`, whose variables are created likewise.
    - `args`, `kwargs`: arguments of its call, arrays or shapes, for the plan.
    - `policy`: a `jshard.Policy`, its class or place; default: the registered one, else the search decides.
    - `fused`: names of what is replaced by fused functions that keep less for gradients, `("attention", "norm")` and what
        the policy's `fused` adds, after the policy's `prepare`: as `fuse` for nnx, as `fuse_function` for linen.
    - `mesh`: as for `shard`. `config`: options of `shard` as a configuration, below what the policy's layout says.

    Returns the sharded model with its plan. Raises `ShardError` where a policy is not for this model.
    """
    if isinstance(model, linen.Module):
        return _optimize_linen(model, args, kwargs, find_policy(model, policy), mesh, config, rngs, fused)
    exists = isinstance(model, nnx.Module)
    if not exists and (isinstance(model, type) or not callable(model)):
        raise ShardError(
            f"optimize takes a module or a function that makes one, not {type_with_article(model)}",
            where="jshard.flax.optimize",
            fix="optimize(Net(rngs=nnx.Rngs(0)), x), or optimize(lambda: Net(rngs=nnx.Rngs(0)), x)",
        )
    shapes = model if exists else nnx.eval_shape(model)
    if not isinstance(shapes, nnx.Module):
        raise ShardError(
            f"the function makes {type_with_article(shapes)}, no nnx module",
            where="jshard.flax.optimize",
            fix="lambda: Net(rngs=nnx.Rngs(0))",
        )
    found = find_policy(shapes, policy)

    def build() -> nnx.Module:
        return _prepared(found, model(), fused)

    prepared = _prepared(found, model, fused) if exists else nnx.eval_shape(build)
    layout = found.policy.layout(prepared, mesh)
    options = _options(layout, config, mesh)
    plan = _nnx.plan_of(_nnx.shard_module(prepared, **options), *args, **kwargs)
    if exists:
        place(prepared, plan)
    else:
        prepared = _nnx.shard_module(init(build, plan), **options)
    return Optimized(prepared, plan, found, _layout_text(layout))


def _optimize_linen(
    model: linen.Module,
    args: tuple,
    kwargs: dict[str, PyTree],
    found: FoundPolicy,
    mesh: PyTree,
    config: PyTree,
    rngs: PyTree,
    fused: Sequence[str],
) -> Optimized:
    if rngs is None:
        raise ShardError(
            f"{type(model).__name__} is a linen module, which holds no parameters",
            where="jshard.flax.optimize",
            fix="rngs=jax.random.key(0), with which they are created",
        )
    prepared = _prepared(found, model)
    layout = found.policy.layout(prepared, mesh)
    sharded = _linen.shard_module(prepared, **_options(layout, config, mesh))
    if fused:
        sharded = _linen.with_fusion(sharded, Fusion.of(fused, found.policy.fused))

    def create(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return prepared.init(rngs, *args, **kwargs)

    shapes = jax.eval_shape(create, *args, **kwargs)
    plan = _linen.plan_of(sharded, shapes, *args, **kwargs)
    token = _linen.token_of(sharded)
    if token is not None and token.fusion is not None:
        token.fusion.check(type(model).__name__)
    zeros = jax.tree.map(lambda s: jax.numpy.zeros(s.shape, s.dtype), (args, kwargs))
    made = jax.jit(lambda a, k: create(*a, **k), out_shardings=shardings_for(shapes, plan))
    return Optimized(sharded, plan, found, _layout_text(layout), made(*zeros))


def _prepared(found: FoundPolicy, model: PyTree, fused: Sequence[str] = ()) -> PyTree:
    prepared = found.policy.prepare(model)
    if prepared is None:
        raise ShardError(
            f"{type(found.policy).__name__}.prepare returned None",
            where="prepare",
            fix="return model, changed or as it is",
        )
    if fused:
        fuse(prepared, fused, found.policy.fused)
    return prepared


def _options(layout: PyTree, config: PyTree, mesh: PyTree) -> dict[str, PyTree]:
    """The arguments of `shard` for a layout on top of a configuration."""
    merged = merged_config(*(c for c in (config, layout) if c is not None))
    return {"mesh": mesh} | ({} if merged is None else {"config": merged})


def _layout_text(layout: PyTree) -> str:
    if layout is None:
        return "derived by the search"
    return layout if isinstance(layout, str) and "\n" not in layout else "by the policy's configuration"
