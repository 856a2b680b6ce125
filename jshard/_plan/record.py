"""The data of a plan: what was decided, what it costs, how good that is; and its JSON form.

A record holds no arrays and no compiled program. It is compared with `==`, written to JSON and read back without
loss. The candidates of the operators (`decision`) suffice to schedule the same program again without a search;
`fingerprint` identifies that program. Reports render records; the public `jshard.Plan` is a record with methods.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from jshard._core.errors import PlanMismatchError
from jshard._core.layout import Layout, MeshAxes
from jshard._core.messages import say_interrupted
from jshard._plan.compiled_timeline import CompiledTimeline
from jshard._plan.lazy_rows import LazyTuple
from jshard._plan.rows import (
    CollectiveRow,
    Cost,
    Decision,
    EntryRow,
    LiveRow,
    LocalRow,
    Memory,
    ModelFlops,
    OperatorRow,
    PipelineRow,
    ProductBound,
    StepLowerBound,
    TensorRow,
)


JSON_VERSION = 2


class VerificationSummary(Protocol):
    """What reports show of the comparison with a compiled program (`jshard._verify.Verification`)."""

    @property
    def ok(self) -> bool:
        """Whether the program communicates as planned."""
        ...

    @property
    def summary(self) -> str:
        """The result in one line."""
        ...

    @property
    def timeline(self) -> CompiledTimeline | None:
        """What the compiled program computes, moves and waits for; None where its compiler does not tell."""
        ...


@dataclasses.dataclass(frozen=True)
class PlanRecord:
    """The plan of one function and one set of shapes, as data.

    `boundaries` are the operators at which values enter, circulate in and leave loops and branches: they compute
    nothing, and one layout holds on both sides. `verification` is the result of `f.plan(..., verify=True)`, `physics`
    the lower bound on a step with these placements. `entry` lists the arguments that `f.plan` was given with another
    placement than the plan's: they are moved before every such call. `padding` has a row (true size, number, padded size)
    for each class of dimensions that the program pads (`_plan/padding_classes.py`). `live` says when each tensor is in
    memory; a plan read from a file has none.
    """

    name: str
    level: int
    search: str
    mesh: MeshAxes
    chip: str
    fingerprint: str
    inputs: tuple[TensorRow, ...]
    outputs: tuple[TensorRow, ...]
    operators: Sequence[OperatorRow]
    collectives: tuple[CollectiveRow, ...]
    cost: Cost
    decision: Decision
    memory_budget: float | None = None
    microbatches: int = 1
    pipeline: PipelineRow | None = None
    unknown: tuple[str, ...] = ()
    memory: Memory = Memory()
    physics: StepLowerBound = StepLowerBound()
    model_flops: ModelFlops = ModelFlops()
    boundaries: Sequence[OperatorRow] = ()
    local: Sequence[LocalRow] = ()
    kept: tuple[tuple[int, ...], ...] | None = None
    padding: tuple[tuple[int, int, int], ...] = ()
    steps: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    entry: tuple[EntryRow, ...] = dataclasses.field(default=(), compare=False)
    verification: VerificationSummary | None = dataclasses.field(default=None, compare=False, repr=False)
    live: Sequence[LiveRow] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of one call: compute at the chip's peak, and the communication that no product hides.

        Left out: launches of kernels, the host. It ranks plans, and is no measurement.
        """
        return self.cost.compute + self.cost.exposed

    @property
    def interrupted(self) -> bool:
        """Whether a search for it was interrupted (Ctrl-C): it is the best plan that was known then."""
        return say_interrupted(self.steps)

    @property
    def serial_seconds(self) -> float:
        """The same with compute and all communication one after the other."""
        return self.cost.compute + self.cost.communication

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization at the predicted step: model FLOPs over what the devices could do in that time."""
        return self.model_flops.peak_seconds / self.step_seconds if self.step_seconds > 0 else 0.0

    @property
    def bytes_by_kind(self) -> dict[str, float]:
        """Bytes received per device and call, by kind of collective."""
        out: dict[str, float] = {}
        for c in self.collectives:
            out[c.kind] = out.get(c.kind, 0.0) + c.total
        return dict(sorted(out.items()))

    def to_json(self) -> str:
        """The plan as JSON text; `Plan.from_json` gives an equal plan.

        One object: `jshard` (the version of this form), then the fields that `==` compares. Rows are
        objects with the fields of their classes, tuples are lists, and a layout is
        `{"layout": [axes that cut each dimension], "partial": [axes]}`. Seconds and bytes are numbers.
        """
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.compare}
        parts = []
        for key, value in {"jshard": JSON_VERSION, **_to_json_value(fields)}.items():
            # One row a line, so that two files compare line by line.
            rows = isinstance(value, list) and value and isinstance(value[0], dict)
            text = "[\n " + ",\n ".join(map(_dumps, value)) + "\n]" if rows else _dumps(value)
            parts.append(f"{json.dumps(key)}: {text}")
        return "{\n" + ",\n".join(parts) + "\n}\n"


Record = TypeVar("Record", bound=PlanRecord)


def record_from_json(kind: type[Record], text: str) -> Record:
    """Read the text of `PlanRecord.to_json` as a record of some class; another version is refused."""
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise PlanMismatchError(
            "this is no plan",
            where="Plan.load",
            fix="a file that plan.save(path) wrote, or plan.to_json()",
        )
    version = data.pop("jshard", None)
    if version != JSON_VERSION:
        raise PlanMismatchError(
            f"this plan was written in version {version!r}, this jshard reads version {JSON_VERSION}",
            where="Plan.load",
            fix="plan again with this version: plan = f.plan(*args); plan.save(path)",
        )
    required = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory]
    missing = [name for name in required if name not in data]
    if missing:
        raise PlanMismatchError(
            f"this plan lacks {', '.join(missing[:3])}",
            where="Plan.load",
            fix="a file that plan.save(path) wrote, whole",
        )
    rows = {
        "inputs": TensorRow, "outputs": TensorRow, "operators": OperatorRow, "collectives": CollectiveRow,
        "boundaries": OperatorRow, "local": LocalRow,
    }  # fmt: skip
    for key, row in rows.items():
        data[key] = tuple(row(**_from_json_value(r)) for r in data.get(key, ()))
    data["mesh"] = MeshAxes(**_from_json_value(data["mesh"]))
    data["cost"] = Cost(**_from_json_value(data["cost"]))
    data["decision"] = Decision(**_from_json_value(data["decision"]))
    data["unknown"] = tuple(data["unknown"])
    data["model_flops"] = ModelFlops(**data.get("model_flops", {}))
    data["memory"] = Memory(**_from_json_value(data.get("memory", {})))
    least = _from_json_value(data.get("physics", {}))
    data["kept"] = _from_json_value(data.get("kept"))
    if data.get("pipeline") is not None:
        data["pipeline"] = PipelineRow(**_from_json_value(data["pipeline"]))
    data["padding"] = _from_json_value(data.get("padding", ()))
    data["physics"] = StepLowerBound(
        **{**least, "products": tuple(ProductBound(**n) for n in least.get("products", ()))}
    )
    return kind(**data)


def _dumps(x: object) -> str:
    return json.dumps(x, separators=(",", ":"))


def _to_json_value(x: Any) -> Any:
    if isinstance(x, Layout):
        return {"layout": [list(d) for d in x.dims], "partial": list(x.partial)}
    if dataclasses.is_dataclass(x):
        return {f.name: _to_json_value(getattr(x, f.name)) for f in dataclasses.fields(x)}
    if isinstance(x, Mapping):
        return {k: _to_json_value(v) for k, v in x.items()}
    if isinstance(x, tuple | list | LazyTuple):
        return [_to_json_value(v) for v in x]
    return x.item() if hasattr(x, "item") else x


def _from_json_value(x: Any) -> Any:
    if isinstance(x, dict):
        if "layout" in x and "partial" in x and len(x) == 2:
            return Layout(tuple(map(tuple, x["layout"])), tuple(x["partial"]))
        return {k: _from_json_value(v) for k, v in x.items()}
    return tuple(map(_from_json_value, x)) if isinstance(x, list) else x
