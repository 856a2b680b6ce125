"""The only file that uses JAX's private and semi-public modules; hides the differences between JAX 0.10 and 0.12."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeGuard, TypeVar, cast

import jax
import numpy as np
from jax import core

# Not from jax.extend, which imports Pallas: 18 ms.
from jax._src import config, core as jex, distributed, source_info_util, traceback_util, tree_util
from jax._src.core import trace_state_clean
from jax._src.interpreters import pxla
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
from jax._src.state import AbstractRef
from jax.interpreters import ad, batching, mlir, partial_eval, pxla as public_pxla
from jax.sharding import AbstractMesh, Mesh, Sharding
from jax.typing import ArrayLike

from jshard._core.errors import ShardError
from jshard._core.jax_types import (
    ArrayFunction,
    ClosedJaxpr,
    Function,
    JaxMesh,
    Jaxpr,
    JaxprAtom,
    JaxprEqn,
    JaxprLiteral,
    Params,
    Primitive,
    PyTree,
)
from jshard._core.layout import ArrayType


T = TypeVar("T", bound=ArrayLike)

ALL_TO_ALL_MIXES_LAYOUTS = jax.__version_info__ < (0, 11)
"""Whether XLA may assign different memory layouts to the parts of one all-to-all, which then fails to compile.

See `docs/jax_bugs.md`: seen on 0.10.2, not on 0.12.0.1, with arrays that have a dimension of length one.
"""


def all_gather_invariant(x: jax.Array, axes: Sequence[str], *, axis: int) -> jax.Array:
    """All-gather whose result is typed invariant over `axes` (inside `shard_map` with `check_vma`)."""
    try:
        from jax._src.lax.parallel import all_gather_invariant as gather  # JAX 0.10
    except ImportError:
        return jax.lax.all_gather(x, axes, axis=axis, tiled=True, to="invarying")
    return gather(x, axes, axis=axis, tiled=True)


def open_jaxpr(j: Jaxpr | ClosedJaxpr) -> tuple[Jaxpr, Sequence[jax.Array]]:
    """A jaxpr and its constants, whether closed (two classes on 0.10) or merged (one class from 0.11)."""
    return cast("Jaxpr", getattr(j, "jaxpr", j)), getattr(j, "consts", ())


def make_jaxpr(fn: ArrayFunction, *avals: ArrayType) -> ClosedJaxpr:
    """The jaxpr of a function on arrays of some types."""
    return cast("ClosedJaxpr", jax.make_jaxpr(fn)(*avals))


_JAXPR_TYPES = (jex.Jaxpr, getattr(jex, "ClosedJaxpr", jex.Jaxpr))


def is_jaxpr(value: object) -> TypeGuard[Jaxpr | ClosedJaxpr]:
    """Whether a parameter of an equation is a jaxpr, open or closed."""
    return isinstance(value, _JAXPR_TYPES)


def without_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr without dead equations; all inputs stay."""
    live, *_ = partial_eval.dce_jaxpr(cast("jex.Jaxpr", jaxpr), [True] * len(jaxpr.outvars), instantiate=True)
    return cast("Jaxpr", live)


def live_part(jaxpr: Jaxpr, used: Sequence[bool]) -> tuple[Jaxpr, list[bool]]:
    """What some results of an open jaxpr need of it, with these results only; and which of its inputs that reads."""
    live, inputs, *_ = partial_eval.dce_jaxpr(cast("jex.Jaxpr", jaxpr), list(used))
    return cast("Jaxpr", live), list(inputs)


def has_effects(jaxpr: Jaxpr | ClosedJaxpr) -> bool:
    """Whether a jaxpr has effects: prints, callbacks, writes."""
    return bool(jaxpr.effects)


def as_function(jaxpr: Jaxpr | ClosedJaxpr) -> Callable[..., list[jax.Array]]:
    """A closed jaxpr as a function of its flat arguments."""
    return jex.jaxpr_as_fun(jaxpr)


