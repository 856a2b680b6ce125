"""The one file that touches JAX's semi-public parts, and hides what differs between JAX 0.10 and 0.12."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import core

# Not from jax.extend, which loads Pallas with it: 18 ms of the import.
from jax._src import config, core as jex, source_info_util, traceback_util, tree_util
from jax._src.core import trace_state_clean
from jax._src.interpreters import pxla
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
from jax._src.state import AbstractRef
from jax.interpreters import ad, batching, mlir, partial_eval

from jshard._core.errors import MeshError, NestedShardError, ShardError


ALL_TO_ALL_MIXES_LAYOUTS = jax.__version_info__ < (0, 11)
"""Whether XLA may give the parts of one all-to-all different memory layouts, which it then refuses.

See `docs/jax_bugs.md`: seen on 0.10.2, not on 0.12.0.1, with arrays that have a dimension of length one.
"""


def all_gather_invariant(x: Any, axes: Any, *, axis: int) -> Any:
    """All-gather whose result is typed equal on every device of `axes` (inside `shard_map` with `check_vma`)."""
    try:
        from jax._src.lax.parallel import all_gather_invariant as gather  # JAX 0.10
    except ImportError:
        return jax.lax.all_gather(x, axes, axis=axis, tiled=True, to="invarying")
    return gather(x, axes, axis=axis, tiled=True)


def open_jaxpr(j: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr and its constants, whether closed (two classes on 0.10) or merged (one class from 0.11)."""
    if hasattr(j, "jaxpr") and hasattr(j, "consts"):
        return j.jaxpr, j.consts
    return j, getattr(j, "consts", ())


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter of an equation is a program, open or closed."""
    return isinstance(value, jex.Jaxpr | getattr(jex, "ClosedJaxpr", jex.Jaxpr))


def without_dead_code(jaxpr: Any) -> Any:
    """The jaxpr without equations whose results nobody reads; all inputs stay."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def has_effects(jaxpr: Any) -> bool:
    """Whether running a jaxpr does more than give results: prints, callbacks, writes."""
    return bool(jaxpr.effects)


def as_function(jaxpr: Any) -> Any:
    """A closed jaxpr as a function of its flat arguments."""
    return jex.jaxpr_as_fun(jaxpr)


def captured_tracers(traced: Any) -> Sequence[Any]:
    """Tracers that a traced function closes over: they are the first inputs of its jaxpr."""
    return getattr(traced, "_consts", None) or ()


def is_tracer(x: Any) -> bool:
    """Whether a value is one of a trace that is going on."""
    return isinstance(x, core.Tracer)


def is_ref(x: Any) -> bool:
    """Whether a value is a mutable array (`jax.new_ref`)."""
    return isinstance(array_type(x), AbstractRef)


def array_type(x: Any) -> Any:
    """The type of what JAX takes for an array or a number, None for anything else."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    try:
        found = jax.typeof(x)
    except (TypeError, ValueError):
        return None
    return found if hasattr(found, "shape") else None  # other types are made of several arrays


ShardingTypeError = jex.ShardingTypeError

VARIABLE = jex.Var


def is_literal(v: Any) -> bool:
    """Whether a jaxpr atom is a literal."""
    return isinstance(v, jex.Literal)


def is_drop(v: Any) -> bool:
    """Whether an output variable is dropped."""
    return isinstance(v, jex.DropVar)


def scan_split(params: Any) -> tuple[int, int]:
    """Number of constants and of carried values of a scan equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def bind_params(eqn: Any, params: Any) -> dict[str, Any]:
    """Parameters in the form that `primitive.bind` takes."""
    return eqn.primitive.get_bind_params(dict(params))


def name_stack(prefix: str, eqn: Any) -> str:
    """Name stack of an equation, with that of the calls around it."""
    own = str(eqn.source_info.name_stack) if eqn is not None else ""
    return "/".join(p for p in (prefix, own) if p)


def module_path(prefix: str, eqn: Any) -> str:
    """Name stack without the marks of transformations: `transpose(jvp(Net))/blocks_0` -> `Net/blocks_0`."""
    parts = []
    for part in name_stack(prefix, eqn).split("/"):
        while part.endswith(")") and "(" in part:
            part = part[part.index("(") + 1 : -1]
        if part:
            parts.append(part)
    return "/".join(parts)


def is_backward(prefix: str, eqn: Any) -> bool:
    """Whether an equation comes from a transposition (the backward pass)."""
    return "transpose(" in name_stack(prefix, eqn)


