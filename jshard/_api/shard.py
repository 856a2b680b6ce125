"""`shard`: the decorator, and the callable that it returns.

The first call with a new signature traces the function, plans it and compiles one program. Every later call is served
by JAX's C++ dispatch of that program: the object's `__call__` is that C++ function, and no Python code runs. Under
another transformation (`jit`, `grad`, `scan`) the planned program is inlined into the outer trace instead, so that
JAX can differentiate it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from jshard._api.bound_method import BoundMethod
from jshard._api.call_state import refuse_arguments
from jshard._api.executable import Executable, inline
from jshard._api.padded_at_rest import call_arguments, place
from jshard._api.plan import Plan, check_plan
from jshard._api.plan_together import plan_together, report_failure
from jshard._api.prepare import PlannedCall, check_pins, prepare
from jshard._api.process_group import warn_if_not_initialized
from jshard._api.shard_request import ShardRequest, traced_arguments
from jshard._api.signature import Signature, checked_statics, explain_miss, signature
from jshard._api.state_library import StatefulFunction, state_library
from jshard._config.config_record import ConfigSource
from jshard._core import jaxcompat as compat
from jshard._core.argument_checks import check_call, checked_with, parameters_of, signature_text
from jshard._core.errors import (
    ArgumentError,
    MemoryBudgetError,
    MeshError,
    NestedShardError,
    ShardError,
    StrategyError,
)
from jshard._core.hardware import Chip
from jshard._core.jax_types import Function, PyTree
from jshard._core.messages import describe_value
from jshard._core.named_topology import MeshRequest
from jshard._report.progress import progress, search_status
from jshard._spec.function_argument import check_function, flax_entry_point
from jshard._spec.options import (
    DEFAULT_LEVEL,
    DEFAULT_SEARCH,
    KEYWORD_ADVICE,
    check_call_options,
    check_options,
    with_rare_options,
)


CALLBACK_PRIMITIVES = frozenset(("pure_callback", "io_callback", "debug_callback", "debug_print"))

_Kwargs = dict[str, PyTree]
_Progress = Callable[..., None] | None

_log = logging.getLogger("jshard")


@checked_with(KEYWORD_ADVICE)
def shard(
    fn: Function | None = None,
    in_strategy: PyTree = None,
    out_strategy: PyTree = None,
    parameter_plan: PyTree = None,
    device: str | None = None,
    level: int = DEFAULT_LEVEL,
    *,
    config: ConfigSource | None = None,
    mesh: MeshRequest | None = None,
    hardware: Chip | str | None = None,
    memory_budget: int | str | None = None,
    search: str = DEFAULT_SEARCH,
    plan: Plan | None = None,
    strict: bool | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    remat: str | None = None,
    microbatches: int | str | None = None,
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
    - `in_strategy`: one entry per positional argument, or a dict by name: `None` (left to the search), shards per
        dimension `(4, 2)`, a `PartitionSpec` or `NamedSharding`, or a pytree prefix of these.
    - `out_strategy`: the same for results, or `"full_batch"` (replicated), `"data_parallel"` (dimension 0).
    - `parameter_plan`: dict from dotted parameter path to entry; `*` matches one part of a path.
    - `device`: `"tpu"`, `"gpu"` or `"cpu"`; default: JAX's default backend.
    - `level`: what the search minimises: 0 communication and redundant compute, 1 peak memory (then step time, among
        the plans found at the least peak), 2 step time.
    - `config`: a configuration, for what other arguments leave open: the path of a YAML file, YAML text, a dict or a
        `Config`. These options are there only. `search_seconds`: how long a plan is improved, in effort of one core of
        2026, so that machines agree, and its gap is said; by default until the proof, each search 60 s at most, of memory
        240. Plans that are compared share it, each has a tenth or more; choices of `remat` have as much again. A search
        that finds no plan within a budget is made again with four times as much (up to 20 s), then as at level 1. `prefer`:
        `"memory:1%"` takes the plan of least peak found at up to 1% more than the least cost. `pad`: sizes of large tensors
        that no cut divides are padded where that makes the plan better; `False` never pads, `True` pads small tensors and
        what pinned cuts do not divide too, paths pad arguments at rest (`PaddedArray`). `pipeline`: loops over stacked
        layers run in stages over a mesh axis, `{"axis": "stage", "microbatches": 16}`; "auto" compares with none.
        `overlap`: `False` counts communication that products hide. Of processes: `local_batch`, `check_host_arrays`, ....
    - `mesh`: a `Mesh`, `AbstractMesh` or `topology(...)`; `"auto"` compares the meshes that the strategies allow on
        the local devices, `"auto:4"` on four of them, `"auto:v5e:4x4"` on a named machine; default: the mesh in context,
        else one inferred from the strategies.
    - `hardware`: a chip's name, or the file of a measured one, `"my-cluster.json"`; default: the chip of the mesh.
    - `memory_budget`: bytes per device, or text such as `"14GiB"`; default: 90% of the chip's memory, none on CPU.
    - `search`: `"optimal"` or `"propagation"` (MindSpore's algorithm).
    - `plan`: a `Plan` to use instead of searching.
    - `strict`: whether names that match nothing are an error instead of a warning; default: those of a `config` are,
        those of `parameter_plan` are not.
    - `static_argnums`, `static_argnames`, `donate_argnums`, `donate_argnames`: as in `jax.jit`.
    - `remat`: "auto" computes values again where the budget needs it, "policy" also prints the `jax.checkpoint` policy.
        `config={"replication_price": 0}` counts the products that several devices compute no more than their time.
    - `microbatches`: into how many pieces the batch is cut, which run in a loop that adds up sums over examples (gradients)
        and changes no result; "auto": the least number that fits the memory budget, or more if they cost less.

    Returns a `Sharded` callable, a decorator without `fn`, of a Flax module a sharded one; wrong arguments: `ShardError`.
    """
    options = dict(
        in_strategy=in_strategy, out_strategy=out_strategy, parameter_plan=parameter_plan, device=device, level=level,
        mesh=mesh, hardware=hardware, memory_budget=memory_budget, search=search, plan=plan, strict=strict,
        static_argnums=static_argnums, static_argnames=static_argnames, donate_argnums=donate_argnums,
        donate_argnames=donate_argnames, config=config, remat=remat, microbatches=microbatches,
    )  # fmt: skip
    if config is not None and (fn is None or flax_entry_point(fn) is None):
        return _shard_by_config(fn, options)
    plan_options = check_options(
        level=level,
        device=device,
        memory_budget=memory_budget,
        search=search,
        strict=strict,
        hardware=hardware,
        remat=remat,
        microbatches=microbatches,
    )
    call_options = check_call_options(
        static_argnums=static_argnums, static_argnames=static_argnames, donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
    )  # fmt: skip
    check_plan(plan)
    if fn is None:
        return functools.partial(shard, **options)
    shard_module = flax_entry_point(fn)
    if shard_module is not None:
        return shard_module(fn, **options)
    if isinstance(fn, Sharded):
        raise NestedShardError(
            f"{fn.__name__} is sharded already",
            where=f"shard({fn.__name__})",
            fix=f"shard the plain function: jshard.shard({fn.__name__}.__wrapped__, ...)",
        )
    check_function(fn, call=call_options)
    if (library := state_library()) is not None:
        library.refuse_bound_method(fn)
    name = getattr(fn, "__name__", type(fn).__name__)
    return Sharded(
        ShardRequest(
            fn, name, in_strategy, out_strategy, parameter_plan, plan_options, call_options, mesh, plan
        )
    )