def captured_tracers(traced: jax.stages.Traced) -> Sequence[core.Tracer]:
    """Tracers that a traced function closes over; they are the first inputs of its jaxpr."""
    return getattr(traced, "_consts", None) or ()


def is_tracer(x: object) -> TypeGuard[core.Tracer]:
    """Whether a value is a tracer."""
    return isinstance(x, core.Tracer)


def is_ref(x: object) -> bool:
    """Whether a value is a mutable array (`jax.new_ref`)."""
    return isinstance(array_type(x), AbstractRef)


def array_type(x: object) -> ArrayType | None:
    """The type of an array or a number, None for anything else."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    try:
        aval = jax.typeof(x)
    except (TypeError, ValueError):
        return None
    return aval if hasattr(aval, "shape") else None  # other types consist of several arrays


ShardingTypeError = jex.ShardingTypeError

VARIABLE = cast("Callable[[ArrayType], JaxprAtom]", jex.Var)


def is_literal(v: object) -> TypeGuard[JaxprLiteral]:
    """Whether a jaxpr atom is a literal."""
    return isinstance(v, jex.Literal)


def scan_split(params: Params) -> tuple[int, int]:
    """Number of constants and of carried values of a scan equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def bind_params(eqn: JaxprEqn, params: Params) -> Params:
    """An equation's parameters as arguments of `primitive.bind`."""
    return eqn.primitive.get_bind_params(dict(params))


def name_stack(prefix: str, eqn: JaxprEqn | None) -> str:
    """Name stack of an equation, after that of the enclosing calls."""
    own = str(eqn.source_info.name_stack) if eqn is not None else ""
    return "/".join(p for p in (prefix, own) if p)


def module_path(prefix: str, eqn: JaxprEqn | None) -> str:
    """Name stack without the names of transformations: `transpose(jvp(Net))/blocks_0` -> `Net/blocks_0`."""
    parts = []
    for part in name_stack(prefix, eqn).split("/"):
        while part.endswith(")") and "(" in part:
            part = part[part.index("(") + 1 : -1]
        if part:
            parts.append(part)
    return "/".join(parts)


def is_backward(prefix: str, eqn: JaxprEqn | None) -> bool:
    """Whether an equation comes from a transposition (the backward pass)."""
    return "transpose(" in name_stack(prefix, eqn)


def source_line(eqn: JaxprEqn | None, frames: int = 1) -> str:
    """`file.py:line (function)` of the user's innermost frames, one a line, the innermost last; or an empty string."""
    if eqn is None:
        return ""
    return source_info_util.summarize(cast("source_info_util.SourceInfo", eqn.source_info), frames)


def eqn_context(eqn: JaxprEqn, prefix: str = "") -> contextlib.AbstractContextManager[object]:
    """A context manager under which re-emitted primitives keep the equation's source line and names."""
    info = cast("source_info_util.SourceInfo", eqn.source_info)
    stack = source_info_util.current_name_stack() + info.name_stack
    return source_info_util.user_context(info.traceback, name_stack=stack)


def _key_type(dtype: Any) -> Any:
    """The generator of a dtype of typed PRNG keys."""
    return dtype._impl


@functools.lru_cache(maxsize=256)
def itemsize(dtype: np.dtype) -> int:
    """Bytes of one element; typed PRNG keys count their key data."""
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        return int(np.prod(_key_type(dtype).key_shape)) * 4
    if dtype == jax.dtypes.float0:
        return 0
    return max(1, np.dtype(dtype).itemsize)


def empty(shape: Sequence[int], dtype: np.dtype) -> jax.Array:
    """An array of size zero, of typed PRNG keys too."""
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        impl = _key_type(dtype)
        return jax.random.wrap_key_data(jax.numpy.zeros((*shape, *impl.key_shape), "uint32"), impl=impl)
    return jax.numpy.zeros(shape, dtype)


def weakly_typed(x: jax.Array) -> jax.Array:
    """`x` with a weak type, as results of Python scalars have: its dtype yields to others in promotion."""
    return jax.lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)


