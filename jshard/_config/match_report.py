"""What a configuration and a function have to say to each other, both ways: as data and as a table.

>>> from jshard._config.config_record import Rule
>>> from jshard._config.resolve import resolve
>>> from jshard._config.tensors import TensorName
>>> record = ConfigRecord(parameters=(Rule("fc.w", (("x",), ()), "f.yaml:2"), Rule("haed.w", ((), ()), "f.yaml:3")))
>>> tensors = [TensorName(f"params.{n}.w", (4, 4), "float32", "params") for n in ("fc", "head")]
>>> report = MatchReport.of(record, resolve(record, tensors, sizes={"x": 2}), {"x": 2})
>>> report.ok, [(p.kind, p.name) for p in report.problems], report.bytes_per_device
(False, [('unmatched', 'haed.w'), ('without rule', 'params.head.w')], 96)
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence

from jshard._config.config_record import ConfigRecord, entry_text
from jshard._config.fitting import Problem
from jshard._config.resolution import Resolution, Row
from jshard._core.errors import StrategyError
from jshard._core.messages import count_of
from jshard._core.text_width import wrapped


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One tensor of the report.

    - `kind`: "argument", "result", "module" (an output), "name" (of `checkpoint_name`), "scope".
    - `status`: "rule", "mirrors" (that of the parameter `of`), "derived" by the search, "replicated".
    - `entry`: as written in a file, or empty. `rule`, `where`: the name of the rule and its place.
    - `bytes`: of the whole tensor, `device_bytes` of one device's part; what is derived counts whole.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    status: str
    entry: str
    rule: str
    where: str
    bytes: int
    device_bytes: int
    of: str = ""


@dataclasses.dataclass(frozen=True)
class MatchReport:
    """The answer of `Config.check`: every tensor with its entry, and every problem."""

    source: str
    tensors: tuple[TensorEntry, ...]
    problems: tuple[Problem, ...]
    mesh: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def of(record: ConfigRecord, found: Resolution, sizes: Mapping[str, int] | None) -> MatchReport:
        """The report of a resolution on a mesh with these sizes."""
        rows = (*found.rows, *found.inner, *found.results)
        return MatchReport(
            record.source,
            tuple(_entry(r, sizes or {}) for r in rows),
            found.problems,
            tuple((sizes or {}).items()),
        )

    @property
    def ok(self) -> bool:
        """Whether there is no error; warnings may be there."""
        return not self.errors

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems that a strict configuration refuses."""
        return tuple(p for p in self.problems if p.error)

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """The problems that are only reported."""
        return tuple(p for p in self.problems if not p.error)

    @property
    def bytes_per_device(self) -> int:
        """Bytes of all arguments on one device, where derived tensors are counted whole."""
        return sum(t.device_bytes for t in self.tensors if t.kind == "argument")

    def __str__(self) -> str:
        mesh = " x ".join(f"{n}={s}" for n, s in self.mesh) or "no mesh"
        lines = [f"{self.source} on {mesh}: {self._summary()}"]
        for title, problems in (("errors", self.errors), ("warnings", self.warnings)):
            lines += [title] if problems else []
            for p in problems:
                lines.append(f"  {p.kind}: {p.what}")
                lines.append(f"    where: {p.where}; write instead: {p.advice}")
        lines.append("tensors (entry, bytes a device, rule)")
        for t in self.tensors:
            name = t.path or "(the model)"
            by = f"mirrors {t.of}" if t.of else f"{t.rule} {t.where}".strip() or t.status
            shown = f"{t.dtype}{list(t.shape)}".replace(" ", "")
            lines.append(f"  {name:44} {shown:22} {t.entry or '?':26} {t.device_bytes:>14,}  {by}")
        return wrapped(lines)

    def _summary(self) -> str:
        ruled = sum(t.status in ("rule", "mirrors") for t in self.tensors)
        left = sum(t.status == "derived" for t in self.tensors)
        return (
            f"{count_of(len(self.errors), 'error')}, {count_of(len(self.warnings), 'warning')}; "
            f"{ruled} of {len(self.tensors)} tensors by rules, {left} derived; "
            f"arguments {self.bytes_per_device:,} bytes a device"
        )


def _entry(row: Row, sizes: Mapping[str, int]) -> TensorEntry:
    t = row.tensor
    pieces = 1
    if row.entry is not None and not isinstance(row.entry, str):
        for d in row.entry:
            pieces *= d if isinstance(d, int) else math.prod(sizes.get(a, 1) for a in d or ())
    key = t.key if row.tensor.kind == "module" else t.path
    return TensorEntry(
        key,
        t.kind,
        t.shape,
        str(getattr(t.dtype, "name", t.dtype)),
        row.status,
        "" if row.entry is None else entry_text(row.entry),
        row.rule.key if row.rule is not None else "",
        row.rule.where if row.rule is not None else "",
        t.nbytes,
        t.nbytes // pieces,
        row.of,
    )


def enforce(record: ConfigRecord, problems: Sequence[Problem], name: str) -> None:
    """Raise a `StrategyError` for what refuses the call of the function `name`; warn of other errors if not strict."""
    refused = [p for p in problems if p.refuses or p.error and record.strict]
    if refused:
        raise _error(refused, record, name)
    for p in problems:
        if p.error:
            warnings.warn(f"{p.what} ({p.where}); write instead: {p.advice}", UserWarning, stacklevel=2)


def _may_pad(problem: Problem) -> str:
    """The advice to pad among that of several problems, which is not checked."""
    return ", or pad: true, if it can be padded" if problem.padded else ""


def _error(problems: Sequence[Problem], record: ConfigRecord, name: str) -> StrategyError:
    first = problems[0]
    if len(problems) == 1:
        fix = first.fix if first.refuses else f"{first.fix}; strict: false for a warning"
        return StrategyError(first.what, where=f"{first.where} (for {name})", fix=fix, padded=first.padded)
    lines = [f"{p.kind}: {p.what}; {p.where}; write instead: {p.fix}{_may_pad(p)}" for p in problems[:12]]
    if len(problems) > 12:
        lines.append(f"and {len(problems) - 12} more")
    return StrategyError(
        f"{len(problems)} entries of {record.source} do not fit {name}:\n  " + "\n  ".join(lines),
        where=first.where,
        fix="see each line; config.check(...) prints the whole table",
    )
