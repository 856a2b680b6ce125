"""What to do when no plan fits the memory: each remedy is tried, and its figures are those of the plan that it gives.

A remedy is a function from what is known of a refusal to the lines of its table. Most plan the call again as it would be
if one followed the advice: with donated arguments, a smaller batch, more devices, another mesh. The effort is limited by
a count of operators, so that a refusal comes soon, and on every machine with the same text; what is not tried is named.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
from jax.sharding import AbstractMesh, AxisType

from jshard._api.batch_arguments import batches, resized
from jshard._api.padding_advice import with_checked_padding
from jshard._api.prepare import PlannedCall, prepare, trace_call
from jshard._api.shard_request import ShardRequest
from jshard._api.trace_call import BuiltPrograms, abstract
from jshard._core import hardware, topology as device_topology
from jshard._core.errors import MemoryBudgetError, ShardError, StrategyError
from jshard._core.gc_pause import gc_paused
from jshard._core.jax_types import PyTree, PyTreeDef
from jshard._core.layout import MeshAxes
from jshard._core.named_topology import MeshRequest, TopologyMesh, topology as named_topology
from jshard._plan.memory_refusal import MemoryRefusal, budget_advice
from jshard._plan.recomputation import Recomputation
from jshard._plan.recompute_peaks import estimated_first_choice
from jshard._report.refusal_text import Remedy, refusal_error
from jshard._schedule.peak_profile import COPIES, INTERMEDIATE
from jshard._spec.options import PlanOptions
from jshard._spec.tree_paths import argument_names


_OPERATORS = 30_000  # of all programs that are planned to try remedies; the first one is always tried
_PADDED_OPERATORS = 4_000  # of a program that is planned with padded sizes too, up to three times as often
_ESTIMATED_GAP = 0.01  # relative, of the plans of larger programs: their figures are estimates
_LEAST_PEAK_EFFORT = 8  # times that of a plan of least time
_SEARCH_SECONDS = 1  # of search within the budget: without a limit some programs take minutes
_SEARCH_EFFORT = 10  # times that of a plan of least time
_MORE_DEVICES = 64  # times as many at most


@gc_paused()
def with_remedies(
    error: MemoryBudgetError | StrategyError,
    request: ShardRequest,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    programs: BuiltPrograms | None = None,
) -> ShardError:
    """The error of a refused call, with a table of what helps; `programs`: built for the call as it was refused.

    That of a cut that does not divide names padding only where the call can pad it.
    """
    if isinstance(error, StrategyError):
        return with_checked_padding(error, request, args, kwargs)
    if not isinstance(error, MemoryBudgetError) or not isinstance(error.refusal, MemoryRefusal):
        return error
    trials = Trials(request, args, kwargs, error.refusal, {} if programs is None else programs)
    found = [remedy for find in REMEDIES for remedy in find(trials)]
    donated = trials.names_of(request.call.donate_argnums) + request.call.donate_argnames
    return refusal_error(error, error.refusal, found, donated)


@dataclasses.dataclass(eq=False)
class Trials:
    """The refused call, planned again with changes.

    - `refusal`: what is known of it. `programs`: built for the same arguments.
    - `spent`: operators of the programs that were planned for trials.
    """

    request: ShardRequest
    args: Sequence[PyTree]
    kwargs: Mapping[str, PyTree]
    refusal: MemoryRefusal
    programs: BuiltPrograms
    spent: int = 0

    def names_of(self, positions: Sequence[int]) -> tuple[str, ...]:
        """The names of some positional arguments."""
        names = argument_names(self.request.fn, len(self.args))
        return tuple(names[i] for i in positions if i < len(names))

    def plan(
        self,
        advice: str,
        args: Sequence[PyTree] | None = None,
        kwargs: Mapping[str, PyTree] | None = None,
        mesh: MeshRequest | None = None,
        **changes: object,
    ) -> Remedy | None:
        """The remedy of a changed call; None where it cannot be planned, or that would take too long.

        Of a large program no sizes are padded, and the figures are estimates of those of the plan that one gets. So are
        those of a call with `remat=` whose plan of least time exceeds the budget: what would be computed again is predicted.

        Arguments:

        - `advice`: what one would write.
        - `args`, `kwargs`: other arguments, None for the same. `mesh`: another mesh.
        - `changes`: other fields of the request.
        """
        retraced = args is not None or kwargs is not None
        if not self.may_plan(retraced):
            return None
        self.spent += self._effort(retraced)
        options = dataclasses.replace(self.request.options, search_in_budget=False, remat=None)
        may_pad = self.refusal.operators <= _PADDED_OPERATORS or options.pad is not None
        if not may_pad:
            options = dataclasses.replace(options, pad=False, gap=_ESTIMATED_GAP, estimate=True)
        if mesh is not None and options.hardware is None and not isinstance(mesh, TopologyMesh):
            options = dataclasses.replace(options, hardware=self.refusal.chip)
        changed = dataclasses.replace(
            self.request,
            options=options,
            plan=None,
            mesh=self.request.mesh if mesh is None else mesh,
            **changes,
        )
        call = self.tried(changed, args, kwargs)
        refused = call.refusal if isinstance(call, MemoryBudgetError) else None
        with_remat = self.request.options.remat is not None
        if isinstance(call, PlannedCall):
            peak, seconds, devices = call.plan.cost.peak_bytes, call.plan.step_seconds, call.chosen.axes.total
            searched = options.level == 1 and not with_remat
        elif isinstance(refused, MemoryRefusal):  # it is proved not to fit
            peak, seconds, devices = refused.peak, refused.step_seconds, refused.mesh.total
            searched = not with_remat
        else:
            return None
        remedy = Remedy(advice, peak, seconds, estimated=not may_pad, searched=searched)
        if not with_remat or remedy.peak <= self.refusal.limit:
            return remedy
        return self.recomputed(remedy, changed, devices, args, kwargs) or remedy

    @property
    def may_search(self) -> bool:
        """Whether the effort that is left suffices for a search within the budget."""
        return self.spent + _SEARCH_EFFORT * self.refusal.operators <= _OPERATORS

    def searched(self, advice: str, options: PlanOptions, **changes: object) -> Remedy | None:
        """The remedy of a changed call that is planned within the budget, as one would get it; None where that finds none.

        It is searched for a second unless the user says for how long; `advice` then says so too. For where `may_search`.

        Arguments: as of `plan`; `options`: of the changed call.
        """
        self.spent += _SEARCH_EFFORT * self.refusal.operators
        if options.search_seconds is None:
            options = dataclasses.replace(options, search_seconds=_SEARCH_SECONDS)
            advice += f', config={{"search_seconds": {_SEARCH_SECONDS}}}'
        call = self.planned(dataclasses.replace(self.request, options=options, **changes))
        return None if call is None else Remedy(advice, call.plan.cost.peak_bytes, call.plan.step_seconds)

    def planned(
        self,
        request: ShardRequest,
        args: Sequence[PyTree] | None = None,
        kwargs: Mapping[str, PyTree] | None = None,
    ) -> PlannedCall | None:
        """The planned call of another request; None where it cannot be planned."""
        call = self.tried(request, args, kwargs)
        return call if isinstance(call, PlannedCall) else None

    def tried(
        self,
        request: ShardRequest,
        args: Sequence[PyTree] | None = None,
        kwargs: Mapping[str, PyTree] | None = None,
    ) -> PlannedCall | MemoryBudgetError | None:
        """The planned call of another request, its refusal for want of memory, or None."""
        retraced = args is not None or kwargs is not None
        args, kwargs = self._arguments(args, kwargs)
        shapes, named = [abstract(a) for a in args], {k: abstract(v) for k, v in kwargs.items()}
        try:
            return prepare(request, shapes, named, programs=None if retraced else self.programs)
        except MemoryBudgetError as refused:
            return refused
        except Exception:  # the user's function or its pins may not take the change: then it is no remedy
            return None

    def recomputed(
        self,
        free: Remedy,
        request: ShardRequest,
        devices: int,
        args: Sequence[PyTree] | None = None,
        kwargs: Mapping[str, PyTree] | None = None,
    ) -> Remedy | None:
        """The choice of what is computed again that the search would plan first, with its predicted peak and seconds.

        None where none is predicted to fit. `free`: the same call without recomputation, planned on `devices`.
        """
        same = args is None and kwargs is None and request.call == self.request.call  # on whatever mesh
        recomputation = self._own_recomputation if same else self._recomputation(request, args, kwargs)
        estimate = estimated_first_choice(recomputation, self.refusal.limit, free.peak)
        if estimate is None:
            return None
        peak, more = estimate
        return Remedy(free.advice, peak, free.seconds + more / devices, estimated=True)

    @functools.cached_property
    def _own_recomputation(self) -> Recomputation:
        return self._recomputation(self.request)

    def _recomputation(
        self,
        request: ShardRequest,
        args: Sequence[PyTree] | None = None,
        kwargs: Mapping[str, PyTree] | None = None,
    ) -> Recomputation:
        traced = trace_call(request, *self._arguments(args, kwargs))
        return Recomputation(traced.jaxpr, hardware.get(self.refusal.chip), traced.donated)

    def _arguments(
        self, args: Sequence[PyTree] | None, kwargs: Mapping[str, PyTree] | None
    ) -> tuple[Sequence[PyTree], Mapping[str, PyTree]]:
        """The arguments of a trial; None for those of the refused call."""
        return self.args if args is None else args, self.kwargs if kwargs is None else kwargs

    def may_plan(self, retraced: bool = False) -> bool:
        """Whether the effort that is left suffices for one more plan; one of other shapes is traced again."""
        return not self.spent or self.spent + self._effort(retraced) <= _OPERATORS

    def _effort(self, retraced: bool) -> int:
        per_plan = _LEAST_PEAK_EFFORT if self.request.options.level == 1 else 1
        return self.refusal.operators * (per_plan + retraced)


def donate(trials: Trials) -> Iterator[Remedy]:
    """Donating the arguments whose buffers results can take over: those of equal structure, shapes and dtypes."""
    request = trials.request
    if trials.refusal.peak_if_donated >= trials.refusal.peak:
        return
    free = _replaceable(trials)
    every = tuple(sorted({*request.call.donate_argnums, *free}))
    if free:
        call = dataclasses.replace(request.call, donate_argnums=every)
        shown = f"({every[0]},)" if len(every) == 1 else str(every)
        refusal, advice = trials.refusal, f"donate_argnums={shown}"
        remedy = trials.plan(advice, call=call)
        if remedy is None:
            return
        if remedy.peak > refusal.limit and not remedy.searched and trials.may_search:
            within = trials.searched(advice, request.options, call=call)
            remedy = within or dataclasses.replace(remedy, searched=True)
        if remedy.peak >= refusal.peak:  # a plan of least time; the one that was refused would hold less
            peak, seconds = refusal.peak_if_donated, refusal.step_seconds
            remedy = Remedy(advice, peak, seconds, estimated=True, searched=remedy.searched)
        yield remedy


def _replaceable(trials: Trials) -> list[int]:
    """Positions of the arguments that are not donated, and that a result of the function can replace."""
    request = trials.request
    try:
        result = jax.eval_shape(request.fn, *trials.args, **trials.kwargs)
    except Exception:  # static arguments, or state: nothing is known of the results
        return []
    left = [_types(part) for part in (result if isinstance(result, tuple | list) else [result])]
    out = []
    for i, argument in enumerate(trials.args):
        types = _types(argument)
        if types[1] and types in left and i not in request.statics[0]:
            left.remove(types)
            if i not in request.call.donate_argnums:
                out.append(i)
    return out


def _types(tree: PyTree) -> tuple[PyTreeDef, tuple[object, ...]]:
    leaves, structure = jax.tree.flatten(abstract(tree))
    return structure, tuple((getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves)


def checkpoint(trials: Trials) -> Iterator[Remedy]:
    """`jax.checkpoint` around the module that the program repeats, by an estimate: there is nothing to trace again."""
    estimate = trials.refusal.checkpoint
    if estimate is not None:
        body = "the body of the scan in " if estimate.in_loop else ""
        name = estimate.name or "the layers"
        advice = f"jax.checkpoint around {body}{name} ({estimate.count} times)"
        yield Remedy(advice, estimate.peak, trials.refusal.checkpoint_seconds, estimated=True)


def recompute(trials: Trials) -> Iterator[Remedy]:
    """`remat="auto"`, planned as one would get it; for large programs its first choice, by an estimate."""
    request, refusal = trials.request, trials.refusal
    if request.options.remat is not None or refusal.argument_bytes > refusal.limit:
        return
    advice = 'remat="auto"'
    if not trials.may_search:
        free = Remedy(advice, refusal.peak, refusal.step_seconds)
        remedy = trials.recomputed(free, request, refusal.mesh.total)
    else:
        options = dataclasses.replace(request.options, remat="auto", traced_is_refused=True)
        remedy = trials.searched(advice, options)
    if remedy is not None:
        yield remedy


def smaller_batch(trials: Trials) -> Iterator[Remedy]:
    """A batch of which a plan fits, for the arguments that are not state and have its size in common.

    Activations shrink with the batch, gathered copies and state do not. Where there is no time to plan it, the figure
    is that estimate.
    """
    refusal = trials.refusal
    growing = sum(h.nbytes for h in refusal.holders if h.kind == INTERMEDIATE)
    if refusal.peak - growing >= refusal.limit:  # with other layouts copies may be smaller too
        growing += sum(h.nbytes for h in refusal.holders if h.kind == COPIES)
    rest = refusal.peak - growing
    state = {*trials.request.call.donate_argnums, *_replaceable(trials)}
    for names, size, dim in batches(trials.request, trials.args, trials.kwargs, state):
        whose = f"dimension {dim} of {', '.join(names)}" if dim else ", ".join(names)
        share = (refusal.limit - rest) / max(growing, 1.0)
        sizes = [n for n in range(1, size) if size % n == 0]
        fitting = [n for n in sizes if n <= size * share]
        for smaller in fitting[-2:][::-1]:
            advice = f"batch of {smaller} in place of {size} ({whose})"
            if not trials.may_plan(retraced=True):
                yield Remedy(advice, rest + growing * smaller / size, 0.0, estimated=True, searched=False)
                return
            remedy = trials.plan(
                advice, *resized(trials.request, trials.args, trials.kwargs, (names, dim), smaller)
            )
            if remedy is None:
                break
            if remedy.peak <= refusal.limit or smaller == fitting[-2:][0]:
                yield remedy
                return


def more_devices(trials: Trials) -> Iterator[Remedy]:
    """The next larger machine on which the plan may fit, its first mesh axis longer; one twice as large if it does not."""
    refusal, mesh = trials.refusal, trials.refusal.mesh
    least = max(1, math.ceil(math.log2(refusal.peak / refusal.limit)))
    tried: Remedy | None = None
    for doublings in (least, least + 1):
        if 2**doublings > _MORE_DEVICES:
            break
        larger = _machine(trials.request.mesh, _longer(mesh, 2**doublings))
        if larger is None:
            break
        advice = f"{mesh.total * 2**doublings} devices: {larger[0]}"
        remedy = trials.plan(advice, mesh=larger[1])
        if remedy is None:
            break
        tried = remedy
        if remedy.peak <= refusal.limit:
            break
    if tried is not None:
        yield tried


def another_mesh(trials: Trials) -> Iterator[Remedy]:
    """The same devices as another grid, where it is not proved that none of them fits."""
    refusal, mesh = trials.refusal, trials.refusal.mesh
    if refusal.bound > refusal.limit or len(mesh.sizes) < 2:
        return
    grids = [
        MeshAxes(mesh.names, sizes)
        for sizes in itertools.product(*[_divisors(mesh.total)] * len(mesh.sizes))
        if math.prod(sizes) == mesh.total and sizes != mesh.sizes and min(sizes) > 1
    ]
    found: list[Remedy] = []
    for grid in sorted(grids, key=lambda g: max(g.sizes))[:2]:
        machine = _machine(trials.request.mesh, grid)
        remedy = None if machine is None else trials.plan(machine[0], mesh=machine[1])
        if remedy is not None and remedy.peak < refusal.peak:
            found.append(remedy)
    if found:
        yield min(found, key=lambda r: r.peak)


def larger_budget(trials: Trials) -> Iterator[Remedy]:
    """A budget in which the plan that was found fits, if the chip has so much memory."""
    budget = budget_advice(trials.refusal)
    if budget is not None:
        peak, seconds = trials.refusal.peak, trials.refusal.step_seconds
        yield Remedy(f"memory_budget={budget}", peak, seconds, own_budget=True)


REMEDIES: tuple[Callable[[Trials], Iterator[Remedy]], ...] = (
    donate, checkpoint, recompute, more_devices, smaller_batch, another_mesh, larger_budget,
)  # fmt: skip
"""What is tried, in this order."""


def _longer(mesh: MeshAxes, factor: int) -> MeshAxes:
    return MeshAxes(mesh.names, (mesh.sizes[0] * factor, *mesh.sizes[1:]))


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _machine(mesh: MeshRequest | None, axes: MeshAxes) -> tuple[str, MeshRequest] | None:
    """What to write for a grid of the machine's kind, and the mesh; None where there is no such machine."""
    sizes = dict(zip(axes.names, axes.sizes, strict=True))
    shown = "{" + ", ".join(f"{n!r}: {s}" for n, s in sizes.items()) + "}"
    if not isinstance(mesh, TopologyMesh):
        kinds = (AxisType.Auto,) * len(axes.names)
        return f"mesh {axes}", AbstractMesh(axes.sizes, axes.names, axis_types=kinds)
    shape = device_topology.shape_of_size(mesh.hardware, mesh.physical, axes.total // mesh.slices)
    if shape is None:
        return None
    name = f"{mesh.name.partition(':')[0]}:{'x'.join(map(str, shape))}"
    slices = f", num_slices={mesh.slices}" if mesh.slices > 1 else ""
    try:
        larger = named_topology(name, sizes, num_slices=mesh.slices, compiles=False)
    except ShardError:
        return None
    return f"topology({name!r}, {shown}{slices})", larger