def vma(x: ArrayLike) -> frozenset[str]:
    """Mesh axes over which a value inside `shard_map` is typed as varying."""
    return vma_of_type(jax.typeof(x))


def vma_of_type(aval: object) -> frozenset[str]:
    """Mesh axes over which values of a type are varying."""
    kinds = getattr(aval, "mat", None)  # JAX 0.12: one record for varying, unreduced and reduced axes
    return frozenset(kinds.varying if kinds is not None else getattr(aval, "vma", ()) or ())


def cast_vma(x: T, axes: Iterable[str]) -> T | jax.Array:
    """A value inside `shard_map`, typed as varying over `axes` beside those it varies over already."""
    axes = frozenset(axes)
    if not axes:
        return x
    array = x if isinstance(x, jax.Array) else jax.numpy.asarray(x)
    missing = tuple(sorted(axes - vma(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def to_common_vma(values: Sequence[T]) -> list[T | jax.Array]:
    """Values typed as varying over the same mesh axes, as primitives require under `check_vma`."""
    axes = frozenset().union(*(vma(x) for x in values if hasattr(x, "dtype")))
    return [cast_vma(x, axes) for x in values]


def check_vma_enabled() -> bool:
    """Whether the `shard_map` being traced types values by the axes they vary over."""
    return bool(config._check_vma.value)


def check_vma(on: bool) -> contextlib.AbstractContextManager[object]:
    """A context with `check_vma` on or off, to trace a body as it was traced before."""
    return config._check_vma(on)


def run_jaxpr(jaxpr: Jaxpr, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """The results of an open jaxpr without constants."""
    return jex.eval_jaxpr(cast("jex.Jaxpr", jaxpr), (), *operands)


def with_axes(aval: core.ShapedArray, axes: frozenset[str]) -> core.ShapedArray:
    """A type that varies over exactly these mesh axes."""
    return aval.update(manual_axis_type=jex.ManualAxisType(varying=axes))


retype_p = jex.Primitive("jshard_retype")
retype_p.def_impl(lambda x, **_: x)
retype_p.def_abstract_eval(lambda aval, *, axes, what: with_axes(aval, axes))
mlir.register_lowering(retype_p, lambda ctx, x, **_: [x])


def _no_derivative(primals: object, tangents: object, *, axes: frozenset[str], what: str) -> NoReturn:
    raise ShardError(
        "the derivative, taken from outside a sharded function, of a jax.shard_map(..., check_vma=False) inside it",
        where=what,
        fix="check_vma=True in that shard_map, or the derivative inside: jshard.shard(jax.grad(f), ...)",
    )


ad.primitive_jvps[retype_p] = _no_derivative


def retyped(x: jax.Array, axes: frozenset[str], what: str) -> jax.Array:
    """A value retyped as varying over exactly `axes`, without a check; not differentiable."""
    return retype_p.bind(x, axes=axes, what=what)


def threefry_2x32(
    k0: jax.Array, k1: jax.Array, high: jax.Array, low: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The threefry block cipher on uint32 words: key words and counts broadcast against each other."""
    from jax.extend.random import threefry2x32_p

    return tuple(threefry2x32_p.bind(k0, k1, high, low))


def identity_primitive(name: str) -> jex.Primitive:
    """A primitive that returns its operand; it compiles to nothing, tangents bypass it, `vmap` keeps it.

    A `pin` parameter with a method `batched(dim)` is replaced by its result under `vmap`.
    """
    p = jex.Primitive(name)
    p.def_impl(lambda x, **_: x)
    p.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(p, lambda ctx, x, **_: [x])
    # The pin applies to the primal value only.
    ad.primitive_jvps[p] = lambda primals, tangents, **k: (p.bind(*primals, **k), tangents[0])

    def batch(
        args: Sequence[jax.Array], dims: Sequence[int | None], **k: Any
    ) -> tuple[jax.Array, int | None]:
        if hasattr(k.get("pin"), "batched"):
            k["pin"] = k["pin"].batched(dims[0])
        return p.bind(*args, **k), dims[0]

    batching.primitive_batchers[p] = batch
    return p


def debug_callback_function(name: str, params: Params) -> Callable[..., None]:
    """The host function of a `debug_callback` or `debug_print`."""
    from jax._src import debugging

    primitive = getattr(debugging, name + "_p")
    return lambda *values: primitive.impl(*values, **params)


def new_equation(
    primitive: Primitive, operands: Sequence[JaxprAtom], results: Sequence[JaxprAtom], params: Params,
    effects: Collection[object], like: JaxprEqn,
) -> JaxprEqn:  # fmt: skip
    """An equation `results = primitive(operands)` with the source line and name stack of the equation `like`."""
    ends = list(operands), list(results)
    return cast("JaxprEqn", jex.new_jaxpr_eqn(*ends, primitive, params, effects, like.source_info, like.ctx))


def constraint_of(eqn: JaxprEqn) -> Sharding | None:
    """The sharding of a `with_sharding_constraint` or `reshard` equation."""
    return eqn.params.get("sharding", eqn.params.get("dst_sharding"))


def at_top_level() -> bool:
    """Whether no transformation (`jit`, `grad`, `vmap`, ...) is being traced."""
    return trace_state_clean()


def context_mesh() -> AbstractMesh | None:
    """The abstract mesh set by `jax.set_mesh`, or None."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """A context without a mesh, to trace on global shapes inside `shard_map`: without manual axes and their types."""
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())), check_vma(False):
        yield


def context_of_trace(mesh: JaxMesh | None) -> contextlib.AbstractContextManager[object]:
    """The mesh context of the original trace: a mesh with Explicit axes, or none."""
    return without_mesh() if mesh is None else with_mesh(mesh)


def call_primitive(name: str, run: ArrayFunction) -> jex.Primitive:
    """A primitive with several results, evaluated, abstractly evaluated and compiled as `run(fused, *operands)`.

    Under `vmap`, `fused.batched(operands, dims)` returns the operands and the parameter of the batched call, whose
    results have the batch dimension first.
    """
    p = jex.Primitive(name)
    p.multiple_results = True
    p.def_impl(lambda *xs, fused: run(fused, *xs))

    def shapes(*avals: core.ShapedArray, fused: object) -> list[core.ShapedArray]:
        structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
        with without_mesh():
            outs = jax.eval_shape(lambda *xs: run(fused, *xs), *structs)
        return [core.ShapedArray(o.shape, o.dtype, weak_type=o.weak_type) for o in outs]

    def batch(
        args: Sequence[jax.Array], dims: Sequence[int | None], *, fused: Any
    ) -> tuple[Sequence[jax.Array], Sequence[int]]:
        grown, new = fused.batched(args, dims)
        out = p.bind(*grown, fused=new)
        return out, [0] * len(out)

    p.def_abstract_eval(shapes)
    batching.primitive_batchers[p] = batch
    mlir.register_lowering(p, mlir.lower_fun(lambda *xs, fused: run(fused, *xs), multiple_results=True))
    return p


def multi_result_primitive(name: str) -> jex.Primitive:
    """A new primitive with several results."""
    p = jex.Primitive(name)
    p.multiple_results = True
    return p


# Like other JAX libraries: frames of this package are left out of source lines and tracebacks.
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
source_info_util.register_exclusion(_PACKAGE)
traceback_util.register_exclusion(_PACKAGE)
api_boundary = traceback_util.api_boundary


def dispatcher(
    name: str, fn: Function, miss: Function, static_argnums: Iterable[int], static_argnames: Iterable[str]
) -> Function:
    """A callable with the C++ dispatch of `jax.jit`, and `miss` as its handler of cache misses.

    `miss(*args, **kwargs)` returns (results, fast-path data of `call_and_fastpath_data`, False). Under
    `jax.disable_jit`, `fn` runs instead.
    """

    def plain(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return fn(*args, **kwargs)

    return _jax.pjit(
        name, plain, miss, sorted(static_argnums), sorted(static_argnames), pxla.JitGlobalCppCacheKeys(),
        tree_util.dispatch_registry, pxla.cc_shard_arg,
    )  # fmt: skip


def clear_dispatch_cache(dispatch: Any) -> None:
    """Empty the cache of a `dispatcher`."""
    dispatch._clear_cache()


def call_and_fastpath_data(
    compiled: jax.stages.Compiled, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> tuple[PyTree, object]:
    """Results of a compiled program, and its data for the C++ fast path; None if only Python can dispatch it."""
    executable = compiled._executable
    if getattr(getattr(executable, "unsafe_call", None), "ordered_effects", None):
        return compiled(*args, **kwargs), None
    call = executable.create_cpp_call(compiled._params)
    if call is None:  # callbacks and the like
        return compiled(*args, **kwargs), None
    out, fastpath_data, _ = call._cache_miss(*args, **kwargs)
    return out, fastpath_data


def trace_options() -> tuple[tuple[str, object], ...]:
    """The JAX options that a trace depends on, as (name, value) of this thread."""
    both = zip(config.trace_context_names(), config.trace_context(), strict=True)
    return tuple((n, v) for n, v in both if n.startswith("jax_"))


def jax_option(name: str) -> Any:
    """The value of a JAX option in this thread."""
    return getattr(jax.config, name)


def with_mesh(mesh: JaxMesh) -> contextlib.AbstractContextManager[object]:
    """A context in which `mesh` (concrete or abstract) is the current abstract mesh."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh)


def entered_mesh() -> Mesh | None:
    """The mesh of an enclosing `with mesh:`, None outside of one: the value behind the deprecated name, which warns."""
    _, resources = vars(public_pxla).get("_deprecations", {}).get("thread_resources", (None, None))
    entered = getattr(getattr(resources, "env", None), "physical_mesh", None)
    return entered if isinstance(entered, Mesh) and not entered.empty else None


def coordination_client() -> object:
    """The client of the coordination service that `jax.distributed.initialize` started; None without it."""
    return distributed.global_state.client


def is_partitioned(context: mlir.LoweringRuleContext) -> bool:
    """Whether XLA partitions what is being lowered over several devices, outside of any `shard_map` over all axes."""
    axes = context.module_context.axis_context
    manual, mesh = getattr(axes, "manual_axes", None), getattr(axes, "mesh", None)
    return getattr(axes, "num_devices", 1) > 1 if mesh is None else manual != frozenset(mesh.axis_names)


def splash_backward(
    kernel: Any, operands: Sequence[jax.Array], segments: object, out: jax.Array, logsumexp: jax.Array,
    cotangent: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """The backward kernels of splash attention alone, of results and logsumexp that may be over more keys than these."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as module

    residuals = (*operands, segments, None, out, logsumexp, kernel.dq_mask_info, kernel.dkv_mask_info)
    return module._splash_attention_bwd(**{**kernel.kwargs, "res": residuals, "do": cotangent})[3:6]


def cudnn_attention(*operands: jax.Array, scale: float, causal: bool) -> list[jax.Array]:
    """cuDNN's attention: (result, logsumexp) of q, k, v (B, T, N, H); the gradients, if given these and a cotangent too.

    `jax.nn.dot_product_attention` runs the same primitives, but has no way to say a logsumexp over more keys than these.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    mask = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
    how = {"scale": scale, "seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False), "mask_type": mask,
           "layout": cudnn.AttentionLayout.BTNH.value, "sliding_window_length": None}  # fmt: skip
    how |= {} if jax.__version_info__ < (0, 11) else {"score_mod_name": None, "score_mod_jaxpr": None}
    given = [*operands[:3], *[jax.numpy.zeros(0, operands[0].dtype)] * 7, *operands[3:]]
    if len(operands) > 3:
        return cudnn._dot_product_attention_bwd_p.bind(*given, **how)
    return cudnn._dot_product_attention_fwd_p.bind(*given, **how, is_training=True)
