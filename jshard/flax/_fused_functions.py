"""Functions with fused ones inside, by name: attention that is written out, and modules of linen.

Problem.  Modules of linen exist only while they are called, and attention is a few lines inside of a library's module:
neither can be exchanged in a model as `fuse` does.

Idea.  While the function is traced, calls of linen's modules pass through an interceptor (`linen.intercept_methods`, for
this trace alone), which calls the fused function for those that it knows. In what was traced, attention is found by what it
computes and replaced by one operator; bodies of loops and of checkpointed functions are entered.

>>> import jax, jax.numpy as jnp, jshard.flax
>>> def attend(x):
...     return jax.nn.softmax(jnp.einsum("btd,bsd->bts", x, x)) @ x
>>> x = jax.random.normal(jax.random.key(0), (2, 8, 4))
>>> fused = fuse_function(attend, ("attention",))
>>> bool(jnp.allclose(fused(x), attend(x), atol=1e-5)), "jshard_attention" in str(jax.make_jaxpr(fused)(x))
(True, True)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import linen
from flax.linen import dtypes

from jshard._api import ops
from jshard._api.policy import qualified_name
from jshard._core import jaxcompat as compat
from jshard._core.errors import ShardError
from jshard._core.jax_types import ClosedJaxpr, Function, Jaxpr, JaxprEqn, PyTree
from jshard._core.messages import suggest
from jshard.flax._equation_graph import Graph, bound
from jshard.flax._fused import Replacements
from jshard.flax._replacements import check_same_signature
from jshard.flax._written_out_attention import find_attention


_LOOKED_FOR = {
    "attention": (
        "a softmax between two products whose probabilities are neither dropped out nor used elsewhere",
    ),
    "norm": ("linen.LayerNorm", "linen.RMSNorm over the last dimension"),
}
KINDS = tuple(_LOOKED_FOR)


def fuse_function(fn: Function, names: Sequence[str], own: Replacements | None = None) -> Function:
    """The function with fused ones inside, for one that applies linen modules or writes attention out.

    >>> from flax import linen
    >>> import jax, jax.numpy as jnp
    >>> norm = linen.LayerNorm()
    >>> variables = norm.init(jax.random.key(0), jnp.ones((2, 4)))
    >>> fused = fuse_function(norm.apply, ("norm",))
    >>> x = jnp.arange(8.0).reshape(2, 4)
    >>> bool(jnp.allclose(fused(variables, x), norm.apply(variables, x), atol=1e-5))
    True

    Arguments:

    - `fn`: of arrays and trees of them; other leaves are passed on as they are. It is traced at each call, so put
        `jax.jit`, `jax.grad` or `jshard.shard` around the result.
    - `names`: `"attention"` (a softmax between two products, with what is added, masked and scaled, by
        `jshard.ops.attention`), `"norm"` (`linen.LayerNorm`, `linen.RMSNorm` over the last dimension), and those of `own`.
    - `own`: by name, `{"module.Class.method": new}` of linen modules with `new(original, *args)`, where `original` is
        bound to the module; also of a class that derives from it. It comes before the replacements of this package.

    Raises `ShardError` for a name that is not known, or, when called, that replaces nothing.
    """
    fusion = Fusion.of(names, own)

    @functools.wraps(fn)
    def fused(*args: PyTree, **kwargs: PyTree) -> PyTree:
        fusion.done.clear()
        out = fusion.around(fn)(*args, **kwargs)
        fusion.check(getattr(fn, "__name__", "the function"))
        return out

    return fused


@dataclasses.dataclass(frozen=True)
class Fusion:
    """Names of what is replaced by fused functions; `done`: by name, where something was."""

    names: tuple[str, ...]
    own: tuple[tuple[str, tuple[tuple[str, Function], ...]], ...] = ()
    done: dict[str, set[str]] = dataclasses.field(default_factory=dict, compare=False)

    @staticmethod
    def of(names: Sequence[str], own: Replacements | None = None) -> Fusion:
        """The replacements named, which must be known."""
        known = [*(own or ()), *(k for k in KINDS if k not in (own or ()))]
        if isinstance(names, str):
            raise ShardError(f"fused is a str, {names!r}", where="fused", fix=f"a tuple: fused=({names!r},)")
        for name in names:
            if name not in known:
                raise ShardError(f"there is no fused {name!r}", where="fused", fix=suggest(name, known))
        return Fusion(tuple(names), tuple((k, tuple(v.items())) for k, v in (own or {}).items()))

    def around(self, fn: Function) -> Function:
        """The function with replacements."""
        return functools.partial(_run, self, fn)

    def check(self, what: str) -> None:
        """Refuse names that replaced nothing in what was traced."""
        for name in self.names:
            if not self.done.get(name):
                own = [key for key, _ in dict(self.own).get(name, ())]
                kinds = ", ".join((*own, *_LOOKED_FOR.get(name, ())))
                raise ShardError(
                    f"fused {name!r} replaces nothing in {what}: there is none of {kinds}",
                    where="fused",
                    fix=f"a policy with fused = {{{name!r}: {{'module.Class.method': lambda original, ...: ...}}}}, "
                    f"or fused without {name!r}",
                )

    def note(self, name: str, where: str) -> None:
        """Something of this name was replaced."""
        self.done.setdefault(name, set()).add(where)


def _run(fusion: Fusion, fn: Function, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
    """One call of a function with replacements."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    traced = [i for i, x in enumerate(leaves) if compat.array_type(x) is not None]
    result: list[Any] = []

    def flat(*arrays: jax.Array) -> Sequence[jax.Array]:
        given = list(leaves)
        for i, x in zip(traced, arrays, strict=True):
            given[i] = x
        inner_args, inner_kwargs = jax.tree.unflatten(tree, given)
        with _intercepted(fusion):
            out, shape = jax.tree.flatten(fn(*inner_args, **inner_kwargs))
        result[:] = [shape, out]
        return [x for x in out if compat.array_type(x) is not None]

    arrays = [leaves[i] for i in traced]
    if "attention" not in fusion.names:
        flat(*arrays)
        return jax.tree.unflatten(*result)
    computed = iter(_computed(compat.make_jaxpr(flat, *arrays), arrays, fusion))
    out = [x if compat.array_type(x) is None else next(computed) for x in result[1]]
    return jax.tree.unflatten(result[0], out)