def source_line(eqn: Any) -> str:
    """`file.py:line (function)` of the user's frame, or an empty string."""
    if eqn is None:
        return ""
    return source_info_util.summarize(eqn.source_info)


def eqn_context(eqn: Any, prefix: str = "") -> Any:
    """A context manager under which re-emitted primitives keep the equation's source line and names."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)


@functools.lru_cache(maxsize=256)
def itemsize(dtype: Any) -> int:
    """Bytes of one element; typed PRNG keys count their key data."""
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        return int(np.prod(dtype._impl.key_shape)) * 4
    if dtype == jax.dtypes.float0:
        return 0
    return max(1, np.dtype(dtype).itemsize)


def empty(shape: Sequence[int], dtype: Any) -> Any:
    """An array of size zero, of typed PRNG keys too."""
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.numpy.zeros((*shape, *dtype._impl.key_shape), "uint32")
        return jax.random.wrap_key_data(data, impl=dtype._impl)
    return jax.numpy.zeros(shape, dtype)


def weakly_typed(x: Any) -> Any:
    """`x` with a weak type, as the results of Python numbers have: its dtype gives way to that of others."""
    return jax.lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)


def vma(x: Any) -> frozenset[str]:
    """Mesh axes over which a value inside `shard_map` is typed as varying."""
    return vma_of_type(jax.typeof(x))


def vma_of_type(aval: Any) -> frozenset[str]:
    """The same for a type."""
    kinds = getattr(aval, "mat", None)  # JAX 0.12: one record for varying, unreduced and reduced axes
    return frozenset(kinds.varying if kinds is not None else getattr(aval, "vma", ()) or ())


def cast_vma(x: Any, axes: Iterable[str]) -> Any:
    """A value inside `shard_map`, typed as varying over `axes` beside those it varies over already."""
    axes = frozenset(axes)
    if not axes:
        return x
    x = x if isinstance(x, jax.Array) else jax.numpy.asarray(x)
    missing = tuple(sorted(axes - vma(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def to_common_vma(values: Sequence[Any]) -> list[Any]:
    """Values typed as varying over the same mesh axes, as primitives require under `check_vma`."""
    axes = frozenset().union(*(vma(x) for x in values if hasattr(x, "dtype")))
    return [cast_vma(x, axes) for x in values]


def check_vma_enabled() -> bool:
    """Whether values of the `shard_map` being traced are typed by the axes they vary over."""
    return bool(config._check_vma.value)


def check_vma(on: bool) -> Any:
    """A context that types values so, or does not: for a body that was traced that way."""
    return config._check_vma(on)


def run_jaxpr(jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of an open jaxpr without constants."""
    return jex.eval_jaxpr(jaxpr, (), *operands)


def row_major(x: Any) -> Any:
    """An array that lies in memory row by row, as compilers lay it out unless they choose otherwise."""
    from jax.experimental.layout import Layout, with_layout_constraint

    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim)))) if x.ndim > 1 else x


def with_axes(aval: Any, axes: frozenset[str]) -> Any:
    """A type that varies over some mesh axes."""
    return aval.update(manual_axis_type=jex.ManualAxisType(varying=axes))


retype_p = jex.Primitive("jshard_retype")
retype_p.def_impl(lambda x, **_: x)
retype_p.def_abstract_eval(lambda aval, *, axes, what: with_axes(aval, axes))
mlir.register_lowering(retype_p, lambda ctx, x, **_: [x])


def _no_derivative(primals: Any, tangents: Any, *, axes: Any, what: str) -> Any:
    raise ShardError(
        "the derivative, taken from outside a sharded function, of a jax.shard_map(..., check_vma=False) inside it",
        where=what,
        fix="check_vma=True in that shard_map, or the derivative inside: jshard.shard(jax.grad(f), ...)",
    )


ad.primitive_jvps[retype_p] = _no_derivative


def retyped(x: Any, axes: frozenset[str], what: str) -> Any:
    """A value typed as varying over exactly `axes`, whatever it is typed as, on the caller's word; no derivative."""
    return retype_p.bind(x, axes=axes, what=what)


def threefry_2x32(k0: Any, k1: Any, high: Any, low: Any) -> tuple[Any, Any]:
    """The threefry block cipher on uint32 words: key words and counts broadcast against each other."""
    from jax.extend.random import threefry2x32_p

    return tuple(threefry2x32_p.bind(k0, k1, high, low))


