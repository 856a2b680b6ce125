"""The public plan: a record of what was decided, rendered, verified, compared, saved and searched again.

The data and its JSON form are `PlanRecord` (`_plan/record.py`), the texts are in `_report/`, the comparison with a
compiled program in `_verify/`; this class gives users one object for them. Modules of reports are imported at their first
use, which keeps `import jshard` light.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding

from jshard._config.config_record import ConfigRecord
from jshard._core.argument_checks import checked
from jshard._core.errors import ShardError
from jshard._core.jax_types import JaxMesh, PyTree, PyTreeDef
from jshard._core.messages import type_with_article
from jshard._core.text_files import write_file
from jshard._core.topology import Topology
from jshard._plan.record import PlanRecord, record_from_json
from jshard._plan.replan import Replanner
from jshard._plan.request import PlanRequest
from jshard._plan.rows import TensorRow
from jshard._program.graph import Program
from jshard._schedule.schedule import Schedule


if TYPE_CHECKING:
    from jshard._api.config import Config
    from jshard._api.measure import Measurement, PlannedFunction
    from jshard._batch.batch_report import BatchReport
    from jshard._report.alternatives import Why
    from jshard._report.diff import Difference, WhatIf
    from jshard._report.step_figures import StepFigures
    from jshard._verify import Verification


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(PlanRecord):
    """The answer for one function and one set of shapes.

    `boundaries` are where values enter, go round and leave loops and branches: they compute nothing, and one layout
    holds on both sides. `verification` is what `f.plan(..., verify=True)` found in the compiled
    program, `physics` what nothing with these placements could avoid, `entry` the arguments that `f.plan` was given
    and that lie elsewhere than the plan has them: they are moved before every such call.

    >>> import jax, jax.numpy as jnp, jshard
    >>> f = jshard.shard(lambda x, w: jax.nn.relu(x @ w), in_strategy=((1, 1), None))
    >>> plan = f.plan(jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((4, 16), "float32"))
    >>> plan.level, [row.path for row in plan.inputs], plan.cost.optimal
    (0, ['x', 'w'], True)
    """

    verification: Verification | None = dataclasses.field(default=None, compare=False, repr=False)
    jax_mesh: JaxMesh | None = dataclasses.field(default=None, compare=False, repr=False)
    in_tree: PyTreeDef | None = dataclasses.field(default=None, compare=False, repr=False)
    out_tree: PyTreeDef | None = dataclasses.field(default=None, compare=False, repr=False)
    search_again: Replanner | None = dataclasses.field(default=None, compare=False, repr=False)
    batch_of: Callable[[], BatchReport] | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def batch(self) -> BatchReport:
        """What every value is with respect to the batch: per example, shared, a sum over examples, or coupled.

        >>> import jax, jshard
        >>> x, w = jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((4, 2), "float32")
        >>> print(jshard.shard(lambda x, w: (x @ w).sum()).plan(x, w).batch)
        batch of <lambda>: 8 examples, dimension 0 of x
          arguments: 1 per example, 1 shared; values: 1 per example, 0 shared, 1 sum over examples
          coupled: none
          results
            result        f32[]      sum over examples
        """
        if self.batch_of is None:
            raise ShardError(
                "a plan read from a file has no program",
                where="Plan.batch",
                fix="the batch of a plan that shard made: f.plan(*args).batch",
            )
        return self.batch_of()

    @property
    def in_shardings(self) -> PyTree:
        """Shardings of the arguments: a pytree as `(args, kwargs)`, ready for `jax.device_put` and `jax.jit`."""
        return self._shardings(self.inputs, self.in_tree)

    @property
    def out_shardings(self) -> PyTree:
        """Shardings of the results, a pytree like the function's result."""
        return self._shardings(self.outputs, self.out_tree)

    def _shardings(self, rows: tuple[TensorRow, ...], tree: PyTreeDef | None) -> PyTree:
        if self.jax_mesh is None or tree is None:
            raise ShardError(
                "a plan read from a file has no mesh and no pytrees",
                where="Plan.in_shardings",
                fix="pass it to the function: jshard.shard(fn, plan=plan).plan(*args).in_shardings",
            )
        leaves = [NamedSharding(self.jax_mesh, r.layout.spec) for r in rows[: tree.num_leaves]]
        return jax.tree.unflatten(tree, leaves)

    def __repr__(self) -> str:
        from jshard._report.totals import summary_line

        return f"<{summary_line(self)}>"

    def __str__(self) -> str:
        from jshard._report.text import text_report

        return text_report(self)

    def __rich__(self) -> Any:
        from jshard._report.text import rich_report

        return rich_report(self)

    @checked
    def ir(self, local: bool = False) -> str:
        """One line an operator with its `in_strategy`; `local=True`: per-device shapes and inserted collectives."""
        from jshard._report.ir import ir_listing

        return ir_listing(self, local)

    @checked
    def verify(self, compiled: jax.stages.Compiled | str) -> Verification:
        """What the compiler emitted against what the plan predicted; `compiled` is `f.lower(...).compile()`."""
        from jshard._verify.verify_plan import verify_plan  # here, so that `import jshard` stays light

        if not _is_compiled(compiled):
            lowered = isinstance(compiled, jax.stages.Lowered)
            raise ShardError(
                f"verify takes a compiled program, not {type_with_article(compiled)}",
                where="Plan.verify",
                fix="plan.verify(lowered.compile())" if lowered
                else "plan.verify(f.lower(*args).compile()), or f.plan(*args, verify=True)",
            )  # fmt: skip
        return verify_plan(self, compiled)

    def _repr_html_(self) -> str:
        from jshard._report.html import html_fragment

        return html_fragment(self)

    @checked
    def to_html(self, path: str | Path) -> None:
        """Write the report as one HTML page that works offline, in light and dark."""
        from jshard._report.html import html_page

        write_file(path, html_page(self), "Plan.to_html")

    def to_markdown(self) -> str:
        """The report as Markdown tables."""
        from jshard._report.markdown import markdown_report

        return markdown_report(self)

    def to_dot(self) -> str:
        """The operator graph in Graphviz' language, alike operators folded."""
        from jshard._report.operator_graph import graphviz_dot

        return graphviz_dot(self)

    @checked
    def to_trace(self, path: str | Path, devices: int = 1) -> None:
        """Write the predicted timeline of one device (or more) as a Chrome trace, for ui.perfetto.dev."""
        if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
            raise ShardError(f"devices={devices!r}", where="Plan.to_trace", fix="how many to draw: devices=2")
        from jshard._report.chrome_trace import chrome_trace_json

        write_file(path, chrome_trace_json(self, devices), "Plan.to_trace")

    @checked
    def figures(
        self, *, tokens: float | None = None, examples: float | None = None, price: float | None = None
    ) -> StepFigures:
        """Step seconds, model FLOPs utilization, tokens or examples a second, chip-hours and cost of the predicted step.

        >>> import jax, jshard
        >>> f32 = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
        >>> mesh = jshard.topology("v5e:2x4", {"x": 2, "y": 4}, compiles=False)
        >>> f = jshard.shard(lambda x, w: x @ w, in_strategy=((2, 4), (4, 1)), mesh=mesh)
        >>> figures = f.plan(f32(8192, 4096), f32(4096, 4096)).figures(examples=8192, price=1.2)
        >>> f"{figures.model_flops:.3g} FLOP at {figures.mfu:.0%} MFU, {figures.examples_per_second:.2g} examples/s"
        '2.75e+11 FLOP at 14% MFU, 6.7e+06 examples/s'

        Arguments:

        - `tokens`, `examples`: how many are in the batch of one call.
        - `price`: of one device for an hour, in any currency.
        """
        for name, value in (("tokens", tokens), ("examples", examples), ("price", price)):
            ok = (
                value is None or isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
            )
            if not ok:
                raise ShardError(
                    f"{name}={value!r}",
                    where="Plan.figures",
                    fix="a price per device and hour: price=1.2" if name == "price"
                    else f"how many a call processes: {name}=8 * 2048",
                )  # fmt: skip
        from jshard._report.step_figures import step_figures

        return step_figures(self, tokens, examples, price)

    @checked
    def to_config(self, machine: str = "") -> Config:
        """The layouts of arguments and results as a configuration: the fewest rules that give exactly these.

        >>> import jax, jax.numpy as jnp, jshard
        >>> f = jshard.shard(lambda p, x: x @ p["w"], in_strategy={"x": (4, 1)})
        >>> f32 = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
        >>> print(f.plan({"w": f32(8, 4)}, f32(16, 8)).to_config().parameters[0].key)
        w

        `machine`: the name of a machine that is not attached, as for `jshard.topology`, which a plan does not know.
        """
        from jshard._api.config import config_of_plan

        return config_of_plan(self, self.jax_mesh, machine, self.in_tree, self.out_tree)

    @checked
    def to_rules(self, form: str, names: Mapping[str, Sequence[str | None]] | None = None) -> str:
        """The layouts of the arguments as rules of other libraries, as Python text.

        >>> import jax, jshard
        >>> plan = jshard.shard(lambda p: p["w"] * 2, in_strategy=({"w": (2, 1)},)).plan({"w": jax.numpy.ones((4, 4))})
        >>> print(plan.to_rules("regexes"))
        from jax.sharding import PartitionSpec as P
        <BLANKLINE>
        PARTITION_RULES = (
            (r"(^|/)w$", P("x")),
        )
        <BLANKLINE>

        - `form`: "regexes", of which the first that matches holds (EasyLM, scalax); "specs", a pytree of
            `PartitionSpec`s; "logical", pairs of a logical axis and mesh axes (MaxText, Flax), with the tensors that no
            such pairs give in comments.
        - `names`: for "logical", the logical axes of each argument by path.
        """
        from jshard._config.export_rules import rules_text

        return rules_text(self, form, names)

    @checked
    def diff(self, other: Plan) -> Difference:
        """What `other` does differently: layouts, strategies, traffic, cost; empty (and false) when nothing."""
        if not isinstance(other, Plan):
            raise ShardError(
                f"diff takes a plan, not {type_with_article(other)}",
                where="Plan.diff",
                fix="a Plan, as f.plan(*args) or jshard.Plan.load(path) gives it",
            )
        from jshard._report.diff import compare_plans

        return compare_plans(self, other)

    @checked
    def why(self, name: str, on_progress: Callable[[int, int], None] | None = None) -> Why:
        """Every other way to cut a tensor or an operator, and what the whole plan would then cost.

        >>> import jax, jshard
        >>> f = jshard.shard(lambda x: x * 2, in_strategy=((1, 1),))
        >>> plan = f.plan(jax.ShapeDtypeStruct((8, 6), "float32"))
        >>> [a.cuts for a in plan.why("result").alternatives if a.chosen] == [plan.operators[0].strategy[0]]
        True

        Arguments:

        - `name`: an argument or result by path or the end of it, an operator or tensor as `ir()` names it, or a file
            and line such as `"model.py:26"`: the operator written there with the most FLOPs.
        - `on_progress`: called with (searches done, searches in all).

        Each alternative is a search of its own. A plan that was read from a file cannot search: a `ShardError`.
        """
        if not isinstance(name, str):
            raise ShardError(
                f"why takes a name, not {type_with_article(name)}",
                where="Plan.why",
                fix=f"a name as plan.ir() shows it, such as {self.inputs[0].path if self.inputs else 'result'!r}",
            )
        from jshard._report.alternatives import rank_alternatives

        return rank_alternatives(self, self._require_replanner("why"), name, on_progress)

    @checked
    def what_if(self, **pins: PyTree) -> WhatIf[Plan]:
        """The plan with these pins beside the others (None frees one), and how it differs from this one.

        Both as one pair that prints the difference: `print(plan.what_if(x=(1, 1)))`.

        >>> import jax, jshard
        >>> plan = jshard.shard(lambda x: x * 2).plan(jax.ShapeDtypeStruct((8, 6), "float32"))
        >>> other, difference = plan.what_if(x=(1, 1))
        >>> other.inputs[0].pinned
        True

        `pins`: path of an argument, result or tensor to an entry as in `in_strategy`; name of an operator to the
        pieces of each operand. Dotted paths go in a dict: `what_if(**{"params.*.w": (1, 8)})`.
        """
        replanner = self._require_replanner("what_if").with_pins(pins)
        other = plan_of_record(
            replanner.run(), replanner, jax_mesh=self.jax_mesh, in_tree=self.in_tree, out_tree=self.out_tree,
            kept=self.kept, microbatches=self.microbatches, pipeline=self.pipeline, batch_of=self.batch_of,
            padding=self.padding,
        )  # fmt: skip
        from jshard._report.diff import WhatIf, compare_plans

        return WhatIf(other, compare_plans(self, other))

    @checked
    def measure(self, f: PlannedFunction, *args: PyTree, **kwargs: PyTree) -> Measurement:
        """Run the planned program on the devices at hand: predicted beside measured, in all and by collective.

        >>> import jax, jax.numpy as jnp, jshard
        >>> f = jshard.shard(lambda x, w: x @ w, in_strategy=((8, 1), None))
        >>> x, w = jnp.ones((64, 32)), jnp.ones((32, 16))
        >>> found = f.plan(x, w).measure(f, x, w)
        >>> found.predicted == f.plan(x, w).step_seconds, found.measured > 0
        (True, True)

        Arguments:

        - `f`: the function made by `shard`, whose plan for these arguments is this one; another: `PlanMismatchError`.
        - `args`, `kwargs`: arrays. Donated ones are copied before each call, which is not part of its time.
        """
        from jshard._api.measure import measure_plan

        return measure_plan(self, f, args, kwargs)

    def _require_replanner(self, method: str) -> Replanner:
        if self.search_again is None:
            raise ShardError(
                "a plan read from a file cannot search",
                where=f"Plan.{method}",
                fix="plan the function: jshard.shard(fn, ...).plan(*args)." + method + "(...)",
            )
        return self.search_again

    @staticmethod
    @checked
    def from_json(text: str) -> Plan:
        """Read `to_json`'s text; another version is refused."""
        if not isinstance(text, str):
            said = f"from_json takes a text, not {type_with_article(text)}"
            raise ShardError(said, where="Plan.from_json", fix="what plan.to_json() gives")
        return record_from_json(Plan, text)

    @checked
    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file."""
        write_file(path, self.to_json(), "Plan.save")

    @staticmethod
    @checked
    def load(path: str | Path) -> Plan:
        """Read a plan from a JSON file."""
        if not isinstance(path, str | os.PathLike):
            raise ShardError(
                f"load takes a path, not {type_with_article(path)}", where="Plan.load", fix="Plan.load(path)"
            )
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            here = sorted(str(p) for p in Path(path).parent.glob("*.json"))[:3]
            fix = "the path of a file that plan.save(path) wrote" + (
                f"; there: {', '.join(here)}" if here else ""
            )
            reason = getattr(error, "strerror", None) or "it is no text"
            raise ShardError(f"{path} cannot be read: {reason}", where="Plan.load", fix=fix) from None
        return Plan.from_json(text)


def check_plan(plan: object) -> None:
    """Raise `ShardError` for a value of `plan=` that is neither a plan nor None."""
    if plan is None or isinstance(plan, Plan):
        return
    fix = "a Plan, as f.plan(*args) or jshard.Plan.load(path) gives it"
    if isinstance(plan, ConfigRecord | dict):
        fix = f"config=..., for a configuration; here {fix}"
    elif isinstance(plan, str | os.PathLike):
        fix = f"plan=jshard.Plan.load({str(plan)!r})"
    raise ShardError(f"plan is {type_with_article(plan)}", where="plan", fix=fix)


def _is_compiled(program: object) -> bool:
    """Whether a value is a compiled program, or the text of one."""
    if isinstance(program, str):
        return program.lstrip().startswith("HloModule")
    compiled = hasattr(program, "as_text") and not isinstance(program, jax.stages.Lowered | jax.stages.Traced)
    return compiled or hasattr(program, "collectives") and not isinstance(program, Plan)


def plan_of_record(record: PlanRecord, replanner: Replanner | None = None, **fields: Any) -> Plan:
    """The public plan of a record; `fields` are those that only `Plan` has."""
    data = {f.name: getattr(record, f.name) for f in dataclasses.fields(PlanRecord)}
    return Plan(**{**data, "search_again": replanner, **fields})


def plan_program(
    program: Program, topology: Topology, request: PlanRequest, on_progress: Callable[..., None] | None = None
) -> tuple[Plan, Schedule]:
    """Search a plan that can search again; returns it with the schedule it stands for."""
    from jshard._plan.planner import make_plan  # at the first plan: it imports every search

    record, schedule = make_plan(program, topology, request, on_progress)
    return planned_again(plan_of_record(record), program, topology, request), schedule


def planned_again(plan: Plan, program: Program, topology: Topology, request: PlanRequest) -> Plan:
    """A plan of this request for a program, as one that can search again."""
    # Without the captured arrays: a plan keeps none alive.
    bare = dataclasses.replace(program, constants=(), jaxpr=None)
    return dataclasses.replace(plan, search_again=Replanner(bare, topology, request.to_the_end))