def _shard_by_config(fn: Function | None, options: Mapping[str, Any]) -> Sharded | functools.partial:
    """`shard` with a configuration: its options where the arguments are the defaults, its mesh, its rules."""
    from jshard._config.apply import options_and_rules  # here, so that `import jshard` stays light

    if fn is None:
        return functools.partial(shard, **options)
    own, rare, record = options_and_rules(options, inspect.signature(shard))
    request = shard(fn, **own).request
    rules = record if record.says_layouts else None
    return Sharded(
        dataclasses.replace(request, options=with_rare_options(request.options, rare), config=rules)
    )


class Sharded:
    """A sharded function: call it, `plan` it, or `lower` it.

    It has the name, documentation and signature of the original function, which is its `__wrapped__`.

    >>> import jax.numpy as jnp, jshard
    >>> double = jshard.shard(lambda x: 2 * x, in_strategy=((1,),))
    >>> isinstance(double, jshard.Sharded), float(double(jnp.ones(3)).sum())
    (True, 6.0)
    """

    # `__call__` is a slot, not a method, so that Python calls JAX's C++ function directly.
    __slots__ = ("__call__", "__dict__", "__weakref__")
    __call__: Function
    place = place  # `padded_at_rest.place`, with this function as `step`

    def __init__(self, request: ShardRequest, *, of_arrays: bool = False):
        """`of_arrays`: whether this is the `inner` function of a `StatefulFunction`, whose arguments hold no state."""
        functools.update_wrapper(self, request.fn)
        self.__name__ = request.name
        self._request = request
        self._lock = threading.Lock()  # for short critical sections; planning has a lock per signature
        self._planning: dict[Signature, threading.RLock] = {}
        self._executables: dict[Signature, Executable] = {}
        self._executables_by_shapes: dict[Signature, tuple[Executable, ...]] = {}
        self._failed = False  # whether the last call that missed the cache raised
        self._is_array_function = of_arrays
        self._stateful: StatefulFunction[Sharded] | None = None
        self.calls_back = False  # whether a planned program has host callbacks
        self._dispatch = compat.dispatcher(request.name, request.fn, self._on_cache_miss, *request.statics)
        self.__call__ = self._call_with_statics if any(request.statics) else self._dispatch
        self.call_arguments = call_arguments(request, of_arrays)
        if self.call_arguments.names:
            self.__call__ = self._call_with_local_batch

    def plan(self, *args: PyTree, verify: bool | None = None, **kwargs: PyTree) -> Plan:
        """The plan for these arguments: arrays or `ShapeDtypeStruct`s; no device is needed.

        >>> import jax, jshard
        >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
        >>> jshard.shard(lambda x: x + 1, in_strategy=((1, 1),)).plan(x).outputs[0].layout.dims
        ((), ())

        `verify=True` also compiles the planned program and sets `verification`, the comparison with what the compiler
        emitted; a function with an argument `verify` of its own receives it instead. Planning that takes longer than
        2 s shows its progress on a terminal.
        """
        if verify is not None and "verify" in parameters_of(self._request.fn):
            kwargs["verify"], verify = verify, None
        if not isinstance(verify, bool | None):
            raise ShardError(
                f"verify is {describe_value(verify)}",
                where=f"{self.__name__}.plan",
                fix="verify=True or verify=False",
            )
        args, kwargs = self.call_arguments.shapes(args, kwargs)
        with progress(f"planning {self.__name__}", after=2.0) as show:
            with self.as_array_function(args, kwargs) as (function, arrays, arrays_kw):
                executable = function._executable_for_arrays(
                    arrays, arrays_kw, lambda *state: show(0, search_status(*state)), runs=False
                )
                moves = executable.entry_moves(arrays, arrays_kw)
            plan = executable.plan
            plan = dataclasses.replace(plan, entry=moves) if moves else plan
            if not verify:
                return plan
            if isinstance(executable.prepared.chosen.mesh, AbstractMesh):
                raise MeshError(
                    f"the mesh {plan.mesh} plans only, nothing can be compiled for it",
                    where=f"{self.__name__}.plan(..., verify=True)",
                    fix="a mesh of devices, or jshard.topology(...) where its compiler is installed: libtpu for TPU, "
                    "JAX's CUDA plugin for GPU",
                )
            show(0, "compiling")
            verification = plan.verify(executable.compile())
        return dataclasses.replace(plan, verification=verification)

    def lower(self, *args: PyTree, **kwargs: PyTree) -> jax.stages.Lowered:
        """The planned program as a `jax.stages.Lowered`, ready for `.compile()`."""
        return self._executable(*self.call_arguments.shapes(args, kwargs)).lower()

    def clear_cache(self) -> None:
        """Drop all plans and compiled programs."""
        with self._lock:
            self._executables.clear()
            self._executables_by_shapes.clear()
            self._planning.clear()
            self._stateful = None
        compat.clear_dispatch_cache(self._dispatch)

    @property
    def request(self) -> ShardRequest:
        """The checked arguments of `shard`."""
        return self._request

    def check_arguments(
        self, args: tuple, kwargs: _Kwargs, where: str = "", settings: tuple[str, ...] = ()
    ) -> None:
        """Raise `ArgumentError` for wrong names or a wrong number of arguments of the function.

        `where`: the function of jshard that passes them on ("sweep", "pareto"); `settings`: its own arguments.
        """
        options = list(inspect.signature(shard).parameters)[1:]
        how = f"jshard.{where}(jshard.shard({self.__name__}, {{0}}=...), ...)"
        if not where:
            how = f"{{0}} where the function is sharded: jshard.shard({self.__name__}, {{0}}=...)"
        advice = {o: how.format(o) for o in options if o not in settings}
        advice |= KEYWORD_ADVICE
        if where == "pareto":
            advice["level"] = "nothing: a frontier has the plans of every level"
        check_call(
            self._request.fn,
            args,
            kwargs,
            self.__name__,
            where=where or f"call of {self.__name__}",
            own_arguments=settings,
            advice=advice,
            form=f"jshard.{where}({{}}, {{}})" if where else "{}({})",
        )

    def __get__(self, obj: object, owner: type | None = None) -> Sharded | BoundMethod:
        """Bind to an instance, as functions do."""
        return self if obj is None else BoundMethod(self, obj)

    def __deepcopy__(self, memo: dict[int, object]) -> Sharded:
        return self  # like functions

    def __copy__(self) -> Sharded:
        return self

    def __repr__(self) -> str:
        return f"<sharded {self.__name__}{signature_text(self._request.fn)}>"

    @compat.api_boundary
    def _on_cache_miss(self, *args: PyTree, **kwargs: PyTree) -> tuple[PyTree, object, bool]:
        """Serve a call that JAX's C++ dispatch has not cached.

        Returns the results, the data with which dispatch repeats the call (None: it shall not), and whether to remove
        the entry from its cache (never).
        """
        try:
            stateful = self._stateful_function(args, kwargs)
            if stateful is not None:
                if not self.call_arguments.names:  # which has its own `__call__`
                    self.__call__ = self._call_checking_for_state  # dispatch cannot cache calls with state
                return self._call_stateful(stateful, args, kwargs), None, False
            executable = self._executable(args, kwargs)
            if not compat.at_top_level():
                return inline(executable, args, kwargs), None, False
            out, fastpath = executable.run(args, kwargs)
        except BaseException:
            # Dispatch remembers a signature whose first call failed, and calls Python for it ever after.
            self._failed = True
            raise
        if self._failed:
            self._failed = False
            compat.clear_dispatch_cache(self._dispatch)
        return out, fastpath, False

    @compat.api_boundary
    def _call_checking_for_state(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """`__call__` from the first call with state on."""
        stateful = self._stateful_function(args, kwargs)
        if stateful is not None:
            return self._call_stateful(stateful, args, kwargs)
        if any(self._request.statics):
            return self._call_with_statics(*args, **kwargs)
        return self._dispatch(*args, **kwargs)

    @compat.api_boundary
    def _call_with_local_batch(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """A call whose batches are rows of this process: arrays over all processes take their place."""
        if compat.at_top_level():
            args, kwargs = self.call_arguments.arrays(
                args, kwargs, lambda *shapes: self._executable(*shapes).plan
            )
        return self._call_checking_for_state(*args, **kwargs)

    @compat.api_boundary
    def _call_with_statics(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """A call with static arguments; dispatch hashes them, and its error for an unhashable one is replaced."""
        try:
            return self._dispatch(*args, **kwargs)
        except (TypeError, ValueError):
            checked_statics(self._request, args, kwargs)
            raise

    def _stateful_function(self, args: tuple, kwargs: _Kwargs) -> StatefulFunction[Sharded] | None:
        """This function with its state split off, if an argument holds state of `flax.nnx`."""
        library = state_library() if not self._is_array_function else None
        if library is None or not library.holds_state(traced_arguments(self._request, args, kwargs)):
            return None
        with self._lock:
            if self._stateful is None:
                self._stateful = library.StatefulFunction(
                    self._request, functools.partial(Sharded, of_arrays=True)
                )
            return self._stateful

    @contextlib.contextmanager
    def as_array_function(self, args: tuple, kwargs: _Kwargs) -> Iterator[tuple[Sharded, tuple, _Kwargs]]:
        """The function that is planned for these arguments, and its arguments: arrays, with state split."""
        stateful = self._stateful_function(args, kwargs)
        with self._explaining_errors(args, kwargs), contextlib.ExitStack() as stack:
            if stateful is not None:
                args, kwargs = stack.enter_context(stateful.split_arguments(args, kwargs))
            yield (self if stateful is None else stateful.inner), tuple(args), dict(kwargs)

    def _call_stateful(self, stateful: StatefulFunction[Sharded], args: tuple, kwargs: _Kwargs) -> PyTree:
        with self._explaining_errors(args, kwargs):
            return stateful(args, kwargs)

    @contextlib.contextmanager
    def _explaining_errors(self, args: tuple, kwargs: _Kwargs) -> Iterator[None]:
        """Replace errors of a wrong call, or of captured state, by `ShardError`s that name the argument."""
        try:
            yield
        except Exception as error:
            if isinstance(error, TypeError | StrategyError):
                self.check_arguments(args, kwargs)
            refuse_arguments(self.__name__, args, kwargs, error)
            library = state_library()
            if library is None:
                raise
            explained = library.explain_trace_error(error, self._request.fn, self.__name__)
            if explained is error:
                raise
            raise explained from None

    def _executable(self, args: tuple, kwargs: _Kwargs, on_progress: _Progress = None) -> Executable:
        if not self._is_array_function:
            with self.as_array_function(args, kwargs) as (function, args, kwargs):
                return function._executable_for_arrays(args, kwargs, on_progress)
        return self._executable_for_arrays(args, kwargs, on_progress)

    def _executable_for_arrays(
        self, args: tuple, kwargs: _Kwargs, on_progress: _Progress, *, runs: bool = True
    ) -> Executable:
        """The cached executable of a call, planned if there is none; calls of one signature plan it once.

        `runs`: it is to run, so its plan must be the one of all processes.
        """
        try:
            key = signature(self._request, args, kwargs)
        except ArgumentError as error:
            if runs:
                report_failure(self._request, args, kwargs, error)
            check_pins(self._request, args, kwargs)  # an error in a strategy is reported first
            raise
        if (cached := self._cached(key)) is not None and (cached.is_common or not runs):
            return cached
        with self._lock:
            planning = self._planning.setdefault(key.without_placement, threading.RLock())
        with planning:
            cached = self._cached(key)
            if cached is not None and (cached.is_common or not runs):
                return cached
            if self._executables and cached is None and compat.jax_option("jax_log_compiles"):
                reason = explain_miss(key, list(self._executables))
                _log.warning("%s is planned anew; changed: %s", self.__name__, reason)
            # Stored only now: a search that is interrupted without a result leaves no entry.
            known = None if cached is None else cached.prepared
            prepared = self._plan_call(args, kwargs, on_progress, runs, known)
            if cached is not None and prepared is known:
                cached.is_common = True
                return cached
            executable = self._executables[key] = Executable(prepared, is_common=runs)
            same_shapes = self._executables_by_shapes.get(key.without_placement, ())
            others = tuple(e for e in same_shapes if e is not cached)
            self._executables_by_shapes[key.without_placement] = (*others, executable)
            program = executable.prepared.schedule.assignment.program
            self.calls_back |= any(name in CALLBACK_PRIMITIVES for _, name in program.use_def.primitive_ids)
            executable.warn_if_interrupted()
        return executable

    def _cached(self, key: Signature) -> Executable | None:
        """The executable of a signature, or one for the same shapes that moves no unpinned argument of this call."""
        if (cached := self._executables.get(key)) is not None:
            return cached
        same_shapes = self._executables_by_shapes.get(key.without_placement, ())
        return next((e for e in same_shapes if e.accepts_placement(key.placement)), None)

    def _plan_call(
        self, args: tuple, kwargs: _Kwargs, on_progress: _Progress, runs: bool, known: PlannedCall | None
    ) -> PlannedCall:
        """The plan of a call, with a progress bar of its own unless the caller has one."""
        together = runs and compat.coordination_client() is not None
        if runs and not together:
            warn_if_not_initialized(self.__name__, os.environ)
        programs = {}
        alone = functools.partial(prepare, programs=programs)
        plan = functools.partial(plan_together, known=known) if together else alone
        try:
            if on_progress is not None:
                return plan(self._request, args, kwargs, on_progress)
            with progress(f"planning {self.__name__}", after=2.0) as show:
                return plan(self._request, args, kwargs, lambda *state: show(0, search_status(*state)))
        except (MemoryBudgetError, StrategyError) as error:
            from jshard._api.remedies import with_remedies  # here, so that `import jshard` stays light

            refused = with_remedies(error, self._request, args, kwargs, programs)
        raise refused