def identity_primitive(name: str) -> Any:
    """A primitive that returns its operand; tangents and compiled code do not see it, `vmap` keeps it.

    A `pin` parameter that has a `batched(dim)` method is asked for its form with a batch dimension.
    """
    p = jex.Primitive(name)
    p.def_impl(lambda x, **_: x)
    p.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(p, lambda ctx, x, **_: [x])
    # Tangents pass by: the mark is about the primal value only.
    ad.primitive_jvps[p] = lambda primals, tangents, **k: (p.bind(*primals, **k), tangents[0])

    def batch(args: Any, dims: Any, **k: Any) -> Any:
        if hasattr(k.get("pin"), "batched"):
            k["pin"] = k["pin"].batched(dims[0])
        return p.bind(*args, **k), dims[0]

    batching.primitive_batchers[p] = batch
    return p


def debug_callback_function(name: str, params: Any) -> Any:
    """What a `debug_callback` or `debug_print` does with the values, as a function of them."""
    from jax._src import debugging

    multi_result_primitive = getattr(debugging, name + "_p")

    def run(*values: Any) -> None:
        multi_result_primitive.impl(*values, **params)

    return run


def identity_equation(primitive: Any, operand: Any, result: Any, like: Any) -> Any:
    """An equation `result = primitive(operand)` with the source line and names of another equation."""
    return jex.new_jaxpr_eqn([operand], [result], primitive, {}, set(), like.source_info, like.ctx)


def with_scalar_predicate(eqn: Any) -> Any:
    """A `while` equation whose test is one boolean: `vmap` makes tests of many, and each stops its own part.

    As JAX lowers them: on while any says yes, and what goes round keeps the parts whose test says no.
    """
    p = eqn.params
    test, turn, nc = as_function(p["cond_jaxpr"]), as_function(p["body_jaxpr"]), p["cond_nconsts"]
    shape = open_jaxpr(p["cond_jaxpr"])[0].outvars[0].aval.shape
    if not shape:
        return eqn
    consts = [v.aval for v in eqn.invars[: nc + p["body_nconsts"]]]
    carry = [v.aval for v in eqn.outvars]

    def any_on(*args: Any) -> Any:
        return jax.lax.reduce_or(test(*args)[0], axes=range(len(shape)))

    def selected(*args: Any) -> list[Any]:
        old = args[len(consts) :]
        on = test(*args[:nc], *old)[0]
        new = turn(*args[nc:])
        grown = [jax.lax.broadcast_in_dim(on, o.shape, range(len(shape))) for o in old]
        return [jax.lax.select(g, n, o) for g, n, o in zip(grown, new, old, strict=True)]

    params = {
        **p,
        "cond_jaxpr": jax.make_jaxpr(any_on)(*consts[:nc], *carry),
        "body_jaxpr": jax.make_jaxpr(selected)(*consts, *carry),
        "body_nconsts": len(consts),
    }
    invars = [*eqn.invars[:nc], *eqn.invars]
    return jex.new_jaxpr_eqn(
        invars, eqn.outvars, eqn.primitive, params, eqn.effects, eqn.source_info, eqn.ctx
    )


def constraint_of(eqn: Any) -> Any:
    """The sharding that a `with_sharding_constraint` or `reshard` equation asks for."""
    return eqn.params.get("sharding", eqn.params.get("dst_sharding"))


def at_top_level() -> bool:
    """Whether no transformation (`jit`, `grad`, `vmap`, ...) is being traced."""
    return trace_state_clean()