# -- attention ------------------------------------------------------------------------------------------------


def _computed(jaxpr: Jaxpr | ClosedJaxpr, arrays: Sequence[jax.Array], fusion: Fusion) -> list[jax.Array]:
    """The results of a jaxpr, with attention as one operator."""
    graph = Graph.of(jaxpr)
    replaced = find_attention(graph)
    for value in replaced:
        assert value.made_by is not None
        fusion.note("attention", compat.module_path("", value.made_by.eqn))
    return graph.compute(arrays, replaced, functools.partial(_bound_with_bodies, fusion=fusion))


def _bound_with_bodies(eqn: JaxprEqn, operands: Sequence[PyTree], *, fusion: Fusion) -> Sequence[PyTree]:
    """An equation on some operands; attention is replaced in the bodies of scans and of checkpointed functions."""
    name, p = eqn.primitive.name, eqn.params
    if name not in ("scan", "checkpoint", "remat2") or not _has_attention(p["jaxpr"]):
        return bound(eqn, operands)
    if name != "scan":
        body = jax.checkpoint(
            lambda *xs: _computed(p["jaxpr"], xs, fusion), prevent_cse=p["prevent_cse"], policy=p["policy"]
        )
        return body(*operands)
    n, m = compat.scan_split(p)
    consts, carry, xs = operands[:n], operands[n : n + m], operands[n + m :]

    def step(carry: Sequence[PyTree], xs: Sequence[PyTree]) -> tuple[PyTree, PyTree]:
        out = _computed(p["jaxpr"], (*consts, *carry, *xs), fusion)
        return tuple(out[:m]), tuple(out[m:])

    carry, ys = jax.lax.scan(
        step, tuple(carry), tuple(xs), length=int(p["length"]), reverse=p["reverse"], unroll=p["unroll"]
    )
    return (*carry, *ys)


def _has_attention(jaxpr: Jaxpr | ClosedJaxpr) -> bool:
    graph = Graph.of(jaxpr)
    bodies = [
        m.eqn.params["jaxpr"] for m in graph.made if m.eqn.primitive.name in ("scan", "checkpoint", "remat2")
    ]
    return bool(find_attention(graph)) or any(map(_has_attention, bodies))


# -- modules of linen -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _intercepted(fusion: Fusion) -> Iterator[None]:
    """A context in which calls of linen modules are those of the replacements named."""

    def intercept(
        call: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        context: linen.module.InterceptorContext,
    ) -> PyTree:
        module, method = context.module, context.method_name
        if module.is_initializing():
            return call(*args, **kwargs)
        own = dict(fusion.own)
        for name in fusion.names:
            new = _own_replacement(module, method, dict(own.get(name, ())))
            if new is None and name == "norm" and method == "__call__":
                new = _norm_replacement(module)
            if new is not None:
                fusion.note(name, "/".join(module.path))
                original = types.MethodType(lambda self, *a, **k: call(*a, **k), module)
                return new(original, *args, **kwargs)
        return call(*args, **kwargs)

    with linen.intercept_methods(intercept):
        yield


def _own_replacement(
    module: linen.Module, method: str, methods: Mapping[str, Function]
) -> Callable[..., PyTree] | None:
    for cls in type(module).__mro__:
        if (new := methods.get(f"{qualified_name(cls)}.{method}")) is not None:
            check_same_signature(f"{cls.__name__}.{method}", getattr(cls, method), new)
            return new
    return None


def _norm_replacement(module: linen.Module) -> Function | None:
    kind = next((k for k in _NORMS if isinstance(module, k)), None)
    if kind is None or type(module).__call__ is not kind.__call__:
        return None
    last, m = (-1, (-1,), [-1]), module
    assert isinstance(m, linen.LayerNorm | linen.RMSNorm)
    fits = m.reduction_axes in last and m.feature_axes in last and m.axis_name is None
    return _NORMS[kind] if fits and m.force_float32_reductions else None


def _layer_norm(original: types.MethodType, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
    if mask is not None:
        return original(x, mask=mask)
    m: Any = original.__self__
    scale, bias = (
        m.get_variable("params", n) if on else None
        for n, on in (("scale", m.use_scale), ("bias", m.use_bias))
    )
    x, scale, bias = dtypes.promote_dtype(x, scale, bias, dtype=m.dtype)
    return ops.layer_norm(x, scale, bias, epsilon=m.epsilon)


def _rms_norm(original: types.MethodType, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
    if mask is not None:
        return original(x, mask=mask)
    m: Any = original.__self__
    scale = m.get_variable("params", "scale") if m.use_scale else None
    x, scale = dtypes.promote_dtype(x, scale, dtype=m.dtype)
    return ops.rms_norm(x, scale, epsilon=m.epsilon)


_NORMS: Mapping[type, Function] = {linen.LayerNorm: _layer_norm, linen.RMSNorm: _rms_norm}
