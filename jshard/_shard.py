"""`shard`: the decorator, and the callable it returns.

The first call with a new signature traces the function, plans it, and compiles one program; every later call
goes straight to JAX's own dispatch of that program. Under another transformation (`jit`, `grad`, `scan`) the
planned program is written inline instead, so that JAX can differentiate it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from jshard import _jaxcompat as compat
from jshard._errors import MeshError, NestedShardError, ShardError
from jshard._lower.interpret import spmd
from jshard._plan.plan import Plan
from jshard._prepare import Prepared, Request, abstract, dynamic, prepare, static_values
from jshard._report.progress import progress, search_state
from jshard._wish.options import check_call_options, check_function, check_options


def shard(
    fn: Callable[..., Any] | None = None,
    in_strategy: Any = None,
    out_strategy: Any = None,
    parameter_plan: Any = None,
    device: str | None = None,
    level: int = 0,
    *,
    mesh: Any = None,
    hardware: Any = None,
    memory_budget: int | str | None = None,
    search: str = "optimal",
    plan: Plan | None = None,
    strict: bool = False,
    static_argnums: Any = None,
    static_argnames: Any = None,
    donate_argnums: Any = None,
    donate_argnames: Any = None,
) -> Any:
    """Plan a function from a few strategies and run it sharded.

    >>> import jax, jax.numpy as jnp, jshard
    >>> @jshard.shard(in_strategy=((1, 1), None), level=2)
    ... def dense(x, w):
    ...     return jax.nn.relu(x @ w)
    >>> dense(jnp.ones((4, 8)), jnp.ones((8, 2))).shape
    (4, 2)

    Arguments:

    - `fn`: the function; without it `shard` is a decorator with options.
    - `in_strategy`: one entry per positional argument, or a dict by name: `None` (derive), pieces per dimension
        `(4, 2)`, a `PartitionSpec` or `NamedSharding`, or a pytree prefix of these.
    - `out_strategy`: the same for results, or `"full_batch"` (replicated), `"data_parallel"` (dimension 0).
    - `parameter_plan`: dotted parameter path -> entry; `*` matches one part.
    - `device`: `"tpu"`, `"gpu"` or `"cpu"`; default: JAX's default backend.
    - `level`: what the search minimises: 0 communication and redundant compute, 1 peak memory, 2 step time.
    - `mesh`: a `Mesh`, `AbstractMesh` or `topology(...)`; default: the mesh in context, else inferred.
    - `hardware`: a chip's name; default: what the mesh consists of.
    - `memory_budget`: bytes a device, or `"14GiB"`; default: 90% of the chip's memory, none on CPU.
    - `search`: `"optimal"` or `"propagation"` (MindSpore's algorithm).
    - `plan`: a `Plan` to use instead of searching.
    - `strict`: names in `parameter_plan` that match nothing are an error instead of a warning.
    - `static_argnums`, `static_argnames`, `donate_argnums`, `donate_argnames`: as in `jax.jit`.

    Returns a `Sharded` callable. Raises `ShardError` for what cannot be.
    """
    options = dict(
        in_strategy=in_strategy, out_strategy=out_strategy, parameter_plan=parameter_plan, device=device, level=level,
        mesh=mesh, hardware=hardware, memory_budget=memory_budget, search=search, plan=plan, strict=strict,
        static_argnums=static_argnums, static_argnames=static_argnames, donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
    )  # fmt: skip
    checked = check_options(
        level=level,
        device=device,
        memory_budget=memory_budget,
        search=search,
        strict=strict,
        hardware=hardware,
    )
    call = check_call_options(
        static_argnums=static_argnums, static_argnames=static_argnames, donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
    )  # fmt: skip
    if plan is not None and not isinstance(plan, Plan):
        raise ShardError(
            f"plan is a {type(plan).__name__}",
            where="plan",
            fix="a Plan, as f.plan(*args) or jshard.Plan.load(path) gives it",
        )
    if fn is None:
        return functools.partial(shard, **options)
    if isinstance(fn, Sharded):
        raise NestedShardError(
            f"{fn.__name__} is sharded already",
            where=f"shard({fn.__name__})",
            fix=f"shard the plain function: jshard.shard({fn.__name__}.__wrapped__, ...)",
        )
    check_function(fn)
    name = getattr(fn, "__name__", type(fn).__name__)
    request = Request(fn, name, in_strategy, out_strategy, parameter_plan, checked, call, mesh, plan)
    return Sharded(request)


class Sharded:
    """A planned function: call it, or ask for its `plan` or its `lower`ed program.

    It keeps the name, documentation and signature of the function, which is `__wrapped__`.

    >>> import jax.numpy as jnp, jshard
    >>> double = jshard.shard(lambda x: 2 * x, in_strategy=((1,),))
    >>> isinstance(double, jshard.Sharded), float(double(jnp.ones(3)).sum())
    (True, 6.0)
    """

    def __init__(self, request: Request):
        functools.update_wrapper(self, request.fn)
        self.__name__ = request.name
        self._request = request
        self._lock = threading.Lock()  # held for moments only: planning has a lock per signature
        self._planning: dict[Any, Any] = {}
        self._prepared: dict[Any, Prepared] = {}
        self._running: dict[Any, Callable[..., Any]] = {}
        self._seen: Any = None  # runner and keywords of the last call on the slow path
        self._fast: _Fast | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fast = self._fast
        if fast is not None and compat.at_top_level():
            names, order, run = fast
            try:
                if not kwargs:
                    if not names:
                        return run(*args)
                elif tuple(kwargs) == names:
                    return run(*args, *[kwargs[n] for n in order])
            except (_Other, ValueError):
                # Another signature, or arguments that lie elsewhere. A failed attempt is dear, so the next ones
                # look the signature up until two calls in a row agree again.
                self._fast = self._seen = None
        return self._slow(args, kwargs)

    def plan(self, *args: Any, verify: bool | None = None, **kwargs: Any) -> Plan:
        """The plan for these arguments; arrays or `ShapeDtypeStruct`s, no device needed.

        >>> import jax, jshard
        >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
        >>> jshard.shard(lambda x: x + 1, in_strategy=((1, 1),)).plan(x).outputs[0].layout.dims
        ((), ())

        `verify=True` compiles the planned program too, and the plan says what the compiler emitted. A function with
        an argument of that name gets it instead. What takes longer than 2 s shows its progress on a terminal.
        """
        if verify is not None and "verify" in _parameters(self._request.fn):
            kwargs["verify"], verify = verify, None
        with progress(f"planning {self.__name__}", after=2.0) as show:
            prepared = self._prepare(args, kwargs, lambda *state: show(0, search_state(*state)))
            if not verify:
                return prepared.plan
            if isinstance(prepared.chosen.mesh, AbstractMesh):
                raise MeshError(
                    f"the mesh {prepared.plan.mesh} plans only, nothing can be compiled for it",
                    where=f"{self.__name__}.plan(..., verify=True)",
                    fix="a mesh of devices, or jshard.topology(...) where its compiler is installed: libtpu for TPU, "
                    "JAX's CUDA plugin for GPU",
                )
            show(0, "compiling")
            check = prepared.plan.verify(self.lower(*args, **kwargs).compile())
        return dataclasses.replace(prepared.plan, verification=check)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The planned program as a `jax.stages.Lowered`, ready for `.compile()`."""
        prepared = self._prepare(args, kwargs)
        names = self._request.statics[1]
        named = (kwargs[k] if k in names else abstract(kwargs[k]) for k in sorted(kwargs))
        return self._runner(prepared, args, kwargs).lower(*_abstract_call(self._request, args), *named)

    def clear_cache(self) -> None:
        """Forget every plan and compiled program."""
        with self._lock:
            self._prepared.clear()
            self._running.clear()
            self._planning.clear()
            self._fast = self._seen = None

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        """Methods: bound to an instance as functions are."""
        return self if obj is None else functools.partial(self, obj)

    def __repr__(self) -> str:
        return f"<sharded {self.__name__}{_signature(self._request.fn)}>"

    def _prepare(self, args: Any, kwargs: Any, on_progress: Callable[..., None] | None = None) -> Prepared:
        key = _key(self._request, args, kwargs)
        found = self._prepared.get(key)
        if found is not None:
            return found
        with self._lock:
            planning = self._planning.setdefault(key, threading.RLock())
        with planning:
            found = self._prepared.get(key)
            if found is None:
                if self._prepared and compat.setting("jax_log_compiles"):
                    _explain(self.__name__, key, list(self._prepared))
                # Kept only when whole: an interrupted search leaves nothing behind.
                found = self._prepared[key] = prepare(self._request, args, kwargs, on_progress)
        return found

    def _runner(self, prepared: Prepared, args: Any, kwargs: Any) -> Any:
        names = tuple(sorted(kwargs))
        key = (id(prepared), names)
        with self._lock:
            if key not in self._running:
                self._running[key] = _jitted(prepared, len(args), names)
            return self._running[key]

    def _slow(self, args: Any, kwargs: Any) -> Any:
        prepared = self._prepare(args, kwargs)
        if not compat.at_top_level():
            return _inline(prepared, args, kwargs)
        run = self._runner(prepared, args, kwargs)
        # JAX refuses arguments committed to another layout, so those are placed as the plan says.
        call, moved = _place(prepared, args, kwargs)
        out = run(*call)
        now: _Fast = (tuple(kwargs), tuple(sorted(kwargs)), run)
        self._fast = now if not moved and self._seen == now else None
        self._seen = None if moved else now
        return out


_Fast = tuple[
    tuple[str, ...], tuple[str, ...], Callable[..., Any]
]  # keywords as called, as passed on, what runs


class _Other(Exception):
    """The compiled function was called with another signature."""


def _abstract_call(request: Request, args: Any) -> tuple:
    """Positional arguments as shapes, static ones as they are."""
    numbers, _ = request.statics
    return tuple(a if i in numbers else abstract(a) for i, a in enumerate(args))


def _jitted(prepared: Prepared, n_args: int, names: tuple[str, ...]) -> Any:
    """The planned program as one `jax.jit` of the call's own arguments, keywords made positional."""
    request = prepared.request
    numbers, static_names = request.statics
    program = prepared.schedule.choice.program
    mesh = prepared.chosen.mesh
    body = spmd(prepared.schedule, mesh)
    constants = program.constants
    in_args, in_kwargs = prepared.plan.in_shardings
    by_name = dict(in_kwargs)
    wanted, settings = [_aval_key(a) for a in prepared.in_avals], _settings()
    statics = tuple(i for i in range(n_args) if i in numbers)
    statics += tuple(n_args + k for k, n in enumerate(names) if n in static_names)

    def run(*call: Any) -> Any:
        args = tuple(a for i, a in enumerate(call[:n_args]) if i not in numbers)
        kwargs = {n: v for n, v in zip(names, call[n_args:], strict=False) if n not in static_names}
        leaves, tree = jax.tree.flatten((args, kwargs))
        have = [_aval_key(x) for x in leaves]
        if len(call) != n_args + len(names) or tree != prepared.in_tree:
            raise _Other
        if have != wanted or _settings() != settings:
            raise _Other
        if (
            static_values(request, call[:n_args], dict(zip(names, call[n_args:], strict=True)))
            != prepared.statics
        ):
            raise _Other
        # A compiled call of its own: its arguments come in our shardings, a mesh in context says nothing of them.
        with compat.inside_mesh(mesh):
            return jax.tree.unflatten(prepared.out_tree, body(*leaves, *constants))

    run.__name__ = run.__qualname__ = request.name
    donate = tuple(i for i in request.call.donate_argnums if i < n_args)
    positional = _positional_names(request.fn)
    donate += tuple(i for i, n in enumerate(positional[:n_args]) if n in request.call.donate_argnames)
    donate += tuple(n_args + k for k, n in enumerate(names) if n in request.call.donate_argnames)
    shardings = (*in_args, *(by_name[n] for n in names if n in by_name))
    return jax.jit(
        run,
        in_shardings=shardings if shardings else None,
        out_shardings=prepared.plan.out_shardings,
        static_argnums=statics or None,
        donate_argnums=tuple(dict.fromkeys(donate)) or None,
    )


def _inline(prepared: Prepared, args: Any, kwargs: Any) -> Any:
    """The planned program inside another trace, in the form JAX can differentiate."""
    left, left_kw, _ = dynamic(prepared.request, args, kwargs)
    leaves = jax.tree.leaves((left, left_kw))
    body = spmd(prepared.schedule, prepared.chosen.mesh, vma=True)
    marked = [compat.boundary(x, prepared.request.name) for x in leaves]
    choice = prepared.schedule.choice
    context = jax.sharding.get_abstract_mesh()
    if not context.empty and AxisType.Explicit in context.axis_types:
        specs = tuple(choice.needed(i, 0).spec for i in choice.program.outputs)
        body = jax.sharding.auto_axes(body, out_sharding=list(specs))
    out: Any = body(*marked, *choice.program.constants)
    return jax.tree.unflatten(prepared.out_tree, out)


def _place(prepared: Prepared, args: Any, kwargs: Any) -> tuple[tuple, bool]:
    """The arguments of a call where the plan wants them, and whether any lay elsewhere."""
    request = prepared.request
    numbers, static_names = request.statics
    left = tuple(a for i, a in enumerate(args) if i not in numbers)
    left_kw = {k: v for k, v in kwargs.items() if k not in static_names}
    leaves, tree = jax.tree.flatten((left, left_kw))
    shardings = jax.tree.leaves(prepared.plan.in_shardings)
    elsewhere = [i for i, (x, s) in enumerate(zip(leaves, shardings, strict=True)) if _elsewhere(x, s)]
    if elsewhere:
        for i in elsewhere:
            _check_devices(request, leaves[i], shardings[i])
        moved = jax.device_put([leaves[i] for i in elsewhere], [shardings[i] for i in elsewhere])
        for i, x in zip(elsewhere, moved, strict=True):
            leaves[i] = x
        left, left_kw = jax.tree.unflatten(tree, leaves)
    given = iter(left)
    call = tuple(a if i in numbers else next(given) for i, a in enumerate(args))
    call += tuple(kwargs[n] if n in static_names else left_kw[n] for n in sorted(kwargs))
    return call, bool(elsewhere)


def _elsewhere(x: Any, sharding: NamedSharding) -> bool:
    if not isinstance(x, jax.Array) or not getattr(x, "committed", True) or x.sharding is sharding:
        return False  # JAX itself places what is on the host or not committed to a device
    return not x.sharding.is_equivalent_to(sharding, x.ndim)


def _check_devices(request: Request, x: Any, sharding: NamedSharding) -> None:
    foreign = x.sharding.device_set - sharding.device_set
    if foreign:
        names = ", ".join(str(d) for d in sorted(foreign, key=lambda d: d.id)[:3])
        raise MeshError(
            f"an argument of shape {x.shape} lies on {names}, outside the mesh of {len(sharding.device_set)} devices",
            where=f"call of {request.name}",
            fix="jax.device_put(x, f.plan(x).in_shardings[0][0]), or give shard a mesh with these devices",
        )


def _key(request: Request, args: Any, kwargs: Any) -> Any:
    numbers, names = request.statics
    left = tuple(a for i, a in enumerate(args) if i not in numbers)
    leaves, tree = jax.tree.flatten((left, {k: v for k, v in kwargs.items() if k not in names}))
    context = None if request.mesh is not None else compat.context_mesh()
    avals = tuple(map(_aval_key, leaves))
    statics = static_values(request, args, kwargs) if numbers or names else ()
    try:
        hash(statics)
    except TypeError:
        raise ShardError(
            f"a static argument of {request.name} cannot be hashed: "
            + ", ".join(type(v).__name__ for _, v in statics),
            where=f"call of {request.name}",
            fix="a hashable value (a tuple instead of a list), or leave it out of static_argnums, static_argnames",
        ) from None
    return tree, avals, statics, context, _settings()


def _settings() -> tuple:
    """What else a trace depends on."""
    return compat.setting("jax_enable_x64"), compat.setting("jax_default_matmul_precision")


_log = logging.getLogger("jshard")


def _explain(name: str, key: Any, known: list[Any]) -> None:
    """Say why a call is planned anew: how it differs from the known signature that is closest."""

    def differences(old: Any) -> list[str]:
        if old[0] != key[0]:
            return [f"the structure of the arguments: {old[0]} -> {key[0]}"]
        paths = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(key[0], range(len(key[1]))))[0]
        said = [
            f"argument {jax.tree_util.keystr(path)}: {_shown(was)} -> {_shown(now)}"
            for (path, _), was, now in zip(paths, old[1], key[1], strict=True)
            if was != now
        ]
        titles = ("static arguments", "mesh in context", "settings (x64, matmul precision)")
        return said + [f"{t}: {a} -> {b}" for t, a, b in zip(titles, old[2:], key[2:], strict=True) if a != b]

    closest = min((differences(k) for k in known), key=len)
    _log.warning("%s is planned anew; changed: %s", name, "; ".join(closest))


def _shown(aval: Any) -> str:
    if not isinstance(aval, tuple):
        return str(aval)
    shape, dtype, weak = aval
    return f"{dtype}[{','.join(map(str, shape))}]" + (" (weak)" if weak else "")


def _aval_key(x: Any) -> Any:
    if isinstance(x, jax.Array) or isinstance(x, jax.ShapeDtypeStruct):
        return x.shape, x.dtype, bool(getattr(x, "weak_type", False))
    a = abstract(x)
    return (a.shape, a.dtype, a.weak_type) if isinstance(a, jax.ShapeDtypeStruct) else a


def _parameters(fn: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return {}


def _positional_names(fn: Any) -> list[str]:
    parameters = _parameters(fn).values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _signature(fn: Any) -> str:
    try:
        return str(inspect.signature(fn))
    except (TypeError, ValueError):
        return "(...)"