def context_mesh() -> Any:
    """What `jax.set_mesh` put into the context, as a hashable value; None outside."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


ARGUMENT_MARKER = "jshard_boundary"

argument_marker_p = jex.Primitive(ARGUMENT_MARKER)
argument_marker_p.def_impl(lambda x, **_: x)
argument_marker_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(argument_marker_p, lambda ctx, x, **_: [x])
# Tangents pass by, so that derivatives of a sharded function are not themselves boundaries.
ad.primitive_jvps[argument_marker_p] = lambda primals, tangents, **k: (
    argument_marker_p.bind(*primals, **k),
    tangents[0],
)


def _refuse_batching(args: Any, dims: Any, *, name: str) -> Any:
    raise NestedShardError(
        f"vmap of the sharded function {name}",
        where=f"jax.vmap({name})",
        fix=f"put vmap inside: jshard.shard(jax.vmap(f), ...) instead of jax.vmap(jshard.shard(f, ...)) for f = {name}",
    )


batching.primitive_batchers[argument_marker_p] = _refuse_batching


def mark_argument(x: Any, name: str) -> Any:
    """`x`, marked as an argument of the sharded function `name`: no cache hides it from `vmap` or another `shard`."""
    return argument_marker_p.bind(x, name=name)


def _nothing_runs(ctx: Any, x: Any, *, what: str, where: str, fix: str) -> Any:
    raise MeshError(what, where=where, fix=fix)


described_p = jex.Primitive("jshard_described")
described_p.def_impl(lambda x, *, what, where, fix: _nothing_runs(None, x, what=what, where=where, fix=fix))
described_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(described_p, _nothing_runs)
ad.primitive_jvps[described_p] = lambda primals, tangents, **k: (described_p.bind(*primals, **k), tangents[0])


def never_compiled(x: Any, error: ShardError) -> Any:
    """`x` in a program of which only shapes are asked: compiling it raises the error."""
    return described_p.bind(x, what=error.what, where=error.where, fix=error.fix)


@contextlib.contextmanager
def without_mesh() -> Any:
    """A context without a mesh: tracing on global shapes while inside `shard_map` sees neither its manual axes nor
    that values are typed by them."""
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())), check_vma(False):
        yield


def context_of_trace(mesh: Any) -> Any:
    """The context in which to trace global shapes again as they were: of the mesh with Explicit axes, or of none."""
    return without_mesh() if mesh is None else with_mesh(mesh)


def call_primitive(name: str, run: Any) -> Any:
    """A primitive with several results whose one parameter `fused` runs it: as it is, abstractly, and compiled.

    `vmap` asks `fused.batched(operands, dims)` for the operands and the parameter of the mapped call, whose results
    have the new dimension first.
    """
    p = jex.Primitive(name)
    p.multiple_results = True
    p.def_impl(lambda *xs, fused: run(fused, *xs))

    def shapes(*avals: Any, fused: Any) -> Any:
        given = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
        with without_mesh():
            outs = jax.eval_shape(lambda *xs: run(fused, *xs), *given)
        return [core.ShapedArray(o.shape, o.dtype, weak_type=o.weak_type) for o in outs]

    def batch(args: Any, dims: Any, *, fused: Any) -> Any:
        grown, new = fused.batched(args, dims)
        out = p.bind(*grown, fused=new)
        return out, [0] * len(out)

    p.def_abstract_eval(shapes)
    batching.primitive_batchers[p] = batch
    mlir.register_lowering(p, mlir.lower_fun(lambda *xs, fused: run(fused, *xs), multiple_results=True))
    return p


def primitive(name: str) -> Any:
    """A new primitive with several results."""
    p = jex.Primitive(name)
    p.multiple_results = True
    return p


# As other libraries of JAX do: our frames are neither the user's lines nor of use in his tracebacks.
_HERE = os.path.dirname(__file__)
source_info_util.register_exclusion(_HERE)
traceback_util.register_exclusion(_HERE)
api_boundary = traceback_util.api_boundary


def dispatcher(name: str, fn: Any, miss: Any, static_argnums: Any, static_argnames: Any) -> Any:
    """JAX's own dispatch of calls, the C++ function behind `jax.jit`, with our own way to serve a call it has not seen.

    `miss(*args, **kwargs)` gives (results, what `first_call` says, False). Under `jax.disable_jit` `fn` runs instead.
    """

    def plain(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return _jax.pjit(
        name, plain, miss, sorted(static_argnums), sorted(static_argnames), pxla.JitGlobalCppCacheKeys(),
        tree_util.dispatch_registry, pxla.cc_shard_arg,
    )  # fmt: skip


def clear_dispatch_cache(dispatch: Any) -> None:
    """Empty the cache of a `dispatcher`."""
    dispatch._clear_cache()


def call_and_fastpath_data(compiled: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Results of a compiled program, and what the dispatcher needs to repeat the call; None if only Python can."""
    executable = compiled._executable
    if getattr(getattr(executable, "unsafe_call", None), "ordered_effects", None):
        return compiled(*args, **kwargs), None
    call = executable.create_cpp_call(compiled._params)
    if call is None:  # callbacks and the like
        return compiled(*args, **kwargs), None
    out, again, _ = call._cache_miss(*args, **kwargs)
    return out, again


def trace_options() -> tuple[tuple[str, Any], ...]:
    """The options of JAX that a trace depends on, as (name, value) in this thread."""
    both = zip(config.trace_context_names(), config.trace_context(), strict=True)
    return tuple((n, v) for n, v in both if n.startswith("jax_"))


def jax_option(name: str) -> Any:
    """The value of one of JAX's options in this thread."""
    return getattr(jax.config, name)


def with_mesh(mesh: Any) -> Any:
    """A context in which `mesh` (concrete or abstract) is the one that types of arrays refer to."""
    return jax.sharding.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh))
