"""Modules replaced by fused ones, by name: `attention`, `norm`, and what a policy adds; the state keeps its paths.

Problem.  A model has its attention and norms where its author wrote them. A replacement must compute the same, and what it
cannot compute (dropout of the attention's probabilities, a norm over other dimensions) must stay as it was.

Idea.  The modules of Flax that say what they compute (`MultiHeadAttention`, `LayerNorm`, `RMSNorm`, and classes that
derive from them without a call of their own) are replaced here; others by the policy of their model, which names the
method and its replacement.

>>> from flax import nnx
>>> model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.LayerNorm(4, rngs=nnx.Rngs(0)))
>>> fuse(model, ("norm",))
{'norm': ('layers.1',)}
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jshard._api import ops
from jshard._api.policy import qualified_name
from jshard._core.errors import ShardError
from jshard._core.jax_types import Function, PyTree
from jshard._core.messages import suggest
from jshard.flax._replacements import replace_method


Replacements = Mapping[str, Mapping[str, Function]]


def fuse(
    model: nnx.Module, names: Sequence[str], own: Replacements | None = None
) -> dict[str, tuple[str, ...]]:
    """Replace the modules of these kinds in a model by fused ones, in place; the paths that were replaced, by name.

    Arguments:

    - `names`: `"attention"` (`jshard.ops.attention` in `nnx.MultiHeadAttention`), `"norm"` (`nnx.LayerNorm`,
        `nnx.RMSNorm`), and the names of `own`.
    - `own`: by name, `{"module.Class.method": new}` with `new(original, *args)`, as for `replace_method`; also of a class
        that derives from it. It comes before the replacements of this package.

    Raises `ShardError` for a name that is not known, or that replaces nothing.
    """
    own, done = own or {}, dict[str, tuple[str, ...]]()
    known = tuple(dict.fromkeys((*own, *_KINDS)))
    if isinstance(names, str):
        raise ShardError(f"fused is a str, {names!r}", where="fused", fix=f"a tuple: fused=({names!r},)")
    for name in names:
        if name not in known:
            raise ShardError(f"there is no fused {name!r}", where="fused", fix=suggest(name, known))
        found = []
        for path, module in nnx.iter_modules(model):
            if _replaced(module, own.get(name, {})) or _KINDS.get(name, _nothing)(module):
                found.append(".".join(map(str, path)))
        if not found:
            kinds = ", ".join((*own.get(name, ()), *_LOOKED_FOR.get(name, ())))
            raise ShardError(
                f"fused {name!r} replaces nothing in {type(model).__name__}: no module is one of {kinds}",
                where="fused",
                fix=f"a policy with fused = {{{name!r}: {{'module.Class.method': lambda original, ...: ...}}}}, "
                f"or fused without {name!r}",
            )
        done[name] = tuple(sorted(found))
    return done


def _replaced(module: nnx.Module, methods: Mapping[str, Function]) -> bool:
    """Whether one of the named methods is this module's, which is replaced."""
    for cls in type(module).__mro__:
        for key, new in methods.items():
            owner, _, method = key.rpartition(".")
            if owner == qualified_name(cls):
                replace_method(module, method, new)
                return True
    return False


def _nothing(module: nnx.Module) -> bool:
    return False


# -- attention ------------------------------------------------------------------------------------------------


def _fuse_attention(module: nnx.Module) -> bool:
    if not isinstance(module, nnx.MultiHeadAttention):
        return False
    if module.attention_fn is not nnx.dot_product_attention:
        return False  # the author's own
    module.attention_fn = dot_product_attention
    return True


def dot_product_attention(query: jax.Array, key: jax.Array, value: jax.Array, **options: PyTree) -> jax.Array:
    """`nnx.dot_product_attention` as one operator, where no probabilities are dropped or recorded."""
    dropped = options.get("dropout_rate", 0.0) > 0 and not options.get("deterministic", False)
    fits = query.ndim >= 3 and jnp.issubdtype(query.dtype, jnp.floating)
    if dropped or options.get("module") is not None or not fits:
        return nnx.dot_product_attention(query, key, value, **options)
    if (dtype := options.get("dtype")) is not None:
        query, key, value = (x.astype(dtype) for x in (query, key, value))
    mask, bias, causal = options.get("mask"), options.get("bias"), bool(options.get("is_causal", False))
    if mask is None:
        return ops.attention(query, key, value, causal=causal, bias=bias)
    mask = mask.astype(bool).reshape((1,) * (query.ndim - mask.ndim) + mask.shape)
    out = ops.attention(query, key, value, causal=causal, mask=mask, bias=bias)
    if causal:
        pairs = (*mask.shape[:-2], query.shape[-3], key.shape[-3])
        mask = jnp.tril(jnp.broadcast_to(mask, pairs))
    # Flax gives equal weights to all keys where a query may attend to none; the operator gives zeros.
    some = jnp.swapaxes(mask.any(-1), -1, -2)[..., None]
    mean = value.mean(-3, keepdims=True, dtype=jnp.promote_types(value.dtype, jnp.float32))
    return jnp.where(some, out, jnp.repeat(mean, query.shape[-2] // value.shape[-2], -2).astype(out.dtype))


# -- norms ----------------------------------------------------------------------------------------------------


def _fuse_norm(module: nnx.Module) -> bool:
    kind = next((k for k in _NORMS if isinstance(module, k)), None)
    if kind is None or type(module).__call__ is not kind.__call__ or not _over_the_last(module):
        return False
    replace_method(module, "__call__", _NORMS[kind])
    return True


def _over_the_last(module: PyTree) -> bool:
    """Whether a norm goes over the last dimension alone, on this device's block alone."""
    last = (-1, (-1,), [-1])
    return module.reduction_axes in last and module.feature_axes in last and module.axis_name is None


def _layer_norm(original: types.MethodType, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
    if mask is not None:
        return original(x, mask=mask)
    m: PyTree = original.__self__
    scale, bias = (None if p is None else p[...] for p in (m.scale, m.bias))
    x, scale, bias = m.promote_dtype((x, scale, bias), dtype=m.dtype)
    return ops.layer_norm(x, scale, bias, epsilon=m.epsilon)


def _rms_norm(original: types.MethodType, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    if mask is not None:
        return original(x, mask=mask)
    m: PyTree = original.__self__
    x, scale = m.promote_dtype((x, None if m.scale is None else m.scale[...]), dtype=m.dtype)
    return ops.rms_norm(x, scale, epsilon=m.epsilon)


_NORMS: Mapping[type, Function] = {nnx.LayerNorm: _layer_norm, nnx.RMSNorm: _rms_norm}
_KINDS: Mapping[str, Callable[[nnx.Module], bool]] = {"attention": _fuse_attention, "norm": _fuse_norm}
_LOOKED_FOR = {
    "attention": ("nnx.MultiHeadAttention",),
    "norm": ("nnx.LayerNorm", "nnx.RMSNorm over the last dimension"),
}
