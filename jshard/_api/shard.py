"""`shard`: the decorator, and the callable it returns.

The first call with a new signature traces the function, plans it, and compiles one program; every later call is
served by JAX's own dispatch of that program: the object's `__call__` is that C++ function, no Python runs. Under
another transformation (`jit`, `grad`, `scan`) the planned program is written inline instead, so that JAX can
differentiate it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh

from jshard import _jaxcompat as compat
from jshard._api.executable import Executable, inline
from jshard._api.plan import Plan
from jshard._api.prepare import PlannedCall, check_pins, prepare
from jshard._api.shard_request import ShardRequest, traced_arguments
from jshard._api.signature import Signature, checked_statics, explain_miss, signature
from jshard._core.argument_checks import check_call, checked
from jshard._core.errors import ArgumentError, MeshError, NestedShardError, ShardError
from jshard._core.messages import describe_value
from jshard._report.progress import progress, search_status
from jshard._spec.options import check_call_options, check_function, check_options, flax_entry_point


CALLBACK_PRIMITIVES = frozenset(("pure_callback", "io_callback", "debug_callback", "debug_print"))

_log = logging.getLogger("jshard")


@checked
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
    replication_price: float = 1000.0,
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
    - `level`: what the search minimises: 0 communication and redundant compute, 1 peak memory (of the plans found at the
        least peak the fastest), 2 step time.
    - `mesh`: a `Mesh`, `AbstractMesh` or `topology(...)`; `"auto"` tries the grids that the pins allow on the devices
        here, `"auto:4"` on four of them, `"auto:v5e:4x4"` on a named machine; default: that in context, else inferred.
    - `hardware`: a chip's name; default: what the mesh consists of.
    - `memory_budget`: bytes a device, or `"14GiB"`; default: 90% of the chip's memory, none on CPU.
    - `search`: `"optimal"` or `"propagation"` (MindSpore's algorithm).
    - `plan`: a `Plan` to use instead of searching.
    - `strict`: names in `parameter_plan` that match nothing are an error instead of a warning.
    - `static_argnums`, `static_argnames`, `donate_argnums`, `donate_argnames`: as in `jax.jit`.
    - `replication_price`: what each second counts, at levels 0 and 2, that devices spend on products which others
        compute as well; 0: nothing but its time.

    Returns a `Sharded` callable. Raises `ShardError` for what cannot be.
    """
    options = dict(
        in_strategy=in_strategy, out_strategy=out_strategy, parameter_plan=parameter_plan, device=device, level=level,
        mesh=mesh, hardware=hardware, memory_budget=memory_budget, search=search, plan=plan, strict=strict,
        static_argnums=static_argnums, static_argnames=static_argnames, donate_argnums=donate_argnums,
        donate_argnames=donate_argnames, replication_price=replication_price,
    )  # fmt: skip
    checked = check_options(
        level=level,
        device=device,
        memory_budget=memory_budget,
        search=search,
        strict=strict,
        hardware=hardware,
        replication_price=replication_price,
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
    whole = flax_entry_point(fn)
    if whole is not None:
        return whole(fn, **options)
    if isinstance(fn, Sharded):
        raise NestedShardError(
            f"{fn.__name__} is sharded already",
            where=f"shard({fn.__name__})",
            fix=f"shard the plain function: jshard.shard({fn.__name__}.__wrapped__, ...)",
        )
    check_function(fn)
    if (flax := _flax_function()) is not None:
        flax.refuse_bound_method(fn)
    name = getattr(fn, "__name__", type(fn).__name__)
    request = ShardRequest(fn, name, in_strategy, out_strategy, parameter_plan, checked, call, mesh, plan)
    return Sharded(request)


class Sharded:
    """A planned function: call it, or ask for its `plan` or its `lower`ed program.

    It keeps the name, documentation and signature of the function, which is `__wrapped__`.

    >>> import jax.numpy as jnp, jshard
    >>> double = jshard.shard(lambda x: 2 * x, in_strategy=((1,),))
    >>> isinstance(double, jshard.Sharded), float(double(jnp.ones(3)).sum())
    (True, 6.0)
    """

    # `__call__` is a slot, not a method: Python finds the C++ function there and calls it with no frame between.
    __slots__ = ("__call__", "__dict__", "__weakref__")
    __call__: Callable[..., Any]

    def __init__(self, request: ShardRequest, *, of_arrays: bool = False):
        functools.update_wrapper(self, request.fn)
        self.__name__ = request.name
        self._request = request
        self._lock = threading.Lock()  # held for moments only: planning has a lock per signature
        self._planning: dict[Signature, threading.RLock] = {}
        self._executables: dict[Signature, Executable] = {}
        self._executables_by_shapes: dict[
            Signature, tuple[Executable, ...]
        ] = {}  # those that differ in where arguments lie
        self._failed = False
        self._is_array_function = of_arrays  # a function of arrays that another one calls: it holds no state
        self._stateful: Any = None  # for arguments that hold state, as Flax modules do
        self.calls_back = False  # whether a program calls Python functions
        self._dispatch = compat.dispatcher(request.name, request.fn, self._on_cache_miss, *request.statics)
        self.__call__ = self._call_with_statics if any(request.statics) else self._dispatch

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
        if not isinstance(verify, bool | None):
            raise ShardError(
                f"verify is {describe_value(verify)}",
                where=f"{self.__name__}.plan",
                fix="verify=True or verify=False",
            )
        with progress(f"planning {self.__name__}", after=2.0) as show:
            with self.as_array_function(args, kwargs) as (function, left, left_kw):
                program = function._executable_for_arrays(
                    left, left_kw, lambda *state: show(0, search_status(*state))
                )
                moved = program.entry_moves(left, left_kw)
            plan = program.plan
            plan = dataclasses.replace(plan, entry=moved) if moved else plan
            if not verify:
                return plan
            if isinstance(program.prepared.chosen.mesh, AbstractMesh):
                raise MeshError(
                    f"the mesh {plan.mesh} plans only, nothing can be compiled for it",
                    where=f"{self.__name__}.plan(..., verify=True)",
                    fix="a mesh of devices, or jshard.topology(...) where its compiler is installed: libtpu for TPU, "
                    "JAX's CUDA plugin for GPU",
                )
            show(0, "compiling")
            check = plan.verify(program.compile())
        return dataclasses.replace(plan, verification=check)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The planned program as a `jax.stages.Lowered`, ready for `.compile()`."""
        return self._executable(args, kwargs).lower()

    def clear_cache(self) -> None:
        """Forget every plan and compiled program."""
        with self._lock:
            self._executables.clear()
            self._executables_by_shapes.clear()
            self._planning.clear()
            self._stateful = None
        compat.clear_dispatch_cache(self._dispatch)

    def check_arguments(
        self, args: Any, kwargs: Any, where: str = "", settings: tuple[str, ...] = ()
    ) -> None:
        """Raise what is wrong with a call of the function: names and number of its arguments.

        `where`: the function that plans it, with `settings` of its own.
        """
        options = list(inspect.signature(shard).parameters)[1:]
        how = f"jshard.{where}(jshard.shard({self.__name__}, {{0}}=...), ...)"
        if not where:
            how = f"{{0}} where the function is sharded: jshard.shard({self.__name__}, {{0}}=...)"
        elsewhere = {o: how.format(o) for o in options if o not in settings}
        if where == "pareto":
            elsewhere["level"] = "nothing: a frontier has the plans of every level"
        called = f"call of {self.__name__}"
        check_call(
            self._request.fn,
            args,
            kwargs,
            self.__name__,
            where=where or called,
            own_arguments=settings,
            advice=elsewhere,
        )

    @property
    def request(self) -> ShardRequest:
        """What was asked of `shard`."""
        return self._request

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        """Methods: bound to an instance as functions are."""
        return self if obj is None else _Bound(self, obj)

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharded:
        return self  # as functions are

    def __copy__(self) -> Sharded:
        return self

    def __repr__(self) -> str:
        return f"<sharded {self.__name__}{_signature(self._request.fn)}>"

    @compat.api_boundary
    def _on_cache_miss(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        """What JAX's dispatch calls when it does not know a call: results, how to repeat it, whether to forget it."""
        try:
            over = self._stateful_function(args, kwargs)
            if over is not None:
                self.__call__ = self._call_checking_for_state  # of those calls dispatch knows nothing
                return self._call_stateful(over, args, kwargs), None, False
            program = self._executable(args, kwargs)
            if not compat.at_top_level():
                return inline(program, args, kwargs), None, False
            out, again = program.run(args, kwargs)
        except BaseException:
            # Dispatch would take the slow path for this signature from now on.
            self._failed = True
            raise
        if self._failed:
            self._failed = False
            compat.clear_dispatch_cache(self._dispatch)
        return out, again, False

    @compat.api_boundary
    def _call_checking_for_state(self, *args: Any, **kwargs: Any) -> Any:
        """A call of a function that was called with state."""
        over = self._stateful_function(args, kwargs)
        if over is not None:
            return self._call_stateful(over, args, kwargs)
        return (
            self._call_with_statics(*args, **kwargs)
            if any(self._request.statics)
            else self._dispatch(*args, **kwargs)
        )

    @compat.api_boundary
    def _call_with_statics(self, *args: Any, **kwargs: Any) -> Any:
        """A call with static arguments: dispatch hashes them before it asks us."""
        try:
            return self._dispatch(*args, **kwargs)
        except (TypeError, ValueError):
            checked_statics(self._request, args, kwargs)
            raise

    def _stateful_function(self, args: Any, kwargs: Any) -> Any:
        """The form for arguments with state that the function may change, graph nodes of nnx; None without."""
        flax = _flax_function() if not self._is_array_function else None
        if flax is None or not flax.holds_state(traced_arguments(self._request, args, kwargs)):
            return None
        with self._lock:
            if self._stateful is None:
                self._stateful = flax.StatefulFunction(self._request, functools.partial(Sharded, of_arrays=True))
            return self._stateful

    @contextlib.contextmanager
    def as_array_function(self, args: Any, kwargs: Any) -> Iterator[tuple[Sharded, tuple, dict[str, Any]]]:
        """The function of arrays that is planned for these arguments, and its arguments."""
        over = self._stateful_function(args, kwargs)
        with self._explaining_errors(args, kwargs), contextlib.ExitStack() as stack:
            if over is not None:
                args, kwargs = stack.enter_context(over.split_arguments(args, kwargs))
            yield (self if over is None else over.inner), tuple(args), dict(kwargs)

    def _call_stateful(self, over: Any, args: Any, kwargs: Any) -> Any:
        """A call that may change the state among its arguments."""
        with self._explaining_errors(args, kwargs):
            return over(args, kwargs)

    @contextlib.contextmanager
    def _explaining_errors(self, args: Any, kwargs: Any) -> Iterator[None]:
        """Errors of a wrong call, and of a trace that concern captured state, in words that name what is meant."""
        try:
            yield
        except Exception as error:
            if isinstance(error, TypeError):
                self.check_arguments(args, kwargs)
            flax = _flax_function()
            found = error if flax is None else flax.explain_trace_error(error, self._request.fn, self.__name__)
            if found is error:
                raise
            raise found from None

    def _executable(
        self, args: Any, kwargs: Any, on_progress: Callable[..., None] | None = None
    ) -> Executable:
        if not self._is_array_function:
            with self.as_array_function(args, kwargs) as (function, args, kwargs):
                return function._executable_for_arrays(args, kwargs, on_progress)
        return self._executable_for_arrays(args, kwargs, on_progress)

    def _executable_for_arrays(
        self, args: Any, kwargs: Any, on_progress: Callable[..., None] | None
    ) -> Executable:
        try:
            key = signature(self._request, args, kwargs)
        except ArgumentError:
            check_pins(self._request, args, kwargs)  # what was asked of that argument is said first
            raise
        found = self._cached(key)
        if found is not None:
            return found
        with self._lock:
            planning = self._planning.setdefault(key.without_placement, threading.RLock())
        with planning:
            found = self._cached(key)
            if found is None:
                if self._executables and compat.jax_option("jax_log_compiles"):
                    _log.warning(
                        "%s is planned anew; changed: %s",
                        self.__name__,
                        explain_miss(key, list(self._executables)),
                    )
                # Kept only when whole: a search that is interrupted before any answer leaves nothing behind.
                found = self._executables[key] = Executable(self._plan_call(args, kwargs, on_progress))
                self._executables_by_shapes[key.without_placement] = (
                    *self._executables_by_shapes.get(key.without_placement, ()),
                    found,
                )
                plan, program = found.prepared.plan, found.prepared.schedule.assignment.program
                self.calls_back |= any(
                    name in CALLBACK_PRIMITIVES for _, name in program.use_def.primitive_ids
                )
                if any("interrupted" in s for s in plan.steps):
                    _log.warning(
                        "%s: the search was interrupted; the best plan it had (gap %.2g%%) is used from now on, "
                        "until %s.clear_cache()",
                        self.__name__, 100 * plan.cost.gap, self.__name__,
                    )  # fmt: skip
        return found

    def _cached(self, key: Signature) -> Executable | None:
        """The program of a signature: its own, or one whose arguments are planned where they lie now."""
        found = self._executables.get(key)
        if found is not None:
            return found
        return next(
            (
                p
                for p in self._executables_by_shapes.get(key.without_placement, ())
                if p.accepts_placement(key.placement)
            ),
            None,
        )

    def _plan_call(self, args: Any, kwargs: Any, on_progress: Callable[..., None] | None) -> PlannedCall:
        """A plan; a call or `lower` shows its progress as `plan` does."""
        if on_progress is not None:
            return prepare(self._request, args, kwargs, on_progress)
        with progress(f"planning {self.__name__}", after=2.0) as show:
            return prepare(self._request, args, kwargs, lambda *state: show(0, search_status(*state)))


class _Bound(functools.partial):
    """A sharded function as a method of an object; `plan` and `lower` know the object too."""

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        return self.func.plan(*self.args, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        return self.func.lower(*self.args, *args, **kwargs)

    def clear_cache(self) -> None:
        self.func.clear_cache()


def _flax_function() -> Any:
    """What carries the state of nnx; None while nnx is not imported, when nobody can have any."""
    if "flax.nnx" not in sys.modules:
        return None
    from jshard._flax import function as step  # here, so that the package does without Flax

    return step


def _parameters(fn: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return {}


def _signature(fn: Any) -> str:
    try:
        return str(inspect.signature(fn))
    except (TypeError, ValueError):
        return "(...)"
